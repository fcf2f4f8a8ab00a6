"""Adapter client: show, upload, load, unload, promote and roll back a server's adapters.

The calls use the timeout, token and retries of a `Client`; a failed call raises a `CallError`. A
file is uploaded in chunks. The server checks the file before it adds the adapter.
"""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from clients.client import Client
from clients.servers import Server
from protos.preamble.v1 import adapters_pb2 as pb

UPLOAD_CHUNK_BYTES = 1 << 20


class AdapterCalls:
    """Calls of the adapter service through `client`, which the caller must close."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def show(self, name: str) -> pb.Adapter:
        """Return the adapter `name` (its current version) or `name@version`."""
        return self._call_for_adapter("GetAdapter", pb.GetAdapterRequest(name=name))

    def load(self, name: str) -> pb.Adapter:
        """Rescan the server's adapter directory immediately, and return the adapter `name`.

        Raises CallError with the reason if the adapter's file is unusable.
        """
        return self._call_for_adapter("LoadAdapter", pb.LoadAdapterRequest(name=name))

    def unload(self, name: str) -> None:
        """Unload `name@version`, and remove its file from the server's adapter directory."""
        self._call("UnloadAdapter", pb.UnloadAdapterRequest(name=name))

    def promote(self, name: str) -> pb.Adapter:
        """Make `name@version` the current version, and return the adapter."""
        return self._call_for_adapter("PromoteAdapter", pb.PromoteAdapterRequest(name=name))

    def rollback(self, name: str) -> pb.Adapter:
        """Undo the last promotion of `name`, and return the adapter that is current again."""
        return self._call_for_adapter("RollbackAdapter", pb.RollbackAdapterRequest(name=name))

    def upload(self, name: str, file: Path) -> pb.Adapter:
        """Upload a file as the next version of `name`, or as `name@version`; return the adapter.

        Raises OSError if the file cannot be opened.
        """
        # If the file could not be opened during the call, gRPC would report a lost call without the
        # cause. Opening the file before the call raises the OSError.
        with open(file, "rb"):
            pass

        def upload_method(server: Server) -> Any:
            def send_file(message: object, **call_options: Any) -> Any:
                # Each attempt of the call sends the whole file.
                return server.adapters.UploadAdapter(_upload_requests(name, file), **call_options)

            return send_file

        adapter = self._client.call(upload_method, None, idempotent=False).adapter
        assert isinstance(adapter, pb.Adapter)
        return adapter

    def _call_for_adapter(self, method: str, message: object) -> pb.Adapter:
        adapter = self._call(method, message).adapter
        assert isinstance(adapter, pb.Adapter)
        return adapter

    def _call(self, method: str, message: object) -> Any:
        # A change that its server began before it was lost must not be made twice.
        idempotent = method in ("GetAdapter", "LoadAdapter")
        return self._client.call(attrgetter(f"adapters.{method}"), message, idempotent=idempotent)


def _upload_requests(name: str, file: Path) -> Iterator[pb.UploadAdapterRequest]:
    yield pb.UploadAdapterRequest(name=name)
    with open(file, "rb") as source:
        while data := source.read(UPLOAD_CHUNK_BYTES):
            yield pb.UploadAdapterRequest(data=data)
