"""The runner does what a step says: blocks, rows and tables first, then one pass of the model."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.errors import ConfigError
from gpt.generation.generate import Completion, generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Begin, Guide, Outcome, Rewrite, Scored, Step, Table
from serving.worker import model_runner as runner_module
from serving.worker.model_runner import Runner, blocks_that_fit, rehearsal
from tests.support.models import CLASSIC, CONFIGS, MODERN, build

BLOCK = 4
V = CLASSIC.vocab_size
CONFIG = ServerConfig(
    "model",
    kv_block_tokens=BLOCK,
    kv_tokens_max=200,
    running_requests_max=6,
    step_tokens_max=40,
    adapter_rows_max=8,
)
GREEDY = Sampling(max_new_tokens=6)
PROMPT = [7, 3, 90, 12, 5, 44, 61, 2, 18, 33]
TABLE = torch.randn(3, CLASSIC.hidden_size, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CLASSIC)


class Desk:
    """Writes steps by hand, for a few sequences in blocks of their own."""

    def __init__(self, model: GPT, config: ServerConfig = CONFIG) -> None:
        self.runner = Runner(model, config, blocks=blocks_that_fit(model, config), slots=6)
        self.number = 0

    def run(self, step: Step) -> Outcome:
        self.number += 1
        outcome = self.runner.run(replace_number(step, self.number))
        assert outcome is not None
        assert outcome.number == self.number
        assert outcome.seconds > 0
        for layer in self.runner.model.layers:
            assert not self.runner.pool.layer(layer)[0].any(), "block 0 is nobody's"
        return outcome

    def begin(self, slot: int, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Step:
        """A step that only gives a slot to a sequence: blocks 10 x slot and on are its own."""
        own = [one if one < V else -1 for one in prompt]
        blocks = list(range(1 + 8 * slot, 9 + 8 * slot))
        return Step(0, begins=[Begin(slot, sampling, own, [])], tables=[Table(slot, 0, blocks)])

    def go_on(self, slot: int, past: int, ids: Sequence[int], count: int) -> list[int]:
        """Run these ids, then decode: `count` tokens in all."""
        made: list[int] = []
        ids = list(ids)
        while len(made) < count:
            outcome = self.run(one(slot, past, ids))
            assert outcome.faults == []
            past, ids = past + len(ids), outcome.tokens
            made += ids
        return made


def replace_number(step: Step, number: int) -> Step:
    return Step(number, *(getattr(step, name) for name in step.__struct_fields__[1:]))


def one(slot: int, past: int, ids: Sequence[int], *, draws: bool = True, scores: int = 0) -> Step:
    return Step(
        0,
        slots=[slot],
        past=[past],
        lengths=[len(ids)],
        ids=list(ids),
        draws=[draws],
        scores=[scores],
    )


def alone(model: GPT, prompt: Sequence[int], table: Tensor | None = None) -> list[int]:
    return generate(model, [prompt], GREEDY, table=table)[0].token_ids


def packed(table: Tensor) -> bytes:
    return table.float().numpy().tobytes()


def test_last_values_that_overflow_are_seen_before_others_can_find_them() -> None:
    """In a chunk that draws nothing: only the last layer's rows themselves tell of them."""
    model = build(CLASSIC, dtype=torch.float16)
    qkv = model.blocks[-1].self_attention.linear_qkv
    with torch.no_grad():
        heads = qkv.weight.unflatten(0, (CLASSIC.num_query_groups, -1, CLASSIC.kv_channels))
        heads[:, -1] = 6e4
    desk = Desk(model)
    desk.run(desk.begin(2, PROMPT))
    assert desk.run(one(2, 0, PROMPT[:4], draws=False)).faults == [0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_a_prompt_in_chunks_gives_the_tokens_of_a_whole_one(name: str, chunk: int) -> None:
    model = build(CONFIGS[name])
    desk = Desk(model)
    desk.run(desk.begin(2, PROMPT))
    for start in range(0, len(PROMPT) - chunk, chunk):
        outcome = desk.run(one(2, start, PROMPT[start : start + chunk], draws=False))
        assert outcome.tokens == []
    last = range(0, len(PROMPT), chunk)[-1]
    assert desk.go_on(2, last, PROMPT[last:], 6) == alone(model, PROMPT)


def test_only_those_that_draw_have_tokens_in_the_steps_order(model: GPT) -> None:
    desk = Desk(model)
    prompts = {4: PROMPT, 0: PROMPT[:3], 3: PROMPT[2:9]}
    for slot, prompt in prompts.items():
        desk.run(desk.begin(slot, prompt))
    step = Step(
        0,
        slots=list(prompts),
        past=[0, 0, 0],
        lengths=[len(prompt) for prompt in prompts.values()],
        ids=[token for prompt in prompts.values() for token in prompt],
        draws=[True, False, True],
        scores=[0, 0, 0],
    )
    assert desk.run(step).tokens == [alone(model, prompts[slot])[0] for slot in (4, 3)]


def test_a_token_is_drawn_behind_each_guess_as_if_there_were_no_others(model: GPT) -> None:
    desk = Desk(model)
    rules = {0: replace(GREEDY, logprobs=2), 1: Sampling(temperature=0.8, seed=5), 2: GREEDY}
    made = {}
    for slot, rule in rules.items():
        desk.run(desk.begin(slot, PROMPT, rule))
        made[slot] = desk.go_on(slot, 0, PROMPT, 6)
    for slot, rule in rules.items():  # All again, from their first tokens.
        desk.run(desk.begin(slot, PROMPT, rule))
        desk.run(one(slot, 0, PROMPT))
    right, wrong = made[0][:3], [made[1][0], made[1][1], (made[1][2] + 1) % V]
    step = Step(
        0,
        slots=[0, 2, 1],
        past=[10, 0, 10],
        lengths=[3, 10, 3],
        ids=right + PROMPT + wrong,
        draws=[True, True, True],
        scores=[0, 0, 0],
        drafts=[2, 0, 2],
    )
    outcome = desk.run(step)
    assert outcome.tokens[:4] == [*made[0][1:4], made[2][0]]
    assert outcome.tokens[4:6] == made[1][1:3]  # What comes behind the wrong one is nobody's.
    want = generate(model, [PROMPT], rules[0])[0].scores[1:4]
    for got, alone_got in zip(outcome.scores[:3], want, strict=True):
        assert got.logprob == pytest.approx(alone_got.logprob, abs=1e-9)
    # The next tokens are written over it.
    assert desk.go_on(1, 12, [made[1][2]], 3) == made[1][3:]
    assert desk.go_on(0, 13, [made[0][3]], 2) == made[0][4:]


def test_what_is_not_finite_behind_a_guess_is_seen(model: GPT) -> None:
    desk = Desk(model)
    bad = torch.full((1, CLASSIC.hidden_size), float("nan"))
    desk.run(Step(0, rewrites=[Rewrite(0, "bad", packed(bad))]))
    for slot in (0, 1):
        desk.run(desk.begin(slot, PROMPT))
        desk.run(one(slot, 0, PROMPT))
    first = alone(model, PROMPT)
    step = Step(
        0,
        slots=[0, 1],
        past=[10, 10],
        lengths=[2, 2],
        ids=[first[0], V, *first[:2]],
        draws=[True, True],
        scores=[0, 0],
        drafts=[1, 1],
    )
    outcome = desk.run(step)
    assert (outcome.faults, outcome.tokens[2:]) == ([0], first[1:3])


def test_a_step_without_sequences_is_answered(model: GPT) -> None:
    outcome = Desk(model).run(Step(0))
    assert (outcome.tokens, outcome.faults, outcome.prompt_scores) == ([], [], [])


def test_a_copied_block_serves_its_new_owner(model: GPT) -> None:
    desk = Desk(model)
    desk.run(desk.begin(0, PROMPT))
    desk.run(one(0, 0, PROMPT))
    # 8 tokens in two whole blocks, which are copied into those of slot 1.
    begin = desk.begin(1, PROMPT)
    desk.run(Step(0, begins=begin.begins, tables=begin.tables, copies=[(1, 9), (2, 10)]))
    assert desk.go_on(1, 8, PROMPT[8:], 6) == alone(model, PROMPT)


def test_all_copies_are_read_before_any_is_written(model: GPT) -> None:
    desk = Desk(model)
    desk.run(desk.begin(0, PROMPT))
    desk.run(one(0, 0, PROMPT))
    blocks = desk.runner.pool.layer(1)
    first, second, third = (blocks[block].clone() for block in (1, 2, 3))
    desk.run(Step(0, copies=[(1, 2), (2, 1), (1, 3)]))
    assert torch.equal(blocks[1], second)
    assert torch.equal(blocks[2], first)
    assert torch.equal(blocks[3], first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)


def test_blocks_are_cleared_before_they_are_copied(model: GPT) -> None:
    desk = Desk(model)
    desk.run(desk.begin(0, PROMPT))
    desk.run(one(0, 0, PROMPT))
    desk.run(Step(0, clears=[1], copies=[(1, 2)]))
    for layer in model.layers:
        blocks = desk.runner.pool.layer(layer)
        assert [bool(blocks[block].any()) for block in (1, 2, 3)] == [False, False, True]


def test_rows_of_two_adapters_stand_in_one_step_and_are_replaced(model: GPT) -> None:
    desk = Desk(model)
    other = TABLE[:2] * 2 + 1
    first, second = [V, V + 1, V + 2, *PROMPT], [*PROMPT[:4], V, V + 1, 9]
    begins = [desk.begin(slot, prompt) for slot, prompt in ((0, first), (1, second))]
    # The first adapter is at rows 2 to 4 of the pool, the second one at 6 and 7.
    ids = [one + 2 if one >= V else one for one in first]
    ids += [one + 6 if one >= V else one for one in second]
    step = Step(
        0,
        slots=[0, 1],
        past=[0, 0],
        lengths=[len(first), len(second)],
        ids=ids,
        draws=[True, True],
        scores=[0, 0],
        begins=[begin for step in begins for begin in step.begins],
        tables=[table for step in begins for table in step.tables],
        rewrites=[Rewrite(2, "a", packed(TABLE)), Rewrite(6, "b", packed(other))],
    )
    want = [alone(model, first, TABLE)[0], alone(model, second, other)[0]]
    assert desk.run(step).tokens == want
    # Another adapter takes the rows of the first.
    begin = desk.begin(2, second)
    rewrites = [Rewrite(2, "b", packed(other))]
    desk.run(Step(0, begins=begin.begins, tables=begin.tables, rewrites=rewrites))
    ids = [one + 2 if one >= V else one for one in second]
    assert desk.run(one(2, 0, ids)).tokens == want[1:]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("name", ["classic", "modern", "experts"])
def test_what_is_not_finite_is_its_own_sequences_fault(name: str, bad: float) -> None:
    model = build(CONFIGS[name], dtype=torch.float32)
    desk = Desk(model)
    for slot in (0, 1, 2):
        desk.run(desk.begin(slot, PROMPT))
    broken = [model.config.vocab_size, *PROMPT[1:]]
    table = torch.full((1, CLASSIC.hidden_size), bad)
    step = Step(
        0,
        slots=[0, 1, 2],
        past=[0, 0, 0],
        lengths=[10, 10, 10],
        ids=PROMPT + broken + PROMPT,
        draws=[True, True, True],
        scores=[0, 0, 0],
        rewrites=[Rewrite(0, "bad", packed(table))],
    )
    outcome = desk.run(step)
    # An RMS norm makes small numbers of the largest ones.
    assert outcome.faults == ([] if (name, bad) == ("modern", 3e38) else [1])
    assert outcome.tokens[0] == outcome.tokens[2] == alone(model, PROMPT)[0]
    # Its blocks are cleared, and then serve others.
    desk.run(Step(0, clears=list(range(9, 17))))
    assert desk.go_on(1, 0, PROMPT, 6) == alone(model, PROMPT)


def test_a_row_that_draws_nothing_is_looked_at_too(model: GPT) -> None:
    desk = Desk(model)
    desk.run(desk.begin(0, PROMPT))
    bad = torch.full((1, CLASSIC.hidden_size), float("nan"))
    desk.run(Step(0, rewrites=[Rewrite(0, "bad", packed(bad))]))
    assert desk.run(one(0, 0, [1, V, 3], draws=False)).faults == [0]


def test_prompt_scores_are_those_of_the_whole_prompt_in_any_chunks(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Sampling(max_new_tokens=1, prompt_logprobs=3, logprobs=2)
    prompt = [*PROMPT[:3], V, V + 2, *PROMPT[3:]]
    want = generate(model, [prompt], rule, table=TABLE)[0]
    # Three rows at a time, where chunks are of other sizes.
    monkeypatch.setattr(runner_module, "SCORED_BYTES_MAX", 3 * 4 * V)
    for chunk in (1, 5, 12):
        desk = Desk(model)
        desk.run(desk.begin(0, prompt, rule))
        desk.run(Step(0, rewrites=[Rewrite(0, "a", packed(TABLE))]))
        got: list[Scored] = []
        for start in range(0, len(prompt), chunk):
            ids = prompt[start : start + chunk]
            last = start + len(ids) == len(prompt)
            outcome = desk.run(one(0, start, ids, draws=last, scores=len(ids) - last))
            got += outcome.prompt_scores[0] if outcome.prompt_scores else []
        assert outcome.tokens == want.token_ids
        check_scores(got, want)


def check_scores(got: list[Scored], want: Completion) -> None:
    """Places of virtual tokens are filled with something; the first token has none."""
    assert len(got) == len(want.prompt_scores) - 1
    for mine, theirs in zip(got, want.prompt_scores[1:], strict=True):
        if theirs is not None:
            assert abs(mine.logprob - theirs.logprob) < 1e-9
            assert mine.rank == theirs.rank
            assert [token for token, _ in mine.tops] == [token for token, _ in theirs.tops]


def test_a_guide_that_cannot_be_followed_ends_its_own_sequence(model: GPT) -> None:
    desk = Desk(model)  # It has no tokenizer, so it can follow no guide.
    for slot in (0, 1):
        desk.run(desk.begin(slot, PROMPT))
    begin = Begin(1, GREEDY, PROMPT, [], Guide("choice", '["a", "b"]'))
    step = Step(
        0,
        slots=[0, 1],
        past=[0, 0],
        lengths=[10, 10],
        ids=PROMPT * 2,
        draws=[True, True],
        scores=[0, 0],
        begins=[begin],
        tables=[Table(1, 0, list(range(9, 17)))],
    )
    outcome = desk.run(step)
    assert (outcome.faults, outcome.stuck) == ([], [1])
    assert outcome.tokens[0] == alone(model, PROMPT)[0]
    # The next one in its slot has no guide.
    desk.run(desk.begin(1, PROMPT))
    assert desk.go_on(1, 0, PROMPT, 6) == alone(model, PROMPT)


@pytest.mark.parametrize("kv_tokens", [16, 100, 400])
@pytest.mark.parametrize("step_tokens", [6, 40, 500])
def test_a_rehearsal_fits_and_leaves_nothing(model: GPT, step_tokens: int, kv_tokens: int) -> None:
    config = replace(CONFIG, step_tokens_max=step_tokens, kv_tokens_max=kv_tokens)
    desk = Desk(model, config)
    steps = rehearsal(config, desk.runner)
    assert sum(steps[0].lengths) == min(step_tokens, kv_tokens, 6 * CLASSIC.max_position_embeddings)
    assert len(steps[2].slots) == min(6, kv_tokens // BLOCK)
    for step in steps:
        assert desk.run(step).faults == []
    for layer in model.layers:
        assert not desk.runner.pool.layer(layer).any()
    desk.run(desk.begin(0, PROMPT[:8]))
    assert desk.go_on(0, 0, PROMPT[:8], 2) == alone(model, PROMPT[:8])[:2]


def test_as_many_blocks_as_asked_for_and_one_that_nobody_has(model: GPT) -> None:
    config = replace(CONFIG, kv_tokens_max=17)
    assert blocks_that_fit(model, config) == 6


def test_without_a_number_every_sequence_that_runs_has_room_for_its_context(model: GPT) -> None:
    config = replace(CONFIG, kv_tokens_max=None)
    assert blocks_that_fit(model, config) == 6 * CLASSIC.max_position_embeddings // BLOCK + 1


@pytest.mark.parametrize("free", [0, 3 << 20])
def test_memory_bounds_the_blocks_and_none_is_told(
    free: int, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, kv_tokens_max=None, running_requests_max=40)
    monkeypatch.setattr(runner_module, "_host_bytes", lambda: free)
    if not free:
        with pytest.raises(ConfigError, match="kv_tokens_max"):
            blocks_that_fit(model, config)
        return
    # 5 layers of 32 channels, keys and values, in fp64: 10,240 bytes for 4 tokens.
    assert blocks_that_fit(model, config) == free // 4 // 10_240
    assert blocks_that_fit(model, config, neighbours=2) == free // 4 // 2 // 10_240


def test_more_than_there_is_memory_for_is_refused_with_what_could_be(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_host_bytes", lambda: 10 * 10_240)
    with pytest.raises(ConfigError, match=r"say at most 36\b"):
        blocks_that_fit(model, replace(CONFIG, kv_tokens_max=40))
    assert blocks_that_fit(model, replace(CONFIG, kv_tokens_max=36)) == 10


def test_a_window_hides_what_lies_before_it() -> None:
    model = build(MODERN)
    desk = Desk(model)
    prompt = PROMPT * 3
    desk.run(desk.begin(0, prompt))
    assert desk.go_on(0, 0, prompt[:30], 2) == alone(model, prompt)[:2]
