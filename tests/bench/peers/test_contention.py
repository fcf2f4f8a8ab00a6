"""Contention benchmark on a tiny model; the shares are not checked."""

import math
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import pytest

from bench.harness.targets import Row
from bench.peers import contention, prompt_tuning

NETWORK: dict[str, float | None] = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 320,
    "n_positions": 160,
}


def test_the_share_is_relative_to_the_fair_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "usable_cores", lambda: 2)
    monkeypatch.setattr(contention, "shares_by_session", lambda: False)
    samples = {0: [90.0, 60.0], 1: [30.0, 40.0], 2: [45.0, 15.0]}
    assert contention.fair_shares(samples, 1) == pytest.approx([0.5, 1.0])
    assert contention.fair_shares(samples, 2) == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize(
    ("cores", "busy", "by_session", "fraction"),
    [
        (2, 1, False, 2 / 3),
        (2, 2, False, 1 / 2),
        (2, 1, True, 1 / 2),
        (2, 2, True, 1 / 3),
        (8, 1, True, 7 / 8),
        (8, 15, True, 1 / 16),
    ],
)
def test_the_fair_fraction_depends_on_what_shares_the_cores(
    cores: int, busy: int, by_session: bool, fraction: float
) -> None:
    assert contention.fair_fraction(cores, busy, by_session=by_session) == pytest.approx(fraction)


def test_busy_processes_run_only_inside_of_the_context() -> None:
    def children() -> set[str]:
        return set(Path("/proc/self/task").joinpath(own_task, "children").read_text().split())

    own_task = Path("/proc/thread-self").resolve().name
    before = children()
    with contention.busy_processes(2):
        assert len(children() - before) == 2
    assert children() == before


def test_the_trainer_uses_the_cores_of_the_fair_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "usable_cores", lambda: 8)
    assert contention.ContentionSizes().tuning.threads == 8


def test_an_engine_that_fails_in_a_round_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_speed() -> float:
        if next(calls) == 2:
            raise contention.ContentionError("the process exited: out of memory")
        return 10.0

    monkeypatch.setattr(contention, "busy_processes", lambda count: nullcontext())
    for failing, working in (("ours", "llama"), ("llama", "ours")):
        calls = count()
        speeds = {failing: failing_speed, working: lambda: 10.0}
        outputs = list(contention.report_shares("serving", "tokens/s", speeds, {}, 2))
        rows = [output for output in outputs if isinstance(output, Row)]
        reason = "the process exited: out of memory"
        assert reason in outputs
        assert len(rows) == 2
        if failing == "ours":
            assert {row.not_run_reason for row in rows} == {reason}
        else:
            assert all(row.value > 0 and set(row.samples) == {"ours"} for row in rows)


def test_an_engine_that_does_not_start_has_rows_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> object:
        raise RuntimeError("the ours process exited: no module torch")

    monkeypatch.setattr(contention, "EngineProcess", refuse)
    monkeypatch.setattr(contention, "start_trainers", refuse)
    for measure in (contention.measure_serving, contention.measure_tuning):
        outputs = list(measure(tmp_path / "model", 320, contention.ContentionSizes(rounds=1)))
        rows = [output for output in outputs if isinstance(output, Row)]
        assert [row.not_run_reason for row in rows] == 2 * [
            "the ours process exited: no module torch"
        ]


@pytest.mark.slow
def test_each_part_yields_a_row_for_one_and_for_two_busy_processes() -> None:
    pytest.importorskip("peft")
    tuning = prompt_tuning.TuningSizes(batch_size=2, answer_tokens=2, steps=1, threads=1)
    sizes = contention.ContentionSizes(rounds=1, prompt_tokens=8, new_tokens=8, tuning=tuning)
    outputs = list(contention.run_suite((), sizes, **NETWORK))
    rows = [output for output in outputs if isinstance(output, Row)]
    assert [row.target.name.removeprefix("contention/") for row in rows] == [
        "serving-1",
        "serving-2",
        "tuning-1",
        "tuning-2",
    ]
    assert all(math.isfinite(row.value) and row.value > 0 for row in rows)
