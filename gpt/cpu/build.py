"""Compiles what lies in cpu/ into one library. `make kernels` and the wheel build run it.

How it is compiled stands here alone. Without the library answers on a CPU are slower, and no less
right, so a machine that cannot compile it hears of that in one line and goes on. It imports nothing
of ours, since it runs before there is anything else.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = "libkernels.so"
OPTIONS = ("-O3", "-Wall", "-Wextra", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC")


def main(folder: Path) -> int:
    """Puts the library into `folder`; 1 if there is none now, after saying why."""
    library, part = folder / LIBRARY, folder / f".{LIBRARY}.{os.getpid()}.part"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    sources = sorted(map(str, FOLDER.glob("src/*.c")))
    command = [*compiler, *OPTIONS, "-o", str(part), *sources, "-lm"]
    try:
        code = subprocess.run(command, check=False).returncode
        reason = f"{compiler[0]} failed (above)"
    except OSError as error:
        code, reason = 1, f"no C compiler: {compiler[0]}: {error.strerror}"
    if code == 0:
        os.replace(part, library)  # Whoever runs with the old one keeps it.
        return 0
    for file in (part, library):  # An old one would not be what the source says.
        file.unlink(missing_ok=True)
    sys.stderr.write(f"{LIBRARY} was not built ({reason}): answers on a CPU will be slower\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
