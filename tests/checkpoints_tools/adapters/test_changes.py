"""`preamble adapters log`: filters, text and JSON, and the record of `adapters import`."""

import json
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.adapters.change_log import CHANGES_FILE, FOLDER, AdapterChangeLog, ChangeAuthor
from gpt.errors import AdapterError
from tests.support.adapter_exchange import run_adapters_command


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An adapter directory with four changes by two tenants."""
    log = AdapterChangeLog(tmp_path)
    crew = ChangeAuthor("crew", "ci", "", "preamble", "Promote", "10.0.0.1:5", "r\n7")
    for name, author in (("tax@1", crew), ("tax@2", crew), ("fox@1", ChangeAuthor("guest"))):
        with log.recording("promote", name, author, author.tenant) as change:
            change.begin(int(name[-1]), None)
            change.finish(int(name[-1]))
    with pytest.raises(AdapterError), log.recording("unload", "fox\x1b[2J", crew, "crew"):
        raise AdapterError("no such\nversion")
    return tmp_path


def requested(text: str) -> list[str]:
    return [record["requested"] for record in json.loads(text)]


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ([], ["tax@1", "tax@2", "fox@1", "fox\x1b[2J"]),
        (["--adapter", "tax"], ["tax@1", "tax@2"]),
        (["--adapter", "tax@2"], ["tax@2"]),
        (["--tenant", "guest"], ["fox@1"]),
        (["--tenant", ""], []),
        (["--status", "refused"], ["fox\x1b[2J"]),
        (["--last", "1"], ["fox\x1b[2J"]),
        (["--adapter", "tax", "--last", "1"], ["tax@2"]),
        (["--since", "1h"], ["tax@1", "tax@2", "fox@1", "fox\x1b[2J"]),
        (["--since", "2000-01-01"], ["tax@1", "tax@2", "fox@1", "fox\x1b[2J"]),
        (["--since", (datetime.now(UTC) + timedelta(days=2)).date().isoformat()], []),
        (["--since", "2999-01-01T00:00+02:00"], []),
    ],
)
def test_filters_select_changes(
    directory: Path, capsys: pytest.CaptureFixture[str], filters: list[str], names: list[str]
) -> None:
    code, out, _ = run_adapters_command(capsys, "log", directory, *filters, "--json")
    assert (code, requested(out)) == (0, names)


def test_an_empty_tenant_selects_changes_without_any_tenant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command has no tenant, but may change the folder of one."""
    log, command = AdapterChangeLog(tmp_path), ChangeAuthor.of_command("adapters import")
    for name, author, owner in (
        ("shared", command, ""),
        ("owned", command, "crew"),
        ("own", ChangeAuthor("crew"), "crew"),
    ):
        with log.recording("upload", name, author, owner) as change:
            change.begin(1, None)
            change.finish(1)
    selected = {
        tenant: requested(
            run_adapters_command(capsys, "log", tmp_path, "--tenant", tenant, "--json")[1]
        )
        for tenant in ("", "crew")
    }
    assert selected == {"": ["shared"], "crew": ["owned", "own"]}


def test_each_change_is_one_printable_line(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_adapters_command(capsys, "log", directory)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 4 and all(line.isprintable() for line in lines)
    assert "done        promote   tax@1" in lines[0] and "current none -> 1" in lines[0]
    assert "tenant=crew  token=ci  by preamble Promote  from 10.0.0.1:5" in lines[0]
    assert lines[0].endswith(r"request_id=r\n7")
    assert r"refused     unload    fox\x1b[2J" in lines[3]
    assert lines[3].endswith(r"reason=AdapterError  no such\nversion")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["log", "DIR/none"], 1, "none is not a directory"),
        (["log", "DIR", "--since", "soon"], 2, "'soon' is not a time"),
        (["log", "DIR", "--since", "0001-01-01T00:00+14:00"], 2, "is not a time"),
        (["log", "DIR", "--last", "0"], 2, "--last"),
        (["log"], 2, "DIR"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    exit_code: int,
    message: str,
) -> None:
    words = [word.replace("DIR", str(tmp_path)) for word in arguments]
    try:
        code, _, err = run_adapters_command(capsys, *words)
    except SystemExit as exit_request:
        code, err = exit_request.code or 0, capsys.readouterr().err  # type: ignore[assignment]
    assert code == exit_code and message in err


def test_a_directory_without_a_log_has_no_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_adapters_command(capsys, "log", tmp_path) == (0, "", "")
    assert run_adapters_command(capsys, "log", tmp_path, "--json") == (0, "[]\n", "")


def test_imports_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source.safetensors"
    save_adapter(build_adapter(Card("tax"), torch.zeros(1, 8)), source)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    assert run_adapters_command(capsys, "import", source, adapters)[0] == 0
    assert run_adapters_command(capsys, "import", source, adapters / "fox@3.safetensors")[0] == 0
    assert (
        run_adapters_command(capsys, "import", source, tmp_path / "elsewhere.safetensors")[0] == 0
    )

    records: list[dict[str, Any]] = json.loads(
        run_adapters_command(capsys, "log", adapters, "--json")[1]
    )
    keys = ("status", "action", "adapter", "version", "protocol", "method")
    assert [tuple(record[key] for key in keys) for record in records] == [
        ("done", "upload", "tax", 1, "command", "adapters import"),
        ("done", "upload", "fox", 3, "command", "adapters import"),
    ]
    assert not (tmp_path / FOLDER).exists()


def test_large_logs_are_printed_in_bounded_memory(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory / FOLDER / CHANGES_FILE
    line = path.read_bytes().splitlines(keepends=True)[-1]
    path.write_bytes(line * 8_000)  # About 4 MB.
    tracemalloc.start()
    assert run_adapters_command(capsys, "log", directory, "--tenant", "crew", "--last", "3")[0] == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 5
