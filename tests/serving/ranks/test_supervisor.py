"""Ranks that die, hang, refuse or are closed: noticed in time, told once, and nothing is left.

Real processes on one node. The slow drills, with every rank of a split model, are in
test_rank_faults.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.errors import CheckpointError
from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Submission
from serving.ranks.supervisor import Supervisor
from tests.support.recording_receiver import Ear, complete
from tests.support.servers import ROOT, Stalls, eventually, write_checkpoint

START_S = 60.0
NOTICED_S = 2.0
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 30]
TOKENS = 12
GENERATIONS = 6
STEP_S = 5.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = tmp_path_factory.mktemp("supervisor")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    return ServerConfig(
        model=str(checkpoint),
        dtype="float64",
        kv_tokens_max=8192,
        step_tokens_max=64,
        step_timeout_s=STEP_S,
        flight_dir=str(folder),
    )


@pytest.fixture(scope="module")
def oracle(config: ServerConfig) -> list[list[int]]:
    model = load(config.model, dtype=torch.float64)
    return [
        generate(model, [prompt], Sampling(max_new_tokens=TOKENS))[0].token_ids
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def pair(config: ServerConfig) -> Iterator[tuple[Supervisor, Ear]]:
    """Two tensor ranks, which each test leaves ready."""
    supervisor, ear = Supervisor(replace(config, tp=2)), Ear()
    supervisor.start(ear)
    supervisor.wait_ready(START_S)
    yield supervisor, ear
    pids = supervisor.pids
    supervisor.close()
    assert not any(map(alive, pids))
    assert not [thread for thread in threading.enumerate() if thread.name == "ranks"]


def alive(pid: int) -> bool:
    """Also if it has ended and nobody has taken note."""
    return Path(f"/proc/{pid}").exists()


def test_ranks_answer_as_one_model_does(
    pair: tuple[Supervisor, Ear], oracle: list[list[int]]
) -> None:
    supervisor, ear = pair
    assert complete(supervisor, ear, PROMPTS, TOKENS, first=0, within_s=20) == oracle
    facts = supervisor.wait_ready(0)
    assert facts.dtype == "float64"
    assert facts.kv_tokens == 8192
    assert facts.weight_bytes > 8 * 640 * 32 * 2


def test_an_idle_engine_shows_that_it_lives(pair: tuple[Supervisor, Ear]) -> None:
    _, ear = pair
    before = ear.updates
    ear.until(lambda: ear.updates >= before + 2, 6)
    assert not ear.losses


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="dead"),
        pytest.param(signal.SIGSTOP, id="hung", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_told_in_time_and_the_ranks_come_back(
    pair: tuple[Supervisor, Ear],
    oracle: list[list[int]],
    config: ServerConfig,
    number: signal.Signals,
) -> None:
    """Idle, so that the stopped one is missed only by the sign of life."""
    supervisor, ear = pair
    losses, readies = len(ear.losses), len(ear.readies)
    old, files = supervisor.pids, len(os.listdir("/proc/self/fd"))
    crashes = len(os.listdir(str(config.flight_dir)))
    hit = time.monotonic()

    with Stalls() as stalls:
        os.kill(old[1], number)
        ear.until(lambda: len(ear.losses) > losses, 30)
    noticed_s = ear.losses[-1][0] - hit - stalls.seconds
    ear.until(lambda: len(ear.readies) > readies, START_S)
    print(f"noticed after {noticed_s:.2f} s, back after {ear.readies[-1][0] - hit:.1f} s")
    # An idle engine speaks each second, and may be late by its limit.
    assert noticed_s < NOTICED_S + (0 if number == signal.SIGKILL else 1.0 + STEP_S)
    assert len(ear.losses) == losses + 1
    assert len(os.listdir(str(config.flight_dir))) <= crashes + 1
    assert not any(map(alive, old))
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
    first = 1000 * (1 + number)
    assert complete(supervisor, ear, PROMPTS, TOKENS, first=first, within_s=20) == oracle
    if number == signal.SIGKILL:
        assert "rank 1 was ended by SIGKILL" in ear.losses[-1][1]
    else:
        assert "said nothing" in ear.losses[-1][1]


@pytest.mark.slow
def test_ranks_that_are_killed_leave_no_file_and_no_thread_behind(
    pair: tuple[Supervisor, Ear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of them as soon as they are there, so that many generations take a moment."""
    monkeypatch.setattr("serving.ranks.supervisor.BACKOFF_S", (0.0,))
    supervisor, ear = pair
    readies, before = len(ear.readies), opened()

    for generation in range(GENERATIONS):
        follow(supervisor, ear, killed=generation % 2)

    ear.until(lambda: len(ear.readies) > readies, START_S)
    eventually(lambda: not grown(before))


def follow(supervisor: Supervisor, ear: Ear, *, killed: int) -> None:
    """Kill a rank, and wait until the processes of others have begun."""
    losses, old = len(ear.losses), supervisor.pids
    os.kill(old[killed], signal.SIGKILL)
    ear.until(lambda: len(ear.losses) > losses, 10)
    eventually(lambda: len(set(supervisor.pids) - set(old)) == 2)
    assert not any(map(alive, old))


def opened() -> Counter[str]:
    """Kinds of the files that are open here, and the names of the threads."""
    found = Counter(thread.name for thread in threading.enumerate())
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The one that lists them is gone.
            found[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return found


def grown(before: Counter[str]) -> Counter[str]:
    """What is more than before. What others left here may go meanwhile."""
    return opened() - before


def test_the_last_steps_are_written_when_ranks_hang_and_when_asked_for(
    pair: tuple[Supervisor, Ear], config: ServerConfig, tmp_path: Path
) -> None:
    supervisor, _ = pair
    path = tmp_path / "steps.jsonl"
    supervisor.dump(str(path))
    eventually(path.exists)
    assert '"steps"' in path.read_text()
    assert list(Path(str(config.flight_dir)).glob("preamble-flight-*.jsonl"))


def test_what_is_sent_while_there_are_no_ranks_is_dropped(config: ServerConfig) -> None:
    supervisor = Supervisor(config)
    supervisor.send(Submission(1, [1], Sampling()))
    supervisor.close()


def test_a_model_that_cannot_be_is_refused_once_and_with_its_own_sentence(
    config: ServerConfig, tmp_path: Path
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    supervisor, ear = Supervisor(replace(config, model=str(tmp_path / "nothing"))), Ear()
    supervisor.start(ear)

    with pytest.raises(CheckpointError, match="does not exist"):
        supervisor.wait_ready(START_S)

    eventually(lambda: len(ear.losses) == 1)
    assert "does not exist" in ear.losses[0][1]
    eventually(lambda: supervisor.pids == [])
    supervisor.close()
    assert set(os.listdir("/proc/self/fd")) <= before


PROGRAM = """
import sys, time
from serving.config import ServerConfig
from serving.ranks.supervisor import Supervisor
from tests.support.recording_receiver import Ear
supervisor = Supervisor(ServerConfig(model=sys.argv[1], kv_tokens_max=1024))
supervisor.start(Ear())
while not supervisor.pids:
    time.sleep(0.01)
print(*supervisor.pids, flush=True)
if len(sys.argv) > 2:
    supervisor.wait_ready(60)
    print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "when", ["while they load", pytest.param("when they are ready", marks=pytest.mark.slow)]
)
def test_ranks_end_with_a_front_end_that_is_killed(config: ServerConfig, when: str) -> None:
    words = [sys.executable, "-c", PROGRAM, config.model, *(["wait"] if "ready" in when else [])]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        pids = [int(word) for word in front.stdout.readline().split()]
        assert pids
        if "ready" in when:
            assert front.stdout.readline() == "ready\n"
        arguments = Path(f"/proc/{pids[0]}/cmdline").read_text()
        assert not re.search(re.escape(config.model), arguments)
        hit = time.monotonic()
        front.kill()
    with Stalls() as stalls:
        eventually(lambda: not any(running(pid) for pid in pids))
    took_s = time.monotonic() - hit - stalls.seconds
    print(f"ended after {took_s:.2f} s")
    assert took_s < NOTICED_S


def running(pid: int) -> bool:
    """An orphan that nobody reaps stays as a zombie where there is no init: it does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
