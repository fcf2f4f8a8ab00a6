"""CUDA graphs of two tensor ranks: the order of captures, and a rank that fails.

The ranks are processes on a CPU with gloo. Their recorders return the work itself, so a replay runs
it again, collectives included; some recorders fail. tests/serving/ranks/test_replay_faults.py has
faults in a replay.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
import torch

from gpt.parallel.mesh import Mesh
from gpt.parallel.rank_agreement import AgreementTimeoutError
from serving.messages import Outcome, Step
from serving.worker import cuda_graphs
from serving.worker.cuda_graphs import Capturer, WarmUpError, Work
from serving.worker.kv_cache_size import available_kv_blocks
from serving.worker.model_runner import ModelRunner
from tests.support.capturable_attention import CapturableAttention
from tests.support.graph_runners import CONFIG, SLOTS, make_runner, run_step, sampled_token
from tests.support.graph_steps import RULES, next_step, prefill_step
from tests.support.models import CONFIGS, build
from tests.support.ranks import ranks

HEARTBEAT = Step(9, may_capture_graph=True)
NAME = "modern"
STEPS = 5  # The tokens of the last step are in the vocabulary shards of both ranks.


def make_rank(capturer: Capturer | None) -> ModelRunner:
    """This rank's runner of a model over two tensor ranks."""
    torch.set_num_threads(1)
    model = build(CONFIGS[NAME], Mesh.create(2, 1), attention_backend=CapturableAttention())
    config = CONFIG.with_fields(tp=2, step_ahead="on")
    return ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=True,
        blocks=available_kv_blocks(model, config.scheduler_config, config.cache_config),
        slots=SLOTS,
        capturer=capturer,
    )


def single_rank_steps() -> tuple[list[Step], list[Outcome]]:
    """A prefill and decode steps, with the outcomes of a model on one rank."""
    runner = make_runner(NAME, None)
    steps, outcomes = [prefill_step(RULES)], list[Outcome]()
    for _ in range(STEPS):
        outcomes.append(run_step(runner, steps[-1]))
        steps.append(next_step(steps[-1], outcomes[-1], sampled_token))
    outcomes.append(run_step(runner, steps[-1]))
    return steps, outcomes


@dataclass
class FailingCapturer:
    """Captures a number of graphs; each further capture fails."""

    error: Callable[[], Exception]
    captures_left: int

    def __call__(self, work: Work) -> Work:
        if self.captures_left == 0:
            raise self.error()
        self.captures_left -= 1
        return work


def run_with_a_failed_capture(
    rank: int, error: Callable[[], Exception], steps: list[Step]
) -> list[Outcome]:
    """Rank 1 fails at its second capture. The input tokens are the last sampled ones."""
    runner = make_rank(FailingCapturer(error, 1 if rank == 1 else 99))
    outcomes = []
    for index, step in enumerate(steps):
        if index > 0:
            step = msgspec.structs.replace(step, token_ids=[-1] * len(step.token_ids))
        outcomes.append(runner.run_step(msgspec.structs.replace(step, may_capture_graph=True)))
        if index == 2:
            runner.run_step(HEARTBEAT)
    assert runner.failed_captures == 1 and runner.graph_sizes == ()
    return [outcome for outcome in outcomes if outcome is not None]


def no_capture() -> Exception:
    return RuntimeError("operation not permitted when stream is capturing")


def no_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("error", [no_capture, pytest.param(no_memory, marks=pytest.mark.slow)])
def test_a_failed_capture_on_one_rank_turns_graphs_off_on_all(
    error: Callable[[], Exception],
) -> None:
    steps, expected = single_rank_steps()
    outcomes, no_outcomes = ranks(2, run_with_a_failed_capture, error, steps)
    assert no_outcomes == []
    for index, (outcome, single) in enumerate(zip(outcomes, expected, strict=True)):
        assert outcome.tokens == single.tokens and outcome.faults == single.faults
        # The first size is captured in the first decode step, the second one in the heartbeat.
        assert outcome.replayed == (index in (1, 2))


def run_with_a_failed_warm_up(rank: int) -> str:
    """Rank 1 fails before its capture, when rank 0 may wait for it in a collective."""
    cuda_graphs.AGREEMENT_S = 0.5
    runner = make_rank(FailingCapturer(lambda: WarmUpError("no kernel"), 0 if rank == 1 else 99))
    try:
        runner.run_step(HEARTBEAT)
    except (WarmUpError, AgreementTimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_failure_before_the_capture_ends_the_ranks() -> None:
    assert ranks(2, run_with_a_failed_warm_up) == [
        "AgreementTimeoutError: tensor ranks [1] did not reach an agreement within 0.5 s",
        "WarmUpError: no kernel",
    ]


def log_captured_sizes(rank: int) -> list[int]:
    runner = make_rank(lambda work: work)
    assert runner._graphs is not None
    while runner.has_missing_graphs:
        runner.run_step(HEARTBEAT)
    return list(runner._graphs._captured_graphs)


def test_all_ranks_capture_the_same_sizes_in_the_same_order() -> None:
    assert ranks(2, log_captured_sizes) == [[6, 4, 2, 1]] * 2
