"""The engine's sampler: the plain twin's tokens in any company, and what transformers keeps."""

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.generation.generate import generate
from gpt.generation.reference_sampler import choose, score, shape, weigh
from gpt.sampling_params import Sampling, uniform
from serving.messages import Begin, Scored, Submission
from serving.worker.sampler import Sampler, uniforms
from tests.support.engine_scenarios import Scene, Shelf, play
from tests.support.models import CONFIGS, build

V = 12  # So few that rules meet: what is banned is often what would be drawn.
IDS = st.integers(0, V - 1)
DEVICES = [
    pytest.param("cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@st.composite
def rules(draw: st.DrawFn) -> Sampling:
    """Every field at random; each is off often enough that it also stands alone."""

    def some(strategy: st.SearchStrategy[float], off: float) -> float:
        return draw(st.one_of(st.just(off), strategy))

    def ids(most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(IDS, max_size=most)))

    return Sampling(
        min_new_tokens=draw(st.integers(0, 4)),
        temperature=some(st.floats(1e-3, 5), 0.0),
        top_k=int(some(st.integers(1, V + 5), 0)),
        top_p=some(st.floats(0.01, 1), 1.0),
        min_p=some(st.floats(0, 1), 0.0),
        typical_p=some(st.floats(0.01, 1), 1.0),
        repetition_penalty=some(st.floats(0.2, 5), 1.0),
        presence_penalty=some(st.floats(-2, 2), 0.0),
        frequency_penalty=some(st.floats(-2, 2), 0.0),
        logit_bias=tuple(draw(st.lists(st.tuples(IDS, st.floats(-100, 100)), max_size=3))),
        allowed_token_ids=ids(6),
        bad_words=tuple(
            map(tuple, draw(st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=4)))
        ),
        no_repeat_ngram_size=int(some(st.integers(1, 4), 0)),
        stop_token_ids=ids(3),
        length_decay=draw(
            st.one_of(st.none(), st.tuples(st.integers(0, 4), st.floats(1, 10, width=32)))
        ),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@dataclass
class Sequence:
    rule: Sampling
    prompt: list[int]
    made: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.made)

    def begin(self, slot: int) -> Begin:
        return Begin(slot, self.rule, self.prompt, list(self.made))

    def twin(self, logits: Tensor) -> int:
        return choose(logits, self.rule, self.prompt, self.made, self.position)


PROMPTS = st.lists(st.integers(-1, V - 1), max_size=5)


@settings(deadline=None, max_examples=70)
@given(st.data())
def test_tokens_are_the_plain_twins_whatever_the_company(data: st.DataObject) -> None:
    sampler, running = Sampler(4, V), dict[int, Sequence]()
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    for _ in range(9):
        for slot in range(4):
            if slot not in running or chance.random() < 0.06:
                fresh = Sequence(data.draw(rules()), data.draw(PROMPTS))
                running[slot] = fresh
                fresh.made = [chance.randrange(V) for _ in range(chance.choice([0, 0, 3]))]
                sampler.begin(fresh.begin(slot))
        one, other = chance.sample(range(4), 2)
        if chance.random() < 0.15:  # Preempted, and each resumed in the other's place.
            running[one], running[other] = running[other], running[one]
            sampler.begin(running[one].begin(one))
            sampler.begin(running[other].begin(other))
        slots = chance.sample(range(4), chance.randint(1, 4))
        logits = torch.randn(len(slots), V, generator=generator, dtype=torch.float64) * 3
        if chance.random() < 0.3:
            logits = logits.round()  # Ties.
        before = logits.clone()
        chosen = sampler.choose(logits, slots, [running[slot].position for slot in slots])
        assert torch.equal(logits, before)
        assert chosen.tokens == [
            running[slot].twin(row) for slot, row in zip(slots, logits, strict=True)
        ]
        assert not chosen.broken
        check_scores(chosen.tokens, logits, [running[slot].rule for slot in slots], chosen.scores)
        for slot, token in zip(slots, chosen.tokens, strict=True):
            running[slot].made.append(token)


