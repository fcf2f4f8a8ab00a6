"""Replicas in a real Ray cluster of several nodes on this machine, through the proxies of Serve.

The slow tests use Serve's Python proxy; the soak tests repeat them with HAProxy.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from bench.harness.ray_cluster import RayCluster
from clients.adapter_client import AdapterCalls
from clients.client import CallError, Client, Options, Piece, Retries
from tests.support.client_environments import interpreter
from tests.support.servers import (
    WAIT_S,
    eventually,
    free_ports,
    serving,
    write_adapter,
    write_checkpoint,
)

PROMPTS = ["hello", "a second prompt", "one more"]
ANSWER = Options(max_new_tokens=24, temperature=1.0, seed=7, ignore_ends=True)
# Times on a quiet machine, and the factor by which a busy one may exceed them.
READY_S, RESTART_S, BUSY = 40.0, 15.0, 5.0
PAUSE_S = 0.2  # Of callers while replicas start, which need the cores too.
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"  # Of the nodes; `deploy` has the flag --haproxy.
ADAPTERS = 15  # Odd: two replicas do not have the same number of them.


@dataclass(frozen=True)
class Ports:
    """The ports of the proxy on the head, and on the other nodes, which share one."""

    head: int
    head_http: int
    worker: int


@pytest.fixture(scope="module")
def ports() -> Ports:
    return Ports(*free_ports(3))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="python-proxy", marks=pytest.mark.slow),
        pytest.param({HAPROXY_VARIABLE: "1"}, id="haproxy", marks=pytest.mark.soak),
    ],
)
def cluster(
    request: pytest.FixtureRequest, ports: Ports, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayCluster]:
    python = interpreter("ray")
    *_, port, worker_http = free_ports(5)
    variables = {
        "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(ports.worker),
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(worker_http),
        **request.param,
    }
    with RayCluster(python, tmp_path_factory.mktemp("ray"), port, variables) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The answers of one process."""
    with serving(checkpoint) as server, server.client() as client:
        return [client.generate(prompt, ANSWER).token_ids for prompt in PROMPTS]


@dataclass
class Nodes:
    """The cluster's nodes for ranks, each with one CPU.

    The next test uses the nodes of the last one: each start takes seconds of CPU time. Therefore
    tests that need more nodes come later.
    """

    cluster: RayCluster
    names: list[str] = field(default_factory=list)

    def resize(self, count: int) -> None:
        while len(self.names) < count:
            self.add()
        while len(self.names) > count:
            self.remove()

    def add(self) -> None:
        self.names.append(self.cluster.add_node(CPU=1))

    def remove(self) -> None:
        """Kill all processes of the oldest node."""
        self.cluster.remove_node(self.names.pop(0))


@pytest.fixture(scope="module")
def nodes(cluster: RayCluster) -> Nodes:
    return Nodes(cluster)


@contextmanager
def deployed(
    cluster: RayCluster, ports: Ports, checkpoint: Path, *flags: str | Path
) -> Iterator["subprocess.CompletedProcess[str]"]:
    """A deployment, removed after the block."""
    try:
        yield deploy(cluster, ports, checkpoint, *flags)
    finally:
        assert cluster.run("remove", "preamble").returncode == 0


def deploy(
    cluster: RayCluster, ports: Ports, checkpoint: Path, *flags: str | Path
) -> "subprocess.CompletedProcess[str]":
    settings = cluster.folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({"step_timeout_s": 60.0, "drain_s": 60.0}))
    words: list[str | Path] = ["deploy", checkpoint, "--dtype", "float64"]
    if "--config" not in flags:
        words += ["--config", settings, "--insecure"]
    words += ["--port", str(ports.head), "--http-port", str(ports.head_http)]
    if HAPROXY_VARIABLE in cluster.environment:
        words.append("--haproxy")
    return cluster.run(*words, *flags)


def client_of(
    port: int, *, token: str | None = None, attempts: int = 1, application: str = ""
) -> Client:
    retries = Retries(attempts_max=attempts)
    metadata = {"application": application} if application else {}
    return Client(f"127.0.0.1:{port}", WAIT_S, token=token, retries=retries, metadata=metadata)


