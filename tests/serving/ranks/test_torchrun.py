"""Under torchrun: workers find each other and their front end, on as many nodes as there are.

The slow drill is two agents on loopback, each with two ranks of TP2 x PP2, of which one is killed
and started again. What workers say to each other is tested on torch's own store, with leftovers.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed as dist
import yaml

from clients.client import Options
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.ranks.rank_channels import Store
from serving.ranks.torchrun_supervisor import Outside, connect, folder_of, read_card
from serving.ranks.torchrun_worker import Presence, first_rank, muster
from tests.support.recording_receiver import Ear
from tests.support.servers import ROOT, Server, Stalls, eventually, free_port, write_checkpoint

READY_S = 90.0
NOTICED_S = 2.0
PROMPT = [1, 2, 3]
TOKENS = 12


def presence(rank: int, *, front: bool = False) -> Presence:
    return Presence(node=rank // 2, pid=100 + rank, host=f"host{rank // 2}", front=front)


def gather(store: Store, ranks: int) -> list[tuple[str, list[Presence]]]:
    found: dict[int, tuple[str, list[Presence]]] = {}

    def worker(rank: int) -> None:
        found[rank] = muster(store, rank, ranks, presence(rank), timeout_s=10)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(ranks)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(15)
    return [found[rank] for rank in range(ranks)]


def test_workers_learn_who_is_there_whatever_earlier_rounds_have_left() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("preamble/word/1", "of a worker that is gone")
    rounds = [gather(store, 4) for _ in range(3)]
    for told in rounds:
        assert len({name for name, _ in told}) == 1
        assert all(all_ == [presence(rank) for rank in range(4)] for _, all_ in told)
    assert len({told[0][0] for told in rounds}) == 3


def test_a_worker_that_does_not_come_is_waited_for_only_so_long() -> None:
    with pytest.raises(TimeoutError, match="1 of 2"):
        muster(dist.HashStore(), 0, 2, presence(0), timeout_s=0.1)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="not all 2"):
        muster(dist.HashStore(), 1, 2, presence(1), timeout_s=0.1)  # type: ignore[attr-defined]


def test_the_planner_is_where_a_front_end_lives_else_first() -> None:
    assert first_rank([presence(rank) for rank in range(4)]) == 0
    assert first_rank([presence(rank, front=rank > 1) for rank in range(4)]) == 2


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # A socket's path has 107 characters at most, of which pytest's own would take most.
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield folder_of("run", 9000, os.getpid())


@contextmanager
def front_end(folder: Path, agent: int) -> Iterator[tuple[Outside, Ear]]:
    link, ear = Outside(ServerConfig(model="none"), folder, agent), Ear()
    link.start(ear)
    yield link, ear
    link.close()


def test_a_front_end_is_found_by_its_user_and_leaves_nothing(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    stale = folder.parent / "0123-999999999"
    with front_end(folder, os.getpid()):
        card = read_card(folder)
        assert card is not None and card.pid == os.getpid()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert read_card(folder) is None
    assert not folder.exists()
    stale.mkdir()
    with front_end(folder, os.getpid()):
        assert not stale.exists()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_folder_that_others_may_write_is_refused(folder: Path) -> None:
    folder.parent.mkdir(mode=0o777)
    folder.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        Outside(ServerConfig(model="none"), folder, os.getpid())


def test_a_stranger_is_turned_away_and_ranks_that_leave_are_a_loss(folder: Path) -> None:
    with front_end(folder, os.getpid()) as (_, ear):
        card = read_card(folder)
        assert card is not None
        stranger = connect(folder, type(card)(card.pid, "guess"), {0: os.getpid()})
        assert stranger.receive(5) is None
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
            planner = connect(folder, card, {0: rank.pid})
            time.sleep(0.1)
            assert not ear.losses
            planner.close()
            ear.until(lambda: ear.losses, 30)
            # What is left of ranks is ended, since it may hang.
            assert rank.wait(30) == -signal.SIGKILL


def test_a_front_end_ends_with_its_agent(folder: Path) -> None:
    ended: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        with (
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent,
            front_end(folder, agent.pid) as (link, ear),
        ):
            agent.kill()
            ear.until(lambda: ear.losses, 30)
            assert "agent" in str(link.refusal)
            eventually(lambda: ended == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, old)


class Agent:
    """torchrun on a node of its own, as far as it knows."""

    def __init__(self, words: list[str], output: IO[str], *, first: bool = False) -> None:
        """The first one has the rendezvous; ranks go by address, and only then by number."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--local-addr", "127.0.0.1" if first else "127.0.0.2"]
        # A dead node is known as such after 3 s instead of 15.
        conf = f"keep_alive_interval=1,keep_alive_max_attempt=3,is_host={int(first)}"
        torchrun += ["--rdzv-conf", conf]
        self.process = subprocess.Popen(
            [*torchrun, *words], cwd=ROOT, env=environment, stdout=output, text=True
        )
        self._stopped = False

    def stop(self) -> None:
        """Once: a second signal would interrupt it while it waits for its workers."""
        if not self._stopped:
            self._stopped = True
            self.process.terminate()

    def end(self) -> None:
        self.stop()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ready_line(path: Path, process: "subprocess.Popen[str]", count: int = 1) -> str:
    """The server's line, of the `count`-th front end that prints there."""

    def lines() -> list[str]:
        return [line for line in path.read_text().splitlines() if line.startswith("ready ")]

    eventually(lambda: len(lines()) >= count or process.poll() is not None, within_s=READY_S)
    return lines()[count - 1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], list[int]]]:
    """What follows torchrun's own flags, and what the model says."""
    folder = tmp_path_factory.mktemp("torchrun")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({"kv_tokens_max": 4096, "step_tokens_max": 64}))
    words = ["-m", "preamble", "serve", str(checkpoint), "--dtype", "float64"]
    words += ["--port", "0", "--http-port", "0", "--config", str(settings)]
    model = load(checkpoint, dtype=torch.float64)
    told = generate(model, [PROMPT], Sampling(max_new_tokens=TOKENS))[0].token_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield words, told
    assert not list(folder.glob("preamble-*/*"))


def answer(server: Server) -> list[int]:
    with server.client() as client:
        return list(client.generate(PROMPT, Options(max_new_tokens=TOKENS)).token_ids)


def is_ready(server: Server) -> bool:
    try:
        return server.get("/health/ready")[0] == 200
    except OSError:
        return False


@pytest.mark.slow
def test_two_nodes_serve_and_one_that_is_killed_comes_back_alone(
    served: tuple[list[str], list[int]], tmp_path: Path
) -> None:
    words, oracle = served
    rendezvous = [
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "5"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"),
        *("--rdzv-id", "drill", "--monitor-interval", "0.1"),
    ]
    words = [*rendezvous, *words, "--tp", "2", "--pp", "2"]
    agents: list[Agent] = []
    with open(tmp_path / "out", "w") as output:
        try:
            started = time.monotonic()
            agents.append(Agent(words, output, first=True))
            agents.append(Agent(words, output))
            line = ready_line(tmp_path / "out", agents[0].process)
            server = Server(agents[0].process, line)
            print(f"ready after {time.monotonic() - started:.1f} s")
            assert answer(server) == oracle

            hit = time.monotonic()
            with Stalls() as stalls:
                agents[1].process.kill()
                eventually(lambda: not is_ready(server))
            noticed_s = time.monotonic() - hit - stalls.seconds
            print(f"noticed after {noticed_s:.2f} s")
            assert noticed_s < NOTICED_S
            assert server.get("/health/live")[0] == 200

            again = time.monotonic()
            agents.append(Agent(words, output))
            eventually(lambda: is_ready(server), within_s=READY_S)
            print(f"ready again {time.monotonic() - again:.1f} s after it was started")
            assert agents[0].process.poll() is None
            assert answer(server) == oracle
        finally:
            for agent in agents:
                agent.stop()
            for agent in agents:
                agent.end()


@pytest.mark.slow
def test_on_one_node_the_ranks_drain_with_torchrun_and_come_back_after_a_crash(
    served: tuple[list[str], list[int]], tmp_path: Path
) -> None:
    words, oracle = served
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *words, "--pp", "2"]
    with open(tmp_path / "out", "w") as output:
        agent = Agent(words, output, first=True)
        try:
            server = Server(agent.process, ready_line(tmp_path / "out", agent.process))
            assert answer(server) == oracle
            (front,) = [pid for pid in children_named("serving") if pid != agent.process.pid]
            worker = next(
                pid for pid in children_named("preamble") if parent(pid) == agent.process.pid
            )

            os.kill(worker, signal.SIGKILL)
            eventually(lambda: not is_ready(server), within_s=10)
            eventually(lambda: is_ready(server), within_s=READY_S)
            assert answer(server) == oracle

            os.kill(front, signal.SIGKILL)
            line = ready_line(tmp_path / "out", agent.process, count=2)
            server = Server(agent.process, line)
            assert answer(server) == oracle

            with server.client() as client:
                stream = client.stream(PROMPT, Options(max_new_tokens=600))
                got = len(next(stream).token_ids)
                agent.stop()
                got += sum(len(piece.token_ids) for piece in stream)
            assert got == 600
        finally:
            agent.end()
    eventually(lambda: not children_named("serving"))


def children_named(module: str) -> list[int]:
    """Processes that run this module of ours that were started with the settings of this run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            own = f"XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}".encode()
            mine = words and own in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine and module.encode() in words and b"serve" in words:
            found.append(int(entry.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
