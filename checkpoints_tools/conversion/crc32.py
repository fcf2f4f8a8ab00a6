"""CRC-32 of a whole from those of its parts, so that a file can be written in any order.

A checksum is a polynomial's remainder, and putting bytes behind others multiplies it by a power of
x. Bits are reflected, as zlib's are: the highest stands for x to the 0.
It knows no files.
"""

from collections.abc import Iterable
from functools import lru_cache

POLYNOMIAL = 0xEDB88320
ONE = 1 << 31
BYTE = 1 << 23  # x to the 8.


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The checksum of parts one after the other, each given by its own and its length."""
    whole = 0
    for crc, length in parts:
        whole = _product(_shift(length), whole) ^ crc
    return whole


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """What a checksum is multiplied by when `length` bytes follow."""
    power, shift = BYTE, ONE
    while length:
        if length & 1:
            shift = _product(shift, power)
        power = _product(power, power)
        length >>= 1
    return shift


def _product(left: int, right: int) -> int:
    product, bit = 0, ONE
    while bit:
        if left & bit:
            product ^= right
        right = (right >> 1) ^ (POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return product
