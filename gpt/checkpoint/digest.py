"""Which model a checkpoint is, whatever its format, split and files.

The digest hashes every logical, unpadded tensor in its stored dtype: a hash of their hashes. The
fingerprint hashes the part of the config that changes the function, and a few elements of each
tensor; a start can afford it. A computed digest is kept in the user's cache, not in the source.
"""

import hashlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpt.checkpoint.logical_tensor import Checkpoint, Identity, Logical, make_room
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import CheckpointError

__all__ = ["Identity", "base_digest", "combine", "fingerprint", "identify"]

# Per tensor, the fingerprint takes so many columns of one row at its start, middle and end.
SAMPLE_COLUMNS = 64

# More threads than this only wait for the disk.
WORKERS_MAX = 8


def base_digest(checkpoint: Checkpoint) -> str:
    """The digest, computed from every byte, at the speed of the disk or of the hash."""

    own_room = threading.local()

    def one(logical: Logical) -> str:
        own = hashlib.sha256()
        for block in logical.blocks(own_room.bytes):
            own.update(block)
        return own.hexdigest()

    def start() -> None:
        own_room.bytes = make_room()

    workers = min(WORKERS_MAX, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, initializer=start) as pool:
        hashes = pool.map(one, checkpoint.tensors.values())
        return combine(checkpoint, dict(zip(checkpoint.tensors, hashes, strict=True)))


def combine(checkpoint: Checkpoint, hashes: Mapping[str, str]) -> str:
    """The digest of tensors whose own hashes are known."""
    lines = [f"{_head(name, checkpoint.tensors[name])} {hashes[name]}\n" for name in sorted(hashes)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fingerprint(checkpoint: Checkpoint) -> str:
    """A quick likeness of the model: what it computes, and a few elements of each tensor."""
    whole = hashlib.sha256(json.dumps(function(checkpoint.config), sort_keys=True).encode())
    for name in sorted(checkpoint.tensors):
        logical = checkpoint.tensors[name]
        whole.update(_head(name, logical).encode())
        for row in sorted({0, logical.shape[0] // 2, logical.shape[0] - 1}):
            sample = logical.corner(row, 1, SAMPLE_COLUMNS)
            whole.update(sample.view(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _head(name: str, logical: Logical) -> str:
    shape = "x".join(map(str, logical.shape))
    return f"{name} {FLOAT_NAMES[logical.dtype]} {shape}"


def function(config: GPTConfig) -> dict[str, Any]:
    """The fields that change what is computed; readers may fill the others as they like."""
    fields = config.to_dict()
    idle = ["dtype", "hidden_dropout", "attention_dropout"]
    if not config.learned_positions:
        idle.append("max_position_embeddings")  # A limit; not a shape.
    if not config.rotary:
        idle += [name for name in fields if name.startswith(("rotary_", "rope_"))]
    if all(config.moe_layers):
        idle.append("ffn_hidden_size")  # Of dense layers.
    if not any(config.moe_layers):
        idle += ["num_experts"]
        idle += [name for name in fields if name.startswith("moe_")]
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        fields["rope_scaling"] = {"kind": "linear", "factor": config.rope_scaling.factor}
    return {name: _plain(fields[name]) for name in fields if name not in idle}


def _plain(value: Any) -> Any:
    """10000 and 10000.0 are one value, whichever a file had."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return float(value) if type(value) is int else value


def glance(checkpoint: Checkpoint, cache: Path | None = None) -> Identity:
    """Which model it is, without reading it all; the digest is empty if nobody has computed it.

    A record is trusted only if the fingerprint still fits the tensors.
    """
    sampled = fingerprint(checkpoint)
    if checkpoint.identity is None:
        return Identity(_remembered(checkpoint, sampled, cache), sampled, sampled=sampled)
    if checkpoint.identity.sampled != sampled:
        raise CheckpointError(
            f"{checkpoint.path}: the weights are not those that its manifest describes; they were "
            "changed after it was written: convert the checkpoint again"
        )
    return checkpoint.identity


def identify(checkpoint: Checkpoint, cache: Path | None = None) -> Identity:
    """Which model it is: as recorded, as cached, or computed now, byte by byte, and cached."""
    known = glance(checkpoint, cache)
    if known.digest:
        return known
    known = replace(known, digest=base_digest(checkpoint))
    remember(checkpoint, known, cache)
    return known


def remember(checkpoint: Checkpoint, identity: Identity, cache: Path | None = None) -> None:
    """Cache a digest that somebody has computed from every byte."""
    if checkpoint.files:
        place = _place(checkpoint, identity.sampled, cache)
        _remember(place, {"path": str(checkpoint.path), "digest": identity.digest})


def _remembered(checkpoint: Checkpoint, sampled: str, cache: Path | None) -> str:
    if not checkpoint.files:
        return ""
    try:
        return str(json.loads(_place(checkpoint, sampled, cache).read_bytes())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _place(checkpoint: Checkpoint, sampled: str, cache: Path | None) -> Path:
    return (cache or cache_folder()) / f"{_key(checkpoint, sampled)}.json"


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "preamble" / "digests"


def _key(checkpoint: Checkpoint, sampled: str) -> str:
    """Changes when a file is replaced, even by one of the same size and time."""
    facts: list[Any] = [str(checkpoint.path.resolve()), sampled]
    for file in checkpoint.files:
        status = file.stat()
        facts.append([file.name, status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _remember(place: Path, record: dict[str, str]) -> None:
    """A cache that cannot be written costs time at the next start, nothing else."""
    part = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(record))
        part.replace(place)
    except OSError as error:
        logging.getLogger(__name__).warning("event=digest_not_cached reason=%s", error)
