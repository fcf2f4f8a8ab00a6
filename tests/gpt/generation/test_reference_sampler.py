"""Sampling: the distribution asked for, and the same draw whatever else is in the batch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.errors import RequestError
from gpt.generation.generate import Completion, generate, stream
from gpt.generation.reference_sampler import Score, choose, shape, weigh
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling, uniform
from tests.support.models import MODERN, build
from tests.support.ranks import ranks

DRAWS = 4_000
VOCABULARY = MODERN.vocab_size


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(MODERN)


def frequencies(sampling: Sampling, logits: torch.Tensor, draws: int = DRAWS) -> torch.Tensor:
    """How often each token is drawn, over many positions."""
    tokens = [choose(logits, sampling, [], [], position) for position in range(draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    got = frequencies(Sampling(temperature=temperature, seed=7), logits)
    # Four standard deviations of a frequency over 4,000 draws are at most 0.0317.
    assert (got - (logits / temperature).softmax(-1)).abs().max() < 0.0317


def test_top_k_top_p_and_min_p_keep_the_fewest_likeliest_tokens() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[torch.tensor([2, 0, 3, 1])].double()
    # 0.5 + 0.25 reaches 0.7: two stay. Of 0.5 itself one stays, and never none. What top-k leaves
    # is the whole for top-p: 0.5 of 0.75 reaches 0.6.
    for rule, kept in (
        (Sampling(temperature=1, top_p=0.7), 2),
        (Sampling(temperature=1, top_p=0.76), 3),
        (Sampling(temperature=1, top_p=0.49), 1),
        (Sampling(temperature=1, top_p=0.01), 1),
        (Sampling(temperature=1), 4),
        (Sampling(temperature=1, top_k=2), 2),
        (Sampling(temperature=1, top_k=9), 4),
        (Sampling(temperature=1, top_k=2, top_p=0.6), 1),
        (Sampling(temperature=1, min_p=0.29), 3),
        (Sampling(temperature=1, min_p=1), 1),
        (Sampling(temperature=1, top_p=0.7, min_p=0.51), 1),
    ):
        weights = weigh(logits, rule)
        assert int((weights > 0).sum()) == kept, rule
        assert weights.argmax() == 1
        assert torch.equal(frequencies(rule, logits, 300) > 0, weights > 0)


def test_typical_p_keeps_what_surprises_as_much_as_is_expected() -> None:
    # Of -ln p the six are 0.55 from the mean, and the likeliest is 0.83 from it.
    logits = torch.tensor([0.1, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1]).log().double()
    for rule, kept in (
        (Sampling(temperature=1, typical_p=0.1), [1, 1, 0, 1, 1, 1, 1]),
        (Sampling(temperature=1, typical_p=0.59), [1, 1, 0, 1, 1, 1, 1]),
        (Sampling(temperature=1, typical_p=0.61), [1] * 7),
        # Of what is left, and never nothing of it.
        (Sampling(temperature=1, typical_p=0.1, top_k=1), [0, 0, 1, 0, 0, 0, 0]),
        (Sampling(temperature=1, typical_p=0.1, min_p=0.5), [0, 0, 1, 0, 0, 0, 0]),
    ):
        weights = weigh(logits, rule)
        assert (weights > 0).int().tolist() == kept, rule
        assert torch.equal(frequencies(rule, logits, 300) > 0, weights > 0)
    assert choose(logits, Sampling(typical_p=0.1), [], [], 0) == 2


@pytest.mark.parametrize(
    ("rule", "stateless"),
    [
        (Sampling(temperature=1, seed=7, top_k=9, top_p=0.9, min_p=0.1, typical_p=0.9), True),
        (Sampling(logit_bias=((1, 3.0),), allowed_token_ids=(1, 2, 3)), True),
        (Sampling(bad_words=((2,), (3,)), stop_token_ids=(1,), logprobs=2), True),
        (Sampling(bad_words=((2,), (4, 3))), False),
        (Sampling(min_new_tokens=3, stop_token_ids=(3,)), False),
        (Sampling(repetition_penalty=2.0), False),
        (Sampling(presence_penalty=1.0), False),
        (Sampling(frequency_penalty=1.0), False),
        (Sampling(no_repeat_ngram_size=2), False),
        (Sampling(length_decay=(2, 2.0), stop_token_ids=(0,)), False),
    ],
)
def test_a_choice_without_a_state_does_not_know_what_was_before(
    rule: Sampling, stateless: bool
) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 3.0, 0.0])
    pasts = [([4], [4, 4, 4]), ([4, 3, 3], [4]), ([3], [3, 3, 3]), ([4, 3, 4], [4]), ([3] * 4, [])]
    assert all(len(prompt) + len(made) == 4 for prompt, made in pasts)
    shaped = [shape(logits, rule, prompt, made) for prompt, made in pasts]
    chosen = {choose(logits, rule, prompt, made, 4) for prompt, made in pasts}
    assert rule.stateless == stateless
    assert all(torch.equal(one, shaped[0]) for one in shaped) == stateless
    assert len(chosen) == 1 or not stateless


def test_equal_tokens_are_kept_all_or_none() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0], dtype=torch.float64)
    for rule in (Sampling(temperature=1, top_k=1), Sampling(temperature=1, top_p=0.1)):
        assert (weigh(logits, rule) > 0).tolist() == [False, True, True, False, True]


def test_a_tiny_temperature_and_a_top_k_of_one_are_greedy() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 5
    for rule in (
        Sampling(temperature=3.0, top_k=1),
        *(Sampling(temperature=temperature) for temperature in (1e-300, 1e-30, 1e-3)),
    ):
        assert choose(logits, rule, [], [], 0) == int(logits.argmax())


def test_a_ban_that_would_leave_nothing_does_not_count() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    for rule, token in (
        (Sampling(allowed_token_ids=(0, 3)), 3),
        (Sampling(allowed_token_ids=(3,), bad_words=((3,),)), 3),
        (Sampling(allowed_token_ids=(2, 3), bad_words=((2,), (9, 3))), 3),
        (Sampling(allowed_token_ids=(3,), min_new_tokens=1, stop_token_ids=(3,)), 3),
        (Sampling(bad_words=((1,),), min_new_tokens=1, stop_token_ids=(2,)), 3),
        (Sampling(allowed_token_ids=(77,)), 1),
    ):
        assert choose(logits, rule, [5, 6], [], 2) == token, rule


def test_the_prompt_alone_is_scored_when_no_token_is_asked_for(model: GPT) -> None:
    table = torch.randn(2, MODERN.hidden_size, dtype=torch.float64)
    prompt = [3, VOCABULARY, 4, VOCABULARY + 1, 5, 6]
    rule = Sampling(0, prompt_logprobs=3)
    mates = [Sampling(5, prompt_logprobs=0, logprobs=2), rule, Sampling(5)]
    done = generate(model, [[7, 8], prompt, [9]], mates, table=table)
    assert (done[1].token_ids, done[1].logprobs, done[1].scores) == ([], [], [])
    assert done[1].finish_reason == "scored"
    told = done[1].prompt_scores
    assert [score is None for score in told] == [True, True, False, True, False, False]
    logprobs = model.logits(torch.tensor([prompt]), table)[0].log_softmax(-1)
    for place in (2, 4, 5):
        score, row = told[place], logprobs[place - 1]
        assert score is not None
        assert score.logprob == pytest.approx(float(row[prompt[place]]), abs=1e-9)
        assert score.rank == 1 + int((row > row[prompt[place]]).sum())
        best = row.topk(3)
        assert [token for token, _ in score.tops] == best.indices.tolist()
        assert [p for _, p in score.tops] == pytest.approx(best.values.tolist(), abs=1e-9)
    assert len(done[0].prompt_scores) == 2 and done[0].prompt_scores[1] is not None
    assert done[0].prompt_scores[1].tops == ()
    assert done[2].prompt_scores == done[2].scores == []
    # The mates' tokens are what they are without any of this; the greedy one is always the best.
    for mate, ids in ((done[0], [7, 8]), (done[2], [9])):
        assert mate.token_ids == generate(model, [ids], Sampling(5))[0].token_ids
    assert [score.rank for score in done[0].scores] == [1] * 5
    assert [score.tops[0][0] for score in done[0].scores] == done[0].token_ids


SPLIT_RULES = [
    Sampling(4, temperature=1.0, top_p=0.9, seed=3, frequency_penalty=1.0, logprobs=2),
    Sampling(0, prompt_logprobs=1),
    Sampling(6, bad_words=((5,),), repetition_penalty=1.5),
]


def completions_of_a_rank(rank: int, tp: int, pp: int) -> list[Completion]:
    return generate(build(MODERN, Mesh.create(tp, pp)), [[3, 4], [5, 6, 7], [8]], SPLIT_RULES)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_every_rank_of_a_split_knows_the_tokens_and_their_scores(
    model: GPT, tp: int, pp: int
) -> None:
    want = generate(model, [[3, 4], [5, 6, 7], [8]], SPLIT_RULES)
    for told in ranks(2, completions_of_a_rank, tp, pp):
        for got, one in zip(told, want, strict=True):
            assert got.token_ids == one.token_ids
            assert got.finish_reason == one.finish_reason
            assert got.logprobs == pytest.approx(one.logprobs, abs=1e-9)
            for some, others in ((got.scores, one.scores), (got.prompt_scores, one.prompt_scores)):
                assert [flat(score) for score in some] == [
                    pytest.approx(flat(score), abs=1e-9) for score in others
                ]


def flat(score: Score | None) -> list[float]:
    if score is None:
        return []
    return [score.logprob, score.rank, *(number for top in score.tops for number in top)]


def test_rules_see_the_prompt_and_the_completion_but_no_virtual_token(model: GPT) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(1, MODERN.hidden_size, dtype=torch.float64, generator=generator)
    prompt = [VOCABULARY, 3, 4]
    free = generate(model, [prompt], Sampling(6), table=table)[0].token_ids
    # Heavy enough that nothing comes twice.
    rule = Sampling(20, presence_penalty=2, frequency_penalty=2, repetition_penalty=10)
    once = generate(model, [prompt], rule, table=table)[0].token_ids
    assert len(set(once)) == 20 and not {3, 4} & set(once)
    word = (free[2], free[3])
    without = generate(model, [prompt], Sampling(6, bad_words=(word,)), table=table)[0].token_ids
    assert without[:3] == free[:3] and without[3] != free[3]
    assert word not in list(pairwise(without))
    late = Sampling(6, min_new_tokens=4, stop_token_ids=tuple(free))
    made = generate(model, [prompt], late, table=table)[0].token_ids
    assert len(made) >= 4 and not set(made[:4]) & set(free)


def test_logits_that_are_not_finite_end_their_own_row_only(model: GPT) -> None:
    table = torch.full((1, MODERN.hidden_size), float("nan"), dtype=torch.float64)
    prompts = [[3, 4, 5], [3, MODERN.vocab_size], [6]]
    bad = generate(model, prompts, Sampling(6), table=table)
    assert [c.finish_reason for c in bad] == ["length", "fault", "length"]
    assert len(bad[1].token_ids) == 1
    for row in (0, 2):
        assert bad[row].token_ids == generate(model, [prompts[row]], Sampling(6))[0].token_ids


def test_rows_that_are_dropped_take_no_further_step(model: GPT) -> None:
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


def test_a_seed_gives_the_same_tokens_in_any_batch(model: GPT) -> None:
    prompts = [[3, 4, 5], [6], [7, 8]]
    rules = [
        Sampling(10, temperature=1.0, top_k=30, seed=1),
        Sampling(10),
        Sampling(10, temperature=0.8, top_p=0.9, seed=2, frequency_penalty=1, logprobs=1),
    ]
    together = generate(model, prompts, rules)
    for prompt, rule, completion in zip(prompts, rules, together, strict=True):
        assert completion.token_ids == generate(model, [prompt], rule)[0].token_ids


def test_logprobs_are_of_the_models_own_distribution(model: GPT) -> None:
    completion = generate(model, [[3, 4, 5]], Sampling(4, temperature=1.0, seed=5))[0]
    ids = torch.tensor([[3, 4, 5, *completion.token_ids]])
    logprobs = model.logits(ids).log_softmax(-1)[0, 2:-1]
    want = logprobs.gather(-1, ids[0, 3:].unsqueeze(-1)).squeeze(-1).tolist()
    assert completion.logprobs == pytest.approx(want, abs=1e-9)


def test_a_stop_token_ends_a_prompt_and_not_its_neighbours(model: GPT) -> None:
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
        ({"top_k": 2**32}, "top_k"),  # Larger ones would break the message that has them.
        ({"max_new_tokens": 10**400}, "max_new_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"typical_p": 1.01}, "typical_p"),
        ({"typical_p": float("nan")}, "typical_p"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": 101}, "no_repeat_ngram_size"),
        ({"length_decay": (-1, 2.0)}, "length_decay"),
        ({"length_decay": (2**32, 2.0)}, "length_decay"),
        ({"length_decay": (0, 0.99)}, "length_decay"),
        ({"length_decay": (0, 10.01)}, "length_decay"),
        ({"length_decay": (0, float("nan"))}, "length_decay"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),  # A logit over it is infinite.
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"min_new_tokens": 999}, "min_new_tokens"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"logprobs": 101}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_its_field(
    change: dict[str, object], field: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        Sampling(**change)  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} is ")
    assert "; it must be " in str(refusal.value)


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
