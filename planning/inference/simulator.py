"""Continuous-batching simulator that the planner uses: replays requests on a simulated clock.

The simulator has the rules of `serving/scheduler/scheduler.py` for requests of one class and one
tenant; a test compares it with `planning.inference.reference_simulator`, which runs the scheduler.
Step durations come from the step cost model. Consecutive steps that only decode are simulated
together, so thousands of requests take milliseconds.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import groupby

from planning.inference.step_cost import StepCostModel
from serving.memory_budget import KV_BLOCK_TOKENS
from serving.scheduler.chunked_prefill import PrefillTokenBudget, chunk_end

# `PrefillCostModel` weights old steps down, by a decay per step. After this many equal steps the
# weight of all older steps is 5 %, so further equal steps are not recorded.
PREFILL_COST_STEPS_MAX = 150
# A simulation stops after this many steps if at least one request has finished by then.
STEPS_MAX, PIPELINE_STEPS_MAX = 2_000_000, 100_000


@dataclass(slots=True)
class SimulatedRequest:
    """One request. Times are engine times, without the overhead of the front end."""

    number: int
    arrival_s: float
    prompt_tokens: int  # Including cached tokens.
    output_tokens: int
    cached_tokens: int = 0  # Prompt tokens that are in the prefix cache.
    first_token_s: float = -1.0
    end_s: float = -1.0
    last_token_s: float = -1.0  # Time of the most recent token.
    generated_tokens: int = 0
    # Number of tokens whose prefill is planned or done, cached tokens included.
    prefilled_tokens: int = 0
    # `prefilled_tokens` when the prefill is complete: the prompt tokens and, after a preemption,
    # also the tokens generated before it.
    prefill_target: int = 0


@dataclass(frozen=True)
class SchedulerRules:
    """The server settings that determine scheduling."""

    running_requests_max: int
    step_tokens_max: int
    prefill_stall_s: float
    kv_tokens: int
    pipeline_stages: int = 1
    block_tokens: int = KV_BLOCK_TOKENS


@dataclass
class SimulationResult:
    """The finished requests and the counters of a simulation.

    A token gap is (seconds between two tokens, number of tokens with that gap, end time).
    """

    requests: list[SimulatedRequest] = field(default_factory=list)
    token_gaps: list[tuple[float, int, float]] = field(default_factory=list)
    busy_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0


@dataclass
class PrefillChunks:
    """The prefill part of a step."""

    tokens: int = 0
    attention_pairs: int = 0
    chunk_count: int = 0
    # Requests whose last prefill chunk is in this step.
    completed: list[SimulatedRequest] = field(default_factory=list)


def make_simulation(step_costs: StepCostModel, rules: SchedulerRules) -> "Simulation":
    return (
        SingleStageSimulation(step_costs, rules)
        if rules.pipeline_stages == 1
        else PipelineSimulation(step_costs, rules)
    )


class Simulation(ABC):
    """The simulation of one replica. An instance runs once."""

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        self._step_costs = step_costs
        self._rules = rules
        self._stall_budget = PrefillTokenBudget(rules.prefill_stall_s, rules.block_tokens)
        self._now = 0.0
        # Requests that have not arrived yet, and requests in the queue; both sorted by arrival.
        self._arrivals: deque[SimulatedRequest] = deque()
        self._waiting: list[tuple[float, int, SimulatedRequest]] = []
        # Running requests whose prefill is not completely planned yet.
        self._prefilling: list[SimulatedRequest] = []
        # KV cache tokens of all running requests, with the complete prompts of `_prefilling`.
        self._kv_tokens = 0
        # Closed loop: requests that no client has sent yet, and the pause between two requests.
        self._unsent: deque[SimulatedRequest] = deque()
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
        """Run until all requests have arrived and finished, or until the limit of steps."""

    def _enqueue_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0].arrival_s <= self._now:
            request = self._arrivals.popleft()
            request.prefilled_tokens = request.cached_tokens
            request.prefill_target = request.prompt_tokens
            self._enqueue(request)

    def _enqueue(self, request: SimulatedRequest) -> None:
        insort(self._waiting, (request.arrival_s, request.number, request))

    def _prefill_budget(self, token_budget: int, decoding: int) -> int:
        """Return the limit of prefill tokens in a step with `token_budget` tokens left.

        `decoding`: the number of requests that decode. If it is not 0, the limit also bounds how
        long the prefill may delay the next tokens of these requests.
        """
        if not decoding:
            return token_budget
        first_tokens_pending = len(self._waiting) + len(self._prefilling)
        return self._stall_budget.limit_tokens(token_budget, first_tokens_pending)

    def _admit(self, token_budget: int, running: int) -> None:
        """Admit waiting requests in order of arrival until tokens, slots or memory run out."""
        rules, block_tokens = self._rules, self._rules.block_tokens
        tokens_pending = sum(
            prefilling.prefill_target - prefilling.prefilled_tokens
            for prefilling in self._prefilling
        )
        while (
            self._waiting and token_budget > tokens_pending and running < rules.running_requests_max
        ):
            request = self._waiting[0][2]
            # Each running request needs one more block to grow into.
            if (
                running
                and self._kv_tokens + request.prefill_target + block_tokens * (running + 1)
                > rules.kv_tokens
            ):
                return
            self._waiting.pop(0)
            self._prefilling.append(request)
            tokens_pending += request.prefill_target - request.prefilled_tokens
            self._kv_tokens += request.prefill_target
            running += 1

    def _plan_prefill_chunks(self, token_budget: int) -> PrefillChunks:
        """Plan prefill chunks of whole blocks, in order of admission."""
        chunks, block_tokens = PrefillChunks(), self._rules.block_tokens
        for request in self._prefilling:
            if token_budget <= 0:
                break
            end = chunk_end(
                request.prefilled_tokens, token_budget, request.prefill_target, block_tokens
            )
            new_tokens = end - request.prefilled_tokens
            chunks.attention_pairs += new_tokens * (request.prefilled_tokens + end + 1) // 2
            chunks.tokens += new_tokens
            chunks.chunk_count += 1
            token_budget -= new_tokens
            request.prefilled_tokens = end
            if end == request.prefill_target:
                chunks.completed.append(request)
        for request in chunks.completed:
            self._prefilling.remove(request)
        return chunks

    def _complete_prefill(self, request: SimulatedRequest) -> None:
        """Record the token that the last prefill chunk generates."""
        request.generated_tokens += 1
        request.last_token_s = self._now
        if request.first_token_s < 0:
            request.first_token_s = self._now

    def _finish_request(self, request: SimulatedRequest) -> None:
        request.end_s = self._now
        self._kv_tokens -= request.prompt_tokens + request.output_tokens - 1
        self.simulation_result.requests.append(request)
        if self._think_s is not None and self._unsent:
            next_request = self._unsent.popleft()
            next_request.arrival_s = self._now + self._think_s
            self._arrivals.append(next_request)

    def _is_kv_exhausted(self, decoding: int) -> bool:
        """Return whether the KV cache is too full for all decoding requests to grow.

        `_kv_tokens` does not count the empty part of last blocks: half a block per request on
        average.
        """
        block_tokens = self._rules.block_tokens
        return (
            decoding > 1 and self._kv_tokens + decoding * block_tokens // 2 >= self._rules.kv_tokens
        )

    def _requeue_preempted(self, request: SimulatedRequest) -> None:
        """Put a preempted request back into the queue; all of its tokens are computed again."""
        self._kv_tokens -= request.prompt_tokens + request.generated_tokens - 1
        request.prefilled_tokens = 0
        request.prefill_target = request.prompt_tokens + request.generated_tokens
        self.simulation_result.preemptions += 1
        self._enqueue(request)


class SingleStageSimulation(Simulation):
    """Simulation without pipeline parallelism.

    Each step generates one token for each decoding request, so the step in which a request finishes
    is known when its decoding starts.
    """

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        super().__init__(step_costs, rules)
        self._step_index = 0  # Number of steps so far.
        # Heap of decoding requests, ordered by the step that generates their last token.
        self._decode_heap: list[tuple[int, int, SimulatedRequest]] = []
        self._context_tokens = 0  # Context tokens of all decoding requests.

    def _run(self) -> None:
        while self.simulation_result.steps < STEPS_MAX or not self.simulation_result.requests:
            self._enqueue_arrivals()
            if not (self._waiting or self._prefilling or self._decode_heap):
                if not self._arrivals:
                    return
                self._now = self._arrivals[0].arrival_s
                continue
            count, budget = len(self._decode_heap), self._rules.step_tokens_max
            if self._waiting:
                token_budget = self._prefill_budget(budget - count, count)
                self._admit(token_budget, count + len(self._prefilling))
            if self._prefilling:
                self._run_mixed_step(
                    self._plan_prefill_chunks(self._prefill_budget(budget - count, count))
                )
            else:
                assert self._decode_heap, "a request waits although nothing runs"
                self._run_decode_steps()
            while self._decode_heap and self._decode_heap[0][0] <= self._step_index:
                self._finish_decode(heappop(self._decode_heap)[2])
            while self._is_kv_exhausted(len(self._decode_heap)):
                self._preempt_latest()

    def _run_mixed_step(self, chunks: PrefillChunks) -> None:
        """Simulate a step that decodes and computes prefill chunks."""
        count = len(self._decode_heap)
        seconds = self._step_costs.step_seconds(
            count + chunks.tokens,
            count + len(chunks.completed),
            self._context_tokens + count,
            chunks.attention_pairs,
            count + chunks.chunk_count,
        )
        self._advance_clock(seconds, 1)
        self.simulation_result.tokens += chunks.tokens
        self._stall_budget.record_step(chunks.tokens, seconds)
        for request in chunks.completed:
            self._complete_prefill(request)
            self._context_tokens += request.prefill_target
            finish_step = self._step_index + request.output_tokens - request.generated_tokens
            heappush(self._decode_heap, (finish_step, request.number, request))

    def _run_decode_steps(self) -> None:
        """Simulate decode steps together, up to the next event.

        The events are: a request finishes, a request arrives, the memory is full.
        """
        count, step_costs = len(self._decode_heap), self._step_costs
        first_s = step_costs.step_seconds(count, count, self._context_tokens + count, 0, count)
        growth_s = step_costs.context_s * count
        kv_tokens_free = (
            self._rules.kv_tokens - self._kv_tokens - count * self._rules.block_tokens // 2
        )
        steps_taken = max(
            1, min(self._decode_heap[0][0] - self._step_index, kv_tokens_free // count)
        )
        if self._arrivals:
            until_s = self._arrivals[0].arrival_s - self._now
            steps_taken = max(
                1, min(steps_taken, int(until_s / (first_s + growth_s * steps_taken / 2)))
            )
        seconds = steps_taken * first_s + growth_s * steps_taken * (steps_taken - 1) / 2
        self._advance_clock(seconds, steps_taken)
        for _ in range(min(steps_taken, PREFILL_COST_STEPS_MAX)):
            self._stall_budget.record_step(0, seconds / steps_taken)

    def _advance_clock(self, seconds: float, steps: int) -> None:
        count, simulation_result = len(self._decode_heap), self.simulation_result
        self._now += seconds
        self._step_index += steps
        self._context_tokens += count * steps
        self._kv_tokens += count * steps
        simulation_result.busy_s += seconds
        simulation_result.steps += steps
        simulation_result.tokens += steps * count
        if count:
            simulation_result.token_gaps.append((seconds / steps, count * steps, self._now))

    def _finish_decode(self, request: SimulatedRequest) -> None:
        request.generated_tokens = request.output_tokens
        self._context_tokens -= request.prompt_tokens + request.output_tokens - 1
        self._finish_request(request)

    def _preempt_latest(self) -> None:
        """Preempt the decoding request that arrived last."""
        last = max(self._decode_heap, key=lambda heap_entry: heap_entry[2].arrival_s)
        self._decode_heap.remove(last)
        heapify(self._decode_heap)
        finish_step, _, request = last
        request.generated_tokens = request.output_tokens - (finish_step - self._step_index)
        self._context_tokens -= request.prompt_tokens + request.generated_tokens - 1
        self._requeue_preempted(request)


@dataclass
class _InFlightStep:
    """A step that passes through the pipeline stages."""

    end_s: float
    last_stage_s: float  # Duration of the step as measured on the last stage.
    decoding: list[SimulatedRequest]
    chunks: PrefillChunks


class PipelineSimulation(Simulation):
    """Simulation of a pipeline with up to one step in flight per stage.

    Each step decodes an equal share of the decoding requests.
    """

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        super().__init__(step_costs, rules)
        self._in_flight: deque[_InFlightStep] = deque()
        # The time at which each stage finishes its launched steps.
        self._stage_free_s = [0.0] * rules.pipeline_stages
        self._ready: deque[SimulatedRequest] = deque()  # Decoding requests that are not in flight.
        self._decoding_count = 0  # Number of decoding requests, in flight or not.

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
        decodes_per_step = -(-self._decoding_count // rules.pipeline_stages)
        if self._waiting:
            token_budget = self._prefill_budget(
                budget - min(len(self._ready), decodes_per_step), self._decoding_count
            )
            self._admit(token_budget, self._decoding_count + len(self._prefilling))
            decodes_per_step = -(-self._decoding_count // rules.pipeline_stages)
        decoding = [self._ready.popleft() for _ in range(min(decodes_per_step, len(self._ready)))]
        chunks = self._plan_prefill_chunks(
            self._prefill_budget(budget - len(decoding), self._decoding_count)
        )
        self._decoding_count += len(chunks.completed)
        rows = len(decoding) + chunks.tokens
        if not rows:
            return False
        seconds = self._step_costs.step_seconds(
            rows,
            len(decoding) + len(chunks.completed),
            sum(request.prompt_tokens + request.generated_tokens for request in decoding),
            chunks.attention_pairs,
            len(decoding) + chunks.chunk_count,
        )
        end_s, last = self._now, max(self._now, self._stage_free_s[-1])
        for stage, stage_free_s in enumerate(self._stage_free_s):
            end_s = self._stage_free_s[stage] = max(end_s, stage_free_s) + seconds
        self._kv_tokens += len(decoding)
        self._in_flight.append(_InFlightStep(end_s, end_s - last, decoding, chunks))
        self.simulation_result.steps += 1
        self.simulation_result.tokens += rows
        self.simulation_result.busy_s += seconds
        return True

    def _complete_step(self) -> None:
        step = self._in_flight.popleft()
        self._now = max(self._now, step.end_s)
        self._stall_budget.record_step(step.chunks.tokens, step.last_stage_s)
        gaps = [self._now - request.last_token_s for request in step.decoding]
        equal_gaps = groupby(sorted(gaps))
        self.simulation_result.token_gaps += [
            (gap, len(list(equal_gap_group)), self._now) for gap, equal_gap_group in equal_gaps
        ]
        for request in step.decoding:
            request.generated_tokens += 1
            request.last_token_s = self._now
            self._continue_or_finish(request)
        for request in step.chunks.completed:
            self._complete_prefill(request)
            self._continue_or_finish(request)
        while self._ready and self._is_kv_exhausted(self._decoding_count):
            last = max(self._ready, key=lambda request: request.arrival_s)
            self._ready.remove(last)
            self._decoding_count -= 1
            self._requeue_preempted(last)

    def _continue_or_finish(self, request: SimulatedRequest) -> None:
        if request.generated_tokens == request.output_tokens:
            self._decoding_count -= 1
            self._finish_request(request)
        else:
            self._ready.append(request)
