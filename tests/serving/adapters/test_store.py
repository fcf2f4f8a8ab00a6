"""What changes a directory of adapters: whatever happens, others see all of a change or none."""

import queue
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, publish_adapter, save_adapter
from gpt.errors import PreambleError, RequestError
from serving.adapters.files import GONE, UPLOAD, Note, read_note, unloaded, write_note
from serving.adapters.registry import Adapters
from serving.adapters.store import GONE_S, AdapterStore
from serving.config import ServerConfig
from serving.frontend.call import ended_by
from serving.messages import Rows
from serving.request import RefusedError, UnknownAdapterError
from serving.worker.adapter_cache import Loaded, Tables
from tests.support.models import CLASSIC
from tests.support.servers import ROOT, WAIT_S, eventually

CONFIG = ServerConfig("none", upload_bytes_max=100_000, uploads_max=2)


def adapter(name: str = "tax", value: float = 1.0) -> Adapter:
    return build_adapter(Card(name), torch.full((2, 8), value))


def content(folder: Path, value: float = 1.0) -> bytes:
    file = folder / "made.safetensors"
    save_adapter(adapter(value=value), file)
    return file.read_bytes()


def fine(adapter: Adapter) -> None:
    """Nothing is wrong with any."""


def store_of(
    folder: Path, config: ServerConfig = CONFIG, check: Callable[[Adapter], None] = fine
) -> AdapterStore:
    folder.mkdir(exist_ok=True)
    adapters = Adapters(folder, check, adapters_max=20)
    adapters.scan()
    return AdapterStore(adapters, config)


def upload(store: AdapterStore, name: str, data: bytes, tenant: str = "") -> str:
    one = store.upload(name, tenant)
    try:
        one.begin()
        for start in range(0, len(data), 100):
            one.write(data[start : start + 100])
        return one.finish().key
    finally:
        one.drop()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def refused(reason: str, words: str, field: str | None = None) -> Iterator[None]:
    with pytest.raises(PreambleError, match=words) as caught:
        yield
    ended = ended_by(caught.value)
    assert (ended.reason.name, ended.field) == (reason, field)


def test_an_upload_is_the_next_version_and_nothing_else_stays(tmp_path: Path) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)

    assert upload(store, "tax", data) == "tax@1"
    assert upload(store, "tax@7", data) == "tax@7"
    assert upload(store, "tax", data) == "tax@8"

    assert names(folder) == [f"tax@{version}.safetensors" for version in (1, 7, 8)]
    assert store.adapters.resolve("tax").key == "tax@8"
    with refused("ALREADY_EXISTS", "tax@7 is there already", "name"):
        upload(store, "tax@7", data)
    save_adapter(adapter("old"), folder / "old.safetensors")
    with refused("ALREADY_EXISTS", "old@1 is there already", "name"):
        upload(store, "old@1", data)


def test_an_upload_that_breaks_off_is_nowhere_and_gives_its_place_back(tmp_path: Path) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    one, other = store.upload("tax", ""), store.upload("tax", "")
    one.begin()
    one.write(data[:-1])
    with refused("QUEUE_FULL", "2 uploads are on their way"):
        store.upload("tax", "")
    store.adapters.scan()
    assert len(store.adapters) == 0 and names(folder)[0].startswith(UPLOAD)

    one.drop()
    one.drop()
    other.drop()
    with refused("CANCELLED", "given up"):  # A thread that comes late changes nothing.
        other.begin()

    assert names(folder) == []
    assert upload(store, "tax", data) == "tax@1"


def test_of_many_uploads_of_one_name_each_gets_a_version_or_all_but_one_are_refused(
    tmp_path: Path,
) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    # Two servers on one directory.
    stores = [store_of(folder, replace(CONFIG, uploads_max=20)) for _ in range(2)]
    with ThreadPoolExecutor(8) as threads:
        free = [threads.submit(upload, stores[i % 2], "tax", data) for i in range(8)]
        assert sorted(one.result(WAIT_S) for one in free) == [f"tax@{i}" for i in range(1, 9)]
        same = [threads.submit(upload, stores[i % 2], "fox@3", data) for i in range(8)]
        ends = [one.exception(WAIT_S) for one in same]
    assert ends.count(None) == 1
    reasons = {end.reason for end in ends if isinstance(end, RefusedError)}
    assert reasons == {"ALREADY_EXISTS"}


def test_a_full_disk_ends_an_upload_with_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, before[1]))
        with refused("NOT_POSSIBLE_NOW", "cannot be changed"):
            upload(store, "tax", data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)
    assert names(folder) == []
    assert upload(store, "tax", data) == "tax@1"


