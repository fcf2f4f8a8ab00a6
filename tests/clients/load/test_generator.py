"""The load generator against a real server, and its figures on calls that one can check."""

import asyncio
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import preamble
from clients.cli.bench import bench_parser
from clients.load.generator import (
    Length,
    LoadError,
    Run,
    Sent,
    Where,
    Work,
    load,
    quantile,
    read_dataset,
)
from clients.load.report import Report, Slo
from protos.preamble.v1 import admin_pb2
from protos.preamble.v1 import generation_pb2 as pb
from tests.support.servers import Server, serving, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("load")
    checkpoint = write_checkpoint(folder / "model", tokenizer=False)
    settings = folder / "limits.yaml"
    with serving(checkpoint, settings, queue_requests_max=2, running_requests_max=2) as running:
        yield running


def sent(due: float, *messages: tuple[float, int], begun: float | None = None) -> Sent:
    one = Sent(due, due if begun is None else begun, messages=list(messages))
    one.first, one.last = messages[0][0], messages[-1][0]
    one.end = one.last
    return one


def test_figures_are_what_their_definitions_say() -> None:
    # Due at 1 s: a token after 100 ms, two after 40 ms more, one after 20 ms more.
    one = sent(1.0, (1.1, 1), (1.14, 2), (1.16, 1))
    report = Report.of(Run([one], seconds=2.0, cpu_s=0.1, open_loop=False))
    assert report.ttft_ms and report.gap_ms and report.itl_ms and report.tpot_ms and report.e2e_ms
    assert report.ttft_ms.p50 == pytest.approx(100)
    assert report.gap_ms.count == 2 and report.gap_ms.mean == pytest.approx(30)
    assert report.itl_ms.count == 3 and report.itl_ms.max == pytest.approx(20)  # 20, 20 and 20.
    assert report.tpot_ms.p99 == pytest.approx(20)  # 60 ms for the three after the first.
    assert report.e2e_ms.p50 == pytest.approx(160)
    assert (report.tokens, report.tokens_per_s, report.requests_per_s) == (4, 2.0, 0.5)
    assert report.tokens_per_message == pytest.approx(4 / 3)
    assert report.late_ms is None and report.warnings == ()


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(one) for one in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [quantile(values, part) for part in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert quantile([7.0], 0.01) == 7.0 and math.isnan(quantile([], 0.5))


def test_goodput_counts_only_requests_that_keep_all_limits_and_ended_well() -> None:
    slo = Slo.of("ttft:200ms, itl:0.02s")
    quick, slow_first = sent(0, (0.1, 1), (0.12, 1)), sent(0, (0.3, 1), (0.31, 1))
    slow_later, alone = sent(0, (0.1, 1), (0.2, 1)), sent(0, (0.1, 1))
    failed = sent(0, (0.1, 1))
    failed.code, failed.reason = "UNAVAILABLE", "ENGINE_LOST"
    calls = [quick, slow_first, slow_later, alone, failed]
    report = Report.of(Run(calls, 2.0, 0.0, open_loop=True), slo)
    assert report.goodput_per_s == 1.0  # Two of them in two seconds: `quick` and `alone`.
    assert report.errors == {"UNAVAILABLE ENGINE_LOST": 1} and report.ok == 4


@pytest.mark.parametrize("words", ["ttft", "ttft:fast", "sometime:1s", "ttft:-1ms", "ttft:5", ""])
def test_an_slo_that_says_nothing_is_refused(words: str) -> None:
    with pytest.raises(LoadError, match="ttft:200ms,itl:20ms"):
        Slo.of(words)


def test_a_late_generator_is_told_of() -> None:
    calls = [sent(0.0, (0.5, 1), begun=0.2)]
    report = Report.of(Run(calls, 1.0, 0.95, open_loop=True))
    assert len(report.warnings) == 2 and "200 ms" in report.warnings[0]
    assert report.ttft_ms and report.ttft_ms.p50 == pytest.approx(500)  # Of when it was due.


@pytest.mark.parametrize("word", ["0", "-3", "9-4", "x", "~4-9", "1.5", ""])
def test_a_length_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(LoadError, match="128, 64-256 or ~128"):
        Length.of(word)


def test_lengths_are_drawn_as_they_are_described() -> None:
    draw = random.Random(3)
    assert {Length.of("5").draw(draw, 100) for _ in range(9)} == {5}
    assert {Length.of("2-4").draw(draw, 100) for _ in range(99)} == {2, 3, 4}
    around = [Length.of("~50").draw(draw, 10_000) for _ in range(4000)]
    assert 45 < sum(around) / len(around) < 55 and min(around) >= 1
    assert Length.of("500").draw(draw, 60) == 60  # What the model has room for.


def test_a_dataset_is_read_line_by_line_and_its_mistakes_have_a_place(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "new_tokens": 3, "adapter": "x"}\n'
                    '{"inputs": {"mail": "b"}}\n')  # fmt: skip
    text, ids, fields = read_dataset(path)
    assert (text.prompt, ids.prompt, fields.prompt) == ("a", [1, 2], {"mail": "b"})
    assert (ids.new_tokens, ids.adapter) == (3, "x")
    for wrong in ("{", '{"prompt": 5}', '{"prompt": "a", "new_tokens": 0}', "[]"):
        path.write_text(f'{{"prompt": "a"}}\n{wrong}\n')
        with pytest.raises(LoadError, match=r"prompts.jsonl:2 is not"):
            read_dataset(path)


