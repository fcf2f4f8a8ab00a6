"""A model split over ranks is the same model: logits, gradients and tokens."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpt.batch import Batch, Dropout
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh, Sends, receive_from, send_to
from gpt.parallel.sharding import check_split, stage_layers
from gpt.sampling_params import Sampling
from tests.support.models import CONFIGS, MODERN, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

# fp64 sums in another order: a few units in the last place of numbers of about 10.
EXACT = 1e-10

LENGTHS = (5, 1, 9)  # 15 tokens: no number of tensor ranks divides them.
VIRTUAL = 3
PROMPTS = [[7, 3, 90, 12, 5], [64], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


@dataclass(frozen=True)
class Result:
    """What a rank can say of one run; a stage knows only its part."""

    logits: Tensor | None
    table_grad: Tensor | None
    embedding_grad: Tensor | None
    tokens: list[list[int]]


def inputs(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Flat ids, virtual ones among them at the start and in the middle, and the adapter's table."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, config.vocab_size, (sum(LENGTHS),), generator=generator)
    for place, row in ((0, 0), (1, 1), (9, 2), (11, 0)):
        ids[place] = config.vocab_size + row
    table = torch.randn(VIRTUAL, config.hidden_size, generator=generator, dtype=torch.float64)
    return ids, table


def back(model: GPT, x: Tensor, y: Tensor) -> None:
    """Gradients of one stage: `y` is what it sent, or a scalar on the last one; `x` its input."""
    mesh, grad = model.mesh, None
    if not model.last:
        grad = receive_from(tuple(y.shape), y.dtype, mesh, mesh.pp_rank + 1)
    torch.autograd.backward(y, grad)
    if not model.first:
        assert x.grad is not None
        send_to(x.grad, mesh, mesh.pp_rank - 1)


def run(config: GPTConfig, mesh: Mesh, stages: list[int] | None, dropout: float) -> Result:
    """Forward, backward and greedy decoding of one rank's share."""
    config = config.with_fields(hidden_dropout=dropout, attention_dropout=dropout)
    model = build(config, mesh, stages=stages, trainable=True)
    ids, table = inputs(config)
    table.requires_grad_()
    batch = Batch.plain(LENGTHS, dropout=Dropout(11) if dropout else None)
    x = pipeline.take(model, ids, batch)
    if not model.first:
        x.requires_grad_()
    y = model(x, batch, table=table if model.first else None)
    logits = None
    if model.last:
        logits = y.detach()
        generator = torch.Generator().manual_seed(3)
        y = (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum()
    else:
        send_to(y, mesh, mesh.pp_rank + 1)
    back(model, x, y)
    embedding = model.embedding.rows.grad if model.embedding else None
    tokens: list[list[int]] = []
    if not dropout:  # Decoding knows none. The third token reads what the second one has stored.
        completions = generate(model, PROMPTS, Sampling(max_new_tokens=3))
        tokens = [completion.token_ids for completion in completions]
    return Result(logits, table.grad, embedding, tokens)


CASES = [*((name, 0.0) for name in CONFIGS), ("modern", 0.1), ("experts", 0.1)]


def run_split(rank: int, tp: int, pp: int) -> list[Result]:
    """All cases without sequence parallelism and, where rows can be shared, with it."""
    results = []
    for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
        mesh = Mesh.create(tp, pp, sequence_parallel=sequence_parallel)
        for name, dropout in CASES:
            config = CONFIGS[name]
            stages = [3, 1, 1] if pp == 3 and config.num_layers == 5 else None
            results.append(run(config, mesh, stages, dropout))
    return results


@pytest.fixture(scope="module")
def alone() -> list[Result]:
    return [run(CONFIGS[name], Mesh.single(), None, dropout) for name, dropout in CASES]


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        # Six ranks and more crowd a small machine.
        pytest.param(t, p, marks=[pytest.mark.slow] if t * p >= 6 or t == 4 else [])
        for t in (1, 2, 4)
        for p in (1, 2, 3)
        if t * p > 1
    ],
)
def test_any_split_gives_one_ranks_logits_gradients_and_tokens(
    tp: int, pp: int, alone: list[Result]
) -> None:
    everyone = ranks(tp * pp, run_split, tp, pp)
    for case, results in enumerate(zip(*everyone, strict=True)):
        check(results, alone[case % len(CASES)], tp, pp, f"case {case}: {CASES[case % len(CASES)]}")