KILLED = """
import sys, time
from pathlib import Path
from tests.serving.adapters.test_store import store_of
store = store_of(Path(sys.argv[1]))
one = store.upload("tax", "acme")
one.begin()
one.write(Path(sys.argv[2]).read_bytes()[:-1])
one._file.flush()
print("half", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_what_a_killed_server_left_is_swept_by_the_next_and_what_others_write_is_not(
    tmp_path: Path,
) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    folder.mkdir()
    words = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "made.safetensors")]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        (part,) = (folder / "acme").iterdir()
        store = store_of(folder)
        time.sleep(max(0.0, part.stat().st_mtime + 1.1 - time.time()))
        store.sweep()
        assert part.exists()  # It is being written.
    finally:
        process.kill()
        process.communicate()

    assert len(store.adapters) == 0
    store.sweep()

    assert names(folder / "acme") == []
    assert upload(store, "tax", data, "acme") == "tax@1"


def test_what_is_unloaded_is_gone_and_its_number_is_not_given_again(tmp_path: Path) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    for _ in range(2):
        upload(store, "tax", data)

    store.unload("tax@2", "")

    assert store.adapters.resolve("tax").key == "tax@1"
    with pytest.raises(UnknownAdapterError):
        store.unload("tax@2", "")
    with refused("ALREADY_EXISTS", "was given before", "name"):
        upload(store, "tax@2", data)
    assert upload(store, "tax", data) == "tax@3"
    with refused("INVALID_FIELD", "with a version", "name"):
        store.unload("tax", "")


def test_a_sequence_that_waits_still_gets_the_rows_of_an_adapter_that_was_unloaded(
    tmp_path: Path,
) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    upload(store, "tax", data)
    rows: Rows = store.adapters.resolve("tax").rows
    store.unload("tax@1", "")

    came: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
    tables = Tables(CLASSIC.with_fields(hidden_size=8), 1 << 20, came.put)
    assert tables.pin(rows) == "coming"
    loaded = came.get(timeout=WAIT_S)
    tables.close()

    assert loaded.data == adapter().table.numpy().tobytes() and not loaded.reason


def test_hidden_files_of_what_was_unloaded_go_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    upload(store, "tax", data)
    store.unload("tax@1", "")
    hidden = unloaded(folder / "tax@1.safetensors")
    store.sweep()
    assert hidden.exists() and hidden.name.startswith(GONE)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + GONE_S + 1)
    store.sweep()
    assert not hidden.exists()


def test_a_promotion_is_seen_by_all_who_read_the_directory_and_can_be_taken_back(
    tmp_path: Path,
) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store, other = store_of(folder), store_of(folder).adapters
    for _ in range(3):
        upload(store, "tax", data)

    def current() -> str:
        other.scan()
        assert store.adapters.resolve("tax").key == other.resolve("tax").key
        assert [one.key for one, is_current in other.list() if is_current] == [
            other.resolve("tax").key
        ]
        return other.resolve("tax").key

    assert current() == "tax@3"
    store.promote("tax@1", "")
    assert current() == "tax@1"
    assert upload(store, "tax", data) == "tax@4" and current() == "tax@1"
    store.promote("tax@4", "")
    store.promote("tax@4", "")  # Said twice, it is one promotion.
    assert current() == "tax@4"
    assert store.rollback("tax", "").key == current() == "tax@1"
    assert store.rollback("tax", "").key == current() == "tax@3"
    with refused("NOT_POSSIBLE_NOW", "no promotion", "name"):
        store.rollback("tax", "")
    with refused("INVALID_FIELD", "without a version", "name"):
        store.rollback("tax@3", "")
    with refused("INVALID_FIELD", "with a version", "name"):
        store.promote("tax", "")
    with pytest.raises(UnknownAdapterError):
        store.promote("tax@9", "")


def test_a_promoted_version_that_is_missing_or_a_broken_note_means_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    for _ in range(2):
        upload(store, "tax", data)
    store.promote("tax@1", "")
    (folder / "tax@1.safetensors").unlink()
    store.adapters.scan()
    assert store.adapters.resolve("tax").key == "tax@2"
    assert caplog.text.count("adapter_current_missing") == 1

    for broken in ("", "[]", "{}", '{"current": "2", "before": [], "gone": 0}', "[" * 3000):
        (folder / "tax.current").write_text(broken)
        store.adapters.scan()
        assert store.adapters.resolve("tax").key == "tax@2"
        with refused("NOT_POSSIBLE_NOW", r"tax\.current .* cannot be read"):
            store.promote("tax@2", "")
    write_note(folder, "tax", Note(2, (1,), 5))
    assert read_note(folder, "tax") == Note(2, (1,), 5)


def test_a_tenant_has_a_folder_whose_names_hide_everybodys(tmp_path: Path) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    for name in ("tax", "tax", "fox"):
        upload(store, name, data)
    assert upload(store, "tax", content(tmp_path, 2.0), "acme") == "tax@1"
    upload(store, "own", data, "acme")

    def seen(tenant: str) -> list[str]:
        return [one.key for one, _ in store.adapters.list(tenant)]

    assert seen("") == seen("zeta") == ["fox@1", "tax@1", "tax@2"]
    assert seen("acme") == ["fox@1", "own@1", "tax@1"]
    shared, own = store.adapters.resolve("tax@1"), store.adapters.resolve("tax@1", "acme")
    assert shared.rows.digest != own.rows.digest and len(store.adapters) == 5
    with pytest.raises(UnknownAdapterError):  # Not everybody's: the name is the tenant's own.
        store.adapters.resolve("tax@2", "acme")

    sentences = set()
    for name in ("own", "nil"):  # Another's is as unknown as nobody's.
        for call in (store.show, store.load, store.rollback):
            with pytest.raises(UnknownAdapterError) as caught:
                call(name, "zeta")
            sentences.add(str(caught.value).replace(name, "NAME"))
        for change in (store.unload, store.promote):
            with pytest.raises(UnknownAdapterError) as caught:
                change(f"{name}@1", "zeta")
            sentences.add(str(caught.value).replace(f"{name}@1", "NAME"))
    assert len(sentences) == 1
    for change in (store.unload, store.promote):
        with refused("PERMISSION_DENIED", "everybody's", "name"):
            change("fox@1", "acme")

    store.unload("tax@1", "acme")
    assert store.adapters.resolve("tax", "acme") is store.adapters.resolve("tax")


@pytest.mark.parametrize("tenant", ["..", ".", "a/b", "/etc", "a\0b", ".hidden", "x" * 101])
def test_a_tenants_name_never_leads_out_of_the_directory(tmp_path: Path, tenant: str) -> None:
    store = store_of(tmp_path / "adapters")
    with refused("NOT_POSSIBLE_NOW", "cannot be a folder's"):
        store.upload("tax", tenant)
    assert store.adapters.list(tenant) == []
    with pytest.raises(UnknownAdapterError):
        store.adapters.resolve("tax", tenant)


def test_a_server_without_a_directory_says_so(tmp_path: Path) -> None:
    store = AdapterStore(Adapters(None, fine, adapters_max=1), CONFIG)
    with refused("NOT_POSSIBLE_NOW", "no directory of adapters"):
        store.upload("tax", "")
    assert store.adapters.list("acme") == []
    store.sweep()


def test_more_than_may_be_are_not_taken_and_other_folders_count(tmp_path: Path) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    store.adapters.adapters_max = 2
    upload(store, "tax", data, "acme")
    upload(store, "fox", data)
    with refused("NOT_POSSIBLE_NOW", "adapters_max"):
        upload(store, "owl", data, "zeta")
    publish_adapter(adapter("elk"), folder)
    store.adapters.scan()
    assert len(store.adapters) == 2
    store.unload("tax@1", "acme")
    store.adapters.scan()
    assert store.adapters.resolve("elk").key == "elk@1"  # There is room for it now.


def test_what_is_there_and_cannot_be_used_is_said_by_load(tmp_path: Path) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    (folder / "tax@2.safetensors").write_bytes(data[:-1])
    for name in ("tax", "tax@2"):
        with refused("ADAPTER_UNUSABLE", f"^{name}: tax@2.safetensors is truncated", "name"):
            store.load(name, "")
    (folder / "tax@2.safetensors").write_bytes(data)
    assert store.load("tax", "").key == "tax@2"
    with pytest.raises(RequestError):
        store.load("../tax", "")


def test_a_folder_that_cannot_be_read_does_not_take_the_others_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, data = tmp_path / "adapters", content(tmp_path)
    store = store_of(folder)
    upload(store, "tax", data, "acme")
    (folder / "loop").symlink_to(folder / "acme")
    store.adapters.scan()
    assert store.adapters.resolve("tax", "loop").key == "tax@1"
    (folder / "acme").rename(tmp_path / "elsewhere")
    store.adapters.scan()
    upload(store, "fox", data)
    eventually(lambda: len(store.adapters) == 1)
    with pytest.raises(UnknownAdapterError):
        store.adapters.resolve("tax", "acme")


def test_a_prefix_is_measured_by_its_numbers(tmp_path: Path) -> None:
    folder, limit = tmp_path / "adapters", CONFIG.row_norm_max
    store, file = store_of(folder), tmp_path / "made.safetensors"
    for value in (0.9 * limit, 1.1 * limit):
        wide = torch.full((2, 800), value)
        save_adapter(build_adapter(Card("tax", kind="prefix"), wide), file)
        if value < limit:
            assert upload(store, "tax", file.read_bytes()) == "tax@1"
            assert store.adapters.resolve("tax").rows.prefix
            continue
        with refused("INVALID_FIELD", "has a key or value 1.1e", "data"):
            upload(store, "tax", file.read_bytes())
