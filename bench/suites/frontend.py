"""What serving costs beside the model: the front end's own CPU, its own delay, and what it does
under too much load.

Costs are CPU time of processes, which other work on the machine hardly moves; times are those that
a client sees. The generator is another process and counts apart. Each line has its target and a
verdict; none fails anything.
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
from bench.harness.record import Item
from bench.harness.server_process import Served, random_checkpoint, served
from bench.harness.targets import judged
from bench.suites.null_engine import null_service, serve_null
from clients.load.generator import Length, Run, Where, Work, quantile, run
from clients.load.report import Report
from gpt.config import GPTConfig
from serving.request import Ask

WAIT_S = 120.0


@dataclass(frozen=True)
class Sizes:
    """How much is asked; a test asks for less."""

    streams: int = 256
    new: int = 64  # Tokens of each answer of a model,
    null_new: int = 400  # and of the null engine,
    null_step_s: float = 0.0128  # which so makes 20,000 a second.
    prompt: int = 32
    calls: int = 200  # One after another, to time the first token.
    load_s: float = 60.0
    load_new: int = 32
    steady_new: int = 96  # Of the load under the profiles: mostly decoding.
    over: float = 10.0  # Times capacity.


def lines(
    parts: Sequence[str] = (), sizes: Sizes = Sizes(), network: GPTConfig = GPT2_SMALL
) -> Iterator[Item]:
    """The parts that are asked for; none: all."""
    parts = parts or PARTS
    for name in parts:
        if name in ALONE:
            yield from ALONE[name](sizes)
    if any(name in SERVED for name in parts):
        with random_checkpoint(network) as model:
            for name in parts:
                if name in SERVED:
                    yield from SERVED[name](model, sizes)


# ------------------------------------------------------------------------------- without a model


@contextmanager
def null_server(step_s: float, streams: int) -> Iterator[tuple[str, Connection]]:
    """Where it listens, and what is asked for its CPU time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_null, args=(theirs, step_s, streams), daemon=True)
    process.start()
    try:
        if not ours.poll(WAIT_S):
            raise RuntimeError(f"the null server did not come up within {WAIT_S:g} s")
        yield f"127.0.0.1:{ours.recv()}", ours
    finally:
        ours.send(False)
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()


def tokens_per_core(sizes: Sizes) -> Iterator[Item]:
    """Streamed tokens for each second of the server's CPU; the null engine's own is taken off."""

    def spent(pipe: Connection) -> float:
        pipe.send(True)
        whole_s, null_s = pipe.recv()
        return float(whole_s - null_s)

    with null_server(sizes.null_step_s, sizes.streams) as (address, pipe):
        run(Where(address), _at_once(sizes, 8))
        before = spent(pipe)
        done = run(Where(address), _at_once(sizes, sizes.null_new))
        cpu_s = spent(pipe) - before
    report = Report.of(done)
    per_core = report.tokens / cpu_s
    yield judged(
        "front/tokens",
        per_core,
        f"{sizes.streams} streams, null engine, {per_core:,.0f} tokens/s per core "
        f"({1e6 * cpu_s / report.tokens:.1f} us a token, {report.tokens_per_message:.2f} tokens a "
        f"message, {report.tokens_per_s:,.0f} tokens/s; the generator's own CPU "
        f"{report.generator_cpu_s:.1f} s, the server's {cpu_s:.1f} s)",
    )


def first_token(sizes: Sizes) -> Iterator[Item]:
    """A call over gRPC, and the same through the engine in process: what is between them."""
    with null_server(0.0, 4) as (address, _):
        work = Work(
            requests_max=sizes.calls,
            warmup_requests=8,
            prompt=Length("fixed", sizes.prompt, sizes.prompt),
            new=Length("fixed", 2, 2),
        )
        report = Report.of(run(Where(address), work))
    inside_ms = 1e3 * statistics.median(asyncio.run(_inside(sizes)))
    assert report.ttft_ms is not None
    added_ms = report.ttft_ms.p50 - inside_ms
    yield judged(
        "front/first",
        added_ms,
        f"p50 {report.ttft_ms.p50:.2f} ms over gRPC, {inside_ms:.2f} ms by the engine's own "
        f"submit, {added_ms:.2f} ms added",
    )


async def _inside(sizes: Sizes) -> list[float]:
    service, _ = null_service(0.0, 4)
    try:
        request = service.admission.admit(Ask((7,) * sizes.prompt, max_new_tokens=2))
        took: list[float] = []
        for _ in range(sizes.calls):
            begun = time.perf_counter()
            stream = service.engine.submit(request)
            await anext(stream)
            took.append(time.perf_counter() - begun)
            async for _ in stream:
                pass
            stream.close()
        return took
    finally:
        service.close()


def _at_once(sizes: Sizes, new: int) -> Work:
    return Work(
        concurrency=sizes.streams,
        requests_max=sizes.streams,
        warmup_requests=0,
        prompt=Length("fixed", sizes.prompt, sizes.prompt),
        new=Length("fixed", new, new),
    )


# ------------------------------------------------------------------------------------ with a model


