"""Garbage collection: imports of large libraries without collections."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_without_collections() -> Iterator[None]:
    """Disable garbage collections while modules are imported.

    The imports of a server create half a million objects and little garbage: collections would take
    15 % of their time. Later collections do not scan these objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
