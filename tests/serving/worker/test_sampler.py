"""Batched sampler: equals the reference sampler in any batch, and transformers' processors."""

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

# A machine with a GPU may have no packages but torch and pytest.
pytest.importorskip("hypothesis", reason="hypothesis is not installed, and it draws the cases")
pytest.importorskip("msgspec", reason="msgspec is not installed, and the sampler needs it")

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpt.generation.generate import generate
from gpt.generation.reference_sampler import (
    process_logits,
    sample_token,
    sampling_weights,
    score_tokens,
)
from gpt.sampling_params import SamplingParams, uniform_draw
from serving.messages import SlotInit, Submission, TokenScore
from serving.worker.sampler import Sampler, uniforms
from tests.support.engine_scenarios import AdapterFiles, Scenario, run_scenarios
from tests.support.models import CONFIGS, build

V = 12  # Small, so that bans often hit the token that would be sampled.
IDS = st.integers(0, V - 1)
WITHOUT_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
DEVICES = [
    pytest.param("cpu"),
    pytest.param("cuda", marks=[pytest.mark.gpu, WITHOUT_CUDA]),
]


@st.composite
def rules(draw: st.DrawFn) -> SamplingParams:
    """Random sampling parameters; each is often off, so that each is also tested alone."""

    def optional(strategy: st.SearchStrategy[float], off: float) -> float:
        return draw(st.one_of(st.just(off), strategy))

    def ids(count_max: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(IDS, max_size=count_max)))

    return SamplingParams(
        min_new_tokens=draw(st.integers(0, 4)),
        temperature=optional(st.floats(1e-3, 5), 0.0),
        top_k=int(optional(st.integers(1, V + 5), 0)),
        top_p=optional(st.floats(0.01, 1), 1.0),
        min_p=optional(st.floats(0, 1), 0.0),
        typical_p=optional(st.floats(0.01, 1), 1.0),
        repetition_penalty=optional(st.floats(0.2, 5), 1.0),
        presence_penalty=optional(st.floats(-2, 2), 0.0),
        frequency_penalty=optional(st.floats(-2, 2), 0.0),
        logit_bias=tuple(draw(st.lists(st.tuples(IDS, st.floats(-100, 100)), max_size=3))),
        allowed_token_ids=ids(6),
        bad_words=tuple(
            map(tuple, draw(st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=4)))
        ),
        no_repeat_ngram_size=int(optional(st.integers(1, 4), 0)),
        stop_token_ids=ids(3),
        length_decay=draw(
            st.one_of(st.none(), st.tuples(st.integers(0, 4), st.floats(1, 10, width=32)))
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@dataclass
class Sequence:
    """A sequence with its sampling parameters and the tokens that it has so far."""

    rule: SamplingParams
    prompt: list[int]
    generated: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.generated)

    def slot_init(self, slot: int) -> SlotInit:
        return SlotInit(slot, self.rule, self.prompt, list(self.generated))

    def reference_token(self, logits: Tensor) -> int:
        return sample_token(logits, self.rule, self.prompt, self.generated, self.position)


PROMPTS = st.lists(st.integers(-1, V - 1), max_size=5)


@settings(deadline=None, max_examples=70)
@given(st.data())
def test_tokens_equal_the_reference_sampler_in_any_batch(data: st.DataObject) -> None:
    sampler = Sampler(4, V)
    running = dict[int, Sequence]()
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    for _ in range(9):
        for slot in range(4):
            if slot not in running or chance.random() < 0.06:
                sequence = Sequence(data.draw(rules()), data.draw(PROMPTS))
                running[slot] = sequence
                sequence.generated = [chance.randrange(V) for _ in range(chance.choice([0, 0, 3]))]
                sampler.init_slot(sequence.slot_init(slot))
        first, second = chance.sample(range(4), 2)
        if chance.random() < 0.15:  # Both are preempted, and each resumes in the other's slot.
            running[first], running[second] = running[second], running[first]
            sampler.init_slot(running[first].slot_init(first))
            sampler.init_slot(running[second].slot_init(second))
        slots = chance.sample(range(4), chance.randint(1, 4))
        logits = torch.randn(len(slots), V, generator=generator, dtype=torch.float64) * 3
        if chance.random() < 0.3:
            logits = logits.round()  # Ties.
        before = logits.clone()
        rows_at_once = chance.choice([1, 2, 1000])
        with mock.patch("serving.worker.sampler._PROCESSED_LOGITS_MAX", rows_at_once * V):
            sampled = sampler.sample(logits, slots, [running[slot].position for slot in slots])
        assert torch.equal(logits, before)
        assert sampled.tokens == [
            running[slot].reference_token(row) for slot, row in zip(slots, logits, strict=True)
        ]
        assert not sampled.failed_guide_rows
        check_scores(sampled.tokens, logits, [running[slot].rule for slot in slots], sampled.scores)
        for slot, token in zip(slots, sampled.tokens, strict=True):
            running[slot].generated.append(token)


