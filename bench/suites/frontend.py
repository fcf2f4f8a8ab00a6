"""Front-end benchmark: CPU per token, added latency, service profiles and overload.

Costs are CPU times of processes, which other programs on the machine hardly change. Latencies are
measured at the client. The CPU time of the load generator is not counted, because the generator
runs in another process than the server. Some parts replace the model by a null engine
(bench/suites/null_engine.py). A missed target is reported as a verdict and does not change the exit
status.
"""

import asyncio
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.record import SuiteOutput
from bench.harness.server_process import ServerProcess, running_server, saved_random_checkpoint
from bench.harness.targets import measured_row
from bench.suites.null_engine import null_service, serve_null
from clients.load.generator import (
    LengthSampler,
    LoadRun,
    LoadSpec,
    ServerEndpoint,
    run_load,
)
from clients.load.percentiles import quantile
from clients.load.report import LoadReport
from gpt.config import GPTConfig
from serving.request import Ask

WAIT_S = 120.0  # Time limit for the start and for the end of the null-engine server.


@dataclass(frozen=True)
class FrontendSizes:
    """Sizes of the loads; tests use smaller ones."""

    streams: int = 256
    new_tokens: int = 64  # New tokens per request to a server with a model.
    null_new_tokens: int = 400  # New tokens per request to the null engine.
    null_step_s: float = 0.0128  # 256 streams at this step time are 20,000 tokens/s.
    prompt_tokens: int = 32
    calls: int = 200  # Sequential calls that measure the TTFT.
    load_s: float = 60.0  # Duration of an open-loop load.
    load_new_tokens: int = 32  # New tokens per request of the overload.
    # New tokens per request when profiles are compared: enough that most steps are decode steps.
    steady_new_tokens: int = 96
    overload_factor: float = 10.0  # Request rate as a multiple of the measured capacity.


def run_suite(
    parts: Sequence[str] = (),
    sizes: FrontendSizes = FrontendSizes(),
    network: GPTConfig = GPT2_SMALL,
) -> Iterator[SuiteOutput]:
    """Run the selected parts, or all parts if none is selected."""
    parts = parts or PARTS
    for name in parts:
        if name in NULL_ENGINE_PARTS:
            yield from NULL_ENGINE_PARTS[name](sizes)
    if any(name in SERVER_PARTS for name in parts):
        with saved_random_checkpoint(network) as model:
            for name in parts:
                if name in SERVER_PARTS:
                    yield from SERVER_PARTS[name](model, sizes)


# ----------------------------------------------------------------------------------- null engine


@contextmanager
def null_server(step_s: float, streams: int) -> Iterator[tuple[str, Connection]]:
    """Run a null-engine server; yield its address and its pipe (see `serve_null`)."""
    context = multiprocessing.get_context("spawn")
    parent_pipe, child_pipe = context.Pipe()
    process = context.Process(target=serve_null, args=(child_pipe, step_s, streams), daemon=True)
    process.start()
    try:
        if not parent_pipe.poll(WAIT_S):
            raise RuntimeError(f"the null-engine server did not start within {WAIT_S:g} s")
        yield f"127.0.0.1:{parent_pipe.recv()}", parent_pipe
    finally:
        parent_pipe.send(False)
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()


def tokens_per_core(sizes: FrontendSizes) -> Iterator[SuiteOutput]:
    """Measure streamed tokens per CPU second of the server, without the null engine's CPU time."""

    def server_cpu_s(pipe: Connection) -> float:
        pipe.send(True)
        process_s, null_s = pipe.recv()
        return float(process_s - null_s)

    with null_server(sizes.null_step_s, sizes.streams) as (address, pipe):
        run_load(ServerEndpoint(address), _closed_loop(sizes, 8))
        cpu_before_s = server_cpu_s(pipe)
        load_run = run_load(ServerEndpoint(address), _closed_loop(sizes, sizes.null_new_tokens))
        cpu_s = server_cpu_s(pipe) - cpu_before_s
    report = LoadReport.from_run(load_run)
    tokens_per_cpu_s = report.tokens / cpu_s
    yield measured_row(
        "front/tokens",
        tokens_per_cpu_s,
        f"{sizes.streams} streams, null engine, {tokens_per_cpu_s:,.0f} tokens/s per core "
        f"({1e6 * cpu_s / report.tokens:.1f} us per token, "
        f"{report.tokens_per_message:.2f} tokens per message, {report.tokens_per_s:,.0f} tokens/s; "
        f"CPU of the generator {report.generator_cpu_s:.1f} s, of the server {cpu_s:.1f} s)",
    )


