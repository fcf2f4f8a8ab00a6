"""A Triton kernel of a few instructions, whose code depends on each of its arguments."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["offset"])
def store_sum(
    x_ptr, out_ptr, size, offset, addend, unused, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """Store SCALE * x + addend of BLOCK elements, `offset` elements behind the beginning of `x`."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset + index, index < size, 0.0)
    tl.store(out_ptr + index, SCALE * x + addend, index < size)
