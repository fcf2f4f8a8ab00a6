"""Pipeline execution: results, freed activations, and generation over several chunks.

tests/equivalence/test_gradients_across_splits.py compares the gradients of many splits; this file
tests the other properties.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from gpt.sampling_params import SamplingParams
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import MicroBatch, build_micro_batch
from ptuning.training.pipeline import SENDS_PENDING_MAX, PipelineChannels, run_passes
from ptuning.training.pipeline_schedule import (
    schedule_1f1b,
    schedule_forward_only,
    schedule_interleaved_1f1b,
)
from tests.support.models import CLASSIC, EXPERTS, MODERN, build, lively, recompute_greedy
from tests.support.ranks import ranks

EXACT = 1e-10
DEEP = MODERN.with_fields(num_layers=6, moe_layers=())
MICROS = 5


def chunks_of(
    config: GPTConfig, mesh: Mesh, chunks: int, dtype: torch.dtype = torch.float64
) -> list[GPT]:
    layers = stage_layers(config.num_layers, mesh.pp, vpp=chunks)[mesh.pp_rank]
    checkpoint = lively(config.with_fields(dtype="float64"))
    return [load_model(checkpoint, mesh, dtype=dtype, layers=layer) for layer in layers]


def micro_batches_of(config: GPTConfig) -> list[MicroBatch]:
    """Micro-batches of two examples with 3 to 9 tokens; each begins with row 0 of the table."""
    generator = torch.Generator().manual_seed(2)
    micro_batches = []
    for number in range(MICROS):
        examples = []
        for size in (3 + number, 9 - number):
            text = torch.randint(config.vocab_size, (size,), generator=generator).tolist()
            examples.append(Example([config.vocab_size, *text], 2 + number % 2))
        micro_batches.append(build_micro_batch(examples))
    return micro_batches


def table_of(config: GPTConfig, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(1, config.hidden_size, generator=generator, dtype=torch.float64)
    return table.to(dtype).requires_grad_()


@dataclass(frozen=True)
class RunResult:
    losses: list[Tensor]  # Of each run.
    grads: list[Tensor | None]


def run_twice(mesh: Mesh, chunks: int, dtype: torch.dtype) -> RunResult:
    """Run the same training passes twice, then forward-only passes."""
    model = chunks_of(DEEP, mesh, chunks, dtype)
    micros = micro_batches_of(DEEP)
    channels = PipelineChannels(mesh)
    stage = mesh.pp_rank
    passes = schedule_interleaved_1f1b(stage, mesh.pp, MICROS, chunks)
    losses = []
    grads = []
    for _ in range(2):
        table = table_of(DEEP, torch.promote_types(dtype, torch.float32))
        losses.append(run_passes(model, passes, micros, channels, table=table, loss_scales=[0.5]))
        grads.append(table.grad)
    table = table_of(DEEP, torch.promote_types(dtype, torch.float32))
    passes = schedule_forward_only(mesh.pp, MICROS, chunks)
    losses.append(run_passes(model, passes, micros, channels, table=table, loss_scales=[0.5]))
    assert table.grad is None
    return RunResult(losses, grads)


def run_split(rank: int, pp: int, chunks: int, dtype: torch.dtype) -> RunResult:
    return run_twice(Mesh.create(1, pp), chunks, dtype)


def check_against_single_rank(results: Sequence[RunResult], exact: float) -> None:
    """Compare with one rank that runs each micro-batch with PyTorch's cross entropy."""
    model = build(DEEP)
    table = table_of(DEEP)
    total = 0.0
    for micro in micro_batches_of(DEEP):
        logits = model(micro.ids, micro.batch, virtual_embeddings=table)
        loss = F.cross_entropy(logits, micro.labels, reduction="sum")
        (loss * 0.5).backward()
        total += float(loss.detach())
    assert table.grad is not None
    first_stage = results[0]
    last_stage = results[-1]
    assert [float(loss) for loss in last_stage.losses] == pytest.approx([total] * 3, rel=exact)
    assert {loss.dtype for loss in last_stage.losses} == {torch.float64}
    for grad in first_stage.grads:
        assert grad is not None
        assert (grad - table.grad).abs().max() <= exact * table.grad.abs().max()
    assert torch.equal(*[grad for grad in first_stage.grads if grad is not None])
    assert torch.equal(last_stage.losses[0], last_stage.losses[1])
    for result in results[:-1]:
        assert not any(map(bool, result.losses))
    for result in results[1:]:
        assert result.grads == [None, None]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_one_rank_runs_several_chunks_without_messages(chunks: int) -> None:
    check_against_single_rank([run_twice(Mesh.single(), chunks, torch.float64)], EXACT)


