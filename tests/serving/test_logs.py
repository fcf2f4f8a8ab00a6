"""Logs: lines to a pipe are dropped while nothing reads them, and counted afterwards."""

import json
import os
import subprocess
import sys
import time

import pytest

from tests.support.servers import ROOT, WAIT_S

LINES = 2_000
PROGRAM = f"""
import logging, sys, time
from serving.logs import log_to_stderr
log_to_stderr(sys.argv[1])
log = logging.getLogger("test")
started = time.monotonic()
for number in range({LINES}):
    log.info("event=line number=%d text=%s", number, "x" * 100)
print(time.monotonic() - started, flush=True)
sys.stdin.readline()
log.info("event=after")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_reader_that_stops_does_not_stop_the_writer(log_format: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, log_format],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdin is not None
        assert float(process.stdout.readline()) < 10.0
        descriptor = process.stderr.fileno()
        os.set_blocking(descriptor, False)
        received = os.read(descriptor, 1 << 20)
        os.set_blocking(descriptor, True)
        process.stdin.write("\n")
        process.stdin.close()
        end = time.monotonic() + WAIT_S
        while b"event=after" not in received and b'"after"' not in received:
            assert time.monotonic() < end
            received += os.read(descriptor, 1 << 16)
    lines = received.decode().splitlines()
    written = [line for line in lines if "number=" in line or '"number"' in line]
    assert 100 < len(written) < LINES
    (dropped,) = [line for line in lines if "log_lines_dropped" in line]
    if log_format == "json":
        assert int(json.loads(dropped)["fields"]["suppressed"]) >= LINES - len(written)
    else:
        assert int(dropped.rpartition("=")[2]) >= LINES - len(written)


def test_a_reader_that_reads_gets_every_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "text"],
        cwd=ROOT,
        input="\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stderr.count("event=line") == LINES and "event=after" in done.stderr


def test_a_closed_pipe_ends_no_program() -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "text"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(reader)
    os.close(writer)
    process.communicate(b"\n", timeout=WAIT_S)
    assert process.returncode == 0
