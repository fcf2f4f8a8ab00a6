"""The client against a real server, and the generate command."""

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
ANSWERS_MAX = 4  # The limits of running and of queued answers.
FILLING_OPTIONS = Options(answers=2 * ANSWERS_MAX, max_new_tokens=4000)  # Uses all of them.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("client")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters" / "echo.safetensors", checkpoint, [4, 5])
    limits: dict[str, Any] = {
        "running_requests_max": ANSWERS_MAX,
        "queue_requests_max": ANSWERS_MAX,
    }
    limits["adapters"] = str(folder / "adapters")
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


def test_options_reach_the_server(client: Client) -> None:
    completion = client.generate(PROMPT, Options(temperature=1.0, seed=3, max_new_tokens=5))
    assert (completion.seed, completion.usage.completion_tokens) == (3, 5)
    assert (completion.finish_reason, completion.adapter) == ("length", "")
    other_seed = client.generate(PROMPT, Options(temperature=1.0, seed=4, max_new_tokens=5))
    assert other_seed.token_ids != completion.token_ids


def test_answers_have_the_requested_details(client: Client) -> None:
    options = Options(
        adapters=["", "echo"],
        answers=2,
        max_new_tokens=3,
        temperature=1.0,
        seed=5,
        logprobs=2,
        prompt_logprobs=0,
    )
    answers = client.completions(PROMPT, options)
    assert [answer.adapter for answer in answers] == ["", "", "echo@1", "echo@1"]
    assert answers[0].seed == answers[2].seed == 5 != answers[1].seed
    for completion in answers:
        assert [score.token_id for score in completion.scores] == completion.token_ids
        assert {len(score.tops) for score in completion.scores} == {2}
        assert all(score.logprob is not None and score.rank > 0 for score in completion.scores)
    prompt_scores = answers[2].prompt_scores
    assert [score.virtual for score in prompt_scores] == [True, True, False, False, False]
    assert [score.logprob is None for score in prompt_scores] == [True, True, False, False, False]
    first_answer = client.generate(PROMPT, options)
    assert (first_answer.token_ids, first_answer.stop) == (answers[0].token_ids, None)


def test_pieces_are_indexed_and_join_to_the_completions(client: Client) -> None:
    options = Options(answers=3, max_new_tokens=5, temperature=1.0, seed=5, logprobs=0)
    completions = client.completions(PROMPT, options)
    pieces = list(client.stream(PROMPT, options))
    for index, completion in enumerate(completions):
        answer_pieces = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in answer_pieces) == completion.text
        assert [score for piece in answer_pieces for score in piece.scores] == completion.scores
        assert answer_pieces[0].seed == completion.seed
        assert (answer_pieces[-1].finish_reason, answer_pieces[-1].usage) == (
            "length",
            completions[index].usage,
        )


def test_beams_guides_and_time_limits_are_plain_options(client: Client) -> None:
    beams = client.completions(PROMPT, Options(beams=Beams(3), answers=2, max_new_tokens=4))
    scores = [beam.beam_score for beam in beams]
    assert scores[0] is not None and scores[1] is not None and scores[0] > scores[1]
    timed_out = client.generate(PROMPT, Options(max_new_tokens=4000, time_limit_ms=1500))
    assert timed_out.finish_reason == "time_limit" and 0 < len(timed_out.token_ids) < 4000
    with pytest.raises(CallError, match="guide sets regex and choices; set exactly one") as caught:
        client.generate(PROMPT, Options(guide=Guide(regex="a", choices=["b"])))
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(CallError, match="needs a stop token to end the completion"):
        client.generate(PROMPT, Options(guide=Guide(regex="a")))


def test_scores_are_plain_values(client: Client) -> None:
    best = client.generate(PROMPT, Options(max_new_tokens=1)).token_ids[0]
    scores = client.score(PROMPT, [f" {best}", " 17 18"], adapter="", logprobs=1)
    assert [text.greedy for text in scores.texts] == [True, False]
    assert scores.texts[0].tokens[0].tops[0][0] == best
    assert scores.usage.completion_tokens == 3
    (text_score,) = client.score(PROMPT).texts
    assert text_score.logprob == pytest.approx(
        sum(token.logprob or 0 for token in text_score.tokens), abs=1e-5
    )


def test_errors_have_code_reason_and_retry_time(client: Client) -> None:
    with pytest.raises(CallError) as caught:
        client.generate(PROMPT, Options(temperature=-1))
    error = caught.value
    assert (error.code, error.reason, error.field, error.retry_s) == (
        *("INVALID_ARGUMENT", "INVALID_FIELD", "sampling.temperature", None),
    )


def test_full_servers_are_retried_within_the_deadline(server: Server, client: Client) -> None:
    running_stream = client.stream(PROMPT, FILLING_OPTIONS)
    next(running_stream)
    options = Options(max_new_tokens=1)
    with server.client() as second_client:
        second_client.load()  # To connect.
        for timeout_s in (0.9, 20.0):  # Less than the retry delay; then without a second attempt.
            second_client.retries = Retries(4 if timeout_s < 1 else 1)
            started = time.monotonic()
            with pytest.raises(CallError) as caught:
                second_client.generate(PROMPT, options, timeout_s=timeout_s)
            assert (caught.value.reason, caught.value.retry_s) == ("QUEUE_FULL", 1.0)
            assert time.monotonic() - started < 10
        second_client.retries = Retries()
        refusals = (
            'preamble_requests_total{code="RESOURCE_EXHAUSTED",method="Generate",wire="preamble"}'
        )
        refusals_before = server.metric(refusals)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(second_client.generate, PROMPT, options)
            eventually(lambda: server.metric(refusals) > refusals_before)
            running_stream.close()
            assert future.result(WAIT_S).usage.completion_tokens == 1


