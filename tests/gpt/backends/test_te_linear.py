"""Transformer Engine's modules are made from our parameters, or it is said why they cannot be."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt.backends import te_linear
from gpt.backends.te_linear import Engine, find, swap
from gpt.model.layers import ColumnLinear, Linear
from gpt.parallel.mesh import Mesh
from tests.support import te_stub
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, ODD, build
from tests.support.ranks import ranks

IDS = torch.arange(2, 26).view(2, 12)
EXACT = 1e-9
WIDE = CLASSIC.with_fields(hidden_size=64, num_attention_heads=4)  # All sizes divide by 16.


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found is remembered for the life of a process, and so are modules."""
    find.cache_clear()
    yield
    find.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def stub(patch: pytest.MonkeyPatch, *, old: bool = False) -> tuple[Engine, list[te_stub.Linear]]:
    made = te_stub.install(patch, old=old)
    engine = find()
    assert isinstance(engine, Engine)
    return engine, made


@pytest.mark.parametrize("name", CONFIGS)
def test_its_modules_say_what_ours_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    engine, made = stub(monkeypatch)
    model = build(config)
    want = model.logits(IDS)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert swap(model, engine, "none", range(0)) == 0
    assert (model.logits(IDS) - want).abs().max() < EXACT
    assert len(made) == len(linears)
    assert not any("linear" in name and ".weight" in name for name, _ in model.named_parameters())
    for linear in linears:
        module = linear.product.module  # type: ignore[union-attr]
        column = isinstance(linear, ColumnLinear)
        assert module.given == {
            "bias": column and linear.bias is not None,
            "parallel_mode": None,
            "params_dtype": torch.float64,
        }
        fused = column and linear.layer_norm_weight is not None
        assert type(module) is (te_stub.LayerNormLinear if fused else te_stub.Linear)
        if fused:
            assert module.around_one == config.layernorm_zero_centered_gamma
            assert module.normalization == config.normalization
            assert module.eps == config.layernorm_epsilon
        assert not module.training and not any(p.requires_grad for p in module.parameters())
    assert set(model.state_dict())  # Which asks no module of theirs for its state.


def split_model(_rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine, _ = stub(patch)
        for config in (CLASSIC, MODERN, ODD, EXPERTS):
            model = build(config, Mesh.create(2, 1))
            swap(model, engine, "none", range(0))
            assert (model.logits(IDS) - build(config).logits(IDS)).abs().max() < EXACT


def test_sums_over_tensor_ranks_stay_ours() -> None:
    ranks(2, split_model)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("current", te_stub.Float8CurrentScaling),
        ("block", te_stub.Float8BlockScaling),
        ("delayed", te_stub.DelayedScaling),
    ],
)
def test_narrow_products_have_the_recipe_and_the_shapes_that_it_needs(
    recipe: str, kind: type, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, made = stub(monkeypatch, old=old)
    model = build(WIDE)
    want = model.logits(IDS[:, :5])
    freed = swap(model, engine, recipe, range(1, 4))
    # 10 rows are padded to 16, and come back as 10.
    assert (model.logits(IDS[:, :5]) - want).abs().max() < EXACT
    narrow, wide = made[4:16], [*made[:4], *made[16:]]
    assert all(type(call) is kind for module in narrow for call in module.narrow_calls)
    assert all(call is None for module in wide for call in module.narrow_calls)
    delayed = recipe == "delayed"  # Its scales are learned from wide weights, as it goes.
    assert all((type(one.narrow_parameters) is kind) != delayed for one in narrow)
    assert all(one.training == delayed for one in narrow)
    assert freed == 0  # Of fp64 it is not known; see below.


def test_what_narrow_weights_free_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = stub(monkeypatch)
    model = build(WIDE, dtype=torch.bfloat16)
    numbers = sum(m.weight.numel() for m in model.blocks[1].modules() if isinstance(m, Linear))
    assert swap(model, engine, "current", range(1, 2)) == numbers


def test_shapes_that_do_not_fit_stay_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = stub(monkeypatch)
    model = build(MODERN)  # 48 queries, 12 keys and 12 values of 32 channels; an MLP of 44.
    want = model.logits(IDS)
    swap(model, engine, "current", model.layers)
    assert (model.logits(IDS) - want).abs().max() < EXACT
    narrow = {tuple(one.weight.shape) for one in made if one.narrow_parameters is not None}
    assert narrow == {shape for shape in narrow if all(size % 16 == 0 for size in shape)}
    assert any(one.narrow_parameters is None for one in made)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import transformer_engine_of_nobody", "ModuleNotFoundError: No module named"),
        ("raise RuntimeError('found no torch extension')", "RuntimeError: found no torch"),
        ("raise FileNotFoundError(2, 'no libtransformer_engine.so')", "FileNotFoundError: "),
        ("raise OSError('libcudnn.so.9: cannot open')", "OSError: libcudnn.so.9: cannot open"),
        ("assert False, 'versions 2.20 and 2.19 differ\\nhere'", "AssertionError: versions 2.20"),
    ],
)
def test_whatever_it_raises_is_the_reason(
    line: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "common").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    found = find()
    assert isinstance(found, str)
    assert found.startswith(reason)
    assert "\n" not in found


def test_it_is_imported_by_nobody_else() -> None:
    folder = Path(te_linear.__file__).parents[2]
    naming = {
        path.name
        for name in ("gpt", "serving", "ptuning", "planning")
        for path in (folder / name).rglob("*.py")
        if "import transformer_engine" in path.read_text()
        or 'import_module("transformer_engine' in path.read_text()
    }
    assert naming == {"te_linear.py"}
