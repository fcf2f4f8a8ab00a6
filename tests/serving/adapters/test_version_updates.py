"""The adapter store: uploads, promotions and removals are atomic for every reader."""

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, publish_adapter, save_adapter
from gpt.adapters.change_log import FOLDER as CHANGES_FOLDER
from gpt.adapters.change_log import AdapterChangeLog, ChangeAuthor
from gpt.errors import PreambleError, RequestError
from gpt.linear_adapter import LinearAdapter
from serving.adapters.alias_record import AliasRecord, read_alias, write_alias
from serving.adapters.directory_layout import UNLOADED_PREFIX, UPLOAD_PREFIX, unloaded_path
from serving.adapters.registry import AdapterRegistry
from serving.adapters.version_updates import UNLOADED_KEEP_S, AdapterStore
from serving.config import AdapterConfig
from serving.engine_core.adapter_cache import AdapterCache
from serving.engine_core.adapter_reader import AdapterReadResult
from serving.frontend.call import to_call_failure
from serving.messages import AdapterRef
from serving.request import RefusedError, UnknownAdapterError
from serving.service.error_reasons import reason_name
from tests.support.full_disk import full_disk
from tests.support.models import CLASSIC
from tests.support.privileges import plain_user
from tests.support.ready_programs import ready_program
from tests.support.servers import WAIT_S, eventually

CONFIG = AdapterConfig(upload_bytes_max=100_000, uploads_max=2)


def adapter(name: str = "tax", value: float = 1.0) -> Adapter:
    return build_adapter(Card(name), torch.full((2, 8), value))


def content(folder: Path, value: float = 1.0) -> bytes:
    file = folder / "made.safetensors"
    save_adapter(adapter(value=value), file)
    return file.read_bytes()


def accept_all(adapter: Adapter) -> None:
    """A check that accepts every adapter."""


def store_of(
    folder: Path, config: AdapterConfig = CONFIG, check: Callable[[Adapter], None] = accept_all
) -> AdapterStore:
    folder.mkdir(exist_ok=True)
    adapters = AdapterRegistry(folder, check, adapters_max=20)
    adapters.scan()
    return AdapterStore(adapters, config, reason_name)


def upload(store: AdapterStore, name: str, content_: bytes, tenant: str = "") -> str:
    upload_ = store.start_upload(name, tenant)
    try:
        upload_.create_file()
        for start in range(0, len(content_), 100):
            upload_.write_chunk(content_[start : start + 100])
        key = upload_.finish().key
    except BaseException as error:
        upload_.discard(error)
        raise
    upload_.discard()
    return key


def store_of_two_versions(folder: Path, payload: bytes) -> AdapterStore:
    """A store with the uploaded versions tax@1 and tax@2."""
    store = store_of(folder)
    for _ in range(2):
        upload(store, "tax", payload)
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != CHANGES_FOLDER)


@contextmanager
def raises_refusal(reason: str, message_words: str, field: str | None = None) -> Iterator[None]:
    with pytest.raises(PreambleError, match=message_words) as caught:
        yield
    failure = to_call_failure(caught.value)
    assert (failure.reason.name, failure.field) == (reason, field)


def test_uploads_become_the_next_version_and_leave_no_other_file(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)

    assert upload(store, "tax", payload) == "tax@1"
    assert upload(store, "tax@7", payload) == "tax@7"
    assert upload(store, "tax", payload) == "tax@8"

    assert names(folder) == [f"tax@{version}.safetensors" for version in (1, 7, 8)]
    assert store.adapters.resolve("tax").key == "tax@8"
    with raises_refusal("ALREADY_EXISTS", "tax@7 exists already", "name"):
        upload(store, "tax@7", payload)
    save_adapter(adapter("old"), folder / "old.safetensors")
    with raises_refusal("ALREADY_EXISTS", "old@1 exists already", "name"):
        upload(store, "old@1", payload)


def test_an_adapter_without_virtual_tokens_is_uploaded(tmp_path: Path) -> None:
    lora = LinearAdapter(torch.ones(2, 8), torch.ones(24, 2))
    file = tmp_path / "lora.safetensors"
    key = "decoder.layers.0.self_attention.linear_qkv"
    save_adapter(build_adapter(Card("lora", kind="linears"), None, {key: lora}), file)
    store = store_of(tmp_path / "adapters")
    assert upload(store, "lora", file.read_bytes()) == "lora@1"
    loaded = store.get("lora", "")
    assert (loaded.info.method, loaded.info.rank) == ("lora", 2)
    assert loaded.info.nbytes == 4 * (2 * 8 + 24 * 2)
    assert loaded.adapter_ref.row_count == 0 and loaded.adapter_ref.changes_linears