@pytest.mark.slow
def test_two_stages_of_two_chunks_are_deterministic() -> None:
    check_against_single_rank(ranks(2, run_split, 2, 2, torch.float64), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (2, 3), (3, 1), (3, 2), (6, 1)])
def test_more_stages_and_chunks_are_deterministic(pp: int, chunks: int) -> None:
    check_against_single_rank(ranks(pp, run_split, pp, chunks, torch.float64), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_stages_send_activations_in_the_compute_dtype(dtype: torch.dtype, close: float) -> None:
    check_against_single_rank(ranks(2, run_split, 2, 2, dtype), close)


class WatchedChannels(PipelineChannels):
    """Counts the outputs that are still in memory when the next output is sent."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.sent: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive_max = 0

    def send(self, x: Tensor, *, forward: bool) -> None:
        super().send(x, forward=forward)
        if forward:
            self.sent.append(weakref.ref(x.untyped_storage()))
            alive = sum(storage() is not None for storage in self.sent)
            self.alive_max = max(self.alive_max, alive)


def count_alive(rank: int) -> int:
    mesh = Mesh.create(1, 2)
    model = chunks_of(DEEP, mesh, 1)
    channels = WatchedChannels(mesh)
    # Nothing returns before all are sent, so all inputs and graphs are alive at once.
    passes = schedule_1f1b(mesh.pp_rank, mesh.pp, MICROS)
    passes = sorted(passes, key=lambda pass_: not pass_.forward)
    run_passes(
        model, passes, micro_batches_of(DEEP), channels, table=table_of(DEEP), loss_scales=[1.0]
    )
    return channels.alive_max


@pytest.mark.slow
def test_sent_activation_is_freed_after_arrival() -> None:
    alive_max, _ = ranks(2, count_alive)
    assert 1 <= alive_max <= SENDS_PENDING_MAX + 1 < MICROS


PROMPTS = [[7, 3, 90, 12, 5], [64], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
TOKENS = 4


def decode(mesh: Mesh, config: GPTConfig, chunks: int) -> list[list[int]]:
    table = table_of(config).detach()
    prompts = [[config.vocab_size, *prompt] for prompt in PROMPTS]
    completions = generate(
        chunks_of(config, mesh, chunks),
        prompts,
        SamplingParams(max_new_tokens=TOKENS),
        adapter_table=table,
    )
    return [completion.token_ids for completion in completions]


def decode_split(rank: int, tp: int, pp: int, chunks: int) -> list[list[list[int]]]:
    mesh = Mesh.create(tp, pp)
    return [decode(mesh, config, chunks) for config in (CLASSIC, EXPERTS)]


def oracle(config: GPTConfig) -> list[list[int]]:
    model = build(config)
    table = table_of(config).detach()
    virtual = config.vocab_size
    return [recompute_greedy(model, [virtual, *p], TOKENS, table).tokens for p in PROMPTS]


def test_decode_passes_through_all_chunks_of_one_rank() -> None:
    assert decode(Mesh.single(), CLASSIC, 2) == oracle(CLASSIC)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 2, 2), (2, 2, 2), (1, 1, 4), (1, 4, 1)])
def test_decode_passes_through_all_chunks_of_all_stages(tp: int, pp: int, chunks: int) -> None:
    for rank_tokens in ranks(tp * pp, decode_split, tp, pp, chunks):
        assert rank_tokens == [oracle(CLASSIC), oracle(EXPERTS)]


def test_unpaged_batch_has_the_same_logits_in_chunks() -> None:
    batch = Batch.unpaged([4, 2])
    ids = torch.arange(6)
    x: Tensor = ids
    for chunk in chunks_of(DEEP, Mesh.single(), 3):
        x = chunk(x, batch)
    assert torch.equal(x, build(DEEP)(ids, batch))
