"""Beam searches to try, and what transformers finds in them with the same model.

The models are the tests' own with flatter logits, so that beams differ and overtake one another.
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
from gpt.sampling_params import Sampling
from serving.engine.beam_search import Beams
from serving.request import (
    Answer,
    BeamRule,
    Request,
)
from tests.support.models import build

CLOSE = 1e-4  # Transformers adds up in fp32.


@cache
def flat(config: GPTConfig) -> GPT:
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
    rule: BeamRule
    most: int
    least: int = 0
    ends: tuple[int, ...] = ()

    @property
    def request(self) -> Request:
        sampling = Sampling(self.most, self.least, stop_token_ids=self.ends, logprobs=3)
        return Request((Answer(self.prompt, sampling),) * self.rule.answers, beams=self.rule)


Best = list[tuple[tuple[int, ...], float]]


@cache
def outer(model: GPT, table: Tensor | None) -> Any:
    """The model as transformers wants one for its search."""
    hf = import_module("transformers")
    answers = import_module("transformers.modeling_outputs").CausalLMOutput

    class Outer(hf.PreTrainedModel, hf.GenerationMixin):  # type: ignore[misc, name-defined]
        config_class = hf.PreTrainedConfig

        def __init__(self) -> None:
            super().__init__(hf.PreTrainedConfig(vocab_size=model.config.vocab_size))
            self.anchor = torch.nn.Parameter(torch.zeros(1))  # It tells the device.

        def forward(self, input_ids: Tensor, **_: object) -> Any:
            return answers(logits=model.logits(input_ids, table))

        def prepare_inputs_for_generation(self, input_ids: Tensor, **_: object) -> dict[str, Any]:
            return {"input_ids": input_ids}

    return Outer()


@torch.inference_mode()
def expected(model: GPT, case: Case, table: Tensor | None = None) -> Best:
    """What transformers finds."""
    wanted = import_module("transformers").GenerationConfig(
        num_beams=case.rule.width,
        num_return_sequences=case.rule.answers,
        length_penalty=case.rule.length_penalty,
        early_stopping=case.rule.early_stopping,
        max_new_tokens=case.most,
        min_new_tokens=case.least,
        eos_token_id=list(case.ends) or None,
        pad_token_id=0,
        do_sample=False,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = outer(model, table).generate(torch.tensor([case.prompt]), generation_config=wanted)
    lengths = (found.beam_indices >= 0).sum(-1).tolist()
    made = found.sequences[:, len(case.prompt) :].tolist()
    worths = found.sequences_scores.tolist()
    return [
        (tuple(ids[:length]), worth)
        for ids, length, worth in zip(made, lengths, worths, strict=True)
    ]


@torch.inference_mode()
def searched(model: GPT, case: Case) -> Beams:
    """The search alone, fed by the model without an engine."""
    beams = Beams(case.rule, case.most, case.least, case.ends)
    while not beams.over:
        ids = torch.tensor([[*case.prompt, *beam.tokens] for beam in beams.live])
        best = model.logits(ids)[:, -1].log_softmax(-1).topk(beams.tops_max)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        beams.feed([list(zip(*row, strict=True)) for row in rows])
    return beams


def cases(model: GPT, count: int, seed: int) -> Iterator[Case]:
    """Random ones. Most have ends that their beams do meet."""
    luck = Random(seed)
    for turn in range(count):
        width = 2 + turn % 4
        rule = BeamRule(
            width,
            luck.randint(1, width),
            luck.choice((0.5, 1.0, 2.0, 0.0, -1.0)),
            luck.choice((True, False, "never")),
        )
        prompt = tuple(luck.choices(range(90), k=luck.randint(1, 9)))
        case = Case(prompt, rule, luck.choice((1, 5, 9)), luck.choice((0, 0, 1)))
        met = [one for found in searched(model, case).hypotheses for one in found.beam.tokens]
        ends = tuple(dict.fromkeys(luck.sample(met, k=min(len(met), luck.choice((0, 1, 2, 5))))))
        yield replace(case, ends=ends)


def same(found: Best, wanted: Best) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    assert [worth for _, worth in found] == pytest.approx([one for _, one in wanted], abs=CLOSE)
