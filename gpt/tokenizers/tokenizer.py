"""Opens the tokenizer of a model: sentencepiece, GPT-2 BPE, `tokenizer.json`, or plain numbers.

One protocol for all four. Text becomes a control token only if the caller says `special=True`, and
encoding never adds one. Knows nothing of prompts, templates or models, except whether a vocabulary
is large enough.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, cast, get_args

from gpt.errors import CheckpointError, ConfigError, RequestError
from gpt.tokenizers.detokenizer import Decoding, Joining, Piece, Pieces, TextStream
from gpt.tokenizers.hf_tokenizer import JsonTokenizer, gpt2_tokenizer
from gpt.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from gpt.tokenizers.special_tokens import Control, read_json, read_named

__all__ = ["NullTokenizer", "TextStream", "Tokenizer", "check_tokenizer", "open_tokenizer"]

Kind = Literal["tokenizer.json", "sentencepiece", "gpt2", "null"]


class Tokenizer(Pieces, Protocol):
    """`started` says that text stands before: then no space is put, or taken, at the beginning."""

    kind: str
    vocab_size: int  # One more than the largest id.
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]  # eos_id and whatever else the files say ends a text.
    adds_bos: bool  # Whether prompts of this model begin with bos_id; encode never adds it.
    controls: Mapping[str, Control]  # By the text that a template writes for each.

    def encode(self, text: str, *, special: bool = False, started: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int], *, started: bool = False) -> str: ...

    def spelling(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty if it has none of that id."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's text inside a longer one; None for a control token."""
        ...


class NullTokenizer(Decoding):
    """Text is token ids as decimal numbers, for a model that came without a tokenizer."""

    kind = "null"
    joining = Joining("text")
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    adds_bos = False
    controls: Mapping[str, Control] = MappingProxyType({})

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def encode(self, text: str, *, special: bool = False, started: bool = False) -> list[int]:
        words = text.split()
        for place, word in enumerate(words):
            number = word.isascii() and word.isdigit() and len(word) < 20
            if not number or int(word) >= self.vocab_size:
                raise RequestError(
                    f"word {place + 1} of the text is {word[:20]!r}; this model has no tokenizer, "
                    f"so a text must be token ids from 0 to {self.vocab_size - 1}, with spaces "
                    "between them",
                    field="text",
                )
        return [int(word) for word in words]

    def spelling(self, token_id: int) -> str:
        return str(token_id) if 0 <= token_id < self.vocab_size else ""

    def _look_up(self, token_id: int) -> Piece:
        return f" {token_id}" if 0 <= token_id < self.vocab_size else None


def _null(path: Path) -> NullTokenizer:
    size = read_json(path).get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointError(
            f"{path} has vocab_size {size!r}; it must be a whole number of at least 1"
        )
    return NullTokenizer(size)


# The files of each kind, in order of preference: what HF itself reads comes first.
_FILES: dict[Kind, tuple[str, ...]] = {
    "tokenizer.json": ("tokenizer.json",),
    "sentencepiece": ("tokenizer.model", ".model"),
    "gpt2": ("vocab.json",),
    "null": ("null.json",),
}


def _one(folder: Path, ending: str) -> Path | None:
    """The file of that name, or the one whose name ends so: NeMo puts a hash before names."""
    if (folder / ending).is_file():
        return folder / ending
    found = sorted(path for path in folder.glob(f"*{ending}") if path.is_file())
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(
            f"{folder} has several tokenizer files ({names}); give the path of the right one"
        )
    return found[0] if found else None


def _find(path: Path, kind: Kind | None) -> tuple[Kind, Path]:
    kinds = [kind] if kind else list(_FILES)
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"there is no tokenizer at {path}; give a file or a directory")
        for one in kinds:
            if kind or path.name.endswith(_FILES[one]):
                return one, path
    for one in kinds if path.is_dir() else ():
        for ending in _FILES[one]:
            found = _one(path, ending)
            if found:
                return one, found
    raise CheckpointError(
        f"{path} is no tokenizer; needed is tokenizer.json, a sentencepiece *.model, vocab.json "
        'with merges.txt, or null.json ({"vocab_size": N}) for plain token ids'
    )


def open_tokenizer(path: Path, *, kind: str | None = None) -> Tokenizer:
    """The tokenizer in a file or a directory; `kind` chooses where there are several."""
    if kind is not None and kind not in get_args(Kind):
        raise ConfigError(f"tokenizer kind {kind!r}; known are {', '.join(get_args(Kind))}")
    try:
        return _open(*_find(Path(path), cast(Kind | None, kind)))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give the tokenizer "
            "as a file or a directory that exists here, and that this user may read"
        ) from None


def _open(kind: Kind, file: Path) -> Tokenizer:
    named = read_named(file.parent)
    match kind:
        case "sentencepiece":
            return SentencePieceTokenizer(file, named)
        case "tokenizer.json":
            return JsonTokenizer(read_json(file), file, "tokenizer.json", named)
        case "null":
            return _null(file)
    prefix = file.name.removesuffix("vocab.json")
    merges = file.with_name(f"{prefix}merges.txt")
    merges = merges if merges.is_file() else _one(file.parent, "merges.txt") or merges
    if not merges.is_file():
        raise CheckpointError(f"{file} has no {merges.name} beside it; copy both files of the BPE")
    return gpt2_tokenizer(file, merges, named)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int, where: object) -> None:
    """Refuses a tokenizer that cannot be this model's."""
    size = tokenizer.vocab_size
    if size > vocab_size:
        raise CheckpointError(
            f"the tokenizer in {where} has ids up to {size - 1}, the model's vocabulary ends at "
            f"{vocab_size - 1}; give the tokenizer that the model was trained with"
        )
    # Vocabularies are padded to multiples of up to a few thousand, and some leave room to grow.
    if vocab_size - size > max(4096, size // 8):
        raise CheckpointError(
            f"the tokenizer in {where} has {size} ids, the model's vocabulary {vocab_size}: more "
            "than padding explains; give the tokenizer that the model was trained with"
        )
