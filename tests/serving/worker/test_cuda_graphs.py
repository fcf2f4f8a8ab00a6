"""Steps that are recorded do what they would have done: padded, packed, and with tables elsewhere.

Here a recording is the work itself, and to replay it is to do it again on the same memory. What a
CUDA graph adds to that is for tests/gpu/test_cuda_graphs.py.
"""

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from gpt.errors import ConfigError
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Begin, Outcome, Rewrite, Step, Table
from serving.worker import cuda_graphs
from serving.worker.model_runner import Runner, blocks_that_fit, recordings
from tests.support.batch_runs import SIZES, Tally, run
from tests.support.capturable_attention import recordable
from tests.support.engine_scenarios import Scene, Shelf, drawn, squeezed
from tests.support.graph_steps import PROMPT, RULES, V, after, begun
from tests.support.models import CLASSIC, CONFIGS, MODERN, build

BLOCK, SLOTS = 4, 6
CONFIG = ServerConfig(
    "model",
    kv_block_tokens=BLOCK,
    kv_tokens_max=200,
    running_requests_max=SLOTS,
    step_tokens_max=60,
    adapter_rows_max=8,
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf.make(tmp_path_factory.mktemp("adapters"), CLASSIC.hidden_size, SIZES)


def again(work: cuda_graphs.Work) -> cuda_graphs.Work:
    return work


def runner_of(
    name: str, record: cuda_graphs.Record | None, config: ServerConfig = CONFIG
) -> Runner:
    model = recordable(build(CONFIGS[name]))
    return Runner(model, config, blocks=blocks_that_fit(model, config), slots=SLOTS, record=record)


def ran(runner: Runner, step: Step) -> Outcome:
    outcome = runner.run(step)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("name", ["classic", "modern", "odd"])
@pytest.mark.parametrize(
    "rules", [RULES, RULES[-1:] * 3, RULES[:1] * 2], ids=["all", "ban", "best"]
)
def test_a_replayed_step_does_to_tokens_scores_and_memory_what_the_step_does(
    name: str, rules: list[Sampling]
) -> None:
    plain, recorded = (runner_of(name, record) for record in (None, again))
    step = begun(rules)
    outcomes = [ran(runner, step) for runner in (plain, recorded)]
    for _ in range(6):
        one, other = outcomes
        assert (one.tokens, one.faults, one.stuck) == (other.tokens, other.faults, other.stuck)
        for mine, theirs in zip(one.scores, other.scores, strict=True):
            assert abs(mine.logprob - theirs.logprob) < 1e-9 and mine.rank == theirs.rank
        step = after(step, one, lambda place, token: token)
        outcomes = [ran(runner, step) for runner in (plain, recorded)]
        assert [outcome.replayed for outcome in outcomes] == [False, True]
    for layer in plain.model.layers:
        held, wanted = recorded.pool.layer(layer), plain.pool.layer(layer)
        assert len(held) == len(wanted) + 1  # What pads write lies behind all others' memory.
        assert (held[:-1] - wanted).abs().max() < 1e-9
        assert not held[0].any()


def test_what_a_slot_drew_last_is_known_on_the_device() -> None:
    plain, recorded = (runner_of("classic", record) for record in (None, again))
    eager = runner_of("classic", None, replace(CONFIG, step_ahead="on"))
    step = begun(RULES[:3])
    told, outcome = step, ran(plain, step)
    for runner in (recorded, eager):
        ran(runner, step)
    # Prompts are not replayed, so the device hears of their tokens only if steps go ahead.
    told = step = after(step, outcome, lambda place, token: token)
    outcome = ran(plain, told)
    assert ran(recorded, told).tokens == outcome.tokens
    assert ran(eager, msgspec.structs.replace(told, ids=[-1] * 3)).tokens == outcome.tokens
    for _ in range(3):
        told = after(told, outcome, lambda place, token: token)
        outcome = ran(plain, told)
        for runner in (recorded, eager):
            assert ran(runner, msgspec.structs.replace(told, ids=[-1] * 3)).tokens == outcome.tokens


def test_a_step_lands_after_another_was_launched() -> None:
    runner = runner_of("classic", again, replace(CONFIG, step_ahead="on"))
    plain = runner_of("classic", None)
    step = begun(RULES[:3])
    outcome = ran(plain, step)
    ran(runner, step)
    step = after(step, outcome, lambda place, token: token)
    following = after(step, outcome, lambda place, token: -1)
    first, second = runner.launch(step), runner.launch(following)
    assert first is not None and second is not None
    made = first(), second()
    outcome = ran(plain, step)
    assert made[0].tokens == outcome.tokens
    step = after(step, outcome, lambda place, token: token)
    assert made[1].tokens == ran(plain, step).tokens


def test_a_virtual_token_may_come_alone_and_what_is_not_finite_is_its_own_fault() -> None:
    bad, good = torch.full((1, CLASSIC.hidden_size), torch.nan), torch.ones(1, CLASSIC.hidden_size)
    data = torch.cat([good, bad]).numpy().tobytes()
    outcomes, ids = [], [V + 2, V + 3, 5, V + 3]
    for record in (None, again):
        runner = runner_of("classic", record)
        step = begun(RULES[:4])
        first = ran(runner, step)
        ran(runner, Step(2, rewrites=[Rewrite(2, "rows", data)]))
        step = after(step, first, lambda place, token: ids[place])
        step.draws[3] = False  # Who draws nothing is looked at, too.
        outcomes.append(ran(runner, step))
    one, other = outcomes
    assert one.faults == other.faults == [1, 3]
    assert len(one.tokens) == len(other.tokens) == 3
    assert [one.tokens[place] for place in (0, 2)] == [other.tokens[place] for place in (0, 2)]


def test_logits_that_are_not_finite_are_a_fault_of_who_draws_from_them() -> None:
    outcomes = []
    for record in (None, again):
        runner = runner_of("modern", record)
        step = begun(RULES[:4])
        first = ran(runner, step)
        runner.model.head_weight.mul_(1e308)
        step = after(step, first, lambda place, token: token)
        step.draws[2] = False
        outcomes.append(ran(runner, step))
    assert outcomes[0].faults == outcomes[1].faults == [0, 1, 3]


def test_tables_may_change_more_than_a_step_has_room_to_say() -> None:
    plain, recorded = (runner_of("modern", record) for record in (None, again))
    step = begun([Sampling()] * 5)
    moved = [list(range(31 + 3 * slot, 34 + 3 * slot)) for slot in range(5)]
    tables = [Table(slot, 0, blocks) for slot, blocks in enumerate(moved)]
    step = msgspec.structs.replace(step, tables=tables)
    first, _ = (ran(runner, step) for runner in (plain, recorded))
    alone = after(step, first, lambda place, token: token)
    # Only one of them goes on, so the others' tables are news for later.
    one = Step(3, [2], alone.past[2:3], [1], alone.ids[2:3], [True], [0])
    assert ran(recorded, one).tokens == ran(plain, one).tokens
    assert ran(recorded, alone).tokens == ran(plain, alone).tokens


QUICK = ("classic", "experts")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CONFIGS],
)
def test_in_any_scene_of_recorded_steps_all_get_what_they_get_alone(
    name: str, shelf: Shelf, tmp_path: Path
) -> None:
    scenes = [recorded(drawn(name, 0, shelf)), recorded(squeezed(name, shelf))]
    tally = run(scenes, (1, 1), tmp_path, shelf)
    assert_used(tally)
    assert tally.preemptions > 0 and tally.cached > 0 and tally.cancelled > 0


