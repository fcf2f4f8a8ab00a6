"""Proxy benchmark: the requests per second of four replicas behind Envoy, and without a proxy.

The load is the same on both sides: generators, one for each replica, whose streaming calls go to
the replicas themselves, or all to Envoy, which distributes them in turn. The two sides run in turn.
All processes share the machine, so that the CPU time of Envoy is part of the result. The demo model
is so small that the front ends, the generators and Envoy use most of the CPU time: it shows the
worst case.
"""

import asyncio
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bench.harness.envoy_process import CONFIG, ROOT, envoy_process, find_envoy, set_endpoints
from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.record import SuiteOutput
from bench.harness.server_process import running_server, saved_random_checkpoint
from bench.harness.targets import measured_row, not_run_row
from clients.client import CallError, Client
from clients.load.generator import LengthSampler, LoadSpec, ServerEndpoint, run_load_async
from clients.load.percentiles import quantile
from gpt.config import GPTConfig

DEMO_MODEL = ROOT / "examples/demo/checkpoint"
PARTS = ("gpt2", "demo")
READY_S = 30.0  # Time limit for the start of Envoy.


@dataclass(frozen=True)
class ProxySizes:
    """Sizes of the loads; tests use smaller ones."""

    rounds: int = 5
    replicas: int = 4
    calls: int = 4  # In flight for each replica.
    prompt_tokens: int = 32
    new_tokens: int = 32
    # Requests of a round for each replica, by model.
    requests: Mapping[str, int] = field(default_factory=lambda: {"gpt2": 24, "demo": 150})


@dataclass(frozen=True)
class Round:
    """The figures of one load."""

    requests_per_s: float
    ttft_ms: float  # The median.

    def __str__(self) -> str:
        return f"{self.requests_per_s:.1f} requests/s, TTFT {self.ttft_ms:.1f} ms"


def run_suite(
    parts: Sequence[str] = (),
    sizes: ProxySizes = ProxySizes(),
    network: GPTConfig = GPT2_SMALL,
) -> Iterator[SuiteOutput]:
    """Run the selected parts, or all parts if none is selected."""
    for name in parts or PARTS:
        binary = find_envoy()
        if binary is None:
            yield not_run_row(f"proxy/{name}", "Envoy is not installed; run: make clients-tools")
        elif name == "gpt2":
            with saved_random_checkpoint(network) as model:
                yield from _compare(name, model, binary, sizes)
        else:
            yield from _compare(name, DEMO_MODEL, binary, sizes)


def _compare(name: str, model: Path, binary: Path, sizes: ProxySizes) -> Iterator[SuiteOutput]:
    rounds: dict[str, list[Round]] = {"direct": [], "Envoy": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        stack.enter_context(_limited_threads())
        servers = [stack.enter_context(running_server(model)) for _ in range(sizes.replicas)]
        addresses = [server.address for server in servers]
        config = yaml.safe_load(CONFIG.read_text())
        set_endpoints(config, {"grpc": addresses, "http": addresses}, "ROUND_ROBIN")
        address = stack.enter_context(envoy_process(binary, config, folder, _free_port()))
        _wait_until_ready(address)
        for number in range(sizes.rounds + 1):
            for side, targets in (("direct", addresses), ("Envoy", [address] * sizes.replicas)):
                figures = asyncio.run(_run_round(targets, sizes, sizes.requests[name], number))
                if number:  # The first round is for warm-up.
                    rounds[side].append(figures)
                    yield f"{name}, {side}: {figures}"
    rates = {side: [figures.requests_per_s for figures in rounds[side]] for side in rounds}
    ratios = [
        proxied / direct for direct, proxied in zip(rates["direct"], rates["Envoy"], strict=True)
    ]
    summary = ", ".join(
        f"{side} {statistics.median(rates[side]):.1f} requests/s and TTFT "
        f"{statistics.median(figures.ttft_ms for figures in rounds[side]):.1f} ms"
        for side in rounds
    )
    yield measured_row(f"proxy/{name}", statistics.median(ratios), summary, samples=rates)


async def _run_round(
    addresses: Sequence[str], sizes: ProxySizes, requests: int, seed: int
) -> Round:
    start = time.monotonic()
    runs = await asyncio.gather(
        *(
            run_load_async(
                ServerEndpoint(address),
                LoadSpec(
                    concurrency=sizes.calls,
                    requests_max=requests,
                    warmup_requests=0,
                    prompt_length=LengthSampler.parse(str(sizes.prompt_tokens)),
                    output_length=LengthSampler.parse(str(sizes.new_tokens)),
                    seed=seed * len(addresses) + index,
                ),
            )
            for index, address in enumerate(addresses)
        )
    )
    seconds = time.monotonic() - start
    calls = [call for run in runs for call in run.calls]
    failed = [call for call in calls if call.code != "OK" or call.first_token_s is None]
    assert not failed, f"{len(failed)} calls failed: {failed[0]}"
    ttfts_s = [(call.first_token_s or 0.0) - call.due_s for call in calls]
    return Round(len(calls) / seconds, 1000 * quantile(ttfts_s, 0.5))


@contextmanager
def _limited_threads() -> Iterator[None]:
    """Limit the threads of child processes, which would wait for each other on a small machine."""
    former = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = former


def _wait_until_ready(address: str) -> None:
    end = time.monotonic() + READY_S
    with Client(address, 1.0) as client:
        while True:
            try:
                client.info()
                return
            except CallError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
