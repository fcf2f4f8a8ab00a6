"""The adapter file: one safetensors with the table and, as metadata, the card.

It is written whole or not at all, and read with its digest checked, so nothing half-written and
nothing changed since is ever used. Adapters of HF PEFT, TGIS and NeMo are read as well. Whether an
adapter fits a model is asked here; how its rows enter the model is not known.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gpt.adapters.card import Adapter, Card, Golden, Name, build_adapter, parse_name
from gpt.adapters.import_nemo import is_nemo_prompt, open_nemo_prompt
from gpt.adapters.import_peft import open_peft, open_tgis
from gpt.checkpoint.files.safetensors_file import open_safetensors
from gpt.checkpoint.logical_tensor import Checkpoint, Identity
from gpt.config import GPTConfig
from gpt.dtypes import FLOATS
from gpt.errors import AdapterError, CheckpointError, RequestError

__all__ = [
    "Adapter",
    "Card",
    "Golden",
    "Name",
    "build_adapter",
    "check_adapter",
    "check_folder",
    "instruction_adapter",
    "latest_adapter",
    "open_adapter",
    "parse_name",
    "publish_adapter",
    "save_adapter",
    "table_width",
]

FORMAT = "preamble.adapter"
VERSION = 1
SUFFIX = ".safetensors"
TABLE = "table"


def save_adapter(adapter: Adapter, path: Path, *, overwrite: bool = True) -> None:
    """Write the file and bring it to the disk; whoever looks sees all of it or none."""
    if path.suffix != SUFFIX:
        raise AdapterError(f"{path} must end with {SUFFIX}, or nobody will take it for an adapter")
    try:
        _write(adapter, path, os.replace if overwrite else os.link)
    except FileExistsError:
        raise AdapterError(f"{path} exists already; remove it or choose another name") from None


def publish_adapter(adapter: Adapter, folder: Path) -> Path:
    """Write the file as the next version of its card's name; what was written never changes."""
    name, version = adapter.card.name, _last_version(folder, adapter.card.name)
    while True:
        version += 1
        path = folder / f"{name}@{version}{SUFFIX}"
        try:
            parse_name(f"{name}@{version}")
        except RequestError:
            raise AdapterError(
                f"{folder} has no version of {name!r} left; use a new name"
            ) from None
        try:
            # Of two that chose one number, the second link fails: it takes the next number.
            _write(adapter, path, os.link)
        except FileExistsError:
            continue
        return path


def latest_adapter(folder: Path, name: str) -> tuple[Path, Adapter] | None:
    """The newest version of a name that `publish_adapter` has written."""
    path = folder / f"{name}@{_last_version(folder, name)}{SUFFIX}"
    return (path, open_adapter(path)) if path.exists() else None


def check_folder(folder: Path) -> None:
    """Make the folder, and write into it as `publish_adapter` will; nothing else stays."""
    probe = folder / f".{secrets.token_hex(8)}.part"
    linked = probe.with_suffix(".link")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        try:
            os.link(probe, linked)
        finally:
            linked.unlink(missing_ok=True)
            probe.unlink()
    except FileExistsError:
        raise AdapterError(f"{folder} is not a directory; name one, new or not") from None
    except OSError as error:
        raise AdapterError(
            f"{folder} cannot take an adapter: {error.strerror}; give a directory, new or "
            "not, that is writable, on a file system with hard links"
        ) from None


def _last_version(folder: Path, name: str) -> int:
    versions = [0]
    for file in folder.glob(f"{name}*{SUFFIX}"):
        try:
            found = parse_name(file.name.removesuffix(SUFFIX))
        except RequestError:
            continue
        if found.name == name:
            versions.append(found.version or 1)
    return max(versions)


def _write(adapter: Adapter, path: Path, place: Callable[[Path, Path], None]) -> None:
    """`place` gives the finished file its name."""
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "card": adapter.card.to_json(),
        "digest": adapter.digest,
    }
    content = safetensors.torch.save({TABLE: adapter.table}, metadata)
    # Hidden, and with another ending: a directory of adapters may be read at any moment.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        place(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # The name, too, must survive a power cut.
        finally:
            os.close(folder)
    except FileExistsError:
        raise
    except OSError as error:
        raise AdapterError(
            f"{path} cannot be written: {error.strerror}; give a directory that exists, is "
            "writable and has room"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def open_adapter(path: Path, *, task: str | None = None, base: Checkpoint | None = None) -> Adapter:
    """Our own file; a PEFT directory or its weights; a TGIS decoder.pt or its directory; a .nemo.

    `task` chooses one of several: by number in a multitask PEFT adapter, by name in NeMo's. `base`
    is looked at only where the table cannot be told, or checked, without its model.
    """
    path = Path(path)
    try:
        if path.exists() and is_nemo_prompt(path):
            return open_nemo_prompt(path, task, base)
        if path.is_dir():
            if (path / "decoder.pt").is_file() and not (path / "adapter_config.json").is_file():
                return open_tgis(path / "decoder.pt")
            return open_peft(path, task, base.config if base else None)
        if not path.is_file():
            raise AdapterError(f"there is no adapter at {path}; give a file or a directory")
        if path.suffix in (".pt", ".pth"):
            return open_tgis(path)
        if path.name in ("adapter_config.json", "adapter_model.bin", "adapter_model.safetensors"):
            return open_peft(path.parent, task, base.config if base else None)
        return _open_own(path)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    except OSError as error:
        raise AdapterError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give an adapter "
            "that exists here, and that this user may read"
        ) from None


