"""The same gradients at any split: every pair of settings, every triple of split and schedule.

The oracle is one rank, one batch of plain sequences and torch's own cross entropy. A split computes
the same examples in micro-batches of unequal sizes, with answers of unequal lengths. fp64, so that
any formula that is not the same shows.
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
from gpt.model.activation_checkpointing import Recompute
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import parameters, part, stage_layers
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import MicroBatch, micro_batch
from ptuning.prompt.prefix_tuning import Prefix, prefix_parts
from ptuning.training.optimizer import Optimizer, of_model, of_prefix
from ptuning.training.pipeline import Channels, prefix_at, run_passes
from ptuning.training.pipeline_schedule import interleaved, one_f_one_b
from tests.support.models import CLASSIC, EXPERTS, MODERN, build, lively
from tests.support.ranks import ranks

EXACT = 1e-10  # Of the largest gradient: fp64 sums in another order.
RANKS_MAX = 12  # More crowd a small machine.
VIRTUAL = 3

# Six layers, so that three stages of two chunks have one each.
MODELS = {
    "classic": CLASSIC.with_fields(num_layers=6, moe_layers=()),
    "modern": MODERN.with_fields(num_layers=6, moe_layers=()),
    "experts": EXPERTS.with_fields(num_layers=6, moe_layers=(True, False, True, True, False, True)),
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
    def world(self) -> tuple[int, int, int]:
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


def pairs_of(case: Case) -> set[Pair]:
    """Without those that say nothing: rows are shared out among tensor ranks, so one has all."""
    named = [(field.name, value) for field, value in zip(fields(case), astuple(case), strict=True)]
    pairs = set(combinations(named, 2))
    idle = ("sequence_parallel", True) if case.tp == 1 else None
    return {pair for pair in pairs if idle not in pair or pair[0][0] == "tp"}


def every_pair() -> set[Pair]:
    return {
        ((one, a), (other, b))
        for one, other in combinations(VALUES, 2)
        for a, b in product(VALUES[one], VALUES[other])
    }


@cache
def covering() -> tuple[Case, ...]:
    """Each triple of TP, PP and schedule once, with what covers most pairs yet; then the rest."""
    everything = [
        case
        for values in product(*VALUES.values())
        if (case := Case(*values)).tp * case.pp * case.dp <= RANKS_MAX  # type: ignore[arg-type]
    ]
    # One number of data ranks for each split, so that its cases share their processes; two of them
    # along a diagonal meet every TP and every PP.
    wide = {(1, 3), (2, 2), (4, 1)}
    worlds = [case for case in everything if (case.dp == 2) == ((case.tp, case.pp) in wide)]
    found: list[Case] = []
    missing = every_pair()
    for triple in product(VALUES["tp"], VALUES["pp"], VALUES["virtual_stages"]):
        some = [case for case in worlds if (case.tp, case.pp, case.virtual_stages) == triple]
        found.append(max(some, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(found[-1])
    while missing:
        found.append(max(worlds, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(found[-1])
    return tuple(found)


def model_of(case: Case) -> str:
    """Experts are slow, so a few cases have them."""
    number = covering().index(case)
    return "experts" if number % 6 == 4 else ("classic", "modern")[number % 2]


def learns_all(case: Case) -> bool:
    return covering().index(case) % 4 in (0, 3)


@cache
def examples_of(vocab_size: int) -> tuple[Example, ...]:
    """Two virtual tokens, a text of 3 to 12 tokens with a virtual one in some, unequal answers."""
    generator = torch.Generator().manual_seed(8)
    found = []
    for number in range(14):
        size = 3 + number * 7 % 10
        text = torch.randint(vocab_size, (size,), generator=generator).tolist()
        if number % 3 == 0:
            text[0] = vocab_size + 2
        answer = 1 + number * 5 % (size - 1)
        ids = [vocab_size, vocab_size + 1, *text]
        found.append(Example(ids, len(ids) - answer))
    return tuple(found)


def table_of(config: GPTConfig) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VIRTUAL, config.hidden_size, generator=generator, dtype=torch.float64)
    return table.requires_grad_()


@dataclass(frozen=True)
class Alone:
    """What one rank finds."""

    loss: float
    table: Tensor
    parameters: dict[str, Tensor]


@cache
def alone(name: str) -> Alone:
    """No micro-batches, nothing shared, no loss of ours."""
    config = MODELS[name]
    model, table = build(config, trainable=True), table_of(config)
    examples = examples_of(config.vocab_size)
    ids = torch.tensor([token for one in examples for token in one.ids])
    logits = model(ids, Batch.plain([len(one.ids) for one in examples]), table=table)
    starts = [sum(len(one.ids) for one in examples[:n]) for n in range(len(examples))]
    pairs = list(zip(starts, examples, strict=True))
    rows = [start + place - 1 for start, one in pairs for place in one.learned]
    wanted = torch.tensor([one.ids[place] for one in examples for place in one.learned])
    loss = F.cross_entropy(logits[rows], wanted)
    loss.backward()
    assert table.grad is not None
    grads = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return Alone(float(loss.detach()), table.grad, grads)


@dataclass(frozen=True)
class Found:
    """What a rank of a split finds."""

    loss: float  # On the last stage; elsewhere zero.
    table: Tensor | None  # On the first stage.
    parameters: dict[str, Tensor]  # Where they are learned; put together over the ranks.


def run_world(rank: int, tp: int, pp: int, dp: int, cases: Sequence[Case]) -> list[Found]:
    meshes = {
        wanted: Mesh.create(tp, pp, dp, sequence_parallel=wanted)
        for wanted in sorted({case.sequence_parallel for case in cases})
    }
    channels = Channels(next(iter(meshes.values())))
    return [run(case, meshes[case.sequence_parallel], channels) for case in cases]


def run(case: Case, mesh: Mesh, channels: Channels) -> Found:
    config = MODELS[model_of(case)]
    chunks = chunks_of(case, config, mesh)
    learned = of_model(chunks) if learns_all(case) else []
    table = table_of(config)
    micros = list(micros_of(config, mesh, share=covering().index(case) % 4 < 2))
    total = sum(len(one.learned) for one in examples_of(config.vocab_size))
    if case.virtual_stages == 1:
        passes = one_f_one_b(mesh.pp_rank, mesh.pp, len(micros))
    else:
        passes = interleaved(mesh.pp_rank, mesh.pp, len(micros), case.virtual_stages)
    loss = run_passes(chunks, passes, micros, channels, table=table, scale=1 / total)
    if learned:
        Optimizer(learned, TuneConfig("model", data="records", method="full"), mesh).gather(config)
    grads = {f"{n}/{one.name}": one.value.grad for n, one in enumerate(learned)}
    return Found(float(loss) / total, table.grad, {k: v for k, v in grads.items() if v is not None})


def chunks_of(case: Case, config: GPTConfig, mesh: Mesh) -> list[GPT]:
    layers = stage_layers(config.num_layers, mesh.pp, vpp=case.virtual_stages)[mesh.pp_rank]
    checkpoint = lively(config.with_fields(dtype="float64"))
    recompute = Recompute(case.recompute)  # type: ignore[arg-type]
    return [load_model(checkpoint, mesh, layers=some, recompute=recompute) for some in layers]


def micros_of(config: GPTConfig, mesh: Mesh, *, share: bool) -> Iterator[MicroBatch]:
    """This data rank's examples, a few at a time; data ranks have unequal numbers of passes."""
    own = examples_of(config.vocab_size)[mesh.dp_rank :: mesh.dp]
    sizes = [3, 1, 4, 2, 4] if mesh.dp == 1 else [[3, 1, 2, 1], [5, 2]][mesh.dp_rank]
    assert sum(sizes) == len(own)
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        yield micro_batch(own[start : start + size], share=share)


