"""`torch.save` files of torch < 1.6: consecutive pickles, then the bytes of the storages.

The pickles are: a magic number, the protocol version, facts about the system, the object, and the
keys of the storages. Each storage follows as its number of elements and its bytes, in the order of
the keys. `view_legacy_file` may raise any exception for a broken file. The module is independent of
the model.
"""

from typing import Any

from gpt.checkpoint.files.file_tree import Span
from gpt.checkpoint.files.torch_unpickle import (
    PickleReader,
    Storage,
    TensorUnpickler,
    build_tensors,
)

PICKLE_MAGIC = b"\x80"  # The first byte of a pickle of protocol 2 or newer.
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
COUNT_BYTES = 8  # The number of elements before each storage is a little-endian integer.


def view_legacy_file(span: Span) -> Any:
    """Load the object of a file; its tensors are views of the mapped file."""
    memory = span.memory()
    if len(memory) < span.length:
        raise ValueError("the file ends before its storages do")
    reader = PickleReader(memory)
    if TensorUnpickler(reader).load() != MAGIC_NUMBER:
        raise ValueError("it does not begin with the magic number of torch.save")
    if TensorUnpickler(reader).load() != PROTOCOL_VERSION:
        raise ValueError("its protocol version is unknown")
    system_facts = TensorUnpickler(reader).load()
    if not isinstance(system_facts, dict) or system_facts.get("little_endian") is not True:
        raise ValueError("its bytes are in big-endian order")
    object_unpickler = TensorUnpickler(reader)
    unpickled_object = object_unpickler.load()
    keys = TensorUnpickler(reader).load()
    offsets = _storage_offsets(memory, reader.position, keys, object_unpickler.storages)
    return build_tensors(unpickled_object, memory, lambda storage: offsets[storage.key])


def _storage_offsets(
    memory: memoryview, position: int, keys: Any, storages: dict[str, Storage]
) -> dict[str, int]:
    """Return the offset of each storage's first byte; `position`: the end of the last pickle."""
    offsets: dict[str, int] = {}
    for key in keys:
        storage = storages[key]
        count = int.from_bytes(memory[position : position + COUNT_BYTES], "little")
        if count != storage.element_count:
            raise ValueError(f"storage {key} has {count} elements, not {storage.element_count}")
        offsets[key] = position + COUNT_BYTES
        position = offsets[key] + count * storage.dtype.itemsize
        if position > len(memory):
            raise ValueError("the file ends before its storages do")
    return offsets
