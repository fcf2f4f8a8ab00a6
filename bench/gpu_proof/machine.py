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
UNKNOWN = "unknown"
DRIVER_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")


def describe_device(device: str, ranks: int) -> dict[str, Any]:
    """Return the facts that need no measurement. `collectives`: the library of several ranks."""
    facts: dict[str, Any] = describe_machine() | {
        "device": device,
        "collectives": _collectives(device) if ranks > 1 else "none",
    }
    if ranks > 1:
        facts["ranks"] = ranks
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
        if ranks > 1:
            facts |= {"GPUs": torch.cuda.device_count(), "links": _query_driver("topo", "-m")}
    return facts


def measure_limits(stage: StageContext) -> None:
    """Measure the copy bandwidth and the matmul peak, as the rows of the targets do."""
    sizes = ProofSizes.of(stage.device)
    limits = list(measure_device_limits(sizes.rounds, sizes.suite))
    for limit in limits:
        stage.figures.add(f"{limit.name}, G{limit.unit}/s", limit.value / 1e9)
    stage.figures.add("limits", [limit_record(limit) for limit in limits])


def _driver_facts() -> dict[str, str]:
    output = _query_driver(f"--query-gpu={','.join(DRIVER_FIELDS)}", "--format=csv,noheader")
    if output.startswith(UNKNOWN):
        return {"driver": output}
    return dict(zip(DRIVER_FIELDS, output.splitlines()[0].split(", "), strict=False))


def _query_driver(*arguments: str) -> str:
    """Return the output of nvidia-smi, or a text that begins with UNKNOWN."""
    command = ["nvidia-smi", *arguments]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{UNKNOWN}: {type(error).__name__}"
    return output.stdout


def _collectives(device: str) -> str:
    """Return the library with which the ranks communicate; see `join_world`."""
    if device == "cpu":
        return "gloo"
    return f"nccl: {'.'.join(map(str, torch.cuda.nccl.version()))}"
