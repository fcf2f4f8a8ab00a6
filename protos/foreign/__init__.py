"""Protos of other wires, in a pool of their own: their stubs may be imported beside them.

Python's default pool takes a package's messages once. Whoever has tritonclient's or TGIS's stubs in
the same process would meet ours there; here they never do. The descriptors are compiled from the
.proto files beside this one, which we wrote from those wires' published names and numbers.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

HERE = Path(__file__).parent


class Package:
    """A file's messages by their names, as classes, and its services' descriptors."""

    def __init__(self, stem: str) -> None:
        self.pool = DescriptorPool()
        files = FileDescriptorSet.FromString((HERE / f"{stem}.binpb").read_bytes())
        for one in files.file:
            self.pool.AddSerializedFile(one.SerializeToString())
        self.file = self.pool.FindFileByName(files.file[-1].name)

    def __getattr__(self, name: str) -> Any:
        found = self.file.message_types_by_name.get(name)
        if found is None:
            raise AttributeError(f"{self.file.name} has no message {name}")
        return GetMessageClass(found)


@cache
def package(stem: str) -> Package:
    """That of `<stem>.proto`."""
    return Package(stem)
