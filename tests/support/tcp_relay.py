"""A TCP relay on this machine, whose connections a test can cut, as a network fault does."""

import socket
import threading
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 65536


class TcpRelay:
    """Forwards each connection to a target, in both directions, until `cut` or the end."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Close the connections that are open now. New connections are forwarded."""
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._sockets.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # The listener was shut down.
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    self._sockets.append(client)
                    server = socket.create_connection(self._target)
                    self._sockets.append(server)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_forward, args=(source, sink), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # Ends `accept`.
        self._thread.join()
        self._listener.close()
        self.cut()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
