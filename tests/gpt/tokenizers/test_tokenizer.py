"""Tokenizers are real ones, trained here in a moment; the libraries themselves are the oracle."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.checkpoint.logical_tensor import find_tokenizer
from gpt.errors import CheckpointError, ConfigError, RequestError
from gpt.tokenizers.detokenizer import Piece
from gpt.tokenizers.tokenizer import (
    NullTokenizer,
    TextStream,
    Tokenizer,
    check_tokenizer,
    open_tokenizer,
)
from tests.support.trained_tokenizers import (
    LINES,
    Case,
    all_cases,
    byte_level,
    byte_tokens,
    json_case,
    metaspace,
    sentencepiece_case,
    sentencepiece_model,
    words,
)

# Everything that a decoder can get wrong: several code points to a character, several bytes to a
# code point, spaces of many kinds, marks that tokenizers use themselves, control tokens as text.
NASTY = [
    "👩‍👩‍👧",
    "e\u0301",
    "مَرْحَبًا",
    "漢字",
    "🇩🇪",
    "\u2581",
    " ",
    "  ",
    "\n",
    "\t",
    "\u00a0",
    "\0",
    "\ufffd",
]
NASTY += ["<s>", "</s>", "<|endoftext|>", "<tool>", "<0x41>", "<unk>", "\u0120", "the", " answer"]
TEXT = st.lists(
    st.one_of(
        st.sampled_from(NASTY), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return all_cases(tmp_path_factory.mktemp("tokenizers"))


NAMES = (
    "bpe",
    "llama",
    "unigram",
    "gpt2",
    "byte_level",
    "llama_json",
    "metaspace",
    "words",
    "null",
)
TEXTUAL = NAMES[:7]
LOSSLESS = ("llama", "gpt2", "byte_level", "llama_json")


def as_kept(name: str, text: str) -> str:
    """What comes back: in sentencepiece the mark for a space is a space."""
    return text.replace("\u2581", " ") if name.startswith("llama") else text


def odd_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that make decoding hard: control, only spaces, single bytes."""
    pieces = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
    control = [i for i, piece in enumerate(pieces) if piece is None]
    spaces = [i for i, piece in enumerate(pieces) if piece and not shown(piece).strip()]
    raw = [i for i, piece in enumerate(pieces) if piece in (b"\xe4", b"\xb8", b"\xad", b"\xff")]
    return control + spaces + raw


def shown(piece: str | bytes) -> str:
    text = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
    return text.replace("\u2581", " ")


def streamed(tokenizer: Tokenizer, ids: Sequence[int], started: bool = False) -> list[str]:
    stream = TextStream(tokenizer, started=started)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(-600, 599), max_size=24))
def test_any_ids_decode_as_the_library_decodes_them(
    cases: dict[str, Case], name: str, numbers: list[int]
) -> None:
    case = cases[name]
    size, odd = case.ours.vocab_size, odd_tokens(case.ours)
    ids = [
        number % size if number >= 0 or not odd else odd[number % len(odd)] for number in numbers
    ]

    expected = case.decode(ids)
    found = streamed(case.ours, ids)

    assert case.ours.decode(ids) == "".join(found)
    if case.runs and "\ufffd" in expected:
        assert "".join(found).count("\ufffd") <= expected.count("\ufffd")
    else:
        assert "".join(found) == expected


