"""Column- and row-parallel linears, and the interface of the linear backends that compute them.

A linear calls `gpt.parallel` for the communication before a column-parallel and after a
row-parallel matmul, with or without sequence parallelism. Its `LinearBackend` computes the matmul,
bias, activation and residual, and in some backends the norm. The default backend is
`TrainingLinear`. The other backends are in gpt/linear; the backend is chosen once, when the model
is loaded.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.cpu import training_kernels, training_linear
from gpt.fp8_rows import Fp8Rows
from gpt.linear_adapter import BatchAdapters, LinearTerm, TermKernels
from gpt.model.activation import ACTIVATIONS
from gpt.model.adapted_linear import (
    RowBottlenecks,
    RowTerms,
    adapted_product,
    row_bottlenecks,
    terms_of,
)
from gpt.model.adapted_linear_training import adapted_linear, supports_terms
from gpt.model.build_context import BuildContext
from gpt.model.norm import Norm, normalize
from gpt.model.residual_dropout import Residual
from gpt.parallel.sequence_parallel import all_gather_linear, local_rows
from gpt.parallel.tensor_parallel import from_row_parallel, to_column_parallel

# Returns memory for (rows, columns, dtype); None if there is none.
OutputAllocator = Callable[[int, int, torch.dtype], Tensor | None]


class LinearBackend(Protocol):
    """Base class of linear backends. An instance computes one linear, and has its weight."""

    # Whether `forward` applies the norm in front of the linear. Such a backend is used only where
    # no communication lies between the norm and the linear.
    includes_norm: bool = False
    # Whether `store_fp8_rows` may be called. Only backends for inference accept fp8 rows.
    accepts_fp8_rows: bool = False

    @abstractmethod
    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        """Return residual + activation(x @ weight.T + bias).

        `activation` is a key of ACTIVATIONS. If an argument is None, its operation is left out.
        """

    def forward_adapted(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        terms: RowTerms,
    ) -> Tensor:
        """Return the output of `forward` with the terms of adapters (gpt/linear_adapter.py)."""
        y = adapted_product(self.input_rows(x), terms, self.multiply, bias)
        return self._finish_adapted(y, activation, residual)

    def forward_with_kernels(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        kernels: TermKernels,
    ) -> Tensor:
        """Return the output of `forward_adapted`, with the terms added by kernels on a GPU."""
        rows = self.input_rows(x)
        y = self.multiply(kernels.scale_input(rows), bias)
        return self._finish_adapted(kernels.add_terms(y, rows, bias), activation, residual)

    def _finish_adapted(self, y: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
        if activation is not None:
            y = self.activate(y, activation)
        return y if residual is None else self.add_residual(y, None, residual)

    def prepare_terms(
        self, terms: Sequence[LinearTerm], dtype: torch.dtype
    ) -> Sequence[LinearTerm]:
        """Return copies of the terms of an adapter that `forward_adapted` reads fastest.

        `dtype`: the dtype of the computation.
        """
        return [
            term.map_tensors(lambda tensor: tensor.to(dtype, copy=True).contiguous())
            for term in terms
        ]

    def input_rows(self, x: Tensor) -> Tensor:
        """Return the rows that the weight multiplies: `x` after the norm, if `includes_norm`."""
        assert not self.includes_norm, "a backend with a norm has its own input_rows"
        return x

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return rows @ weight.T + bias; `rows` are the rows of `input_rows`, or scaled ones."""
        return self.forward(rows, bias, None, None)

    def activate(self, y: Tensor, activation: str) -> Tensor:
        """Return the activation of `y`, if `forward` also applies it."""
        return ACTIVATIONS[activation](y)

    def add_residual(self, y: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """Return y + bias + residual; `y` is an all-reduced output of `forward`."""
        return residual + (y if bias is None else y + bias)

    def store_fp8_rows(self, x: Tensor, rows: Fp8Rows) -> None:
        """Store `x` in e4m3, for the next call of `forward` with the same tensor `x`."""
        raise AssertionError("the backend does not accept fp8 rows")

    def multiply_into(self, x: Tensor, allocate: OutputAllocator) -> Tensor | None:
        """Return x @ weight.T in memory from `allocate`; None if that is not supported.

        `allocate` returns memory for an output of a number of rows, a number of columns and a
        dtype, or None. The result may have fewer rows than were allocated.
        """
        return None


class TorchLinear(LinearBackend):
    """A linear in torch only: the reference with which tests compare the other backends."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        y = F.linear(x, self.weight, bias)
        if activation is not None:
            y = ACTIVATIONS[activation](y)
        return y if residual is None else residual + y


class TrainingLinear(TorchLinear):
    """The default backend: torch, or the C library where it is faster in training on a CPU.

    `training_linear.supports_matmul` lists the conditions of the C library.
    """

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        if training_linear.supports_matmul(x, self.weight):
            return self._forward_by_kernels(x, bias, activation, residual, ())
        return super().forward(x, bias, activation, residual)

    def forward_adapted(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        terms: RowTerms,
    ) -> Tensor:
        (rows, row_group), *others = terms
        is_of_all_rows = rows is None and not others
        if (
            is_of_all_rows
            and training_linear.supports_matmul(x, self.weight)
            and training_linear.supports_terms(row_group)
        ):
            return self._forward_by_kernels(x, bias, activation, residual, row_group)
        if not supports_terms(self.weight, terms):
            return super().forward_adapted(x, bias, activation, residual, terms)
        if activation is None:
            return adapted_linear(x, self.weight, bias, residual, terms)
        y = self.activate(adapted_linear(x, self.weight, bias, None, terms), activation)
        return y if residual is None else residual + y

    def _forward_by_kernels(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        terms: Sequence[LinearTerm],
    ) -> Tensor:
        if activation in (*training_kernels.ACTIVATIONS, training_kernels.GATED_SILU):
            return training_linear.linear(x, self.weight, bias, activation, residual, terms)
        y = training_linear.linear(x, self.weight, bias, None, None, terms)
        y = self.activate(y, activation)
        return y if residual is None else residual + y

    def activate(self, y: Tensor, activation: str) -> Tensor:
        if training_kernels.supports_activation(y, activation):
            return training_kernels.apply_activation(y, activation)
        return super().activate(y, activation)


class Linear(nn.Module):
    """A weight and an optional bias, computed by a backend (`use_backend`)."""

    weight: Tensor  # None after `use_backend` has removed the parameter.
    bias: Tensor | None

    def __init__(
        self, build: BuildContext, name: str, optional_parameters: tuple[str, ...] = ("bias",)
    ) -> None:
        super().__init__()
        self.name = name
        for optional in optional_parameters:
            self.register_parameter(optional, None)
        self.mesh = build.mesh
        build.allocate_parameters(self, name)
        self.backend: LinearBackend = TrainingLinear(self.weight)

    def use_backend(self, backend: LinearBackend, *, keep_weight: bool = False) -> None:
        """Compute this linear with `backend`.

        The weight parameter is removed, because the backend has its own copy. `keep_weight` keeps
        the parameter, for a backend that uses it instead of a copy.
        """
        self.backend = backend
        if not keep_weight:
            self._parameters["weight"] = None

    def _backend_output(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
        terms: RowTerms | TermKernels,
    ) -> Tensor:
        if isinstance(terms, TermKernels):
            return self.backend.forward_with_kernels(x, bias, activation, residual, terms)
        if terms:
            return self.backend.forward_adapted(x, bias, activation, residual, terms)
        return self.backend.forward(x, bias, activation, residual)


class ColumnParallelLinear(Linear):
    """A linear whose weight is split by rows: each rank computes its own output columns.

    As in Megatron-Core, some column-parallel linears contain the norm in front of the matmul. They
    also have the parameters `layer_norm_weight` and, for a LayerNorm, `layer_norm_bias`.
    """

    layer_norm_weight: Tensor | None
    layer_norm_bias: Tensor | None

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, name, ("bias", "layer_norm_weight", "layer_norm_bias"))
        self.config = build.config

    def forward(
        self,
        x: Tensor,
        tokens: int,
        activation: str | None = None,
        adapted_rows: BatchAdapters = (),
    ) -> Tensor:
        if self.backend.includes_norm:
            return self.project_gathered(x, activation, adapted_rows)
        if self.layer_norm_weight is not None:
            x = normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.config)
        if self.mesh.sequence_parallel and self._trains_weight():
            y = all_gather_linear(x, self.weight, self.bias, self.mesh, tokens)
            return y if activation is None else ACTIVATIONS[activation](y)
        x = to_column_parallel(x, self.mesh, tokens)
        return self.project_gathered(x, activation, adapted_rows)

    def project_gathered(
        self,
        x: Tensor,
        activation: str | None = None,
        adapted_rows: BatchAdapters = (),
    ) -> Tensor:
        """Return the backend's output for `x`, which must have the rows of all tensor ranks."""
        terms = terms_of(adapted_rows, self.name)
        return self._backend_output(x, self.bias, activation, None, terms)

    def _trains_weight(self) -> bool:
        weight = self._parameters["weight"]
        return torch.is_grad_enabled() and weight is not None and weight.requires_grad


class RowParallelLinear(Linear):
    """A linear whose weight is split by columns: the outputs of the ranks are summed.

    As in Megatron Bridge, some row-parallel linears contain a norm of their output, which is
    applied before the residual is added.
    """

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, name)
        self.post_layernorm: Norm | None = None
        if f"{name}.post_layernorm" in build.parameters_by_module:
            self.post_layernorm = Norm(build, f"{name}.post_layernorm")

    def forward(
        self,
        x: Tensor,
        residual: Residual | None = None,
        adapted_rows: BatchAdapters = (),
    ) -> Tensor:
        terms = terms_of(adapted_rows, self.name)
        # Without dropout, a factor and a norm of the output, the backend adds the residual.
        fused_residual: Tensor | None = None
        is_plain = residual is not None and residual.is_plain_sum and self.post_layernorm is None
        if residual is not None and is_plain:
            fused_residual = residual.x
        bottlenecks = row_bottlenecks(adapted_rows, self.name)
        if bottlenecks:
            y = self._output_with_bottlenecks(x, fused_residual, terms, bottlenecks)
        elif self.mesh.tp == 1:
            y = self._backend_output(x, self.bias, None, fused_residual, terms)
        elif terms:
            y = self._summed_adapted_output(x, terms)
            if fused_residual is not None:
                y = self.backend.add_residual(y, None, fused_residual)
        else:
            y = self._summed_output(x, is_temporary=fused_residual is not None)
            y = self._add_bias(y, fused_residual)
        if self.post_layernorm is not None:
            y = self.post_layernorm(y)
        if residual is not None and not is_plain:
            y = residual.add_output(y)
        return y

    def _summed_output(self, x: Tensor, *, is_temporary: bool) -> Tensor:
        """Return the sum of the outputs of the tensor ranks, without the bias.

        A temporary sum may be in memory that the next sum overwrites. The matmul then writes its
        output to the memory that the other ranks read, without a copy.
        """
        all_reduce = self.mesh.symmetric_all_reduce
        if all_reduce is not None and is_temporary and self._is_inference:
            y = self.backend.multiply_into(x, all_reduce.allocate)
            if y is not None:
                return all_reduce.sum_allocated(y)
        return from_row_parallel(self.partial_output(x), self.mesh)

    def _summed_adapted_output(self, x: Tensor, terms: RowTerms | TermKernels) -> Tensor:
        """Return the sum of the outputs of the tensor ranks with adapters, with the bias.

        All factors of an output column are equal on all ranks, so each rank applies them to its
        share of the sum. One rank adds the bias, because an output scale applies to it too.
        """
        bias = self.bias if self.mesh.tp_rank == 0 else None
        return from_row_parallel(self._backend_output(x, bias, None, None, terms), self.mesh)

    def _output_with_bottlenecks(
        self,
        x: Tensor,
        residual: Tensor | None,
        terms: RowTerms | TermKernels,
        bottlenecks: RowBottlenecks,
    ) -> Tensor:
        """Return the output of a batch of which some rows have bottlenecks.

        A bottleneck changes the sum over the tensor ranks, without the bias. The products of its
        rows are therefore computed apart; the other rows have the same values as without them.
        """
        first_rows, first = bottlenecks[0]
        if first_rows is None:
            product = from_row_parallel(self.partial_output(x), self.mesh)
            return self._add_bias(first.apply(product), residual)
        rows = [cast(Tensor, own_rows) for own_rows, _ in bottlenecks]
        all_rows = torch.cat(rows)
        all_products = self.partial_output(x.index_select(0, all_rows))
        products: Sequence[Tensor] = all_products.split(list(map(len, rows)))
        y = all_products  # Without other rows, all of them are replaced below.
        if len(all_rows) < len(x):
            bias = self.bias if self.mesh.tp_rank == 0 else None
            own_residual = residual if self.mesh.tp == 1 else None
            y = self._backend_output(x, bias, None, own_residual, terms)
        if self.mesh.tp > 1:
            y = from_row_parallel(y.index_copy(0, all_rows, all_products), self.mesh)
            rows = [local_rows(own_rows, len(x), self.mesh) for own_rows in rows]
            products = [y.index_select(0, own_rows) for own_rows in rows]
            if residual is not None:
                y = self.backend.add_residual(y, None, residual)
        for own_rows, product, (_, bottleneck) in zip(rows, products, bottlenecks, strict=True):
            row_residual = None if residual is None else residual.index_select(0, own_rows)
            output = self._add_bias(bottleneck.apply(product), row_residual)
            y = y.index_copy(0, own_rows, output)
        return y

    def _add_bias(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """Return y + bias + residual."""
        if residual is not None:
            return self.backend.add_residual(y, self.bias, residual)
        return y if self.bias is None else y + self.bias

    @property
    def _is_inference(self) -> bool:
        return not self.mesh.sequence_parallel and not torch.is_grad_enabled()

    def partial_output(
        self, x: Tensor, bias: Tensor | None = None, adapted_rows: BatchAdapters = ()
    ) -> Tensor:
        """Return this rank's output before the sum over tensor ranks; one rank gives the bias."""
        return self._backend_output(x, bias, None, None, terms_of(adapted_rows, self.name))
