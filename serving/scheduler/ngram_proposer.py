"""N-gram speculative decoding: proposes tokens that followed an earlier copy of the last tokens.

The proposer finds the longest suffix of a sequence's tokens that also occurs earlier; the tokens
after the earlier occurrence are the draft. The number of draft tokens depends on the acceptance
rate so far. A draft changes no output: the model verifies it, and a rejected draft token costs only
its computation in the step. This module is independent of steps and KV blocks.
"""

from array import array

# Shortest and longest suffix (n-gram) that is matched, in tokens.
NGRAM_MIN, NGRAM_MAX = 2, 4
# Number of earlier positions that are compared for the longest match, the latest first.
CANDIDATES_MAX = 8
# Tokens indexed per proposal. A long prompt is indexed over several steps, so that no step is slow.
INDEXED_TOKENS_MAX = 1024
# A draft token is proposed if its acceptance probability is at least ACCEPTANCE_MIN. After
# PROBE_INTERVAL matches without a proposal, one token is proposed to measure the rate again.
ACCEPTANCE_MIN, PROBE_INTERVAL = 0.3, 32
# Acceptance rate of a new sequence, and the weight of each verified token in the moving average.
ACCEPTANCE_START, ACCEPTANCE_STEP = 0.6, 0.2


class NgramProposer:
    """Proposes draft tokens for one sequence.

    `tokens` is the list of the sequence itself, not a copy; it only grows. Virtual tokens
    (ids >= `vocab_size`) never match and are never proposed.
    """

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        # By bigram: the end position (position of the second token) of its latest occurrence.
        self._last_position: dict[int, int] = {}
        # By end position of a bigram: the end position of its previous occurrence; 0: none.
        self._previous_position = array("q")
        self._skips_left = PROBE_INTERVAL  # Matches until one token is proposed as a probe.
        # Moving average of (accepted draft tokens) / (verified draft tokens).
        self.acceptance_rate = ACCEPTANCE_START

    def propose(self, tokens_max: int) -> list[int]:
        """Draft tokens, at most `tokens_max`; none if nothing matches or acceptance is unlikely."""
        tokens = self._tokens
        if tokens_max <= 0 or not self._index_tokens():
            return []
        start = self._find_continuation()
        count = self._draft_length(tokens_max) if start else 0
        draft: list[int] = []
        for offset in range(count):
            # After the sequence's last token, the continuation goes on with the draft's tokens.
            position = start + offset
            token = tokens[position] if position < len(tokens) else draft[position - len(tokens)]
            if token >= self._vocab_size:
                break
            draft.append(token)
        return draft

    def record_acceptance(self, proposed_count: int, accepted_count: int) -> None:
        """Update the acceptance rate; tokens after the first rejected one do not count."""
        for _ in range(accepted_count):
            self.acceptance_rate += ACCEPTANCE_STEP * (1 - self.acceptance_rate)
        if accepted_count < proposed_count:
            self.acceptance_rate -= ACCEPTANCE_STEP * self.acceptance_rate

    def _draft_length(self, tokens_max: int) -> int:
        """The length of the longest draft that is likely enough to be accepted.

        The last token of such a draft is accepted with a probability of at least ACCEPTANCE_MIN. If
        there is no such draft, the length is 0, but every PROBE_INTERVAL-th time it is 1 (a probe).
        """
        count, probability = 0, self.acceptance_rate
        while count < tokens_max and probability >= ACCEPTANCE_MIN:
            count, probability = count + 1, probability * self.acceptance_rate
        if count == 0:
            self._skips_left -= 1
            if self._skips_left <= 0:
                self._skips_left, count = PROBE_INTERVAL, 1
        return count

    def _index_tokens(self) -> bool:
        """Index up to INDEXED_TOKENS_MAX more tokens; returns whether all are indexed.

        The last token is not indexed, because no token follows it yet.
        """
        tokens = self._tokens
        last_position = self._last_position
        previous_position = self._previous_position
        end = len(tokens) - 1
        for position in range(
            len(previous_position), min(end, len(previous_position) + INDEXED_TOKENS_MAX)
        ):
            pair = self._bigram_key(position)
            previous_position.append(last_position.get(pair, 0) if pair >= 0 else 0)
            if pair >= 0:
                last_position[pair] = position
        return len(previous_position) >= end > 0

    def _bigram_key(self, position: int) -> int:
        """A number for the bigram that ends at `position`; -1: position 0, or a virtual token."""
        first, second = self._tokens[position - 1], self._tokens[position]
        if position == 0 or max(first, second) >= self._vocab_size:
            return -1
        return first * self._vocab_size + second

    def _tokens_match(self, left: int, right: int) -> bool:
        return self._tokens[left] == self._tokens[right] < self._vocab_size

    def _find_continuation(self) -> int:
        """The position after the longest earlier match of the last tokens; 0: there is no match.

        Of equally long matches, the latest is chosen.
        """
        tokens = self._tokens
        end = len(tokens) - 1
        position = self._last_position.get(self._bigram_key(end), 0)
        longest, start = 0, 0
        for _ in range(CANDIDATES_MAX):
            if position == 0:
                break
            length = NGRAM_MIN
            while (
                length < NGRAM_MAX
                and length <= position
                and self._tokens_match(position - length, end - length)
            ):
                length += 1
            if length > longest:
                longest, start = length, position + 1
            if length == NGRAM_MAX:
                break
            position = self._previous_position[position]
        return start
