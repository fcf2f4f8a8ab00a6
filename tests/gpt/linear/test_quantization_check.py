"""Quantization check: the divergence is measured, logged, and refused over the limit."""

import logging
import math

import pytest
import torch

from gpt.errors import ConfigError
from gpt.linear.fused_linear import fuse_layers
from gpt.linear.quantization_check import (
    DIVERGENCE_MAX,
    PROBE_TEXT_TOKENS,
    PROBE_TEXTS,
    Divergence,
    DivergenceProbe,
    enforce_limit,
)
from gpt.model.gpt_model import GPT
from gpt.model.mlp import MLP
from gpt.parallel.mesh import Mesh
from tests.support.models import CLASSIC, MODERN, build
from tests.support.ranks import ranks


def add_bias_error(model: GPT, error: float) -> None:
    """Add an error to the bias of a few channels; a norm would remove an error of all channels."""
    mlp = model.decoder_layers[2].mlp
    assert isinstance(mlp, MLP) and mlp.linear_fc2.bias is not None
    mlp.linear_fc2.bias[:4] += error


def test_an_unchanged_model_has_no_divergence() -> None:
    model = build(CLASSIC, dtype=torch.float32)
    drift = DivergenceProbe(model).measure(model)
    assert drift == Divergence(PROBE_TEXTS * PROBE_TEXT_TOKENS, 0.0, 1.0)
    assert drift.is_within_limit


def test_divergence_equals_the_textbook_formula() -> None:
    """The reference is torch's kl_div over the probe's texts."""
    model = build(CLASSIC, dtype=torch.float64)
    probe = DivergenceProbe(model)
    texts = torch.tensor(probe._probe_texts)
    before = model.logits(texts).flatten(0, 1)
    add_bias_error(model, 0.1)
    after = model.logits(texts).flatten(0, 1)
    drift = probe.measure(model)
    want = torch.nn.functional.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert drift is not None
    assert drift.mean_kl_nats == pytest.approx(float(want), rel=1e-9)
    assert drift.top1_agreement == float((before.argmax(-1) == after.argmax(-1)).double().mean())


def test_probe_texts_are_likely_under_the_model() -> None:
    """The divergence on unlikely text is not representative of the model's real prompts."""
    model = build(CLASSIC, dtype=torch.float64)
    probe = DivergenceProbe(model)
    texts = torch.tensor(probe._probe_texts)
    probe_logprobs = model.logits(texts)[:, :-1].log_softmax(-1).gather(-1, texts[:, 1:, None])
    random_texts = torch.randint(CLASSIC.vocab_size, texts.shape, generator=torch.Generator())
    random_logprobs = (
        model.logits(random_texts)[:, :-1].log_softmax(-1).gather(-1, random_texts[:, 1:, None])
    )
    assert float(probe_logprobs.mean()) > float(random_logprobs.mean()) + 2


def test_a_divergence_over_the_limit_is_refused_with_the_setting() -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    probe = DivergenceProbe(model)
    fuse_layers(model)
    enforce_limit(probe.measure(model), "fusing")  # Only changes where sums are rounded.
    add_bias_error(model, 9)
    with pytest.raises(
        ConfigError, match="with weights: int3 the model's next-token distributions diverge by"
    ):
        enforce_limit(probe.measure(model), "weights: int3")


def test_logits_that_are_not_finite_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    probe = DivergenceProbe(model)
    add_bias_error(model, math.nan)
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match="diverge by nan"):
        enforce_limit(probe.measure(model), "linear_backend fp8")
    assert "event=accuracy setting='linear_backend fp8' divergence=nan" in caplog.text


def test_the_divergence_limit_is_configurable() -> None:
    for limit, is_within_limit in ((1e3, True), (1e-9, False)):
        model = build(CLASSIC, dtype=torch.float32)
        probe = DivergenceProbe(model, limit)
        add_bias_error(model, 0.1)
        drift = probe.measure(model)
        assert drift is not None and drift.is_within_limit == is_within_limit


@pytest.mark.parametrize("divergence", [0.0, DIVERGENCE_MAX])
def test_a_divergence_within_the_limit_passes(divergence: float) -> None:
    enforce_limit(Divergence(100, divergence, 0.9), "weights: int8")
    enforce_limit(None, "weights: int8")


def scaled_projection_divergence(mesh: Mesh) -> Divergence | None:
    """The divergence of a model after its attention output projections are scaled by 1.1."""
    model = build(MODERN, mesh, dtype=torch.float32)
    probe = DivergenceProbe(model)
    for layer in model.decoder_layers:
        layer.self_attention.linear_proj.weight.data *= 1.1
    return probe.measure(model)


def divergence_of_rank(_rank: int, tp: int, pp: int) -> Divergence | None:
    return scaled_projection_divergence(Mesh.create(tp, pp))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_every_split_measures_the_same_divergence_on_the_last_stage(tp: int, pp: int) -> None:
    unsplit = scaled_projection_divergence(Mesh.single())
    assert unsplit is not None
    divergences = ranks(tp * pp, divergence_of_rank, tp, pp)
    # The first of two pipeline stages has no logits.
    assert [divergence is None for divergence in divergences] == [pp == 2, False]
    for divergence in divergences:
        if divergence is not None:
            assert divergence.mean_kl_nats == pytest.approx(unsplit.mean_kl_nats, rel=1e-2)
