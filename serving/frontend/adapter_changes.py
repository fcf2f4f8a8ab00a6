"""Adapter changes: runs a call's change of the adapter directory in a thread, within time limits.

A change that waits for a thread too long is dropped. A change that runs cannot be stopped, so the
call waits for it longer. The module is independent of protocols; `serving.adapters` makes the
changes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from gpt.adapters.change_log import ChangeAction
from serving.frontend.call import Call
from serving.request import RefusedError, UnavailableError, UnknownAdapterError

T = TypeVar("T")


async def run_change(call: Call, action: ChangeAction, name: str, change: Callable[[], T]) -> T:
    """Run `change` of the adapter `name` in a thread; record its refusal if it did not run."""
    access = call.service.file_threads.submit(call.caller.tenant, change)
    try:
        return await change_result(call, access)
    except BaseException as error:
        if access.cancelled():  # A change that runs records its own refusal.
            call.record_refusal(action, name, error)
        raise


async def change_result(call: Call, access: Future[T], limit_s: float | None = None) -> T:
    """Return the result of a submitted change.

    A change that has no thread after `limit_s` (default: `adapters_answer_s`) is dropped, and
    clients retry the call. A change that has a thread cannot be stopped, and a retry could make it
    twice. Therefore the call waits for it up to `limit_s` (default: `upload_s`), and then ends with
    an error that clients do not retry.
    """
    upload_s = call.service.config.adapter_config.upload_s
    running_limit_s = upload_s if limit_s is None else limit_s
    try:
        with adapter_name_field():
            return await call.service.file_threads.result(access, limit_s, running_limit_s)
    except UnavailableError:
        if access.cancelled():
            raise
        raise RefusedError(
            "DEADLINE_PASSED",
            f"the change takes longer than {upload_s:g} s (upload_s), and may still be made; see "
            "`preamble adapters log` before you repeat it",
        ) from None


@contextmanager
def adapter_name_field() -> Iterator[None]:
    """Add to an UnknownAdapterError the field that contains the adapter's name in all requests."""
    try:
        yield
    except UnknownAdapterError as error:
        if error.field == "adapter":
            error.field = "name"
        raise
