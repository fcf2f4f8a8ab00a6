"""Special tokens of a tokenizer: their declarations in config files, and a guard for user text.

A control token marks structure, such as the beginning or end of a text or a turn. Several files in
the tokenizer's directory declare control tokens, each in its own format. User text that would be
encoded as a control token is encoded letter by letter instead.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import CheckpointError, RequestError

# Candidates for EOS and BOS tokens if the files do not name them.
EOS_CANDIDATES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
BOS_CANDIDATES = ("<s>", "<|begin_of_text|>", "<bos>")


def check_unicode(text: str) -> str:
    """Refuse lone surrogates, for which each tokenizer library raises a different error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate at character {error.start}; it must be valid Unicode: "
            "decode it as UTF-8 first",
            field="text",
        ) from None
    return text


def spell_out_guarded(
    ids: list[int], guarded_tokens: Mapping[int, str], encode: Callable[[str], list[int]]
) -> list[int]:
    """Replace each guarded token in `ids` by the encodings of its letters.

    User text must not contain guarded tokens, but the tokenizer can produce them from user text: by
    BPE merges, or by a match of a whole piece.
    """
    unguarded_ids = []
    spellings: dict[int, list[int]] = {}  # Cached, because a text may repeat a guarded token.
    for token_id in ids:
        if token_id not in guarded_tokens:
            unguarded_ids.append(token_id)
            continue
        if token_id not in spellings:
            spelling: list[int] = []
            for letter in guarded_tokens[token_id]:
                spelling += [i for i in encode(letter) if i not in guarded_tokens]
            spellings[token_id] = spelling
        unguarded_ids += spellings[token_id]
    return unguarded_ids


@dataclass(frozen=True)
class ControlToken:
    """A token that marks structure and that chat templates can write as text."""

    id: int
    # Whether the tokenizer declares the token as special, so that `Tokenizer.encode` does not
    # produce it from user text. False: an added token, which only `ChatTemplateEncoder` keeps out
    # of messages.
    special: bool = True
    lstrip: bool = False  # Whether encoding removes the whitespace before the token.
    rstrip: bool = False  # Whether encoding removes the whitespace after the token.


@dataclass(frozen=True)
class SpecialTokens:
    """The control tokens that the tokenizer's config files declare."""

    bos: str | None = None
    eos: str | None = None
    adds_bos: bool | None = None  # None: not declared.
    special: frozenset[str] = frozenset()  # The texts of all special tokens.
    # `bos_id` and `stop_ids` are read from generation_config.json.
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()


def read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); copy it again from the model's source"
        ) from None
    if not isinstance(record, dict):
        raise CheckpointError(
            f"{path} contains a {type(record).__name__}; it must be a JSON object: copy it again"
        )
    return record


def _token_text(token: object) -> str | None:
    """Return the text of a token, which files store as a string or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _parse_ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the special tokens that the config files in the directory declare."""
    files = ("special_tokens_map.json", "tokenizer_config.json", "generation_config.json")
    tokens_map, config, generation = (
        read_json(folder / file) if (folder / file).is_file() else {} for file in files
    )
    merged: dict[str, Any] = {**tokens_map, **{k: v for k, v in config.items() if v is not None}}
    added_tokens = config.get("added_tokens_decoder")
    added_tokens = added_tokens.values() if isinstance(added_tokens, Mapping) else ()
    tokens: list[object] = [
        token for token in added_tokens if isinstance(token, Mapping) and token.get("special")
    ]
    for key in ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token"):
        tokens.append(merged.get(key))
    additional = merged.get("additional_special_tokens")
    tokens += additional if isinstance(additional, list) else []
    adds_bos = config.get("add_bos_token")
    return SpecialTokens(
        bos=_token_text(merged.get("bos_token")),
        eos=_token_text(merged.get("eos_token")),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        special=frozenset(text for text in map(_token_text, tokens) if text),
        bos_id=next(iter(_parse_ids(generation.get("bos_token_id"))), None),
        stop_ids=_parse_ids(generation.get("eos_token_id")),
    )


def read_token_names(folder: Path) -> dict[str, str]:
    """Read the texts of named tokens (`bos_token`, `eos_token` and others), for chat templates."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        record = read_json(folder / file) if (folder / file).is_file() else {}
        texts = {key: _token_text(value) for key, value in record.items() if key.endswith("_token")}
        names |= {key: text for key, text in texts.items() if text is not None}
    return names


def collect_stop_ids(eos_id: int | None, special_tokens: SpecialTokens) -> tuple[int, ...]:
    """Return all end-of-text ids without duplicates, `eos_id` first."""
    eos_ids = () if eos_id is None else (eos_id,)
    return tuple(dict.fromkeys((*eos_ids, *special_tokens.stop_ids)))
