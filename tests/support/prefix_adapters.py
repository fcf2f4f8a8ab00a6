"""Prefix adapters for tests: drawn, or what a model itself keeps of a text: then they are it."""

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
from serving.messages import Rows


@torch.inference_mode()
def kept(model: GPT, ids: Sequence[int]) -> Tensor:
    """Keys and values that a whole model has of a text: as a prefix they are that text."""
    blocks = -(-len(ids) // BLOCK_TOKENS)
    pool = KVPool(model.config, model.layers, blocks, dtype=model.dtype)
    batch = Batch.paged([len(ids)], [0], torch.arange(blocks)[None], BLOCK_TOKENS)
    pipeline.forward([model], torch.tensor(ids), batch, kv=pool)
    layers = [pool.layer(layer).transpose(2, 3).transpose(1, 2) for layer in model.layers]
    return torch.stack([one.flatten(0, 1)[: len(ids)] for one in layers], 1).flatten(1)


def drawn(config: GPTConfig, count: int, seed: int = 0) -> Tensor:
    """Large enough to be heard everywhere."""
    draws = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(count, config.prefix_width, generator=draws)


def saved(folder: Path, name: str, table: Tensor) -> Rows:
    adapter = build_adapter(Card(name, kind="prefix"), table)
    path = folder / f"{name}.safetensors"
    save_adapter(adapter, path)
    return Rows(adapter.digest, len(table), str(path), "prefix")
