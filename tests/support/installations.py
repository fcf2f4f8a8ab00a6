"""Installed wheels for tests: wheels of a checkout or of a commit, each in its own environment.

An environment links to every installed package except preamble, so torch is not installed again and
nothing is downloaded for it.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND_S = 600.0  # Time limit of a command that hangs.


@dataclass(frozen=True)
class Installation:
    """An environment in the folder `home`/env, with one release of Preamble."""

    home: Path

    @property
    def python(self) -> Path:
        return self.home / "env" / "bin" / "python"

    @property
    def preamble(self) -> Path:
        return self.home / "env" / "bin" / "preamble"

    def run(self, *words: str | Path, cwd: Path | None = None, code: int = 0) -> str:
        """Run `preamble WORDS`, check its exit code, and return its stdout."""
        return call(self.preamble, *words, cwd=cwd or self.home, code=code)


def clean_environment() -> dict[str, str]:
    """Return the environment without variables that lead pip or Python to another installation."""
    return {
        name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
    }


def call(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """Run a command that must end with `code`, and return its stdout."""
    process = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert process.returncode == code, f"{command}\n{process.stdout}{process.stderr}"
    return process.stdout


def copy_checkout(target: Path) -> Path:
    """Copy the checkout without build outputs."""
    outputs = ("build", "dist", "*_pb2*", "*.so", "__pycache__")
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".*", *outputs))
    return target


def extract_commit(commit: str, target: Path) -> str | None:
    """Write the files of a commit to `target`; return why not, if the history lacks the commit."""
    command = ["git", "archive", "--format=tar", commit]
    try:
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        return "git is not installed"
    if archive.returncode != 0:
        return f"the git history has no commit {commit}; run `git fetch --unshallow`"
    target.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return None


def build_wheel(source: Path, **environment: str) -> Path:
    """Build the wheel of a source folder."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", "."]
    subprocess.run(command, cwd=source, check=True, env=os.environ | environment)
    return next(source.glob("dist/preamble-*.whl"))


def install_wheel(wheel: Path, home: Path, torch_version: str | None = None) -> Installation:
    """Create an environment in `home` and install the wheel there.

    With `torch_version`, the metadata of torch in this environment states that version.
    """
    home.mkdir(parents=True, exist_ok=True)
    call(sys.executable, "-m", "venv", "--without-pip", "env", cwd=home)
    links = home / "links"
    links.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "preamble" in package.name:
            continue
        if torch_version is not None and package.name.startswith("torch-"):
            _copy_metadata(package, links, torch_version)
        else:
            (links / package.name).symlink_to(package)
    site_packages = next(home.glob("env/lib/python*/site-packages"))
    (site_packages / "links.pth").write_text(str(links))
    installation = Installation(home)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", installation.python]
    call(*pip, "install", "-q", "--no-index", wheel, cwd=home)
    return installation


def _copy_metadata(package: Path, links: Path, torch_version: str) -> None:
    folder = links / f"torch-{torch_version}.dist-info"
    shutil.copytree(package, folder)
    text = (folder / "METADATA").read_text()
    text = re.sub(r"^Version: .*", f"Version: {torch_version}", text, count=1, flags=re.M)
    (folder / "METADATA").write_text(text)
