"""Our launches of Triton kernels against Triton's own: the same kernels and the same arguments."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.triton_compiled import ROOT, VERSIONS, recorded_launches

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools")

MEMORY = torch.zeros(256)
# A tensor whose address is a multiple of 16, and one whose address is not.
ALIGNED, UNALIGNED = MEMORY[4:], MEMORY[1:]
WIDE = 1 << 40
# Arguments of `store_sum`, and its constants. For some of them Triton compiles other code.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
CONSTANTS = {"SCALE": 2, "BLOCK": 32, "num_warps": 1}
CASES: dict[str, Arguments] = {
    "plain": ((ALIGNED, ALIGNED, 20, 3, 0.5, None), CONSTANTS),
    "unaligned": ((UNALIGNED, ALIGNED, 20, 3, 0.5, None), CONSTANTS),
    "dtype": ((ALIGNED, ALIGNED.to(torch.float64), 20, 3, 0.5, None), CONSTANTS),
    "size 1": ((ALIGNED, ALIGNED, 1, 3, 0.5, None), CONSTANTS),
    "size 16": ((ALIGNED, ALIGNED, 16, 3, 0.5, None), CONSTANTS),
    "wide offset": ((ALIGNED, ALIGNED, 20, WIDE, 0.5, None), CONSTANTS),
    "tensor for None": ((ALIGNED, ALIGNED, 20, 3, 0.5, ALIGNED), CONSTANTS),
    "constant": ((ALIGNED, ALIGNED, 20, 3, 0.5, None), CONSTANTS | {"SCALE": 3}),
    "option": ((ALIGNED, ALIGNED, 20, 3, 0.5, None), CONSTANTS | {"num_warps": 2}),
}


def kernel() -> Any:
    from tests.support.launched_kernel import store_sum

    return store_sum


@pytest.fixture
def traced() -> Iterator[list[Any]]:
    """The launches that reach Triton's driver."""
    from tests.support.traced_launches import traced_launches

    with traced_launches() as launches:
        yield launches
    kernel().device_caches.clear()


def test_a_later_launch_equals_triton_s_launch(traced: list[Any]) -> None:
    from gpt.triton_runtime import launcher

    assert launcher.IS_VERSION_SUPPORTED
    for arguments, constants in CASES.values():
        launcher.launch(kernel(), (3, 2), *arguments, **constants)
    assert len({launch.function for launch in traced}) == len(CASES)
    for arguments, constants in reversed(CASES.values()):
        traced.clear()
        kernel()[3, 2](*arguments, **constants)
        launcher.launch(kernel(), (3, 2), *arguments, **constants)
        triton_launch, our_launch = traced
        assert our_launch == triton_launch
        assert our_launch.grid == (3, 2, 1) and our_launch.stream == 77
        assert our_launch.arguments[:2] == (arguments[0].data_ptr(), arguments[1].data_ptr())


def test_triton_launches_a_kernel_once(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt.triton_runtime import launcher

    arguments, constants = CASES["plain"]
    launcher.launch(kernel(), (1,), *arguments, **constants)
    monkeypatch.setattr(type(kernel()), "run", None)  # Triton's launch would raise an error.
    launcher.launch(kernel(), (1,), *arguments, **constants)
    assert len(traced) == 2


def test_triton_makes_every_launch_in_an_unknown_version(
    traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt.triton_runtime import launcher

    monkeypatch.setattr(launcher, "IS_VERSION_SUPPORTED", False)
    arguments, constants = CASES["plain"]
    for _ in range(3):
        launcher.launch(kernel(), (1,), *arguments, **constants)
    assert len(traced) == 3
    assert launcher._compiled_kernels == {}


def test_the_hooks_of_a_profiler_see_every_launch(traced: list[Any]) -> None:
    from triton import knobs

    from gpt.triton_runtime import launcher

    arguments, constants = CASES["plain"]
    names: list[str] = []

    def enter(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    launcher.launch(kernel(), (1,), *arguments, **constants)
    knobs.runtime.launch_enter_hook.add(enter)
    try:
        launcher.launch(kernel(), (1,), *arguments, **constants)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    launcher.launch(kernel(), (1,), *arguments, **constants)
    assert names == ["store_sum"] and len(traced) == 3


def test_launches_with_equal_keys_have_equal_keys_in_triton() -> None:
    from gpt.triton_runtime import launcher

    tensors = (ALIGNED, UNALIGNED, ALIGNED[:0], ALIGNED.to(torch.bfloat16))
    integers = (0, 1, -1, 15, 16, -16, 2**31 - 1, 2**31, -(2**31), WIDE, WIDE + 1, 2**63)
    triton_keys: dict[object, set[str]] = {}
    with recorded_launches() as launches:
        for x, size, offset, unused in product(tensors, integers, integers[::3], (None, 0.5, 7)):
            arguments = (x, ALIGNED, size, offset, 0.5, unused)
            launches.clear()
            launcher.launch(kernel(), (1,), *arguments, **CONSTANTS)
            key = tuple(launcher._key_and_values(arguments)[0])
            triton_keys.setdefault(key, set()).update(launches)
    assert len(triton_keys) > 100
    assert all(len(keys) == 1 for keys in triton_keys.values())


def test_a_bool_is_refused() -> None:
    from gpt.triton_runtime import launcher

    with pytest.raises(AssertionError):
        launcher._key_and_values((ALIGNED, True))


@pytest.mark.slow
def test_the_tests_pass_in_the_newer_version_of_triton() -> None:
    version, folder = list(VERSIONS.items())[-1]
    if not (folder / "triton").is_dir():
        pytest.skip(f"Triton {version} is not installed: make tools")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout and "skipped" not in process.stdout


@pytest.mark.slow
def test_the_interpreter_runs_the_kernel() -> None:
    script = (
        "import torch\n"
        "from gpt.triton_runtime import launcher\n"
        "from tests.support.attention_cases import patch_interpreter\n"
        "from tests.support.launched_kernel import store_sum\n"
        "patch_interpreter()\n"
        "x, out = torch.arange(8.0), torch.zeros(4)\n"
        "launcher.launch(store_sum, (1,), x, out, 4, 3, 0.5, None, SCALE=2, BLOCK=4, num_warps=1)\n"
        "assert out.tolist() == [6.5, 8.5, 10.5, 12.5], out\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)
