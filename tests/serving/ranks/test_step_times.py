"""The step time-out pairs each time with its step: replays through the engine loop.

The engine loop and the scheduler are real. The model runner is a fake: each step has a duration
that the test chooses, and no step takes time. The limit is read where the engine loop launches a
step and where it waits for a step, from the updates that it has sent until then.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.engine_core.engine_loop import EngineLoop
from serving.messages import (
    Close,
    FromEngineLoop,
    Outcome,
    Step,
    StepSize,
    StepTime,
    Submission,
    Update,
    decode_from_engine_loop,
    encode,
)
from serving.ranks.watchdog import RECENT_STEPS, TIMEOUT_FACTOR, TIMEOUT_MIN_S, StepTimeout
from serving.scheduler.scheduler import Scheduler
from serving.worker.model_runner import ModelRunner, PendingOutcome

CONFIG = GPTConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=1,
    vocab_size=64,
    max_position_embeddings=8192,
    position_embedding_type="rope",
)
PROMPT_TOKENS = 4096
DECODE_S = 0.03


class Replay:
    """An engine loop over a fake model runner, with the step time-out that reads its updates.

    `duration_s` is called with the size of each step. `warmup_s`: the duration of the warm-up's
    largest step. `on_update` may send messages to the engine loop.
    """

    def __init__(
        self,
        duration_s: Callable[[StepSize], float],
        *,
        pp: int = 1,
        async_scheduling: bool = False,
        warmup_s: float,
        step_tokens_max: int = PROMPT_TOKENS,
    ) -> None:
        self.updates: list[Update] = []
        self.completed: list[StepTime] = []
        # At the launch of each step, and while the engine loop waits for the step.
        self.limits: list[tuple[StepSize, float]] = []
        self.sizes_in_flight: deque[StepSize] = deque()
        self.on_update: Callable[[Update], None] = lambda update: None
        self.on_step: Callable[[], None] = lambda: None
        self._duration_s = duration_s
        self._ended = 0
        self.timeout = StepTimeout(None, first_step_s=300.0)
        self.timeout.record_steps([StepTime(step_tokens_max, 0, warmup_s)], [])
        config = ServerConfig(
            "model",
            prefix_cache=False,
            prefill_stall_ms_max=1e6,  # A prompt is not split because other requests decode.
            step_tokens_max=step_tokens_max,
            running_requests_max=8,
        )
        scheduler = Scheduler(
            vocab_size=CONFIG.vocab_size,
            blocks=4096,
            scheduler_config=config.scheduler_config,
            cache_config=config.cache_config,
            context_tokens_max=CONFIG.max_position_embeddings,
            stages=pp,
            prefix_write_tokens_max=256,
            async_scheduling=async_scheduling,
        )
        model = SimpleNamespace(config=CONFIG, mesh=SimpleNamespace(pp=pp))
        runner = SimpleNamespace(
            model=model,
            async_scheduling=async_scheduling,
            launch=self._launch,
            failed_captures=0,
        )
        self.engine_loop = EngineLoop(
            scheduler,
            cast(ModelRunner, runner),
            config.scheduler_config,
            config.cache_config,
            config.observability_config,
            self._on_message,
        )

    def submit(self, sequence_id: int, prompt_tokens: int, new_tokens: int) -> None:
        prompt = [(sequence_id + position) % 60 for position in range(prompt_tokens)]
        sampling = SamplingParams(max_new_tokens=new_tokens)
        self.engine_loop.put_message(Submission(sequence_id, prompt, sampling))

    def run(self, requests: int) -> None:
        """Run until `requests` requests have ended."""
        self._requests = requests
        assert self.engine_loop.run() is None

    def _on_message(self, message: FromEngineLoop) -> None:
        update = decode_from_engine_loop(encode(message))
        assert isinstance(update, Update), update
        self.updates.append(update)
        self.timeout.record_steps(update.completed_steps, update.steps_in_flight)
        self.on_update(update)
        self._ended += sum(output.end is not None for output in update.outputs)
        if self._ended == self._requests and not update.steps_in_flight:
            self.engine_loop.put_message(Close())

    def _launch(self, step: Step) -> PendingOutcome:
        size = StepSize(sum(step.lengths), sum(step.past))
        if step.slots:
            self.sizes_in_flight.append(size)
            self.on_step()
            self.limits.append((size, self.timeout.limit_s()))
        return partial(self._wait, step, size)

    def _wait(self, step: Step, size: StepSize) -> Outcome:
        """The outcome of a step; at its begin the engine loop starts to wait for the step."""
        seconds = 0.0
        if step.slots:
            self.on_step()
            self.limits.append((size, self.timeout.limit_s()))
            seconds = self._duration_s(size)
            self.completed.append(StepTime(size.tokens, size.context_tokens, seconds))
            self.sizes_in_flight.popleft()
        return Outcome(step.step_id, tokens=[1] * sum(step.draws), seconds=seconds)


def prefill_or_decode_s(prefill_s: float) -> Callable[[StepSize], float]:
    return lambda size: prefill_s if size.tokens > PROMPT_TOKENS // 2 else DECODE_S


def submit_sequentially(replay: Replay, requests: int, new_tokens: int) -> None:
    def submit_next(update: Update) -> None:
        for output in update.outputs:
            if output.end is not None and output.sequence_id + 1 < requests:
                replay.submit(output.sequence_id + 1, PROMPT_TOKENS, new_tokens)

    replay.on_update = submit_next
    replay.submit(0, PROMPT_TOKENS, new_tokens)
    replay.run(requests)


def prefill_limits_s(replay: Replay) -> list[float]:
    return [limit_s for size, limit_s in replay.limits if size.tokens > PROMPT_TOKENS // 2]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_healthy_prefill_with_idle_stages_stays_below_the_limit(pp: int) -> None:
    """One request at a time leaves all stages but one idle; the warm-up's sample ages out."""
    replay = Replay(prefill_or_decode_s(5.0), pp=pp, warmup_s=5.0)
    submit_sequentially(replay, requests=10, new_tokens=50)
    assert len(replay.completed) > RECENT_STEPS
    assert len(prefill_limits_s(replay)) == 2 * 10
    assert all(limit_s >= 50.0 for limit_s in prefill_limits_s(replay))