def recorded(scene: Scene) -> Scene:
    return replace(
        scene,
        settings=scene.settings | {"step_ahead": "on", "cuda_graph_rows_max": 3},
        recorded=True,
    )


def assert_used(tally: Tally) -> None:
    assert tally.replayed > tally.early > 0


def test_stages_of_a_pipeline_replay_what_is_theirs(shelf: Shelf, tmp_path: Path) -> None:
    scene = replace(squeezed("modern", shelf), recorded=True)
    assert run([scene], (1, 2), tmp_path, shelf).replayed > 0


def test_sizes_are_few_and_the_largest_holds_all() -> None:
    def sizes(running: int, most: int = 256) -> tuple[int, ...]:
        config = replace(CONFIG, running_requests_max=running, step_tokens_max=4096)
        return cuda_graphs.sizes(replace(config, cuda_graph_rows_max=most))

    assert sizes(1) == (1,)
    assert sizes(6) == (1, 2, 4, 6)
    assert sizes(20) == (1, 2, 4, 8, 16, 20)
    assert sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert sizes(1000)[-2:] == (240, 256)
    assert sizes(1000, 3) == (1, 2, 3)


def test_only_steps_in_which_all_have_one_token_are_taken() -> None:
    runner = runner_of("classic", again, replace(CONFIG, cuda_graph_rows_max=3))
    step = begun(RULES[:2])
    assert not ran(runner, step).replayed
    one = Step(2, [0], [9], [1], [5], [True], [0])
    assert ran(runner, one).replayed
    scored = Begin(1, Sampling(prompt_logprobs=0), PROMPT, [])
    assert not ran(runner, Step(3, [1], [7], [1], [5], [False], [1], begins=[scored])).replayed
    guessed = Step(4, [0], [10], [2], [5, 6], [True], [0], drafts=[1])
    assert not ran(runner, guessed).replayed
    ran(runner, begun(RULES[:4]))
    four = Step(5, [0, 1, 2, 3], [9, 8, 7, 6], [1] * 4, [5] * 4, [True] * 4, [0] * 4)
    assert not ran(runner, four).replayed