def share(model: Path, sizes: Sizes) -> Iterator[Item]:
    """The front end's CPU against the ranks', with as many streams as run at once."""
    limits = {"running_requests_max": sizes.streams, "prove": False}
    with served(model, ["--profile", "throughput"], limits) as server:
        run(Where(server.address), _at_once(sizes, 2))
        before = server.spent
        done = run(Where(server.address), _at_once(sizes, sizes.new))
        spent = server.spent.since(before)
    report = Report.of(done)
    part = spent.front_s / max(spent.ranks_s, 1e-9)
    # Without an answer it has cost nothing, which is no merit.
    yield judged(
        "front/share",
        100 * part if report.ok else math.inf,
        f"{sizes.streams} streams, {spent.front_s:.2f} s, {100 * part:.1f} % of the ranks' "
        f"{spent.ranks_s:.2f} s (generator {report.generator_cpu_s:.2f} s, "
        f"{report.tokens_per_s:,.0f} tokens/s, {report.ok} of {report.sent} well)",
    )


def _capacity(server: Served, sizes: Sizes, new: int) -> float:
    """Requests/s of a closed loop that keeps it busy."""
    streams = min(sizes.streams, 64)
    lengths = Length("fixed", sizes.prompt, sizes.prompt), Length("fixed", new, new)
    work = Work(concurrency=streams, requests_max=4 * streams, prompt=lengths[0], new=lengths[1])
    return Report.of(run(Where(server.address), work)).requests_per_s


def _open(sizes: Sizes, rate: float, new: int) -> Work:
    return Work(
        rate=rate,
        requests_max=None,
        duration_s=sizes.load_s,
        prompt=Length("fixed", sizes.prompt, sizes.prompt),
        new=Length("fixed", new, new),
        seed=1,
    )


def _steady(done: Run, sizes: Sizes) -> float:
    """Tokens/s while the load lasts, but for its first third: neither filling up nor emptying."""
    since = sizes.load_s / 3
    told = [message for one in done.sent for message in one.messages]
    tokens = sum(count for when, count in told if since < when <= sizes.load_s)
    return max(1, tokens) / (sizes.load_s - since)


def profiles(model: Path, sizes: Sizes) -> Iterator[Item]:
    """One open-loop load near the capacity, under both profiles."""
    told: dict[str, Report] = {}
    steady: dict[str, float] = {}
    rate = 0.0
    for name in ("throughput", "latency"):
        with served(model, ["--profile", name], {"prove": False}) as server:
            rate = rate or _capacity(server, sizes, sizes.steady_new)
            done = run(Where(server.address), _open(sizes, rate, sizes.steady_new))
            told[name], steady[name] = Report.of(done), _steady(done, sizes)
    heads = "".join(
        f"{head:>10}" for head in ("tokens/s", "itl p50", "p95", "ttft p50", "p95", "refused")
    )
    yield f"{'profile':12}{heads}  (ms)"
    for name, one in told.items():
        assert one.itl_ms is not None and one.ttft_ms is not None
        yield (
            f"{name:12}{steady[name]:10,.0f}{one.itl_ms.p50:10.1f}{one.itl_ms.p95:10.1f}"
            f"{one.ttft_ms.p50:10.1f}{one.ttft_ms.p95:10.1f}{one.sent - one.ok:10,}"
        )
    fast, much = told["latency"], told["throughput"]
    assert fast.itl_ms is not None and much.itl_ms is not None
    quicker = 1 - fast.itl_ms.p95 / much.itl_ms.p95
    more = steady["throughput"] / steady["latency"] - 1
    yield judged(
        "front/profiles-itl",
        100 * quicker,
        f"{100 * quicker:.0f} %, at {rate:.2f} requests/s",
        samples={name: [one.itl_ms.p95] for name, one in told.items() if one.itl_ms is not None},
    )
    yield judged(
        "front/profiles-tokens",
        100 * more,
        f"{100 * more:.0f} %, at {rate:.2f} requests/s",
        samples={name: [speed] for name, speed in steady.items()},
    )


def overload(model: Path, sizes: Sizes) -> Iterator[Item]:
    """Far more than it can do: what is refused is refused at once, what is accepted is kept."""
    limits = {"queue_requests_max": 128, "prove": False}
    with served(model, limits=limits) as server:
        rate = _capacity(server, sizes, sizes.load_new) * sizes.over
        before = server.front_bytes
        done = run(Where(server.address), _open(sizes, rate, sizes.load_new))
        growth = server.front_bytes / before - 1
    yield from told_of_overload(done, growth)


def told_of_overload(done: Run, growth: float) -> list[Item]:
    report = Report.of(done)
    lost = [one for one in done.sent if not one.ok and one.code != "RESOURCE_EXHAUSTED"]
    # From when it was sent: what the generator was late by is not the server's.
    refused = [one.end - one.begun for one in done.sent if one.code == "RESOURCE_EXHAUSTED"]
    p99_ms = 1e3 * quantile(refused, 0.99) if refused else 0.0
    return [
        judged(
            "front/refused",
            p99_ms,
            f"{report.sent:,} calls in {done.seconds:.0f} s, {report.ok:,} answered, "
            f"{len(refused):,} refused within {p99_ms:.1f} ms",
        ),
        judged("front/lost", len(lost)),
        judged("front/growth", 100 * growth),
        *(f"  {warning}" for warning in report.warnings),
    ]


ALONE: dict[str, Callable[[Sizes], Iterator[Item]]] = {
    "tokens": tokens_per_core,
    "first": first_token,
}
SERVED: dict[str, Callable[[Path, Sizes], Iterator[Item]]] = {
    "share": share,
    "profiles": profiles,
    "overload": overload,
}
PARTS = (*ALONE, *SERVED)
