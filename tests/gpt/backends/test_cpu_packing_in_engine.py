"""Packed models in the whole engine: each request gets, to the last token, what it gets alone.

In C a row's numbers depend on nothing beside it, so no margin decides here: not who shared a step,
and not whether all logits were made or only those on a shortlist. Prompts are computed whole.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.backends.cpu_packing import pack
from gpt.cpu.int8_linear import multiplies
from tests.support.engine_scenarios import Shelf, drawn, lead
from tests.support.models import CONFIGS, build

if not multiplies():
    pytest.skip("this machine does not multiply bytes", allow_module_level=True)

SIZES = [1, 3, 5]  # Rows of the adapters.
# A piece of a few tokens is attended by another sum than a longer one, so nothing is cut or kept.
WHOLE = {
    "prefix_cache": False,
    "step_tokens_max": 600,
    "kv_tokens_max": 4000,
    "prefill_stall_ms_max": 1e9,
    "running_requests_max": 32,
    "adapter_rows_max": 64,
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["classic", "modern", "odd"])
def test_each_request_gets_what_it_gets_alone(name: str, int8: bool, tmp_path: Path) -> None:
    shelf = Shelf.make(tmp_path, CONFIGS[name].hidden_size, SIZES)
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    pack(model, int8=int8)
    scene = drawn(name, 0, shelf)
    scene = replace(scene, settings=scene.settings | WHOLE)
    together = lead(model, scene)
    assert together.load.preemptions == together.load.cached_tokens == 0
    cancelled = {number for _, number in scene.cancels}
    model.shortlist = None
    for _, one in scene.asks:
        alone = lead(model, replace(scene, asks=[(0, one)], cancels=[]))
        answer, want = together.answers[one.number], alone.answers[one.number]
        where = f"{name}, request {one.number}: {one.sampling}"
        assert answer.scores == want.scores[: len(answer.scores)], where
        if one.number in cancelled:
            assert answer.tokens == want.tokens[: len(answer.tokens)], where
        else:
            assert (answer.tokens, answer.end) == (want.tokens, want.end), where
