"""Failed calls: their exceptions and frames are freed without the garbage collector."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.admission.auth import Authenticator
from serving.frontend.call import CallFailure, Frontend
from serving.request import RefusedError
from serving.service.metrics import Metrics
from tests.support.process_memory import anonymous_bytes
from tests.support.servers import serving, write_checkpoint
from tests.support.suites import by_suite

# A refused prompt takes about 80 MB, so 30 of them would take 2.4 GB.
PROMPT_TOKENS = 2_000_000
GROWTH_MAX = 300 << 20


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Message:
    """Stands for a message of many MiB in a variable of the call."""


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_variables_of_a_refused_call_are_freed() -> None:
    messages: list[weakref.ref[Message]] = []

    def refuse() -> None:
        message = Message()
        messages.append(weakref.ref(message))
        raise RefusedError("BODY_TOO_LARGE", "too large")

    async def fail() -> None:
        frontend = Frontend(Metrics(), Authenticator())
        with pytest.raises(CallFailure):
            async with frontend.call("preamble", "Generate"):
                refuse()

    asyncio.run(fail())
    (message,) = messages
    assert message() is None


@pytest.mark.parametrize("calls", by_suite(12, 30))
def test_refused_prompts_are_freed(calls: int, tmp_path: Path) -> None:
    with serving(write_checkpoint(tmp_path)) as server:
        before = anonymous_bytes(server.process.pid)
        body = {"prompt": [500] * PROMPT_TOKENS, "max_tokens": 1}
        for _ in range(calls):
            status, text = server.request("/v1/completions", body)
            assert status == 400 and "over the model's context" in text
        assert anonymous_bytes(server.process.pid) - before < GROWTH_MAX * calls / 30
