"""Runs that are killed, starved, interrupted and misled: what was learned stays whole, and goes on.

Each run is the command itself in a process of its own, forked from a server that has torch loaded;
its other ranks it starts itself. Every wait has an end.
"""

import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread

import pytest
import torch

from checkpoints_tools.convert import write_native
from clients.generation import Options
from gpt.adapter import open_adapter
from gpt.checkpoint import open_checkpoint
from gpt.digest import base_digest
from gpt.logical import Checkpoint, in_memory
from ptuning.__main__ import main
from ptuning.state import STATE
from tests.models import lively
from tests.ranks import FORKSERVER, PRELOAD
from tests.servers import CONFIG, ROOT, eventually, serving, write_checkpoint
from tests.test_ptuning import records, write_settings

pytestmark = pytest.mark.slow

FORKSERVER.set_forkserver_preload(
    [
        *PRELOAD,
        "torch._dynamo",
        "preamble",
        "ptuning.__main__",
        "ptuning.learning",
        "ptuning.audience",
    ]
)
END_S = 60.0
KILLS = 20
Start = Callable[..., "Run"]

MANY = 100_000  # Steps: it does not end by itself.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@dataclass
class Run:
    """`preamble tune`, running."""

    process: ForkServerProcess
    folder: Path

    @property
    def said(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def wrote(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def ranks(self) -> list[int]:
        """The processes that it has started."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        with suppress(OSError):
            return sorted(int(pid) for task in tasks for pid in task.read_text().split())
        return []

    @property
    def rows(self) -> int:
        return count_rows(self.folder)

    @property
    def goes_on(self) -> bool:
        return "going on" in self.said

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self, timeout_s: float = END_S) -> int:
        """Its exit code. All that it has started ends with it."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        assert code is not None, f"still running after {timeout_s} s; said {self.said!r}"
        time.sleep(0.05)  # For its last words to arrive.
        return code

    def reach(self, rows: int) -> None:
        """Wait for so many steps."""
        end = time.monotonic() + END_S
        while self.rows < rows and self.process.is_alive():
            assert time.monotonic() < end, f"{self.rows} rows; said {self.said!r}"
            time.sleep(0.002)


@pytest.fixture
def start() -> Iterator[Start]:
    runs: list[Run] = []

    def one(file: Path, *words: str, room: int | None = None) -> Run:
        """`room`: the most bytes that it can write into a file."""
        folder = file.parent
        for name in ("out", "err"):
            (folder / name).write_bytes(b"")
        ours, theirs = FORKSERVER.Pipe(duplex=False)
        arguments = (folder, theirs, [str(file), *words], room)
        process = FORKSERVER.Process(target=_command, args=arguments)
        process.start()
        theirs.close()
        Thread(target=_keep, args=(ours, folder / "err"), daemon=True).start()
        runs.append(Run(process, folder))
        return runs[-1]

    yield one
    for run in runs:
        run.process.kill()
        run.process.join()


def _keep(pipe: Connection, file: Path) -> None:
    """What is said goes through a pipe, which has room where the disk has none."""
    with pipe, file.open("ab", buffering=0) as out:
        while said := os.read(pipe.fileno(), 10_000):
            out.write(said)


def _command(folder: Path, stderr: Connection, words: list[str], room: int | None) -> None:
    import preamble

    os.chdir(ROOT)
    torch.set_num_threads(1)
    os.dup2(os.open(folder / "out", os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    if room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    sys.exit(preamble.main(["tune", *words]))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def latest(folder: Path) -> Path:
    """Of the runs there. One that was killed before its first state does not go on."""
    runs = (folder / "runs/answer").glob("[1-9]*")
    return max(runs, key=lambda one: int(one.name), default=folder / "runs/answer/1")


def logged(folder: Path) -> list[tuple[str, ...]]:
    """What a run tells of its steps that a clock has no part in, as it is written."""
    with suppress(FileNotFoundError), open(latest(folder) / "metrics.csv") as file:
        names = ("step", "loss", "rate", "gradient_norm", "skipped")
        return [tuple(row[name] or "" for name in names) for row in csv.DictReader(file)]
    return []


def count_rows(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return (latest(folder) / "metrics.csv").read_bytes().count(b"\n") - 1
    return 0


def states(folder: Path) -> list[str]:
    return sorted(one.name for one in latest(folder).iterdir() if "state-" in one.name)


def adapters(folder: Path) -> list[str]:
    """What a server would see."""
    return sorted(one.name for one in (folder / "adapters").iterdir() if one.name[0] != ".")


def table(folder: Path) -> torch.Tensor:
    return open_adapter(folder / "adapters" / "answer@1.safetensors").table


def made(folder: Path, checkpoint: Path, **changes: object) -> Path:
    """Settings of a run in a folder of its own."""
    folder.mkdir(exist_ok=True)
    return write_settings(folder, checkpoint, **{"save_every": 3, **changes})


def test_a_run_that_is_killed_twenty_times_learns_what_it_would_have(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    settings = {"steps": 60, "method": "lstm", "encoder_dropout": 0.2, "learning_rate": 0.01}
    settings |= {"batch_examples": 2, "virtual_tokens": 4}
    assert start(made(tmp_path / "whole", checkpoint, **settings)).end() == 0
    file, dice, kills = made(tmp_path / "killed", checkpoint, **settings), random.Random(1), 0
    folder = file.parent
    while kills < KILLS:
        run, before = start(file), count_rows(folder)
        if kills % 5 == 4:
            time.sleep(dice.uniform(0, 0.5))  # While it loads, mostly.
        else:
            # A run that goes on cuts off rows first; then it makes them again.
            eventually(lambda run=run: "tuning" in run.said, END_S)  # type: ignore[misc]
            run.reach(min((before if run.goes_on else 0) + dice.randint(0, 3), 56))
        run.kill()
        assert run.end() == -signal.SIGKILL
        assert adapters(folder) == []
        kills += 1
    assert 0 < count_rows(folder) < 60
    assert start(file).end() == 0
    assert logged(folder) == logged(tmp_path / "whole")
    assert len(logged(folder)) == 60
    assert torch.equal(table(folder), table(tmp_path / "whole"))
    assert states(folder) == []


@pytest.mark.parametrize("method", ["mlp", "full"])
def test_a_run_that_is_killed_while_it_ends_leaves_one_result(
    method: str, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    settings = {"method": method, "learning_rate": 1e-3}
    file, dice = made(tmp_path, checkpoint, steps=4, **settings), random.Random(2)
    result = "answer-1" if method == "full" else "answer@1.safetensors"
    kills = 0
    for _ in range(12):
        run = start(file)
        run.reach(4) if kills == 0 else eventually(lambda run=run: "tuning" in run.said)  # type: ignore
        time.sleep(dice.uniform(0, 0.06))
        run.kill()
        run.end()
        kills += 1
        assert set(adapters(tmp_path)) <= {result}
        if adapters(tmp_path) and not states(tmp_path):
            break  # All was done but the goodbye.
    else:
        assert start(file).end() == 0
    assert kills
    assert adapters(tmp_path) == [result]
    assert states(tmp_path) == []
    assert len(logged(tmp_path)) == 4


def test_splits_are_killed_and_go_on_to_the_losses_of_one_rank(
    tmp_path: Path, start: Start
) -> None:
    """Either end of a run, at any rank, ends all of it; validation writes answers meanwhile."""
    checkpoint = tmp_path / "model"
    write_checkpoint(tmp_path)  # For its tokenizer.
    deep = lively(CONFIG.with_fields(num_layers=4, moe_layers=(False,) * 4))
    write_native(deep, checkpoint, tokenizer=tmp_path / "tokenizer.model")
    validation = tmp_path / "validation.jsonl"
    validation.write_text("\n".join(json.dumps(record) for record in records(7)))
    settings = {
        "steps": 30,
        "validation": str(validation),
        "measure": "exact_match",
        "validate_every": 10,
        "max_new_tokens": 3,
        "batch_examples": 4,
    }
    assert start(made(tmp_path / "one", checkpoint, **settings)).end() == 0
    alone = [float(row[1]) for row in logged(tmp_path / "one")]

    splits: dict[str, dict[str, int]] = {
        "tensor": {"tp": 2},
        "all": {"pp": 2, "dp": 2, "virtual_stages": 2, "micro_batch_examples": 2},
    }
    for name, split in splits.items():
        file = made(tmp_path / name, checkpoint, **settings, **split)
        folder = file.parent
        if name == "tensor":
            run = start(file)
            run.reach(4)
            others = run.ranks
            assert len(others) == 1
            run.kill()
            run.end()
            eventually(lambda others=others: all(map(gone, others)), 10)  # type: ignore[misc]
        run = start(file)
        run.reach(count_rows(folder) + 8)
        others = run.ranks
        assert len(others) == (1 if name == "tensor" else 3)
        os.kill(others[-1], signal.SIGKILL)
        assert run.end() == 1
        last = run.said.splitlines()[-1]
        assert last.startswith(f"preamble tune: rank {len(others)} was killed by signal 9")
        assert "Traceback" not in run.said
        assert all(map(gone, others))
        assert adapters(folder) == []

        run = start(file)
        assert run.end() == 0, run.said
        assert "going on from step" in run.said
        losses = [float(row[1]) for row in logged(folder)]
        assert losses == pytest.approx(alone, rel=1e-10), name
        torch.testing.assert_close(table(folder), table(tmp_path / "one"), rtol=1e-5, atol=1e-6)
        cards = [
            open_adapter(tmp_path / one / "adapters" / "answer@1.safetensors").card
            for one in ("one", name)
        ]
        assert cards[0].metrics["validation"].keys() == cards[1].metrics["validation"].keys()
        for what in ("prompt", "adapter"):
            shares = [
                value
                for card in cards
                for key, value in card.metrics["validation"].items()
                if what in key
            ]
            assert len(shares) % 2 == 0
            assert shares[: len(shares) // 2] == shares[len(shares) // 2 :]


def test_a_rank_that_fails_while_it_starts_does_not_keep_the_others(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    for name in ("killed", "misled"):
        file = made(tmp_path / name, checkpoint, steps=4, tp=2)
        run = start(file)
        eventually(lambda run=run: len(run.ranks) == 1, END_S)  # type: ignore[misc]
        if name == "killed":
            os.kill(run.ranks[0], signal.SIGKILL)
        else:
            (file.parent / "examples.jsonl").unlink()  # Rank 0 has read it.
        assert run.end() == 1
        (line,) = run.said.splitlines()
        words = "rank 1 was killed by signal 9" if name == "killed" else "cannot be read"
        assert words in line, line


def test_a_disk_that_is_full_on_one_of_two_ranks_ends_no_run(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(made(tmp_path, checkpoint, steps=40, tp=2))
    run.reach(4)
    (other,) = run.ranks
    resource.prlimit(other, resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
    assert run.end() == 0, run.said
    assert run.said.count("no state could be saved") == 1, run.said
    assert run.said.count("warning") == 1, run.said
    assert len(logged(tmp_path)) == 40
    assert adapters(tmp_path) == ["answer@1.safetensors"]


def test_a_full_disk_keeps_logs_and_states_from_a_run_but_not_its_adapter(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(made(tmp_path, checkpoint, steps=40), room=5000)
    assert run.end() == 0
    assert run.said.count("no state could be saved") == 1, run.said
    assert run.said.count("cannot write") == 1, run.said
    assert run.said.count("warning") == 2
    assert adapters(tmp_path) == ["answer@1.safetensors"]
    assert states(tmp_path) == []


@pytest.mark.parametrize("method", ["prompt-tuning", "lstm", "full"])
def test_what_has_no_room_at_the_end_is_written_when_there_is_some(
    method: str, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    """Without a word of Python: one sentence, and the same command has little left to do."""
    rate = {"prompt-tuning": 0.5, "lstm": 0.01, "full": 1e-4}[method]
    file = made(tmp_path, checkpoint, steps=30, method=method, learning_rate=rate)
    run = start(file)
    run.reach(4)
    assert run.process.pid is not None
    # Of an lstm the adapter has room, and its network has none.
    room = 5000 if method == "lstm" else 100
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    assert run.end() == 1
    assert run.said.splitlines()[-1].startswith("preamble tune: "), run.said
    assert "cannot be written" in run.said.splitlines()[-1]
    assert "Traceback" not in run.said
    assert adapters(tmp_path) == (["answer@1.safetensors"] if method == "lstm" else [])
    (state,) = [one for one in states(tmp_path) if STATE.fullmatch(one)]
    assert int(state[-8:]) >= 3

    again = start(file)
    assert again.end() == 0, again.said
    name = "answer-1" if method == "full" else "answer@1.safetensors"
    assert adapters(tmp_path) == [name]
    assert states(tmp_path) == []
    assert [row[0] for row in logged(tmp_path)] == [str(step) for step in range(1, 31)]


def rewrite(checkpoint: Path, model: Checkpoint) -> None:
    """Another model at the same path, as whole as the one before."""
    tokenizer = checkpoint.parent / "tokenizer.model"
    shutil.rmtree(checkpoint)
    write_native(model, checkpoint, tokenizer=tokenizer)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_loss_that_is_no_number_is_one_sentence_with_the_step(
    tp: int, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    wild = {"method": "mlp", "learning_rate": 1e30, "dtype": None}
    run = start(made(tmp_path, checkpoint, save_every=1, tp=tp, **wild))
    assert run.end() == 1
    assert "Traceback" not in run.said
    assert run.said.count("loss is nan") == 1, run.said
    last = run.said.splitlines()[-1]
    assert last.startswith(f"preamble tune: the loss is nan at step {run.rows + 1}; try a smaller")
    assert run.rows >= 1
    assert states(tmp_path) == [f"state-{run.rows:08d}"]
    assert adapters(tmp_path) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_a_base_that_is_not_finite_is_refused_once(tp: int, tmp_path: Path, start: Start) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    sound = lively(CONFIG)
    tensors = {name: sound.read(name).clone() for name in sound.tensors}
    tensors["embedding.word_embeddings.weight"][-1] = torch.nan
    rewrite(checkpoint, in_memory(CONFIG, tensors))
    run = start(made(tmp_path, checkpoint, tp=tp))
    assert run.end() == 1
    (line,) = run.said.splitlines()
    assert "holds values that are not finite" in line


def test_a_base_that_changed_between_two_halves_is_refused(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    file = made(tmp_path, checkpoint, steps=MANY)
    run = start(file)
    run.reach(4)
    run.kill()
    run.end()
    rewrite(checkpoint, lively(CONFIG, seed=5))

    assert main(["tune", str(file)]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "the base model has changed since; bring back what it learned from" in line
    assert [one for one in states(tmp_path) if STATE.fullmatch(one)]


def test_a_second_run_in_the_same_folder_is_refused_at_once(
    checkpoint: Path, tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    file = made(tmp_path, checkpoint, steps=MANY)
    run = start(file)
    run.reach(1)
    assert run.process.is_alive()
    assert main(["tune", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is in use by another `preamble tune`" in line
    before = run.rows
    run.reach(before + 3)
    run.kill()
    run.end()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_kind_signal_saves_and_a_second_one_ends_at_once(
    tp: int, checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    file = made(tmp_path, checkpoint, steps=MANY, save_every=MANY, tp=tp)
    for number in (signal.SIGINT, signal.SIGTERM):
        run = start(file)
        run.reach(count_rows(tmp_path) + 2)
        others = run.ranks
        for pid in [*others, run.process.pid or 0]:  # As a service manager ends a whole group.
            os.kill(pid, number)
        assert run.end() == 130, run.said
        assert all(map(gone, others))
        assert run.wrote == ""
        assert run.said.count("saving, after this step") == 1
        assert run.said.endswith(
            f"saved at step {run.rows}; the same command goes on from there\n"
        ), run.said
        assert states(tmp_path) == [f"state-{run.rows:08d}"]
    saved = states(tmp_path)
    run = start(file)
    run.reach(run.rows + 2)
    others = run.ranks
    # As long as it is stopped it cannot save; both are heard when it goes on.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        run.kill(number)
    assert run.end() == 130
    assert "interrupted" in run.said.splitlines()[-1], run.said
    assert "Traceback" not in run.said
    eventually(lambda: all(map(gone, others)), 10)
    assert states(tmp_path) == saved


def torchrun(file: Path) -> "subprocess.Popen[bytes]":
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "preamble"]
    with open(file.parent / "err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", *words, "tune", str(file)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )


def test_torchrun_starts_interrupts_and_is_told_once(checkpoint: Path, tmp_path: Path) -> None:
    file = made(tmp_path, checkpoint, steps=200, save_every=MANY, tp=2)
    for attempt in ("interrupted", "finished", "refused"):
        if attempt == "refused":
            file = made(tmp_path, checkpoint, steps=200, tp=2, name="a@b@c")
        launcher = torchrun(file)
        try:
            if attempt == "interrupted":
                eventually(lambda: count_rows(tmp_path) > 2, END_S)
                launcher.terminate()
            code = launcher.wait(END_S)
        finally:
            launcher.kill()
            launcher.wait()
        said = (tmp_path / "err").read_text()
        if attempt == "interrupted":
            assert code != 0
            assert said.count("saving, after this step") == 1, said
            assert f"saved at step {count_rows(tmp_path)}" in said
            assert states(tmp_path) == [f"state-{count_rows(tmp_path):08d}"]
        elif attempt == "finished":
            assert code == 0, said
            assert said.count("going on from step") == 1
            assert adapters(tmp_path) == ["answer@1.safetensors"]
            assert len(logged(tmp_path)) == 200
        else:
            assert code == 1
            assert said.count("preamble tune: ") == 1, said
    assert adapters(tmp_path) == ["answer@1.safetensors"]


def test_data_that_is_wrong_is_told_once_for_all_ranks(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    for lines, words in (("", "no usable example"), ('{"prompt": "a"}', "line 1: no field")):
        file = made(tmp_path, checkpoint, tp=2)
        (tmp_path / "examples.jsonl").write_text(lines)
        run = start(file)
        assert run.end() == 1
        (line,) = run.said.splitlines()
        assert words in line
    assert adapters(tmp_path) == []


@pytest.mark.parametrize("split", [{"tp": 2}, {"dp": 2}])
def test_a_state_of_another_split_is_refused_once(
    split: dict[str, int], checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    run = start(made(tmp_path, checkpoint, steps=MANY))
    run.reach(4)
    run.kill()
    run.end()
    run = start(made(tmp_path, checkpoint, steps=MANY, **split))
    assert run.end() == 1
    (line,) = run.said.splitlines()
    (name,) = split
    assert f"had {name} 1, now it is 2; set it back to go on, or give --restart" in line


CLOSED = {
    "stderr is closed": "2>&-",
    "nobody reads stderr": "2> >(exec 0<&-)",
    "nobody reads stdout": "> >(exec 0<&-)",
}


@pytest.mark.parametrize("how", CLOSED)
def test_a_run_needs_nobody_to_listen(how: str, checkpoint: Path, tmp_path: Path) -> None:
    file = made(tmp_path, checkpoint, steps=6)
    line = f"{sys.executable} -m preamble tune {file} {CLOSED[how]}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, timeout=END_S, check=False
    )
    assert done.returncode == (1 if how == "nobody reads stdout" else 0), done.stderr
    assert b"Traceback" not in done.stderr
    expected = b"" if "stdout" in how else b"answer@1.safetensors\n"
    assert done.stdout.endswith(expected)
    assert done.stdout.count(b"\n") == (1 if expected else 0), done.stdout
    assert adapters(tmp_path) == ["answer@1.safetensors"]
    assert len(logged(tmp_path)) == 6
    assert (latest(tmp_path) / "metrics.csv").read_text().count("\n") == 7


def test_a_running_server_serves_what_was_just_learned(
    checkpoint: Path, tmp_path: Path, start: Start
) -> None:
    before = base_digest(open_checkpoint(checkpoint))
    file = made(tmp_path, checkpoint, steps=80)
    limits = {"adapters": str(tmp_path / "adapters")}
    with (
        serving(checkpoint, tmp_path / "serve.yaml", **limits) as server,
        server.client() as client,
    ):
        plain = client.generate("the", Options(max_new_tokens=4)).token_ids
        assert start(file).end() == 0
        # An unknown name is looked for once more before it is refused.
        first = client.generate({"prompt": "the"}, Options(adapter="answer"))
        assert first.text == " dog"
        assert start(file).end() == 0
        eventually(
            lambda: client.generate({"prompt": "the"}, Options(adapter="answer@2")).text == " dog"
        )
        assert client.generate("the", Options(max_new_tokens=4)).token_ids == plain
    assert adapters(tmp_path) == ["answer@1.safetensors", "answer@2.safetensors"]
    assert base_digest(open_checkpoint(checkpoint)) == before
