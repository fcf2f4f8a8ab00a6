"""Texts with control tokens become the ids of transformers, for every kind of tokenizer.

transformers opens the same files; the texts are fixed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from gpt.tokenizers.tokenizer import (
    IncrementalDetokenizer,
    Tokenizer,
    open_tokenizer,
    piece_decoder,
)
from tests.support.chat_templates import ADDED, SPECIAL
from tests.support.trained_tokenizers import (
    LINES,
    auto_tokenizer,
    byte_level,
    llama_like,
    metaspace,
    sentencepiece_model,
)

CHAT = "<|im_start|>user\nWhat is the sum?<|im_end|>\n<|im_start|>assistant\n"
# Chats, control tokens at every place, parts of control tokens, spaces beside them, other scripts.
TEXTS = (
    "",
    " ",
    "the quick brown fox",
    CHAT,
    f"<s>{CHAT}",
    "<s>",
    "</s>",
    "<s></s><s>",
    "<s> the fox</s> jumps",
    "the fox</s>",
    "the <s> fox  </s>  jumps\n<s>\n",
    " <s> the",
    "\n\n</s>\n\nfox\n",
    "<s><s>the",
    "<unk> the <unk>fox<unk>",
    "<|endoftext|>the<|endoftext|>",
    "<|im_<|im_end|>end|>",
    "<|im_end|",
    "< s > </ s>",
    "<S> </S>",
    "[INST] the fox [/INST] jumps </s>[INST]over[/INST]",
    "<<SYS>>\nbe of use\n<</SYS>>\n\n[INST]hi[/INST]",
    "<start_of_turn>user\n  what  is <end_of_turn>\n<start_of_turn>model\n",
    "<|user|>\nthe</s>\n<|assistant|>",
    "<|user|>the<|user|>",
    "a<|im_end|>b <|im_end|> c  <|im_end|>  d\t<|im_end|>\n",
    "Größe<s>Straße</s>今日は<|im_end|>世界",
    "مرحبا<s>بالعالم</s>",
    "👩‍👩‍👧</s>e\u0301<s>\u2581</s>\u00a0<s>\ufffd",
    "<0x41><s><0x0A></s>",
    "<pad><mask>  the  <mask>the<extra_0><extra_1>",
    "answer:</s>" * 20,
    *LINES,
)
HFTokenizer = Any


def decode_with_control_tokens(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = IncrementalDetokenizer(piece_decoder(tokenizer, keep_special_tokens=True))
    return "".join(map(stream.push, ids)) + stream.finish()


def assert_same_ids(ours: Tokenizer, theirs: HFTokenizer) -> None:
    for text in TEXTS:
        ids = ours.encode(text, allow_special=True)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        expected = theirs(text, add_special_tokens=True).input_ids
        assert [*ours.prefix_ids, *ids, *ours.suffix_ids] == expected, text
        assert all(0 <= token < ours.vocab_size for token in ids)


def with_tokens(make: Callable[[], tokenizers.Tokenizer], **flags: bool) -> tokenizers.Tokenizer:
    library = make()
    token = tokenizers.AddedToken
    library.add_special_tokens([token(text, normalized=False, **flags) for text in SPECIAL])
    library.add_tokens([token(text, normalized=False) for text in ADDED])
    library.add_tokens([token("<extra_0>", normalized=True, single_word=True)])
    library.add_special_tokens([token("<mask>", lstrip=True, normalized=False)])
    return library


def around_texts(library: tokenizers.Tokenizer, template: str) -> tokenizers.Tokenizer:
    """The library with a post-processor that adds <s> and </s>."""
    special_tokens = [(text, library.token_to_id(text)) for text in ("<s>", "</s>")]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=special_tokens
    )
    return library


JSON_KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": lambda: with_tokens(byte_level),
    "bytes, BOS": lambda: around_texts(with_tokens(byte_level), "<s> $A"),
    "bytes, BOS and EOS": lambda: around_texts(with_tokens(byte_level), "<s> $A </s>"),
    "bytes, two tokens": lambda: around_texts(with_tokens(byte_level), "</s> <s> $A"),
    "stripping": lambda: with_tokens(byte_level, lstrip=True, rstrip=True),
    "stripping right": lambda: with_tokens(byte_level, rstrip=True),
    "llama": lambda: around_texts(with_tokens(llama_like), "<s> $A"),
    "metaspace": lambda: with_tokens(metaspace),
}


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_tokenizer_json_parses_control_tokens_as_transformers(tmp_path: Path, kind: str) -> None:
    library = JSON_KINDS[kind]()
    library.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))

    assert_same_ids(open_tokenizer(tmp_path), auto_tokenizer(tmp_path))


def test_tokens_that_only_config_files_declare_are_parsed(tmp_path: Path) -> None:
    library = byte_level()
    library.save(str(tmp_path / "tokenizer.json"))
    size = library.get_vocab_size()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|endoftext|>",
        "pad_token": "the",  # An ordinary entry of the vocabulary that is declared as special.
        "added_tokens_decoder": {
            str(size): {"content": "<|im_start|>", "special": True, "rstrip": True},
            str(size + 1): {"content": "<|im_end|>", "special": True},
            str(size + 2): {"content": "<extra_0>", "special": False, "normalized": False},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = open_tokenizer(tmp_path)

    assert_same_ids(ours, auto_tokenizer(tmp_path))
    assert ours.vocab_size == size + 3
    assert ours.control_tokens["<|im_start|>"].rstrip
    assert not {size, size + 1} & set(ours.encode(CHAT))


def gpt2_files(folder: Path) -> int:
    """The files of a GPT-2 tokenizer; return the size of its vocabulary."""
    library = byte_level()
    library.model.save(str(folder))
    return int(library.get_vocab_size())


def test_gpt2_files_with_added_tokens_parse_as_transformers(tmp_path: Path) -> None:
    size = gpt2_files(tmp_path)
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "added_tokens_decoder": {
            str(size): {"content": "<|im_start|>", "special": True},
            str(size + 1): {"content": "<|im_end|>", "special": True, "lstrip": True},
            str(size + 2): {"content": "[INST]", "special": False, "normalized": False},
            "0": {"content": "<|endoftext|>", "special": True},
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = open_tokenizer(tmp_path)
    assert ours.kind == "gpt2"
    assert_same_ids(ours, auto_tokenizer(tmp_path))

    ids = ours.encode(CHAT, allow_special=True)
    assert ids.count(size) == 2 and ids.count(size + 1) == 1
    assert not {size, size + 1} & set(ours.encode(CHAT))
    assert decode_with_control_tokens(ours, ids) == CHAT
    assert ours.decode(ids) == "user\nWhat is the sum?\nassistant\n"


@pytest.mark.parametrize("flags", [(False, False), (True, False), (True, True)])
def test_gpt2_files_add_bos_and_eos_as_transformers(
    tmp_path: Path, flags: tuple[bool, bool]
) -> None:
    gpt2_files(tmp_path)
    (tmp_path / "added_tokens.json").write_text("{}")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    flag_fields = {"add_bos_token": flags[0], "add_eos_token": flags[1]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | flag_fields))
    ours = open_tokenizer(tmp_path)

    assert_same_ids(ours, auto_tokenizer(tmp_path))
    assert (bool(ours.prefix_ids), bool(ours.suffix_ids)) == flags


def test_added_tokens_json_declares_tokens_of_gpt2_files(tmp_path: Path) -> None:
    size = gpt2_files(tmp_path)
    added = {"<|im_start|>": size, "<|im_end|>": size + 1, "<|far|>": size + 9}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"additional_special_tokens": ["<|im_start|>"]})
    )
    ours = open_tokenizer(tmp_path)

    assert ours.encode("<|im_start|>a", allow_special=True)[0] == size
    assert ours.encode("<|im_end|>", allow_special=True) == [size + 1]
    assert ours.control_tokens["<|im_start|>"].special
    assert not ours.control_tokens["<|im_end|>"].special
    # The files do not say which tokens have the ids between, so this one has no known id.
    assert ours.vocab_size == size + 2


# ----------------------------------------------------------------------------------- sentencepiece


def slow_tokenizer(folder: Path, **options: Any) -> HFTokenizer:
    """The sentencepiece tokenizer of transformers that uses the sentencepiece library."""
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    backend: Any = SentencePieceBackend
    return backend(vocab_file=str(folder / "tokenizer.model"), unk_token="<unk>", **options)


def llama_model(folder: Path, **options: Any) -> None:
    model = sentencepiece_model(
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model)


def test_sentencepiece_models_parse_control_pieces_as_the_slow_tokenizer(tmp_path: Path) -> None:
    llama_model(tmp_path, user_defined_symbols=["[INST]", "[/INST]"])
    theirs = slow_tokenizer(
        tmp_path,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["[INST]", "[/INST]"],
        legacy=True,
    )
    ours = open_tokenizer(tmp_path)

    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, allow_special=True) == expected, text
    assert ours.prefix_ids == ours.suffix_ids == ()


def test_sentencepiece_models_have_the_tokens_of_config_files(tmp_path: Path) -> None:
    llama_model(tmp_path)
    size = open_tokenizer(tmp_path).vocab_size
    decoder = {
        str(size): {"content": "<|im_start|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<|im_end|>", "special": True, "lstrip": True, "rstrip": True},
        str(size + 2): {"content": "<extra_0>", "special": False, "normalized": False},
    }
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": True,
        "added_tokens_decoder": decoder,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = open_tokenizer(tmp_path)
    theirs = slow_tokenizer(tmp_path, bos_token="<s>", eos_token="</s>", legacy=True)
    theirs.add_tokens([tokenizers.AddedToken(**token) for token in decoder.values()])  # type: ignore[arg-type]

    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, allow_special=True) == expected, text
    assert ours.vocab_size == size + 3
    assert (ours.prefix_ids, ours.suffix_ids) == ((ours.bos_id,), (ours.eos_id,))
    assert [ours.id_to_token(size), ours.id_to_token(size + 2)] == ["<|im_start|>", "<extra_0>"]
    assert ours.decode([size, *ours.encode("the fox"), size + 2]) == "the fox<extra_0>"
    assert not {size, size + 1, size + 2} & set(ours.encode(CHAT + "<extra_0>"))


def test_only_the_legacy_mode_adds_a_space_after_control_pieces(tmp_path: Path) -> None:
    llama_model(tmp_path)
    text = "the<s>fox</s> jumps"
    legacy = open_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    ours = open_tokenizer(tmp_path)

    for tokenizer, continues_text in ((legacy, False), (ours, True)):
        assert tokenizer.continues_after_control == continues_text
        assert tokenizer.encode(text, allow_special=True) == [
            *tokenizer.encode("the"),
            tokenizer.bos_id,
            *tokenizer.encode("fox", continues_text=continues_text),
            tokenizer.eos_id,
            *tokenizer.encode(" jumps", continues_text=continues_text),
        ]
    assert legacy.encode("fox") != legacy.encode("fox", continues_text=True)


# ----------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", ["bytes", "llama", "metaspace"])
def test_decode_can_write_control_tokens_as_transformers(tmp_path: Path, kind: str) -> None:
    JSON_KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    ours, theirs = open_tokenizer(tmp_path), auto_tokenizer(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text, allow_special=True)
        expected = theirs.decode(ids, skip_special_tokens=False)
        if "\ufffd" not in expected:
            assert decode_with_control_tokens(ours, ids) == expected, text
