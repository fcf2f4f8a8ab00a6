"""Layers whose seams are fused say what plain ones say; here with the kernels' twins in torch."""

import weakref
from typing import Any

import pytest
import torch

from gpt.backends import fused_linear, norm_activation
from gpt.backends.fp8_linear import Fp8, narrow_weight
from gpt.backends.fused_linear import Ahead, fuse, unfit
from gpt.backends.norm_activation import Norm, added, in_e4m3, narrowed
from gpt.config import GPTConfig
from gpt.generation.generate import generate
from gpt.model.layers import Linear
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, ODD, build
from tests.support.ranks import ranks

IDS = torch.arange(2, 26).view(2, 12)
PROMPTS = [[5, 6, 7], [1], list(range(30, 45))]
EXACT = 1e-9


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_model_is_the_plain_one(name: str) -> None:
    model = build(CONFIGS[name])
    logits = model.logits(IDS)
    rule = Sampling(max_new_tokens=8)
    tokens = [one.token_ids for one in generate(model, PROMPTS, rule)]
    assert fuse(model) == 0
    assert (model.logits(IDS) - logits).abs().max() < EXACT
    assert [one.token_ids for one in generate(model, PROMPTS, rule)] == tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_is_rounded_less_often_and_so_no_worse(name: str) -> None:
    exact = build(CONFIGS[name]).logits(IDS)
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    plain = model.logits(IDS)
    fuse(model)
    assert (model.logits(IDS) - exact).std() < 1.2 * (plain - exact).std()


def split_model(_rank: int) -> None:
    mesh = Mesh.create(2, 1)
    for config in (CLASSIC, MODERN, ODD, EXPERTS):
        model = build(config, mesh)
        fuse(model)
        assert (model.logits(IDS) - build(config).logits(IDS)).abs().max() < EXACT


def test_a_split_model_adds_bias_and_residual_once() -> None:
    ranks(2, split_model)


@pytest.mark.parametrize(
    ("config", "alone"),
    [
        (CLASSIC, 1),  # What the embedding made.
        (ODD, 1 + ODD.num_layers),  # With a parallel residual two linears norm the same rows.
        # So do layers 1 and 3, which follow experts; and layer 0.
        (EXPERTS, 3),
    ],
)
def test_rows_are_normed_by_whoever_sums_them(
    config: GPTConfig, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    take = Ahead.take

    def noted(self: Ahead, x: Any) -> Any:
        rows = take(self, x)
        taken.append(rows is not None)
        return rows

    monkeypatch.setattr(Ahead, "take", noted)
    model = build(config)
    fuse(model)
    model.logits(IDS)
    assert taken.count(False) == alone


class Kernels:
    """In the place of those in Triton: which were launched, and what their twins make of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        self._inside = False
        patch.setattr(norm_activation, "_kernels", lambda x: None if self._inside else self)

    def __getattr__(self, name: str) -> Any:
        def launch(*parts: Any) -> Any:
            self.launched.append(name)
            self._inside = True
            keyword = {"narrow": parts[-1]} if name in ("added", "normed") else {}
            made = getattr(norm_activation, name)(*parts[: len(parts) - len(keyword)], **keyword)
            self._inside = False
            return made

        return launch


def test_between_the_products_of_a_layer_are_no_more_passes_than_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(CLASSIC, dtype=torch.bfloat16)
    fuse(model, range(1, 4))
    kernels = Kernels(monkeypatch)
    model.logits(IDS)
    wide, narrow = ["added", "activated", "added"], ["narrowed", "added", "narrowed", "added"]
    assert kernels.launched == ["normed", *wide, *narrow * 3, *wide]


def test_rows_that_were_normed_ahead_are_nobody_elses() -> None:
    ahead, x, rows = Ahead(), torch.ones(2, 3), torch.zeros(2, 3)
    ahead.put(x, rows)
    assert ahead.take(x.clone()) is None
    assert ahead.take(x) is None, "rows that were not asked for must not be kept"
    ahead.put(x, rows)
    assert ahead.take(x) is rows
    assert ahead.take(x) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_fp8_layers_stay_near_the_models_own_answers(name: str) -> None:
    """Three bits of mantissa on either side; the lively logits have a spread of five and more."""
    config = CONFIGS[name]
    exact = build(config).logits(IDS)
    model = build(config, dtype=torch.bfloat16)
    fuse(model, range(1, config.num_layers - 1))
    drift = (model.logits(IDS) - exact).std() / exact.std()
    assert 0.001 < drift < 0.25


def narrow_split(_rank: int) -> None:
    """A rank's own channels have scales of their own, so the sums differ as rounding does."""
    mesh = Mesh.create(2, 1)
    for config in (CLASSIC, MODERN, EXPERTS):
        exact = build(config).logits(IDS)
        model = build(config, mesh, dtype=torch.bfloat16)
        fuse(model, range(1, config.num_layers - 1))
        assert (model.logits(IDS) - exact).std() < 0.25 * exact.std()


def test_fp8_layers_are_split_as_others_are() -> None:
    ranks(2, narrow_split)


def test_a_weight_is_gone_when_the_next_one_is_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(EXPERTS, dtype=torch.bfloat16)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    weights = [weakref.ref(module.weight) for module in linears]
    size = sum(module.weight.nbytes for module in linears)
    held: list[int] = []

    class Noted(Fp8):
        def __init__(self, *parts: Any, **rest: Any) -> None:
            held.append(sum(weight() is not None for weight in weights))
            super().__init__(*parts, **rest)

    monkeypatch.setattr(fused_linear, "Fp8", Noted)
    freed = fuse(model, model.layers)
    assert held == list(range(len(weights), 0, -1))
    assert not any("linear" in name and ".weight" in name for name, _ in model.named_parameters())
    kept = sum(module.product.nbytes for module in linears)  # type: ignore[union-attr]
    assert freed == size - kept


def test_what_cannot_be_fused_says_why() -> None:
    assert unfit(build(CLASSIC)) == "its dtype is torch.float64"
    trained = build(CLASSIC, dtype=torch.float32, trainable=True)
    assert unfit(trained) == "its weights are to be trained"
    assert unfit(build(CLASSIC, dtype=torch.float32)) is None


# ------------------------------------------------------------------------------ products in fp8


def meant(x: norm_activation.Narrow) -> torch.Tensor:
    """What narrow numbers stand for, in fp64."""
    return x.numbers.double() * x.scales.double()


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 64, 48), (1, 33, 100), (40, 16, 16)])
def test_a_product_is_off_by_no_more_than_its_digits_allow(shape: tuple[int, int, int]) -> None:
    rows, columns, channels = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(columns, channels, generator=generator, dtype=torch.float64)
    bias = torch.randn(columns, generator=generator, dtype=torch.float64)
    product = Fp8(weight.float())
    got = product(x.float(), bias.float(), None, None).double()
    # Each factor keeps 4 bits, so it is off by a 16th at most; numbers too small for that, by half
    # of the smallest step, which is 2 ** -9 of a scale.
    one = narrowed(x.float()).scales.double() * 2**-10
    other = product.weight.scales[:columns].double().t() * 2**-10
    off = (x.abs() / 16 + one) @ weight.abs().t() + (x.abs() * (1 + 1 / 16) + one) @ (
        (weight.abs() / 16 + other.t()).t()
    )
    assert bool(((got - (x @ weight.t() + bias)).abs() <= off + 1e-5).all())
    # And it is exactly what the narrow numbers stand for, but for fp32's rounding.
    stands = meant(narrowed(x.float())) @ meant(product.weight).t()[:, :columns] + bias
    assert torch.allclose(got, stands, rtol=1e-5, atol=1e-5)


