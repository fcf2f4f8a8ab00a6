"""Sampling: the distribution asked for, and the same draw whatever else is in the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.choice import choose, keep_likely
from gpt.errors import RequestError
from gpt.generate import generate, stream
from gpt.sampling import Sampling, uniform
from tests.models import MODERN, build

DRAWS = 20_000


def frequencies(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """How often each token is drawn, over many positions."""
    rows = logits.expand(DRAWS, -1)
    tokens = choose(rows, [sampling] * DRAWS, range(DRAWS))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    got = frequencies(Sampling(temperature=temperature, seed=7), logits)
    # Four standard deviations of a frequency over 20,000 draws are at most 0.0142.
    assert (got - (logits / temperature).softmax(-1)).abs().max() < 0.0142


def test_top_k_and_top_p_keep_the_fewest_likeliest_tokens() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[torch.tensor([2, 0, 3, 1])]
    assert (frequencies(Sampling(temperature=1, top_k=2), logits) > 0).tolist() == [
        *(False, True, False, True)
    ]
    # 0.5 + 0.25 reaches 0.7: two stay. Of 0.5 itself one stays, and never none.
    for top_p, kept in ((0.7, 2), (0.76, 3), (0.5, 1), (0.01, 1), (1.0, 4)):
        left = keep_likely(logits.unsqueeze(0), [Sampling(temperature=1, top_p=top_p)])
        assert int(left.isfinite().sum()) == kept, top_p


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(50, 30)
    rules = [Sampling(temperature=3.0, top_k=1, seed=row) for row in range(50)]
    assert torch.equal(choose(logits, rules, range(50)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(20, 30) * 5
    rules = [Sampling(temperature=temperature, seed=row) for row in range(20)]
    assert torch.equal(choose(logits, rules, range(20)), logits.argmax(-1))


def test_logits_that_are_not_finite_end_their_own_row_only() -> None:
    model = build(MODERN)
    table = torch.full((1, MODERN.hidden_size), float("nan"), dtype=torch.float64)
    prompts = [[3, 4, 5], [3, MODERN.vocab_size], [6]]
    bad = generate(model, prompts, Sampling(6), table=table)
    assert [c.finish_reason for c in bad] == ["length", "fault", "length"]
    assert len(bad[1].token_ids) == 1
    for row in (0, 2):
        assert bad[row].token_ids == generate(model, [prompts[row]], Sampling(6))[0].token_ids


def test_rows_that_are_dropped_take_no_further_step() -> None:
    model = build(MODERN)
    prompts = [[3, 4, 5], [6], [7, 8]]
    whole = generate(model, prompts, Sampling(6))
    dropped: set[int] = set()
    made: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step, pieces in enumerate(stream(model, prompts, Sampling(6), dropped=dropped)):
        for piece in pieces:
            made[piece.row].append(piece.token_id)
        if step == 1:
            dropped.add(0)
    assert made[0] == whole[0].token_ids[:2]
    assert [made[1], made[2]] == [whole[1].token_ids, whole[2].token_ids]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_uniform_numbers_are_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    model = build(MODERN)
    prompts = [[3, 4, 5], [6], [7, 8]]
    rules = [
        Sampling(10, temperature=1.0, top_k=30, seed=1),
        Sampling(10),
        Sampling(10, temperature=0.8, top_p=0.9, seed=2),
    ]
    together = generate(model, prompts, rules)
    for prompt, rule, completion in zip(prompts, rules, together, strict=True):
        assert completion.token_ids == generate(model, [prompt], rule)[0].token_ids


def test_logprobs_are_of_the_models_own_distribution() -> None:
    model = build(MODERN)
    completion = generate(model, [[3, 4, 5]], Sampling(4, temperature=1.0, seed=5))[0]
    ids = torch.tensor([[3, 4, 5, *completion.token_ids]])
    logprobs = model.logits(ids).log_softmax(-1)[0, 2:-1]
    want = logprobs.gather(-1, ids[0, 3:].unsqueeze(-1)).squeeze(-1).tolist()
    assert completion.logprobs == pytest.approx(want, abs=1e-9)


def test_a_stop_token_ends_a_prompt_and_not_its_neighbours() -> None:
    model = build(MODERN)
    free = generate(model, [[3, 4, 5], [6]], Sampling(10))
    stop = free[0].token_ids[3]
    first = free[0].token_ids.index(stop)
    rules = [Sampling(10, stop_token_ids=(stop,)), Sampling(10)]
    stopped = generate(model, [[3, 4, 5], [6]], rules)
    assert stopped[0].token_ids == free[0].token_ids[: first + 1]
    assert (stopped[0].finish_reason, stopped[1].finish_reason) == ("stop", "length")
    assert stopped[1].token_ids == free[1].token_ids


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_its_field(
    change: dict[str, float], field: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        Sampling(**change)  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert field in str(refusal.value)


@pytest.mark.parametrize(
    ("prompt", "count", "sentence"),
    [
        ([], 1, "the prompt is empty"),
        ([1] * 60, 10, r"= 70, over the model's context of 64; ask for at most 4 new tokens"),
        ([1] * 64, 1, "cut 1 tokens"),
        ([103], 1, "token id 103 is outside the vocabulary of 103"),
        ([-1], 1, "token id -1 is outside"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt: list[int], count: int, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        generate(build(MODERN), [prompt], Sampling(count))
