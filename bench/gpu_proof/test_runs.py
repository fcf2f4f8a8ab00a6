"""Test stages of a GPU proof: the GPU tests, and a few of them under compute-sanitizer."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu_proof.stage_context import StageContext, StageFailure
from gpt.child_processes import module_command

ROOT = Path(__file__).resolve().parents[2]
FAILURES_MAX = 100  # Recorded failures; each has one line.
LINE_CHARACTERS_MAX = 300
ATTENTION_CASES = 30
SANITIZED_TESTS = (
    *(
        f"tests/gpu/test_attention.py::test_triton_attention_equals_the_reference[{seed}]"
        for seed in range(ATTENTION_CASES)
    ),
    "tests/gpu/test_cuda_graphs.py::test_replayed_steps_have_the_tokens_of_plain_steps[classic]",
)
SANITIZER_EXIT_CODE = 99


def run_gpu_tests(stage: StageContext) -> None:
    """Run `make test-gpu`'s tests, and record their counts and the last line of each failure."""
    command = module_command(["tests.support.gpu_tests", "-q", "-p", "no:cacheprovider"])
    _run_pytest(stage, command)


def run_under_sanitizer(stage: StageContext) -> None:
    """Run attention cases and replayed steps under compute-sanitizer's memcheck.

    Without a GPU, the tests run without compute-sanitizer, and skip themselves.
    """
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-W", "default"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", *SANITIZED_TESTS]
    if stage.on_gpu:
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            stage.figures.skip("compute-sanitizer is not on the PATH")
            return
        options = ["--tool", "memcheck", "--error-exitcode", str(SANITIZER_EXIT_CODE)]
        command = [tool, *options, *command]
    stage.figures.add("sanitizer", "memcheck" if stage.on_gpu else "none")
    _run_pytest(stage, command)


def _run_pytest(stage: StageContext, command: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        process = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, check=False)
        if not report.exists():
            raise StageFailure(f"pytest ended with code {process.returncode}, without a report")
        counts, failures = read_report(report)
    for name, count in counts.items():
        stage.figures.add(name, count)
    stage.figures.add("failures", failures)
    if process.returncode == SANITIZER_EXIT_CODE:
        raise StageFailure("compute-sanitizer found invalid accesses; see the stage's log")
    if process.returncode:
        raise StageFailure(
            f"{counts['failed']} of {counts['tests']} tests failed (pytest's code "
            f"{process.returncode})"
        )
    if stage.on_gpu and not counts["passed"]:
        raise StageFailure("no test ran")


def read_report(path: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return the counts of a JUnit report, and the last line of each failure by test."""
    counts = {"tests": 0, "passed": 0, "failed": 0, "skipped": 0}
    failures: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        counts["tests"] += 1
        faults = [*case.findall("failure"), *case.findall("error")]
        if faults:
            counts["failed"] += 1
            lines = (faults[0].get("message") or faults[0].text or "").strip().splitlines()
            if len(failures) < FAILURES_MAX:
                name = f"{case.get('classname')}::{case.get('name')}"
                failures[name] = "".join(lines[-1:])[:LINE_CHARACTERS_MAX]
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, failures
