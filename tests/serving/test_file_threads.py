"""File threads: an access that does not end delays no other owner, and not the exit."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from serving.file_threads import OWNER_THREADS_MAX, THREADS_MAX, FileThreads
from serving.request import UnavailableError
from tests.support.servers import ROOT, WAIT_S


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """An event that the accesses of a test wait for."""
    event = threading.Event()
    yield event
    event.set()


def waiting(event: threading.Event) -> Callable[[], str]:
    def access() -> str:
        assert event.wait(WAIT_S)
        return "done"

    return access


def test_values_and_errors_of_an_access_reach_its_caller() -> None:
    async def main() -> None:
        threads = FileThreads(WAIT_S)
        assert await threads.run("a", divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", divmod, 7, 0)

        def give_up() -> None:
            raise TimeoutError(110, "Connection timed out")

        with pytest.raises(TimeoutError, match="Connection timed out"):
            await threads.run("a", give_up)

    asyncio.run(main())


def test_an_owner_whose_accesses_hang_delays_no_other_owner(released: threading.Event) -> None:
    async def main() -> None:
        threads = FileThreads(0.05)
        hung = [
            asyncio.create_task(threads.run("a", waiting(released)))
            for _ in range(3 * OWNER_THREADS_MAX)
        ]
        await asyncio.sleep(0)
        assert await threads.result(threads.submit("b", divmod, 7, 2), WAIT_S) == (3, 1)
        for task in hung:
            with pytest.raises(UnavailableError, match=r"did not answer within 0\.05 s") as caught:
                await task
            assert caught.value.reason == "STORAGE_TIMEOUT"
        # The accesses that had no thread were dropped, so that they do not run later.
        released.set()
        assert await threads.result(threads.submit("a", divmod, 9, 2), WAIT_S) == (4, 1)

    asyncio.run(main())


def test_the_number_of_threads_is_bounded(released: threading.Event) -> None:
    running = threading.Semaphore(0)

    def access() -> str:
        running.release()
        return waiting(released)()

    threads = FileThreads(WAIT_S)
    futures = [
        threads.submit(f"owner{number % 50}", access) for number in range(50 * OWNER_THREADS_MAX)
    ]
    for _ in range(THREADS_MAX):
        assert running.acquire(timeout=WAIT_S)
    assert not running.acquire(timeout=0.05)
    released.set()
    assert {future.result(WAIT_S) for future in futures} == {"done"}


def test_an_access_that_must_run_is_not_dropped(released: threading.Event) -> None:
    calls: list[int] = []

    async def main() -> None:
        threads = FileThreads(0.02)
        for _ in range(OWNER_THREADS_MAX):
            with pytest.raises(UnavailableError):
                await threads.run("a", waiting(released))
        await threads.run_to_end("a", lambda: calls.append(1))  # Stops waiting, without an error.
        assert not calls
        released.set()
        await threads.result(threads.submit("a", divmod, 7, 2), WAIT_S)

    asyncio.run(main())
    assert calls == [1]


def test_a_caller_knows_whether_its_access_was_dropped_or_runs(released: threading.Event) -> None:
    async def main() -> None:
        threads = FileThreads(0.02)
        running = [threads.submit("a", waiting(released)) for _ in range(OWNER_THREADS_MAX)]
        queued, cancelled = threads.submit("a", divmod, 7, 2), threads.submit("a", divmod, 7, 2)
        caller = asyncio.create_task(threads.result(cancelled))
        with pytest.raises(UnavailableError, match=r"within 0\.02 s"):
            await threads.result(queued, running_limit_s=WAIT_S)
        caller.cancel()
        await asyncio.wait([caller])
        with pytest.raises(UnavailableError, match=r"within 0\.04 s"):
            await threads.result(running[0], running_limit_s=0.04)
        assert queued.cancelled() and cancelled.cancelled() and not running[0].cancelled()
        caller = asyncio.create_task(threads.result(running[0], running_limit_s=WAIT_S))
        await asyncio.sleep(0.06)  # Longer than the limit of an access without a thread.
        released.set()
        assert await caller == "done"

    asyncio.run(main())


def test_errors_of_an_access_that_must_run_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        await FileThreads(WAIT_S).run_to_end("a", lambda: divmod(7, 0))

    asyncio.run(main())
    (record,) = caplog.records
    assert record.message == "event=file_access_failed"
    assert "ZeroDivisionError" in caplog.text


def test_the_number_of_waiting_logged_accesses_is_bounded(
    released: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    async def main() -> None:
        threads = FileThreads(0.02)
        for _ in range(OWNER_THREADS_MAX):
            threads.submit("a", waiting(released))
        accesses = [
            threads.submit_logged("a", lambda: calls.append(1), waiting_max=3) for _ in range(5)
        ]
        other = threads.submit_logged("b", lambda: calls.append(2), waiting_max=3)
        await threads.wait(other)
        await threads.wait(accesses[4])
        assert calls == [2]
        released.set()
        assert [access.cancelled() or access.result(WAIT_S) for access in accesses] == [
            *3 * [None],
            *2 * [True],
        ]

    asyncio.run(main())
    assert calls == [2, 1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "event=file_access_dropped owner=a suppressed=0"
    ]


def test_the_exit_does_not_wait_for_an_access() -> None:
    program = (
        "import asyncio, threading\n"
        "from serving.file_threads import FileThreads\n"
        "from serving.request import UnavailableError\n"
        "async def main():\n"
        "    try:\n"
        "        await FileThreads(0.01).run('a', threading.Event().wait)\n"
        "    except UnavailableError:\n"
        "        print('late')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")
