"""Requests played through the rules by which our scheduler fills steps, on a clock of its own.

The rules are those of `serving/scheduler/scheduler.py` for requests of one class and tenant; a test
plays the same requests through both. What a step takes is told from outside. Where nothing but
decoding goes on, many steps are taken at once, so that thousands of requests cost milliseconds.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import groupby

from planning.inference.step_cost import Steps
from serving.scheduler.prefill_cost import Pace

# As many steps the pace remembers; what comes on top changes nothing.
PACE_STEPS = 150
# Nobody waits longer for a prediction; what has ended by then tells enough.
STEPS_MAX, STAGED_STEPS_MAX = 2_000_000, 100_000


@dataclass(slots=True)
class Call:
    """One request. Times are of the engine's clock; the front end's part is added by others."""

    number: int
    arrival_s: float
    prompt: int  # Tokens, those known already included.
    output: int
    cached: int = 0
    first_s: float = -1.0
    end_s: float = -1.0
    last_s: float = -1.0  # Its last token until now.
    made: int = 0
    done: int = 0  # Of its prompt, or of what must be computed again.
    goal: int = 0


@dataclass(frozen=True)
class Rules:
    """What of a server's settings decides who runs."""

    running_max: int
    step_tokens_max: int
    stall_s: float
    kv_tokens: int
    stages: int = 1
    block_tokens: int = 16


@dataclass
class Played:
    """What became of the calls: in `gaps` seconds between tokens, how many had that, and when."""

    calls: list[Call] = field(default_factory=list)
    gaps: list[tuple[float, int, float]] = field(default_factory=list)
    busy_s: float = 0.0
    steps: int = 0
    rows: int = 0
    preemptions: int = 0


@dataclass
class Pieces:
    """What a step has of prompts."""

    tokens: int = 0
    pairs: int = 0
    count: int = 0
    over: list[Call] = field(default_factory=list)  # Those whose last piece it is.


def simulation(steps: Steps, rules: Rules) -> "Simulation":
    return OneStage(steps, rules) if rules.stages == 1 else Staged(steps, rules)


class Simulation(ABC):
    """One replica; plays once."""

    def __init__(self, steps: Steps, rules: Rules) -> None:
        self._steps, self._rules = steps, rules
        self._pace = Pace()
        self._now = 0.0
        self._coming: deque[Call] = deque()  # By arrival.
        self._waiting: list[tuple[float, int, Call]] = []  # Likewise.
        self._prompts: list[Call] = []  # Those that run and whose prompt is not all planned.
        self._held = 0  # Keys and values of all that run, those that prompts will have included.
        self._left: deque[Call] = deque()
        self._turn_s: float | None = None
        self.played = Played()

    def open(self, calls: list[Call]) -> Played:
        """Calls come when they come, in order."""
        self._coming.extend(calls)
        self._run()
        return self.played

    def closed(self, calls: list[Call], concurrency: int, turn_s: float) -> Played:
        """So many at once; whoever is answered calls again, `turn_s` later."""
        self._left, self._turn_s = deque(calls), turn_s
        for _ in range(min(concurrency, len(calls))):
            call = self._left.popleft()
            call.arrival_s = turn_s
            self._coming.append(call)
        self._run()
        return self.played

    @abstractmethod
    def _run(self) -> None:
        """Until nobody comes any more and all have ended."""

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival_s <= self._now:
            call = self._coming.popleft()
            call.done, call.goal = call.cached, call.prompt
            self._wait(call)

    def _wait(self, call: Call) -> None:
        insort(self._waiting, (call.arrival_s, call.number, call))

    def _prompt_budget(self, tokens: int, decoding: int) -> int:
        """Of so many tokens, those that prompts may have while so many wait for their next one."""
        if not decoding:
            return tokens
        firsts = len(self._waiting) + len(self._prompts)
        stall_s = self._rules.stall_s * max(1, firsts)
        return min(tokens, self._pace.tokens_within(stall_s, self._rules.block_tokens))

    def _admit(self, left: int, running: int) -> None:
        """Those that come first, as far as there are tokens, places and memory for them."""
        rules, size = self._rules, self._rules.block_tokens
        ahead = sum(one.goal - one.done for one in self._prompts)
        while self._waiting and left > ahead and running < rules.running_max:
            call = self._waiting[0][2]
            # A block for each that runs to grow into.
            if running and self._held + call.goal + size * (running + 1) > rules.kv_tokens:
                return
            self._waiting.pop(0)
            self._prompts.append(call)
            ahead += call.goal - call.done
            self._held += call.goal
            running += 1

    def _pieces(self, left: int) -> Pieces:
        """Of prompts, whole blocks, the first one first."""
        pieces, size = Pieces(), self._rules.block_tokens
        for call in self._prompts:
            if left <= 0:
                break
            end = min(call.done + left, call.goal)
            if end < call.goal and end // size * size > call.done:
                end = end // size * size
            new = end - call.done
            pieces.pairs += new * (call.done + end + 1) // 2
            pieces.tokens += new
            pieces.count += 1
            left -= new
            call.done = end
            if end == call.goal:
                pieces.over.append(call)
        for call in pieces.over:
            self._prompts.remove(call)
        return pieces

    def _first(self, call: Call) -> None:
        """Its prompt is computed, and with it its next token."""
        call.made += 1
        call.last_s = self._now
        if call.first_s < 0:
            call.first_s = self._now

    def _finish(self, call: Call) -> None:
        call.end_s = self._now
        self._held -= call.prompt + call.output - 1
        self.played.calls.append(call)
        if self._turn_s is not None and self._left:
            after = self._left.popleft()
            after.arrival_s = self._now + self._turn_s
            self._coming.append(after)

    def _short(self, decoding: int) -> bool:
        """Whether not all of those that decode can grow; half of a block is empty of each."""
        size = self._rules.block_tokens
        return decoding > 1 and self._held + decoding * size // 2 >= self._rules.kv_tokens

    def _put_back(self, call: Call) -> None:
        """It has lost its place, and waits to be computed again."""
        self._held -= call.prompt + call.made - 1
        call.done, call.goal = 0, call.prompt + call.made
        self.played.preemptions += 1
        self._wait(call)


