"""Detokenizer: converts token ids to text, one token at a time, in complete characters only.

Each token is decoded to text or to bytes independently of other tokens, so the same code decodes
complete and streamed texts. `DecodingRules` describes the differences between tokenizers: leading
spaces and invalid UTF-8. The module opens no files and uses no tokenizer library.
"""

import codecs
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from gpt.tokenizers.special_tokens import ControlToken, ControlTokenSplitter

# The content of a token. str: text. bytes: UTF-8 that may begin or end within a character. None: a
# control token, or an id without a token (sampling can return a padding id of the vocabulary).
Piece = str | bytes | None

# What decoding removes at the start of a text, because encoding adds a space there. A space mark is
# the character SPACE_MARK.
# "keep": nothing.
# "text": one leading space of the text.
# "mark": the first character of the first text piece, if it is a space mark.
# "marks": a space mark at the start of each text piece, until the decoded text is not empty.
# "token": all space marks in the first text piece.
LeadingSpace = Literal["keep", "text", "mark", "marks", "token"]

SPACE_MARK = "\u2581"  # The character that stands for a space in a sentencepiece piece.
# Error handler that writes one replacement character per invalid byte, as sentencepiece does.
# Python's "replace" writes one replacement character per truncated sequence, as byte-level
# tokenizers do.
BYTEWISE_ERRORS = "preamble.bytewise"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(BYTEWISE_ERRORS, _replace_each_byte)


@dataclass(frozen=True)
class DecodingRules:
    """How the pieces of a tokenizer are joined to text."""

    leading_space: LeadingSpace
    decode_errors: str = "replace"  # Codec error handler for invalid UTF-8.
    # True: bytes of an incomplete character before a control token become replacement characters.
    # False: bytes after the control token can complete the character.
    control_ends_bytes: bool = False

    @property
    def keeps_space_marks(self) -> bool:
        """Whether text pieces contain space marks; False: the tokenizer replaced them by spaces.

        Some rules of `leading_space` remove space marks. After the detokenizer has applied such a
        rule, it replaces the remaining marks by spaces.
        """
        return self.leading_space in ("mark", "marks", "token")


class PieceDecoder(Protocol):
    decoding_rules: DecodingRules

    def piece(self, token_id: int) -> Piece: ...


class ControlTextDecoder:
    """Decodes like a tokenizer, except that a control token has its text of the vocabulary."""

    def __init__(
        self,
        tokenizer: PieceDecoder,
        token_text: Callable[[int], str],
        token_ids: Collection[int] | None = None,
    ) -> None:
        """`token_text` returns the text of a token in the vocabulary; empty for an unknown id.

        `token_ids`: the control tokens that have a text; None: all of them.
        """
        self.decoding_rules = tokenizer.decoding_rules
        self._piece = tokenizer.piece
        self._token_text = token_text
        self._token_ids = token_ids

    def piece(self, token_id: int) -> Piece:
        piece = self._piece(token_id)
        if piece is not None or not (self._token_ids is None or token_id in self._token_ids):
            return piece
        return self._token_text(token_id) or None


class IncrementalDetokenizer:
    """Decodes token by token, and returns only complete characters.

    The texts of all `push` calls and of `finish`, joined, equal `decode` of the same ids. Bytes
    stay pending until they form a character or are invalid.
    """

    def __init__(self, tokenizer: PieceDecoder, *, continues_text: bool = False) -> None:
        self._piece = tokenizer.piece
        self._rules = tokenizer.decoding_rules
        self._has_space_marks = self._rules.keeps_space_marks
        self._at_start = not continues_text and self._rules.leading_space != "keep"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._rules.decode_errors)
        self._has_pending_bytes = False  # Whether _utf8 may have an incomplete character.

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if isinstance(piece, bytes):
            self._has_pending_bytes = True
            return self._strip_leading_space(self._utf8.decode(piece))
        if piece is None and not self._rules.control_ends_bytes:
            return ""
        text = self._flush_bytes()
        if piece is None:
            return self._strip_leading_space(text)
        if self._has_space_marks:
            if self._at_start and not text:
                piece = self._strip_mark(piece)
            piece = piece.replace(SPACE_MARK, " ")
        return self._strip_leading_space(text + piece)

    def finish(self) -> str:
        """Return the remaining text; incomplete characters become replacement characters."""
        return self._strip_leading_space(self._flush_bytes())

    def _flush_bytes(self) -> str:
        has_pending_bytes, self._has_pending_bytes = self._has_pending_bytes, False
        return self._utf8.decode(b"", True) if has_pending_bytes else ""

    def _strip_mark(self, piece: str) -> str:
        if self._rules.leading_space == "token":
            self._at_start = False
            return piece.replace(SPACE_MARK, "")
        if piece.startswith(SPACE_MARK):
            self._at_start = self._rules.leading_space == "marks"
            return piece[1:]
        return piece

    def _strip_leading_space(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            if self._rules.leading_space == "text":
                return text.removeprefix(" ")
        return text


class TokenizerBase:
    """Base class of tokenizers: caches pieces, and implements `decode` by the detokenizer."""

    decoding_rules: DecodingRules
    control_tokens: Mapping[str, ControlToken]

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}

    @cached_property
    def control_splitter(self) -> ControlTokenSplitter:
        return ControlTokenSplitter(self.control_tokens)

    @cached_property
    def continues_after_control(self) -> bool:
        """Whether "a" after a control token is encoded differently than "a" alone.

        If so, the tokenizer adds a leading space only at the start of a text, not after a control
        token.
        """
        if not self.control_tokens:
            return False
        control = min(self.control_tokens, key=len)
        return self.encode(f"{control}a", allow_special=True)[1:] != self.encode("a")

    def encode(
        self, text: str, *, allow_special: bool = False, continues_text: bool = False
    ) -> list[int]:
        raise NotImplementedError

    def _decode_piece(self, token_id: int) -> Piece:
        raise NotImplementedError

    def piece(self, token_id: int) -> Piece:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode_piece(token_id)
        return self._pieces[token_id]

    def decode(self, ids: Iterable[int], *, continues_text: bool = False) -> str:
        stream = IncrementalDetokenizer(self, continues_text=continues_text)
        return "".join(map(stream.push, ids)) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes | None:
        piece = self.piece(token_id)
        if not isinstance(piece, str):
            return piece
        if self.decoding_rules.keeps_space_marks:
            piece = piece.replace(SPACE_MARK, " ")
        return piece.encode()
