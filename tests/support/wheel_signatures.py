"""Signatures of third-party wheels: the functions that Preamble calls, recorded as JSON.

The GPU packages are not installed where the tests run, so the tests call stand-ins. This module
reads the signatures of the real functions from the source in the wheels, without importing it, and
records them in tests/golden/wheel_signatures.json, for the lowest supported version and for the
newest one on PyPI. The tests bind Preamble's calls to the recorded signatures.

`python -m tests.support.wheel_signatures` downloads the wheels and compares them with the record;
with `--write` it writes the record.
"""

import argparse
import ast
import inspect
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "golden" / "wheel_signatures.json"
DOWNLOAD_TIMEOUT_S = 600


@dataclass(frozen=True)
class WheelPackage:
    """A package on PyPI, and the names of which the signatures are recorded."""

    name: str
    lowest_version: str  # The lower bound in pyproject.toml.
    files: tuple[str, ...]  # The files in the wheel that define the names.
    # Functions, methods (Class.method), and classes, of which the constructor is recorded.
    functions: tuple[str, ...]
    # Functions of which the record says whether they read torch.is_grad_enabled().
    gradient_rules: tuple[str, ...] = ()


_WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
PACKAGES = (
    WheelPackage(
        "flashinfer-python",
        "0.6.0",
        ("flashinfer/decode.py", "flashinfer/prefill.py"),
        tuple(f"{name}.{method}" for name in _WRAPPERS for method in ("__init__", "plan", "run")),
    ),
    WheelPackage(
        "transformer-engine",
        "2.9.0",
        (
            "transformer_engine/pytorch/module/base.py",
            "transformer_engine/pytorch/module/linear.py",
            "transformer_engine/pytorch/module/layernorm_linear.py",
            "transformer_engine/pytorch/quantization.py",
            "transformer_engine/common/recipe/__init__.py",
        ),
        (
            *(
                f"{name}.{method}"
                for name in ("Linear", "LayerNormLinear")
                for method in ("__init__", "forward")
            ),
            "autocast",
            "quantized_model_init",
            "is_fp8_available",
            "is_fp8_block_scaling_available",
            "is_mxfp8_available",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
        ),
        (
            "FP8GlobalStateManager.autocast_exit",
            "TransformerEngineBaseModule.reset_parameters",
        ),
    ),
)
# Methods that pass all arguments to another method, if the wheel has it: its signature is recorded.
IMPLEMENTATIONS = {f"{name}.plan": f"{name}._plan_impl" for name in _WRAPPERS}
TORCH_OPERATORS = (
    "one_shot_all_reduce_copy",
    "one_shot_all_reduce",
    "two_shot_all_reduce_out",
    "two_shot_all_reduce_",
    "multimem_all_reduce_",
)


# ------------------------------------------------------------------------------- reading the record


@cache
def read_record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def recorded_schemas() -> dict[str, str]:
    """Return the recorded schemas of torch's symmetric-memory operators."""
    schemas: dict[str, str] = read_record()["torch.ops.symm_mem"]
    return schemas


def recorded_signatures(package: str, function: str) -> dict[str, inspect.Signature]:
    """Return the signatures of a function by version."""
    return {
        version["version"]: parse_signature(version["functions"][function])
        for version in read_record()[package].values()
    }


def bind_call(package: str, function: str, *args: object, **kwargs: object) -> dict[str, Any]:
    """Bind a call to the recorded signature of each version; return the arguments by name.

    Raise TypeError if a version does not accept the call. Each argument must have the same name in
    all versions.
    """
    bound_calls = [
        signature.bind(*args, **kwargs).arguments
        for signature in recorded_signatures(package, function).values()
    ]
    names_of_ids = [{name: id(value) for name, value in call.items()} for call in bound_calls]
    assert all(names == names_of_ids[0] for names in names_of_ids), bound_calls
    return dict(bound_calls[0])


