"""Linear backend selection: by what is available, with the reason logged or raised."""

import logging
from collections.abc import Iterator

import pytest
import torch

from gpt.errors import ConfigError
from gpt.linear import fp8_linear, grouped_experts, te_linear
from gpt.linear import selector as linear_selector
from gpt.linear.fp8_linear import Fp8Matmul, fp8_layers
from gpt.linear.fused_linear import FusedLinear
from gpt.linear.grouped_experts import GroupedExperts
from gpt.linear.quantization_check import DIVERGENCE_MAX
from gpt.linear.selector import apply_backend, check_backend
from gpt.linear.unquantized_matmul import UnquantizedMatmul
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear, TrainingLinear
from gpt.model.moe import MoELayer, TorchExperts
from serving.config import LINEAR_BACKENDS, TE_RECIPES, ServerConfig
from tests.support import te_stub
from tests.support.models import CLASSIC, EXPERTS, MODERN, build

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = torch.arange(2, 26).view(2, 12)


@pytest.fixture(autouse=True)
def clear_import_cache() -> Iterator[None]:
    """Clear the cached import of Transformer Engine before and after each test."""
    te_linear.import_transformer_engine.cache_clear()
    yield
    te_linear.import_transformer_engine.cache_clear()


def logged_message(caplog: pytest.LogCaptureFixture) -> str:
    (message,) = [r.getMessage() for r in caplog.records if r.name == linear_selector.__name__]
    return message


def test_settings_list_all_backends_and_recipes() -> None:
    assert LINEAR_BACKENDS == linear_selector.BACKENDS
    assert tuple(te_linear.RECIPES) == TE_RECIPES
    for name in ("linear_backend", "te_recipe"):
        with pytest.raises(
            ConfigError, match=f"{name} is 'fp7'; choose one of: {TE_RECIPES[0]}|auto"
        ):
            ServerConfig("model", **{name: "fp7"})