def test_a_stall_of_the_server_is_in_the_times_of_all_who_were_due_meanwhile() -> None:
    """One call at a time, 50 ms each, asked for every 10 ms: whoever waits, waits from when due."""
    turn = asyncio.Lock()

    async def stream(message: object, context: object) -> object:
        async with turn:
            await asyncio.sleep(0.05)
        yield pb.GenerateStreamResponse(token_ids=[1])

    async def info(message: object, context: object) -> object:
        model = admin_pb2.ModelInfo(vocabulary_size=9, context_tokens_max=99)
        return admin_pb2.GetServerInfoResponse(model=model)

    async def main() -> Run:
        server = grpc.aio.server()
        told: dict[str, dict[str, Any]] = {
            "preamble.v1.GenerationService": {
                "GenerateStream": grpc.unary_stream_rpc_method_handler(
                    stream, None, pb.GenerateStreamResponse.SerializeToString
                )
            },
            "preamble.v1.AdminService": {
                "GetServerInfo": grpc.unary_unary_rpc_method_handler(
                    info, None, admin_pb2.GetServerInfoResponse.SerializeToString
                )
            },
        }
        handlers = [grpc.method_handlers_generic_handler(*item) for item in told.items()]
        server.add_generic_rpc_handlers(tuple(handlers))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        short = Length.of("4")
        work = Work(rate=100.0, requests_max=20, warmup_requests=0, prompt=short, new=short)
        try:
            return await load(Where(f"127.0.0.1:{port}"), work)
        finally:
            await server.stop(0)

    run = asyncio.run(main())
    report = Report.of(run)
    assert report.ok == 20 and report.e2e_ms is not None
    assert run.sent[-1].due < 1.0 <= run.sent[-1].end  # 20 of them take 50 ms each.
    assert report.e2e_ms.max > 400
    assert all(one.begun >= one.due for one in run.sent)


def test_a_closed_loop_asks_for_every_token_and_gets_it(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "load.png"
    words = ["bench", "--server", server.address, "--concurrency", "2", "--requests", "6"]
    words += ["--prompt-tokens", "4-9", "--new-tokens", "7", "--quiet", "--slo", "e2e:60s"]
    assert preamble.main([*words, "--json", "--plot", str(picture)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["sent"], said["ok"], said["tokens"], said["errors"]) == (6, 6, 42, {})
    assert said["goodput_per_s"] == pytest.approx(said["requests_per_s"])
    assert 6 * 4 <= said["prompt_tokens"] <= 6 * 9
    assert said["generator_cpu_s"] > 0 and said["late_ms"] is None
    assert said["ttft_ms"]["count"] == 6
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_open_loop_counts_what_is_refused_by_code_and_reason(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--server", server.address, "--rate", "2000", "--requests", "30"]
    words += ["--warmup-requests", "1"]
    assert preamble.main([*words, "--prompt-tokens", "8", "--new-tokens", "60"]) == 0
    said = capsys.readouterr().out
    lines = {line[:18].strip(): line[18:] for line in said.splitlines()}
    assert "RESOURCE_EXHAUSTED QUEUE_FULL" in lines["errors"]
    assert "of 30 ended well" in lines["requests"] and "ended badly" in lines


def test_the_same_seed_asks_for_the_same(server: Server) -> None:
    def once(seed: int) -> list[tuple[float, int]]:
        work = Work(rate=400.0, requests_max=5, prompt=Length.of("1-90"), new=Length.of("1"),
                    seed=seed)  # fmt: skip
        run = asyncio.run(load(Where(server.address), work))
        return [(one.due, one.prompt_tokens) for one in run.sent]

    assert once(1) == once(1) != once(2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "0"], "--rate is 0.0"),
        (["--requests", "-1"], "--requests is -1"),
        (["--new-tokens", "none"], "'none' is no length"),
        (["--dataset", "/nowhere/x.jsonl"], "cannot be read"),
        (["--slo", "speed:1s"], "--slo: 'speed:1s'"),
        ([], "does not tell what it is (UNAVAILABLE"),
    ],
)
def test_what_cannot_be_says_why(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preamble.main(["bench", "--server", "127.0.0.1:1", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_picture_without_what_draws_it_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["bench", "--server", "127.0.0.1:1", "--plot", "x.png"]
    assert preamble.main(words) == 1
    assert "pip install 'preamble[plots]'" in capsys.readouterr().err


def test_the_page_about_the_command_has_every_flag_of_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    flags = [
        word
        for action in bench_parser()._actions
        for word in action.option_strings
        if word.startswith("--")
    ]
    assert [flag for flag in flags if f"`{flag}" not in page and flag != "--help"] == []
