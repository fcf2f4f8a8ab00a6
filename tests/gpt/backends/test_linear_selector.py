"""Which products a model has is decided by what is there, or refused by what is not."""

import logging
from collections.abc import Iterator

import pytest
import torch

from gpt.backends import fp8_linear, fused_linear, linear_selector, norm_activation, te_linear
from gpt.backends.fp8_linear import Fp8
from gpt.backends.linear_selector import check, narrow_layers, place
from gpt.backends.quantization_check import DIVERGENCE_MAX
from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.model.layers import Linear
from serving.config import LINEARS, TE_RECIPES, ServerConfig
from tests.support import te_stub
from tests.support.models import CLASSIC, MODERN, build

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = torch.arange(2, 26).view(2, 12)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found is remembered for the life of a process."""
    te_linear.find.cache_clear()
    yield
    te_linear.find.cache_clear()


def line(caplog: pytest.LogCaptureFixture) -> str:
    (message,) = [r.getMessage() for r in caplog.records if r.name == linear_selector.__name__]
    return message


def test_settings_name_what_there_is() -> None:
    assert LINEARS == linear_selector.BACKENDS
    assert TE_RECIPES == linear_selector.RECIPES
    for name in ("linear_backend", "te_recipe"):
        with pytest.raises(ConfigError, match=f"{name} is 'fp7'; known are: {TE_RECIPES[0]}|auto"):
            ServerConfig("model", **{name: "fp7"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "recipe", "message"),
    [
        ("fp8", "none", r"'fp8'.*its device is cpu.*weights: int8"),
        ("te", "none", r"'te'.*its device is cpu; install preamble\[te\]"),
        ("te", "block", r"'te'.*its device is cpu; install preamble\[te\]"),
        ("auto", "block", r"te_recipe is 'block'.*linear_backend is 'auto'"),
        ("fp8", "current", r"'fp8'.*its device is cpu"),
    ],
)
def test_what_a_cpu_has_not_is_refused_before_anything_is_loaded(
    backend: str, recipe: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(backend, recipe, CPU, torch.bfloat16)


def test_fp8_is_refused_of_other_dtypes_before_anything_is_loaded() -> None:
    message = r"its dtype is torch.float32.*leave it out, or say dtype: bfloat16"
    with pytest.raises(ConfigError, match=message):
        check("fp8", "none", CUDA, torch.float32)


def test_transformer_engine_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: .*; install preamble\[te\]"):
        check("te", "none", CUDA, torch.bfloat16)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_is_left_open_is_always_there(backend: str) -> None:
    check(backend, "none", CPU, torch.float32)
    check(backend, "none", CUDA, torch.float32)


def test_fused_products_are_taken_where_there_are_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    want = model.logits(IDS)
    monkeypatch.setattr(norm_activation, "kernels_missing", lambda: None)
    with caplog.at_level(logging.INFO):
        assert place(model, "auto") == (0, None)
    assert line(caplog).startswith("event=linears backend=fused reason=")
    assert products(model) == {fused_linear.Wide}
    assert torch.allclose(model.logits(IDS), want, rtol=1e-4, atol=1e-4)


def products(model: GPT) -> set[type]:
    return {type(module.product) for module in model.modules() if isinstance(module, Linear)}


@pytest.mark.parametrize(
    ("backend", "dtype", "missing", "reason"),
    [
        ("torch", torch.float32, None, "linear_backend is torch"),
        ("auto", torch.float32, "ImportError: none", "ImportError: none"),
        ("auto", torch.float64, None, "its dtype is torch.float64"),
    ],
)
def test_without_them_products_stay_as_they_are_and_it_is_said_why(
    backend: str,
    dtype: torch.dtype,
    missing: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build(CLASSIC, dtype=dtype)
    monkeypatch.setattr(norm_activation, "kernels_missing", lambda: missing)
    with caplog.at_level(logging.INFO):
        assert place(model, backend) == (0, None)
    assert line(caplog) == f"event=linears backend=torch reason={reason!r}"
    assert products(model) == {type(None)}


def test_the_first_and_the_last_layer_stay_wide_on_whatever_stage() -> None:
    from gpt.model.loading import load_model
    from tests.support.models import lively

    def stage(layers: range, hidden_min: int = 0) -> list[int]:
        model = load_model(lively(CLASSIC), build(CLASSIC).mesh, layers=layers)
        return list(narrow_layers(model, hidden_min))

    assert stage(range(5)) == [1, 2, 3]
    assert stage(range(2)) == [1]
    assert stage(range(2, 4)) == [2, 3]
    assert stage(range(4, 5)) == []
    assert stage(range(5), hidden_min=33) == []


def as_if_it_could(patch: pytest.MonkeyPatch) -> None:
    """fp8 in plain torch, which a server on a CPU is not offered."""
    patch.setattr(fp8_linear, "unfit", lambda device, dtype: None)


def test_layers_that_are_too_narrow_for_fp8_stay_wide(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_if_it_could(monkeypatch)
    monkeypatch.setattr(norm_activation, "kernels_missing", lambda: None)
    model = build(CLASSIC, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert place(model, "fp8") == (0, None)
    assert line(caplog).endswith("reason='layers as narrow as 32 lose by fp8'")
    assert Fp8 not in products(model)


# With a head that asks for little, narrow layers change little; with the lively one they change
# more than is let through.
QUIET = 0.02


@pytest.mark.parametrize("quiet", [True, False])
def test_fp8_passes_the_gate_or_is_refused(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_if_it_could(monkeypatch)
    monkeypatch.setattr(linear_selector, "NARROW_HIDDEN_MIN", 0)
    monkeypatch.setattr(narrow_layers, "__defaults__", (0,))
    model = build(MODERN, dtype=torch.bfloat16)
    if quiet:
        model.head_weight.mul_(QUIET)
    weights = sum(m.weight.nbytes for b in model.blocks[1:4] for m in linears(b))
    with caplog.at_level(logging.INFO):
        if not quiet:
            with pytest.raises(ConfigError, match="with linear_backend fp8 the model's next tok"):
                place(model, "fp8")
            return
        freed, drift = place(model, "fp8")
    assert drift is not None and 0 < drift.divergence < DIVERGENCE_MAX
    assert products(model) == {fused_linear.Wide, Fp8}
    # Small weights are padded, and each column has a scale.
    assert 0.2 * weights < freed < 0.5 * weights
    assert "backend=fp8 reason=" in line(caplog)
    assert "layers 1 to 3 are narrow, and rows are narrowed in " in line(caplog)


def linears(module: torch.nn.Module) -> list[Linear]:
    return [one for one in module.modules() if isinstance(one, Linear)]


def test_transformer_engine_serves_where_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    te_stub.install(monkeypatch)
    check("te", "current", CUDA, torch.bfloat16)
    model = build(CLASSIC, dtype=torch.float32)
    want = model.logits(IDS)
    with caplog.at_level(logging.INFO):
        place(model, "te", "none")
    assert line(caplog).startswith("event=linears backend=te reason='Transformer Engine, recipe no")
    assert products(model) == {te_linear.Product}
    assert torch.allclose(model.logits(IDS), want, rtol=1e-4, atol=1e-4)
