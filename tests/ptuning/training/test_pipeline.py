"""A stage runs its schedule: what is computed, kept, and let go; and decoding over several chunks.

Gradients at many splits are in tests/equivalence/test_gradients_across_splits.py; here are the
promises beside them.
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
from gpt.parallel.sharding import stage_layers
from gpt.sampling_params import Sampling
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import MicroBatch, micro_batch
from ptuning.training.pipeline import KEPT_MAX, Channels, run_passes
from ptuning.training.pipeline_schedule import forward_only, interleaved, one_f_one_b
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
    return [load_model(checkpoint, mesh, dtype=dtype, layers=some) for some in layers]


def micros_of(config: GPTConfig) -> list[MicroBatch]:
    """Two examples each, of 3 to 9 tokens; row 0 of the table stands first."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for number in range(MICROS):
        some = []
        for size in (3 + number, 9 - number):
            text = torch.randint(config.vocab_size, (size,), generator=generator).tolist()
            some.append(Example([config.vocab_size, *text], 2 + number % 2))
        found.append(micro_batch(some))
    return found


def table_of(config: GPTConfig, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(1, config.hidden_size, generator=generator, dtype=torch.float64)
    return table.to(dtype).requires_grad_()


@dataclass(frozen=True)
class Found:
    losses: list[Tensor]  # Of each run.
    grads: list[Tensor | None]


def run_twice(mesh: Mesh, chunks: int, dtype: torch.dtype) -> Found:
    """Learn twice from the same, then only look."""
    model, micros, channels = chunks_of(DEEP, mesh, chunks, dtype), micros_of(DEEP), Channels(mesh)
    stage = mesh.pp_rank
    passes = interleaved(stage, mesh.pp, MICROS, chunks)
    losses, grads = [], []
    for _ in range(2):
        table = table_of(DEEP, torch.promote_types(dtype, torch.float32))
        losses.append(run_passes(model, passes, micros, channels, table=table, scale=0.5))
        grads.append(table.grad)
    table = table_of(DEEP, torch.promote_types(dtype, torch.float32))
    passes = forward_only(mesh.pp, MICROS, chunks)
    losses.append(run_passes(model, passes, micros, channels, table=table, scale=0.5))
    assert table.grad is None
    return Found(losses, grads)


def run_split(rank: int, pp: int, chunks: int, dtype: torch.dtype) -> Found:
    return run_twice(Mesh.create(1, pp), chunks, dtype)


def check(got: Sequence[Found], exact: float) -> None:
    """Against one rank, each micro-batch by itself and by torch's own cross entropy."""
    model, table, total = build(DEEP), table_of(DEEP), 0.0
    for micro in micros_of(DEEP):
        logits = model(micro.ids, micro.batch, table=table)
        loss = F.cross_entropy(logits, micro.answers, reduction="sum")
        (loss * 0.5).backward()
        total += float(loss.detach())
    assert table.grad is not None
    first, last = got[0], got[-1]
    assert [float(loss) for loss in last.losses] == pytest.approx([total] * 3, rel=exact)
    assert {loss.dtype for loss in last.losses} == {torch.float64}
    for grad in first.grads:
        assert grad is not None
        assert (grad - table.grad).abs().max() <= exact * table.grad.abs().max()
    assert torch.equal(*[grad for grad in first.grads if grad is not None])
    assert torch.equal(last.losses[0], last.losses[1])
    for one in got[:-1]:
        assert not any(map(bool, one.losses))
    for one in got[1:]:
        assert one.grads == [None, None]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_one_rank_runs_any_number_of_chunks_and_sends_nothing(chunks: int) -> None:
    check([run_twice(Mesh.single(), chunks, torch.float64)], EXACT)


@pytest.mark.slow
def test_two_stages_of_two_chunks_find_the_same_bits_again() -> None:
    check(ranks(2, run_split, 2, 2, torch.float64), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (2, 3), (3, 1), (3, 2), (6, 1)])
def test_more_stages_and_chunks_find_the_same_bits_again(pp: int, chunks: int) -> None:
    check(ranks(pp, run_split, pp, chunks, torch.float64), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_narrow_models_send_what_they_compute_in(dtype: torch.dtype, close: float) -> None:
    check(ranks(2, run_split, 2, 2, dtype), close)


class Watched(Channels):
    """Counts the outputs that are still in memory when the next one is sent."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.sent: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive_max = 0

    def send(self, x: Tensor, *, forward: bool) -> None:
        super().send(x, forward=forward)
        if forward:
            self.sent.append(weakref.ref(x.untyped_storage()))
            alive = sum(one() is not None for one in self.sent)
            self.alive_max = max(self.alive_max, alive)


def count_alive(rank: int) -> int:
    mesh = Mesh.create(1, 2)
    model, channels = chunks_of(DEEP, mesh, 1), Watched(mesh)
    # Nothing comes back before all are sent, so all inputs and graphs are kept at once.
    passes = one_f_one_b(mesh.pp_rank, mesh.pp, MICROS)
    passes = sorted(passes, key=lambda one: not one.forward)
    run_passes(model, passes, micros_of(DEEP), channels, table=table_of(DEEP), scale=1.0)
    return channels.alive_max


@pytest.mark.slow
def test_an_output_is_let_go_when_it_has_arrived() -> None:
    most, _ = ranks(2, count_alive)
    assert 1 <= most <= KEPT_MAX + 1 < MICROS


PROMPTS = [[7, 3, 90, 12, 5], [64], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
TOKENS = 4


def decode(mesh: Mesh, config: GPTConfig, chunks: int) -> list[list[int]]:
    table = table_of(config).detach()
    prompts = [[config.vocab_size, *prompt] for prompt in PROMPTS]
    made = generate(
        chunks_of(config, mesh, chunks), prompts, Sampling(max_new_tokens=TOKENS), table=table
    )
    return [one.token_ids for one in made]


def decode_split(rank: int, tp: int, pp: int, chunks: int) -> list[list[list[int]]]:
    mesh = Mesh.create(tp, pp)
    return [decode(mesh, config, chunks) for config in (CLASSIC, EXPERTS)]


def oracle(config: GPTConfig) -> list[list[int]]:
    model, table = build(config), table_of(config).detach()
    virtual = config.vocab_size
    return [recompute_greedy(model, [virtual, *p], TOKENS, table).tokens for p in PROMPTS]


def test_decoding_passes_through_all_chunks_of_one_rank() -> None:
    assert decode(Mesh.single(), CLASSIC, 2) == oracle(CLASSIC)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 2, 2), (2, 2, 2), (1, 1, 4), (1, 4, 1)])
def test_decoding_passes_through_all_chunks_of_all_stages(tp: int, pp: int, chunks: int) -> None:
    for told in ranks(tp * pp, decode_split, tp, pp, chunks):
        assert told == [oracle(CLASSIC), oracle(EXPERTS)]


def test_a_batch_of_plain_sequences_has_the_same_logits_in_chunks() -> None:
    batch, ids = Batch.plain([4, 2]), torch.arange(6)
    x: Tensor = ids
    for chunk in chunks_of(DEEP, Mesh.single(), 3):
        x = chunk(x, batch)
    assert torch.equal(x, build(DEEP)(ids, batch))
