"""Triton paged attention without a GPU: in Triton's interpreter, and compiled for GPUs."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.suites import by_suite
from tests.support.triton_compiled import (
    CORE_CASES,
    GOLDEN,
    SHARED_BYTES,
    VERSIONS,
    resources_with,
)

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: make tools"
)


@pytest.mark.parametrize("count", by_suite(3, 30))
def test_random_steps_in_the_interpreter_equal_the_reference(count: int) -> None:
    run_interpreted("tests.support.attention_cases", count)


@pytest.mark.parametrize("count", by_suite(2, 20))
def test_random_rotary_steps_in_the_interpreter_equal_the_reference(count: int) -> None:
    run_interpreted("tests.support.rotary_cases", count)


def run_interpreted(module: str, count: int) -> None:
    """Run a program of random cases, and its other checks, with Triton's interpreter."""
    process = subprocess.run(
        [sys.executable, "-m", module, "0", str(count)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", CORE_CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernels_of_a_step_compile_within_the_golden_resources(version: str, case: str) -> None:
    if not (VERSIONS[version] / "triton").is_dir():
        pytest.skip(f"Triton {version} is not installed: make tools")
    golden = json.loads(GOLDEN.read_text())[version][case]
    compiled = resources_with(version, case)
    assert compiled.keys() == golden.keys()
    for kernel, resources in compiled.items():
        limits = golden[kernel]
        assert resources["registers"] <= 1.05 * limits["registers"], kernel
        assert resources["spilled_bytes"] <= limits["spilled_bytes"], kernel
        assert resources["shared_bytes"] <= SHARED_BYTES[int(case.split()[0])], kernel
        assert (resources["wgmma"] > 0) == (limits["wgmma"] > 0), kernel
