"""Linear backend selection: torch, fused, fp8 or Transformer Engine, chosen and logged once.

"auto" selects the fused backend, or torch where the fused backend is unsupported: both give the
same output except for rounding. A setting that names an unavailable backend is an error with the
reason. Quantized weights must pass the check of gpt/linear/quantization_check.py: the next-token
distributions must be close to those of the unquantized model.
"""

import logging
from collections.abc import Callable

import torch

from gpt.errors import ConfigError
from gpt.linear import fp8_linear, fused_linear, grouped_experts, te_linear
from gpt.linear.quantization_check import Divergence, DivergenceProbe, enforce_limit
from gpt.model.gpt_model import GPT
from gpt.triton_runtime.availability import triton_unavailable_reason

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "fp8", "te")
_TE_REMEDY = "install preamble[te] and use a CUDA device, or remove linear_backend"


def check_backend(backend: str, recipe: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the backend does not support the device, the dtype or the recipe.

    The function needs no model, so it is called before the model is loaded.
    """
    if backend == "fp8":
        _raise_if_unavailable(
            backend, fp8_linear.unsupported_reason(device, dtype), _fp8_remedy(device)
        )
    if backend == "te":
        engine = te_linear.import_transformer_engine()
        reason = engine if isinstance(engine, str) else None
        if device.type != "cuda":
            reason = f"the device is {device.type}"
        _raise_if_unavailable(backend, reason, _TE_REMEDY)
        assert not isinstance(engine, str)
        recipe_reason = te_linear.unsupported_recipe_reason(engine, recipe)
        if recipe_reason is not None:
            raise ConfigError(
                f"te_recipe {recipe!r} is unavailable: {recipe_reason}; set another te_recipe, or "
                "linear_backend: fp8"
            )
    if recipe != "none" and backend != "te":
        raise ConfigError(
            f"te_recipe is {recipe!r}, a recipe of Transformer Engine, but linear_backend is "
            f"{backend!r}: set linear_backend: te, or remove te_recipe"
        )


# The bytes freed, and the divergence that quantized weights cause. The divergence is None without
# quantized weights, and on all stages but the last.
AppliedBackend = tuple[int, Divergence | None]


def apply_backend(
    model: GPT, backend: str, recipe: str = "none", divergence_max: float | None = None
) -> AppliedBackend:
    """Make `backend` compute the linears of a model on a GPU; all ranks must call this together.

    `recipe` is a key of `te_linear.RECIPES`. `divergence_max` is the limit of `DivergenceProbe`. On
    a CPU, gpt/cpu_inference/weight_packing.py packs the weights instead.
    """
    assert backend in BACKENDS, f"there is no linear backend {backend!r}"
    if backend == "fp8":
        return _apply_fp8(model, divergence_max)
    if backend == "te":
        return _apply_te(model, recipe, divergence_max)
    if backend == "torch":
        _log_backend("torch", "linear_backend is torch")
        return 0, None
    return _apply_fused(model, "matmuls include bias and activation")


def _apply_fused(model: GPT, reason: str) -> AppliedBackend:
    """Apply the fused backend without quantization, or torch where it is unsupported."""
    unsupported = fused_linear.unsupported_reason(model) or triton_unavailable_reason(
        model.mesh.device
    )
    if unsupported is not None:
        _log_backend("torch", unsupported)
        return 0, None
    _log_backend("fused", reason)
    return fused_linear.fuse_layers(model, groups_experts=_select_grouped_experts(model)), None


def _apply_fp8(model: GPT, divergence_max: float | None) -> AppliedBackend:
    reason = fp8_linear.unsupported_reason(
        model.mesh.device, model.dtype
    ) or fused_linear.unsupported_reason(model)
    _raise_if_unavailable("fp8", reason, _fp8_remedy(model.mesh.device))
    if not fp8_linear.has_fp8_layers(model):
        return _apply_fused(model, f"fp8 is slower at hidden size {model.config.hidden_size}")
    layers = fp8_linear.fp8_layers(model)
    probe = DivergenceProbe(model, divergence_max)
    groups_experts = _select_grouped_experts(model)
    applied_backend = _apply_with_probe(
        probe,
        model,
        "linear_backend fp8",
        lambda: fused_linear.fuse_layers(model, layers, groups_experts=groups_experts),
    )
    triton_reason = triton_unavailable_reason(model.mesh.device)
    implementation = (
        "in Triton"
        if triton_reason is None
        else f"in torch, because Triton is unavailable ({triton_reason})"
    )
    _log_backend(
        "fp8", f"{_format_layers(layers)} are fp8, and rows are quantized {implementation}"
    )
    return applied_backend


def _select_grouped_experts(model: GPT) -> bool:
    """Return whether grouped matmuls compute the experts; log the choice if there are experts."""
    if not model.config.num_experts:
        return False
    reason = grouped_experts.unsupported_reason(model)
    if reason is not None:
        log.info("event=experts backend=torch reason=%r", reason)
        return False
    log.info("event=experts backend=grouped reason=%r", "one matmul computes all experts")
    return True


def _apply_te(model: GPT, recipe: str, divergence_max: float | None) -> AppliedBackend:
    engine = te_linear.import_transformer_engine()
    reason = engine if isinstance(engine, str) else fused_linear.unsupported_reason(model)
    _raise_if_unavailable("te", reason, _TE_REMEDY)
    assert not isinstance(engine, str)
    layers = range(0) if recipe == "none" else fp8_linear.fp8_layers(model)

    def replace_linears() -> int:
        return te_linear.replace_linears(model, engine, recipe, layers)

    applied_backend: AppliedBackend
    if recipe == "none" or not fp8_linear.has_fp8_layers(model):
        layers = range(0)
        applied_backend = (replace_linears(), None)
    else:
        applied_backend = _apply_with_probe(
            DivergenceProbe(model, divergence_max), model, f"te_recipe {recipe}", replace_linears
        )
    _log_backend("te", f"Transformer Engine, recipe {recipe}: {_format_layers(layers)} are fp8")
    return applied_backend


def _apply_with_probe(
    probe: DivergenceProbe, model: GPT, setting: str, replace_linears: Callable[[], int]
) -> AppliedBackend:
    """Call `replace_linears`, then check the divergence.

    Return the bytes freed and the divergence.
    """
    freed_bytes = replace_linears()
    if model.mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # Return the freed memory to the device.
    divergence = probe.measure(model)
    enforce_limit(divergence, setting)
    return freed_bytes, divergence


def _format_layers(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}" if layers else "no layers"


def _fp8_remedy(device: torch.device) -> str:
    if device.type == "cpu":
        return "on a CPU, set weights: int8 instead"
    return "remove linear_backend, or set dtype: bfloat16 if the dtype is the problem"


def _raise_if_unavailable(backend: str, reason: str | None, remedy: str) -> None:
    if reason is not None:
        raise ConfigError(f"linear_backend {backend!r} is unavailable: {reason}; {remedy}")


def _log_backend(backend: str, reason: str) -> None:
    log.info("event=linears backend=%s reason=%r", backend, reason)
