"""Tests of kernels in Triton's interpreter, which a process selects before it loads Triton."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES_S_MAX = 600.0


def check_interpreted_cases(file: str) -> None:
    """Run the tests of a file, relative to the repository root, in a process of their own."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=CASES_S_MAX,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout
