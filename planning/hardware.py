"""Hardware specifications: the specification sheets of GPUs (Device), and a Cluster of nodes.

The speeds are the peak values of the specification sheets. The fractions of the peaks that a
program reaches are in `planning.training.efficiency` and `planning.inference.step_pricing`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isqrt

from gpt.errors import ConfigError
from gpt.settings import short_repr, suggest_nearest

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """The specification sheet of one GPU model. Link and network speeds are for one direction."""

    name: str
    flops: float  # FLOP/s of dense 16-bit matrix products.
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float  # Bandwidth to the other GPUs of the node (NVLink, PCIe).
    network_bytes_per_s: float  # This GPU's share of the node's network bandwidth.
    flops_fp8: float = 0.0  # FLOP/s of dense FP8 matrix products; 0: no FP8 support.


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
        # Name, 16-bit FLOP/s, memory bytes, memory bytes/s, link bytes/s, network bytes/s, and
        # FP8 FLOP/s.
        Device("a100-40g", 312e12, 40_000_000_000, 1.555e12, 300e9, 25e9),
        Device("a100-80g", 312e12, 80 * GIB, 2.039e12, 300e9, 25e9),
        Device("h100", 989e12, 80 * GIB, 3.35e12, 450e9, 50e9, 1978e12),
        Device("h200", 989e12, 141_000_000_000, 4.8e12, 450e9, 50e9, 1978e12),
        Device("l40s", 362e12, 46068 << 20, 0.864e12, 32e9, 25e9, 733e12),
        Device("b200", 2250e12, 180 * GIB, 7.7e12, 900e9, 50e9, 4500e12),
    )
}
DEVICE_ALIASES = {"a100": "a100-80g", "h100-sxm": "h100", "h100-80g": "h100", "h200-sxm": "h200"}


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def find_device(name: str) -> Device:
    """Look up a GPU by name; case is ignored, and `_` and spaces mean the same as `-`.

    The error for an unknown name suggests the nearest valid name.
    """
    normalized_name = name.lower().replace("_", "-").replace(" ", "-")
    normalized_name = DEVICE_ALIASES.get(normalized_name, normalized_name)
    if normalized_name not in DEVICES:
        raise ConfigError(
            f"unknown GPU {short_repr(name)}; {suggest_nearest(normalized_name, DEVICES)}"
        )
    return DEVICES[normalized_name]
