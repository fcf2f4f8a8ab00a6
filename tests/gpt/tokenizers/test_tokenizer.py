"""Tokenizers: small ones trained here, compared with their own libraries."""

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
    IncrementalDetokenizer,
    NullTokenizer,
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
    word_level,
)

# Hard cases for decoders: several code points per character, several bytes per code point, many
# kinds of spaces, marks that tokenizers use themselves, control tokens as text.
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


def as_decoded(name: str, text: str) -> str:
    """The decoded text: SentencePiece's mark for a space decodes to a space."""
    return text.replace("\u2581", " ") if name.startswith("llama") else text


def odd_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that make decoding hard: control, only spaces, single bytes."""
    pieces = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
    control = [i for i, piece in enumerate(pieces) if piece is None]
    spaces = [i for i, piece in enumerate(pieces) if piece and not piece_text(piece).strip()]
    raw = [i for i, piece in enumerate(pieces) if piece in (b"\xe4", b"\xb8", b"\xad", b"\xff")]
    return control + spaces + raw


def piece_text(piece: str | bytes) -> str:
    text = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
    return text.replace("\u2581", " ")


def stream_pieces(tokenizer: Tokenizer, ids: Sequence[int], started: bool = False) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, continues_text=started)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(-600, 599), max_size=24))
def test_decode_equals_the_library(cases: dict[str, Case], name: str, numbers: list[int]) -> None:
    case = cases[name]
    size = case.ours.vocab_size
    odd = odd_tokens(case.ours)
    ids = [
        number % size if number >= 0 or not odd else odd[number % len(odd)] for number in numbers
    ]

    expected = case.decode(ids)
    pieces = stream_pieces(case.ours, ids)

    assert case.ours.decode(ids) == "".join(pieces)
    if case.runs and "\ufffd" in expected:
        assert "".join(pieces).count("\ufffd") <= expected.count("\ufffd")
    else:
        assert "".join(pieces) == expected


@pytest.mark.parametrize("name", ["llama", "llama_json", "byte_level", "gpt2"])
@settings(max_examples=60, deadline=None)
@given(draws=st.data())
def test_invalid_bytes_get_the_librarys_replacement_characters(
    cases: dict[str, Case], name: str, draws: st.DataObject
) -> None:
    # Random ids are rarely bytes; these always are, so that all kinds of broken UTF-8 occur.
    case = cases[name]
    single = [i for i in range(case.ours.vocab_size) if len(case.ours.token_bytes(i) or b"") == 1]
    high = [i for i in single if (case.ours.token_bytes(i) or b"\0")[0] >= 0x80]
    ids = draws.draw(st.lists(st.sampled_from(high + single), max_size=16))

    if name == "llama_json":  # SentencePiece itself is the oracle of a llama written in JSON.
        raw = b"".join(case.ours.token_bytes(i) or b"" for i in ids)
        expected = cases["llama"].decode(byte_tokens(cases["llama"], b"a" + raw))[1:]
        assert "".join(stream_pieces(case.ours, ids, started=True)) == expected
    else:
        assert "".join(stream_pieces(case.ours, ids)) == case.decode(ids)


@pytest.mark.parametrize("name", TEXTUAL)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_encode_equals_the_library_without_control_tokens(
    cases: dict[str, Case], name: str, text: str
) -> None:
    case = cases[name]
    ids = case.ours.encode(text)
    expected = case.encode(text)
    control = {i for i in range(case.ours.vocab_size) if case.ours.piece(i) is None}
    control -= {0} if name == "metaspace" else set()  # Its <unk>: text may be unknown.

    assert not control.intersection(ids)
    if not control.intersection(expected):
        assert ids == expected
    if name in LOSSLESS:
        assert case.ours.decode(ids) == as_decoded(name, text)


@pytest.mark.parametrize("name", TEXTUAL)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, continuation=TEXT)
def test_streamed_text_has_complete_characters_and_equals_decode(
    cases: dict[str, Case], name: str, text: str, continuation: str
) -> None:
    case = cases[name]
    ids = case.ours.encode(text)
    pushed = stream_pieces(case.ours, ids)

    assert pushed[-1] == "", "a whole text leaves nothing to finish"
    full_text = case.ours.decode(ids)
    for prefix_length in range(len(ids)):
        assert full_text.startswith("".join(pushed[:prefix_length]))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pushed)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, continuation=TEXT)
def test_continued_text_keeps_its_spaces(
    cases: dict[str, Case], name: str, text: str, continuation: str
) -> None:
    tokenizer = cases[name].ours
    first_ids = tokenizer.encode(text)
    second_ids = tokenizer.encode(continuation, continues_text=bool(text))

    text = as_decoded(name, text)
    continuation = as_decoded(name, continuation)
    assert tokenizer.decode(first_ids + second_ids) == text + continuation
    assert tokenizer.decode(second_ids, continues_text=bool(text)) == continuation
    assert "".join(stream_pieces(tokenizer, second_ids, started=bool(text))) == continuation


def test_emoji_of_four_byte_tokens_is_streamed_with_the_fourth(cases: dict[str, Case]) -> None:
    llama = cases["llama"].ours
    ids = byte_tokens(cases["llama"], "🙂".encode())

    assert stream_pieces(llama, ids) == ["", "", "", "🙂", ""]
    # One byte short: no text until the end, then one replacement character for each byte.
    assert stream_pieces(llama, ids[:3]) == ["", "", "", "\ufffd\ufffd\ufffd"]
    # Text after an incomplete character completes it.
    fox_ids = llama.encode("fox", continues_text=True)
    assert stream_pieces(llama, ids[:2] + fox_ids)[2].startswith("\ufffd\ufffd")


def test_control_token_ends_an_incomplete_character_as_in_the_library(
    cases: dict[str, Case],
) -> None:
    for name in ("llama", "bpe", "llama_json", "byte_level"):
        case = cases[name]
        character_ids = byte_tokens(case, "中".encode())
        assert case.ours.eos_id is not None
        interrupted = [*character_ids[:1], case.ours.eos_id, *character_ids[1:]]
        assert "".join(stream_pieces(case.ours, interrupted)) == case.decode(interrupted), name
        assert case.ours.decode(character_ids) == "中"
        assert ("\ufffd" in case.decode(interrupted)) == (name in ("llama", "bpe"))


def test_leading_spaces_are_removed_as_in_the_library(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    library = metaspace()
    library.add_tokens(["\u2581\u2581"])
    several = json_case(tmp_path / "m", library)
    for case in (*(cases[name] for name in TEXTUAL), several):
        size = case.ours.vocab_size
        blank = [i for i in range(size) if set(piece_text(case.ours.piece(i) or "x")) == {" "}]
        word_ids = case.ours.encode("the fox")
        for ids_with_spaces in ([*blank[-1:] * n, *word_ids] for n in range(4)):
            assert "".join(stream_pieces(case.ours, ids_with_spaces)) == case.decode(
                ids_with_spaces
            )
        joined = [blank[-1], *word_ids] if blank else word_ids
        assert case.ours.decode(joined, continues_text=True).startswith(" " if blank else "the")


def test_control_tokens_and_unknown_ids_decode_to_nothing(
    cases: dict[str, Case],
) -> None:
    for name in TEXTUAL:
        tokenizer = cases[name].ours
        ids = tokenizer.encode("the fox")
        padded = [tokenizer.vocab_size, *ids[:1], tokenizer.vocab_size + 5, *ids[1:], -1]
        assert tokenizer.decode(padded) == "the fox", name
        assert tokenizer.token_bytes(tokenizer.vocab_size) is None


def test_text_becomes_control_tokens_only_with_allow_special(cases: dict[str, Case]) -> None:
    for name in ("bpe", "llama", "llama_json"):
        tokenizer = cases[name].ours
        assert tokenizer.eos_id is not None
        assert tokenizer.eos_id not in tokenizer.encode("</s>the</s> end</s>")
        assert tokenizer.decode(tokenizer.encode("</s>the</s> end</s>")) == "</s>the</s> end</s>"
        assert (
            tokenizer.encode("</s>the</s> end</s>", allow_special=True).count(tokenizer.eos_id) == 3
        )
    for name in ("gpt2", "byte_level"):
        tokenizer = cases[name].ours
        assert tokenizer.eos_id is not None
        text = "a<|endoftext|>b"
        assert tokenizer.encode(text, allow_special=True)[1] == tokenizer.eos_id
        assert tokenizer.eos_id not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_user_defined_sentencepiece_markup_is_control_and_words_are_not(
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
    assert {tool, inst} < set(case.ours.encode(text, allow_special=True))
    assert case.ours.decode([tool]) == "<tool>"  # What the model says is shown.


def test_config_files_name_bos_eos_and_stop_tokens(tmp_path: Path) -> None:
    library = byte_level()
    library.save(str(tmp_path / "tokenizer.json"))
    plain = open_tokenizer(tmp_path)
    assert (plain.bos_id, plain.eos_id, plain.adds_bos) == (1, 0, False)

    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 7]}))
    opened = open_tokenizer(tmp_path)
    assert (opened.bos_id, opened.eos_id, opened.adds_bos) == (0, 1, True)
    assert opened.stop_ids == (1, 0, 7)

    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).adds_bos
    assert open_tokenizer(tmp_path).encode("the")[0] != 1


def test_added_tokens_that_the_config_calls_special_are_control(tmp_path: Path) -> None:
    library = byte_level()
    library.add_tokens(["<turn>"])
    library.save(str(tmp_path / "tokenizer.json"))
    turn = library.token_to_id("<turn>")
    assert turn in open_tokenizer(tmp_path).encode("<turn>")

    config = {"added_tokens_decoder": {str(turn): {"content": "<turn>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    opened = open_tokenizer(tmp_path)
    assert turn not in opened.encode("<turn>")
    assert turn in opened.encode("<turn>", allow_special=True)
    assert opened.decode([turn]) == ""


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


def test_tokenizer_files_are_found_by_any_name(tmp_path: Path) -> None:
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


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give tokenizer\.json"):
        open_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"the tokenizer .* does not exist"):
        open_tokenizer(tmp_path / "nowhere")
    for path in (Path("~nosuchuser/x"), Path(__file__) / "below"):
        with pytest.raises(CheckpointError, match=r"the tokenizer .* does not exist"):
            open_tokenizer(path)
    with pytest.raises(CheckpointError, match=r"cannot read /.*: File name too long; give the"):
        open_tokenizer(tmp_path / ("a" * 256))
    with pytest.raises(ConfigError, match=r"choose one of tokenizer\.json, sentencepiece"):
        open_tokenizer(tmp_path, kind="wordpiece")
    model_bytes = sentencepiece_model(model_type="bpe")
    for content in (b"", b"hello world", model_bytes[: len(model_bytes) // 2]):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a sentencepiece model"):
            open_tokenizer(tmp_path)
    for content, message in (
        (b"{", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "is not a readable tokenizer"),
        (b'{"added_tokens": [7], "model": 3}', "is not a readable tokenizer"),
    ):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            open_tokenizer(tmp_path)
    library = word_level()
    library.decoder = tokenizers.decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        CheckpointError, match="has the decoder WordPiece; supported decoders are ByteLevel"
    ):
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
def test_null_tokenizer_accepts_only_token_ids(text: str) -> None:
    with pytest.raises(RequestError, match="must be token ids from 0 to 4") as caught:
        NullTokenizer(5).encode(text)
    assert caught.value.field == "text"
    assert NullTokenizer(5).encode(" 4 0\n1 ") == [4, 0, 1]


def test_lone_surrogate_is_refused_by_every_kind(cases: dict[str, Case]) -> None:
    for name in TEXTUAL:
        with pytest.raises(RequestError, match="lone surrogate at character 1"):
            cases[name].ours.encode("a\ud83db")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_and_padding_is_not() -> None:
    check_tokenizer(NullTokenizer(50257), 50257, "here")
    check_tokenizer(NullTokenizer(50257), 50304, "here")
    check_tokenizer(NullTokenizer(151669), 151936, "here")
    with pytest.raises(CheckpointError, match=r"here has ids up to 50256, .* ends at 49999; give"):
        check_tokenizer(NullTokenizer(50257), 50000, "here")
    with pytest.raises(
        CheckpointError, match=r"32000 ids, .* 50304, which is more than padding explains"
    ):
        check_tokenizer(NullTokenizer(32000), 50304, "here")


def test_piece_of_each_token_is_cached(cases: dict[str, Case]) -> None:
    ours = cases["llama"].ours
    text = "漢字🙂 the fox" * 500
    looked_at = 0

    class Counted:
        decoding_rules = ours.decoding_rules

        def piece(self, token_id: int) -> Piece:
            nonlocal looked_at
            looked_at += 1
            return ours.piece(token_id)

    ids = ours.encode(text)
    stream = IncrementalDetokenizer(Counted())
    assert "".join(map(stream.push, ids)) + stream.finish() == text
    assert looked_at == len(ids)
