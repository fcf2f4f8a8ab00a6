"""Base digest and fingerprint: the identity of a model, independent of format and sharding.

The base digest is a SHA-256 over the name, dtype, shape and SHA-256 of every logical (unsharded,
unpadded) tensor. The fingerprint hashes the config fields that affect the forward pass, and a few
elements of each tensor, so it can be computed at every start. A computed base digest is cached in
the user's cache directory, because the checkpoint's directory may be read-only.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint.logical_tensor import Checkpoint, LogicalTensor, ModelIdentity, allocate_scratch
from gpt.config import GPTConfig, RopeScaling
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import CheckpointError
from gpt.files.abandoned_files import remove_abandoned_partials
from gpt.files.atomic_files import write_atomic
from gpt.host_limits import usable_cores

__all__ = ["ModelIdentity", "base_digest", "combine_digests", "fingerprint", "identify"]

# The fingerprint reads this number of columns in the first, the middle and the last row of each
# tensor.
SAMPLE_COLUMNS = 64

# The fields that each kind of RoPE scaling uses, besides its kind and factor.
_SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("frequency_factors", "attention_factor"),
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
    ),
}

# Fields of GPTConfig that version 0.2 did not have, with the values that mean "as in version 0.2".
_LATER_FIELDS: Mapping[str, object] = {
    "rope_layers": (),
    "window_rope": None,
    "norm_placement": "pre",
    "embedding_layernorm": False,
    "activation_func_clamp_value": 0.0,
    "glu_linear_offset": 0.0,
    "qk_layernorm_scope": "head",
    "softmax_scale": 0.0,
    "attention_sinks": False,
    "query_scaling_beta": 0.0,
    "query_scaling_length": 0,
    "embedding_multiplier": 1.0,
    "embedding_multiplier_scope": "token_ids",
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "window_layers": (),
    "moe_router_bias": False,
}

# Maximum number of hashing threads. More threads are not faster, because the disk is the limit.
WORKERS_MAX = 8


def base_digest(checkpoint: Checkpoint) -> str:
    """Compute the base digest from every byte of the weights."""

    thread_scratch = threading.local()

    def hash_tensor(logical: LogicalTensor) -> str:
        hasher = hashlib.sha256()
        for block in logical.iter_blocks(thread_scratch.bytes):
            hasher.update(block)
        return hasher.hexdigest()

    def init_worker() -> None:
        thread_scratch.bytes = allocate_scratch()

    workers = min(WORKERS_MAX, usable_cores())
    with ThreadPoolExecutor(workers, initializer=init_worker) as pool:
        hashes = pool.map(hash_tensor, checkpoint.tensors.values())
        return combine_digests(checkpoint, dict(zip(checkpoint.tensors, hashes, strict=True)))


def combine_digests(checkpoint: Checkpoint, hashes: Mapping[str, str]) -> str:
    """Compute the base digest from `hashes`, the hexadecimal SHA-256 of each tensor by name."""
    lines = [
        f"{_tensor_header(name, checkpoint.tensors[name])} {hashes[name]}\n"
        for name in sorted(hashes)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hash `functional_config` and a few elements of each tensor; no other elements are read."""
    hasher = hashlib.sha256(
        json.dumps(functional_config(checkpoint.config), sort_keys=True).encode()
    )
    for name in sorted(checkpoint.tensors):
        logical = checkpoint.tensors[name]
        hasher.update(_tensor_header(name, logical).encode())
        for row in sorted({0, logical.shape[0] // 2, logical.shape[0] - 1}):
            sample = logical.read_sample(row, 1, SAMPLE_COLUMNS)
            hasher.update(sample.view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _tensor_header(name: str, logical: LogicalTensor) -> str:
    shape = "x".join(map(str, logical.shape))
    return f"{name} {FLOAT_DTYPE_NAMES[logical.dtype]} {shape}"


def functional_config(config: GPTConfig) -> dict[str, Any]:
    """Return the config fields that affect the forward pass.

    The other fields are omitted, because formats can record different values for the same model.
    """
    fields = config.to_dict()
    ignored_fields = ["dtype", "hidden_dropout", "attention_dropout"]
    if not config.has_learned_positions:
        # Without learned positions this field is only a limit; no tensor has this size.
        ignored_fields.append("max_position_embeddings")
    if not config.uses_rope:
        ignored_fields += [name for name in fields if name.startswith(("rotary_", "rope_"))]
    if all(config.moe_layers):
        ignored_fields.append("ffn_hidden_size")  # Only dense layers use this field.
    if not any(config.moe_layers):
        ignored_fields += ["num_experts"]
        ignored_fields += [name for name in fields if name.startswith("moe_")]
    # Of the factors of LongRoPE, the forward pass uses those for the model's context.
    fields["rope_scaling"] = _functional_scaling(config.rope.scaling)
    if config.window_rope is not None:
        window_rope = config.window_rope.for_context(config.max_position_embeddings)
        fields["window_rope"]["scaling"] = _functional_scaling(window_rope.scaling)
    # A digest must not change when a version of this project adds a field that the model lacks.
    ignored_fields += [name for name, default in _LATER_FIELDS.items() if fields[name] == default]
    return {name: _normalize_numbers(fields[name]) for name in fields if name not in ignored_fields}


def _functional_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the fields that a kind of scaling uses."""
    if scaling is None:
        return None
    names = ("kind", "factor", *_SCALING_FIELDS[scaling.kind])
    return {name: getattr(scaling, name) for name in names}


def _normalize_numbers(value: Any) -> Any:
    """Convert integers to floats, so that 10000 and 10000.0 hash to the same value."""
    if isinstance(value, dict):
        return {key: _normalize_numbers(inner) for key, inner in value.items()}
    return float(value) if type(value) is int else value


def lookup_identity(checkpoint: Checkpoint, cache: Path | None = None) -> ModelIdentity:
    """Return the identity from the manifest or, without a manifest, from the digest cache.

    Of the weights, only the elements that the fingerprint hashes are read. The digest is empty if
    there is neither a manifest nor a cache record. Raises CheckpointError if the fingerprint of the
    files differs from the fingerprint in the manifest.
    """
    sampled = fingerprint(checkpoint)
    if checkpoint.identity is None:
        return ModelIdentity(
            _read_cached_digest(checkpoint, sampled, cache), sampled, sampled=sampled
        )
    if checkpoint.identity.sampled != sampled:
        raise CheckpointError(
            f"{checkpoint.path}: the weights do not match the fingerprint in the manifest, so they "
            "were changed after the manifest was written; convert the checkpoint again"
        )
    return checkpoint.identity


def identify(checkpoint: Checkpoint, cache: Path | None = None) -> ModelIdentity:
    """Return the identity with its digest; a digest that is not known is computed and cached."""
    identity = lookup_identity(checkpoint, cache)
    if identity.digest:
        return identity
    identity = replace(identity, digest=base_digest(checkpoint))
    cache_digest(checkpoint, identity, cache)
    return identity


def cache_digest(
    checkpoint: Checkpoint, identity: ModelIdentity, cache: Path | None = None
) -> None:
    """Write a computed base digest to the cache; do nothing for a checkpoint without files."""
    if checkpoint.files:
        path = _cache_path(checkpoint, identity.sampled, cache)
        _write_cache(path, {"path": str(checkpoint.path), "digest": identity.digest})


def _read_cached_digest(checkpoint: Checkpoint, sampled: str, cache: Path | None) -> str:
    if not checkpoint.files:
        return ""
    try:
        return str(json.loads(_cache_path(checkpoint, sampled, cache).read_bytes())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _cache_path(checkpoint: Checkpoint, sampled: str, cache: Path | None) -> Path:
    return (cache or digest_cache_folder()) / f"{_cache_key(checkpoint, sampled)}.json"


def digest_cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "preamble" / "digests"


def _cache_key(checkpoint: Checkpoint, sampled: str) -> str:
    """Return a key that changes with the path, size or modification time of a file.

    The fingerprint `sampled` is a part of the key. A change of the weight elements that the
    fingerprint reads therefore changes the key, even if no size or modification time changes.
    """
    key_parts: list[Any] = [str(checkpoint.path.resolve()), sampled]
    for file in checkpoint.files:
        status = file.stat()
        key_parts.append([file.name, status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()


def _write_cache(path: Path, record: dict[str, str]) -> None:
    """Write a cache record; log a failure, because the digest can be computed again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned_partials(path.parent)
        write_atomic(path, json.dumps(record).encode(), durable=False)
    except OSError as error:
        logging.getLogger(__name__).warning("event=digest_not_cached reason=%s", error)
