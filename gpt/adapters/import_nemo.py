"""NeMo import: soft prompts of prompt learning and p-tuning from .nemo files and directories.

NeMo has three layouts of the virtual-token rows:

- one table per task, with flat keys;
- one table per task, in nested dicts;
- since NeMo 1.20, a buffer in an adapter module of the model. If the model has learned positions,
  these rows include position embeddings, which `_subtract_positions` subtracts.

If the rows are missing, all zeros or not finite, `nemo_encoder.py` computes them with the prompt
encoder in the file.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.adapters.card import Adapter, Card, build_adapter, card_name, sanitized_name
from gpt.adapters.import_nemo_linears import is_nemo_linears, open_nemo_linears
from gpt.adapters.import_peft import checked_table
from gpt.adapters.nemo_encoder import SavedEncoder
from gpt.adapters.prompt_template import PromptTemplate
from gpt.checkpoint.files.file_tree import FileTree, Span, scan_folder_recursive
from gpt.checkpoint.files.torch_file import read_torch_span
from gpt.checkpoint.logical_tensor import Checkpoint, summarize_names
from gpt.errors import AdapterError, ConfigError
from gpt.formats.mappings.nemo_yaml import NemoConfig, read_config
from gpt.formats.nemo.archive import CONFIG_FILE, open_nemo_archive
from gpt.settings import short_repr

TASK_KEY = re.compile(r"prompt_table\.(.+)\.prompt_embeddings\.weight")
INFERENCE_TABLE_KEY = "ptuning_adapter.inference_table"
RANKS_MAX = 1024  # Tensor parallel ranks.
POSITION_EMBEDDING_KEY = "embedding.position_embeddings.weight"
# Names of the files with the table: without parallelism, with tensor parallelism, with tensor and
# pipeline parallelism. Each tensor rank of the first pipeline stage has the complete table.
WEIGHT_FILES = tuple(
    f"{folder}model_weights.ckpt"
    for folder in ("", "mp_rank_{:02d}/", "tp_rank_{:02d}_pp_rank_000/")
)


def is_nemo_prompt(path: Path) -> bool:
    """Tell whether a path is a .nemo file or the directory of an unpacked .nemo file."""
    return path.suffix == ".nemo" or (path / CONFIG_FILE).is_file()


def open_nemo_prompt(path: Path, task: str | None, base: Checkpoint | None) -> Adapter:
    """Open the soft prompt of one task, or an adapter of linears (import_nemo_linears.py).

    `base`, the base model, is needed in two cases: the rows include the model's position
    embeddings, or the rows must be computed from the embeddings of the task's name.
    """
    tree = open_nemo_archive(path)[0] if path.is_file() else scan_folder_recursive(path)
    fields = NemoConfig(_read_model_config(tree), str(path / CONFIG_FILE))
    if is_nemo_linears(fields):
        return open_nemo_linears(path, tree, fields, base)
    first_rank, *other_ranks = _weight_files(path, tree)
    state = _read_state_dict(first_rank)
    tables = _read_tables(state)
    inference_table_keys = [key for key in state if f".{key}".endswith(f".{INFERENCE_TABLE_KEY}")]
    encoder = SavedEncoder(path, state, lambda: map(_read_state_dict, other_ranks), fields, base)
    task_names = set(tables)
    if encoder.is_per_task:
        task_names.update(_new_tasks(fields))
    notes = []
    if task_names:
        name = _choose_task(task_names, task, path)
        template = _task_template(fields, name)
        table = tables.get(name)
        notes.append("imported from NeMo's prompt learning")
        if template is None:
            notes.append(f"its config has no template for the task {name!r}")
    elif len(inference_table_keys) == 1 or (encoder.is_in_model and not inference_table_keys):
        name = ""  # An adapter module has no task.
        template = None
        table = (
            checked_table(state[inference_table_keys[0]], f"{path}: {inference_table_keys[0]}")
            if inference_table_keys
            else None
        )
        notes.append("imported from NeMo's p-tuning adapter; its rows are before the text")
    else:
        raise AdapterError(
            f"{path} has no soft prompt of NeMo; it contains "
            f"{summarize_names(sorted(map(str, state)))}: give the .nemo file that prompt learning "
            "or p-tuning saved at its end"
        )
    if table is None or not bool(table.isfinite().all()) or not bool(table.any()):
        table = encoder.compute_rows(name)
        notes.append("its rows were computed by the encoder in the file")
    if not name:
        table, note = _subtract_positions(path, table, fields, base)
        notes.append(note)
    card = Card(
        sanitized_name(name) if name else card_name(path.with_suffix("")),
        task=name,
        template=template,
        method="nemo",
        notes=tuple(filter(None, notes)),
    )
    return build_adapter(card, table)


def _read_model_config(tree: FileTree) -> dict[str, Any]:
    if CONFIG_FILE not in tree.spans:
        raise AdapterError(
            f"{tree.path} has no {CONFIG_FILE}; it was not saved by NeMo or is incomplete: copy it "
            "again"
        )
    return read_config(tree.spans[CONFIG_FILE])


def _weight_files(path: Path, tree: FileTree) -> list[Span]:
    """Return the weight files of the first pipeline stage, in order of tensor parallel rank."""
    for name in WEIGHT_FILES:
        is_per_rank = name.format(0) != name
        file_names = [name.format(rank) for rank in range(RANKS_MAX if is_per_rank else 1)]
        spans = [tree.spans[file_name] for file_name in file_names if file_name in tree.spans]
        if spans and file_names[0] in tree.spans:
            return spans
    expected = ", ".join(name.format(0) for name in WEIGHT_FILES)
    raise AdapterError(
        f"{path} has none of the files {expected}; it contains "
        f"{summarize_names(sorted(tree.spans))}: give a complete archive that prompt learning saved"
    )


def _read_state_dict(span: Span) -> dict[str, Any]:
    """Return the state dict of a file.

    If it has a nested dict "prompt_table", the entries of this dict are copied to the top level.
    """
    record = read_torch_span(span)
    if isinstance(record, dict) and isinstance(record.get("state_dict"), dict):
        record = record["state_dict"]
    if not isinstance(record, dict):
        raise AdapterError(
            f"{span.path} is a {type(record).__name__}, not a state dict; give the .nemo file that "
            "prompt learning or p-tuning saved at its end"
        )
    nested = record.get("prompt_table")
    return {**record, **nested} if isinstance(nested, dict) else record


def _new_tasks(fields: NemoConfig) -> list[str]:
    """Return the task names in the config's `new_tasks`; the encoder can compute their rows."""
    tasks = fields.get("new_tasks", [])
    return [task for task in tasks if isinstance(task, str)] if isinstance(tasks, list) else []


