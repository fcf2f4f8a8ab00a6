"""Web origins: checks the Host and Origin headers of HTTP requests, and adds the CORS headers.

A browser runs the scripts of any page that its user opens, and such a script can send requests to a
server on the user's machine. Two rules protect a server without tokens on a loopback address. The
Host header must be a loopback name: with DNS rebinding, the name of a foreign page becomes an alias
of 127.0.0.1, and the browser then treats the page and the server as one origin. The Origin header
must be the server's own origin or an allowed one. CORS permits allowed pages to call the server and
to read its responses. The module is independent of the routes.
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from serving.config import SecurityConfig, is_loopback
from serving.frontend.call import CallFailure
from serving.service.error_reasons import REASONS

ALL = "*"  # In a list of origins or host names: all of them.
# Response headers that scripts of other origins may read, besides those that CORS always permits.
EXPOSED_HEADERS = "X-Request-Id, Retry-After, Retry-After-Ms"
PREFLIGHT_AGE_S = 600  # Browsers may repeat a preflight's answer for this time.
# Request headers that a script may send: those that the preflight names, if they are valid.
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_QUOTED_CHARACTERS_MAX = 100


class OriginPolicy:
    """The host names and web origins that may call one HTTP server.

    `host`: the address that the server binds.
    """

    def __init__(self, host: str, security: SecurityConfig) -> None:
        self._allowed_origins = {origin.lower() for origin in security.allowed_origins}
        self._host_names = {_bare_name(name) for name in (host, *security.allowed_hosts)}
        self._is_loopback = is_loopback(host)
        is_open_loopback = self._is_loopback and security.tokens is None
        self._checks_host = bool(is_open_loopback or security.allowed_hosts)
        self._checks_origin = is_open_loopback

    def check(self, request: web.BaseRequest) -> None:
        """Raise CallFailure if the request's Host or Origin is not allowed."""
        host, origin = request.headers.get("Host"), request.headers.get("Origin")
        # Browsers always send Host; a client of HTTP/1.0 may omit it.
        if self._checks_host and host is not None and not self._allows_host(_host_name(host)):
            raise CallFailure(
                REASONS["HOST_NOT_ALLOWED"],
                f"the header Host is {_quote(host)}, which is not a name of this server; use "
                "localhost or 127.0.0.1, or add the name to the setting allowed_hosts",
            )
        if (
            self._checks_origin
            and origin is not None
            and not self._allows_origin(origin)
            and not _is_same_authority(origin, host)
        ):
            raise CallFailure(
                REASONS["ORIGIN_NOT_ALLOWED"],
                f"the header Origin is {_quote(origin)}, and pages of other origins may not call "
                "this server; add the origin to the setting allowed_origins",
            )

    def _allows_host(self, name: str) -> bool:
        if ALL in self._host_names or name in self._host_names:
            return True
        if is_loopback(name) or name.endswith(".localhost"):
            return True
        # An address as Host cannot result from DNS rebinding. Probes of a server that other
        # machines can reach use its address.
        return not self._is_loopback and _is_address(name)

    def _allows_origin(self, origin: str) -> bool:
        return ALL in self._allowed_origins or origin.lower() in self._allowed_origins

    def is_preflight(self, request: web.BaseRequest) -> bool:
        """Whether the request is a CORS preflight of an allowed origin."""
        return (
            request.method == "OPTIONS"
            and "Access-Control-Request-Method" in request.headers
            and self._allows_origin(request.headers.get("Origin", ""))
        )

    def response_headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        """Return the CORS headers that permit the request's origin to read the response."""
        if not self._allowed_origins:
            return {}
        headers = {"Vary": "Origin"}
        origin = request.headers.get("Origin")
        if origin is not None and self._allows_origin(origin):
            headers["Access-Control-Allow-Origin"] = ALL if ALL in self._allowed_origins else origin
            headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
        return headers


def preflight_headers(request: web.BaseRequest, methods: Iterable[str]) -> Mapping[str, str]:
    """Return the headers of the answer to a preflight, besides those of all responses."""
    headers = {
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
    }
    names = request.headers.get("Access-Control-Request-Headers", "")
    if _HEADER_NAMES.fullmatch(names):
        headers["Access-Control-Allow-Headers"] = names
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return headers


def _host_name(host: str) -> str:
    """Return the host name in a Host header, without its port."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return _bare_name(name)


def _bare_name(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_authority(origin: str, host: str | None) -> bool:
    """Whether an origin has the host and port of a Host header; browsers write both alike."""
    if not host:
        return False
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _quote(text: str) -> str:
    return ascii(text[:_QUOTED_CHARACTERS_MAX])
