"""Triton compilations: reports and logs each kernel that Triton compiles in this process.

Triton compiles a kernel in the thread that launches it, when a launch needs a variant that does not
exist yet; this stops a step for up to seconds. The warm-up of a server compiles the variants that
its requests need, so a later compilation is worth a look. The module does not know which
kernels there are.
"""

import inspect
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

# Called with the kernel's name: before a compilation with None, and after it with its seconds.
CompilationObserver = Callable[[str, float | None], None]


def observe_compilations(observer: CompilationObserver) -> None:
    """Call `observer` before and after each compilation from now on, in place of an earlier one.

    Loading a compiled kernel from Triton's cache on disk counts as a compilation. After a
    compilation that fails, there is no second call: the launch raises an exception. Triton keeps
    its hooks for the life of the process; if `observer` is a method, they have only a weak
    reference to its object, so that a closed engine and its KV pool are freed. Without Triton this
    function does nothing.
    """
    try:
        from triton import knobs
    except Exception as error:  # A broken installation raises many kinds of exceptions.
        log.info("event=compilations_not_observed reason=%r", str(error))
        return
    start_times: dict[str, float] = {}
    reference = _weak_reference(observer)

    def report(kernel: str, seconds: float | None) -> None:
        if (current_observer := reference()) is not None:
            current_observer(kernel, seconds)

    def before(*, key: str, fn: Any, **_: object) -> bool:
        start_times[key] = time.perf_counter()
        report(_kernel_name(fn), None)
        return False  # Triton compiles the kernel itself.

    def after(*, key: str, fn: Any, **_: object) -> None:
        seconds = time.perf_counter() - start_times.pop(key)
        log.info("event=kernel_compiled kernel=%s seconds=%.2f", _kernel_name(fn), seconds)
        report(_kernel_name(fn), seconds)

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = after


def _weak_reference(observer: CompilationObserver) -> Callable[[], CompilationObserver | None]:
    """Return a function that returns the observer; None: it is a method of a deleted object."""
    return weakref.WeakMethod(observer) if inspect.ismethod(observer) else lambda: observer


def _kernel_name(function: Any) -> str:
    return str(function.name).rpartition(".")[2]
