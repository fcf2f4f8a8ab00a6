"""The load generator: runs against a real server, and figures of calls with known times."""

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
    CallRecord,
    LengthSampler,
    LoadError,
    LoadRun,
    LoadSpec,
    ServerEndpoint,
    read_dataset,
    run_load_async,
)
from clients.load.percentiles import quantile
from clients.load.report import LoadReport, Slo
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


def call_record(
    due: float, *messages: tuple[float, int], sent_s: float | None = None
) -> CallRecord:
    call = CallRecord(due, due if sent_s is None else sent_s, messages=list(messages))
    call.first_token_s = messages[0][0]
    call.last_token_s = messages[-1][0]
    call.ended_s = call.last_token_s
    return call


def test_figures_follow_their_definitions() -> None:
    # Due at 1 s: a token after 100 ms, two after 40 ms more, one after 20 ms more.
    call = call_record(1.0, (1.1, 1), (1.14, 2), (1.16, 1))
    report = LoadReport.from_run(LoadRun([call], seconds=2.0, cpu_s=0.1, open_loop=False))
    assert report.ttft_ms and report.gap_ms and report.itl_ms and report.tpot_ms and report.e2e_ms
    assert report.ttft_ms.p50 == pytest.approx(100)
    assert report.gap_ms.count == 2 and report.gap_ms.mean == pytest.approx(30)
    assert report.itl_ms.count == 3 and report.itl_ms.max == pytest.approx(20)  # 20, 20 and 20.
    assert report.tpot_ms.p99 == pytest.approx(20)  # 60 ms for the three after the first.
    assert report.e2e_ms.p50 == pytest.approx(160)
    assert (report.tokens, report.tokens_per_s, report.requests_per_s) == (4, 2.0, 0.5)
    assert report.tokens_per_message == pytest.approx(4 / 3)
    assert report.late_ms is None and report.warnings == ()


def test_percentiles_are_measured_values() -> None:
    values = [float(number) for number in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [quantile(values, part) for part in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert quantile([7.0], 0.01) == 7.0 and math.isnan(quantile([], 0.5))


def test_goodput_counts_successful_requests_within_all_limits() -> None:
    slo = Slo.parse("ttft:200ms, itl:0.02s")
    fast_call = call_record(0, (0.1, 1), (0.12, 1))
    slow_first = call_record(0, (0.3, 1), (0.31, 1))
    slow_later = call_record(0, (0.1, 1), (0.2, 1))
    single_token = call_record(0, (0.1, 1))
    failed = call_record(0, (0.1, 1))
    failed.code = "UNAVAILABLE"
    failed.reason = "ENGINE_LOST"
    calls = [fast_call, slow_first, slow_later, single_token, failed]
    report = LoadReport.from_run(LoadRun(calls, 2.0, 0.0, open_loop=True), slo)
    assert report.goodput_per_s == 1.0  # Two in two seconds: `fast_call` and `single_token`.
    assert report.errors == {"UNAVAILABLE ENGINE_LOST": 1} and report.ok == 4


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "sometime:1s", "ttft:-1ms", "ttft:5", ""])
def test_invalid_slos_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="ttft:200ms,itl:20ms"):
        Slo.parse(text)


def test_a_late_generator_is_reported() -> None:
    calls = [call_record(0.0, (0.5, 1), sent_s=0.2)]
    report = LoadReport.from_run(LoadRun(calls, 1.0, 0.95, open_loop=True))
    assert len(report.warnings) == 2 and "200 ms" in report.warnings[0]
    assert report.ttft_ms and report.ttft_ms.p50 == pytest.approx(500)  # From the due time.


@pytest.mark.parametrize("text", ["0", "-3", "9-4", "x", "~4-9", "1.5", ""])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="128, 64-256 or ~128"):
        LengthSampler.parse(text)


def test_sampled_lengths_follow_their_description() -> None:
    draw = random.Random(3)
    assert {LengthSampler.parse("5").sample(draw, 100) for _ in range(9)} == {5}
    assert {LengthSampler.parse("2-4").sample(draw, 100) for _ in range(99)} == {2, 3, 4}
    samples = [LengthSampler.parse("~50").sample(draw, 10_000) for _ in range(4000)]
    assert 45 < sum(samples) / len(samples) < 55 and min(samples) >= 1
    assert LengthSampler.parse("500").sample(draw, 60) == 60  # Limited by the context.


def test_dataset_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a"}\n\n{"prompt": [1, 2], "new_tokens": 3, "adapter": "x"}\n'
        '{"inputs": {"mail": "b"}}\n'
    )
    text, ids, fields = read_dataset(path)
    assert (text.prompt, ids.prompt, fields.prompt) == ("a", [1, 2], {"mail": "b"})
    assert (ids.new_tokens, ids.adapter) == (3, "x")
    for invalid_line in ("{", '{"prompt": 5}', '{"prompt": "a", "new_tokens": 0}', "[]"):
        path.write_text(f'{{"prompt": "a"}}\n{invalid_line}\n')
        with pytest.raises(LoadError, match=r"prompts.jsonl:2 is not"):
            read_dataset(path)


