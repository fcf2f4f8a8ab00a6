"""Export of adapter weights to PEFT: fused and separate projections, kinds, and refusals."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import Adapter, Card, build_adapter, open_adapter, save_adapter
from gpt.adapters.export_peft import write_export
from gpt.adapters.export_peft_linears import convert_linears_to_peft
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.formats.registry import open_checkpoint
from gpt.linear_adapter import LinearAdapter
from tests.support.adapter_exchange import run_adapters_command
from tests.support.checkpoints.hf_models import CASES, ids, model_of
from tests.support.linear_adapters import METHODS, random_linears
from tests.support.peft_adapters import adapted_logits, peft_tensors, relative_difference

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

BASES = ("gpt2", "qwen2", "phi3", "bloom")


@pytest.fixture(scope="module", params=BASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Base":
    return Base(request.param, tmp_path_factory.mktemp("base"))


class Base:
    """A model of transformers and its checkpoint."""

    def __init__(self, case: str, folder: Path) -> None:
        self.family = CASES[case][0]
        self.case = case
        model_of(case).save_pretrained(folder / "base")
        self.checkpoint = open_checkpoint(folder / "base")

    def peft_logits(self, folder: Path, tokens: torch.Tensor) -> torch.Tensor:
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(model_of(self.case), str(folder)).eval()
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens).logits
        return logits


def export(adapter: Adapter, base: Checkpoint, family: str, folder: Path) -> Path:
    write_export(convert_linears_to_peft(adapter, base, None, family), folder)
    return folder


def with_norms_of_base(adapter: Adapter, base: Checkpoint) -> Adapter:
    """The adapter with the norms that an importer computes, for DoRA."""
    from gpt.adapters.fused_linears import with_weight_norms

    return build_adapter(adapter.card, None, with_weight_norms(adapter.linears, base))


@pytest.mark.slow
@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_exported_adapter_has_our_logits_in_peft(
    tmp_path: Path, case: Base, method: str, by_parts: bool
) -> None:
    config, tokens = case.checkpoint.config, ids(2, 24)
    linears = random_linears(config, method, by_parts=by_parts, strength=0.4)
    linears = {key: replace(change, scale=0.5) for key, change in linears.items()}
    adapter = with_norms_of_base(build_adapter(Card("change"), None, linears), case.checkpoint)
    is_fused = case.family in ("gpt2", "phi3", "bloom")
    if method == "dora" and by_parts and is_fused:
        with pytest.raises(AdapterError, match="magnitudes of some parts"):
            convert_linears_to_peft(adapter, case.checkpoint, None, case.family)
        return
    folder = export(adapter, case.checkpoint, case.family, tmp_path / "exported")
    expected = adapted_logits(case.checkpoint, adapter, tokens)
    assert relative_difference(case.peft_logits(folder, tokens), expected) <= 2e-6
    imported = open_adapter(folder, base=case.checkpoint)
    if not by_parts or not is_fused:
        # Three equal A are folded again; the order of the keys and all bits are the same.
        expected_digest = build_adapter(imported.card, None, adapter.linears).digest
        assert imported.digest == expected_digest
    again = export(imported, case.checkpoint, case.family, tmp_path / "again")
    tensors, others = peft_tensors(folder), peft_tensors(again)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)


def test_parts_with_different_scales_become_one_projection(tmp_path: Path) -> None:
    base = Base("gpt2", tmp_path)
    config = base.checkpoint.config
    linears = random_linears(config, by_parts=True, targets=("linear_qkv",))
    linears = {
        key: replace(change, scale=0.25 if key.endswith("query") else 0.5)
        for key, change in linears.items()
    }
    adapter = build_adapter(Card("change"), None, linears)
    folder = export(adapter, base.checkpoint, "gpt2", tmp_path / "exported")
    tensors = peft_tensors(folder)
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"
    assert tensors[name].shape == (3 * 48, 4 + 3)
    assert not tensors[name][:48, 4:].any() and not tensors[name][48:96, :4].any()
    assert not tensors[name][96:].any()  # The value is not changed.
    imported = open_adapter(folder, base=base.checkpoint)
    tokens = ids(1, 16)
    with torch.inference_mode():
        expected = adapted_logits(base.checkpoint, adapter, tokens)
        actual = adapted_logits(base.checkpoint, imported, tokens)
    assert relative_difference(actual, expected) < 1e-6


def test_an_adapter_that_peft_does_not_have_is_refused(tmp_path: Path) -> None:
    base = Base("gpt2", tmp_path).checkpoint
    config = base.config
    lora, ia3 = random_linears(config), random_linears(config, "ia3")
    dora = random_linears(config, "dora")
    first = next(iter(lora))
    ones = torch.ones(base.read(f"{first}.weight").shape[0])
    refused = {
        "has 2 virtual tokens and adapter weights": build_adapter(
            Card("a"), torch.ones(2, config.hidden_size), lora
        ),
        "has bottlenecks": build_adapter(Card("a"), None, random_linears(config, "bottleneck")),
        "combines DoRA, LoRA": build_adapter(Card("a"), None, {**lora, first: dora[first]}),
        "combines IA3, LoRA": build_adapter(Card("a"), None, {**lora, first: ia3[first]}),
        "combines LoRA in": build_adapter(
            Card("a"), None, {**lora, first: replace(lora[first], output_scale=2 * ones)}
        ),
    }
    for message, adapter in refused.items():
        with pytest.raises(AdapterError, match=message):
            convert_linears_to_peft(adapter, base, None, "gpt2")
    with pytest.raises(AdapterError, match="give the base model with --model"):
        convert_linears_to_peft(build_adapter(Card("a"), None, lora), None, None, None)


def test_ranks_and_scales_differ_by_module(tmp_path: Path) -> None:
    base = Base("gpt2", tmp_path).checkpoint
    linears = random_linears(base.config)
    changes: dict[str, LinearAdapter] = {}
    for number, (key, change) in enumerate(linears.items()):
        rank = 1 + number % 3
        assert change.lora_a is not None and change.lora_b is not None
        changes[key] = replace(
            change, lora_a=change.lora_a[:rank], lora_b=change.lora_b[:, :rank], scale=0.1 * number
        )
    adapter = build_adapter(Card("a", invocation=(5, 6)), None, changes)
    folder = export(adapter, base, "gpt2", tmp_path / "exported")
    imported = open_adapter(folder, base=base)
    # No alpha may give a scale exactly; the last bit of a double can then differ.
    assert imported.card.scales == pytest.approx(adapter.card.scales, rel=1e-15)
    assert imported.card.invocation == (5, 6)
    ranks = {key: change.rank for key, change in imported.linears.items()}
    assert ranks == {key: change.rank for key, change in changes.items()}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["c_attn", "c_fc", "c_proj"]
    assert len(config["rank_pattern"]) == 8


def test_the_commands_convert_adapters_of_linears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Base("qwen2", tmp_path).checkpoint
    write_native(base, tmp_path / "native")
    linears = random_linears(base.config, by_parts=True)
    card = Card("change", base_digest=identify(base).digest, stop=("\n",))
    save_adapter(build_adapter(card, None, linears), tmp_path / "change.safetensors")
    for name in ("base", "native"):
        flags = ("--model", tmp_path / name, "--to", "peft")
        code, out, err = run_adapters_command(
            capsys, "export", tmp_path / "change.safetensors", tmp_path / f"peft-{name}", *flags
        )
        assert (code, out) == (0, f"{tmp_path / f'peft-{name}'}\n")
        assert "the format has no field for the stop strings" in err
    tensors, others = peft_tensors(tmp_path / "peft-base"), peft_tensors(tmp_path / "peft-native")
    assert tensors.keys() == others.keys()
    code, out, err = run_adapters_command(
        capsys,
        "import",
        tmp_path / "peft-base",
        tmp_path / "again.safetensors",
        "--model",
        tmp_path / "base",
        "--template",
        "{text} is",
        "--stop",
        "\n",
        "--json",
    )
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert (record["method"], record["kind"], record["rank_max"]) == ("lora", "linears", 4)
    again = open_adapter(tmp_path / "again.safetensors")
    assert again.linears.keys() == linears.keys()
    assert again.card.template is not None and again.card.template.virtual_tokens == 0
    code, _, err = run_adapters_command(
        capsys, "export", tmp_path / "again.safetensors", tmp_path / "x.nemo", "--to", "nemo"
    )
    assert code == 1 and "changes linears" in err
    code, _, err = run_adapters_command(
        capsys, "export", tmp_path / "again.safetensors", tmp_path / "tgis", "--to", "tgis"
    )
    assert code == 1 and "changes linears, which TGIS does not support" in err
    code, out, _ = run_adapters_command(capsys, "check", tmp_path / "again.safetensors")
    assert code == 0 and "rank max" in out
