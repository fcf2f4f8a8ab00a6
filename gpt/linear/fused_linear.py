"""Fused GPU linears: matmul epilogues, and residual-add + norm between the matmuls of a layer.

The backend runs inference on a GPU with few kernels: a dense layer is four matmuls, attention, and
two kernels between the matmuls. A matmul includes its bias and, where cuBLAS supports it, the
activation. After a row-parallel linear and its all-reduce, one kernel adds bias and residual, and
applies the norm of the next linear. In fp8 layers this kernel also quantizes the rows.
"""

from collections.abc import Collection

from torch import Tensor

from gpt.fp8_rows import Fp8Rows
from gpt.linear import grouped_experts, norm_activation
from gpt.linear.fp8_linear import Fp8Matmul
from gpt.linear.norm_activation import NormParameters, Rows
from gpt.linear.unquantized_matmul import UnquantizedMatmul
from gpt.model.activation import activation_name
from gpt.model.decoder import DecoderLayer
from gpt.model.gpt_model import GPT
from gpt.model.linear import ColumnParallelLinear, Linear, LinearBackend, OutputAllocator
from gpt.model.mlp import MLP
from gpt.model.moe import MoELayer


class PreparedRows:
    """Holds the input rows of the next linear, if the kernel before it has prepared them.

    It has normed the rows, quantized them, or both.
    """

    def __init__(self) -> None:
        self._source: Tensor | None = None
        self._rows: Rows | None = None

    def store(self, x: Tensor, rows: Rows) -> None:
        self._source = x
        self._rows = rows

    def consume(self, x: Tensor) -> Rows | None:
        """Return the rows that were stored for `x` (the same tensor object); None without them.

        The stored rows are removed, even if they were stored for another tensor.
        """
        rows = self._rows if self._source is x else None
        self._source = self._rows = None
        return rows


