"""A narrowed model is held against what it said before, and refused if it says something else."""

import logging
import math

import pytest
import torch

from gpt.backends.fused_linear import fuse
from gpt.backends.quantization_check import DIVERGENCE_MAX, TEXT_TOKENS, TEXTS, Drift, Gate, judge
from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.model.layers import MLP
from gpt.parallel.mesh import Mesh
from tests.support.models import CLASSIC, MODERN, build
from tests.support.ranks import ranks


def broken(model: GPT, value: float) -> None:
    """With a bias that is off, in a few channels, or a norm would take it out again."""
    mlp = model.blocks[2].mlp
    assert isinstance(mlp, MLP) and mlp.linear_fc2.bias is not None
    mlp.linear_fc2.bias[:4] += value


def test_an_unchanged_model_has_not_drifted() -> None:
    model = build(CLASSIC, dtype=torch.float32)
    drift = Gate(model).drift(model)
    assert drift == Drift(TEXTS * TEXT_TOKENS, 0.0, 1.0)
    assert drift.fine


def test_divergence_is_the_textbooks() -> None:
    """Held against torch's own, over the text that the gate has drawn."""
    model = build(CLASSIC, dtype=torch.float64)
    gate = Gate(model)
    texts = torch.tensor(gate._texts)
    before = model.logits(texts).flatten(0, 1)
    broken(model, 0.1)
    after = model.logits(texts).flatten(0, 1)
    drift = gate.drift(model)
    want = torch.nn.functional.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert drift is not None
    assert drift.divergence == pytest.approx(float(want), rel=1e-9)
    assert drift.same_best == float((before.argmax(-1) == after.argmax(-1)).double().mean())


def test_the_text_is_likely_to_the_model_itself() -> None:
    """Else what is measured there tells nothing of what it will be asked."""
    model = build(CLASSIC, dtype=torch.float64)
    gate = Gate(model)
    texts = torch.tensor(gate._texts)
    told = model.logits(texts)[:, :-1].log_softmax(-1).gather(-1, texts[:, 1:, None])
    drawn = torch.randint(CLASSIC.vocab_size, texts.shape, generator=torch.Generator())
    other = model.logits(drawn)[:, :-1].log_softmax(-1).gather(-1, drawn[:, 1:, None])
    assert float(told.mean()) > float(other.mean()) + 2


def test_a_model_that_says_other_things_is_refused_by_the_settings_name() -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    gate = Gate(model)
    fuse(model)
    judge(gate.drift(model), "fusing")  # Which rounds elsewhere, and no more than that.
    broken(model, 9)
    with pytest.raises(ConfigError, match="with weights: int3 the model's next tokens diverge by"):
        judge(gate.drift(model), "weights: int3")


def test_a_model_that_says_nothing_finite_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    gate = Gate(model)
    broken(model, math.nan)
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match="diverge by nan"):
        judge(gate.drift(model), "linear_backend fp8")
    assert "event=accuracy setting='linear_backend fp8' divergence=nan" in caplog.text


def test_who_runs_it_may_let_more_through_or_less() -> None:
    for limit, fine in ((1e3, True), (1e-9, False)):
        model = build(CLASSIC, dtype=torch.float32)
        gate = Gate(model, limit)
        broken(model, 0.1)
        drift = gate.drift(model)
        assert drift is not None and drift.fine == fine


@pytest.mark.parametrize("divergence", [0.0, DIVERGENCE_MAX])
def test_what_is_within_the_limit_is_let_through(divergence: float) -> None:
    judge(Drift(100, divergence, 0.9), "weights: int8")
    judge(None, "weights: int8")


def split(rank: int, tp: int, pp: int) -> Drift | None:
    model = build(MODERN, Mesh.create(tp, pp), dtype=torch.float32)
    gate = Gate(model)
    for block in model.blocks:
        block.self_attention.linear_proj.weight.data *= 1.1
    return gate.drift(model)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_any_split_finds_the_same_and_the_last_stage_knows_it(tp: int, pp: int) -> None:
    whole = split_alone()
    found = ranks(tp * pp, split, tp, pp)
    assert [one is None for one in found] == [pp == 2, False] if pp == 2 else [False, False]
    for one in found:
        if one is not None:
            assert one.divergence == pytest.approx(whole.divergence, rel=1e-2)


def split_alone() -> Drift:
    model = build(MODERN, dtype=torch.float32)
    gate = Gate(model)
    for block in model.blocks:
        block.self_attention.linear_proj.weight.data *= 1.1
    drift = gate.drift(model)
    assert drift is not None
    return drift
