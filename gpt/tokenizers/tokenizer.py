"""Tokenizer protocol and opening: sentencepiece, GPT-2 BPE, tokenizer.json or plain token ids.

All four kinds implement the same protocol. Text becomes a control token only with
`allow_special=True`, and `encode` never adds a control token such as BOS. With
`allow_special=True`, `encode` returns the ids of transformers' tokenizer with
`add_special_tokens=False`; with `add_special_tokens=True`, transformers adds `prefix_ids` and
`suffix_ids`. The module is independent of prompts, templates and models; `check_tokenizer` only
compares vocabulary sizes.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, cast, get_args

from gpt.errors import CheckpointError, ConfigError, RequestError
from gpt.tokenizers.detokenizer import (
    ControlTextDecoder,
    DecodingRules,
    IncrementalDetokenizer,
    Piece,
    PieceDecoder,
    TokenizerBase,
)
from gpt.tokenizers.hf_tokenizer import HFTokenizer, gpt2_tokenizer
from gpt.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from gpt.tokenizers.special_tokens import (
    ControlToken,
    ControlTokenSplitter,
    read_json,
    read_special_tokens,
)

__all__ = [
    "IncrementalDetokenizer",
    "NullTokenizer",
    "Tokenizer",
    "check_tokenizer",
    "open_tokenizer",
    "piece_decoder",
]

log = logging.getLogger(__name__)

TokenizerKind = Literal["tokenizer.json", "sentencepiece", "gpt2", "null"]


class Tokenizer(PieceDecoder, Protocol):
    """Converts text to token ids and back.

    `continues_text` means that the text follows other text. Then `encode` does not add a leading
    space, and `decode` does not remove one.
    """

    kind: str
    vocab_size: int  # The largest token id plus one.
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]  # eos_id, and other end-of-text tokens that the files name.
    adds_bos: bool  # Whether prompts of this model begin with bos_id; `encode` never adds it.
    # Control tokens that prompts have before and after a text, such as BOS and EOS (the
    # post-processor of tokenizer.json); `encode` never adds them.
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    control_tokens: Mapping[str, ControlToken]  # Keys: the tokens' texts in a chat template.

    @property
    def control_splitter(self) -> ControlTokenSplitter:
        """Splits a text at `control_tokens`."""
        ...

    @property
    def continues_after_control(self) -> bool:
        """Whether the text after a control token is encoded with `continues_text`."""
        ...

    def encode(
        self, text: str, *, allow_special: bool = False, continues_text: bool = False
    ) -> list[int]: ...

    def decode(self, ids: Iterable[int], *, continues_text: bool = False) -> str: ...

    def id_to_token(self, token_id: int) -> str:
        """Return the token's text in the vocabulary; empty for an unknown id."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that the token adds to a text; None for a control token."""
        ...


class NullTokenizer(TokenizerBase):
    """Tokenizer for a model without tokenizer files: a text is token ids, separated by spaces."""

    kind = "null"
    decoding_rules = DecodingRules("text")
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    adds_bos = False
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    control_tokens: Mapping[str, ControlToken] = MappingProxyType({})

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def encode(
        self, text: str, *, allow_special: bool = False, continues_text: bool = False
    ) -> list[int]:
        words = text.split()
        for index, word in enumerate(words):
            is_number = word.isascii() and word.isdigit() and len(word) < 20
            if not is_number or int(word) >= self.vocab_size:
                raise RequestError(
                    f"word {index + 1} of the text is {word[:20]!r}; this model has no tokenizer, "
                    f"so the text must be token ids from 0 to {self.vocab_size - 1}, separated by "
                    "spaces",
                    field="text",
                )
        return [int(word) for word in words]

    def id_to_token(self, token_id: int) -> str:
        return str(token_id) if 0 <= token_id < self.vocab_size else ""

    def _decode_piece(self, token_id: int) -> Piece:
        return f" {token_id}" if 0 <= token_id < self.vocab_size else None


def _open_null_tokenizer(path: Path) -> NullTokenizer:
    size = read_json(path).get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointError(
            f"{path} has vocab_size {size!r}; it must be a whole number of at least 1"
        )
    return NullTokenizer(size)


# The files of each kind, in order of preference; transformers also prefers tokenizer.json.
_FILE_NAMES: dict[TokenizerKind, tuple[str, ...]] = {
    "tokenizer.json": ("tokenizer.json",),
    "sentencepiece": ("tokenizer.model", ".model"),
    "gpt2": ("vocab.json",),
    "null": ("null.json",),
}


