"""Gradients are equal at any split: every pair of settings, every triple of split and schedule.

The oracle is one rank, one batch of whole sequences and torch's own cross entropy. A split computes
the same examples in micro-batches of unequal sizes, with answers of unequal lengths, in fp64, so
that every difference of a formula shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import parameter_specs, shard_spec
from ptuning.config import TrainingConfig
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import MicroBatch, build_micro_batch
from ptuning.prompt.prefix_tuning import PrefixEncoder, shard_prefix_table
from ptuning.training.gradient_reduction import trainable_model_tensors, trainable_prefix_tensors
from ptuning.training.optimizer import Optimizer
from ptuning.training.pipeline import PipelineChannels, micro_batch_prefix, run_passes
from ptuning.training.pipeline_schedule import schedule_1f1b, schedule_interleaved_1f1b
from tests.support.models import (
    ALIBI,
    CLASSIC,
    EXPERTS,
    LAYERED,
    MODERN,
    POST_NORMS,
    SINKS,
    XIELU,
    build,
    lively,
)
from tests.support.ranks import ranks

EXACT = 1e-10  # Relative to the largest gradient: fp64 sums in another order.
RANKS_MAX = 12  # More ranks overload a small machine.
VIRTUAL = 3

# Six layers, so that three stages of two chunks have one each.
MODELS = {
    "classic": CLASSIC.with_fields(num_layers=6, moe_layers=()),
    "modern": MODERN.with_fields(num_layers=6, moe_layers=()),
    "experts": EXPERTS.with_fields(num_layers=6, moe_layers=(True, False, True, True, False, True)),
    "layered": LAYERED.with_fields(
        num_layers=6,
        moe_layers=(),
        window_layers=(True, False, True, True, False, True),
        rope_layers=(True, True, False, True, True, False),
        untie_embeddings_and_output_weights=True,
    ),
    "post norms": POST_NORMS.with_fields(num_layers=6, moe_layers=(), window_layers=()),
    "sinks": SINKS.with_fields(
        num_layers=6, moe_layers=(True,) * 6, window_layers=(True, False) * 3
    ),
    # BLOOM's positions and embedding norm with OPT's activation.
    "ALiBi": ALIBI.with_fields(num_layers=6, moe_layers=(), activation="relu"),
    # Apertus with the factors of Granite.
    "xIELU": XIELU.with_fields(
        num_layers=6,
        moe_layers=(),
        softmax_scale=0.3,
        embedding_multiplier=1.5,
        embedding_multiplier_scope="all",
        residual_multiplier=0.6,
        logits_scaling=0.8,
    ),
}


@dataclass(frozen=True)
class Case:
    tp: int
    pp: int
    dp: int
    sequence_parallel: bool
    recompute: str
    virtual_stages: int  # 1: 1F1B; more: interleaved.

    @property
    def split(self) -> tuple[int, int, int]:
        return self.tp, self.pp, self.dp


VALUES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 3),
    "dp": (1, 2),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "block", "full"),
    "virtual_stages": (1, 2),
}
Pair = tuple[tuple[str, object], tuple[str, object]]


def setting_pairs(case: Case) -> set[Pair]:
    """Without meaningless pairs: sequence parallelism needs more than one tensor rank."""
    settings = [
        (field.name, value) for field, value in zip(fields(case), astuple(case), strict=True)
    ]
    pairs = set(combinations(settings, 2))
    idle = ("sequence_parallel", True) if case.tp == 1 else None
    return {pair for pair in pairs if idle not in pair or pair[0][0] == "tp"}


def every_pair() -> set[Pair]:
    return {
        ((values, a), (other_values, b))
        for values, other_values in combinations(VALUES, 2)
        for a, b in product(VALUES[values], VALUES[other_values])
    }


@cache
def covering_cases() -> tuple[Case, ...]:
    """Each triple of TP, PP and schedule, as the case that covers most pairs; then the rest."""
    cases = [
        case
        for values in product(*VALUES.values())
        if (case := Case(*values)).tp * case.pp * case.dp <= RANKS_MAX  # type: ignore[arg-type]
    ]
    # One data-parallel size for each split, so that its cases share their processes; two of them
    # along a diagonal combine with every TP and every PP.
    data_parallel_splits = {(1, 3), (2, 2), (4, 1)}
    worlds = [
        case for case in cases if (case.dp == 2) == ((case.tp, case.pp) in data_parallel_splits)
    ]
    chosen: list[Case] = []
    missing = every_pair()
    for triple in product(VALUES["tp"], VALUES["pp"], VALUES["virtual_stages"]):
        candidates = [case for case in worlds if (case.tp, case.pp, case.virtual_stages) == triple]
        chosen.append(max(candidates, key=lambda case: len(setting_pairs(case) & missing)))
        missing -= setting_pairs(chosen[-1])
    while missing:
        chosen.append(max(worlds, key=lambda case: len(setting_pairs(case) & missing)))
        missing -= setting_pairs(chosen[-1])
    return tuple(chosen)


def model_of(case: Case) -> str:
    """Experts are slow, so only a few cases have them."""
    number = covering_cases().index(case)
    if number % 6 == 4:
        return ("experts", "sinks")[number // 6 % 2]
    if number == 8:  # TP x PP x DP with sequence parallelism, and all weights are trained.
        return "xIELU"
    return ("classic", "modern", "layered", "post norms", "ALiBi")[number % 5]


def trains_all_weights(case: Case) -> bool:
    # Sinks and norms of all heads are frozen, as all weights are in prompt learning.
    is_frozen = model_of(case) in ("sinks", "post norms")
    return covering_cases().index(case) % 4 in (0, 3) and not is_frozen


@cache
def examples_of(vocab_size: int) -> tuple[Example, ...]:
    """Two virtual tokens, a text of 3 to 12 tokens with a virtual one in some, unequal answers."""
    generator = torch.Generator().manual_seed(8)
    examples = []
    for number in range(14):
        size = 3 + number * 7 % 10
        text = torch.randint(vocab_size, (size,), generator=generator).tolist()
        if number % 3 == 0:
            text[0] = vocab_size + 2
        answer = 1 + number * 5 % (size - 1)
        ids = [vocab_size, vocab_size + 1, *text]
        examples.append(Example(ids, len(ids) - answer))
    return tuple(examples)


def table_of(config: GPTConfig) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VIRTUAL, config.hidden_size, generator=generator, dtype=torch.float64)
    return table.requires_grad_()


@dataclass(frozen=True)
class SingleRank:
    """Loss and gradients of one rank."""

    loss: float
    table: Tensor
    parameters: dict[str, Tensor]


@cache
def single_rank(name: str) -> SingleRank:
    """No micro-batches, no sharding, and torch's cross entropy."""
    config = MODELS[name]
    model = build(config, trainable=True)
    table = table_of(config)
    examples = examples_of(config.vocab_size)
    ids = torch.tensor([token for example in examples for token in example.ids])
    batch = Batch.unpaged([len(example.ids) for example in examples])
    logits = model(ids, batch, virtual_embeddings=table)
    starts = [sum(len(example.ids) for example in examples[:n]) for n in range(len(examples))]
    pairs = list(zip(starts, examples, strict=True))
    rows = [start + position - 1 for start, example in pairs for position in example.loss_positions]
    targets = torch.tensor(
        [example.ids[position] for example in examples for position in example.loss_positions]
    )
    loss = F.cross_entropy(logits[rows], targets)
    loss.backward()
    assert table.grad is not None
    grads = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return SingleRank(float(loss.detach()), table.grad, grads)


