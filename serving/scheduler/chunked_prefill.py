"""Chunked prefill: the number of prompt tokens that one step computes, and the chunk boundaries.

A prompt is computed over several steps, so that it does not stall the sequences that decode in the
same steps. `PrefillTokenBudget` bounds the time that the prefill tokens of a step add to the step.
`PrefillCostModel` estimates this time. It fits a line, seconds = intercept + slope * prompt tokens,
to the recent steps by least squares: the slope is the time that one prefill token adds. The
scheduler chooses the sequences; this module is independent of sequences, models and devices.
"""

# Weight of a step relative to the next one: about the last fifty steps determine the fit.
DECAY = 0.98
# Lower bound of the slope, as a fraction of total seconds / total tokens. Without this bound, noise
# could make the slope negative.
SLOPE_RATIO_MIN = 0.1


class PrefillCostModel:
    """Least-squares fit with exponential decay: five weighted sums over steps."""

    def __init__(self) -> None:
        self._steps = self._tokens = self._squares = self._seconds = self._products = 0.0

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        self._steps = self._steps * DECAY + 1
        self._tokens = self._tokens * DECAY + prompt_tokens
        self._squares = self._squares * DECAY + prompt_tokens * prompt_tokens
        self._seconds = self._seconds * DECAY + seconds
        self._products = self._products * DECAY + prompt_tokens * seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds that one prefill token adds to a step; None: no prefill was recorded."""
        if self._tokens < 1:
            return None
        quotient = self._seconds / self._tokens
        variance = self._steps * self._squares - self._tokens**2
        if variance <= 1e-6 * self._tokens**2:
            # All steps have nearly the same token count, so no slope can be fitted. The whole time
            # of the steps is attributed to their prompt tokens, which overestimates the cost.
            return self._products / self._squares
        slope = (self._steps * self._products - self._tokens * self._seconds) / variance
        return min(max(slope, SLOPE_RATIO_MIN * quotient), quotient)

    def tokens_within(self, seconds: float, tokens_min: int) -> int:
        """Maximum number of prefill tokens that make a step at most `seconds` longer.

        The number is never below `tokens_min`. If no prefill was recorded, it is `tokens_min`.
        """
        seconds_per_token = self.seconds_per_token
        return (
            tokens_min
            if seconds_per_token is None
            else max(tokens_min, int(min(seconds / seconds_per_token, 1e9)))
        )


class PrefillTokenBudget:
    """Converts the stall limit from seconds to prefill tokens.

    `stall_s_max`: the seconds that prefill may add to a step with decodes. The stall limit is never
    below one block (`block_tokens`), so that prefill always makes progress.
    """

    def __init__(self, stall_s_max: float, block_tokens: int) -> None:
        self._stall_s_max = stall_s_max
        self._block_tokens = block_tokens
        self._cost = PrefillCostModel()

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a completed step with this number of prefill tokens."""
        self._cost.record_step(prompt_tokens, seconds)

    def limit_tokens(self, tokens: int, first_tokens_pending: int) -> int:
        """The number of tokens, out of `tokens`, that prefill may use within the stall limit.

        `first_tokens_pending`: the number of sequences that need their first token. The stall limit
        is multiplied by this number, but at least by 1.
        """
        stall_s = self._stall_s_max * max(1, first_tokens_pending)
        return min(tokens, self._cost.tokens_within(stall_s, self._block_tokens))


def chunk_end(past: int, tokens_max: int, prefill_target: int, block_tokens: int) -> int:
    """End of the prefill chunk that begins at `past` and has at most `tokens_max` tokens.

    `prefill_target`: the position where the prefill ends. A chunk that ends earlier is cut at the
    last block boundary inside it, if there is one, so that all of its blocks can be published.
    """
    end = min(past + tokens_max, prefill_target)
    if end < prefill_target:
        boundary = end // block_tokens * block_tokens
        if boundary > past:
            return boundary
    return end