def _read_tables(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the table of each task that has a table, by task name."""
    tables = {}
    for key, value in state.items():
        match = TASK_KEY.fullmatch(str(key))
        if match:
            tables[match[1]] = checked_table(value, match[0])
    return tables


def _choose_task(task_names: Collection[str], task: str | None, path: Path) -> str:
    if task is None and len(task_names) == 1:
        return next(iter(task_names))
    if task is None or task not in task_names:
        problem = "several tasks" if task is None else f"no task {task[:60]!r}"
        names = summarize_names(sorted(task_names))
        raise AdapterError(f"{path} has {problem}; set task to one of {names}")
    return task


def _task_template(fields: NemoConfig, task: str) -> PromptTemplate | None:
    """Return the task's template, with the begin- and end-of-text tokens as in training."""
    templates = fields.get("task_templates", [])
    task_records = [
        record
        for record in (templates if isinstance(templates, list) else [])
        if isinstance(record, Mapping) and record.get("taskname") == task
    ]
    if not task_records:
        return None
    record = task_records[0]
    text = record.get("prompt_template")
    splits = record.get("virtual_token_splits")
    splits = [record.get("total_virtual_tokens")] if splits is None else splits
    has_valid_splits = isinstance(splits, list) and all(type(split) is int for split in splits)
    if not isinstance(text, str) or not has_valid_splits:
        raise AdapterError(
            f"{fields.location}: the template of {task!r} is {short_repr(text)} with the splits "
            f"{short_repr(splits)}; the template must be a text, and the splits whole numbers: "
            "correct the file"
        )
    data_section = fields.section("data")
    answer = record.get("answer_field")
    # `PromptTemplate` requires the answer at the end; NeMo requires this only if answer_only_loss
    # is set. An answer field that is not at the end becomes an input field.
    is_answer_last = isinstance(answer, str) and text.endswith(f"{{{answer}}}")
    try:
        return PromptTemplate(
            text,
            tuple(splits),
            truncate_field=record.get("truncate_field"),
            answer_field=answer if is_answer_last else None,
            bos="first" if data_section.get("add_bos", False) is True else "none",
            eos=data_section.get("add_eos", True) is True,
        )
    except ConfigError as error:
        raise AdapterError(f"{fields.location}: the template of {task!r}: {error}") from None


def _subtract_positions(
    path: Path, table: Tensor, fields: NemoConfig, base: Checkpoint | None
) -> tuple[Tensor, str]:
    """Return the rows without learned position embeddings, and a note for the user.

    NeMo adds position embeddings only to the text, so trained rows stand for a word embedding plus
    a position embedding. Preamble adds position embeddings to rows too. Therefore this function
    subtracts them: row n loses the embedding of position n. The note is empty if the model has no
    learned position embeddings.
    """
    if base is not None:
        has_learned_positions = base.config.has_learned_positions
    else:
        has_learned_positions = fields.text(
            "position_embedding_type", "learned_absolute"
        ).startswith("learned")
    if not has_learned_positions:
        return table, ""
    if base is None:
        raise AdapterError(
            f"the rows of {path} include learned position embeddings, which must be subtracted; "
            "give the model that the prompt was trained on with --model"
        )
    positions = base.tensors[POSITION_EMBEDDING_KEY]
    if table.ndim != 2 or table.shape[1:] != positions.shape[1:] or len(table) > positions.shape[0]:
        raise AdapterError(
            f"the prompt in {path} has the shape {tuple(table.shape)}, but the model's position "
            f"embedding has the shape {positions.shape}; give the model that the prompt was "
            "trained on with --model"
        )
    position_rows = positions.read_sample(0, *table.shape).float()
    return table - position_rows, "the model's position embeddings were subtracted from its rows"
