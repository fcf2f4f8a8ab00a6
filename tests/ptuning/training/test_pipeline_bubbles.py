"""How long a pipeline idles, measured: real schedules and messages, stages that sleep.

Sleeping takes no processor, so stages work side by side on any machine. What a busy one adds makes
a run longer, but not more so if stages sleep longer: where it counts, the next run sleeps longer.
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
from ptuning.training.pipeline import Channels, run_passes
from ptuning.training.pipeline_schedule import interleaved, one_f_one_b
from tests.support.ranks import ranks

STAGES = 4
CASES = [(chunks, micros) for chunks in (1, 2) for micros in (8, 12)]
NAPS_S = (0.03, 0.06, 0.12, 0.16, 0.3, 0.5)  # Of a pass, in one run after another.
CLOSE = 0.1
SIZES = GPTConfig(
    num_layers=8, hidden_size=4, num_attention_heads=1, vocab_size=3, max_position_embeddings=8
)


class Slept:
    """What this stage has slept, which is more than it was to where the machine is busy."""

    def __init__(self, nap_s: float) -> None:
        self.nap_s, self.seconds = nap_s, 0.0

    def sleep(self) -> None:
        started = time.perf_counter()
        time.sleep(self.nap_s)
        self.seconds += time.perf_counter() - started


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slept: Slept) -> Tensor:
        ctx.slept = slept
        slept.sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.slept.sleep()
        return grads[0].clone(), None


class Sleeper(nn.Module):
    """A chunk that costs time and nothing else; what it has of a GPT is what a schedule uses."""

    def __init__(self, mesh: Mesh, place: int, chunks: int, slept: Slept) -> None:
        super().__init__()
        self.config, self.mesh, self.dtype, self.slept = SIZES, mesh, torch.float32, slept
        self.first, self.last = place == 0, place == STAGES * chunks - 1

    def hidden(
        self, x: Tensor, batch: Batch, kv: None, table: Tensor | None, *, prefix: None
    ) -> Tensor:
        if self.first:
            assert table is not None
            x = table[x]
        return cast(Tensor, _Nap.apply(x, self.slept))  # type: ignore[no-untyped-call]

    def head_shard(self, x: Tensor, batch: Batch) -> Tensor:
        return x[:, : SIZES.vocab_size].clone()


@dataclass(frozen=True)
class Run:
    seconds: float
    busy: float  # Asleep, which is a stage's work here, or computing.


def run(mesh: Mesh, channels: Channels, chunks: int, micros: int, nap_s: float) -> Run:
    slept = Slept(nap_s)
    places = [mesh.pp_rank + chunk * STAGES for chunk in range(chunks)]
    model = cast(Sequence[GPT], [Sleeper(mesh, place, chunks, slept) for place in places])
    ids = torch.tensor([0, 1])
    work = [MicroBatch(ids, Batch.plain([2]), ids)] * micros
    table = torch.zeros(2, SIZES.hidden_size, requires_grad=True)
    if chunks == 1:
        passes = one_f_one_b(mesh.pp_rank, STAGES, micros)
    else:
        passes = interleaved(mesh.pp_rank, STAGES, micros, chunks)
    dist.barrier()
    started, computing = time.perf_counter(), time.thread_time()
    run_passes(model, passes, work, channels, table=table, scale=1.0)
    dist.barrier()
    computed = time.thread_time() - computing
    return Run(time.perf_counter() - started, slept.seconds + computed)


def wanted(chunks: int, micros: int) -> float:
    return (STAGES - 1) / (chunks * micros)


def measure(rank: int) -> list[list[float]]:
    """For each case the bubbles of its runs; it runs until one is close, or often enough."""
    mesh = Mesh.create(1, STAGES)
    channels = Channels(mesh)
    found: list[list[float]] = [[] for _ in CASES]
    run(mesh, channels, 2, 1, 0.0)  # The first backward pass of a process is slow.
    for bubbles, (chunks, micros) in zip(found, CASES, strict=True):
        for nap_s in NAPS_S:
            one = run(mesh, channels, chunks, micros, nap_s)
            told = torch.tensor([one.seconds, one.busy], dtype=torch.float64)
            dist.all_reduce(told)
            bubbles.append(float((told[0] - told[1]) / told[1]))
            if bubbles[-1] == pytest.approx(wanted(chunks, micros), rel=CLOSE):
                break
    return found


@pytest.mark.slow
def test_stages_idle_as_long_as_the_formulas_say() -> None:
    found = ranks(STAGES, measure, timeout_s=400)[0]
    for bubbles, (chunks, micros) in zip(found, CASES, strict=True):
        told, want = ", ".join(f"{bubble:.4f}" for bubble in bubbles), wanted(chunks, micros)
        print(f"{chunks} chunks, {micros} micro-batches: {told}; {want:.4f}")
        assert bubbles[-1] == pytest.approx(want, rel=CLOSE)
