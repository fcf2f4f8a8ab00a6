"""Weight packing: equal logits, no weight stored twice, and a logged reason if unsupported."""

import logging
import weakref
from collections.abc import Callable

import pytest
import torch

from gpt.cpu.int8_linear import Int8PackedLinear, has_int8_gemm
from gpt.cpu.packed_linear import PackedLinear
from gpt.cpu_inference.weight_packing import pack_weights
from gpt.generation.generate import generate
from gpt.linear.cpu_linear import OneDnnLinear
from gpt.model.linear import Linear
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from tests.support.models import CLASSIC, CONFIGS, MODERN, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

IDS = torch.arange(2, 26).view(2, 12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_those_of_the_unpacked_model(
    name: str, activation: str, dtype: torch.dtype
) -> None:
    config = CONFIGS[name]
    if not config.gated and config.activation != "relu2":
        config = config.with_fields(activation=activation)
    exact = build(config).logits(IDS)
    plain = build(config, dtype=dtype).logits(IDS)
    model = build(config, dtype=dtype)
    pack_weights(model)
    packed = model.logits(IDS)
    if dtype == torch.float32:
        assert torch.allclose(packed, plain, rtol=1e-3, atol=1e-4)
    else:
        # Fused operations round bf16 at other points; the error must not grow much by that.
        assert (packed - exact).std() < 1.5 * (plain - exact).std()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_the_reference(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.float32)
    prompts = [[5, 6, 7], [1], list(range(30, 45))]
    oracles = [recompute_greedy(model, prompt, 12) for prompt in prompts]
    pack_weights(model)
    completions = generate(model, prompts, SamplingParams(max_new_tokens=12))
    for oracle, completion in zip(oracles, completions, strict=True):
        equal = first_tie(oracle)
        assert completion.token_ids[:equal] == oracle.tokens[:equal]


def check_tensor_parallel_models(_rank: int) -> None:
    mesh = Mesh.create(2, 1)
    for config in (CLASSIC, MODERN):
        unsplit_logits = build(config, dtype=torch.float32).logits(IDS)
        model = build(config, mesh, dtype=torch.float32)
        pack_weights(model)
        assert not any(".weight" in n and "linear" in n for n, _ in model.named_parameters())
        assert torch.allclose(model.logits(IDS), unsplit_logits, rtol=1e-3, atol=1e-4)


def test_a_split_model_adds_bias_and_residual_once() -> None:
    ranks(2, check_tensor_parallel_models)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_stage_of_a_pipeline_is_packed(stage: int) -> None:
    """A middle stage has neither an embedding nor an LM head."""
    config = MODERN.with_fields(num_layers=3, moe_layers=())
    model = build(config, Mesh(torch.device("cpu"), pp=3, rank=stage), dtype=torch.float32)
    pack_weights(model)
    assert not any(".weight" in n and "linear" in n for n, _ in model.named_parameters())


def test_only_a_tied_embedding_is_stored_twice() -> None:
    for config in (CLASSIC, MODERN):
        model = build(config, dtype=torch.bfloat16)
        pack_weights(model)
        unpacked = [name for name, weight in model.named_parameters() if weight.dim() > 1]
        embeddings = [f"embedding.{kind}_embeddings.weight" for kind in ("word", "position")]
        assert unpacked == embeddings[: 1 + config.has_learned_positions]


@pytest.mark.parametrize("int8", [False, True])
def test_each_weight_is_freed_before_the_next_is_packed(
    monkeypatch: pytest.MonkeyPatch, int8: bool
) -> None:
    """Otherwise packing would need the memory of the model twice."""
    if int8 and not has_int8_gemm():
        pytest.skip("this machine has no int8 GEMM")
    model = build(CLASSIC, dtype=torch.bfloat16)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    weights = [weakref.ref(module.weight) for module in linears]
    live_weights: list[int] = []

    def recording(initialize: Callable[..., None]) -> Callable[..., None]:
        def recording_init(*arguments: object, **keywords: object) -> None:
            live_weights.append(sum(weight() is not None for weight in weights))
            initialize(*arguments, **keywords)

        return recording_init

    for kind in (OneDnnLinear, PackedLinear, Int8PackedLinear):
        monkeypatch.setattr(kind, "__init__", recording(kind.__init__))
    pack_weights(model, int8=int8)
    assert live_weights[-len(weights) :] == list(range(len(weights), 0, -1))


@pytest.mark.parametrize(
    ("dtype", "trainable", "reason"),
    [
        (torch.float64, False, "the model's dtype is torch.float64"),
        (torch.float32, True, "the model has trainable weights"),
    ],
)
def test_an_unsupported_model_stays_unpacked_and_logs_the_reason(
    dtype: torch.dtype, trainable: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(CLASSIC, dtype=dtype, trainable=trainable)
    names = [name for name, _ in model.named_parameters()]
    with caplog.at_level(logging.INFO):
        pack_weights(model)
    assert [record.getMessage() for record in caplog.records] == [
        f"event=weights_not_packed reason={reason!r}"
    ]
    assert [name for name, _ in model.named_parameters()] == names
