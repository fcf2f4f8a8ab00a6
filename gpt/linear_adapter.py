"""Linear adapters: low-rank products (LoRA), magnitudes (DoRA), scales (IA3) and bottlenecks.

With an adapter, a linear computes

    y = output_scale * (c * (W (input_scale * x) + scale * B (A x)) + bias),

where c = magnitude / weight_norm. LoRA and activated LoRA have A and B; DoRA also has a magnitude;
IA3 has an output scale or an input scale. A bottleneck changes the output of attention or of an MLP
(gpt/bottleneck_adapter.py); it belongs to the last linear of the block, which it changes alone. A
`LinearAdapter` has whole tensors, as in an adapter file; a `LinearTerm` is one rank's shard of it,
in the dtype of the computation.

A linear is identified by its canonical name, for example
`decoder.layers.3.self_attention.linear_qkv`. An adapter may change the parts of a fused linear
separately; the key of a part is the linear's name and the part's name: `....linear_qkv.query`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpt.bottleneck_adapter import TENSOR_PREFIX, Bottleneck
from gpt.dropout import Dropout
from gpt.linear_parts import LOCAL_EXPERTS


@dataclass(frozen=True, eq=False)
class LinearAdapter:
    """The change of one linear, or of one part of a fused linear; whole tensors.

    A tensor that is None has no effect. `lora_a` and `lora_b` are set together, and so are
    `magnitude` and `weight_norm`.
    """

    lora_a: Tensor | None = None  # (rank, input channels)
    lora_b: Tensor | None = None  # (output columns, rank)
    scale: float = 1.0  # Factor of the low-rank product.
    magnitude: Tensor | None = None  # (output columns,)
    # The norm of each row of W + scale * B A. The base model is frozen, so the adapter's author
    # knows it, and a server needs no unquantized weights.
    weight_norm: Tensor | None = None  # (output columns,)
    output_scale: Tensor | None = None  # (output columns,)
    input_scale: Tensor | None = None  # (input channels,)
    # The tensors of a `Bottleneck`, without any of the others.
    bottleneck_down: Tensor | None = None
    bottleneck_up: Tensor | None = None
    bottleneck_pre_norm_weight: Tensor | None = None
    bottleneck_pre_norm_bias: Tensor | None = None
    bottleneck_post_norm_weight: Tensor | None = None
    bottleneck_post_norm_bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """The rank of the low-rank product; 0 without one."""
        return 0 if self.lora_a is None else len(self.lora_a)

    @property
    def output_factor(self) -> Tensor | None:
        """The factor c of the product of a linear with a magnitude."""
        if self.magnitude is None:
            return None
        assert self.weight_norm is not None
        return self.magnitude / self.weight_norm

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The bottleneck of the linear's output."""
        if self.bottleneck_down is None:
            return None
        return Bottleneck(
            **{
                name.removeprefix(TENSOR_PREFIX): tensor
                for name, tensor in self.tensors()
                if name.startswith(TENSOR_PREFIX)
            }
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the value of each tensor that is set, in the order of the fields."""
        for tensor_field in fields(self):
            value = getattr(self, tensor_field.name)
            if isinstance(value, Tensor):
                yield tensor_field.name, value


TENSOR_NAMES = tuple(
    tensor_field.name for tensor_field in fields(LinearAdapter) if tensor_field.name != "scale"
)


def last_occurrence(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Return the position of the last occurrence of an invocation; None if there is none."""
    length, ids = len(invocation), list(invocation)
    for start in range(len(tokens) - length, -1, -1):
        if tokens[start] == ids[0] and list(tokens[start : start + length]) == ids:
            return start
    return None


@dataclass(frozen=True)
class OutputColumns:
    """Columns of a linear's output: `count` runs of `width` columns, `stride` apart.

    The queries of a fused QKV linear, for example, are one run for each group of heads.
    """

    offset: int
    width: int
    stride: int
    count: int


@dataclass(frozen=True)
class ExampleRows:
    """The examples of an adapter in a training batch, in the order of their rows."""

    numbers: tuple[int, ...]  # A number of each example that no split of the batch changes.
    rows: tuple[int, ...]  # The number of rows of each example.
    # The rows of each example that have logits: in the last layer, some linears compute only these.
    logit_rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class InputDropout:
    """Dropout of the inputs of a low-rank product, in training only.

    A mask is drawn for all rows and input channels of each example, so the mask of a token depends
    neither on the other examples of the micro-batch nor on the ranks.
    """

    dropout: Dropout
    p: float
    site: tuple[int, ...]
    in_features: int
    columns: slice  # The input channels of this rank.
    examples: ExampleRows

    def __call__(self, x: Tensor) -> Tensor:
        examples = self.examples
        masks = [
            self.dropout.keep_mask((rows, self.in_features), self.p, (*self.site, number), x)
            for number, rows in zip(examples.numbers, examples.rows, strict=True)
        ]
        if len(x) < sum(examples.rows):
            masks = [
                mask[list(rows)] for mask, rows in zip(masks, examples.logit_rows, strict=True)
            ]
        return x * torch.cat(masks)[:, self.columns] / (1 - self.p)


@dataclass(frozen=True, eq=False)
class LinearTerm:
    """One rank's shard of a `LinearAdapter`, in the dtype of the computation.

    In training the tensors are in at least fp32, and are rounded to the dtype of the computation
    where they are used.
    """

    columns: OutputColumns | None = None  # The columns that it changes; None: all columns.
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 1.0
    output_factor: Tensor | None = None  # The factor c of the product, before the bias.
    output_scale: Tensor | None = None
    input_scale: Tensor | None = None
    input_dropout: InputDropout | None = None  # Of the low-rank product.
    # Without any of the other tensors. It is whole on each rank: it acts after the sum over ranks.
    bottleneck: Bottleneck | None = None

    @property
    def column_factor(self) -> Tensor | None:
        """The output scale or the factor of the product; a term has one of them at most."""
        return self.output_scale if self.output_factor is None else self.output_factor

    def tensors(self) -> Iterator[Tensor]:
        """Yield each tensor that is set."""
        values = list(vars(self).values())
        if self.bottleneck is not None:
            values += vars(self.bottleneck).values()
        return (value for value in values if isinstance(value, Tensor))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "LinearTerm":
        """Return the term with `function` applied to each tensor that is set."""
        changes: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        if self.bottleneck is not None:
            changes["bottleneck"] = self.bottleneck.map_tensors(function)
        return replace(self, **changes)


# Returns memory on the host for a number of bytes, with any content; None: there is none.
HostAllocator = Callable[[int], Tensor | None]
# By the name of a linear, without a part: the terms of its parts on this rank.
ModelAdapter = Mapping[str, Sequence[LinearTerm]]


@dataclass(frozen=True, eq=False)
class AdaptedRows:
    """The rows of a batch on which an adapter acts. A row has at most one adapter."""

    adapter: ModelAdapter
    rows: Tensor | None  # (n,) flat indices in ascending order; None: all rows.

    @cached_property
    def moe_layers(self) -> frozenset[str]:
        """The names of the MoE layers in which the adapter changes experts of this rank."""
        return frozenset(
            name.partition(LOCAL_EXPERTS)[0] for name in self.adapter if LOCAL_EXPERTS in name
        )


class TermKernels(ABC):
    """Kernels on a GPU that apply the terms of all adapters of a batch to one linear."""

    @abstractmethod
    def scale_input(self, x: Tensor) -> Tensor:
        """Return `x` with the rows of adapters multiplied by their input scales."""

    @abstractmethod
    def add_terms(self, y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the linear with all terms; `y` is overwritten.

        `y`: the product of the base weight and the scaled input, with the bias. `x`: the input
        rows, not scaled.
        """


class AdapterKernels(ABC):
    """The adapters of a batch, whose terms and rows kernels read from memory on the device."""

    bottlenecks: Sequence[AdaptedRows] = ()  # Those with bottlenecks, which torch computes.

    @abstractmethod
    def for_linear(self, linear: str) -> TermKernels | None:
        """Return the kernels of the linear with this name; None: no adapter changes it."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> "AdapterKernels":
        """Return the adapters of a batch of which only `rows` are left, in this order."""

    @property
    @abstractmethod
    def expert_rows(self) -> Sequence[AdaptedRows]:
        """The adapters that change linears of experts, which the kernels do not change."""


# The adapters that act on the rows of a batch: their terms on the host, or kernels.
BatchAdapters = Sequence[AdaptedRows] | AdapterKernels
