"""Manifest `preamble.json`: format, config, model identity, and size and checksum of each file.

A native checkpoint is complete only with its manifest, which is therefore written last. A converted
checkpoint of another format also has a manifest, but the reader of that format does not need it.
The manifest has a version number; newer versions are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.safetensors_file import read_small_file
from gpt.checkpoint.logical_tensor import ModelIdentity
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.settings import short_repr

FORMAT, VERSION = "preamble.checkpoint", 1
MANIFEST = "preamble.json"
NATIVE = "native"


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    layout: str  # The format of the listed files, as in Checkpoint.format.
    config: GPTConfig
    identity: ModelIdentity
    files: Mapping[str, Mapping[str, Any]]  # Size in bytes and checksum of each file, by path.

    def to_bytes(self) -> bytes:
        record = {
            "format": FORMAT,
            "version": VERSION,
            "layout": self.layout,
            "config": self.config.to_dict(),
            "identity": asdict(self.identity),
            "files": dict(self.files),
        }
        return json.dumps(record, indent=1).encode()


def is_native(folder: Path) -> bool:
    """Tell whether a directory has the manifest of a native checkpoint."""
    path = folder / MANIFEST
    return path.is_file() and _load_record(path).get("layout", NATIVE) in (None, NATIVE)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a directory, and check the existence and size of each listed file.

    Checksums are not compared here, but by the command `verify`.
    """
    path = folder / MANIFEST
    record = _load_record(path)
    files, identity, layout = (record.get(key) for key in ("files", "identity", "layout"))
    layout = NATIVE if layout is None else layout
    if (
        not isinstance(record.get("config"), dict)
        or not isinstance(identity, dict)
        # Older manifests do not have `stored`.
        or {*identity, "stored"} != set(ModelIdentity.__dataclass_fields__)
        or not all(isinstance(value, str) for value in identity.values())
        or not isinstance(files, dict)
        or not isinstance(layout, str)
    ):
        raise CheckpointError(f"{path} has no valid config, files or identity; copy it again")
    for name, entry in files.items():
        _check_file(folder, name, entry)
    try:
        config = GPTConfig.from_dict(record["config"])
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Manifest(layout, config, ModelIdentity(**identity), files)


def _load_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_small_file(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy it again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a manifest of a Preamble checkpoint; copy it again, or remove it if "
            "another program wrote it"
        )
    version = record.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path} has format version {short_repr(version)}, but this release of Preamble reads "
            f"versions up to {VERSION}; use a newer release, or write the checkpoint again with "
            "this release"
        )
    return record


def _check_file(folder: Path, name: str, entry: object) -> None:
    """Check that a listed file lies inside the directory and has the listed size."""
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        raise CheckpointError(
            f"{folder / MANIFEST} has no size in bytes for {name!r}; copy it again"
        )
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts or not parts or not name.isprintable():
        raise CheckpointError(
            f"{folder / MANIFEST} names {name[:60]!r}, which is not inside {folder}; copy it again"
        )
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder} lacks {name}, which its manifest names; copy it again")
    size = (folder / name).stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(
            f"{folder / name} has {size} bytes, but the manifest records {entry['bytes']}; copy it "
            "again"
        )