@dataclass
class Callers:
    """Callers that repeat calls until they are stopped, and compare the answers."""

    port: int
    expected: list[list[int]]
    attempts: int = 1  # 1: each lost call is a failure.
    streams: bool = True  # Every second caller streams.
    pause_s: float = PAUSE_S  # After each call.
    calls: int = 0
    failures: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, callers: int) -> Iterator["Callers"]:
        with ThreadPoolExecutor(callers) as pool:
            running = [pool.submit(self._repeat, number) for number in range(callers)]
            try:
                yield self
            finally:
                self.stopped.set()
                for call in running:
                    call.result()

    def wait_for_calls(self, count: int) -> None:
        target = self.calls + count
        eventually(lambda: self.calls >= target, BUSY * WAIT_S)

    def _repeat(self, number: int) -> None:
        with client_of(self.port, attempts=self.attempts) as client:
            while not self.stopped.is_set():
                index = (number + self.calls) % len(PROMPTS)
                try:
                    if self.streams and number % 2:
                        pieces = client.stream(PROMPTS[index], ANSWER)
                        token_ids = [token for piece in pieces for token in piece.token_ids]
                    else:
                        token_ids = client.generate(PROMPTS[index], ANSWER).token_ids
                except CallError as error:
                    self.failures.append(f"{error.code}: {error}")
                else:
                    if token_ids != self.expected[index]:
                        self.failures.append(f"prompt {index}: {token_ids}")
                self.calls += 1
                self.stopped.wait(self.pause_s)


def rank_pids(cluster: RayCluster) -> list[int]:
    """The processes of the ranks in this cluster."""
    marker = f"RAY_gcs_storage_path={cluster.environment['RAY_gcs_storage_path']}".encode()
    pids = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            is_rank = b"serving.ranks.rank_process" in (process / "cmdline").read_bytes()
            if is_rank and marker in (process / "environ").read_bytes():
                pids.append(int(process.name))
        except OSError:  # It has exited.
            continue
    return sorted(pids)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_deployments_at_the_same_time_keep_each_other(
    cluster: RayCluster, ports: Ports, checkpoint: Path
) -> None:
    """They also start Serve. There are no nodes for their replicas."""
    names, port = ("first", "second", "third"), str(ports.head)
    # Serve gives a replica without a place this time to shut down, too.
    settings = cluster.folder / "no_drain.yaml"
    settings.write_text(yaml.safe_dump({"drain_s": 1.0}))
    flags: tuple[str | Path, ...] = ("--insecure", "--later", "--wait", "0", "--config", settings)
    flags += ("--http-port", str(ports.head_http))
    with ThreadPoolExecutor(len(names)) as pool:
        runs = pool.map(
            lambda name: cluster.run("deploy", checkpoint, *flags, "--name", name, "--port", port),
            names,
        )
        for process in runs:
            assert process.returncode == 0, process.stdout + process.stderr
    status = cluster.run("status").stdout
    assert all(f"{name}: " in status for name in names), status
    process = cluster.run("deploy", checkpoint, *flags, "--port", "1")
    assert process.returncode == 1 and f"deploy with --port {port}" in process.stderr
    with ThreadPoolExecutor(len(names)) as pool:
        removals = list(pool.map(lambda name: cluster.run("remove", name).returncode, names))
    assert removals == [0, 0, 0]


def test_a_model_that_fits_nowhere_is_refused(
    cluster: RayCluster, ports: Ports, checkpoint: Path
) -> None:
    process = deploy(cluster, ports, checkpoint, "--tp", "2", "--rank-cpus", "64")
    assert process.returncode == 1
    assert "a replica of 2 ranks (--tp 2 --pp 1), each with CPU 64, does not fit" in process.stderr


HOLD_LOCK = """
import sys, time
from serving.ray.cluster import _deployment_lock, connect
connect(sys.argv[1])
with _deployment_lock():
    print(flush=True)
    time.sleep(600)
"""


