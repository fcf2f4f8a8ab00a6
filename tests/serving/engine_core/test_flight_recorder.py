"""Flight recorder: dumps describe the recent steps and reveal no prompts."""

import json
import re
import stat
from pathlib import Path
from typing import Any

from gpt.sampling_params import SamplingParams
from serving.engine_core.flight_recorder import CRASH_FILES_MAX, FlightRecorder, crash_path
from serving.messages import (
    AdapterRowsWrite,
    BlockTableUpdate,
    EngineStats,
    Guide,
    Outcome,
    PrefixKVWrite,
    SlotInit,
    Step,
    TokenScore,
)

# No size, index or step ID is in this range: a number in it is a token id.
SECRET = 700_000
SECRET_PATTERN = re.compile(r"7000\d\d")

SAMPLING = SamplingParams(
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
        token_ids=[SECRET + 7, SECRET + 8, SECRET + 9],
        draws=[True, True],
        prompt_score_counts=[0, 0],
        draft_counts=[0, 1],
        slot_inits=[SlotInit(1, SAMPLING, [SECRET + 8, SECRET + 9], [SECRET + 10], guide)],
        block_table_updates=[BlockTableUpdate(1, 0, [5])],
        block_copies=[(4, 5)],
        block_clears=[6],
        adapter_writes=[AdapterRowsWrite(0, "d" * 64, b"secret" * 4)],
        prefix_writes=[PrefixKVWrite("e" * 64, 2, 3, [5], b"secret" * 5)],
    )


def outcome(number: int) -> Outcome:
    scores = [TokenScore(-0.5, 1, [(SECRET + 11, -0.5)])] * 2
    prompt_scores = [[TokenScore(-1.0, 2, [(SECRET + 12, -0.1)])]]
    return Outcome(number, [SECRET + 13, SECRET + 14], scores, prompt_scores, [1], 0.004)


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorder_with_steps() -> FlightRecorder:
    recorder = FlightRecorder(10)
    for number in (1, 2):
        recorder.record_step(step(number))
        recorder.record_outcome(outcome(number))
    recorder.record_step(step(3))
    return recorder


def test_a_dump_describes_the_recorded_steps(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    assert recorder_with_steps().write(
        path, "rank 2 is gone", EngineStats(waiting=4, blocks_held=7)
    )
    head, first, second, last = read_lines(path)
    assert head["why"] == "rank 2 is gone"
    assert (head["steps"], head["load"]["waiting"], head["load"]["blocks_held"]) == (3, 4, 7)
    assert [line["number"] for line in (first, second, last)] == [1, 2, 3]
    assert (first["slots"], first["past"], first["lengths"]) == ([3, 1], [16, 0], [1, 2])
    assert first["drafts"] == [0, 1]
    assert (first["tokens"], first["copies"], first["clears"]) == (3, [[4, 5]], [6])
    assert first["rewrites"] == [{"start": 0, "digest": "d" * 64, "bytes": 24}]
    prefix_write = {
        "digest": "e" * 64,
        "start": 2,
        "blocks": [5],
        "other_group_blocks": [],
        "bytes": 30,
    }
    assert first["fills"] == [prefix_write]
    begin = first["begins"][0]
    assert (begin["slot"], begin["prompt_tokens"], begin["made_tokens"]) == (1, 2, 1)
    assert (begin["sampling"]["temperature"], begin["sampling"]["bad_words"]) == (0.5, 1)
    assert (first["outcome"]["drawn"], first["outcome"]["faults"]) == (2, [1])
    assert first["ms"] >= 0
    # The step in flight at the end has no outcome.
    assert last["outcome"] is None
    assert last["ms"] is None


def test_token_ids_are_written_only_on_request(tmp_path: Path) -> None:
    redacted, with_ids = tmp_path / "redacted.jsonl", tmp_path / "with-ids.jsonl"
    recorder = recorder_with_steps()
    recorder.write(redacted, "request", EngineStats())
    recorder.write(with_ids, "request", EngineStats(), with_token_ids=True)
    assert not SECRET_PATTERN.search(redacted.read_text())
    assert "secret" not in redacted.read_text()
    # Neither alternatives nor guides are written.
    assert len(set(SECRET_PATTERN.findall(with_ids.read_text()))) == 11
    assert "secret" not in with_ids.read_text()


def test_a_dump_is_private_and_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    path.write_text("older\n")
    recorder_with_steps().write(path, "request", EngineStats())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert len(read_lines(path)) == 4


def test_a_failed_write_raises_nothing(tmp_path: Path) -> None:
    assert not recorder_with_steps().write(
        tmp_path / "none" / "flight.jsonl", "request", EngineStats()
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert not recorder_with_steps().write(
        tmp_path / "file" / "flight.jsonl", "request", EngineStats()
    )
    assert not recorder_with_steps().write(tmp_path / ("long" * 99), "request", EngineStats())
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_ring_buffer_is_bounded_in_steps_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "flight.jsonl"
    by_steps = FlightRecorder(5)
    by_bytes = FlightRecorder(1000, ring_bytes_max=4000)
    for number in range(50):
        by_steps.record_step(step(number))
        by_bytes.record_step(step(number))
    by_steps.write(path, "request", EngineStats())
    assert [line["number"] for line in read_lines(path)[1:]] == [45, 46, 47, 48, 49]
    by_bytes.write(path, "request", EngineStats())
    assert 2 < len(read_lines(path)) < 40
    assert read_lines(path)[-1]["number"] == 49


def test_a_step_over_the_byte_limit_leaves_an_empty_ring(tmp_path: Path) -> None:
    recorder = FlightRecorder(5, ring_bytes_max=10)
    recorder.record_step(step(1))
    recorder.record_outcome(outcome(1))
    assert recorder.write(tmp_path / "flight.jsonl", "request", EngineStats())


def test_every_crash_dump_has_a_new_path(tmp_path: Path) -> None:
    assert crash_path(str(tmp_path)) != crash_path(str(tmp_path))
    assert crash_path(str(tmp_path)).parent == tmp_path
    assert crash_path(None).parent.is_dir()


def test_old_crash_dumps_are_deleted(tmp_path: Path) -> None:
    recorder = FlightRecorder(4)
    written = []
    for _ in range(CRASH_FILES_MAX + 5):
        written.append(crash_path(str(tmp_path)))
        assert recorder.write(written[-1], "a crash", EngineStats())
    remaining = sorted(tmp_path.iterdir())
    assert len(remaining) == CRASH_FILES_MAX
    assert written[-1] in remaining
