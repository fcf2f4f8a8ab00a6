"""Adapter file: reads and writes the safetensors file with an adapter's tensors and its card.

The tensors are the virtual-token table, if the adapter has virtual tokens, and the weights of its
linears. The card is in the file's metadata. An adapter without weights of linears is written in
version 1 of the format, which older releases read. Writes are atomic, and a read compares the
adapter's digest with the recorded digest, so an incomplete or changed file is refused. Adapters of
Hugging Face PEFT, TGIS, NeMo and Megatron-Bridge can be read too. The module checks whether an
adapter fits a model; it does not apply adapters.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gpt.adapters.card import (
    CARD_BYTES_MAX,
    SCALE_BYTES_MAX,
    Adapter,
    AdapterName,
    Card,
    GoldenExample,
    build_adapter,
    parse_name,
)
from gpt.adapters.change_log import AdapterChange, AdapterChangeLog, ChangeAuthor
from gpt.adapters.import_bridge import find_bridge_adapter, open_bridge
from gpt.adapters.import_nemo import is_nemo_prompt, open_nemo_prompt
from gpt.adapters.import_peft import open_peft, open_tgis
from gpt.adapters.linear_check import (
    LINEARS_MAX,
    SCALE_MAX,
    TENSORS_MAX,
    check_linears,
    is_scale,
)
from gpt.checkpoint.files.safetensors_file import read_safetensors
from gpt.checkpoint.logical_tensor import Checkpoint, ModelIdentity, StoredTensor
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import AdapterError, CheckpointError, RequestError
from gpt.files.abandoned_files import remove_abandoned_partials
from gpt.files.atomic_files import write_atomic
from gpt.files.buffer_pool import BufferPool
from gpt.linear_adapter import TENSOR_NAMES, LinearAdapter
from gpt.settings import short_repr

__all__ = [
    "BUFFERS",
    "Adapter",
    "AdapterName",
    "Card",
    "GoldenExample",
    "build_adapter",
    "check_adapter",
    "check_publish_directory",
    "encode_adapter",
    "find_adapter",
    "instruction_adapter",
    "last_version",
    "latest_adapter",
    "open_adapter",
    "open_verified_adapter",
    "parse_name",
    "publish_adapter",
    "recording_upload",
    "save_adapter",
    "table_width",
]

FORMAT = "preamble.adapter"
TABLE_VERSION = 1  # The table is the only tensor.
LINEARS_VERSION = 2
SUFFIX = ".safetensors"
TABLE = "table"
# The header contains a card as a JSON string, in which quotes are escaped, and the entries of the
# tensors. A header with a million tensor names would take seconds and hundreds of MiB to parse.
TENSORS_PER_LINEAR_MAX = 7  # A bottleneck has six.
HEADER_BYTES_MAX = 3 * CARD_BYTES_MAX + LINEARS_MAX * (
    2 * SCALE_BYTES_MAX + TENSORS_PER_LINEAR_MAX * 160
)
# A server reads adapters while it runs steps; reads reuse the memory of evicted adapters.
BUFFERS = BufferPool(free_bytes_max=64 << 20)


def save_adapter(adapter: Adapter, path: Path, *, overwrite: bool = True) -> None:
    """Write the adapter to `path` atomically, and flush it to disk."""
    if path.suffix != SUFFIX:
        raise AdapterError(
            f"the name {path} must end with {SUFFIX}; files with other names are not read as "
            "adapters"
        )
    try:
        _write_file(adapter, path, overwrite=overwrite)
    except FileExistsError:
        raise AdapterError(f"{path} exists already; remove it or choose another name") from None


def publish_adapter(adapter: Adapter, folder: Path, command: str = "") -> Path:
    """Write the adapter as NAME@N with the next version number N, and return the path.

    Existing versions are not changed. `command`: the author in the change log (`recording_upload`).
    """
    name = adapter.card.name
    version = last_version(folder, name)
    with recording_upload(folder, name, command) as change:
        while True:
            version += 1
            path = folder / f"{name}@{version}{SUFFIX}"
            try:
                parse_name(f"{name}@{version}")
            except RequestError:
                raise AdapterError(
                    f"all version numbers of {name!r} in {folder} are used; choose a new name"
                ) from None
            change.begin(version, None, adapter.digest)
            try:
                # If another process has used this version, the write fails, and the next version
                # is tried.
                _write_file(adapter, path, overwrite=False)
            except FileExistsError:
                continue
            change.finish(None)
            return path


@contextmanager
def recording_upload(folder: Path, name: str, command: str) -> Iterator[AdapterChange]:
    """Record the upload of a version to an adapter directory, if the directory has a change log.

    `command`: the command that writes the version. A log that cannot be written is an AdapterError.
    """
    changes = AdapterChangeLog.find(folder) or AdapterChangeLog(None)
    author = ChangeAuthor.of_command(command)
    try:
        with changes.recording("upload", name, author, changes.owner_of(folder)) as change:
            yield change
    except OSError as error:
        raise _unwritable_log_error(folder, error) from None


def _unwritable_log_error(folder: Path, error: OSError) -> AdapterError:
    return AdapterError(
        f"the change log of the adapter directory {folder} cannot be written ({error.strerror}), "
        "and a change without a record is refused; free disk space, or grant write permission"
    )


def latest_adapter(folder: Path, name: str) -> tuple[Path, Adapter] | None:
    """Open the file NAME@N with the largest N; return None if no file has a version number."""
    path = folder / f"{name}@{last_version(folder, name)}{SUFFIX}"
    return (path, open_adapter(path)) if path.exists() else None


def find_adapter(
    folder: Path, name: str, digest: str, *, after_version: int
) -> tuple[Path, Adapter] | None:
    """Open the adapter with this digest among the versions after `after_version`.

    Files that are not valid adapters are ignored. Return None if no version has this digest.
    """
    for version in range(after_version + 1, last_version(folder, name) + 1):
        path = folder / f"{name}@{version}{SUFFIX}"
        try:
            adapter = open_adapter(path)
        except AdapterError:
            continue
        if adapter.digest == digest:
            return path, adapter
    return None


def check_publish_directory(folder: Path) -> None:
    """Check that `publish_adapter` can write to a folder: create it, write and remove a file.

    Partial files that killed processes left in the folder are removed.

    `publish_adapter` needs a file system with hard links: `write_atomic` with overwrite=False gives
    a file its name by a hard link, which cannot replace an existing version.
    """
    probe = folder / f".{secrets.token_hex(8)}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned_partials(folder)
        write_atomic(probe, b"", overwrite=False, durable=False)
        probe.unlink()
    except FileExistsError:
        raise AdapterError(f"{folder} is not a directory; give the path of a directory") from None
    except OSError as error:
        raise AdapterError(
            f"{folder} cannot be written to: {error.strerror}; give a writable directory on a file "
            "system that supports hard links"
        ) from None
    changes = AdapterChangeLog.find(folder)
    if changes is not None:
        try:
            changes.check_writable()
        except OSError as error:
            raise _unwritable_log_error(folder, error) from None


def last_version(folder: Path, name: str) -> int:
    """Return the largest version number of an adapter, or 0 if the adapter has no files.

    A file name without a number counts as version 1.
    """
    versions = [0]
    for file in folder.glob(f"{name}*{SUFFIX}"):
        try:
            adapter_name = parse_name(file.name.removesuffix(SUFFIX))
        except RequestError:
            continue
        if adapter_name.name == name:
            versions.append(adapter_name.version or 1)
    return max(versions)


def encode_adapter(adapter: Adapter) -> bytes:
    """Return the content of the adapter's file."""
    metadata = {
        "format": FORMAT,
        "version": str(LINEARS_VERSION if adapter.linears else TABLE_VERSION),
        "card": adapter.card.to_json(),
        "digest": adapter.digest,
    }
    tensors = {
        f"{key}.{name}": tensor
        for key, linear in adapter.linears.items()
        for name, tensor in linear.tensors()
    }
    if len(adapter.table):
        tensors[TABLE] = adapter.table
    return safetensors.torch.save(tensors, metadata)


