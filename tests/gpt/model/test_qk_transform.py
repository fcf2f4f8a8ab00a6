"""Attention backends that transform queries and keys: when the model calls them, and with what."""

import pytest
import torch
from torch import Tensor

from gpt.attention.backend import QKTransform, QKTransformBackend, TorchAttention
from gpt.attention.kv_cache import KVPool
from gpt.attention.paged import KV
from gpt.batch import Batch
from gpt.config import GPTConfig
from tests.support.models import CLASSIC, EXPERTS, MODERN, ODD, build
from tests.support.rotary_cases import chunked_logits, reference_transform

CPU = torch.device("cpu")
CHUNKS = 4  # Steps of `chunked_logits`.


class TorchTransform(TorchAttention, QKTransformBackend):
    """Transforms queries and keys with the model's own functions, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def transform_and_store(
        self, qkv: Tensor, transform: QKTransform, batch: Batch, kv: KV
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        q, k, v = reference_transform(qkv, transform, batch.positions)
        self.store(k, v, batch, kv)
        return q, k, v


@pytest.mark.parametrize("config", [MODERN, ODD, EXPERTS])
def test_a_model_with_rope_calls_the_backend_in_each_layer(config: GPTConfig) -> None:
    backend = TorchTransform()
    logits = chunked_logits(config, backend, CPU)
    assert backend.calls == CHUNKS * config.num_layers
    assert torch.equal(logits, chunked_logits(config, TorchAttention(), CPU))


def test_a_model_with_learned_positions_alone_does_not_call_the_backend() -> None:
    backend = TorchTransform()
    chunked_logits(CLASSIC, backend, CPU)
    assert backend.calls == 0


def test_a_step_without_a_pool_or_beyond_the_last_position_does_not_call_the_backend() -> None:
    backend = TorchTransform()
    model, plain_model = (
        build(MODERN, dtype=torch.float32, attention_backend=attention)
        for attention in (backend, TorchAttention())
    )
    ids = torch.tensor([[5, 7, 2]])
    assert torch.equal(model.logits(ids), plain_model.logits(ids))
    last = MODERN.max_position_embeddings - 1
    tables = torch.arange(5).unsqueeze(0)
    for position, calls in ((last + 1, 0), (last, MODERN.num_layers)):
        pool = KVPool(MODERN, model.layers, 5, block_tokens=16, dtype=torch.float32)
        batch = Batch.paged([1], [position], tables, 16)
        assert model(ids[0, :1], batch, pool).isfinite().all()
        assert backend.calls == calls