def check_scores(
    tokens: list[int], logits: Tensor, rule: list[Sampling], scores: list[Scored]
) -> None:
    asked = [one.logprobs for one in rule]
    assert len(scores) == (len(tokens) if any(n is not None for n in asked) else 0)
    wanted = score(logits, tokens, [n or 0 for n in asked])
    for n, told, want in zip(asked, scores, wanted, strict=False):
        if n is not None:
            assert told.rank == want.rank
            assert told.logprob == pytest.approx(want.logprob, abs=1e-9)
            assert [i for i, _ in told.tops] == [i for i, _ in want.tops]
            assert [p for _, p in told.tops] == pytest.approx([p for _, p in want.tops], abs=1e-9)


@pytest.mark.parametrize("spread", [0.01, 0.5, 2.0])
def test_a_large_vocabulary_is_cut_where_the_twin_cuts_it(spread: float) -> None:
    """So flat that the likeliest 256, or 4096, are too few to tell; and ties at every edge."""
    size = 6000
    generator = torch.Generator().manual_seed(3)
    rule = Sampling(temperature=1.0, seed=5)
    sequences = [
        Sequence(rule, [1, 2]),
        *(Sequence(replace(rule, top_p=p, seed=9), [3]) for p in (0.02, 0.5, 0.9, 0.999)),
        *(Sequence(replace(rule, typical_p=p), [3]) for p in (0.02, 0.5, 0.9, 0.999)),
        Sequence(replace(rule, typical_p=0.6, top_k=300, top_p=0.9), [3]),
        *(Sequence(replace(rule, top_k=k), [3]) for k in (1, 255, 256, 257, 4096, 5000, 7000)),
        *(Sequence(replace(rule, top_k=k, top_p=0.6, min_p=0.01), [3]) for k in (40, 300, 4500)),
        Sequence(replace(rule, min_p=0.3), [3]),
    ]
    slots = list(range(len(sequences)))
    sampler = Sampler(len(slots), size)
    for slot, one in zip(slots, sequences, strict=True):
        sampler.begin(one.begin(slot))
    for grain in (1e9, 20):
        for _ in range(3):
            logits = torch.randn(len(slots), size, generator=generator, dtype=torch.float64)
            logits = (logits * spread * grain).round() / grain
            made = sampler.choose(logits, slots, [one.position for one in sequences]).tokens
            assert made == [s.twin(row) for s, row in zip(sequences, logits, strict=True)]
            for one, token in zip(sequences, made, strict=True):
                one.made.append(token)


@settings(deadline=None, max_examples=100)
@given(rules(), st.lists(IDS, min_size=2, max_size=6), st.lists(IDS, max_size=5), st.integers(0))
def test_what_is_left_is_what_transformers_leaves(
    rule: Sampling, prompt: list[int], made: list[int], seed: int
) -> None:
    import transformers as hf

    # What transformers has otherwise, or not: values that it refuses, and bans of all there is.
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
    steps = hf.LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(rule.repetition_penalty)])
    if rule.no_repeat_ngram_size:
        steps.append(hf.NoRepeatNGramLogitsProcessor(rule.no_repeat_ngram_size))
    words = [list(word) for word in rule.bad_words]
    if words:
        steps.append(hf.NoBadWordsLogitsProcessor(words, eos_token_id=V - 1))
    steps.append(
        hf.MinNewTokensLengthLogitsProcessor(len(prompt), rule.min_new_tokens, eos_token_id=V - 1)
    )
    if rule.length_decay is not None:
        steps.append(hf.ExponentialDecayLengthPenalty(rule.length_decay, [V - 1], len(prompt)))
    steps.append(hf.TemperatureLogitsWarper(rule.temperature))
    if rule.top_k:
        steps.append(hf.TopKLogitsWarper(rule.top_k))
    if rule.top_p < 1:
        steps.append(hf.TopPLogitsWarper(rule.top_p))
    if rule.min_p:
        steps.append(hf.MinPLogitsWarper(rule.min_p))
    if rule.typical_p < 1:
        steps.append(hf.TypicalLogitsWarper(rule.typical_p))
    ids = torch.LongTensor([[*prompt, *made]])
    want = steps(ids, logits.unsqueeze(0).clone())[0]
    assume(not want.isnan().any())  # All were banned.
    weights = weigh(shape(logits, rule, prompt, made), rule)
    assert torch.equal(weights > 0, want.softmax(-1) > 0)
    assert torch.allclose(weights / weights.sum(), want.softmax(-1), atol=1e-12)


