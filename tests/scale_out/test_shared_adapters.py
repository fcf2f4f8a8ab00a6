"""Replicas with one adapter directory: changes through one replica reach all, and none is lost."""

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from clients.adapter_client import AdapterCalls
from clients.client import CallError, Client, Options
from tests.support.replicas import Replicas
from tests.support.servers import WAIT_S, eventually, write_adapter, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of their own.

REPLICAS = 4
STORED = 10_000  # Adapters in the directory.
# Five times the value in docs/scale-out.md, from the upload until all replicas have answered.
ANSWER_MAX_S = 5 * 3.0
TRIES = 3  # Of changes at the same time.
OPTIONS = Options(max_new_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of different adapters for the checkpoint in their folder."""
    folder = tmp_path_factory.mktemp("shared")
    checkpoint = write_checkpoint(folder)
    rng = random.Random(0)
    paths = [folder / f"file{number}.safetensors" for number in range(3)]
    for path in paths:
        write_adapter(path, checkpoint, [rng.randrange(3, 600) for _ in range(8)])
    return paths


@pytest.fixture(scope="module")
def replicas(files: list[Path]) -> Iterator[Replicas]:
    folder = files[0].parent
    directory = folder / "adapters"
    directory.mkdir()
    for number in range(STORED):
        os.link(files[0], directory / f"stored{number}.safetensors")
    settings = {"adapters": str(directory), "adapters_max": 2 * STORED}
    with Replicas(folder / "checkpoint", folder, REPLICAS, **settings) as replicas:
        yield replicas


def _upload(client: Client, name: str, file: Path) -> str:
    adapter = AdapterCalls(client).upload(name, file)
    return f"{adapter.name}@{adapter.version}"


def test_an_uploaded_adapter_answers_on_all_replicas(replicas: Replicas, files: list[Path]) -> None:
    clients = [server.client() for server in replicas.servers]
    start = time.monotonic()
    _upload(clients[0], "uploaded", files[1])
    answers = [
        client.generate("seven", Options(**{**vars(OPTIONS), "adapter": "uploaded"}))
        for client in clients
    ]
    duration_s = time.monotonic() - start
    print(f"{duration_s:.2f} s until {REPLICAS} replicas of {STORED} adapters had answered")
    assert len({answer.text for answer in answers}) == 1
    assert duration_s <= ANSWER_MAX_S
    for client in clients:
        client.close()


def test_one_of_two_uploads_of_a_version_succeeds(replicas: Replicas, files: list[Path]) -> None:
    with replicas.servers[0].client() as first, replicas.servers[1].client() as second:
        for number in range(1, TRIES + 1):
            name = f"rival@{number}"
            results = _call_together(
                partial(_upload, first, name, files[1]), partial(_upload, second, name, files[2])
            )
            errors = [error for result in results if (error := result.exception()) is not None]
            assert len(errors) == 1
            assert isinstance(errors[0], CallError) and errors[0].reason == "ALREADY_EXISTS"


def test_no_promotion_is_lost(replicas: Replicas, files: list[Path]) -> None:
    """Each promotion replaces the one before, and a rollback restores that one."""
    with replicas.servers[0].client() as first, replicas.servers[1].client() as second:
        for version in (1, 2, 3):
            _upload(first, f"moved@{version}", files[version - 1])
        calls = [AdapterCalls(client) for client in (first, second)]
        for call in calls:
            call.load("moved@3")
        for _ in range(TRIES):
            calls[0].promote("moved@1")
            results = _call_together(
                lambda: calls[0].promote("moved@2"), lambda: calls[1].promote("moved@3")
            )
            assert not any(result.exception() for result in results)
            current = calls[0].load("moved").version
            assert current in (2, 3)
            assert calls[1].rollback("moved").version == 5 - current
            assert calls[0].rollback("moved").version == 1
    for server in replicas.servers:
        with server.client() as client:
            eventually(partial(_is_current, client, "moved", 1))


def _is_current(client: Client, name: str, version: int) -> bool:
    return AdapterCalls(client).show(name).version == version


def _call_together(*calls: Callable[[], object]) -> list[Future[object]]:
    """Make the calls at the same time; return their results."""
    barrier = Barrier(len(calls))

    def call(number: int) -> object:
        barrier.wait(WAIT_S)
        return calls[number]()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call, number) for number in range(len(calls))]
