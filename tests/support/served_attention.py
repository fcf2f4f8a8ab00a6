"""An attention layer that runs a server's steps, to see which Triton kernels they launch."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpt.attention.backend import NormWeights, QKTransform
from gpt.attention.options import AttentionOptions
from gpt.attention.triton_paged import TritonAttention
from gpt.batch import Batch
from gpt.config import GPTConfig
from serving.config import SchedulerConfig
from serving.engine_core.warmup import warmup_steps
from serving.messages import Step
from serving.worker.input_batch import build_input_batch
from tests.support.rotary_cases import make_rotary_table

CONTEXT_TOKENS, BLOCK_TOKENS, SLOTS = 2048, 16, 64
CONFIG = SchedulerConfig(running_requests_max=SLOTS, step_tokens_max=512)
TABLES = np.zeros((SLOTS, CONTEXT_TOKENS // BLOCK_TOKENS), np.int64)


class ServedLayer:
    """An attention layer with a KV pool, which runs steps as a server does.

    `rotary`: the layer has RoPE and qk-norm. `quantizes`: the next linear multiplies in fp8. With
    several `options`, one such layer for each.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        *,
        rotary: bool = False,
        quantizes: bool = False,
        options: Sequence[AttentionOptions] = (AttentionOptions(),),
    ) -> None:
        groups, queries, channels = heads
        self._backend = TritonAttention()
        self._kv = torch.zeros(8, 2, groups, BLOCK_TOKENS, channels, dtype=kv_dtype)
        self._qkv = torch.zeros(
            CONFIG.step_tokens_max + 4 * SLOTS, groups, queries + 2, channels, dtype=dtype
        )
        self._transform = _qk_transform(heads, dtype) if rotary else None
        self._compiles = False
        self._quantizes = quantizes
        self._options = options
        self._last_tokens = torch.zeros(SLOTS + 1, dtype=torch.long)

    def warm_up(self) -> None:
        """Run the server's warm-up steps, and a decode step with lengths on the device.

        As on a GPU, the first step also launches all kernels that later steps may need.
        """
        self._compiles = True
        config = SimpleNamespace(max_position_embeddings=CONTEXT_TOKENS)
        runner: Any = SimpleNamespace(
            slots=SLOTS, blocks=1000, windows=(None,), model=SimpleNamespace(config=config)
        )
        for step in warmup_steps(CONFIG, BLOCK_TOKENS, runner):
            if step.slots:
                self.run_step(step)
        self.run_captured(SLOTS)

    def run_lengths(self, lengths: list[int], past_lengths: list[int]) -> None:
        """Run a step of sequences with these numbers of new and of past tokens."""
        count = len(lengths)
        self.run_step(
            Step(
                0,
                slots=list(range(count)),
                past=past_lengths,
                lengths=lengths,
                token_ids=[0] * sum(lengths),
                draws=[True] * count,
                prompt_score_counts=[0] * count,
            )
        )

    def run_step(self, step: Step) -> None:
        self._run(build_input_batch(step, TABLES[None], BLOCK_TOKENS, self._last_tokens).batch)

    def run_captured(self, size: int) -> None:
        """Run a decode step as CudaGraphRunner does: the lengths are on the device."""
        positions = torch.zeros(size, dtype=torch.long)
        self._run(
            Batch(
                (1,) * size,
                (CONTEXT_TOKENS - 1,) * size,
                positions,
                (positions.clone(), positions % BLOCK_TOKENS),
                torch.zeros(size, TABLES.shape[1], dtype=torch.int32),
                device_context_lengths=torch.ones(size, dtype=torch.int32),
            )
        )

    def _run(self, batch: Batch) -> None:
        qkv = self._qkv[: batch.tokens]
        if self._transform is not None:
            q, k, v = self._backend.transform_and_store(qkv, self._transform, batch, self._kv)
        else:
            q = qkv[:, :, :-2].reshape(len(qkv), -1, qkv.shape[-1])
            k, v = qkv[:, :, -2], qkv[:, :, -1]
            self._backend.store(k, v, batch, self._kv)
        for options in self._options:
            if self._compiles:  # On a GPU the backend calls this itself.
                self._backend.compile_kernels(q, self._kv, options, quantizes=self._quantizes)
            if self._quantizes:
                self._backend.attend_and_quantize(q, k, v, batch, self._kv, options)
            else:
                self._backend.attend(q, k, v, batch, self._kv, options)


def _qk_transform(heads: tuple[int, int, int], dtype: torch.dtype) -> QKTransform:
    groups, queries, channels = heads
    config = GPTConfig(
        num_layers=1,
        hidden_size=channels,
        num_attention_heads=groups * queries,
        num_query_groups=groups,
        kv_channels=channels,
        vocab_size=8,
        max_position_embeddings=CONTEXT_TOKENS,
        position_embedding_type="rope",
        normalization="RMSNorm",
        qk_layernorm=True,
    )
    norm = NormWeights(torch.ones(channels, dtype=dtype), None)
    table = make_rotary_table(config, torch.device("cpu"))
    return QKTransform(config, config.rope, table, (norm, norm))