def test_blank_texts_are_refused(client: Client) -> None:
    for text, reason in (("", "text is empty"), (" ", "text has 1 characters but encodes")):
        with pytest.raises(CallError, match=reason) as caught:
            client.generate(text)
        assert caught.value.code == "INVALID_ARGUMENT"


def test_unrepresentable_values_are_refused_before_sending(client: Client) -> None:
    for prompt, options in (
        (PROMPT, Options(max_new_tokens=-1)),
        (PROMPT, Options(seed=2**64)),
        ([-1], Options()),
        ("\ud800", Options()),
    ):
        with pytest.raises(CallError) as caught:
            client.generate(prompt, options)
        assert caught.value.code == "INVALID_ARGUMENT"


def test_abandoned_streams_are_cancelled(server: Server, client: Client) -> None:
    for _ in client.stream(PROMPT, Options(max_new_tokens=4000)):
        break
    eventually(lambda: server.metric("preamble_requests_in_flight") == 0)


def test_missing_servers_fail_by_the_deadline() -> None:
    started = time.monotonic()
    with socket.socket() as unused_socket:  # Bound, so that no process listens on this port.
        unused_socket.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused_socket.getsockname()[1]}"
        with Client(address, timeout_s=2) as client, pytest.raises(CallError) as caught:
            client.generate(PROMPT)
    assert caught.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert time.monotonic() - started < 10


def test_server_info(client: Client) -> None:
    server_info = client.info()
    assert (server_info.model.name, server_info.model.vocabulary_size) == ("checkpoint", 640)
    assert server_info.model.dtype == "float64"
    assert server_info.limits.queue_requests_max == ANSWERS_MAX
    assert [(adapter.name, adapter.virtual_tokens) for adapter in client.adapters()] == [
        ("echo", 2)
    ]
    assert client.load().engine_up


def test_generate_command_prints_the_answer(
    server: Server, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", PROMPT, "--server", server.address, "--max-new-tokens", "8"]

    assert main(arguments) == 0

    expected = client.generate(PROMPT, Options(max_new_tokens=8)).text
    assert capsys.readouterr().out == expected + "\n"


def test_generate_command_reports_refusals(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    field_file = tmp_path / "mail.txt"
    field_file.write_text("where is my money")
    arguments = ["generate", "--server", server.address, "--task", "refunds"]
    arguments += ["--field", f"text=@{field_file}"]

    assert main(arguments) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("preamble generate: NOT_FOUND: adapter 'refunds' does not exist; ")
    assert err.count("\n") == 1


def test_generate_command_labels_several_answers(
    server: Server, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", PROMPT, "--server", server.address, "--max-new-tokens", "3"]
    arguments += ["--task", "echo", "--task", "", "--answers", "2", "--temperature", "1"]
    arguments += ["--seed", "5", "--top-k", "9", "--min-p", "0.1", "--repetition-penalty", "1.5"]

    assert main(arguments) == 0

    options = Options(
        adapters=["echo", ""],
        answers=2,
        max_new_tokens=3,
        temperature=1.0,
        seed=5,
        top_k=9,
        min_p=0.1,
        repetition_penalty=1.5,
    )
    expected_lines = [
        f"--- {completion.adapter or 'no task'}, seed {completion.seed}\n{completion.text}\n"
        for completion in client.completions(PROMPT, options)
    ]
    assert capsys.readouterr().out == "".join(expected_lines)


def test_closed_pipes_leave_no_traceback(server: Server) -> None:
    arguments = [sys.executable, "-m", "clients", "generate", PROMPT, "--server", server.address]
    arguments += ["--max-new-tokens", "2000"]
    command = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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


def test_missing_files_of_flags_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flag, file_kind in (
        ("--token", "@nowhere"),
        ("--ca", "nowhere"),
        ("--key", "nowhere"),
        ("--json-schema", "nowhere"),
    ):
        assert main(["generate", "a", "--server", "x:1", flag, file_kind]) == 1
        message = (
            f"preamble generate: {flag}: nowhere cannot be read (No such file or directory); "
            "give a readable file\n"
        )
        assert capsys.readouterr().err == message
    with pytest.raises(SystemExit):
        main(["generate", "a", "--server", "x:1", "--json-schema", "a", "--regex", "b"])


COMMANDS = [(main, ["--server", "x:1"]), (local_main, ["--model", "x"])]


@pytest.mark.parametrize(("command", "flags"), COMMANDS, ids=["by a server", "in process"])
def test_usage_errors_have_their_own_exit_code(
    command: Callable[[list[str]], int], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["a", "--field", "b=c"], ["--field", "b"]):
        with pytest.raises(SystemExit) as misused:
            command(["generate", *arguments, *flags])
        assert misused.value.code == 2
    capsys.readouterr()
    assert command(["generate", "--field", "b=@nowhere", *flags]) == 1
    assert capsys.readouterr().err == (
        "preamble generate: --field b: nowhere cannot be read (No such file or directory); "
        "give a readable file\n"
    )


def test_both_generate_commands_have_the_same_flags() -> None:
    def flags(parser: argparse.ArgumentParser) -> dict[str, tuple[object, ...]]:
        return {
            action.dest: (action.option_strings, action.default, action.type, action.help)
            for action in parser._actions
        }

    client_flags = flags(client_parser())
    local_flags = flags(local_parser())
    calls = {"server", "timeout_s", "token", "tls", "ca", "cert", "key", "metadata"}
    assert set(client_flags) - set(local_flags) == calls
    loads = {"model", "tokenizer", "true_vocab_size", "config_json", "adapters", "device", "dtype"}
    assert set(local_flags) - set(client_flags) == loads
    for name in set(client_flags) & set(local_flags):
        assert client_flags[name] == local_flags[name]
