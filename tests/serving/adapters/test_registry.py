"""The directory of adapters: what lies there is what can be asked for, however many there are."""

import os
import time
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, publish_adapter, save_adapter
from gpt.errors import AdapterError, ConfigError
from serving.adapters.registry import Adapters
from serving.request import UnknownAdapterError


def adapter(name: str, value: int = 1, rows: int = 2) -> Adapter:
    return build_adapter(Card(name), torch.full((rows, 8), float(value)))


def fine(adapter: Adapter) -> None:
    """Nothing is wrong with any."""


def folder(path: Path, *, adapters_max: int = 10) -> Adapters:
    adapters = Adapters(path, fine, adapters_max=adapters_max)
    adapters.scan()
    return adapters


def keys(adapters: Adapters) -> list[str]:
    return [resident.key for resident, _ in adapters.list()]


def test_a_name_alone_is_its_newest_version_and_a_version_never_moves(tmp_path: Path) -> None:
    publish_adapter(adapter("tax", 1), tmp_path)
    adapters = folder(tmp_path)
    first = adapters.resolve("tax")
    assert (first.key, first.rows.count, first.card.name) == ("tax@1", 2, "tax")
    assert Path(first.rows.file).is_absolute()

    publish_adapter(adapter("tax", 2, rows=3), tmp_path)
    adapters.scan()

    assert adapters.resolve("tax").key == "tax@2"
    assert adapters.resolve("tax@1") is first
    Path(adapters.resolve("tax@2").rows.file).unlink()
    adapters.scan()
    assert adapters.resolve("tax") is first
    assert keys(adapters) == ["tax@1"]


def test_an_unknown_name_is_looked_for_on_the_disk_before_it_is_unknown(tmp_path: Path) -> None:
    adapters = folder(tmp_path)
    with pytest.raises(UnknownAdapterError, match="ListAdapters"):
        adapters.resolve("tax")
    publish_adapter(adapter("tax"), tmp_path)
    assert adapters.resolve("tax@1").key == "tax@1"
    with pytest.raises(UnknownAdapterError, match="no directory of adapters was given"):
        Adapters(None, fine, adapters_max=1).resolve("tax")
    with pytest.raises(ConfigError, match="not a directory"):
        Adapters(tmp_path / "none", fine, adapters_max=1)


def test_names_that_nobody_has_cost_no_look_at_a_directory_that_did_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_adapter(adapter("tax"), tmp_path)
    os.utime(tmp_path, ns=(0, time.time_ns() - 10**10))
    adapters = folder(tmp_path)
    with monkeypatch.context() as watched:
        watched.setattr(os, "scandir", lambda path: pytest.fail("it was looked through"))
        for place in range(3):
            with pytest.raises(UnknownAdapterError):
                adapters.resolve(f"nobody{place}")
    publish_adapter(adapter("late"), tmp_path)
    assert adapters.resolve("late").key == "late@1"


def test_a_file_that_changes_in_place_is_said_and_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = publish_adapter(adapter("tax", 1), tmp_path)
    adapters = folder(tmp_path)
    first = adapters.resolve("tax")

    save_adapter(adapter("tax", 2), file)
    for _ in range(2):
        adapters.scan()

    assert adapters.resolve("tax").rows.digest == first.rows.digest
    assert adapters.failures == 1
    assert caplog.text.count("write a new version") == 1


