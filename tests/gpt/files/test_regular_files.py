"""Regular files: other kinds of files are refused without blocking."""

import os
import socket
from pathlib import Path

import pytest

from gpt.files.regular_files import open_regular_file, read_regular_file


def test_a_regular_file_is_read_through_links(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    (tmp_path / "link").symlink_to(file)
    assert read_regular_file(tmp_path / "link") == b"content"
    with open_regular_file(file) as opened:
        assert opened.read(3) == b"con"


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "socket", "device", "folder", "loop"])
def test_other_kinds_of_files_are_refused_without_blocking(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to a fifo":
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to(tmp_path / "fifo")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(tmp_path)  # The path of a socket has at most 107 characters.
            listener.bind("file")
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    with pytest.raises(OSError, match=path.name):
        open_regular_file(path)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular_file(tmp_path / "fifo")
    assert len(os.listdir("/proc/self/fd")) == before