def test_a_killed_deployment_does_not_block_others(
    cluster: RayCluster, ports: Ports, checkpoint: Path
) -> None:
    command = [str(cluster.python), "-c", HOLD_LOCK, cluster.address]
    with subprocess.Popen(
        command, cwd=cluster.folder, env=cluster.environment, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"\n"
            flags = ("--later", "--wait", "0", "--name", "later")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(deploy, cluster, ports, checkpoint, *flags)
                with pytest.raises(TimeoutError):
                    waiting.result(WAIT_S / 3)
                holder.kill()
                process = waiting.result(BUSY * WAIT_S)
        finally:
            holder.kill()
    assert process.returncode == 0, process.stdout + process.stderr
    assert cluster.run("remove", "later").returncode == 0


def test_calls_name_one_of_several_deployments(
    cluster: RayCluster,
    nodes: Nodes,
    ports: Ports,
    checkpoint: Path,
    expected: list[list[int]],
) -> None:
    """The second one has no replica."""
    settings = cluster.folder / "short_drain.yaml"
    settings.write_text(yaml.safe_dump({"drain_s": 1.0}))
    second: tuple[str | Path, ...] = ("--config", settings, "--insecure", "--name", "second")
    second += ("--later", "--wait", "0", "--rank-cpus", "64")
    nodes.resize(1)
    with deployed(cluster, ports, checkpoint) as process:
        assert process.returncode == 0, process.stdout + process.stderr
        process = deploy(cluster, ports, checkpoint, *second)
        assert process.returncode == 0, process.stdout + process.stderr
        with client_of(ports.head) as client:
            eventually(lambda: code_of_call(client) == "NOT_FOUND", BUSY * WAIT_S)
        with client_of(ports.head, application="preamble") as client:
            assert client.generate(PROMPTS[0], ANSWER).token_ids == expected[0]
        assert cluster.run("remove", "second").returncode == 0


def code_of_call(client: Client) -> str:
    try:
        client.info()
    except CallError as error:
        return error.code
    return "OK"


def test_changes_of_a_deployment_lose_no_call(
    cluster: RayCluster,
    nodes: Nodes,
    ports: Ports,
    checkpoint: Path,
    expected: list[list[int]],
) -> None:
    """Another version beside the first, other settings without a restart, a node drained.

    Then each replica is terminated, which loses no call of a client that repeats calls.
    """
    nodes.resize(2)
    with deployed(cluster, ports, checkpoint, "--replicas", "2") as process:
        assert process.returncode == 0, process.stdout + process.stderr
        first = cluster.replicas()["RUNNING"]
        callers = Callers(ports.head, expected)
        with callers.running(4):
            # A new version.
            flags = ("--replicas", "2", "--served-model-name", "renamed")
            process = deploy(cluster, ports, checkpoint, *flags)
            assert process.returncode == 0, process.stdout + process.stderr
            second = cluster.replicas()["RUNNING"]
            assert len(second) == 2 and not set(first) & set(second)
            # Settings that change while the replicas serve.
            settings = cluster.folder / "changed.yaml"
            settings.write_text(
                yaml.safe_dump({"step_timeout_s": 60.0, "drain_s": 60.0, "calls_max": 100})
            )
            process = deploy(cluster, ports, checkpoint, *flags, "--config", settings, "--insecure")
            assert process.returncode == 0, process.stdout + process.stderr
            assert set(cluster.replicas()["RUNNING"]) == set(second)
            callers.wait_for_calls(20)
            # A node goes away for maintenance.
            nodes.add()
            assert cluster.run("drain", nodes.names[0], "--deadline", "300").returncode == 0
            eventually(lambda: _has_moved(cluster, second), BUSY * WAIT_S)
            callers.wait_for_calls(20)
        nodes.remove()
        with client_of(ports.head) as client:
            assert client.info().model.name == "renamed"
        assert not callers.failures, callers.failures
        print(f"{callers.calls} calls")
        terminate_replicas(cluster, Callers(ports.head, expected, attempts=8))


def terminate_replicas(cluster: RayCluster, callers: Callers) -> None:
    """Terminate each of two replicas without a drain: clients repeat and resume its calls."""
    with callers.running(4):
        for replica in [parent_of(pid) for pid in rank_pids(cluster)]:
            callers.wait_for_calls(20)
            old = cluster.replicas()["RUNNING"]
            os.kill(replica, signal.SIGTERM)
            eventually(lambda: _has_moved(cluster, old), BUSY * WAIT_S)  # noqa: B023
        callers.wait_for_calls(20)
    assert not callers.failures, callers.failures


def _has_moved(cluster: RayCluster, old: list[str]) -> bool:
    """Whether one of two replicas was replaced."""
    states = cluster.replicas()
    running = set(states.get("RUNNING", []))
    return set(states) == {"RUNNING"} and len(running) == 2 and len(running & set(old)) == 1


def test_replicas_check_tokens_and_keep_adapters_apart(
    cluster: RayCluster, nodes: Nodes, ports: Ports, checkpoint: Path, tmp_path: Path
) -> None:
    """A wrong token and a missing role are refused by a replica; an adapter stays on a replica."""
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    for number in range(ADAPTERS):
        write_adapter(adapters / f"a{number}.safetensors", checkpoint, [number + 3, 5, 7])
    tokens = tmp_path / "tokens.yaml"
    tenants = {
        "a": {"token": "secret-of-tenant-a"},
        "b": {"token": "secret-of-tenant-b", "roles": ["generate", "adapters"]},
    }
    tokens.write_text(yaml.safe_dump(tenants))
    tokens.chmod(0o600)
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        yaml.safe_dump({"step_timeout_s": 60.0, "tokens": str(tokens), "adapters": str(adapters)})
    )
    flags = ("--config", settings, "--replicas", "2")
    nodes.resize(2)
    with deployed(cluster, ports, checkpoint, *flags) as process:
        assert process.returncode == 0, process.stdout + process.stderr
        with client_of(ports.head, token="wrong") as client:
            with pytest.raises(CallError) as refusal:
                client.generate("hello", ANSWER)
            assert (refusal.value.code, refusal.value.reason) == (
                "UNAUTHENTICATED",
                "UNAUTHENTICATED",
            )
            pieces: list[Piece] = []
            with pytest.raises(CallError) as refusal:
                pieces.extend(client.stream("hello", ANSWER))
            assert (refusal.value.code, refusal.value.reason) == (
                "UNAUTHENTICATED",
                "UNAUTHENTICATED",
            )
            assert not pieces
        with client_of(ports.head, token="secret-of-tenant-a") as client:
            for number in range(3 * ADAPTERS):
                options = Options(max_new_tokens=2, adapter=f"a{number % ADAPTERS}")
                client.generate("hello", options)
            residents = _residents(client)
            with pytest.raises(CallError) as refusal:
                AdapterCalls(client).unload("a0")
            assert refusal.value.code == "PERMISSION_DENIED"
        with client_of(ports.head, token="secret-of-tenant-b") as client:
            # A call with a stream of requests.
            own = tmp_path / "own.safetensors"
            write_adapter(own, checkpoint, [9, 8, 7])
            assert AdapterCalls(client).upload("own", own).name == "own"
            answer = client.generate("hello", Options(max_new_tokens=2, adapter="own"))
            assert len(answer.token_ids) == 2
    if HAPROXY_VARIABLE in cluster.environment:
        pytest.skip("the adapters were not counted: HAProxy has no request router")
    assert len(residents) == 2
    assert sum(residents) == ADAPTERS, residents


