"""GPU tests and the GPU proof in an environment that has torch and pytest, but few other packages.

Import hooks hide the packages, so that no second environment is needed.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpt.child_processes import child_environment

ROOT = Path(__file__).resolve().parents[2]
# Packages of ours that images with torch and Triton usually lack.
MISSING = ("msgspec", "rich", "grpc_health", "grpc_reflection")
# The same image with the wheels that `make gpu-proof` installs; the protos are not compiled there.
MISSING_BESIDE_WHEELS = ("rich", "grpc_health", "grpc_reflection", "grpc_tools", "grpc")
HOOK = """
import importlib.abc
import sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def run_without(
    packages: Sequence[str], command: Sequence[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments `command`, in which `packages` cannot be imported."""
    (folder / "sitecustomize.py").write_text(HOOK.format(names=tuple(packages)))
    environment = child_environment(os.environ | {"PYTHONPATH": str(folder)})
    environment.pop("PYTHONSAFEPATH")
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_gpu_tests_are_collected_without_our_packages(tmp_path: Path) -> None:
    command = ["-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    collection = run_without(MISSING, command, tmp_path)
    assert collection.returncode == 0, collection.stdout[-2000:]
    collected = re.search(r"^(\d+)(?:/\d+)? tests collected", collection.stdout, re.MULTILINE)
    assert collected and int(collected[1]) >= 200, collection.stdout[-2000:]
    assert "error" not in collected.string.splitlines()[-1]


@pytest.mark.parametrize("package", MISSING)
def test_the_hook_hides_the_package(package: str, tmp_path: Path) -> None:
    assert (
        "ModuleNotFoundError"
        in run_without([package], ["-c", f"import {package}"], tmp_path).stderr
    )


def test_the_gpu_proof_runs_without_grpc_and_compiled_protos(tmp_path: Path) -> None:
    modules = sorted(path.stem for path in (ROOT / "bench" / "gpu_proof").glob("*.py"))
    imports = "; ".join(f"import bench.gpu_proof.{module}" for module in modules)
    process = run_without(MISSING_BESIDE_WHEELS, ["-c", imports], tmp_path)
    assert process.returncode == 0, process.stderr[-2000:]
