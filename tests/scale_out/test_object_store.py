"""Four replicas with one object store: uploads, promotions, a lost store, and no secrets."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from clients.adapter_client import AdapterCalls
from clients.client import CallError, Client, Options, Retries
from gpt.object_store.object_store import ObjectStore
from tests.support.object_store import (
    BUCKET,
    KEY_ID,
    SECRET,
    RunningStore,
    put_folder,
    running_store,
)
from tests.support.replicas import Replicas
from tests.support.servers import (
    ROOT,
    WAIT_S,
    command,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of their own.

URL = f"s3://{BUCKET}/team/one"
OTHER_ADAPTERS = 10_000
OPTIONS = Options(max_new_tokens=12, temperature=0.0, ignore_ends=True)
ANSWER_S = 5.0  # Gate: an upload answers on all replicas.
LISTED_S = 2.0  # Gate: a listing of all adapters.
SLACK = 5  # A busy machine.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    with running_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def files(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of adapters with different outputs."""
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / f"a{number}.safetensors" for number in range(8)]
    for number, path in enumerate(paths):
        write_adapter(path, checkpoint, [5 + 31 * number + token for token in range(8)])
    return paths


@pytest.fixture(scope="module")
def replicas(
    store: RunningStore,
    checkpoint: Path,
    files: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Replicas]:
    payload = files[0].read_bytes()
    objects = ObjectStore(URL)
    with ThreadPoolExecutor(16) as pool:
        keys = (f"other{number}@1.safetensors" for number in range(OTHER_ADAPTERS))
        list(pool.map(lambda key: objects.write(key, payload), keys))
    folder = tmp_path_factory.mktemp("replicas")

    settings = {
        "adapters": URL,
        "adapter_mirror": lambda index: str(folder / f"mirror{index}"),
        "adapters_poll_s": 1.0,
        "flight_dir": str(folder),
    }
    with Replicas(checkpoint, folder, 4, **settings) as replicas:
        yield replicas


def answer(client: Client, adapter: str) -> list[int]:
    options = Options(**{**vars(OPTIONS), "adapter": adapter})
    return client.generate("a text", options).token_ids


def answers(replicas: Replicas, adapter: str) -> list[list[int]]:
    tokens: list[list[int]] = []
    for server in replicas.servers:
        with server.client() as client:
            tokens.append(answer(client, adapter))
    return tokens


def outcomes(replicas: Replicas, call: Callable[[AdapterCalls, int], object]) -> list[str]:
    """The code of the same call on all replicas at once; OK if it succeeds."""

    def run(index: int) -> str:
        with replicas.servers[index].client() as client:
            try:
                call(AdapterCalls(client), index)
            except CallError as error:
                return str(error.code)
        return "OK"

    with ThreadPoolExecutor(len(replicas.servers)) as pool:
        return list(pool.map(run, range(len(replicas.servers))))


def run_command(*words: str, fails: bool = False) -> str:
    """The standard output of a command; its standard error if it `fails`."""
    completed = subprocess.run(
        command(*words), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == fails, completed.stderr
    return completed.stderr if fails else completed.stdout


def test_an_upload_answers_on_all_replicas(replicas: Replicas, files: list[Path]) -> None:
    with replicas.servers[0].client() as client:
        AdapterCalls(client).upload("mood", files[1])
        began = time.monotonic()
        first, *others = answers(replicas, "mood")
        seconds = time.monotonic() - began
        assert others == [first] * 3
        assert first != answer(client, ""), "the adapter has an effect"
    print(f"answers of four replicas after an upload: {seconds:.2f} s")
    assert seconds < SLACK * ANSWER_S

    # A new version replaces it where it is in use.
    with replicas.servers[1].client() as client:
        AdapterCalls(client).upload("mood", files[2])
        began = time.monotonic()
        expected = answer(client, "mood")
        assert expected != first
        eventually(lambda: answers(replicas, "mood") == [expected] * 4, SLACK * ANSWER_S)
    print(f"new version on four replicas: {time.monotonic() - began:.2f} s")
    assert replicas.total("preamble_adapter_store_fetches_total") == 6


def test_all_adapters_are_listed_without_being_fetched(replicas: Replicas) -> None:
    server = replicas.servers[3]
    with server.client() as client:
        client.adapters()
        began = time.monotonic()
        adapters = client.adapters()
        seconds = time.monotonic() - began
    print(f"listing of {len(adapters)} adapters: {seconds:.2f} s")
    assert len([adapter for adapter in adapters if adapter.name != "mood"]) == OTHER_ADAPTERS
    assert all(adapter.current for adapter in adapters if adapter.name != "mood")
    assert seconds < SLACK * LISTED_S
    assert server.metric("preamble_adapter_store_versions") == len(adapters)
    assert server.metric("preamble_adapters_loaded") < 10
    models = json.loads(server.get("/v1/models")[1])["data"]
    assert {"other77", "other77@1"} <= {model["id"] for model in models}
    with server.client() as client:
        assert AdapterCalls(client).show("other4321").virtual_tokens == 8


def test_one_of_several_uploads_of_a_version_succeeds(
    replicas: Replicas, files: list[Path]
) -> None:
    codes = outcomes(replicas, lambda calls, index: calls.upload("race@3", files[index]))
    assert sorted(codes) == ["ALREADY_EXISTS"] * 3 + ["OK"]
    winner = codes.index("OK")
    with replicas.servers[winner].client() as client:
        assert answers(replicas, "race@3") == [answer(client, "race")] * 4


def test_no_promotion_is_lost(replicas: Replicas, files: list[Path]) -> None:
    with replicas.servers[0].client() as client:
        for path in files[:5]:
            AdapterCalls(client).upload("vote", path)
    codes = outcomes(replicas, lambda calls, index: calls.promote(f"vote@{index + 1}"))
    assert codes == ["OK"] * 4
    content, _ = ObjectStore(URL).read("vote.current", 4096)
    record = json.loads(content)
    # The first promotion replaced version 5, the newest one.
    assert {record["current"], *record["before"]} == {1, 2, 3, 4, 5}
    with replicas.servers[2].client() as client:
        expected = answer(client, f"vote@{record['current']}")
    eventually(lambda: answers(replicas, "vote") == [expected] * 4)
    log = json.loads(run_command("adapters", "log", URL, "--adapter", "vote", "--json"))
    assert [change["status"] for change in log] == ["done"] * 9
    assert len({change["process"] for change in log}) == 4


def test_a_lost_store_stops_no_replica(
    replicas: Replicas, store: RunningStore, files: list[Path]
) -> None:
    (expected, *_) = answers(replicas, "mood")
    store.suspend()  # It accepts connections, and does not answer.
    try:
        with replicas.servers[3].client() as client:
            with pytest.raises(CallError) as caught:
                answer(client, "other98")
            assert caught.value.reason == "STORAGE_TIMEOUT"
        assert answers(replicas, "mood") == [expected] * 4
    finally:
        store.resume()
    store.stop()
    try:
        time.sleep(3.0)
        assert answers(replicas, "mood") == [expected] * 4
        replicas.servers[0].stop(signal.SIGKILL)
        replicas.restart(0)  # It serves the copies of its mirror.
        assert answers(replicas, "mood") == [expected] * 4
        for server in replicas.servers[:2]:
            assert server.get("/health/ready")[0] == 200
            with Client(server.address, WAIT_S, retries=Retries(attempts_max=1)) as client:
                for adapter in ("other99", "unknown"):
                    with pytest.raises(CallError) as caught:
                        answer(client, adapter)
                    assert caught.value.code == "UNAVAILABLE"
                    assert caught.value.reason == "STORAGE_TIMEOUT"
                with pytest.raises(CallError) as caught:
                    AdapterCalls(client).upload("late", files[3])
                assert caught.value.reason == "STORAGE_TIMEOUT"
            assert server.metric("preamble_adapter_store_errors_total") > 0
        assert replicas.servers[0].metric("preamble_adapter_store_listing_age_seconds") == -1
        assert replicas.servers[1].metric("preamble_adapter_store_listing_age_seconds") > 3
        assert "event=adapter_store_failed" in replicas.log_path(1).read_text()
    finally:
        store.start()
    with replicas.servers[2].client() as client:
        calls = AdapterCalls(client)
        eventually(lambda: _succeeds(lambda: calls.upload("late", files[3])))
    eventually(lambda: _succeeds(lambda: answers(replicas, "late")))
    assert answers(replicas, "mood") == [expected] * 4
    assert "event=adapter_store_answers" in replicas.log_path(1).read_text()


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except CallError:
        return False
    return True


def test_credentials_are_in_no_flag_file_log_or_metric(replicas: Replicas) -> None:
    (replicas.log_path(0).parent / "metrics.txt").write_text(
        "".join(server.get("/metrics")[1] for server in replicas.servers)
    )
    folder = replicas.log_path(0).parent
    texts = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for server in replicas.servers:
        for pid in (server.process.pid, *server.ranks):
            path = Path(f"/proc/{pid}/cmdline")
            texts[path] = path.read_bytes()
    assert len(texts) > 20
    for path, content in texts.items():
        for secret in (KEY_ID, SECRET):
            assert secret.encode() not in content, path
    objects = ObjectStore(URL)
    for entry in chain(objects.list(".changes"), objects.list(after="vote")):
        assert SECRET.encode() not in objects.read(entry.key, 1 << 20)[0]


def test_a_model_is_served_from_the_store(
    replicas: Replicas, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"s3://{BUCKET}/models/small"
    put_folder(checkpoint, url)
    with (
        serving(url, log=tmp_path / "log", adapters=URL, tp=2) as server,
        server.client() as client,
    ):
        assert "model=small" in server.ready
        assert answer(client, "mood") == answers(replicas, "mood")[0]
    # The front end and two ranks have copied the small files once.
    (cached,) = (tmp_path / "cache" / "preamble" / "objects").iterdir()
    assert (cached / "small" / "preamble.json").exists()


def test_a_server_says_what_is_missing(
    checkpoint: Path, store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(words: str, *flags: str) -> None:
        message = run_command("serve", str(checkpoint), "--port", "0", *flags, fails=True)
        assert re.search(words, message.splitlines()[-1]), message

    refuse("no_such_bucket.*404 NoSuchBucket", "--adapters", "s3://no_such_bucket/a")
    monkeypatch.delenv("PYTHONPATH")
    refuse(r"needs the package obstore.*install preamble\[s3\]", "--adapters", URL)
