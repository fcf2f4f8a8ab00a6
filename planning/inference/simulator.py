"""Continuous-batching simulator that the planner uses: replays requests on a simulated clock.

The simulator has the rules of `serving/scheduler/scheduler.py` for requests of one class and one
tenant. A test compares it with `planning.inference.reference_simulator`, which runs the scheduler.
Step durations come from the step cost model. With one pipeline stage, consecutive steps that only
decode are simulated together, so thousands of requests take milliseconds.
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
    # Number of tokens whose prefill is planned or done, cached tokens included.
    prefilled_tokens: int = 0
    # Number of tokens to prefill, cached tokens included: the prompt and, after a preemption, the
    # tokens that were generated before the preemption.
    prefill_target: int = 0


@dataclass(frozen=True)
class SchedulerRules:
    """The server settings that determine scheduling."""

    running_requests_max: int
    step_tokens_max: int
    prefill_stall_s: float  # The server's `prefill_stall_ms_max`, in seconds.
    kv_tokens: int  # Size of the KV cache in tokens.
    pipeline_stages: int = 1
    block_tokens: int = KV_BLOCK_TOKENS


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
    """The simulation of one replica. Call only one of the `run_` methods, and only once."""

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        self._step_costs = step_costs
        self._rules = rules
        self._stall_budget = PrefillTokenBudget(rules.prefill_stall_s, rules.block_tokens)
        self._now = 0.0
        # Requests that have not arrived yet, sorted by arrival.
        self._arrivals: deque[SimulatedRequest] = deque()
        # The queue: (arrival, number, request), sorted.
        self._waiting: list[tuple[float, int, SimulatedRequest]] = []
        # Running requests whose prefill is not completely planned yet.
        self._prefilling: list[SimulatedRequest] = []
        # KV cache tokens of all running requests. A request in `_prefilling` counts with all tokens
        # that it will prefill.
        self._kv_tokens = 0
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
            request.prefilled_tokens = request.cached_tokens
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

    def _admit(self, token_budget: int, running: int) -> None:
        """Admit waiting requests in order of arrival until tokens, slots or memory run out."""
        rules, block_tokens = self._rules, self._rules.block_tokens
        tokens_pending = sum(
            request.prefill_target - request.prefilled_tokens for request in self._prefilling
        )
        while (
            self._waiting and token_budget > tokens_pending and running < rules.running_requests_max
        ):
            request = self._waiting[0][2]
            # Each running request needs one more block to grow into. If nothing runs, a request is
            # always admitted.
            kv_tokens_needed = (
                self._kv_tokens + request.prefill_target + block_tokens * (running + 1)
            )
            if running and kv_tokens_needed > rules.kv_tokens:
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
        # The keys and values of the last token are not computed.
        self._kv_tokens -= request.prompt_tokens + request.output_tokens - 1
        self.simulation_result.requests.append(request)
        if self._think_s is not None and self._unsent:
            next_request = self._unsent.popleft()
            next_request.arrival_s = self._now + self._think_s
            self._arrivals.append(next_request)

    def _is_kv_exhausted(self, decoding: int) -> bool:
        """Return whether the KV cache is too full for the next tokens of all decoding requests.

        `_kv_tokens` does not count the unused part of each request's last block, which is half a
        block on average. A request that decodes alone can always grow.
        """
        kv_tokens_used = self._kv_tokens + decoding * self._rules.block_tokens // 2
        return decoding > 1 and kv_tokens_used >= self._rules.kv_tokens

    def _requeue_preempted(self, request: SimulatedRequest) -> None:
        """Put a preempted request back into the queue; all its tokens will be computed again."""
        self._kv_tokens -= request.prompt_tokens + request.generated_tokens - 1
        request.prefilled_tokens = 0
        request.prefill_target = request.prompt_tokens + request.generated_tokens
        self.simulation_result.preemptions += 1
        self._enqueue(request)


class SingleStageSimulation(Simulation):
    """Simulation without pipeline parallelism.

    Each step generates one token for each decoding request. The step in which a request finishes is
    therefore known when its decoding starts.
    """

    def __init__(self, step_costs: StepCostModel, rules: SchedulerRules) -> None:
        super().__init__(step_costs, rules)
        self._step_index = 0  # Number of steps so far.
        # Heap of decoding requests: (index of the step that generates the last token, number,
        # request).
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

        The events are: a request finishes, a request arrives, the KV cache is full.
        """
        count, step_costs = len(self._decode_heap), self._step_costs
        # The duration of the first step, and the increase of the duration from step to step.
        first_s = step_costs.step_seconds(count, count, self._context_tokens + count, 0, count)
        growth_s = step_costs.context_s * count
        kv_tokens_free = (
            self._rules.kv_tokens - self._kv_tokens - count * self._rules.block_tokens // 2
        )
        steps_to_finish = self._decode_heap[0][0] - self._step_index
        steps = max(1, min(steps_to_finish, kv_tokens_free // count))
        if self._arrivals:
            until_arrival_s = self._arrivals[0].arrival_s - self._now
            mean_step_s = first_s + growth_s * steps / 2
            steps = max(1, min(steps, int(until_arrival_s / mean_step_s)))
        seconds = steps * first_s + growth_s * steps * (steps - 1) / 2
        self._advance_clock(seconds, steps)
        for _ in range(min(steps, PREFILL_COST_STEPS_MAX)):
            self._stall_budget.record_step(0, seconds / steps)

    def _advance_clock(self, seconds: float, steps: int) -> None:
        """Advance the clock by `seconds`, the total duration of `steps` steps.

        Each step generates one token for each decoding request.
        """
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
        latest_entry = max(self._decode_heap, key=lambda heap_entry: heap_entry[2].arrival_s)
        self._decode_heap.remove(latest_entry)
        heapify(self._decode_heap)
        finish_step, _, request = latest_entry
        request.generated_tokens = request.output_tokens - (finish_step - self._step_index)
        self._context_tokens -= request.prompt_tokens + request.generated_tokens - 1
        self._requeue_preempted(request)


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
    """Simulation of a pipeline with up to one step in flight per stage.

    Each step decodes at most 1 / (number of stages) of the decoding requests, rounded up.
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
        end_s = self._now
        last_stage_start_s = max(self._now, self._stage_free_s[-1])
        for stage, stage_free_s in enumerate(self._stage_free_s):
            end_s = self._stage_free_s[stage] = max(end_s, stage_free_s) + seconds
        self._kv_tokens += len(decoding)
        self._in_flight.append(_InFlightStep(end_s, end_s - last_stage_start_s, decoding, chunks))
        self.simulation_result.steps += 1
        self.simulation_result.tokens += rows
        self.simulation_result.busy_s += seconds
        return True

    def _complete_step(self) -> None:
        step = self._in_flight.popleft()
        self._now = max(self._now, step.end_s)
        self._stall_budget.record_step(step.chunks.tokens, step.last_stage_s)
        gaps = sorted(self._now - request.last_token_s for request in step.decoding)
        self.simulation_result.token_gaps += [
            (gap, len(list(equal_gaps)), self._now) for gap, equal_gaps in groupby(gaps)
        ]
        for request in step.decoding:
            request.generated_tokens += 1
            request.last_token_s = self._now
            self._continue_or_finish(request)
        for request in step.chunks.completed:
            self._complete_prefill(request)
            self._continue_or_finish(request)
        while self._ready and self._is_kv_exhausted(self._decoding_count):
            latest_request = max(self._ready, key=lambda request: request.arrival_s)
            self._ready.remove(latest_request)
            self._decoding_count -= 1
            self._requeue_preempted(latest_request)

    def _continue_or_finish(self, request: SimulatedRequest) -> None:
        if request.generated_tokens == request.output_tokens:
            self._decoding_count -= 1
            self._finish_request(request)
        else:
            self._ready.append(request)
