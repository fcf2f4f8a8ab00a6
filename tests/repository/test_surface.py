"""User-visible surface: flags, settings, metrics, protocols, logs and files equal the record."""

import difflib
import subprocess
import sys

import pytest

from tests.support.surface import GOLDEN
from tests.support.surface_source import ROOT

LIMIT_S = 600
LINES_SHOWN_MAX = 200
ADVICE = (
    "The user-visible surface has changed. If the change is intended, record it with "
    "`python -m tests.support.surface --write`, read the difference, and describe it for users in "
    "CHANGELOG.md. Lines with - are in the record, lines with + are in the current surface:"
)


@pytest.mark.slow
def test_the_user_visible_surface_equals_the_record() -> None:
    # The recorder interrupts its own process and patches `ArgumentParser`, so it runs in a child.
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.surface"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert process.returncode == 0, process.stderr

    recorded = GOLDEN.read_text().splitlines()
    current = process.stdout.splitlines()
    changes = list(difflib.unified_diff(recorded, current, lineterm=""))[2:]
    assert not changes, "\n".join([ADVICE, *changes[:LINES_SHOWN_MAX]])
