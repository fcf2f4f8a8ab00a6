"""The parallel mesh: logits, gradients and tokens of any split equal those of one rank."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.dropout import Dropout
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_communication import AsyncSender, receive_from_stage, send_to_stage
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.tensor_parallel import gather_columns
from gpt.parallel.weight_sharding import check_split
from gpt.sampling_params import SamplingParams
from tests.support.models import CONFIGS, MODERN, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

# fp64 sums in another order: a few units in the last place of numbers of about 10.
EXACT = 1e-10

LENGTHS = (5, 1, 9)  # 15 tokens: no number of tensor ranks divides them.
VIRTUAL = 3
PROMPTS = [[7, 3, 90, 12, 5], [64], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


@dataclass(frozen=True)
class RankRun:
    """The outputs of one run on a rank; a stage has only its part."""

    logits: Tensor | None
    table_grad: Tensor | None
    embedding_grad: Tensor | None
    tokens: list[list[int]]


def inputs(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Flat ids with virtual tokens at the start and in the middle, and the adapter's table."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, config.vocab_size, (sum(LENGTHS),), generator=generator)
    for position, row in ((0, 0), (1, 1), (9, 2), (11, 0)):
        ids[position] = config.vocab_size + row
    table = torch.randn(VIRTUAL, config.hidden_size, generator=generator, dtype=torch.float64)
    return ids, table


def run_backward(model: GPT, x: Tensor, y: Tensor) -> None:
    """Gradients of one stage: `y` is its output, or a scalar on the last stage; `x` its input."""
    mesh = model.mesh
    grad = None
    if not model.is_last_stage:
        grad = receive_from_stage(tuple(y.shape), y.dtype, mesh, mesh.pp_rank + 1)
    torch.autograd.backward(y, grad)
    if not model.is_first_stage:
        assert x.grad is not None
        send_to_stage(x.grad, mesh, mesh.pp_rank - 1)


def run(config: GPTConfig, mesh: Mesh, stages: list[int] | None, dropout: float) -> RankRun:
    """Forward, backward and greedy decoding of one rank's share."""
    config = config.with_fields(hidden_dropout=dropout, attention_dropout=dropout)
    model = build(config, mesh, stages=stages, trainable=True)
    ids, table = inputs(config)
    table.requires_grad_()
    batch = Batch.unpaged(LENGTHS, dropout=Dropout(11) if dropout else None)
    x = pipeline.receive_input(model, ids, batch)
    if not model.is_first_stage:
        x.requires_grad_()
    y = model(x, batch, virtual_embeddings=table if model.is_first_stage else None)
    logits = None
    if model.is_last_stage:
        logits = y.detach()
        generator = torch.Generator().manual_seed(3)
        y = (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum()
    else:
        send_to_stage(y, mesh, mesh.pp_rank + 1)
    run_backward(model, x, y)
    embedding = model.embedding.weight_shard.grad if model.embedding else None
    tokens: list[list[int]] = []
    if not dropout:  # Decoding has no dropout. The third token reads the second one's KV.
        completions = generate(model, PROMPTS, SamplingParams(max_new_tokens=3))
        tokens = [completion.token_ids for completion in completions]
    return RankRun(logits, table.grad, embedding, tokens)


CASES = [*((name, 0.0) for name in CONFIGS), ("modern", 0.1), ("experts", 0.1)]


def is_large(tp: int, pp: int) -> bool:
    return tp * pp >= 6 or tp == 4


def cases_of(tp: int, pp: int, sequence_parallel: bool) -> list[int]:
    """The indices of the cases that run with or without sequence parallelism.

    On a small split all cases run without it and, where rows can be divided, with it. On a large
    one each case runs either with it or without it.
    """
    cases = range(len(CASES))
    return [*(cases[sequence_parallel::2] if is_large(tp, pp) else cases)]


def modes_of(tp: int) -> tuple[bool, ...]:
    """Without and with sequence parallelism."""
    return (False, True)[: 1 + (tp > 1)]


def run_split(rank: int, tp: int, pp: int) -> list[RankRun]:
    results = []
    for sequence_parallel in modes_of(tp):
        mesh = Mesh.create(tp, pp, sequence_parallel=sequence_parallel)
        for case in cases_of(tp, pp, sequence_parallel):
            name, dropout = CASES[case]
            config = CONFIGS[name]
            stages = [3, 1, 1] if pp == 3 and config.num_layers == 5 else None
            results.append(run(config, mesh, stages, dropout))
    return results


@pytest.fixture(scope="module")
def single_rank_runs() -> list[RankRun]:
    return [run(CONFIGS[name], Mesh.single(), None, dropout) for name, dropout in CASES]


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        # Six ranks and more overload a small machine.
        pytest.param(t, p, marks=[pytest.mark.slow] if is_large(t, p) else [])
        for t in (1, 2, 4)
        for p in (1, 2, 3)
        if t * p > 1
    ],
)
def test_logits_gradients_and_tokens_equal_across_splits(
    tp: int, pp: int, single_rank_runs: list[RankRun]
) -> None:
    results_by_rank = ranks(tp * pp, run_split, tp, pp)
    cases = [case for mode in modes_of(tp) for case in cases_of(tp, pp, mode)]
    for case, results in zip(cases, zip(*results_by_rank, strict=True), strict=True):
        check_against_single_rank(
            results, single_rank_runs[case], tp, pp, f"case {case}: {CASES[case]}"
        )


