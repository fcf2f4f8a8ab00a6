"""CRC-32 of a whole from its parts, beside zlib's of the whole."""

import random
import zlib

from checkpoints_tools.conversion.crc32 import joined


def test_parts_of_any_size_give_the_checksum_of_the_whole() -> None:
    draw = random.Random(0)
    for _ in range(100):
        parts = [
            draw.randbytes(draw.choice([0, 1, 7, 300, 70000])) for _ in range(draw.randrange(9))
        ]
        assert joined((zlib.crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


def test_a_part_can_be_longer_than_memory() -> None:
    """Zeros after a checksum only multiply it, so two ways of counting them must agree."""
    terabyte = 1 << 40
    zeros = joined((0, 1 << 39) for _ in range(2))
    assert joined([(123456789, 9), (zeros, terabyte)]) == joined(
        [(123456789, 9), (0, 1 << 39), (0, 1 << 39)]
    )
