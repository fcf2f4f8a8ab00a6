"""Measured pipeline bubbles: real schedules and messages, with stages that sleep.

Sleeping needs no CPU, so the stages run in parallel on any machine. The overhead of a busy machine
does not grow with the sleep time, so a measurement with too much overhead is repeated with a longer
sleep.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from ptuning.data.micro_batch import MicroBatch
from ptuning.training.pipeline import PipelineChannels, run_passes
from ptuning.training.pipeline_schedule import schedule_1f1b, schedule_interleaved_1f1b
from tests.support.ranks import ranks

STAGES = 4
CASES = [(chunks, micros) for chunks in (1, 2) for micros in (8, 12)]
NAPS_S = (0.03, 0.06, 0.12, 0.16, 0.3, 0.5)  # Sleep per pass, in one run after another.
CLOSE = 0.1
SIZES = GPTConfig(
    num_layers=8, hidden_size=4, num_attention_heads=1, vocab_size=3, max_position_embeddings=8
)


class SleepTimer:
    """Time that a stage has slept; longer than requested if the machine is busy."""

    def __init__(self, nap_s: float) -> None:
        self.nap_s = nap_s
        self.seconds = 0.0

    def sleep(self) -> None:
        started = time.perf_counter()
        time.sleep(self.nap_s)
        self.seconds += time.perf_counter() - started


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slept: SleepTimer) -> Tensor:
        ctx.slept = slept
        slept.sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.slept.sleep()
        return grads[0].clone(), None


class Sleeper(nn.Module):
    """A model chunk that only sleeps, with the GPT attributes that a schedule reads."""

    def __init__(self, mesh: Mesh, virtual_stage: int, chunks: int, slept: SleepTimer) -> None:
        super().__init__()
        self.config = SIZES
        self.mesh = mesh
        self.dtype = torch.float32
        self.slept = slept
        self.is_first_stage = virtual_stage == 0
        self.is_last_stage = virtual_stage == STAGES * chunks - 1

    def forward_hidden(
        self, x: Tensor, batch: Batch, kv: None, virtual_embeddings: Tensor | None, *, prefix: None
    ) -> Tensor:
        if self.is_first_stage:
            assert virtual_embeddings is not None
            x = virtual_embeddings[x]
        return cast(Tensor, _Nap.apply(x, self.slept))  # type: ignore[no-untyped-call]

    def compute_logits_shard(self, x: Tensor, batch: Batch) -> Tensor:
        return x[:, : SIZES.vocab_size].clone()


@dataclass(frozen=True)
class Run:
    seconds: float
    busy: float  # Time asleep, which stands for computing here.


def run(mesh: Mesh, channels: PipelineChannels, chunks: int, micros: int, nap_s: float) -> Run:
    slept = SleepTimer(nap_s)
    virtual_stages = [mesh.pp_rank + chunk * STAGES for chunk in range(chunks)]
    model = cast(
        Sequence[GPT],
        [Sleeper(mesh, virtual_stage, chunks, slept) for virtual_stage in virtual_stages],
    )
    ids = torch.tensor([0, 1])
    work = [MicroBatch(ids, Batch.unpaged([2]), ids)] * micros
    table = torch.zeros(2, SIZES.hidden_size, requires_grad=True)
    if chunks == 1:
        passes = schedule_1f1b(mesh.pp_rank, STAGES, micros)
    else:
        passes = schedule_interleaved_1f1b(mesh.pp_rank, STAGES, micros, chunks)
    dist.barrier()
    started = time.perf_counter()
    computing = time.thread_time()
    run_passes(model, passes, work, channels, table=table, loss_scale=1.0)
    dist.barrier()
    computed = time.thread_time() - computing
    return Run(time.perf_counter() - started, slept.seconds + computed)


def expected_bubble(chunks: int, micros: int) -> float:
    return (STAGES - 1) / (chunks * micros)


def measure(rank: int) -> list[list[float]]:
    """Bubbles of the runs of each case; runs repeat until one is close to the formula."""
    mesh = Mesh.create(1, STAGES)
    channels = PipelineChannels(mesh)
    bubbles_by_case: list[list[float]] = [[] for _ in CASES]
    run(mesh, channels, 2, 1, 0.0)  # The first backward pass of a process is slow.
    for bubbles, (chunks, micros) in zip(bubbles_by_case, CASES, strict=True):
        for nap_s in NAPS_S:
            timed_run = run(mesh, channels, chunks, micros, nap_s)
            totals = torch.tensor([timed_run.seconds, timed_run.busy], dtype=torch.float64)
            dist.all_reduce(totals)
            bubbles.append(float((totals[0] - totals[1]) / totals[1]))
            if bubbles[-1] == pytest.approx(expected_bubble(chunks, micros), rel=CLOSE):
                break
    return bubbles_by_case


@pytest.mark.slow
def test_measured_bubble_equals_the_formulas() -> None:
    bubbles_by_case = ranks(STAGES, measure, timeout_s=400)[0]
    for bubbles, (chunks, micros) in zip(bubbles_by_case, CASES, strict=True):
        bubbles_text = ", ".join(f"{bubble:.4f}" for bubble in bubbles)
        want = expected_bubble(chunks, micros)
        print(f"{chunks} chunks, {micros} micro-batches: {bubbles_text}; {want:.4f}")
        assert bubbles[-1] == pytest.approx(want, rel=CLOSE)