def check(got: tuple[Result, ...], want: Result, tp: int, pp: int, case: str) -> None:
    """What each rank knows against what one rank alone found."""
    for rank, result in enumerate(got):
        assert result.tokens == want.tokens, (case, rank)
        if rank >= tp * (pp - 1):  # The last stage: each of its tensor ranks has all logits.
            assert close(result.logits, want.logits), (case, rank)
        if rank < tp:
            assert close(result.table_grad, want.table_grad), (case, rank)
    assert want.embedding_grad is not None
    vocabulary = len(want.embedding_grad)
    rows = joined(got[:tp])
    if pp > 1 and got[-1].embedding_grad is not None:
        rows = rows + joined(got[-tp:])  # A tied head on the last stage has its part there.
    assert close(rows[:vocabulary], want.embedding_grad), case
    assert not rows[vocabulary:].any(), "padding rows of the vocabulary have a gradient"


def joined(stage: tuple[Result, ...]) -> Tensor:
    """The embedding's gradient from the tensor ranks of a stage."""
    return torch.cat([r.embedding_grad for r in stage if r.embedding_grad is not None])


def close(got: Tensor | None, want: Tensor | None) -> bool:
    assert got is not None
    assert want is not None
    return got.shape == want.shape and float((got - want).abs().max()) <= EXACT


FP32_TOKENS = 16  # The window is 7, so the last ones no longer see the shorter prompts.


def greedy_fp32(rank: int, tp: int, pp: int) -> list[list[int]]:
    model = build(MODERN, Mesh.create(tp, pp), dtype=torch.float32)
    return [c.token_ids for c in generate(model, PROMPTS, Sampling(max_new_tokens=FP32_TOKENS))]


def logits_bf16(rank: int, sequence_parallel: bool) -> Tensor | None:
    mesh = Mesh.create(2, 2, sequence_parallel=sequence_parallel)
    model = build(MODERN, mesh, dtype=torch.bfloat16)
    with torch.inference_mode():
        return pipeline.forward(model, torch.arange(15), Batch.plain(LENGTHS))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bf16_travels_between_ranks(sequence_parallel: bool) -> None:
    whole = build(MODERN)(torch.arange(15), Batch.plain(LENGTHS))
    for logits in ranks(4, logits_bf16, sequence_parallel)[2:]:
        assert logits is not None
        # bf16 has 8 bits: an error of a tenth of the spread would be a wrong formula.
        assert (logits - whole).std() < 0.1 * whole.std()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_fp32_greedy_tokens_agree_up_to_the_first_near_tie(tp: int, pp: int) -> None:
    model = build(MODERN, dtype=torch.float32)
    tokens = ranks(tp * pp, greedy_fp32, tp, pp)
    assert all(t == tokens[0] for t in tokens)
    for prompt, made in zip(PROMPTS, tokens[0], strict=True):
        oracle = recompute_greedy(model, prompt, FP32_TOKENS)
        until = first_tie(oracle)
        if until < FP32_TOKENS:
            print(f"tp {tp} x pp {pp}: compared {until} of {FP32_TOKENS} tokens, then a near-tie")
        assert made[:until] == oracle.tokens[:until]


def test_stages_differ_by_at_most_one_layer_and_the_middle_takes_more() -> None:
    assert stage_layers(7, 3) == [[range(0, 2)], [range(2, 5)], [range(5, 7)]]
    assert stage_layers(8, 3) == [[range(0, 3)], [range(3, 6)], [range(6, 8)]]


def test_virtual_chunks_run_through_all_stages_before_the_second_round() -> None:
    assert stage_layers(8, 2, vpp=2) == [
        [range(0, 2), range(4, 6)],
        [range(2, 4), range(6, 8)],
    ]


def test_a_split_that_cannot_be_is_refused_with_one_that_can() -> None:
    with pytest.raises(ConfigError, match=r"8 heads in 2 query groups.*--tp can be 1, 2, 4"):
        check_split(MODERN, tp=3, pp=1)
    with pytest.raises(ConfigError, match="--pp can be at most 5"):
        check_split(MODERN, tp=1, pp=6)
    with pytest.raises(ConfigError, match="add up to 5"):
        check_split(MODERN, tp=1, pp=2, stages=[3, 3])


def send_many(rank: int) -> list[float]:
    """Two stages: the second looks only when the first has sent everything, and goes on working."""
    mesh = Mesh.create(1, 2)
    shape = (512, 1024)  # 2 MiB each, more than any socket holds.
    got: list[float] = []
    if rank == 0:
        sends, x = Sends(mesh, 1, kept_max=4), torch.empty(shape)
        for number in range(4):
            sends.send(x.fill_(number))
    dist.barrier()
    if rank == 1:
        got = [float(receive_from(shape, torch.float32, mesh, 0).mean()) for _ in range(4)]
    dist.barrier()
    return got


def test_a_stage_sends_on_while_the_next_one_is_busy() -> None:
    assert ranks(2, send_many)[1] == [0.0, 1.0, 2.0, 3.0]
