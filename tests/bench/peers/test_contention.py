"""Contention benchmark on a tiny model; the shares are not checked."""

import math
from pathlib import Path

import pytest

from bench.harness.targets import Row
from bench.peers import contention, prompt_tuning
from tests.support.models import TINY_GPT2

NETWORK: dict[str, float | None] = {
    **TINY_GPT2,
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
