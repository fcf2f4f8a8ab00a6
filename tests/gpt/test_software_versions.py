"""Software versions and `preamble --version`: one line, the verbose lines, broken libraries."""

import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import preamble
from gpt.cpu.kernels import isa_level
from gpt.software_versions import (
    CHECKOUT_VERSION,
    PROTOCOL,
    describe_commit,
    library_version,
    preamble_version,
    runtime_libraries,
)
from protos.preamble.v1 import generation_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_one_line_has_the_versions_that_decide_compatibility(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert preamble.main(["--version"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(rf"preamble {re.escape(preamble_version())} \(", line)
    for words in (PROTOCOL, f"Python {platform.python_version()}", f"torch {version('torch')}"):
        assert words in line
    assert f"CPU kernels {isa_level() or 'not built'}" in line


def test_the_verbose_lines_name_every_library_of_the_product(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SECRET_TOKEN", "never printed")
    assert preamble.main(["--version", "-v"]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
    assert lines["preamble"] == preamble_version()
    for name in ("torch", "grpcio", "protobuf", "numpy", "llguidance"):
        assert lines[name] == version(name)
    assert "OMP_NUM_THREADS=1" in out
    assert "never printed" not in out


def test_the_libraries_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    extras.pop("dev")
    requirements = [
        *project["dependencies"],
        *(line for lines in extras.values() for line in lines),
    ]
    names = {re.match(r"[\w.-]+", line)[0].lower() for line in requirements}  # type: ignore[index]
    if preamble_version() == CHECKOUT_VERSION:
        pytest.skip("preamble is not installed, so it has no metadata")
    assert {name.lower() for name in runtime_libraries()} == names


def test_a_library_that_is_not_installed_has_no_version() -> None:
    assert library_version("no-such-distribution") is None


def test_a_broken_torch_is_reported_and_does_not_stop_the_command() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import preamble; "
        "sys.exit(preamble.main(sys.argv[1:]))"
    )
    for flags in ([], ["-v"]):
        process = subprocess.run(
            [sys.executable, "-c", program, "--version", *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (process.returncode, process.stderr) == (0, "")
        assert "unknown (ModuleNotFoundError" in process.stdout


def test_the_protocol_is_the_package_of_the_protos() -> None:
    assert generation_pb2.DESCRIPTOR.package == PROTOCOL


def test_a_commit_is_described_with_its_state(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) is None
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]

    def git(*words: str) -> str:
        command = ["git", *identity, *words]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "x")
    git("tag", "v1")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert describe_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert describe_commit(tmp_path) == f"{commit}-dirty"
