"""Which share of each GPU training gets, as published runs show it.

Some numbers are measured facts of the hardware or counted from the programs; the fitted ones, few,
come from `python -m planning.published.fit_training`, which prints this file's tables anew. A GPU
that nobody published a run of borrows from its nearest kin, and says so with a wider error bar.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planning.hardware import Device
from planning.training.step_time import Efficiency


@dataclass(frozen=True)
class Software:
    """What trains, of its time, on a GPU; and how far off predictions are for runs not fitted."""

    name: str
    efficiency: Efficiency
    error: float
    error_fp8: float
    note: str = ""


# Megatron-LM of 2021 and 2022 and NeMo of 2022 and 2023, on A100: attention in parts, collectives
# behind backward products at most. Measured: links (222 of 300 GB/s in all-reduces of 8).
A100 = Efficiency(
    products=0.756,  # Fitted.
    products_fp8=0.0,
    tail=0.4186,  # Fitted.
    fused=0.5,
    memory=0.8206,  # Fitted.
    link=0.74,
    network=0.8196,  # Fitted.
    start_s=20e-6,
    gap_s=50e-6,
    hidden_forward=0.0,
    hidden_backward=0.6007,  # Fitted.
    hidden_pipeline=0.0,
    hidden_data=0.0,
    optimizer_bytes=60.96,  # Fitted.
    gradient_bytes=2.0,
    logit_bytes=50.0,
    uneven=0.008,
    flash=False,
)

# Megatron-Core and NeMo of 2024, on H100: fused attention, a distributed optimizer, and collectives
# of every kind behind products.
H100 = Efficiency(
    products=0.68,  # Fitted.
    products_fp8=0.5642,  # Fitted.
    tail=0.5,
    fused=0.45,
    memory=0.8,
    link=0.8,
    network=0.8,
    start_s=20e-6,
    gap_s=166.6e-6,  # Fitted.
    hidden_forward=0.8,  # Fitted, together with the next.
    hidden_backward=0.8,
    hidden_pipeline=0.7,
    hidden_data=0.9,
    optimizer_bytes=60.0,
    gradient_bytes=4.0,
    logit_bytes=50.0,
    uneven=0.005,
    flash=True,
)

_OLD = "Megatron-LM and NeMo of 2021 to 2023"
_NEW = "Megatron-Core of 2024"
_BORROWED = "no published run of this GPU; the H100's constants, with this GPU's product speeds"

# Medians of products of 4096 and more, measured: H100 0.80 and in fp8 0.53, H200 0.77 and 0.60,
# L40S 0.62 and 0.50, B200 0.69 and 0.48. Links of the L40S are PCIe: 5 GB/s among four.
SOFTWARE: Mapping[str, Software] = {
    "a100-40g": Software(_OLD, A100, 0.09, 0.0, "fitted on the 80 GB card"),
    "a100-80g": Software(_OLD, A100, 0.06, 0.0),
    "h100": Software(_NEW, H100, 0.09, 0.10),
    "h200": Software(
        _NEW,
        replace(H100, products=H100.products * 0.77 / 0.80, products_fp8=H100.products_fp8),
        0.15,
        0.20,
        _BORROWED,
    ),
    "l40s": Software(
        _NEW,
        replace(
            H100,
            products=H100.products * 0.62 / 0.80,
            products_fp8=H100.products_fp8 * 0.50 / 0.53,
            link=0.16,
        ),
        0.25,
        0.30,
        _BORROWED,
    ),
    "b200": Software(
        _NEW,
        replace(
            H100,
            products=H100.products * 0.69 / 0.80,
            products_fp8=H100.products_fp8 * 0.48 / 0.53,
        ),
        0.25,
        0.30,
        _BORROWED,
    ),
}


def software(device: Device) -> Software:
    """A device that somebody described himself is taken for a recent one."""
    unknown = Software(_NEW, H100, 0.30, 0.35, _BORROWED)
    return SOFTWARE.get(device.name, unknown)
