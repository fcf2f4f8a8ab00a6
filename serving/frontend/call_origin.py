"""Where a call comes from: its method, its headers, the request id and trace context in them.

Plain data that transports make, and that logs and traces read; so tracing need not know the front
end's calls, nor they how they are traced. No protocol and no model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# What clients and proxies call a request: TGIS's own name for that, and everyone else's.
LABELS = ("x-correlation-id", "x-request-id")
LABEL_CHARACTERS_MAX = 100
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def label_of(name: str) -> str:
    """As much of a caller's name for a request as can be shown anywhere."""
    return "".join(one for one in name[:LABEL_CHARACTERS_MAX] if " " <= one <= "~").strip()


@dataclass(frozen=True, slots=True)
class Came:
    """How a call came, besides what it asks: for logs and traces."""

    name: str = ""  # What was called, as its protocol says it.
    headers: Mapping[str, str] = field(default_factory=dict)  # gRPC's metadata are such, too.
    facts: Mapping[str, str] = field(default_factory=dict)  # In OpenTelemetry's words.

    @property
    def label(self) -> str:
        """What the caller calls its request, as far as that can be shown."""
        return label_of(next((one for name in LABELS if (one := self.headers.get(name))), ""))

    @property
    def trace_id(self) -> str:
        """Of the caller's own trace; empty: it has none."""
        match = _TRACEPARENT.fullmatch(self.headers.get("traceparent", "")[:200])
        return match[1] if match else ""


NOWHERE = Came()
