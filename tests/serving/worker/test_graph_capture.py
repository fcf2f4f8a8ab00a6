"""CUDA graph capture on a simulated device: failures, the order of captures, and the logits buffer.

`SimulatedCuda` replaces the functions below `torch.cuda.graph`, whose own code runs. Steps run on
the CPU.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from serving.messages import Step
from serving.worker import cuda_graphs
from serving.worker.cuda_graphs import GraphCaptureError, WarmUpError, _CudaGraphCapturer
from tests.support.graph_runners import eager_capturer, make_runner, run_step, sampled_token
from tests.support.graph_steps import RULES, next_step, prefill_step

HEARTBEAT = Step(9, may_capture_graph=True)


class SimulatedStream:
    def wait_stream(self, _: object) -> None:
        """Do nothing: work runs at once."""


MAIN, CAPTURE = SimulatedStream(), SimulatedStream()


class SimulatedCuda:
    """The current stream, and a capture that an error in the captured work invalidates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: object = MAIN
        self.is_capturing = False
        self.is_invalid = False
        self.is_unusable = False  # The device has failed: it reports this when it is synchronized.
        replacements: dict[str, Callable[..., Any]] = {
            "CUDAGraph": lambda: self,
            "Stream": lambda _: CAPTURE,
            "current_stream": lambda *_: self.stream,
            "stream": partial(_StreamContext, self),
            "device": lambda _: nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
            "synchronize": self._synchronize,
            "empty_cache": lambda: None,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def replay(self) -> None:
        """Replay the graph; part of the interface of `CUDAGraph`."""

    def capture_begin(self, *_: object, **__: object) -> None:
        self.is_capturing, self.is_invalid = True, False

    def capture_end(self) -> None:
        assert self.stream == CAPTURE
        self.is_capturing = False
        if self.is_invalid:
            raise accelerator_error(901)

    def _synchronize(self) -> None:
        if self.is_unusable:
            raise accelerator_error(700)


class _StreamContext:
    def __init__(self, cuda: SimulatedCuda, stream: object) -> None:
        self._cuda = cuda
        self._stream = stream
        self._previous: object = None

    def __enter__(self) -> None:
        self._previous, self._cuda.stream = self._cuda.stream, self._stream

    def __exit__(self, *_: object) -> None:
        self._cuda.stream = self._previous


def accelerator_error(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error {code}")
    error.error_code = code  # type: ignore[attr-defined]  # torch sets it on each error.
    return error


def failing_work(cuda: SimulatedCuda, error: Exception, *, breaks_device: bool) -> cuda_graphs.Work:
    """Work that runs, but fails while it is captured."""

    def work() -> None:
        if cuda.is_capturing:
            cuda.is_invalid, cuda.is_unusable = True, breaks_device
            raise error

    return work


CAPTURED_READ = "operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("error", "breaks_device", "raised", "text"),
    [
        (RuntimeError(CAPTURED_READ), False, GraphCaptureError, f"6 rows: {CAPTURED_READ}"),
        (accelerator_error(900), False, GraphCaptureError, "6 rows: CUDA error 900"),
        (torch.OutOfMemoryError("no memory"), False, torch.OutOfMemoryError, "no memory"),
        (accelerator_error(700), False, torch.AcceleratorError, "CUDA error 700"),
        (RuntimeError(CAPTURED_READ), True, torch.AcceleratorError, "CUDA error 700"),
    ],
)
def test_a_failed_capture_restores_the_stream_and_keeps_errors_of_the_device(
    error: Exception,
    breaks_device: bool,
    raised: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner("classic", eager_capturer)
    assert runner._graphs is not None
    cuda = SimulatedCuda(monkeypatch)
    work = failing_work(cuda, error, breaks_device=breaks_device)
    capturer = _CudaGraphCapturer(torch.device("cuda"))
    runner._graphs._capturer = lambda _: capturer(work)
    with pytest.raises(raised, match=text):
        runner._graphs.capture_for(6)
    assert cuda.stream == MAIN


def test_a_successful_capture_returns_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimulatedCuda(monkeypatch)
    streams: list[object] = []
    replay = _CudaGraphCapturer(torch.device("cuda"))(lambda: streams.append(cuda.stream))
    assert streams[2:] == [CAPTURE] and cuda.stream == MAIN
    assert replay == cuda.replay


def test_a_failure_before_the_capture_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensor ranks may wait for the work of a warm-up, but never for that of a capture."""

    def work() -> None:
        raise torch.OutOfMemoryError("no memory")

    cuda = SimulatedCuda(monkeypatch)
    with pytest.raises(WarmUpError, match="no memory"):
        _CudaGraphCapturer(torch.device("cuda"))(work)
    assert cuda.stream == MAIN and not cuda.is_capturing


def test_after_a_failed_capture_all_steps_run_without_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def capture_six_rows_only(work: cuda_graphs.Work) -> cuda_graphs.Work:
        if not captured_work:
            captured_work.append(work)
            return work
        raise RuntimeError(CAPTURED_READ)

    captured_work: list[cuda_graphs.Work] = []
    step = prefill_step(RULES)
    eager = make_runner("classic", None)
    failing = make_runner("classic", capture_six_rows_only)
    outcome = run_step(eager, step)
    run_step(failing, step)
    with caplog.at_level(logging.WARNING):
        for index in range(4):
            step = next_step(step, outcome, sampled_token)
            outcome = run_step(eager, step)
            failing_outcome = run_step(failing, step)
            assert failing_outcome.tokens == outcome.tokens
            assert failing_outcome.replayed == (index < 2)
            if index == 1:
                run_step(failing, HEARTBEAT)
    (message,) = caplog.messages
    assert message == f"event=graphs_off reason='4 rows: {CAPTURED_READ}'"
    assert failing.failed_captures == 1
    assert failing.graph_sizes == () and not failing.has_missing_graphs


def test_heartbeats_capture_the_missing_graphs_and_other_steps_use_a_larger_one() -> None:
    runner = make_runner("classic", eager_capturer)
    eager = make_runner("classic", None)
    step = prefill_step(RULES[:1])
    outcome = run_step(eager, step)
    runner.run_step(step)
    # 2 and 1 rows are not captured before the last two heartbeats.
    for replayed in (False, True, True, True, True):
        step = next_step(step, outcome, sampled_token)
        outcome = run_step(eager, step)
        tested = runner.run_step(step)
        assert tested is not None
        assert tested.replayed == replayed and tested.tokens == outcome.tokens
        assert runner._graphs is not None
        assert runner._graphs.captured_size(1) == min(captured(runner), default=None)
        runner.run_step(HEARTBEAT)
    assert captured(runner) == [6, 4, 2, 1] and not runner.has_missing_graphs


def captured(runner: Any) -> list[int]:
    return list(runner._graphs._captured_graphs)


def test_all_graphs_write_their_logits_to_one_buffer() -> None:
    runner = make_runner("classic", eager_capturer)
    assert runner._graphs is not None
    graphs, outputs = runner._graphs, []
    for count in (6, 2):
        graphs.capture_for(count)
        slots = list(range(count))
        step = Step(1, slots, [1] * count, [1] * count, [5] * count, [True] * count, [0] * count)
        outputs.append(graphs.run(step, None).logits)
    assert [None if logits is None else len(logits) for logits in outputs] == [6, 2]
    assert len({logits.data_ptr() for logits in outputs if logits is not None}) == 1
