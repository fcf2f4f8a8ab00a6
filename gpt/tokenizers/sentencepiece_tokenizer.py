"""SentencePiece tokenizer: byte fallback, dummy prefix and whitespace as in the model file.

Settings of the model file that the library does not report are inferred from decoded test tokens,
or read from the file's protobuf bytes. For text that follows other text, a second copy of the model
encodes without a dummy prefix (leading space), and removes no whitespace.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import sentencepiece

from gpt.errors import CheckpointError
from gpt.tokenizers.detokenizer import (
    BYTEWISE_ERRORS,
    SPACE_MARK,
    DecodingRules,
    LeadingSpace,
    Piece,
    TokenizerBase,
)
from gpt.tokenizers.special_tokens import (
    ControlToken,
    SpecialTokens,
    check_unicode,
    collect_stop_ids,
    spell_out_guarded,
)


class SentencePieceTokenizer(TokenizerBase):
    """Tokenizer of one sentencepiece model file."""

    kind = "sentencepiece"

    def __init__(self, path: Path, special_tokens: SpecialTokens) -> None:
        super().__init__()
        self._model, proto = _load_model(path)
        self.vocab_size: int = self._model.get_piece_size()
        pieces = [self._model.id_to_piece(i) for i in range(self.vocab_size)]
        self._special_ids = {i for i, piece in enumerate(pieces) if piece in special_tokens.special}
        self._special_ids |= {i for i in range(self.vocab_size) if self._model.is_control(i)}
        self._special_ids.discard(self._model.unk_id())  # User text may contain unknown tokens.
        # User-defined pieces match anywhere in a text. NeMo marks turns and tools with user-defined
        # pieces that look like markup, so user text must not be encoded as such a piece. Decoding
        # writes these pieces as text.
        markup_ids = (i for i, p in enumerate(pieces) if re.fullmatch(r"<[^<>]+>|\[[^\[\]]+\]", p))
        guarded_ids = self._special_ids | {
            i for i in markup_ids if _is_user_defined(proto, pieces[i])
        }
        self._guarded_tokens = {i: str(pieces[i]) for i in sorted(guarded_ids)}
        self._control_ids = {piece: i for i, piece in self._guarded_tokens.items()}
        self.control_tokens: Mapping[str, ControlToken] = {
            p: ControlToken(i) for p, i in self._control_ids.items()
        }
        ids: dict[str | None, int | None] = {piece: i for i, piece in enumerate(pieces)}
        bos_id, eos_id = self._model.bos_id(), self._model.eos_id()
        self.bos_id = bos_id if bos_id >= 0 else ids.get(special_tokens.bos, special_tokens.bos_id)
        self.stop_ids = collect_stop_ids(
            eos_id if eos_id >= 0 else ids.get(special_tokens.eos), special_tokens
        )
        self.eos_id = next(iter(self.stop_ids), None)
        self.adds_bos = bool(special_tokens.adds_bos) and self.bos_id is not None
        self.decoding_rules = DecodingRules(
            self._leading_space_rule(pieces), BYTEWISE_ERRORS, control_ends_bytes=True
        )

    def _leading_space_rule(self, pieces: list[str]) -> LeadingSpace:
        """Infer the rule for leading spaces from decoded test tokens."""
        marked_id = next(
            (i for i, piece in enumerate(pieces) if piece.startswith(SPACE_MARK)), None
        )
        if marked_id is None or self._model.decode([marked_id]).startswith(" "):
            return "keep"
        # If decoding removes both of two leading space marks, the rule is "marks".
        marker_id = self._model.piece_to_id(SPACE_MARK)
        decoded_pair = (
            self._model.decode([marker_id, marker_id]) if pieces[marker_id] == SPACE_MARK else " "
        )
        return "mark" if decoded_pair else "marks"

    @cached_property
    def _continuation_model(self) -> sentencepiece.SentencePieceProcessor:
        # A field that is appended to a protobuf overrides the earlier value. The appended
        # normalizer_spec (field 3) switches add_dummy_prefix (3) and remove_extra_whitespaces (4)
        # off.
        proto = self._model.serialized_model_proto() + b"\x1a\x04\x18\x00\x20\x00"
        return sentencepiece.SentencePieceProcessor(model_proto=proto)

    def encode(
        self, text: str, *, allow_special: bool = False, continues_text: bool = False
    ) -> list[int]:
        model = self._continuation_model if continues_text else self._model
        if not allow_special:
            ids: list[int] = model.encode(check_unicode(text))
            if self._guarded_tokens.keys().isdisjoint(ids):
                return ids
            return spell_out_guarded(ids, self._guarded_tokens, self._continuation_model.encode)
        # Each text between control tokens is encoded separately and gets the model's dummy prefix
        # (unless `continues_text`), as in NeMo's legacy mode.
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", check_unicode(text))
        token_ids: list[int] = []
        for part in parts if longest_first else [text]:
            control_id = self._control_ids.get(part)
            token_ids += model.encode(part) if control_id is None else [control_id]
        return token_ids

    def id_to_token(self, token_id: int) -> str:
        is_in_vocabulary = 0 <= token_id < self.vocab_size
        return str(self._model.id_to_piece(token_id)) if is_in_vocabulary else ""

    def _decode_piece(self, token_id: int) -> Piece:
        if not 0 <= token_id < self.vocab_size or token_id in self._special_ids:
            return None
        if self._model.is_unknown(token_id):
            return str(self._model.decode([token_id]))
        text = str(self._model.id_to_piece(token_id))
        if self._model.is_byte(token_id):
            return bytes([int(text[3:5], 16)])
        return text if self.decoding_rules.keeps_space_marks else text.replace(SPACE_MARK, " ")


def _load_model(path: Path) -> tuple[sentencepiece.SentencePieceProcessor, bytes]:
    proto = path.read_bytes()
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        if proto and model.get_piece_size():
            return model, proto
    except (RuntimeError, OSError):
        pass  # The library's message only refers to a line of its source code.
    raise CheckpointError(
        f"{path} ({len(proto)} bytes) is not a sentencepiece model, or is truncated; copy it "
        "again, or replace it with the model's tokenizer.json"
    )


def _is_user_defined(proto: bytes, piece: str) -> bool:
    """Return whether a piece has the type USER_DEFINED (4), which the library does not report."""
    text = piece.encode()
    if len(text) > 127:  # Pieces with a length field of two bytes are too long for control tokens.
        return False
    header = re.escape(b"\x0a" + bytes([len(text)]) + text)
    return re.search(header + rb"(?:\x15.{4})?\x18\x04", proto, re.DOTALL) is not None
