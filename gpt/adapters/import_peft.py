"""PEFT and TGIS import: soft prompts of PEFT directories and of TGIS's decoder.pt.

For inference, each of these adapters is one table: virtual-token rows, or the keys and values of
all layers. `import_peft_linears.py` reads PEFT's linear adapters; other types are refused. An
unreadable file raises a CheckpointError, which `open_adapter` converts to an AdapterError. These
formats do not record the digest of the base model, so the card has no base digest.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.adapters.card import TABLE_BYTES_MAX, Adapter, Card, build_adapter, card_name
from gpt.adapters.import_peft_linears import LINEAR_PEFT_TYPES, open_peft_linears
from gpt.adapters.peft_directory import CONFIG_FILE, find_weights, open_tensors, read_config
from gpt.checkpoint.files.torch_save import is_dense, load_weights_only
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError

PROMPT_EMBEDDINGS_KEY = "prompt_embeddings"
MULTITASK_PROMPT_TUNING = "MULTITASK_PROMPT_TUNING"
PREFIX_TUNING = "PREFIX_TUNING"
PEFT_TYPES = ("PROMPT_TUNING", "P_TUNING", MULTITASK_PROMPT_TUNING, PREFIX_TUNING)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

PLACEMENT_NOTE = "its virtual tokens come first, then the begin-of-text token, then the text"


def open_peft(folder: Path, task: str | None, base: Checkpoint | None = None) -> Adapter:
    """Open a directory with adapter_config.json and adapter_model.safetensors or adapter_model.bin.

    If `base`, the base model, is given, the numbers of layers and heads of a prefix are compared
    with it. The table's width alone does not determine these numbers.
    """
    weights = find_weights(folder)
    config_file = folder / CONFIG_FILE
    notes = [f"imported from PEFT; {PLACEMENT_NOTE}"]
    config: dict[str, Any] = {}
    if config_file.is_file():
        config = read_config(config_file)
        if config.get("peft_type") in LINEAR_PEFT_TYPES:
            return open_peft_linears(folder, config, weights, base)
        _check_config(config, config_file, notes)
    else:
        notes.append("there was no adapter_config.json: the type PROMPT_TUNING is assumed")
    tensors = _read_tensors(weights)
    peft_type = str(config.get("peft_type", "PROMPT_TUNING"))
    expected_keys = (
        {PROMPT_EMBEDDINGS_KEY, "prefix_task_cols", "prefix_task_rows"}
        if peft_type == MULTITASK_PROMPT_TUNING
        else {PROMPT_EMBEDDINGS_KEY}
    )
    if set(tensors) != expected_keys:
        raise AdapterError(
            f"{weights} has the tensors {', '.join(sorted(tensors)[:4]) or '(none)'}; a "
            f"{peft_type} adapter must have exactly {', '.join(sorted(expected_keys))}: give a "
            "soft prompt or a prefix, because other adapters are not supported"
        )
    tensors = {key: checked_table(tensor, f"{weights}: {key}") for key, tensor in tensors.items()}
    table = tensors[PROMPT_EMBEDDINGS_KEY]
    if peft_type == MULTITASK_PROMPT_TUNING:
        table = _task_rows(tensors, task, weights)
        tasks = len(tensors["prefix_task_cols"])
        notes.append(f"task {task or 0}; the adapter's tasks are 0 to {tasks - 1}")
    _check_sizes(config, table, weights)
    if peft_type == PREFIX_TUNING and base is not None:
        _check_layers(config, base.config, weights)
    # PEFT's prefix has the same layout as ours: for each layer the keys, then the values.
    adapter_kind = "prefix" if peft_type == PREFIX_TUNING else "rows"
    card = Card(card_name(folder), method=peft_type.lower(), kind=adapter_kind, notes=tuple(notes))
    return build_adapter(card, table)


def _check_config(config: dict[str, Any], path: Path, notes: list[str]) -> None:
    """Refuse the config of an unsupported adapter; append notes for the user to `notes`."""
    peft_type = config.get("peft_type")
    if peft_type not in PEFT_TYPES:
        raise AdapterError(
            f"{path} has peft_type {str(peft_type)[:40]}, which is not supported; train one of the "
            f"types {', '.join((*PEFT_TYPES, *LINEAR_PEFT_TYPES))}, or merge this adapter into the "
            "model"
        )
    task_type, submodules = config.get("task_type"), config.get("num_transformer_submodules")
    if task_type is None:
        notes.append("its config has no task_type, so PEFT would ignore the adapter")
    elif task_type != "CAUSAL_LM" or submodules not in (None, 1):
        raise AdapterError(
            f"{path} has task_type {str(task_type)[:40]} and num_transformer_submodules "
            f"{str(submodules)[:9]}; only CAUSAL_LM with 1 is supported: train the adapter for "
            "CAUSAL_LM"
        )
    saved_modules = config.get("modules_to_save")
    if saved_modules:
        raise AdapterError(
            f"{path} also replaces weights ({str(saved_modules)[:99]}); only adapters that do not "
            "change the model are supported: train the adapter without modules_to_save"
        )
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and base:
        notes.append(f"trained on {base[:200]}")


def _check_sizes(config: dict[str, Any], table: Tensor, weights: Path) -> None:
    """Compare the table's shape with (num_virtual_tokens, token_dim * factor) of the config.

    `factor` is 2 * num_layers for a prefix, which has keys and values of each layer, and 1 for
    other adapters.
    """
    layers = config.get("num_layers")
    factor = 1
    if config.get("peft_type") == PREFIX_TUNING:
        # If the config does not have num_layers, the factor is 0, and token_dim is not compared.
        factor = 2 * layers if isinstance(layers, int) else 0
    for key, actual_size, key_factor in (
        ("num_virtual_tokens", table.shape[0], 1),
        ("token_dim", table.shape[-1], factor),
    ):
        size = config.get(key)
        if size is None or key_factor == 0:
            continue
        if not isinstance(size, int) or size * key_factor != actual_size:
            raise AdapterError(
                f"{weights} has a table of {' x '.join(map(str, table.shape))}, but its config has "
                f"{key} {str(size)[:20]}; table and config belong to different adapters: save the "
                "adapter again"
            )


def _check_layers(config: dict[str, Any], model_config: GPTConfig, weights: Path) -> None:
    """Compare the layers and heads of a prefix with the model."""
    for key, required_size, unit in (
        ("num_layers", model_config.num_layers, "layers"),
        ("token_dim", model_config.num_query_groups * model_config.kv_channels, "key channels"),
        # In the config of a prefix, PEFT stores the number of KV heads under this key.
        ("num_attention_heads", model_config.num_query_groups, "KV heads"),
    ):
        size = config.get(key)
        if size is not None and size != required_size:
            raise AdapterError(
                f"{weights} is a prefix for a model with {key} {str(size)[:20]}, but this model "
                f"has {required_size} {unit}; use the prefix with the model that it was trained on"
            )


def _task_rows(tensors: dict[str, Tensor], task: str | None, weights: Path) -> Tensor:
    """Return one task's rows of a multitask adapter: prompt * (cols[task] @ rows[task])."""
    prompt = tensors[PROMPT_EMBEDDINGS_KEY]
    cols, rows = tensors["prefix_task_cols"], tensors["prefix_task_rows"]
    has_consistent_shapes = (
        prompt.ndim == 2
        and cols.ndim == rows.ndim == 3
        and len(cols) == len(rows)
        and (cols.shape[1], rows.shape[2]) == tuple(prompt.shape)
        and cols.shape[2] == rows.shape[1]
    )
    if not has_consistent_shapes:
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in tensors.items())
        raise AdapterError(f"{weights} has inconsistent shapes ({shapes}); save it again")
    tasks = len(cols)
    if task is None and tasks != 1:
        raise AdapterError(
            f"{weights} has {tasks} tasks; set task to a number from 0 to {tasks - 1}"
        )
    number = int(task) if task and re.fullmatch(r"0|[1-9][0-9]{0,8}", task) else -1
    if task is None and tasks == 1:
        number = 0
    if not 0 <= number < tasks:
        raise AdapterError(
            f"{weights} has no task {str(task)[:20]}; its tasks are 0 to {tasks - 1}"
        )
    return prompt * (cols[number] @ rows[number])