def test_aborted_uploads_leave_no_file_and_free_their_slot(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    first_upload = store.start_upload("tax", "")
    second_upload = store.start_upload("tax", "")
    first_upload.create_file()
    first_upload.write_chunk(payload[:-1])
    with raises_refusal("QUEUE_FULL", "2 uploads are in progress"):
        store.start_upload("tax", "")
    store.adapters.scan()
    assert len(store.adapters) == 0 and names(folder)[0].startswith(UPLOAD_PREFIX)

    first_upload.discard()
    first_upload.discard()
    second_upload.discard()
    with raises_refusal("CANCELLED", "cancelled"):  # A late thread changes nothing.
        second_upload.create_file()

    assert names(folder) == []
    assert upload(store, "tax", payload) == "tax@1"


def test_concurrent_uploads_get_distinct_versions_or_one_succeeds(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    # Two servers on one directory.
    stores = [store_of(folder, replace(CONFIG, uploads_max=20)) for _ in range(2)]
    with ThreadPoolExecutor(8) as threads:
        free = [threads.submit(upload, stores[i % 2], "tax", payload) for i in range(8)]
        assert sorted(future.result(WAIT_S) for future in free) == [f"tax@{i}" for i in range(1, 9)]
        conflicting = [threads.submit(upload, stores[i % 2], "fox@3", payload) for i in range(8)]
        errors = [future.exception(WAIT_S) for future in conflicting]
    assert errors.count(None) == 1
    reasons = {end.reason for end in errors if isinstance(end, RefusedError)}
    assert reasons == {"ALREADY_EXISTS"}


def test_promotions_of_several_servers_are_all_in_the_record(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    stores = [store_of(folder) for _ in range(2)]
    for _ in range(9):
        upload(stores[0], "tax", payload)
    stores[1].adapters.scan("")
    stores[0].promote("tax@2", "")
    stores[1].promote("tax@1", "")  # This server has not read the directory since.
    record = read_alias(folder, "tax")
    assert (record.current, record.previous) == (1, (2, 9))
    with ThreadPoolExecutor(7) as threads:
        for version in range(3, 10):
            threads.submit(stores[version % 2].promote, f"tax@{version}", "")
    record = read_alias(folder, "tax")
    assert {record.current, *record.previous[:-3]} == set(range(3, 10))
    assert record.previous[-3:] == (1, 2, 9)


def test_full_disks_fail_an_upload_without_leaving_files(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    with full_disk(len(payload) // 2), raises_refusal("NOT_POSSIBLE_NOW", "cannot be changed"):
        upload(store, "tax", payload)
    assert names(folder) == []
    assert upload(store, "tax", payload) == "tax@1"


KILLED = """
import sys, time
from pathlib import Path
from tests.serving.adapters.test_version_updates import store_of
store = store_of(Path(sys.argv[1]))
upload = store.start_upload("tax", "acme")
upload.create_file()
upload.write_chunk(Path(sys.argv[2]).read_bytes()[:-1])
upload._file.flush()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_leftovers_of_killed_servers_are_removed_and_active_uploads_kept(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    folder.mkdir()
    with ready_program(KILLED, folder, tmp_path / "made.safetensors"):
        (upload_part,) = (folder / "acme").iterdir()
        store = store_of(folder)
        time.sleep(max(0.0, upload_part.stat().st_mtime + 1.1 - time.time()))
        store.sweep()
        assert upload_part.exists()  # It is being written.

    assert len(store.adapters) == 0
    store.sweep()

    assert names(folder / "acme") == []
    assert upload(store, "tax", payload, "acme") == "tax@1"


def test_unloaded_versions_are_removed_and_not_reused(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of_two_versions(folder, payload)

    store.unload("tax@2", "")

    assert store.adapters.resolve("tax").key == "tax@1"
    with pytest.raises(UnknownAdapterError):
        store.unload("tax@2", "")
    with raises_refusal("ALREADY_EXISTS", "was used before", "name"):
        upload(store, "tax@2", payload)
    assert upload(store, "tax", payload) == "tax@3"
    with raises_refusal("INVALID_FIELD", "with a version", "name"):
        store.unload("tax", "")


def test_waiting_sequences_can_read_an_unloaded_adapter(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    upload(store, "tax", payload)
    rows: AdapterRef = store.adapters.resolve("tax").adapter_ref
    store.unload("tax@1", "")

    results: queue.SimpleQueue[AdapterReadResult] = queue.SimpleQueue()
    tables = AdapterCache(CLASSIC.with_fields(hidden_size=8), 1 << 20, results.put)
    assert tables.pin(rows) == "reading"
    loaded = results.get(timeout=WAIT_S)
    tables.close()

    assert loaded.data == adapter().table.numpy().tobytes() and not loaded.reason


def test_hidden_files_of_unloaded_adapters_are_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    upload(store, "tax", payload)
    store.unload("tax@1", "")
    hidden = unloaded_path(folder / "tax@1.safetensors")
    store.sweep()
    assert hidden.exists() and hidden.name.startswith(UNLOADED_PREFIX)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + UNLOADED_KEEP_S + 1)
    store.sweep()
    assert not hidden.exists()


def test_promotions_are_visible_to_all_servers_and_can_be_rolled_back(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    other_server = store_of(folder).adapters
    for _ in range(3):
        upload(store, "tax", payload)

    def current() -> str:
        other_server.scan()
        assert store.adapters.resolve("tax").key == other_server.resolve("tax").key
        assert [loaded.key for loaded, is_current in other_server.list_visible() if is_current] == [
            other_server.resolve("tax").key
        ]
        return other_server.resolve("tax").key

    assert current() == "tax@3"
    store.promote("tax@1", "")
    assert current() == "tax@1"
    assert upload(store, "tax", payload) == "tax@4" and current() == "tax@1"
    store.promote("tax@4", "")
    store.promote("tax@4", "")  # A repeated promotion changes nothing.
    assert current() == "tax@4"
    assert store.rollback("tax", "").key == current() == "tax@1"
    assert store.rollback("tax", "").key == current() == "tax@3"
    with raises_refusal("NOT_POSSIBLE_NOW", "no earlier promotion", "name"):
        store.rollback("tax", "")
    with raises_refusal("INVALID_FIELD", "without a version", "name"):
        store.rollback("tax@3", "")
    with raises_refusal("INVALID_FIELD", "with a version", "name"):
        store.promote("tax", "")
    with pytest.raises(UnknownAdapterError):
        store.promote("tax@9", "")


def test_missing_or_invalid_promotions_mean_the_newest_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "adapters"
    store = store_of_two_versions(folder, content(tmp_path))
    store.promote("tax@1", "")
    (folder / "tax@1.safetensors").unlink()
    store.adapters.scan()
    assert store.adapters.resolve("tax").key == "tax@2"
    assert caplog.text.count("adapter_current_missing") == 1

    for content_text in ("", "[]", "{}", '{"current": "2", "before": [], "gone": 0}', "[" * 3000):
        (folder / "tax.current").write_text(content_text)
        store.adapters.scan()
        assert store.adapters.resolve("tax").key == "tax@2"
        with raises_refusal("NOT_POSSIBLE_NOW", r"tax\.current .* is not a valid"):
            store.promote("tax@2", "")
    write_alias(folder, "tax", AliasRecord(2, (1,), 5))
    assert read_alias(folder, "tax") == AliasRecord(2, (1,), 5)


def test_tenant_adapters_hide_shared_ones_of_the_same_name(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    for name in ("tax", "tax", "fox"):
        upload(store, name, payload)
    assert upload(store, "tax", content(tmp_path, 2.0), "acme") == "tax@1"
    upload(store, "own", payload, "acme")

    def visible_keys(tenant: str) -> list[str]:
        return [loaded.key for loaded, _ in store.adapters.list_visible(tenant)]

    assert visible_keys("") == visible_keys("zeta") == ["fox@1", "tax@1", "tax@2"]
    assert visible_keys("acme") == ["fox@1", "own@1", "tax@1"]
    shared_adapter = store.adapters.resolve("tax@1")
    own_adapter = store.adapters.resolve("tax@1", "acme")
    assert (
        shared_adapter.adapter_ref.digest != own_adapter.adapter_ref.digest
        and len(store.adapters) == 5
    )
    with pytest.raises(UnknownAdapterError):  # The tenant's own name hides the shared one.
        store.adapters.resolve("tax@2", "acme")

    sentences = set()
    for name in ("own", "nil"):  # Another tenant's adapter is as unknown as a missing one.
        for call in (store.get, store.load, store.rollback):
            with pytest.raises(UnknownAdapterError) as caught:
                call(name, "zeta")
            sentences.add(str(caught.value).replace(name, "NAME"))
        for change in (store.unload, store.promote):
            with pytest.raises(UnknownAdapterError) as caught:
                change(f"{name}@1", "zeta")
            sentences.add(str(caught.value).replace(f"{name}@1", "NAME"))
    assert len(sentences) == 1
    for change in (store.unload, store.promote):
        with raises_refusal("PERMISSION_DENIED", "shared by all tenants", "name"):
            change("fox@1", "acme")

    store.unload("tax@1", "acme")
    assert store.adapters.resolve("tax", "acme") is store.adapters.resolve("tax")


@pytest.mark.parametrize("tenant", ["..", ".", "a/b", "/etc", "a\0b", ".hidden", "x" * 101])
def test_tenant_names_cannot_leave_the_directory(tmp_path: Path, tenant: str) -> None:
    store = store_of(tmp_path / "adapters")
    with raises_refusal("NOT_POSSIBLE_NOW", "is not a valid folder name"):
        store.start_upload("tax", tenant)
    assert store.adapters.list_visible(tenant) == []
    with pytest.raises(UnknownAdapterError):
        store.adapters.resolve("tax", tenant)


def test_uploads_without_a_directory_are_refused(tmp_path: Path) -> None:
    registry = AdapterRegistry(None, accept_all, adapters_max=1)
    store = AdapterStore(registry, CONFIG, reason_name)
    with raises_refusal("NOT_POSSIBLE_NOW", "no adapter directory"):
        store.start_upload("tax", "")
    assert store.adapters.list_visible("acme") == []
    store.sweep()


def test_the_adapter_limit_counts_all_folders(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    store.adapters.adapters_max = 2
    upload(store, "tax", payload, "acme")
    upload(store, "fox", payload)
    with raises_refusal("NOT_POSSIBLE_NOW", "adapters_max"):
        upload(store, "owl", payload, "zeta")
    publish_adapter(adapter("elk"), folder)
    store.adapters.scan()
    assert len(store.adapters) == 2
    store.unload("tax@1", "acme")
    store.adapters.scan()
    assert store.adapters.resolve("elk").key == "elk@1"  # Within the limit now.


def test_loading_an_unusable_adapter_reports_why(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    (folder / "tax@2.safetensors").write_bytes(payload[:-1])
    for name in ("tax", "tax@2"):
        with raises_refusal("ADAPTER_UNUSABLE", f"^{name}: tax@2.safetensors is truncated", "name"):
            store.load(name, "")
    (folder / "tax@2.safetensors").write_bytes(payload)
    assert store.load("tax", "").key == "tax@2"
    with pytest.raises(RequestError):
        store.load("../tax", "")


def test_an_unreadable_folder_does_not_affect_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    upload(store, "tax", payload, "acme")
    (folder / "loop").symlink_to(folder / "acme")
    store.adapters.scan()
    assert store.adapters.resolve("tax", "loop").key == "tax@1"
    (folder / "acme").rename(tmp_path / "elsewhere")
    store.adapters.scan()
    upload(store, "fox", payload)
    eventually(lambda: len(store.adapters) == 1)
    with pytest.raises(UnknownAdapterError):
        store.adapters.resolve("tax", "acme")


def test_prefix_values_beyond_the_dtype_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    limit = CONFIG.row_norm_max
    store = store_of(folder)
    file = tmp_path / "made.safetensors"
    for value in (0.9 * limit, 1.1 * limit):
        table = torch.full((2, 800), value)
        save_adapter(build_adapter(Card("tax", kind="prefix"), table), file)
        if value < limit:
            assert upload(store, "tax", file.read_bytes()) == "tax@1"
            assert store.adapters.resolve("tax").adapter_ref.is_prefix
            continue
        with raises_refusal("INVALID_FIELD", "has a key or value of 1.1e", "data"):
            upload(store, "tax", file.read_bytes())


# ------------------------------------------------------------------------------ the change log


def changes(folder: Path, *keys: str) -> list[tuple[object, ...]]:
    return [tuple(record[key] for key in keys) for record in AdapterChangeLog(folder).read()]


def test_each_change_is_recorded_with_its_author_and_the_current_versions(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    author = ChangeAuthor("acme", "ci", "", "preamble", "A/B", "10.0.0.1:7", "request-1")
    upload(store, "tax", payload, "acme")
    upload(store, "tax@5", payload, "acme")
    store.promote("tax@1", "acme", author)
    upload(store, "tax", payload, "acme")
    store.promote("tax@6", "acme", author)
    store.rollback("tax", "acme", author)
    store.unload("tax@1", "acme", author)

    keys = ("action", "adapter", "version", "current_before", "current_after")
    assert changes(folder, *keys) == [
        ("upload", "tax", 1, None, 1),
        ("upload", "tax", 5, 1, 5),
        ("promote", "tax", 1, 5, 1),
        ("upload", "tax", 6, 1, 1),
        ("promote", "tax", 6, 1, 6),
        ("rollback", "tax", 1, 6, 1),
        ("unload", "tax", 1, 1, 6),
    ]
    origins = changes(folder, "status", "tenant", "owner", "token", "peer", "request_id")
    assert set(origins[:2]) == {("done", "acme", "acme", "", "", "")}
    assert set(origins[4:]) == {("done", "acme", "acme", "ci", "10.0.0.1:7", "request-1")}
    digest = adapter().digest
    assert changes(folder, "digest")[:3] == [(digest,)] * 3


def test_refusals_are_recorded_with_their_reasons(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of(folder)
    upload(store, "tax", payload)
    refused_calls: list[Callable[[], object]] = [
        lambda: upload(store, "tax@1", payload),
        lambda: upload(store, "tax", payload[:-1]),
        lambda: store.promote("tax@9", "acme"),
        lambda: store.promote("tax\n", ""),
        lambda: store.unload("tax@1", "acme"),
        lambda: store.rollback("tax", ""),
    ]
    for call in refused_calls:
        with pytest.raises(PreambleError):
            call()
    cancelled_upload = store.start_upload("fox", "")
    cancelled_upload.create_file()
    cancelled_upload.discard()

    assert changes(folder, "status", "action", "requested", "reason")[1:] == [
        ("refused", "upload", "tax@1", "ALREADY_EXISTS"),
        ("refused", "upload", "tax", "INVALID_FIELD"),
        ("refused", "promote", "tax@9", "UNKNOWN_ADAPTER"),
        ("refused", "promote", "tax\n", "INVALID_FIELD"),
        ("refused", "unload", "tax@1", "PERMISSION_DENIED"),
        ("refused", "rollback", "tax", "NOT_POSSIBLE_NOW"),
        ("refused", "upload", "fox", "CANCELLED"),
    ]


def test_a_change_that_cannot_be_recorded_is_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    store = store_of_two_versions(folder, payload)
    log_folder = folder / CHANGES_FOLDER
    for path in (log_folder, *log_folder.iterdir()):
        path.chmod(0o500 if path == log_folder else 0o400)
    with plain_user():
        for call in (
            lambda: upload(store, "tax", payload),
            lambda: store.promote("tax@1", ""),
            lambda: store.unload("tax@1", ""),
        ):
            with raises_refusal("NOT_POSSIBLE_NOW", "cannot be changed"):
                call()
    for path in (log_folder, *log_folder.iterdir()):
        path.chmod(0o700)
    store.changes.write_pending()

    assert names(folder) == ["tax@1.safetensors", "tax@2.safetensors"]
    assert store.adapters.resolve("tax").key == "tax@2"
    assert changes(folder, "status", "action", "version")[2:] == [
        ("refused", "upload", 3),
        ("refused", "promote", 1),
        ("refused", "unload", 1),
    ]


def test_servers_of_one_directory_write_one_log(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    payload = content(tmp_path)
    stores = [store_of(folder, replace(CONFIG, uploads_max=20)) for _ in range(2)]
    with ThreadPoolExecutor(8) as threads:
        uploads = [threads.submit(upload, stores[i % 2], f"n{i % 3}", payload) for i in range(12)]
        keys = sorted(future.result(WAIT_S) for future in uploads)
    records = changes(folder, "status", "adapter", "version")
    assert sorted(f"{name}@{version}" for _, name, version in records) == keys
    assert {status for status, _, _ in records} == {"done"}


CHANGING = """
import sys
from pathlib import Path
from tests.serving.adapters.test_version_updates import store_of
store = store_of(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    for version in (1, 2):
        store.promote(f"tax@{version}", "")
"""


@pytest.mark.slow
def test_the_log_of_a_killed_server_names_the_last_change(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    store = store_of_two_versions(folder, content(tmp_path))
    for delay_s in (0.0, 0.02, 0.05):
        with ready_program(CHANGING, folder):
            time.sleep(delay_s)
        # The current version is that of the last change, or of the change before it, if the server
        # was killed between the record of its beginning and the change itself.
        *_, before_last, last = changes(folder, "status", "version")
        current = read_alias(folder, "tax").current or 2
        assert current == last[1] or (last[0] == "unfinished" and current == before_last[1])
        store.promote("tax@2", "")  # Another server can change and record at once.
        assert changes(folder, "status", "version")[-1] == ("done", 2)
