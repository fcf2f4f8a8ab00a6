"""Hugging Face tokenizer writer: plans the files from which AutoTokenizer gives Preamble's ids.

A tokenizer of any kind is written as a tokenizer.json, with a tokenizer_config.json whose class
loads exactly this file. Other classes of transformers rebuild the tokenizer from its vocabulary by
their own rules. A sentencepiece model that a tokenizer.json cannot express is written with a class
that encodes with the sentencepiece library. The module compares the exported tokenizer with
Preamble's on fixed texts, and writes none if any id or decoded text differs. generation_config.json
has the end-of-text ids.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from checkpoints_tools.layout.layout import TargetFile, literal_file
from checkpoints_tools.layout.tokenizer_files import read_tokenizer_file
from checkpoints_tools.writers.sentencepiece_export import export_sentencepiece
from checkpoints_tools.writers.tokenizer_comparison import compared_texts, find_difference
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.tokenizers.chat_template import token_names, tokenizer_folder
from gpt.tokenizers.detokenizer import SPACE_MARK
from gpt.tokenizers.hf_tokenizer import HFTokenizer
from gpt.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from gpt.tokenizers.special_tokens import read_json
from gpt.tokenizers.tokenizer import Tokenizer, check_tokenizer, open_tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
# In transformers 4 and 5, this class loads tokenizer.json without changes.
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
# transformers 5 ignores the class in tokenizer_config.json for models of this family, and builds
# this class from the vocabulary and the merges.
FORCED_CLASSES = {"qwen2": "Qwen2Tokenizer"}
# Fields of a BPE model that Qwen2Tokenizer does not set.
QWEN2_UNSET_FIELDS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
# Its pattern, which splits text into pre-tokens.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A class of transformers that encodes with the sentencepiece library, adds neither BOS nor EOS, and
# has no rules of its own; and the name of its model file.
SLOW_CLASS, SLOW_FILE = "BertGenerationTokenizer", "spiece.model"
SLOW_NOTE = (
    "a tokenizer.json cannot express the tokenizer, so AutoTokenizer needs the package "
    "sentencepiece, and decodes unknown tokens to nothing"
)
# Families for which AutoTokenizer of transformers 5 does not load the slow class.
FAST_ONLY_FAMILIES = ("glm4_moe", "mistral", "mixtral", "nemotron", "qwen2")
# Fields of a source's tokenizer_config.json that do not change ids.
COPIED_FIELDS = ("chat_template", "padding_side", "truncation_side")
TEMPLATE_PATTERNS = ("*.jinja", "chat_template.json")


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """The planned files of a tokenizer, and its BOS and EOS ids for config.json."""

    files: tuple[TargetFile, ...] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    notes: tuple[str, ...] = ()


def plan_tokenizer(path: Path | None, config: GPTConfig, family: str) -> HuggingFaceTokenizer:
    """Plan the files of the tokenizer in `path` for a model of `family`."""
    if path is None:
        return HuggingFaceTokenizer()
    try:
        tokenizer = open_tokenizer(path)
        check_tokenizer(tokenizer, config.vocab_size, path)
    except CheckpointError as error:
        note = f"the target has no tokenizer, and config.json has no BOS and EOS token ids: {error}"
        return HuggingFaceTokenizer(notes=(note,))
    generation = _generation_config(tokenizer, path)
    planned = HuggingFaceTokenizer(generation, tokenizer.bos_id, tokenizer.eos_id)
    try:
        files = _tokenizer_files(tokenizer, path, config, family)
    except CheckpointError as error:
        if isinstance(tokenizer, SentencePieceTokenizer) and _suits_slow_class(tokenizer, family):
            files = _slow_files(tokenizer, path, config)
            return replace(planned, files=(*files, *generation), notes=(SLOW_NOTE,))
        note = (
            f"the target has no tokenizer, because transformers would not give the ids of {path}: "
            f"{error}; to serve the target, give the tokenizer with --tokenizer"
        )
        return replace(planned, notes=(note,))
    return replace(planned, files=(*files, *generation))


def _tokenizer_files(
    tokenizer: Tokenizer, path: Path, config: GPTConfig, family: str
) -> tuple[TargetFile, ...]:
    """Plan the files; raise CheckpointError with the reason if transformers gives other ids."""
    if tokenizer.kind == "null":
        # transformers ignores this file, and Preamble's reader needs it.
        file = path / "null.json" if path.is_dir() else path
        return (literal_file("null.json", read_tokenizer_file(file)),)
    library = _export(tokenizer)
    _set_post_processor(library, tokenizer)
    tokenizer_class = FORCED_CLASSES.get(family, TOKENIZER_CLASS)
    if tokenizer_class == "Qwen2Tokenizer" and not _is_qwen2_tokenizer(library):
        raise CheckpointError(
            f"AutoTokenizer builds a {tokenizer_class} for each {family} model, which splits text "
            "by other rules; choose another --family if possible"
        )
    if difference := find_difference(tokenizer, library):
        raise CheckpointError(difference)
    special_tokens = _special_token_names(tokenizer, path)
    tokenizer_config = {
        **_tokenizer_config(path, config, special_tokens),
        "tokenizer_class": tokenizer_class,
    }
    return (
        literal_file(TOKENIZER_FILE, library.to_str(pretty=True).encode()),
        _json_file(CONFIG_FILE, tokenizer_config),
        _json_file("special_tokens_map.json", special_tokens),
        *_copied_files(tokenizer, path),
    )


def _suits_slow_class(tokenizer: SentencePieceTokenizer, family: str) -> bool:
    """Return whether AutoTokenizer gives the same ids and texts through the slow class.

    Its `decode` joins the pieces and removes spaces at both ends, so it is compared here.
    """
    if family in FAST_ONLY_FAMILIES or tokenizer.prefix_ids or tokenizer.suffix_ids:
        return False
    if not tokenizer.spaces_each_text:
        return False
    for text in compared_texts(tokenizer):
        ids = tokenizer.encode(text, allow_special=True)
        if tokenizer.unknown_id not in ids:
            pieces = [tokenizer.id_to_token(i) for i in ids if tokenizer.piece(i) is not None]
            if "".join(pieces).replace(SPACE_MARK, " ").strip() != tokenizer.decode(ids):
                return False
    return True


def _slow_files(
    tokenizer: SentencePieceTokenizer, path: Path, config: GPTConfig
) -> tuple[TargetFile, ...]:
    """Plan the files of the slow class: the sentencepiece model and its control tokens."""
    special_tokens = _special_token_names(tokenizer, path)
    # Without these fields, the class adds tokens of its own.
    named_tokens = {
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "sep_token")),
        "unk_token": tokenizer.id_to_token(tokenizer.unknown_id),
        **special_tokens,
    }
    added_tokens = {
        str(control.id): {
            "content": text,
            "lstrip": control.lstrip,
            "rstrip": control.rstrip,
            "single_word": False,
            "normalized": False,
            "special": tokenizer.piece(control.id) is None,
        }
        for text, control in tokenizer.control_tokens.items()
    }
    tokenizer_config = {
        **_tokenizer_config(path, config, named_tokens),
        "added_tokens_decoder": added_tokens,
        "legacy": True,
        "tokenizer_class": SLOW_CLASS,
    }
    return (
        _json_file(CONFIG_FILE, tokenizer_config),
        literal_file(SLOW_FILE, read_tokenizer_file(tokenizer.path)),
        *_template_files(path),
    )


def _json_file(name: str, record: Mapping[str, Any]) -> TargetFile:
    return literal_file(name, json.dumps(record, indent=2).encode() + b"\n")


def _export(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer as one of the library; raise CheckpointError if that is impossible."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        try:
            return export_sentencepiece(tokenizer)
        except CheckpointError as error:
            raise CheckpointError(
                f"a tokenizer.json cannot express this sentencepiece model: {error}"
            ) from None
    assert isinstance(tokenizer, HFTokenizer), "tokenizers of all other kinds are HFTokenizers"
    return tokenizer.copy_library()


def _set_post_processor(library: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    """Let the library add the BOS and EOS ids that Preamble adds to a text."""
    text_ids = library.encode("a", add_special_tokens=False).ids
    if library.encode("a").ids == [*tokenizer.prefix_ids, *text_ids, *tokenizer.suffix_ids]:
        return
    before = [tokenizer.id_to_token(i) for i in tokenizer.prefix_ids]
    after = [tokenizer.id_to_token(i) for i in tokenizer.suffix_ids]
    for token in (*before, *after):
        if not token or ":" in token or token.startswith("$"):
            raise CheckpointError(f"a post-processor cannot add the token {token!r}")
    second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second],
        special_tokens=[
            (tokenizer.id_to_token(i), i)
            for i in dict.fromkeys((*tokenizer.prefix_ids, *tokenizer.suffix_ids))
        ],
    )


def _is_qwen2_tokenizer(library: tokenizers.Tokenizer) -> bool:
    """Return whether transformers' Qwen2Tokenizer encodes like the library's tokenizer."""
    record = json.loads(library.to_str())
    model, end_of_text = record["model"], "<|endoftext|>"
    steps = (record["pre_tokenizer"] or {}).get("pretokenizers") or [{}, {}]
    special = {token["content"] for token in record["added_tokens"] if token["special"]}
    return (
        model["type"] == "BPE"
        and not any(model.get(name) for name in QWEN2_UNSET_FIELDS)
        and record["normalizer"] == {"type": "NFC"}
        and len(steps) == 2
        and steps[0].get("pattern") == {"Regex": QWEN2_PATTERN}
        and (steps[0].get("behavior"), steps[0].get("invert")) == ("Isolated", False)
        and steps[1].get("type") == "ByteLevel"
        and (steps[1]["add_prefix_space"], steps[1]["use_regex"]) == (False, False)
        and (record["decoder"] or {}).get("type") == "ByteLevel"
        and end_of_text in special
    )


def _special_token_names(tokenizer: Tokenizer, path: Path) -> dict[str, str]:
    """Return the special tokens by name, such as `eos_token`.

    transformers makes each named token special, so a token that is text for Preamble is not named.
    """
    return {
        name: text
        for name, text in token_names(path, tokenizer).items()
        if text in tokenizer.control_tokens
        and tokenizer.piece(tokenizer.control_tokens[text].id) is None
    }


def _tokenizer_config(
    path: Path, config: GPTConfig, special_tokens: Mapping[str, str | None]
) -> dict[str, Any]:
    source = _read_companion(path, CONFIG_FILE)
    return {
        **{name: source[name] for name in COPIED_FIELDS if source.get(name) is not None},
        **special_tokens,
        "clean_up_tokenization_spaces": False,
        # Without this field, transformers adds token_type_ids, which most GPT models refuse.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": config.max_position_embeddings,
    }


def _read_companion(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON file in the tokenizer's directory; an empty record if there is none."""
    file = _folder(path) / name
    return read_json(file) if file.is_file() else {}


