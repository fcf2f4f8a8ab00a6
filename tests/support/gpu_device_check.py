"""Plugin of pytest that ends a test process whose GPU no longer works.

After an invalid memory access, each further CUDA call of the process raises an error, so all later
tests of the process would fail. pytest-xdist starts a new process in place of one that ends.
"""

import os
import sys
import time
from typing import Any

import pytest

REPORT_S = 1.0  # Time for the report of the last test to reach the main process.
# The number of failed tests of this process; the device is checked only after a failure.
_failures = 0


def device_error() -> str:
    """Return the error of the device; empty if it works or was not used."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _failures
    _failures += report.failed


def pytest_runtest_logfinish() -> None:
    global _failures
    error = device_error() if _failures else ""
    _failures = 0
    if not error:
        return
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(f"the device no longer works: {error}", returncode=1)
    time.sleep(REPORT_S)
    os._exit(1)
