"""Runs the GPU tests, in parallel if pytest-xdist is installed.

    python -m tests.support.gpu_tests [OPTIONS OF PYTEST]

Most of the time of the GPU tests is the compilation of Triton kernels, each of which uses one core.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpt.host_limits import usable_cores

# Each process has a CUDA context of about 0.5 GB, and models of a few MB.
WORKERS_MAX = 8
NVIDIA_DRIVER = Path("/dev/nvidiactl")


def worker_options() -> list[str]:
    """Return the options of pytest-xdist; empty: the tests run in one process.

    Without an NVIDIA driver all tests skip themselves, and more processes only cost time.
    """
    workers = min(WORKERS_MAX, usable_cores())
    in_parallel = workers > 1 and NVIDIA_DRIVER.exists() and find_spec("xdist") is not None
    return ["-n", str(workers)] if in_parallel else []


if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "gpu", "-W", "default", *worker_options(), *sys.argv[1:]]))