def check_scores(
    tokens: list[int], logits: Tensor, rules: list[SamplingParams], scores: list[TokenScore]
) -> None:
    """Assert that each row with logprobs has the scores of the reference sampler."""
    top_counts = [rule.logprobs for rule in rules]
    has_scores = any(count is not None for count in top_counts)
    assert len(scores) == (len(tokens) if has_scores else 0)
    expected_scores = score_tokens(logits, tokens, [count or 0 for count in top_counts])
    for count, score, expected in zip(top_counts, scores, expected_scores, strict=False):
        if count is not None:
            assert score.rank == expected.rank
            assert score.logprob == pytest.approx(expected.logprob, abs=1e-9)
            assert [token for token, _ in score.tops] == [token for token, _ in expected.tops]
            logprobs = [logprob for _, logprob in score.tops]
            expected_logprobs = [logprob for _, logprob in expected.tops]
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-9)


@pytest.mark.parametrize("spread", [0.01, 0.5, 2.0])
def test_truncation_of_a_large_vocabulary_equals_the_reference(spread: float) -> None:
    """The logits are flat: truncation keeps more than 256 or 4096 tokens, with boundary ties."""
    size = 6000
    generator = torch.Generator().manual_seed(3)
    rule = SamplingParams(temperature=1.0, seed=5)
    sequences = [
        Sequence(rule, [1, 2]),
        Sequence(replace(rule, top_p=0.02, seed=9), [3]),
        Sequence(replace(rule, top_p=0.5, seed=9), [3]),
        Sequence(replace(rule, top_p=0.9, seed=9), [3]),
        Sequence(replace(rule, top_p=0.999, seed=9), [3]),
        Sequence(replace(rule, typical_p=0.02), [3]),
        Sequence(replace(rule, typical_p=0.5), [3]),
        Sequence(replace(rule, typical_p=0.9), [3]),
        Sequence(replace(rule, typical_p=0.999), [3]),
        Sequence(replace(rule, typical_p=0.6, top_k=300, top_p=0.9), [3]),
        Sequence(replace(rule, top_k=1), [3]),
        Sequence(replace(rule, top_k=255), [3]),
        Sequence(replace(rule, top_k=256), [3]),
        Sequence(replace(rule, top_k=257), [3]),
        Sequence(replace(rule, top_k=4096), [3]),
        Sequence(replace(rule, top_k=5000), [3]),
        Sequence(replace(rule, top_k=7000), [3]),
        Sequence(replace(rule, top_k=40, top_p=0.6, min_p=0.01), [3]),
        Sequence(replace(rule, top_k=300, top_p=0.6, min_p=0.01), [3]),
        Sequence(replace(rule, top_k=4500, top_p=0.6, min_p=0.01), [3]),
        Sequence(replace(rule, min_p=0.3), [3]),
    ]
    slots = list(range(len(sequences)))
    sampler = Sampler(len(slots), size)
    for slot, sequence in zip(slots, sequences, strict=True):
        sampler.init_slot(sequence.slot_init(slot))
    for grain in (1e9, 20):
        for _ in range(3):
            logits = torch.randn(len(slots), size, generator=generator, dtype=torch.float64)
            logits = (logits * spread * grain).round() / grain
            positions = [sequence.position for sequence in sequences]
            tokens = sampler.sample(logits, slots, positions).tokens
            for sequence, row, token in zip(sequences, logits, tokens, strict=True):
                assert token == sequence.reference_token(row)
                sequence.generated.append(token)


@settings(deadline=None, max_examples=100)
@given(rules(), st.lists(IDS, min_size=2, max_size=6), st.lists(IDS, max_size=5), st.integers(0))
def test_truncated_weights_equal_those_of_transformers(
    rule: SamplingParams, prompt: list[int], generated: list[int], seed: int
) -> None:
    import transformers as hf

    # Without parameters that transformers refuses, and without bans that leave no token.
    rule = replace(
        rule,
        logit_bias=(),
        allowed_token_ids=(),
        presence_penalty=0.0,
        frequency_penalty=0.0,
        temperature=rule.temperature or 1.0,
        bad_words=tuple(word for word in rule.bad_words if word not in {(V - 1,)}),
        stop_token_ids=(V - 1,),
    )
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed % 2**63)).double() * 3
    processors = hf.LogitsProcessorList(
        [hf.RepetitionPenaltyLogitsProcessor(rule.repetition_penalty)]
    )
    if rule.no_repeat_ngram_size:
        processors.append(hf.NoRepeatNGramLogitsProcessor(rule.no_repeat_ngram_size))
    words = [list(word) for word in rule.bad_words]
    if words:
        processors.append(hf.NoBadWordsLogitsProcessor(words, eos_token_id=V - 1))
    processors.append(
        hf.MinNewTokensLengthLogitsProcessor(len(prompt), rule.min_new_tokens, eos_token_id=V - 1)
    )
    if rule.length_decay is not None:
        processors.append(hf.ExponentialDecayLengthPenalty(rule.length_decay, [V - 1], len(prompt)))
    processors.append(hf.TemperatureLogitsWarper(rule.temperature))
    if rule.top_k:
        processors.append(hf.TopKLogitsWarper(rule.top_k))
    if rule.top_p < 1:
        processors.append(hf.TopPLogitsWarper(rule.top_p))
    if rule.min_p:
        processors.append(hf.MinPLogitsWarper(rule.min_p))
    if rule.typical_p < 1:
        processors.append(hf.TypicalLogitsWarper(rule.typical_p))
    ids = torch.LongTensor([[*prompt, *generated]])
    processed = processors(ids, logits.unsqueeze(0).clone())[0]
    assume(not processed.isnan().any())  # All tokens are banned.
    expected = processed.softmax(-1)
    weights = sampling_weights(process_logits(logits, rule, prompt, generated), rule)
    assert torch.equal(weights > 0, expected > 0)
    assert torch.allclose(weights / weights.sum(), expected, atol=1e-12)


