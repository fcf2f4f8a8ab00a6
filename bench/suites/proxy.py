"""Proxy benchmark: the requests per second of replicas behind a proxy, and without one.

A generator sends streaming calls to four replicas of `preamble serve` directly, by the round robin
of its gRPC channel, or to Envoy, which distributes them by round robin as well. The distribution
must be the same on both sides: with a fixed number of calls for each replica, the requests of a
replica start and end together, and its batches are larger. A replica in Ray is compared with a
server of its own, through both proxies of Ray Serve, the Python proxy and HAProxy. The sides run in
turn. All processes share the machine, so that the CPU time of a proxy is part of the result. The
demo model is so small that the front ends, the generator and the proxy use most of the CPU time: it
shows the worst case.
"""

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bench.harness.envoy_process import CONFIG, ROOT, envoy_process, find_envoy, set_endpoints
from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.ray_cluster import RayCluster, find_ray
from bench.harness.record import SuiteOutput
from bench.harness.server_process import running_server, saved_random_checkpoint
from bench.harness.targets import Row, measured_row, not_run_row
from clients.client import CallError, Client
from clients.load.generator import LengthSampler, LoadSpec, ServerEndpoint, run_load
from clients.load.percentiles import quantile
from gpt.config import GPTConfig

DEMO_MODEL = ROOT / "examples/demo/checkpoint"
PARTS = ("gpt2", "demo", "ray")
READY_S = 30.0  # Time limit until a proxy answers.
# The environment variables of Ray and the flags of `deploy` that select the proxy of Serve.
RAY_PROXIES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "Python proxy": ({}, ()),
    # One thread, as for Envoy.
    "HAProxy": (
        {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_NBTHREAD": "1"},
        ("--haproxy",),
    ),
}


@dataclass(frozen=True)
class ProxySizes:
    """Sizes of the loads; tests use smaller ones."""

    rounds: int = 5
    replicas: int = 4
    calls: int = 4  # In flight for each replica.
    prompt_tokens: int = 32
    new_tokens: int = 32
    # Requests of a round, by model.
    requests: Mapping[str, int] = field(
        default_factory=lambda: {"gpt2": 96, "demo": 600, "ray": 400}
    )
    ray_calls: int = 32  # In flight for the replica in Ray.


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
        if name == "ray":
            yield from _ray_part(sizes)
            continue
        binary = find_envoy()
        if binary is None:
            yield not_run_row(f"proxy/{name}", "Envoy is not installed; run: make clients-tools")
        elif name == "gpt2":
            with saved_random_checkpoint(network) as model:
                yield from _envoy_part(name, model, binary, sizes)
        else:
            yield from _envoy_part(name, DEMO_MODEL, binary, sizes)


def _envoy_part(name: str, model: Path, binary: Path, sizes: ProxySizes) -> Iterator[SuiteOutput]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        stack.enter_context(_limited_threads())
        servers = [stack.enter_context(running_server(model)) for _ in range(sizes.replicas)]
        addresses = [server.address for server in servers]
        config = yaml.safe_load(CONFIG.read_text())
        set_endpoints(config, {"grpc": addresses, "http": addresses}, "ROUND_ROBIN")
        address = stack.enter_context(envoy_process(binary, config, folder, _free_port()))
        sides = {"direct": "ipv4:" + ",".join(addresses), "Envoy": address}
        rounds = yield from _run_rounds(name, sides, sizes, sizes.replicas * sizes.calls)
    yield _ratio_row(name, rounds, "Envoy")


def _ray_part(sizes: ProxySizes) -> Iterator[SuiteOutput]:
    python = find_ray()
    if python is None:
        yield not_run_row("proxy/ray-haproxy", "Ray is not installed; run: make clients-tools")
        return
    with ExitStack() as stack:
        stack.enter_context(_limited_threads())
        sides = {"direct": stack.enter_context(running_server(DEMO_MODEL)).address}
        for proxy, (variables, flags) in RAY_PROXIES.items():
            sides[proxy] = stack.enter_context(_ray_replica(python, variables, flags))
        rounds = yield from _run_rounds("ray", sides, sizes, sizes.ray_calls)
    yield f"ray, Python proxy: {_ratio(rounds, 'Python proxy'):.2f} x direct"
    yield _ratio_row("ray-haproxy", rounds, "HAProxy")


@contextmanager
def _ray_replica(
    python: Path, variables: Mapping[str, str], proxy_flags: Sequence[str]
) -> Iterator[str]:
    """Deploy a replica of the demo model in a cluster of its own; yield the proxy's address."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        cluster = RayCluster(python, folder, _free_port(), variables, head_cpus=1)
        stack.enter_context(cluster)
        port, http_port = _free_port(), _free_port()
        flags = ("--insecure", "--port", str(port), "--http-port", str(http_port))
        process = cluster.run("deploy", DEMO_MODEL, *flags, *proxy_flags)
        if process.returncode:
            raise RuntimeError(process.stdout + process.stderr)
        yield f"127.0.0.1:{port}"


def _run_rounds(
    name: str, sides: Mapping[str, str], sizes: ProxySizes, concurrency: int
) -> Generator[SuiteOutput, None, dict[str, list[Round]]]:
    """Load the gRPC target of each side in turn; return the rounds of each side."""
    rounds: dict[str, list[Round]] = {side: [] for side in sides}
    for target in sides.values():
        _wait_until_ready(target)
    for number in range(sizes.rounds + 1):
        for side, target in sides.items():
            figures = _run_round(target, sizes, concurrency, sizes.requests[name], number)
            if number:  # The first round is for warm-up.
                rounds[side].append(figures)
                yield f"{name}, {side}: {figures}"
    return rounds


def _ratio_row(name: str, rounds: Mapping[str, Sequence[Round]], proxied: str) -> Row:
    sides = {side: rounds[side] for side in ("direct", proxied)}
    rates = {side: [figures.requests_per_s for figures in sides[side]] for side in sides}
    ttfts = {side: [figures.ttft_ms for figures in sides[side]] for side in sides}
    summary = ", ".join(
        f"{side} {statistics.median(rates[side]):.1f} requests/s and TTFT "
        f"{statistics.median(ttfts[side]):.1f} ms"
        for side in sides
    )
    return measured_row(f"proxy/{name}", _ratio(rounds, proxied), summary, samples=rates)


def _ratio(rounds: Mapping[str, Sequence[Round]], proxied: str) -> float:
    """Return the median ratio of the requests per second of a round, proxied to direct."""
    return statistics.median(
        with_proxy.requests_per_s / direct.requests_per_s
        for direct, with_proxy in zip(rounds["direct"], rounds[proxied], strict=True)
    )


def _run_round(target: str, sizes: ProxySizes, concurrency: int, requests: int, seed: int) -> Round:
    spec = LoadSpec(
        concurrency=concurrency,
        requests_max=requests,
        warmup_requests=0,
        prompt_length=LengthSampler.parse(str(sizes.prompt_tokens)),
        output_length=LengthSampler.parse(str(sizes.new_tokens)),
        seed=seed,
    )
    load = run_load(ServerEndpoint(target), spec)
    failed = [call for call in load.calls if call.code != "OK" or call.first_token_s is None]
    assert not failed, f"{len(failed)} calls failed: {failed[0]}"
    ttfts_s = [call.ttft_s for call in load.calls if call.ttft_s is not None]
    return Round(len(load.calls) / load.seconds, 1000 * quantile(ttfts_s, 0.5))


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


def _wait_until_ready(target: str) -> None:
    end = time.monotonic() + READY_S
    with Client(target, 1.0) as client:
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