def _residents(client: Client) -> list[int]:
    """The numbers of adapters on the replicas, which are different."""
    return sorted({client.load().adapters_resident for _ in range(40)})


def test_the_number_of_replicas_follows_the_load(
    cluster: RayCluster,
    nodes: Nodes,
    ports: Ports,
    checkpoint: Path,
    expected: list[list[int]],
) -> None:
    """From 1 to 3 replicas, to 1, to none, and back to 1 for the first call."""
    settings = cluster.folder / "small.yaml"
    # Two requests fill a replica.
    settings.write_text(
        yaml.safe_dump({"step_timeout_s": 60.0, "drain_s": 60.0, "running_requests_max": 2})
    )
    flags: tuple[str | Path, ...]
    flags = ("--config", settings, "--insecure", "--min", "0", "--max", "3", "--replicas", "1")
    flags += ("--scale-up-after", "1", "--scale-down-after", "3")
    nodes.resize(3)
    with deployed(cluster, ports, checkpoint, *flags) as process:
        assert process.returncode == 0, process.stdout + process.stderr
        callers = Callers(ports.head, expected, pause_s=0.0)
        with callers.running(8):
            began = time.monotonic()
            eventually(lambda: len(cluster.replicas().get("RUNNING", [])) == 3, BUSY * 60)
            print(f"3 replicas after {time.monotonic() - began:.1f} s")
        assert not callers.failures, callers.failures
        few = Callers(ports.head, expected)
        with few.running(1):
            eventually(lambda: len(cluster.replicas().get("RUNNING", [])) == 1, BUSY * 60)
        assert not few.failures, few.failures
        eventually(lambda: not cluster.replicas(), BUSY * 60)
        with client_of(ports.head) as client:
            began = time.monotonic()
            assert client.generate(PROMPTS[0], ANSWER).token_ids == expected[0]
            print(f"the first call waited {time.monotonic() - began:.1f} s")
        assert len(cluster.replicas()["RUNNING"]) == 1