def test_a_prefill_longer_ago_than_the_recent_steps_stays_below_the_limit() -> None:
    replay = Replay(prefill_or_decode_s(5.0), pp=2, warmup_s=5.0)
    submit_sequentially(replay, requests=3, new_tokens=RECENT_STEPS + 50)
    assert all(limit_s >= 50.0 for limit_s in prefill_limits_s(replay))


def test_asynchronous_scheduling_does_not_raise_the_limit() -> None:
    """Two steps are in flight on one rank: the prefill's time is not that of a decode step."""
    replay = Replay(prefill_or_decode_s(0.2), async_scheduling=True, warmup_s=0.2)
    submit_sequentially(replay, requests=20, new_tokens=20)
    assert len(replay.completed) > RECENT_STEPS
    assert max(len(update.steps_in_flight) for update in replay.updates) == 2
    # Until a step with context tokens was measured, the warm-up's limit applies.
    limits_s = prefill_limits_s(replay)[2:]
    assert len(limits_s) == 2 * 19
    assert all(TIMEOUT_MIN_S <= limit_s < 4.5 for limit_s in limits_s)


def test_an_update_that_launches_no_step_keeps_the_steps_in_flight() -> None:
    """A request ends while the prefill step of another one runs, and no step can be planned."""
    new_tokens = 120  # The p99 of the step times is that of decode steps.
    replay = Replay(prefill_or_decode_s(5.0), pp=2, warmup_s=5.0)
    tokens = 0

    def submit_before_the_end(update: Update) -> None:
        nonlocal tokens
        tokens += sum(len(output.tokens) for output in update.outputs)
        if tokens == new_tokens - 1 and update.outputs:
            replay.submit(1, PROMPT_TOKENS, new_tokens=1)

    replay.on_update = submit_before_the_end
    replay.submit(0, 64, new_tokens)
    replay.run(2)
    (end_update,) = [
        update
        for update in replay.updates
        for output in update.outputs
        if output.sequence_id == 0 and output.end is not None
    ]
    assert end_update.steps_in_flight == [StepSize(PROMPT_TOKENS, 0)]
    assert len(prefill_limits_s(replay)) == 2
    assert all(limit_s >= 50.0 for limit_s in prefill_limits_s(replay))


@given(
    pp=st.integers(1, 4),
    async_scheduling=st.booleans(),
    requests=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 100), st.integers(1, 12)),
        min_size=1,
        max_size=8,
    ),
    seconds=st.lists(st.sampled_from([0.01, 0.03, 0.7, 4.0, 60.0]), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_each_time_is_paired_with_its_step(
    pp: int,
    async_scheduling: bool,
    requests: list[tuple[int, int, int]],
    seconds: Sequence[float],
) -> None:
    """Requests of (updates before the arrival, prompt tokens, new tokens), and any durations."""
    durations = itertools.cycle(seconds)
    replay = Replay(
        lambda size: next(durations),
        pp=pp,
        async_scheduling=async_scheduling,
        warmup_s=4.0,
        step_tokens_max=32,
    )
    arrivals = sorted(enumerate(requests), key=lambda arrival: arrival[1][0])

    def submit_next(update: Update) -> None:
        is_idle = not update.stats.running + update.stats.waiting
        while arrivals and (is_idle or arrivals[0][1][0] <= len(replay.updates)):
            sequence_id, (_, prompt_tokens, new_tokens) = arrivals.pop(0)
            replay.submit(sequence_id, prompt_tokens, new_tokens)
            is_idle = False

    def check_limit() -> None:
        assert replay.updates[-1].steps_in_flight == list(replay.sizes_in_flight)
        for step in replay.completed:
            if StepSize(step.tokens, step.context_tokens) in replay.sizes_in_flight:
                assert replay.timeout.limit_s() >= TIMEOUT_FACTOR * step.seconds

    replay.on_update = submit_next
    replay.on_step = check_limit
    sequence_id, (_, prompt_tokens, new_tokens) = arrivals.pop(0)
    replay.submit(sequence_id, prompt_tokens, new_tokens)
    replay.run(len(requests))
    completed = [step for update in replay.updates for step in update.completed_steps]
    assert completed == replay.completed
