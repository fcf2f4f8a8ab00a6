"""Model runner: applies a step's writes to the pools and tables, then runs the model once."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from gpt.generation.generate import Completion, generate
from gpt.kv_groups import kv_groups
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import (
    AdapterRowsWrite,
    BlockTableUpdate,
    Guide,
    Outcome,
    SlotInit,
    Step,
    TokenScore,
)
from serving.worker import model_runner
from serving.worker.kv_cache_size import available_kv_blocks
from serving.worker.model_runner import ModelRunner
from tests.support.models import CLASSIC, CONFIGS, MODERN, build

BLOCK_TOKENS = 4
V = CLASSIC.vocab_size
CONFIG = ServerConfig(
    "model",
    kv_block_tokens=BLOCK_TOKENS,
    kv_tokens_max=200,
    running_requests_max=6,
    step_tokens_max=40,
    adapter_rows_max=8,
)
GREEDY = SamplingParams(max_new_tokens=6)
# `StepDriver` has one block table for each sequence.
SINGLE_GROUP_CONFIGS = [name for name, config in CONFIGS.items() if len(kv_groups(config)) == 1]
PROMPT = [7, 3, 90, 12, 5, 44, 61, 2, 18, 33]
ADAPTER_TABLE = torch.randn(3, CLASSIC.hidden_size, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


class StepDriver:
    """Runs steps that a test builds, for a few sequences with separate blocks."""

    def __init__(self, model: GPT, config: ServerConfig = CONFIG) -> None:
        self.runner = ModelRunner(
            model,
            config.scheduler_config,
            config.cache_config,
            async_scheduling=config.uses_async_scheduling("cpu"),
            blocks=available_kv_blocks(model, config.scheduler_config, config.cache_config),
            slots=6,
        )
        self.step_id = 0

    def run(self, step: Step) -> Outcome:
        self.step_id += 1
        outcome = self.runner.run_step(msgspec.structs.replace(step, step_id=self.step_id))
        assert outcome is not None
        assert outcome.step_id == self.step_id
        assert outcome.seconds > 0
        for layer in self.runner.model.layers:
            assert not self.runner.pool.layer(layer)[0].any(), "block 0 is assigned to no sequence"
        return outcome

    def begin(self, slot: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Step:
        """A step that only assigns a slot to a sequence, with 8 blocks from 1 + 8 x slot on."""
        token_ids = [token if token < V else -1 for token in prompt]
        blocks = list(range(1 + 8 * slot, 9 + 8 * slot))
        return Step(
            0,
            slot_inits=[SlotInit(slot, sampling, token_ids, [])],
            block_table_updates=[BlockTableUpdate(slot, 0, blocks)],
        )

    def generate(self, slot: int, past: int, ids: Sequence[int], count: int) -> list[int]:
        """Run the ids, then decode, until `count` tokens are sampled."""
        generated: list[int] = []
        ids = list(ids)
        while len(generated) < count:
            outcome = self.run(sequence_step(slot, past, ids))
            assert outcome.faults == []
            past += len(ids)
            ids = outcome.tokens
            generated += ids
        return generated


def sequence_step(
    slot: int, past: int, ids: Sequence[int], *, draws: bool = True, scores: int = 0
) -> Step:
    """A step of one sequence."""
    return Step(
        0,
        slots=[slot],
        past=[past],
        lengths=[len(ids)],
        token_ids=list(ids),
        draws=[draws],
        prompt_score_counts=[scores],
    )


def reference_tokens(model: GPT, prompt: Sequence[int], table: Tensor | None = None) -> list[int]:
    return generate(model, [prompt], GREEDY, adapter_table=table)[0].token_ids


def row_bytes(table: Tensor) -> bytes:
    return table.float().numpy().tobytes()


def test_overflow_in_the_last_layers_kv_is_a_fault() -> None:
    """In a chunk that samples nothing, only the last layer's hidden rows show the overflow."""
    model = build(CLASSIC, dtype=torch.float16)
    qkv = model.decoder_layers[-1].self_attention.linear_qkv
    with torch.no_grad():
        heads = qkv.weight.unflatten(0, (CLASSIC.num_query_groups, -1, CLASSIC.kv_channels))
        heads[:, -1] = 6e4
    driver = StepDriver(model)
    driver.run(driver.begin(2, PROMPT))
    assert driver.run(sequence_step(2, 0, PROMPT[:4], draws=False)).faults == [0]


