"""Refused changes of adapters: the records of calls that lack a role, in the change log."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

from serving.admission.auth import Authenticator, Caller
from serving.file_threads import FileThreads
from serving.frontend.call import Call, Frontend
from serving.frontend.call_origin import UNKNOWN_ORIGIN
from serving.request import RefusedError
from serving.service.metrics import Metrics
from tests.support.servers import WAIT_S


def test_refused_calls_do_not_wait_for_each_others_records() -> None:
    """If a record cannot be written, each refused call waits for its own record only."""
    both_records = threading.Barrier(2)
    refusals: list[str] = []

    def record_refusal(action: str, name: str, author: Any, error: BaseException) -> None:
        both_records.wait(WAIT_S)
        refusals.append(f"{action}: {error}")

    async def refuse_two() -> list[Any]:
        frontend = Frontend(Metrics(), Authenticator())
        store = SimpleNamespace(record_refusal=record_refusal)
        frontend.service = cast(Any, SimpleNamespace(store=store, file_threads=FileThreads(WAIT_S)))
        call = Call(
            frontend, "preamble", Caller("crew", frozenset({"generate"})), None, UNKNOWN_ORIGIN
        )
        calls = [call.require_role("adapters", "promote") for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = asyncio.run(refuse_two())
    assert [type(error) for error in errors] == [RefusedError] * 2
    assert refusals == [f"promote: {errors[0]}"] * 2
