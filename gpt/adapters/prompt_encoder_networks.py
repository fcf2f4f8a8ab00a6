"""Prompt encoders: the MLP, LSTM and tensor-parallel MLP that compute virtual-token rows.

A prompt encoder computes the rows of an adapter's table while the adapter is trained. NeMo and PEFT
define the networks. In this module a network is a dict of its tensors, under NeMo's names:

- kind "linears": linear layers (`mlp_head`);
- kind "lstm": an LSTM (`lstm_head`), then linear layers (`mlp_head`);
- kind "split": two linear layers that are sharded over tensor parallel ranks (`first`, `second`).

The trainer and the reader of NeMo files call this module, which is independent of the model and of
training.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.parallel.mesh import Mesh
from gpt.parallel.tensor_parallel import from_row_parallel, to_column_parallel

EncoderKind = Literal["linears", "lstm", "split"]
EncoderWeights = Mapping[str, Tensor]
# Applies dropout to the input of an LSTM layer; called with the input and the layer's number.
LstmDropout = Callable[[Tensor, int], Tensor]

# The sharded dimension of each sharded tensor of a split network.
SPLIT_DIMENSIONS = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
LSTM_FIRST_KEY = "lstm_head.weight_ih_l0"
DIRECTION_SUFFIXES = ("", "_reverse")
LSTM_GATES = 4


def encoder_kind(weights: Mapping[str, object]) -> EncoderKind | None:
    """Infer the kind of network from tensor names.

    Returns None if there is no network; then the table consists of the encoder's input rows.
    """
    if "first.weight" in weights:
        return "split"
    if LSTM_FIRST_KEY in weights:
        return "lstm"
    return "linears" if "mlp_head.0.weight" in weights else None


def encoder_shapes(
    kind: EncoderKind, width: int, hidden: int, layers: int, input_width: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a network by tensor name.

    The network maps rows of width `input_width` (default `width`) to rows of width `width`.
    `hidden` is the width of its hidden layers; in an LSTM, the width of each direction.

    `layers` is the number of LSTM layers for the kind "lstm", and the number of linear layers for
    the kind "linears". It is not used for the kind "split", which always has two linear layers.
    """
    input_width = input_width or width
    if kind == "split":
        return _linear_shapes("first", input_width, hidden) | _linear_shapes(
            "second", hidden, width
        )
    if kind == "linears":
        sizes = [input_width, *[hidden] * (layers - 1), width]
    else:
        sizes = [2 * hidden, 2 * hidden, width]  # The outputs of both directions are concatenated.
    tensor_shapes: dict[str, tuple[int, ...]] = {}
    for number, (in_features, out_features) in enumerate(pairwise(sizes)):
        tensor_shapes |= _linear_shapes(f"mlp_head.{2 * number}", in_features, out_features)
    for layer in range(layers if kind == "lstm" else 0):
        in_features = 2 * hidden if layer else input_width
        for direction in DIRECTION_SUFFIXES:
            weight_ih, weight_hh, *biases = _lstm_names(layer, direction)
            tensor_shapes |= {
                weight_ih: (LSTM_GATES * hidden, in_features),
                weight_hh: (LSTM_GATES * hidden, hidden),
            }
            tensor_shapes |= dict.fromkeys(biases, (LSTM_GATES * hidden,))
    return tensor_shapes


def _linear_shapes(name: str, in_features: int, out_features: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out_features, in_features), f"{name}.bias": (out_features,)}


def _lstm_names(layer: int, direction: str) -> list[str]:
    """Return the tensor names of an LSTM layer in the argument order of torch.lstm."""
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [f"lstm_head.{part}_l{layer}{direction}" for part in parts]