def test_penalties_on_the_completion_are_those_of_openai() -> None:
    logits = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rule = SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.3, logit_bias=((4, 2.0), (5, -1.0))
    )
    generated = [4, 4, 9, 4]
    expected = logits.clone()
    expected[4] += 2.0 - 0.7 - 3 * 0.3
    expected[5] -= 1.0
    expected[9] -= 0.7 + 0.3
    processed = process_logits(logits, rule, [5, 9, 7, -1, V], generated)
    assert torch.allclose(processed, expected, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_rows_do_not_change_other_rows(device: str, dtype: torch.dtype) -> None:
    rules_of_pairs = [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.5, seed=1),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.1, seed=2, logprobs=2),
        SamplingParams(temperature=1.0, typical_p=0.4, seed=3, no_repeat_ngram_size=2),
        SamplingParams(length_decay=(1, 2.0), stop_token_ids=(2, 9)),
        SamplingParams(repetition_penalty=2.0, bad_words=((3,),), logprobs=0),
        SamplingParams(allowed_token_ids=(1, 2, 3), min_new_tokens=2, stop_token_ids=(2,)),
    ]
    slots = list(range(2 * len(rules_of_pairs)))
    logits = torch.randn(len(slots), V, generator=torch.Generator().manual_seed(8)) * 4
    logits = logits.to(dtype)
    clean_sampler = Sampler(len(slots), V, device)
    nan_sampler = Sampler(len(slots), V, device)
    for slot in slots:
        for sampler in (clean_sampler, nan_sampler):
            sampler.init_slot(Sequence(rules_of_pairs[slot // 2], [5, 6]).slot_init(slot))
    for step in range(4):
        nan_logits = logits.clone()
        for slot in slots[1::2]:
            nan_logits[slot] = (math.nan, math.inf, -math.inf, math.nan)[step]
            nan_logits[slot, :3] = 0.0
            if step == 2:
                nan_logits[slot] = -math.inf
        positions = [2 + step] * len(slots)
        expected = clean_sampler.sample(logits.to(device), slots, positions)
        actual = nan_sampler.sample(nan_logits.to(device), slots, positions)
        assert actual.tokens[::2] == expected.tokens[::2]
        assert actual.scores[::2] == expected.scores[::2]
        assert all(0 <= token < V for token in actual.tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_use_unmodified_logits_and_ties_prefer_lower_ids(device: str) -> None:
    logits = torch.tensor([[1.0, 3, 2, 3, 2, 2], [0, 0, 0, 0, 0, 5]], device=device)
    sampler = Sampler(2, 6, device)
    first, second = sampler.score_targets(logits, [4, 0], 4)
    assert (first.rank, second.rank) == (3, 2)
    assert [token for token, _ in first.tops] == [1, 3, 2, 4]
    assert [token for token, _ in second.tops] == [5, 0, 1, 2]
    logprobs = logits.double().log_softmax(-1)
    assert first.logprob == pytest.approx(float(logprobs[0, 4]), abs=1e-6)
    top_logprobs = [logprob for _, logprob in second.tops]
    assert top_logprobs == pytest.approx(logprobs[1, [5, 0, 1, 2]].tolist(), abs=1e-6)
    assert len(sampler.score_targets(logits, [4, 0], 100)[0].tops) == 6
    assert sampler.score_targets(logits, [4, 0], 0)[1].tops == []
    assert sampler.score_targets(logits[:0], [], 3) == []
    repeated = logits.repeat(100, 1)  # More rows than are scored at once.
    assert sampler.score_targets(repeated, [4, 0] * 100, 4) == [first, second] * 100


def test_bad_words_are_never_completed() -> None:
    chance = random.Random(1)
    words = [tuple(chance.choices(range(V), k=n)) for n in (2,) * 30 + (3,) * 60]
    sequence = Sequence(
        SamplingParams(temperature=2.0, seed=1, bad_words=tuple(words)), [3, -1, words[0][0]]
    )
    sampler = Sampler(1, V)
    sampler.init_slot(sequence.slot_init(0))
    for count in range(150):
        if count % 4 == 0:
            sampler.init_slot(sequence.slot_init(0))  # Resumed.
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(sequence.position))
        token = sampler.sample(logits, [0], [sequence.position]).tokens[0]
        assert token == sequence.reference_token(logits[0])
        sequence.generated.append(token)
    text = sequence.prompt + sequence.generated
    assert not (ngrams(text, 2) | ngrams(text, 3)) & set(words)


def ngrams(tokens: list[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)}


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_ngrams_do_not_repeat_and_exclude_virtual_tokens(size: int) -> None:
    chance = random.Random(size)
    prompt = [-1, 0, -1, 1, -1, *chance.choices(range(2), k=200), -1]
    rule = SamplingParams(temperature=0.7, seed=1, no_repeat_ngram_size=size)
    sequence = Sequence(rule, prompt)
    sampler = Sampler(1, V)
    sampler.init_slot(sequence.slot_init(0))
    after_virtual_token = 0
    for count in range(300 if size > 1 else V - 3):
        if count % 7 == 0:
            sampler.init_slot(sequence.slot_init(0))  # Resumed.
        # Without the ban, only the first two tokens would be sampled.
        logits = torch.tensor([[9.0, 9.0, *[0.0] * (V - 2)]])
        token = sampler.sample(logits, [0], [sequence.position]).tokens[0]
        assert token == sequence.reference_token(logits[0])
        text = sequence.prompt + sequence.generated
        prefix = tuple(text[len(text) - size + 1 :])
        banned = {ngram[-1] for ngram in ngrams(text, size) if ngram[:-1] == prefix}
        if -1 in prefix:
            after_virtual_token += 1
            assert token < 2
        elif len(banned) < V:
            assert token not in banned
        sequence.generated.append(token)
    assert after_virtual_token == min(size - 1, 300)


def test_bans_are_skipped_in_order_of_importance() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    words = ((0,), (1,))
    stops = (0, 1)
    for rule, prompt, token in (
        (SamplingParams(no_repeat_ngram_size=1), [2, 1], 3),
        (SamplingParams(no_repeat_ngram_size=1), [0, 1, 2, 3], 1),
        (SamplingParams(no_repeat_ngram_size=1, allowed_token_ids=(1, 2)), [1, 2, 3], 1),
        (SamplingParams(no_repeat_ngram_size=1, bad_words=words), [2, 3], 2),
        (SamplingParams(no_repeat_ngram_size=1, min_new_tokens=1, stop_token_ids=stops), [2, 3], 1),
    ):
        sampler = Sampler(1, 4)
        sampler.init_slot(SlotInit(0, rule, prompt, []))
        assert sample_token(logits[0], rule, prompt, [], len(prompt)) == token
        assert sampler.sample(logits, [0], [len(prompt)]).tokens == [token]


def test_length_decay_raises_stop_logits_with_length() -> None:
    rule = SamplingParams(
        stop_token_ids=(1, 2, 1, V), length_decay=(2, 2.0), max_new_tokens=2**32 - 1
    )
    logits = torch.tensor([3.0, -2.0, 1.0, 0.0], dtype=torch.float64)
    for generated_tokens, stop_logits in (
        (0, [-2, 1]),
        (2, [-2, 1]),
        (3, [0, 2]),
        (4, [4, 4]),
        (5, [12, 8]),
    ):
        processed = process_logits(logits, rule, [3, -1], [0] * generated_tokens)
        assert processed.tolist() == [3, *stop_logits, 0]
    # Length counts from the end of the prompt with its virtual tokens, also after a preemption.
    sampler = Sampler(1, 4)
    sampler.init_slot(SlotInit(0, rule, [3, -1], [0, 0, 0]))
    assert sampler.sample(logits.unsqueeze(0), [0], [5]).tokens == [0]
    assert sampler.sample(logits.unsqueeze(0), [0], [6]).tokens == [1]
    assert sampler.sample(logits.unsqueeze(0), [0], [2**31]).tokens == [1]
    with_min_tokens = replace(rule, min_new_tokens=9)
    sampler.init_slot(SlotInit(0, with_min_tokens, [3, -1], [0] * 8))
    assert sampler.sample(logits.unsqueeze(0), [0], [10]).tokens == [0]
    assert sampler.sample(logits.unsqueeze(0), [0], [11]).tokens == [1]


@pytest.mark.parametrize("device", DEVICES)
def test_min_new_tokens_takes_the_best_token_that_does_not_stop(device: str) -> None:
    with_min_tokens = SamplingParams(min_new_tokens=2, stop_token_ids=(1, 3))
    rules = [
        with_min_tokens,
        SamplingParams(stop_token_ids=(1,)),
        with_min_tokens,
        SamplingParams(temperature=1.0, seed=4),
        with_min_tokens,
    ]
    logits = torch.tensor(
        [[0.0, 9, 1, 8], [0, 9, 1, 8], [7, 6, 5, 4], [0, 0, 50, 0], [2, 3, 2, 3]], device=device
    )
    sampler = Sampler(len(rules), 4, device)
    for slot, rule in enumerate(rules):
        sampler.init_slot(SlotInit(slot, rule, [0], []))
    for position, tokens in (
        (1, [2, 1, 0, 2, 0]),
        (2, [2, 1, 0, 2, 0]),
        (3, [1, 1, 0, 2, 1]),
    ):
        assert sampler.sample(logits, range(5), [position] * 5).tokens == tokens


STATEFUL_RULES = [
    SamplingParams(36, temperature=1.5, seed=5, typical_p=0.3),
    SamplingParams(36, no_repeat_ngram_size=2),
    SamplingParams(36, temperature=0.3, seed=3, no_repeat_ngram_size=1),
    SamplingParams(36, length_decay=(8, 1.4), stop_token_ids=tuple(range(0, 60, 5))),
]


def test_sampling_state_survives_preemption(tmp_path: Path) -> None:
    model_config = CONFIGS["classic"]
    adapter_files = AdapterFiles.make(tmp_path, model_config.hidden_size, [3])
    rows = adapter_files.rows[0]
    virtual = [model_config.vocab_size + row for row in range(3)]
    prompts = [[7, 8, 9], [*virtual, 7, 8, *virtual, 7], [4, 5, 6, 4], [1, 2]]
    submissions = [
        Submission(number, prompt, rule, adapter_ref=rows if number == 1 else None)
        for number, (prompt, rule) in enumerate(zip(prompts, STATEFUL_RULES, strict=True))
    ]
    settings = {"kv_block_tokens": 4, "running_requests_max": 4, "kv_tokens_max": 68}
    arrivals = [(0, submission) for submission in submissions]
    scenario = Scenario("classic", "float64", settings, arrivals)
    (scenario_run,) = run_scenarios(0, 1, 1, [scenario], str(tmp_path))
    assert scenario_run.load.preemptions > 0
    model = build(model_config)
    for submission in submissions:
        prompt = submission.prompt
        rule = submission.sampling
        table = adapter_files.table(submission)
        answer = scenario_run.answers[submission.sequence_id]
        expected = generate(model, [prompt], rule, adapter_table=table)[0]
        assert (answer.tokens, answer.end) == (expected.token_ids, expected.finish_reason)
        stateless = replace(rule, typical_p=1.0, no_repeat_ngram_size=0, length_decay=None)
        unrestricted = generate(model, [prompt], stateless, adapter_table=table)[0]
        assert unrestricted.token_ids != answer.tokens
        if size := rule.no_repeat_ngram_size:
            text = prompt + answer.tokens
            runs = [tuple(text[start : start + size]) for start in range(len(text) - size + 1)]
            assert len(set(runs[-36:]) - set(runs[:-36])) == len(answer.tokens) == 36
        if rule.length_decay:
            assert (answer.end, unrestricted.finish_reason) == ("stop", "length")
            assert 8 < len(answer.tokens) < 36


def test_no_rows_give_no_tokens() -> None:
    sampled = Sampler(2, V).sample(torch.zeros(0, V), [], [])
    assert (sampled.tokens, sampled.scores, sampled.failed_guide_rows) == ([], [], [])


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1))
def test_batched_uniforms_equal_single_ones(pairs: list[tuple[int, int]]) -> None:
    import numpy as np

    seeds, positions = zip(*pairs, strict=True)
    draws = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions))
    assert draws.tolist() == [uniform_draw(seed, position) for seed, position in pairs]