def test_penalties_on_the_completion_are_those_of_openai() -> None:
    logits = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rule = Sampling(presence_penalty=0.7, frequency_penalty=0.3, logit_bias=((4, 2.0), (5, -1.0)))
    made = [4, 4, 9, 4]
    want = logits.clone()
    want[4] += 2.0 - 0.7 - 3 * 0.3
    want[5] -= 1.0
    want[9] -= 0.7 + 0.3
    assert torch.allclose(shape(logits, rule, [5, 9, 7, -1, V], made), want, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_disturbs_no_other(device: str, dtype: torch.dtype) -> None:
    many = [
        Sampling(),
        Sampling(temperature=1.0, top_p=0.5, seed=1),
        Sampling(temperature=1.0, top_k=5, min_p=0.1, seed=2, logprobs=2),
        Sampling(temperature=1.0, typical_p=0.4, seed=3, no_repeat_ngram_size=2),
        Sampling(length_decay=(1, 2.0), stop_token_ids=(2, 9)),
        Sampling(repetition_penalty=2.0, bad_words=((3,),), logprobs=0),
        Sampling(allowed_token_ids=(1, 2, 3), min_new_tokens=2, stop_token_ids=(2,)),
    ]
    slots = list(range(2 * len(many)))
    logits = torch.randn(len(slots), V, generator=torch.Generator().manual_seed(8)) * 4
    logits = logits.to(dtype)
    clean, dirty = Sampler(len(slots), V, device), Sampler(len(slots), V, device)
    for slot in slots:
        for sampler in (clean, dirty):
            sampler.begin(Sequence(many[slot // 2], [5, 6]).begin(slot))
    for step in range(4):
        spoilt = logits.clone()
        for slot in slots[1::2]:
            spoilt[slot] = (math.nan, math.inf, -math.inf, math.nan)[step]
            spoilt[slot, :3] = 0.0
            if step == 2:
                spoilt[slot] = -math.inf
        positions = [2 + step] * len(slots)
        want = clean.choose(logits.to(device), slots, positions)
        got = dirty.choose(spoilt.to(device), slots, positions)
        assert got.tokens[::2] == want.tokens[::2]
        assert got.scores[::2] == want.scores[::2]
        assert all(0 <= token < V for token in got.tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_are_of_the_bare_logits_and_of_equals_the_lower_id_is_better(device: str) -> None:
    logits = torch.tensor([[1.0, 3, 2, 3, 2, 2], [0, 0, 0, 0, 0, 5]], device=device)
    sampler = Sampler(2, 6, device)
    first, second = sampler.scores(logits, [4, 0], 4)
    assert (first.rank, second.rank) == (3, 2)
    assert [i for i, _ in first.tops] == [1, 3, 2, 4]
    assert [i for i, _ in second.tops] == [5, 0, 1, 2]
    want = logits.double().log_softmax(-1)
    assert first.logprob == pytest.approx(float(want[0, 4]), abs=1e-6)
    assert [p for _, p in second.tops] == pytest.approx(want[1, [5, 0, 1, 2]].tolist(), abs=1e-6)
    assert len(sampler.scores(logits, [4, 0], 100)[0].tops) == 6
    assert sampler.scores(logits, [4, 0], 0)[1].tops == []
    assert sampler.scores(logits[:0], [], 3) == []
    many = logits.repeat(100, 1)  # More than are scored at once.
    assert sampler.scores(many, [4, 0] * 100, 4) == [first, second] * 100


def test_bad_words_never_become_complete_wherever_they_begin() -> None:
    chance = random.Random(1)
    words = [tuple(chance.choices(range(V), k=n)) for n in (2,) * 30 + (3,) * 60]
    one = Sequence(Sampling(temperature=2.0, seed=1, bad_words=tuple(words)), [3, -1, words[0][0]])
    sampler = Sampler(1, V)
    sampler.begin(one.begin(0))
    for count in range(150):
        if count % 4 == 0:
            sampler.begin(one.begin(0))  # Resumed.
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(one.position))
        token = sampler.choose(logits, [0], [one.position]).tokens[0]
        assert token == one.twin(logits[0])
        one.made.append(token)
    text = one.prompt + one.made
    runs = {tuple(text[at : at + n]) for n in (2, 3) for at in range(len(text) - n + 1)}
    assert not runs & set(words)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_no_run_of_tokens_comes_twice_and_virtual_ones_are_in_no_run(size: int) -> None:
    chance = random.Random(size)
    prompt = [-1, 0, -1, 1, -1, *chance.choices(range(2), k=200), -1]
    one = Sequence(Sampling(temperature=0.7, seed=1, no_repeat_ngram_size=size), prompt)
    sampler = Sampler(1, V)
    sampler.begin(one.begin(0))
    free = 0
    for count in range(300 if size > 1 else V - 3):
        if count % 7 == 0:
            sampler.begin(one.begin(0))  # Resumed.
        # Two tokens are so likely that without the rule all would be these.
        logits = torch.tensor([[9.0, 9.0, *[0.0] * (V - 2)]])
        token = sampler.choose(logits, [0], [one.position]).tokens[0]
        assert token == one.twin(logits[0])
        text = one.prompt + one.made
        runs = {tuple(text[at : at + size]) for at in range(len(text) - size + 1)}
        last = (*text[len(text) - size + 1 :], token)
        taken = {run[-1] for run in runs if run[:-1] == last[:-1]}
        if -1 in last[:-1]:
            free += 1
            assert token < 2
        elif len(taken) < V:
            assert last not in runs
        one.made.append(token)
    assert free == min(size - 1, 300)


def test_bad_words_go_before_runs_that_repeat_and_those_before_a_least_length() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    words, stops = ((0,), (1,)), (0, 1)
    for rule, prompt, token in (
        (Sampling(no_repeat_ngram_size=1), [2, 1], 3),
        (Sampling(no_repeat_ngram_size=1), [0, 1, 2, 3], 1),
        (Sampling(no_repeat_ngram_size=1, allowed_token_ids=(1, 2)), [1, 2, 3], 1),
        (Sampling(no_repeat_ngram_size=1, bad_words=words), [2, 3], 2),
        (Sampling(no_repeat_ngram_size=1, min_new_tokens=1, stop_token_ids=stops), [2, 3], 1),
    ):
        sampler = Sampler(1, 4)
        sampler.begin(Begin(0, rule, prompt, []))
        assert choose(logits[0], rule, prompt, [], len(prompt)) == token
        assert sampler.choose(logits, [0], [len(prompt)]).tokens == [token]


def test_an_answer_ends_sooner_the_longer_it_gets() -> None:
    rule = Sampling(stop_token_ids=(1, 2, 1, V), length_decay=(2, 2.0), max_new_tokens=2**32 - 1)
    logits = torch.tensor([3.0, -2.0, 1.0, 0.0], dtype=torch.float64)
    for made, want in ((0, [-2, 1]), (2, [-2, 1]), (3, [0, 2]), (4, [4, 4]), (5, [12, 8])):
        shaped = shape(logits, rule, [3, -1], [0] * made)
        assert shaped.tolist() == [3, *want, 0]
    # It begins after the prompt, virtual tokens included, wherever it is taken up again.
    sampler = Sampler(1, 4)
    sampler.begin(Begin(0, rule, [3, -1], [0, 0, 0]))
    assert sampler.choose(logits.unsqueeze(0), [0], [5]).tokens == [0]
    assert sampler.choose(logits.unsqueeze(0), [0], [6]).tokens == [1]
    assert sampler.choose(logits.unsqueeze(0), [0], [2**31]).tokens == [1]
    held = replace(rule, min_new_tokens=9)
    sampler.begin(Begin(0, held, [3, -1], [0] * 8))
    assert sampler.choose(logits.unsqueeze(0), [0], [10]).tokens == [0]
    assert sampler.choose(logits.unsqueeze(0), [0], [11]).tokens == [1]


@pytest.mark.parametrize("device", DEVICES)
def test_what_must_not_end_yet_has_the_likeliest_token_that_is_no_end(device: str) -> None:
    held = Sampling(min_new_tokens=2, stop_token_ids=(1, 3))
    rules = [held, Sampling(stop_token_ids=(1,)), held, Sampling(temperature=1.0, seed=4), held]
    logits = torch.tensor(
        [[0.0, 9, 1, 8], [0, 9, 1, 8], [7, 6, 5, 4], [0, 0, 50, 0], [2, 3, 2, 3]], device=device
    )
    sampler = Sampler(len(rules), 4, device)
    for slot, rule in enumerate(rules):
        sampler.begin(Begin(slot, rule, [0], []))
    for position, want in ((1, [2, 1, 0, 2, 0]), (2, [2, 1, 0, 2, 0]), (3, [1, 1, 0, 2, 1])):
        assert sampler.choose(logits, range(5), [position] * 5).tokens == want


RULED = {
    "typical": Sampling(36, temperature=1.5, seed=5, typical_p=0.3),
    "greedy": Sampling(36, no_repeat_ngram_size=2),
    "drawn": Sampling(36, temperature=0.3, seed=3, no_repeat_ngram_size=1),
    "ending": Sampling(36, length_decay=(8, 1.4), stop_token_ids=tuple(range(0, 60, 5))),
}


def test_the_engine_keeps_the_rules_through_preemption(tmp_path: Path) -> None:
    network = CONFIGS["classic"]
    shelf = Shelf.make(tmp_path, network.hidden_size, [3])
    rows = shelf.rows[0]
    virtual = [network.vocab_size + row for row in range(3)]
    prompts = [[7, 8, 9], [*virtual, 7, 8, *virtual, 7], [4, 5, 6, 4], [1, 2]]
    asks = [
        Submission(number, prompt, rule, rows=rows if number == 1 else None)
        for number, (prompt, rule) in enumerate(zip(prompts, RULED.values(), strict=True))
    ]
    settings = {"kv_block_tokens": 4, "running_requests_max": 4, "kv_tokens_max": 68}
    scene = Scene("classic", "float64", settings, [(0, ask) for ask in asks])
    (played,) = play(0, 1, 1, [scene], str(tmp_path))
    assert played.load.preemptions > 0
    model = build(network)
    for ask in asks:
        answer, table = played.answers[ask.number], shelf.table(ask)
        alone = generate(model, [ask.prompt], ask.sampling, table=table)[0]
        assert (answer.tokens, answer.end) == (alone.token_ids, alone.finish_reason)
        bare = replace(ask.sampling, typical_p=1.0, no_repeat_ngram_size=0, length_decay=None)
        free = generate(model, [ask.prompt], bare, table=table)[0]
        assert free.token_ids != answer.tokens
        if size := ask.sampling.no_repeat_ngram_size:
            text = ask.prompt + answer.tokens
            runs = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
            assert len(set(runs[-36:]) - set(runs[:-36])) == len(answer.tokens) == 36
        if ask.sampling.length_decay:
            assert (answer.end, free.finish_reason) == ("stop", "length")
            assert 8 < len(answer.tokens) < 36


def test_a_step_without_rows_has_no_tokens() -> None:
    chosen = Sampler(2, V).choose(torch.zeros(0, V), [], [])
    assert (chosen.tokens, chosen.scores, chosen.broken) == ([], [], [])


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1))
def test_numbers_drawn_together_are_those_drawn_alone(pairs: list[tuple[int, int]]) -> None:
    import numpy as np

    seeds, positions = zip(*pairs, strict=True)
    got = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions))
    assert got.tolist() == [uniform(seed, position) for seed, position in pairs]


