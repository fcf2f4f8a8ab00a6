"""Preamble's own checkpoint: canonical tensors, whole and unsharded, in safetensors files.

`preamble.json` is written last: the config, each file's size and checksum, and which model it is.
A directory without it is no checkpoint, and a target appears under its name only when everything
is on the disk. A manifest of a newer version is refused by its number.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.digest import combine, fingerprint, identify
from gpt.errors import CheckpointError, ConfigError
from gpt.logical import (
    Checkpoint,
    Identity,
    Logical,
    in_memory,
    overridden,
    refuse_larger_vocabulary,
    stack,
)
from gpt.safetensors_file import open_safetensors, write_safetensors

FORMAT, VERSION = "preamble.checkpoint", 1
MANIFEST = "preamble.json"
TOKENIZER = "tokenizer"

# Of a tokenizer's directory, what is copied: never weights that lie beside it.
TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken")
NOT_TOKENIZER = ("config.json", "preamble.json", "model.safetensors.index.json")

SHARD_BYTES_MAX = 4 << 30


def open_native(path: Path, changes: GPTConfig | Mapping[str, Any] | None = None) -> Checkpoint:
    """A directory that `write_native` made. `changes` are fields of GPTConfig to override."""
    manifest = _read_manifest(path)
    try:
        config = GPTConfig.from_dict(manifest["config"])
        used = overridden(config, changes)
    except ConfigError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from None
    refuse_larger_vocabulary(path, used, config.vocab_size)
    tensors: dict[str, Logical] = {}
    weights = [path / name for name in manifest["files"] if name.endswith(".safetensors")]
    for file in weights:
        for name, stored in open_safetensors(file).items():
            if name in tensors:
                raise CheckpointError(f"{file} holds {name}, which another file holds too")
            tensors[name] = stack([(stored, 0, stored.shape[0] if stored.shape else 1)])
    if used.vocab_size < config.vocab_size:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in tensors:
                source = tensors[name].pieces[0].source
                tensors[name] = stack([(source, 0, used.vocab_size)])
    recorded = Identity(**manifest["identity"])
    checkpoint = Checkpoint(
        *(path, "native", used, tensors, tuple(weights)),
        tokenizer=path / TOKENIZER if (path / TOKENIZER).is_dir() else None,
        notes=(recorded.note,) if recorded.note else (),
        identity=recorded if used == config else None,
    )
    checkpoint.check()
    return checkpoint


def _read_manifest(path: Path) -> dict[str, Any]:
    where = path / MANIFEST
    try:
        manifest = json.loads(where.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON ({error}); copy it again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not a manifest of a Preamble checkpoint")
    version = manifest.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{where} has format version {version!r}, this Preamble reads up to {VERSION}; upgrade "
            "Preamble, or write the checkpoint again with this one"
        )
    files, identity = manifest.get("files"), manifest.get("identity")
    if (
        not isinstance(manifest.get("config"), dict)
        or not isinstance(identity, dict)
        or set(identity) != set(Identity.__dataclass_fields__)
        or not all(isinstance(value, str) for value in identity.values())
        or not isinstance(files, dict)
    ):
        raise CheckpointError(f"{where} lacks its config, files or identity; copy it again")
    for name, record in files.items():
        _check_file(path, name, record)
    return manifest


def _check_file(path: Path, name: str, record: object) -> None:
    """A listed file lies inside the directory and has its size. Checksums are `verify`'s work."""
    if not isinstance(record, dict) or type(record.get("bytes")) is not int:
        raise CheckpointError(f"{path / MANIFEST} does not say how large {name!r} is")
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts or not parts:
        raise CheckpointError(f"{path / MANIFEST} names {name!r}, which is not inside {path}")
    if not (path / name).is_file():
        raise CheckpointError(f"{path} lacks {name}, which its manifest names; copy it again")
    size = (path / name).stat().st_size
    if size != record["bytes"]:
        raise CheckpointError(
            f"{path / name} has {size} bytes, its manifest says {record['bytes']}; copy it again"
        )


def write_native(
    source: Checkpoint | tuple[GPTConfig, Mapping[str, Tensor]],
    target: Path,
    *,
    tokenizer: Path | None = None,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    dtype: torch.dtype | None = None,
    identity: Identity | None = None,
) -> Identity:
    """Write a checkpoint, or tensors in memory, as native; all of it appears at once or nothing.

    With `dtype` the weights are converted, and the identity stays the origin's, with a note. A
    caller that knows the origin's identity passes it; else it is computed.
    """
    checkpoint = source if isinstance(source, Checkpoint) else in_memory(*source)
    checkpoint.check()
    if identity is None and checkpoint.identity is not None:
        identity = identify(checkpoint)  # As recorded, if the weights still are what it says.
    if dtype is not None:
        converted = checkpoint.in_dtype(dtype)
        if any(converted.tensors[n].dtype != t.dtype for n, t in checkpoint.tensors.items()):
            origin = identity or identify(checkpoint)
            note = f"converted from {checkpoint.config.dtype} to {converted.config.dtype}"
            identity = replace(origin, note=f"{origin.note}; {note}" if origin.note else note)
        checkpoint = converted
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; remove it or choose another target")
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        part.mkdir(parents=True)
        files, hashes = _write_weights(checkpoint, part, shard_bytes_max)
        files |= _copy_tokenizer(tokenizer or checkpoint.tokenizer, part)
        sampled, digest = fingerprint(checkpoint), combine(checkpoint, hashes)
        identity = replace(identity or Identity(digest, sampled), sampled=sampled)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "config": checkpoint.config.to_dict(),
            "identity": asdict(identity),
            "files": files,
        }
        _write(part / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(part)
        part.rename(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return identity


def _write_weights(
    checkpoint: Checkpoint, folder: Path, shard_bytes_max: int
) -> tuple[dict[str, Any], dict[str, str]]:
    shards: list[dict[str, Logical]] = []
    room = 0
    for name, logical in checkpoint.tensors.items():
        if not shards or logical.nbytes > room:
            shards.append({})
            room = shard_bytes_max
        shards[-1][name] = logical
        room -= logical.nbytes
    files: dict[str, Any] = {}
    hashes: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        written = write_safetensors(folder / file, shard)
        files[file] = {"bytes": written.size, "sha256": written.sha256}
        hashes |= written.tensors
    return files, hashes


def _copy_tokenizer(tokenizer: Path | None, folder: Path) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    sources = [tokenizer]
    if tokenizer.name.endswith("vocab.json"):
        sources.append(tokenizer.with_name(tokenizer.name.replace("vocab.json", "merges.txt")))
    if tokenizer.is_dir():
        sources = [
            file
            for file in sorted(tokenizer.iterdir())
            if file.suffix in TOKENIZER_SUFFIXES and file.name not in NOT_TOKENIZER
        ]
    (folder / TOKENIZER).mkdir()
    files = {}
    for file in sources:
        text = file.read_bytes()
        _write(folder / TOKENIZER / file.name, text)
        record = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        files[f"{TOKENIZER}/{file.name}"] = record
    _sync_folder(folder / TOKENIZER)
    return files


def _write(path: Path, text: bytes) -> None:
    with open(path, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
