"""Abandoned files: partial files of killed processes are removed, others are kept."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from gpt.files.abandoned_files import remove_abandoned_partials, temporary_folder
from gpt.files.atomic_files import write_atomic
from tests.support.ready_programs import ready_program

WRITERS = {
    "file": "with open_atomic(folder / 'file') as file:\n    file.write(b'part')\n    pause()",
    "folder": (
        "with stage_folder(folder / 'copy') as partial:\n"
        "    (partial / 'weights').write_bytes(b'part')\n    pause()"
    ),
    "temporary": "with temporary_folder('tests') as partial:\n    pause()",
}
PROGRAM = """
import sys
from pathlib import Path
from gpt.files.abandoned_files import temporary_folder
from gpt.files.atomic_files import open_atomic, stage_folder

def pause():
    print("ready", flush=True)
    sys.stdin.read()

folder = Path(sys.argv[1])
"""


def age(folder: Path) -> None:
    """Set old modification times."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (1e9, 1e9))


def sweep(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "temporary":
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with temporary_folder("tests") as own_folder:
            assert own_folder.is_dir()
        assert not own_folder.exists()
    else:
        remove_abandoned_partials(folder)


@pytest.mark.parametrize("kind", WRITERS)
def test_partial_files_are_removed_after_their_process_is_killed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process has begun to write, and waits.
    program = PROGRAM + WRITERS[kind]
    with ready_program(program, tmp_path, TMPDIR=str(tmp_path)) as process:
        age(tmp_path)
        sweep(kind, tmp_path, monkeypatch)
        assert len(list(tmp_path.iterdir())) == 1  # Its process still writes it.
        process.send_signal(signal.SIGKILL)
        process.wait()
        age(tmp_path)
        sweep(kind, tmp_path, monkeypatch)
        assert not list(tmp_path.iterdir())


def test_a_file_that_was_just_created_is_kept(tmp_path: Path) -> None:
    """A process creates a file before it locks it."""
    (tmp_path / ".adapter.01234567.part").write_bytes(b"part")
    remove_abandoned_partials(tmp_path)
    assert list(tmp_path.iterdir())


def test_files_with_other_names_are_kept(tmp_path: Path) -> None:
    names = ["adapter.safetensors", ".hidden", "file.part", ".file.xyz.part"]
    for name in names:
        (tmp_path / name).write_bytes(b"content")
    age(tmp_path)
    remove_abandoned_partials(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    write_atomic(tmp_path / "adapter.safetensors", b"new")
    assert {path.name for path in tmp_path.iterdir()} == set(names)
