"""Triton kernel that stores one element, to find out whether Triton can run on a device."""

import triton
import triton.language as tl


@triton.jit
def store_one(element):
    """Store 1 in the only element of a tensor."""
    tl.store(element, 1)