def test_the_cases_cover_every_pair_and_every_triple_of_split_and_schedule() -> None:
    cases = covering()
    assert set().union(*map(pairs_of, cases)) == every_pair()
    triples = {(case.tp, case.pp, case.virtual_stages) for case in cases}
    assert triples == set(product(VALUES["tp"], VALUES["pp"], VALUES["virtual_stages"]))
    assert {model_of(case) for case in cases} == set(MODELS)
    assert {learns_all(case) for case in cases} == {True, False}
    assert max(case.tp * case.pp * case.dp for case in cases) <= RANKS_MAX
    lengths = {len(one.ids) - 2 for one in examples_of(100)}
    assert lengths == set(range(3, 13))


WORLDS = sorted({case.world for case in covering()})


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=["x".join(map(str, world)) for world in WORLDS])
def test_gradients_are_one_ranks(world: tuple[int, int, int]) -> None:
    tp, pp, dp = world
    cases = [case for case in covering() if case.world == world]
    everyone = ranks(tp * pp * dp, run_world, tp, pp, dp, cases, timeout_s=120)
    for case, results in zip(cases, zip(*everyone, strict=True), strict=True):
        check(case, results)


def check(case: Case, got: Sequence[Found]) -> None:
    want, tp, wide = alone(model_of(case)), case.tp, case.tp * case.dp
    for tensor_rank in range(tp):
        # Each data rank has its own examples' share; tensor ranks have the same.
        own = got[tensor_rank::tp]
        assert sum(one.loss for one in own) == pytest.approx(want.loss, rel=EXACT), case
        first = [one.table for one in own[: case.dp] if one.table is not None]
        assert close(torch.stack(first).sum(0), want.table), case
    for rank, one in enumerate(got):
        assert (one.table is None) == (rank >= wide), case
        assert bool(one.parameters) == learns_all(case), case
        for key, grad in one.parameters.items():
            name = key.partition("/")[2]
            own_part = cut(case, name, want.parameters[name], rank % tp)
            assert close(grad, own_part), (case, rank, name)