class FusedLinear(LinearBackend):
    """A linear with the norm before its matmul, or with the residual sum after its matmul.

    One kernel of a row-parallel linear adds the residual, applies `next_norm` to the sum, and with
    `next_fp8` quantizes the normed rows. The linear stores these rows in `prepared`, where the next
    linear reads them. `next_norm` is None if the next operation is not a linear with a norm.
    """

    def __init__(
        self,
        matmul: UnquantizedMatmul | Fp8Matmul,
        prepared: PreparedRows,
        norm: NormParameters | None,
        *,
        next_norm: NormParameters | None = None,
        next_fp8: bool = False,
    ) -> None:
        self.matmul = matmul
        self.includes_norm = norm is not None
        self.accepts_fp8_rows = norm is None and isinstance(matmul, Fp8Matmul)
        self._prepared = prepared
        self._norm = norm
        self._next_norm = next_norm
        self._next_fp8 = next_fp8

    def forward(
        self, x: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        if residual is not None:
            assert activation is None, "a row-parallel linear has no activation"
            assert self._norm is None, "a row-parallel linear has no norm"
            return self.add_residual(self._multiply(x, None, None), bias, residual)
        return self._multiply(x, bias, activation)

    def input_rows(self, x: Tensor) -> Tensor:
        """Return the input rows in the model's dtype.

        A linear with an fp8 weight also stores them in e4m3, as `forward` would quantize them, for
        `multiply`. Exceptions are the rows after an input activation: the scales of adapters may
        follow the activation, so `multiply` quantizes them.
        """
        if not isinstance(self.matmul, Fp8Matmul):
            rows = self._input_rows(x)
            assert isinstance(rows, Tensor)
            return rows
        if self.matmul.input_activation is not None:
            return norm_activation.activate_rows(x, self.matmul.input_activation)
        quantized = self._input_rows(x)
        wide = x if self._norm is None else norm_activation.norm_rows(x, self._norm)
        assert isinstance(wide, Tensor)
        if isinstance(quantized, Fp8Rows):
            self._prepared.store(wide, quantized)
        return wide

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(self.matmul, Fp8Matmul):
            return self.matmul(rows, bias, None)
        quantized = self._prepared.consume(rows)
        if not isinstance(quantized, Fp8Rows):
            quantized = norm_activation.quantize_rows(rows)
        return self.matmul(quantized, bias, None)

    def activate(self, y: Tensor, activation: str) -> Tensor:
        if isinstance(self.matmul, Fp8Matmul) and activation == self.matmul.deferred_activation:
            return y
        return norm_activation.activate_rows(y, activation)

    def multiply_into(self, x: Tensor, allocate: OutputAllocator) -> Tensor | None:
        out = self.matmul.allocate_output(len(x), allocate)
        return None if out is None else self._multiply(x, None, None, out)

    def store_fp8_rows(self, x: Tensor, rows: Fp8Rows) -> None:
        self._prepared.store(x, rows)

    def _multiply(
        self, x: Tensor, bias: Tensor | None, activation: str | None, out: Tensor | None = None
    ) -> Tensor:
        rows = self._input_rows(x)
        if isinstance(self.matmul, Fp8Matmul):
            return self.matmul(rows, bias, activation, out)
        assert not isinstance(rows, Fp8Rows), "fp8 rows were stored for a linear that is not fp8"
        return self.matmul(rows, bias, activation, out)

    def _input_rows(self, x: Tensor) -> Rows:
        """Return the input rows of the matmul: `x` after the norm, if there is one."""
        if self._norm is None and not self.accepts_fp8_rows:
            return x
        rows = self._prepared.consume(x)
        if rows is not None:
            return rows
        if self._norm is None:
            return x
        return norm_activation.norm_rows(x, self._norm, fp8=isinstance(self.matmul, Fp8Matmul))

    def add_residual(self, y: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        residual_sum, rows = norm_activation.add_norm(
            y, bias, residual, self._next_norm, fp8=self._next_fp8
        )
        if rows is not None:
            self._prepared.store(residual_sum, rows)
        return residual_sum


def unsupported_reason(model: GPT) -> str | None:
    """Return why the layers of this model cannot be fused; None if they can."""
    if model.dtype not in norm_activation.KERNEL_DTYPES:
        return f"the model's dtype is {model.dtype}"
    if any(parameter.requires_grad for parameter in model.parameters()):
        return "the model has trainable weights"
    if model.mesh.sequence_parallel:
        return "the model uses sequence parallelism"
    if model.config.norm_placement != "pre":
        return "the layers have norms behind their linears"
    if activation_name(model.config) is None:
        return "the kernels do not compute the activation"
    return None


def fuse_layers(
    model: GPT, fp8_layers: Collection[int] = (), *, groups_experts: bool = False
) -> int:
    """Use fused linears in all layers, with fp8 weights in `fp8_layers`; return the bytes freed.

    The LM head is fused too, but its norm is not. In `fp8_layers`, each unquantized weight is freed
    before the next weight is quantized. With `groups_experts`, grouped matmuls compute the experts
    of the other layers.
    """
    freed_bytes = 0
    prepared = PreparedRows()
    layers = model.decoder_layers
    for index, layer in enumerate(layers):
        is_fp8 = layer.layer in fp8_layers
        next_layer = layers[index + 1] if index + 1 < len(layers) else None
        attention = layer.self_attention
        freed_bytes += _fuse_linear(attention.linear_qkv, prepared, fp8=is_fp8)
        # The linear whose norm reads the residual sum after attention. None for an MoE layer, whose
        # norm is a separate module, and with a parallel residual, where no norm reads this sum.
        mlp_input = None
        if isinstance(layer.mlp, MLP) and not layer.config.parallel_residual:
            mlp_input = layer.mlp.linear_fc1
        freed_bytes += _fuse_linear(
            attention.linear_proj, prepared, fp8=is_fp8, next_linear=mlp_input, next_fp8=is_fp8
        )
        # The linear whose norm reads the residual sum after the MLP. None for the last layer, and
        # for an MoE layer, which sums the outputs of its experts before it adds the residual.
        next_qkv = None
        if next_layer is not None and isinstance(layer.mlp, MLP):
            next_qkv = next_layer.self_attention.linear_qkv
        next_fp8 = next_layer is not None and next_layer.layer in fp8_layers
        if groups_experts and not is_fp8 and isinstance(layer.mlp, MoELayer):
            grouped_experts.group_experts(layer.mlp)
        for mlp in layer_mlps(layer):
            activation = activation_name(mlp.config)
            freed_bytes += _fuse_linear(
                mlp.linear_fc1, prepared, fp8=is_fp8, deferred_activation=activation
            )
            freed_bytes += _fuse_linear(
                mlp.linear_fc2,
                prepared,
                fp8=is_fp8,
                input_activation=activation,
                next_linear=next_qkv,
                next_fp8=next_fp8,
            )
    if model.is_last_stage:
        head = FusedLinear(UnquantizedMatmul(model.head_weight), prepared, None)
        model.use_head_backend(head, keep_weight=True)
    return freed_bytes


def layer_mlps(layer: DecoderLayer) -> list[MLP]:
    """Return the MLPs of a layer: the dense MLP, or the MLPs of its experts."""
    return [module for module in layer.mlp.modules() if isinstance(module, MLP)]


def _fuse_linear(
    linear: Linear,
    prepared: PreparedRows,
    *,
    fp8: bool,
    input_activation: str | None = None,
    deferred_activation: str | None = None,
    next_linear: ColumnParallelLinear | None = None,
    next_fp8: bool = False,
) -> int:
    """Make a fused backend compute `linear`; return the bytes freed.

    With `next_linear`, the kernel that adds the residual also applies the norm of `next_linear`.
    With `next_fp8`, this kernel also quantizes the normed rows. `Fp8Matmul` describes
    `input_activation` and `deferred_activation`.
    """
    weight_bytes = linear.weight.nbytes
    matmul: UnquantizedMatmul | Fp8Matmul
    if fp8:
        matmul = Fp8Matmul(
            linear.weight,
            input_activation=input_activation,
            deferred_activation=deferred_activation,
        )
        freed_bytes = weight_bytes - matmul.nbytes
    else:
        matmul = UnquantizedMatmul(linear.weight)
        freed_bytes = 0
    backend = FusedLinear(
        matmul,
        prepared,
        NormParameters.before_linear(linear),
        next_norm=None if next_linear is None else NormParameters.before_linear(next_linear),
        next_fp8=next_fp8,
    )
    linear.use_backend(backend, keep_weight=not fp8)
    return freed_bytes
