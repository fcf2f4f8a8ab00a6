"""The flight ring tells what the engine was doing, and nothing of what anybody asked."""

import json
import re
import stat
from pathlib import Path
from typing import Any

from gpt.sampling_params import Sampling
from serving.messages import Begin, Fill, Guide, Load, Outcome, Rewrite, Scored, Step, Table
from serving.worker.flight_recorder import CRASHES_MAX, Flight, crash_path

# No size, place or number of a step is in this range: whatever is, is a token id.
SECRET = 700_000
FOUND = re.compile(r"7000\d\d")

SAMPLING = Sampling(
    max_new_tokens=9,
    temperature=0.5,
    logit_bias=((SECRET + 1, 2.0),),
    allowed_token_ids=(SECRET + 2,),
    bad_words=((SECRET + 3, SECRET + 4),),
    stop_token_ids=(SECRET + 5,),
    logprobs=2,
)


def step(number: int) -> Step:
    guide = Guide("choice", f'["{SECRET + 6}"]')
    return Step(
        number,
        slots=[3, 1],
        past=[16, 0],
        lengths=[1, 2],
        ids=[SECRET + 7, SECRET + 8, SECRET + 9],
        draws=[True, True],
        scores=[0, 0],
        drafts=[0, 1],
        begins=[Begin(1, SAMPLING, [SECRET + 8, SECRET + 9], [SECRET + 10], guide)],
        tables=[Table(1, 0, [5])],
        copies=[(4, 5)],
        clears=[6],
        rewrites=[Rewrite(0, "d" * 64, b"secret" * 4)],
        fills=[Fill("e" * 64, 2, 3, [5], b"secret" * 5)],
    )


def answer(number: int) -> Outcome:
    scores = [Scored(-0.5, 1, [(SECRET + 11, -0.5)])] * 2
    prompt_scores = [[Scored(-1.0, 2, [(SECRET + 12, -0.1)])]]
    return Outcome(number, [SECRET + 13, SECRET + 14], scores, prompt_scores, [1], 0.004)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def flown() -> Flight:
    flight = Flight(10)
    for number in (1, 2):
        flight.begin(step(number))
        flight.end(answer(number))
    flight.begin(step(3))
    return flight


def test_the_ring_says_what_the_engine_was_doing(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    assert flown().write(path, "rank 2 is gone", Load(waiting=4, blocks_held=7))
    head, first, second, last = lines(path)
    assert head["why"] == "rank 2 is gone"
    assert (head["steps"], head["load"]["waiting"], head["load"]["blocks_held"]) == (3, 4, 7)
    assert [line["number"] for line in (first, second, last)] == [1, 2, 3]
    assert (first["slots"], first["past"], first["lengths"]) == ([3, 1], [16, 0], [1, 2])
    assert first["drafts"] == [0, 1]
    assert (first["tokens"], first["copies"], first["clears"]) == (3, [[4, 5]], [6])
    assert first["rewrites"] == [{"start": 0, "digest": "d" * 64, "bytes": 24}]
    filled = {"digest": "e" * 64, "start": 2, "blocks": [5], "bytes": 30}
    assert first["fills"] == [filled]
    begin = first["begins"][0]
    assert (begin["slot"], begin["prompt_tokens"], begin["made_tokens"]) == (1, 2, 1)
    assert (begin["sampling"]["temperature"], begin["sampling"]["bad_words"]) == (0.5, 1)
    assert (first["outcome"]["drawn"], first["outcome"]["faults"]) == (2, [1])
    assert first["ms"] >= 0
    # What ran when it ended has no outcome.
    assert last["outcome"] is None
    assert last["ms"] is None


def test_no_token_id_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    closed, open_ = tmp_path / "closed.jsonl", tmp_path / "open.jsonl"
    flight = flown()
    flight.write(closed, "asked", Load())
    flight.write(open_, "asked", Load(), ids=True)
    assert not FOUND.search(closed.read_text())
    assert "secret" not in closed.read_text()
    assert len(set(FOUND.findall(open_.read_text()))) == 11  # Not of alternatives, nor of guides.
    assert "secret" not in open_.read_text()


def test_only_its_owner_may_read_it_and_half_a_file_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    path.write_text("older\n")
    flown().write(path, "asked", Load())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert len(lines(path)) == 4


def test_a_ring_that_cannot_be_written_hurts_nobody(tmp_path: Path) -> None:
    assert not flown().write(tmp_path / "none" / "flight.jsonl", "asked", Load())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert not flown().write(tmp_path / "file" / "flight.jsonl", "asked", Load())
    assert not flown().write(tmp_path / ("long" * 99), "asked", Load())
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_ring_is_bounded_in_steps_and_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    few = Flight(5)
    small = Flight(1000, bytes_max=4000)
    for number in range(50):
        few.begin(step(number))
        small.begin(step(number))
    few.write(path, "asked", Load())
    assert [line["number"] for line in lines(path)[1:]] == [45, 46, 47, 48, 49]
    small.write(path, "asked", Load())
    assert 2 < len(lines(path)) < 40
    assert lines(path)[-1]["number"] == 49


def test_a_step_larger_than_the_ring_leaves_it_empty_and_well(tmp_path: Path) -> None:
    flight = Flight(5, bytes_max=10)
    flight.begin(step(1))
    flight.end(answer(1))
    assert flight.write(tmp_path / "flight.jsonl", "asked", Load())


def test_every_crash_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert crash_path(str(tmp_path)) != crash_path(str(tmp_path))
    assert crash_path(str(tmp_path)).parent == tmp_path
    assert crash_path(None).parent.is_dir()


def test_many_crashes_leave_the_last_ones_only(tmp_path: Path) -> None:
    flight = Flight(4)
    written = []
    for _ in range(CRASHES_MAX + 5):
        written.append(crash_path(str(tmp_path)))
        assert flight.write(written[-1], "a crash", Load())
    left = sorted(tmp_path.iterdir())
    assert len(left) == CRASHES_MAX
    assert written[-1] in left
