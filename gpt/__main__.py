"""`preamble --version` command: versions of Preamble, its protocol, libraries and CPU kernels.

The default output is one line. With `-v` the command prints all that a bug report needs: commit,
libraries, machine, GPUs and the names of environment variables that change the computation. A
broken library is reported, and does not stop the command. It prints no host name and no secrets.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gpt.host_limits import total_memory_bytes, usable_cores
from gpt.software_versions import (
    PROTOCOL,
    library_version,
    preamble_version,
    runtime_libraries,
    source_commit,
)

NOT_INSTALLED = "not installed"
# Prefixes of environment variables that change how the computation runs.
VARIABLE_PREFIXES = ("PREAMBLE_", "OMP_", "GOMP_", "KMP_", "MKL_", "CUDA_", "NCCL_", "TORCH")
CPU_FILE = Path("/proc/cpuinfo")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="preamble", description="Print versions.")
    parser.add_argument("--version", action="store_true", required=True, help="print one line")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print what a bug report needs: libraries, machine, GPUs",
    )
    args = parser.parse_args(argv)
    print("\n".join(verbose_lines()) if args.verbose else version_line())
    return 0


def version_line() -> str:
    """Return the versions that decide compatibility, in one line."""
    return (
        f"preamble {preamble_version()} ({PROTOCOL}, Python {platform.python_version()}, "
        f"torch {library_version('torch') or NOT_INSTALLED}, {_platform()}, "
        f"CPU kernels {_or_reason(_cpu_kernels)})"
    )


def verbose_lines() -> Iterator[str]:
    """Yield the lines of `preamble --version -v`: a name, a colon and a version or property."""
    yield f"preamble: {preamble_version()}"
    yield f"commit: {source_commit() or 'unknown'}"
    yield f"location: {Path(__file__).resolve().parent.parent}"
    yield f"protocol: {PROTOCOL}"
    yield f"Python: {platform.python_version()} ({sys.executable})"
    yield f"platform: {_platform()}, {platform.platform()}"
    yield f"processor: {_processor()}, {usable_cores()} usable cores"
    yield f"memory: {total_memory_bytes() / (1 << 30):.1f} GiB"
    yield f"CPU kernels: {_or_reason(_cpu_kernels)}"
    yield f"torch build: {_or_reason(_torch_build)}"
    yield f"GPUs: {_or_reason(_gpus)}"
    libraries = runtime_libraries()
    # Not requirements: torch's CUDA builds and drivers bring them.
    libraries |= {name: library_version(name) for name in ("triton", "nvidia-nccl-cu12")}
    for name, version in libraries.items():
        yield f"{name}: {version or NOT_INSTALLED}"
    for name in sorted(os.environ):
        if name.startswith(VARIABLE_PREFIXES):
            yield f"{name}={os.environ[name]}"


def _or_reason(describe: Callable[[], str]) -> str:
    """Call `describe`; a library that cannot be imported becomes the reason in one line."""
    try:
        return describe()
    except Exception as error:  # Broken native libraries raise many kinds of exceptions.
        reason = (str(error).splitlines() or [""])[0]
        return f"unknown ({type(error).__name__}: {reason})"


def _platform() -> str:
    return f"{platform.system().lower()} {platform.machine()}"


def _processor() -> str:
    text = CPU_FILE.read_text() if CPU_FILE.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _cpu_kernels() -> str:
    """Return the instruction set that the C library uses on this machine."""
    from gpt.cpu.kernels import isa_level

    return isa_level() or "not built, torch computes instead"


def _torch_build() -> str:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads"


def _gpus() -> str:
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return (
        ", ".join(
            f"{device.name} ({device.total_memory / (1 << 30):.0f} GiB, compute capability "
            f"{device.major}.{device.minor})"
            for device in devices
        )
        or "none"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
