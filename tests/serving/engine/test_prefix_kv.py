"""Prefixes on the engine: written into blocks, shared, lost and written again, on any split.

Whatever happens, the tokens and their scores are those of the plain loop, which PEFT and the model
itself vouch for in tests/gpt/generation/test_prefix_generation.py. Neighbours have rows, or no
adapter at all.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.generation.generate import generate
from gpt.generation.reference_sampler import Score
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.messages import Rows, Scored, Submission
from tests.support import prefix_adapters
from tests.support.engine_scenarios import Played, Scene, play
from tests.support.fake_ranks import Play, adapter, text, virtual
from tests.support.models import CONFIGS, build
from tests.support.ranks import ranks

V, MANY = 5, 18
TEXT = [7, 3, 60, 3, 21, 90, 8]
RULE = Sampling(max_new_tokens=6, logprobs=1)
NETWORKS = ["modern", "odd"]  # Two KV heads and one; learned positions and rotary ones.


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rows]]:
    """For each network two prefixes that are equally long, a long one, one token, and rows."""
    made, seeded = {}, torch.Generator().manual_seed(1)
    for name in NETWORKS:
        folder, config = tmp_path_factory.mktemp("adapters"), CONFIGS[name]
        made[name] = [
            prefix_adapters.saved(
                folder, f"prefix-{seed}", prefix_adapters.drawn(config, count, seed)
            )
            for seed, count in enumerate([V, V, MANY, 1])
        ]
        rows = build_adapter(Card("rows"), torch.randn(3, config.hidden_size, generator=seeded))
        save_adapter(rows, folder / "rows.safetensors")
        made[name].append(Rows(rows.digest, 3, str(folder / "rows.safetensors")))
    return made


def ask(
    name: str, number: int, rows: Rows | None, words: list[int], rule: Sampling = RULE, **how: int
) -> Submission:
    size = CONFIGS[name].vocab_size
    ids = [size + row for row in range(rows.count if rows else 0)] + words
    return Submission(number, ids, rule, rows=rows, **how)  # type: ignore[arg-type]


def crowd(name: str, shelf: list[Rows], **settings: object) -> Scene:
    """All of the adapters and none, twice over; too little memory for all that grow, and chunks."""
    drawn = replace(RULE, temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    told = replace(RULE, prompt_logprobs=1)
    asks = []
    for number in range(12):
        rows = [*shelf, None][number % 6]
        rule = replace(
            [RULE, drawn, told][number % 3], max_new_tokens=4 if number > 5 else 14, seed=9
        )
        words = TEXT[: 1 + 3 * (number % 3)] + [number % 2] * (number // 6)
        asks.append((number // 6 * 4, ask(name, number, rows, words, rule)))
    limits = {"kv_block_tokens": 4, "running_requests_max": 4, "kv_tokens_max": 48, "pp": 1}
    more = {"step_tokens_max": 6, "adapter_rows_max": 4, **settings}
    return Scene(name, "float64", limits | more, asks, fill_tokens_max=7)


def check(model: GPT, scene: Scene, played: Played) -> None:
    for _, one in scene.asks:
        found, table = played.answers[one.number], None
        if one.rows is not None:
            table = open_adapter(Path(one.rows.file)).table
        kind = one.rows.kind if one.rows else "rows"
        (want,) = generate(model, [one.prompt], one.sampling, table=table, kind=kind)
        assert (found.tokens, found.end) == (want.token_ids, want.finish_reason), one.number
        assert numbers(found.scores) == pytest.approx(want.logprobs, abs=1e-9)
        if one.sampling.prompt_logprobs is not None:
            wanted = numbers(want.prompt_scores)
            assert [score is None for score in found.prompt_scores] == [
                score is None for score in want.prompt_scores
            ]
            assert numbers(found.prompt_scores) == pytest.approx(wanted, abs=1e-9)


def numbers(scores: list[Scored | None] | list[Scored] | list[Score | None]) -> list[float]:
    return [one.logprob for one in scores if one is not None]


SETTINGS: dict[str, dict[str, object]] = {
    "guessing": {"speculate_tokens_max": 3, "speculate_rows_max": 9},
    "without a cache": {"prefix_cache": False, "step_tokens_max": 40},
    "in small blocks": {"kv_block_tokens": 1, "step_tokens_max": 4, "adapter_bytes_max": 1},
}
CASES = [(name, how) for name in NETWORKS for how in SETTINGS]


@pytest.mark.parametrize(
    ("name", "how"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])],
)
def test_prefixes_rows_and_none_share_steps(
    name: str, how: str, shelves: dict[str, list[Rows]], tmp_path: Path
) -> None:
    scene = crowd(name, shelves[name], **SETTINGS[how])
    (played,) = play(0, 1, 1, [scene], str(tmp_path))
    check(build(CONFIGS[name]), scene, played)
    assert played.load.preemptions or how == "in small blocks"
    assert bool(played.load.cached_tokens) == (how != "without a cache")


@pytest.mark.parametrize(("name", "tp", "pp"), [("odd", 2, 1), ("modern", 1, 2)])
def test_every_rank_writes_its_part(
    name: str, tp: int, pp: int, shelves: dict[str, list[Rows]], tmp_path: Path
) -> None:
    scene = crowd(name, shelves[name])
    played = ranks(tp * pp, play, tp, pp, [scene], str(tmp_path))[0][0]
    check(build(CONFIGS[name]), scene, played)
    assert played.load.preemptions and played.load.cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "pp"), [("modern", 4, 1), ("odd", 2, 2), ("modern", 2, 2)])
def test_every_one_of_four_ranks_writes_its_part(
    name: str, tp: int, pp: int, shelves: dict[str, list[Rows]], tmp_path: Path
) -> None:
    scene = crowd(name, shelves[name])
    played = ranks(tp * pp, play, tp, pp, [scene], str(tmp_path))[0][0]
    check(build(CONFIGS[name]), scene, played)


@pytest.mark.parametrize("chunk", [1, V - 1, V, V + 1])
def test_equally_long_prefixes_on_one_text_share_nothing(
    chunk: int, shelves: dict[str, list[Rows]], tmp_path: Path
) -> None:
    name, shelf = "odd", shelves["odd"]
    asks = [(40 * place, ask(name, place, shelf[place % 2], TEXT)) for place in range(4)]
    settings = {"kv_block_tokens": 1, "running_requests_max": 1}
    settings |= {"step_tokens_max": chunk, "kv_tokens_max": 200}
    scene = Scene(name, "float64", settings, asks)
    (played,) = play(0, 1, 1, [scene], str(tmp_path))
    check(build(CONFIGS[name]), scene, played)
    made = [played.answers[place] for place in range(4)]
    assert made[0].tokens != made[1].tokens
    assert [one.cached for one in made] == [0, 0, V + 6, V + 6]
    assert played.load.adapter_loads == 2


@pytest.mark.parametrize("words", [[], [1, "virtual"], ["virtual"], [0]])
def test_a_prompt_that_is_not_a_prefix_and_a_text_is_refused(words: list[object]) -> None:
    one = Play()
    ids = [50 if word == "virtual" else 3 for word in words]
    rows = adapter("a", 2, "prefix")
    number = one.submit([*virtual(2 if words != [0] else 1), *ids], rows=rows)
    assert one.made[number].end == "refused"
    assert "which stand before all others" in one.made[number].reason


def test_a_large_prefix_comes_in_several_steps_and_is_written_once() -> None:
    one = Play(fill_tokens_max=3)
    rows = adapter("a", 10, "prefix")
    first = one.submit([*virtual(10), *text(5)], rows=rows)
    counts = []
    while (step := one.plan()) is not None:
        one.commit()
        counts.append((sum(fill.count for fill in step.fills), len(step.ids)))
    assert counts[:4] == [(3, 0), (3, 0), (3, 0), (1, 5)]
    again = one.submit([*virtual(10), *text(4, seed=1)], rows=rows)
    one.finish()
    assert one.ranks.filled == 10 and one.cached[again] == 10
    assert one.ranks.computed[first] == 5 + 3
    assert one.scheduler.load.adapter_loads == 1


def test_what_is_left_of_a_prefix_is_not_written_again() -> None:
    one = Play(blocks=6)
    ids, rows = [*virtual(10), *text(2)], adapter("a", 10, "prefix")
    one.submit(ids, new=2, rows=rows)
    one.finish()
    one.submit(text(8, seed=1), new=2)  # It takes the blocks behind the prefix's first two.
    one.finish()
    again = one.submit(ids, new=2, rows=rows)
    one.finish()
    assert one.cached[again] == 8
    fills = [(fill.start, fill.count) for step in one.steps for fill in step.fills]
    assert fills == [(0, 10), (8, 2)]


def test_a_prefix_needs_no_room_in_the_adapter_pool() -> None:
    one = Play(adapter_rows_max=2)
    number = one.submit([*virtual(8), 1], rows=adapter("a", 8, "prefix"))
    one.finish()
    assert one.made[number].end == "length"
