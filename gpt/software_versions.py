"""Software versions for `preamble --version`, metrics, proofs, states of runs and journals.

The version of Preamble comes from its installed distribution; pyproject.toml is its only source.
This module must not import torch, because `serve` and `tune` read the version before torch loads.
"""

import importlib.metadata
import re
import subprocess
from pathlib import Path

# The gRPC package whose messages a release reads and writes.
PROTOCOL = "preamble.v1"
# The version of a checkout that was never installed.
CHECKOUT_VERSION = "0+checkout"
# Written by setup.py into a wheel. A checkout has no such file, but a git history.
COMMIT_FILE = Path(__file__).with_name("commit.txt")
GIT_S = 5.0


def preamble_version() -> str:
    """Return the installed version of Preamble."""
    return library_version("preamble") or CHECKOUT_VERSION


def library_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def runtime_libraries() -> dict[str, str | None]:
    """Return the versions of the libraries that Preamble and its extras require, by name.

    The value is None if a library is not installed. The extra `dev` does not count.
    """
    try:
        requirements = importlib.metadata.requires("preamble") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    names = {
        match[0]
        for requirement in requirements
        if not re.search(r"extra == ['\"]dev['\"]", requirement)
        and (match := re.match(r"[\w.-]+", requirement))
    }
    return {name: library_version(name) for name in sorted(names, key=str.lower)}


def source_commit() -> str | None:
    """Return the git commit that the wheel was built from or that is checked out; None: unknown.

    The suffix `-dirty` means that tracked files differ from the commit.
    """
    if COMMIT_FILE.exists():
        return COMMIT_FILE.read_text().strip() or None
    return describe_commit(COMMIT_FILE.parent.parent)


def describe_commit(checkout: Path) -> str | None:
    """Return the commit that is checked out in `checkout`; None if it has no git history."""
    if not (checkout / ".git").exists():  # Git would describe the repository of an outer folder.
        return None
    # --exclude: a tag would replace the commit's hash.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        process = subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None