def test_server_stalls_count_for_all_due_calls() -> None:
    """One call at a time, 50 ms each, one due every 10 ms: the delay counts from the due time."""
    turn = asyncio.Lock()

    async def stream(message: object, context: object) -> object:
        async with turn:
            await asyncio.sleep(0.05)
        yield pb.GenerateStreamResponse(token_ids=[1])

    async def info(message: object, context: object) -> object:
        model = admin_pb2.ModelInfo(vocabulary_size=9, context_tokens_max=99)
        return admin_pb2.GetServerInfoResponse(model=model)

    async def main() -> LoadRun:
        server = grpc.aio.server()
        handlers_by_service: dict[str, dict[str, Any]] = {
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
        handlers = [
            grpc.method_handlers_generic_handler(*service_handlers)
            for service_handlers in handlers_by_service.items()
        ]
        server.add_generic_rpc_handlers(tuple(handlers))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        length_sampler = LengthSampler.parse("4")
        work = LoadSpec(
            rate=100.0,
            requests_max=20,
            warmup_requests=0,
            prompt_length=length_sampler,
            output_length=length_sampler,
        )
        try:
            return await run_load_async(ServerEndpoint(f"127.0.0.1:{port}"), work)
        finally:
            await server.stop(0)

    run = asyncio.run(main())
    report = LoadReport.from_run(run)
    assert report.ok == 20 and report.e2e_ms is not None
    assert run.calls[-1].due_s < 1.0 <= run.calls[-1].ended_s  # 20 calls take 50 ms each.
    assert report.e2e_ms.max > 400
    assert all(call.started_s >= call.due_s for call in run.calls)


def test_closed_loop_gets_every_requested_token(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot_file = tmp_path / "load.png"
    arguments = ["bench", "--server", server.address, "--concurrency", "2", "--requests", "6"]
    arguments += ["--prompt-tokens", "4-9", "--new-tokens", "7", "--quiet", "--slo", "e2e:60s"]
    assert preamble.main([*arguments, "--json", "--plot", str(plot_file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sent"], report["ok"], report["tokens"], report["errors"]) == (6, 6, 42, {})
    assert report["goodput_per_s"] == pytest.approx(report["requests_per_s"])
    assert 6 * 4 <= report["prompt_tokens"] <= 6 * 9
    assert report["generator_cpu_s"] > 0 and report["late_ms"] is None
    assert report["ttft_ms"]["count"] == 6
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def test_open_loop_counts_refusals_by_code_and_reason(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--server", server.address, "--rate", "2000", "--requests", "30"]
    arguments += ["--warmup-requests", "1"]
    assert preamble.main([*arguments, "--prompt-tokens", "8", "--new-tokens", "60"]) == 0
    output = capsys.readouterr().out
    lines = {line[:18].strip(): line[18:] for line in output.splitlines()}
    assert "RESOURCE_EXHAUSTED QUEUE_FULL" in lines["errors"]
    assert "of 30 succeeded" in lines["requests"] and "failed calls" in lines


def test_equal_seeds_send_equal_requests(server: Server) -> None:
    def run_once(seed: int) -> list[tuple[float, int]]:
        work = LoadSpec(
            rate=400.0,
            requests_max=5,
            prompt_length=LengthSampler.parse("1-90"),
            output_length=LengthSampler.parse("1"),
            seed=seed,
        )
        run = asyncio.run(run_load_async(ServerEndpoint(server.address), work))
        return [(call.due_s, call.prompt_tokens) for call in run.calls]

    assert run_once(1) == run_once(1) != run_once(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "--rate is 0.0"),
        (["--requests", "-1"], "--requests is -1"),
        (["--new-tokens", "none"], "'none' is not a length"),
        (["--dataset", "/nowhere/x.jsonl"], "cannot be read"),
        (["--slo", "speed:1s"], "--slo: 'speed:1s'"),
        ([], "GetServerInfo failed (UNAVAILABLE"),
    ],
)
def test_invalid_arguments_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preamble.main(["bench", "--server", "127.0.0.1:1", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_sending(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["bench", "--server", "127.0.0.1:1", "--plot", "x.png"]
    assert preamble.main(arguments) == 1
    assert "pip install 'preamble[plots]'" in capsys.readouterr().err


def test_the_document_lists_every_flag() -> None:
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    flags = [
        word
        for action in bench_parser()._actions
        for word in action.option_strings
        if word.startswith("--")
    ]
    assert [flag for flag in flags if f"`{flag}" not in page and flag != "--help"] == []
