"""The adapters of a running server, from a program: which there are, and changing that.

Goes over a `Client`, with its timeout, token and retries; what the server refuses is a `CallError`.
A file is sent in parts, and becomes an adapter only when the server has found it good.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clients.client import Client
from protos.preamble.v1 import adapters_pb2 as pb
from protos.preamble.v1 import adapters_pb2_grpc

PART_BYTES = 1 << 20


class AdapterCalls:
    """What `client`'s server has of adapters; the client stays the caller's to close."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stub = adapters_pb2_grpc.AdapterServiceStub(client.channel)

    def show(self, name: str) -> pb.Adapter:
        """`name` (its current version) or `name@version`."""
        return self._adapter(self._stub.GetAdapter, pb.GetAdapterRequest(name=name))

    def load(self, name: str) -> pb.Adapter:
        """Have the server look at its directory now, for this adapter."""
        return self._adapter(self._stub.LoadAdapter, pb.LoadAdapterRequest(name=name))

    def unload(self, name: str) -> None:
        """Take `name@version` away, from the server's directory too."""
        self._client.call(self._stub.UnloadAdapter, pb.UnloadAdapterRequest(name=name))

    def promote(self, name: str) -> pb.Adapter:
        """From now on the name alone means `name@version`."""
        return self._adapter(self._stub.PromoteAdapter, pb.PromoteAdapterRequest(name=name))

    def rollback(self, name: str) -> pb.Adapter:
        """Take the last promotion of `name` back."""
        return self._adapter(self._stub.RollbackAdapter, pb.RollbackAdapterRequest(name=name))

    def upload(self, name: str, file: Path) -> pb.Adapter:
        """A file becomes the next version of `name`, or `name@version`.

        An OSError if it cannot be opened.
        """
        with open(file, "rb"):
            pass  # In the midst of a call it would look like a server that is lost.

        def send(message: object, **how: Any) -> Any:
            # Each attempt sends the file from its beginning.
            return self._stub.UploadAdapter(_parts(name, file), **how)

        return self._adapter(send, None)

    def _adapter(self, method: Any, message: object) -> pb.Adapter:
        adapter = self._client.call(method, message).adapter
        assert isinstance(adapter, pb.Adapter)
        return adapter


def _parts(name: str, file: Path) -> Iterator[pb.UploadAdapterRequest]:
    yield pb.UploadAdapterRequest(name=name)
    with open(file, "rb") as source:
        while data := source.read(PART_BYTES):
            yield pb.UploadAdapterRequest(data=data)