@pytest.mark.gpu
def test_tokens_on_cuda_are_the_plain_twins() -> None:
    chance = random.Random(4)
    generator = torch.Generator().manual_seed(4)
    rule = [
        Sampling(),
        Sampling(temperature=0.8, top_p=0.9, seed=1),
        Sampling(temperature=1.2, top_k=30, min_p=0.05, seed=2, frequency_penalty=0.5),
        Sampling(repetition_penalty=1.3, bad_words=((3,), (4, 5))),
        Sampling(temperature=1.3, typical_p=0.7, seed=4, no_repeat_ngram_size=2),
        Sampling(length_decay=(4, 3.0), stop_token_ids=(11, 12)),
        Sampling(temperature=1.0, logit_bias=((7, 5.0),), min_new_tokens=3, stop_token_ids=(7,)),
        Sampling(temperature=1.0, allowed_token_ids=tuple(range(30)), logprobs=5),
    ]
    size = 9000
    sequences = [Sequence(one, [chance.randrange(size) for _ in range(9)]) for one in rule]
    slots = list(range(len(rule)))
    sampler = Sampler(len(slots), size, "cuda")
    for slot, one in zip(slots, sequences, strict=True):
        sampler.begin(one.begin(slot))
    for _ in range(10):
        logits = torch.randn(len(slots), size, generator=generator, dtype=torch.float64) * 3
        positions = [one.position for one in sequences]
        made = sampler.choose(logits.cuda(), slots, positions).tokens
        assert made == [s.twin(row) for s, row in zip(sequences, logits, strict=True)]
        for one, token in zip(sequences, made, strict=True):
            one.made.append(token)
