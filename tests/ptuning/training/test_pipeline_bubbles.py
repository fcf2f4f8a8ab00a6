"""Pipeline bubbles: real schedules and messages, with stages that have a logical clock.

A pass takes one unit of time. The activations and gradients that stages exchange contain the time
at which their sender finished; a stage starts a pass when its inputs have arrived and its previous
pass has ended. So the bubble is exact, whatever the load of the machine.
"""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.linear_adapter import ExampleRows
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from ptuning.data.micro_batch import MicroBatch, TaskSlice
from ptuning.training.pipeline import PipelineChannels, run_passes
from ptuning.training.pipeline_schedule import schedule_1f1b, schedule_interleaved_1f1b
from tests.support.ranks import ranks

STAGES = 4
CASES = [(chunks, micros) for chunks in (1, 2) for micros in (8, 12)]
SIZES = GPTConfig(
    num_layers=8, hidden_size=4, num_attention_heads=1, vocab_size=3, max_position_embeddings=8
)


class StageClock:
    """The logical time of a stage."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passes = 0

    def run_pass(self, inputs: Tensor) -> Tensor:
        """Run a pass; return its output, which contains the time of its end like `inputs`."""
        self.now = max(self.now, float(inputs.max())) + 1
        self.passes += 1
        return torch.full_like(inputs, self.now)


class _TimedPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: StageClock) -> Tensor:
        ctx.clock = clock
        return clock.run_pass(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.clock.run_pass(grads[0]), None


class TimedChunk(nn.Module):
    """A model chunk whose passes take time, with the GPT attributes that a schedule reads."""

    def __init__(self, mesh: Mesh, virtual_stage: int, chunks: int, clock: StageClock) -> None:
        super().__init__()
        self.config = SIZES
        self.mesh = mesh
        self.dtype = torch.float32
        self.clock = clock
        self.layers = range(virtual_stage, virtual_stage + 1)
        self.is_first_stage = virtual_stage == 0
        self.is_last_stage = virtual_stage == STAGES * chunks - 1

    def forward_hidden(
        self, x: Tensor, batch: Batch, kv: None, virtual_embeddings: Tensor | None, *, prefix: None
    ) -> Tensor:
        if self.is_first_stage:
            assert virtual_embeddings is not None
            x = virtual_embeddings[x]  # Zeros: the inputs of the first stage are there at time 0.
        return cast(Tensor, _TimedPass.apply(x, self.clock))  # type: ignore[no-untyped-call]

    def compute_logits_shard(self, x: Tensor, batch: Batch) -> Tensor:
        # The gradients of the loss are below 1: they arrive at once.
        return x[:, : SIZES.vocab_size].clone()


def run(mesh: Mesh, channels: PipelineChannels, chunks: int, micros: int) -> StageClock:
    """Run the passes of a step, and return the clock of this stage."""
    clock = StageClock()
    virtual_stages = [mesh.pp_rank + chunk * STAGES for chunk in range(chunks)]
    model = cast(
        Sequence[GPT],
        [TimedChunk(mesh, virtual_stage, chunks, clock) for virtual_stage in virtual_stages],
    )
    ids = torch.tensor([0, 1])
    task = TaskSlice(0, None, ExampleRows((0,), (2,), ((0, 1),)))
    work = [MicroBatch(ids, Batch.unpaged([2]), ids, (task,))] * micros
    table = torch.zeros(2, SIZES.hidden_size, requires_grad=True)
    if chunks == 1:
        passes = schedule_1f1b(mesh.pp_rank, STAGES, micros)
    else:
        passes = schedule_interleaved_1f1b(mesh.pp_rank, STAGES, micros, chunks)
    run_passes(model, passes, work, channels, table=table, loss_scales=[1.0])
    return clock


def measure(rank: int) -> list[tuple[float, int]]:
    """The time of each case at the end of the last stage to end, and the passes of this stage."""
    mesh = Mesh.create(1, STAGES)
    channels = PipelineChannels(mesh)
    measured = []
    for chunks, micros in CASES:
        clock = run(mesh, channels, chunks, micros)
        end = torch.tensor(clock.now, dtype=torch.float64)
        dist.all_reduce(end, dist.ReduceOp.MAX)
        measured.append((float(end), clock.passes))
    return measured


@pytest.mark.slow
def test_the_bubbles_equal_the_formulas() -> None:
    for stage_results in ranks(STAGES, measure, timeout_s=120):
        for (end, passes), (chunks, micros) in zip(stage_results, CASES, strict=True):
            assert passes == 2 * chunks * micros
            assert (end - passes) / passes == (STAGES - 1) / (chunks * micros)
