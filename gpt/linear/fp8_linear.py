"""FP8 (e4m3) linear: per-channel weight scales, per-row activation scales, scaled matmul.

On a GPU the tensor cores compute the fp8 matmul. On other devices the values are dequantized and
multiplied in fp32, which is also the reference of the tests. Input rows are unquantized, or e4m3 if
the previous kernel quantized them. `fp8_layers` selects the layers whose weights are quantized; the
other layers stay in the model's dtype. gpt/linear/selector.py decides whether fp8 is used.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.fp8_rows import FP8_ALIGNMENT, FP8_DTYPE, MATMUL_ROWS_MIN, Fp8Rows
from gpt.linear.norm_activation import Rows, quantize_e4m3, quantize_rows
from gpt.model.activation import ACTIVATIONS
from gpt.model.gpt_model import GPT
from gpt.model.linear import OutputAllocator

# The smallest hidden size with fp8 layers. In narrower layers, the quantization of the input rows
# takes longer than fp8 saves.
FP8_HIDDEN_MIN = 1025
CAPABILITY_MIN = (8, 9)  # Ada; older GPUs have no e4m3 tensor cores.
CHUNK_ROWS = 2048  # Number of weight rows (output columns) that are converted to fp32 at once.


def fp8_layers(model: GPT, hidden_min: int = FP8_HIDDEN_MIN) -> range:
    """Return the global numbers of this stage's fp8 layers (backends fp8 and Transformer Engine).

    The range excludes the first and the last layer of the model, whose quantization costs the most
    accuracy. It is empty if the hidden size is below `hidden_min`.
    """
    if model.config.hidden_size < hidden_min:
        return range(0)
    last = model.config.num_layers - 1
    return range(max(model.layers.start, 1), min(model.layers.stop, last))


def has_fp8_layers(model: GPT) -> bool:
    """Return whether any stage of the model has fp8 layers. All ranks return the same value."""
    config = model.config
    return config.hidden_size >= FP8_HIDDEN_MIN and config.num_layers > 2


class Fp8Matmul:
    """A matmul with an e4m3 weight of shape (output columns, input channels).

    The kernel that quantizes the input rows of fc2 also computes the activation between fc1 and
    fc2. Therefore fc1 gets the activation as `deferred_activation` and does not apply it; fc2 gets
    the activation as `input_activation` and applies it to the input rows.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        input_activation: str | None = None,
        deferred_activation: str | None = None,
    ) -> None:
        self.weight = quantize_weight(weight)
        self._columns = weight.shape[0]
        self._dtype = weight.dtype
        self.input_activation = input_activation
        self.deferred_activation = deferred_activation

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def allocate_output(self, rows: int, allocate: OutputAllocator) -> Tensor | None:
        """Allocate the `out` of a call for a number of rows; None if there is no memory."""
        if self._columns != len(self.weight.values):
            return None  # The output has padding columns, which are removed by a copy.
        return allocate(max(rows, MATMUL_ROWS_MIN), self._columns, self._dtype)

    def __call__(
        self, x: Rows, bias: Tensor | None, activation: str | None, out: Tensor | None = None
    ) -> Tensor:
        rows = x if isinstance(x, Fp8Rows) else quantize_rows(x, self.input_activation)
        y = scaled_matmul(rows, self.weight, bias, self._dtype, out)
        if y.shape[1] != self._columns:
            y = y[:, : self._columns].contiguous()
        if activation is not None and activation != self.deferred_activation:
            y = ACTIVATIONS[activation](y)
        return y


def quantize_weight(weight: Tensor) -> Fp8Rows:
    """Return the weight in e4m3, with both dimensions padded to multiples of FP8_ALIGNMENT."""
    columns, channels = (size + -size % FP8_ALIGNMENT for size in weight.shape)
    values = weight.new_zeros(columns, channels, dtype=FP8_DTYPE)
    scales = weight.new_ones(columns, 1, dtype=torch.float32)
    for start in range(0, len(weight), CHUNK_ROWS):
        chunk = quantize_e4m3(weight.detach()[start : start + CHUNK_ROWS].float())
        values[start : start + len(chunk.values)] = chunk.values
        scales[start : start + len(chunk.values)] = chunk.scales
    return Fp8Rows(values, scales)


def scaled_matmul(
    rows: Fp8Rows,
    weight: Fp8Rows,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return rows @ weight.T + bias in `dtype`; each padding row of `weight` gives a column too.

    `out`: memory for the output, at least MATMUL_ROWS_MIN rows. The result is its first rows.
    """
    padding = 0 if bias is None else len(weight.values) - len(bias)
    if bias is not None and padding:
        bias = F.pad(bias, (0, padding))
    if not rows.values.is_cuda:
        y = reference_matmul(rows, weight, bias, dtype)
        return y if out is None else out[: len(y)].copy_(y)
    rows_of_matmul = _with_rows_min(rows)
    y = torch._scaled_mm(
        rows_of_matmul.values,
        weight.values.t(),
        scale_a=rows_of_matmul.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
        out=out,
    )
    return y[: len(rows.values)]


def _with_rows_min(rows: Fp8Rows) -> Fp8Rows:
    """Return at least MATMUL_ROWS_MIN rows; the numbers in the added rows are arbitrary."""
    count, channels = rows.values.shape
    if count >= MATMUL_ROWS_MIN:
        return rows
    if rows.values.untyped_storage().nbytes() >= MATMUL_ROWS_MIN * channels:
        # The kernel that wrote the rows has allocated memory for the added rows.
        return Fp8Rows(
            rows.values.as_strided((MATMUL_ROWS_MIN, channels), (channels, 1)),
            rows.scales.as_strided((MATMUL_ROWS_MIN, 1), (1, 1)),
        )
    values = rows.values.new_zeros(MATMUL_ROWS_MIN, channels)
    scales = rows.scales.new_ones(MATMUL_ROWS_MIN, 1)
    values[:count], scales[:count] = rows.values, rows.scales
    return Fp8Rows(values, scales)


def reference_matmul(
    rows: Fp8Rows, weight: Fp8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute `scaled_matmul` from dequantized values, in fp32."""
    y = (rows.values.float() @ weight.values.float().t()) * rows.scales * weight.scales.t()
    return (y if bias is None else y + bias).to(dtype)


@cache
def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why fp8 matmuls are unsupported; None if a test matmul on the device is correct."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"the model's dtype is {dtype}; fp8 matmuls with row scales need bfloat16"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY_MIN:
        actual, required = (".".join(map(str, version)) for version in (capability, CAPABILITY_MIN))
        return f"the GPU's compute capability is {actual}; e4m3 needs {required}"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).to(device, dtype) for rows in (3, 32))
    rows = quantize_e4m3(x.float())
    quantized_weight = quantize_weight(weight)
    bias = weight[:, 0].contiguous()
    try:
        product = scaled_matmul(rows, quantized_weight, bias, dtype)
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["no message"])[0]
        return f"a test matmul raised an error in torch {torch.__version__} ({reason})"
    error_max = float(
        (product - reference_matmul(rows, quantized_weight, bias, torch.float32)).abs().max()
    )
    # An output is a sum of 64 products of magnitudes around 1, rounded to bf16. A larger error than
    # this limit means that the scales were applied incorrectly.
    return None if error_max < 0.25 else f"a test matmul had an error of {error_max:.3g}"
