"""An adapter as NeMo 1.20 to 1.22 reads it: a `.nemo` of prompt learning, with its template.

Its table is there twice: as what an encoder without a network reads, and as what it made. So NeMo
can use it at once, and learn on from it. What NeMo would take for something else is refused, what
it has no place for is returned as notes. Knows no NeMo but by its files.
"""

import io
import os
import re
import secrets
import tarfile
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from gpt.adapters.card import Adapter
from gpt.adapters.export_peft import Export, begin_row, refuse_prefix
from gpt.adapters.prompt_template import MARK, Field, Template
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.formats.nemo.archive import CONFIG

SUFFIX = ".nemo"
WEIGHTS = "model_weights.ckpt"
MODEL = (
    "nemo.collections.nlp.models.language_modeling.megatron_gpt_prompt_learning_model."
    "MegatronGPTPromptLearningModel"
)
PLAIN = f"{MARK}0|>{{prompt}}"
PSEUDO = re.compile(r"<prompt_[0-9]+>")


def as_nemo(adapter: Adapter, base: Checkpoint | None, base_name: str | None) -> Export:
    """`base_name` is the path of the model's own `.nemo`, as NeMo will look for it."""
    refuse_prefix(adapter, "NeMo")
    notes: list[str] = []
    template, table = _in_order(adapter, base, notes)
    task = _task_name(adapter.card.name, notes)
    weights = {
        "prompt_table": {f"prompt_table.{task}.prompt_embeddings.weight": table},
        "embeddings": {"weight": table.clone()},
    }
    content = io.BytesIO()
    torch.save(weights, content)
    config = _config(task, template, base_name)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    begins = template.bos == "first"
    notes.append(f"set inference.add_BOS={begins} in NeMo, which does not read it from the file")
    if base_name is None:
        notes.append("it does not say which model it is for: give NeMo gpt_model_file")
    if any(isinstance(part, tuple) for part in template.parts[: _last_rows(template)]):
        notes.append("NeMo places rows that stand after a text rightly only in batches of one")
    card = adapter.card
    parts = {"stops": card.stop, "max_new_tokens": card.max_new_tokens, "description": card.task}
    lost = [name for name, value in parts.items() if value]
    if lost:
        notes.append(f"that format has no place for the {' and the '.join(lost)}")
    return Export({CONFIG: text.encode(), WEIGHTS: content.getvalue()}, tuple(notes))


def check_nemo(path: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken, as `write_nemo` would, before anything is computed."""
    if path.suffix != SUFFIX or not path.parent.is_dir():
        raise AdapterError(
            f"{path} cannot be written; NeMo takes a {SUFFIX} file: give one in a directory that "
            "is there"
        )
    if os.path.lexists(path) and (not overwrite or path.is_symlink() or not path.is_file()):
        raise AdapterError(f"{path} exists already; give --overwrite for a file, or another place")


def write_nemo(export: Export, path: Path, *, overwrite: bool = False) -> None:
    """Pack the archive: it is there whole, or not at all."""
    check_nemo(path, overwrite=overwrite)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for name, content in export.files.items():
                    member = tarfile.TarInfo(f"./{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            part.replace(path)
        else:
            os.link(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # The name, too, must survive a power cut.
        finally:
            os.close(folder)
    except OSError as error:
        raise AdapterError(
            f"{path} cannot be written: {error.strerror}; give a place in a directory that "
            "exists, is writable and has room"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def _in_order(
    adapter: Adapter, base: Checkpoint | None, notes: list[str]
) -> tuple[Template, Tensor]:
    """Rows in the order of the text, as NeMo puts one after another wherever virtual tokens are."""
    found, table = adapter.card.template, adapter.table.contiguous()
    if found is None:
        notes.append("it had no template, so its rows stand before {prompt}")
        return Template(PLAIN, (len(table),)), table
    _check_text(adapter.card.name, found)
    runs = [part for part in found.parts if isinstance(part, range)]
    ordered = torch.cat([table[run.start : run.stop] for run in runs])
    if not torch.equal(ordered, table):
        notes.append("the rows were put into the order in which they stand in the template")
    text, bos, splits = "", found.bos, list[int]()
    lead = next((n for n, part in enumerate(found.parts) if not isinstance(part, range)), len(runs))
    for part in found.parts:
        if isinstance(part, range):
            text += f"{MARK}{len(splits)}|>"
            splits.append(len(part))
        else:
            text += "".join(f"{{{one.name}}}" if isinstance(one, Field) else one for one in part)
    if bos == "text":
        # NeMo knows no such token behind rows; as a row of its own it is the same.
        if lead:
            row, end = begin_row(adapter, base, "after"), sum(splits[:lead])
            ordered = torch.cat([ordered[:end], row, ordered[end:]])
            splits[lead - 1] += 1
            notes.append("the begin-of-text token behind the leading rows became a row of its own")
        bos = "none" if lead else "first"
    kept = {"truncate_field": found.truncate_field, "answer_field": found.answer_field}
    return Template(text, tuple(splits), **kept, bos=bos, eos=found.eos), ordered


def _check_text(name: str, template: Template) -> None:
    """NeMo takes all between braces for a field, and some texts for its own."""
    for part in template.parts:
        literals = [] if isinstance(part, range) else [one for one in part if isinstance(one, str)]
        for text in literals:
            bad = next((one for one in "{}" if one in text), None)
            own = PSEUDO.search(text)
            if bad or own or text.endswith("$"):
                what = bad or (own[0] if own else "$ before a field")
                raise AdapterError(
                    f"the template of adapter {name!r} has {what!r} in its text, which NeMo would "
                    "take for something else; export it --to peft, or train without it"
                )


def _last_rows(template: Template) -> int:
    places = [n for n, part in enumerate(template.parts) if isinstance(part, range)]
    return places[-1] if places else 0


def _task_name(name: str, notes: list[str]) -> str:
    """NeMo's is the name of a torch module."""
    task = name.replace(".", "_")
    task += "_" if hasattr(torch.nn.ModuleDict, task) or task == "training" else ""
    if task != name:
        notes.append(f"NeMo cannot name a task {name!r}; it is {task!r} there")
    return task


def _config(task: str, template: Template, base_name: str | None) -> dict[str, Any]:
    """All that NeMo's own config of prompt learning has, so that it can learn on as well."""
    record = {
        "taskname": task,
        "prompt_template": template.text,
        "total_virtual_tokens": template.rows,
        "virtual_token_splits": list(template.splits),
        "truncate_field": template.truncate_field,
        "answer_only_loss": template.answer_field is not None,
        "answer_field": template.answer_field,
    }
    # As its default is, but for what says that nothing stands between the rows and the table.
    encoder = {"encoder_type": "embedding", "dropout": 0.0, "num_layers": 2}
    return {
        "seed": 1234,
        "nemo_path": f"{task}{SUFFIX}",
        "virtual_prompt_style": "p-tuning",  # There is no other since 1.17, for inference neither.
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
        "target": MODEL,
    }
