"""Processes that a process of ours starts: they find our modules, and end with it.

Nothing here takes time to import, so that a child can see to its end before it does anything else.
"""

import ctypes
import os
import signal
import site
from collections.abc import Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Ours, with the way to our own modules, wherever they were started from."""
    made = dict(environment)
    root = str(Path(__file__).resolve().parent.parent)
    if root not in site.getsitepackages():
        ways = [root, *filter(None, [made.get("PYTHONPATH")])]
        made["PYTHONPATH"] = os.pathsep.join(ways)
    # Else `-m` looks for modules where the program was started first: in a model's directory, say.
    made["PYTHONSAFEPATH"] = "1"
    return made


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG is not to be had")
    if os.getppid() != parent:  # It ended before.
        os._exit(1)
