"""Batch invariance: a request gets the same tokens in any batch, on any split, as alone.

Scenarios drawn from seeds run on the whole engine below the front end: engine loop, scheduler,
model runner. The oracle is `gpt.generation.generate` with a batch of one. In fp64 all tokens are
equal; in fp32 up to the first near-tie.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from gpt.cpu import kernels
from gpt.cpu_inference.weight_packing import pack_weights
from gpt.linear.cpu_linear import OneDnnLinear
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear
from tests.support.batch_runs import SIZES, Coverage, check, run_and_check
from tests.support.engine_scenarios import (
    AdapterFiles,
    Scenario,
    draw_scenario,
    lead,
    overflow_scenario,
    preemption_scenario,
    shared_document_scenario,
)
from tests.support.models import CONFIGS, build
from tests.support.suites import by_suite, cases_by_suite

SPLITS = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    """All networks of the tests have the same width, so adapters fit all."""
    (width,) = {config.hidden_size for config in CONFIGS.values()}
    return AdapterFiles.make(tmp_path_factory.mktemp("adapters"), width, SIZES)


def draw_scenarios(adapters: AdapterFiles, seeds: range, dtype: str = "float64") -> list[Scenario]:
    return [draw_scenario(name, seed, adapters, dtype=dtype) for name in CONFIGS for seed in seeds]


def assert_resources_were_scarce(coverage: Coverage) -> None:
    """The scenarios forced preemption, chunked prefill and more effects of scarce resources."""
    assert coverage.preemptions > 0
    assert coverage.cached > 0
    assert coverage.chunked > 0
    assert coverage.cancelled > 0
    assert coverage.loads > 0


@pytest.mark.parametrize("name", ["classic", "experts"])
def test_tokens_do_not_change_under_preemption(
    name: str, adapters: AdapterFiles, tmp_path: Path
) -> None:
    assert_resources_were_scarce(
        run_and_check([preemption_scenario(name, adapters)], (1, 1), tmp_path, adapters)
    )


@pytest.mark.parametrize("name", ["modern", "odd"])
def test_adapters_share_the_prefix_cache_of_a_document(
    name: str, adapters: AdapterFiles, tmp_path: Path
) -> None:
    coverage = run_and_check([shared_document_scenario(name, adapters)], (1, 1), tmp_path, adapters)
    # Each shares its three full blocks, and some share a part of the fourth as well.
    assert coverage.cached > 4 * 24


def test_tokens_do_not_depend_on_the_batch_on_one_rank(
    adapters: AdapterFiles, tmp_path: Path
) -> None:
    assert_resources_were_scarce(
        run_and_check(draw_scenarios(adapters, range(1)), (1, 1), tmp_path, adapters)
    )


# Two ranks each; the slow tests below have four.
@pytest.mark.parametrize("split", SPLITS[:2])
def test_tokens_do_not_depend_on_the_batch_on_any_split(
    split: tuple[int, int], adapters: AdapterFiles, tmp_path: Path
) -> None:
    # Every network on every split is among the slow scenarios.
    names = {(2, 1): ["experts"], (1, 2): ["odd"], (2, 2): ["classic"]}[split]
    scenarios = [
        preemption_scenario("modern", adapters),
        *(draw_scenario(name, 0, adapters) for name in names),
    ]
    coverage = run_and_check(scenarios, split, tmp_path, adapters)
    assert_resources_were_scarce(coverage)
    assert coverage.in_flight == (split[1] if split[1] > 1 else 0)


@pytest.mark.parametrize("split", [(1, 1)])
def test_fp32_tokens_differ_only_at_near_ties(
    split: tuple[int, int], adapters: AdapterFiles, tmp_path: Path
) -> None:
    names = ["modern"] if split == (2, 2) else ["classic", "odd", "experts"]
    scenarios = [draw_scenario(name, 0, adapters, dtype="float32") for name in names]
    coverage = run_and_check(scenarios, split, tmp_path, adapters)
    assert coverage.ties <= coverage.requests // 10


def model_with_backend(backend: str, name: str, patch: pytest.MonkeyPatch) -> GPT:
    """An fp32 model that uses this backend alone, whatever this machine would choose."""
    model = build(CONFIGS[name], dtype=torch.float32)
    if backend == "torch":
        patch.setattr(kernels, "library", lambda: None)
    elif backend == "packed":
        pack_weights(model)
        assert any(isinstance(matmul, OneDnnLinear) for matmul in matmuls_of(model))
    else:
        kernels.force_isa_level(backend)
        if kernels.isa_level() != backend:
            pytest.skip(f"this machine is less than {backend}, or the library was not built")
    return model


def matmuls_of(model: GPT) -> list[object]:
    return [module.backend for module in model.modules() if isinstance(module, Linear)]


# Both fp32 tests run these scenarios, so that each request alone is completed once.
FP32_SEEDS = range(200, 202)


def run_with_backend(
    backend: str, names: list[str], seeds: range, adapters: AdapterFiles, patch: pytest.MonkeyPatch
) -> Coverage:
    coverage = Coverage()
    try:
        for name in names:
            model = model_with_backend(backend, name, patch)
            for seed in seeds:
                scenario = draw_scenario(name, seed, adapters, dtype="float32")
                check(scenario, lead(model, scenario), adapters, coverage)
    finally:
        kernels.force_isa_level(None)
    assert coverage.ties <= coverage.requests // 10
    return coverage


BACKENDS = ["torch", *kernels.ISA_LEVELS, "packed"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_do_not_depend_on_the_batch_with_every_backend(
    backend: str, adapters: AdapterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with_backend(backend, ["modern"], range(1), adapters, monkeypatch)


@pytest.mark.parametrize("seeds", by_suite(FP32_SEEDS[:1], FP32_SEEDS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_scenarios_with_every_backend(
    backend: str, seeds: range, adapters: AdapterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resources_were_scarce(
        run_with_backend(backend, list(CONFIGS), seeds, adapters, monkeypatch)
    )


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2)])
def test_overflow_does_not_affect_other_sequences(
    split: tuple[int, int], adapters: AdapterFiles, tmp_path: Path
) -> None:
    coverage = run_and_check([overflow_scenario("classic", adapters)], split, tmp_path, adapters)
    assert coverage.faults == 3


def speculating(scenario: Scenario, **settings: object) -> Scenario:
    """The scenario with short prompts, which these models continue in repetitions."""
    vocabulary = CONFIGS[scenario.name].vocab_size
    submissions = []
    for arrival, submission in scenario.submissions:
        prompt = [token if token >= vocabulary else token % 4 for token in submission.prompt]
        submissions.append((arrival, msgspec.structs.replace(submission, prompt=prompt)))
    speculation = {"speculate_tokens_max": 3, "speculate_rows_max": 12, **settings}
    return replace(scenario, submissions=submissions, settings=scenario.settings | speculation)


def speculating_scenarios(names: list[str], adapters: AdapterFiles, seeds: range) -> list[Scenario]:
    """Drawn scenarios of each network, and one that needs preemption.

    Every other network preempts without a prefix cache, with drafts of another length.
    """
    scenes = [speculating(draw_scenario(name, seed, adapters)) for name in names for seed in seeds]
    for number, name in enumerate(names):
        changes = {"prefix_cache": False, "speculate_tokens_max": number} if number % 2 else {}
        scenes.append(speculating(preemption_scenario(name, adapters), **changes))
    return scenes


def assert_speculated(coverage: Coverage) -> None:
    assert coverage.preemptions > 0
    assert coverage.cached > 0
    assert 0 < coverage.accepted < coverage.drafted


def test_speculation_does_not_change_tokens(adapters: AdapterFiles, tmp_path: Path) -> None:
    assert_speculated(
        run_and_check(
            speculating_scenarios(["classic", "modern"], adapters, range(1)),
            (1, 1),
            tmp_path,
            adapters,
        )
    )


def networks_of(split: tuple[int, int]) -> list[str]:
    """Every third network; the splits of several ranks have different ones."""
    return list(CONFIGS)[SPLITS.index(split) :: 3] if split in SPLITS else list(CONFIGS)


@pytest.mark.parametrize("has_all", by_suite(slow=False, soak=True))
@pytest.mark.parametrize("split", [(1, 1), *SPLITS])
def test_many_scenarios_with_speculation_on_any_split(
    split: tuple[int, int], has_all: bool, adapters: AdapterFiles, tmp_path: Path
) -> None:
    names = list(CONFIGS) if has_all else networks_of(split)
    count = 2 if split == (1, 1) and has_all else 1
    scenarios = speculating_scenarios(names, adapters, range(300, 300 + count))
    assert_speculated(run_and_check(scenarios, split, tmp_path, adapters, 600))


@pytest.mark.parametrize("split", cases_by_suite([((1, 1),)], [((2, 2),)]))
def test_many_scenarios_in_fp32(
    split: tuple[int, int], adapters: AdapterFiles, tmp_path: Path
) -> None:
    seeds = FP32_SEEDS if split == (1, 1) else FP32_SEEDS[:1]
    scenarios = draw_scenarios(adapters, seeds, "float32")
    coverage = run_and_check(scenarios, split, tmp_path, adapters, 600)
    assert coverage.ties <= coverage.requests // 10


@pytest.mark.parametrize("has_all", by_suite(slow=False, soak=True))
@pytest.mark.parametrize("split", [(1, 1), *SPLITS])
def test_many_scenarios_on_any_split(
    split: tuple[int, int], has_all: bool, adapters: AdapterFiles, tmp_path: Path
) -> None:
    count = 1
    if split == (1, 1):
        count = 4 if has_all else 2
    names = list(CONFIGS) if has_all else networks_of(split)
    scenarios = [
        scenario
        for scenario in draw_scenarios(adapters, range(100, 100 + count))
        if scenario.name in names
    ]
    assert_resources_were_scarce(run_and_check(scenarios, split, tmp_path, adapters, 600))