@pytest.mark.parametrize("name", ["llama", "llama_json", "byte_level", "gpt2"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_that_are_no_text_become_the_library_s_replacements(
    cases: dict[str, Case], name: str, data: st.DataObject
) -> None:
    # Random ids are rarely bytes; these always are, so that every kind of broken UTF-8 comes up.
    case = cases[name]
    single = [i for i in range(case.ours.vocab_size) if len(case.ours.token_bytes(i) or b"") == 1]
    high = [i for i in single if (case.ours.token_bytes(i) or b"\0")[0] >= 0x80]
    ids = data.draw(st.lists(st.sampled_from(high + single), max_size=16))

    if name == "llama_json":  # Of a llama written in JSON sentencepiece itself is the oracle.
        raw = b"".join(case.ours.token_bytes(i) or b"" for i in ids)
        expected = cases["llama"].decode(byte_tokens(cases["llama"], b"a" + raw))[1:]
        assert "".join(streamed(case.ours, ids, started=True)) == expected
    else:
        assert "".join(streamed(case.ours, ids)) == case.decode(ids)


@pytest.mark.parametrize("name", TEXTUAL)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_encoding_is_the_library_s_except_that_text_is_never_a_control_token(
    cases: dict[str, Case], name: str, text: str
) -> None:
    case = cases[name]
    ids, theirs = case.ours.encode(text), case.encode(text)
    control = {i for i in range(case.ours.vocab_size) if case.ours.piece(i) is None}
    control -= {0} if name == "metaspace" else set()  # Its <unk>: text may be unknown.

    assert not control.intersection(ids)
    if not control.intersection(theirs):
        assert ids == theirs
    if name in LOSSLESS:
        assert case.ours.decode(ids) == as_kept(name, text)


@pytest.mark.parametrize("name", TEXTUAL)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, more=TEXT)
def test_a_stream_never_gives_half_a_character_and_takes_nothing_back(
    cases: dict[str, Case], name: str, text: str, more: str
) -> None:
    case = cases[name]
    ids = case.ours.encode(text)
    pushed = streamed(case.ours, ids)

    assert pushed[-1] == "", "a whole text leaves nothing to finish"
    whole = case.ours.decode(ids)
    for cut in range(len(ids)):
        assert whole.startswith("".join(pushed[:cut]))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pushed)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, more=TEXT)
def test_text_that_follows_text_keeps_its_spaces(
    cases: dict[str, Case], name: str, text: str, more: str
) -> None:
    ours = cases[name].ours
    first, second = ours.encode(text), ours.encode(more, started=bool(text))

    text, more = as_kept(name, text), as_kept(name, more)
    assert ours.decode(first + second) == text + more
    assert ours.decode(second, started=bool(text)) == more
    assert "".join(streamed(ours, second, started=bool(text))) == more


def test_an_emoji_of_four_byte_tokens_comes_out_at_the_fourth(cases: dict[str, Case]) -> None:
    llama = cases["llama"].ours
    ids = byte_tokens(cases["llama"], "🙂".encode())

    assert streamed(llama, ids) == ["", "", "", "🙂", ""]
    # One byte short: nothing until it is certain, then one replacement for each byte.
    assert streamed(llama, ids[:3]) == ["", "", "", "\ufffd\ufffd\ufffd"]
    # A piece of text after half a character decides it.
    fox = llama.encode("fox", started=True)
    assert streamed(llama, ids[:2] + fox)[2].startswith("\ufffd\ufffd")


def test_a_control_token_cuts_a_character_where_the_library_says_so(cases: dict[str, Case]) -> None:
    for name in ("llama", "bpe", "llama_json", "byte_level"):
        case = cases[name]
        whole = byte_tokens(case, "中".encode())
        assert case.ours.eos_id is not None
        cut = [*whole[:1], case.ours.eos_id, *whole[1:]]
        assert "".join(streamed(case.ours, cut)) == case.decode(cut), name
        assert case.ours.decode(whole) == "中"
        assert ("\ufffd" in case.decode(cut)) == (name in ("llama", "bpe"))


def test_leading_spaces_go_as_the_library_says(cases: dict[str, Case], tmp_path: Path) -> None:
    library = metaspace()
    library.add_tokens(["\u2581\u2581"])
    several = json_case(tmp_path / "m", library)
    for case in (*(cases[name] for name in TEXTUAL), several):
        size = case.ours.vocab_size
        blank = [i for i in range(size) if set(shown(case.ours.piece(i) or "x")) == {" "}]
        word = case.ours.encode("the fox")
        for some in ([*blank[-1:] * n, *word] for n in range(4)):
            assert "".join(streamed(case.ours, some)) == case.decode(some)
        joined = [blank[-1], *word] if blank else word
        assert case.ours.decode(joined, started=True).startswith(" " if blank else "the")


def test_a_control_token_shows_nothing_and_an_id_beyond_the_vocabulary_neither(
    cases: dict[str, Case],
) -> None:
    for name in TEXTUAL:
        ours = cases[name].ours
        ids = ours.encode("the fox")
        padded = [ours.vocab_size, *ids[:1], ours.vocab_size + 5, *ids[1:], -1]
        assert ours.decode(padded) == "the fox", name
        assert ours.token_bytes(ours.vocab_size) is None


