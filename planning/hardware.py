"""What there is to compute on: a kind of GPU, how many, and how they are joined.

The numbers are spec sheets'; how much of them a program gets is the business of whoever predicts
its time. A name that is not known is refused with the nearest one that is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isqrt

from gpt.errors import ConfigError
from gpt.settings import nearest, shown

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """One GPU, by its spec sheet. Speeds are a second's, each link's is of one direction."""

    name: str
    flops: float  # Dense, of 16-bit matrices.
    memory_bytes: int
    bandwidth_bytes: float
    link_bytes: float  # To its neighbours in the node.
    network_bytes: float  # Its share of what leaves the node.
    flops_fp8: float = 0.0  # 0: it has none.


@dataclass(frozen=True)
class Cluster:
    device: Device
    gpus: int
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40g", 312e12, 40_000_000_000, 1.555e12, 300e9, 25e9),
        Device("a100-80g", 312e12, 80 * GIB, 2.039e12, 300e9, 25e9),
        Device("h100", 989e12, 80 * GIB, 3.35e12, 450e9, 50e9, 1978e12),
        Device("h200", 989e12, 141_000_000_000, 4.8e12, 450e9, 50e9, 1978e12),
        Device("l40s", 362e12, 46068 << 20, 0.864e12, 32e9, 25e9, 733e12),
        Device("b200", 2250e12, 180 * GIB, 7.7e12, 900e9, 50e9, 4500e12),
    )
}
OTHER_NAMES = {"a100": "a100-80g", "h100-sxm": "h100", "h100-80g": "h100", "h200-sxm": "h200"}


@cache
def divisors(number: int) -> tuple[int, ...]:
    """How many alike parts it can have: a node's GPUs, a model's layers, a batch."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def find_device(name: str) -> Device:
    """By its name, however it is written."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    plain = OTHER_NAMES.get(plain, plain)
    if plain not in DEVICES:
        raise ConfigError(f"no GPU {shown(name)} is known; {nearest(plain, DEVICES)}")
    return DEVICES[plain]