def stub_difference(stub: Callable[..., Any], signature: inspect.Signature) -> str | None:
    """Return why the stub accepts a call that `signature` rejects; None if it accepts none.

    The stub may have fewer parameters. If it has positional parameters, they are the first ones.
    """
    real, accepted = signature.parameters, inspect.signature(stub).parameters
    positional = [name for name, p in accepted.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if positional != list(real)[: len(positional)]:
        return f"the positional parameters are {positional}, those of the wheel are {list(real)}"
    for name, parameter in accepted.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return f"{parameter} accepts every argument"
        if name not in real:
            return f"the wheel has no parameter {name}"
        if parameter.default is parameter.empty and real[name].default is not parameter.empty:
            return f"{name} has a default in the wheel"
        if parameter.default is not parameter.empty and real[name].default is parameter.empty:
            return f"{name} has no default in the wheel"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in real.items():
        is_required = parameter.default is parameter.empty and parameter.kind not in variadic
        if is_required and name not in accepted:
            return f"the wheel requires {name}"
    return None


def parse_signature(text: str) -> inspect.Signature:
    """Return the signature that a record describes; each default is `...`."""
    function = ast.parse(f"def function{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments, kinds = function.args, inspect.Parameter
    first = [*arguments.posonlyargs, *arguments.args]
    required = len(first) - len(arguments.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY
            if index < len(arguments.posonlyargs)
            else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if index < required else ...,
        )
        for index, argument in enumerate(first)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        empty_or_default = kinds.empty if default is None else ...
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=empty_or_default))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


# ------------------------------------------------------------------------------- writing the record


def record_package(package: WheelPackage) -> dict[str, Any]:
    """Download the lowest and the newest version of a package; return their records."""
    return {
        "lowest": _record_requirement(package, f"{package.name}=={package.lowest_version}"),
        "newest": _record_requirement(package, package.name),
    }


def record_wheel(package: WheelPackage, wheel: Path) -> dict[str, Any]:
    """Return the version, the signatures and the rules of a wheel."""
    definitions = dict(_definitions(package, wheel))
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation in definitions:
            definitions[name] = definitions[implementation]
    return {
        "version": wheel.name.split("-")[1],
        "functions": {name: _signature_text(definitions[name]) for name in package.functions},
        "reads_is_grad_enabled": {
            name: "torch.is_grad_enabled()" in ast.unparse(definitions[name])
            for name in package.gradient_rules
        },
    }


def torch_operator_schemas() -> dict[str, str]:
    """Return the schemas of torch's symmetric-memory operators."""
    import torch

    return {
        name: str(getattr(torch.ops.symm_mem, name).default._schema) for name in TORCH_OPERATORS
    }


def changed_signatures(record: dict[str, Any]) -> list[str]:
    """Compare with the record in the repository; return a line for each difference.

    The version number of the newest wheel is no difference.
    """
    recorded = read_record()
    differences = []
    for package in PACKAGES:
        for which, wheel in record[package.name].items():
            for section in ("functions", "reads_is_grad_enabled"):
                for name, actual in wheel[section].items():
                    expected = recorded[package.name][which][section].get(name)
                    if actual != expected:
                        version = f"{package.name} {wheel['version']}"
                        differences.append(f"{version}: {name} is {actual}, recorded: {expected}")
    return differences


def _record_requirement(package: WheelPackage, requirement: str) -> dict[str, Any]:
    """Download a wheel, and return its record."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        _download(requirement, folder)
        (wheel,) = Path(folder).glob("*.whl")
        return record_wheel(package, wheel)


def _download(requirement: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--only-binary", ":all:", "-d", folder, requirement]
    subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S)


def _definitions(package: WheelPackage, wheel: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions, classes and methods in the package's files, by their names.

    Of overloaded methods, the last definition is the implementation.
    """
    with zipfile.ZipFile(wheel) as archive:
        sources = [archive.read(name).decode() for name in package.files]
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name, node
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        yield f"{node.name}.{method.name}", method


def _signature_text(node: ast.AST) -> str:
    """Return the parameters of a function or of a class, with `...` as each default.

    Those of a class are the ones of its constructor, without `self`, or the fields of a dataclass.
    """
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                return _signature_text(method).replace("self, ", "")
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        names = [ast.unparse(field.target) + "=..." * bool(field.value) for field in fields]
        return f"({', '.join(names)})"
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [
        None if default is None else ast.Constant(...) for default in arguments.kw_defaults
    ]
    return f"({ast.unparse(arguments)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {package.name: record_package(package) for package in PACKAGES}
    record["torch.ops.symm_mem"] = torch_operator_schemas()
    if arguments.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        return 0
    differences = changed_signatures(record)
    print("\n".join(differences) or "the record equals the wheels")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
