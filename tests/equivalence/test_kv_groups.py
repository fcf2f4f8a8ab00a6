"""Models with layers of different windows: served tokens equal those of each request alone."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from serving.config import ServerConfig
from serving.messages import Step
from serving.scheduler.block_pool import BlockPool
from serving.worker.model_runner import ModelRunner
from tests.support.batch_runs import SIZES, run_and_check
from tests.support.engine_scenarios import (
    AdapterFiles,
    build_runner,
    draw_scenario,
    preemption_scenario,
    shared_document_scenario,
)
from tests.support.models import MIXED_WINDOWS, build

NAME = "mixed windows"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    folder = tmp_path_factory.mktemp("adapters")
    return AdapterFiles.make(folder, MIXED_WINDOWS.hidden_size, SIZES)


def test_groups_share_the_memory_of_the_pool() -> None:
    """Six layers in three groups: a block stores two layers."""
    model = build(MIXED_WINDOWS)
    runner = build_runner(model, ServerConfig("model", kv_tokens_max=64))
    layer_kv = [runner.pool.layer(layer) for layer in range(6)]
    assert runner.windows == (None, 7, 7)
    assert len({kv.data_ptr() for kv in layer_kv}) == 2
    assert runner.pool.block_bytes == 2 * layer_kv[0][0].nbytes


@pytest.mark.parametrize(
    ("split", "captured"),
    [
        ((1, 1), True),
        *(
            pytest.param(split, False, marks=pytest.mark.slow)
            for split in [(1, 1), (2, 1), (1, 2), (2, 2)]
        ),
    ],
)
def test_tokens_are_equal_with_preemption_and_prefix_hits(
    split: tuple[int, int], captured: bool, adapters: AdapterFiles, tmp_path: Path
) -> None:
    scenarios = [
        preemption_scenario(NAME, adapters),
        shared_document_scenario(NAME, adapters),
        draw_scenario(NAME, 0, adapters),
    ]
    scenarios = [replace(scenario, captured=captured) for scenario in scenarios]
    coverage = run_and_check(scenarios, split, tmp_path, adapters)
    assert coverage.preemptions and coverage.cached and coverage.chunked
    assert bool(coverage.replayed) == captured


@pytest.mark.slow
def test_blocks_behind_a_window_are_not_read(
    adapters: AdapterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are free for the scheduler are NaN while a step runs."""
    apply_updates = ModelRunner._apply_updates
    allocate, release = BlockPool.allocate, BlockPool.release
    freed: set[int] = set()
    poisoned_total = 0

    def allocate_and_record(block_pool: BlockPool, count: int, group: int) -> list[int]:
        blocks = allocate(block_pool, count, group)
        freed.difference_update(blocks)
        return blocks

    def release_and_record(block_pool: BlockPool, blocks: list[int]) -> None:
        release(block_pool, blocks)
        freed.update(blocks)

    def poison_freed_blocks(runner: ModelRunner, step: Step) -> None:
        nonlocal poisoned_total
        apply_updates(runner, step)
        for layer in runner.model.layers:
            kv = runner.pool.layer(layer)
            # A block that a sequence gets again must be finite behind the sequence's end.
            kv[kv.isnan()] = 0
            kv[sorted(freed)] = math.nan
        poisoned_total += len(freed)

    monkeypatch.setattr(BlockPool, "allocate", allocate_and_record)
    monkeypatch.setattr(BlockPool, "release", release_and_record)
    monkeypatch.setattr(ModelRunner, "_apply_updates", poison_freed_blocks)
    scenario = preemption_scenario(NAME, adapters)
    scenario = replace(scenario, settings=scenario.settings | {"prefix_cache": False})
    run_and_check([scenario], (1, 1), tmp_path, adapters)
    assert poisoned_total


@pytest.mark.slow
def test_tokens_are_equal_in_many_scenarios(adapters: AdapterFiles, tmp_path: Path) -> None:
    scenarios = [draw_scenario(NAME, seed, adapters) for seed in range(20)]
    assert run_and_check(scenarios, (1, 1), tmp_path, adapters).preemptions
