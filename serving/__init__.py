"""Serving: serves a model and its adapters over gRPC and HTTP, or in process to Python code.

In process: `open_engine(config)` returns a service whose model is loaded in the calling process.
The service's method `generate([Ask("One and two is")])` returns completions, and its method `start`
returns a stream.
"""

from typing import TYPE_CHECKING

from serving.config import ServerConfig

if TYPE_CHECKING:
    from serving.service.service import Service

__all__ = ["open_engine"]


def open_engine(config: ServerConfig) -> "Service":
    """Open a service with its model in this process, on one rank. The caller closes the service."""
    # Imported here because the import of torch takes seconds.
    from serving.service.service import open_in_process

    return open_in_process(config)
