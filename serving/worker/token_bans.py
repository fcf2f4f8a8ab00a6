"""Token bans: masks for allowed ids, bad words, repeated n-grams and early stop tokens.

The bans of one slot depend on its sampling parameters and on its tokens so far. Each kind of ban is
a separate mask over the vocabulary, because the sampler skips a ban that would leave no token. The
state advances with each output token, and can be rebuilt from a sequence's tokens after a
preemption. This module is independent of logits and of other slots.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpt.sampling_params import SamplingParams

TokenMask = NDArray[np.bool_]


class TokenBans:
    """The masks (V,) of one slot; True means banned.

    A `*_mask` method returns None if it would ban no token. Prompt ids outside the vocabulary are
    virtual tokens; they match no other token.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        output_tokens: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._bad_words = sampling.bad_words
        self._last_tokens_max = max((len(word) - 1 for word in sampling.bad_words), default=0)
        self._last_tokens = (*prompt, *output_tokens)[
            -self._last_tokens_max or len(prompt) + len(output_tokens) :
        ]
        self._not_allowed = (
            ~self._mask(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        )
        self._stop_mask = self._mask(sampling.stop_token_ids)
        self._min_tokens_left = sampling.min_new_tokens - len(output_tokens)
        size = sampling.no_repeat_ngram_size
        self._repeats = (
            _RepeatedNgrams(size, (*prompt, *output_tokens), vocab_size) if size else None
        )

    @staticmethod
    def is_needed(sampling: SamplingParams, output_count: int) -> bool:
        """Whether these parameters can ban a token after `output_count` or more output tokens."""
        has_lasting_bans = (
            sampling.allowed_token_ids or sampling.bad_words or sampling.no_repeat_ngram_size
        )
        return bool(has_lasting_bans) or (
            sampling.min_new_tokens > output_count and bool(sampling.stop_token_ids)
        )

    def append(self, token: int) -> None:
        self._min_tokens_left -= 1
        if self._last_tokens_max:
            self._last_tokens = (*self._last_tokens, token)[-self._last_tokens_max :]
        if self._repeats is not None:
            self._repeats.append(token)

    def not_allowed_mask(self) -> TokenMask | None:
        return self._not_allowed

    def bad_words_mask(self) -> TokenMask | None:
        last_words = [
            word[-1]
            for word in self._bad_words
            if self._last_tokens[max(0, len(self._last_tokens) - len(word) + 1) :] == word[:-1]
        ]
        return self._mask(last_words) if last_words else None

    def repeats_mask(self) -> TokenMask | None:
        if self._repeats is None:
            return None
        repeated_tokens = self._repeats.repeated_tokens()
        if not len(repeated_tokens):
            return None
        mask = self._mask(())
        mask[repeated_tokens] = True
        return mask

    def early_stop_mask(self) -> TokenMask | None:
        return self._stop_mask if self._min_tokens_left > 0 else None

    def bans_stop_token(self, token: int) -> bool:
        """Whether `token` is a stop token and min_new_tokens is not reached."""
        return self._min_tokens_left > 0 and bool(self._stop_mask[token])

    def _mask(self, tokens: Iterable[int]) -> TokenMask:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[[token for token in tokens if 0 <= token < self._vocab_size]] = True
        return mask


class _RepeatedNgrams:
    """Finds the tokens that would repeat an n-gram of `size` tokens in a growing sequence.

    It scans the sequence at each step. The scan is cheap, because few candidate positions remain
    after one comparison; a table of n-grams would need `size` times the memory of the sequence.
    Virtual tokens have the id -1, and are in no n-gram.
    """

    def __init__(self, size: int, token_ids: Sequence[int], vocab_size: int) -> None:
        ids = np.asarray(token_ids, dtype=np.int64)
        self._ids = np.where(ids < vocab_size, ids, -1)
        self._size = size
        self._length = len(ids)

    def append(self, token: int) -> None:
        if self._length == len(self._ids):
            added_zeros = np.zeros(max(256, self._length), dtype=np.int64)
            self._ids = np.concatenate([self._ids, added_zeros])
        self._ids[self._length] = token
        self._length += 1

    def repeated_tokens(self) -> NDArray[np.int64]:
        """Return the tokens that would complete an n-gram which is already in the sequence."""
        tokens, prefix_size = self._ids[: self._length], self._size - 1
        if not prefix_size:
            return tokens[tokens >= 0]
        if self._length < self._size or tokens[-prefix_size:].min() < 0:
            return tokens[:0]
        # Candidates are the positions after a token that equals the sequence's last token. Each
        # iteration keeps the candidates for which one more preceding token matches.
        positions = prefix_size + np.flatnonzero(tokens[prefix_size - 1 : -1] == tokens[-1])
        for distance in range(2, self._size):
            positions = positions[tokens[positions - distance] == tokens[-distance]]
        next_tokens = tokens[positions]
        return next_tokens[next_tokens >= 0]
