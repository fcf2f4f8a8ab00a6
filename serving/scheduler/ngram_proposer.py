"""What a sequence may say next, guessed from what it has said: a run that it repeats goes on alike.

The longest end of its tokens that stood somewhere before names the tokens that followed there. How
many of them are worth a row of a step each is learned from how many were right. A guess changes no
answer: it is verified, and what is wrong costs its row. It knows no step and no memory.
"""

from array import array

# So many tokens at least, and so many at most, must have stood before.
RUN_MIN, RUN_MAX = 2, 4
# Places that are looked at for the longest run, the last ones first.
PLACES_MAX = 8
# Tokens that one look takes in: a long prompt is read over some steps, so that none of them waits.
READ_MAX = 1024
# A guess is worth its row if it is right at least this often; after so many looks without one, one
# is tried again.
RATE_MIN, REST_LOOKS = 0.3, 32
# What a sequence is trusted with before anything is known, and what each guess counts.
RATE_START, RATE_STEP = 0.6, 0.2


class Guesses:
    """Of one sequence. Virtual tokens, those from `vocab_size` on, neither match nor are guessed.

    It looks at the list of tokens that it is given, which only grows.
    """

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self._tokens, self._vocab_size = tokens, vocab_size
        # Where each pair of tokens ended last; and for the end of a pair, where it did before.
        self._last: dict[int, int] = {}
        self._before = array("q")
        self._rest = REST_LOOKS
        self.rate = RATE_START  # Of guesses that are right, as far as it was tried.

    def next(self, most: int) -> list[int]:
        """At most so many tokens, if it is likely enough that they come."""
        tokens = self._tokens
        if most <= 0 or not self._read():
            return []
        place = self._place()
        count = self._worth(most) if place else 0
        guess: list[int] = []
        for step in range(count):
            # A run that reaches its own end goes on with itself.
            at = place + step
            token = tokens[at] if at < len(tokens) else guess[at - len(tokens)]
            if token >= self._vocab_size:
                break
            guess.append(token)
        return guess

    def learn(self, guessed: int, right: int) -> None:
        """So many of the last guess were right; of those behind the first wrong one none counts."""
        for _ in range(right):
            self.rate += RATE_STEP * (1 - self.rate)
        if right < guessed:
            self.rate -= RATE_STEP * self.rate

    def _worth(self, most: int) -> int:
        """How many: if each is right with `rate`, the last of them is with RATE_MIN."""
        count, chance = 0, self.rate
        while count < most and chance >= RATE_MIN:
            count, chance = count + 1, chance * self.rate
        if count == 0:
            self._rest -= 1
            if self._rest <= 0:
                self._rest, count = REST_LOOKS, 1
        return count

    def _read(self) -> bool:
        """Take in tokens that are followed by another; whether all are."""
        tokens, last, before = self._tokens, self._last, self._before
        end = len(tokens) - 1
        for at in range(len(before), min(end, len(before) + READ_MAX)):
            pair = self._pair(at)
            before.append(last.get(pair, 0) if pair >= 0 else 0)
            if pair >= 0:
                last[pair] = at
        return len(before) >= end > 0

    def _pair(self, at: int) -> int:
        """A number for the tokens at `at` and before it; -1: one is virtual, or there is none."""
        first, second = self._tokens[at - 1], self._tokens[at]
        if at == 0 or max(first, second) >= self._vocab_size:
            return -1
        return first * self._vocab_size + second

    def _alike(self, one: int, other: int) -> bool:
        return self._tokens[one] == self._tokens[other] < self._vocab_size

    def _place(self) -> int:
        """Where what may follow the last tokens begins; 0: nothing like them stood before."""
        tokens = self._tokens
        end = len(tokens) - 1
        at = self._last.get(self._pair(end), 0)
        best, place = 0, 0
        for _ in range(PLACES_MAX):
            if at == 0:
                break
            run = RUN_MIN
            while run < RUN_MAX and run <= at and self._alike(at - run, end - run):
                run += 1
            if run > best:
                best, place = run, at + 1
            if run == RUN_MAX:
                break
            at = self._before[at]
        return place
