"""Packed models in the engine: each request gets the tokens and scores that it gets alone.

The C kernels compute each row independently of the others, so the comparison is exact: for any
requests in the same step, and with screened argmax or all logits. Prompts are not chunked.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.cpu.int8_linear import has_int8_gemm
from gpt.cpu_inference.weight_packing import pack_weights
from tests.support.engine_scenarios import AdapterFiles, draw_scenario, lead
from tests.support.models import CONFIGS, build
from tests.support.packed_models import disable_screening

if not has_int8_gemm():
    pytest.skip("this machine has no int8 GEMM", allow_module_level=True)

ADAPTER_ROWS = [1, 3, 5]
# A chunk of a few tokens is attended in another order of sums than a long one, so the limits permit
# no chunked prefill, no preemption and no prefix cache.
UNCHUNKED_PREFILL = {
    "prefix_cache": False,
    "step_tokens_max": 600,
    "kv_tokens_max": 4000,
    "prefill_stall_ms_max": 1e9,
    "running_requests_max": 32,
    "adapter_rows_max": 64,
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["classic", "modern", "odd"])
def test_batched_requests_equal_each_request_alone(name: str, int8: bool, tmp_path: Path) -> None:
    adapters = AdapterFiles.make(tmp_path, CONFIGS[name].hidden_size, ADAPTER_ROWS)
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    pack_weights(model, int8=int8)
    scenario = draw_scenario(name, 0, adapters)
    scenario = replace(scenario, settings=scenario.settings | UNCHUNKED_PREFILL)
    together = lead(model, scenario)
    assert together.load.preemptions == together.load.cached_tokens == 0
    cancelled = {number for _, number in scenario.cancels}
    disable_screening(model)
    for _, submission in scenario.submissions:
        number = submission.sequence_id
        alone = lead(model, replace(scenario, submissions=[(0, submission)], cancels=[]))
        answer, want = together.answers[number], alone.answers[number]
        label = f"{name}, request {number}: {submission.sampling}"
        assert answer.scores == want.scores[: len(answer.scores)], label
        if number in cancelled:
            assert answer.tokens == want.tokens[: len(answer.tokens)], label
        else:
            assert (answer.tokens, answer.end) == (want.tokens, want.end), label
