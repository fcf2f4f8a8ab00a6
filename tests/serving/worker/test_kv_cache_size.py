"""KV cache size: the blocks of a setting, of the free memory, and of the running sequences."""

from dataclasses import replace

import pytest

from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from serving.config import ServerConfig
from serving.worker import kv_cache_size
from serving.worker.kv_cache_size import available_kv_blocks
from tests.support.models import CLASSIC, build

BLOCK_TOKENS = 4
CONFIG = ServerConfig(
    "model", kv_block_tokens=BLOCK_TOKENS, running_requests_max=6, step_tokens_max=40
)


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


def test_kv_tokens_max_gives_its_blocks_and_block_0(model: GPT) -> None:
    config = CONFIG.with_fields(kv_tokens_max=17)
    assert available_kv_blocks(model, config.scheduler_config, config.cache_config) == 6


def test_by_default_every_running_sequence_fits_its_context(model: GPT) -> None:
    config = CONFIG.with_fields(kv_tokens_max=None)
    assert (
        available_kv_blocks(model, config.scheduler_config, config.cache_config)
        == 6 * CLASSIC.max_position_embeddings // BLOCK_TOKENS + 1
    )


@pytest.mark.parametrize("free", [0, 3 << 20])
def test_free_memory_limits_the_blocks_and_none_is_an_error(
    free: int, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.with_fields(kv_tokens_max=None, running_requests_max=40)
    monkeypatch.setattr(kv_cache_size, "available_memory_bytes", lambda: free)
    if not free:
        with pytest.raises(ConfigError, match="kv_tokens_max"):
            available_kv_blocks(model, config.scheduler_config, config.cache_config)
        return
    # Keys and values of 5 layers with 32 channels in fp64: 10,240 bytes per block of 4 tokens.
    assert (
        available_kv_blocks(model, config.scheduler_config, config.cache_config)
        == free // 4 // 10_240
    )
    assert (
        available_kv_blocks(
            model, config.scheduler_config, config.cache_config, ranks_sharing_memory=2
        )
        == free // 4 // 2 // 10_240
    )


def test_kv_tokens_max_over_free_memory_names_the_largest_allowed_number(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_size, "available_memory_bytes", lambda: 10 * 10_240)
    with pytest.raises(ConfigError, match=r"set it to at most 36\b"):
        available_kv_blocks(
            model, CONFIG.scheduler_config, replace(CONFIG.cache_config, kv_tokens_max=40)
        )
    cache_config = replace(CONFIG.cache_config, kv_tokens_max=36)
    assert available_kv_blocks(model, CONFIG.scheduler_config, cache_config) == 10