@pytest.mark.parametrize("name", SINGLE_GROUP_CONFIGS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_chunked_prefill_gives_the_same_tokens(name: str, chunk: int) -> None:
    model = build(CONFIGS[name])
    driver = StepDriver(model)
    driver.run(driver.begin(2, PROMPT))
    for start in range(0, len(PROMPT) - chunk, chunk):
        outcome = driver.run(sequence_step(2, start, PROMPT[start : start + chunk], draws=False))
        assert outcome.tokens == []
    last = range(0, len(PROMPT), chunk)[-1]
    assert driver.generate(2, last, PROMPT[last:], 6) == reference_tokens(model, PROMPT)


def test_only_sampling_sequences_have_tokens_in_step_order(model: GPT) -> None:
    driver = StepDriver(model)
    prompts = {4: PROMPT, 0: PROMPT[:3], 3: PROMPT[2:9]}
    for slot, prompt in prompts.items():
        driver.run(driver.begin(slot, prompt))
    step = Step(
        0,
        slots=list(prompts),
        past=[0, 0, 0],
        lengths=[len(prompt) for prompt in prompts.values()],
        token_ids=[token for prompt in prompts.values() for token in prompt],
        draws=[True, False, True],
        prompt_score_counts=[0, 0, 0],
    )
    assert driver.run(step).tokens == [reference_tokens(model, prompts[slot])[0] for slot in (4, 3)]


def test_tokens_after_drafts_equal_plain_decoding(model: GPT) -> None:
    driver = StepDriver(model)
    rules = {0: replace(GREEDY, logprobs=2), 1: SamplingParams(temperature=0.8, seed=5), 2: GREEDY}
    tokens = {}
    for slot, rule in rules.items():
        driver.run(driver.begin(slot, PROMPT, rule))
        tokens[slot] = driver.generate(slot, 0, PROMPT, 6)
    for slot, rule in rules.items():  # Run again, from the prompts.
        driver.run(driver.begin(slot, PROMPT, rule))
        driver.run(sequence_step(slot, 0, PROMPT))
    correct_draft = tokens[0][:3]
    wrong_draft = [tokens[1][0], tokens[1][1], (tokens[1][2] + 1) % V]
    step = Step(
        0,
        slots=[0, 2, 1],
        past=[10, 0, 10],
        lengths=[3, 10, 3],
        token_ids=correct_draft + PROMPT + wrong_draft,
        draws=[True, True, True],
        prompt_score_counts=[0, 0, 0],
        draft_counts=[2, 0, 2],
    )
    outcome = driver.run(step)
    assert outcome.tokens[:4] == [*tokens[0][1:4], tokens[2][0]]
    assert outcome.tokens[4:6] == tokens[1][1:3]  # The token after a wrong draft is discarded.
    expected_scores = generate(model, [PROMPT], rules[0])[0].scores[1:4]
    for score, expected_score in zip(outcome.scores[:3], expected_scores, strict=True):
        assert score.logprob == pytest.approx(expected_score.logprob, abs=1e-9)
    # The next tokens overwrite the keys and values of the wrong draft.
    assert driver.generate(1, 12, [tokens[1][2]], 3) == tokens[1][3:]
    assert driver.generate(0, 13, [tokens[0][3]], 2) == tokens[0][4:]


def test_nan_in_a_draft_row_is_a_fault(model: GPT) -> None:
    driver = StepDriver(model)
    nan_table = torch.full((1, CLASSIC.hidden_size), float("nan"))
    driver.run(Step(0, adapter_writes=[AdapterRowsWrite(0, "faulty", row_bytes(nan_table))]))
    for slot in (0, 1):
        driver.run(driver.begin(slot, PROMPT))
        driver.run(sequence_step(slot, 0, PROMPT))
    first = reference_tokens(model, PROMPT)
    step = Step(
        0,
        slots=[0, 1],
        past=[10, 10],
        lengths=[2, 2],
        token_ids=[first[0], V, *first[:2]],
        draws=[True, True],
        prompt_score_counts=[0, 0],
        draft_counts=[1, 1],
    )
    outcome = driver.run(step)
    assert (outcome.faults, outcome.tokens[2:]) == ([0], first[1:3])


def test_an_empty_step_has_an_empty_outcome(model: GPT) -> None:
    outcome = StepDriver(model).run(Step(0))
    assert (outcome.tokens, outcome.faults, outcome.prompt_scores) == ([], [], [])


def test_copied_blocks_can_be_used_by_another_slot(model: GPT) -> None:
    driver = StepDriver(model)
    driver.run(driver.begin(0, PROMPT))
    driver.run(sequence_step(0, 0, PROMPT))
    # 8 tokens in two full blocks, which are copied into those of slot 1.
    begin = driver.begin(1, PROMPT)
    driver.run(
        Step(
            0,
            slot_inits=begin.slot_inits,
            block_table_updates=begin.block_table_updates,
            block_copies=[(1, 9), (2, 10)],
        )
    )
    assert driver.generate(1, 8, PROMPT[8:], 6) == reference_tokens(model, PROMPT)


def test_block_copies_read_all_sources_first(model: GPT) -> None:
    driver = StepDriver(model)
    driver.run(driver.begin(0, PROMPT))
    driver.run(sequence_step(0, 0, PROMPT))
    blocks = driver.runner.pool.layer(1)
    first, second, third = (blocks[block].clone() for block in (1, 2, 3))
    driver.run(Step(0, block_copies=[(1, 2), (2, 1), (1, 3)]))
    assert torch.equal(blocks[1], second)
    assert torch.equal(blocks[2], first)
    assert torch.equal(blocks[3], first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)


def test_blocks_are_cleared_before_they_are_copied(model: GPT) -> None:
    driver = StepDriver(model)
    driver.run(driver.begin(0, PROMPT))
    driver.run(sequence_step(0, 0, PROMPT))
    driver.run(Step(0, block_clears=[1], block_copies=[(1, 2)]))
    for layer in model.layers:
        blocks = driver.runner.pool.layer(layer)
        assert [bool(blocks[block].any()) for block in (1, 2, 3)] == [False, False, True]


def test_two_adapters_in_one_step_and_replaced_rows(model: GPT) -> None:
    driver = StepDriver(model)
    second_table = ADAPTER_TABLE[:2] * 2 + 1
    first = [V, V + 1, V + 2, *PROMPT]
    second = [*PROMPT[:4], V, V + 1, 9]
    begin_steps = [driver.begin(slot, prompt) for slot, prompt in ((0, first), (1, second))]
    # The first adapter is at rows 2 to 4 of the pool, the second one at 6 and 7.
    ids = [token + 2 if token >= V else token for token in first]
    ids += [token + 6 if token >= V else token for token in second]
    step = Step(
        0,
        slots=[0, 1],
        past=[0, 0],
        lengths=[len(first), len(second)],
        token_ids=ids,
        draws=[True, True],
        prompt_score_counts=[0, 0],
        slot_inits=[begin for step in begin_steps for begin in step.slot_inits],
        block_table_updates=[table for step in begin_steps for table in step.block_table_updates],
        adapter_writes=[
            AdapterRowsWrite(2, "a", row_bytes(ADAPTER_TABLE)),
            AdapterRowsWrite(6, "b", row_bytes(second_table)),
        ],
    )
    first_token = reference_tokens(model, first, ADAPTER_TABLE)[0]
    second_token = reference_tokens(model, second, second_table)[0]
    assert driver.run(step).tokens == [first_token, second_token]
    # Another adapter replaces the rows of the first.
    begin = driver.begin(2, second)
    rewrites = [AdapterRowsWrite(2, "b", row_bytes(second_table))]
    driver.run(
        Step(
            0,
            slot_inits=begin.slot_inits,
            block_table_updates=begin.block_table_updates,
            adapter_writes=rewrites,
        )
    )
    ids = [token + 2 if token >= V else token for token in second]
    assert driver.run(sequence_step(2, 0, ids)).tokens == [second_token]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("name", ["classic", "modern", "experts"])
def test_nan_fails_only_its_own_sequence(name: str, number: float) -> None:
    model = build(CONFIGS[name], dtype=torch.float32)
    driver = StepDriver(model)
    for slot in (0, 1, 2):
        driver.run(driver.begin(slot, PROMPT))
    faulty_prompt = [model.config.vocab_size, *PROMPT[1:]]
    table = torch.full((1, CLASSIC.hidden_size), number)
    step = Step(
        0,
        slots=[0, 1, 2],
        past=[0, 0, 0],
        lengths=[10, 10, 10],
        token_ids=PROMPT + faulty_prompt + PROMPT,
        draws=[True, True, True],
        prompt_score_counts=[0, 0, 0],
        adapter_writes=[AdapterRowsWrite(0, "faulty", row_bytes(table))],
    )
    outcome = driver.run(step)
    # An RMS norm makes the largest values small again.
    assert outcome.faults == ([] if (name, number) == ("modern", 3e38) else [1])
    assert outcome.tokens[0] == outcome.tokens[2] == reference_tokens(model, PROMPT)[0]
    # The blocks of the faulty sequence are cleared, and then used by another.
    driver.run(Step(0, block_clears=list(range(9, 17))))
    assert driver.generate(1, 0, PROMPT, 6) == reference_tokens(model, PROMPT)


def test_rows_without_sampling_are_checked_for_nan(model: GPT) -> None:
    driver = StepDriver(model)
    driver.run(driver.begin(0, PROMPT))
    nan_table = torch.full((1, CLASSIC.hidden_size), float("nan"))
    driver.run(Step(0, adapter_writes=[AdapterRowsWrite(0, "faulty", row_bytes(nan_table))]))
    assert driver.run(sequence_step(0, 0, [1, V, 3], draws=False)).faults == [0]


def test_prompt_scores_do_not_depend_on_chunks(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = SamplingParams(max_new_tokens=1, prompt_logprobs=3, logprobs=2)
    prompt = [*PROMPT[:3], V, V + 2, *PROMPT[3:]]
    expected = generate(model, [prompt], rule, adapter_table=ADAPTER_TABLE)[0]
    # Three rows are scored at a time; chunks have other sizes.
    monkeypatch.setattr(model_runner, "SCORED_BYTES_MAX", 3 * 4 * V)
    for chunk in (1, 5, 12):
        driver = StepDriver(model)
        driver.run(driver.begin(0, prompt, rule))
        driver.run(Step(0, adapter_writes=[AdapterRowsWrite(0, "a", row_bytes(ADAPTER_TABLE))]))
        scores: list[TokenScore] = []
        for start in range(0, len(prompt), chunk):
            ids = prompt[start : start + chunk]
            last = start + len(ids) == len(prompt)
            outcome = driver.run(sequence_step(0, start, ids, draws=last, scores=len(ids) - last))
            scores += outcome.prompt_scores[0] if outcome.prompt_scores else []
        assert outcome.tokens == expected.token_ids
        check_scores(scores, expected)


def check_scores(scores: list[TokenScore], expected: Completion) -> None:
    """Virtual tokens have placeholder scores; the first token has no score."""
    assert len(scores) == len(expected.prompt_scores) - 1
    for score, expected_score in zip(scores, expected.prompt_scores[1:], strict=True):
        if expected_score is not None:
            assert abs(score.logprob - expected_score.logprob) < 1e-9
            assert score.rank == expected_score.rank
            top_tokens = [token for token, _ in score.tops]
            assert top_tokens == [token for token, _ in expected_score.tops]


def test_a_failed_guide_ends_only_its_sequence(model: GPT) -> None:
    driver = StepDriver(model)  # Without a tokenizer, no guide can be started.
    for slot in (0, 1):
        driver.run(driver.begin(slot, PROMPT))
    begin = SlotInit(1, GREEDY, PROMPT, [], Guide("choice", '["a", "b"]'))
    step = Step(
        0,
        slots=[0, 1],
        past=[0, 0],
        lengths=[10, 10],
        token_ids=PROMPT * 2,
        draws=[True, True],
        prompt_score_counts=[0, 0],
        slot_inits=[begin],
        block_table_updates=[BlockTableUpdate(1, 0, list(range(9, 17)))],
    )
    outcome = driver.run(step)
    assert (outcome.faults, outcome.stuck) == ([], [1])
    assert outcome.tokens[0] == reference_tokens(model, PROMPT)[0]
    # The next sequence in the slot has no guide.
    driver.run(driver.begin(1, PROMPT))
    assert driver.generate(1, 0, PROMPT, 6) == reference_tokens(model, PROMPT)


def test_a_sliding_window_masks_earlier_tokens() -> None:
    model = build(MODERN)
    driver = StepDriver(model)
    prompt = PROMPT * 3
    driver.run(driver.begin(0, prompt))
    assert driver.generate(0, 0, prompt[:30], 2) == reference_tokens(model, prompt)[:2]
