"""NeMo export: writes an adapter and its template as a .nemo file of NeMo 1.20 to 1.22.

The table is stored twice: as the input of a prompt encoder of type "embedding", which returns its
input unchanged, and as the encoder's output. NeMo reads the output for inference, and the input
for further training. Template text that NeMo would parse as a field or as a pseudo-token such as
`<prompt_0>` is refused. Notes list the card fields that the format does not have.
"""

import io
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.export_peft import AdapterExport, bos_row, check_rows_only
from gpt.adapters.prompt_template import VIRTUAL_PROMPT_MARK, PromptTemplate, TemplateField
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.files.atomic_files import open_atomic
from gpt.formats.nemo.archive import CONFIG_FILE

SUFFIX = ".nemo"
WEIGHTS = "model_weights.ckpt"
TARGET_CLASS = (
    "nemo.collections.nlp.models.language_modeling.megatron_gpt_prompt_learning_model."
    "MegatronGPTPromptLearningModel"
)
DEFAULT_TEMPLATE = f"{VIRTUAL_PROMPT_MARK}0|>{{prompt}}"
PSEUDO_TOKEN = re.compile(r"<prompt_[0-9]+>")


def convert_to_nemo(
    adapter: Adapter, base: Checkpoint | None, base_name: str | None
) -> AdapterExport:
    """Convert an adapter to the files of a .nemo archive.

    `base_name` is the path from which NeMo will load the base model's `.nemo`; None: the archive
    does not record the base model.
    """
    check_rows_only(adapter, "NeMo")
    notes: list[str] = []
    template, table = _order_rows(adapter, base, notes)
    task = _task_name(adapter.card.name, notes)
    weights = {
        "prompt_table": {f"prompt_table.{task}.prompt_embeddings.weight": table},
        "embeddings": {"weight": table.clone()},
    }
    content = io.BytesIO()
    torch.save(weights, content)
    config = _nemo_config(task, template, base_name)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    adds_bos = template.bos == "first"
    notes.append(f"set inference.add_BOS={adds_bos} in NeMo, which does not read it from the file")
    if base_name is None:
        notes.append("the .nemo does not record the base model: set gpt_model_file in NeMo")
    if any(isinstance(part, tuple) for part in template.parts[: _last_virtual_part(template)]):
        notes.append(
            "the template has virtual tokens after text; NeMo places these correctly only at batch "
            "size 1"
        )
    card = adapter.card
    unsupported_fields = {
        "stops": card.stop,
        "max_new_tokens": card.max_new_tokens,
        "description": card.task,
    }
    lost_fields = [name for name, content in unsupported_fields.items() if content]
    if lost_fields:
        notes.append(f"the format has no field for the {' and the '.join(lost_fields)}")
    return AdapterExport({CONFIG_FILE: text.encode(), WEIGHTS: content.getvalue()}, tuple(notes))


