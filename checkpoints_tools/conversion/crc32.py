"""CRC-32 combination: the checksum of a file from the checksums of its parts.

The parts of a file can thus be written and checksummed in any order. A CRC-32 is the remainder of a
polynomial division. Therefore the CRC-32 of `a` followed by `b` is
crc(a) * x^(8 * len(b)) XOR crc(b), modulo POLYNOMIAL. Bits are reflected as in zlib: the highest
bit is the coefficient of x^0.
"""

from collections.abc import Iterable
from functools import lru_cache

POLYNOMIAL = 0xEDB88320
X_TO_THE_0 = 1 << 31
X_TO_THE_8 = 1 << 23  # The factor of one appended byte.


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of the concatenated parts. A part is (CRC-32, length in bytes)."""
    combined = 0
    for crc, length in parts:
        combined = _multiply(_shift_factor(length), combined) ^ crc
    return combined


@lru_cache(maxsize=4096)
def _shift_factor(length: int) -> int:
    """Return x^(8 * length) modulo POLYNOMIAL."""
    power, shift = X_TO_THE_8, X_TO_THE_0
    while length:
        if length & 1:
            shift = _multiply(shift, power)
        power = _multiply(power, power)
        length >>= 1
    return shift


def _multiply(left: int, right: int) -> int:
    """Return the product of two polynomials modulo POLYNOMIAL."""
    product, bit = 0, X_TO_THE_0
    while bit:
        if left & bit:
            product ^= right
        right = (right >> 1) ^ (POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return product
