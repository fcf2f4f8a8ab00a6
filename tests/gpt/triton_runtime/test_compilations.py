"""Observation of Triton's compilations: one real compilation is reported once, with its seconds."""

import gc
import weakref
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gpt.triton_runtime.compilations import observe_compilations

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools")


def test_a_compilation_is_reported_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton import knobs

    from gpt.attention import triton_kernels
    from tests.support.triton_compiled import fake_gpu

    reports: list[tuple[str, float | None]] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    caplog.set_level("INFO")
    x, blocks = torch.zeros(4, 2, 16), torch.zeros(4, dtype=torch.long)
    tensors, strides = (x, x, x, blocks, blocks, None), (32, 16, 32, 16)
    with fake_gpu(), knobs.runtime.scope():
        observe_compilations(lambda kernel, seconds: reports.append((kernel, seconds)))
        for block_tokens in (16, 16, 32):
            triton_kernels.append_kv.warmup(
                *tensors,
                *strides,
                GROUPS=2,
                D=16,
                WIDTH=16,
                BLOCK=block_tokens,
                DTYPE_MAX=0,
                SCALED=False,
                num_warps=1,
                grid=(4, 2),
            )
    assert [kernel for kernel, _ in reports] == ["append_kv"] * 4
    seconds = [seconds for _, seconds in reports]
    assert seconds[::2] == [None, None]
    assert all(value is not None and value > 0 for value in seconds[1::2])
    assert caplog.text.count("event=kernel_compiled kernel=append_kv seconds=") == 2


def test_the_object_of_an_observing_method_is_not_kept() -> None:
    from triton import knobs

    class Engine:
        def __init__(self) -> None:
            self.kernels: list[str] = []

        def record(self, kernel: str, seconds: float | None) -> None:
            self.kernels.append(kernel)

    class Kernel:
        name = "gpt.attention.append_kv"

    engine = Engine()
    with knobs.runtime.scope():
        observe_compilations(engine.record)
        hook = knobs.runtime.jit_cache_hook
        assert hook is not None
        hook(key="a", fn=Kernel)
        assert engine.kernels == ["append_kv"]
        deleted = weakref.ref(engine)
        del engine
        gc.collect()
        assert deleted() is None
        hook(key="b", fn=Kernel)
