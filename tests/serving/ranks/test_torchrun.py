"""Ranks under torchrun: rendezvous of workers and connection to their frontend, on 1 or 2 nodes.

The slow test runs two agents on loopback, each with two ranks of TP2 x PP2; one agent is killed and
started again. The rendezvous is tested on torch's own store, with entries of earlier rounds.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec
import pytest
import torch
import torch.distributed as dist
import yaml

from clients.client import Options
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.ranks.rank_channels import Store
from serving.ranks.torchrun_supervisor import (
    ADDRESS_FILE,
    TorchrunSupervisor,
    connect_to_frontend,
    frontend_folder,
    read_frontend_address,
)
from serving.ranks.torchrun_worker import WorkerInfo, first_rank, rendezvous
from tests.support.recording_receiver import RecordingReceiver
from tests.support.servers import (
    ROOT,
    WAIT_S,
    Server,
    Stalls,
    eventually,
    free_port,
    write_checkpoint,
)

READY_S = 240.0
DETECTION_S_MAX = 2.0
PROMPT = [1, 2, 3]
TOKENS = 12


def worker_info(rank: int, *, has_frontend: bool = False) -> WorkerInfo:
    return WorkerInfo(
        node=rank // 2, pid=100 + rank, host=f"host{rank // 2}", has_frontend=has_frontend
    )


def rendezvous_of_ranks(store: Store, ranks: int) -> list[tuple[str, list[WorkerInfo]]]:
    rendezvous_of_rank: dict[int, tuple[str, list[WorkerInfo]]] = {}

    def run_worker(rank: int) -> None:
        rendezvous_of_rank[rank] = rendezvous(
            store, rank, ranks, worker_info(rank), timeout_s=WAIT_S
        )

    threads = [threading.Thread(target=run_worker, args=(rank,)) for rank in range(ranks)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [rendezvous_of_rank[rank] for rank in range(ranks)]


def test_rendezvous_ignores_entries_of_earlier_rounds() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("preamble/nonces/1", "of a worker that is gone")
    rounds = [rendezvous_of_ranks(store, 4) for _ in range(3)]
    for workers in rounds:
        assert len({name for name, _ in workers}) == 1
        assert all(infos == [worker_info(rank) for rank in range(4)] for _, infos in workers)
    assert len({workers[0][0] for workers in rounds}) == 3


def test_rendezvous_times_out_without_all_workers() -> None:
    with pytest.raises(TimeoutError, match="1 of 2"):
        rendezvous(dist.HashStore(), 0, 2, worker_info(0), timeout_s=0.1)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="not all 2"):
        rendezvous(dist.HashStore(), 1, 2, worker_info(1), timeout_s=0.1)  # type: ignore[attr-defined]


def test_mesh_rank_0_is_on_the_node_with_a_frontend() -> None:
    assert first_rank([worker_info(rank) for rank in range(4)]) == 0
    assert first_rank([worker_info(rank, has_frontend=rank > 1) for rank in range(4)]) == 2


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # A socket's path has at most 107 characters, and pytest's temporary directories are long.
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield frontend_folder("run", 9000, os.getpid())


@contextmanager
def start_supervisor(
    folder: Path, agent: int
) -> Iterator[tuple[TorchrunSupervisor, RecordingReceiver]]:
    supervisor = TorchrunSupervisor(ServerConfig(model="none"), folder, agent)
    receiver = RecordingReceiver()
    supervisor.start(receiver)
    yield supervisor, receiver
    supervisor.close()


def test_a_frontend_publishes_its_address_in_its_folder_and_removes_it(folder: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    stale = folder.parent / "0123-999999999"
    with start_supervisor(folder, os.getpid()):
        address = read_frontend_address(folder)
        assert address is not None and address.pid == os.getpid()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert read_frontend_address(folder) is None
    assert not folder.exists()
    stale.mkdir()
    with start_supervisor(folder, os.getpid()):
        assert not stale.exists()
    eventually(lambda: set(os.listdir("/proc/self/fd")) <= descriptors)


def test_a_folder_that_others_can_access_is_refused(folder: Path) -> None:
    folder.parent.mkdir(mode=0o777)
    folder.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        TorchrunSupervisor(ServerConfig(model="none"), folder, os.getpid())


def test_a_folder_that_cannot_be_created_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = folder.parent.parent / "missing"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(missing))
    with pytest.raises(ConfigError, match=r"missing.*set XDG_RUNTIME_DIR"):
        TorchrunSupervisor(
            ServerConfig(model="none"), frontend_folder("run", 9000, os.getpid()), os.getpid()
        )


def test_a_process_that_reuses_the_frontends_id_is_not_the_frontend(folder: Path) -> None:
    with start_supervisor(folder, os.getpid()):
        address = read_frontend_address(folder)
        assert address is not None
        earlier = msgspec.structs.replace(address, start_ticks=address.start_ticks - 1)
        (folder / ADDRESS_FILE).write_bytes(msgspec.json.encode(earlier))
        assert read_frontend_address(folder) is None


def test_a_second_close_closes_no_descriptor_of_another_file(folder: Path) -> None:
    """The server closes its transport twice: with the engine, then itself."""
    with start_supervisor(folder, os.getpid()) as (supervisor, _):
        supervisor.close()
        descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # Reuse the numbers.
        supervisor.close()
        for descriptor in descriptors:
            os.close(descriptor)


FAILED_RENDEZVOUS = """
import os, torch.distributed
from serving.config import ServerConfig
from serving.ranks.torchrun_worker import run_worker