# A prefix is of every layer and KV head, so each kind of split once; "modern" has two groups.
PREFIXES = {
    "modern": (
        Case(4, 1, 1, False, "none", 1),
        Case(4, 1, 1, True, "block", 1),
        Case(2, 2, 1, True, "full", 1),
    ),
    "experts": (Case(1, 2, 2, False, "selective", 2),),
    "classic": (Case(2, 1, 2, False, "none", 1),),
}


def keys_of(config: GPTConfig) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    shape = VIRTUAL, config.prefix_width
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@cache
def alone_with_a_prefix(name: str) -> tuple[float, Tensor]:
    """The loss and the whole table's gradient, as `alone` finds them."""
    config = MODELS[name]
    model, keys = build(config), keys_of(config)
    examples = examples_of(config.vocab_size)
    micro = micro_batch(examples, share=False)
    shape = (VIRTUAL, config.num_layers, 2, config.num_query_groups, config.kv_channels)
    layers = dict(enumerate(keys.view(shape).unbind(1)))
    prefix = prefix_at(layers, micro.ids, config.vocab_size)
    logits = model.head(model.hidden(micro.ids, micro.batch, prefix=prefix), micro.batch)
    loss = F.cross_entropy(logits, micro.answers)
    loss.backward()
    assert keys.grad is not None
    return float(loss.detach()), keys.grad


@dataclass(frozen=True)
class Prefixed:
    """What a rank of a split finds of a prefix."""

    loss: float  # On the last stage.
    squares: float  # Its share of the whole gradient's.
    grads: dict[int, Tensor]  # Of its layers and KV heads, put together over the ranks,
    wanted: dict[int, Tensor]  # and these of one rank's.


def run_prefix(_: int, case: Case, name: str) -> Prefixed:
    mesh = Mesh.create(*(case.tp, case.pp, case.dp), sequence_parallel=case.sequence_parallel)
    config = MODELS[name]
    chunks = chunks_of(case, config, mesh)
    for chunk in chunks:
        chunk.requires_grad_(False)
    prefix = Prefix(keys_of(config).detach(), chunks)
    learned = of_prefix(prefix.named_parameters(), config, mesh)
    micros = list(micros_of(config, mesh, share=case.dp == 1))
    passes = one_f_one_b(mesh.pp_rank, mesh.pp, len(micros))
    if case.virtual_stages > 1:
        passes = interleaved(mesh.pp_rank, mesh.pp, len(micros), case.virtual_stages)
    total = sum(len(one.learned) for one in examples_of(config.vocab_size))
    given = {"table": None, "prefix": prefix.layers, "scale": 1 / total}
    loss = run_passes(chunks, passes, micros, Channels(mesh), **given)  # type: ignore[arg-type]
    settings = TuneConfig("model", data="records", name="n", method="prefix")
    squares = Optimizer(learned, settings, mesh).gather(config)
    found = {layer: learned[place].value.grad for place, layer in enumerate(prefix.layers)}
    grads = {layer: grad for layer, grad in found.items() if grad is not None}
    wanted = prefix_parts(alone_with_a_prefix(name)[1], chunks)
    flat = {layer: one.flatten(1) for layer, one in wanted.items()}
    return Prefixed(float(loss) / total, squares, grads, flat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"), [(n, one) for n, some in PREFIXES.items() for one in some]
)
def test_so_are_those_of_a_prefix(name: str, case: Case) -> None:
    loss, gradient = alone_with_a_prefix(name)
    got = ranks(case.tp * case.pp * case.dp, run_prefix, case, name, timeout_s=120)
    last = got[-case.tp * case.dp :]
    squares = float(gradient.square().sum())
    assert sum(one.loss for one in last[:: case.tp]) == pytest.approx(loss, rel=EXACT)
    assert sum(one.squares for one in got) == pytest.approx(squares, rel=EXACT)
    assert {layer for one in got for layer in one.grads} == set(range(MODELS[name].num_layers))
    for one in got:
        assert one.grads.keys() == one.wanted.keys()
        for layer, grad in one.grads.items():
            assert close(grad, one.wanted[layer]), (case, layer)


def cut(case: Case, name: str, whole: Tensor, rank: int) -> Tensor:
    """A tensor rank's part; a vocabulary that does not divide is padded with zeros."""
    config = MODELS[model_of(case)]
    held = part(parameters(config)[name], config, rank, case.tp)
    own = torch.cat([whole.narrow(held.dim, a, b - a) for a, b in held.ranges], held.dim)
    missing = held.size - own.shape[held.dim]
    return torch.cat([own, own.new_zeros(missing, *own.shape[1:])]) if missing else own


def close(got: Tensor, want: Tensor) -> bool:
    assert got.shape == want.shape
    return float((got - want).abs().max()) <= EXACT * float(want.abs().max())
