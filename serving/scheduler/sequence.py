"""One sequence on its way: its tokens, how many of them have keys and values, and its standing.

Counts only go up, until it loses its place: then it starts again with the tokens that it has made,
and those come to the same. It decides nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from serving.messages import End, Phases, Scored, Submission
from serving.scheduler.ngram_proposer import Guesses

# So many levels of waiting turn the throughput class into the latency class.
LEVELS_TO_LATENCY = 6

Standing = tuple[bool, int, int]


@dataclass(slots=True, eq=False)
class Sequence:
    submission: Submission
    order: int  # Of arrival.
    tokens: list[int]  # The prompt, and what was made.
    prompt: int  # How many of them are the prompt.
    most: int  # Tokens of both at most.
    latency: bool
    queued_at: float  # When it last began to wait.
    waited_s: float = 0.0  # Before that, and once it runs, in all.
    came_at: float = 0.0  # When it was first heard of,
    aside_s: float = 0.0  # and how long it took from then until it was queued.

    # What of it is virtual: the first position, and the one after the last.
    virtual_start: int = 0
    virtual_end: int = 0
    adapter: bytes = b""  # What stands for the adapter in keys.

    # Keys of whole blocks; of parts of blocks, by the block's place: (position, key).
    keys: list[bytes] = field(default_factory=list)
    tails: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)

    slot: int = -1  # -1: it waits.
    parked: bool = False  # It waits for what another computes.
    table: list[int] = field(default_factory=list)
    goal: int = (
        0  # Tokens that it had when it was admitted: until these are planned, it is a prompt.
    )
    planned: int = 0  # Tokens whose keys and values are there, or will be by the steps in flight.
    computed: int = 0  # Those of steps that are over.
    flights: int = 0  # Steps in flight with it.
    filled: int = 0  # Tokens of a prefix that the first of these finds written before it.
    planned_at: float = 0.0
    rows_start: int = (
        -1
    )  # Where its adapter lies in the pool, while it must stay there; -1: no need.

    guesses: Guesses | None = None  # None: what comes next is not guessed.
    guess: list[int] = field(default_factory=list)  # Behind its last token, in a step in flight.

    scored: int = 0  # Prompt tokens whose scores have been told, or are not wanted.
    cached: int = -1  # Prompt tokens that were in the prefix cache; -1: it never ran.
    told: bool = False  # Whether `cached` was, and its phases.
    ending: End | None = None  # It ends as soon as no step has it.
    reason: str = ""
    over: bool = False  # Its end was told, though a step has it that nobody needs.
    poisoned: bool = False  # What it wrote after `computed` may not be finite.

    @property
    def number(self) -> int:
        return self.submission.number

    @property
    def waits(self) -> bool:
        return self.slot < 0

    def phases(self, now: float) -> Phases:
        """Where its time went until now; it runs."""
        queue_s = self.aside_s + self.waited_s
        return Phases(queue_s, max(0.0, now - self.came_at - queue_s))

    @property
    def unfilled(self) -> int:
        """Tokens of its prefix whose keys and values are not there yet, and are not computed."""
        rows = self.submission.rows
        return max(0, rows.count - self.planned) if rows is not None and rows.prefix else 0

    @property
    def match_max(self) -> int:
        """Tokens that may come from the cache: one is computed for its logits, scored ones all."""
        if self.scored < self.prompt:
            return max(0, self.scored - 1)  # A token's score comes from the row before it.
        return len(self.tokens) - 1

    @property
    def kv_most(self) -> int:
        """Tokens that ever need keys and values: the last one made does not."""
        return max(self.prompt, self.most - 1)

    @property
    def guess_max(self) -> int:
        """So many may be guessed that one more token may be drawn behind them."""
        return self.most - len(self.tokens) - 1

    def accept(self, drawn: list[int]) -> list[int]:
        """What was drawn behind its last token and behind each guess: as much as holds of it.

        The first one always does. The next one does if the guess that it was drawn behind is what
        was drawn before it, so that nothing is told that would not have come without guesses.
        """
        guess, self.guess = self.guess, []
        stops, kept = self.submission.sampling.stop_token_ids, list[int]()
        for place, token in enumerate(drawn):
            kept.append(token)
            if token in stops:
                self.ending = "stop"
            elif len(self.tokens) + len(kept) == self.most:
                self.ending = "length"
            if self.ending is not None or guess[place : place + 1] != [token]:
                break
        self.tokens += kept
        if guess and self.guesses is not None:
            self.guesses.learn(len(guess), len(kept) - 1)
        return kept

    def news(self, told: list[Scored], past: int, vocab_size: int) -> list[Scored | None]:
        """Scores of its prompt that are news: row `past + i` has scored the token after it.

        A prefix has no rows, so what follows it has no score.
        """
        fresh: list[Scored | None] = [None] if self.scored == 0 else []
        start = max(self.scored, 1)
        for position in range(start, min(self.computed, self.prompt - 1) + 1):
            virtual = self.tokens[position] >= vocab_size
            fresh.append(None if virtual or position <= past else told[position - 1 - past])
        self.scored += len(fresh)
        return fresh

    def level(self, now: float, age_s: float) -> int:
        """Levels that it gained by waiting."""
        waited = self.waited_s + (now - self.queued_at if self.waits else 0.0)
        return int(waited / age_s)

    def standing(self, age_s: float) -> Standing:
        """Of one that runs: the lowest is the first to lose its place. Fixed while it runs."""
        level = int(self.waited_s / age_s)
        urgent = self.latency or level >= LEVELS_TO_LATENCY
        return urgent, self.submission.priority + level, -self.order

    def boundaries(self, vocab_size: int) -> Iterator[int]:
        """Where others may part from this prompt: ends of virtual runs, and its last token; and
        where one that is scored from some token on needs the row before that.

        One that asks for a single token may be gone on from where it ends: so do beams.
        """
        last = self.prompt - 1
        if self.virtual_end:
            before = False
            for position in range(self.virtual_start, self.virtual_end + 1):
                virtual = position < self.prompt and self.tokens[position] >= vocab_size
                if virtual != before and 0 < position < last:
                    yield position
                before = virtual
        if 1 < self.submission.unscored < last:
            yield self.submission.unscored - 1
        if last > 0:
            yield last
        if self.most == self.prompt + 1:
            yield self.prompt
