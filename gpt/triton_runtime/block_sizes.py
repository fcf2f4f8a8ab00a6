"""Block sizes of Triton kernels: the numbers that Triton requires.

Triton's own functions of this kind can also be called in a kernel, and take the host longer.
"""


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