def _write_file(adapter: Adapter, path: Path, *, overwrite: bool) -> None:
    # A server can scan the directory at any time, but it ignores hidden files. `write_atomic`
    # writes to a hidden file, and then gives the complete file the name `path`.
    try:
        write_atomic(path, encode_adapter(adapter), overwrite=overwrite)
    except FileExistsError:
        raise
    except OSError as error:
        raise AdapterError(
            f"{path} cannot be written: {error.strerror}; give an existing, writable directory "
            "with free space"
        ) from None


def open_adapter(path: Path, *, task: str | None = None, base: Checkpoint | None = None) -> Adapter:
    """Open an adapter: a native file, or one of PEFT, TGIS, NeMo or Megatron-Bridge.

    PEFT and TGIS have a file or a directory, NeMo an archive or the directory of an unpacked .nemo
    file, Megatron-Bridge and NeMo 2 a distributed checkpoint.

    `task` selects one of several tasks: by number in a multitask PEFT adapter, by name in a NeMo
    adapter. `base`, the base model, is needed for the linear adapters of other programs, and
    for some prompts of NeMo.
    """
    path = Path(path)
    try:
        if path.exists() and is_nemo_prompt(path):
            return open_nemo_prompt(path, task, base)
        if path.is_dir():
            if not (path / "adapter_config.json").is_file():
                if (path / "decoder.pt").is_file():
                    return open_tgis(path / "decoder.pt")
                distributed_folder = find_bridge_adapter(path)
                if distributed_folder is not None:
                    return open_bridge(path, distributed_folder, base)
            return open_peft(path, task, base)
        if not path.is_file():
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise AdapterError(f"{path} {problem}; give the file or directory of an adapter")
        if path.suffix in (".pt", ".pth"):
            return open_tgis(path)
        if path.name in ("adapter_config.json", "adapter_model.bin", "adapter_model.safetensors"):
            return open_peft(path.parent, task, base)
        return _open_native(path)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    except OSError as error:
        raise AdapterError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give an adapter "
            "that exists and that this user may read"
        ) from None


