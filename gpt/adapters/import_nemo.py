"""Prompts that NeMo learned, as its `.nemo` files or unpacked directories hold them.

Three layouts have been written: a table for each task, flat or nested, and since 1.20 one buffer of
an adapter inside the model. Each is rows as they stand before a text, but for the last one on a
model with learned positions: those rows hold positions, which are taken out again. Rows that were
never written down are made again by the encoder beside them, if that is whole.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.adapters.card import Adapter, Card, build_adapter
from gpt.adapters.import_peft import card_name, plain_name, plain_table
from gpt.adapters.nemo_encoder import SavedEncoder
from gpt.adapters.prompt_template import Template
from gpt.checkpoint.files.file_tree import FileTree, Span, files_below
from gpt.checkpoint.files.torch_zip import read_archive
from gpt.checkpoint.logical_tensor import Checkpoint, some
from gpt.errors import AdapterError, ConfigError
from gpt.formats.mappings.nemo_yaml import Fields, read_config
from gpt.formats.nemo.archive import CONFIG, open_archive
from gpt.settings import shown

TASK = re.compile(r"prompt_table\.(.+)\.prompt_embeddings\.weight")
LEAF = "ptuning_adapter.inference_table"
RANKS_MAX = 1024  # Of tensors.
POSITIONS = "embedding.position_embeddings.weight"
# Every tensor rank has the whole table, and the first stage has it alone; of one rank, of tensor
# ranks, and of stages too.
WEIGHTS = tuple(
    f"{folder}model_weights.ckpt"
    for folder in ("", "mp_rank_{:02d}/", "tp_rank_{:02d}_pp_rank_000/")
)


def is_nemo_prompt(path: Path) -> bool:
    """Whether a path is of the kind that `open_nemo_prompt` reads."""
    return path.suffix == ".nemo" or (path / CONFIG).is_file()


def open_nemo_prompt(path: Path, task: str | None, base: Checkpoint | None) -> Adapter:
    """One task's prompt. `base` is needed where its positions are in the rows."""
    tree = open_archive(path)[0] if path.is_file() else files_below(path)
    first, *others = _weights(path, tree)
    state = _state(first)
    tables = _tables(state)
    inner = [key for key in state if f".{key}".endswith(f".{LEAF}")]
    fields = Fields(_config(tree), str(path / CONFIG))
    encoder = SavedEncoder(path, state, lambda: map(_state, others), fields, base)
    names, notes = {*tables, *(_new_tasks(fields) if encoder.beside else ())}, []
    if names:
        name = _chosen(names, task, path)
        template, table = _template(fields, name), tables.get(name)
        notes.append("imported from NeMo's prompt learning")
        if template is None:
            notes.append(f"its config has no template of the task {name!r}")
    elif len(inner) == 1 or (encoder.inside and not inner):
        name, template = "", None
        table = plain_table(state[inner[0]], f"{path}: {inner[0]}") if inner else None
        notes.append("imported from NeMo's p-tuning adapter; its place is before the text")
    else:
        raise AdapterError(
            f"{path} holds no prompt that NeMo learned, but {some(sorted(map(str, state)))}; give "
            "the .nemo that prompt learning or p-tuning saved at its end"
        )
    if table is None or not bool(table.isfinite().all()) or not bool(table.any()):
        table = encoder.rows(name)
        notes.append("its rows were made again by the encoder that was saved with it")
    if not name:
        table, note = _without_positions(path, table, fields, base)
        notes.append(note)
    card = Card(
        plain_name(name) if name else card_name(path.with_suffix("")),
        task=name,
        template=template,
        method="nemo",
        notes=tuple(filter(None, notes)),
    )
    return build_adapter(card, table)


def _config(tree: FileTree) -> dict[str, Any]:
    if CONFIG not in tree.spans:
        raise AdapterError(f"{tree.path} has no {CONFIG}; it is not of NeMo, or not all of it")
    return read_config(tree.spans[CONFIG])


