"""A sentencepiece model as a tokenizer.

Byte fallback, dummy prefix and whitespace are as the model's own header says; what the library does
not tell is asked of it by decoding, or read from the few bytes that hold it. Text that follows
other text is encoded by a second copy of the model that adds no dummy prefix.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import sentencepiece

from gpt.errors import CheckpointError
from gpt.tokenizers.detokenizer import BYTEWISE, MARK, Decoding, Joining, Lead, Piece
from gpt.tokenizers.special_tokens import Control, Named, checked, spelled, stop_ids


class SentencePieceTokenizer(Decoding):
    """One sentencepiece model."""

    kind = "sentencepiece"

    def __init__(self, path: Path, named: Named) -> None:
        super().__init__()
        self._model, proto = _sentencepiece(path)
        self.vocab_size: int = self._model.get_piece_size()
        pieces = [self._model.id_to_piece(i) for i in range(self.vocab_size)]
        self._hidden = {i for i, piece in enumerate(pieces) if piece in named.special}
        self._hidden |= {i for i in range(self.vocab_size) if self._model.is_control(i)}
        self._hidden.discard(self._model.unk_id())  # Text can be unknown; that is no control.
        # User-defined pieces are matched in any text. Those that look like markup are how NeMo
        # writes turns and tools, so text may not become one; in output they remain visible.
        markup = (i for i, p in enumerate(pieces) if re.fullmatch(r"<[^<>]+>|\[[^\[\]]+\]", p))
        guarded = self._hidden | {i for i in markup if _user_defined(proto, pieces[i])}
        self._guarded = {i: str(pieces[i]) for i in sorted(guarded)}
        self._control = {piece: i for i, piece in self._guarded.items()}
        self.controls: Mapping[str, Control] = {p: Control(i) for p, i in self._control.items()}
        ids: dict[str | None, int | None] = {piece: i for i, piece in enumerate(pieces)}
        bos_id, eos_id = self._model.bos_id(), self._model.eos_id()
        self.bos_id = bos_id if bos_id >= 0 else ids.get(named.bos, named.bos_id)
        self.stop_ids = stop_ids(eos_id if eos_id >= 0 else ids.get(named.eos), named)
        self.eos_id = next(iter(self.stop_ids), None)
        self.adds_bos = bool(named.adds_bos) and self.bos_id is not None
        self.joining = Joining(self._lead(pieces), BYTEWISE, control_ends_bytes=True)

    def _lead(self, pieces: list[str]) -> Lead:
        """The rule for leading spaces, asked of the model by decoding."""
        marked = next((i for i, piece in enumerate(pieces) if piece.startswith(MARK)), None)
        if marked is None or self._model.decode([marked]).startswith(" "):
            return "keep"
        alone = self._model.piece_to_id(MARK)
        both = self._model.decode([alone, alone]) if pieces[alone] == MARK else " "
        return "mark" if both else "marks"

    @cached_property
    def _continuing(self) -> sentencepiece.SentencePieceProcessor:
        # In a protobuf a field that comes again overrides: normalizer_spec (3) with
        # add_dummy_prefix (3) and remove_extra_whitespaces (4) off, the rest as it was.
        proto = self._model.serialized_model_proto() + b"\x1a\x04\x18\x00\x20\x00"
        return sentencepiece.SentencePieceProcessor(model_proto=proto)

    def encode(self, text: str, *, special: bool = False, started: bool = False) -> list[int]:
        model = self._continuing if started else self._model
        if not special:
            ids: list[int] = model.encode(checked(text))
            if self._guarded.keys().isdisjoint(ids):
                return ids
            return spelled(ids, self._guarded, self._continuing.encode)
        # Each stretch between control tokens has its own dummy prefix, as NeMo's legacy mode has.
        longest_first = sorted(self._control, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", checked(text))
        found: list[int] = []
        for part in parts if longest_first else [text]:
            known = self._control.get(part)
            found += model.encode(part) if known is None else [known]
        return found

    def spelling(self, token_id: int) -> str:
        known = 0 <= token_id < self.vocab_size
        return str(self._model.id_to_piece(token_id)) if known else ""

    def _look_up(self, token_id: int) -> Piece:
        if not 0 <= token_id < self.vocab_size or token_id in self._hidden:
            return None
        if self._model.is_unknown(token_id):
            return str(self._model.decode([token_id]))
        text = str(self._model.id_to_piece(token_id))
        if self._model.is_byte(token_id):
            return bytes([int(text[3:5], 16)])
        return text if self.joining.marked else text.replace(MARK, " ")


def _sentencepiece(path: Path) -> tuple[sentencepiece.SentencePieceProcessor, bytes]:
    proto = path.read_bytes()
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        if proto and model.get_piece_size():
            return model, proto
    except (RuntimeError, OSError):
        pass  # The library's message is a line of its own source.
    raise CheckpointError(
        f"{path} ({len(proto)} bytes) is not a sentencepiece model, or not all of one; copy it "
        "again, or put the model's tokenizer.json in its place"
    )


def _user_defined(proto: bytes, piece: str) -> bool:
    """Whether a piece is of the type USER_DEFINED (4), which the library does not tell."""
    text = piece.encode()
    if len(text) > 127:  # Its length would take two bytes; no control token is that long.
        return False
    head = re.escape(b"\x0a" + bytes([len(text)]) + text)
    return re.search(head + rb"(?:\x15.{4})?\x18\x04", proto, re.DOTALL) is not None
