"""The small networks that make an adapter's rows while they are learned, as NeMo and PEFT do it.

A network is its tensors, under the names of both: linears (`mlp_head`), an LSTM before them
(`lstm_head`), or two linears that are split over tensor ranks (`first`, `second`). What reads their
files and what trains them compute the rows here. Knows no model, and nothing of learning.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.parallel.mesh import Mesh, enter, leave

Kind = Literal["linears", "lstm", "split"]
Weights = Mapping[str, Tensor]
Drop = Callable[[Tensor, int], Tensor]  # What an LSTM's layer makes, and its number.

# Along which dimension the tensor ranks share a tensor of a split network out.
SPLITS = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
LSTM_FIRST = "lstm_head.weight_ih_l0"
WAYS = ("", "_reverse")
GATES = 4


def kind_of(weights: Mapping[str, object]) -> Kind | None:
    """What the names are of; None: there is no network, and rows stand for themselves."""
    if "first.weight" in weights:
        return "split"
    if LSTM_FIRST in weights:
        return "lstm"
    return "linears" if "mlp_head.0.weight" in weights else None


def shapes(
    kind: Kind, width: int, hidden: int, layers: int, source: int | None = None
) -> dict[str, tuple[int, ...]]:
    """The tensors of a whole network: from rows of `source` (else `width`) to rows of `width`.

    `layers` are the linears, or of an LSTM its layers; a split network has two linears.
    """
    source = source or width
    if kind == "split":
        return _linear("first", source, hidden) | _linear("second", hidden, width)
    if kind == "linears":
        sizes = [source, *[hidden] * (layers - 1), width]
    else:
        sizes = [2 * hidden, 2 * hidden, width]
    found: dict[str, tuple[int, ...]] = {}
    for number, (wide, made) in enumerate(pairwise(sizes)):
        found |= _linear(f"mlp_head.{2 * number}", wide, made)
    for layer in range(layers if kind == "lstm" else 0):
        wide = 2 * hidden if layer else source
        for way in WAYS:
            weight_ih, weight_hh, *biases = _lstm_names(layer, way)
            found |= {weight_ih: (GATES * hidden, wide), weight_hh: (GATES * hidden, hidden)}
            found |= dict.fromkeys(biases, (GATES * hidden,))
    return found


def _linear(name: str, source: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width, source), f"{name}.bias": (width,)}


def _lstm_names(layer: int, way: str) -> list[str]:
    """In the order in which torch takes them."""
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [f"lstm_head.{part}_l{layer}{way}" for part in parts]


def shapes_like(weights: Weights, rows: Tensor) -> dict[str, tuple[int, ...]]:
    """What a whole network with these sizes has, to compare: a file may have less, or others."""
    kind = kind_of(weights)
    assert kind is not None
    if kind == "split":
        hidden, width = weights["first.weight"].shape[0], weights["second.bias"].shape[-1]
        return shapes(kind, width, hidden, 2, rows.shape[-1])
    linears = [name for name in weights if name.startswith("mlp_head.") and name.endswith("bias")]
    width = weights[f"{last_linear(weights)}.bias"].shape[-1]
    if kind == "linears":
        hidden = weights["mlp_head.0.weight"].shape[0]
        return shapes(kind, width, hidden, len(linears), rows.shape[-1])
    layers = sum(".weight_ih_l" in name and not name.endswith(WAYS[1]) for name in weights)
    hidden = weights[LSTM_FIRST].shape[0] // GATES
    return shapes(kind, width, hidden, layers, rows.shape[-1])


def last_linear(weights: Mapping[str, object]) -> str:
    """The name of the linear that makes the rows."""
    if kind_of(weights) == "split":
        return "second"
    numbers = [int(name.split(".")[1]) for name in weights if name.startswith("mlp_head.")]
    return f"mlp_head.{max(numbers, default=0)}"


def encode(
    rows: Tensor, weights: Weights, mesh: Mesh | None = None, drop: Drop | None = None
) -> Tensor:
    """What the network makes of a task's own rows (n, source): the adapter's rows (n, width).

    Every tensor rank has them all, and must call. The mesh shares no rows out.
    """
    kind = kind_of(weights)
    if kind is None:
        return rows
    mesh = mesh or Mesh.single(rows.device)
    last = last_linear(weights)
    weight, bias = weights[f"{last}.weight"], weights[f"{last}.bias"]
    x = features(rows, weights, mesh, drop)
    if kind == "split":
        return leave(F.linear(x, weight), mesh) + bias
    return F.linear(x, weight, bias)


def features(
    rows: Tensor, weights: Weights, mesh: Mesh | None = None, drop: Drop | None = None
) -> Tensor:
    """What the last linear reads; of a split network, this rank's columns of it."""
    kind = kind_of(weights)
    if kind == "split":
        mesh = mesh or Mesh.single(rows.device)
        assert not mesh.sequence_parallel
        x = enter(rows, mesh, len(rows))
        x = F.linear(x, weights["first.weight"], weights["first.bias"])
        return F.gelu(x, approximate="tanh")
    x = _lstm(rows, weights, drop) if kind == "lstm" else rows
    for number in range(0, int(last_linear(weights).split(".")[1]), 2):
        name = f"mlp_head.{number}"
        x = F.relu(F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
    return x


def _lstm(rows: Tensor, weights: Weights, drop: Drop | None) -> Tensor:
    """Both ways, side by side. A layer at a time, so that what is dropped between is `drop`'s."""
    x = rows.unsqueeze(1)  # (n, 1, source): one sequence.
    for layer in range(sum(name.startswith("lstm_head.weight_ih") for name in weights) // 2):
        if layer and drop is not None:
            x = drop(x, layer)
        held = [weights[name] for way in WAYS for name in _lstm_names(layer, way)]
        start = x.new_zeros(2, 1, held[1].shape[1])
        # cuDNN keeps what a backward needs only if it is told that one may come.
        learning = torch.is_grad_enabled()
        x = torch.lstm(x, (start, start), held, True, 1, 0.0, learning, True, False)[0]
    return x.squeeze(1)
