"""Atomic files: full disks, killed processes, existing targets, links and permission bits."""

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpt.child_processes import child_environment
from gpt.files.atomic_files import (
    fsync_folders,
    open_atomic,
    rename_durable,
    stage_folder,
    write_atomic,
    write_synced,
)
from tests.support.full_disk import full_disk

OLD, NEW = b"old content", b"new content"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)


def content(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder, hidden files included."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fail_while_writing(path: Path, error: BaseException) -> None:
    with open_atomic(path) as file:
        file.write(NEW)
        raise error


def fill_folder(folder: Path, overwrite: bool) -> None:
    with stage_folder(folder, overwrite=overwrite) as partial:
        (partial / "card").write_bytes(NEW)
        (partial / "weights").write_bytes(NEW * 100)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("partial_name", [None, ".report.part"])
def test_a_write_replaces_the_content_and_leaves_no_other_file(
    tmp_path: Path, durable: bool, partial_name: str | None
) -> None:
    path = tmp_path / "report"
    partial_path = tmp_path / partial_name if partial_name else None
    for text in (OLD, NEW):
        assert write_atomic(path, text, durable=durable, partial_path=partial_path) == path
        assert content(tmp_path) == {"report": text}


def test_a_full_disk_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "report", OLD)
    for partial_path in (None, tmp_path / ".report.part"):
        with full_disk(64), pytest.raises(OSError, match="File too large"):
            write_atomic(path, NEW * 100, partial_path=partial_path)
        with full_disk(64), pytest.raises(OSError, match="File too large"):
            write_atomic(tmp_path / "first", NEW * 100, partial_path=partial_path)
    assert content(tmp_path) == {"report": OLD}


def test_a_writer_that_fails_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "report", OLD)
    for error in (ValueError("no content"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail_while_writing(path, error)
    assert content(tmp_path) == {"report": OLD}


def test_the_content_appears_only_after_the_block(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "report", OLD)
    with open_atomic(path) as file:
        file.write(NEW)
        file.flush()
        assert path.read_bytes() == OLD
        (hidden,) = {entry.name for entry in tmp_path.iterdir()} - {"report"}
        assert hidden.startswith(".report.") and hidden.endswith(".part")
    assert path.read_bytes() == NEW


def test_a_killed_writer_leaves_the_old_content(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "report", OLD)
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from gpt.files.atomic_files import open_atomic\n"
        "path = Path(sys.argv[1])\n"
        "with open_atomic(path, partial_path=path.with_name('.report.part')) as file:\n"
        "    file.write(b'new content'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    killed = subprocess.run(command, env=child_environment(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert content(tmp_path) == {"report": OLD, ".report.part": NEW}
    # The next write uses the same name, so the part of the killed writer does not remain.
    write_atomic(path, b"next", partial_path=tmp_path / ".report.part")
    assert content(tmp_path) == {"report": b"next"}


@pytest.mark.parametrize("durable", [True, False])
def test_without_overwrite_an_existing_file_stays(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "version"
    write_atomic(path, OLD, overwrite=False, durable=durable)
    with pytest.raises(FileExistsError):
        write_atomic(path, NEW, overwrite=False, durable=durable)
    assert content(tmp_path) == {"version": OLD} and path.stat().st_nlink == 1


def test_a_symbolic_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target, link = write_atomic(tmp_path / "target", OLD), tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(FileExistsError):
        write_atomic(link, NEW, overwrite=False)
    assert link.is_symlink()
    write_atomic(link, NEW)
    assert not link.is_symlink() and content(tmp_path) == {"target": OLD, "link": NEW}


def test_permission_bits_follow_the_mode_and_the_umask(tmp_path: Path) -> None:
    with umask(0o027):
        public = write_atomic(tmp_path / "public", NEW)
        private = write_atomic(tmp_path / "private", NEW, mode=0o600)
        private.chmod(0o644)
        write_atomic(private, OLD, mode=0o600)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (public, private)]
    assert modes == [0o640, 0o600]


def test_an_unusable_folder_raises_the_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "report", NEW)
    file = write_atomic(tmp_path / "file", OLD)
    with pytest.raises(NotADirectoryError):
        write_atomic(file / "report", NEW)
    (tmp_path / "folder" / "child").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", NEW)
    assert content(tmp_path) == {"file": OLD}


def test_a_staged_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with stage_folder(folder) as partial:
        (partial / "tokenizer").mkdir()
        (partial / "tokenizer" / "vocab").write_bytes(OLD)
        (partial / "weights").write_bytes(NEW)
        assert not folder.exists() and partial.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert content(folder) == {"tokenizer/vocab": OLD, "weights": NEW}


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_that_fails_leaves_the_old_one_and_no_other(
    tmp_path: Path, overwrite: bool
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_atomic(folder / "weights", OLD)
    with full_disk(64), pytest.raises(OSError, match="File too large"):
        fill_folder(folder, overwrite)
    assert content(tmp_path) == {"adapter/weights": OLD}
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_staged_folder_replaces_another_only_with_overwrite(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    for text in (OLD, NEW):
        with stage_folder(folder, overwrite=True) as partial:
            (partial / "weights").write_bytes(text)
        assert content(tmp_path) == {"adapter/weights": text}
    with pytest.raises(OSError, match="not empty"), stage_folder(folder) as partial:
        (partial / "weights").write_bytes(OLD)
    assert content(tmp_path) == {"adapter/weights": NEW}
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_folder_that_cannot_be_replaced_is_renamed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapter"
    with stage_folder(folder) as partial:
        (partial / "weights").write_bytes(OLD)
    rename = os.replace

    def busy(source: Path, target: Path) -> None:
        if source.name.endswith(".part"):
            assert not folder.exists()  # The old folder has its other name already.
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(OSError, match="busy"), stage_folder(folder, overwrite=True) as partial:
        (partial / "weights").write_bytes(NEW)
    assert content(tmp_path) == {"adapter/weights": OLD}
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_staged_folder_with_a_fixed_name_removes_what_a_killed_process_left(
    tmp_path: Path,
) -> None:
    partial_path = tmp_path / ".model.part"
    partial_path.mkdir()
    (partial_path / "unfinished").write_bytes(OLD)
    with stage_folder(tmp_path / "model", partial_path=partial_path) as partial:
        assert partial == partial_path
        (partial / "weights").write_bytes(NEW)
    assert content(tmp_path) == {"model/weights": NEW}


def test_a_rename_without_overwrite_takes_each_name_once(tmp_path: Path) -> None:
    first, second = write_atomic(tmp_path / "1", OLD), write_atomic(tmp_path / "2", NEW)
    target = tmp_path / "version"
    rename_durable(first, target, overwrite=False)
    with pytest.raises(FileExistsError):
        rename_durable(second, target, overwrite=False)
    assert content(tmp_path) == {"version": OLD, "2": NEW}
    rename_durable(second, target)
    assert content(tmp_path) == {"version": NEW}


def test_files_of_an_unfinished_folder_can_be_written_again(tmp_path: Path) -> None:
    for text in (OLD, NEW):
        write_synced(tmp_path / "facts", text)
        assert content(tmp_path) == {"facts": text}
    (tmp_path / "a" / "b").mkdir(parents=True)
    fsync_folders(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_folders(tmp_path / "missing")