def test_a_weights_scales_are_its_columns() -> None:
    weight = torch.tensor([[1.0, -448.0], [0.25, 0.5], [0.0, 0.0]])
    made = narrow_weight(weight)
    assert made.numbers.shape == (16, 16)
    assert made.scales[:2].flatten().tolist() == pytest.approx([1.0, 0.5 / 448])
    assert torch.allclose(meant(made)[:3, :2], weight.double(), rtol=1e-6)
    assert not made.numbers.float()[3:].any() and not made.numbers.float()[:, 2:].any()


def test_a_row_that_is_not_finite_stays_so_and_harms_no_other() -> None:
    x = torch.randn(4, 20)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    product = Fp8(torch.randn(8, 20))
    y = product(x, None, None, None)
    assert bool(y[[0, 3]].isfinite().all())
    assert not bool(y[[1, 2]].isfinite().any())
    alone = product(x[3:], None, None, None)
    assert torch.equal(alone[0], y[3])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu2", "gated_silu"])
def test_an_activation_may_be_left_to_the_next_product(activation: str) -> None:
    x, gated = torch.randn(5, 24), activation.startswith("gated_")
    first, second = torch.randn(64, 24), torch.randn(16, 32 if gated else 64)
    leaves = Fp8(first, leaves=activation)
    begins = Fp8(second, begins=activation)
    between_them = leaves(x, None, activation, None)
    assert torch.equal(between_them, Fp8(first)(x, None, None, None))
    activated = Fp8(first)(x, None, activation, None)
    want = Fp8(second)(activated, None, None, None)
    assert torch.allclose(begins(between_them, None, None, None), want, rtol=1e-4, atol=1e-3)


def test_the_cpus_own_product_in_fp8_agrees_where_torch_has_one() -> None:
    x, weight = in_e4m3(torch.randn(6, 64)), narrow_weight(torch.randn(32, 64))
    try:
        got = torch._scaled_mm(
            x.numbers,
            weight.numbers.t(),
            scale_a=x.scales,
            scale_b=weight.scales.t(),
            out_dtype=torch.bfloat16,
        )
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch {torch.__version__}: {str(error).splitlines()[0]}")
    assert torch.allclose(got.double(), meant(x) @ meant(weight).t(), rtol=1e-2, atol=1e-1)


def test_a_sum_is_rounded_once_and_normed_as_others_read_it() -> None:
    x, y = (torch.randn(4, 32).bfloat16() for _ in range(2))
    bias = torch.randn(32).bfloat16()
    norm = Norm(torch.rand(32) + 0.5, torch.randn(32), 1e-5, rms=False)
    total, rows = added(y, bias, x, norm)
    assert torch.equal(total, (x.double() + y.double() + bias.double()).bfloat16())
    assert isinstance(rows, torch.Tensor)
    wide = total.double()
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    want = want * norm.scale.double() + norm.shift.double()  # type: ignore[union-attr]
    assert (rows.double() - want).abs().max() < 0.03