def test_what_is_broken_foreign_or_too_much_is_refused_once_and_the_rest_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c", "z"):
        publish_adapter(adapter(name), tmp_path)
    whole = (tmp_path / "a@1.safetensors").read_bytes()
    (tmp_path / "broken.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "bcut.safetensors").write_bytes(whole[:40])
    (tmp_path / "a.safetensors").write_bytes(whole)
    (tmp_path / "..no name.safetensors").write_bytes(whole)
    (tmp_path / ".hidden.safetensors").write_bytes(whole)
    (tmp_path / "notes.txt").write_text("not one")

    adapters = folder(tmp_path, adapters_max=3)
    adapters.scan()

    assert len(adapters) == 3
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == adapters.failures == 4
    for words in ("its digest is", "truncated", "another file is a@1", "adapters_max"):
        assert sum(words in line for line in refused) == 1


def test_there_are_never_more_than_may_be_and_who_waits_outside_comes_in_when_one_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("m", "n"):
        publish_adapter(adapter(name), tmp_path)
    adapters = folder(tmp_path, adapters_max=3)

    for name in ("x", "a", "b"):  # Before and behind those that are there.
        publish_adapter(adapter(name), tmp_path)
    adapters.scan()
    assert keys(adapters) == ["a@1", "m@1", "n@1"]
    (tmp_path / "notes.safetensors").write_text("changes the directory")
    adapters.scan()
    assert [line for line in caplog.messages if "adapters_max" in line and "file=x" in line]
    assert len([line for line in caplog.messages if "adapters_max" in line]) == 3
    assert adapters.failures == 3
    with pytest.raises(UnknownAdapterError):
        adapters.resolve("b")

    (tmp_path / "m@1.safetensors").unlink()
    adapters.scan()
    assert keys(adapters) == ["a@1", "b@1", "n@1"]
    (tmp_path / "n@1.safetensors").unlink()
    whole = (tmp_path / "x@1.safetensors").read_bytes()
    (tmp_path / "x@1.safetensors").write_bytes(whole[:40])
    adapters.scan()
    assert keys(adapters) == ["a@1", "b@1"]
    assert sum("truncated" in line and "file=x" in line for line in caplog.messages) == 1


def test_of_two_files_with_one_name_the_second_comes_in_when_the_first_goes(
    tmp_path: Path,
) -> None:
    save_adapter(adapter("a"), tmp_path / "a.safetensors")
    adapters = folder(tmp_path)
    first = adapters.resolve("a").rows
    save_adapter(adapter("a", 5), tmp_path / "a@1.safetensors")
    adapters.scan()
    assert adapters.resolve("a").rows == first and adapters.failures == 1
    (tmp_path / "notes.safetensors").write_text("changes the directory")
    adapters.scan()
    assert adapters.failures == 2  # The notes.

    (tmp_path / "a.safetensors").unlink()
    adapters.scan()
    second = adapters.resolve("a").rows
    assert second != first and Path(second.file).name == "a@1.safetensors"


def test_one_adapter_that_brings_a_fault_to_light_does_not_take_the_others_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("bad", "good", "wrong"):
        publish_adapter(adapter(name), tmp_path)

    def check(adapter: Adapter) -> None:
        if adapter.card.name == "bad":
            raise ZeroDivisionError
        if adapter.card.name == "wrong":
            raise AdapterError("it is of another model")

    adapters = Adapters(tmp_path, check, adapters_max=10)
    adapters.scan()

    assert keys(adapters) == ["good@1"]
    assert adapters.failures == 2


def test_a_directory_that_goes_away_keeps_what_was_known(tmp_path: Path) -> None:
    place = tmp_path / "adapters"
    place.mkdir()
    publish_adapter(adapter("tax"), place)
    adapters = folder(place)
    place.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        adapters.scan()
    with pytest.raises(UnknownAdapterError):
        adapters.resolve("other")
    assert adapters.resolve("tax").key == "tax@1"


@pytest.mark.parametrize(
    "count", [pytest.param(1000), pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_thousands_are_found_and_looked_at_again_quickly(tmp_path: Path, count: int) -> None:
    file = publish_adapter(adapter("task0", rows=20), tmp_path)
    for place in range(1, count):
        os.link(file, tmp_path / f"task{place}@1.safetensors")
    adapters = Adapters(tmp_path, fine, adapters_max=count)

    began = time.monotonic()
    adapters.scan()
    first_s = time.monotonic() - began
    began = time.monotonic()
    adapters.scan()
    again_s = time.monotonic() - began

    assert len(adapters) == count
    assert adapters.resolve(f"task{count - 1}").key == f"task{count - 1}@1"
    print(f"{count} adapters: first scan {first_s:.2f} s, again {again_s * 1e3:.0f} ms")
    assert first_s < count * 6e-3
    assert again_s < count * 2e-4
