"""Houlsby adapters of NeMo 1, from its formulas: networks in torch, and the files of each rank."""

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from gpt.linear_adapter import LinearAdapter
from gpt.model.gpt_model import GPT
from gpt.model.linear import RowParallelLinear
from gpt.model.residual_dropout import Residual

MODULES = {
    "self_attention.linear_proj": "adapter_1",
    "mlp.linear_fc2": "adapter_2",
}


class ParallelLinearAdapter(nn.Module):
    """The forward pass of NeMo's class of this name, on one rank."""

    def __init__(self, change: LinearAdapter) -> None:
        super().__init__()
        assert change.bottleneck_down is not None and change.bottleneck_up is not None
        size, hidden = change.bottleneck_down.shape
        self.linear_in = nn.Linear(hidden, size, bias=False)
        self.linear_out = nn.Linear(size, hidden, bias=False)
        self.activation = nn.SiLU()
        self.layer_norm = nn.LayerNorm(hidden)
        self.linear_in.weight.data = change.bottleneck_down.double()
        self.linear_out.weight.data = change.bottleneck_up.double()
        self.norm_position = None
        for position in ("pre", "post"):
            weight = getattr(change, f"bottleneck_{position}_norm_weight")
            if weight is not None:
                bias = getattr(change, f"bottleneck_{position}_norm_bias")
                self.norm_position = position
                self.layer_norm.weight.data, self.layer_norm.bias.data = (
                    weight.double(),
                    bias.double(),
                )

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_position == "pre":
            x = self.layer_norm(x)
        x = self.linear_in(x)
        x = self.activation(x)
        x = self.linear_out(x)
        if self.norm_position == "post":
            x = self.layer_norm(x)
        return x


def put_into(model: GPT, changes: Mapping[str, LinearAdapter]) -> GPT:
    """Put NeMo's adapters behind the blocks of a model in fp64 on one rank."""
    for key, change in changes.items():
        module = model.get_submodule(key)
        assert isinstance(module, RowParallelLinear)
        forward = partial(_block_output, module, ParallelLinearAdapter(change))
        module.forward = forward  # type: ignore[method-assign]
    return model


def _block_output(
    module: RowParallelLinear,
    adapter: nn.Module,
    x: Tensor,
    residual: Residual | None = None,
    adapted_rows: object = (),
) -> Tensor:
    """As NeMo's transformer layer: the block's output without its bias, then bias and residual."""
    output = F.linear(x, module.weight)
    output = cast(Tensor, adapter(output)) + output
    if module.bias is not None:
        output = output + module.bias
    return output if residual is None else residual.add_output(output)


def rank_state(
    changes: Mapping[str, LinearAdapter],
    *,
    tp: int,
    tp_rank: int,
    layers: Mapping[int, str],
    prefix: str = "model.decoder.",
) -> dict[str, Tensor]:
    """The state of one rank: linear_in is cut by rows, linear_out by columns, the norm is whole.

    `layers`: the name of each of its layers in the keys.
    """
    state: dict[str, Tensor] = {}
    for key, change in changes.items():
        _, _, layer, block, linear = key.split(".")
        if int(layer) not in layers:
            continue
        assert change.bottleneck_down is not None and change.bottleneck_up is not None
        module = f"{prefix}layers.{layers[int(layer)]}.adapter_layer.{MODULES[f'{block}.{linear}']}"
        state[f"{module}.linear_in.weight"] = change.bottleneck_down.chunk(tp)[tp_rank].clone()
        state[f"{module}.linear_out.weight"] = change.bottleneck_up.chunk(tp, 1)[tp_rank].clone()
        for name, tensor in change.tensors():
            _, _, leaf = name.rpartition("_norm_")
            if leaf in ("weight", "bias"):
                state[f"{module}.layer_norm.{leaf}"] = tensor.clone()
    return state
