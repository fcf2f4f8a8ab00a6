"""Facts of the machine of a GPU proof: device, driver, libraries and measured limits."""

import subprocess
from typing import Any

import torch

from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext
from bench.harness.record import describe_machine, limit_record
from bench.suites.gpu import measure_device_limits
from gpt.software_versions import library_version

LIBRARIES = ("triton", "transformers", "flashinfer-python", "transformer-engine")
DRIVER_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")


def describe_device(device: str) -> dict[str, Any]:
    """Return the facts that need no measurement. `collectives`: this proof has one rank."""
    facts: dict[str, Any] = describe_machine() | {"device": device, "collectives": "none"}
    for library in LIBRARIES:
        facts[library] = library_version(library) or "not installed"
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        facts |= {
            "device": f"cuda: {torch.cuda.get_device_name()}",
            "compute capability": f"{major}.{minor}",
            "CUDA": str(torch.version.cuda),
            "device memory": f"{total_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB free",
            **_driver_facts(),
        }
    return facts


def measure_limits(stage: StageContext) -> None:
    """Measure the copy bandwidth and the matmul peak, as the rows of the targets do."""
    sizes = ProofSizes.of(stage.device)
    limits = list(measure_device_limits(sizes.rounds, sizes.suite))
    for limit in limits:
        stage.figures.add(f"{limit.name}, G{limit.unit}/s", limit.value / 1e9)
    stage.figures.add("limits", [limit_record(limit) for limit in limits])


def _driver_facts() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(DRIVER_FIELDS)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver": f"unknown: {type(error).__name__}"}
    values = output.stdout.splitlines()[0].split(", ")
    return dict(zip(DRIVER_FIELDS, values, strict=False))
