"""Deprecated module path of the gRPC client; import the names from `clients` instead.

Release 0.1 documented this path. docs/releases.md says how long deprecated names live.
"""

import warnings

from clients.client import Client
from clients.options import Beams, Guide, Options, Prompt
from clients.responses import (
    Completion,
    Failure,
    FinishReason,
    Piece,
    Scores,
    TextScore,
    TokenScore,
    Usage,
)
from clients.transport import CallError, Retries, Tls

__all__ = [
    "Beams",
    "CallError",
    "Client",
    "Completion",
    "Failure",
    "FinishReason",
    "Guide",
    "Options",
    "Piece",
    "Prompt",
    "Retries",
    "Scores",
    "TextScore",
    "Tls",
    "TokenScore",
    "Usage",
]

warnings.warn(
    "clients.generation is deprecated and will be removed in 0.4; import from `clients`",
    DeprecationWarning,
    stacklevel=2,
)
