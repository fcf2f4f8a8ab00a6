"""Garbage collection: imports without collections, and fewer collections beside running steps."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Collections of the middle generation for each full collection; 10 by default.
FULL_COLLECTION_THRESHOLD = 100


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


def freeze_startup_objects() -> None:
    """Exclude all present objects from later garbage collections.

    Those of a server's start-up live until it ends. Scanning them would delay a step by 0.1 s.
    """
    gc.collect()
    gc.freeze()


def make_full_collections_rare() -> None:
    """Let full collections be ten times as rare.

    For a process that runs steps: a full collection scans the weights of the cached adapters, for
    50 ms in which no step runs. The objects of steps are rarely in reference cycles.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_THRESHOLD)
