"""Hardware efficiency of training on each GPU model, fitted to runs of Megatron-LM and NeMo.

`python -m planning.published.fit_training` computes the constants that are marked as fitted from
published runs, and prints them. The other constants are measured on the hardware, or follow from
the training software, such as the bytes per gradient element in the all-reduce. A GPU without
published runs has the constants of the 80 GB A100 or of the H100, some of them adjusted by
measurements, and a wider error bar.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planning.hardware import Device
from planning.training.step_time import Efficiency


@dataclass(frozen=True)
class Software:
    """The software of published training runs, and the relative errors of its predicted speed."""

    name: str
    efficiency: Efficiency
    error: float
    error_fp8: float  # 0: the GPU does not support fp8.
    note: str = ""  # A remark on the error bar.


# Megatron-LM of 2021 and 2022 and NeMo of 2022 and 2023, on A100. Attention is unfused, and
# collectives overlap only with the matmuls of the backward pass. `link` is measured: an all-reduce
# among 8 GPUs reached 222 of 300 GB/s.
A100 = Efficiency(
    products=0.756,  # Fitted.
    products_fp8=0.0,
    tail=0.4186,  # Fitted.
    fused_attention=0.5,
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
    straggler_share=0.008,
    flash=False,
)

# Megatron-Core and NeMo of 2024, on H100: fused attention, a distributed optimizer, and overlap of
# all communication with computation.
H100 = Efficiency(
    products=0.68,  # Fitted.
    products_fp8=0.5642,  # Fitted.
    tail=0.5,
    fused_attention=0.45,
    memory=0.8,
    link=0.8,
    network=0.8,
    start_s=20e-6,
    gap_s=166.6e-6,  # Fitted.
    hidden_forward=0.8,  # Fitted, with the constraint that hidden_backward is equal.
    hidden_backward=0.8,
    hidden_pipeline=0.7,
    hidden_data=0.9,
    optimizer_bytes=60.0,
    gradient_bytes=4.0,
    logit_bytes=50.0,
    straggler_share=0.005,
    flash=True,
)

_MEGATRON_2021 = "Megatron-LM and NeMo of 2021 to 2023"
_MEGATRON_CORE_2024 = "Megatron-Core of 2024"
_BORROWED_NOTE = (
    "no published run on this GPU; uses the H100's constants and this GPU's matmul speeds"
)

# H200, L40S and B200 have no published runs. Their matmul speeds (`products`, `products_fp8`) are
# those of the H100 multiplied by a ratio of measured speeds, such as 0.77 / 0.80 for the H200 in 16
# bits. The measured speeds are fractions of the peak (medians over matmuls of size 4096 and more):
#
#           H100   H200   L40S   B200
#   16 bits 0.80   0.77   0.62   0.69
#   fp8     0.53   0.60   0.50   0.48
#
# The exception is the H200 in fp8: it has the speed of the H100, although 0.60 is more than 0.53.
# The L40S has PCIe links: an all-reduce among four GPUs reaches 5.2 of 32 GB/s, so `link` is 0.16.
SOFTWARE: Mapping[str, Software] = {
    "a100-40g": Software(_MEGATRON_2021, A100, 0.09, 0.0, "fitted on the 80 GB card"),
    "a100-80g": Software(_MEGATRON_2021, A100, 0.06, 0.0),
    "h100": Software(_MEGATRON_CORE_2024, H100, 0.09, 0.10),
    "h200": Software(
        _MEGATRON_CORE_2024,
        replace(H100, products=H100.products * 0.77 / 0.80, products_fp8=H100.products_fp8),
        0.15,
        0.20,
        _BORROWED_NOTE,
    ),
    "l40s": Software(
        _MEGATRON_CORE_2024,
        replace(
            H100,
            products=H100.products * 0.62 / 0.80,
            products_fp8=H100.products_fp8 * 0.50 / 0.53,
            link=0.16,
        ),
        0.25,
        0.30,
        _BORROWED_NOTE,
    ),
    "b200": Software(
        _MEGATRON_CORE_2024,
        replace(
            H100,
            products=H100.products * 0.69 / 0.80,
            products_fp8=H100.products_fp8 * 0.48 / 0.53,
        ),
        0.25,
        0.30,
        _BORROWED_NOTE,
    ),
}


def software_of_device(device: Device) -> Software:
    """Return the software of a GPU; for an unknown GPU, the H100's with a wide error bar."""
    default_software = Software(_MEGATRON_CORE_2024, H100, 0.30, 0.35, _BORROWED_NOTE)
    return SOFTWARE.get(device.name, default_software)
