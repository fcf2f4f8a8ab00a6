"""The operating system's priority of a background thread."""

import os
import threading
from contextlib import suppress


def use_lowest_priority() -> None:
    """Let the calling thread take only CPU time that other threads leave unused."""
    with suppress(OSError):
        # With a native thread id, Linux changes the priority of this thread only.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
