"""LoRA, activated LoRA, DoRA, IA3 and bottlenecks, served with prompts and prefixes in one batch.

Each answer of a mixed batch must equal, in fp64, the answer of the generation loop to the prompt
alone; tests/gpt/model/test_adapted_linear.py compares the loop's model with merged weights, and
test_bottlenecks.py beside it with NeMo's networks.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, open_adapter, save_adapter
from gpt.adapters.sequence_adapters import sequence_adapters
from gpt.config import GPTConfig
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.parallel.adapter_sharding import largest_rank_bytes
from gpt.sampling_params import SamplingParams
from serving.messages import AdapterRef, Submission
from tests.support.engine_scenarios import Scenario, ScenarioRun, run_scenarios
from tests.support.linear_adapters import random_linears
from tests.support.models import SERVED_CONFIGS, build
from tests.support.prefix_adapters import draw_prefix_table
from tests.support.ranks import ranks
from tests.support.suites import cases_by_suite

RULE = SamplingParams(max_new_tokens=6, logprobs=1)
INVOCATION = (11, 12)
DOCUMENT = [7, 3, 60, 3, 21, 90, 8, 5, 44, 17, 2, 9]
NETWORKS = ("classic", "modern", "experts")


def make_adapters(config: GPTConfig, folder: Path) -> dict[str, AdapterRef]:
    draws = torch.Generator().manual_seed(1)
    table = torch.randn(3, config.hidden_size, generator=draws)
    prefix = draw_prefix_table(config, 4)

    def linears(seed: int, method: str = "lora", **options: object) -> dict[str, object]:
        return dict(random_linears(config, method, seed=seed, strength=0.5, **options))  # type: ignore[arg-type]

    contents = {
        "rows": (Card("rows"), table, {}),
        "prefix": (Card("prefix", kind="prefix"), prefix, {}),
        "lora1": (Card("lora1"), None, linears(1, rank=1)),
        "lora2": (Card("lora2"), None, linears(2, rank=2, by_parts=True)),
        "lora5": (Card("lora5"), None, linears(3, rank=5, targets=("linear_qkv",))),
        "alora": (Card("alora", invocation=INVOCATION), None, linears(4)),
        "other-alora": (Card("other-alora", invocation=INVOCATION), None, linears(5)),
        "dora": (Card("dora"), None, linears(6, "dora")),
        "ia3": (Card("ia3"), None, linears(7, "ia3", by_parts=True)),
        "bottleneck": (Card("bottleneck"), None, linears(10, "bottleneck", rank=2)),
        "alora-post": (
            Card("alora-post", invocation=INVOCATION),
            None,
            linears(11, "bottleneck-post"),
        ),
        "rows-lora": (Card("rows-lora"), table, linears(8)),
        "prefix-lora": (Card("prefix-lora", kind="prefix"), prefix, linears(9)),
    }
    return {
        name: save(build_adapter(card, content, changes), config, folder)  # type: ignore[arg-type]
        for name, (card, content, changes) in contents.items()
    }


def save(adapter: Adapter, config: GPTConfig, folder: Path) -> AdapterRef:
    path = folder / f"{adapter.card.name}.safetensors"
    save_adapter(adapter, path)
    rank_bytes = 0
    if adapter.linears:
        stages = [range(config.num_layers)]
        rank_bytes = largest_rank_bytes(adapter.linears, config, stages, tp=1, itemsize=8)
    return AdapterRef(
        adapter.digest,
        len(adapter.table),
        str(path),
        adapter.card.kind,
        len(adapter.linears),
        adapter.nbytes - adapter.table.nbytes,
        rank_bytes,
    )


def submission_of(
    number: int, ref: AdapterRef | None, config: GPTConfig, sampling: SamplingParams = RULE
) -> Submission:
    virtual = [config.vocab_size + row for row in range(ref.row_count if ref else 0)]
    text = DOCUMENT[: 3 + number % 9]
    adapted_from = 0
    if ref is not None and "alora" in ref.file:
        # An earlier occurrence, and a text behind the invocation that acts.
        text = [*INVOCATION, *DOCUMENT[: 4 + number % 3]]
        adapted_from = len(text)
        text = [*text, *INVOCATION, 30 + number % 2]
    if number % 4 == 0:
        sampling = replace(sampling, max_new_tokens=30)
    return Submission(
        number,
        virtual + text,
        sampling,
        adapter_ref=ref,
        adapted_from=adapted_from,
        priority=number % 3,
    )


def mixed_scenario(name: str, adapters: dict[str, AdapterRef], **settings: object) -> Scenario:
    """Every kind of adapter and none, twice; with preemption, chunked prompts and cached blocks."""
    config = SERVED_CONFIGS[name]
    drawn = replace(RULE, temperature=1.0, top_p=0.9, seed=9)
    scored = replace(RULE, prompt_logprobs=1)
    references = [*adapters.values(), None]
    submissions = [
        (
            number // 4 * 3,
            submission_of(
                number,
                references[number % len(references)],
                config,
                (RULE, drawn, scored)[number % 3],
            ),
        )
        for number in range(2 * len(references) + 3)
    ]
    # When the batch has ended: requests of the base model, for which there is too little memory,
    # and one with the same prompt. Their preemption and cached blocks do not depend on the times at
    # which adapters were read.
    long = replace(RULE, max_new_tokens=40)
    submissions += [(1000, submission_of(number, None, config, long)) for number in (35, 53)]
    submissions += [(2000, submission_of(71, None, config))]
    limits: dict[str, object] = {
        "kv_block_tokens": 4,
        "running_requests_max": 5,
        "kv_tokens_max": 72,
        "pp": 1,
        "step_tokens_max": 7,
        "adapter_rows_max": 6,
    }
    return Scenario(name, "float64", limits | settings, submissions, prefix_write_tokens_max=3)


def check_answers(model: GPT, scenario: Scenario, scenario_run: ScenarioRun) -> None:
    for _, submission in scenario.submissions:
        answer = scenario_run.answers[submission.sequence_id]
        ref = submission.adapter_ref
        adapter = open_adapter(Path(ref.file)) if ref else None
        (expected,) = generate(
            model,
            [submission.prompt],
            submission.sampling,
            adapter_table=adapter.table if adapter and len(adapter.table) else None,
            adapter_kind=ref.kind if ref else "rows",
            adapters=sequence_adapters(adapter, model, [submission.prompt]) if adapter else (),
        )
        case = (submission.sequence_id, ref and ref.file, answer.reason)
        assert (answer.tokens, answer.end) == (expected.token_ids, expected.finish_reason), case
        logprobs = [score.logprob for score in answer.scores]
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-9), case
        scores = [score and score.logprob for score in answer.prompt_scores]
        expected_scores = [score and score.logprob for score in expected.prompt_scores]
        assert scores == pytest.approx(expected_scores, abs=1e-9), case


SETTINGS: dict[str, dict[str, object]] = {
    "small blocks": {"kv_block_tokens": 2, "step_tokens_max": 5},
    "speculative decoding": {"speculate_tokens_max": 3, "speculate_rows_max": 9},
    "no prefix cache": {"prefix_cache": False, "step_tokens_max": 40},
    "asynchronous scheduling": {"step_ahead": "on"},
}


CASES = [(name, case) for name in NETWORKS for case in SETTINGS]
# The other cases are slow: each takes a second.
FAST_CASES = [*((NETWORKS[0], case) for case in SETTINGS), ("modern", "speculative decoding")]


@pytest.mark.parametrize(
    ("name", "case"),
    [case if case in FAST_CASES else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_mixed_batch_equals_each_prompt_alone(name: str, case: str, tmp_path: Path) -> None:
    config = SERVED_CONFIGS[name]
    adapters = make_adapters(config, tmp_path)
    scenario = mixed_scenario(name, adapters, **SETTINGS[case])
    (scenario_run,) = run_scenarios(0, 1, 1, [scenario], str(tmp_path))
    check_answers(build(config), scenario, scenario_run)
    assert scenario_run.load.adapter_loads >= len(adapters)
    assert bool(scenario_run.load.cached_tokens) == (case != "no prefix cache")
    # The window of "modern" frees the blocks for which other sequences are preempted.
    assert scenario_run.load.preemptions or config.window_size is not None


def test_activated_lora_shares_the_blocks_before_its_invocation(tmp_path: Path) -> None:
    """The base model, two activated LoRAs and the base model again: one prefill of the document."""
    config = SERVED_CONFIGS["classic"]
    adapters = make_adapters(config, tmp_path)
    document = DOCUMENT + DOCUMENT[::-1] + [70]
    references = [None, adapters["alora"], adapters["other-alora"], adapters["lora1"], None]
    submissions = []
    for number, ref in enumerate(references):
        start = len(document) if ref in (adapters["alora"], adapters["other-alora"]) else 0
        prompt = [*document, *INVOCATION, 30]
        submission = Submission(number, prompt, RULE, adapter_ref=ref, adapted_from=start)
        submissions.append((100 * number, submission))
    settings = {"kv_block_tokens": 4, "kv_tokens_max": 400, "step_tokens_max": 64}
    scenario = Scenario("classic", "float64", settings, submissions)
    (scenario_run,) = run_scenarios(0, 1, 1, [scenario], str(tmp_path))
    check_answers(build(config), scenario, scenario_run)
    cached = [scenario_run.answers[number].cached for number in range(len(references))]
    last = len(document) + len(INVOCATION)
    # An activated LoRA's own block begins at the invocation, in the middle of a block.
    assert cached == [0, len(document) // 4 * 4, len(document), 0, last]
    logprobs = [scenario_run.answers[n].scores[0].logprob for n in range(len(references))]
    assert logprobs[0] == pytest.approx(logprobs[4], abs=1e-12) and len(set(logprobs[:4])) == 4


def test_a_small_memory_evicts_and_writes_adapters_again(tmp_path: Path) -> None:
    config = SERVED_CONFIGS["classic"]
    adapters = make_adapters(config, tmp_path)
    names = ["lora1", "lora2", "dora", "alora"] * 3
    submissions = [
        (0, submission_of(number, adapters[name], config)) for number, name in enumerate(names)
    ]
    largest = max(ref.rank_bytes for ref in adapters.values())
    settings = {
        "kv_block_tokens": 4,
        "kv_tokens_max": 400,
        "adapter_memory_mb": -(-largest // 1_000_000),
    }
    scenario = Scenario("classic", "float64", settings, submissions)
    (scenario_run,) = run_scenarios(0, 1, 1, [scenario], str(tmp_path))
    check_answers(build(config), scenario, scenario_run)


RANK_CASES = [(name, *split) for name in NETWORKS for split in ((2, 1), (1, 2), (2, 2))]
# Each network has the largest split, and each split a network.
SLOW_RANK_CASES = [*((name, 2, 2) for name in NETWORKS), ("modern", 2, 1), ("experts", 1, 2)]


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    cases_by_suite(SLOW_RANK_CASES, [case for case in RANK_CASES if case not in SLOW_RANK_CASES]),
)
def test_ranks_equal_each_prompt_alone(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    config = SERVED_CONFIGS[name]
    scenario = mixed_scenario(name, make_adapters(config, tmp_path))
    scenario_run = ranks(tp * pp, run_scenarios, tp, pp, [scenario], str(tmp_path))[0][0]
    check_answers(build(config), scenario, scenario_run)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (2, 2)])
def test_ranks_with_own_experts_equal_each_prompt_alone(tp: int, ep: int, tmp_path: Path) -> None:
    name = "eight experts"
    config = SERVED_CONFIGS[name]
    scenario = mixed_scenario(name, make_adapters(config, tmp_path))
    scenario_run = ranks(max(tp, ep), run_scenarios, tp, 1, [scenario], str(tmp_path), ep)[0][0]
    check_answers(build(config), scenario, scenario_run)
