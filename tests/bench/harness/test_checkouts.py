"""Child processes of another checkout: its own code, its own interpreter, and clear errors."""

import os
import sys
import time
from pathlib import Path

import pytest

from bench.harness.checkouts import Checkout, CheckoutError, this_checkout


def stub_checkout(folder: Path, preamble: str = "") -> Checkout:
    """A folder that looks like a checkout, with this text as its `preamble.py`."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    (folder / "preamble.py").write_text(preamble)
    return Checkout.at("other", folder)


def test_a_folder_without_preamble_py_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckoutError, match=r"has no preamble\.py"):
        Checkout.at("other", tmp_path)


def test_a_checkout_with_a_virtual_environment_uses_its_interpreter(tmp_path: Path) -> None:
    checkout = stub_checkout(tmp_path / "other")
    assert checkout.python == sys.executable
    interpreter = checkout.root / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    assert checkout.python == str(interpreter)


def test_a_child_process_imports_from_its_own_checkout(tmp_path: Path) -> None:
    checkout = stub_checkout(tmp_path / "other", "NAME = 'the other one'")
    program = "import json, preamble, sys; work = json.loads(sys.stdin.readline())\n"
    program += "print(json.dumps({'name': preamble.NAME, 'work': work}))"
    reply = checkout.call(program, {"a": 1}, tmp_path / "run")
    assert reply == {"name": "the other one", "work": {"a": 1}}
    assert this_checkout().root == Path(__file__).resolve().parents[3]


def test_the_error_of_a_failed_command_contains_its_stderr(tmp_path: Path) -> None:
    checkout = stub_checkout(tmp_path / "other", "import sys; sys.exit('no such model')")
    with pytest.raises(CheckoutError, match=r"preamble tune x ended with code 1: no such model"):
        checkout.command(["preamble", "tune", "x"], tmp_path / "run")


def test_a_command_that_exceeds_its_time_limit_is_killed(tmp_path: Path) -> None:
    source = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
    checkout = stub_checkout(tmp_path / "other", source + "time.sleep(600)")
    with pytest.raises(CheckoutError, match="was not done after 5 s"):
        checkout.command(["preamble"], tmp_path / "run", within_s=5)
    pid = int((tmp_path / "run" / "pid").read_text())
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_program_that_prints_no_json_raises_an_error(tmp_path: Path) -> None:
    checkout = stub_checkout(tmp_path / "other")
    with pytest.raises(CheckoutError, match="printed no JSON"):
        checkout.call("print('hello')", {}, tmp_path / "run")


def test_server_addresses_are_read_from_the_first_line(tmp_path: Path) -> None:
    source = "import time\nprint('ready grpc=127.0.0.1:1 http=127.0.0.1:2', flush=True)\n"
    checkout = stub_checkout(tmp_path / "other", source + "time.sleep(600)")
    with checkout.server(["model"], tmp_path / "run") as server:
        assert (server.grpc, server.http) == ("127.0.0.1:1", "127.0.0.1:2")
    refusing = stub_checkout(tmp_path / "refusing", "import sys; sys.exit('refused')")
    with (
        pytest.raises(CheckoutError, match="did not start: refused"),
        refusing.server(["model"], tmp_path / "run"),
    ):
        raise AssertionError("the server has started")
    assert list((tmp_path / "run").iterdir()) == []
