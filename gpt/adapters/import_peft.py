"""Soft prompts that other programs saved: HF PEFT's prompt adapters, and TGIS's decoder.pt.

At serving time each is one table, of rows or of layers' keys and values, whatever trained it, so
reading one is finding that table and refusing whatever would need more. A file that cannot be read
is a CheckpointError of whoever reads such files, which `open_adapter` turns into its own. None of
these formats says which model it belongs to; the card then says so too.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.adapters.card import TABLE_BYTES_MAX, Adapter, Card, build_adapter
from gpt.checkpoint.files.safetensors_file import open_safetensors
from gpt.checkpoint.files.torch_save import is_dense, load_torch, open_torch
from gpt.config import GPTConfig
from gpt.errors import AdapterError

PROMPTS = "prompt_embeddings"
MULTITASK = "MULTITASK_PROMPT_TUNING"
PREFIX = "PREFIX_TUNING"
PEFT_TYPES = ("PROMPT_TUNING", "P_TUNING", MULTITASK, PREFIX)
CONFIG_BYTES_MAX = 1 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ORDER = "its place is before the text and its begin-of-text token"


def open_peft(folder: Path, task: str | None, network: GPTConfig | None = None) -> Adapter:
    """A directory with adapter_config.json and adapter_model.safetensors, or .bin.

    A prefix's layers and heads are compared with those of `network`, if that is given: a table of
    others may be just as wide.
    """
    weights = next((p for p in _weights(folder) if p.is_file()), None)
    config_file = folder / "adapter_config.json"
    if weights is None:
        what = "adapter_config.json but no weights" if config_file.is_file() else "no adapter"
        raise AdapterError(
            f"{folder} has {what}; needed is a PEFT directory with adapter_model.safetensors, or a "
            "TGIS one with decoder.pt"
        )
    notes = [f"imported from PEFT; {ORDER}"]
    config: dict[str, Any] = {}
    if config_file.is_file():
        config = _config(config_file, notes)
    else:
        notes.append("there was no adapter_config.json: nothing says what the rows are for")
    tensors = _tensors(weights)
    kind = str(config.get("peft_type", "PROMPT_TUNING"))
    known = {PROMPTS, "prefix_task_cols", "prefix_task_rows"} if kind == MULTITASK else {PROMPTS}
    if set(tensors) != known:
        raise AdapterError(
            f"{weights} holds {', '.join(sorted(tensors)[:4])}; a {kind} adapter holds "
            f"{', '.join(sorted(known))}: only adapters that stand before a text are read"
        )
    tensors = {key: plain_table(tensor, f"{weights}: {key}") for key, tensor in tensors.items()}
    table = tensors[PROMPTS]
    if kind == MULTITASK:
        table = _collapse(tensors, task, weights)
        notes.append(f"task {task or 0} of {len(tensors['prefix_task_cols'])}")
    _compare(config, table, weights)
    if kind == PREFIX and network is not None:
        _compare_layers(config, network, weights)
    # Its layout is ours: for each layer the keys, as attention reads them, and then the values.
    ours = "prefix" if kind == PREFIX else "rows"
    card = Card(card_name(folder), method=kind.lower(), kind=ours, notes=tuple(notes))
    return build_adapter(card, table)


def _weights(folder: Path) -> tuple[Path, ...]:
    return folder / "adapter_model.safetensors", folder / "adapter_model.bin"


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ValueError(f"over {CONFIG_BYTES_MAX} bytes")
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read ({error}); save the adapter again") from None
    kind = config.get("peft_type")
    if kind not in PEFT_TYPES:
        raise AdapterError(
            f"{path} is of the type {str(kind)[:40]}, which changes more than the prompt; read are "
            f"{', '.join(PEFT_TYPES)}: train one of those, or merge this one into the model"
        )
    task_type, submodules = config.get("task_type"), config.get("num_transformer_submodules")
    if task_type is None:
        notes.append("its config has no task_type, so PEFT itself would ignore it")
    elif task_type != "CAUSAL_LM" or submodules not in (None, 1):
        raise AdapterError(
            f"{path} is for {str(task_type)[:40]} with {str(submodules)[:9]} submodules; this "
            "model is CAUSAL_LM with 1: train the adapter for that"
        )
    replaced = config.get("modules_to_save")
    if replaced:
        raise AdapterError(
            f"{path} also replaces weights ({str(replaced)[:99]}); only adapters that leave the "
            "model as it is are read: train it without modules_to_save"
        )
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and base:
        notes.append(f"trained on {base[:200]}")
    return config


def _compare(config: dict[str, Any], table: Tensor, weights: Path) -> None:
    layers, parts = config.get("num_layers"), 1
    if config.get("peft_type") == PREFIX:
        parts = 2 * layers if isinstance(layers, int) else 0
    for key, found, count in (
        ("num_virtual_tokens", table.shape[0], 1),
        ("token_dim", table.shape[-1], parts),
    ):
        said = config.get(key)
        if said is not None and count and (not isinstance(said, int) or said * count != found):
            raise AdapterError(
                f"{weights} has a table of {' x '.join(map(str, table.shape))}, its config says "
                f"{key} {str(said)[:20]}; they are of different adapters: save it again"
            )


def _compare_layers(config: dict[str, Any], network: GPTConfig, weights: Path) -> None:
    for key, needed in (
        ("num_layers", network.num_layers),
        ("token_dim", network.num_query_groups * network.kv_channels),
        ("num_attention_heads", network.num_query_groups),  # PEFT says those that have keys.
    ):
        said = config.get(key)
        if said is not None and said != needed:
            raise AdapterError(
                f"{weights} is keys and values of a model with {key} {str(said)[:20]}, this one "
                f"has {needed} (KV heads count); use it with the model that it was trained on"
            )


def _collapse(tensors: dict[str, Tensor], task: str | None, weights: Path) -> Tensor:
    """One task's rows of a multitask adapter: P * (cols[k] @ rows[k])."""
    shared = tensors[PROMPTS]
    cols, rows = tensors["prefix_task_cols"], tensors["prefix_task_rows"]
    fits = (
        shared.ndim == 2
        and cols.ndim == rows.ndim == 3
        and len(cols) == len(rows)
        and (cols.shape[1], rows.shape[2]) == tuple(shared.shape)
        and cols.shape[2] == rows.shape[1]
    )
    if not fits:
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors.items())
        raise AdapterError(
            f"{weights} has shapes that do not go together ({shapes}); save it again"
        )
    tasks = len(cols)
    if task is None and tasks != 1:
        raise AdapterError(f"{weights} has {tasks} tasks; say which, from 0 to {tasks - 1}")
    known = {str(number): number for number in range(tasks)}
    if task is not None and task not in known:
        raise AdapterError(f"{weights} has no task {task[:20]}; its tasks are 0 to {tasks - 1}")
    number = known[task or "0"]
    return shared * (cols[number] @ rows[number])