def fail(*arguments: object, **options: object) -> None:
    raise TimeoutError("no rendezvous")

torch.distributed.rendezvous = fail
run_worker(ServerConfig(model="none", tp=2, log_format="json"), [])
"""


def test_a_worker_logs_in_the_configured_format_before_the_rendezvous() -> None:
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    worker = subprocess.run(
        [sys.executable, "-c", FAILED_RENDEZVOUS],
        cwd=ROOT,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert worker.returncode == 1
    events = [json.loads(line)["event"] for line in worker.stderr.splitlines()]
    assert events == ["restarts_limited", "rank_failed"]


def test_a_wrong_secret_is_rejected_and_disconnected_ranks_are_a_loss(folder: Path) -> None:
    with start_supervisor(folder, os.getpid()) as (_, receiver):
        address = read_frontend_address(folder)
        assert address is not None
        guess = msgspec.structs.replace(address, secret="guess")
        stranger = connect_to_frontend(folder, guess, {0: os.getpid()})
        assert stranger.receive(WAIT_S) is None
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
            channel = connect_to_frontend(folder, address, {0: rank.pid})
            time.sleep(0.1)
            assert not receiver.losses
            channel.close()
            receiver.until(lambda: receiver.losses, WAIT_S)
            # Ranks that still run are killed, since they may hang.
            assert rank.wait(WAIT_S) == -signal.SIGKILL


def test_a_frontend_stops_when_the_torchrun_agent_exits(folder: Path) -> None:
    signals: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        with (
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent,
            start_supervisor(folder, agent.pid) as (supervisor, receiver),
        ):
            agent.kill()
            receiver.until(lambda: receiver.losses, WAIT_S)
            assert "agent" in str(supervisor.refusal)
            eventually(lambda: signals == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, handler)


class Agent:
    """A torchrun agent that represents a node of its own."""

    def __init__(self, arguments: list[str], output: IO[str], *, is_first: bool = False) -> None:
        """The first agent hosts the rendezvous; torchrun orders ranks by address, then number."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--local-addr", "127.0.0.1" if is_first else "127.0.0.2"]
        # A dead node is detected after 3 s instead of 15 s.
        rendezvous_options = (
            f"keep_alive_interval=1,keep_alive_max_attempt=3,is_host={int(is_first)}"
        )
        torchrun += ["--rdzv-conf", rendezvous_options]
        self.process = subprocess.Popen(
            [*torchrun, *arguments], cwd=ROOT, env=environment, stdout=output, text=True
        )
        self._stopped = False

    def stop(self) -> None:
        """Send one signal; a second would interrupt the agent while it waits for its workers."""
        if not self._stopped:
            self._stopped = True
            self.process.terminate()

    def end(self) -> None:
        self.stop()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ready_line(path: Path, process: "subprocess.Popen[str]", count: int = 1) -> str:
    """The ready line of the `count`-th frontend that prints to this file."""

    def ready_lines() -> list[str]:
        return [line for line in path.read_text().splitlines() if line.startswith("ready ")]

    eventually(lambda: len(ready_lines()) >= count or process.poll() is not None, within_s=READY_S)
    return ready_lines()[count - 1]


