"""Beam search cases, and what transformers computes for them with the same model.

The models are the tests' models with flatter logits, so that beams differ and overtake.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from serving.engine.beam_search import BeamSearchScorer
from serving.request import (
    AnswerSpec,
    BeamSearchParams,
    Request,
)
from tests.support.models import build

CLOSE = 1e-4  # Tolerance of scores: transformers sums in fp32.


@cache
def flat_model(config: GPTConfig) -> GPT:
    model = build(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "final_layernorm" in name:
                value.mul_(0.3)
                if config.layernorm_zero_centered_gamma and name.endswith("weight"):
                    value.sub_(0.7)
    return model


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    rule: BeamSearchParams
    new_tokens_max: int
    new_tokens_min: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def request(self) -> Request:
        sampling = SamplingParams(
            self.new_tokens_max, self.new_tokens_min, stop_token_ids=self.stop_token_ids, logprobs=3
        )
        return Request((AnswerSpec(self.prompt, sampling),) * self.rule.answers, beams=self.rule)


Best = list[tuple[tuple[int, ...], float]]


@cache
def transformers_model(model: GPT, table: Tensor | None) -> Any:
    """The model behind the interface that transformers' generation expects."""
    hf = import_module("transformers")
    output_class = import_module("transformers.modeling_outputs").CausalLMOutput

    class TransformersModel(hf.PreTrainedModel, hf.GenerationMixin):  # type: ignore[misc, name-defined]
        config_class = hf.PreTrainedConfig

        def __init__(self) -> None:
            super().__init__(hf.PreTrainedConfig(vocab_size=model.config.vocab_size))
            self.anchor = torch.nn.Parameter(torch.zeros(1))  # Tells transformers the device.

        def forward(self, input_ids: Tensor, **_: object) -> Any:
            return output_class(logits=model.logits(input_ids, table))

        def prepare_inputs_for_generation(self, input_ids: Tensor, **_: object) -> dict[str, Any]:
            return {"input_ids": input_ids}

    return TransformersModel()


@torch.inference_mode()
def transformers_beams(model: GPT, case: Case, table: Tensor | None = None) -> Best:
    """The beams that transformers returns."""
    generation_config = import_module("transformers").GenerationConfig(
        num_beams=case.rule.width,
        num_return_sequences=case.rule.answers,
        length_penalty=case.rule.length_penalty,
        early_stopping=case.rule.early_stopping,
        max_new_tokens=case.new_tokens_max,
        min_new_tokens=case.new_tokens_min,
        eos_token_id=list(case.stop_token_ids) or None,
        pad_token_id=0,
        do_sample=False,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    generated = transformers_model(model, table).generate(
        torch.tensor([case.prompt]), generation_config=generation_config
    )
    lengths = (generated.beam_indices >= 0).sum(-1).tolist()
    sequences = generated.sequences[:, len(case.prompt) :].tolist()
    scores = generated.sequences_scores.tolist()
    return [
        (tuple(ids[:length]), score)
        for ids, length, score in zip(sequences, lengths, scores, strict=True)
    ]


@torch.inference_mode()
def run_scorer(model: GPT, case: Case) -> BeamSearchScorer:
    """The scorer alone, fed by the model without an engine."""
    beams = BeamSearchScorer(
        case.rule, case.new_tokens_max, case.new_tokens_min, case.stop_token_ids
    )
    while not beams.is_done:
        ids = torch.tensor([[*case.prompt, *beam.tokens] for beam in beams.live])
        best = model.logits(ids)[:, -1].log_softmax(-1).topk(beams.candidates_max)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        beams.advance([list(zip(*row, strict=True)) for row in rows])
    return beams


def draw_cases(model: GPT, count: int, seed: int) -> Iterator[Case]:
    """Random cases. Most have stop tokens that their beams reach."""
    random = Random(seed)
    for turn in range(count):
        width = 2 + turn % 4
        rule = BeamSearchParams(
            width,
            random.randint(1, width),
            random.choice((0.5, 1.0, 2.0, 0.0, -1.0)),
            random.choice((True, False, "never")),
        )
        prompt = tuple(random.choices(range(90), k=random.randint(1, 9)))
        case = Case(prompt, rule, random.choice((1, 5, 9)), random.choice((0, 0, 1)))
        reached = [
            token
            for hypothesis in run_scorer(model, case).hypotheses
            for token in hypothesis.beam.tokens
        ]
        ends = tuple(
            dict.fromkeys(random.sample(reached, k=min(len(reached), random.choice((0, 1, 2, 5)))))
        )
        yield replace(case, stop_token_ids=ends)


def assert_same_beams(beams: Best, expected_beams: Best) -> None:
    assert [ids for ids, _ in beams] == [ids for ids, _ in expected_beams]
    assert [score for _, score in beams] == pytest.approx(
        [score for _, score in expected_beams], abs=CLOSE
    )
