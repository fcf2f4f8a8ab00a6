"""The tokenizer of a Hugging Face target: AutoTokenizer gives our ids and texts, or there is none.

transformers opens the written files, and encodes a thousand fixed texts.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import gpt
import preamble
from checkpoints_tools.conversion.convert import write_native
from checkpoints_tools.writers.huggingface_tokenizer import HuggingFaceTokenizer, plan_tokenizer
from checkpoints_tools.writers.sentencepiece_export import export_sentencepiece
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from tests.support.chat_templates import CHATML
from tests.support.checkpoints.hf_models import ids as some_ids
from tests.support.checkpoints.hf_models import logits_of
from tests.support.checkpoints.hf_targets import GATED
from tests.support.models import lively
from tests.support.tokenizer_texts import fixed_texts
from tests.support.trained_tokenizers import (
    auto_tokenizer,
    byte_level,
    llama_like,
    metaspace,
    sentencepiece_model,
    word_level,
)

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
IDENTITY = {"normalization_rule_name": "identity"}
KEEPING_SPACES = {**IDENTITY, "remove_extra_whitespaces": False}
LOGITS_ATOL = 1e-4  # fp32 sums in another order, over logits of a few tens.

SENTENCEPIECE_OPTIONS: dict[str, dict[str, Any]] = {
    "bpe, bytes": {"model_type": "bpe", "byte_fallback": True, **KEEPING_SPACES},
    "bpe": {"model_type": "bpe", **KEEPING_SPACES},
    "bpe, stripped": {"model_type": "bpe", "byte_fallback": True, **IDENTITY},
    "bpe, no prefix": {"model_type": "bpe", "add_dummy_prefix": False, **KEEPING_SPACES},
    "bpe, markup": {
        "model_type": "bpe",
        "user_defined_symbols": ["[INST]", "[/INST]", "<extra_id_0>"],
        "control_symbols": ["<pad>"],
        **KEEPING_SPACES,
    },
    "bpe, words": {
        "model_type": "bpe",
        "byte_fallback": True,
        "user_defined_symbols": ["\n", "\t", "fox", "def f"],
        **KEEPING_SPACES,
    },
    "unigram": {"model_type": "unigram", **KEEPING_SPACES},
    "unigram, bytes": {"model_type": "unigram", "byte_fallback": True, **KEEPING_SPACES},
    "unigram, stripped": {"model_type": "unigram", **IDENTITY},
    "unigram, no prefix": {"model_type": "unigram", "add_dummy_prefix": False, **KEEPING_SPACES},
    "unigram, words": {
        "model_type": "unigram",
        "user_defined_symbols": ["\n", "fox", "[INST]"],
        **KEEPING_SPACES,
    },
}


FAST_NAMES = ("bpe, bytes", "unigram, stripped")


def sentencepiece_folder(folder: Path, name: str, **config: Any) -> Path:
    folder.mkdir()
    model = sentencepiece_model(**SENTENCEPIECE_OPTIONS[name])
    (folder / "tokenizer.model").write_bytes(model)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gpt2_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    byte_level().model.save(str(folder))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def json_folder(folder: Path, library: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_planned(source: Path, folder: Path, family: str = "llama") -> HuggingFaceTokenizer:
    """Write the planned tokenizer of `source` beside a config.json of the family."""
    folder.mkdir()
    size = open_tokenizer(source).vocab_size
    planned = plan_tokenizer(source, GATED.with_fields(vocab_size=size + 3), family)
    for file in planned.files:
        (folder / file.path).write_bytes(b"".join(text.content for text in file.literals))
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return planned


def assert_same_tokenizer(ours: Tokenizer, folder: Path, texts: list[str]) -> None:
    """Check that AutoTokenizer, and our reader of the written files, give the ids of `ours`."""
    theirs, reopened = auto_tokenizer(folder), open_tokenizer(folder)
    for text in texts:
        text_ids = ours.encode(text, allow_special=True)
        ids = [*ours.prefix_ids, *text_ids, *ours.suffix_ids]
        assert theirs(text, add_special_tokens=False).input_ids == text_ids, text
        assert theirs(text).input_ids == ids, text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text
        assert reopened.encode(text, allow_special=True) == text_ids, text
        assert reopened.decode(ids) == ours.decode(ids), text
    assert (reopened.prefix_ids, reopened.suffix_ids) == (ours.prefix_ids, ours.suffix_ids)
    assert (reopened.bos_id, reopened.stop_ids) == (ours.bos_id, ours.stop_ids)
    assert set(theirs("the fox")) == {"input_ids", "attention_mask"}


def check_export(source: Path, folder: Path, family: str = "llama") -> None:
    planned = write_planned(source, folder, family)
    assert planned.notes == ()
    ours = open_tokenizer(source)
    texts = fixed_texts(ours.control_tokens)
    assert len(texts) == 1000
    assert_same_tokenizer(ours, folder, texts)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST_NAMES else pytest.param(name, marks=pytest.mark.slow)
        for name in SENTENCEPIECE_OPTIONS
    ],
)
def test_sentencepiece_models_keep_their_ids(name: str, tmp_path: Path) -> None:
    check_export(sentencepiece_folder(tmp_path / "source", name), tmp_path / "target")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["gpt2", "gpt_neox", "mistral", "nemotron", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe"],
)
def test_every_family_keeps_the_ids_of_a_sentencepiece_model(family: str, tmp_path: Path) -> None:
    source = sentencepiece_folder(tmp_path / "source", "bpe, bytes")
    check_export(source, tmp_path / "target", family)


def test_sentencepiece_model_with_added_tokens_keeps_its_ids(tmp_path: Path) -> None:
    source = sentencepiece_folder(tmp_path / "source", "bpe, bytes")
    size = open_tokenizer(source).vocab_size
    added = {
        str(size): {"content": "<|im_start|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<|im_end|>", "special": True, "lstrip": True, "rstrip": True},
        str(size + 2): {"content": "<extra_id_0>", "special": False, "normalized": False},
    }
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    config_file = source / "tokenizer_config.json"
    config_file.write_text(json.dumps(config | {"added_tokens_decoder": added}))
    check_export(source, tmp_path / "target")
    theirs = auto_tokenizer(tmp_path / "target")
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


GPT2_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bos and eos": {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": True},
    "other eos": {"eos_token": "<s>", "add_eos_token": True},
}


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ("bos and eos", "gpt2"),
        pytest.param("plain", "llama", marks=pytest.mark.slow),
        pytest.param("other eos", "gpt2", marks=pytest.mark.slow),
        pytest.param("bos and eos", "llama", marks=pytest.mark.slow),
    ],
)
def test_gpt2_files_keep_their_ids(config: str, family: str, tmp_path: Path) -> None:
    source = gpt2_folder(tmp_path / "source", **GPT2_CONFIGS[config])
    check_export(source, tmp_path / "target", family)


def with_bos(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


def with_tokens(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.add_tokens([tokenizers.AddedToken("<pad>", lstrip=True, normalized=False)])
    return library


JSON_LIBRARIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": byte_level,
    "bytes, BOS": lambda: with_bos(byte_level()),
    "bytes, added tokens": lambda: with_tokens(byte_level()),
    "llama": lambda: with_bos(with_tokens(llama_like())),
    "metaspace": metaspace,
    "words": word_level,
}
# Classes that transformers 5 builds anew from the vocabulary, and that change the ids of others.
CLASSES = ("LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast")


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("name", JSON_LIBRARIES)
def test_tokenizer_json_keeps_its_ids(name: str, tokenizer_class: str, tmp_path: Path) -> None:
    config = {"tokenizer_class": tokenizer_class, "clean_up_tokenization_spaces": True}
    source = json_folder(tmp_path / "source", JSON_LIBRARIES[name](), **config)
    check_export(source, tmp_path / "target")


def test_flags_of_the_config_file_decide_on_bos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False}
    source = json_folder(tmp_path / "source", with_bos(byte_level()), **config)
    assert open_tokenizer(source).prefix_ids == ()
    check_export(source, tmp_path / "target")


def qwen2_tokenizer() -> tokenizers.Tokenizer:
    import transformers

    library = byte_level()
    record = json.loads(library.to_str())["model"]
    merges = [tuple(merge) for merge in record["merges"]]
    qwen: Any = transformers.Qwen2Tokenizer
    backend: tokenizers.Tokenizer = qwen(vocab=record["vocab"], merges=merges).backend_tokenizer
    return backend


def test_qwen2_models_get_only_tokenizers_of_qwen2(tmp_path: Path) -> None:
    source = json_folder(tmp_path / "source", qwen2_tokenizer(), eos_token="<|endoftext|>")
    check_export(source, tmp_path / "target", "qwen2")

    other = json_folder(tmp_path / "other source", byte_level())
    planned = write_planned(other, tmp_path / "other", "qwen2")
    assert "AutoTokenizer builds a Qwen2Tokenizer for each qwen2 model" in planned.notes[0]
    assert not TOKENIZER_FILES & {file.path for file in planned.files}


REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nmt_nfkc, bytes": ({"model_type": "bpe", "byte_fallback": True}, {}, "character map"),
    "nmt_nfkc, BOS": ({"model_type": "bpe"}, {"add_bos_token": True}, "character map"),
    "suffix": (
        {"model_type": "bpe", "treat_whitespace_as_suffix": True, **IDENTITY},
        {},
        "space marks before words",
    ),
    "not legacy": ({"model_type": "bpe", **KEEPING_SPACES}, {"legacy": False}, '"legacy": false'),
}


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_tokenizer_that_transformers_would_misread_is_omitted(name: str, tmp_path: Path) -> None:
    options, config, reason = REFUSED_OPTIONS[name]
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.model").write_bytes(sentencepiece_model(**options))
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    planned = write_planned(source, tmp_path / "target")
    assert not TOKENIZER_FILES & {file.path for file in planned.files}
    (note,) = planned.notes
    assert "would not give the ids" in note and reason in note and "--tokenizer" in note
    # The BOS and EOS ids are known without a tokenizer.
    ours = open_tokenizer(source)
    assert (planned.bos_id, planned.eos_id) == (ours.bos_id, ours.eos_id)


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("bpe", "llama"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("unigram", "llama"),
                ("bpe", "qwen2_moe"),
                ("bpe", "qwen3_moe"),
            ]
        ),
    ],
)
def test_models_with_a_character_map_keep_their_ids_in_the_slow_class(
    model_type: str, family: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    options = {"model_type": model_type, "user_defined_symbols": ["[INST]"]}
    (source / "tokenizer.model").write_bytes(sentencepiece_model(**options))
    planned = write_planned(source, tmp_path / "target", family)
    assert "needs the package sentencepiece" in planned.notes[0]
    assert not (tmp_path / "target" / "tokenizer.json").exists()
    ours = open_tokenizer(source)
    theirs, reopened = auto_tokenizer(tmp_path / "target"), open_tokenizer(tmp_path / "target")
    for text in fixed_texts(ours.control_tokens):
        ids = ours.encode(text, allow_special=True)
        assert theirs(text, add_special_tokens=False).input_ids == ids, text
        assert theirs(text).input_ids == ids, text
        assert reopened.encode(text, allow_special=True) == ids, text
        if ours.encode("<unk>", allow_special=True)[0] not in ids:
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text

    for fast_only_family in ("mistral", "glm4_moe"):
        planned = write_planned(source, tmp_path / fast_only_family, fast_only_family)
        assert "would not give the ids" in planned.notes[0]


def test_wrong_export_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sentencepiece_folder(tmp_path / "source", "bpe, bytes")

    def export_without_prefix(tokenizer: Any) -> tokenizers.Tokenizer:
        library = export_sentencepiece(tokenizer)
        library.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        return library

    writer = "checkpoints_tools.writers.huggingface_tokenizer"
    monkeypatch.setattr(f"{writer}.export_sentencepiece", export_without_prefix)
    planned = write_planned(source, tmp_path / "target")
    assert "would have the ids" in planned.notes[0]
    assert not TOKENIZER_FILES & {file.path for file in planned.files}


# --------------------------------------------------------------------------------- whole conversion

FORMATS: dict[str, tuple[str, ...]] = {
    "native": ("--to", "native"),
    "megatron": ("--to", "megatron", "--tp", "2", "--pp", "2"),
    "megatron-dist": ("--to", "megatron-dist", "--tp", "2"),
    "nemo": ("--to", "nemo", "--pp", "2"),
}


FAST_CHAINS = (("sentencepiece", "megatron"), ("tokenizer.json", "nemo"))


def convert(source: Path, target: Path, *arguments: str) -> None:
    assert preamble.main(["convert", str(source), str(target), *arguments]) == 0


@pytest.mark.parametrize(
    ("kind", "intermediate_format"),
    [
        pytest.param(kind, name, marks=[] if (kind, name) in FAST_CHAINS else [pytest.mark.slow])
        for kind in ("sentencepiece", "gpt2", "tokenizer.json")
        for name in FORMATS
    ],
)
def test_model_and_tokenizer_return_from_any_format(
    kind: str, intermediate_format: str, tmp_path: Path
) -> None:
    import transformers

    named = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    if kind == "sentencepiece":
        folder = sentencepiece_folder(tmp_path / "words", "bpe, bytes", chat_template=CHATML)
    elif kind == "gpt2":
        folder = gpt2_folder(tmp_path / "words", **named)
    else:
        folder = json_folder(tmp_path / "words", with_tokens(byte_level()), **named)
    ours = open_tokenizer(folder)
    assert ours.eos_id is not None
    generation = {"eos_token_id": [ours.eos_id, 7], "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    ours = open_tokenizer(folder)
    model = lively(GATED.with_fields(vocab_size=ours.vocab_size, num_layers=4, moe_layers=()))
    write_native(model, tmp_path / "source", tokenizer=folder)

    convert(tmp_path / "source", tmp_path / "first", "--to", "hf")
    between = tmp_path / f"between.{intermediate_format}"
    convert(tmp_path / "first", between, *FORMATS[intermediate_format])
    convert(between, tmp_path / "last", "--to", "hf")

    assert_same_tokenizer(ours, tmp_path / "last", fixed_texts(ours.control_tokens, 200))
    theirs = auto_tokenizer(tmp_path / "last")
    chat = [{"role": "user", "content": "What is the sum?"}]
    assert "<|im_start|>user\nWhat is the sum?" in theirs.apply_chat_template(chat, tokenize=False)
    hf_model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    defaults = hf_model.generation_config
    assert (defaults.eos_token_id, defaults.temperature) == ([ours.eos_id, 7], 0.6)
    assert defaults.bos_token_id == ours.bos_id
    logits = gpt.load(tmp_path / "source").logits(some_ids())
    assert float((logits - logits_of(hf_model, some_ids())).abs().max()) <= LOGITS_ATOL
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        first, last = (tmp_path / run / name for run in ("first", "last"))
        assert first.read_bytes() == last.read_bytes(), name


def test_target_without_a_tokenizer_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    model = sentencepiece_model(model_type="bpe", byte_fallback=True)
    (folder / "tokenizer.model").write_bytes(model)
    size = open_tokenizer(folder).vocab_size
    source = replace(lively(GATED.with_fields(vocab_size=size)), tokenizer=folder)
    write_native(source, tmp_path / "source", tokenizer=folder)
    convert(tmp_path / "source", tmp_path / "target", "--to", "hf")
    assert "the target has no tokenizer, because transformers would not" in capsys.readouterr().err
    assert open_checkpoint(tmp_path / "target").tokenizer is None
