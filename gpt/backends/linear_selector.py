"""Which products a loaded model's linears have: chosen once, and told in one line.

What was left open is decided by what is there, and never changes what the model says by more than
rounding. What was asked for is had, or refused with what it needs. Narrow weights pass a gate: the
model must still say, of text of its own, what it said with wide ones.
"""

import logging
from collections.abc import Callable

import torch

from gpt.backends import fp8_linear, fused_linear, norm_activation, te_linear
from gpt.backends.quantization_check import Drift, Gate, judge
from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "fp8", "te")
RECIPES = tuple(te_linear.RECIPES)
# In narrower layers there is more to narrow than to multiply.
NARROW_HIDDEN_MIN = 1025


def check(backend: str, recipe: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what a model of that dtype cannot have there, before it is loaded."""
    if backend == "fp8":
        _refuse(backend, fp8_linear.unfit(device, dtype), _elsewhere(device))
    if backend == "te":
        found = te_linear.find()
        reason = found if isinstance(found, str) else None
        if device.type != "cuda":
            reason = f"its device is {device.type}"
        _refuse(backend, reason, "install preamble[te], and run it on a CUDA device")
    if recipe != "none" and backend != "te":
        raise ConfigError(
            f"te_recipe is {recipe!r}, which says how Transformer Engine narrows numbers, and "
            f"linear_backend is {backend!r}: make that te, or leave te_recipe out"
        )


# How many bytes are freed, and what narrow weights have changed, where the last stage knows it.
Placed = tuple[int, Drift | None]


def place(
    model: GPT, backend: str, recipe: str = "none", divergence_max: float | None = None
) -> Placed:
    """Give a model on a GPU its products, all ranks together.

    On a CPU weights are packed instead (gpt/backends/cpu_packing.py).
    """
    if backend == "fp8":
        return _place_fp8(model, divergence_max)
    if backend == "te":
        return _place_te(model, recipe, divergence_max)
    if backend == "torch":
        _say("torch", "linear_backend is torch")
        return 0, None
    return _place_fused(model, "products end with what follows them")


def narrow_layers(model: GPT, hidden_min: int = NARROW_HIDDEN_MIN) -> range:
    """Those of this stage that are worth it. The first and the last one bear it worst."""
    if model.config.hidden_size < hidden_min:
        return range(0)
    last = model.config.num_layers - 1
    return range(max(model.layers.start, 1), min(model.layers.stop, last))


def _place_fused(model: GPT, reason: str) -> Placed:
    """Where nothing is narrow."""
    unfit = fused_linear.unfit(model) or norm_activation.kernels_missing()
    if unfit is not None:
        _say("torch", unfit)
        return 0, None
    _say("fused", reason)
    return fused_linear.fuse(model), None


def _place_fp8(model: GPT, divergence_max: float | None) -> Placed:
    reason = fp8_linear.unfit(model.mesh.device, model.dtype) or fused_linear.unfit(model)
    _refuse("fp8", reason, _elsewhere(model.mesh.device))
    if not _any_narrow(model):
        return _place_fused(model, f"layers as narrow as {model.config.hidden_size} lose by fp8")
    layers = narrow_layers(model)
    gate = Gate(model, divergence_max)
    placed = _gated(gate, model, "linear_backend fp8", lambda: fused_linear.fuse(model, layers))
    missing = norm_activation.kernels_missing()
    how = "in Triton" if missing is None else f"in torch, since Triton is missing ({missing})"
    _say("fp8", f"{_spelt(layers)} are narrow, and rows are narrowed {how}")
    return placed


def _place_te(model: GPT, recipe: str, divergence_max: float | None) -> Placed:
    engine = te_linear.find()
    reason = engine if isinstance(engine, str) else fused_linear.unfit(model)
    _refuse("te", reason, "install preamble[te], and run it on a CUDA device")
    assert not isinstance(engine, str)
    layers = range(0) if recipe == "none" else narrow_layers(model)

    def swap() -> int:
        return te_linear.swap(model, engine, recipe, layers)

    if recipe == "none" or not _any_narrow(model):
        layers = range(0)
        placed: Placed = (swap(), None)
    else:
        placed = _gated(Gate(model, divergence_max), model, f"te_recipe {recipe}", swap)
    _say("te", f"Transformer Engine, recipe {recipe}: {_spelt(layers)} are narrow")
    return placed


def _gated(gate: Gate, model: GPT, setting: str, swap: Callable[[], int]) -> Placed:
    freed = swap()
    if model.mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # Or it would not count as free to whoever asks the device.
    gate.drift(model)  # A scale that follows earlier steps has none before the first.
    drift = gate.drift(model)
    judge(drift, setting)
    return freed, drift


def _any_narrow(model: GPT) -> bool:
    """Whether any stage has narrow layers, as every rank sees it alike."""
    config = model.config
    return config.hidden_size >= NARROW_HIDDEN_MIN and config.num_layers > 2


def _spelt(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}" if layers else "no layers"


def _elsewhere(device: torch.device) -> str:
    if device.type == "cpu":
        return "on a CPU, weights: int8 is what there is"
    return "leave it out, or say dtype: bfloat16 if that is it"


def _refuse(backend: str, reason: str | None, remedy: str) -> None:
    if reason is not None:
        raise ConfigError(f"linear_backend is {backend!r}, and cannot be had: {reason}; {remedy}")


def _say(backend: str, reason: str) -> None:
    log.info("event=linears backend=%s reason=%r", backend, reason)
