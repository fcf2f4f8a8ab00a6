"""Which attention a model has: chosen once, when it is loaded, and said in the log.

Nobody asked: the fastest that works here, with the reason if it is not the first. Asked for and not
to be had: an error that says what to install or to say instead. Each is one object's two functions,
so a model knows none of them by name.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from gpt.attention.fp8_kv_cache import EightBits
from gpt.attention.kv_cache import KINDS
from gpt.attention.paged import Attend, Store, ragged, store
from gpt.config import GPTConfig
from gpt.dtypes import FLOATS
from gpt.errors import ConfigError

log = logging.getLogger(__name__)

FIRST = "triton"  # Of those that "auto" may mean.

# The oldest GPUs that multiply bf16, and that have numbers of eight bits.
CAPABILITY_MIN, CAPABILITY_EIGHT_BITS_MIN = (8, 0), (8, 9)


@dataclass(frozen=True)
class Backend:
    """How a model attends, and how it fills its pool."""

    attend: Attend
    store: Store

    @property
    def name(self) -> str:
        return name_of(self.attend)


@dataclass(frozen=True)
class _Wanted:
    """The model that will attend."""

    config: GPTConfig
    dtype: torch.dtype
    device: torch.device
    eight_bits: bool  # Whether its pool is of such numbers.


def name_of(attend: Attend) -> str:
    """What the backend is called that this is of."""
    return str(getattr(getattr(attend, "__self__", None), "name", "torch"))


def choose(
    name: str,
    config: GPTConfig,
    device: torch.device,
    *,
    dtype: str | None = None,
    kv_dtype: str = "auto",
) -> Backend:
    """The backend of this name, for a model that computes in `dtype` (None: as it is stored).

    "auto": Triton's if it serves, else torch.
    """
    reason = check(name, config, device, dtype=dtype, kv_dtype=kv_dtype)
    wanted = _Wanted(config, FLOATS[dtype or config.dtype], device, kv_dtype in KINDS)
    found = _BACKENDS["torch" if reason else FIRST if name == "auto" else name](wanted)
    reason = reason or ("it is there" if name == "auto" else "asked for")
    log.info("event=attention backend=%s kv_dtype=%s reason=%r", found.name, kv_dtype, reason)
    return found


def check(
    name: str, config: GPTConfig, device: torch.device, *, dtype: str | None, kv_dtype: str
) -> str | None:
    """Refuse what was asked for and cannot be; else why what nobody asked for is not the first."""
    wanted = _Wanted(config, FLOATS[dtype or config.dtype], device, kv_dtype in KINDS)
    if wanted.eight_bits and device.type != "cuda":
        raise ConfigError(
            f"kv_dtype is {kv_dtype!r}, and keys and values in eight bits need a CUDA device; the "
            f"device is {device.type}: say kv_dtype: auto, or device: cuda"
        )
    if name == "torch":
        return None
    reason = _unfit(FIRST if name == "auto" else name, wanted)
    if reason is not None and name != "auto":
        raise ConfigError(
            f"attention_backend is {name!r}, and {reason}; "
            f"{_HELP[name]}, or say attention_backend: auto"
        )
    return reason


def _torch(wanted: _Wanted) -> Backend:
    if not wanted.eight_bits:
        return Backend(ragged, store)
    twin = EightBits()
    return Backend(twin.attend, twin.store)


def _triton(wanted: _Wanted) -> Backend:
    from gpt.attention.triton_paged import TritonAttention

    made = TritonAttention()
    return Backend(made.attend, made.store)


def _flashinfer(wanted: _Wanted) -> Backend:
    from gpt.attention.flashinfer import FlashInferAttention

    config = wanted.config
    queries = config.num_attention_heads // config.num_query_groups
    made = FlashInferAttention(wanted.device, queries=queries)
    return Backend(made.attend, made.store)


_BACKENDS: dict[str, Callable[[_Wanted], Backend]] = {
    "torch": _torch,
    "triton": _triton,
    "flashinfer": _flashinfer,
}
# What each of them computes in, and for which widths of a head.
_DTYPES = {
    "triton": (torch.bfloat16, torch.float32),
    "flashinfer": (torch.bfloat16, torch.float16),
}
_WIDTHS = {"triton": range(2, 257, 2), "flashinfer": (64, 128, 256)}
_HELP = {
    "triton": "it comes with a CUDA build of torch (pip install triton), and needs a model in "
    "bfloat16 or float32 on a GPU of compute capability 8.0 or later",
    "flashinfer": "install it with pip install 'preamble[flashinfer]' beside a CUDA build of "
    "torch, for a model in bfloat16 with heads of 64, 128 or 256 channels",
}


def _unfit(name: str, wanted: _Wanted) -> str | None:
    """Why this backend does not serve."""
    if wanted.device.type != "cuda":
        return f"the device is {wanted.device.type}"
    if wanted.dtype not in _DTYPES[name]:
        return f"the model computes in {str(wanted.dtype).removeprefix('torch.')}"
    if wanted.config.kv_channels not in _WIDTHS[name]:
        return f"the model's heads have {wanted.config.kv_channels} channels"
    has = torch.cuda.get_device_capability(wanted.device)
    least = CAPABILITY_EIGHT_BITS_MIN if wanted.eight_bits else CAPABILITY_MIN
    if has < least:
        what = "numbers of eight bits need" if wanted.eight_bits else "it needs"
        return f"the GPU's compute capability is {has[0]}.{has[1]}; {what} {least[0]}.{least[1]}"
    try:
        import_module(name)
    except Exception as error:  # Packages for GPUs fail in many ways where something is missing.
        reason = (str(error).splitlines() or ["it does not say why"])[0]
        return f"{name} cannot be imported ({type(error).__name__}: {reason})"
    return None