def open_verified_adapter(path: Path) -> Adapter:
    """Open a native file whose digest and values `open_adapter` has verified before.

    The digest is the recorded one. All tensors share the memory into which the file was read.
    """
    content = _NativeContent.read(path)
    table = torch.empty(0, content.card.hidden_size) if content.table is None else content.table
    return Adapter(content.card, table, content.recorded_digest or "", content.linears)


def _open_native(path: Path) -> Adapter:
    content = _NativeContent.read(path)
    adapter = build_adapter(content.card, content.table, content.linears)
    if adapter.digest != content.recorded_digest:
        raise AdapterError(
            f"{path} was changed after it was saved: its digest is "
            f"{_short_digest(adapter.digest)}, but its metadata records "
            f"{_short_digest(content.recorded_digest)}; copy the file again"
        )
    return adapter


@dataclass(frozen=True)
class _NativeContent:
    """The content of a native file, not checked."""

    card: Card
    table: Tensor | None  # None: the adapter has no virtual tokens.
    linears: dict[str, LinearAdapter]
    recorded_digest: str | None

    @classmethod
    def read(cls, path: Path) -> "_NativeContent":
        if path.suffix != SUFFIX:
            raise AdapterError(
                f"{path} is not an adapter; give a {SUFFIX} file, a PEFT directory, a decoder.pt, "
                "or a .nemo file of prompt learning"
            )
        # `read_safetensors` is called first: it describes a broken header better than `safe_open`.
        tensors = read_safetensors(
            path, header_bytes_max=HEADER_BYTES_MAX, tensors_max=TENSORS_MAX, buffers=BUFFERS
        )
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
        except safetensors.SafetensorError as error:
            raise AdapterError(f"{path} has a broken header ({error}); copy it again") from None
        if metadata.get("format") != FORMAT:
            raise AdapterError(
                f"{path} has no adapter metadata, so its weights may not be an adapter; give a "
                "file that `preamble tune` wrote, a PEFT directory, or a decoder.pt"
            )
        version = _check_version(metadata.get("version", ""), path)
        _check_tensors(tensors, version, path)
        card = Card.from_json(metadata.get("card", ""))
        table = tensors[TABLE].tensor() if TABLE in tensors else None
        return cls(card, table, _read_linears(tensors, card), metadata.get("digest"))


def _check_version(version: str, path: Path) -> int:
    if version in (str(TABLE_VERSION), str(LINEARS_VERSION)):
        return int(version)
    if version.isascii() and version.isdigit() and int(version[:9]) > LINEARS_VERSION:
        raise AdapterError(
            f"{path} has format version {version[:9]}, but this release of Preamble reads only "
            f"versions up to {LINEARS_VERSION}; use a newer release, or export the adapter again "
            "with this release"
        )
    raise AdapterError(
        f"{path} has the format version {version[:20]!r}; it must be {TABLE_VERSION} or "
        f"{LINEARS_VERSION}: copy the file again"
    )


def _check_tensors(tensors: Mapping[str, StoredTensor], version: int, path: Path) -> None:
    names = set(tensors) - {TABLE}
    expected = f"one tensor, {TABLE} (torch.float32)"
    names_match = list(tensors) == [TABLE]
    if version == LINEARS_VERSION:
        expected = "torch.float32 tensors named LINEAR.lora_a, LINEAR.lora_b and so on"
        names_match = bool(names) and all(
            name.rpartition(".")[2] in TENSOR_NAMES and "." in name for name in names
        )
    if not names_match or any(stored.dtype != torch.float32 for stored in tensors.values()):
        tensor_summary = ", ".join(
            f"{name[:100]} ({stored.dtype})" for name, stored in list(tensors.items())[:4]
        )
        raise AdapterError(
            f"{path} contains {tensor_summary or 'no tensor'}; version {version} of the format has "
            f"{expected}: export the adapter again"
        )