@dataclass(frozen=True)
class RankResult:
    """Loss and gradients on a rank of a split."""

    loss: float  # On the last stage; elsewhere zero.
    table: Tensor | None  # On the first stage.
    parameters: dict[str, Tensor]  # Of the trained tensors; summed over the ranks.


def run_split(rank: int, tp: int, pp: int, dp: int, cases: Sequence[Case]) -> list[RankResult]:
    meshes = {
        sequence_parallel: Mesh.create(tp, pp, dp, sequence_parallel=sequence_parallel)
        for sequence_parallel in sorted({case.sequence_parallel for case in cases})
    }
    channels = PipelineChannels(next(iter(meshes.values())))
    return [run(case, meshes[case.sequence_parallel], channels) for case in cases]


def run(case: Case, mesh: Mesh, channels: PipelineChannels) -> RankResult:
    config = MODELS[model_of(case)]
    chunks = chunks_of(case, config, mesh)
    trained = trainable_model_tensors(chunks) if trains_all_weights(case) else []
    table = table_of(config)
    micros = list(micro_batches_of(config, mesh, share=covering_cases().index(case) % 4 < 2))
    total = sum(len(example.loss_positions) for example in examples_of(config.vocab_size))
    if case.virtual_stages == 1:
        passes = schedule_1f1b(mesh.pp_rank, mesh.pp, len(micros))
    else:
        passes = schedule_interleaved_1f1b(mesh.pp_rank, mesh.pp, len(micros), case.virtual_stages)
    loss = run_passes(chunks, passes, micros, channels, table=table, loss_scales=[1 / total])
    if trained:
        optimizer = Optimizer(trained, TrainingConfig(), mesh, peak_learning_rates=[1e-4])
        optimizer.reduce_gradients(config)
    grads = {f"{n}/{trainable.name}": trainable.value.grad for n, trainable in enumerate(trained)}
    return RankResult(
        float(loss) / total, table.grad, {k: v for k, v in grads.items() if v is not None}
    )


