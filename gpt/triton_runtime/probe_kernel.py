"""Triton kernel that stores one element: the probe of `availability`."""

import triton
import triton.language as tl


@triton.jit
def write_flag(flag_ptr):
    """Store 1 in the only element of an int32 tensor."""
    tl.store(flag_ptr, 1)
