"""Steps with linear adapters, with and without graphs, in Triton's interpreter.

tests/gpt/linear/test_low_rank.py runs it in a process of its own.
"""

import pytest
import torch

from gpt.linear import low_rank
from serving.worker.cuda_graphs import Capturer
from serving.worker.model_runner import ModelRunner
from tests.support.adapter_steps import check_equal_outcomes, run_adapter_steps
from tests.support.attention_cases import patch_interpreter
from tests.support.graph_runners import CONFIG, eager_capturer, make_runner
from tests.support.models import CONFIGS

patch_interpreter()


def interpreting_runner(
    name: str, capturer: Capturer | None, monkeypatch: pytest.MonkeyPatch
) -> ModelRunner:
    config = CONFIG.with_fields(adapter_memory_mb=1)
    monkeypatch.setattr(low_rank, "unsupported_reason", lambda *_: None)
    runner = make_runner(name, capturer, config, torch.float32)
    monkeypatch.undo()
    assert runner._adapter_memory.table is not None
    return runner


@pytest.mark.parametrize(("name", "capturer"), [("classic", None), ("modern", eager_capturer)])
def test_steps_have_the_tokens_of_the_torch_reference(
    name: str, capturer: Capturer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS[name]
    reference = make_runner(name, None, CONFIG.with_fields(adapter_memory_mb=1), torch.float32)
    expected = run_adapter_steps(reference, config, has_bottlenecks=True)
    runner = interpreting_runner(name, capturer, monkeypatch)
    actual = run_adapter_steps(runner, config, has_bottlenecks=True)
    *replayable, with_bottlenecks = actual
    assert all(outcome.replayed == (capturer is not None) for outcome in replayable)
    assert not with_bottlenecks.replayed
    check_equal_outcomes(actual, expected, 1e-3)
