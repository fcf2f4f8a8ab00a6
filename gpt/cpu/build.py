"""Build of the C kernel library from gpt/cpu/src, for `make kernels` and the wheel.

Only this module defines the compiler flags. Only int8 weights need the library. Without it, torch
computes all other operations, more slowly. Therefore setup.py ignores a failed build. The module
imports nothing from this repository, because it runs before the package is installed.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = "libkernels.so"
COMPILER_FLAGS = ("-O3", "-Wall", "-Wextra", "-Wno-psabi", "-pthread", "-shared", "-fPIC")


def main(folder: Path) -> int:
    """Build the library in `folder`, and return the exit code: 0, or 1 after a failed build."""
    library, partial = folder / LIBRARY, folder / f".{LIBRARY}.{os.getpid()}.part"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    sources = sorted(map(str, FOLDER.glob("src/*.c")))
    command = [*compiler, *COMPILER_FLAGS, "-o", str(partial), *sources, "-lm"]
    try:
        exit_code = subprocess.run(command, check=False).returncode
        reason = f"{compiler[0]} failed, see above"
    except OSError as error:
        exit_code, reason = 1, f"no C compiler: {compiler[0]}: {error.strerror}"
    if exit_code == 0:
        os.replace(partial, library)  # Running processes keep the old file open.
        return 0
    for file in (partial, library):  # An old library would not match the source.
        file.unlink(missing_ok=True)
    sys.stderr.write(
        f"{LIBRARY} was not built ({reason}), so inference on a CPU will be slower; install a "
        "working C compiler or set CC, then run make kernels\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
