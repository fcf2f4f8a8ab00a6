"""The HTTP port: metrics, and health for those who do not speak gRPC.

A few fixed pages, each made by a function when it is asked for. Serves from threads of its own, so
a slow scraper never holds up a token.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Self

from gpt.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # Seconds that a client may take for its request, or to read the answer.
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "preamble", ""
    pages: Mapping[str, Callable[[], Page]]

    def do_GET(self) -> None:
        make = self.pages.get(self.path.partition("?")[0])
        page = make() if make else Page(404, f"known are: {', '.join(self.pages)}\n".encode())
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        log.debug("event=http client=%s " + format, self.client_address[0], *args)


def family(host: str) -> socket.AddressFamily:
    """IPv6 if the address is of that kind; a name is taken for IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        # The library's own asks the name service for this host's name, which can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class HttpServer:
    """Serves `pages`, by path, while it is open."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], Page]]) -> None:
        handler = type("Handler", (_Handler,), {"pages": pages})
        # The library takes the family from the class, before there is anything to tell it.
        server = type("Server", (_Server,), {"address_family": family(host)})
        try:
            self._server: _Server = server((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"http_port {port} of {host} cannot be bound ({error.strerror}); "
                "choose another, or 0 for any that is free"
            ) from None
        self.port = self._server.server_port
        # It looks this often whether it should end, and a server that drains waits for it.
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=serve, name="http", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