@pytest.mark.gpu
@WITHOUT_CUDA
def test_cuda_tokens_equal_the_reference_sampler() -> None:
    chance = random.Random(4)
    generator = torch.Generator().manual_seed(4)
    rules = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1),
        SamplingParams(temperature=1.2, top_k=30, min_p=0.05, seed=2, frequency_penalty=0.5),
        SamplingParams(repetition_penalty=1.3, bad_words=((3,), (4, 5))),
        SamplingParams(temperature=1.3, typical_p=0.7, seed=4, no_repeat_ngram_size=2),
        SamplingParams(length_decay=(4, 3.0), stop_token_ids=(11, 12)),
        SamplingParams(
            temperature=1.0, logit_bias=((7, 5.0),), min_new_tokens=3, stop_token_ids=(7,)
        ),
        SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(30)), logprobs=5),
    ]
    size = 9000
    sequences = [Sequence(rule, [chance.randrange(size) for _ in range(9)]) for rule in rules]
    slots = list(range(len(rules)))
    sampler = Sampler(len(slots), size, "cuda")
    for slot, sequence in zip(slots, sequences, strict=True):
        sampler.init_slot(sequence.slot_init(slot))
    for _ in range(10):
        logits = torch.randn(len(slots), size, generator=generator, dtype=torch.float64) * 3
        positions = [sequence.position for sequence in sequences]
        tokens = sampler.sample(logits.cuda(), slots, positions).tokens
        for sequence, row, token in zip(sequences, logits, tokens, strict=True):
            assert token == sequence.reference_token(row)
            sequence.generated.append(token)
