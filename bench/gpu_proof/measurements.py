"""Measurements of a GPU proof: the function of each stage, and the process that runs it.

    python -m bench.gpu_proof.measurements STAGE --device cuda --ranks 1 FIGURES

`stage_runner` starts the process; FIGURES is the file to which a stage writes its figures. The
stages need torch, and libraries that may be missing: each stage imports its modules when it runs.
On a CPU, each stage runs with a tiny model and leaves out what needs a GPU.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.gpu_proof.stage_runner import FiguresFile

ROOT = Path(__file__).resolve().parents[2]
# One cache of compiled kernels for all stages, so that only one of them compiles a kernel.
KERNEL_CACHE = ROOT / "build" / "gpu-proof" / "triton"


def _facts(stage: StageContext) -> None:
    from bench.gpu_proof import machine

    for name, value in machine.describe_device(stage.device, stage.ranks).items():
        stage.figures.add(name, value)
    machine.measure_limits(stage)


def _compile(stage: StageContext) -> None:
    if not stage.on_gpu or not find_spec("triton"):
        stage.figures.skip("it needs Triton and a CUDA device")
        return
    from bench.gpu_proof import kernel_compilation

    kernel_compilation.compile_in_processes(stage, KERNEL_CACHE)


def _smoke(stage: StageContext) -> None:
    from bench.gpu_proof import model_checks

    model_checks.check_tokens(stage)


def _commands(stage: StageContext) -> None:
    from bench.gpu_proof import command_checks

    command_checks.check_commands(stage)


def _tests(stage: StageContext) -> None:
    from bench.gpu_proof import test_runs

    test_runs.run_gpu_tests(stage)


def _sanitizer(stage: StageContext) -> None:
    from bench.gpu_proof import test_runs

    test_runs.run_under_sanitizer(stage)


def _steps(stage: StageContext) -> None:
    from bench.gpu_proof import step_profile

    step_profile.profile_workloads(stage)


def _rows(stage: StageContext) -> None:
    from bench.gpu_proof import model_checks

    model_checks.measure_rows(stage)


def _mixed_load(stage: StageContext) -> None:
    from bench.gpu_proof import mixed_load

    mixed_load.measure_mixed_load(stage)


def _compiled(stage: StageContext) -> None:
    from bench.gpu_proof import peer_models

    peer_models.measure_plain_gpt(stage)


def _transformers(stage: StageContext) -> None:
    from bench.gpu_proof import peer_models

    peer_models.measure_transformers(stage)


def _figures(stage: StageContext) -> None:
    from bench.gpu_proof import kernel_times

    kernel_times.measure_kernels(stage)


def _node_tokens(stage: StageContext) -> None:
    from bench.gpu_proof import node_checks

    node_checks.compare_layouts(stage)


def _all_reduce(stage: StageContext) -> None:
    from bench.gpu_proof import all_reduce_times

    all_reduce_times.measure_all_reduces(stage)


def _rank_loss(stage: StageContext) -> None:
    from bench.gpu_proof import node_checks

    node_checks.check_rank_loss(stage)


def _node_rows(stage: StageContext) -> None:
    from bench.gpu_proof import node_rows

    node_rows.measure_layouts(stage)


MEASUREMENTS: Mapping[str, Callable[[StageContext], None]] = {
    "facts": _facts,
    "compile": _compile,
    "smoke": _smoke,
    "commands": _commands,
    "tests": _tests,
    "sanitizer": _sanitizer,
    "steps": _steps,
    "rows": _rows,
    "mixed-load": _mixed_load,
    "compiled": _compiled,
    "transformers": _transformers,
    "figures": _figures,
    "node-tokens": _node_tokens,
    "all-reduce": _all_reduce,
    "rank-loss": _rank_loss,
    "node-rows": _node_rows,
}
RANKS_MAX = 8
REHEARSED_RANKS = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_proof.measurements")
    parser.add_argument("stage", choices=list(MEASUREMENTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("figures", type=Path)
    flags = parser.parse_args(argv)
    os.environ.setdefault("TRITON_CACHE_DIR", str(KERNEL_CACHE))
    with FiguresFile(flags.figures) as figures:
        try:
            ranks = count_ranks(flags.device, flags.ranks)
            MEASUREMENTS[flags.stage](StageContext(flags.device, figures, ranks))
        except StageFailure as failure:
            figures.fail(str(failure))
            return 1
    return 0


def count_ranks(device: str, requested: int) -> int:
    """Return the number of ranks, each with a GPU of its own. `requested` 0: as many as possible.

    Raise StageFailure if there are too few GPUs. The number is a power of two, so that every layout
    divides the heads of the models. A rehearsal has no limit, because CPU ranks share the cores.
    """
    if device == "cpu":
        return requested or REHEARSED_RANKS
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        raise StageFailure("torch sees no CUDA device")
    if not requested and devices == 1:
        raise StageFailure("torch sees only one CUDA device; `make gpu-proof` proves one")
    if requested > devices:
        raise StageFailure(f"torch sees {devices} CUDA devices, fewer than {requested} ranks")
    return requested or min(RANKS_MAX, 1 << (devices.bit_length() - 1))


if __name__ == "__main__":
    sys.exit(main())
