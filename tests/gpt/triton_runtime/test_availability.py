"""Triton availability: without a compiler, a cache or a working driver, `auto` selects torch.

The failures are those of Triton's own code. The tests need no GPU: host memory takes the place of
the device's memory, and Triton's CUDA driver is told that there is a GPU.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.attention.selector import select_backend
from gpt.errors import ConfigError
from gpt.linear.selector import apply_backend
from gpt.triton_runtime.availability import triton_unavailable_reason
from tests.support.models import CLASSIC, build
from tests.support.triton_compiled import recorded_launches

pytest.importorskip("triton", reason="Triton is not installed: make tools")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from gpt.triton_runtime import probe_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROBE = probe_kernel.write_flag


class RefusingDriver:
    """A driver of a device on which Triton can compile kernels, but cannot launch them."""

    def __init__(self) -> None:
        self.get_current_device = self.get_current_stream = lambda *_: 0
        self.get_current_target = partial(GPUTarget, "cuda", 90, 32)
        self.utils = SimpleNamespace(get_device_properties=self.refuse)
        self.launcher_cls = self.refuse

    @staticmethod
    def refuse(*_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: no kernel image is available")


@pytest.fixture(autouse=True)
def new_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let Triton create its CUDA driver in the test, as on a machine with a GPU."""
    monkeypatch.setattr(CudaDriver, "is_active", staticmethod(lambda: True))
    for name in ("_default", "_active"):
        monkeypatch.setattr(driver, name, None)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    triton_unavailable_reason.cache_clear()
    yield
    PROBE.device_caches.clear()  # They contain properties of the driver.
    triton_unavailable_reason.cache_clear()


def remove_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def remove_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only the default cache, in a home folder that cannot be written."""
    monkeypatch.delenv("TRITON_CACHE_DIR")
    # Triton reads HOME once, when it is imported, and TRITON_HOME each time.
    monkeypatch.setenv("TRITON_HOME", "/dev/null")


def refuse_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", RefusingDriver())


@pytest.mark.parametrize(
    ("break_triton", "reason"),
    [
        (remove_compiler, "(RuntimeError: Failed to find C compiler."),
        (remove_cache, "(NotADirectoryError: "),
        (refuse_launches, "(RuntimeError: Triton Error [CUDA]: no kernel image is available)"),
    ],
)
def test_auto_selects_torch_where_no_kernel_can_be_launched_and_logs_the_reason(
    break_triton: Callable[[pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    config = CLASSIC.with_fields(dtype="bfloat16")
    break_triton(monkeypatch)
    allocate = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, dtype: allocate(*size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with caplog.at_level(logging.INFO):
        assert select_backend("auto", config, CUDA).name == "torch"
        apply_backend(model, "auto")
    attention, linears = caplog.messages
    for line in (attention, linears):
        assert " backend=torch " in line
        assert f"no Triton kernel can be launched {reason}" in line
    with pytest.raises(ConfigError, match="'triton' is unavailable: no Triton kernel can be"):
        select_backend("triton", config, CUDA)


@pytest.mark.parametrize(("stored", "reason"), [(1, None), (0, "stored 0 instead of 1")])
def test_the_stored_element_decides(
    stored: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[[Tensor], Any]:
            return lambda element: element.fill_(stored)

    monkeypatch.setattr(probe_kernel, "write_flag", Kernel())
    reported = triton_unavailable_reason(CPU)
    assert reported == reason or (reason is not None and reason in str(reported))


def test_the_kernel_compiles_for_a_gpu() -> None:
    with recorded_launches() as launches:
        PROBE[1,](torch.zeros(1, dtype=torch.int32))
    (launch,) = launches.values()
    assert launch.compile().shared_bytes == 0
