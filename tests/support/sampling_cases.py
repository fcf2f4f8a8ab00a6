"""The sampler's Triton kernel against the reference sampler, on a GPU or in Triton's interpreter.

tests/serving/worker/test_triton_sampler.py runs it in a process of its own with TRITON_INTERPRET=1,
and tests/gpu/test_sampler_kernel.py runs it on a GPU. The kernel's thresholds and cumulative sums
are rounded to fp32. Therefore a token may differ from the reference if its random number, or a
filter's threshold, is within `ROUNDING` of the boundary between the two tokens.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gpt.generation.reference_sampler import sample_token, sampling_weights
from gpt.sampling_params import SamplingParams, uniform_draw
from serving.messages import SlotInit
from serving.worker import triton_sampler
from serving.worker.sampler import Sampler
from tests.support.attention_cases import patch_interpreter

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    patch_interpreter()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
# The interpreter runs one program after another. On a GPU the vocabularies are those of models.
VOCABULARIES = (1, 7, 300, 9001) if IS_INTERPRETED else (300, 50257, 151936)
DTYPES = (torch.bfloat16, torch.float32)
# Bound of the error of a cumulative probability: fp32 rounds a distance of d to d * 2^-22 or so.
ROUNDING = 4e-6
STEPS = 2
PROMPT = (3, 1, 4)

RULES = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        [
            (1.0, 0, 1.0, 0.0),
            (0.8, 0, 0.9, 0.0),
            (1.5, 40, 1.0, 0.0),
            (1.2, 100, 0.95, 0.0),
            (1.0, 1, 1.0, 0.0),
            (1.0, 10**6, 1.0, 0.0),
            (0.7, 0, 0.01, 0.0),
            (2.0, 0, 0.999, 0.0),
            (1.1, 0, 1.0, 0.05),
            (0.9, 200, 0.99, 0.02),
            (1e-3, 0, 0.5, 0.0),
            (5.0, 7, 0.3, 1.0),
        ]
    )
]
# Rules beside which the kernel is not used, or is used for processed logits.
OTHER_RULES = [
    SamplingParams(),
    SamplingParams(temperature=1.0, typical_p=0.7, seed=20),
    SamplingParams(temperature=1.0, top_p=0.9, seed=21, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, top_k=30, seed=22, bad_words=((2,), (5,)), logprobs=2),
    SamplingParams(temperature=0.9, seed=23, logit_bias=((6, 4.0),)),
    SamplingParams(presence_penalty=0.5),
]


@dataclass
class Row:
    """A sequence that is sampled by the sampler and by the reference."""

    rules: SamplingParams
    tokens: list[int]

    def agrees(self, logits: Tensor, token: int) -> bool:
        """Whether the token is the reference's, or the draw is within the rounding of another.

        The distribution of the reference must have the token, with top-p moved by the rounding.
        """
        position = len(PROMPT) + len(self.tokens)
        if sample_token(logits, self.rules, PROMPT, self.tokens, position) == token:
            return True
        for shift in (0.0, -ROUNDING, ROUNDING):
            top_p = min(max(self.rules.top_p + shift, 1e-9), 1.0)
            rules = SamplingParams(
                temperature=self.rules.temperature,
                top_k=self.rules.top_k,
                top_p=1.0 if self.rules.top_p == 1 else top_p,
                min_p=min(self.rules.min_p * (1 + shift), 1.0),
            )
            weights = sampling_weights(logits.double(), rules)
            cumulative = (weights.cumsum(0) / weights.sum()).tolist()
            low = cumulative[token - 1] if token else 0.0
            uniform = uniform_draw(self.rules.seed, position)
            if weights[token] > 0 and low - ROUNDING <= uniform <= cumulative[token] + ROUNDING:
                return True
        return False


def make_sampler(rows: list[Row], vocabulary: int) -> Sampler:
    sampler = Sampler(len(rows), vocabulary, DEVICE)
    sampler._row_kernel = triton_sampler.sample_rows
    for slot, row in enumerate(rows):
        sampler.init_slot(SlotInit(slot, row.rules, list(PROMPT), row.tokens))
    return sampler


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (torch.randn(rows, vocabulary, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_equal_the_reference_up_to_rounding(
    vocabulary: int, dtype: torch.dtype, spread: float
) -> None:
    rows = [Row(rules, []) for rules in RULES]
    sampler = make_sampler(rows, vocabulary)
    differing = 0
    for _ in range(STEPS):
        logits = random_logits(len(rows), vocabulary, dtype, spread)
        positions = [len(PROMPT) + len(row.tokens) for row in rows]
        tokens = sampler.sample(logits.to(DEVICE), range(len(rows)), positions).tokens
        for row, row_logits, token in zip(rows, logits, tokens, strict=True):
            assert row.agrees(row_logits, token), (row.rules, token)
            reference = sample_token(row_logits, row.rules, PROMPT, row.tokens, positions[0])
            differing += reference != token
            row.tokens.append(token)
    assert differing <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    vocabulary = VOCABULARIES[2]
    rows = [Row(rules, []) for rules in (*RULES, *OTHER_RULES)]
    logits = random_logits(len(rows), vocabulary, dtype, 3.0).to(DEVICE)
    slots = list(range(len(rows)))
    tokens = make_sampler(rows, vocabulary).sample(logits, slots, [3] * len(rows)).tokens
    sampler = make_sampler(rows, vocabulary)
    alone = [sampler.sample(logits[slot : slot + 1], [slot], [3]).tokens[0] for slot in slots]
    ordinary = make_sampler(rows, vocabulary).sample(
        logits[: len(RULES)], slots[: len(RULES)], [3] * len(RULES)
    )
    assert alone == tokens
    assert ordinary.tokens == tokens[: len(RULES)]
    for row, row_logits, token in zip(rows, logits.cpu(), tokens, strict=True):
        assert token == sample_token(row_logits, row.rules, PROMPT, (), 3), row.rules


def test_equal_logits_remain_or_are_removed_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 0.0]] * 60)
    rows = [
        Row(SamplingParams(temperature=1.0, seed=seed, **rule), [])
        for seed in range(30)
        for rule in ({"top_k": 2}, {"top_p": 0.3})
    ]
    tokens = make_sampler(rows, 6).sample(logits.to(DEVICE), range(60), [3] * 60).tokens
    assert set(tokens[::2]) == set(tokens[1::2]) == {1, 2, 4}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_finite_weights_has_a_valid_token(value: float) -> None:
    rows = [Row(rules, []) for rules in RULES]
    logits = torch.full((len(rows), 300), value)
    tokens = make_sampler(rows, 300).sample(logits.to(DEVICE), range(len(rows)), [3] * len(rows))
    assert all(0 <= token < 300 for token in tokens.tokens)
