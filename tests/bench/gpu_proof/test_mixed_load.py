"""Mixed load of a GPU proof: the schedule of the requests, and the figures of known times."""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from bench.gpu_proof import mixed_load
from bench.gpu_proof.mixed_load import COLUMNS, RequestTimes, describe_times, measure_mixed_load
from bench.gpu_proof.model_checks import open_network
from bench.gpu_proof.proof_sizes import MIXED_LOAD, ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.gpu_proof.stage_runner import FiguresFile
from bench.suites.gpu import GpuSizes
from serving.engine.engine import Engine


class Figures(FiguresFile):
    """Figures in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def _write(self, line: dict[str, object]) -> None:
        self.lines.append(line)


def test_requests_arrive_at_fixed_times_with_prompts_in_turn() -> None:
    arrivals = MIXED_LOAD.arrivals
    assert len(arrivals) == MIXED_LOAD.requests == 150
    assert arrivals[:5] == [(0.0, 256), (0.1, 1024), (0.2, 512), (0.3, 2048), (0.4, 256)]
    assert arrivals[-1][0] < MIXED_LOAD.seconds
    context_tokens = max(MIXED_LOAD.prompt_tokens) + MIXED_LOAD.new_tokens
    assert context_tokens <= GpuSizes().network.max_position_embeddings
    assert max(MIXED_LOAD.chunk_tokens) <= max(MIXED_LOAD.prompt_tokens)


def test_figures_of_known_times() -> None:
    first = RequestTimes(0.0, 100, [(0.5, 1), (0.6, 1), (0.9, 3)])
    second = RequestTimes(1.0, 300, [(1.25, 1), (2.0, 1)])
    assert first.new_tokens == 5 and second.time_to_first_token_s == 0.25
    assert first.token_gaps_s == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert describe_times([first, second]) == [
        "2",
        "4",  # 7 new tokens in 2 seconds, rounded to even.
        "200",
        "250.0 / 500.0",
        "100.0 / 750.0",
    ]


@pytest.mark.slow
def test_the_load_runs_with_each_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Figures()
    budgets: list[object] = []

    def open_and_record(*arguments: Any, **settings: Any) -> AbstractContextManager[Engine]:
        budgets.append(settings["step_tokens_max"])
        return open_network(*arguments, **settings)

    monkeypatch.setattr(mixed_load, "open_network", open_and_record)
    measure_mixed_load(StageContext("cpu", figures))
    load = ProofSizes.of("cpu").mixed_load
    tables = [line["value"] for line in figures.lines if line["figure"] == "table"]
    assert len(tables) == len(load.chunk_tokens)
    table = tables[-1]
    assert isinstance(table, dict) and table["columns"] == list(COLUMNS)
    by_column = [dict(zip(COLUMNS, line, strict=True)) for line in table["lines"]]
    chunks = [int(line["tokens of a chunk, at most"]) for line in by_column]
    assert chunks == budgets == list(load.chunk_tokens)
    assert {line["requests"] for line in by_column} == {str(load.requests)}
    # More steps than chunks of the longest prompt.
    steps_min = [-(-max(load.prompt_tokens) // chunk) for chunk in chunks]
    assert all(int(line["steps"]) > least for line, least in zip(by_column, steps_min, strict=True))
    assert all("not measured / " in line[COLUMNS[-1]] for line in by_column)


@pytest.mark.slow
def test_missing_tokens_fail_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [RequestTimes(0.0, 8, [(0.1, 4)])] * (ProofSizes.of("cpu").mixed_load.requests - 1)
    monkeypatch.setattr("bench.gpu_proof.mixed_load.run_load", lambda *_: times)
    with pytest.raises(StageFailure, match=r"chunks of 16: 4 tokens are missing; chunks of 64: 4"):
        measure_mixed_load(StageContext("cpu", Figures()))
