"""A packed model says what the plain one says, holds no weight twice, and tells when it cannot."""

import logging
import weakref
from collections.abc import Callable

import pytest
import torch

from gpt.backends import cpu_packing
from gpt.backends.cpu_packing import pack
from gpt.cpu.int8_linear import Int8Panels, multiplies
from gpt.cpu.packed_linear import Panels
from gpt.generation.generate import generate
from gpt.model.layers import Linear
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from tests.support.models import CLASSIC, CONFIGS, MODERN, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

IDS = torch.arange(2, 26).view(2, 12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_plain_model(
    name: str, activation: str, dtype: torch.dtype
) -> None:
    config = CONFIGS[name]
    if not config.gated and config.activation != "relu2":
        config = config.with_fields(activation=activation)
    exact = build(config).logits(IDS)
    plain = build(config, dtype=dtype).logits(IDS)
    model = build(config, dtype=dtype)
    pack(model)
    packed = model.logits(IDS)
    if dtype == torch.float32:
        assert torch.allclose(packed, plain, rtol=1e-3, atol=1e-4)
    else:
        # bf16 rounds elsewhere when steps are fused; it must not be worse by that.
        assert (packed - exact).std() < 1.5 * (plain - exact).std()


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_the_oracles(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.float32)
    prompts = [[5, 6, 7], [1], list(range(30, 45))]
    oracles = [recompute_greedy(model, prompt, 12) for prompt in prompts]
    pack(model)
    made = generate(model, prompts, Sampling(max_new_tokens=12))
    for oracle, completion in zip(oracles, made, strict=True):
        equal = first_tie(oracle)
        assert completion.token_ids[:equal] == oracle.tokens[:equal]


def split_model(_rank: int) -> None:
    mesh = Mesh.create(2, 1)
    for config in (CLASSIC, MODERN):
        whole = build(config, dtype=torch.float32).logits(IDS)
        model = build(config, mesh, dtype=torch.float32)
        pack(model)
        assert not any(".weight" in n and "linear" in n for n, _ in model.named_parameters())
        assert torch.allclose(model.logits(IDS), whole, rtol=1e-3, atol=1e-4)


def test_a_split_model_adds_bias_and_residual_once() -> None:
    ranks(2, split_model)


def test_no_weight_is_held_twice_but_a_tied_embedding() -> None:
    for config in (CLASSIC, MODERN):
        model = build(config, dtype=torch.bfloat16)
        pack(model)
        held = [name for name, value in model.named_parameters() if value.dim() > 1]
        embeddings = [f"embedding.{kind}_embeddings.weight" for kind in ("word", "position")]
        assert held == embeddings[: 1 + config.learned_positions]


@pytest.mark.parametrize("int8", [False, True])
def test_a_weight_is_gone_when_the_next_one_is_packed(
    monkeypatch: pytest.MonkeyPatch, int8: bool
) -> None:
    """Else a model would for a moment need its memory twice."""
    if int8 and not multiplies():
        pytest.skip("this machine does not multiply bytes")
    model = build(CLASSIC, dtype=torch.bfloat16)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    weights = [weakref.ref(module.weight) for module in linears]
    held: list[int] = []

    def noted(begin: Callable[..., None]) -> Callable[..., None]:
        def begins(*parts: object, **rest: object) -> None:
            held.append(sum(weight() is not None for weight in weights))
            begin(*parts, **rest)

        return begins

    for kind in (cpu_packing.Packed, Panels, Int8Panels):
        monkeypatch.setattr(kind, "__init__", noted(kind.__init__))
    pack(model, int8=int8)
    assert held[-len(weights) :] == list(range(len(weights), 0, -1))


@pytest.mark.parametrize(
    ("dtype", "trainable", "reason"),
    [
        (torch.float64, False, "its dtype is torch.float64"),
        (torch.float32, True, "its weights are to be trained"),
    ],
)
def test_what_cannot_be_packed_stays_plain_and_says_why(
    dtype: torch.dtype, trainable: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(CLASSIC, dtype=dtype, trainable=trainable)
    names = [name for name, _ in model.named_parameters()]
    with caplog.at_level(logging.INFO):
        pack(model)
    assert [record.getMessage() for record in caplog.records] == [
        f"event=weights_not_packed reason={reason!r}"
    ]
    assert [name for name, _ in model.named_parameters()] == names