def test_control_tokens_are_made_from_text_only_on_request(cases: dict[str, Case]) -> None:
    for name in ("bpe", "llama", "llama_json"):
        ours = cases[name].ours
        assert ours.eos_id is not None
        assert ours.eos_id not in ours.encode("</s>the</s> end</s>")
        assert ours.decode(ours.encode("</s>the</s> end</s>")) == "</s>the</s> end</s>"
        assert ours.encode("</s>the</s> end</s>", special=True).count(ours.eos_id) == 3
    for name in ("gpt2", "byte_level"):
        ours = cases[name].ours
        assert ours.eos_id is not None
        text = "a<|endoftext|>b"
        assert ours.encode(text, special=True)[1] == ours.eos_id
        assert ours.eos_id not in ours.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_user_defined_markup_of_a_sentencepiece_model_is_control_and_words_are_not(
    tmp_path: Path,
) -> None:
    symbols = ["<tool>", "[INST]", "12", "\n"]
    case = sentencepiece_case(
        tmp_path / "t", model_type="bpe", byte_fallback=True, user_defined_symbols=symbols
    )
    library = sentencepiece.SentencePieceProcessor(
        model_file=str(tmp_path / "t" / "tokenizer.model")
    )
    tool, inst, twelve, line = (library.piece_to_id(symbol) for symbol in symbols)
    text = "use <tool> or [INST]\n12"

    ids = case.ours.encode(text)

    assert not {tool, inst} & set(ids)
    assert {twelve, line} <= set(ids)
    assert case.ours.decode(ids) == text
    assert {tool, inst} < set(case.ours.encode(text, special=True))
    assert case.ours.decode([tool]) == "<tool>"  # What the model says is shown.


def test_files_beside_a_tokenizer_name_bos_eos_and_stops(tmp_path: Path) -> None:
    library = byte_level()
    library.save(str(tmp_path / "tokenizer.json"))
    plain = open_tokenizer(tmp_path)
    assert (plain.bos_id, plain.eos_id, plain.adds_bos) == (1, 0, False)

    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 7]}))
    named = open_tokenizer(tmp_path)
    assert (named.bos_id, named.eos_id, named.adds_bos) == (0, 1, True)
    assert named.stop_ids == (1, 0, 7)

    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).adds_bos
    assert open_tokenizer(tmp_path).encode("the")[0] != 1