def check_against_single_rank(
    results: tuple[RankRun, ...], want: RankRun, tp: int, pp: int, case: str
) -> None:
    """Compare each rank's results with those of one rank."""
    for rank, result in enumerate(results):
        assert result.tokens == want.tokens, (case, rank)
        if rank >= tp * (pp - 1):  # The last stage: each of its tensor ranks has all logits.
            assert is_close(result.logits, want.logits), (case, rank)
        if rank < tp:
            assert is_close(result.table_grad, want.table_grad), (case, rank)
    assert want.embedding_grad is not None
    vocabulary = len(want.embedding_grad)
    rows = join_embedding_grad(results[:tp])
    if pp > 1 and results[-1].embedding_grad is not None:
        rows = rows + join_embedding_grad(
            results[-tp:]
        )  # A tied head on the last stage has its part there.
    assert is_close(rows[:vocabulary], want.embedding_grad), case
    assert not rows[vocabulary:].any(), "padding rows of the vocabulary have a gradient"


def join_embedding_grad(stage: tuple[RankRun, ...]) -> Tensor:
    """The embedding's gradient from the tensor ranks of a stage."""
    return torch.cat([r.embedding_grad for r in stage if r.embedding_grad is not None])


def is_close(got: Tensor | None, want: Tensor | None) -> bool:
    assert got is not None
    assert want is not None
    return got.shape == want.shape and float((got - want).abs().max()) <= EXACT


FP32_TOKENS = 16  # The window is 7, so the last tokens no longer see the shorter prompts.


def greedy_fp32(rank: int, tp: int, pp: int) -> list[list[int]]:
    model = build(MODERN, Mesh.create(tp, pp), dtype=torch.float32)
    return [
        c.token_ids for c in generate(model, PROMPTS, SamplingParams(max_new_tokens=FP32_TOKENS))
    ]


def logits_bf16(rank: int, sequence_parallel: bool) -> Tensor | None:
    mesh = Mesh.create(2, 2, sequence_parallel=sequence_parallel)
    model = build(MODERN, mesh, dtype=torch.bfloat16)
    with torch.inference_mode():
        return pipeline.forward(model, torch.arange(15), Batch.unpaged(LENGTHS))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bf16_tensors_are_sent_between_ranks(sequence_parallel: bool) -> None:
    expected = build(MODERN)(torch.arange(15), Batch.unpaged(LENGTHS))
    for logits in ranks(4, logits_bf16, sequence_parallel)[2:]:
        assert logits is not None
        # bf16 has 8 bits: an error of a tenth of the spread would be a wrong formula.
        assert (logits - expected).std() < 0.1 * expected.std()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_fp32_greedy_tokens_agree_up_to_the_first_near_tie(tp: int, pp: int) -> None:
    model = build(MODERN, dtype=torch.float32)
    tokens = ranks(tp * pp, greedy_fp32, tp, pp)
    assert all(t == tokens[0] for t in tokens)
    for prompt, tokens_of_prompt in zip(PROMPTS, tokens[0], strict=True):
        oracle = recompute_greedy(model, prompt, FP32_TOKENS)
        until = first_tie(oracle)
        if until < FP32_TOKENS:
            print(f"tp {tp} x pp {pp}: compared {until} of {FP32_TOKENS} tokens, then a near-tie")
        assert tokens_of_prompt[:until] == oracle.tokens[:until]