def _weights(path: Path, tree: FileTree) -> list[Span]:
    """The first stage's, of each tensor rank."""
    for name in WEIGHTS:
        many = name.format(0) != name
        numbered = [name.format(rank) for rank in range(RANKS_MAX if many else 1)]
        spans = [tree.spans[one] for one in numbered if one in tree.spans]
        if spans and numbered[0] in tree.spans:
            return spans
    found = ", ".join(name.format(0) for name in WEIGHTS)
    raise AdapterError(
        f"{path} has none of {found}; found were {some(sorted(tree.spans))}: give "
        "an archive that prompt learning saved, whole"
    )


def _state(span: Span) -> dict[str, Any]:
    """The weights' names and tensors, of all nests."""
    record = read_archive(span)
    if isinstance(record, dict) and isinstance(record.get("state_dict"), dict):
        record = record["state_dict"]
    if not isinstance(record, dict):
        raise AdapterError(f"{span.path} is a {type(record).__name__}, not a model's state")
    nested = record.get("prompt_table")
    return {**record, **nested} if isinstance(nested, dict) else record


def _new_tasks(fields: Fields) -> list[str]:
    """Those whose rows the encoder makes."""
    named = fields.get("new_tasks", [])
    return [one for one in named if isinstance(one, str)] if isinstance(named, list) else []


def _tables(state: Mapping[str, Any]) -> dict[str, Tensor]:
    found = ((TASK.fullmatch(str(key)), value) for key, value in state.items())
    return {match[1]: plain_table(value, match[0]) for match, value in found if match}


def _chosen(tables: Collection[str], task: str | None, path: Path) -> str:
    if task is None and len(tables) == 1:
        return next(iter(tables))
    if task is None or task not in tables:
        what = "several tasks" if task is None else f"no task {task[:60]!r}"
        raise AdapterError(f"{path} has {what}; say which of {some(sorted(tables))}")
    return task


def _template(fields: Fields, task: str) -> Template | None:
    """The task's own, with the order of tokens that it was trained with."""
    templates = fields.get("task_templates", [])
    found = [
        one
        for one in (templates if isinstance(templates, list) else [])
        if isinstance(one, Mapping) and one.get("taskname") == task
    ]
    if not found:
        return None
    text, splits = found[0].get("prompt_template"), found[0].get("virtual_token_splits")
    splits = [found[0].get("total_virtual_tokens")] if splits is None else splits
    whole = isinstance(splits, list) and all(type(one) is int for one in splits)
    if not isinstance(text, str) or not whole:
        raise AdapterError(
            f"{fields.where}: the template of {task!r} is {shown(text)} with the splits "
            f"{shown(splits)}; needed are a text and whole numbers: mend the file"
        )
    data = fields.under("data")
    answer = found[0].get("answer_field")
    # NeMo holds it to its place only where loss is for the answer alone.
    last = isinstance(answer, str) and text.endswith(f"{{{answer}}}")
    try:
        return Template(
            text,
            tuple(splits),
            truncate_field=found[0].get("truncate_field"),
            answer_field=answer if last else None,
            bos="first" if data.get("add_bos", False) is True else "none",
            eos=data.get("add_eos", True) is True,
        )
    except ConfigError as error:
        raise AdapterError(f"{fields.where}: the template of {task!r}: {error}") from None


def _without_positions(
    path: Path, table: Tensor, fields: Fields, base: Checkpoint | None
) -> tuple[Tensor, str]:
    """NeMo puts these rows where positions were added already; here those are added after."""
    if base is not None:
        learned = base.config.learned_positions
    else:
        learned = fields.text("position_embedding_type", "learned_absolute").startswith("learned")
    if not learned:
        return table, ""
    if base is None:
        raise AdapterError(
            f"the rows of {path} replace embeddings and their learned positions, which only the "
            "model can tell apart; give the model it was trained on with --model"
        )
    positions = base.tensors[POSITIONS]
    if table.ndim != 2 or table.shape[1:] != positions.shape[1:] or len(table) > positions.shape[0]:
        raise AdapterError(
            f"the prompt in {path} has the shape {tuple(table.shape)}, the model's positions "
            f"{positions.shape}; it is another model's"
        )
    taken = positions.corner(0, *table.shape).float()
    return table - taken, "the model's positions were taken out of its rows"