def test_a_replica_without_a_place_waits_and_says_what_it_lacks(
    cluster: RayCluster,
    nodes: Nodes,
    ports: Ports,
    checkpoint: Path,
    expected: list[list[int]],
) -> None:
    """Space for one replica and a half, then for two; then a node is lost."""
    flags = ("--tp", "2", "--node-ranks", "1", "--replicas", "2")
    nodes.resize(3)
    with deployed(cluster, ports, checkpoint, *flags, "--wait", "25") as process:
        assert process.returncode == 1, process.stdout + process.stderr
        assert "lacks 1 x (CPU 1) of its 2 bundles" in process.stdout, process.stdout
        # On a busy machine the start of the first replica takes longer than `--wait`.
        eventually(lambda: len(cluster.replicas().get("RUNNING", [])) == 1, BUSY * WAIT_S)
        status = cluster.run("status").stdout
        assert "1 of 2 replicas run" in status and "lacks 1 x (CPU 1)" in status, status
        with client_of(ports.head) as client:
            assert client.generate(PROMPTS[0], ANSWER).token_ids == expected[0]
        nodes.add()
        eventually(lambda: len(cluster.replicas().get("RUNNING", [])) == 2, BUSY * WAIT_S)
        # A node with a rank of one replica: the other one answers. Calls in progress fail, and
        # clients repeat them.
        callers = Callers(ports.head, expected, attempts=8)
        with callers.running(4):
            callers.wait_for_calls(20)
            nodes.remove()
            callers.wait_for_calls(40)
        assert not callers.failures, callers.failures


def test_ranks_on_four_nodes_give_the_tokens_of_one_process(
    cluster: RayCluster,
    nodes: Nodes,
    ports: Ports,
    checkpoint: Path,
    expected: list[list[int]],
) -> None:
    flags = ("--tp", "2", "--pp", "2", "--node-ranks", "1")
    nodes.resize(4)
    started = time.monotonic()
    with deployed(cluster, ports, checkpoint, *flags) as process:
        ready_s = time.monotonic() - started
        assert process.returncode == 0, process.stdout + process.stderr
        pids = rank_pids(cluster)
        assert len(pids) == 4
        with client_of(ports.head) as client:
            answers = [client.generate(prompt, ANSWER).token_ids for prompt in PROMPTS]
            assert answers == expected
            parents = {pid: parent_of(pid) for pid in pids}
            assert len(set(parents.values())) == 4  # An actor on each node.
            restarts = []
            for kills_actor in (False, True):
                # The rank that started last is not the replica's own.
                victim = parent_of(pids[-1]) if kills_actor else pids[-1]
                # Clients resume the streams, and repeat the calls that are refused meanwhile.
                callers = Callers(ports.head, expected, attempts=8)
                with callers.running(2):
                    callers.wait_for_calls(4)
                    os.kill(victim, signal.SIGKILL)
                    began = time.monotonic()
                    eventually(lambda: answers_again(client, expected[0]), BUSY * RESTART_S)
                    restarts.append(time.monotonic() - began)
                    callers.wait_for_calls(4)
                assert not callers.failures, callers.failures
                assert not set(pids) & set(rank_pids(cluster))  # All were started again.
                pids = rank_pids(cluster)
    print(f"ready after {ready_s:.1f} s, serving again after {restarts} s")
    assert ready_s < BUSY * READY_S


def answers_again(client: Client, tokens: list[int]) -> bool:
    try:
        return client.generate(PROMPTS[0], ANSWER).token_ids == tokens
    except CallError:
        return False


def test_replicas_answer_while_the_head_is_lost(
    cluster: RayCluster,
    nodes: Nodes,
    ports: Ports,
    checkpoint: Path,
    expected: list[list[int]],
) -> None:
    if HAPROXY_VARIABLE in cluster.environment:
        pytest.skip("only one node of a machine can have HAProxy: its metrics have a fixed port")
    nodes.resize(1)
    with deployed(cluster, ports, checkpoint) as process:
        assert process.returncode == 0, process.stdout + process.stderr
        replicas = cluster.replicas()["RUNNING"]
        callers = Callers(ports.worker, expected)
        with callers.running(2):
            callers.wait_for_calls(10)
            cluster.kill_head()
            callers.wait_for_calls(50)
            cluster.start_head()
            callers.wait_for_calls(20)
            eventually(lambda: cluster.replicas() == {"RUNNING": replicas}, BUSY * WAIT_S)
        assert not callers.failures, callers.failures
        status = cluster.run("status")
        assert status.stdout.startswith("preamble: RUNNING, 1 of 1 replicas run"), status.stdout
