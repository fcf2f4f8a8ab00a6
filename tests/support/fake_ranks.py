"""Ranks without a model: they obey steps, and hold every read of the KV pool against the prefix.

What a place of a block holds is a hash of all tokens up to its own, and of the tenant. So a block
that is shared wrongly, copied stale or used after it was given away is seen when it is read.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import (
    AdapterRef,
    Outcome,
    Phases,
    PrefixKVWrite,
    SequenceOutput,
    Step,
    Submission,
    TokenScore,
)
from serving.scheduler.scheduler import Scheduler

VOCAB_SIZE = 50
NOT_FINITE = -1
CLEARED = -2
Identity = int | tuple[str, int]


def identity(submission: Submission, token: int) -> Identity:
    if token < VOCAB_SIZE:
        return token
    assert submission.adapter_ref is not None
    return submission.adapter_ref.digest, token - VOCAB_SIZE


def named(word: str) -> int:
    """The same in every process, which a string's hash is not."""
    return crc32(word.encode())


def chained(before: int, token: Identity) -> int:
    known = token if isinstance(token, int) else (named(token[0]), token[1])
    return hash((before, known)) & 0x7FFFFFFFFFFFFFFF


def prefixed(digest: str, row: int) -> int:
    """What lies where a prefix's token is, whoever has it."""
    return hash((named(digest), row))


def drawn(state: int, seed: int, position: int) -> int:
    """The token after a prefix with this hash: often one that can be guessed."""
    chance = hash((state, seed, position))
    return chance // 8 % VOCAB_SIZE if chance % 8 == 0 else position % 2


def score(state: int, target: int) -> float:
    return float(hash((state, target)) % 1000)


@dataclass
class Alone:
    """What a submission comes to if nothing else is there."""

    submission: Submission
    states: list[int] = field(default_factory=list)  # The hash after each token.
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        one = self.submission
        self.states += [
            prefixed(one.adapter_ref.digest, row) for row in range(self.prefix) if one.adapter_ref
        ]
        state = hash((named(one.tenant), self.states[-1] if self.states else 0))
        for token in one.prompt[self.prefix :]:
            state = chained(state, identity(one, token))
            self.states.append(state)
        sampling = one.sampling
        while len(self.tokens) < sampling.max_new_tokens:
            token = drawn(state, sampling.seed, len(self.states))
            self.tokens.append(token)
            state = chained(state, token)
            self.states.append(state)
            if token in sampling.stop_token_ids:
                break

    @property
    def prefix(self) -> int:
        """Tokens whose keys and values come from a table."""
        rows = self.submission.adapter_ref
        return rows.row_count if rows is not None and rows.is_prefix else 0

    @property
    def end(self) -> str:
        if not self.submission.sampling.max_new_tokens:
            return "scored"
        return "stop" if self.tokens[-1] in self.submission.sampling.stop_token_ids else "length"

    @property
    def prompt_scores(self) -> list[TokenScore | None]:
        prompt = self.submission.prompt
        after = zip(self.states, prompt[1:], strict=False)
        found = [
            TokenScore(score(state, target)) if target < VOCAB_SIZE else None
            for state, target in after
        ]
        if self.prefix:  # Nothing is computed before what follows it.
            found[self.prefix - 1] = None
        return [None, *found]


@dataclass
class _Slot:
    alone: Alone
    table: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)  # Of the last step,
    states: list[int] = field(default_factory=list)  # and the hash after each token up to its end.


