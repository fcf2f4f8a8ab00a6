"""Host time of an eager layer: the time to launch its kernels in a step without a CUDA graph.

No GPU is needed, because nothing is computed. Tensors are in host memory, a fake CUDA driver stands
for the GPU, and Triton compiles the kernels for it. Products and torch's attention are replaced by
an allocation of their output. The result is the time of the model's code, of torch's allocations,
and of Triton's launches up to the call of the CUDA driver. A GPU waits for the host in a step whose
kernels take less time than that.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.harness.record import SuiteOutput
from gpt.attention import triton_kernels, triton_paged
from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.fp8_rows import Fp8Rows
from gpt.linear import (
    fp8_linear,
    norm_activation,
    triton_norm_activation,
    triton_row_kernels,
    unquantized_matmul,
)
from gpt.linear.fused_linear import fuse_layers
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.triton_runtime import launcher

CAPABILITY = 90
CHUNK_TOKENS, PAST_TOKENS, BLOCK_TOKENS = 512, 512, 16
DECODES = 16  # Sequences that decode beside the chunk.
LAYERS = 8
WARM_UP_STEPS = 2  # They compile the kernels.
STEPS_PER_ROUND = 20
# Small widths: the time of the host does not depend on them.
GPT_LAYERS = GPTConfig(
    num_layers=LAYERS,
    hidden_size=256,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=2048,
    dtype="bfloat16",
)
LLAMA_LAYERS = GPT_LAYERS.with_fields(
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
)
SHAPES = {"GPT": GPT_LAYERS, "Llama": LLAMA_LAYERS}


class _CountingDriver:
    """A CUDA driver of one GPU, which counts the launches that reach it."""

    def __init__(self) -> None:
        self.count = 0
        self.utils = SimpleNamespace(
            # Triton loads a kernel again in every launch if its module is None.
            load_binary=lambda *_: (object(), 0, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def launcher_cls(self, *_: object) -> Any:
        return self._launch

    def _launch(self, *_: object) -> None:
        self.count += 1


@dataclass(frozen=True)
class HostTime:
    """The host time and the launches of one layer."""

    microseconds: float
    launches: float  # Of Triton's kernels; products and torch's attention are not counted.


def run_suite(rounds: int) -> Iterator[SuiteOutput]:
    """Yield a line for each shape, dtype of the linears and kind of step."""
    for (shape, config), fp8, first in product(SHAPES.items(), (False, True), (True, False)):
        direct, through_triton = (
            measure_layer(config, rounds, fp8=fp8, first=first, triton=triton)
            for triton in (False, True)
        )
        yield (
            f"{shape}, {'fp8' if fp8 else 'bf16'}, "
            f"{'first chunk' if first else 'later chunk and decodes'}: "
            f"{direct.microseconds:.1f} us a layer with {direct.launches:.1f} launches of Triton "
            f"kernels; {through_triton.microseconds:.1f} us if Triton launches them"
        )


def measure_layer(
    config: GPTConfig, rounds: int, *, fp8: bool, first: bool, triton: bool
) -> HostTime:
    """Measure the host time of a layer: the least CPU time of a step, divided by its layers.

    `first`: the step is the first chunk of a prompt, whose attention is torch's; else a later chunk
    beside decodes. `triton`: every launch is Triton's own.
    """
    with _without_gpu() as launches, torch.inference_mode():
        model = GPT(
            config,
            Mesh.single("cpu"),
            dtype=torch.bfloat16,
            attention_backend=triton_paged.TritonAttention(),
        )
        model.requires_grad_(False)
        fuse_layers(model, range(config.num_layers) if fp8 else ())
        pool = KVPool(
            config, model.layers, 256, block_tokens=BLOCK_TOKENS, dtype=torch.bfloat16, device="cpu"
        )
        x = torch.zeros(_step(first).tokens, config.hidden_size, dtype=torch.bfloat16)
        seconds = []
        with mock.patch.object(launcher, "IS_VERSION_SUPPORTED", not triton):
            for _ in range(WARM_UP_STEPS + rounds * STEPS_PER_ROUND):
                batch, count_before = _step(first), launches.count
                start = time.thread_time()
                model.decoder_backend.forward(x, batch, pool, None)
                seconds.append(time.thread_time() - start)
        count = launches.count - count_before
    return HostTime(1e6 * min(seconds[WARM_UP_STEPS:]) / LAYERS, count / LAYERS)


def _step(first: bool) -> Batch:
    sequences = 1 if first else 1 + DECODES
    blocks = (PAST_TOKENS + CHUNK_TOKENS) // BLOCK_TOKENS
    return Batch.paged(
        [CHUNK_TOKENS, *[1] * (sequences - 1)],
        [0 if first else PAST_TOKENS] * sequences,
        torch.zeros(sequences, blocks, dtype=torch.int64),
        BLOCK_TOKENS,
    )


def _forget_compiled_kernels() -> None:
    """Delete all compiled kernels, which refer to the fake driver."""
    from triton.runtime import JITFunction

    launcher._compiled_kernels.clear()
    for module in (triton_kernels, triton_row_kernels):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()


@contextmanager
def _without_gpu() -> Iterator[_CountingDriver]:
    """Let the model use its Triton kernels on tensors in host memory."""
    from triton.runtime import driver

    launches = _CountingDriver()

    def multiply(
        matmul: Any,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        out: Tensor | None = None,
    ) -> Tensor:
        y = x.new_empty(x.shape[0], matmul._weight.shape[0])
        # As torch computes it on a GPU: GELU (tanh) is part of the product.
        if activation is None or activation == unquantized_matmul.EPILOGUE_ACTIVATION:
            return y
        return norm_activation.activate_rows(y, activation)

    def multiply_fp8(
        rows: Fp8Rows,
        weight: Fp8Rows,
        bias: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        shape = rows.values.shape[0], weight.values.shape[0]
        return rows.scales.new_empty(shape, dtype=dtype)

    def attend(q: Tensor, *_: object) -> Tensor:
        return torch.empty_like(q)

    replacements: list[tuple[Any, str, Any]] = [
        (norm_activation, "_triton_module_for", lambda *_: triton_norm_activation),
        (unquantized_matmul.UnquantizedMatmul, "__call__", multiply),
        (fp8_linear, "scaled_matmul", multiply_fp8),
        (triton_paged, "padded_sdpa", attend),
    ]
    driver_before: Any = driver._active
    driver.set_active(launches)
    with ExitStack() as stack:
        stack.callback(_forget_compiled_kernels)
        stack.callback(setattr, driver, "_active", driver_before)
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield launches