def _read_linears(tensors: Mapping[str, StoredTensor], card: Card) -> dict[str, LinearAdapter]:
    by_key: dict[str, dict[str, Tensor]] = {}
    for name, stored in tensors.items():
        key, _, tensor_name = name.rpartition(".")
        if name != TABLE:
            by_key.setdefault(key, {})[tensor_name] = stored.tensor()
    for key, scale in card.scales.items():
        if not is_scale(scale):
            raise AdapterError(
                f"the card of {card.name!r} has the scale {short_repr(scale)} of {key[:200]}; it "
                f"must be a number below {SCALE_MAX:g}: export the adapter again"
            )
    linears = {
        key: LinearAdapter(**linear_tensors, scale=float(card.scales.get(key, 1.0)))
        for key, linear_tensors in by_key.items()
    }
    if card.scales.keys() != {key for key, linear in linears.items() if linear.rank}:
        raise AdapterError(
            f"the card of {card.name!r} has scales of other linears than the file; export the "
            "adapter again"
        )
    return linears


def check_adapter(
    adapter: Adapter,
    config: GPTConfig,
    identity: ModelIdentity | None,
    *,
    rows_max: int | None = None,
) -> tuple[str, ...]:
    """Refuse an adapter that does not fit this model; return notes for the user.

    The notes list the checks that were not possible, and the dtype conversions of the model's
    weights.
    `rows_max` limits the number of virtual tokens; None: half of the model's context length.
    """
    card = adapter.card
    rows, width = adapter.table.shape
    check_linears(card.name, adapter.linears, config)
    invalid_id = next((token for token in card.invocation if token >= config.vocab_size), None)
    if invalid_id is not None:
        raise AdapterError(
            f"the invocation of adapter {card.name!r} has the token id {invalid_id}, outside the "
            f"vocabulary of {config.vocab_size}; use it with the model that it was trained on"
        )
    if rows and width != table_width(card.kind, config):
        mismatch = f"rows of width {width}, but the model has hidden_size {config.hidden_size}"
        if card.kind == "prefix":
            mismatch = (
                f"{width} values per virtual token, but this model needs "
                f"{config.prefix_width}: keys and values of {config.num_layers} layers, each with "
                f"{config.num_query_groups} KV heads of {config.kv_channels} channels"
            )
        raise AdapterError(
            f"adapter {card.name!r} has {mismatch}; use it with the model that it was trained on"
        )
    virtual_tokens_limit = config.max_position_embeddings // 2 if rows_max is None else rows_max
    if rows > virtual_tokens_limit:
        context = config.max_position_embeddings
        raise AdapterError(
            f"adapter {card.name!r} has {rows} virtual tokens, over the limit of "
            f"{virtual_tokens_limit} (the model's context has {context} tokens); train it with "
            "fewer virtual tokens, or raise the limit"
        )
    if rows and not bool(adapter.table.to(FLOAT_DTYPES[config.dtype]).isfinite().all()):
        raise AdapterError(
            f"adapter {card.name!r} has values up to {float(adapter.table.abs().max()):.3g}, which "
            f"overflow in {config.dtype}; serve the model in bfloat16 or float32"
        )
    if card.base_digest is None:
        return (
            f"adapter {card.name!r} does not record its base model, so it is used without a check; "
            "its outputs are correct only if it was trained on this model",
        )
    if identity is None:
        return (f"adapter {card.name!r} was not compared with the model's digest",)
    # The model is the adapter's base model if the fingerprints or the digests are equal. A model's
    # fingerprint is always known, but changes with the config. Its digest is independent of the
    # config, but may be unknown.
    is_same_base = (
        card.base_fingerprint is not None and card.base_fingerprint == identity.fingerprint
    )
    if not is_same_base and card.base_digest != identity.digest:
        raise AdapterError(
            f"adapter {card.name!r} was trained on the model with digest "
            f"{_short_digest(card.base_digest)}, but this model has digest "
            f"{_short_digest(identity.digest or 'unknown')}; use the adapter with its base model, "
            "or tune an adapter for this model"
        )
    return (identity.note,) if identity.note else ()


def table_width(kind: str, config: GPTConfig) -> int:
    """Return the number of values per virtual token in an adapter of `kind` for this model."""
    return config.prefix_width if kind == "prefix" else config.hidden_size


def _short_digest(digest: str | None) -> str:
    return digest[:12] if digest else "nothing"


def instruction_adapter(card: Card, token_ids: Sequence[int], rows: Tensor) -> Adapter:
    """Return an adapter whose rows are the token embeddings of an instruction text.

    `rows` are the word embeddings of `token_ids`, without position embeddings. The model adds
    position embeddings to virtual tokens as to any token, so the adapter has the same effect as the
    text.
    """
    if len(rows) != len(token_ids):
        raise AdapterError(
            f"the instruction of {card.name!r} has {len(token_ids)} tokens, but {len(rows)} "
            "embedding rows were given; give one row for each token"
        )
    return build_adapter(replace(card, method=card.method or "instruction"), rows)
