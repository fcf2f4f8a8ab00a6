"""Virtual tokens that lead, served in every awkward way: the tokens are those of one plain pass.

Chunks that end before, at and behind the last virtual token, hits that end among them, lost places,
no text at all, one row, as many as may be. The oracle is the plain loop with the whole table. What
replaces an adapter under way is in tests/serving/protocols/preamble/test_adapters.py and
test_many_tasks.py.
"""

from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from serving.messages import Rows, Submission
from tests.support.engine_scenarios import Played, Scene, lead
from tests.support.models import CONFIGS, build

V = 5
CONTEXT = CONFIGS["odd"].max_position_embeddings
ROWS_MAX = CONTEXT // 2  # What a server takes unless it is told otherwise.
TEXT = [7, 3, 60, 3, 21, 90, 8]
RULE = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def model() -> GPT:
    """Of learned positions and rotary ones, so that a wrong place shows twice."""
    return build(CONFIGS["odd"])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Rows]:
    """Two of equally many rows, one of a single row, one of as many as may be."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for place, count in enumerate([V, V, 1, ROWS_MAX]):
        draws = torch.Generator().manual_seed(place)
        table = torch.randn(count, CONFIGS["odd"].hidden_size, generator=draws)
        adapter = build_adapter(Card(f"adapter-{place}"), table)
        path = folder / f"{adapter.card.name}.safetensors"
        save_adapter(adapter, path)
        made.append(Rows(adapter.digest, count, str(path)))
    return made


def ask(
    model: GPT, number: int, rows: Rows, text: list[int], *, first: int | None = None
) -> Submission:
    """The adapter's rows, or the first of them, and a text."""
    virtual = range(rows.count if first is None else first)
    prompt = [model.config.vocab_size + row for row in virtual] + text
    return Submission(number, prompt, RULE, rows=rows)


def play(model: GPT, asks: list[tuple[int, Submission]], **limits: int) -> Played:
    """Run them on the engine, and hold every answer against the plain loop's."""
    settings = {"kv_block_tokens": 4, "running_requests_max": 4, "kv_tokens_max": 400, "pp": 1}
    played = lead(model, Scene("", "float64", settings | limits, asks))
    for _, one in asks:
        assert one.rows is not None
        table = open_adapter(Path(one.rows.file)).table
        (alone,) = generate(model, [one.prompt], one.sampling, table=table)
        assert played.answers[one.number].tokens == alone.token_ids
        assert len(alone.token_ids) == RULE.max_new_tokens
    return played


@pytest.mark.parametrize("chunk", [1, V - 1, V, V + 1])
def test_a_chunk_may_end_before_at_and_behind_the_last_virtual_token(
    model: GPT, adapters: list[Rows], chunk: int
) -> None:
    limits = {"kv_block_tokens": 1, "running_requests_max": 1, "step_tokens_max": chunk}
    played = play(model, [(0, ask(model, 0, adapters[0], TEXT))], **limits)
    assert played.largest == chunk


@pytest.mark.parametrize("known", [1, 3, 4])
def test_what_the_cache_knows_may_end_among_the_virtual_tokens(
    model: GPT, adapters: list[Rows], known: int
) -> None:
    first = ask(model, 0, adapters[0], [50] * 6, first=known)
    asks = [(0, first), (40, ask(model, 1, adapters[0], TEXT))]
    assert play(model, asks, kv_block_tokens=known).answers[1].cached == known


def test_a_place_is_lost_and_taken_again(model: GPT, adapters: list[Rows]) -> None:
    asks = [(0, ask(model, number, adapters[number % 2], [*TEXT, number])) for number in range(4)]
    late = ask(model, 4, adapters[0], TEXT)
    asks.append((4, Submission(4, late.prompt, late.sampling, rows=late.rows, priority=2)))
    played = play(model, asks, kv_tokens_max=CONTEXT, prefix_cache=False)
    assert played.load.preemptions > 0


def test_a_text_may_be_empty(model: GPT, adapters: list[Rows]) -> None:
    play(model, [(0, ask(model, place, rows, [])) for place, rows in enumerate(adapters)])


def test_there_may_be_one_virtual_token_or_as_many_as_may_be(
    model: GPT, adapters: list[Rows]
) -> None:
    asks = [(0, ask(model, place, adapters[2 + place], TEXT)) for place in range(2)]
    play(model, [*asks, (30, ask(model, 2, adapters[3], [*TEXT, 1]))])
    play(model, [(0, ask(model, 0, adapters[3], [5] * (CONTEXT - ROWS_MAX - 6)))])


def test_equally_long_adapters_on_one_text_share_nothing(model: GPT, adapters: list[Rows]) -> None:
    asks = [(40 * place, ask(model, place, adapters[place % 2], TEXT)) for place in range(4)]
    played = play(model, asks)
    made = [played.answers[place] for place in range(4)]
    assert made[0].tokens != made[1].tokens
    assert [one.cached > 0 for one in made] == [False, False, True, True]
