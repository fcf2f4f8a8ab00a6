"""Bans: what one slot may not draw next, because of its rules and of what stands there already.

Each kind of ban is a mask over the vocabulary by itself, so that one that would leave nothing can
be dropped without the others. What was made is followed token by token, and can be taken up
anywhere. Knows no logits, and nothing of who else draws.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpt.sampling_params import Sampling

Mask = NDArray[np.bool_]


class Bans:
    """The masks (V,) of one slot, or None where there is nothing to ban.

    An id of `prompt` outside the vocabulary is a virtual token's: it is like no other.
    """

    def __init__(
        self, rule: Sampling, prompt: Sequence[int], made: Sequence[int], vocab_size: int
    ) -> None:
        self._vocab_size = vocab_size
        self._words = rule.bad_words
        self._tail_max = max((len(word) - 1 for word in rule.bad_words), default=0)
        self._tail = (*prompt, *made)[-self._tail_max or len(prompt) + len(made) :]
        self._allowed = ~self._mask(rule.allowed_token_ids) if rule.allowed_token_ids else None
        self._stops = self._mask(rule.stop_token_ids)
        self._left = rule.min_new_tokens - len(made)
        size = rule.no_repeat_ngram_size
        self._runs = _Runs(size, (*prompt, *made), vocab_size) if size else None

    @staticmethod
    def needed(rule: Sampling, made: int) -> bool:
        """Whether a slot with this rule has anything to ban, after so many tokens or later."""
        ever = rule.allowed_token_ids or rule.bad_words or rule.no_repeat_ngram_size
        return bool(ever) or (rule.min_new_tokens > made and bool(rule.stop_token_ids))

    def push(self, token: int) -> None:
        self._left -= 1
        if self._tail_max:
            self._tail = (*self._tail, token)[-self._tail_max :]
        if self._runs is not None:
            self._runs.push(token)

    def strangers(self) -> Mask | None:
        return self._allowed

    def words(self) -> Mask | None:
        ends = [
            word[-1]
            for word in self._words
            if self._tail[max(0, len(self._tail) - len(word) + 1) :] == word[:-1]
        ]
        return self._mask(ends) if ends else None

    def repeats(self) -> Mask | None:
        if self._runs is None or not len(ends := self._runs.ends()):
            return None
        mask = self._mask(())
        mask[ends] = True
        return mask

    def ends(self) -> Mask | None:
        return self._stops if self._left > 0 else None

    def keeps_from(self, token: int) -> bool:
        """Whether the token would end what must not end yet."""
        return self._left > 0 and bool(self._stops[token])

    def _mask(self, tokens: Iterable[int]) -> Mask:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[[token for token in tokens if 0 <= token < self._vocab_size]] = True
        return mask


class _Runs:
    """The runs of `size` tokens of a text that grows.

    They are looked for, not kept: a table of them would be as large as the text times `size`, and
    after the first comparison few places are left to look at.
    """

    def __init__(self, size: int, text: Sequence[int], vocab_size: int) -> None:
        ids = np.asarray(text, dtype=np.int64)
        self._ids = np.where(ids < vocab_size, ids, -1)
        self._size, self._length = size, len(ids)

    def push(self, token: int) -> None:
        if self._length == len(self._ids):
            more = np.zeros(max(256, self._length), dtype=np.int64)
            self._ids = np.concatenate([self._ids, more])
        self._ids[self._length] = token
        self._length += 1

    def ends(self) -> NDArray[np.int64]:
        """The last token of each run that would come again with it."""
        text, before = self._ids[: self._length], self._size - 1
        if not before:
            return text[text >= 0]
        if self._length < self._size or text[-before:].min() < 0:
            return text[:0]
        # Places of the tokens that come after one like the last, and then of fewer and fewer.
        places = before + np.flatnonzero(text[before - 1 : -1] == text[-1])
        for back in range(2, self._size):
            places = places[text[places - back] == text[-back]]
        ends = text[places]
        return ends[ends >= 0]
