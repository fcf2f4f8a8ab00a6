"""Weights of one byte: products by a slow twin, models that stay what they were, and the gate."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import serving
from gpt.backends.cpu_packing import batch_invariant, pack_as_bytes, weight_bytes
from gpt.backends.quantization_check import DIVERGENCE_MAX
from gpt.cpu import int8_linear, packed_linear
from gpt.cpu.int8_linear import CODE_MAX, GROUP, Int8Panels
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.model.layers import ACTIVATIONS, ColumnLinear, Linear
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.ranks.rank import arrange
from serving.request import Ask
from tests.support.cpu_decoder_steps import MORE, STEPS, packed, step
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, build
from tests.support.ranks import ranks

DEMO = Path("examples/demo/checkpoint")

if not int8_linear.multiplies():
    pytest.skip("this machine does not multiply bytes", allow_module_level=True)


def paneled(
    weight: Tensor,
    kind: type[packed_linear.Panels] = Int8Panels,
    *,
    wide: bool = True,
    gated: bool = False,
) -> packed_linear.Panels:
    held, dtype = int8_linear.size(weight, gated=gated), torch.uint8
    if kind is packed_linear.Panels:
        held, dtype = packed_linear.size(weight, gated=gated), torch.bfloat16
    return kind(weight, torch.empty(held, dtype=dtype), wide=wide, gated=gated)


def twin(x: Tensor, weight: Tensor) -> Tensor:
    """What bytes say, in numbers that hold all of it."""
    columns = weight.float().abs().amax(1) / CODE_MAX
    codes = (weight.float() / columns.clamp(min=1e-38)[:, None]).round()
    shape = (-1, -(-x.shape[1] // GROUP), GROUP)
    parts = (F.pad(one, (0, -one.shape[1] % GROUP)).view(shape) for one in (x, codes))
    rows, codes = (part.float() for part in parts)
    largest = rows.abs().amax(-1)
    # A number over a tensor would be its reciprocal times that number.
    by = torch.where(largest > 1e-30, torch.tensor(float(CODE_MAX)) / largest, 0)
    sums = torch.einsum("rgk,cgk->rcg", (rows * by[..., None]).round().double(), codes.double())
    return (sums * (largest / CODE_MAX).double()[:, None]).sum(-1) * columns.double()


@given(
    st.sampled_from([0, 1, 2, 5, 6, 7, 12, 13, 31, 100]),
    st.sampled_from([(2, 1), (6, 31), (64, 32), (97, 33), (130, 100), (515, 70)]),
    st.sampled_from([None, *ACTIVATIONS]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=100, deadline=None)
def test_products_are_the_twins_and_a_row_is_alone(
    rows: int, shape: tuple[int, int], activation: str | None, parts: tuple[bool, bool, bool]
) -> None:
    channels, columns = shape
    has_bias, has_residual, wide = parts
    gated = activation is not None and activation.startswith(packed_linear.GATED)
    generator = torch.Generator().manual_seed(rows * channels)
    weight = torch.randn(columns * (1 + gated), channels, generator=generator).bfloat16()
    x = torch.randn(rows, channels, generator=generator)
    x = (x * torch.randn(rows, channels, generator=generator).exp()).bfloat16()
    bias = torch.randn(len(weight), generator=generator).bfloat16() if has_bias else None
    residual = torch.randn(rows, columns, generator=generator).bfloat16() if has_residual else None
    product = paneled(weight, wide=wide, gated=gated)
    got = product(x, bias, activation, residual)
    y = twin(x, weight) + (0 if bias is None else bias.double())
    y = y if activation is None else ACTIVATIONS[activation](y)
    y = y if residual is None else y + residual.double()
    assert got.dtype == (torch.float32 if wide else torch.bfloat16)
    assert torch.allclose(got.double(), y, rtol=1e-4 if wide else 1e-2, atol=1e-2)
    for row in range(rows)[::5]:
        own = None if residual is None else residual[row : row + 1]
        assert torch.equal(product(x[row : row + 1], bias, activation, own)[0], got[row])


def test_rows_are_normed_before_they_become_bytes() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 130, generator=generator).bfloat16() for n in (40, 7))
    scale, shift = torch.randn(2, 130, generator=generator)
    norm = packed_linear.Norm(scale, shift, 1e-5, rms=False)
    same = paneled(torch.eye(130).bfloat16(), packed_linear.Panels, wide=False)
    normed = same(x, None, None, None, norm=norm)
    product = paneled(weight)
    got = product(x, None, None, None, norm=norm)
    assert torch.equal(got, product(normed, None, None, None))


def test_a_large_number_costs_its_neighbours_digits_and_nobody_else() -> None:
    x = torch.ones(1, 4 * GROUP).bfloat16()
    x[0, 5] = 10_000.0
    weight = torch.ones(32, 4 * GROUP).bfloat16()
    weight[:, :GROUP] = 0
    got = paneled(weight)(x, None, None, None)
    assert torch.allclose(got, torch.full((1, 32), 3.0 * GROUP))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_row_and_all_of_it(broken: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 130, generator=generator).bfloat16() for n in (70, 9))
    product = paneled(weight)
    whole = product(x, None, None, None)
    x[4, 100] = broken
    got = product(x, None, None, None)
    assert not got[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(got[others], whole[others])


@pytest.mark.parametrize("gated", [False, True])
def test_bytes_are_off_by_half_a_step_and_that_is_what_is_told(gated: bool) -> None:
    weight = torch.randn(2 * 45, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    memory = torch.empty(int8_linear.size(weight, gated=gated), dtype=torch.uint8)
    scales, errors = int8_linear.lay(weight, memory, gated=gated)
    lanes = packed_linear.COLUMNS // (1 + gated)
    four = memory.view(-1, 128 // 4, 1 + gated, lanes, 4).permute(2, 0, 3, 1, 4)
    codes = four.reshape(1 + gated, -1, 128)[:, : len(weight) // (1 + gated)].reshape(-1, 128)
    there = [one.view(-1, 1 + gated, lanes).transpose(0, 1) for one in (scales, errors)]
    there = [one.reshape(1 + gated, -1)[:, : len(weight) // (1 + gated)] for one in there]
    steps, lost = (one.reshape(-1, 1) for one in there)
    off = weight.float() - (codes[:, :70].float() - 128) * steps
    assert (off.abs() <= steps * 0.501).all()
    assert torch.allclose(off.norm(dim=1, keepdim=True), lost, rtol=1e-4)
    assert (codes[:, 70:] == 128).all()


@pytest.mark.parametrize("name", ["classic", "modern", "odd", "experts", "biases"])
def test_it_walks_as_the_modules_go(name: str) -> None:
    model = packed((CONFIGS | MORE)[name], int8=True)
    assert batch_invariant(model) == (not model.config.num_experts)
    for lengths, past in (STEPS["several"], STEPS["all kinds"]):
        got, pool = step(model, lengths, past, walks=True)
        want, plain_pool = step(model, lengths, past, walks=False)
        if not model.config.rotary and not model.config.qk_layernorm:
            assert torch.equal(got, want)
            assert all(torch.equal(a, b) for a, b in zip(pool, plain_pool, strict=True))
        exact, _ = step(build(model.config, dtype=torch.float64), lengths, past, walks=False)
        assert (got - exact).std() < 1.5 * (want - exact).std() + 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_stays_what_it_was(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    found = pack_as_bytes(model)
    assert found is not None
    assert 0 < found.divergence < found.limit
    assert found.same_best > 0.9
    held = [n for n, value in model.named_parameters() if value.dim() > 1 and "linear" in n]
    assert not held
    assert all(isinstance(m.product, Int8Panels) for m in model.modules() if isinstance(m, Linear))


def one_of_two(_rank: int) -> None:
    torch.set_num_threads(1)
    for config, mesh in ((EXPERTS, Mesh.create(2, 1)), (MODERN, Mesh.create(1, 2))):
        model = build(config, mesh, dtype=torch.bfloat16)
        found = pack_as_bytes(model)
        assert (found is None) == (not model.last)
        assert found is None or found.same_best > 0.9


def test_split_models_are_held_against_what_they_were_too() -> None:
    ranks(2, one_of_two)


def spoilt() -> GPT:
    """One that bf16 serves well: a channel that is always 0 has the largest weights."""
    model = build(CLASSIC, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, ColumnLinear):
            assert module.layer_norm_weight is not None and module.layer_norm_bias is not None
            with torch.no_grad():
                module.layer_norm_weight[0] = module.layer_norm_bias[0] = 0
                module.weight[:, 0] = 500.0
    return model


def test_a_model_that_bytes_change_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = spoilt()
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ConfigError, match="with weights int8 the model"),
    ):
        pack_as_bytes(model)
    assert "event=accuracy setting='weights int8'" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "device", "said"),
    [("float32", "cpu", "its dtype is float32"), ("bfloat16", "cuda", "its device is cuda")],
)
def test_it_is_refused_where_it_cannot_be(dtype: str, device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        int8_linear.refuse_unfit(torch.device(device), getattr(torch, dtype))


def test_a_service_answers_with_bytes_and_says_what_they_cost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask = Ask("past: I walk ->", max_new_tokens=0, prompt_logprobs=0)
    scores = {}
    for weights in ("auto", "int8"):
        config = ServerConfig(str(DEMO), dtype="bfloat16", weights=weights, kv_tokens_max=400)
        with caplog.at_level(logging.INFO), serving.open_engine(config) as engine:
            told = engine.generate([ask])[0].prompt_scores
        scores[weights] = torch.tensor([one.logprob for one in told if one is not None])
    assert len(scores["int8"]) > 5
    assert torch.allclose(scores["int8"], scores["auto"], atol=0.3)
    assert not torch.equal(scores["int8"], scores["auto"])
    assert "event=accuracy setting='weights int8'" in caplog.text
    with pytest.raises(ConfigError, match="its dtype is float32"):
        serving.open_engine(ServerConfig(str(DEMO), dtype="float32", weights="int8"))
    with pytest.raises(ConfigError, match="leave one of them out"):
        ServerConfig(str(DEMO), weights="int8", linear_backend="torch")


def test_what_it_frees_and_changes_is_told() -> None:
    config = ServerConfig("model", weights="int8")
    model = build(MODERN, dtype=torch.bfloat16)
    stored = weight_bytes(model)
    assert stored == sum(parameter.nbytes for parameter in model.parameters())
    arranged = arrange(model, config)
    assert stored - arranged.freed_bytes == weight_bytes(model)
    assert arranged.told is not None and 0 < arranged.told[0] < DIVERGENCE_MAX
    assert generate(model, [[5, 6, 7]], Sampling(max_new_tokens=5))[0].token_ids
