"""Transformer Engine modules get our parameters, with a stand-in for the package."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt.linear import te_linear
from gpt.linear.te_linear import (
    TransformerEngine,
    import_transformer_engine,
    replace_linears,
    unsupported_recipe_reason,
)
from gpt.model.linear import ColumnParallelLinear, Linear
from gpt.parallel.mesh import Mesh
from tests.support import te_stub
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, ODD, build
from tests.support.ranks import ranks

IDS = torch.arange(2, 26).view(2, 12)
EXACT = 1e-9
ALIGNED = CLASSIC.with_fields(hidden_size=64, num_attention_heads=4)  # 16 divides all sizes.


@pytest.fixture(autouse=True)
def clear_import_cache() -> Iterator[None]:
    """Clear the cached import before and after each test, and remove the imported modules."""
    import_transformer_engine.cache_clear()
    yield
    import_transformer_engine.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def install_stub(patch: pytest.MonkeyPatch) -> tuple[TransformerEngine, list[te_stub.Linear]]:
    modules = te_stub.install(patch)
    engine = import_transformer_engine()
    assert isinstance(engine, TransformerEngine)
    return engine, modules


# The linears of these two have norms behind them, which Transformer Engine's modules lack.
@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if name not in ("layered", "post norms")]
)
def test_te_modules_equal_our_linears(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    engine, modules = install_stub(monkeypatch)
    model = build(config)
    want = model.logits(IDS)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert replace_linears(model, engine, "none", range(0)) == 0
    assert (model.logits(IDS) - want).abs().max() < EXACT
    assert len(modules) == len(linears)
    assert not any("linear" in name and ".weight" in name for name, _ in model.named_parameters())
    for linear in linears:
        module = linear.backend.module  # type: ignore[attr-defined]
        column = isinstance(linear, ColumnParallelLinear)
        assert module.arguments == {
            "bias": column and linear.bias is not None,
            "parallel_mode": None,
            "params_dtype": torch.float64,
        }
        fused = column and linear.layer_norm_weight is not None
        assert type(module) is (te_stub.LayerNormLinear if fused else te_stub.Linear)
        if fused:
            assert module.zero_centered_gamma == config.layernorm_zero_centered_gamma
            assert module.normalization == config.normalization
            assert module.eps == config.layernorm_epsilon
        assert not module.training and not any(p.requires_grad for p in module.parameters())
    assert set(model.state_dict())  # Must not read the extra state of Transformer Engine's modules.


def check_tensor_parallel_models(_rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine, _ = install_stub(patch)
        for config in (CLASSIC, MODERN, ODD, EXPERTS):
            model = build(config, Mesh.create(2, 1))
            replace_linears(model, engine, "none", range(0))
            assert (model.logits(IDS) - build(config).logits(IDS)).abs().max() < EXACT


def test_the_mesh_does_the_all_reduces_of_te_modules() -> None:
    ranks(2, check_tensor_parallel_models)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("current", te_stub.Float8CurrentScaling),
        ("block", te_stub.Float8BlockScaling),
        ("mxfp8", te_stub.MXFP8BlockScaling),
    ],
)
def test_fp8_matmuls_get_the_recipe_and_padded_shapes(
    recipe: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, modules = install_stub(monkeypatch)
    model = build(ALIGNED)
    want = model.logits(IDS[:, :5])
    replace_linears(model, engine, recipe, range(1, 4))
    # 10 rows are padded to a multiple of 8 or 32, and the output has 10 rows.
    assert (model.logits(IDS[:, :5]) - want).abs().max() < EXACT
    fp8_modules = modules[4:16]
    other_modules = [*modules[:4], *modules[16:]]
    assert all(type(call) is kind for module in fp8_modules for call in module.fp8_calls)
    assert all(call is None for module in other_modules for call in module.fp8_calls)
    assert all(type(module.fp8_parameters) is kind for module in fp8_modules)
    assert not any(module.training for module in modules)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_fp8_weights_are_stored_and_quantized_once(
    with_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the caller has gradients enabled, the weights are not stored transposed too."""
    engine, modules = install_stub(monkeypatch)
    model = build(ALIGNED, dtype=torch.bfloat16)

    def allocated_bytes(device: object) -> int:
        """The bytes of the model's parameters and of the weights of the modules, as on a GPU."""
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        return parameter_bytes + sum(module.weight_bytes for module in modules)

    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated_bytes)
    elements = sum(
        module.weight.numel()
        for module in model.decoder_layers[1].modules()
        if isinstance(module, Linear)
    )
    with torch.set_grad_enabled(with_gradients):
        assert replace_linears(model, engine, "current", range(1, 2)) == elements
    for _ in range(3):
        model.logits(IDS)
    assert [module.weight_casts for module in modules] == [0] * len(modules)
    assert all(len(module.fp8_calls) == 3 for module in modules)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_delayed_scaling_learns_its_scales_only_with_gradients(with_gradients: bool) -> None:
    """The rule of Transformer Engine because of which te_recipe has no delayed scaling."""
    module = te_stub.Linear(16, 16, bias=False, params_dtype=torch.float32, device="cpu")
    module.weight.data.copy_(torch.eye(16))
    x = torch.full((8, 16), 1000.0)
    with torch.set_grad_enabled(with_gradients):
        for _ in range(2):
            with te_stub.autocast(recipe=te_stub.DelayedScaling()):
                y = module(x).detach()
    assert float(y.max()) == pytest.approx(1000.0 if with_gradients else te_stub.FP8_MAX)
    assert module.weight_casts == 2, "an unquantized weight is quantized in every call"