def _find_single_file(folder: Path, suffix: str) -> Path | None:
    """Return the file named `suffix`, else the only file whose name ends with `suffix`, else None.

    Files in NeMo's archives have names with a hash before the suffix.
    """
    if (folder / suffix).is_file():
        return folder / suffix
    matches = sorted(path for path in folder.glob(f"*{suffix}") if path.is_file())
    if len(matches) > 1:
        names = ", ".join(path.name for path in matches)
        raise CheckpointError(
            f"{folder} has several tokenizer files ({names}); give the path of the file to use"
        )
    return matches[0] if matches else None


def _find_tokenizer_file(path: Path, kind: TokenizerKind | None) -> tuple[TokenizerKind, Path]:
    kinds = [kind] if kind else list(_FILE_NAMES)
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"the tokenizer {path} does not exist; give a file or directory")
        for candidate in kinds:
            if kind or path.name.endswith(_FILE_NAMES[candidate]):
                return candidate, path
    for candidate in kinds if path.is_dir() else ():
        for suffix in _FILE_NAMES[candidate]:
            file = _find_single_file(path, suffix)
            if file:
                return candidate, file
    raise CheckpointError(
        f"{path} has no tokenizer; give tokenizer.json, a sentencepiece *.model, vocab.json with "
        'merges.txt, or null.json ({"vocab_size": N}) for plain token ids'
    )


def open_tokenizer(path: Path, *, kind: str | None = None) -> Tokenizer:
    """Open the tokenizer in a file or a directory.

    `kind` selects a tokenizer of a directory that contains tokenizers of several kinds.
    """
    if kind is not None and kind not in get_args(TokenizerKind):
        raise ConfigError(
            f"tokenizer kind {kind!r} does not exist; choose one of "
            f"{', '.join(get_args(TokenizerKind))}"
        )
    try:
        return _open_kind(*_find_tokenizer_file(Path(path), cast(TokenizerKind | None, kind)))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give the tokenizer "
            "as a file or directory that exists and that this user may read"
        ) from None


def _open_kind(kind: TokenizerKind, file: Path) -> Tokenizer:
    special_tokens = read_special_tokens(file.parent)
    match kind:
        case "sentencepiece":
            return SentencePieceTokenizer(file, special_tokens)
        case "tokenizer.json":
            return HFTokenizer(read_json(file), file, "tokenizer.json", special_tokens)
        case "null":
            return _open_null_tokenizer(file)
    prefix = file.name.removesuffix("vocab.json")
    merges = file.with_name(f"{prefix}merges.txt")
    merges = merges if merges.is_file() else _find_single_file(file.parent, "merges.txt") or merges
    if not merges.is_file():
        raise CheckpointError(f"{file} has no {merges.name} beside it; copy the two files together")
    return gpt2_tokenizer(file, merges, special_tokens)


def piece_decoder(
    tokenizer: Tokenizer, *, keep_special_tokens: bool, text_token_ids: Collection[int] = ()
) -> PieceDecoder:
    """Return the decoder of a completion's tokens.

    `keep_special_tokens`: decode control tokens to their texts, instead of to nothing.
    `text_token_ids`: decode these control tokens to their texts in any case.
    """
    if keep_special_tokens:
        return ControlTextDecoder(tokenizer, tokenizer.id_to_token)
    if text_token_ids:
        return ControlTextDecoder(tokenizer, tokenizer.id_to_token, text_token_ids)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int, source: object) -> None:
    """Raise CheckpointError if the tokenizer's ids do not fit the model's vocabulary."""
    size = tokenizer.vocab_size
    for stop_id in tokenizer.stop_ids:
        # Small models that were trained from scratch often have the end-of-text id of a large one.
        if stop_id >= vocab_size:
            log.warning("event=stop_id_unused id=%d vocab_size=%d", stop_id, vocab_size)
    if size > vocab_size:
        raise CheckpointError(
            f"the tokenizer in {source} has ids up to {size - 1}, but the model's vocabulary ends "
            f"at {vocab_size - 1}; give the tokenizer that the model was trained with"
        )
    # Vocabularies are padded to multiples of up to a few thousand; some also have unused ids.
    if vocab_size - size > max(4096, size // 8):
        raise CheckpointError(
            f"the tokenizer in {source} has {size} ids, but the model's vocabulary has "
            f"{vocab_size}, which is more than padding explains; give the tokenizer that the model "
            "was trained with"
        )
