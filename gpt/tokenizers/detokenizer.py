"""Token ids to text, one token at a time and never half a character.

The one idea: a token is either finished text or some bytes of it, so decoding never looks back, and
a whole text and a streamed one come from the same lines. What differs between tokenizers (spaces at
the beginning, bytes that are no text) is a value, `Joining`. Knows no file and no library.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

# What a token adds to a text: finished text; bytes, perhaps of half a character; None: nothing,
# for a control token and for an id that no token has (a padded vocabulary can sample one).
Piece = str | bytes | None

# What becomes of the space that encoding put before a text. "keep": all of it. "text": the text
# loses one leading space. "mark": the first piece loses one mark. "marks": pieces lose a mark until
# there is text. "token": the first token loses all its marks.
Lead = Literal["keep", "text", "mark", "marks", "token"]

MARK = "\u2581"  # How sentencepiece writes a space inside a piece.
# One replacement character for each undecodable byte, as sentencepiece has it. Python's own
# "replace" gives one for each run that began well, as the byte-level tokenizers have it.
BYTEWISE = "preamble.bytewise"


def _bytewise(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(BYTEWISE, _bytewise)


@dataclass(frozen=True)
class Joining:
    """How the pieces of one tokenizer become text."""

    lead: Lead
    errors: str = "replace"  # The codec error handler for bytes that are no text.
    control_ends_bytes: bool = False  # Whether a control token cuts a character in two.

    @property
    def marked(self) -> bool:
        """Whether pieces still have marks for spaces, since the first of them matters."""
        return self.lead in ("mark", "marks", "token")


class Pieces(Protocol):
    joining: Joining

    def piece(self, token_id: int) -> Piece: ...


class TextStream:
    """Decodes token by token and never gives half a character.

    What `push` and at last `finish` gave, joined, is what `decode` gives for all ids at once. Bytes
    are held back only until they are a character, or certainly none.
    """

    def __init__(self, tokenizer: Pieces, *, started: bool = False) -> None:
        self._piece = tokenizer.piece
        self._joining = tokenizer.joining
        self._marked = self._joining.marked
        self._at_start = not started and self._joining.lead != "keep"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._joining.errors)
        self._held = False  # Whether _utf8 may hold the beginning of a character.

    def push(self, token_id: int) -> str:
        piece = self._piece(token_id)
        if isinstance(piece, bytes):
            self._held = True
            return self._begin(self._utf8.decode(piece))
        if piece is None and not self._joining.control_ends_bytes:
            return ""
        text = self._release()
        if piece is None:
            return self._begin(text)
        if self._marked:
            if self._at_start and not text:
                piece = self._unmark(piece)
            piece = piece.replace(MARK, " ")
        return self._begin(text + piece)

    def finish(self) -> str:
        """The rest: bytes that would have needed another token become replacement characters."""
        return self._begin(self._release())

    def _release(self) -> str:
        held, self._held = self._held, False
        return self._utf8.decode(b"", True) if held else ""

    def _unmark(self, piece: str) -> str:
        if self._joining.lead == "token":
            self._at_start = False
            return piece.replace(MARK, "")
        if piece.startswith(MARK):
            self._at_start = self._joining.lead == "marks"
            return piece[1:]
        return piece

    def _begin(self, text: str) -> str:
        if text and self._at_start:
            self._at_start = False
            if self._joining.lead == "text":
                return text.removeprefix(" ")
        return text


class Decoding:
    """What the kinds share: each token's piece is looked up once, and a whole text is streamed."""

    joining: Joining

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}

    def _look_up(self, token_id: int) -> Piece:
        raise NotImplementedError

    def piece(self, token_id: int) -> Piece:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._look_up(token_id)
        return self._pieces[token_id]

    def decode(self, ids: Iterable[int], *, started: bool = False) -> str:
        stream = TextStream(self, started=started)
        return "".join(map(stream.push, ids)) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes | None:
        piece = self.piece(token_id)
        if not isinstance(piece, str):
            return piece
        return (piece.replace(MARK, " ") if self.joining.marked else piece).encode()