def test_an_ordinary_added_token_that_the_config_calls_special_is_control(tmp_path: Path) -> None:
    library = byte_level()
    library.add_tokens(["<turn>"])
    library.save(str(tmp_path / "tokenizer.json"))
    turn = library.token_to_id("<turn>")
    assert turn in open_tokenizer(tmp_path).encode("<turn>")

    config = {"added_tokens_decoder": {str(turn): {"content": "<turn>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    guarded = open_tokenizer(tmp_path)
    assert turn not in guarded.encode("<turn>")
    assert turn in guarded.encode("<turn>", special=True)
    assert guarded.decode([turn]) == ""


def test_transformers_reads_the_same_ids_from_the_same_files(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2Tokenizer

    library = byte_level()
    library.model.save(str(tmp_path))
    theirs = GPT2Tokenizer.from_pretrained(tmp_path)
    ours = open_tokenizer(tmp_path)
    for text in (*LINES, "a  b\n\n c 🙂", " x"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))

    theirs.save_pretrained(tmp_path / "saved")
    saved = open_tokenizer(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.kind == "tokenizer.json"
    assert saved.encode(LINES[0]) == again.encode(LINES[0])
    assert saved.eos_id == again.eos_token_id


def test_every_name_that_files_go_by_is_found(tmp_path: Path) -> None:
    library = byte_level()
    for prefix in ("", "gpt2-", "0a1b_"):
        folder = tmp_path / f"with{prefix}"
        folder.mkdir()
        for file in map(Path, library.model.save(str(folder))):
            file.rename(folder / f"{prefix}{file.name}")
        assert open_tokenizer(folder).kind == "gpt2"
        assert find_tokenizer(tmp_path, folder) == folder
        assert open_tokenizer(folder / f"{prefix}vocab.json").kind == "gpt2"
    folder = tmp_path / "nemo"
    folder.mkdir()
    model = sentencepiece_model(model_type="bpe")
    (folder / "f00_tokenizer.model").write_bytes(model)
    assert open_tokenizer(folder).kind == "sentencepiece"
    assert find_tokenizer(folder) == folder
    library.save(str(folder / "tokenizer.json"))
    assert open_tokenizer(folder).kind == "tokenizer.json"
    assert open_tokenizer(folder, kind="sentencepiece").kind == "sentencepiece"
    (folder / "f01_tokenizer.model").write_bytes(model)
    with pytest.raises(CheckpointError, match=r"several tokenizer files \(f00_.*, f01_.*\)"):
        open_tokenizer(folder, kind="sentencepiece")
    (tmp_path / "null.json").write_text('{"vocab_size": 7}')
    assert open_tokenizer(tmp_path).vocab_size == 7
    assert find_tokenizer(tmp_path, folder) == tmp_path


def test_what_is_no_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"needed is tokenizer\.json"):
        open_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="there is no tokenizer at"):
        open_tokenizer(tmp_path / "nowhere")
    for path in (Path("~nosuchuser/x"), Path(__file__) / "below"):
        with pytest.raises(CheckpointError, match="there is no tokenizer at"):
            open_tokenizer(path)
    with pytest.raises(CheckpointError, match=r"cannot read /.*: File name too long; give the"):
        open_tokenizer(tmp_path / ("a" * 256))
    with pytest.raises(ConfigError, match=r"known are tokenizer\.json, sentencepiece"):
        open_tokenizer(tmp_path, kind="wordpiece")
    whole = sentencepiece_model(model_type="bpe")
    for content in (b"", b"hello world", whole[: len(whole) // 2]):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a sentencepiece model"):
            open_tokenizer(tmp_path)
    for content, message in (
        (b"{", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "is not a tokenizer that can be read"),
        (b'{"added_tokens": [7], "model": 3}', "is not a tokenizer that can be read"),
    ):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            open_tokenizer(tmp_path)
    library = words()
    library.decoder = tokenizers.decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decodes by WordPiece; known are ByteLevel"):
        open_tokenizer(tmp_path)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no merges\.txt beside it"):
        open_tokenizer(tmp_path / "alone")
    (tmp_path / "alone" / "merges.txt").write_text("a b\n")
    with pytest.raises(CheckpointError, match="are not a BPE vocabulary"):
        open_tokenizer(tmp_path / "alone")
    (tmp_path / "null.json").write_text('{"vocab_size": true}')
    with pytest.raises(CheckpointError, match="whole number"):
        open_tokenizer(tmp_path / "null.json")


@pytest.mark.parametrize("text", ["1 x", "5", "-1", "1.5", "²", "9" * 5000])
def test_without_a_shown_must_be_ids(text: str) -> None:
    with pytest.raises(RequestError, match="must be token ids from 0 to 4") as caught:
        NullTokenizer(5).encode(text)
    assert caught.value.field == "text"
    assert NullTokenizer(5).encode(" 4 0\n1 ") == [4, 0, 1]


def test_half_a_surrogate_pair_is_refused_by_every_kind(cases: dict[str, Case]) -> None:
    for name in TEXTUAL:
        with pytest.raises(RequestError, match="lone surrogate at character 1"):
            cases[name].ours.encode("a\ud83db")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_and_padding_is_not() -> None:
    check_tokenizer(NullTokenizer(50257), 50257, "here")
    check_tokenizer(NullTokenizer(50257), 50304, "here")
    check_tokenizer(NullTokenizer(151669), 151936, "here")
    with pytest.raises(CheckpointError, match=r"here has ids up to 50256, .* ends at 49999; give"):
        check_tokenizer(NullTokenizer(50257), 50000, "here")
    with pytest.raises(CheckpointError, match=r"32000 ids, .* 50304: more than padding"):
        check_tokenizer(NullTokenizer(32000), 50304, "here")


def test_each_token_is_looked_at_once_however_long_the_text(cases: dict[str, Case]) -> None:
    ours = cases["llama"].ours
    text = "漢字🙂 the fox" * 500
    looked_at = 0

    class Counted:
        joining = ours.joining

        def piece(self, token_id: int) -> Piece:
            nonlocal looked_at
            looked_at += 1
            return ours.piece(token_id)

    ids = ours.encode(text)
    stream = TextStream(Counted())
    assert "".join(map(stream.push, ids)) + stream.finish() == text
    assert looked_at == len(ids)
