"""Call origin: method, headers, peer, request id and W3C trace context of a call, for logs.

A transport creates a `CallOrigin`; logs, tracing and the adapter change log read it. The class is
in a separate module so that `call` and `tracing` need not import each other. The module is
independent of protocols and models.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# Headers with a caller's request id, by precedence. Clients of TGIS send the first header;
# most other clients send the second header.
REQUEST_ID_HEADERS = ("x-correlation-id", "x-request-id")
REQUEST_ID_CHARACTERS_MAX = 100
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def printable_request_id(request_id: str) -> str:
    """Return the printable ASCII characters of a caller's request id, truncated."""
    return "".join(
        character for character in request_id[:REQUEST_ID_CHARACTERS_MAX] if " " <= character <= "~"
    ).strip()


def caller_request_id(headers: Mapping[str, str]) -> str:
    """Return the request id in a call's headers in printable form; empty if no id was sent."""
    for name in REQUEST_ID_HEADERS:
        if request_id := printable_request_id(headers.get(name, "")):
            return request_id
    return ""


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Method, headers, trace attributes and peer of a call, collected by its transport."""

    name: str = ""  # Span name: gRPC method, or HTTP method and route.
    headers: Mapping[str, str] = field(default_factory=dict)  # HTTP headers or gRPC metadata.
    attributes: Mapping[str, str] = field(default_factory=dict)  # OpenTelemetry span attributes.
    # The id that the transport gave the request; empty: none.
    assigned_request_id: str = ""
    # Address and port of the client, or of the last proxy before the server; empty: unknown.
    peer: str = ""

    @property
    def request_id(self) -> str:
        """The caller's request id in printable form, else the assigned id; empty if none exists."""
        return caller_request_id(self.headers) or self.assigned_request_id

    @property
    def trace_id(self) -> str:
        """The trace id of the `traceparent` header; empty if there is no valid header."""
        match = _TRACEPARENT.fullmatch(self.headers.get("traceparent", "")[:200])
        return match[1] if match else ""


UNKNOWN_ORIGIN = CallOrigin()
