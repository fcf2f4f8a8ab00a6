"""Reference simulator of continuous batching, for tests; the planner uses `simulator`.

The reference runs the server's scheduler on a simulated clock, with predicted step durations.
`planning.inference.simulator` implements the rules of the scheduler again, and is several times
faster. A test runs random workloads through both simulators. The reference has no prefix cache, so
requests must not have cached tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt.sampling_params import SamplingParams
from planning.inference.simulator import SchedulerRules, SimulatedRequest, SimulationResult
from planning.inference.step_cost import StepCostModel
from serving.config import ServerConfig
from serving.messages import Outcome, SequenceOutput, Step, Submission
from serving.scheduler.scheduler import Scheduler

# This simulation has no stop tokens, no prefix cache and no speculative decoding. Therefore the
# values of tokens do not affect the scheduler, and all tokens have the id TOKEN_ID.
VOCAB_SIZE, TOKEN_ID = 2, 0
CONTEXT_TOKENS_MAX = 1 << 20


def simulate_with_scheduler(
    step_costs: StepCostModel,
    rules: SchedulerRules,
    requests: Sequence[SimulatedRequest],
    *,
    concurrency: int = 0,
    think_s: float = 0.0,
) -> SimulationResult:
    """Simulate requests with the server's scheduler; `requests` are not modified.

    Open loop (`concurrency` 0): each request arrives at its `arrival_s`; `requests` must be sorted
    by this time.
    Closed loop: each of `concurrency` clients sends its next request `think_s` after a response.
    """
    simulation = _SchedulerSimulation(step_costs, rules, think_s if concurrency else None)
    return simulation.run([replace(request) for request in requests], concurrency)


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that passes through the pipeline stages."""

    outcome: Outcome  # Committed to the scheduler at `end_s`.
    end_s: float


class _SchedulerSimulation:
    """Runs the scheduler's steps on simulated pipeline stages, with a simulated clock.

    `run` can be called once.
    """

    def __init__(
        self, step_costs: StepCostModel, rules: SchedulerRules, think_s: float | None
    ) -> None:
        self._step_costs = step_costs
        self._rules = rules
        self._think_s = think_s  # None: open loop.
        self._scheduler = make_scheduler(rules)
        self._now = 0.0
        self._arrivals: deque[SimulatedRequest] = deque()
        # Closed loop: requests that no client has sent yet.
        self._unsent: deque[SimulatedRequest] = deque()
        self._live: dict[int, SimulatedRequest] = {}
        self._in_flight: deque[_LaunchedStep] = deque()
        # The time at which each stage finishes its launched steps.
        self._stage_free_s = [0.0] * rules.pipeline_stages
        self._simulation_result = SimulationResult()

    def run(self, requests: list[SimulatedRequest], concurrency: int) -> SimulationResult:
        if self._think_s is None:
            self._arrivals.extend(requests)
        else:
            self._unsent.extend(requests)
            for _ in range(min(concurrency, len(requests))):
                self._send_next_request(self._think_s)
        while self._arrivals or self._live:
            if len(self._in_flight) >= self._rules.pipeline_stages:
                self._complete_step()
            self._submit_arrivals()
            step = self._scheduler.plan(self._now)
            if step is not None:
                self._launch_step(step)
            elif self._in_flight:
                self._complete_step()
            elif self._arrivals:
                self._now = max(self._now, self._arrivals[0].arrival_s)
            else:
                assert not self._live, "a request waits although nothing runs"
        self._simulation_result.preemptions = self._scheduler.stats.preemptions
        return self._simulation_result

    def _send_next_request(self, think_s: float) -> None:
        request = self._unsent.popleft()
        request.arrival_s = self._now + think_s
        self._arrivals.append(request)

    def _submit_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0].arrival_s <= self._now:
            request = self._arrivals.popleft()
            assert not request.cached_tokens, "the reference simulation has no prefix cache"
            submission = Submission(
                request.number,
                [TOKEN_ID] * request.prompt_tokens,
                SamplingParams(max_new_tokens=request.output_tokens),
            )
            rejection = self._scheduler.add_sequence(submission, self._now)
            assert rejection is None, f"the scheduler rejects request {request.number}: {rejection}"
            self._live[request.number] = request

    def _launch_step(self, step: Step) -> None:
        seconds = self._step_seconds(step)
        end_s = self._now
        last_stage_start_s = max(self._now, self._stage_free_s[-1])
        for stage, stage_free_s in enumerate(self._stage_free_s):
            end_s = self._stage_free_s[stage] = max(end_s, stage_free_s) + seconds
        outcome = Outcome(
            step.step_id, [TOKEN_ID] * sum(step.draws), seconds=end_s - last_stage_start_s
        )
        self._in_flight.append(_LaunchedStep(outcome, end_s))
        self._simulation_result.steps += 1
        self._simulation_result.tokens += sum(step.lengths)
        self._simulation_result.busy_s += seconds

    def _step_seconds(self, step: Step) -> float:
        attention_pairs = context_tokens = 0.0
        span = self._rules.attention_span
        for past, length in zip(step.past, step.lengths, strict=True):
            if length == 1 and past:
                context_tokens += span.keys(past + 1)
            else:
                attention_pairs += span.pairs(past, past + length)
        return self._step_costs.step_seconds(
            sum(step.lengths), sum(step.draws), context_tokens, attention_pairs, len(step.slots)
        )

    def _complete_step(self) -> None:
        step = self._in_flight.popleft()
        self._now = max(self._now, step.end_s)
        for sequence_output in self._scheduler.commit(step.outcome, self._now):
            self._record_token(sequence_output)
        self._scheduler.check()

    def _record_token(self, sequence_output: SequenceOutput) -> None:
        request = self._live[sequence_output.sequence_id]
        request.generated_tokens += 1
        if request.first_token_s < 0:
            request.first_token_s = self._now
        else:
            self._simulation_result.token_gaps.append(
                (self._now - request.last_token_s, 1, self._now)
            )
        request.last_token_s = self._now
        if sequence_output.end is None:
            return
        request.end_s = self._now
        self._simulation_result.requests.append(self._live.pop(request.number))
        if self._think_s is not None and self._unsent:
            self._send_next_request(self._think_s)


def make_scheduler(rules: SchedulerRules) -> Scheduler:
    """Return a scheduler with the settings of `rules` and without a prefix cache."""
    config = ServerConfig(
        model="",
        running_requests_max=rules.running_requests_max,
        step_tokens_max=rules.step_tokens_max,
        prefill_stall_ms_max=1000 * rules.prefill_stall_s,
        kv_block_tokens=rules.block_tokens,
        prefix_cache=False,
    )
    return Scheduler(
        vocab_size=VOCAB_SIZE,
        blocks=rules.kv_blocks + 1,  # Block 0 is never assigned.
        scheduler_config=config.scheduler_config,
        cache_config=config.cache_config,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        stages=rules.pipeline_stages,
        windows=rules.windows,
    )