@pytest.fixture(scope="module")
def serve_command(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[str], list[int]]]:
    """The arguments after torchrun's own flags, and the tokens that the model gives."""
    folder = tmp_path_factory.mktemp("torchrun")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({"kv_tokens_max": 4096, "step_tokens_max": 64}))
    arguments = ["-m", "preamble", "serve", str(checkpoint), "--dtype", "float64"]
    arguments += ["--port", "0", "--http-port", "0", "--config", str(settings)]
    model = load(checkpoint, dtype=torch.float64)
    tokens = generate(model, [PROMPT], SamplingParams(max_new_tokens=TOKENS))[0].token_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield arguments, tokens
    assert not list(folder.glob("preamble-*/*"))


def generate_tokens(server: Server) -> list[int]:
    with server.client() as client:
        return list(client.generate(PROMPT, Options(max_new_tokens=TOKENS)).token_ids)


def is_ready(server: Server) -> bool:
    try:
        return server.get("/health/ready")[0] == 200
    except OSError:
        return False


@pytest.mark.slow
def test_two_nodes_serve_and_a_killed_node_rejoins(
    serve_command: tuple[list[str], list[int]], tmp_path: Path
) -> None:
    arguments, expected_tokens = serve_command
    torchrun_flags = {
        "--nnodes": "2",
        "--nproc-per-node": "2",
        "--max-restarts": "5",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"localhost:{free_port()}",
        "--rdzv-id": "drill",
        "--monitor-interval": "0.1",
    }
    rendezvous_arguments = list(chain.from_iterable(torchrun_flags.items()))
    arguments = [*rendezvous_arguments, *arguments, "--tp", "2", "--pp", "2"]
    agents: list[Agent] = []
    with open(tmp_path / "out", "w") as output:
        try:
            started_s = time.monotonic()
            agents.append(Agent(arguments, output, is_first=True))
            agents.append(Agent(arguments, output))
            line = ready_line(tmp_path / "out", agents[0].process)
            server = Server(agents[0].process, line)
            print(f"ready after {time.monotonic() - started_s:.1f} s")
            assert generate_tokens(server) == expected_tokens

            killed_at = time.monotonic()
            with Stalls() as stalls:
                agents[1].process.kill()
                eventually(lambda: not is_ready(server))
            detection_s = time.monotonic() - killed_at - stalls.seconds
            print(f"detected after {detection_s:.2f} s")
            assert detection_s < DETECTION_S_MAX
            assert server.get("/health/live")[0] == 200

            restarted_at = time.monotonic()
            agents.append(Agent(arguments, output))
            eventually(lambda: is_ready(server), within_s=READY_S)
            print(f"ready again {time.monotonic() - restarted_at:.1f} s after it was started")
            assert agents[0].process.poll() is None
            assert generate_tokens(server) == expected_tokens
        finally:
            for agent in agents:
                agent.stop()
            for agent in agents:
                agent.end()


@pytest.mark.slow
def test_a_single_node_restarts_after_a_crash_and_drains_with_torchrun(
    serve_command: tuple[list[str], list[int]], tmp_path: Path
) -> None:
    arguments, expected_tokens = serve_command
    arguments = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        *arguments,
        "--pp",
        "2",
    ]
    with open(tmp_path / "out", "w") as output:
        agent = Agent(arguments, output, is_first=True)
        try:
            server = Server(agent.process, ready_line(tmp_path / "out", agent.process))
            assert generate_tokens(server) == expected_tokens
            (frontend,) = [pid for pid in children_named("serving") if pid != agent.process.pid]
            worker = next(
                pid for pid in children_named("preamble") if parent(pid) == agent.process.pid
            )

            os.kill(worker, signal.SIGKILL)
            eventually(lambda: not is_ready(server))
            eventually(lambda: is_ready(server), within_s=READY_S)
            assert generate_tokens(server) == expected_tokens

            os.kill(frontend, signal.SIGKILL)
            line = ready_line(tmp_path / "out", agent.process, count=2)
            server = Server(agent.process, line)
            assert generate_tokens(server) == expected_tokens

            with server.client() as client:
                stream = client.stream(PROMPT, Options(max_new_tokens=600))
                token_count = len(next(stream).token_ids)
                agent.stop()
                token_count += sum(len(piece.token_ids) for piece in stream)
            assert token_count == 600
        finally:
            agent.end()
    eventually(lambda: not children_named("serving"))


def children_named(module: str) -> list[int]:
    """Processes of this module that were started with the settings of this run."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (
                (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            )
            environment_entry = f"XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}".encode()
            environment = (entry / "environ").read_bytes().split(b"\0") if arguments else []
            is_of_this_run = environment_entry in environment
        except OSError:
            continue
        if is_of_this_run and module.encode() in arguments and b"serve" in arguments:
            pids.append(int(entry.name))
    return pids


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
