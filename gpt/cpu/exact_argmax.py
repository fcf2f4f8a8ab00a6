"""Exact greedy argmax: int8 logits bound all logits, and bf16 logits decide among the candidates.

An int8 copy of the LM head has half of the bytes of the bf16 head, so a GEMM with it takes about
half of the time. The int8 logits give a lower and an upper bound of each exact logit. A column of
the head is the weight vector of one vocabulary token, and a panel is PANEL_COLUMNS adjacent
columns. Only the panels that can contain a row's largest logit are computed from the bf16 head,
with the arithmetic of the full bf16 GEMM. The result is therefore the argmax of the full GEMM, also
if several logits are equal. The C code is gpt/cpu/src/exact_argmax.c.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.cpu import int8_linear
from gpt.cpu.huge_pages import huge_page_zeros
from gpt.cpu.kernels import KEEP_GIL_ELEMENTS_MAX, POINTER, library, library_keeping_gil
from gpt.cpu.packed_linear import PANEL_COLUMNS, CpuNorm, PackedLinear, PackedWeight

ROWS_MAX = 256  # Must equal ROWS_MAX in gpt/cpu/src/exact_argmax.c.
MEMORY_BOUND_ROWS = 12  # Up to this number of rows the GEMM is limited by memory bandwidth.
# The bounds are valid only for norms of rows and columns in this range: outside of it, fp32 squares
# underflow or overflow. gpt/cpu/src/exact_argmax.c checks the rows, with the same limits.
NORM_RANGE = (1e-10, 1e10)
CHUNK_TOKENS = 4096  # Columns of the head (vocabulary tokens) that are converted to fp32 at once.
# A screened step (`ScreenedArgmax`) that computes many bf16 panels is slower than the full GEMM.
# After a slow step, screening pauses for PAUSE_STEPS_MIN steps. If the first step after a pause is
# slow too, the next pause is twice as long, up to PAUSE_STEPS_MAX.
PAUSE_STEPS_MIN, PAUSE_STEPS_MAX = 8, 1024


class _ScreenedHead(ctypes.Structure):
    """The struct ScreenedHead in gpt/cpu/src/exact_argmax.c."""

    _fields_ = (
        ("int8_weight", PackedWeight),
        *((name, POINTER) for name in ("error_norms", "column_norms")),
        *((name, POINTER) for name in ("column_mean", "bf16_panels")),
        ("norm_max", ctypes.c_double),
    )


class ScreenedArgmax:
    """Argmax over the logits of an LM head: int8 bounds screen the panels, bf16 logits decide."""

    def __init__(
        self,
        weight: Tensor,
        head: PackedLinear,
        norm: CpuNorm | None,
        column_mean: Tensor,
        column_norms: Tensor,
        norm_max: float,
    ) -> None:
        """Quantize `weight - column_mean`; `column_norms` are the column norms of this difference.

        `build` computes the arguments. The unpacked `weight` is not stored.
        """
        assert head.weight_args.scales is None and head.weight_args.channels == weight.shape[1]
        self._memory = huge_page_zeros(
            (int8_linear.packed_bytes(weight),), torch.uint8, torch.device("cpu")
        )
        scales, errors = int8_linear.pack_int8(weight, self._memory, column_mean=column_mean)
        # The factor 1.001 covers the rounding of the norms. By the triangle inequality, the norm of
        # a quantized column is at most the column's norm plus the norm of its quantization error.
        errors *= 1.001
        column_norms = F.pad(column_norms * 1.001, (0, len(errors) - len(column_norms))) + errors
        # This object keeps the tensors allocated, because the library gets their addresses.
        self._keepalive = (head, scales, errors, column_norms, column_mean)
        self._norm = norm
        memory, (columns, channels) = self._memory.data_ptr(), weight.shape
        self._head = _ScreenedHead(
            PackedWeight(memory, channels, columns, True, False, scales.data_ptr()),
            errors.data_ptr(),
            column_norms.data_ptr(),
            column_mean.data_ptr(),
            head.weight_args.panels,
            norm_max,
        )
        self._panels = -(-len(weight) // PANEL_COLUMNS)
        self._pause = 0
        self._next_pause = PAUSE_STEPS_MIN
        self.steps = 0  # The number of screened steps.
        self.panels_scored = 0  # (row, bf16 panel) pairs computed in all screened steps.

    @classmethod
    def build(
        cls, weight: Tensor, head: PackedLinear, norm: CpuNorm | None = None
    ) -> "ScreenedArgmax | None":
        """Return the screened argmax of a head; `norm` is the norm before the head.

        Return None if this machine has no int8 GEMM, or if the head's column norms are outside
        NORM_RANGE.
        """
        if not int8_linear.has_int8_gemm():
            return None
        # Subtract the mean of all columns. All logits of a row then change by the same amount, so
        # the argmax does not change. The mean is often large. After the subtraction the int8 scales
        # are smaller, and therefore the error bounds too.
        chunks = weight.detach().split(CHUNK_TOKENS)
        column_mean = torch.stack([chunk.float().sum(0) for chunk in chunks]).sum(0) / len(weight)
        largest_norm = torch.stack([chunk.float().norm(dim=1).amax() for chunk in chunks]).amax()
        column_norms = torch.cat([(chunk.float() - column_mean).norm(dim=1) for chunk in chunks])
        # `norm_max` bounds the norms of all columns, before and after subtraction and quantization.
        # A column's quantization error has a norm of at most sqrt(channels) * scale / 2, and the
        # scale is at most norm / CODE_MAX. Therefore quantization multiplies a norm by at most this
        # factor.
        quantization_factor = 1 + weight.shape[1] ** 0.5 / (2 * int8_linear.CODE_MAX)
        largest_norm = torch.maximum(largest_norm, column_norms.amax())
        norm_max = 1.001 * quantization_factor * float(largest_norm)
        return (
            cls(weight, head, norm, column_mean, column_norms, norm_max)
            if NORM_RANGE[0] < norm_max < NORM_RANGE[1]
            else None
        )

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return the argmax token of each row (the first of equal logits), for up to ROWS_MAX rows.

        Return None if screening pauses, or if a row's norm is outside NORM_RANGE or not finite.
        """
        assert x.dtype == torch.bfloat16 and len(x) <= ROWS_MAX
        if self._pause:
            self._pause -= 1
            return None
        x, tokens = x.contiguous(), torch.empty(len(x), dtype=torch.int64)
        keeps_gil = self._memory.numel() * len(x) <= KEEP_GIL_ELEMENTS_MAX
        lib = library_keeping_gil() if keeps_gil else library()
        assert lib is not None
        scored = lib.preamble_screened_argmax(
            ctypes.byref(self._head),
            None if self._norm is None else ctypes.byref(self._norm.norm_args),
            x.data_ptr(),
            len(x),
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        if scored < 0:
            return None
        self.steps = self.steps + 1
        self.panels_scored = self.panels_scored + scored
        # The unit of cost is one read of a bf16 panel. Scoring one (row, panel) pair costs 1. The
        # full bf16 GEMM reads every panel once; above MEMORY_BOUND_ROWS rows, its cost is
        # proportional to the rows. A screened step costs full_cost / 2 for the int8 GEMM, plus
        # `scored`. It is slower than the full GEMM if `scored` is above full_cost / 2.
        full_cost = self._panels * max(1, len(x) / MEMORY_BOUND_ROWS)
        if 2 * scored > full_cost:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, PAUSE_STEPS_MAX)
        else:
            self._next_pause = PAUSE_STEPS_MIN
        return tokens


class CpuGreedyHead:
    """Greedy tokens of a packed LM head: by the screened argmax, or by the GEMM over all panels.

    The screened argmax is used for up to ROWS_MAX rows, while it is faster (see
    `ScreenedArgmax.argmax`).
    """

    def __init__(
        self,
        head: PackedLinear,
        norm: CpuNorm | None,
        vocab_size: int,
        screened: ScreenedArgmax | None = None,
    ) -> None:
        """`norm`: the norm before the head. `vocab_size`: the number of columns without padding."""
        self._head = head
        self._norm = norm
        self._vocab_size = vocab_size
        self.screened = screened

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return each row's argmax token (the first of equal logits).

        Return None if the GEMM over all panels computed a logit that is not finite.
        """
        if self.screened is not None and len(x) <= ROWS_MAX:
            token_ids = self.screened.argmax(x)
            if token_ids is not None:
                return token_ids
        return self._head.matmul_argmax(x, self._norm, self._vocab_size)
