"""The client, against a real server, and the command that stands on it."""

import argparse
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.__main__ import generate_parser as client_parser
from clients.__main__ import main
from clients.generation import CallError, Client, Options
from serving.__main__ import generate_parser as local_parser
from serving.__main__ import main as local_main
from tests.servers import Server, eventually, serving, write_checkpoint

PROMPT = "1 2 3"  # The model has no tokenizer, so nothing ends an answer early.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("client"), tokenizer=False)
    with serving(checkpoint) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


def test_options_reach_the_server(client: Client) -> None:
    answer = client.generate(PROMPT, Options(temperature=1.0, seed=3, max_new_tokens=5))
    assert (answer.seed, answer.usage.completion_tokens) == (3, 5)
    assert (answer.finish_reason, answer.adapter) == ("length", "")
    other = client.generate(PROMPT, Options(temperature=1.0, seed=4, max_new_tokens=5))
    assert other.token_ids != answer.token_ids


def test_a_blank_text_is_refused_as_what_it_is(client: Client) -> None:
    for text, reason in (("", "text is empty"), (" ", "text is 1 characters and no token")):
        with pytest.raises(CallError, match=reason) as refused:
            client.generate(text)
        assert refused.value.code == "INVALID_ARGUMENT"


def test_what_no_message_can_hold_is_refused_before_it_is_sent(client: Client) -> None:
    for prompt, options in (
        (PROMPT, Options(max_new_tokens=-1)),
        (PROMPT, Options(seed=2**64)),
        ([-1], Options()),
        ("\ud800", Options()),
    ):
        with pytest.raises(CallError) as refused:
            client.generate(prompt, options)
        assert refused.value.code == "INVALID_ARGUMENT"


def test_a_stream_that_is_left_is_cancelled(server: Server, client: Client) -> None:
    for _ in client.stream(PROMPT, Options(max_new_tokens=4000)):
        break
    eventually(lambda: server.metric("preamble_requests_in_flight") == 0, within_s=5)


def test_a_server_that_is_not_there_is_an_error_by_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    started = time.monotonic()
    with Client(f"127.0.0.1:{port}", timeout_s=2) as client, pytest.raises(CallError) as refused:
        client.generate(PROMPT)
    assert refused.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert time.monotonic() - started < 10


def test_the_server_says_what_it_is(client: Client) -> None:
    info = client.info()
    assert (info.model.name, info.model.vocabulary_size) == ("checkpoint", 640)
    assert info.model.dtype == "float64"
    assert info.limits.queue_requests_max == 1024
    assert client.adapters() == []


def test_the_command_prints_the_answer(
    server: Server, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", PROMPT, "--server", server.address, "--max-new-tokens", "8"]

    assert main(words) == 0

    expected = client.generate(PROMPT, Options(max_new_tokens=8)).text
    assert capsys.readouterr().out == expected + "\n"


def test_the_command_says_what_the_server_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mail = tmp_path / "mail.txt"
    mail.write_text("where is my money")
    words = ["generate", "--server", server.address, "--task", "refunds"]
    words += ["--field", f"text=@{mail}"]

    assert main(words) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "preamble generate: NOT_FOUND: there is no adapter 'refunds' here; "
        "no directory of adapters was given (--adapters DIR)\n"
    )


WAYS = [(main, ["--server", "x:1"]), (local_main, ["--model", "x"])]


@pytest.mark.parametrize(("command", "where"), WAYS, ids=["by a server", "in process"])
def test_misuse_is_told_apart_from_failure(
    command: Callable[[list[str]], int], where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["a", "--field", "b=c"], ["--field", "b"]):
        with pytest.raises(SystemExit) as misused:
            command(["generate", *words, *where])
        assert misused.value.code == 2
    capsys.readouterr()
    assert command(["generate", "--field", "b=@nowhere", *where]) == 1
    assert capsys.readouterr().err == (
        "preamble generate: --field b: nowhere cannot be read (No such file or directory)\n"
    )


def test_both_ways_to_generate_have_the_same_flags() -> None:
    def flags(parser: argparse.ArgumentParser) -> dict[str, tuple[object, ...]]:
        return {
            action.dest: (action.option_strings, action.default, action.type, action.help)
            for action in parser._actions
        }

    ours, theirs = flags(client_parser()), flags(local_parser())
    assert set(ours) - set(theirs) == {"server", "timeout_s"}
    loads = {"model", "tokenizer", "true_vocab_size", "config_json", "adapters", "device", "dtype"}
    assert set(theirs) - set(ours) == loads
    for name in set(ours) & set(theirs):
        assert ours[name] == theirs[name]
