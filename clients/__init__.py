"""Python clients of a Preamble server: sync and asyncio clients, commands and load generator.

The public names are imported at first use, so a module of this package that does not need gRPC can
be imported without gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.async_client import AsyncClient
    from clients.client import CallError, Client, Guide, Options

__all__ = ["AsyncClient", "CallError", "Client", "Guide", "Options"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "clients.async_client" if name == "AsyncClient" else "clients.client"
        return getattr(import_module(module), name)
    raise AttributeError(f"module 'clients' has no attribute '{name}'")
