"""How much longer a prompt's token makes a step, learned from the steps that were.

A line through the last steps: seconds over prompt tokens. Its slope is what a token adds, whatever
a step costs without any. It knows of no model and no device.
"""

# Each step counts this much of the one after it: the last fifty or so decide.
MEMORY = 0.98
# The slope is not believed below this part of the plain quotient: noise may turn it around.
SLOPE_MIN = 0.1


class Pace:
    def __init__(self) -> None:
        self._steps = self._tokens = self._squares = self._seconds = self._products = 0.0

    def learn(self, prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        self._steps = self._steps * MEMORY + 1
        self._tokens = self._tokens * MEMORY + prompt_tokens
        self._squares = self._squares * MEMORY + prompt_tokens * prompt_tokens
        self._seconds = self._seconds * MEMORY + seconds
        self._products = self._products * MEMORY + prompt_tokens * seconds

    @property
    def token_s(self) -> float | None:
        """Seconds that a prompt's token adds to a step; None: no prompt was seen."""
        if self._tokens < 1:
            return None
        quotient = self._seconds / self._tokens
        spread = self._steps * self._squares - self._tokens**2
        if spread <= 1e-6 * self._tokens**2:
            # Steps all alike: all of their time is put down to the tokens, which is too much.
            return self._products / self._squares
        slope = (self._steps * self._products - self._tokens * self._seconds) / spread
        return min(max(slope, SLOPE_MIN * quotient), quotient)

    def tokens_within(self, seconds: float, fewest: int) -> int:
        """Prompt tokens that make a step longer by at most so much, and no fewer than `fewest`."""
        token_s = self.token_s
        return fewest if token_s is None else max(fewest, int(min(seconds / token_s, 1e9)))