def open_tgis(path: Path) -> Adapter:
    """A bare matrix in a torch file, as text-generation-inference keeps prompts."""
    if path.with_name("encoder.pt").is_file():
        raise AdapterError(
            f"{path} has an encoder.pt beside it, so it is for a model with an encoder; this model "
            "has none"
        )
    found = load_torch(path, mapped=False)
    if not isinstance(found, Tensor):
        raise AdapterError(
            f"{path} holds a {type(found).__name__}; a decoder.pt is one matrix of rows x hidden"
        )
    table = plain_table(found, str(path))
    # `<name>/decoder.pt` is how the store names them.
    name = path.parent if path.stem in ("decoder", "encoder") else path.with_suffix("")
    notes = (f"imported from TGIS; {ORDER}",)
    return build_adapter(Card(card_name(name), method="tgis", notes=notes), table)


def card_name(path: Path) -> str:
    """A card's name from a file's or directory's."""
    return plain_name(path.resolve().name)


def plain_name(said: str) -> str:
    """A card's name from whatever somebody calls it."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", said).lstrip("._-")[:100] or "imported"


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return {key: stored.tensor() for key, stored in open_safetensors(path).items()}
    # Not mapped: the file may be replaced or cut while the adapter is in use.
    return {key: stored.tensor() for key, stored in open_torch(path, mapped=False).items()}


def plain_table(tensor: object, where: str) -> Tensor:
    """In fp32; refuses what is not simply numbers in memory, whatever shape it claims."""
    if not isinstance(tensor, Tensor):
        raise AdapterError(
            f"{where} is a {type(tensor).__name__}, where a matrix is needed; save it again"
        )
    if not is_dense(tensor) or tensor.dtype not in DTYPES:
        raise AdapterError(
            f"{where} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; it must be a dense "
            "matrix of float32, bfloat16 or float16: save it so"
        )
    if tensor.numel() * 4 > TABLE_BYTES_MAX:
        raise AdapterError(
            f"{where} has the shape {tuple(tensor.shape)}: {tensor.numel() * 4} bytes, over the "
            f"limit of {TABLE_BYTES_MAX}; that is no adapter"
        )
    return tensor.detach().float()
