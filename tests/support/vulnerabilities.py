"""Vulnerabilities of the pinned versions in constraints.txt, for `make check`.

    python -m tests.support.vulnerabilities

pip-audit compares the versions with the Python Packaging Advisory Database. If the database cannot
be reached in time, the command prints the reason and succeeds, so that checks also work offline.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.installations import ROOT

AUDIT_S = 100.0
REQUEST_S = 10  # Time limit of one request of pip-audit.
# Vulnerabilities that do not concern Preamble: the id, and the reason.
EXCEPTIONS: Mapping[str, str] = {}


def audit(constraints: Path, limit_s: float = AUDIT_S) -> dict[str, Any] | str:
    """Return pip-audit's report, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # The file pins every version, so pip resolves and downloads nothing.
        command = [sys.executable, "-m", "pip_audit", "-r", str(constraints), "--no-deps"]
        command += ["--disable-pip", "--progress-spinner", "off", "--timeout", str(REQUEST_S)]
        command += ["--format", "json", "--output", str(report)]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {limit_s:g} s"
        # With vulnerabilities and without a database, pip-audit exits with 1 alike.
        if not report.exists():
            return (process.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]
        content: dict[str, Any] = json.loads(report.read_text())
        if not _checked(content):
            return "the database has none of the libraries"
        return content


def _checked(report: Mapping[str, Any]) -> list[str]:
    """Return the names of the libraries that the database has."""
    return [library["name"] for library in report["dependencies"] if "vulns" in library]


def describe(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each vulnerability that EXCEPTIONS does not list."""
    return [
        f"{library['name']} {library['version']}: {vulnerability['id']}, fixed in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version'}"
        for library in report["dependencies"]
        for vulnerability in library.get("vulns", ())
        if EXCEPTIONS.keys().isdisjoint({vulnerability["id"], *vulnerability["aliases"]})
    ]


def main() -> int:
    report = audit(ROOT / "constraints.txt")
    if isinstance(report, str):
        print(f"vulnerabilities: not checked ({report})")
        return 0
    lines = describe(report)
    count = len(_checked(report))
    print("\n".join(lines) or f"vulnerabilities: none in {count} of the pinned libraries")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