def check_nemo_target(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that `write_nemo` would refuse; call this before a long conversion."""
    if path.suffix != SUFFIX or not path.parent.is_dir():
        raise AdapterError(
            f"{path} cannot be written; NeMo requires a file name that ends with {SUFFIX}, and the "
            "directory must exist"
        )
    if os.path.lexists(path) and (not overwrite or path.is_symlink() or not path.is_file()):
        raise AdapterError(
            f"{path} exists already; choose another path, or give --overwrite, which replaces only "
            "regular files"
        )


def write_nemo(export: AdapterExport, path: Path, *, overwrite: bool = False) -> None:
    """Write the archive atomically."""
    check_nemo_target(path, overwrite=overwrite)
    try:
        with (
            open_atomic(path, overwrite=overwrite) as file,
            tarfile.open(fileobj=file, mode="w") as archive,
        ):
            for name, content in export.files.items():
                member = tarfile.TarInfo(f"./{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise AdapterError(
            f"{path} cannot be written: {error.strerror}; give a path in an existing, writable "
            "directory with free space"
        ) from None


def _order_rows(
    adapter: Adapter, base: Checkpoint | None, notes: list[str]
) -> tuple[PromptTemplate, Tensor]:
    """Return a template and a table that NeMo can use.

    NeMo requires that the table's rows are in the order of their markers in the template, so the
    rows are sorted. NeMo cannot insert a begin-of-text token after virtual tokens. If the template
    requires this (bos "text"), the table gets an extra row with the embedding of that token.
    """
    template, table = adapter.card.template, adapter.table.contiguous()
    if template is None:
        notes.append("the adapter has no template, so its rows are placed before {prompt}")
        return PromptTemplate(DEFAULT_TEMPLATE, (len(table),)), table
    _check_literals(adapter.card.name, template)
    row_ranges = [part for part in template.parts if isinstance(part, range)]
    ordered_table = torch.cat([table[row_range.start : row_range.stop] for row_range in row_ranges])
    if not torch.equal(ordered_table, table):
        notes.append("the rows were sorted by their position in the template")
    text = ""
    bos = template.bos
    splits: list[int] = []
    # The number of parts with virtual tokens before the first text part.
    leading_ranges = next(
        (n for n, part in enumerate(template.parts) if not isinstance(part, range)), len(row_ranges)
    )
    for part in template.parts:
        if isinstance(part, range):
            text += f"{VIRTUAL_PROMPT_MARK}{len(splits)}|>"
            splits.append(len(part))
        elif isinstance(part, tuple):
            text += "".join(
                f"{{{element.name}}}" if isinstance(element, TemplateField) else element
                for element in part
            )
    if bos == "text":
        if leading_ranges:
            bos_embedding = bos_row(adapter, base, "after")
            position = sum(splits[:leading_ranges])
            ordered_table = torch.cat(
                [ordered_table[:position], bos_embedding, ordered_table[position:]]
            )
            splits[leading_ranges - 1] += 1
            notes.append("the begin-of-text token after the leading rows became an extra row")
        bos = "none" if leading_ranges else "first"
    ordered_template = PromptTemplate(
        text,
        tuple(splits),
        truncate_field=template.truncate_field,
        answer_field=template.answer_field,
        bos=bos,
        eos=template.eos,
    )
    return ordered_template, ordered_table


def _check_literals(name: str, template: PromptTemplate) -> None:
    """Refuse literals that NeMo would parse: braces, pseudo-tokens, and `$` before a field."""
    for part in template.parts:
        literals = (
            [literal for literal in part if isinstance(literal, str)]
            if isinstance(part, tuple)
            else []
        )
        for text in literals:
            brace = next((character for character in "{}" if character in text), None)
            pseudo_token = PSEUDO_TOKEN.search(text)
            if brace or pseudo_token or text.endswith("$"):
                conflict = repr(brace or (pseudo_token[0] if pseudo_token else "$"))
                position = "" if brace or pseudo_token else " before a field"
                raise AdapterError(
                    f"the template of adapter {name!r} has {conflict}{position} in its text, which "
                    "NeMo would not read as text; export the adapter with --to peft, or train it "
                    "with a template without this text"
                )


def _last_virtual_part(template: PromptTemplate) -> int:
    """Return the index of the last part with virtual tokens; 0 if there is none."""
    indices = [n for n, part in enumerate(template.parts) if isinstance(part, range)]
    return indices[-1] if indices else 0


def _task_name(name: str, notes: list[str]) -> str:
    """Return a task name that is a valid key of a torch ModuleDict, as NeMo requires."""
    task = name.replace(".", "_")
    task += "_" if hasattr(torch.nn.ModuleDict, task) or task == "training" else ""
    if task != name:
        notes.append(f"NeMo cannot use the task name {name!r}; the task is named {task!r}")
    return task


def _nemo_config(task: str, template: PromptTemplate, base_name: str | None) -> dict[str, Any]:
    """Return a complete config of NeMo's prompt learning, with which NeMo can continue training."""
    record = {
        "taskname": task,
        "prompt_template": template.text,
        "total_virtual_tokens": template.virtual_tokens,
        "virtual_token_splits": list(template.splits),
        "truncate_field": template.truncate_field,
        "answer_only_loss": template.answer_field is not None,
        "answer_field": template.answer_field,
    }
    # NeMo's defaults, except encoder_type: "embedding" is an encoder that returns its input.
    encoder = {"encoder_type": "embedding", "dropout": 0.0, "num_layers": 2}
    return {
        "seed": 1234,
        "nemo_path": f"{task}{SUFFIX}",
        # NeMo 1.17 and newer support only this style, and also require it for inference.
        "virtual_prompt_style": "p-tuning",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "validation_global_batch_size": 8,
        "validation_micro_batch_size": 1,
        "validation_drop_last": False,
        "report_validation_metric": False,
        "validation_metric": "accuracy",
        "restore_path": None,
        "language_model_path": base_name,
        "save_nemo_on_validation_end": False,
        "existing_tasks": [],
        "new_tasks": [task],
        "sequence_parallel": False,
        "activations_checkpoint_granularity": None,
        "activations_checkpoint_method": None,
        "activations_checkpoint_num_layers": None,
        "megatron_amp_O2": False,
        "task_templates": [record],
        "p_tuning": {**encoder, "encoder_hidden": 2048, "init_std": 0.023},
        "data": {
            "train_ds": [],
            "validation_ds": [],
            "add_eos": template.eos,
            "add_bos": template.bos == "first",
            "shuffle": True,
            "num_workers": 8,
            "pin_memory": True,
            "min_seq_length": 1,
        },
        "optim": {
            "name": "fused_adam",
            "lr": 1e-4,
            "weight_decay": 0.01,
            "betas": [0.9, 0.98],
            "sched": {"name": "CosineAnnealing", "warmup_steps": 50, "min_lr": 0.0},
        },
        "target": TARGET_CLASS,
    }
