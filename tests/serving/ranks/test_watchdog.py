"""Watchdog: a long step gets a long learned time-out, a short step gets a short limit."""

import fcntl
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from unittest.mock import create_autospec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import ParallelConfig
from serving.engine.transport import Receiver
from serving.messages import (
    HEARTBEAT_INTERVAL_S,
    EngineStats,
    Failed,
    FromEngineLoop,
    KernelCompilation,
    Ready,
    StepSize,
    StepTime,
    Update,
    encode,
)
from serving.ranks import watchdog as watchdog_module
from serving.ranks.message_socket import Channel
from serving.ranks.watchdog import (
    RECENT_STEPS,
    TIMEOUT_FACTOR,
    TIMEOUT_MIN_S,
    RankLoss,
    RankSet,
    StepTimeout,
    Waker,
    Watchdog,
    close_descriptors,
    readable_descriptors,
    wait_for_exit,
)

HIGH_DESCRIPTOR = 1030  # `select` refuses descriptors from 1024 on.


def timeout_after(*steps: tuple[int, int, float]) -> StepTimeout:
    """A StepTimeout after steps of (tokens, context, seconds)."""
    timeout = StepTimeout(None, first_step_s=300.0)
    for step in steps:
        timeout.record_steps([StepTime(*step)], [])
    return timeout


def limit_s(timeout: StepTimeout, *sizes: tuple[int, int]) -> float:
    """The limit while steps of (tokens, context) are in flight."""
    timeout.record_steps([], [StepSize(*size) for size in sizes])
    return timeout.limit_s()


def test_the_first_step_has_the_warm_up_limit() -> None:
    timeout = StepTimeout(None, first_step_s=300.0)
    assert timeout.limit_s() == TIMEOUT_MIN_S + HEARTBEAT_INTERVAL_S  # Nothing runs.
    assert limit_s(timeout, (512, 0)) == 300.0


def test_the_limit_is_the_minimum_or_ten_times_the_step_time() -> None:
    assert limit_s(timeout_after(*[(4, 100, 0.005)] * 50), (4, 100)) == TIMEOUT_MIN_S
    assert limit_s(timeout_after(*[(4, 100, 0.8)] * 50), (4, 100)) >= 8.0


def test_a_fixed_limit_replaces_the_learned_limit() -> None:
    timeout = StepTimeout(1.5, first_step_s=300.0)
    for _ in range(9):
        timeout.record_steps([StepTime(4, 0, 60.0)], [StepSize(4, 0)])
    assert timeout.limit_s() == 1.5
    timeout.record_steps([StepTime(4, 0, 60.0)], [])
    assert timeout.limit_s() == 1.5 + HEARTBEAT_INTERVAL_S


def test_a_long_prefill_after_decode_steps_gets_a_longer_limit() -> None:
    """Decode takes 10 ms a token; a chunk of 2,000 tokens at 5 ms each must be allowed."""
    assert limit_s(timeout_after(*[(1, 50, 0.010)] * 256), (2000, 0)) > 10.0


def test_a_prefill_may_take_ten_times_as_long_as_an_equal_prefill() -> None:
    timeout = timeout_after((4096, 0, 10.0), *[(1, 4096, 0.03)] * 60)
    assert limit_s(timeout, (4096, 0)) >= 100.0
    # One long step does not raise the p99 of the recent steps.
    assert limit_s(timeout_after((4096, 0, 10.0), *[(1, 9, 0.03)] * 200), (1, 9)) < 10.0


def test_a_longer_context_than_before_gets_a_longer_limit() -> None:
    """Decode takes 10 ms with 100 context tokens; with 100,000 at most a thousand times that."""
    assert limit_s(timeout_after(*[(1, 100, 0.010)] * 50), (1, 100_000)) >= 100.0


def test_the_largest_step_in_flight_sets_the_limit() -> None:
    timeout = timeout_after((64, 0, 0.1), *[(1, 9, 0.01)] * 200)
    assert limit_s(timeout, (640, 0)) > 9.0
    assert limit_s(timeout, (640, 0), (1, 9)) > 9.0
    assert limit_s(timeout, (1, 9), (1, 9)) < 3.0
    assert limit_s(timeout, (1, 9), (640, 0)) > 9.0
    assert limit_s(timeout) == TIMEOUT_MIN_S + HEARTBEAT_INTERVAL_S  # No step is in flight.


step_sizes_parts = (st.integers(1, 4096), st.integers(0, 100_000))
step_sizes = st.tuples(*step_sizes_parts)


@given(
    steps=st.lists(step_sizes, min_size=1, max_size=20),
    fixed_ms=st.floats(0, 50),
    token_ms=st.floats(0.01, 20),
    context_us=st.floats(0, 50),
)
@settings(max_examples=50, deadline=None)
def test_steady_steps_never_exceed_the_limit(
    steps: list[tuple[int, int]], fixed_ms: float, token_ms: float, context_us: float
) -> None:
    """After the largest chunk was measured once, as in the warm-up."""
    timeout = StepTimeout(None, first_step_s=300.0)

    def seconds(tokens: int, context: int) -> float:
        return (fixed_ms + token_ms * tokens) / 1e3 + context_us * context / 1e6

    completed_steps: list[StepTime] = []
    for tokens, context in [(4096, 0), (4096, 100_000), *steps]:
        timeout.record_steps(completed_steps, [StepSize(tokens, context)])
        step_time = StepTime(tokens, context, seconds(tokens, context))
        assert step_time.seconds < timeout.limit_s()
        completed_steps = [step_time]


