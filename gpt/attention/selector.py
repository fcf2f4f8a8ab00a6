"""Attention backend selection: torch, Triton or FlashInfer, chosen once at load and logged.

"auto" selects Triton if a kernel can be launched, else torch, and the reason is logged. If a
backend is selected by its name and is unavailable, an error says what to install or to set instead.
The model uses only the interface `AttentionBackend`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from gpt.attention.backend import AttentionBackend, TorchAttention
from gpt.attention.fp8_kv_cache import Fp8KVAttention
from gpt.attention.kv_cache import FP8_DTYPE, KV_DTYPES
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import ConfigError
from gpt.triton_runtime.availability import triton_unavailable_reason

log = logging.getLogger(__name__)

PREFERRED_BACKEND = "triton"  # Selected by "auto" if available.

CAPABILITY_MIN = (8, 0)  # The lowest CUDA compute capability with bf16 tensor cores.
CAPABILITY_FP8_MIN = (8, 9)  # The lowest CUDA compute capability with fp8.


@dataclass(frozen=True)
class _Requirements:
    """The properties of the model that the backend must support."""

    config: GPTConfig
    dtype: torch.dtype
    device: torch.device
    fp8_kv: bool  # Whether the KV pool is fp8.


def select_backend(
    name: str,
    config: GPTConfig,
    device: torch.device,
    *,
    dtype: str | None = None,
    kv_dtype: str = "auto",
) -> AttentionBackend:
    """Return the backend `name` for a model that computes in `dtype` (None: the stored dtype).

    "auto" selects Triton if it supports the model, the device and the KV cache, else torch.
    """
    unavailable_reason = check_backend(name, config, device, dtype=dtype, kv_dtype=kv_dtype)
    if name != "auto":
        backend_name, reason = name, "requested"
    elif unavailable_reason is None:
        backend_name, reason = PREFERRED_BACKEND, "available"
    else:
        backend_name, reason = "torch", unavailable_reason
    requirements = _Requirements(
        config, FLOAT_DTYPES[dtype or config.dtype], device, kv_dtype in KV_DTYPES
    )
    backend = _BACKENDS[backend_name](requirements)
    log.info("event=attention backend=%s kv_dtype=%s reason=%r", backend.name, kv_dtype, reason)
    return backend


def check_backend(
    name: str, config: GPTConfig, device: torch.device, *, dtype: str | None, kv_dtype: str
) -> str | None:
    """Raise ConfigError if the backend `name`, or an fp8 KV cache, is unavailable.

    If `name` is "auto", a missing backend is not an error: return why the preferred backend is
    unavailable, or None if it is available.
    """
    requirements = _Requirements(
        config, FLOAT_DTYPES[dtype or config.dtype], device, kv_dtype in KV_DTYPES
    )
    if requirements.fp8_kv and device.type != "cuda":
        raise ConfigError(
            f"kv_dtype is {kv_dtype!r}, and an fp8 KV cache needs a CUDA device; the device is "
            f"{device.type}: set kv_dtype: auto, or device: cuda"
        )
    if name == "torch":
        return None
    reason = _unsupported_reason(PREFERRED_BACKEND if name == "auto" else name, requirements)
    if reason is not None and name != "auto":
        raise ConfigError(
            f"attention_backend {name!r} is unavailable: {reason}; this backend needs "
            f"{_BACKEND_REQUIREMENTS[name]}: provide what is missing, or set "
            "attention_backend: auto"
        )
    return reason


def _torch_backend(requirements: _Requirements) -> AttentionBackend:
    return Fp8KVAttention() if requirements.fp8_kv else TorchAttention()


def _triton_backend(requirements: _Requirements) -> AttentionBackend:
    from gpt.attention.triton_paged import TritonAttention

    return TritonAttention()


def _flashinfer_backend(requirements: _Requirements) -> AttentionBackend:
    from gpt.attention.flashinfer import FlashInferAttention

    config = requirements.config
    queries_per_kv_head = config.num_attention_heads // config.num_query_groups
    backend = FlashInferAttention(requirements.device, queries_per_kv_head=queries_per_kv_head)
    kv_dtype = FP8_DTYPE if requirements.fp8_kv else requirements.dtype
    try:
        backend.compile_kernels(
            requirements.dtype, kv_dtype, config.kv_channels, config.window_size
        )
    except Exception as error:  # Compilers and kernels raise many kinds of exceptions.
        reason = (str(error).splitlines() or ["no message"])[0]
        raise ConfigError(
            "attention_backend 'flashinfer' is unavailable: its kernels cannot be compiled or run "
            f"({type(error).__name__}: {reason}); install nvcc and ninja, or flashinfer-jit-cache "
            "of the same version, or set attention_backend: auto"
        ) from error
    return backend


_BACKENDS: dict[str, Callable[[_Requirements], AttentionBackend]] = {
    "torch": _torch_backend,
    "triton": _triton_backend,
    "flashinfer": _flashinfer_backend,
}
# The dtypes, and the numbers of channels per head, that each backend supports.
_DTYPES = {
    "triton": (torch.bfloat16, torch.float16, torch.float32),
    "flashinfer": (torch.bfloat16, torch.float16),
}
_HEAD_DIMS = {"triton": range(2, 257, 2), "flashinfer": (64, 128, 256)}
_BACKEND_REQUIREMENTS = {
    "triton": "a CUDA build of torch with Triton (pip install triton), a C compiler, a writable "
    "cache folder (TRITON_CACHE_DIR), a GPU of compute capability 8.0 or later (8.9 with an fp8 KV "
    "cache), and a model in bfloat16, float16 or float32 whose heads have an even number of "
    "channels up to 256",
    "flashinfer": "a CUDA build of torch with FlashInfer (pip install 'preamble[flashinfer]'), a "
    "GPU of compute capability 8.0 or later (8.9 with an fp8 KV cache), and a model in bfloat16 or "
    "float16 whose heads have 64, 128 or 256 channels, without attention sinks and ALiBi, and with "
    "the same window in all layers",
}


def _unsupported_reason(name: str, requirements: _Requirements) -> str | None:
    """Return why the backend `name` cannot be used with these requirements; None if it can."""
    if requirements.device.type != "cuda":
        return f"the device is {requirements.device.type}"
    if requirements.dtype not in _DTYPES[name]:
        return f"the model computes in {str(requirements.dtype).removeprefix('torch.')}"
    if requirements.config.kv_channels not in _HEAD_DIMS[name]:
        return f"the model's heads have {requirements.config.kv_channels} channels"
    if name == "flashinfer":
        reason = _unsupported_layers(requirements.config)
        if reason is not None:
            return reason
    capability = torch.cuda.get_device_capability(requirements.device)
    capability_min = CAPABILITY_FP8_MIN if requirements.fp8_kv else CAPABILITY_MIN
    if capability < capability_min:
        need = "an fp8 KV cache needs" if requirements.fp8_kv else f"{name} needs"
        major, minor = capability_min
        return (
            f"the GPU's compute capability is {capability[0]}.{capability[1]}; "
            f"{need} {major}.{minor}"
        )
    if name == "triton":
        return triton_unavailable_reason(requirements.device)
    try:
        import_module(name)
    except Exception as error:  # Broken GPU packages raise many kinds of exceptions.
        reason = (str(error).splitlines() or ["no message"])[0]
        return f"{name} cannot be imported ({type(error).__name__}: {reason})"
    return None


def _unsupported_layers(config: GPTConfig) -> str | None:
    """Return why FlashInfer cannot compute the attention of this model's layers; None if it can."""
    if any(layer.attention_sinks for layer in config.layers):
        return "the model has attention sinks"
    if config.position_embedding_type == "alibi":
        return "the model has ALiBi"
    # A step is planned once for all layers.
    if len({layer.window_size for layer in config.layers}) > 1:
        return "the model's layers have different windows"
    return None