def chunks_of(case: Case, config: GPTConfig, mesh: Mesh) -> list[GPT]:
    layers = stage_layers(config.num_layers, mesh.pp, vpp=case.virtual_stages)[mesh.pp_rank]
    checkpoint = lively(config.with_fields(dtype="float64"))
    recompute = RecomputePolicy(case.recompute)  # type: ignore[arg-type]
    return [
        load_model(checkpoint, mesh, layers=chunk_layers, recompute=recompute)
        for chunk_layers in layers
    ]


def micro_batches_of(config: GPTConfig, mesh: Mesh, *, share: bool) -> Iterator[MicroBatch]:
    """This data rank's examples, a few at a time; data ranks have unequal numbers of passes."""
    examples = examples_of(config.vocab_size)[mesh.dp_rank :: mesh.dp]
    sizes = [3, 1, 4, 2, 4] if mesh.dp == 1 else [[3, 1, 2, 1], [5, 2]][mesh.dp_rank]
    assert sum(sizes) == len(examples)
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        yield build_micro_batch(examples[start : start + size], share_prefix=share)


def test_cases_cover_every_pair_of_settings_and_every_triple_of_split_and_schedule() -> None:
    cases = covering_cases()
    assert set().union(*map(setting_pairs, cases)) == every_pair()
    triples = {(case.tp, case.pp, case.virtual_stages) for case in cases}
    assert triples == set(product(VALUES["tp"], VALUES["pp"], VALUES["virtual_stages"]))
    assert {model_of(case) for case in cases} == set(MODELS)
    assert {trains_all_weights(case) for case in cases} == {True, False}
    assert max(case.tp * case.pp * case.dp for case in cases) <= RANKS_MAX
    lengths = {len(example.ids) - 2 for example in examples_of(100)}
    assert lengths == set(range(3, 13))


SPLITS = sorted({case.split for case in covering_cases()})


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=["x".join(map(str, split)) for split in SPLITS])
def test_gradients_equal_across_splits(split: tuple[int, int, int]) -> None:
    tp, pp, dp = split
    cases = [case for case in covering_cases() if case.split == split]
    results_by_rank = ranks(tp * pp * dp, run_split, tp, pp, dp, cases, timeout_s=120)
    for case, results in zip(cases, zip(*results_by_rank, strict=True), strict=True):
        check_against_single_rank(case, results)


def check_against_single_rank(case: Case, results: Sequence[RankResult]) -> None:
    want = single_rank(model_of(case))
    tp = case.tp
    ranks_per_stage = case.tp * case.dp
    for tensor_rank in range(tp):
        # Each data rank has the share of its own examples; tensor ranks have the same.
        data_ranks = results[tensor_rank::tp]
        assert sum(result.loss for result in data_ranks) == pytest.approx(want.loss, rel=EXACT), (
            case
        )
        tables = [result.table for result in data_ranks[: case.dp] if result.table is not None]
        assert is_close(torch.stack(tables).sum(0), want.table), case
    for rank, result in enumerate(results):
        assert (result.table is None) == (rank >= ranks_per_stage), case
        assert bool(result.parameters) == trains_all_weights(case), case
        for key, grad in result.parameters.items():
            name = key.partition("/")[2]
            shard = cut_shard(case, name, want.parameters[name], rank % tp)
            assert is_close(grad, shard), (case, rank, name)


# A prefix covers every layer and KV head, so one case per kind of split; "modern" has two groups.
PREFIX_CASES = {
    "modern": (
        Case(4, 1, 1, False, "none", 1),
        Case(4, 1, 1, True, "block", 1),
        Case(2, 2, 1, True, "full", 1),
    ),
    "experts": (Case(1, 2, 2, False, "selective", 2),),
    "classic": (Case(2, 1, 2, False, "none", 1),),
}


