"""Import of PEFT's LoRA, activated LoRA, DoRA and IA3; PEFT's own logits are the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    open_adapter,
    save_adapter,
)
from gpt.adapters.export_peft import write_export
from gpt.adapters.export_peft_linears import convert_linears_to_peft
from gpt.adapters.fused_linears import split_into_parts
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.formats.huggingface.reader import read_family_name
from gpt.formats.registry import open_checkpoint
from gpt.linear_parts import join_key
from gpt.parallel.adaptable_linears import adaptable_linears
from tests.support.checkpoints.hf_models import CASES, ids, model_of
from tests.support.linear_adapters import EXPERT_TARGETS, random_linears
from tests.support.peft_adapters import (
    IA3_TARGETS,
    INVOCATION,
    adapted_logits,
    peft_config,
    peft_tensors,
    random_peft_model,
    relative_difference,
)

METHODS = ("lora", "dora", "ia3", "alora")
DIFFERENCE_MAX = 2e-6

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::UserWarning",
    # Of patterns for the modules of another version of transformers.
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",
)


class PeftCase:
    """A model with a random adapter of PEFT, and the adapter's directory."""

    def __init__(self, folder: Path, case: str, method: str, **fields: Any) -> None:
        hf_model, family = model_of(case), CASES[case][0]
        hf_model.save_pretrained(folder / "base")
        self.base = open_checkpoint(folder / "base")
        self.tokens = ids(2, 24)
        # The last occurrence of an invocation counts.
        for sequence, start in ((0, 10), (1, 4), (1, 12)):
            self.tokens[sequence, start : start + len(INVOCATION)] = torch.tensor(INVOCATION)
        self.starts = (10, 12) if method == "alora" else ()
        peft_model = random_peft_model(hf_model, peft_config(method, family, **fields))
        self.folder = folder / "tuned"
        peft_model.save_pretrained(self.folder)
        with torch.no_grad():
            self.logits: Tensor = peft_model(input_ids=self.tokens).logits

    def open(self) -> Adapter:
        adapter = open_adapter(self.folder, base=self.base)
        check_adapter(adapter, self.base.config, None)
        return adapter

    @torch.inference_mode()
    def difference(self, adapter: Adapter | None) -> float:
        logits = adapted_logits(self.base, adapter, self.tokens, self.starts)
        return relative_difference(logits, self.logits)


def export(adapter: Adapter, base: Checkpoint, folder: Path, family: str | None = None) -> Path:
    name = family or read_family_name(base.path)
    write_export(convert_linears_to_peft(adapter, base, None, name), folder)
    return folder


def check_equal_tensors(folder: Path, other: Path) -> None:
    tensors, others = peft_tensors(folder), peft_tensors(other)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)


FAST = {("gpt2", "lora"), ("llama, multi-head", "dora")}
ORACLE_CASES = [
    pytest.param(case, method, marks=[] if (case, method) in FAST else [pytest.mark.slow])
    for case in (
        "gpt2",
        "llama, multi-head",
        "llama, tied, all biases, wide heads",
        "llama, llama3 positions, one group",
        "qwen2",
        "qwen3, wide heads",
        "gemma3_text, windows in two layers of three",
        "phi3",
        "gpt_neox, parallel residual",
        "bloom",
        "opt",
        "starcoder2",
        "nemotron",
        "smollm3",
        "mistral, window",
        "olmo2",
        "apertus, biases, tied",
        "ministral3, window",
        "granite, biases, tied",
    )
    for method in METHODS
    # PEFT cannot apply an activated LoRA to OPT's MLP, whose input has two dimensions.
    if (case, method) != ("opt", "alora")
]