def test_every_size_is_rehearsed_the_largest_first() -> None:
    runner = runner_of("classic", again)
    counts = [len(step.slots) for step in recordings(CONFIG, runner)]
    assert counts == [6, 4, 2, 1]
    assert all(ran(runner, step).replayed for step in recordings(CONFIG, runner))


def test_what_cannot_be_recorded_is_done_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def fails(work: cuda_graphs.Work) -> cuda_graphs.Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    step = begun(RULES)
    plain, broken = (runner_of("classic", record) for record in (None, fails))
    first, _ = (ran(runner, step) for runner in (plain, broken))
    step = after(step, first, lambda place, token: token)
    with caplog.at_level(logging.WARNING):
        assert ran(broken, step).tokens == ran(plain, step).tokens
    assert "event=graph_not_recorded rows=6" in caplog.text


def test_the_reason_is_told_where_nothing_is_recorded() -> None:
    assert cuda_graphs.unfit(build(MODERN), CONFIG) == "there are none on a CPU"
    off = replace(CONFIG, cuda_graphs="off")
    assert cuda_graphs.unfit(build(MODERN), off) == "cuda_graphs is off"
    assert cuda_graphs.reserved_bytes(build(MODERN), CONFIG) == 0


@pytest.mark.parametrize(("name", "word"), [("cuda_graphs", "on"), ("step_ahead", "yes")])
def test_an_unknown_word_is_refused(name: str, word: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{word}'; known are: auto"):
        replace(CONFIG, **{name: word})  # type: ignore[arg-type]


def test_only_one_rank_steps_ahead() -> None:
    with pytest.raises(ConfigError, match=r"2 ranks \(tp 2, pp 1\).*leave it at auto"):
        replace(CONFIG, step_ahead="on", tp=2)
    assert replace(CONFIG, step_ahead="auto").steps_ahead("cuda")
    assert not replace(CONFIG, step_ahead="auto").steps_ahead("cpu")
    assert not replace(CONFIG, step_ahead="auto", pp=2).steps_ahead("cuda")
    assert not replace(CONFIG, speculate_tokens_max=3).steps_ahead("cuda")
