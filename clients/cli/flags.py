"""Server flags of the client commands: address, timeout, token, TLS and metadata.

The token can be read from a file, because all users of a machine can see command-line arguments.
"""

import argparse
import re
from pathlib import Path

from clients.client import Client
from clients.servers import GRPC_SCHEMES, split_addresses
from clients.transport import Tls

PORT_MAX = 65535


def add_server_flags(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """Add the flags; `several`: whether the command can use several servers."""
    add = parser.add_argument
    add(
        "--server",
        metavar="HOST:PORT",
        type=_parse_addresses if several else _parse_address,
        required=True,
        help="address of the server"
        + (", or of several servers of one model, separated by commas" if several else ""),
    )
    add(
        "--timeout-s",
        metavar="S",
        type=float,
        default=60.0,
        help="timeout of each call, in seconds (default: 60)",
    )
    add("--token", metavar="T", help="bearer token; @FILE reads it from a file")
    add(
        "--tls", action="store_true", help="use TLS with gRPC's default root certificates; see --ca"
    )
    add("--ca", metavar="FILE", help="use TLS with the root certificates in this file (PEM)")
    add("--cert", metavar="FILE", help="client certificate (PEM), for mutual TLS")
    add("--key", metavar="FILE", help="private key of the client certificate (PEM)")
    add(
        "--metadata",
        metavar="KEY=VALUE",
        type=_parse_metadata,
        action="append",
        default=[],
        help="gRPC metadata of each call, such as application=NAME for a deployment in Ray Serve; "
        "may be repeated",
    )


def _parse_addresses(text: str) -> str:
    """Return the addresses unchanged."""
    for address in split_addresses(text):
        _parse_address(address)
    return text


def _parse_address(text: str) -> str:
    """Return the address unchanged; gRPC's own errors for invalid addresses have no advice."""
    if text.startswith(GRPC_SCHEMES):
        return text
    # An IPv6 address is in brackets, because it contains colons.
    match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[1]) <= PORT_MAX:
        raise argparse.ArgumentTypeError(
            f"{text[:100]!a} is not an address; give the host and the gRPC port of the server, "
            "such as localhost:9000"
        )
    return text


def _parse_metadata(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    is_valid = re.fullmatch(r"[0-9a-z_.-]+", key) and value.isascii() and value.isprintable()
    if not separator or not is_valid or key.startswith("grpc-") or key.endswith("-bin"):
        raise argparse.ArgumentTypeError(
            f"{text[:100]!a} is not metadata of a call; give KEY=VALUE with a key of lower case "
            "letters, such as application=preamble"
        )
    return key, value


def open_client(args: argparse.Namespace) -> Client:
    """Create the client from the flags. Raises ValueError if a file cannot be read."""
    token, tls = read_credentials(args)
    return Client(args.server, args.timeout_s, token=token, tls=tls, metadata=dict(args.metadata))


def read_credentials(args: argparse.Namespace) -> tuple[str | None, Tls | None]:
    """Read the token and the TLS credentials from the flags."""
    token, tls = args.token, None
    if token is not None and token.startswith("@"):
        token = (_read_file(token[1:], "--token") or b"").decode(errors="replace").strip()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ValueError("--token has characters that are not printable ASCII; give a valid token")
    if args.tls or args.ca or args.cert or args.key:
        roots, key, chain = (
            _read_file(getattr(args, name), f"--{name}") for name in ("ca", "key", "cert")
        )
        tls = Tls(roots, key, chain)
    return token, tls


def _read_file(path: str | None, flag: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ValueError(
            f"{flag}: {path} cannot be read ({error.strerror}); give a readable file"
        ) from None
