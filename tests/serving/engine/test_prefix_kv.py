"""Prefix adapters in the engine: KV written to blocks, shared, evicted, rewritten, on any split.

Tokens and scores must equal those of the generation loop, which
tests/gpt/generation/test_prefix_generation.py compares with PEFT and the model. Other sequences of
the batch have adapter rows or no adapter.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.generation.generate import generate
from gpt.generation.reference_sampler import Score
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.messages import AdapterRef, Submission, TokenScore
from tests.support import prefix_adapters
from tests.support.engine_scenarios import Scenario, ScenarioRun, run_scenarios
from tests.support.fake_ranks import make_adapter_ref, text_ids, virtual_ids
from tests.support.models import SERVED_CONFIGS, build
from tests.support.ranks import ranks
from tests.support.scheduler_harness import SchedulerHarness

V = 5  # Virtual tokens of the equally long adapters.
V_LONG = 18
TEXT = [7, 3, 60, 3, 21, 90, 8]
WHEN_IDLE = 1000  # An arrival after more updates than the submissions before need.
RULE = SamplingParams(max_new_tokens=6, logprobs=1)
# Two KV heads and one; learned positions and rotary ones; one KV group and three.
NETWORKS = ["modern", "odd", "mixed windows"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[AdapterRef]]:
    """For each network: two prefixes of equal length, a long one, one of one token, and rows."""
    references = {}
    generator = torch.Generator().manual_seed(1)
    for name in NETWORKS:
        folder = tmp_path_factory.mktemp("adapters")
        config = SERVED_CONFIGS[name]
        references[name] = [
            prefix_adapters.save_prefix_adapter(
                folder, f"prefix-{seed}", prefix_adapters.draw_prefix_table(config, count, seed)
            )
            for seed, count in enumerate([V, V, V_LONG, 1])
        ]
        rows = build_adapter(Card("rows"), torch.randn(3, config.hidden_size, generator=generator))
        save_adapter(rows, folder / "rows.safetensors")
        references[name].append(AdapterRef(rows.digest, 3, str(folder / "rows.safetensors")))
    return references


def build_submission(
    name: str,
    number: int,
    rows: AdapterRef | None,
    text: list[int],
    sampling: SamplingParams = RULE,
    **scheduling: int,
) -> Submission:
    size = SERVED_CONFIGS[name].vocab_size
    ids = [size + row for row in range(rows.row_count if rows else 0)] + text
    return Submission(number, ids, sampling, adapter_ref=rows, **scheduling)  # type: ignore[arg-type]


def mixed_adapters_scenario(name: str, adapters: list[AdapterRef], **settings: object) -> Scenario:
    """Each adapter and no adapter, twice; with too few blocks for all, and chunked prefill.

    A submission of each adapter runs before, so that all adapters are cached. Otherwise the time of
    a read of an adapter file, by a thread, decides how many sequences run at once.
    """
    drawn = replace(RULE, temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    with_prompt_scores = replace(RULE, prompt_logprobs=1)
    submissions = [
        (0, build_submission(name, 12 + number, adapter, TEXT[:1]))
        for number, adapter in enumerate(adapters)
    ]
    for number in range(12):
        adapter = [*adapters, None][number % 6]
        sampling = replace(
            [RULE, drawn, with_prompt_scores][number % 3],
            max_new_tokens=4 if number > 5 else 14,
            seed=9,
        )
        text = TEXT[: 1 + 3 * (number % 3)] + [number % 2] * (number // 6)
        submission = build_submission(name, number, adapter, text, sampling)
        submissions.append((WHEN_IDLE + number // 6 * 4, submission))
    # The same prompt twice, one after the other: the second uses the cached blocks of the first.
    submissions += [
        (when * WHEN_IDLE, build_submission(name, 100 + when, None, TEXT)) for when in (2, 3)
    ]
    limits: dict[str, object] = {
        "kv_block_tokens": 4,
        "running_requests_max": 4,
        "kv_tokens_max": 48,
        "pp": 1,
        "step_tokens_max": 6,
        "adapter_rows_max": 4,
    }
    return Scenario(name, "float64", limits | settings, submissions, prefix_write_tokens_max=7)


def check_answers(model: GPT, scenario: Scenario, scenario_run: ScenarioRun) -> None:
    """Compare the answer of every submission with the generation loop."""
    for _, submission in scenario.submissions:
        answer = scenario_run.answers[submission.sequence_id]
        adapter_ref = submission.adapter_ref
        (expected,) = generate(
            model,
            [submission.prompt],
            submission.sampling,
            adapter_table=open_adapter(Path(adapter_ref.file)).table if adapter_ref else None,
            adapter_kind=adapter_ref.kind if adapter_ref else "rows",
        )
        assert (answer.tokens, answer.end) == (
            expected.token_ids,
            expected.finish_reason,
        ), submission.sequence_id
        assert logprobs_of(answer.scores) == pytest.approx(expected.logprobs, abs=1e-9)
        if submission.sampling.prompt_logprobs is not None:
            assert [score is None for score in answer.prompt_scores] == [
                score is None for score in expected.prompt_scores
            ]
            assert logprobs_of(answer.prompt_scores) == pytest.approx(
                logprobs_of(expected.prompt_scores), abs=1e-9
            )


def logprobs_of(
    scores: list[TokenScore | None] | list[TokenScore] | list[Score | None],
) -> list[float]:
    return [score.logprob for score in scores if score is not None]


SETTINGS: dict[str, dict[str, object]] = {
    "speculative decoding": {"speculate_tokens_max": 3, "speculate_rows_max": 9},
    "no prefix cache": {"prefix_cache": False, "step_tokens_max": 40},
    "small blocks": {"kv_block_tokens": 1, "step_tokens_max": 4, "adapter_bytes_max": 1},
}
CASES = [(name, case) for name in NETWORKS for case in SETTINGS]


@pytest.mark.parametrize(
    ("name", "case"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])],
)
def test_prefix_adapters_row_adapters_and_plain_prompts_share_steps(
    name: str, case: str, adapters: dict[str, list[AdapterRef]], tmp_path: Path
) -> None:
    scenario = mixed_adapters_scenario(name, adapters[name], **SETTINGS[case])
    (scenario_run,) = run_scenarios(0, 1, 1, [scenario], str(tmp_path))
    check_answers(build(SERVED_CONFIGS[name]), scenario, scenario_run)
    assert bool(scenario_run.load.cached_tokens) == (case != "no prefix cache")
    # Small blocks: adapter_bytes_max is 1, so sequences of different adapters do not run together.
    # Windows free the blocks for which sequences of "odd" are preempted.
    needs_preemption = case != "small blocks" and SERVED_CONFIGS[name].window_size is None
    assert scenario_run.load.preemptions or not needs_preemption


@pytest.mark.parametrize(("name", "tp", "pp"), [("odd", 2, 1), ("modern", 1, 2)])
def test_each_rank_writes_its_part_of_a_prefix(
    name: str, tp: int, pp: int, adapters: dict[str, list[AdapterRef]], tmp_path: Path
) -> None:
    scenario = mixed_adapters_scenario(name, adapters[name])
    scenario_run = ranks(tp * pp, run_scenarios, tp, pp, [scenario], str(tmp_path))[0][0]
    check_answers(build(SERVED_CONFIGS[name]), scenario, scenario_run)
    assert scenario_run.load.cached_tokens
    # The window of "modern" frees the blocks for which sequences of "odd" are preempted.
    assert scenario_run.load.preemptions or SERVED_CONFIGS[name].window_size is not None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "pp"), [("modern", 4, 1), ("odd", 2, 2), ("modern", 2, 2)])
def test_each_of_four_ranks_writes_its_part_of_a_prefix(
    name: str, tp: int, pp: int, adapters: dict[str, list[AdapterRef]], tmp_path: Path
) -> None:
    scenario = mixed_adapters_scenario(name, adapters[name])
    scenario_run = ranks(tp * pp, run_scenarios, tp, pp, [scenario], str(tmp_path))[0][0]
    check_answers(build(SERVED_CONFIGS[name]), scenario, scenario_run)


@pytest.mark.parametrize("chunk", [1, V - 1, V, V + 1])
def test_equally_long_prefixes_share_no_blocks(
    chunk: int, adapters: dict[str, list[AdapterRef]], tmp_path: Path
) -> None:
    name = "odd"
    submissions = [
        (40 * number, build_submission(name, number, adapters[name][number % 2], TEXT))
        for number in range(4)
    ]
    settings = {
        "kv_block_tokens": 1,
        "running_requests_max": 1,
        "step_tokens_max": chunk,
        "kv_tokens_max": 200,
    }
    scenario = Scenario(name, "float64", settings, submissions)
    (scenario_run,) = run_scenarios(0, 1, 1, [scenario], str(tmp_path))
    check_answers(build(SERVED_CONFIGS[name]), scenario, scenario_run)
    answers = [scenario_run.answers[number] for number in range(4)]
    assert answers[0].tokens != answers[1].tokens
    assert [answer.cached for answer in answers] == [0, 0, V + 6, V + 6]
    assert scenario_run.load.adapter_loads == 2


@pytest.mark.parametrize("suffix", [[], [1, "virtual"], ["virtual"], [0]])
def test_a_prompt_that_is_not_a_prefix_and_text_is_refused(suffix: list[object]) -> None:
    harness = SchedulerHarness()
    ids = [50 if token == "virtual" else 3 for token in suffix]
    adapter_ref = make_adapter_ref("a", 2, "prefix")
    number = harness.submit(
        [*virtual_ids(2 if suffix != [0] else 1), *ids], adapter_ref=adapter_ref
    )
    assert harness.last_outputs[number].end == "refused"
    assert "the prompt must begin with these tokens" in harness.last_outputs[number].reason


def test_a_large_prefix_is_written_once_over_several_steps() -> None:
    harness = SchedulerHarness(prefix_write_tokens_max=3)
    adapter_ref = make_adapter_ref("a", 10, "prefix")
    first = harness.submit([*virtual_ids(10), *text_ids(5)], adapter_ref=adapter_ref)
    counts = []
    while (step := harness.plan()) is not None:
        harness.commit()
        counts.append((sum(write.count for write in step.prefix_writes), len(step.token_ids)))
    assert counts[:4] == [(3, 0), (3, 0), (3, 0), (1, 5)]
    second = harness.submit([*virtual_ids(10), *text_ids(4, seed=1)], adapter_ref=adapter_ref)
    harness.finish()
    assert harness.ranks.prefix_tokens_written == 10 and harness.cached_tokens[second] == 10
    assert harness.ranks.computed_tokens[first] == 5 + 3
    assert harness.scheduler.stats.adapter_loads == 1


def test_cached_blocks_of_a_prefix_are_not_written_again() -> None:
    harness = SchedulerHarness(blocks=6)
    ids, adapter_ref = [*virtual_ids(10), *text_ids(2)], make_adapter_ref("a", 10, "prefix")
    harness.submit(ids, new=2, adapter_ref=adapter_ref)
    harness.finish()
    harness.submit(text_ids(8, seed=1), new=2)  # Evicts the prefix's blocks after the first two.
    harness.finish()
    repeated = harness.submit(ids, new=2, adapter_ref=adapter_ref)
    harness.finish()
    assert harness.cached_tokens[repeated] == 8
    writes = [(write.start, write.count) for step in harness.steps for write in step.prefix_writes]
    assert writes == [(0, 10), (8, 2)]


def test_a_prefix_needs_no_rows_in_the_adapter_pool() -> None:
    harness = SchedulerHarness(adapter_rows_max=2)
    number = harness.submit([*virtual_ids(8), 1], adapter_ref=make_adapter_ref("a", 8, "prefix"))
    harness.finish()
    assert harness.last_outputs[number].end == "length"
