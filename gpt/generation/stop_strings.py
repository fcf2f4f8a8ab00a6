"""Stop strings: incremental detokenizer that withholds text until no stop string can match it.

It withholds incomplete characters, and text that may be the beginning of a stop string. A stop
string is found across token boundaries, and is not part of the output unless requested. Server
streams and the evaluation of trained adapters both use this code.
"""

from collections.abc import Sequence

from gpt.tokenizers.tokenizer import IncrementalDetokenizer, Tokenizer


class StopStringDetokenizer:
    """Call `push` for each token, then `finish`; concatenate the returned texts.

    The text ends at the stop string that is complete first, independently of token boundaries;
    `matched_stop` is this stop string. The text of the first `unsearched_tokens` tokens is not
    searched.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        unsearched_tokens: int = 0,
        *,
        include_stop: bool = False,
    ) -> None:
        """Prepare the search; with `include_stop` the matched stop string is part of the text."""
        self._unsearched_tokens = unsearched_tokens
        self._include_stop = include_stop
        # The completion continues the prompt, so its leading space is kept.
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues_text=True)
        # An adapter's card may have an empty stop string; ignore it.
        self._matchers = [_StopStringMatcher(stop) for stop in stops if stop]
        self._pending_text = ""
        self.matched_stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.matched_stop is not None

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that can no longer be part of a stop string."""
        if self._unsearched_tokens:
            self._unsearched_tokens -= 1
            return self._detokenizer.push(token_id)
        text = self._cut_at_stop(self._detokenizer.push(token_id))
        if self.is_stopped:
            return text
        safe_length = len(text) - max(
            (search.matched_length for search in self._matchers), default=0
        )
        self._pending_text = text[safe_length:]
        return text[:safe_length]

    def finish(self) -> str:
        """Return the remaining text after the last token."""
        return "" if self.is_stopped else self._cut_at_stop(self._detokenizer.finish())

    def _cut_at_stop(self, new_text: str) -> str:
        """Return the pending text and `new_text`, up to the first stop string, if any."""
        matches = [(end, search) for search in self._matchers if (end := search.push(new_text))]
        text = self._pending_text + new_text
        if not matches:
            return text
        first_end = min(end for end, _ in matches)
        self.matched_stop = max(
            (search.stop_string for end, search in matches if end == first_end), key=len
        )
        return text[
            : len(self._pending_text)
            + first_end
            - (0 if self._include_stop else len(self.matched_stop))
        ]


class _StopStringMatcher:
    """Incremental Knuth-Morris-Pratt search for one stop string.

    The search runs on an event loop, so its cost must be linear in the text for any stop string.
    """

    def __init__(self, stop_string: str) -> None:
        assert stop_string
        self.stop_string = stop_string
        self.matched_length = 0  # Length of the longest stop-string prefix that ends the text.
        # KMP failure function: for each prefix of the stop string, the length of the longest proper
        # prefix that is also its suffix (border).
        self._border_lengths = [0]
        for character in stop_string[1:]:
            self._border_lengths.append(self._advance(self._border_lengths[-1], character))

    def push(self, text: str) -> int | None:
        """Search further text; return the index in `text` where the stop string ends, else None.

        After a match, `push` must not be called again.
        """
        for end, character in enumerate(text, 1):
            self.matched_length = self._advance(self.matched_length, character)
            if self.matched_length == len(self.stop_string):
                return end
        return None

    def _advance(self, length: int, character: str) -> int:
        while length and self.stop_string[length] != character:
            length = self._border_lengths[length - 1]
        return length + (self.stop_string[length] == character)
