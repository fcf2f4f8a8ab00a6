"""From tokens to text that will not be taken back.

Half a character is held back, and so is whatever may yet become a stop string. Stop strings are
found wherever tokens join, and nothing of them is given out. Knows no requests and no streams.
"""

from collections.abc import Sequence

from gpt.tokenizer import TextStream, Tokenizer


class CertainText:
    """`push` tokens, then `finish`; what they return, joined, is the text. `stopped` says why."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        # The prompt stands before, so a leading space is part of the completion.
        self._stream = TextStream(tokenizer, started=True)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        self._held += self._stream.push(token_id)
        text = self._until_stop()
        if self.stopped:
            return text
        sure = len(text) - self._perhaps_stop()
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        self._held += self._stream.finish()
        return self._until_stop()

    def _until_stop(self) -> str:
        """The text held, up to the first stop string in it."""
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        return self._held[: min(found)] if found else self._held

    def _perhaps_stop(self) -> int:
        """How many characters at the end are the beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )
