"""Supervisor: dead, hung, refused and closed ranks are reported once, in time, and cleaned up.

Real processes on one node. The slow tests, with every rank of a split model, are in
test_rank_faults.
"""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from gpt.errors import CheckpointError
from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import DumpFlightRecorder, Submission
from serving.ranks.supervisor import LocalSupervisor
from serving.ranks.watchdog import RankLoss
from tests.support.recording_receiver import RecordingReceiver, complete, until_ready
from tests.support.servers import ROOT, START_S, WAIT_S, Stalls, eventually, write_checkpoint

DETECTION_S_MAX = 2.0
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 30]
TOKENS = 12
RESTARTS = 6
STEP_S = 5.0  # For ranks that hang. Elsewhere the limit is long: a loaded machine delays steps.


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = tmp_path_factory.mktemp("supervisor")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    return ServerConfig(
        model=str(checkpoint),
        dtype="float64",
        kv_tokens_max=8192,
        step_tokens_max=64,
        step_timeout_s=WAIT_S,
        flight_dir=str(folder),
    )


@pytest.fixture(scope="module")
def expected_tokens(config: ServerConfig) -> list[list[int]]:
    model = load(config.model_config.model, dtype=torch.float64)
    return [
        generate(model, [prompt], SamplingParams(max_new_tokens=TOKENS))[0].token_ids
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def two_ranks(config: ServerConfig) -> Iterator[tuple[LocalSupervisor, RecordingReceiver]]:
    """Two tensor ranks; each test leaves them ready."""
    with start_supervisor(config.with_fields(tp=2)) as supervisor_and_receiver:
        yield supervisor_and_receiver


@pytest.fixture
def two_ranks_short_timeout(
    config: ServerConfig,
) -> Iterator[tuple[LocalSupervisor, RecordingReceiver]]:
    """Two tensor ranks with a short step time-out."""
    with start_supervisor(
        config.with_fields(tp=2, step_timeout_s=STEP_S)
    ) as supervisor_and_receiver:
        yield supervisor_and_receiver


@contextmanager
def start_supervisor(config: ServerConfig) -> Iterator[tuple[LocalSupervisor, RecordingReceiver]]:
    supervisor = LocalSupervisor(config)
    receiver = RecordingReceiver()
    supervisor.start(receiver)
    until_ready(supervisor, receiver, START_S)
    yield supervisor, receiver
    pids = supervisor.pids
    supervisor.close()
    assert not any(map(is_present, pids))
    eventually(lambda: "ranks" not in {thread.name for thread in threading.enumerate()})


def is_present(pid: int) -> bool:
    """Also for a zombie, which has exited and is not yet reaped."""
    return Path(f"/proc/{pid}").exists()


def test_two_tensor_ranks_generate_the_reference_tokens(
    two_ranks: tuple[LocalSupervisor, RecordingReceiver], expected_tokens: list[list[int]]
) -> None:
    supervisor, receiver = two_ranks
    tokens = complete(supervisor, receiver, PROMPTS, TOKENS, first=0, within_s=WAIT_S)
    assert tokens == expected_tokens
    ready = until_ready(supervisor, receiver, 0)
    assert ready.dtype == "float64"
    assert ready.kv_tokens == 8192
    assert ready.weight_bytes > 8 * 640 * 32 * 2


def test_idle_ranks_send_heartbeats(two_ranks: tuple[LocalSupervisor, RecordingReceiver]) -> None:
    _, receiver = two_ranks
    before = receiver.updates
    receiver.until(lambda: receiver.updates >= before + 2, WAIT_S)
    assert not receiver.losses


def test_a_dead_rank_is_reported_and_all_ranks_restart(
    two_ranks: tuple[LocalSupervisor, RecordingReceiver],
    expected_tokens: list[list[int]],
    config: ServerConfig,
) -> None:
    """The process exit is detected, long before the missing messages would be."""
    lose_rank_and_recover(two_ranks, expected_tokens, config, signal.SIGKILL)
    assert "rank 1 was ended by SIGKILL" in two_ranks[1].losses[-1][1]


@pytest.mark.slow  # It asserts seconds.
@pytest.mark.parametrize(
    "signal_number",
    [pytest.param(signal.SIGKILL, id="dead"), pytest.param(signal.SIGSTOP, id="hung")],
)
def test_a_lost_rank_is_reported_in_time(
    two_ranks_short_timeout: tuple[LocalSupervisor, RecordingReceiver],
    expected_tokens: list[list[int]],
    config: ServerConfig,
    signal_number: signal.Signals,
) -> None:
    """The ranks are idle, so a stopped rank is detected only by the missing heartbeat."""
    detection_s = lose_rank_and_recover(
        two_ranks_short_timeout, expected_tokens, config, signal_number
    )
    # An idle engine loop sends a heartbeat each second; the limit is added to that.
    assert detection_s < DETECTION_S_MAX + (0 if signal_number == signal.SIGKILL else 1.0 + STEP_S)
    reason = "rank 1 was ended by SIGKILL" if signal_number == signal.SIGKILL else "sent no message"
    assert reason in two_ranks_short_timeout[1].losses[-1][1]


def lose_rank_and_recover(
    two_ranks: tuple[LocalSupervisor, RecordingReceiver],
    expected_tokens: list[list[int]],
    config: ServerConfig,
    signal_number: signal.Signals,
) -> float:
    """Lose rank 1 and wait until all ranks answer again; returns the seconds of the detection."""
    supervisor, receiver = two_ranks
    losses, readies = len(receiver.losses), len(receiver.readies)
    pids = supervisor.pids
    descriptors = len(os.listdir("/proc/self/fd"))
    crash_files = len(os.listdir(str(config.observability_config.flight_dir)))
    signalled_at = time.monotonic()

    with Stalls() as stalls:
        os.kill(pids[1], signal_number)
        receiver.until(lambda: len(receiver.losses) > losses, WAIT_S)
    detection_s = receiver.losses[-1][0] - signalled_at - stalls.seconds
    receiver.until(lambda: len(receiver.readies) > readies, START_S)
    restart_s = receiver.readies[-1][0] - signalled_at
    print(f"detected after {detection_s:.2f} s, ready after {restart_s:.1f} s")
    assert len(receiver.losses) == losses + 1
    assert len(os.listdir(str(config.observability_config.flight_dir))) <= crash_files + 1
    assert not any(map(is_present, pids))
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    first_id = 1000 * (1 + signal_number)
    tokens = complete(supervisor, receiver, PROMPTS, TOKENS, first=first_id, within_s=WAIT_S)
    assert tokens == expected_tokens
    assert list(Path(str(config.observability_config.flight_dir)).glob("preamble-flight-*.jsonl"))
    return detection_s


@pytest.mark.slow
def test_killed_ranks_leave_no_descriptor_and_no_thread(
    two_ranks: tuple[LocalSupervisor, RecordingReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most ranks are killed as soon as they run, which makes a restart short."""
    monkeypatch.setattr("serving.ranks.supervisor.BACKOFF_S", (0.0,))
    supervisor, receiver = two_ranks
    readies, resources = len(receiver.readies), open_resources()

    for restart in range(RESTARTS):
        kill_rank(supervisor, receiver, rank=restart % 2)

    receiver.until(lambda: len(receiver.readies) > readies, START_S)
    eventually(lambda: not added_resources(resources))


def kill_rank(supervisor: LocalSupervisor, receiver: RecordingReceiver, *, rank: int) -> None:
    """Kill a rank and wait until new rank processes have started."""
    losses, pids = len(receiver.losses), supervisor.pids
    os.kill(pids[rank], signal.SIGKILL)
    receiver.until(lambda: len(receiver.losses) > losses, WAIT_S)
    eventually(lambda: len(set(supervisor.pids) - set(pids)) == 2)
    assert not any(map(is_present, pids))


def open_resources() -> Counter[str]:
    """The kinds of this process's open files, and the names of its threads."""
    counts = Counter(thread.name for thread in threading.enumerate())
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The descriptor that lists the folder is closed.
            counts[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return counts


def added_resources(before: Counter[str]) -> Counter[str]:
    """Resources added since `before`. Those of other tests may have been closed meanwhile."""
    return open_resources() - before


def test_the_flight_recorder_is_written_on_request(
    two_ranks: tuple[LocalSupervisor, RecordingReceiver], config: ServerConfig, tmp_path: Path
) -> None:
    supervisor, _ = two_ranks
    path = tmp_path / "steps.jsonl"
    supervisor.send(DumpFlightRecorder(str(path), config.observability_config.flight_ids))
    eventually(lambda: path.exists() and '"steps"' in path.read_text())


def test_a_restart_waits_longer_after_each_loss_until_ranks_were_healthy(
    config: ServerConfig,
) -> None:
    supervisor = LocalSupervisor(config)
    supervisor._has_been_ready = True
    waits = []
    for healthy_s in (5.0, 5.0, 59.0, 60.0, 5.0):
        supervisor._record_loss(RankLoss("rank 0 was killed", "dead", healthy_s))
        waits.append(supervisor._backoff_s)
    assert waits == [0.0, 1.0, 2.0, 0.0, 1.0]
    supervisor.close()


def test_messages_without_ranks_are_dropped(config: ServerConfig) -> None:
    supervisor = LocalSupervisor(config)
    supervisor.send(Submission(1, [1], SamplingParams()))
    supervisor.close()


def test_an_invalid_model_is_refused_once_with_its_error_message(
    config: ServerConfig, tmp_path: Path
) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    supervisor = LocalSupervisor(config.with_fields(model=str(tmp_path / "nothing")))
    receiver = RecordingReceiver()
    supervisor.start(receiver)

    with pytest.raises(CheckpointError, match="does not exist"):
        until_ready(supervisor, receiver, START_S)

    eventually(lambda: len(receiver.losses) == 1)
    assert "does not exist" in receiver.losses[0][1]
    eventually(lambda: supervisor.pids == [])
    supervisor.close()
    eventually(lambda: set(os.listdir("/proc/self/fd")) <= descriptors)


def test_ranks_without_a_process_descriptor_are_killed(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's descriptor cannot be opened, for example because of the file limit."""
    descriptors = set(os.listdir("/proc/self/fd"))
    pids: list[int] = []
    open_descriptor = os.pidfd_open

    def open_for_first_rank(pid: int) -> int:
        pids.append(pid)
        if len(pids) > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_descriptor(pid)

    monkeypatch.setattr(os, "pidfd_open", open_for_first_rank)
    supervisor = LocalSupervisor(config.with_fields(tp=2))

    with pytest.raises(OSError, match="Too many open files"):
        supervisor._start_processes()

    assert len(pids) == 2
    assert not any(map(is_present, pids))
    supervisor.close()
    assert set(os.listdir("/proc/self/fd")) <= descriptors


PROGRAM = """
import sys, time
from serving.config import ServerConfig
from serving.ranks.supervisor import LocalSupervisor
from tests.support.recording_receiver import RecordingReceiver, until_ready
supervisor = LocalSupervisor(ServerConfig(model=sys.argv[1], kv_tokens_max=1024))
receiver = RecordingReceiver()
supervisor.start(receiver)
while not supervisor.pids:
    time.sleep(0.01)
print(*supervisor.pids, flush=True)
if len(sys.argv) > 2:
    until_ready(supervisor, receiver, 240)
    print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "when", ["while they load", pytest.param("when they are ready", marks=pytest.mark.slow)]
)
def test_ranks_exit_when_their_frontend_is_killed(config: ServerConfig, when: str) -> None:
    command = [sys.executable, "-c", PROGRAM, config.model_config.model]
    if "ready" in when:
        command.append("wait")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as frontend:
        assert frontend.stdout is not None
        pids = [int(field) for field in frontend.stdout.readline().split()]
        assert pids
        if "ready" in when:
            assert frontend.stdout.readline() == "ready\n"
        command_line = Path(f"/proc/{pids[0]}/cmdline").read_text()
        assert not re.search(re.escape(config.model_config.model), command_line)
        killed_at = time.monotonic()
        frontend.kill()
    with Stalls() as stalls:
        eventually(lambda: not any(is_running(pid) for pid in pids))
    exit_s = time.monotonic() - killed_at - stalls.seconds
    print(f"ended after {exit_s:.2f} s")
    if "ready" in when:  # Only the slow case asserts seconds.
        assert exit_s < DETECTION_S_MAX


def is_running(pid: int) -> bool:
    """False for a zombie: without an init process, an orphan is never reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
