"""Tests of the memory budget: KV blocks, shares of memory, workspace and limits of a step."""

import pytest

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from planning.inference.estimate import ServingSplit
from serving.config import ServerConfig
from serving.memory_budget import (
    SCORED_BYTES_MAX,
    KVBlockLayout,
    check_step_tokens,
    kv_cache_bytes,
    running_kv_tokens_max,
    workspace_bytes,
)

LAYOUT = KVBlockLayout(block_tokens=16, bytes_per_token=10)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 1), (1, 2), (16, 2), (17, 3), (160, 11)])
def test_a_pool_has_whole_blocks_and_block_0(tokens: int, blocks: int) -> None:
    assert LAYOUT.pool_blocks(tokens) == blocks
    assert LAYOUT.token_capacity(blocks) == (blocks - 1) * 16


@pytest.mark.parametrize(
    ("kv_bytes", "blocks", "tokens"), [(-1, -1, 0), (159, 0, 0), (160, 1, 0), (1600, 10, 144)]
)
def test_bytes_give_whole_blocks_and_never_fewer_than_0_tokens(
    kv_bytes: int, blocks: int, tokens: int
) -> None:
    assert LAYOUT.blocks_within(kv_bytes) == blocks
    assert LAYOUT.token_capacity(blocks) == tokens


def test_host_share_is_of_the_unreserved_memory_and_device_share_of_all_memory() -> None:
    assert kv_cache_bytes(1000, 200, on_cpu=True) == 200  # A quarter of 800.
    assert kv_cache_bytes(1000, 200, on_cpu=False) == 700  # 0.9 of 1000, without 200.
    assert kv_cache_bytes(1000, 1001, on_cpu=True) == kv_cache_bytes(1000, 901, on_cpu=False) == 0


def test_running_requests_use_whole_blocks_for_their_contexts() -> None:
    assert running_kv_tokens_max(3, 33, 16) == 3 * 48


def test_workspace_counts_activations_logits_scores_and_adapter_rows() -> None:
    model_config = GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=640,
        ffn_hidden_size=256,
    )
    activations = 2 * 512 * (8 * 64 + 3 * 256) * 2
    logits, scored = 16 * 8 * 100, 4 * SCORED_BYTES_MAX
    limits = {"step_tokens_max": 512, "logits_rows": 8}
    assert workspace_bytes(model_config, 2, **limits) == activations + logits + scored
    adapter_bytes = workspace_bytes(model_config, 2, **limits, adapter_rows=5) - (
        activations + logits + scored
    )
    assert adapter_bytes == 5 * 64 * 2


def test_server_and_planner_refuse_more_running_requests_than_step_tokens() -> None:
    check_step_tokens(64, 64)
    message = "running_requests_max is 65, but a step has only 64 tokens"
    with pytest.raises(ConfigError, match=message):
        ServerConfig("model").with_fields(running_requests_max=65, step_tokens_max=64)
    with pytest.raises(ConfigError, match=message):
        ServingSplit(running_requests_max=65, step_tokens_max=64)
