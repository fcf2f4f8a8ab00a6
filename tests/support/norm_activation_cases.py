"""The kernels between products say what their twins in torch say: for Triton's interpreter.

It is run by tests/gpt/backends/test_triton_norm_activation.py, in a process of its own. The
interpreter's casts to e4m3 do not round as a GPU's do, so narrow numbers are looked at before they
are cast; the cast itself is for tests on a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.backends import norm_activation, triton_norm_activation
from gpt.backends.norm_activation import MULTIPLE, NARROW_MAX, Narrow, Norm
from gpt.cpu.packed_linear import ACTIVATIONS, GATED
from tests.support.attention_cases import mend_interpreter

mend_interpreter()

NAMES = [name for name in ACTIVATIONS if name is not None]
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 16, 30, 100]


def near(got: Tensor, want: Tensor) -> bool:
    """As near as digits allow; the interpreter's casts to bf16 cut them off, twice in a norm."""
    digits = 2**-6 if got.dtype == torch.bfloat16 else 1e-5
    return got.dtype == want.dtype and torch.allclose(
        got.double(), want.double(), rtol=digits, atol=digits
    )


def room(x: Tensor, width: int) -> Narrow:
    """For narrow numbers before they are cast."""
    made = triton_norm_activation._room(x, width, narrow=True, dtype=torch.float32)
    assert isinstance(made, Narrow)
    return made


def same(got: Narrow, wide: Tensor) -> bool:
    """Numbers and scales against rows as they were before they were narrowed."""
    want = norm_activation.in_e4m3(wide)
    numbers = wide * (
        NARROW_MAX / wide.abs().amax(-1, keepdim=True).clamp_min(norm_activation.LEAST)
    )
    width = wide.shape[1]
    return (
        got.numbers.shape == want.numbers.shape
        and torch.allclose(got.scales, want.scales, rtol=1e-5)
        and torch.allclose(got.numbers[:, :width], numbers, rtol=1e-4, atol=1e-3)
        and not got.numbers[:, width:].any()
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def a_norm(width: int, *, rms: bool) -> Norm:
    shift = None if rms else torch.randn(width)
    return Norm(torch.rand(width) + 0.5, shift, 1e-5, rms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rms", [False, True])
def test_sums_and_norms(width: int, rms: bool, dtype: torch.dtype) -> None:
    x, y = (torch.randn(3, width).to(dtype) for _ in range(2))
    norm = a_norm(width, rms=rms)
    for bias in (None, torch.randn(width).to(dtype)):
        for asked in (None, norm):
            got, rows = triton_norm_activation.added(y, bias, x, asked, narrow=False)
            want, twin = norm_activation.added(y, bias, x, asked)
            assert torch.equal(got, want) or near(got, want)
            assert (rows is None) == (asked is None)
            if isinstance(rows, Tensor) and isinstance(twin, Tensor):
                assert near(rows, twin)
    made, plain = (
        triton_norm_activation.normed(x, norm, narrow=False),
        norm_activation.normed(x, norm),
    )
    assert isinstance(made, Tensor) and isinstance(plain, Tensor) and near(made, plain)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rms", [False, True])
def test_norms_in_e4m3(width: int, rms: bool) -> None:
    x, norm = torch.randn(3, width), a_norm(width, rms=rms)
    made = room(x, width)
    triton_norm_activation._end(x, norm, made, None)
    wide = norm_activation.normed(x, norm)
    assert isinstance(wide, Tensor) and same(made, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*NAMES, *(f"{GATED}{name}" for name in NAMES)])
def test_activations(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of several pieces, the last one not full.
    monkeypatch.setattr(triton_norm_activation, "PIECE", 16)
    monkeypatch.setattr(triton_norm_activation, "PIECE_ALONE", 16)
    x = 3 * torch.randn(3, 76).to(dtype)
    assert near(triton_norm_activation.activated(x, name), norm_activation.activated(x, name))
    wide = norm_activation.activated(x.float(), name)
    made = room(x, wide.shape[1])
    triton_norm_activation._activate(x, name, made)
    assert same(made, wide)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_in_e4m3_as_they_are(width: int) -> None:
    x = torch.randn(4, width)
    x[2] = 0
    made = room(x, width)
    triton_norm_activation._activate(x, None, made)
    assert same(made, x)
    assert made.numbers.shape[1] % MULTIPLE == 0
    assert not made.numbers[2].any()


@pytest.mark.parametrize("name", [None, *NAMES, f"{GATED}silu"])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(name: str | None) -> None:
    x = torch.randn(3, 32)
    x[1, 5] = float("nan")
    made = room(x, 32 // (1 + (name or "").startswith(GATED)))
    triton_norm_activation._activate(x, name, made)
    whole: Any = (made.numbers * made.scales).isfinite().all(-1)
    assert whole.tolist() == [True, False, True]
    if name is not None:
        assert triton_norm_activation.activated(x, name).isfinite().all(-1).tolist() == [
            True,
            False,
            True,
        ]
    norm = a_norm(32, rms=True)
    rows = triton_norm_activation.normed(x, norm, narrow=False)
    assert isinstance(rows, Tensor)
    assert rows.isfinite().all(-1).tolist() == [True, False, True]
