"""Served tokens of a model with native experts equal those of the plain loop in fp64."""

import pytest
import torch

from gpt.cpu.packed_linear import supports_weight
from gpt.cpu_inference.fused_decoder import FusedDecoder
from gpt.cpu_inference.weight_packing import pack_weights
from gpt.linear.cpu_experts import CpuExperts
from gpt.sampling_params import SamplingParams
from serving.messages import Submission
from tests.support.engine_scenarios import Scenario, lead
from tests.support.experts_cases import moe_layer
from tests.support.models import CONFIGS, build, recompute_greedy

# Of the logits of the two best tokens, from which on rounding to bf16 does not decide.
MARGIN_MIN = 1.0
SETTINGS = {
    "kv_block_tokens": 4,
    "step_tokens_max": 16,  # Forces chunked prefill.
    "running_requests_max": 5,
    "kv_tokens_max": 200,
    "pp": 1,
}


@pytest.mark.skipif(
    not supports_weight(torch.empty(32, 32, dtype=torch.bfloat16)),
    reason="the C library has no bf16 GEMM for this CPU",
)
@pytest.mark.parametrize("name", ["experts", "sigmoid experts", "sinks"])
def test_served_tokens_equal_the_plain_loop(name: str) -> None:
    config, new_tokens = CONFIGS[name], 12
    model, exact = build(config, dtype=torch.bfloat16), build(config)
    for values, weight in zip(exact.parameters(), model.parameters(), strict=True):
        values.data.copy_(weight)  # Rounded to bf16.
    pack_weights(model)
    assert isinstance(moe_layer(model).experts_backend, CpuExperts)
    assert isinstance(model.decoder_backend, FusedDecoder)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        for length in (1, 3, 6, 17, 30)
    ]
    sampling = SamplingParams(max_new_tokens=new_tokens)
    submissions = [(0, Submission(i, prompt, sampling)) for i, prompt in enumerate(prompts)]
    run = lead(model, Scenario(name, "bfloat16", SETTINGS, submissions))
    compared = 0
    for number, prompt in enumerate(prompts):
        oracle = recompute_greedy(exact, prompt, new_tokens)
        sure = next((i for i, m in enumerate(oracle.margins) if m < MARGIN_MIN), new_tokens)
        assert run.answers[number].tokens[:sure] == oracle.tokens[:sure]
        compared += sure
    assert compared >= 10
