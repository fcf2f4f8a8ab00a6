"""Deprecated module path of the asyncio client; import `AsyncClient` from `clients` instead.

Release 0.1 documented this path. docs/releases.md says how long deprecated names live.
"""

import warnings

from clients.async_client import AsyncClient

__all__ = ["AsyncClient"]

warnings.warn(
    "clients.aio is deprecated and will be removed in 0.4; import `AsyncClient` from `clients`",
    DeprecationWarning,
    stacklevel=2,
)