def expected_shapes(weights: EncoderWeights, rows: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that the network in `weights` must have.

    The kind of network and its sizes are inferred from `weights` and from `rows`, the input rows.
    The caller compares the shapes with the tensors of a file, to detect an incomplete network.
    """
    kind = encoder_kind(weights)
    assert kind is not None
    if kind == "split":
        hidden, width = weights["first.weight"].shape[0], weights["second.bias"].shape[-1]
        return encoder_shapes(kind, width, hidden, 2, rows.shape[-1])
    linears = [name for name in weights if name.startswith("mlp_head.") and name.endswith("bias")]
    width = weights[f"{output_linear(weights)}.bias"].shape[-1]
    if kind == "linears":
        hidden = weights["mlp_head.0.weight"].shape[0]
        return encoder_shapes(kind, width, hidden, len(linears), rows.shape[-1])
    layers = sum(
        ".weight_ih_l" in name and not name.endswith(DIRECTION_SUFFIXES[1]) for name in weights
    )
    hidden = weights[LSTM_FIRST_KEY].shape[0] // LSTM_GATES
    return encoder_shapes(kind, width, hidden, layers, rows.shape[-1])


def output_linear(weights: Mapping[str, object]) -> str:
    """Return the name of the last linear layer."""
    if encoder_kind(weights) == "split":
        return "second"
    indices = [int(name.split(".")[1]) for name in weights if name.startswith("mlp_head.")]
    return f"mlp_head.{max(indices, default=0)}"


def run_encoder(
    rows: Tensor,
    weights: EncoderWeights,
    mesh: Mesh | None = None,
    dropout: LstmDropout | None = None,
) -> Tensor:
    """Compute the adapter's rows (n, width) from a task's input rows (n, input_width).

    All tensor parallel ranks must pass the same complete `rows`; the mesh must not use sequence
    parallelism.
    """
    kind = encoder_kind(weights)
    if kind is None:
        return rows
    mesh = mesh or Mesh.single(rows.device)
    output_name = output_linear(weights)
    weight, bias = weights[f"{output_name}.weight"], weights[f"{output_name}.bias"]
    x = encoder_features(rows, weights, mesh, dropout)
    if kind == "split":
        return from_row_parallel(F.linear(x, weight), mesh) + bias
    return F.linear(x, weight, bias)


def encoder_features(
    rows: Tensor,
    weights: EncoderWeights,
    mesh: Mesh | None = None,
    dropout: LstmDropout | None = None,
) -> Tensor:
    """Compute the input of the last linear layer; for a split network, only this rank's columns."""
    kind = encoder_kind(weights)
    if kind == "split":
        mesh = mesh or Mesh.single(rows.device)
        assert not mesh.sequence_parallel
        x = to_column_parallel(rows, mesh, len(rows))
        x = F.linear(x, weights["first.weight"], weights["first.bias"])
        return F.gelu(x, approximate="tanh")
    x = _run_lstm(rows, weights, dropout) if kind == "lstm" else rows
    for number in range(0, int(output_linear(weights).split(".")[1]), 2):
        name = f"mlp_head.{number}"
        x = F.relu(F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
    return x


def _run_lstm(rows: Tensor, weights: EncoderWeights, dropout: LstmDropout | None) -> Tensor:
    """Run the bidirectional LSTM one layer at a time, with `dropout` between layers."""
    x = rows.unsqueeze(1)  # (n, 1, input_width): one sequence.
    for layer in range(sum(name.startswith("lstm_head.weight_ih") for name in weights) // 2):
        if layer and dropout is not None:
            x = dropout(x, layer)
        layer_weights = [
            weights[name]
            for direction in DIRECTION_SUFFIXES
            for name in _lstm_names(layer, direction)
        ]
        initial_state = x.new_zeros(2, 1, layer_weights[1].shape[1])
        # The arguments after `layer_weights` are has_biases, num_layers, dropout, train,
        # bidirectional and batch_first. cuDNN saves the activations for the backward pass only with
        # train=True.
        needs_grad = torch.is_grad_enabled()
        x = torch.lstm(
            x, (initial_state, initial_state), layer_weights, True, 1, 0.0, needs_grad, True, False
        )[0]
    return x.squeeze(1)
