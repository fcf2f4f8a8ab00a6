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
    ControlTokenSplitter,
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
        self.path = path
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
        control_tokens = {piece: ControlToken(i) for i, piece in self._guarded_tokens.items()}
        # Tokens that files beside the model file add or describe.
        self._added_texts: dict[int, str] = {}  # Tokens after those of the model file, by id.
        ids: dict[str | None, int | None] = {piece: i for i, piece in enumerate(pieces)}
        for token in special_tokens.declared:
            if token.content not in ids:
                if token.id != self.vocab_size:
                    continue  # The files do not say its id, so the model has no row for it.
                ids[token.content] = self.vocab_size
                self._added_texts[self.vocab_size] = token.content
                if token.special:
                    self._special_ids.add(self.vocab_size)
                self.vocab_size += 1
            token_id = ids[token.content]
            if token_id is not None and token_id != self._model.unk_id():
                control_tokens[token.content] = ControlToken(
                    token_id,
                    special=token.special or token_id in guarded_ids,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                )
        self.control_tokens: Mapping[str, ControlToken] = control_tokens
        # As in HF's slow tokenizers, a text that may have control tokens may have unknown tokens.
        self.unknown_id: int = self._model.unk_id()
        parsed_tokens = dict(control_tokens)
        if self.unknown_id >= 0:
            parsed_tokens[str(pieces[self.unknown_id])] = ControlToken(self.unknown_id)
        self._splitter = ControlTokenSplitter(parsed_tokens)
        self.spaces_each_text = special_tokens.spaces_each_text
        bos_id, eos_id = self._model.bos_id(), self._model.eos_id()
        declared_bos_id = special_tokens.bos_id_below(self.vocab_size)
        self.bos_id = bos_id if bos_id >= 0 else ids.get(special_tokens.bos, declared_bos_id)
        self.stop_ids = collect_stop_ids(
            eos_id if eos_id >= 0 else ids.get(special_tokens.eos), special_tokens
        )
        self.eos_id = next(iter(self.stop_ids), None)
        adds_bos, adds_eos = bool(special_tokens.adds_bos), bool(special_tokens.adds_eos)
        self.prefix_ids: tuple[int, ...] = ()
        self.suffix_ids: tuple[int, ...] = ()
        if adds_bos and self.bos_id is not None:
            self.prefix_ids = (self.bos_id,)
        if adds_eos and self.eos_id is not None:
            self.suffix_ids = (self.eos_id,)
        self.adds_bos = self.prefix_ids != ()
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
        # Each text between control tokens is encoded separately. In HF's legacy mode, which is also
        # NeMo's, each gets the model's dummy prefix (unless `continues_text`).
        token_ids: list[int] = []
        for part, control in self._splitter.split(check_unicode(text)):
            token_ids += model.encode(part)
            if control is not None:
                token_ids.append(control.id)
            if not self.spaces_each_text:
                model = self._continuation_model
        return token_ids

    def id_to_token(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._added_texts.get(token_id) or str(self._model.id_to_piece(token_id))

    def _decode_piece(self, token_id: int) -> Piece:
        if not 0 <= token_id < self.vocab_size or token_id in self._special_ids:
            return None
        if token_id in self._added_texts:
            return self._added_texts[token_id]
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
