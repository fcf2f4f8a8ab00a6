"""From tokens to text that will not be taken back.

Half a character is held back, and so is whatever may yet become a stop string. Stop strings are
found wherever tokens join, and nothing of them is given out unless it is asked for. A server's
streams and the answers that training measures end by the same lines. Knows no requests.
"""

from collections.abc import Sequence

from gpt.tokenizers.tokenizer import TextStream, Tokenizer


class CertainText:
    """`push` tokens, then `finish`; what they return, joined, is the text. `stopped` says why.

    The stop string that is complete first ends the text, so it does not matter how tokens cut it.
    In what the first `unsearched` tokens say none is looked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        unsearched: int = 0,
        *,
        included: bool = False,
    ) -> None:
        """`included`: the stop string that is found is part of the text."""
        self._unsearched, self._included = unsearched, included
        # The prompt stands before, so a leading space is part of the completion.
        self._stream = TextStream(tokenizer, started=True)
        # An adapter's card may have an empty one, which says nothing.
        self._searches = [_Search(stop) for stop in stops if stop]
        self._held = ""
        self.stop: str | None = None  # The one that was found.

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, token_id: int) -> str:
        if self._unsearched:
            self._unsearched -= 1
            return self._stream.push(token_id)
        text = self._until_stop(self._stream.push(token_id))
        if self.stopped:
            return text
        sure = len(text) - max((search.matched for search in self._searches), default=0)
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return "" if self.stopped else self._until_stop(self._stream.finish())

    def _until_stop(self, more: str) -> str:
        """What was held and `more`, up to the stop string in it, if there is one."""
        ends = [(end, search) for search in self._searches if (end := search.push(more))]
        text = self._held + more
        if not ends:
            return text
        first = min(end for end, _ in ends)
        self.stop = max((search.word for end, search in ends if end == first), key=len)
        return text[: len(self._held) + first - (0 if self._included else len(self.stop))]


class _Search:
    """Looks for a word in a text that comes bit by bit, as Knuth, Morris and Pratt do.

    Each character of the text is looked at once, whatever the word: this runs on an event loop.
    """

    def __init__(self, word: str) -> None:
        assert word
        self.word = word
        self.matched = 0  # How much of the word's beginning the text ends with.
        # Of each beginning of the word: how much of the word's beginning it ends with, itself not.
        self._borders = [0]
        for character in word[1:]:
            self._borders.append(self._after(self._borders[-1], character))

    def push(self, text: str) -> int | None:
        """Where in this bit of the text the word is complete; not to be asked any more then."""
        for place, character in enumerate(text, 1):
            self.matched = self._after(self.matched, character)
            if self.matched == len(self.word):
                return place
        return None

    def _after(self, matched: int, character: str) -> int:
        while matched and self.word[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.word[matched] == character)
