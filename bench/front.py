"""What serving costs beside the model: the front end's own CPU, its own delay, and what it does
under too much load.

Costs are CPU time of processes, which other work on the machine hardly moves; times are those that
a client sees. The generator is another process and counts apart. Each line has its target and a
verdict; none fails anything.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench.null_engine import null_service, serve_null
from bench.offline import GPT2_SMALL
from bench.served import Served, random_checkpoint, served
from clients.load import Length, Run, Where, Work, quantile, run
from clients.report import Report
from gpt.config import GPTConfig
from serving.request import Ask

SHARE_MAX = 0.05
TOKENS_PER_CORE_MIN = 20_000
ADDED_MS_MAX = 3.0
ITL_GAIN_MIN, TOKENS_GAIN_MIN = 0.25, 0.15
REFUSED_MS_MAX = 50.0
GROWTH_MAX = 0.1
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
    parts: tuple[str, ...] = (), sizes: Sizes = Sizes(), network: GPTConfig = GPT2_SMALL
) -> Iterator[str]:
    """The parts that are asked for; none: all."""
    parts = parts or tuple(PARTS)
    for name in parts:
        if name in ALONE:
            yield from ALONE[name](sizes)
    if any(name in SERVED for name in parts):
        with random_checkpoint(network) as model:
            for name in parts:
                if name in SERVED:
                    yield from SERVED[name](model, sizes)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


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


def tokens_per_core(sizes: Sizes) -> Iterator[str]:
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
    yield (
        f"{sizes.streams} streams, null engine: {per_core:,.0f} tokens/s per core "
        f"({1e6 * cpu_s / report.tokens:.1f} us a token, {report.tokens_per_message:.2f} tokens a "
        f"message, {report.tokens_per_s:,.0f} tokens/s; the generator's own CPU "
        f"{report.generator_cpu_s:.1f} s, the server's {cpu_s:.1f} s); "
        f"target >= {TOKENS_PER_CORE_MIN:,}: {verdict(per_core >= TOKENS_PER_CORE_MIN)}"
    )


def first_token(sizes: Sizes) -> Iterator[str]:
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
    yield (
        f"first token, p50: {report.ttft_ms.p50:.2f} ms over gRPC, {inside_ms:.2f} ms by the "
        f"engine's own submit, {added_ms:.2f} ms added; target <= {ADDED_MS_MAX:g} ms: "
        f"{verdict(added_ms <= ADDED_MS_MAX)}"
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


def share(model: Path, sizes: Sizes) -> Iterator[str]:
    """The front end's CPU against the ranks', with as many streams as run at once."""
    limits = {"running_requests_max": sizes.streams, "prove": False}
    with served(model, ["--profile", "throughput"], limits) as server:
        run(Where(server.address), _at_once(sizes, 2))
        before = server.spent
        done = run(Where(server.address), _at_once(sizes, sizes.new))
        spent = server.spent.since(before)
    report = Report.of(done)
    part = spent.front_s / max(spent.ranks_s, 1e-9)
    yield (
        f"{sizes.streams} streams, front end's CPU: {spent.front_s:.2f} s, {100 * part:.1f} % of "
        f"the ranks' {spent.ranks_s:.2f} s (generator {report.generator_cpu_s:.2f} s, "
        f"{report.tokens_per_s:,.0f} tokens/s, {report.ok} of {report.sent} well); "
        f"target <= {100 * SHARE_MAX:g} %: {verdict(part <= SHARE_MAX and report.ok > 0)}"
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


def profiles(model: Path, sizes: Sizes) -> Iterator[str]:
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
    met = quicker >= ITL_GAIN_MIN and more >= TOKENS_GAIN_MIN
    yield (
        f"at {rate:.2f} requests/s: p95 between tokens {100 * quicker:.0f} % lower, tokens/s "
        f"{100 * more:.0f} % higher; target >= {100 * ITL_GAIN_MIN:g} % and >= "
        f"{100 * TOKENS_GAIN_MIN:g} %: {verdict(met)}"
    )


def overload(model: Path, sizes: Sizes) -> Iterator[str]:
    """Far more than it can do: what is refused is refused at once, what is accepted is kept."""
    limits = {"queue_requests_max": 128, "prove": False}
    with served(model, limits=limits) as server:
        rate = _capacity(server, sizes, sizes.load_new) * sizes.over
        before = server.front_bytes
        done = run(Where(server.address), _open(sizes, rate, sizes.load_new))
        growth = server.front_bytes / before - 1
    yield from told_of_overload(done, growth)


def told_of_overload(done: Run, growth: float) -> list[str]:
    report = Report.of(done)
    lost = [one for one in done.sent if not one.ok and one.code != "RESOURCE_EXHAUSTED"]
    # From when it was sent: what the generator was late by is not the server's.
    refused = [one.end - one.begun for one in done.sent if one.code == "RESOURCE_EXHAUSTED"]
    p99_ms = 1e3 * quantile(refused, 0.99) if refused else 0.0
    return [
        f"overload, {report.sent:,} calls in {done.seconds:.0f} s: {report.ok:,} answered, "
        f"{len(refused):,} refused within {p99_ms:.1f} ms (p99); target < {REFUSED_MS_MAX:g} ms: "
        f"{verdict(p99_ms < REFUSED_MS_MAX)}",
        f"overload, accepted and lost or late: {len(lost)}; target 0: {verdict(not lost)}",
        f"overload, front end's memory grew by {100 * growth:.1f} %; target <= "
        f"{100 * GROWTH_MAX:g} %: {verdict(growth <= GROWTH_MAX)}",
        *(f"  {warning}" for warning in report.warnings),
    ]


ALONE: dict[str, Callable[[Sizes], Iterator[str]]] = {
    "tokens": tokens_per_core,
    "first": first_token,
}
SERVED: dict[str, Callable[[Path, Sizes], Iterator[str]]] = {
    "share": share,
    "profiles": profiles,
    "overload": overload,
}
PARTS = (*ALONE, *SERVED)
