"""The base digest: equal for the same model in every format, different for another model."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.digest import (
    ModelIdentity,
    base_digest,
    digest_cache_folder,
    fingerprint,
    identify,
    lookup_identity,
)
from gpt.checkpoint.logical_tensor import Checkpoint, checkpoint_from_tensors
from gpt.config import GPTConfig, RopeScaling
from gpt.formats.huggingface.reader import open_huggingface
from gpt.formats.native import open_native
from tests.support.checkpoints.hf_models import edit_json, model_of
from tests.support.models import (
    CLASSIC,
    CONFIGS,
    EXPERTS,
    MODERN,
    MULTIPLIERS,
    XIELU,
    lively,
)

SMALL = GPTConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=5,
    max_position_embeddings=4,
)


def read_weights(source: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in source.tensors.items()}


def plain_digest(tensors: dict[str, Tensor]) -> str:
    """A slow reference implementation of the definition."""
    lines = ""
    for name, value in sorted(tensors.items()):
        content = value.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        shape = "x".join(map(str, value.shape))
        lines += f"{name} {dtype} {shape} {hashlib.sha256(content).hexdigest()}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("name", CONFIGS)
def test_digest_is_a_hash_of_tensor_hashes(name: str) -> None:
    source = lively(CONFIGS[name])
    assert base_digest(source) == plain_digest(read_weights(source))


@pytest.mark.parametrize("case", ["gpt2", "llama, multi-head"])
def test_digest_is_independent_of_format_and_sharding(case: str, tmp_path: Path) -> None:
    model_of(case).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    source = open_huggingface(tmp_path / "sharded")
    write_native(source, tmp_path / "one")
    write_native(source, tmp_path / "many", shard_bytes_max=5000)
    copies = [source, open_native(tmp_path / "one"), open_native(tmp_path / "many")]
    assert len({base_digest(copy) for copy in copies}) == 1
    assert len({fingerprint(copy) for copy in copies}) == 1
    assert len({identify(copy).digest for copy in copies}) == 1


def test_one_flipped_bit_changes_the_digest() -> None:
    for name, value in read_weights(lively(SMALL)).items():
        tensors = read_weights(lively(SMALL))
        value.view(torch.uint8).view(-1)[-1] ^= 1
        tensors[name] = value
        changed = checkpoint_from_tensors(SMALL, tensors)
        assert base_digest(changed) != base_digest(lively(SMALL)), name


def test_small_weight_change_changes_the_fingerprint() -> None:
    tensors = read_weights(lively(MODERN))
    original = fingerprint(checkpoint_from_tensors(MODERN, tensors))
    tensors["decoder.layers.2.mlp.linear_fc2.weight"] *= 1.001
    assert fingerprint(checkpoint_from_tensors(MODERN, tensors)) != original


# Fields that change the computed function, and fields that other readers may fill differently.
MATTERS: list[tuple[GPTConfig, dict[str, Any]]] = [
    (MODERN, {"rotary_base": 500.0}),
    (MODERN, {"rope_scaling": RopeScaling("linear", 2.0)}),
    (MODERN, {"rotary_interleaved": True}),
    (MODERN, {"layernorm_epsilon": 1e-6}),
    (MODERN, {"window_size": None}),
    (MODERN, {"activation": "gelu"}),
    (CLASSIC, {"activation": "gelu"}),
    (CLASSIC, {"parallel_residual": True}),
    (CLASSIC, {"layernorm_zero_centered_gamma": True}),
    (EXPERTS, {"moe_router_topk": 1}),
    (EXPERTS, {"moe_router_pre_softmax": True}),
    (MULTIPLIERS, {"embedding_multiplier": 1.0}),
    (MULTIPLIERS, {"embedding_multiplier_scope": "token_ids"}),
    (MULTIPLIERS, {"residual_multiplier": 1.0}),
    (MULTIPLIERS, {"logits_scaling": 1.0}),
    (XIELU, {"query_scaling_beta": 0.5}),
    (XIELU, {"query_scaling_length": 6}),
    # The context selects the factors of LongRoPE.
    (XIELU, {"max_position_embeddings": 16}),
]
IDLE: list[tuple[GPTConfig, dict[str, Any]]] = [
    (MODERN, {"rotary_base": int(MODERN.rotary_base)}),
    (MODERN, {"max_position_embeddings": 4096}),
    (MODERN, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    (MODERN, {"moe_router_topk": 7, "moe_router_pre_softmax": True}),
    (CLASSIC, {"rotary_base": 500.0, "rotary_percent": 0.5}),
    (CLASSIC, {"embedding_multiplier_scope": "all", "query_scaling_length": 4}),
    (MODERN, {"softmax_scale": MODERN.kv_channels**-0.5}),
    (XIELU, {"max_position_embeddings": 17}),
]


@pytest.mark.parametrize(("config", "fields"), MATTERS)
def test_fields_with_an_effect_change_the_fingerprint(
    config: GPTConfig, fields: dict[str, Any]
) -> None:
    source = lively(config)
    changed = replace(source, config=config.with_fields(**fields))
    assert fingerprint(changed) != fingerprint(source)
    assert base_digest(changed) == base_digest(source)


@pytest.mark.parametrize(("config", "fields"), IDLE)
def test_fields_without_an_effect_keep_the_fingerprint(
    config: GPTConfig, fields: dict[str, Any]
) -> None:
    source = lively(config)
    changed = replace(source, config=config.with_fields(**fields))
    assert fingerprint(changed) == fingerprint(source)


def saved(folder: Path) -> Checkpoint:
    if not folder.exists():
        model_of("gpt2").save_pretrained(folder)
    return open_huggingface(folder)


def break_weights(folder: Path) -> None:
    for entry in folder.glob("*.json"):
        edit_json(entry, lambda record: record.update(digest="from the cache"))


def test_digest_is_computed_once_and_cached_outside_the_checkpoint(tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    cache = tmp_path / "cache"
    files_before = sorted((tmp_path / "m").iterdir())
    assert lookup_identity(source, cache) == ModelIdentity(
        "", fingerprint(source), "", fingerprint(source)
    )
    identity = identify(source, cache)
    assert lookup_identity(source, cache) == identity
    assert identity == ModelIdentity(
        base_digest(source), fingerprint(source), "", fingerprint(source)
    )
    assert sorted((tmp_path / "m").iterdir()) == files_before and len(list(cache.iterdir())) == 1
    break_weights(cache)
    assert identify(saved(tmp_path / "m"), cache).digest == "from the cache"


def test_replaced_files_are_hashed_again(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    os.utime(file, ns=(1, 1))  # A file system's clock may stand still for milliseconds.
    identify(saved(tmp_path / "m"), tmp_path / "cache")
    break_weights(tmp_path / "cache")
    tensors = model_of("gpt2").state_dict()
    tensors.pop("lm_head.weight", None)
    save_file({key: value * 2 for key, value in tensors.items()}, file)
    new_identity = identify(saved(tmp_path / "m"), tmp_path / "cache")
    assert new_identity.digest == base_digest(saved(tmp_path / "m"))


def test_broken_or_read_only_cache_does_not_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tmp_path / "m")
    identify(source, tmp_path / "cache")
    for entry in (tmp_path / "cache").iterdir():
        entry.write_text("{")
    assert identify(source, tmp_path / "cache").digest == base_digest(source)
    (tmp_path / "file").write_text("in the way")
    assert identify(source, tmp_path / "file" / "cache").digest == base_digest(source)
    assert "event=digest_not_cached" in caplog.text


def test_cache_is_in_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    identify(saved(tmp_path / "m"))
    (entry,) = (tmp_path / "xdg" / "preamble" / "digests").iterdir()
    assert json.loads(entry.read_text())["path"] == str(tmp_path / "m")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert digest_cache_folder() == Path.home() / ".cache" / "preamble" / "digests"


def test_digests_of_models_in_memory_are_not_cached(tmp_path: Path) -> None:
    assert identify(lively(SMALL), tmp_path / "cache").digest == base_digest(lively(SMALL))
    assert not (tmp_path / "cache").exists()
