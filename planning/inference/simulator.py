"""Continuous-batching simulator that the planner uses: replays requests on a simulated clock.

The simulator has the rules of `serving/scheduler/scheduler.py` for requests of one class and one
tenant. A test compares it with `planning.inference.reference_simulator`, which runs the scheduler.
Step durations come from the step cost model. With one pipeline stage, consecutive steps that only
decode are simulated together, so thousands of requests take milliseconds.

Blocks of the KV cache are counted as the scheduler counts them. But while the running requests fit
in the KV cache at their full lengths, no block is counted, because none can be missing.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import groupby

from gpt.costs.attention_span import FULL_ATTENTION, AttentionSpan
from gpt.kv_groups import UNLIMITED_TOKENS, SequenceBlocks
from planning.inference.decode_keys import DecodeKeys
from planning.inference.step_cost import StepCostModel
from serving.memory_budget import KV_BLOCK_TOKENS
from serving.scheduler.block_reservation import BlockReservation
from serving.scheduler.chunked_prefill import PrefillTokenBudget, chunk_end

# `PrefillCostModel` (`serving.scheduler.chunked_prefill`) reduces the weight of old steps with each
# recorded step. After this number of identical steps, all older steps together have a weight of
# 5 %, so `_run_decode_steps` does not record further identical steps.
PREFILL_COST_STEPS_MAX = 150
# A simulation stops after this number of steps, but not before a request has finished.
STEPS_MAX, PIPELINE_STEPS_MAX = 2_000_000, 100_000


@dataclass(slots=True)
class SimulatedRequest:
    """One request and its simulated times in seconds, without the overhead of the front end."""

    number: int
    arrival_s: float
    prompt_tokens: int  # Including cached tokens.
    output_tokens: int
    cached_tokens: int = 0  # Prompt tokens that are in the prefix cache.
    first_token_s: float = -1.0  # Negative: no token yet.
    end_s: float = -1.0
    last_token_s: float = -1.0  # Time of the most recent token.
    generated_tokens: int = 0
    is_running: bool = False
    # Number of tokens whose keys and values are computed or planned, cached tokens included, and of
    # those that are computed. With one pipeline stage, they are current only during the prefill.
    planned_tokens: int = 0
    computed_tokens: int = 0
    steps_in_flight: int = 0  # With several pipeline stages only.
    # Number of tokens to prefill, cached tokens included: the prompt and, after a preemption, the
    # tokens that were generated before the preemption.
    prefill_target: int = 0
    blocks_max: int = 0  # While it runs: the most KV blocks that it will need.

    @property
    def kv_tokens_max(self) -> int:
        """Number of tokens with keys and values at the end; the last token has none."""
        return self.prompt_tokens + self.output_tokens - 1

    @property
    def age(self) -> tuple[float, int]:
        """Requests in order of arrival; the largest is preempted first."""
        return self.arrival_s, self.number


@dataclass(frozen=True)
class SchedulerRules:
    """The server settings that determine scheduling, and the model's attention windows."""

    running_requests_max: int
    step_tokens_max: int
    prefill_stall_s: float  # The server's `prefill_stall_ms_max`, in seconds.
    kv_tokens: int  # Size of the KV cache, as the server's `kv_tokens_max`.
    pipeline_stages: int = 1
    block_tokens: int = KV_BLOCK_TOKENS
    windows: tuple[int | None, ...] = (None,)  # The window of each KV group.
    attention_span: AttentionSpan = FULL_ATTENTION

    @cached_property
    def sequence_blocks(self) -> SequenceBlocks:
        return SequenceBlocks(self.windows, self.block_tokens)

    @cached_property
    def block_reservation(self) -> BlockReservation:
        return BlockReservation(self.sequence_blocks, self.pipeline_stages * self.step_tokens_max)

    @cached_property
    def kv_blocks(self) -> int:
        """Number of blocks of the KV cache that requests can use."""
        return self.sequence_blocks.held(self.kv_tokens, 0)


