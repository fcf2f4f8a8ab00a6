"""PEFT import: LoRA, activated LoRA, DoRA and IA3.

The tensors name modules of transformers; the tables of the Hugging Face families say which linear
of the model, or which part of a fused linear, each module is. The base model is needed for these
tables, and for the weight norms of DoRA. The tensors say which modules are changed and with which
rank, the config says the kind and the scale, and both must agree.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.adapters.card import Adapter, Card, build_adapter, card_name
from gpt.adapters.fused_linears import (
    fold_linears,
    scatter_outputs,
    with_weight_norms,
)
from gpt.adapters.linear_check import RANK_MAX
from gpt.adapters.peft_config import LINEAR_PEFT_TYPES, PeftLinearConfig
from gpt.adapters.peft_directory import CONFIG_FILE, open_tensors
from gpt.adapters.peft_experts import ExpertTensors, read_experts
from gpt.adapters.peft_tensors import (
    IA3_VECTOR,
    KEY_PREFIX,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TEXT_PART,
    read_tensor,
)
from gpt.checkpoint.logical_tensor import Checkpoint, StoredTensor
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.formats.huggingface.linear_modules import LinearModule, find_family_modules
from gpt.linear_adapter import LinearAdapter

__all__ = ["LINEAR_PEFT_TYPES", "open_peft_linears"]

# Other tensors of PEFT, by a part of the key, and why they are refused.
_OTHER_TENSORS = {
    "lora_embedding_": "changes the embedding; train the adapter on linears only",
    ".lora_B.bias": "adds a bias; train the adapter with lora_bias=False",
    "token_adapter": "replaces rows of the embedding; train the adapter without trainable tokens",
    "base_layer": "replaces a tensor of the model; train the adapter with bias none, on linears "
    "other than the head and without target_parameters",
}

# The tensors of a module, by leaf.
_ModuleTensors = dict[str, StoredTensor]


def open_peft_linears(
    folder: Path, record: Mapping[str, Any], weights: Path, base: Checkpoint | None
) -> Adapter:
    """Open a LoRA or IA3 adapter. `record` is the content of its adapter_config.json."""
    config = PeftLinearConfig(record, folder / CONFIG_FILE)
    if base is None:
        raise AdapterError(
            f"{folder} is {_article(config.method)}, whose modules depend on the base model; give "
            "the base model with --model"
        )
    tensors = ExpertTensors.split(open_tensors(weights), config, base.config)
    linears = read_experts(tensors, config, base.config, weights)
    by_path = _group_tensors(tensors.others, config, weights)
    if not by_path and (config.has_target_modules or not linears):
        raise AdapterError(f"{weights} has no tensors; save the adapter again")
    modules = _find_modules(by_path, base, weights)
    _check_targets(by_path, modules, config, weights)
    linears |= {
        modules[path].key: _read_module(module_tensors, modules[path], config, base.config, weights)
        for path, module_tensors in by_path.items()
    }
    linears = fold_linears(linears, base.config)
    if config.has_magnitudes:
        linears = with_weight_norms(linears, base)
    notes = ["imported from PEFT"]
    base_name = record.get("base_model_name_or_path")
    if isinstance(base_name, str) and base_name:
        notes.append(f"trained on {base_name[:200]}")
    card = Card(
        card_name(folder),
        method=config.method,
        kind="linears",
        hidden_size=base.config.hidden_size,
        invocation=config.invocation,
        notes=tuple(notes),
    )
    return build_adapter(card, None, linears)


def _article(method: str) -> str:
    return {
        "lora": "a LoRA adapter",
        "alora": "an activated LoRA adapter",
        "dora": "a DoRA adapter",
        "ia3": "an IA3 adapter",
    }[method]


def _group_tensors(
    stored: Mapping[str, StoredTensor], config: PeftLinearConfig, weights: Path
) -> dict[str, _ModuleTensors]:
    """Return the tensors of each module, by the module's path; refuse other tensors."""
    leaves = [IA3_VECTOR] if config.is_ia3 else [LORA_A, LORA_B]
    if config.has_magnitudes:
        leaves.append(MAGNITUDE)
    by_path: dict[str, _ModuleTensors] = {}
    for key, tensor in stored.items():
        # Old versions of PEFT store the magnitude as the weight of a module.
        name = key.removesuffix(".weight") if key.endswith(f"{MAGNITUDE}.weight") else key
        leaf = next((leaf for leaf in leaves if name.endswith(f".{leaf}")), None)
        is_other = any(part in key for part in _OTHER_TENSORS)
        if leaf is None or is_other or not key.startswith(KEY_PREFIX):
            raise AdapterError(f"{weights} has the tensor {key[:200]!r}, {_other_reason(key)}")
        path = name.removeprefix(KEY_PREFIX).removesuffix(f".{leaf}")
        path = TEXT_PART.sub("model.", path)
        if leaf in by_path.setdefault(path, {}):
            raise AdapterError(
                f"{weights} has two tensors {leaf} of {path[:200]}; save the adapter again"
            )
        by_path[path][leaf] = tensor
    for path, tensors in by_path.items():
        if len(tensors) != len(leaves):
            raise AdapterError(
                f"{weights} has only {', '.join(sorted(tensors))} of {path[:200]}; its config, "
                f"{config.path.name}, requires {', '.join(leaves)}: save the adapter again"
            )
    return by_path