class Ranks:
    """Runs steps. `breaks(number)` says whether a sequence's numbers are not finite this time.

    A submission's seed is its number, so that a slot's `Begin` tells whose it is.
    """

    def __init__(self, blocks: int, size: int, breaks: Callable[[int], bool]) -> None:
        self.memory = [[CLEARED] * size for _ in range(blocks)]
        self.size = size
        self.rows: dict[int, tuple[str, int]] = {}
        self.counts: dict[str, int] = {}
        self.slots: dict[int, _Slot] = {}
        self.alone: dict[int, Alone] = {}
        self._breaks = breaks
        self.computed: dict[int, int] = {}  # Tokens of each submission that were run.
        self.decodes = self.prompt_tokens = self.guessed = self.right = self.filled = 0

    def know(self, submission: Submission) -> Alone:
        alone = self.alone[submission.sequence_id] = Alone(submission)
        if submission.adapter_ref and not submission.adapter_ref.is_prefix:
            self.counts[submission.adapter_ref.digest] = submission.adapter_ref.row_count
        return alone

    def run(self, step: Step) -> Outcome:
        self._prepare(step)
        places = range(len(step.slots))
        assert len(set(step.slots)) == len(step.slots), "a slot is twice in a step"
        ids = iter(step.token_ids)
        broken, tokens, prompt_scores = [], [], []
        for place in places:
            count = step.lengths[place]
            known = [next(ids) for _ in range(count)]
            made = self.slots[step.slots[place]].made
            if self._write(step, place, [made[-1] if token == -1 else token for token in known]):
                broken.append(place)
        assert next(ids, None) is None, "ids without a sequence"
        for place in places:
            if place not in broken:
                self._read(step, place)
            slot, end = self.slots[step.slots[place]], step.past[place] + step.lengths[place]
            one, states = slot.alone.submission, slot.states
            if step.draws[place]:
                first = end - (step.draft_counts[place] if step.draft_counts else 0)
                draws = [drawn(states[p - 1], one.sampling.seed, p) for p in range(first, end + 1)]
                tokens += draws
                self._accept(slot, draws, slot.guess)
            if step.prompt_score_counts[place]:
                prompt_scores.append(
                    [
                        TokenScore(score(states[row], one.prompt[row + 1]))
                        for row in range(
                            step.past[place], step.past[place] + step.prompt_score_counts[place]
                        )
                    ]
                )
        return Outcome(
            step.step_id,
            tokens,
            [TokenScore(float(token)) for token in tokens],
            prompt_scores,
            broken,
            seconds=0.01 + 0.0001 * len(step.token_ids),
        )

    def _accept(self, slot: _Slot, draws: list[int], guess: list[int]) -> None:
        """As the scheduler is to do it: up to the first guess that is wrong."""
        right = [mine == theirs for mine, theirs in zip(draws, guess, strict=False)]
        count = right.index(False) if False in right else len(right)
        slot.made += draws[: count + 1]
        self.guessed, self.right = self.guessed + len(guess), self.right + count

    def _prepare(self, step: Step) -> None:
        for block in step.block_clears:
            self.memory[block] = [CLEARED] * self.size
        read = [list(self.memory[source]) for source, _ in step.block_copies]
        for (_, target), content in zip(step.block_copies, read, strict=True):
            assert target != 0, "block 0 is written"
            self.memory[target] = content
        for rewrite in step.adapter_writes:
            for row in range(self.counts[rewrite.digest]):
                self.rows[rewrite.start + row] = (rewrite.digest, row)
        for fill in step.prefix_writes:
            self._fill(fill)
        for begin in step.slot_inits:
            slot = self.slots[begin.slot] = _Slot(self.alone[begin.sampling.seed])
            slot.made = list(begin.output_tokens)
            one = slot.alone.submission
            assert begin.prompt == [t if t < VOCAB_SIZE else -1 for t in one.prompt]
            assert begin.output_tokens == slot.alone.tokens[: len(begin.output_tokens)]
        for table in step.block_table_updates:
            slot = self.slots[table.slot]
            assert table.start == len(slot.table) and table.blocks, "a table with a hole"
            assert 0 not in table.blocks, "block 0 is given out"
            slot.table += table.blocks

    def _fill(self, fill: PrefixKVWrite) -> None:
        first = fill.start // self.size
        assert len(fill.blocks) == -(-(fill.start + fill.count) // self.size) - first
        assert fill.count > 0 and 0 not in fill.blocks
        for row in range(fill.start, fill.start + fill.count):
            block = self.memory[fill.blocks[row // self.size - first]]
            block[row % self.size] = prefixed(fill.digest, row)
        self.filled += fill.count

    def _write(self, step: Step, place: int, ids: list[int]) -> bool:
        slot, past = self.slots[step.slots[place]], step.past[place]
        one, alone = slot.alone.submission, slot.alone
        guesses = step.draft_counts[place] if step.draft_counts else 0
        assert past >= alone.prefix, "a prefix is computed"
        end = past + len(ids)
        known = end - guesses
        whole = [*one.prompt, *alone.tokens]
        expected = [identity(one, token) for token in whole[past:known]]
        found = [t if t < VOCAB_SIZE else self.rows[t - VOCAB_SIZE] for t in ids]
        slot.guess, found = ids[len(expected) :], found[: len(expected)]
        assert found == expected, "the ids of another sequence, or rows of another adapter"
        slot.states = alone.states[:known]
        for token in slot.guess:
            assert 0 <= token < VOCAB_SIZE, "a virtual token is guessed"
            slot.states.append(chained(slot.states[-1], token))
        draws = known == len(one.prompt) + len(slot.made) and one.sampling.max_new_tokens > 0
        assert step.draws[place] == draws
        most = len(one.prompt) + one.sampling.max_new_tokens
        assert not guesses or (draws and known == past + 1 and end < most), "a guess too many"
        wants = one.sampling.prompt_logprobs is not None and not one.output_tokens
        assert wants or not step.prompt_score_counts[place]
        self.computed[one.sequence_id] = self.computed.get(one.sequence_id, 0) + len(ids)
        if past >= len(one.prompt):
            self.decodes += 1
        else:
            self.prompt_tokens += len(ids)
        behind = [self.memory[block] for block in slot.table[: -(-end // self.size)]]
        broken = self._breaks(one.sequence_id) or any(
            NOT_FINITE in block[: max(0, min(self.size, past - at * self.size))]
            for at, block in enumerate(behind)
        )
        for position in range(past, end):
            block = self.memory[slot.table[position // self.size]]
            block[position % self.size] = NOT_FINITE if broken else slot.states[position]
        return broken

    def _read(self, step: Step, place: int) -> None:
        """All that attention looks at is of this very prefix, and what it masks is finite."""
        slot, size = self.slots[step.slots[place]], self.size
        end = step.past[place] + step.lengths[place]
        states = slot.states
        for at in range(-(-end // size)):
            block = self.memory[slot.table[at]]
            expected = states[at * size : min(end, (at + 1) * size)]
            assert block[: len(expected)] == expected, "keys and values of another prefix"
            assert NOT_FINITE not in block, "what is not finite lies behind a sequence's end"


class Play:
    """A scheduler, its ranks and its callers; outcomes come back `stages` steps later at most."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        stages: int = 1,
        context: int = 10_000,
        fill_tokens_max: int = 256,
        breaks: Callable[[int], bool] = lambda number: False,
        **config: object,
    ) -> None:
        settings = {"model": "", "kv_block_tokens": 4, "step_tokens_max": 16, **config}
        settings.setdefault("running_requests_max", settings["step_tokens_max"])
        self.config = ServerConfig(**settings)  # type: ignore[arg-type]
        self.stages = stages
        ahead = stages == 1 and self.config.uses_async_scheduling("cpu")
        self.depth = stages + ahead
        self.early = 0  # Steps that were planned before what they follow was known.
        self.scheduler = Scheduler(
            vocab_size=VOCAB_SIZE,
            blocks=blocks,
            scheduler_config=self.config.scheduler_config,
            cache_config=self.config.cache_config,
            context_tokens_max=context,
            stages=stages,
            prefix_write_tokens_max=fill_tokens_max,
            async_scheduling=ahead,
        )
        self.fill_tokens_max = fill_tokens_max
        self.ranks = Ranks(blocks, self.config.cache_config.kv_block_tokens, breaks)
        self.now = 0.0
        self.numbers = 0
        self.flights: deque[tuple[Step, Outcome]] = deque()
        self.steps: list[Step] = []
        self.keep = True
        self.tokens: dict[int, list[int]] = {}
        self.prompt_scores: dict[int, list[TokenScore | None]] = {}
        self.last_outputs: dict[int, SequenceOutput] = {}  # By sequence.
        self.first_at: dict[int, int] = {}  # The step of each one's first token,
        self.ended_at: dict[int, int] = {}  # and of its end.
        self.cached: dict[int, int] = {}
        self.came: dict[int, float] = {}
        self.phases: dict[int, Phases] = {}
        self.committed = 0

    def submit(self, prompt: Iterable[int], new: int = 4, **how: object) -> int:
        """Queue a prompt; its number. `how` is for the submission, or else for its sampling."""
        submission = self.submission(prompt, new, **how)
        number = submission.sequence_id
        self.numbers += 1
        self.came[number] = self.now
        self.ranks.know(submission)
        self.tokens[number] = list(submission.output_tokens)
        self.prompt_scores[number] = []
        refused = self.scheduler.add_sequence(submission, self.now)
        if refused:
            self.take(refused)
        return number

    def submission(self, prompt: Iterable[int], new: int, **how: object) -> Submission:
        number = self.numbers
        fields = (
            *("adapter_ref", "tenant", "service", "priority", "deadline", "guide"),
            *("output_tokens", "unscored_tokens"),
        )
        outer = {name: value for name, value in how.items() if name in fields}
        inner = {name: value for name, value in how.items() if name not in fields}
        sampling = SamplingParams(max_new_tokens=new, seed=number, **inner)  # type: ignore[arg-type]
        return Submission(number, list(prompt), sampling, **outer)  # type: ignore[arg-type]

    def alone(self, prompt: Iterable[int], new: int, **how: object) -> Alone:
        """What the next submission will come to, if it is this one."""
        return Alone(self.submission(prompt, new, **how))

    def take(self, made: SequenceOutput) -> None:
        assert made.sequence_id not in self.ended_at, "a message after the end"
        self.tokens[made.sequence_id] += made.tokens
        self.prompt_scores[made.sequence_id] += made.prompt_scores
        if made.tokens:
            self.first_at.setdefault(made.sequence_id, self.committed)
            self.cached.setdefault(made.sequence_id, made.cached_tokens)
        if made.phases is not None:
            self.check_phases(made.sequence_id, made.phases)
        if made.tokens or made.end == "scored":
            assert made.sequence_id in self.phases
        self.last_outputs[made.sequence_id] = made
        if made.end:
            self.ended_at[made.sequence_id] = self.committed

    def check_phases(self, number: int, phases: Phases) -> None:
        """They are told once, with the first token, and are all the time until then."""
        assert number not in self.phases
        self.phases[number] = phases
        total = phases.queue_s + phases.prefill_s
        assert abs(total - (self.now - self.came[number])) < 1e-6
        assert phases.queue_s >= 0 and phases.decode_s == 0

    def plan(self) -> Step | None:
        step = self.scheduler.plan(self.now)
        for made in self.scheduler.pop_ended():
            self.take(made)
        if step is None:
            waits = self.scheduler.has_unfinished and not self.flights
            assert not waits, "nothing runs, and nothing is planned for those that wait"
            return None
        assert len(self.flights) < self.depth, "more steps in flight than stages"
        early = bool(step.token_ids) and set(step.token_ids) == {-1}
        assert early == (len(self.flights) == self.stages), "what was drawn is known, or it is not"
        self.early += early
        assert (
            len(step.token_ids) == sum(step.lengths) <= self.config.scheduler_config.step_tokens_max
        )
        guessing = sum(1 + count for count in step.draft_counts if count)
        assert guessing <= self.config.scheduler_config.speculate_rows_max, (
            "guesses make a step slow"
        )
        assert all(
            count <= self.config.scheduler_config.speculate_tokens_max
            for count in step.draft_counts
        )
        assert len(step.slots) <= self.config.scheduler_config.running_requests_max
        assert step.slots or step.prefix_writes, "a step for nothing"
        assert sum(fill.count for fill in step.prefix_writes) <= self.fill_tokens_max
        for other, _ in self.flights:
            busy = {slot for slot, draws in zip(other.slots, other.draws, strict=True) if draws}
            twice = busy & set(step.slots)
            assert early or not twice, "a sequence that draws is in two steps"
        self.flights.append((step, self.ranks.run(step)))
        if self.keep:
            self.steps.append(step)
        return step

    def commit(self) -> None:
        _, outcome = self.flights.popleft()
        for made in self.scheduler.commit(outcome, self.now):
            self.take(made)
        self.committed += 1
        self.scheduler.check(deep=True)

    def step(self) -> bool:
        """As the planner does it: fill the stages, take one outcome. False: nothing was done."""
        while len(self.flights) < self.depth and self.plan():
            pass
        if not self.flights:
            return False
        self.commit()
        self.now += 0.01
        return True

    def finish(self, steps_max: int = 10_000) -> None:
        for _ in range(steps_max):
            if not self.step():
                break
        assert not self.scheduler.has_unfinished, f"not done after {steps_max} steps"
        self.check_over()

    def check_over(self) -> None:
        """Everybody has ended as it would have alone, and everything is given back."""
        load = self.scheduler.stats
        assert (load.waiting, load.running, load.blocks_held) == (0, 0, 0)
        assert self.ended_at.keys() == self.ranks.alone.keys()
        for number, alone in self.ranks.alone.items():
            end = self.last_outputs[number].end
            if end in ("stop", "length", "scored"):
                assert self.tokens[number] == alone.tokens and end == alone.end
                if alone.submission.sampling.prompt_logprobs is not None:
                    wanted = [] if alone.submission.output_tokens else alone.prompt_scores
                    assert self.prompt_scores[number] == wanted[alone.submission.unscored_tokens :]
            else:
                assert self.tokens[number] == alone.tokens[: len(self.tokens[number])]

    def forget(self) -> None:
        """Keep nothing of those that are over, so that what grows is the scheduler's."""
        kept = (self.tokens, self.prompt_scores, self.last_outputs, self.first_at, self.ended_at)
        more = (self.cached, self.came, self.phases, self.ranks.alone, self.ranks.computed)
        for record in (*kept, *more):
            record.clear()


def adapter(name: str, count: int, kind: str = "rows") -> AdapterRef:
    return AdapterRef(name, count, f"{name}.safetensors", kind)


def virtual(count: int) -> list[int]:
    return [VOCAB_SIZE + row for row in range(count)]


def text(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(count)]
