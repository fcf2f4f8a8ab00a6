"""Open files of the front end: fits the numbers of connections to the limit of the process.

Each connection takes one file descriptor. If connections took all of them, the server could neither
accept probes nor restart ranks. The module raises the soft limit (`ulimit -Sn`) when the server
starts, and reserves descriptors that connections cannot take. It knows no protocol.
"""

import asyncio
import logging
import os
import resource
from dataclasses import replace
from typing import Any

from serving.config import NetworkConfig
from serving.logs import LogThrottle

log = logging.getLogger(__name__)

# Descriptors for ranks, checkpoint files, adapters, logs and the connections of probes. If the
# limit of the process is low, half of the free descriptors are reserved instead.
RESERVED_DESCRIPTORS = 512
CONNECTIONS_MIN = 4  # Each bound of connections is at least this number.
ACCEPT_LOG_S = 10.0  # At most one log line in this time says that no connection can be accepted.
# asyncio's message when it cannot accept a connection; it tries again after one second.
ACCEPT_MESSAGE = "socket.accept() out of system resource"


def fit_connections(config: NetworkConfig) -> NetworkConfig:
    """Raise the limit of open files, and return settings whose connections fit the limit.

    Logs a warning if a bound is reduced.
    """
    http_servers = 1 if config.metrics_port is None else 2
    connections = config.connections_max + http_servers * config.http_connections_max
    used = len(os.listdir("/proc/self/fd"))
    limit = _raise_soft_limit(used + connections + RESERVED_DESCRIPTORS)
    if limit is None:
        return config
    free = limit - used
    available = max(free - RESERVED_DESCRIPTORS, free // 2)
    if connections <= available:
        return config
    connections_max, http_connections_max = (
        min(bound, max(CONNECTIONS_MIN, bound * available // connections))
        for bound in (config.connections_max, config.http_connections_max)
    )
    log.warning(
        "event=connections_reduced files_max=%d connections_max=%d http_connections_max=%d note=%r",
        limit,
        connections_max,
        http_connections_max,
        f"{connections} connections and {RESERVED_DESCRIPTORS} other files need a hard limit of "
        f"{used + connections + RESERVED_DESCRIPTORS} open files (ulimit -Hn)",
    )
    return replace(
        config, connections_max=connections_max, http_connections_max=http_connections_max
    )


def _raise_soft_limit(needed: int) -> int | None:
    """Raise the soft limit of open files to `needed`, if the hard limit allows it.

    Return the soft limit; None: unlimited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else max(soft, min(needed, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def log_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log one short line, instead of a stack, while the process has no free file descriptor."""
    throttle = LogThrottle(ACCEPT_LOG_S)

    def handle_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != ACCEPT_MESSAGE:
            loop.default_exception_handler(context)
        elif (suppressed := throttle.claim_line(ACCEPT_MESSAGE)) is not None:
            # `suppressed` is the number of suppressed lines.
            log.warning(
                "event=accept_paused reason=%r suppressed=%d", str(context["exception"]), suppressed
            )

    loop.set_exception_handler(handle_error)
