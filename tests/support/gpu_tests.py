"""Runs the GPU tests, in parallel if pytest-xdist is installed.

    python -m tests.support.gpu_tests [OPTIONS OF PYTEST]

Most of the time of the GPU tests is the compilation of Triton kernels, each of which uses one core.
Failures and slow tests are printed when they end, because time on a machine with a GPU is often
limited: the output of a run that is killed has all that was found.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpt.host_limits import usable_cores

# Each process has a CUDA context of about 0.5 GB, and models of a few MB.
WORKERS_MAX = 16
SLOW_S = 10.0
DEVICE_CHECK = "tests.support.gpu_device_check"
NVIDIA_DRIVER = Path("/dev/nvidiactl")


def worker_options() -> list[str]:
    """Return the options of pytest-xdist; empty: the tests run in one process.

    Without an NVIDIA driver all tests skip themselves, and more processes only cost time.
    """
    workers = min(WORKERS_MAX, usable_cores())
    in_parallel = workers > 1 and NVIDIA_DRIVER.exists() and find_spec("xdist") is not None
    return ["-n", str(workers)] if in_parallel else []


class ImmediateReports:
    """Plugin of pytest that prints each failure, and each slow test, when the test ends."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
        elif report.duration > SLOW_S:
            print(f"\n{report.duration:.0f} s: {report.nodeid} ({report.when})", flush=True)


def main(options: list[str]) -> int:
    arguments = ["-m", "gpu", "-W", "default", "-p", DEVICE_CHECK, *worker_options(), *options]
    return int(pytest.main(arguments, plugins=[ImmediateReports()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