def _folder(path: Path) -> Path:
    folder = tokenizer_folder(path)
    assert folder is not None, "a tokenizer's path has a directory"
    return folder


def _copied_files(tokenizer: Tokenizer, path: Path) -> list[TargetFile]:
    """Plan copies of the chat templates, and of a sentencepiece model for other programs."""
    files = _template_files(path)
    if isinstance(tokenizer, SentencePieceTokenizer):
        files.append(literal_file("tokenizer.model", read_tokenizer_file(tokenizer.path)))
    return files


def _template_files(path: Path) -> list[TargetFile]:
    templates = (file for pattern in TEMPLATE_PATTERNS for file in _folder(path).glob(pattern))
    return [
        literal_file(file.name, read_tokenizer_file(file))
        for file in sorted(templates)
        if file.is_file()
    ]


def _generation_config(tokenizer: Tokenizer, path: Path) -> tuple[TargetFile, ...]:
    """Plan generation_config.json: the source's file, with the tokenizer's BOS and EOS ids."""
    source = _read_companion(path, GENERATION_FILE)
    record = {name: value for name, value in source.items() if name != "_from_model_config"}
    if tokenizer.bos_id is not None:
        record["bos_token_id"] = tokenizer.bos_id
    source_ids = source.get("eos_token_id")
    listed_ids = source_ids if isinstance(source_ids, list) else [source_ids]
    if tokenizer.stop_ids and set(listed_ids) != set(tokenizer.stop_ids):
        ids = list(tokenizer.stop_ids)
        record["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return (_json_file(GENERATION_FILE, record),) if record else ()
