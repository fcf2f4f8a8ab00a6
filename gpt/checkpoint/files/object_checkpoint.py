"""Object checkpoint: a checkpoint in an object store, whose weights are read by ranges.

The small files (config, tokenizer, indexes) are copied to the user's cache. A weight file has a
local file there with its header, of the same size but without the weights (a sparse file), and a
note that names the object. The readers of formats read the local files, and `open_weights` returns
tensors that request their bytes from the store. Only safetensors files are weights: formats whose
tensors are in other files are not supported.
"""

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from gpt.checkpoint.cached_folders import cache_root, cached_folder
from gpt.checkpoint.files.ranged_tensor import RangedFile, RangedTensor
from gpt.checkpoint.files.safetensors_file import (
    HEADER_BYTES_MAX,
    SafetensorsTensor,
    open_safetensors,
)
from gpt.checkpoint.logical_tensor import StoredTensor
from gpt.errors import CheckpointError
from gpt.object_store.object_store import ObjectInfo, ObjectStore, ObjectStoreError

log = logging.getLogger(__name__)

# The files with the weights of native and Hugging Face's checkpoints.
WEIGHT_FILE_NAME = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# Larger files, such as weights in a second format, are not copied.
SMALL_FILE_BYTES_MAX = 256 << 20
FILES_MAX = 100_000
HEADER_READ_BYTES = 1 << 20  # Of the first read of a header; most headers are shorter.
NOTE_SUFFIX = ".object"
CACHE_KIND = "objects"


@dataclass(frozen=True)
class _ObjectNote:
    """The object of a local weight file."""

    url: str
    key: str
    etag: str


def open_object_checkpoint(url: str) -> Path:
    """Return the local folder of a checkpoint in an object store."""
    store = ObjectStore(url)
    try:
        entries = []
        for entry in store.list():
            entries.append(entry)
            if len(entries) > FILES_MAX:
                raise CheckpointError(
                    f"{store.url} has more than {FILES_MAX} objects, so it is not one checkpoint; "
                    "give the prefix of a checkpoint"
                )
        if not any(WEIGHT_FILE_NAME.fullmatch(entry.key) for entry in entries):
            raise CheckpointError(
                f"{store.url} has no model*.safetensors; a checkpoint in an object store must be "
                "native or Hugging Face's, in safetensors: convert it with `preamble convert`"
            )
        state = [[entry.key, entry.size, entry.etag] for entry in entries]
        name = PurePosixPath(store.url.prefix).name or store.url.bucket
        folder = cached_folder(
            CACHE_KIND,
            [str(store.url), state],
            lambda partial_folder: _copy_files(store, entries, partial_folder / name),
        )
        return folder / name
    except ObjectStoreError as error:
        raise CheckpointError(f"{error}; check the URL and the credentials") from None


def open_weights(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by key; only the header is read."""
    tensors = open_safetensors(path)
    note_path = path.with_name(f".{path.name}{NOTE_SUFFIX}")
    # A note elsewhere may be from somebody else, and must not cause requests.
    if not path.is_relative_to(cache_root(CACHE_KIND)) or not note_path.exists():
        return dict(tensors)
    note = _ObjectNote(**json.loads(note_path.read_bytes()))
    store, offset = ObjectStore(note.url), 0
    if tensors:
        offset = next(iter(tensors.values())).file.payload_offset
    file = RangedFile(store, note.key, note.etag, offset)
    return {key: _ranged_tensor(file, path, tensor) for key, tensor in tensors.items()}


def _ranged_tensor(file: RangedFile, path: Path, tensor: SafetensorsTensor) -> RangedTensor:
    return RangedTensor(file, path, tensor.key, tensor.shape, tensor.dtype, tensor.byte_range)


def _copy_files(store: ObjectStore, entries: list[ObjectInfo], folder: Path) -> None:
    copied = 0
    for entry in entries:
        parts = PurePosixPath(entry.key).parts
        if ".." in parts or not entry.key.isprintable() or entry.key.endswith("/"):
            continue
        path = folder.joinpath(*parts)
        if len(parts) == 1 and WEIGHT_FILE_NAME.fullmatch(entry.key):
            copied += _copy_header(store, entry, path)
        elif entry.size <= SMALL_FILE_BYTES_MAX:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                store.download(entry, file)
            copied += entry.size
    log.info("event=checkpoint_copied url=%s files=%d bytes=%d", store.url, len(entries), copied)


def _copy_header(store: ObjectStore, entry: ObjectInfo, path: Path) -> int:
    """Write the header of a weight file, and the note that names the object."""
    header = store.read_range(entry.key, 0, min(entry.size, HEADER_READ_BYTES), etag=entry.etag)
    length = 8 + int.from_bytes(header[:8], "little")
    if len(header) < length <= min(entry.size, 8 + HEADER_BYTES_MAX):
        header += store.read_range(entry.key, len(header), length, etag=entry.etag)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(header[:length])  # The reader describes a broken header.
        file.truncate(entry.size)
    note = _ObjectNote(str(store.url), entry.key, entry.etag)
    path.with_name(f".{path.name}{NOTE_SUFFIX}").write_text(json.dumps(asdict(note)))
    return len(header)
