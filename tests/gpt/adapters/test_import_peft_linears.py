"""Import of PEFT's LoRA, activated LoRA, DoRA and IA3; PEFT's own logits are the reference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.adapters.adapter_file import Adapter, check_adapter, open_adapter, save_adapter
from gpt.adapters.export_peft import write_export
from gpt.adapters.export_peft_linears import convert_linears_to_peft
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.formats.huggingface.reader import read_family_name
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints.hf_models import CASES, ids, model_of
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

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


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


FIELDS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank_pattern": {r"layers\.1\..*q_proj": 2, "down_proj": 7, "q_proj": 3},
        "alpha_pattern": {"model.layers.0.self_attn.o_proj": 11, "layers.[12].mlp.up_proj": 3},
    },
    "rslora with patterns": {"use_rslora": True, "rank_pattern": {"k_proj": 9}},
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
