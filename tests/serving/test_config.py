"""The parts of ServerConfig are built from flat keys, and each key belongs to one part."""

from dataclasses import fields
from typing import Any, get_type_hints

import msgspec
import pytest

from gpt.errors import ConfigError
from gpt.settings import setting_fields
from serving.config import CacheConfig, SchedulerConfig, ServerConfig

PART_TYPES = get_type_hints(ServerConfig)


def test_each_key_belongs_to_one_part() -> None:
    keys = [field.name for part_type in PART_TYPES.values() for field in fields(part_type)]
    assert len(keys) == len(set(keys)) == len(setting_fields(ServerConfig))
    assert not set(keys) & set(PART_TYPES)


def test_the_parts_have_the_values_and_the_defaults_of_the_keys() -> None:
    config = ServerConfig("m", kv_block_tokens=8, step_tokens_max=99)
    assert config.model_config.model == "m"
    assert config.cache_config == CacheConfig(kv_block_tokens=8)
    assert config.scheduler_config == SchedulerConfig(step_tokens_max=99)


@pytest.mark.parametrize(
    ("settings", "step_tokens_max"),
    [
        ({}, 512),
        ({"device": "cpu"}, 512),
        ({"device": "cuda"}, 2048),
        ({"device": "cuda:1"}, 2048),
        ({"device": "cuda", "step_tokens_max": 512}, 512),
    ],
)
def test_steps_on_a_cuda_device_have_more_tokens(
    settings: dict[str, Any], step_tokens_max: int
) -> None:
    assert ServerConfig("m", **settings).scheduler_config.step_tokens_max == step_tokens_max
    read = ServerConfig.read(None, {"model": "m", **settings})
    assert read.scheduler_config.step_tokens_max == step_tokens_max


def test_a_profile_sets_the_tokens_of_a_step_on_a_cuda_device() -> None:
    config = ServerConfig.read(None, {"model": "m", "device": "cuda"}, profile="latency")
    assert config.scheduler_config.step_tokens_max == 256


def test_settings_survive_the_way_to_a_rank_process() -> None:
    config = ServerConfig("m", tp=2, drain_s=5.0, prove=False, metrics_port=1)
    record = msgspec.json.decode(msgspec.json.encode(config.to_dict()), type=dict)
    assert ServerConfig(**record) == config


def test_changed_settings_are_checked_across_the_parts() -> None:
    config = ServerConfig("m", pp=2)
    assert config.with_fields(tp=3).parallel_config.ranks == 6
    with pytest.raises(ConfigError, match="step_ahead is on with 2 pipeline stages"):
        config.with_fields(step_ahead="on")
    with pytest.raises(ConfigError, match="step_tokens_max is 8, less than a block of 16"):
        config.with_fields(step_tokens_max=8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_tokens'"):
        config.with_fields(kv_tokens=1)