@dataclass
class SimulationResult:
    """The finished requests and the counters of a simulation."""

    requests: list[SimulatedRequest] = field(default_factory=list)
    # Each token gap is (seconds since the previous token, number of tokens with this gap, time of
    # these tokens in seconds).
    token_gaps: list[tuple[float, int, float]] = field(default_factory=list)
    busy_s: float = 0.0  # Sum of the durations of all steps.
    steps: int = 0
    tokens: int = 0  # Number of tokens that the steps compute, prompt tokens included.
    preemptions: int = 0


@dataclass
class PrefillChunks:
    """The prefill chunks of a step."""

    tokens: int = 0
    attention_pairs: float = 0.0
    # Each request that has a chunk, and where its chunk ends.
    chunks: list[tuple[SimulatedRequest, int]] = field(default_factory=list)
    # Requests whose last prefill chunk is in this step.
    completed: list[SimulatedRequest] = field(default_factory=list)


def make_simulation(step_costs: StepCostModel, rules: SchedulerRules) -> "Simulation":
    return (
        SingleStageSimulation(step_costs, rules)
        if rules.pipeline_stages == 1
        else PipelineSimulation(step_costs, rules)
    )


class Simulation(ABC):
    """The simulation of one replica. Call only one of the `run_` methods, and only once."""

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        self._step_costs = step_costs
        self._rules = rules
        self._span = rules.attention_span
        self._blocks = rules.sequence_blocks
        self._stall_budget = PrefillTokenBudget(rules.prefill_stall_s, rules.block_tokens)
        self._now = 0.0
        # Requests that have not arrived yet, sorted by arrival.
        self._arrivals: deque[SimulatedRequest] = deque()
        # The queue: (arrival, number, request), sorted.
        self._waiting: list[tuple[float, int, SimulatedRequest]] = []
        # Running requests whose prefill is not completely planned yet.
        self._prefilling: list[SimulatedRequest] = []
        # Sum of `blocks_max` of the running requests.
        self._blocks_max_total = 0
        # Number of blocks that the step being planned can still allocate.
        self._blocks_available = UNLIMITED_TOKENS
        # Closed loop: requests that no client has sent yet.
        self._unsent: deque[SimulatedRequest] = deque()
        # Closed loop: seconds between a response and the client's next request; None: open loop.
        self._think_s: float | None = None
        self.simulation_result = SimulationResult()

    def run_open_loop(self, requests: list[SimulatedRequest]) -> SimulationResult:
        """Simulate requests, sorted by `arrival_s`, that arrive at their `arrival_s`."""
        self._arrivals.extend(requests)
        self._run()
        return self.simulation_result

    def run_closed_loop(
        self, requests: list[SimulatedRequest], concurrency: int, think_s: float
    ) -> SimulationResult:
        """Simulate `concurrency` clients that send the next request `think_s` after a response."""
        self._unsent = deque(requests)
        self._think_s = think_s
        for _ in range(min(concurrency, len(requests))):
            request = self._unsent.popleft()
            request.arrival_s = think_s
            self._arrivals.append(request)
        self._run()
        return self.simulation_result

    @abstractmethod
    def _run(self) -> None:
        """Run until all requests have finished, or until the maximum number of steps."""

    def _enqueue_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0].arrival_s <= self._now:
            request = self._arrivals.popleft()
            request.planned_tokens = request.computed_tokens = request.cached_tokens
            request.prefill_target = request.prompt_tokens
            self._enqueue(request)

    def _enqueue(self, request: SimulatedRequest) -> None:
        insort(self._waiting, (request.arrival_s, request.number, request))

    def _prefill_budget(self, token_budget: int, decoding: int) -> int:
        """Return the maximum number of prefill tokens in a step.

        `token_budget`: the number of tokens that the step can still compute. `decoding`: the number
        of requests that decode; if it is more than 0, the stall limit also bounds the prefill.
        """
        if not decoding:
            return token_budget
        first_tokens_pending = len(self._waiting) + len(self._prefilling)
        return self._stall_budget.limit_tokens(token_budget, first_tokens_pending)

    def _admit(self, token_budget: int) -> None:
        """Admit waiting requests in order of arrival until tokens, slots or memory run out."""
        rules, running = self._rules, self._running_count
        tokens_pending = sum(
            request.prefill_target - request.planned_tokens for request in self._prefilling
        )
        reserved_blocks: int | None = None
        while (
            self._waiting and token_budget > tokens_pending and running < rules.running_requests_max
        ):
            request = self._waiting[0][2]
            prefill_tokens = request.prefill_target - request.planned_tokens
            blocks_max = self._blocks_needed(request, request.kv_tokens_max, prefill_tokens)
            if self._blocks_max_total + blocks_max > rules.kv_blocks:
                if reserved_blocks is None:
                    reserved_blocks = self._reserved_blocks()
                blocks_needed = self._blocks_needed(request, request.prefill_target, prefill_tokens)
                if reserved_blocks + min(blocks_needed, rules.kv_blocks) > rules.kv_blocks:
                    return
                reserved_blocks += blocks_needed
            self._waiting.pop(0)
            self._prefilling.append(request)
            request.is_running = True
            self._set_blocks_max(request, blocks_max)
            tokens_pending += prefill_tokens
            running += 1

    def _plan_prefill_chunks(
        self, token_budget: int, preemptible: Iterable[SimulatedRequest]
    ) -> PrefillChunks:
        """Plan prefill chunks of whole blocks, in order of arrival.

        `preemptible`: the running requests that are in no step.
        """
        chunks, block_tokens = PrefillChunks(), self._rules.block_tokens
        victims = sorted(preemptible, key=lambda request: request.age)
        for request in sorted(self._prefilling, key=lambda request: request.age):
            if token_budget <= 0:
                break
            if not request.is_running:  # Preempted by an earlier request in this loop.
                continue
            start = request.planned_tokens
            end = chunk_end(start, token_budget, request.prefill_target, block_tokens)
            if not self._allocate(request, end, victims):
                shorter_end = min(end, self._tokens_allocatable(request))
                if shorter_end > start:
                    end = shorter_end
                    self._allocate(request, end, victims)
                elif self._running_count > 1:
                    continue
            chunks.attention_pairs += self._span.pairs(start, end)
            chunks.tokens += end - start
            chunks.chunks.append((request, end))
            token_budget -= end - start
            request.planned_tokens = end
            if end == request.prefill_target:
                chunks.completed.append(request)
        for request in chunks.completed:
            self._prefilling.remove(request)
            self._set_blocks_max(request, self._blocks_needed(request, request.kv_tokens_max, 0))
        return chunks

    # -------------------------------------------------------------------------------- KV blocks

    @property
    @abstractmethod
    def _running_count(self) -> int:
        """Number of running requests."""

    @abstractmethod
    def _running_requests(self) -> Iterable[SimulatedRequest]:
        """The running requests, whose `planned_tokens` and `computed_tokens` are current."""

    @abstractmethod
    def _remove_running(self, request: SimulatedRequest) -> None:
        """Remove a request that is preempted, and count its blocks as available."""

    @property
    def _has_ample_blocks(self) -> bool:
        """Whether the running requests fit in the KV cache at their full lengths."""
        return self._blocks_max_total <= self._rules.kv_blocks

    def _count_available_blocks(self) -> None:
        """Set `_blocks_available` for the step that is planned next."""
        self._blocks_available = UNLIMITED_TOKENS
        if not self._has_ample_blocks:
            held_blocks = sum(map(self._held_blocks, self._running_requests()))
            self._blocks_available = self._rules.kv_blocks - held_blocks

    def _set_blocks_max(self, request: SimulatedRequest, blocks_max: int) -> None:
        self._blocks_max_total += blocks_max - request.blocks_max
        request.blocks_max = blocks_max

    def _held_blocks(self, request: SimulatedRequest) -> int:
        return self._blocks.held(request.planned_tokens, request.computed_tokens)

    def _blocks_needed(self, request: SimulatedRequest, tokens: int, prefill_tokens: int) -> int:
        return self._rules.block_reservation.blocks_needed(
            tokens, prefill_tokens, request.kv_tokens_max
        )

    def _reserved_blocks(self) -> int:
        """Return the number of blocks that the running requests hold or that are reserved."""
        return sum(
            max(
                self._held_blocks(request),
                self._blocks_needed(
                    request,
                    max(request.prefill_target, request.planned_tokens),
                    request.prefill_target - request.computed_tokens,
                ),
            )
            for request in self._running_requests()
        )

    def _allocate(
        self, request: SimulatedRequest, tokens: int, victims: list[SimulatedRequest]
    ) -> bool:
        """Allocate the blocks of a running request up to `tokens` tokens; return whether it has.

        If blocks are missing, preempt requests that arrived later, the latest first. `victims` are
        the requests that may be preempted, sorted by arrival. A request that runs alone goes on
        without blocks: it does not fit in the KV cache, and a server would refuse it.
        """
        block_tokens = self._rules.block_tokens
        new_blocks = -(-tokens // block_tokens) - -(-request.planned_tokens // block_tokens)
        blocks = len(self._rules.windows) * new_blocks
        while blocks > self._blocks_available:
            if not victims or victims[-1].age <= request.age:
                return False
            self._preempt(victims.pop())
        self._blocks_available -= blocks
        return True

    def _tokens_allocatable(self, request: SimulatedRequest) -> int:
        """Return the number of tokens for which a request has blocks or can allocate them now."""
        table_length = -(-request.planned_tokens // self._rules.block_tokens)
        blocks = max(0, self._blocks_available) // len(self._rules.windows)
        return (table_length + blocks) * self._rules.block_tokens

    def _preempt(self, request: SimulatedRequest) -> None:
        """Put a running request back into the queue; all its tokens will be computed again."""
        self._remove_running(request)
        self._stop_running(request)
        request.planned_tokens = request.computed_tokens = 0
        request.prefill_target = request.prompt_tokens + request.generated_tokens
        self.simulation_result.preemptions += 1
        self._enqueue(request)

    def _stop_running(self, request: SimulatedRequest) -> None:
        request.is_running = False
        self._set_blocks_max(request, 0)

    # ---------------------------------------------------------------------------- generated tokens

    def _complete_prefill(self, request: SimulatedRequest) -> None:
        """Record the token that the last prefill chunk generates."""
        request.generated_tokens += 1
        if request.first_token_s < 0:
            request.first_token_s = self._now
        else:  # The request was preempted.
            gap_s = self._now - request.last_token_s
            self.simulation_result.token_gaps.append((gap_s, 1, self._now))
        request.last_token_s = self._now

    def _finish_request(self, request: SimulatedRequest) -> None:
        request.end_s = self._now
        self._stop_running(request)
        self.simulation_result.requests.append(request)
        if self._think_s is not None and self._unsent:
            next_request = self._unsent.popleft()
            next_request.arrival_s = self._now + self._think_s
            self._arrivals.append(next_request)


class SingleStageSimulation(Simulation):
    """Simulation without pipeline parallelism.

    Each step generates one token for each decoding request, except for stalled requests, which wait
    for a block. The step in which a request finishes is therefore known while it decodes.
    """

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        super().__init__(step_costs, rules)
        self._step_index = 0  # Number of steps so far.
        # Heap of decoding requests: (index of the step that generates the last token, number,
        # request).
        self._decode_heap: list[tuple[int, int, SimulatedRequest]] = []
        # Decoding requests that have no block for their next token, during a step.
        self._stalled: list[SimulatedRequest] = []
        self._decode_keys = DecodeKeys(rules.attention_span)  # Of the requests in `_decode_heap`.

    def _run(self) -> None:
        while self.simulation_result.steps < STEPS_MAX or not self.simulation_result.requests:
            self._enqueue_arrivals()
            if not (self._waiting or self._prefilling or self._decode_heap):
                if not self._arrivals:
                    return
                self._now = self._arrivals[0].arrival_s
                continue
            budget = self._rules.step_tokens_max
            if self._waiting:
                count = len(self._decode_heap)
                self._admit(self._prefill_budget(budget - count, count))
            steps = 1 if self._prefilling else self._decode_steps_max()
            if steps == 1:
                self._plan_decodes()
            if self._prefilling:
                count = len(self._decode_heap)
                chunks = self._plan_prefill_chunks(
                    self._prefill_budget(budget - count, count + len(self._stalled)),
                    [*self._prefilling, *self._stalled],
                )
                self._run_mixed_step(chunks)
            else:
                assert self._decode_heap, "a request waits although nothing runs"
                self._run_decode_steps(steps)
            while self._decode_heap and self._decode_heap[0][0] <= self._step_index:
                self._finish_decode(heappop(self._decode_heap)[2])
            self._resume_stalled()

    def _run_mixed_step(self, chunks: PrefillChunks) -> None:
        """Simulate a step that decodes and computes prefill chunks."""
        count = len(self._decode_heap)
        seconds = self._step_costs.step_seconds(
            count + chunks.tokens,
            count + len(chunks.completed),
            self._decode_keys.pairs(1),
            chunks.attention_pairs,
            count + len(chunks.chunks),
        )
        self._advance_clock(seconds, 1)
        self.simulation_result.tokens += chunks.tokens
        self._stall_budget.record_step(chunks.tokens, seconds)
        for request, end in chunks.chunks:
            request.computed_tokens = end
        for request in chunks.completed:
            self._complete_prefill(request)
            self._push_decode(request)

    def _run_decode_steps(self, steps_max: int) -> None:
        """Simulate decode steps together, up to the next event.

        The events are: a request finishes, a request arrives, and the end of `steps_max` steps.
        """
        steps = min(steps_max, self._decode_heap[0][0] - self._step_index)
        if self._arrivals:
            until_arrival_s = self._arrivals[0].arrival_s - self._now
            mean_step_s = self._decode_seconds(steps) / steps
            steps = max(1, min(steps, int(until_arrival_s / mean_step_s)))
        seconds = self._decode_seconds(steps)
        self._advance_clock(seconds, steps)
        for _ in range(min(steps, PREFILL_COST_STEPS_MAX)):
            self._stall_budget.record_step(0, seconds / steps)

    def _decode_seconds(self, steps: int) -> float:
        """Return the duration of the next `steps` steps, if they decode the same requests."""
        count = len(self._decode_heap)
        attention_s = self._step_costs.context_s * self._decode_keys.pairs(steps)
        return steps * self._step_costs.step_seconds(count, count, 0, 0, count) + attention_s

    def _advance_clock(self, seconds: float, steps: int) -> None:
        """Advance the clock by `seconds`, the total duration of `steps` steps.

        Each step generates one token for each decoding request that is not stalled.
        """
        count, simulation_result = len(self._decode_heap), self.simulation_result
        self._now += seconds
        self._step_index += steps
        self._decode_keys.advance(steps)
        simulation_result.busy_s += seconds
        simulation_result.steps += steps
        simulation_result.tokens += steps * count
        if count:
            simulation_result.token_gaps.append((seconds / steps, count * steps, self._now))

    def _push_decode(self, request: SimulatedRequest) -> None:
        """Add a request that decodes from the next step on."""
        finish_step = self._step_index + request.output_tokens - request.generated_tokens
        heappush(self._decode_heap, (finish_step, request.number, request))
        tokens = request.prompt_tokens + request.generated_tokens - 1
        self._decode_keys.add(request.number, tokens, request.kv_tokens_max)

    def _finish_decode(self, request: SimulatedRequest) -> None:
        request.generated_tokens = request.output_tokens
        self._decode_keys.remove(request.number)
        self._finish_request(request)

    # -------------------------------------------------------------------------------- KV blocks

    def _decoded_tokens(self, heap_entry: tuple[int, int, SimulatedRequest]) -> int:
        """Return the number of tokens of a decoding request that have keys and values."""
        return heap_entry[2].kv_tokens_max - (heap_entry[0] - self._step_index)

    @property
    def _running_count(self) -> int:
        return len(self._decode_heap) + len(self._prefilling) + len(self._stalled)

    def _running_requests(self) -> list[SimulatedRequest]:
        for heap_entry in self._decode_heap:
            request = heap_entry[2]
            request.planned_tokens = request.computed_tokens = self._decoded_tokens(heap_entry)
        return [*(request for _, _, request in self._decode_heap), *self._prefilling]

    def _decode_steps_max(self) -> int:
        """Return a number of decode steps for which the KV cache has blocks; at least 1."""
        if self._has_ample_blocks:
            return UNLIMITED_TOKENS
        count, block_tokens = len(self._decode_heap), self._rules.block_tokens
        # Numbers of requests by the number of tokens in their last, partly filled blocks.
        token_counts = [self._decoded_tokens(heap_entry) for heap_entry in self._decode_heap]
        offsets = Counter(tokens % block_tokens for tokens in token_counts)
        full_blocks = sum([tokens // block_tokens for tokens in token_counts])

        def blocks_max(steps: int) -> int:
            """Return the number of blocks after these steps, in windows an upper bound."""
            table_length = full_blocks + sum(
                [
                    requests * -(-(offset + steps) // block_tokens)
                    for offset, requests in offsets.items()
                ]
            )
            return self._blocks.held_max_of_several(count, table_length)

        steps_max = self._decode_heap[0][0] - self._step_index
        return max(1, bisect_right(range(1, steps_max + 1), self._rules.kv_blocks, key=blocks_max))

    def _plan_decodes(self) -> None:
        """Allocate blocks for the next token of each decoding request, in order of arrival.

        A request for which there is no block is stalled.
        """
        self._count_available_blocks()
        if self._has_ample_blocks:
            return
        block_tokens = self._rules.block_tokens
        growing = [
            request
            for _, _, request in self._decode_heap
            if request.planned_tokens % block_tokens == 0
        ]
        growing.sort(key=lambda request: request.age)
        victims = sorted(self._running_requests(), key=lambda request: request.age)
        for request in growing:
            if not request.is_running:  # Preempted by an earlier request in this loop.
                continue
            has_block = self._allocate(request, request.planned_tokens + 1, victims)
            if not has_block and self._running_count > 1:
                self._remove_decode(request)
                self._stalled.append(request)

    def _remove_decode(self, request: SimulatedRequest) -> None:
        heap_entry = next(entry for entry in self._decode_heap if entry[2] is request)
        tokens = self._decoded_tokens(heap_entry)
        self._decode_heap.remove(heap_entry)
        heapify(self._decode_heap)
        self._decode_keys.remove(request.number)
        request.generated_tokens = tokens + 1 - request.prompt_tokens
        request.last_token_s = self._now

    def _resume_stalled(self) -> None:
        for request in self._stalled:
            self._push_decode(request)
        self._stalled.clear()

    def _remove_running(self, request: SimulatedRequest) -> None:
        self._blocks_available += self._held_blocks(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        elif request in self._stalled:
            self._stalled.remove(request)
        else:
            self._remove_decode(request)


@dataclass
class _InFlightStep:
    """A step that passes through the pipeline stages."""

    end_s: float
    # `end_s` minus the later of two times: the launch of this step, and the time at which the last
    # pipeline stage finishes the previous step.
    last_stage_s: float
    decoding: list[SimulatedRequest]
    chunks: PrefillChunks


class PipelineSimulation(Simulation):
    """Simulation with up to one step in flight per pipeline stage.

    Each step decodes at most 1 / (number of stages) of the decoding requests, rounded up.
    """

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        super().__init__(step_costs, rules)
        self._in_flight: deque[_InFlightStep] = deque()
        # The time at which each stage finishes its launched steps.
        self._stage_free_s = [0.0] * rules.pipeline_stages
        self._ready: deque[SimulatedRequest] = deque()  # Decoding requests that are not in flight.
        # Decoding requests by number, in flight or not.
        self._decoding: dict[int, SimulatedRequest] = {}

    def _run(self) -> None:
        while (
            self.simulation_result.steps < PIPELINE_STEPS_MAX or not self.simulation_result.requests
        ):
            if len(self._in_flight) >= self._rules.pipeline_stages:
                self._complete_step()
            self._enqueue_arrivals()
            if self._launch_step():
                continue
            if self._in_flight:
                self._complete_step()
            elif self._arrivals:
                self._now = max(self._now, self._arrivals[0].arrival_s)
            else:
                return

    def _launch_step(self) -> bool:
        """Launch a step if there is work for it; return whether a step was launched."""
        rules, budget = self._rules, self._rules.step_tokens_max
        decodes_per_step = -(-len(self._decoding) // rules.pipeline_stages)
        if self._waiting:
            self._admit(
                self._prefill_budget(
                    budget - min(len(self._ready), decodes_per_step), len(self._decoding)
                )
            )
        self._count_available_blocks()
        decoding = self._plan_decodes(decodes_per_step)
        chunks = self._plan_prefill_chunks(
            self._prefill_budget(budget - len(decoding), len(self._decoding)),
            () if self._has_ample_blocks else self._preemptible_requests(),
        )
        for request, _ in chunks.chunks:
            request.steps_in_flight += 1
        self._decoding |= {request.number: request for request in chunks.completed}
        rows = len(decoding) + chunks.tokens
        if not rows:
            return False
        seconds = self._step_costs.step_seconds(
            rows,
            len(decoding) + len(chunks.completed),
            self._attended_keys(decoding),
            chunks.attention_pairs,
            len(decoding) + len(chunks.chunks),
        )
        end_s = self._now
        last_stage_start_s = max(self._now, self._stage_free_s[-1])
        for stage, stage_free_s in enumerate(self._stage_free_s):
            end_s = self._stage_free_s[stage] = max(end_s, stage_free_s) + seconds
        self._in_flight.append(_InFlightStep(end_s, end_s - last_stage_start_s, decoding, chunks))
        self.simulation_result.steps += 1
        self.simulation_result.tokens += rows
        self.simulation_result.busy_s += seconds
        return True

    def _plan_decodes(self, count_max: int) -> list[SimulatedRequest]:
        """Plan one token for each of at most `count_max` ready requests that have a block for it.

        If blocks may be missing, the requests that arrived first come first.
        """
        if self._has_ample_blocks:
            decoding = [self._ready.popleft() for _ in range(min(count_max, len(self._ready)))]
        else:
            decoding = self._allocate_decodes(count_max)
        for request in decoding:
            request.planned_tokens += 1
            request.steps_in_flight += 1
        return decoding

    def _allocate_decodes(self, count_max: int) -> list[SimulatedRequest]:
        ready = list(self._ready)
        if self._blocks_available < len(ready) * len(self._rules.windows):
            ready.sort(key=lambda request: request.age)
        victims = sorted(self._preemptible_requests(), key=lambda request: request.age)
        decoding = dict[int, SimulatedRequest]()
        for request in ready:
            if len(decoding) == count_max:
                break
            if not request.is_running:  # Preempted by an earlier request in this loop.
                continue
            has_block = self._allocate(request, request.planned_tokens + 1, victims)
            if has_block or self._running_count == 1:
                decoding[request.number] = request
        self._ready = deque(request for request in self._ready if request.number not in decoding)
        return list(decoding.values())

    def _attended_keys(self, decoding: list[SimulatedRequest]) -> float:
        """Return the number of keys that the planned tokens of these requests attend to."""
        if not self._span.has_windows:
            return sum([request.planned_tokens for request in decoding])
        return sum([self._span.keys(request.planned_tokens) for request in decoding])

    def _complete_step(self) -> None:
        step = self._in_flight.popleft()
        self._now = max(self._now, step.end_s)
        self._stall_budget.record_step(step.chunks.tokens, step.last_stage_s)
        gaps = sorted(self._now - request.last_token_s for request in step.decoding)
        self.simulation_result.token_gaps += [
            (gap, len(list(equal_gaps)), self._now) for gap, equal_gaps in groupby(gaps)
        ]
        for request in step.decoding:
            request.computed_tokens += 1
            request.steps_in_flight -= 1
            request.generated_tokens += 1
            request.last_token_s = self._now
            self._continue_or_finish(request)
        for request, end in step.chunks.chunks:
            request.computed_tokens = end
            request.steps_in_flight -= 1
        for request in step.chunks.completed:
            self._complete_prefill(request)
            self._continue_or_finish(request)

    def _continue_or_finish(self, request: SimulatedRequest) -> None:
        if request.generated_tokens == request.output_tokens:
            del self._decoding[request.number]
            self._finish_request(request)
        else:
            self._ready.append(request)

    # -------------------------------------------------------------------------------- KV blocks

    @property
    def _running_count(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def _running_requests(self) -> list[SimulatedRequest]:
        return [*self._decoding.values(), *self._prefilling]

    def _preemptible_requests(self) -> list[SimulatedRequest]:
        """The running requests that are in no step in flight."""
        return [request for request in self._running_requests() if not request.steps_in_flight]

    def _remove_running(self, request: SimulatedRequest) -> None:
        self._blocks_available += self._held_blocks(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        else:
            del self._decoding[request.number]
            self._ready = deque(other for other in self._ready if other is not request)
