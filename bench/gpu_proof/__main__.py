"""`python -m bench.gpu_proof`: proves the GPU path on this machine within a time budget.

Needs no network. Each stage is a process of its own; gpu_proof.json and gpu_proof.md in the folder
--out are up to date at any time. With --ranks 0, it proves a node of several GPUs instead of one
GPU. With --device cpu, the command rehearses the stages with a tiny model. The exit code is 0 if no
stage failed or timed out.
"""

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path

from bench.gpu_proof import document
from bench.gpu_proof.proof_file import JSON_NAME, ProofFile
from bench.gpu_proof.stage_runner import Stage, run_stages
from bench.harness.record import git_commit
from gpt.child_processes import module_command
from gpt.errors import PreambleError

BUDGET_S = 570.0
# In order of worth: name, title, time limit on a GPU in seconds. The limits are longer than the
# stages should take; the budget ends the run. `measurements` has a function for each stage.
STAGES = (
    ("facts", "machine, and its limits", 40),
    ("compile", "Triton kernels are compiled", 90),
    ("smoke", "tokens equal the CPU's", 60),
    ("commands", "generate, tune and serve", 90),
    ("tests", "GPU tests", 200),
    ("sanitizer", "memory checks of kernels and graphs", 60),
    ("steps", "kernels, gaps and waits of a step", 60),
    ("rows", "performance targets", 200),
    ("mixed-load", "prompts that arrive beside decodes, by chunk size", 90),
    ("compiled", "a plain GPT under torch.compile", 60),
    ("transformers", "comparison with transformers", 100),
    ("figures", "attention, rotary positions, sampling", 40),
)
# Stages of a node of several GPUs. Its rank processes load a model several times.
NODE_STAGES = (
    ("facts", "machine, its GPUs and its limits", 40),
    ("node-tokens", "TP, PP and TP x PP have the tokens of one rank", 180),
    ("all-reduce", "latency of the all-reduce", 90),
    ("rank-loss", "a killed rank: error and recovery", 90),
    ("node-rows", "decode and prefill by layout", 300),
)
StagePlan = tuple[tuple[str, str, float], ...]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    flags = parser.parse_args(argv)
    names = [name for name, *_ in stage_plan(flags.ranks)]
    if unknown := set(flags.only or []).difference(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: the stages are {', '.join(names)}")
    try:
        if flags.publish is not None:
            for sentence in document.publish(flags.publish):
                print(sentence)
            return 0
        return run_proof(flags)
    except PreambleError as error:
        print(f"gpu_proof: {error}", file=sys.stderr)
        return 1


def run_proof(flags: argparse.Namespace) -> int:
    proof = ProofFile.continued(
        flags.out.resolve(),
        flags.commit or git_commit(),
        flags.device,
        time.strftime("%Y-%m-%dT%H:%M:%S"),
    )
    run_stages(
        make_stages(flags.device, flags.ranks, flags.only),
        proof,
        flags.budget,
        lambda line: print(line, flush=True),
    )
    print(f"proof: {proof.path}")
    return int(any(stage.status in ("failed", "timed out") for stage in proof.stages))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_proof", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="DIR", help=f"run, and write {JSON_NAME} here")
    action.add_argument(
        "--publish",
        type=Path,
        metavar="FILE",
        help=f"do not run; generate the section of {document.SECTION_PATH} from this proof",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="S",
        help="seconds for all stages together (default: %(default)g)",
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=["cuda", "cpu"],
        help="cpu: rehearse with a tiny model (default: cuda)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        choices=[0, 1, 2, 4, 8],
        help="ranks of a node, each on a GPU of its own; 0: as many as possible, or 2 on a CPU "
        "(default: 1, which proves one GPU)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STAGE",
        help="stages to run; the other stages of an earlier run of this commit in the folder stay "
        "in the proof (default: all)",
    )
    parser.add_argument(
        "--commit",
        help="commit of this tree, if it is a copy without git (default: asked from git)",
    )
    return parser


def stage_plan(ranks: int) -> StagePlan:
    """Return the stages of one GPU (`ranks` is 1) or of a node."""
    return STAGES if ranks == 1 else NODE_STAGES


def make_stages(device: str, ranks: int, names: Collection[str] | None) -> list[Stage]:
    """Return the stages `names` (None: all), which run on `device`, in order of worth."""
    options = ["--device", device, "--ranks", str(ranks)]
    return [
        Stage(
            name,
            title,
            module_command(["bench.gpu_proof.measurements", name, *options]),
            limit_s,
        )
        for name, title, limit_s in stage_plan(ranks)
        if names is None or name in names
    ]


if __name__ == "__main__":
    sys.exit(main())
