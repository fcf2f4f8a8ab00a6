"""The wheel, as a user gets it: built, installed in another directory, and started there.

The other environment has every package of this one but ours, by links, so nothing is downloaded;
its torch says that it is the oldest we accept, and must still be there afterwards.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.servers import write_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
OLD_TORCH = "2.11.0+own"


def call(*command: str | Path, cwd: Path) -> str:
    # pip must not be told where to find another torch; Python not where the checkout is.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def built(home: Path, **environment: str) -> Path:
    """The wheel, from a copy without what was built: a build leaves folders behind."""
    copy, made = home / "preamble", ("build", "dist", "*_pb2*", "*.so", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", *made))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", "."]
    subprocess.run(command, cwd=copy, check=True, env=os.environ | environment)
    return next(copy.glob("dist/preamble-*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in another directory with the wheel in it."""
    home = tmp_path_factory.mktemp("elsewhere")
    call(sys.executable, "-m", "venv", "--without-pip", "env", cwd=home)
    borrowed = home / "borrowed"
    borrowed.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "preamble" not in package.name and not package.name.startswith("torch-"):
            (borrowed / package.name).symlink_to(package)
        elif package.name.startswith("torch-"):
            info = borrowed / f"torch-{OLD_TORCH}.dist-info"
            shutil.copytree(package, info)
            text = (info / "METADATA").read_text()
            text = re.sub(r"^Version: .*", f"Version: {OLD_TORCH}", text, count=1, flags=re.M)
            (info / "METADATA").write_text(text)
    own = next(home.glob("env/lib/python*/site-packages"))
    (own / "borrowed.pth").write_text(str(borrowed))
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "env" / "bin" / "python",
    ]
    call(*pip, "install", "-q", "--no-index", wheel, cwd=home)
    return home


def test_the_wheel_holds_our_folders_and_nothing_else(wheel: Path) -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"preamble.py", *(package.split(".")[0] for package in listed)}


def test_the_wheel_holds_the_stubs_and_their_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for proto in (ROOT / "protos/preamble/v1").glob("*.proto"):
        stubs = {f"protos/preamble/v1/{proto.stem}_pb2{end}" for end in (".py", ".pyi", "_grpc.py")}
        assert stubs <= names


def test_the_wheel_holds_the_page(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    page = "serving/protocols/preamble/page"
    files = {f"{page}/{file.name}" for file in (ROOT / page).iterdir()}
    assert len(files) == 4 and files <= names


def test_a_wheel_with_the_library_is_for_one_kind_of_machine(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert "gpt/cpu/libkernels.so" in zipfile.ZipFile(wheel).namelist()


def test_without_a_compiler_there_is_a_wheel_for_any_machine(tmp_path: Path) -> None:
    wheel = built(tmp_path, CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "false failed")]
)
def test_that_the_library_was_not_built_is_said_in_one_line_and_no_old_one_stays(
    tmp_path: Path, compiler: str, reason: str
) -> None:
    (tmp_path / "libkernels.so").touch()
    done = subprocess.run(
        [sys.executable, ROOT / "gpt/cpu/build.py", tmp_path],
        env=os.environ | {"CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and reason in line and "slower" in line
    assert not list(tmp_path.iterdir())


def test_an_installed_preamble_uses_the_library(elsewhere: Path) -> None:
    program = "from gpt.cpu import kernels; print(kernels.library() is not None, kernels.LIBRARY)"
    loaded, file = call(elsewhere / "env/bin/python", "-c", program, cwd=elsewhere).split()
    assert loaded == "True"
    assert Path(file).is_relative_to(elsewhere / "env")


def test_the_command_helps_in_another_directory(elsewhere: Path) -> None:
    assert "usage" in call(elsewhere / "env/bin/preamble", "--help", cwd=elsewhere)


def test_an_installed_preamble_tunes_and_generates(elsewhere: Path) -> None:
    preamble, model = elsewhere / "env/bin/preamble", write_checkpoint(elsewhere / "model")
    (elsewhere / "adapters").mkdir()
    (elsewhere / "examples.jsonl").write_text('{"prompt": "one", "completion": " two"}\n' * 4)
    (elsewhere / "tune.yaml").write_text(
        f"{{model: {model}, data: examples.jsonl, name: echo, steps: 2, batch_examples: 2}}"
    )
    call(preamble, "tune", "tune.yaml", cwd=elsewhere)
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
    call(preamble, "generate", "--max-new-tokens", "2", *words, cwd=elsewhere)


def test_an_installed_preamble_serves(elsewhere: Path) -> None:
    model = write_checkpoint(elsewhere / "served")
    ports = ["--port", "0", "--http-port", "0"]
    process = subprocess.Popen(
        [elsewhere / "env/bin/preamble", "serve", model, *ports],
        cwd=elsewhere,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        try:
            assert said.readline().startswith("ready ")
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def test_the_environments_own_torch_is_kept(elsewhere: Path) -> None:
    program = (
        "import importlib.metadata as m, preamble; print(m.version('torch'), preamble.__file__)"
    )
    version, file = call(elsewhere / "env/bin/python", "-c", program, cwd=elsewhere).split()
    assert version == OLD_TORCH
    assert Path(file).is_relative_to(elsewhere / "env")
