"""CRC-32 combination, compared with zlib's CRC-32 of the whole."""

import random
import zlib

from checkpoints_tools.conversion.crc32 import combine_crc32


def test_parts_of_any_size_combine_to_the_crc_of_the_whole() -> None:
    draw = random.Random(0)
    for _ in range(100):
        parts = [
            draw.randbytes(draw.choice([0, 1, 7, 300, 70000])) for _ in range(draw.randrange(9))
        ]
        assert combine_crc32((zlib.crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


def test_part_may_be_larger_than_memory() -> None:
    """Appending zeros multiplies a CRC, so one long run and many short runs must agree."""
    terabyte = 1 << 40
    zeros = combine_crc32((0, 1 << 39) for _ in range(2))
    assert combine_crc32([(123456789, 9), (zeros, terabyte)]) == combine_crc32(
        [(123456789, 9), (0, 1 << 39), (0, 1 << 39)]
    )
