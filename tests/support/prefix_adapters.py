"""Prefix adapters: random ones, and the KV cache of a text as a prefix."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.attention.kv_cache import BLOCK_TOKENS, KVPool
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from serving.messages import AdapterRef


@torch.inference_mode()
def kv_of_text(model: GPT, ids: Sequence[int]) -> Tensor:
    """Keys and values that a model computes for a text: as a prefix they are equal to that text."""
    blocks = -(-len(ids) // BLOCK_TOKENS)
    pool = KVPool(model.config, model.layers, blocks, dtype=model.dtype)
    batch = Batch.paged([len(ids)], [0], torch.arange(blocks)[None], BLOCK_TOKENS)
    pipeline.forward([model], torch.tensor(ids), batch, kv=pool)
    layers = [pool.layer(layer).transpose(2, 3).transpose(1, 2) for layer in model.layers]
    return torch.stack([layer_kv.flatten(0, 1)[: len(ids)] for layer_kv in layers], 1).flatten(1)


def draw_prefix_table(config: GPTConfig, count: int, seed: int = 0) -> Tensor:
    """A random table, large enough to change every logit."""
    draws = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(count, config.prefix_width, generator=draws)


def save_prefix_adapter(folder: Path, name: str, table: Tensor) -> AdapterRef:
    adapter = build_adapter(Card(name, kind="prefix"), table)
    path = folder / f"{name}.safetensors"
    save_adapter(adapter, path)
    return AdapterRef(adapter.digest, len(table), str(path), "prefix")
