"""Replicas behind a real Envoy: lost replicas lose no call, and adapters stay on their replica."""

import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import openai
import pytest

from bench.harness.envoy_process import CONFIG
from clients.client import Client, Options, Retries
from protos.preamble.v1 import admin_pb2, admin_pb2_grpc
from tests.support.envoy import envoy, envoy_binary
from tests.support.replicas import Replicas
from tests.support.servers import WAIT_S, write_adapter, write_checkpoint

PROMPTS = 8
NEW_TOKENS = 48
CALLERS = 8  # Of unary calls, and of streams.
HTTP_CALLERS = 2
ADAPTERS = 200
ROWS = 64
START_PAUSE_S = 1.0  # Before each call while a replica starts, which needs the cores too.
TEXT_TOKENS = 48  # Of a prompt; no two prompts are equal.
ADAPTER_CALLERS = 32
# With so many, Envoy's bound of 1.5 times the mean allows 25 of the calls on one replica.
ZIPF_CALLERS = 64
LARGEST_SHARE_MAX = 1.6  # Of the prompt tokens, relative to the mean of the replicas.
PROMPT_TOKENS = "preamble_engine_prompt_tokens_total"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    envoy_binary()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def replicas(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Four replicas, each with memory for a third of the adapters, and KV for a half of them."""
    folder = tmp_path_factory.mktemp("servers")
    adapters = folder / "adapters"
    adapters.mkdir()
    rng = random.Random(0)
    for number in range(ADAPTERS):
        ids = [rng.randrange(3, 600) for _ in range(ROWS)]
        write_adapter(adapters / f"a{number}.safetensors", checkpoint, ids)
    settings = {
        "adapters": str(adapters),
        "adapter_rows_max": 4096,
        "kv_tokens_max": 6144,
        "drain_s": 30.0,
    }
    with Replicas(checkpoint, folder, 4, **settings) as replicas:
        yield replicas


@dataclass
class Callers:
    """Callers that repeat the same requests until they are stopped, and compare the answers."""

    address: str
    expected: list[list[int]]
    pause_s: float = 0.0  # Before each call.
    stopped: threading.Event = field(default_factory=threading.Event)
    calls: int = 0
    resumed: int = 0
    failures: list[str] = field(default_factory=list)

    def generate(self) -> None:
        with Client(self.address, WAIT_S) as client:
            for number in self._numbers():
                answer = client.generate(f"prompt {number}", _options(number))
                self._record(number, answer.token_ids)

    def stream(self) -> None:
        with Client(self.address, WAIT_S, retries=Retries(attempts_max=8)) as client:
            for number in self._numbers():
                token_ids: list[int] = []
                for piece in client.stream(f"prompt {number}", _options(number)):
                    token_ids += piece.token_ids
                    self.resumed += bool(piece.resumed_at)
                self._record(number, token_ids)

    def generate_http(self) -> None:
        """Non-streaming calls of an OpenAI client, which does not repeat calls."""
        with openai.OpenAI(
            base_url=f"http://{self.address}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        ) as client:
            for number in self._numbers():
                answer = client.completions.create(
                    model="checkpoint",
                    prompt=f"prompt {number}",
                    max_tokens=NEW_TOKENS,
                    temperature=float(number % 2),
                    seed=number,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                self._record(number, getattr(answer.choices[0], "token_ids"))  # noqa: B009

    def _numbers(self) -> Iterator[int]:
        rng = random.Random(threading.get_ident())
        while not self.stopped.wait(self.pause_s):
            yield rng.randrange(PROMPTS)

    def _record(self, number: int, token_ids: list[int]) -> None:
        self.calls += 1
        if token_ids != self.expected[number]:
            self.failures.append(f"prompt {number}: {token_ids}")


def _options(number: int) -> Options:
    """Greedy options for every other prompt, and sampled ones for the rest."""
    temperature = float(number % 2)
    return Options(
        max_new_tokens=NEW_TOKENS, temperature=temperature, seed=number, ignore_ends=True
    )


def _call_while(
    address: str, replicas: Replicas, events: int, number: int, start_pause_s: float = START_PAUSE_S
) -> Callers:
    """Send a signal to a replica and start it again, `events` times, under all callers."""
    with replicas.servers[0].client() as client:
        answers = [client.generate(f"prompt {n}", _options(n)) for n in range(PROMPTS)]
    callers = Callers(address, [answer.token_ids for answer in answers])
    rng = random.Random(0)
    with ThreadPoolExecutor(2 * CALLERS + HTTP_CALLERS) as pool:
        running = [pool.submit(callers.generate) for _ in range(CALLERS)]
        running += [pool.submit(callers.stream) for _ in range(CALLERS)]
        running += [pool.submit(callers.generate_http) for _ in range(HTTP_CALLERS)]
        try:
            for event in range(events):
                time.sleep(rng.uniform(1.0, 2.0))
                index = event % len(replicas.servers) if number == signal.SIGTERM else None
                index = rng.randrange(len(replicas.servers)) if index is None else index
                replicas.servers[index].stop(number)
                callers.pause_s = start_pause_s
                replicas.restart(index)
                callers.pause_s = 0.0
                time.sleep(3.0)  # Envoy finds it healthy again.
        finally:
            callers.stopped.set()
        for call in running:
            call.result()
    return callers


@pytest.mark.slow
def test_the_configuration_is_valid() -> None:
    arguments = [str(envoy_binary()), "--mode", "validate", "-c", str(CONFIG)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT_S)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_drain_does_not_reach_a_replica_by_chance(replicas: Replicas, tmp_path: Path) -> None:
    with envoy(replicas.servers, tmp_path) as address, grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=WAIT_S)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert all(server.get("/health/ready")[0] == 200 for server in replicas.servers)


@pytest.mark.slow
def test_a_restart_of_each_replica_loses_no_call(replicas: Replicas, tmp_path: Path) -> None:
    with envoy(replicas.servers, tmp_path) as address:
        callers = _call_while(address, replicas, 4, signal.SIGTERM)
    assert not callers.failures and callers.calls > 50


@pytest.mark.slow
def test_kill_9_of_a_replica_loses_no_call(replicas: Replicas, tmp_path: Path) -> None:
    with envoy(replicas.servers, tmp_path) as address:
        callers = _call_while(address, replicas, 3, signal.SIGKILL)
    assert not callers.failures and callers.calls > 50
    assert callers.resumed > 0


@pytest.mark.soak
def test_ten_times_kill_9_loses_no_call(replicas: Replicas, tmp_path: Path) -> None:
    with envoy(replicas.servers, tmp_path) as address:
        callers = _call_while(address, replicas, 10, signal.SIGKILL, start_pause_s=0.0)
    print(f"{callers.calls} calls, {callers.resumed} resumed")
    assert not callers.failures and callers.resumed > 0


@pytest.mark.parametrize(
    ("callers", "calls"),
    [
        # One call at a time: no replica is full, so the choices do not depend on times.
        pytest.param(1, 3 * ADAPTERS, marks=pytest.mark.slow),
        pytest.param(ADAPTER_CALLERS, 6 * ADAPTERS, marks=pytest.mark.soak),
    ],
)
def test_adapters_stay_on_their_replicas(
    replicas: Replicas, tmp_path: Path, callers: int, calls: int
) -> None:
    """Ring hashing finds more prefixes in the cache, and loads adapters less often."""
    hit_rates, loads = {}, {}
    for policy in ("ROUND_ROBIN", ""):
        with envoy(replicas.servers, tmp_path, policy) as address:
            _call_adapters(address, calls // 2, seed=1, callers=callers)  # Warm up.
            before = _counters(replicas)
            _call_adapters(address, calls, seed=2, callers=callers)
            hits, prompts, loaded = (
                after - first for after, first in zip(_counters(replicas), before, strict=True)
            )
        hit_rates[policy], loads[policy] = hits / prompts, loaded
    print(f"hit rates {hit_rates}, adapter loads {loads}")
    assert hit_rates[""] >= 2.3 * hit_rates["ROUND_ROBIN"]
    assert loads[""] <= loads["ROUND_ROBIN"] / 5


@pytest.mark.soak
def test_a_much_used_adapter_does_not_overload_its_replica(
    replicas: Replicas, tmp_path: Path
) -> None:
    """A sixth of the calls is for one adapter; the bound on the load spreads them.

    On a busy machine, where some replicas are slower than others, the others get more calls.
    """
    with envoy(replicas.servers, tmp_path) as address:
        before = [server.metric(PROMPT_TOKENS) for server in replicas.servers]
        _call_adapters(address, 6 * ADAPTERS, seed=3, exponent=1.0, callers=ZIPF_CALLERS)
        after = [server.metric(PROMPT_TOKENS) for server in replicas.servers]
    tokens = [last - first for first, last in zip(before, after, strict=True)]
    share = max(tokens) * len(tokens) / sum(tokens)
    print(f"largest share: {share:.2f} times the mean")
    assert share <= LARGEST_SHARE_MAX


def _counters(replicas: Replicas) -> list[float]:
    names = ("engine_cached_tokens_total", "engine_prompt_tokens_total", "adapter_loads_total")
    return [replicas.total(f"preamble_{name}") for name in names]


def _call_adapters(
    address: str, calls: int, seed: int, exponent: float = 0.0, *, callers: int
) -> None:
    """Call adapters by Zipf's law; with exponent 0, all equally often."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 600) for _ in range(TEXT_TOKENS)] for _ in range(calls)]
    weights = [1 / rank**exponent for rank in range(1, ADAPTERS + 1)]
    names = [f"a{number}" for number in rng.choices(range(ADAPTERS), weights, k=calls)]
    with Client(address, WAIT_S) as client, ThreadPoolExecutor(callers) as pool:

        def call(prompt: list[int], name: str) -> None:
            client.generate(prompt, Options(max_new_tokens=2, adapter=name))

        list(pool.map(call, prompts, names))
