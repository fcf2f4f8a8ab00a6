"""Special tokens of a tokenizer: declarations in config files, search in a text, a guard for text.

A control token marks structure, such as the beginning or end of a text or a turn. Several files in
the tokenizer's directory declare control tokens, each in its own format. `ControlTokenSplitter`
finds them in a text that may contain control tokens, such as a rendered chat template. Plain text
that would be encoded as a control token is encoded letter by letter instead.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt.errors import CheckpointError, RequestError
from gpt.files.regular_files import read_regular_file
from gpt.settings import short_repr

TOKEN_ID_LIMIT = 1 << 31  # Above the size of every vocabulary.

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


def trie_pattern(words: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of these words at a position.

    The pattern is a trie, so the cost per position depends on the length of a word, not on the
    number of words. With an alternation of all words, a long search in a hostile message could
    block the process, because `re` holds the GIL.
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = None
    return _node_pattern(trie)


def _node_pattern(node: dict[str, Any]) -> str:
    common_prefix = ""
    while len(node) == 1 and "" not in node:
        ((letter, node),) = node.items()
        common_prefix += re.escape(letter)
    alternatives = [
        re.escape(letter) + _node_pattern(child) for letter, child in node.items() if letter
    ]
    if not alternatives:
        return common_prefix
    return f"{common_prefix}(?:{'|'.join(alternatives)}){'?' if '' in node else ''}"


class ControlTokenSplitter:
    """Splits a text at control tokens, as HF tokenizers split it at their added tokens.

    At each position the longest control token matches. A control token with `lstrip` or `rstrip`
    removes the whitespace on that side.
    """

    def __init__(self, control_tokens: Mapping[str, ControlToken]) -> None:
        self._control_tokens = control_tokens
        self.pattern = re.compile(trie_pattern(control_tokens) or "(?!)")

    def split(self, text: str) -> Iterator[tuple[str, ControlToken | None]]:
        """Yield each text (possibly empty) with the control token after it; None after the last."""
        end = 0
        strips_next = False  # Whether the last control token removes the whitespace after it.
        for match in self.pattern.finditer(text):
            control = self._control_tokens[match[0]]
            part = text[end : match.start()]
            part = part.lstrip() if strips_next else part
            yield part.rstrip() if control.lstrip else part, control
            end, strips_next = match.end(), control.rstrip
        yield text[end:].lstrip() if strips_next else text[end:], None


@dataclass(frozen=True)
class DeclaredToken:
    """A token that a config file declares; the fields are those of HF's AddedToken."""

    content: str
    id: int | None = None  # None: the file does not say it.
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @classmethod
    def parse(cls, token: object, token_id: int | None, *, special: bool) -> "DeclaredToken | None":
        """Parse a token, which files store as a string or as an object; None: neither."""
        content = _token_text(token)
        if not content:
            return None
        fields = token if isinstance(token, Mapping) else {}
        flags = {name: bool(fields.get(name)) for name in ("lstrip", "rstrip", "single_word")}
        normalized = bool(fields.get("normalized", not special))
        return cls(content, token_id, special, normalized=normalized, **flags)


