"""Python programs in processes of their own, which print `ready` when a test can go on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.servers import ROOT


@contextmanager
def ready_program(
    source: str, *arguments: object, **variables: str
) -> Iterator["subprocess.Popen[str]"]:
    """Run a program with environment variables, wait until it is ready, and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
