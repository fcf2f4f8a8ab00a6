"""Models with sinks, ALiBi and windows of some layers equal the formula of attention."""

import pytest
import torch
from torch import Tensor

from gpt.attention.backend import TorchAttention
from gpt.attention.kv_cache import KVPool
from gpt.attention.options import AttentionOptions, alibi_slopes
from gpt.attention.paged import KV
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.parallel.mesh import Mesh
from tests.support.models import CLASSIC, MODERN, build
from tests.support.plain_attention import plain_attention
from tests.support.ranks import ranks

CONFIGS = {
    "sinks": MODERN.with_fields(
        attention_sinks=True, window_layers=(True, False, True, False, True)
    ),
    "alibi": CLASSIC.with_fields(
        position_embedding_type="alibi", num_attention_heads=6, num_query_groups=6, kv_channels=6
    ),
}
LENGTHS = (23, 9)


class PlainAttention(TorchAttention):
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        kv: KV | None,
        options: AttentionOptions,
    ) -> Tensor:
        return plain_attention(q, k, v, batch, kv, options)


def token_ids(config: GPTConfig) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (sum(LENGTHS),), generator=generator)


@torch.inference_mode()
def paged_logits(config: GPTConfig, mesh: Mesh) -> Tensor:
    """Logits of two prompts, the first in two chunks, the last token of each in a decode step."""
    model = build(config, mesh)
    pool = KVPool(config, model.layers, 8, block_tokens=8, dtype=torch.float64, tp=mesh.tp)
    tables = torch.tensor([[3, 1, 2], [5, 4, 0]])
    first, second = token_ids(config).split(LENGTHS)

    def step(pieces: list[Tensor], past: list[int], rows: list[int]) -> Tensor:
        batch = Batch.paged([len(piece) for piece in pieces], past, tables[rows], 8)
        logits: Tensor = model(torch.cat(pieces), batch, pool)
        return logits

    chunk = step([first[:10]], [0], [0])
    prompts = step([first[10:22], second[:8]], [10, 0], [0, 1])
    decoded = step([first[22:], second[8:]], [22, 8], [0, 1])
    return torch.cat([chunk, prompts[:12], decoded[:1], prompts[12:], decoded[1:]])


@torch.inference_mode()
def plain_logits(config: GPTConfig) -> Tensor:
    model = build(config, attention_backend=PlainAttention())
    logits: Tensor = model(token_ids(config), Batch.unpaged(LENGTHS), None)
    assert logits.std() >= 5
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_prompts_and_decode_equal_the_formula(name: str) -> None:
    config = CONFIGS[name]
    torch.testing.assert_close(
        paged_logits(config, Mesh.single()), plain_logits(config), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_virtual_tokens_equal_those_of_the_formula(name: str) -> None:
    config = CONFIGS[name]
    gradients = []
    for backend in (TorchAttention(), PlainAttention()):
        model = build(config, attention_backend=backend)
        generator = torch.Generator().manual_seed(2)
        table = torch.randn(3, config.hidden_size, generator=generator, dtype=torch.float64)
        table.requires_grad_()
        ids = token_ids(config)
        ids[:3] = ids[-9:-6] = config.vocab_size + torch.arange(3)
        logits = model(ids, Batch.unpaged(LENGTHS), None, table)
        logits.log_softmax(-1)[:, 5].sum().backward()
        assert table.grad is not None and table.grad.abs().max() > 1e-2
        gradients.append(table.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def logits_of_rank(rank: int) -> list[Tensor]:
    mesh = Mesh.create(2, 1)
    return [paged_logits(config, mesh) for config in CONFIGS.values()]


@pytest.mark.slow
def test_tensor_ranks_have_the_sinks_and_slopes_of_their_heads() -> None:
    want = [plain_logits(config) for config in CONFIGS.values()]
    for logits in ranks(2, logits_of_rank):
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == slopes