@dataclass(frozen=True)
class SpecialTokens:
    """The control tokens that the tokenizer's config files declare."""

    bos: str | None = None
    eos: str | None = None
    adds_bos: bool | None = None  # Whether texts get BOS and EOS; None: not declared.
    adds_eos: bool | None = None
    # All tokens that are special, or that were added to the vocabulary; each text occurs once.
    declared: tuple[DeclaredToken, ...] = ()
    # Whether a sentencepiece model adds a leading space to each text between control tokens, as
    # HF's slow tokenizers did at first ("legacy"). False: only at the start of a text.
    spaces_each_text: bool = True
    # `bos_id` and `stop_ids` are read from generation_config.json.
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()

    def bos_id_below(self, vocab_size: int) -> int | None:
        """Return `bos_id` if a vocabulary of this size has it.

        Small models that were trained from scratch often have the BOS id of a large one.
        """
        return self.bos_id if self.bos_id is not None and self.bos_id < vocab_size else None

    @cached_property
    def special(self) -> frozenset[str]:
        """The texts of all special tokens."""
        return frozenset(token.content for token in self.declared if token.special)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object whose texts are valid Unicode."""
    try:
        data = read_regular_file(path)
        record = json.loads(data)
        if b"\\u" in data:
            # The escape of a lone surrogate is valid JSON, but not valid Unicode.
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{path} has the escape of a lone surrogate (\\ud800 to \\udfff), which is no "
            "character; copy it again from the model's source"
        ) from None
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


def _read_ids(record: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """Return the token ids in a field that has one id, a list of ids, or null."""
    value = record.get(key)
    values = value if isinstance(value, list) else [value]
    ids = [token_id for token_id in values if token_id is not None]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < TOKEN_ID_LIMIT:
            raise CheckpointError(
                f"{path}: {key} is {short_repr(token_id)}; it must be a token id, a whole number "
                "from 0 to the size of the vocabulary: correct it, or copy the file again"
            )
    return tuple(ids)


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the special tokens that the config files in the directory declare."""
    files = (
        "special_tokens_map.json",
        "tokenizer_config.json",
        "generation_config.json",
        "added_tokens.json",
    )
    tokens_map, config, generation, added = (
        read_json(folder / file) if (folder / file).is_file() else {} for file in files
    )
    merged: dict[str, Any] = {**tokens_map, **{k: v for k, v in config.items() if v is not None}}
    adds_bos, adds_eos = config.get("add_bos_token"), config.get("add_eos_token")
    return SpecialTokens(
        bos=_token_text(merged.get("bos_token")),
        eos=_token_text(merged.get("eos_token")),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        adds_eos=adds_eos if isinstance(adds_eos, bool) else None,
        declared=_declared_tokens(merged, config.get("added_tokens_decoder"), added),
        spaces_each_text=config.get("legacy") is not False,
        bos_id=next(iter(_read_ids(generation, "bos_token_id", folder / files[2])), None),
        stop_ids=_read_ids(generation, "eos_token_id", folder / files[2]),
    )


def _declared_tokens(
    names: Mapping[str, Any], added_by_id: object, added: Mapping[str, Any]
) -> tuple[DeclaredToken, ...]:
    """Return the declared tokens, those with an id first, in the order of their ids.

    `names`: the special tokens by name, such as `bos_token`. `added_by_id`: `added_tokens_decoder`
    of tokenizer_config.json. `added`: added_tokens.json, which older tokenizers have instead.
    """
    named_tokens: list[object] = [token for key, token in names.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = names.get(key)
        if isinstance(extra, list | Mapping):
            named_tokens += extra.values() if isinstance(extra, Mapping) else extra
    named = [DeclaredToken.parse(token, None, special=True) for token in named_tokens]
    special_texts = {token.content for token in named if token is not None}
    with_ids: list[DeclaredToken | None] = []
    if isinstance(added_by_id, Mapping):
        with_ids = [
            DeclaredToken.parse(token, int(token_id), special=_is_special(token, special_texts))
            for token_id, token in added_by_id.items()
            if re.fullmatch("[0-9]{1,9}", str(token_id))
        ]
    elif added:
        with_ids = [
            DeclaredToken.parse(content, token_id, special=content in special_texts)
            for content, token_id in added.items()
            if isinstance(token_id, int) and not isinstance(token_id, bool)
        ]
    ordered = sorted((t for t in with_ids if t is not None), key=lambda token: token.id or 0)
    by_text: dict[str, DeclaredToken] = {}
    for token in (*ordered, *named):
        if token is not None:
            by_text.setdefault(token.content, token)
    return tuple(by_text.values())


def _is_special(token: object, special_texts: set[str]) -> bool:
    is_marked = isinstance(token, Mapping) and bool(token.get("special"))
    return is_marked or _token_text(token) in special_texts


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