@pytest.mark.parametrize(
    ("backend", "recipe", "message"),
    [
        ("fp8", "none", r"'fp8'.*the device is cpu.*weights: int8"),
        ("te", "none", r"'te'.*the device is cpu; install preamble\[te\]"),
        ("te", "block", r"'te'.*the device is cpu; install preamble\[te\]"),
        ("auto", "block", r"te_recipe is 'block'.*linear_backend is 'auto'"),
        ("fp8", "current", r"'fp8'.*the device is cpu"),
    ],
)
def test_gpu_backends_are_refused_on_a_cpu_before_loading(
    backend: str, recipe: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_backend(backend, recipe, CPU, torch.bfloat16)


def test_fp8_is_refused_for_other_dtypes_before_loading() -> None:
    message = r"the model's dtype is torch.float32.*remove linear_backend, or set dtype: bfloat16"
    with pytest.raises(ConfigError, match=message):
        check_backend("fp8", "none", CUDA, torch.float32)


def test_missing_transformer_engine_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: .*; install preamble\[te\]"):
        check_backend("te", "none", CUDA, torch.bfloat16)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_auto_is_always_available(backend: str) -> None:
    check_backend(backend, "none", CPU, torch.float32)
    check_backend(backend, "none", CUDA, torch.float32)


def test_auto_selects_fused_where_triton_is_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    want = model.logits(IDS)
    monkeypatch.setattr(linear_selector, "triton_unavailable_reason", lambda device: None)
    with caplog.at_level(logging.INFO):
        assert apply_backend(model, "auto") == (0, None)
    assert logged_message(caplog).startswith("event=linears backend=fused reason=")
    assert matmul_types(model) == {UnquantizedMatmul}
    assert torch.allclose(model.logits(IDS), want, rtol=1e-4, atol=1e-4)


def matmul_types(model: GPT) -> set[type]:
    backends = [module.backend for module in model.modules() if isinstance(module, Linear)]
    return {
        type(backend.matmul if isinstance(backend, FusedLinear) else backend)
        for backend in backends
    }


@pytest.mark.parametrize(
    ("backend", "dtype", "missing", "reason"),
    [
        ("torch", torch.float32, None, "linear_backend is torch"),
        ("auto", torch.float32, "ImportError: none", "ImportError: none"),
        ("auto", torch.float64, None, "the model's dtype is torch.float64"),
    ],
)
def test_auto_selects_torch_otherwise_and_logs_the_reason(
    backend: str,
    dtype: torch.dtype,
    missing: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build(CLASSIC, dtype=dtype)
    monkeypatch.setattr(linear_selector, "triton_unavailable_reason", lambda device: missing)
    with caplog.at_level(logging.INFO):
        assert apply_backend(model, backend) == (0, None)
    assert logged_message(caplog) == f"event=linears backend=torch reason={reason!r}"
    assert matmul_types(model) == {TrainingLinear}


@pytest.mark.parametrize(
    ("is_gpu", "backend", "log_line"),
    [
        (True, GroupedExperts, "event=experts backend=grouped reason="),
        (False, TorchExperts, "event=experts backend=torch reason='the device is cpu'"),
    ],
)
def test_experts_are_grouped_where_the_device_supports_it(
    is_gpu: bool,
    backend: type,
    log_line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(linear_selector, "triton_unavailable_reason", lambda device: None)
    if is_gpu:
        monkeypatch.setattr(grouped_experts, "unsupported_device_reason", lambda device: None)
    model = build(EXPERTS, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        apply_backend(model, "auto")
    assert any(record.getMessage().startswith(log_line) for record in caplog.records)
    moe_layers = [layer.mlp for layer in model.decoder_layers if isinstance(layer.mlp, MoELayer)]
    assert {type(layer.experts_backend) for layer in moe_layers} == {backend}


def permit_fp8_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Permit fp8 in plain torch, which a server on a CPU refuses."""
    patch.setattr(fp8_linear, "unsupported_reason", lambda device, dtype: None)


def test_narrow_layers_are_not_quantized_to_fp8(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    permit_fp8_on_cpu(monkeypatch)
    monkeypatch.setattr(linear_selector, "triton_unavailable_reason", lambda device: None)
    model = build(CLASSIC, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert apply_backend(model, "fp8") == (0, None)
    assert logged_message(caplog).endswith("reason='fp8 is slower at hidden size 32'")
    assert Fp8Matmul not in matmul_types(model)


# A factor of the LM head's weights. It makes the logits and the divergence of fp8 layers small;
# without it the divergence is over the limit.
SMALL_LOGITS_FACTOR = 0.02


@pytest.mark.parametrize("small_logits", [True, False])
def test_fp8_passes_the_quantization_check_or_is_refused(
    small_logits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    permit_fp8_on_cpu(monkeypatch)
    monkeypatch.setattr(fp8_linear, "FP8_HIDDEN_MIN", 0)
    monkeypatch.setattr(fp8_layers, "__defaults__", (0,))
    model = build(MODERN, dtype=torch.bfloat16)
    if small_logits:
        model.head_weight.mul_(SMALL_LOGITS_FACTOR)
    weights = sum(m.weight.nbytes for b in model.decoder_layers[1:4] for m in linears(b))
    with caplog.at_level(logging.INFO):
        if not small_logits:
            with pytest.raises(ConfigError, match="with linear_backend fp8 the model's next-tok"):
                apply_backend(model, "fp8")
            return
        freed, drift = apply_backend(model, "fp8")
    assert drift is not None and 0 < drift.mean_kl_nats < DIVERGENCE_MAX
    assert matmul_types(model) == {UnquantizedMatmul, Fp8Matmul}
    # Small weights are padded, and each column has a scale.
    assert 0.2 * weights < freed < 0.5 * weights
    assert "backend=fp8 reason=" in logged_message(caplog)
    assert "layers 1 to 3 are fp8, and rows are quantized in " in logged_message(caplog)


def linears(module: torch.nn.Module) -> list[Linear]:
    return [submodule for submodule in module.modules() if isinstance(submodule, Linear)]


def test_transformer_engine_is_used_where_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    te_stub.install(monkeypatch)
    check_backend("te", "current", CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"te_recipe 'mxfp8' is unavailable: .*capability 10\.0"):
        check_backend("te", "mxfp8", CUDA, torch.bfloat16)
    model = build(CLASSIC, dtype=torch.float32)
    want = model.logits(IDS)
    with caplog.at_level(logging.INFO):
        apply_backend(model, "te", "none")
    assert logged_message(caplog).startswith(
        "event=linears backend=te reason='Transformer Engine, recipe no"
    )
    assert matmul_types(model) == {te_linear.TransformerEngineLinear}
    assert torch.allclose(model.logits(IDS), want, rtol=1e-4, atol=1e-4)