def test_stage_sizes_differ_by_one_layer_and_middle_stages_are_larger() -> None:
    assert stage_layers(7, 3) == [[range(0, 2)], [range(2, 5)], [range(5, 7)]]
    assert stage_layers(8, 3) == [[range(0, 3)], [range(3, 6)], [range(6, 8)]]


def test_first_chunks_of_all_stages_precede_second_chunks() -> None:
    assert stage_layers(8, 2, vpp=2) == [
        [range(0, 2), range(4, 6)],
        [range(2, 4), range(6, 8)],
    ]


def test_invalid_splits_are_refused_with_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"8 heads in 2 query groups.*--tp can be 1, 2, 4"):
        check_split(MODERN, tp=3, pp=1)
    with pytest.raises(ConfigError, match="--pp can be at most 5"):
        check_split(MODERN, tp=1, pp=6)
    with pytest.raises(ConfigError, match="add up to 5"):
        check_split(MODERN, tp=1, pp=2, stages=[3, 3])


def send_many(rank: int) -> list[float]:
    """Two stages: the second receives only after the first has sent everything and gone on."""
    mesh = Mesh.create(1, 2)
    shape = (512, 1024)  # 2 MiB each, more than any socket holds.
    means: list[float] = []
    if rank == 0:
        sends = AsyncSender(mesh, 1, in_flight_max=4)
        x = torch.empty(shape)
        for number in range(4):
            sends.send(x.fill_(number))
    dist.barrier()
    if rank == 1:
        means = [float(receive_from_stage(shape, torch.float32, mesh, 0).mean()) for _ in range(4)]
    dist.barrier()
    return means


def test_sends_do_not_block_while_the_next_stage_is_busy() -> None:
    assert ranks(2, send_many)[1] == [0.0, 1.0, 2.0, 3.0]


def send_transposed(rank: int) -> list[list[float]]:
    mesh = Mesh.create(1, 2)
    x = torch.arange(6.0).view(2, 3).T
    if rank == 0:
        AsyncSender(mesh, 1, in_flight_max=0).send(x)
        return []
    received: list[list[float]] = receive_from_stage((3, 2), torch.float32, mesh, 0).tolist()
    return received


def test_a_transposed_tensor_arrives_unchanged() -> None:
    assert ranks(2, send_transposed)[1] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def gather_bf16_logits(_rank: int) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return the logits, the logits gathered in fp32, and the dtype in which they are gathered."""
    model = build(MODERN, Mesh.create(2, 1), dtype=torch.bfloat16)
    ids, batch = torch.arange(2, 14), Batch.unpaged([5, 7])
    dtypes = []

    def gather(x: Tensor, mesh: Mesh) -> Tensor:
        dtypes.append(x.dtype)
        return gather_columns(x, mesh)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr("gpt.model.gpt_model.gather_columns", gather)
        logits = model(ids, batch)
        shard = model.compute_logits_shard(model.forward_hidden(ids, batch), batch)
    return logits, gather_columns(shard, model.mesh)[:, : MODERN.vocab_size], dtypes[0]


def test_logits_are_gathered_in_the_models_dtype() -> None:
    for logits, fp32_logits, dtype in ranks(2, gather_bf16_logits):
        assert dtype == torch.bfloat16 and logits.dtype == fp32_logits.dtype == torch.float32
        assert torch.equal(logits, fp32_logits)
