"""The adapter registry: every valid file of the directory is served, up to the limit."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, publish_adapter, save_adapter
from gpt.errors import AdapterError, ConfigError
from serving.adapters.registry import AdapterRegistry, check_directory
from serving.request import UnknownAdapterError


def adapter(name: str, value: int = 1, rows: int = 2) -> Adapter:
    return build_adapter(Card(name), torch.full((rows, 8), float(value)))


def accept_all(adapter: Adapter) -> None:
    """A check that accepts every adapter."""


def open_registry(path: Path, *, adapters_max: int = 10) -> AdapterRegistry:
    adapters = AdapterRegistry(path, accept_all, adapters_max=adapters_max)
    adapters.scan()
    return adapters


def visible_keys(adapters: AdapterRegistry) -> list[str]:
    return [resident.key for resident, _ in adapters.list_visible()]


def test_names_resolve_to_the_newest_version_and_versions_are_fixed(tmp_path: Path) -> None:
    publish_adapter(adapter("tax", 1), tmp_path)
    adapters = open_registry(tmp_path)
    newest = adapters.resolve("tax")
    assert (newest.key, newest.adapter_ref.row_count, newest.card.name) == ("tax@1", 2, "tax")
    assert Path(newest.adapter_ref.file).is_absolute()

    publish_adapter(adapter("tax", 2, rows=3), tmp_path)
    adapters.scan()

    assert adapters.resolve("tax").key == "tax@2"
    assert adapters.resolve("tax@1") is newest
    Path(adapters.resolve("tax@2").adapter_ref.file).unlink()
    adapters.scan()
    assert adapters.resolve("tax") is newest
    assert visible_keys(adapters) == ["tax@1"]


def test_unknown_names_trigger_a_directory_scan(tmp_path: Path) -> None:
    adapters = open_registry(tmp_path)
    with pytest.raises(UnknownAdapterError, match="ListAdapters"):
        adapters.resolve("tax")
    publish_adapter(adapter("tax"), tmp_path)
    assert adapters.resolve("tax@1").key == "tax@1"
    with pytest.raises(UnknownAdapterError, match="this server has no adapter directory"):
        AdapterRegistry(None, accept_all, adapters_max=1).resolve("tax")
    with pytest.raises(ConfigError, match="not a directory"):
        check_directory(tmp_path / "none")


def test_unknown_names_do_not_rescan_an_unchanged_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_adapter(adapter("tax"), tmp_path)
    os.utime(tmp_path, ns=(0, time.time_ns() - 10**10))
    adapters = open_registry(tmp_path)
    with monkeypatch.context() as watched:
        watched.setattr(os, "scandir", lambda path: pytest.fail("it was looked through"))
        for number in range(3):
            with pytest.raises(UnknownAdapterError):
                adapters.resolve(f"nobody{number}")
    publish_adapter(adapter("late"), tmp_path)
    assert adapters.resolve("late").key == "late@1"


def test_files_changed_in_place_are_reported_and_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = publish_adapter(adapter("tax", 1), tmp_path)
    os.utime(file, ns=(1, 1))  # A file system's clock may stand still for milliseconds.
    adapters = open_registry(tmp_path)
    original = adapters.resolve("tax")

    save_adapter(adapter("tax", 2), file)
    for _ in range(2):
        adapters.scan()

    assert adapters.resolve("tax").adapter_ref.digest == original.adapter_ref.digest
    assert adapters.failures == 1
    assert caplog.text.count("write the change as a new version") == 1


def test_invalid_adapters_are_refused_once_and_others_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c", "z"):
        publish_adapter(adapter(name), tmp_path)
    content = (tmp_path / "a@1.safetensors").read_bytes()
    (tmp_path / "broken.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tmp_path / "bcut.safetensors").write_bytes(content[:40])
    (tmp_path / "a.safetensors").write_bytes(content)
    (tmp_path / "..no name.safetensors").write_bytes(content)
    (tmp_path / ".hidden.safetensors").write_bytes(content)
    (tmp_path / "notes.txt").write_text("not one")

    adapters = open_registry(tmp_path, adapters_max=3)
    adapters.scan()

    assert len(adapters) == 3
    refusals = [
        record.getMessage() for record in caplog.records if "refused" in record.getMessage()
    ]
    assert len(refusals) == adapters.failures == 4
    for message_words in (
        "its digest is",
        "truncated",
        "another file has the name and version a@1",
        "adapters_max",
    ):
        assert sum(message_words in line for line in refusals) == 1


def test_a_tenant_with_only_refused_files_keeps_its_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tenant").mkdir()
    file = publish_adapter(adapter("tax"), tmp_path / "tenant")
    file.write_bytes(file.read_bytes()[:40])
    adapters = open_registry(tmp_path)
    adapters.scan()
    adapters.scan()
    assert len([line for line in caplog.messages if "adapter_refused" in line]) == 1
    assert adapters.failures == 1


def test_adapters_over_the_limit_load_when_others_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("m", "n"):
        publish_adapter(adapter(name), tmp_path)
    adapters = open_registry(tmp_path, adapters_max=3)

    for name in ("x", "a", "b"):  # Sorted before and after the existing ones.
        publish_adapter(adapter(name), tmp_path)
    adapters.scan()
    assert visible_keys(adapters) == ["a@1", "m@1", "n@1"]
    (tmp_path / "notes.safetensors").write_text("changes the directory")
    adapters.scan()
    assert [line for line in caplog.messages if "adapters_max" in line and "file=x" in line]
    assert len([line for line in caplog.messages if "adapters_max" in line]) == 3
    assert adapters.failures == 3
    with pytest.raises(UnknownAdapterError):
        adapters.resolve("b")

    (tmp_path / "m@1.safetensors").unlink()
    adapters.scan()
    assert visible_keys(adapters) == ["a@1", "b@1", "n@1"]
    (tmp_path / "n@1.safetensors").unlink()
    content = (tmp_path / "x@1.safetensors").read_bytes()
    (tmp_path / "x@1.safetensors").write_bytes(content[:40])
    adapters.scan()
    assert visible_keys(adapters) == ["a@1", "b@1"]
    assert sum("truncated" in line and "file=x" in line for line in caplog.messages) == 1


def test_the_second_file_of_a_name_loads_when_the_first_is_removed(
    tmp_path: Path,
) -> None:
    save_adapter(adapter("a"), tmp_path / "a.safetensors")
    adapters = open_registry(tmp_path)
    first_ref = adapters.resolve("a").adapter_ref
    save_adapter(adapter("a", 5), tmp_path / "a@1.safetensors")
    adapters.scan()
    assert adapters.resolve("a").adapter_ref == first_ref and adapters.failures == 1
    (tmp_path / "notes.safetensors").write_text("changes the directory")
    adapters.scan()
    assert adapters.failures == 2  # The invalid current.json files.

    (tmp_path / "a.safetensors").unlink()
    adapters.scan()
    second_ref = adapters.resolve("a").adapter_ref
    assert second_ref != first_ref and Path(second_ref.file).name == "a@1.safetensors"


def test_a_failing_check_refuses_only_its_adapter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("bad", "good", "wrong"):
        publish_adapter(adapter(name), tmp_path)

    def check(adapter: Adapter) -> None:
        if adapter.card.name == "bad":
            raise ZeroDivisionError
        if adapter.card.name == "wrong":
            raise AdapterError("it is of another model")

    adapters = AdapterRegistry(tmp_path, check, adapters_max=10)
    adapters.scan()

    assert visible_keys(adapters) == ["good@1"]
    assert adapters.failures == 2


def test_concurrent_scans_of_tenants_keep_the_limit_of_adapters(tmp_path: Path) -> None:
    both_are_loading = threading.Barrier(2, timeout=1.0)

    def wait_for_the_other(adapter: Adapter) -> None:
        with suppress(threading.BrokenBarrierError):
            both_are_loading.wait()

    tenants = ("a", "b")
    for tenant in tenants:
        (tmp_path / tenant).mkdir()
    adapters = AdapterRegistry(tmp_path, wait_for_the_other, adapters_max=1)
    adapters.scan()
    for tenant in tenants:
        publish_adapter(adapter(tenant), tmp_path / tenant)

    with ThreadPoolExecutor() as pool:
        list(pool.map(adapters.scan, tenants))

    assert len(adapters) == 1 and adapters.failures == 1
    (loaded,) = adapters.all_adapters()
    Path(loaded.adapter_ref.file).unlink()
    adapters.scan()
    adapters.scan()  # Tenant "a" may be scanned before the adapter of "b" is dropped.
    assert {adapter.tenant for adapter in adapters.all_adapters()} == {*tenants} - {loaded.tenant}


def test_a_scan_is_repeated_if_the_scan_that_it_waited_for_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = open_registry(tmp_path)
    publish_adapter(adapter("tax"), tmp_path)
    requested_at = time.monotonic()

    def fail(path: Path) -> None:
        raise OSError("the disk failed")

    with monkeypatch.context() as failing:
        failing.setattr(os, "scandir", fail)
        with pytest.raises(OSError, match="the disk failed"):
            adapters.scan()
    # A scan that was requested before the failed one, and waited for it.
    monkeypatch.setattr(time, "monotonic", lambda: requested_at)
    adapters.scan()
    assert adapters.lookup("tax").key == "tax@1"


def test_adapters_stay_loaded_when_the_directory_disappears(tmp_path: Path) -> None:
    directory = tmp_path / "adapters"
    directory.mkdir()
    publish_adapter(adapter("tax"), directory)
    adapters = open_registry(directory)
    directory.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        adapters.scan()
    with pytest.raises(UnknownAdapterError):
        adapters.resolve("other")
    assert adapters.resolve("tax").key == "tax@1"


@pytest.mark.parametrize(
    "count", [pytest.param(1000), pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_thousands_of_adapters_are_scanned_and_rescanned_quickly(
    tmp_path: Path, count: int
) -> None:
    file = publish_adapter(adapter("task0", rows=20), tmp_path)
    for number in range(1, count):
        os.link(file, tmp_path / f"task{number}@1.safetensors")
    checks = 0

    def count_check(adapter: Adapter) -> None:
        nonlocal checks
        checks += 1

    adapters = AdapterRegistry(tmp_path, count_check, adapters_max=count)

    start = time.monotonic()
    adapters.scan()
    first_s = time.monotonic() - start
    start = time.monotonic()
    adapters.scan()
    rescan_s = time.monotonic() - start

    assert len(adapters) == count
    assert adapters.resolve(f"task{count - 1}").key == f"task{count - 1}@1"
    print(f"{count} adapters: first scan {first_s:.2f} s, again {rescan_s * 1e3:.0f} ms")
    assert checks == count  # Unchanged files are not read again.
    if count > 1000:  # Only the slow suite asserts times.
        assert first_s < count * 6e-3
        assert rescan_s < count * 2e-4
