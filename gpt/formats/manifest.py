"""`preamble.json`: what Preamble wrote into a directory, and which model it is.

In a native checkpoint it is the last file to be written, and without it there is no checkpoint; in
a directory of another format it stands beside that format's own files, whose reader does not need
it. It has every file's size and checksum, and a version: a newer one is refused by its number.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.safetensors_file import read_text
from gpt.checkpoint.logical_tensor import Identity
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.settings import shown

FORMAT, VERSION = "preamble.checkpoint", 1
MANIFEST = "preamble.json"
NATIVE = "native"
# Checksums that a file may have: of the first version, and of those that are written piecewise.
CHECKSUMS = ("sha256", "crc32")


@dataclass(frozen=True)
class Manifest:
    layout: str  # The format of the files beside it, as their reader calls it.
    config: GPTConfig
    identity: Identity
    files: Mapping[str, Mapping[str, Any]]  # Sizes in bytes, and checksums, by path.

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
    """Whether a directory has a manifest, and that is of a native checkpoint."""
    where = folder / MANIFEST
    return where.is_file() and _record(where).get("layout", NATIVE) in (None, NATIVE)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a directory; each file that it names is there and has its size.

    Checksums are `verify`'s work.
    """
    where = folder / MANIFEST
    record = _record(where)
    files, identity, layout = (record.get(key) for key in ("files", "identity", "layout"))
    layout = NATIVE if layout is None else layout
    if (
        not isinstance(record.get("config"), dict)
        or not isinstance(identity, dict)
        or {*identity, "stored"} != set(Identity.__dataclass_fields__)  # It came later.
        or not all(isinstance(value, str) for value in identity.values())
        or not isinstance(files, dict)
        or not isinstance(layout, str)
    ):
        raise CheckpointError(f"{where} lacks its config, files or identity; copy it again")
    for name, entry in files.items():
        _check_file(folder, name, entry)
    try:
        config = GPTConfig.from_dict(record["config"])
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return Manifest(layout, config, Identity(**identity), files)


def _record(where: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_text(where))
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON ({error}); copy it again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not a manifest of a Preamble checkpoint")
    version = record.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{where} has format version {shown(version)}, this Preamble reads up to {VERSION}; "
            "upgrade Preamble, or write the checkpoint again with this one"
        )
    return record


def _check_file(folder: Path, name: str, entry: object) -> None:
    """A listed file lies inside the directory and has its size."""
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        raise CheckpointError(f"{folder / MANIFEST} does not say how large {name!r} is")
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
            f"{folder / name} has {size} bytes, its manifest says {entry['bytes']}; copy it again"
        )
