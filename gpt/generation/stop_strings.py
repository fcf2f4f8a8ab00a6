"""Stop strings: incremental detokenizer that withholds text until no stop string can match it.

The detokenizer withholds incomplete characters, and text at the end that may be the beginning of a
stop string. It finds stop strings across token boundaries. The server's streams and the evaluation
of trained adapters use `StopStringDetokenizer`.
"""

from collections.abc import Sequence

from gpt.tokenizers.detokenizer import IncrementalDetokenizer, PieceDecoder


class StopStringDetokenizer:
    """Incremental detokenizer: call `push` for each token, then `finish`; join the returned texts.

    The text ends at the stop string that is complete first; `matched_stop` is this string. The text
    of the first `unsearched_tokens` tokens is not searched.
    """

    def __init__(
        self,
        tokenizer: PieceDecoder,
        stops: Sequence[str],
        unsearched_tokens: int = 0,
        *,
        include_stop: bool = False,
    ) -> None:
        """`include_stop`: whether the matched stop string is part of the returned text.

        `token_texts`: texts of special tokens that are part of the text.
        """
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
            return self._detokenize(token_id)
        text = self._cut_at_stop(self._detokenize(token_id))
        if self.is_stopped:
            return text
        # If the text ends with the beginning of a stop string, this beginning is withheld.
        safe_length = len(text) - max(
            (matcher.matched_length for matcher in self._matchers), default=0
        )
        self._pending_text = text[safe_length:]
        return text[:safe_length]

    def finish(self) -> str:
        """Return the remaining text after the last token."""
        return "" if self.is_stopped else self._cut_at_stop(self._detokenizer.finish())

    def _detokenize(self, token_id: int) -> str:
        return self._detokenizer.push(token_id)

    def _cut_at_stop(self, new_text: str) -> str:
        """Return the pending text and `new_text`, up to the first stop string, if any."""
        matches = []
        for matcher in self._matchers:
            end = matcher.push(new_text)
            if end is not None:
                matches.append((end, matcher.stop_string))
        text = self._pending_text + new_text
        if not matches:
            return text
        first_end = min(end for end, _ in matches)
        self.matched_stop = max((stop for end, stop in matches if end == first_end), key=len)
        text_end = len(self._pending_text) + first_end
        if not self._include_stop:
            text_end -= len(self.matched_stop)
        return text[:text_end]


class _StopStringMatcher:
    """Incremental Knuth-Morris-Pratt search for one stop string.

    The server searches on its event loop, so the cost must be linear in the length of the text for
    any stop string.
    """

    def __init__(self, stop_string: str) -> None:
        assert stop_string
        self.stop_string = stop_string
        # Length of the longest beginning of the stop string with which the text so far ends.
        self.matched_length = 0
        # The KMP failure function. A border of a string is a proper prefix that is also a suffix.
        # For each prefix of the stop string: the length of its longest border.
        self._border_lengths = [0]
        for character in stop_string[1:]:
            self._border_lengths.append(self._advance(self._border_lengths[-1], character))

    def push(self, text: str) -> int | None:
        """Continue the search in `text`; return the index in `text` after the stop string.

        Return None without a match. `push` must not be called again after a match.
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