def test_recipes_that_the_gpu_does_not_support_have_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = install_stub(monkeypatch)
    for recipe in ("none", "current", "block"):
        assert unsupported_recipe_reason(engine, recipe) is None
    reason = unsupported_recipe_reason(engine, "mxfp8")
    assert reason is not None and reason.startswith("Device compute capability 10.0")


def test_old_versions_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    te_stub.install(monkeypatch)
    del sys.modules["transformer_engine.pytorch"].autocast
    assert import_transformer_engine() == "Transformer Engine is older than 2.9"


def test_unaligned_shapes_are_not_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, modules = install_stub(monkeypatch)
    model = build(MODERN)  # 48 queries, 12 keys and 12 values of 32 channels; an MLP of 44.
    want = model.logits(IDS)
    replace_linears(model, engine, "current", model.layers)
    assert (model.logits(IDS) - want).abs().max() < EXACT
    fp8_shapes = {
        tuple(module.weight.shape) for module in modules if module.fp8_parameters is not None
    }
    assert all(size % 16 == 0 for shape in fp8_shapes for size in shape)
    assert any(module.fp8_parameters is None for module in modules)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import transformer_engine_absent", "ModuleNotFoundError: No module named"),
        ("raise RuntimeError('found no torch extension')", "RuntimeError: found no torch"),
        ("raise FileNotFoundError(2, 'no libtransformer_engine.so')", "FileNotFoundError: "),
        ("raise OSError('libcudnn.so.9: cannot open')", "OSError: libcudnn.so.9: cannot open"),
        ("assert False, 'versions 2.20 and 2.19 differ\\nhere'", "AssertionError: versions 2.20"),
    ],
)
def test_any_import_error_is_the_reason(
    line: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "common").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    unavailable_reason = import_transformer_engine()
    assert isinstance(unavailable_reason, str)
    assert unavailable_reason.startswith(reason)
    assert "\n" not in unavailable_reason


def test_only_te_linear_imports_transformer_engine() -> None:
    folder = Path(te_linear.__file__).parents[2]
    importers = {
        path.name
        for name in ("gpt", "serving", "ptuning", "planning")
        for path in (folder / name).rglob("*.py")
        if "import transformer_engine" in path.read_text()
        or 'import_module("transformer_engine' in path.read_text()
    }
    assert importers == {"te_linear.py"}
