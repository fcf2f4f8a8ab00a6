"""Products in fp8: weights in e4m3 by output channel, rows in e4m3 by row, sums in fp32.

A GPU multiplies them in its tensor cores; elsewhere numbers are widened and multiplied plainly,
which is the twin, and what tests hold the other against. Rows come in wide or in e4m3 already: who
made them may have known what reads them next. Which weights are worth it is decided elsewhere.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.backends.norm_activation import MULTIPLE, NARROW, Narrow, Rows, in_e4m3, narrowed
from gpt.model.layers import ACTIVATIONS

CAPABILITY_MIN = (8, 9)  # Ada, Hopper and later multiply e4m3.
SLAB_ROWS = 2048  # Of a weight that is in fp32 at once while it is narrowed.


class Fp8:
    """A weight (columns, channels) in e4m3, and the product with it.

    The activation that such a product ends with may be left to the next one, whose rows then begin
    with it: it is then taken in the same pass that narrows them.
    """

    def __init__(
        self, weight: Tensor, *, begins: str | None = None, leaves: str | None = None
    ) -> None:
        self.weight, self._columns = narrow_weight(weight), weight.shape[0]
        self._dtype, self._begins, self._leaves = weight.dtype, begins, leaves

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(
        self, x: Rows, bias: Tensor | None, activation: str | None, residual: Tensor | None
    ) -> Tensor:
        rows = x if isinstance(x, Narrow) else narrowed(x, self._begins)
        y = multiply(rows, self.weight, bias, self._dtype)
        if y.shape[1] != self._columns:
            y = y[:, : self._columns].contiguous()
        if activation is not None and activation != self._leaves:
            y = ACTIVATIONS[activation](y)
        return y if residual is None else residual + y


def narrow_weight(weight: Tensor) -> Narrow:
    """Columns and channels padded as products want them."""
    columns, channels = (size + -size % MULTIPLE for size in weight.shape)
    numbers = weight.new_zeros(columns, channels, dtype=NARROW)
    scales = weight.new_ones(columns, 1, dtype=torch.float32)
    for start in range(0, len(weight), SLAB_ROWS):
        slab = in_e4m3(weight.detach()[start : start + SLAB_ROWS].float())
        numbers[start : start + len(slab.numbers)] = slab.numbers
        scales[start : start + len(slab.numbers)] = slab.scales
    return Narrow(numbers, scales)


def multiply(rows: Narrow, weight: Narrow, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows times the weight's rows, in `dtype`, as wide as the padded weight."""
    missing = 0 if bias is None else len(weight.numbers) - len(bias)
    if bias is not None and missing:
        bias = F.pad(bias, (0, missing))
    if not rows.numbers.is_cuda:
        return plain(rows, weight, bias, dtype)
    return torch._scaled_mm(
        rows.numbers,
        weight.numbers.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def plain(rows: Narrow, weight: Narrow, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same numbers widened, and multiplied in fp32."""
    y = (rows.numbers.float() @ weight.numbers.float().t()) * rows.scales * weight.scales.t()
    return (y if bias is None else y + bias).to(dtype)


@cache
def unfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this device has no such products; None: it has been seen to multiply."""
    if device.type != "cuda":
        return f"its device is {device.type}"
    if dtype != torch.bfloat16:
        return f"its dtype is {dtype}, and products by rows give bfloat16 alone"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY_MIN:
        have, need = (".".join(map(str, one)) for one in (capability, CAPABILITY_MIN))
        return f"its compute capability is {have}, and e4m3 needs {need}"
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).to(device, dtype) for rows in (3, 32))
    rows, numbers, bias = in_e4m3(x.float()), narrow_weight(weight), weight[:, 0].contiguous()
    try:
        got = multiply(rows, numbers, bias, dtype)
    except RuntimeError as error:
        return f"torch {torch.__version__} refuses: {(str(error).splitlines() or [''])[0]}"
    off = float((got - plain(rows, numbers, bias, torch.float32)).abs().max())
    # Sums of 64 numbers of about 1, in bf16: more than this is a wrong formula.
    return None if off < 0.25 else f"a product was off by {off:.3g}"