def first_token_overhead(sizes: FrontendSizes) -> Iterator[SuiteOutput]:
    """Measure the TTFT over gRPC, minus the TTFT of the same request submitted in process."""
    with null_server(0.0, 4) as (address, _):
        workload = LoadSpec(
            requests_max=sizes.calls,
            warmup_requests=8,
            prompt_length=LengthSampler("fixed", sizes.prompt_tokens, sizes.prompt_tokens),
            output_length=LengthSampler("fixed", 2, 2),
        )
        report = LoadReport.from_run(run_load(ServerEndpoint(address), workload))
    in_process_ms = 1e3 * statistics.median(asyncio.run(_in_process_first_token_s(sizes)))
    assert report.ttft_ms is not None
    added_ms = report.ttft_ms.p50 - in_process_ms
    yield measured_row(
        "front/first",
        added_ms,
        f"p50 {report.ttft_ms.p50:.2f} ms over gRPC, {in_process_ms:.2f} ms by Engine.submit "
        f"in process, {added_ms:.2f} ms added",
    )


async def _in_process_first_token_s(sizes: FrontendSizes) -> list[float]:
    service, _ = null_service(0.0, 4)
    try:
        request = service.admission.admit(Ask((7,) * sizes.prompt_tokens, max_new_tokens=2))
        seconds: list[float] = []
        for _ in range(sizes.calls):
            start = time.perf_counter()
            stream = service.engine.submit(request)
            await anext(stream)
            seconds.append(time.perf_counter() - start)
            async for _ in stream:
                pass
            stream.close()
        return seconds
    finally:
        service.close()


def _closed_loop(sizes: FrontendSizes, new_tokens: int) -> LoadSpec:
    return LoadSpec(
        concurrency=sizes.streams,
        requests_max=sizes.streams,
        warmup_requests=0,
        prompt_length=LengthSampler("fixed", sizes.prompt_tokens, sizes.prompt_tokens),
        output_length=LengthSampler("fixed", new_tokens, new_tokens),
    )


# ------------------------------------------------------------------------------ server with a model


def frontend_share(model: Path, sizes: FrontendSizes) -> Iterator[SuiteOutput]:
    """Compare the CPU times of front end and ranks while all streams run."""
    settings = {"running_requests_max": sizes.streams, "prove": False}
    with running_server(model, ["--profile", "throughput"], settings) as server:
        run_load(ServerEndpoint(server.address), _closed_loop(sizes, 2))
        cpu_before = server.cpu_time
        load_run = run_load(ServerEndpoint(server.address), _closed_loop(sizes, sizes.new_tokens))
        cpu_time = server.cpu_time.since(cpu_before)
    report = LoadReport.from_run(load_run)
    cpu_share = cpu_time.frontend_s / max(cpu_time.ranks_s, 1e-9)
    # If no request succeeded, the low CPU share means nothing: report a miss.
    yield measured_row(
        "front/share",
        100 * cpu_share if report.ok else math.inf,
        f"{sizes.streams} streams, front end {cpu_time.frontend_s:.2f} s, "
        f"{100 * cpu_share:.1f} % of the ranks' "
        f"{cpu_time.ranks_s:.2f} s (generator {report.generator_cpu_s:.2f} s, "
        f"{report.tokens_per_s:,.0f} tokens/s, {report.ok} of {report.sent} succeeded)",
    )


def _measure_capacity(server: ServerProcess, sizes: FrontendSizes, new_tokens: int) -> float:
    """Return the requests/s of a closed loop that saturates the server."""
    streams = min(sizes.streams, 64)
    workload = LoadSpec(
        concurrency=streams,
        requests_max=4 * streams,
        prompt_length=LengthSampler("fixed", sizes.prompt_tokens, sizes.prompt_tokens),
        output_length=LengthSampler("fixed", new_tokens, new_tokens),
    )
    return LoadReport.from_run(run_load(ServerEndpoint(server.address), workload)).requests_per_s


def _open_loop(sizes: FrontendSizes, rate: float, new_tokens: int) -> LoadSpec:
    return LoadSpec(
        rate=rate,
        requests_max=None,
        duration_s=sizes.load_s,
        prompt_length=LengthSampler("fixed", sizes.prompt_tokens, sizes.prompt_tokens),
        output_length=LengthSampler("fixed", new_tokens, new_tokens),
        seed=1,
    )


def _steady_tokens_per_s(load_run: LoadRun, sizes: FrontendSizes) -> float:
    """Return tokens/s in the last two thirds of the load period, without ramp-up and drain."""
    window_start_s = sizes.load_s / 3
    messages = [message for call in load_run.calls for message in call.messages]
    tokens = sum(count for time_s, count in messages if window_start_s < time_s <= sizes.load_s)
    return max(1, tokens) / (sizes.load_s - window_start_s)