class OneStage(Simulation):
    """Each step gives all that decode a token, so who ends when is known from the beginning."""

    def __init__(self, steps: Steps, rules: Rules) -> None:
        super().__init__(steps, rules)
        self._tick = 0  # Steps so far.
        # By the step that makes their last token; and what they look back at.
        self._decoding: list[tuple[int, int, Call]] = []
        self._context = 0

    def _run(self) -> None:
        while self.played.steps < STEPS_MAX or not self.played.calls:
            self._arrive()
            if not (self._waiting or self._prompts or self._decoding):
                if not self._coming:
                    return
                self._now = self._coming[0].arrival_s
                continue
            count, budget = len(self._decoding), self._rules.step_tokens_max
            if self._waiting:
                left = self._prompt_budget(budget - count, count)
                self._admit(left, count + len(self._prompts))
            if self._prompts:
                self._mixed(self._pieces(self._prompt_budget(budget - count, count)))
            else:
                assert self._decoding, "one waits, and nobody is in its way"
                self._decodes()
            while self._decoding and self._decoding[0][0] <= self._tick:
                self._end(heappop(self._decoding)[2])
            while self._short(len(self._decoding)):
                self._preempt()

    def _mixed(self, pieces: Pieces) -> None:
        """Everyone's next token, and pieces of prompts."""
        count = len(self._decoding)
        seconds = self._steps.seconds(
            count + pieces.tokens,
            count + len(pieces.over),
            self._context + count,
            pieces.pairs,
            count + pieces.count,
        )
        self._pass(seconds, 1)
        self.played.rows += pieces.tokens
        self._pace.learn(pieces.tokens, seconds)
        for call in pieces.over:
            self._first(call)
            self._context += call.goal
            due = self._tick + call.output - call.made
            heappush(self._decoding, (due, call.number, call))

    def _decodes(self) -> None:
        """Only next tokens, until one of them is the last, or somebody comes."""
        count, steps = len(self._decoding), self._steps
        first_s = steps.seconds(count, count, self._context + count, 0, count)
        growth_s = steps.context_s * count
        room = self._rules.kv_tokens - self._held - count * self._rules.block_tokens // 2
        most = max(1, min(self._decoding[0][0] - self._tick, room // count))
        if self._coming:
            until_s = self._coming[0].arrival_s - self._now
            most = max(1, min(most, int(until_s / (first_s + growth_s * most / 2))))
        seconds = most * first_s + growth_s * most * (most - 1) / 2
        self._pass(seconds, most)
        for _ in range(min(most, PACE_STEPS)):
            self._pace.learn(0, seconds / most)

    def _pass(self, seconds: float, steps: int) -> None:
        count, played = len(self._decoding), self.played
        self._now += seconds
        self._tick += steps
        self._context += count * steps
        self._held += count * steps
        played.busy_s += seconds
        played.steps += steps
        played.rows += steps * count
        if count:
            played.gaps.append((seconds / steps, count * steps, self._now))

    def _end(self, call: Call) -> None:
        call.made = call.output
        self._context -= call.prompt + call.output - 1
        self._finish(call)

    def _preempt(self) -> None:
        """Who came last goes back."""
        last = max(self._decoding, key=lambda one: one[2].arrival_s)
        self._decoding.remove(last)
        heapify(self._decoding)
        due, _, call = last
        call.made = call.output - (due - self._tick)
        self._context -= call.prompt + call.made - 1
        self._put_back(call)


@dataclass
class _Flight:
    """A step on its way through the stages."""

    ends_s: float
    took_s: float  # As the last stage sees it.
    decoding: list[Call]
    pieces: Pieces


class Staged(Simulation):
    """As many steps are on their way as there are stages; each has its part of who decodes."""

    def __init__(self, steps: Steps, rules: Rules) -> None:
        super().__init__(steps, rules)
        self._flights: deque[_Flight] = deque()
        self._free_s = [0.0] * rules.stages  # When each stage has done what it was given.
        self._ready: deque[Call] = deque()  # Those that can decode, and
        self._decoding = 0  # all that are past their prompt, in flight or not.

    def _run(self) -> None:
        while self.played.steps < STAGED_STEPS_MAX or not self.played.calls:
            if len(self._flights) >= self._rules.stages:
                self._land()
            self._arrive()
            if self._plan():
                continue
            if self._flights:
                self._land()
            elif self._coming:
                self._now = max(self._now, self._coming[0].arrival_s)
            else:
                return

    def _plan(self) -> bool:
        """Launch a step, if there is anything to do."""
        rules, budget = self._rules, self._rules.step_tokens_max
        part = -(-self._decoding // rules.stages)
        if self._waiting:
            left = self._prompt_budget(budget - min(len(self._ready), part), self._decoding)
            self._admit(left, self._decoding + len(self._prompts))
            part = -(-self._decoding // rules.stages)
        chosen = [self._ready.popleft() for _ in range(min(part, len(self._ready)))]
        pieces = self._pieces(self._prompt_budget(budget - len(chosen), self._decoding))
        self._decoding += len(pieces.over)
        rows = len(chosen) + pieces.tokens
        if not rows:
            return False
        seconds = self._steps.seconds(
            rows,
            len(chosen) + len(pieces.over),
            sum(one.prompt + one.made for one in chosen),
            pieces.pairs,
            len(chosen) + pieces.count,
        )
        ends, last = self._now, max(self._now, self._free_s[-1])
        for stage, since in enumerate(self._free_s):
            ends = self._free_s[stage] = max(ends, since) + seconds
        self._held += len(chosen)
        self._flights.append(_Flight(ends, ends - last, chosen, pieces))
        self.played.steps += 1
        self.played.rows += rows
        self.played.busy_s += seconds
        return True

    def _land(self) -> None:
        flight = self._flights.popleft()
        self._now = max(self._now, flight.ends_s)
        self._pace.learn(flight.pieces.tokens, flight.took_s)
        gaps = [self._now - one.last_s for one in flight.decoding]
        alike = groupby(sorted(gaps))
        self.played.gaps += [(gap, len(list(some)), self._now) for gap, some in alike]
        for call in flight.decoding:
            call.made += 1
            call.last_s = self._now
            self._go_on(call)
        for call in flight.pieces.over:
            self._first(call)
            self._go_on(call)
        while self._ready and self._short(self._decoding):
            last = max(self._ready, key=lambda one: one.arrival_s)
            self._ready.remove(last)
            self._decoding -= 1
            self._put_back(last)

    def _go_on(self, call: Call) -> None:
        if call.made == call.output:
            self._decoding -= 1
            self._finish(call)
        else:
            self._ready.append(call)