def _other_reason(key: str) -> str:
    reason = next((text for part, text in _OTHER_TENSORS.items() if part in key), None)
    if reason is not None:
        return f"which {reason}, or merge it into the model"
    if f".{MAGNITUDE}" in key:
        return "but its config does not set use_dora; save the adapter again"
    return (
        "which is no tensor of its kind of adapter: modules_to_save and other tensors are not "
        "supported; train the adapter without them, or merge it into the model"
    )


def _find_modules(
    by_path: Mapping[str, _ModuleTensors], base: Checkpoint, weights: Path
) -> Mapping[str, LinearModule]:
    """Return the modules of the family that has all modules of the file, by path."""
    modules, missing = find_family_modules(by_path, base.config)
    if missing is None:
        return modules
    raise AdapterError(
        f"{weights} changes {missing[:200]}, which is no linear of attention, an MLP or an "
        f"expert of {base.path} with {base.config.num_layers} layers; give the model that it was "
        "trained on, or train the adapter on these linears"
    )


def _check_targets(
    by_path: Mapping[str, _ModuleTensors],
    modules: Mapping[str, LinearModule],
    config: PeftLinearConfig,
    weights: Path,
) -> None:
    """Refuse a config that does not target exactly the modules that have tensors."""
    for path in modules:
        is_target = config.targets(path)
        if is_target != (path in by_path):
            problem = "targets {}, but {} has no tensors for it"
            if not is_target:
                problem = "does not target {}, for which {} has tensors"
            raise AdapterError(
                f"{config.path} {problem.format(path, weights.name)}; the files belong to "
                "different adapters: save the adapter again"
            )


def _read_module(
    tensors: _ModuleTensors,
    module: LinearModule,
    config: PeftLinearConfig,
    model: GPTConfig,
    weights: Path,
) -> LinearAdapter:
    rows = module.output_rows(model)
    inputs, outputs = module.linear.in_features, len(rows)

    def read(leaf: str, *shape: int) -> Tensor:
        return read_tensor(tensors[leaf], shape, f"{weights}: {leaf} of {module.path}")

    if config.is_ia3:
        if not config.is_feedforward(module.path):
            vector = read(IA3_VECTOR, outputs, 1).flatten()
            return scatter_outputs(LinearAdapter(output_scale=vector), rows)
        if module.part:
            raise AdapterError(
                f"{config.path} has {module.path} in feedforward_modules, but an input of "
                f"{module.linear.name} cannot be scaled for one of its parts alone; train the "
                "adapter with the down projection as feedforward module"
            )
        return LinearAdapter(input_scale=read(IA3_VECTOR, 1, inputs).flatten())
    scale = config.scale(module.path)
    rank = scale.rank
    stored_rank = tensors[LORA_A].shape[0] if len(tensors[LORA_A].shape) == 2 else rank
    if stored_rank != rank:
        raise AdapterError(
            f"{weights} has rank {stored_rank} in {module.path}, but {config.path.name} has rank "
            f"{rank} (the largest supported rank is {RANK_MAX}); save the adapter again"
        )
    change = LinearAdapter(read(LORA_A, rank, inputs), read(LORA_B, outputs, rank), scale.scale)
    if config.has_magnitudes:
        magnitude = read(MAGNITUDE, outputs)
        change = LinearAdapter(change.lora_a, change.lora_b, change.scale, magnitude)
    return scatter_outputs(change, rows)