def compare_profiles(model: Path, sizes: FrontendSizes) -> Iterator[SuiteOutput]:
    """Run the same open-loop load with the profiles `throughput` and `latency`.

    The request rate is the capacity that is measured with the profile `throughput`.
    """
    reports: dict[str, LoadReport] = {}
    tokens_per_s: dict[str, float] = {}
    rate = 0.0
    for name in ("throughput", "latency"):
        with running_server(model, ["--profile", name], {"prove": False}) as server:
            rate = rate or _measure_capacity(server, sizes, sizes.steady_new_tokens)
            load_run = run_load(
                ServerEndpoint(server.address), _open_loop(sizes, rate, sizes.steady_new_tokens)
            )
            reports[name] = LoadReport.from_run(load_run)
            tokens_per_s[name] = _steady_tokens_per_s(load_run, sizes)
    header = "".join(
        f"{column:>10}" for column in ("tokens/s", "itl p50", "p95", "ttft p50", "p95", "refused")
    )
    yield f"{'profile':12}{header}  (ms)"
    for name, report in reports.items():
        assert report.itl_ms is not None and report.ttft_ms is not None
        yield (
            f"{name:12}{tokens_per_s[name]:10,.0f}{report.itl_ms.p50:10.1f}{report.itl_ms.p95:10.1f}"
            f"{report.ttft_ms.p50:10.1f}{report.ttft_ms.p95:10.1f}{report.sent - report.ok:10,}"
        )
    latency, throughput = reports["latency"], reports["throughput"]
    assert latency.itl_ms is not None and throughput.itl_ms is not None
    itl_reduction = 1 - latency.itl_ms.p95 / throughput.itl_ms.p95
    tokens_gain = tokens_per_s["throughput"] / tokens_per_s["latency"] - 1
    yield measured_row(
        "front/profiles-itl",
        100 * itl_reduction,
        f"{100 * itl_reduction:.0f} %, at {rate:.2f} requests/s",
        samples={
            name: [report.itl_ms.p95]
            for name, report in reports.items()
            if report.itl_ms is not None
        },
    )
    yield measured_row(
        "front/profiles-tokens",
        100 * tokens_gain,
        f"{100 * tokens_gain:.0f} %, at {rate:.2f} requests/s",
        samples={name: [profile_rate] for name, profile_rate in tokens_per_s.items()},
    )


def overload(model: Path, sizes: FrontendSizes) -> Iterator[SuiteOutput]:
    """Overload the server; refusals should be fast, and accepted requests should succeed."""
    settings = {"queue_requests_max": 128, "prove": False}
    with running_server(model, settings=settings) as server:
        rate = _measure_capacity(server, sizes, sizes.load_new_tokens) * sizes.overload_factor
        bytes_before = server.frontend_bytes
        load_run = run_load(
            ServerEndpoint(server.address), _open_loop(sizes, rate, sizes.load_new_tokens)
        )
        growth = server.frontend_bytes / bytes_before - 1
    yield from overload_rows(load_run, growth)


def overload_rows(load_run: LoadRun, growth: float) -> list[SuiteOutput]:
    """Judge an overload run; `growth` is the relative growth of the front end's memory."""
    report = LoadReport.from_run(load_run)
    lost_calls = [
        call for call in load_run.calls if not call.ok and call.code != "RESOURCE_EXHAUSTED"
    ]
    # The time starts when the call was sent, so that delays of the generator do not count.
    refusal_s = [
        call.ended_s - call.started_s
        for call in load_run.calls
        if call.code == "RESOURCE_EXHAUSTED"
    ]
    p99_ms = 1e3 * quantile(refusal_s, 0.99) if refusal_s else 0.0
    return [
        measured_row(
            "front/refused",
            p99_ms,
            f"{report.sent:,} calls in {load_run.seconds:.0f} s, {report.ok:,} succeeded, "
            f"{len(refusal_s):,} refused, p99 {p99_ms:.1f} ms",
        ),
        measured_row("front/lost", len(lost_calls)),
        measured_row("front/growth", 100 * growth),
        *(f"  {warning}" for warning in report.warnings),
    ]


NULL_ENGINE_PARTS: dict[str, Callable[[FrontendSizes], Iterator[SuiteOutput]]] = {
    "tokens": tokens_per_core,
    "first": first_token_overhead,
}
SERVER_PARTS: dict[str, Callable[[Path, FrontendSizes], Iterator[SuiteOutput]]] = {
    "share": frontend_share,
    "profiles": compare_profiles,
    "overload": overload,
}
PARTS = (*NULL_ENGINE_PARTS, *SERVER_PARTS)
