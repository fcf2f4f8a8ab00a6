"""The reference sampler: distributions, and draws that do not depend on the batch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.errors import RequestError
from gpt.generation.generate import Completion, generate, generate_steps
from gpt.generation.reference_sampler import Score, process_logits, sample_token, sampling_weights
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams, uniform_draw
from tests.support.models import MODERN, build
from tests.support.ranks import ranks

DRAWS = 4_000
VOCABULARY = MODERN.vocab_size


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(MODERN)


def frequencies(sampling: SamplingParams, logits: torch.Tensor, draws: int = DRAWS) -> torch.Tensor:
    """How often each token is drawn, over many positions."""
    tokens = [sample_token(logits, sampling, [], [], position) for position in range(draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    frequency = frequencies(SamplingParams(temperature=temperature, seed=7), logits)
    # Four standard deviations of a frequency over 4,000 draws are at most 0.0317.
    assert (frequency - (logits / temperature).softmax(-1)).abs().max() < 0.0317


def test_top_k_top_p_and_min_p_keep_the_fewest_tokens() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[torch.tensor([2, 0, 3, 1])].double()
    # 0.5 + 0.25 reaches 0.7: two tokens stay. For 0.5 itself one token stays, and never none. top-p
    # applies to the tokens that top-k leaves: 0.5 of 0.75 reaches 0.6.
    for rule, expected_count in (
        (SamplingParams(temperature=1, top_p=0.7), 2),
        (SamplingParams(temperature=1, top_p=0.76), 3),
        (SamplingParams(temperature=1, top_p=0.49), 1),
        (SamplingParams(temperature=1, top_p=0.01), 1),
        (SamplingParams(temperature=1), 4),
        (SamplingParams(temperature=1, top_k=2), 2),
        (SamplingParams(temperature=1, top_k=9), 4),
        (SamplingParams(temperature=1, top_k=2, top_p=0.6), 1),
        (SamplingParams(temperature=1, min_p=0.29), 3),
        (SamplingParams(temperature=1, min_p=1), 1),
        (SamplingParams(temperature=1, top_p=0.7, min_p=0.51), 1),
    ):
        weights = sampling_weights(logits, rule)
        assert int((weights > 0).sum()) == expected_count, rule
        assert weights.argmax() == 1
        assert torch.equal(frequencies(rule, logits, 300) > 0, weights > 0)


def test_typical_p_keeps_tokens_of_typical_surprisal() -> None:
    # Of -ln p the six are 0.55 from the mean, and the likeliest is 0.83 from it.
    logits = torch.tensor([0.1, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1]).log().double()
    for rule, expected_tokens in (
        (SamplingParams(temperature=1, typical_p=0.1), [1, 1, 0, 1, 1, 1, 1]),
        (SamplingParams(temperature=1, typical_p=0.59), [1, 1, 0, 1, 1, 1, 1]),
        (SamplingParams(temperature=1, typical_p=0.61), [1] * 7),
        # Of the remaining tokens, and never none of them.
        (SamplingParams(temperature=1, typical_p=0.1, top_k=1), [0, 0, 1, 0, 0, 0, 0]),
        (SamplingParams(temperature=1, typical_p=0.1, min_p=0.5), [0, 0, 1, 0, 0, 0, 0]),
    ):
        weights = sampling_weights(logits, rule)
        assert (weights > 0).int().tolist() == expected_tokens, rule
        assert torch.equal(frequencies(rule, logits, 300) > 0, weights > 0)
    assert sample_token(logits, SamplingParams(typical_p=0.1), [], [], 0) == 2


@pytest.mark.parametrize(
    ("rule", "stateless"),
    [
        (SamplingParams(temperature=1, seed=7, top_k=9, top_p=0.9, min_p=0.1, typical_p=0.9), True),
        (SamplingParams(logit_bias=((1, 3.0),), allowed_token_ids=(1, 2, 3)), True),
        (SamplingParams(bad_words=((2,), (3,)), stop_token_ids=(1,), logprobs=2), True),
        (SamplingParams(bad_words=((2,), (4, 3))), False),
        (SamplingParams(min_new_tokens=3, stop_token_ids=(3,)), False),
        (SamplingParams(repetition_penalty=2.0), False),
        (SamplingParams(presence_penalty=1.0), False),
        (SamplingParams(frequency_penalty=1.0), False),
        (SamplingParams(no_repeat_ngram_size=2), False),
        (SamplingParams(length_decay=(2, 2.0), stop_token_ids=(0,)), False),
    ],
)
def test_stateless_rules_ignore_earlier_tokens(rule: SamplingParams, stateless: bool) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 3.0, 0.0])
    pasts = [([4], [4, 4, 4]), ([4, 3, 3], [4]), ([3], [3, 3, 3]), ([4, 3, 4], [4]), ([3] * 4, [])]
    assert all(len(prompt) + len(generated) == 4 for prompt, generated in pasts)
    processed = [process_logits(logits, rule, prompt, generated) for prompt, generated in pasts]
    samples = {sample_token(logits, rule, prompt, generated, 4) for prompt, generated in pasts}
    assert rule.is_stateless == stateless
    assert all(torch.equal(logits_row, processed[0]) for logits_row in processed) == stateless
    assert len(samples) == 1 or not stateless


def test_equally_likely_tokens_are_kept_together() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0], dtype=torch.float64)
    for rule in (SamplingParams(temperature=1, top_k=1), SamplingParams(temperature=1, top_p=0.1)):
        assert (sampling_weights(logits, rule) > 0).tolist() == [False, True, True, False, True]


def test_tiny_temperature_and_top_k_of_one_are_greedy() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 5
    for rule in (
        SamplingParams(temperature=3.0, top_k=1),
        *(SamplingParams(temperature=temperature) for temperature in (1e-300, 1e-30, 1e-3)),
    ):
        assert sample_token(logits, rule, [], [], 0) == int(logits.argmax())


def test_bans_of_all_tokens_are_ignored() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    for rule, token in (
        (SamplingParams(allowed_token_ids=(0, 3)), 3),
        (SamplingParams(allowed_token_ids=(3,), bad_words=((3,),)), 3),
        (SamplingParams(allowed_token_ids=(2, 3), bad_words=((2,), (9, 3))), 3),
        (SamplingParams(allowed_token_ids=(3,), min_new_tokens=1, stop_token_ids=(3,)), 3),
        (SamplingParams(bad_words=((1,),), min_new_tokens=1, stop_token_ids=(2,)), 3),
        (SamplingParams(allowed_token_ids=(77,)), 1),
    ):
        assert sample_token(logits, rule, [5, 6], [], 2) == token, rule


def test_prompts_are_scored_without_generating_tokens(model: GPT) -> None:
    table = torch.randn(2, MODERN.hidden_size, dtype=torch.float64)
    prompt = [3, VOCABULARY, 4, VOCABULARY + 1, 5, 6]
    rule = SamplingParams(0, prompt_logprobs=3)
    sampling_rules = [SamplingParams(5, prompt_logprobs=0, logprobs=2), rule, SamplingParams(5)]
    completions = generate(model, [[7, 8], prompt, [9]], sampling_rules, adapter_table=table)
    assert (completions[1].token_ids, completions[1].logprobs, completions[1].scores) == (
        [],
        [],
        [],
    )
    assert completions[1].finish_reason == "scored"
    prompt_scores = completions[1].prompt_scores
    assert [score is None for score in prompt_scores] == [True, True, False, True, False, False]
    logprobs = model.logits(torch.tensor([prompt]), table)[0].log_softmax(-1)
    for position in (2, 4, 5):
        score = prompt_scores[position]
        row = logprobs[position - 1]
        assert score is not None
        assert score.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-9)
        assert score.rank == 1 + int((row > row[prompt[position]]).sum())
        best = row.topk(3)
        assert [token for token, _ in score.tops] == best.indices.tolist()
        assert [p for _, p in score.tops] == pytest.approx(best.values.tolist(), abs=1e-9)
    assert len(completions[0].prompt_scores) == 2 and completions[0].prompt_scores[1] is not None
    assert completions[0].prompt_scores[1].tops == ()
    assert completions[2].prompt_scores == completions[2].scores == []
    # The other requests are unaffected; their greedy token is always the best.
    for completion, ids in ((completions[0], [7, 8]), (completions[2], [9])):
        assert completion.token_ids == generate(model, [ids], SamplingParams(5))[0].token_ids
    assert [score.rank for score in completions[0].scores] == [1] * 5
    assert [score.tops[0][0] for score in completions[0].scores] == completions[0].token_ids


SPLIT_RULES = [
    SamplingParams(4, temperature=1.0, top_p=0.9, seed=3, frequency_penalty=1.0, logprobs=2),
    SamplingParams(0, prompt_logprobs=1),
    SamplingParams(6, bad_words=((5,),), repetition_penalty=1.5),
]


def completions_of_a_rank(rank: int, tp: int, pp: int) -> list[Completion]:
    return generate(build(MODERN, Mesh.create(tp, pp)), [[3, 4], [5, 6, 7], [8]], SPLIT_RULES)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_all_ranks_return_the_same_tokens_and_scores(model: GPT, tp: int, pp: int) -> None:
    want = generate(model, [[3, 4], [5, 6, 7], [8]], SPLIT_RULES)
    for rank_completions in ranks(2, completions_of_a_rank, tp, pp):
        for completion, expected in zip(rank_completions, want, strict=True):
            assert completion.token_ids == expected.token_ids
            assert completion.finish_reason == expected.finish_reason
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
            for scores_of_rank, expected_scores in (
                (completion.scores, expected.scores),
                (completion.prompt_scores, expected.prompt_scores),
            ):
                assert [flatten_score(score) for score in scores_of_rank] == [
                    pytest.approx(flatten_score(score), abs=1e-9) for score in expected_scores
                ]


def flatten_score(score: Score | None) -> list[float]:
    if score is None:
        return []
    return [score.logprob, score.rank, *(number for top in score.tops for number in top)]


def test_rules_ignore_virtual_tokens(model: GPT) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(1, MODERN.hidden_size, dtype=torch.float64, generator=generator)
    prompt = [VOCABULARY, 3, 4]
    free = generate(model, [prompt], SamplingParams(6), adapter_table=table)[0].token_ids
    # Penalties heavy enough that no token repeats.
    rule = SamplingParams(20, presence_penalty=2, frequency_penalty=2, repetition_penalty=10)
    once = generate(model, [prompt], rule, adapter_table=table)[0].token_ids
    assert len(set(once)) == 20 and not {3, 4} & set(once)
    bad_word = (free[2], free[3])
    without_bad_word = generate(
        model, [prompt], SamplingParams(6, bad_words=(bad_word,)), adapter_table=table
    )[0].token_ids
    assert without_bad_word[:3] == free[:3] and without_bad_word[3] != free[3]
    assert bad_word not in list(pairwise(without_bad_word))
    min_tokens_rule = SamplingParams(6, min_new_tokens=4, stop_token_ids=tuple(free))
    generated = generate(model, [prompt], min_tokens_rule, adapter_table=table)[0].token_ids
    assert len(generated) >= 4 and not set(generated[:4]) & set(free)


def test_non_finite_logits_end_only_their_row(model: GPT) -> None:
    table = torch.full((1, MODERN.hidden_size), float("nan"), dtype=torch.float64)
    prompts = [[3, 4, 5], [3, MODERN.vocab_size], [6]]
    completions = generate(model, prompts, SamplingParams(6), adapter_table=table)
    assert [c.finish_reason for c in completions] == ["length", "fault", "length"]
    assert len(completions[1].token_ids) == 1
    for row in (0, 2):
        assert (
            completions[row].token_ids
            == generate(model, [prompts[row]], SamplingParams(6))[0].token_ids
        )


def test_dropped_rows_run_no_further_step(model: GPT) -> None:
    prompts = [[3, 4, 5], [6], [7, 8]]
    full_completions = generate(model, prompts, SamplingParams(6))
    dropped: set[int] = set()
    generated: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step, pieces in enumerate(
        generate_steps(model, prompts, SamplingParams(6), dropped_rows=dropped)
    ):
        for piece in pieces:
            generated[piece.row].append(piece.token_id)
        if step == 1:
            dropped.add(0)
    assert generated[0] == full_completions[0].token_ids[:2]
    assert [generated[1], generated[2]] == [
        full_completions[1].token_ids,
        full_completions[2].token_ids,
    ]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_random_numbers_are_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0 <= uniform_draw(seed, position) < 1


def test_seeded_tokens_do_not_depend_on_the_batch(model: GPT) -> None:
    prompts = [[3, 4, 5], [6], [7, 8]]
    rules = [
        SamplingParams(10, temperature=1.0, top_k=30, seed=1),
        SamplingParams(10),
        SamplingParams(10, temperature=0.8, top_p=0.9, seed=2, frequency_penalty=1, logprobs=1),
    ]
    batched = generate(model, prompts, rules)
    for prompt, rule, completion in zip(prompts, rules, batched, strict=True):
        assert completion.token_ids == generate(model, [prompt], rule)[0].token_ids


def test_logprobs_are_of_the_unmodified_distribution(model: GPT) -> None:
    completion = generate(model, [[3, 4, 5]], SamplingParams(4, temperature=1.0, seed=5))[0]
    ids = torch.tensor([[3, 4, 5, *completion.token_ids]])
    logprobs = model.logits(ids).log_softmax(-1)[0, 2:-1]
    want = logprobs.gather(-1, ids[0, 3:].unsqueeze(-1)).squeeze(-1).tolist()
    assert completion.logprobs == pytest.approx(want, abs=1e-9)


def test_stop_tokens_end_only_their_row(model: GPT) -> None:
    free = generate(model, [[3, 4, 5], [6]], SamplingParams(10))
    stop = free[0].token_ids[3]
    stop_index = free[0].token_ids.index(stop)
    rules = [SamplingParams(10, stop_token_ids=(stop,)), SamplingParams(10)]
    stopped = generate(model, [[3, 4, 5], [6]], rules)
    assert stopped[0].token_ids == free[0].token_ids[: stop_index + 1]
    assert (stopped[0].finish_reason, stopped[1].finish_reason) == ("stop", "length")
    assert stopped[1].token_ids == free[1].token_ids


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**32}, "top_k"),  # Larger values would overflow the protobuf field.
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
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),  # Division by it overflows.
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
def test_invalid_sampling_params_are_refused_by_field(
    change: dict[str, object], field: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**change)  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} is ")
    assert "; it must be " in str(refusal.value)


@pytest.mark.parametrize(
    ("prompt", "count", "sentence"),
    [
        ([], 1, "the prompt is empty"),
        ([1] * 60, 10, r"= 70, more than the model's context of 64; request at most 4 new tokens"),
        ([1] * 64, 1, "shorten the prompt by at least 1 tokens"),
        ([103], 1, "token id 103 is outside the vocabulary of 103"),
        ([-1], 1, "token id -1 is outside"),
    ],
)
def test_invalid_prompts_are_refused(prompt: list[int], count: int, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        generate(build(MODERN), [prompt], SamplingParams(count))
