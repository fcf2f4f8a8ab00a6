"""Wheel: the tests build it, install it in another environment and start its commands there.

That environment links to every installed package except preamble, so nothing is downloaded. Its
torch states the oldest version that we accept, and the installation must not replace it.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.installations import ROOT, build_wheel, call, copy_checkout, install_wheel
from tests.support.release import current_version
from tests.support.servers import write_checkpoint

pytestmark = pytest.mark.slow

OLDEST_TORCH = "2.11.0+own"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_checkout(tmp_path_factory.mktemp("source") / "preamble"))


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in an environment in another directory, and return the directory."""
    return install_wheel(wheel, tmp_path_factory.mktemp("installation"), OLDEST_TORCH).home


def test_the_wheel_contains_only_the_listed_packages(wheel: Path) -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"preamble.py", *(package.split(".")[0] for package in listed)}


def test_the_wheel_contains_the_stubs_and_their_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for proto in (ROOT / "protos/preamble/v1").glob("*.proto"):
        stubs = {f"protos/preamble/v1/{proto.stem}_pb2{end}" for end in (".py", ".pyi", "_grpc.py")}
        assert stubs <= names


@pytest.mark.parametrize(
    ("folder", "count"),
    [
        ("serving/protocols/preamble/page", 8),
        ("ptuning/reporting/templates", 5),
        ("planning/output/templates", 3),
    ],
)
def test_the_wheel_contains_the_web_pages_and_templates(
    wheel: Path, folder: str, count: int
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {f"{folder}/{file.name}" for file in (ROOT / folder).iterdir()}
    assert len(files) == count and files <= names


def test_a_wheel_with_the_c_library_has_a_platform_tag(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert "gpt/cpu/libkernels.so" in zipfile.ZipFile(wheel).namelist()


def test_a_wheel_built_without_a_compiler_has_the_tag_any(tmp_path: Path) -> None:
    wheel = build_wheel(copy_checkout(tmp_path / "preamble"), CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "false failed")]
)
def test_a_failed_build_of_the_library_prints_its_reason_and_removes_the_old_library(
    tmp_path: Path, compiler: str, reason: str
) -> None:
    (tmp_path / "libkernels.so").touch()
    process = subprocess.run(
        [sys.executable, ROOT / "gpt/cpu/build.py", tmp_path],
        env=os.environ | {"CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = process.stderr.splitlines()
    assert process.returncode == 1 and reason in line and "slower" in line
    assert not list(tmp_path.iterdir())


def test_an_installed_preamble_loads_the_c_library(installation: Path) -> None:
    program = "from gpt.cpu import kernels; print(kernels.library() is not None, kernels.LIBRARY)"
    loaded, file = call(installation / "env/bin/python", "-c", program, cwd=installation).split()
    assert loaded == "True"
    assert Path(file).is_relative_to(installation / "env")


def test_an_installed_preamble_prints_help(installation: Path) -> None:
    assert "usage" in call(installation / "env/bin/preamble", "--help", cwd=installation)


def test_an_installed_preamble_tunes_and_generates(installation: Path) -> None:
    preamble, model = installation / "env/bin/preamble", write_checkpoint(installation / "model")
    (installation / "adapters").mkdir()
    (installation / "examples.jsonl").write_text('{"prompt": "one", "completion": " two"}\n' * 4)
    (installation / "tune.yaml").write_text(
        f"{{model: {model}, data: examples.jsonl, name: echo, steps: 2, batch_examples: 2}}"
    )
    call(preamble, "tune", "tune.yaml", cwd=installation)
    words: list[str | Path] = [
        "--model",
        model,
        "--adapters",
        "adapters",
        "--task",
        "echo",
        "--field",
        "prompt=one",
    ]
    call(preamble, "generate", "--max-new-tokens", "2", *words, cwd=installation)


def test_an_installed_preamble_serves(installation: Path) -> None:
    model = write_checkpoint(installation / "served")
    ports = ["--port", "0", "--http-port", "0"]
    process = subprocess.Popen(
        [installation / "env/bin/preamble", "serve", model, *ports],
        cwd=installation,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        try:
            assert output.readline().startswith("ready ")
        finally:
            process.terminate()
            assert process.wait(timeout=300) == 0


def test_the_bill_of_materials_has_the_required_libraries(wheel: Path) -> None:
    pytest.importorskip("cyclonedx")
    from tests.support.bill_of_materials import bill_of_materials

    bom = json.loads(bill_of_materials(wheel))
    components = {component["name"].lower(): component for component in bom["components"]}
    assert bom["metadata"]["component"]["name"] == "preamble"
    # Direct requirements, a requirement of an extra, and a requirement of a requirement.
    for name in ("torch", "grpcio", "protobuf", "llguidance", "multidict"):
        assert components[name]["version"] == version(name)
        assert components[name]["purl"].startswith(f"pkg:pypi/{name}@")
    assert not {"pytest", "mypy", "transformers"} & components.keys()
    edges = {edge["ref"]: edge.get("dependsOn", []) for edge in bom["dependencies"]}
    assert components["multidict"]["bom-ref"] in edges[components["aiohttp"]["bom-ref"]]


def test_an_installed_preamble_prints_its_versions(installation: Path) -> None:
    line = call(installation / "env/bin/preamble", "--version", cwd=installation)
    assert line.startswith(f"preamble {current_version()} (preamble.v1, Python ")
    # The wheel was built from a copy without a git history.
    lines = call(installation / "env/bin/preamble", "--version", "-v", cwd=installation)
    assert "commit: unknown" in lines.splitlines()


def test_installation_does_not_replace_the_installed_torch(installation: Path) -> None:
    program = (
        "import importlib.metadata as m, preamble; print(m.version('torch'), preamble.__file__)"
    )
    version, file = call(installation / "env/bin/python", "-c", program, cwd=installation).split()
    assert version == OLDEST_TORCH
    assert Path(file).is_relative_to(installation / "env")