def _open_own(path: Path) -> Adapter:
    if path.suffix != SUFFIX:
        raise AdapterError(
            f"{path} is no adapter; needed is a {SUFFIX} file, a PEFT directory, a decoder.pt, or "
            "a .nemo of prompt learning"
        )
    tensors = open_safetensors(path)  # Checks every word of the header, and says what is wrong.
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise AdapterError(f"{path} has a broken header ({error}); copy it again") from None
    if metadata.get("format") != FORMAT:
        raise AdapterError(
            f"{path} has weights, and nothing says that they are an adapter; needed is a file "
            "that `preamble tune` wrote, a PEFT directory, or a decoder.pt"
        )
    _check_version(metadata.get("version", ""), path)
    if list(tensors) != [TABLE] or tensors[TABLE].dtype != torch.float32:
        found = ", ".join(f"{name} {stored.dtype}" for name, stored in list(tensors.items())[:4])
        raise AdapterError(
            f"{path} holds {found or 'nothing'}; version {VERSION} of the format holds one tensor, "
            f"{TABLE}, in torch.float32: export it again"
        )
    # Copied out of the mapped file: that may be replaced or cut while the adapter is in use.
    adapter = build_adapter(Card.from_json(metadata.get("card", "")), tensors[TABLE].tensor())
    if adapter.digest != metadata.get("digest"):
        raise AdapterError(
            f"{path} is not what was saved: its digest is {_short(adapter.digest)}, it says "
            f"{_short(metadata.get('digest'))}; copy it again"
        )
    return adapter


def _check_version(version: str, path: Path) -> None:
    if version == str(VERSION):
        return
    if version.isascii() and version.isdigit() and int(version[:9]) > VERSION:
        raise AdapterError(
            f"{path} is an adapter of version {version[:9]}, this Preamble reads version "
            f"{VERSION}; use a newer Preamble, or export the adapter with this one"
        )
    raise AdapterError(f"{path} says that its version is {version[:20]!r}; it must be {VERSION}")


def check_adapter(
    adapter: Adapter, config: GPTConfig, identity: Identity | None, *, rows_max: int | None = None
) -> tuple[str, ...]:
    """Refuses an adapter that is not for this model. What could not be checked is returned.

    `rows_max` is half the context, unless an operator says otherwise.
    """
    card, (rows, width) = adapter.card, adapter.table.shape
    if width != table_width(card.kind, config):
        what = f"rows of {width}, the model is {config.hidden_size} wide"
        if card.kind == "prefix":
            what = (
                f"{width} numbers for each virtual token, this model needs "
                f"{config.prefix_width}: keys and values of {config.num_layers} layers, each "
                f"{config.num_query_groups} KV heads of {config.kv_channels}"
            )
        raise AdapterError(
            f"adapter {card.name!r} has {what}; use it with the model that it was trained on"
        )
    limit = config.max_position_embeddings // 2 if rows_max is None else rows_max
    if rows > limit:
        context = config.max_position_embeddings
        raise AdapterError(
            f"adapter {card.name!r} has {rows} virtual tokens, over the limit of {limit} (the "
            f"model's context is {context}); train it with fewer, or allow more"
        )
    if not bool(adapter.table.to(FLOATS[config.dtype]).isfinite().all()):
        raise AdapterError(
            f"adapter {card.name!r} has values that {config.dtype} cannot hold, the largest is "
            f"{float(adapter.table.abs().max()):.3g}; serve the model in bfloat16 or float32"
        )
    if card.base_digest is None:
        return (
            f"adapter {card.name!r} does not say which model it was trained on; it is used as it "
            "is, and is right only if that was this one",
        )
    if identity is None:
        return (f"adapter {card.name!r} was not compared with the model's own digest",)
    # Either settles it: a fingerprint is quick to have, a digest is the same for any format.
    same = card.base_fingerprint is not None and card.base_fingerprint == identity.fingerprint
    if not same and card.base_digest != identity.digest:
        raise AdapterError(
            f"adapter {card.name!r} was trained on the model {_short(card.base_digest)}, this is "
            f"{_short(identity.digest)}; use it with its own, or tune one for this model"
        )
    return (identity.note,) if identity.note else ()


def table_width(kind: str, config: GPTConfig) -> int:
    """How many numbers a virtual token has in this model, in an adapter of that kind."""
    return config.prefix_width if kind == "prefix" else config.hidden_size


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "nothing"


def instruction_adapter(card: Card, token_ids: Sequence[int], rows: Tensor) -> Adapter:
    """The adapter that says what an instruction says: the embeddings of its own tokens.

    `rows` are the embedding's rows for `token_ids`, in order, without positions: virtual tokens get
    theirs where they stand. With it the model must do exactly what it does with the text.
    """
    if len(rows) != len(token_ids):
        raise AdapterError(
            f"the instruction of {card.name!r} has {len(token_ids)} tokens, {len(rows)} embedding "
            "rows were given; give one row for each token"
        )
    return build_adapter(replace(card, method=card.method or "instruction"), rows)
