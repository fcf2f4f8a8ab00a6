"""The client, against a real server, and the command that stands on it."""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clients.__main__ import generate_parser as client_parser
from clients.__main__ import main
from clients.client import Beams, CallError, Client, Guide, Options, Retries
from serving.__main__ import generate_parser as local_parser
from serving.__main__ import main as local_main
from tests.support.servers import (
    ROOT,
    WAIT_S,
    Server,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

PROMPT = "1 2 3"  # The model has no tokenizer, so nothing ends an answer early.
ROOM = 4  # Answers that run, and that wait.
HELD = Options(answers=2 * ROOM, max_new_tokens=4000)  # Takes all of it.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("client")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters" / "echo.safetensors", checkpoint, [4, 5])
    limits: dict[str, Any] = {"running_requests_max": ROOM, "queue_requests_max": ROOM}
    limits["adapters"] = str(folder / "adapters")
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
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


def test_every_answer_comes_with_what_was_asked_of_it(client: Client) -> None:
    options = Options(
        adapters=["", "echo"], answers=2, max_new_tokens=3, temperature=1.0, seed=5, logprobs=2,
        prompt_logprobs=0,
    )  # fmt: skip
    answers = client.completions(PROMPT, options)
    assert [one.adapter for one in answers] == ["", "", "echo@1", "echo@1"]
    assert answers[0].seed == answers[2].seed == 5 != answers[1].seed
    for one in answers:
        assert [score.token_id for score in one.scores] == one.token_ids
        assert {len(score.tops) for score in one.scores} == {2}
        assert all(score.logprob is not None and score.rank > 0 for score in one.scores)
    told = answers[2].prompt_scores
    assert [score.virtual for score in told] == [True, True, False, False, False]
    assert [score.logprob is None for score in told] == [True, True, False, False, False]
    first = client.generate(PROMPT, options)
    assert (first.token_ids, first.stop) == (answers[0].token_ids, None)


def test_pieces_say_whose_they_are_and_come_to_the_same(client: Client) -> None:
    options = Options(answers=3, max_new_tokens=5, temperature=1.0, seed=5, logprobs=0)
    whole = client.completions(PROMPT, options)
    pieces = list(client.stream(PROMPT, options))
    for index, one in enumerate(whole):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == one.text
        assert [score for piece in mine for score in piece.scores] == one.scores
        assert mine[0].seed == one.seed
        assert (mine[-1].finish_reason, mine[-1].usage) == ("length", whole[index].usage)


def test_beams_guides_and_times_are_asked_for_by_plain_values(client: Client) -> None:
    beams = client.completions(PROMPT, Options(beams=Beams(3), answers=2, max_new_tokens=4))
    scores = [one.beam_score for one in beams]
    assert scores[0] is not None and scores[1] is not None and scores[0] > scores[1]
    cut = client.generate(PROMPT, Options(max_new_tokens=4000, time_limit_ms=1500))
    assert cut.finish_reason == "time_limit" and 0 < len(cut.token_ids) < 4000
    with pytest.raises(CallError, match="one of its kinds") as refused:
        client.generate(PROMPT, Options(guide=Guide(regex="a", choices=["b"])))
    assert refused.value.code == "INVALID_ARGUMENT"
    with pytest.raises(CallError, match="a token that ends the text"):
        client.generate(PROMPT, Options(guide=Guide(regex="a")))


def test_scores_are_plain_values(client: Client) -> None:
    best = client.generate(PROMPT, Options(max_new_tokens=1)).token_ids[0]
    scores = client.score(PROMPT, [f" {best}", " 17 18"], adapter="", logprobs=1)
    assert [text.greedy for text in scores.texts] == [True, False]
    assert scores.texts[0].tokens[0].tops[0][0] == best
    assert scores.usage.completion_tokens == 3
    (whole,) = client.score(PROMPT).texts
    assert whole.logprob == pytest.approx(sum(one.logprob or 0 for one in whole.tokens), abs=1e-5)


def test_an_error_says_what_a_program_needs(client: Client) -> None:
    with pytest.raises(CallError) as refused:
        client.generate(PROMPT, Options(temperature=-1))
    error = refused.value
    assert (error.code, error.reason, error.field, error.retry_s) == (
        *("INVALID_ARGUMENT", "INVALID_FIELD", "sampling.temperature", None),
    )


def test_a_full_server_is_asked_again_within_the_time(server: Server, client: Client) -> None:
    holding = client.stream(PROMPT, HELD)
    next(holding)
    one = Options(max_new_tokens=1)
    with server.client() as other:
        other.load()  # It is connected.
        for timeout_s in (0.9, 20.0):  # Less time than the wait takes; then no second attempt.
            other.retries = Retries(4 if timeout_s < 1 else 1)
            started = time.monotonic()
            with pytest.raises(CallError) as refused:
                other.generate(PROMPT, one, timeout_s=timeout_s)
            assert (refused.value.reason, refused.value.retry_s) == ("QUEUE_FULL", 1.0)
            assert time.monotonic() - started < 10
        other.retries = Retries()
        refusals = (
            'preamble_requests_total{code="RESOURCE_EXHAUSTED",method="Generate",wire="preamble"}'
        )
        before = server.metric(refusals)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(other.generate, PROMPT, one)
            eventually(lambda: server.metric(refusals) > before)
            holding.close()
            assert answer.result(WAIT_S).usage.completion_tokens == 1


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
    eventually(lambda: server.metric("preamble_requests_in_flight") == 0)


def test_a_server_that_is_not_there_is_an_error_by_the_deadline() -> None:
    started = time.monotonic()
    with socket.socket() as held:  # Nobody listens, and nobody else can.
        held.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{held.getsockname()[1]}"
        with Client(where, timeout_s=2) as client, pytest.raises(CallError) as refused:
            client.generate(PROMPT)
    assert refused.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert time.monotonic() - started < 10


def test_the_server_says_what_it_is(client: Client) -> None:
    info = client.info()
    assert (info.model.name, info.model.vocabulary_size) == ("checkpoint", 640)
    assert info.model.dtype == "float64"
    assert info.limits.queue_requests_max == ROOM
    assert [(one.name, one.virtual_tokens) for one in client.adapters()] == [("echo", 2)]
    assert client.load().engine_up


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
    assert err.startswith("preamble generate: NOT_FOUND: there is no adapter 'refunds' here; ")
    assert err.count("\n") == 1


def test_the_command_tells_several_answers_apart(
    server: Server, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", PROMPT, "--server", server.address, "--max-new-tokens", "3"]
    words += ["--task", "echo", "--task", "", "--answers", "2", "--temperature", "1"]
    words += ["--seed", "5", "--top-k", "9", "--min-p", "0.1", "--repetition-penalty", "1.5"]

    assert main(words) == 0

    options = Options(
        adapters=["echo", ""], answers=2, max_new_tokens=3, temperature=1.0, seed=5, top_k=9,
        min_p=0.1, repetition_penalty=1.5,
    )  # fmt: skip
    told = [
        f"--- {one.adapter or 'no task'}, seed {one.seed}\n{one.text}\n"
        for one in client.completions(PROMPT, options)
    ]
    assert capsys.readouterr().out == "".join(told)


def test_a_reader_that_leaves_is_no_trace_of_a_fault(server: Server) -> None:
    words = [sys.executable, "-m", "clients", "generate", PROMPT, "--server", server.address]
    words += ["--max-new-tokens", "2000"]
    command = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None and command.stderr is not None
    try:
        command.stdout.read(1)
        command.stdout.close()
        assert command.wait(WAIT_S) == 1
        assert command.stderr.read() == ""
    finally:
        command.kill()
        command.wait()
        command.stderr.close()


def test_files_that_flags_name_are_read_or_said_to_be_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flag, word in (
        ("--token", "@nowhere"),
        ("--ca", "nowhere"),
        ("--key", "nowhere"),
        ("--json-schema", "nowhere"),
    ):
        assert main(["generate", "a", "--server", "x:1", flag, word]) == 1
        said = f"preamble generate: {flag}: nowhere cannot be read (No such file or directory)\n"
        assert capsys.readouterr().err == said
    with pytest.raises(SystemExit):
        main(["generate", "a", "--server", "x:1", "--json-schema", "a", "--regex", "b"])


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
    calls = {"server", "timeout_s", "token", "tls", "ca", "cert", "key"}
    assert set(ours) - set(theirs) == calls
    loads = {"model", "tokenizer", "true_vocab_size", "config_json", "adapters", "device", "dtype"}
    assert set(theirs) - set(ours) == loads
    for name in set(ours) & set(theirs):
        assert ours[name] == theirs[name]
