"""Serving: a model and its adapters, over gRPC or from a program.

A program opens a service with its model in the same process, and asks it: `open_engine(config)`,
then `generate([Ask("One and two is")])`, or `start` for a stream.
"""

from typing import TYPE_CHECKING

from serving.config import ServerConfig

if TYPE_CHECKING:
    from serving.service.service import Service

__all__ = ["open_engine"]


def open_engine(config: ServerConfig) -> "Service":
    """A service that answers, with its model in this process on one rank; close it."""
    # What takes seconds to import is imported only when it is asked for.
    from serving.service.service import open_inside

    return open_inside(config)
