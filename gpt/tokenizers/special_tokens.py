"""Which tokens control the model instead of being text, and how text is kept from becoming one.

The files beside a tokenizer name them, each in its own way. Text that would reach such a token is
spelled letter by letter instead, so a user cannot write one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import CheckpointError, RequestError

END = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # Tried when no file names them.
BEGIN = ("<s>", "<|begin_of_text|>", "<bos>")


def checked(text: str) -> str:
    """Refuses half of a surrogate pair: no tokenizer takes one, and each refuses differently."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate at character {error.start}; it needs to be valid "
            "unicode, so decode it as UTF-8 first",
            field="text",
        ) from None
    return text


def spelled(
    ids: list[int], guarded: Mapping[int, str], encode: Callable[[str], list[int]]
) -> list[int]:
    """The ids with guarded tokens replaced by their letters, encoded one by one.

    Text reaches such a token by merging ordinary letters, or as a piece matched anywhere.
    """
    found = []
    spellings: dict[int, list[int]] = {}  # A text may be nothing else.
    for i in ids:
        if i not in guarded:
            found.append(i)
            continue
        if i not in spellings:
            letters = (encode(letter) for letter in guarded[i])
            spellings[i] = [j for letter in letters for j in letter if j not in guarded]
        found += spellings[i]
    return found


@dataclass(frozen=True)
class Control:
    """A token that a template may write as a text of its own, wherever that stands."""

    id: int
    special: bool = True  # Whether no text of a user becomes it; of others a chat must take care.
    lstrip: bool = False  # Whether it takes along the space before it,
    rstrip: bool = False  # and behind it.


@dataclass(frozen=True)
class Named:
    """What the files beside a tokenizer say about its control tokens."""

    bos: str | None = None
    eos: str | None = None
    adds_bos: bool | None = None
    special: frozenset[str] = frozenset()
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
        raise CheckpointError(f"{path} holds a {type(record).__name__}; it must be a JSON object")
    return record


def _content(token: object) -> str | None:
    """The text of a token that files write as a string or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def read_named(folder: Path) -> Named:
    files = ("special_tokens_map.json", "tokenizer_config.json", "generation_config.json")
    names, config, generation = (
        read_json(folder / file) if (folder / file).is_file() else {} for file in files
    )
    named: dict[str, Any] = {**names, **{k: v for k, v in config.items() if v is not None}}
    added = config.get("added_tokens_decoder")
    added = added.values() if isinstance(added, Mapping) else ()
    tokens: list[object] = [
        token for token in added if isinstance(token, Mapping) and token.get("special")
    ]
    for key in ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token"):
        tokens.append(named.get(key))
    more = named.get("additional_special_tokens")
    tokens += more if isinstance(more, list) else []
    adds = config.get("add_bos_token")
    return Named(
        bos=_content(named.get("bos_token")),
        eos=_content(named.get("eos_token")),
        adds_bos=adds if isinstance(adds, bool) else None,
        special=frozenset(text for text in map(_content, tokens) if text),
        bos_id=next(iter(_ids(generation.get("bos_token_id"))), None),
        stop_ids=_ids(generation.get("eos_token_id")),
    )


def special_names(folder: Path) -> dict[str, str]:
    """What the files call `bos_token` and the like, as templates refer to them."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        record = read_json(folder / file) if (folder / file).is_file() else {}
        texts = {key: _content(value) for key, value in record.items() if key.endswith("_token")}
        found |= {key: text for key, text in texts.items() if text is not None}
    return found


def stop_ids(eos_id: int | None, named: Named) -> tuple[int, ...]:
    """Every id that ends a text, the tokenizer's own first."""
    return tuple(dict.fromkeys((*(() if eos_id is None else (eos_id,)), *named.stop_ids)))
