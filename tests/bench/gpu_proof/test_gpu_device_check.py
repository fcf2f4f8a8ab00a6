"""GPU tests after an error of the device: the process ends, and a new one runs the later tests."""

import os
import subprocess
from pathlib import Path

import pytest

from gpt.child_processes import child_environment, module_command
from tests.support.gpu_tests import DEVICE_CHECK

TESTS = """
import pytest
from tests.support import gpu_device_check

is_broken = False
gpu_device_check.device_error = lambda: "invalid access" if is_broken else ""

@pytest.mark.parametrize("number", range(12))
def test_device(number):
    global is_broken
    assert not is_broken, "a test ran on a broken device"
    if number == 3:
        is_broken = True
        raise AssertionError("this test breaks the device")
    assert number != 7, "this test fails alone"
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_later_tests_run_in_a_new_process(processes: int, tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(TESTS)
    options = ["-q", "-p", DEVICE_CHECK, "-p", "no:cacheprovider", "-n", str(processes)]
    # Not the variables of this test's own process, which can be one of pytest-xdist.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(
        module_command(["pytest", *options, tmp_path / "test_broken.py"]),
        cwd=tmp_path,
        env=child_environment(inherited),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "AssertionError: a test ran on a broken device" not in run.stdout
    assert "AssertionError: this test breaks the device" in run.stdout
    if processes:
        assert "AssertionError: this test fails alone" in run.stdout and "10 passed" in run.stdout
    else:
        assert "the device no longer works: invalid access" in run.stdout + run.stderr
        assert "3 passed" in run.stdout