step_times = st.builds(
    StepTime,
    st.sampled_from([1, 2, 3, 64, 1000, 4096]),
    st.sampled_from([0, 1, 7, 100_000]),
    st.floats(1e-4, 100.0),
)


@given(
    steps=st.lists(step_times, min_size=1, max_size=40),
    later_steps=st.integers(0, RECENT_STEPS - 40),
    others_in_flight=st.lists(st.builds(StepSize, *step_sizes_parts), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_the_limit_is_at_least_ten_times_each_recent_step_of_a_size_in_flight(
    steps: list[StepTime], later_steps: int, others_in_flight: list[StepSize]
) -> None:
    timeout = StepTimeout(None, first_step_s=300.0)
    timeout.record_steps(steps, [])
    timeout.record_steps([StepTime(1, 50, 0.01)] * later_steps, [])
    for step in steps:
        size = StepSize(step.tokens, step.context_tokens)
        timeout.record_steps([], [*others_in_flight, size])
        assert timeout.limit_s() >= max(TIMEOUT_MIN_S, TIMEOUT_FACTOR * step.seconds)


def loss_after(messages: list[FromEngineLoop], config: ParallelConfig) -> RankLoss:
    """The loss that the watchdog reports when rank 0 sends these messages and is silent then."""
    watched_socket, rank_socket = socket.socketpair()
    watched, rank, waker = Channel(watched_socket), Channel(rank_socket), Waker()
    rank_set = RankSet(watched, {}, lambda rank: None)
    receiver = create_autospec(Receiver, instance=True)
    watchdog = Watchdog(rank_set, config, receiver, waker, lambda: None)
    for message in messages:
        rank.send(encode(message))
    try:
        return watchdog.watch_until_lost()
    finally:
        for channel in (watched, rank, waker):
            channel.close()


READY = Ready(kv_tokens=64, weight_bytes=1, dtype="bfloat16")
STEP = Update([], EngineStats(), steps_in_flight=[StepSize(1)])
BEGIN = KernelCompilation("attend_tile")


@pytest.mark.parametrize(
    ("messages", "limit"),
    [
        ([READY, STEP], "0.1 s"),
        ([READY, STEP, BEGIN], "0.4 s"),
        # Two ranks compile the same kernel.
        ([READY, STEP, BEGIN, BEGIN, KernelCompilation("attend_tile", 0.8)], "0.4 s"),
        ([READY, STEP, BEGIN, KernelCompilation("attend_tile", 0.8)], "0.1 s"),
    ],
)
def test_a_step_that_waits_for_a_compilation_has_the_limit_of_the_warm_up(
    messages: list[FromEngineLoop], limit: str
) -> None:
    loss = loss_after(messages, ParallelConfig(step_timeout_s=0.1, warmup_s=0.4))
    assert loss.kind == "hung"
    assert f"while running (limit {limit})" in loss.reason


def test_a_report_of_a_lost_rank_waits_for_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes the sockets of a process before its exit can be noticed."""
    monkeypatch.setattr(watchdog_module, "EXIT_WAIT_S", 60.0)
    watched_socket, rank_socket = socket.socketpair()
    watched, rank, waker = Channel(watched_socket), Channel(rank_socket), Waker()
    rank.send(encode(READY))
    rank.send(encode(Failed("rank 1 has exited")))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2); exit(7)"]) as lost:
        descriptors = {0: os.pidfd_open(os.getpid()), 1: os.pidfd_open(lost.pid)}
        exits: dict[int, Callable[[], int | None]] = {0: lambda: None, 1: lost.poll}

        def describe_exit(rank: int) -> str | None:
            code = exits[rank]()
            return None if code is None else f"exited with code {code}"

        watchdog = Watchdog(
            RankSet(watched, descriptors, describe_exit),
            ParallelConfig(),
            create_autospec(Receiver, instance=True),
            waker,
            lambda: None,
        )
        try:
            loss = watchdog.watch_until_lost()
        finally:
            close_descriptors(descriptors)
            for channel in (watched, rank, waker):
                channel.close()
    assert (loss.kind, loss.reason) == ("failed", "rank 1 has exited; rank 1 exited with code 7")


def test_exits_are_noticed_with_many_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH_DESCRIPTOR + 10), hard))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
        ) as process:
            low = os.pidfd_open(process.pid)
            high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
            assert high >= HIGH_DESCRIPTOR
            assert not wait_for_exit({0: high}, 0.01)
            assert readable_descriptors([high], 0.0) == set()
            process.communicate("\n")
            assert wait_for_exit({0: high}, 60.0)
            assert readable_descriptors([low, high], None) == {low, high}
            close_descriptors({0: high, 1: low})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
