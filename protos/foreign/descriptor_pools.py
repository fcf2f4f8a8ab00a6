"""Protos of other APIs, in descriptor pools of their own.

In Python's default descriptor pool, these protos would conflict with the original stubs (of
tritonclient or TGIS) in the same process. `protos/build.py` compiles the descriptors from the
.proto files of this package, which were written from the published names and field numbers.
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

FOLDER = Path(__file__).parent


class ProtoPackage:
    """The messages of a file as classes, by name, and the descriptors of its services."""

    def __init__(self, stem: str) -> None:
        self.pool = DescriptorPool()
        files = FileDescriptorSet.FromString((FOLDER / f"{stem}.binpb").read_bytes())
        for file in files.file:
            self.pool.AddSerializedFile(file.SerializeToString())
        self.file = self.pool.FindFileByName(files.file[-1].name)

    def __getattr__(self, name: str) -> Any:
        descriptor = self.file.message_types_by_name.get(name)
        if descriptor is None:
            raise AttributeError(f"{self.file.name} has no message {name}")
        return GetMessageClass(descriptor)


@cache
def load_package(stem: str) -> ProtoPackage:
    """Return the messages and services of `<stem>.proto`."""
    return ProtoPackage(stem)


def reflection_pool(services: Iterable[str]) -> DescriptorPool:
    """Return a descriptor pool for server reflection with the protos of these services.

    It has the files of the default pool that define the services, and all files of this package.
    """
    pool = DescriptorPool()
    added_files = set[str]()
    foreign_files = [load_package(path.stem).file for path in sorted(FOLDER.glob("*.binpb"))]
    # Services of this package are not looked up in the default pool, which may have their original
    # stubs.
    foreign_services = {
        f"{file.package}.{name}" for file in foreign_files for name in file.services_by_name
    }

    def add(file: FileDescriptor) -> None:
        if file.name not in added_files:
            added_files.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            pool.AddSerializedFile(file.serialized_pb)

    default_pool = descriptor_pool.Default()
    for name in services:
        if name not in foreign_services:
            add(default_pool.FindFileContainingSymbol(name))
    for file in foreign_files:
        add(file)
    return pool
