"""What a layer keeps for its backward pass, counted in bytes, is what the published formulas say.

Every storage counts once, however many views of it are kept; parameters do not count. Two counts
must agree: what autograd was handed to keep, and what is alive at all when the forward pass is
over. A layer's share is the difference between a model and the same model with one layer more.
Bytes: bf16, s tokens x b sequences, h wide, a heads, t tensor ranks.
"""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt.attention.paged import ragged
from gpt.attention.varlen import unfused
from gpt.batch import Batch, Dropout
from gpt.config import GPTConfig
from gpt.model.activation_checkpointing import Recompute
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from tests.support.ranks import ranks

TOLERANCE = 0.02
SEQUENCE, SEQUENCES, HIDDEN, HEADS = 256, 2, 96, 8
SBH = SEQUENCE * SEQUENCES * HIDDEN
# 5as/h: what the scores of all heads take, per element of a hidden state. Chosen as in 22B.
SCORES = 5 * HEADS * SEQUENCE / HIDDEN
SCORES_22B = 5 * 64 * 2048 / 6144

CLASSIC = GPTConfig(
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    vocab_size=64,
    max_position_embeddings=SEQUENCE,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
GATED = CLASSIC.with_fields(
    num_query_groups=4,
    ffn_hidden_size=3 * HIDDEN,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
)


@dataclass(frozen=True)
class Case:
    """A way to train."""

    tp: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    frozen: bool = False
    fused: bool = False
    dropout: bool = True
    config: GPTConfig = CLASSIC


class Alive(TorchDispatchMode):
    """Remembers, without holding it, every storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return made

    def bytes(self, without: set[int]) -> int:
        """Of all that is still held by somebody, but for some storages."""
        found = {key: size for key, (held, size) in self.seen.items() if not held.expired()}
        return sum(size for key, size in found.items() if key not in without)


def kept(case: Case, mesh: Mesh, layers: int) -> tuple[int, int]:
    """Bytes that a forward pass leaves: as autograd was told, and as are alive."""
    config = case.config.with_fields(num_layers=layers, moe_layers=())
    recompute = Recompute(case.recompute)  # type: ignore[arg-type]
    attend = ragged if case.fused else unfused
    model = GPT(config, mesh, dtype=torch.bfloat16, attend=attend, recompute=recompute)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02).requires_grad_(not case.frozen)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return x

    dropout = Dropout(1) if case.dropout else None
    batch = Batch.plain((SEQUENCE,) * SEQUENCES, dropout=dropout)
    table = torch.randn(1, HIDDEN, requires_grad=True)
    ids = torch.arange(SEQUENCE * SEQUENCES) % config.vocab_size
    ids[0] = config.vocab_size  # So that something learns in front of the first layer.
    with Alive() as alive, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = model.hidden(ids, batch, None, table)
        # A thread that sums over ranks lets go of what it sent a moment after it is done.
        lefts, quiet = [alive.bytes(own)], 0
        while quiet < 8 and len(lefts) < 200:
            time.sleep(0.03)
            lefts.append(alive.bytes(own))
            quiet = quiet + 1 if lefts[-1] == lefts[-2] else 0
    y.float().sum().backward()  # It can be done with what is kept.
    assert table.grad is not None
    return sum(found.values()), min(lefts)


def measure(rank: int, cases: list[Case]) -> list[float]:
    """What a layer keeps on this rank, in sbh, for each case."""
    torch.set_num_threads(1)
    values = []
    for case in cases:
        mesh = Mesh.single()
        if case.tp > 1:
            mesh = Mesh.create(case.tp, 1, sequence_parallel=case.sequence_parallel)
        (told, left), (told_more, left_more) = (kept(case, mesh, n) for n in (2, 3))
        told_layer, left_layer = told_more - told, left_more - left
        assert left_layer == pytest.approx(told_layer, rel=TOLERANCE), (
            case.tp,
            case.recompute,
            told,
            told_more,
            left,
            left_more,
        )
        values.append((told_more - told) / SBH)
    return values


def check(cases: dict[str, tuple[Case, float]], capsys: pytest.CaptureFixture[str]) -> list[float]:
    """All cases of one number of ranks; the figures, which every rank must have alike."""
    wanted = [case for case, _ in cases.values()]
    tp = wanted[0].tp
    found = ranks(tp, measure, wanted) if tp > 1 else [measure(0, wanted)]
    with capsys.disabled():
        print()
        for place, (name, (_, formula)) in enumerate(cases.items()):
            values = ", ".join(f"{one[place]:.2f}" for one in found)
            print(f"{name}, t={tp}: {formula:.2f} sbh by the formula; kept by each rank {values}")
    for one in found:
        for value, (name, (_, formula)) in zip(one, cases.items(), strict=True):
            assert value == pytest.approx(formula, rel=TOLERANCE), name
    return found[0]


@pytest.mark.slow
def test_one_rank_keeps_what_the_formulas_say(capsys: pytest.CaptureFixture[str]) -> None:
    check(
        {
            "none": (Case(), 34 + SCORES),
            "selective": (Case(recompute="selective"), 34),
            "full": (Case(recompute="full"), 2),
            "fused": (Case(fused=True, dropout=False), 32),
            "gated, grouped, fused": (Case(fused=True, dropout=False, config=GATED), 32),
        },
        capsys,
    )


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_keep_what_the_formulas_say(
    tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check(
        {
            "TP": (Case(tp), 10 + 24 / tp + SCORES / tp),
            "TP + SP": (Case(tp, True), (34 + SCORES) / tp),
            "TP + selective": (Case(tp, False, "selective"), 10 + 24 / tp),
            "TP + SP + selective": (Case(tp, True, "selective"), 34 / tp),
            "full, TP": (Case(tp, False, "full"), 2),
            "full, TP + SP": (Case(tp, True, "full"), 2 / tp),
        },
        capsys,
    )
    # The shape is 22B's in all that the formulas read, but for the number of ranks: 8 there.
    assert abs(SCORES - SCORES_22B) < 1e-9
    formula = (10 + 24 / tp + SCORES / tp) / (34 / tp)
    at_22b = (10 + 24 / 8 + SCORES_22B / 8) / (34 / 8)
    with capsys.disabled():
        print(
            f"TP over TP + SP + selective, t={tp}: {found[0] / found[3]:.2f}x less, "
            f"{formula:.2f}x by the formulas; {at_22b:.2f}x for 22B at t=8"
        )
    assert found[0] / found[3] == pytest.approx(formula, rel=2 * TOLERANCE)
    assert at_22b >= 4 and (tp < 4 or found[0] / found[3] >= 4)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_frozen_layers_keep_nothing_for_gradients_of_weights(
    tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = 6 + 14 / tp
    cases = {
        "frozen, selective": (Case(tp, recompute="selective", frozen=True), plain),
        "frozen": (Case(tp, frozen=True), plain + SCORES / tp),
        "frozen, fused": (Case(tp, frozen=True, fused=True, dropout=False), plain - 2),
        # Norms 4, queries 2, keys and values 2, the gate and what it meets 12.
        "frozen, gated": (Case(tp, frozen=True, fused=True, config=GATED, dropout=False), 20 / tp),
    }
    if tp > 1:
        shared = {
            "frozen, SP, selective": (Case(tp, True, "selective", frozen=True), 20 / tp),
            "frozen, SP, fused": (Case(tp, True, frozen=True, fused=True, dropout=False), 18 / tp),
        }
        del cases["frozen, gated"]
        cases |= shared
    found = check(cases, capsys)
    assert found[0] <= plain * (1 + TOLERANCE)