def prefix_table_of(config: GPTConfig) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    shape = VIRTUAL, config.prefix_width
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@cache
def single_rank_with_prefix(name: str) -> tuple[float, Tensor]:
    """The loss and the whole table's gradient on one rank."""
    config = MODELS[name]
    model = build(config)
    keys = prefix_table_of(config)
    examples = examples_of(config.vocab_size)
    micro = build_micro_batch(examples, share_prefix=False)
    shape = (VIRTUAL, config.num_layers, 2, config.num_query_groups, config.kv_channels)
    layers = dict(enumerate(keys.view(shape).unbind(1)))
    prefix = micro_batch_prefix(layers, micro.ids, config.vocab_size)
    logits = model.compute_logits(
        model.forward_hidden(micro.ids, micro.batch, prefix=prefix), micro.batch
    )
    loss = F.cross_entropy(logits, micro.labels)
    loss.backward()
    assert keys.grad is not None
    return float(loss.detach()), keys.grad


@dataclass(frozen=True)
class PrefixResult:
    """Loss and gradients of a prefix on a rank of a split."""

    loss: float  # On the last stage.
    squares: float  # This rank's share of the whole gradient's.
    grads: dict[int, Tensor]  # Of its layers and KV heads, summed over the ranks.
    expected_grads: dict[int, Tensor]  # The same part of the gradient on one rank.


def run_prefix(_: int, case: Case, name: str) -> PrefixResult:
    mesh = Mesh.create(case.tp, case.pp, case.dp, sequence_parallel=case.sequence_parallel)
    config = MODELS[name]
    chunks = chunks_of(case, config, mesh)
    for chunk in chunks:
        chunk.requires_grad_(False)
    prefix = PrefixEncoder(prefix_table_of(config).detach(), chunks)
    trained = trainable_prefix_tensors(prefix.named_parameters(), config, mesh)
    micros = list(micro_batches_of(config, mesh, share=case.dp == 1))
    passes = schedule_1f1b(mesh.pp_rank, mesh.pp, len(micros))
    if case.virtual_stages > 1:
        passes = schedule_interleaved_1f1b(mesh.pp_rank, mesh.pp, len(micros), case.virtual_stages)
    total = sum(len(example.loss_positions) for example in examples_of(config.vocab_size))
    loss = run_passes(
        chunks,
        passes,
        micros,
        PipelineChannels(mesh),
        table=None,
        prefix=prefix.key_values,
        loss_scales=[1 / total],
    )
    optimizer = Optimizer(trained, TrainingConfig(), mesh, peak_learning_rates=[3e-2])
    (squares,) = optimizer.reduce_gradients(config)
    layer_grads = {
        layer: trained[position].value.grad for position, layer in enumerate(prefix.key_values)
    }
    grads = {layer: grad for layer, grad in layer_grads.items() if grad is not None}
    expected_grads = shard_prefix_table(single_rank_with_prefix(name)[1], chunks)
    flat = {layer: expected.flatten(1) for layer, expected in expected_grads.items()}
    return PrefixResult(float(loss) / total, squares, grads, flat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [(n, result) for n, prefix_case in PREFIX_CASES.items() for result in prefix_case],
)
def test_prefix_gradients_equal_across_splits(name: str, case: Case) -> None:
    loss, gradient = single_rank_with_prefix(name)
    results = ranks(case.tp * case.pp * case.dp, run_prefix, case, name, timeout_s=120)
    last_stage = results[-case.tp * case.dp :]
    squares = float(gradient.square().sum())
    assert sum(result.loss for result in last_stage[:: case.tp]) == pytest.approx(loss, rel=EXACT)
    assert sum(result.squares for result in results) == pytest.approx(squares, rel=EXACT)
    assert {layer for result in results for layer in result.grads} == set(
        range(MODELS[name].num_layers)
    )
    for result in results:
        assert result.grads.keys() == result.expected_grads.keys()
        for layer, grad in result.grads.items():
            assert is_close(grad, result.expected_grads[layer]), (case, layer)


def cut_shard(case: Case, name: str, tensor: Tensor, rank: int) -> Tensor:
    """A tensor rank's part; a vocabulary that does not divide is padded with zeros."""
    config = MODELS[model_of(case)]
    shard_spec_ = shard_spec(parameter_specs(config)[name], config, rank, case.tp)
    part = torch.cat(
        [tensor.narrow(shard_spec_.dim, a, b - a) for a, b in shard_spec_.ranges], shard_spec_.dim
    )
    missing = shard_spec_.size - part.shape[shard_spec_.dim]
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


def is_close(gradient: Tensor, want: Tensor) -> bool:
    assert gradient.shape == want.shape
    return float((gradient - want).abs().max()) <= EXACT * float(want.abs().max())
