"""Expert parallelism: served tokens equal those of each request alone, on one rank."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.support.batch_runs import SIZES, run_and_check
from tests.support.engine_scenarios import (
    AdapterFiles,
    draw_scenario,
    preemption_scenario,
    shared_document_scenario,
)
from tests.support.models import EIGHT_EXPERTS
from tests.support.suites import cases_by_suite

NAME = "eight experts"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    folder = tmp_path_factory.mktemp("adapters")
    return AdapterFiles.make(folder, EIGHT_EXPERTS.hidden_size, SIZES)


# Tensor, pipeline and expert ranks.
RANK_SIZES = [sizes for sizes in product((1, 2), (1, 2), (2, 4)) if sizes != (1, 1, 2)]
SLOW_RANK_SIZES = [(2, 1, 2), (1, 2, 2), (2, 2, 4)]


@pytest.mark.parametrize(
    ("tp", "pp", "ep"),
    [
        (1, 1, 2),
        *cases_by_suite(
            SLOW_RANK_SIZES, [sizes for sizes in RANK_SIZES if sizes not in SLOW_RANK_SIZES]
        ),
    ],
)
def test_tokens_are_equal_with_preemption_and_prefix_hits(
    tp: int, pp: int, ep: int, adapters: AdapterFiles, tmp_path: Path
) -> None:
    scenarios = [
        preemption_scenario(NAME, adapters),
        shared_document_scenario(NAME, adapters),
        draw_scenario(NAME, 0, adapters),
    ]
    coverage = run_and_check(scenarios, (tp, pp), tmp_path, adapters, ep=ep)
    assert coverage.preemptions and coverage.cached and coverage.chunked


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (1, 2)])
def test_steps_that_are_launched_early_have_the_same_tokens(
    tp: int, ep: int, adapters: AdapterFiles, tmp_path: Path
) -> None:
    """With asynchronous scheduling, the ranks get the last tokens from the first rank."""
    scenario = draw_scenario(NAME, 0, adapters)
    settings = scenario.settings | {"step_ahead": "on"}
    scenarios = [
        replace(scenario, settings=settings, captured=captured) for captured in (False, True)
    ]
    coverage = run_and_check(scenarios, (tp, 1), tmp_path, adapters, ep=ep)
    assert coverage.early and coverage.replayed