def open_tgis(path: Path) -> Adapter:
    """Open a torch file with a single matrix, the prompt format of TGIS."""
    if path.with_name("encoder.pt").is_file():
        raise AdapterError(
            f"{path} has an encoder.pt beside it, so it is for a model with an encoder; give a "
            "decoder.pt for a decoder-only model"
        )
    matrix = load_weights_only(path, mmap=False)
    if not isinstance(matrix, Tensor):
        raise AdapterError(
            f"{path} contains a {type(matrix).__name__}; a decoder.pt must be one matrix of rows x "
            "hidden: save it again"
        )
    table = checked_table(matrix, str(path))
    # TGIS stores an adapter as `<name>/decoder.pt`, so the directory has the adapter's name.
    named_path = path.parent if path.stem in ("decoder", "encoder") else path.with_suffix("")
    notes = (f"imported from TGIS; {PLACEMENT_NOTE}",)
    return build_adapter(Card(card_name(named_path), method="tgis", notes=notes), table)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    return {key: stored.tensor() for key, stored in open_tensors(path).items()}


def checked_table(tensor: object, source: str) -> Tensor:
    """Return a table as fp32; refuse an object that is not a dense float tensor of limited size."""
    if not isinstance(tensor, Tensor):
        raise AdapterError(
            f"{source} is a {type(tensor).__name__}; it must be a matrix: save it again"
        )
    if not is_dense(tensor) or tensor.dtype not in DTYPES:
        raise AdapterError(
            f"{source} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; it must be a dense "
            "matrix of float32, bfloat16 or float16: save it again as such a matrix"
        )
    if tensor.numel() * 4 > TABLE_BYTES_MAX:
        raise AdapterError(
            f"{source} has the shape {tuple(tensor.shape)}: {tensor.numel() * 4} bytes, over the "
            f"limit of {TABLE_BYTES_MAX}, so the file is not an adapter; give an adapter's file"
        )
    return tensor.detach().float()
