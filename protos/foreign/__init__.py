"""Protos of other wires, in a pool of their own: their stubs may be imported beside them.

Python's default pool takes a package's messages once. Whoever has tritonclient's or TGIS's stubs in
the same process would meet ours there; here they never do. The descriptors are compiled from the
.proto files beside this one, which we wrote from those wires' published names and numbers.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
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


def described(services: Iterable[str]) -> DescriptorPool:
    """A pool with the files of these services of Python's own pool, and with all that are here."""
    pool, known = DescriptorPool(), set[str]()
    here = [package(path.stem).file for path in sorted(HERE.glob("*.binpb"))]
    # Another's stubs of the same services may be in Python's pool.
    foreign = {f"{file.package}.{name}" for file in here for name in file.services_by_name}

    def add(file: FileDescriptor) -> None:
        if file.name not in known:
            known.add(file.name)
            for needed in file.dependencies:
                add(needed)
            pool.AddSerializedFile(file.serialized_pb)

    own = [name for name in services if name not in foreign]
    for file in (*map(descriptor_pool.Default().FindFileContainingSymbol, own), *here):
        add(file)
    return pool