@pytest.mark.parametrize(("case", "method"), ORACLE_CASES)
def test_imported_adapter_has_the_logits_of_peft_and_returns_bit_for_bit(
    tmp_path: Path, case: str, method: str
) -> None:
    family = CASES[case][0]
    fields = {}
    if method == "ia3" and family not in IA3_TARGETS:
        targets = {"opt": "fc2", "starcoder2": "c_proj"}.get(family, "down_proj")
        fields = {"target_modules": ["k_proj", "v_proj", targets], "feedforward_modules": [targets]}
    peft_case = PeftCase(tmp_path, case, method, **fields)
    adapter = peft_case.open()
    assert peft_case.difference(adapter) <= DIFFERENCE_MAX
    assert peft_case.difference(None) > 0.05
    assert adapter.card.method == method
    check_equal_tensors(peft_case.folder, export(adapter, peft_case.base, tmp_path / "exported"))
    save_adapter(adapter, tmp_path / "adapter.safetensors")
    assert open_adapter(tmp_path / "adapter.safetensors").digest == adapter.digest


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
STACKED_CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe, renormalized, wide heads": {"target_parameters": [GATE_UP, DOWN]},
    "mixtral": {"target_parameters": [DOWN, GATE_UP], "target_modules": []},
    "qwen2_moe, one dense layer": {
        "target_parameters": [GATE_UP, "model.layers.0.mlp.experts.down_proj"],
        "target_modules": ["q_proj", "shared_expert.up_proj"],
        "rank_pattern": {"mlp.experts.gate_up_proj": 3, "layers.2.*down_proj": 5},
        "alpha_pattern": {"layers.0.*gate_up_proj": 11},
    },
    "glm4_moe": {"target_parameters": [DOWN], "use_rslora": True},
    "gpt_oss": {"target_parameters": [GATE_UP, DOWN], "target_modules": ["q_proj", "v_proj"]},
    "granitemoe": {"target_parameters": ["gate_up_proj", "experts.down_proj"]},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "mixtral" else [pytest.mark.slow])
        for name in STACKED_CASES
    ],
)
def test_stacked_experts_have_the_logits_of_peft_and_return_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    fields = {"target_modules": ["q_proj", "o_proj"]} | STACKED_CASES[name]
    peft_case = PeftCase(tmp_path, name, "lora", **fields)
    adapter = peft_case.open()
    assert peft_case.difference(adapter) <= DIFFERENCE_MAX
    assert peft_case.difference(None) > 0.05
    attention = {key: change for key, change in adapter.linears.items() if "experts." not in key}
    if attention:
        without_experts = build_adapter(adapter.card, None, attention)
        assert peft_case.difference(without_experts) > 0.01
    exported = export(adapter, peft_case.base, tmp_path / "exported")
    check_equal_tensors(peft_case.folder, exported)
    assert open_adapter(exported, base=peft_case.base).digest == adapter.digest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe, renormalized, wide heads"])
def test_experts_with_changes_of_parts_are_modules_which_peft_can_load(
    tmp_path: Path, name: str
) -> None:
    """Gate and up have matrices A of their own. PEFT converts the modules to parameters."""
    import peft

    hf_model = model_of(name)
    hf_model.save_pretrained(tmp_path / "base")
    base = open_checkpoint(tmp_path / "base")
    wholes = random_linears(base.config, targets=EXPERT_TARGETS, rank=4)
    linears = {}
    for key, change in wholes.items():
        linear = adaptable_linears(base.config)[key]
        parts = split_into_parts(change, linear, base.config) if linear.parts else {"": change}
        for number, (part, own) in enumerate(parts.items()):
            assert own.lora_a is not None
            linears[join_key(key, part)] = replace(own, lora_a=own.lora_a.roll(number, 1))
    adapter = build_adapter(Card("experts", kind="linears"), None, linears)
    exported = export(adapter, base, tmp_path / "exported")
    assert all(".experts.0." in key for key in peft_tensors(exported) if ".0.w1" in key)
    opened = open_adapter(exported, base=base)
    assert opened.linears.keys() == adapter.linears.keys()
    check_equal_tensors(exported, export(opened, base, tmp_path / "again"))
    with torch.no_grad():
        peft_model = peft.PeftModel.from_pretrained(hf_model, exported).eval()
        expected = peft_model(input_ids=ids(2, 24)).logits
    with torch.inference_mode():
        logits = adapted_logits(base, opened, ids(2, 24))
        assert relative_difference(logits, expected) <= DIFFERENCE_MAX
        assert relative_difference(adapted_logits(base, None, ids(2, 24)), expected) > 0.05


FIELDS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank_pattern": {r"layers\.1\..*q_proj": 2, "down_proj": 7, "q_proj": 3},
        "alpha_pattern": {"model.layers.0.self_attn.o_proj": 11, "layers.[12].mlp.up_proj": 3},
    },
    "rslora with patterns": {"use_rslora": True, "lora_alpha": 3, "rank_pattern": {"k_proj": 9}},
    "missing parts": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "regular expression": {
        "target_modules": r"^(?!.*layers\.1\.).*(?:self_attn\.[qk]_proj|mlp\.\w+_proj)$"
    },
    "layers": {
        "target_modules": ["q_proj", "o_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "one layer, excluded modules": {
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "layers_to_transform": 1,
        "exclude_modules": ["mlp.down_proj"],
    },
    "excluded by an expression": {"exclude_modules": r".*\.layers\.[02]\..*"},
    "no low-rank init": {"init_lora_weights": "gaussian", "lora_alpha": 5, "r": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_the_config_are_honoured(tmp_path: Path, name: str, use_dora: bool) -> None:
    case = "llama, tied, all biases, wide heads"
    peft_case = PeftCase(tmp_path, case, "dora" if use_dora else "lora", **FIELDS[name])
    adapter = peft_case.open()
    assert peft_case.difference(adapter) <= DIFFERENCE_MAX
    exported = export(adapter, peft_case.base, tmp_path / "exported")
    check_equal_tensors(peft_case.folder, exported)
    assert open_adapter(exported, base=peft_case.base).digest == adapter.digest
