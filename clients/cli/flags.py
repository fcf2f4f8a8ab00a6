"""Flags that say which server, as whom, and how securely; the same for every command that asks one.

A command line is seen by everyone on its machine; so a token can come from a file. Knows no method.
"""

import argparse
from pathlib import Path

from clients.client import Client
from clients.transport import Tls


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--server", metavar="HOST:PORT", required=True, help="where it listens")
    add("--timeout-s", metavar="S", type=float, default=60.0, help="seconds (default: 60)")
    add("--token", metavar="T", help="the caller's token; @FILE reads a file")
    add("--tls", action="store_true", help="over TLS, with the system's roots")
    add("--ca", metavar="FILE", help="over TLS, with the roots in this file (PEM)")
    add("--cert", metavar="FILE", help="our own certificate (PEM), for servers that want one")
    add("--key", metavar="FILE", help="its private key (PEM)")


def open_client(args: argparse.Namespace) -> Client:
    """The client that the flags describe; a ValueError says which file cannot be read."""
    token, tls = way_of(args)
    return Client(args.server, args.timeout_s, token=token, tls=tls)


def way_of(args: argparse.Namespace) -> tuple[str | None, Tls | None]:
    """The token and the encryption that the flags ask for."""
    token, tls = args.token, None
    if token is not None and token.startswith("@"):
        token = (_read(token[1:], "--token") or b"").decode(errors="replace").strip()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ValueError("--token is not printable ASCII, as a token is")
    if args.tls or args.ca or args.cert or args.key:
        roots, key, chain = (
            _read(getattr(args, name), f"--{name}") for name in ("ca", "key", "cert")
        )
        tls = Tls(roots, key, chain)
    return token, tls


def _read(path: str | None, flag: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ValueError(f"{flag}: {path} cannot be read ({error.strerror})") from None
