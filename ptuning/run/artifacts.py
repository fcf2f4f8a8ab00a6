"""Run artifacts: writes the trained adapters with their cards, the encoder, or the full model.

An adapter contains its task's rows of the run's virtual-token table or prefix table, in fp32. The
method `full` writes a checkpoint instead of adapters. A run writes a publication record before it
writes an adapter, so that a resumed run finds the adapter and does not write it twice. This module
does not train or validate.
"""

import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    build_adapter,
    check_publish_directory,
    find_adapter,
    last_version,
    latest_adapter,
    publish_adapter,
)
from gpt.adapters.golden_examples import record_golden_examples
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import checkpoint_from_tensors
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPE_NAMES, FLOAT_DTYPES
from gpt.errors import ConfigError
from gpt.files.atomic_files import stage_folder, write_atomic
from gpt.formats.manifest import MANIFEST, NATIVE, Manifest
from gpt.formats.native import TOKENIZER_FOLDER
from gpt.formats.registry import open_checkpoint
from gpt.model.gpt_model import GPT
from gpt.parallel.weight_sharding import ParameterSpec, parameter_dtype, parameter_specs, shard_spec
from ptuning.config import MethodConfig
from ptuning.data.dataset import TaskData
from ptuning.prompt.prompt_encoder import ENCODER_FILE
from ptuning.run.preparation import PreparedRun
from ptuning.run.validation import Validator
from ptuning.training.trainer import Trainer

# The publication record in the folder of a run. Keyed by adapter name, it has the digest of the
# adapter, and the last version of this name before the run wrote the adapter.
PUBLICATION_FILE = "publication.json"


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run: its final state, losses and written files."""

    # Written adapters, or the written checkpoint. Empty if the run was interrupted, and on all
    # ranks except rank 0.
    paths: tuple[Path, ...]
    cards: tuple[Card, ...]  # Cards of the written adapters.
    folder: Path  # Folder with the run's logs and report.
    state: str  # "finished", "stopped early" or "interrupted".
    step: int  # Number of completed steps.
    first_loss: float
    last_loss: float  # Mean loss over the last steps; see LAST_LOSS_STEPS in training_loop.py.
    # Step of the written table; None: the last step, or not the same for all tasks.
    best_step: int | None
    # The best step of each task that is trained independently of others, keyed by name.
    task_best_steps: Mapping[str, int | None] = field(default_factory=dict)


def write_adapters(
    prepared: PreparedRun,
    trainer: Trainer,
    table: Tensor,
    task_metrics: Sequence[Mapping[str, Any]],
    validator: Validator,
    run_folder: Path,
    *,
    is_resumed: bool,
) -> list[tuple[Path, Card]]:
    """Write the adapter of each task on rank 0; return the paths and cards (empty on other ranks).

    All ranks must call this function. `task_metrics` has the metrics of each task for its card. If
    `is_resumed` is set, the run may have written some adapters before it was killed; these are not
    written again.
    """
    paths_and_cards = []
    for task, (data, card) in enumerate(zip(prepared.tasks, prepared.cards, strict=True)):
        metrics = {**task_metrics[task], **_validation_metrics(data, validator)}
        method_config = prepared.config.task_method_configs[task]
        card = _complete_card(prepared, data, card, metrics, method_config)
        adapter = _build_task_adapter(trainer, task, data, card, table)
        golden = _golden_examples(prepared, trainer, data, adapter)
        if golden:
            card = replace(adapter.card, golden=golden)
            adapter = _build_task_adapter(trainer, task, data, card, table)
        if trainer.mesh.rank == 0:
            folder = Path(prepared.config.output_config.output)
            written = _find_written_adapter(adapter, folder, run_folder) if is_resumed else None
            if written is None:
                check_publish_directory(folder)  # The folder may have been removed during the run.
                _record_publication(adapter, folder, run_folder)
                written = publish_adapter(adapter, folder, "tune"), adapter
            paths_and_cards.append((written[0], written[1].card))
    return paths_and_cards


def _build_task_adapter(
    trainer: Trainer, task: int, data: TaskData, card: Card, table: Tensor
) -> Adapter:
    """Return the adapter of a task from the run's table, or from its vector of changes."""
    if trainer.linears is not None:
        return build_adapter(card, None, trainer.linear_adapter(task, table.cpu()))
    rows = table[data.first_row : data.first_row + data.template.virtual_tokens]
    return build_adapter(card, rows.cpu())


def _find_written_adapter(
    adapter: Adapter, folder: Path, run_folder: Path
) -> tuple[Path, Adapter] | None:
    """Return the adapter that this run has written before it was killed; None if there is none.

    The table of a resumed run may differ by rounding from the table that was written, so the digest
    is read from the publication record. Runs of versions before 0.2 have no such record.
    """
    record = _read_publications(run_folder).get(adapter.card.name)
    if record is not None:
        digest, last = str(record["digest"]), int(record["last_version"])
        return find_adapter(folder, adapter.card.name, digest, after_version=last)
    latest = latest_adapter(folder, adapter.card.name)
    return latest if latest is not None and latest[1].digest == adapter.digest else None


def _record_publication(adapter: Adapter, folder: Path, run_folder: Path) -> None:
    name = adapter.card.name
    record = {"digest": adapter.digest, "last_version": last_version(folder, name)}
    records = {**_read_publications(run_folder), name: record}
    try:
        run_folder.mkdir(parents=True, exist_ok=True)  # It may have been removed during the run.
        write_atomic(run_folder / PUBLICATION_FILE, json.dumps(records).encode())
    except OSError as error:
        raise _unwritable_error(run_folder / PUBLICATION_FILE, error.strerror) from None


def _read_publications(run_folder: Path) -> dict[str, dict[str, Any]]:
    try:
        records: dict[str, dict[str, Any]] = json.loads(
            (run_folder / PUBLICATION_FILE).read_text("utf-8")
        )
    except (OSError, ValueError):
        # The run has written no adapter yet, or the record is damaged. Without a record,
        # `_find_written_adapter` compares the digest of the latest version.
        return {}
    return records


def write_encoder(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the encoder for later runs that set `encoder_from`."""
    content = safetensors.torch.save(dict(tensors))
    partial_path = folder / f".{ENCODER_FILE}.part"
    try:
        write_atomic(folder / ENCODER_FILE, content, partial_path=partial_path)
    except OSError as error:
        raise _unwritable_error(folder / ENCODER_FILE, error.strerror) from None


def write_model(prepared: PreparedRun, chunks: Sequence[GPT], *, is_resumed: bool) -> list[Path]:
    """Write a fully trained model as a native checkpoint on rank 0; return its folder in a list.

    The list is empty on other ranks. All ranks must call this function. If `is_resumed` is set, the
    run may have written the checkpoint before it was killed; an equal latest checkpoint is not
    written again.
    """
    tensors = gather_model(chunks)
    if chunks[0].mesh.rank != 0:
        return []
    source = prepared.checkpoint
    config = source.config.with_fields(dtype=FLOAT_DTYPE_NAMES[chunks[0].dtype])
    identity = identify(checkpoint_from_tensors(config, tensors))
    output = Path(prepared.config.output_config.output)
    folder, previous_folder = _next_folder(output, prepared.cards[0].name)
    if (
        is_resumed
        and previous_folder is not None
        and identify(open_checkpoint(previous_folder)).digest == identity.digest
    ):
        return [previous_folder]
    partial_path = folder.with_name(f".{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with stage_folder(folder, partial_path=partial_path) as partial_folder:
            weights = "model-00001-of-00001.safetensors"
            safetensors.torch.save_file(tensors, partial_folder / weights)
            if source.tokenizer is not None:
                _copy_tokenizer(source.tokenizer, partial_folder / TOKENIZER_FOLDER)
            files = {
                str(path.relative_to(partial_folder)): {
                    "bytes": path.stat().st_size,
                    "crc32": _crc(path),
                }
                for path in sorted(partial_folder.rglob("*"))
                if path.is_file()
            }
            (partial_folder / MANIFEST).write_bytes(
                Manifest(NATIVE, config, identity, files).to_bytes()
            )
    except (OSError, SafetensorError) as error:
        raise _unwritable_error(folder, getattr(error, "strerror", None) or error) from None
    return [folder]


def _unwritable_error(path: Path, reason: object) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written ({reason}); free disk space, and run the same command again to "
        "resume from the last state"
    )


@torch.no_grad()
def gather_model(chunks: Sequence[GPT]) -> dict[str, Tensor]:
    """Return the full model tensors by name on rank 0, and an empty dict on the other ranks.

    All ranks must call this function.
    """
    mesh, config = chunks[0].mesh, chunks[0].config
    local_parameters = {name: value for chunk in chunks for name, value in chunk.named_parameters()}
    if mesh.tp * mesh.pp * mesh.dp == 1:
        return {name: local_parameters[name].detach().clone() for name in parameter_specs(config)}
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameter_specs(config).items():
        # The first stage that has the parameter; a tied embedding is on two stages.
        first_stage = torch.tensor(
            [mesh.pp_rank if name in local_parameters else mesh.pp], device=mesh.device
        )
        dist.all_reduce(first_stage, op=dist.ReduceOp.MIN)
        stage = int(first_stage)
        if mesh.pp_rank == stage and mesh.dp_rank == 0:
            shards = _gather_shards(local_parameters[name], mesh)
            full_tensor = _join_shards(parameter, config, shards) if mesh.tp_rank == 0 else None
        else:
            full_tensor = None
        first_rank = stage * mesh.tp * mesh.dp
        if mesh.rank == 0:
            if full_tensor is None:
                dtype = FLOAT_DTYPES[parameter_dtype(name, FLOAT_DTYPE_NAMES[chunks[0].dtype])]
                full_tensor = torch.empty(parameter.shape, dtype=dtype, device=mesh.device)
                dist.recv(full_tensor, first_rank)
            tensors[name] = full_tensor.cpu()
        elif mesh.rank == first_rank:
            assert full_tensor is not None
            dist.send(full_tensor.contiguous(), 0)
    return tensors


def _complete_card(
    prepared: PreparedRun,
    data: TaskData,
    card: Card,
    metrics: Mapping[str, Any],
    method_config: MethodConfig,
) -> Card:
    """Return the card with the base model, template, method and metrics."""
    identity = identify(prepared.checkpoint)
    return replace(
        card,
        template=data.template,
        method=method_config.method,
        kind=method_config.adapter_kind,
        invocation=data.invocation,
        # A table has its own width.
        hidden_size=prepared.checkpoint.config.hidden_size if method_config.changes_linears else 0,
        base_digest=identity.digest,
        base_fingerprint=identity.fingerprint,
        metrics={**metrics, "examples": len(data.examples.examples)},
        notes=(identity.note,) if identity.note else (),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _validation_metrics(data: TaskData, validator: Validator) -> dict[str, Any]:
    task_validation = validator.tasks.get(data.task.name)
    if task_validation is None:
        return {}
    baselines = {
        baseline: dict(values) for baseline, values in task_validation.metrics_by_variant.items()
    }
    count = len(task_validation.examples.examples)
    return {"validation": {**baselines, "loss": task_validation.loss, "examples": count}}


def _golden_examples(
    prepared: PreparedRun, trainer: Trainer, data: TaskData, adapter: Adapter
) -> Any:
    """Return golden examples for the adapter's card; all ranks must call this function."""
    count = prepared.config.output_config.golden_examples
    if not count or data.validation is None:
        return ()
    inputs = data.validation.head(count).records
    return record_golden_examples(trainer.model, prepared.tokenizer, adapter, inputs)


def _gather_shards(value: Tensor, mesh: Any) -> list[Tensor]:
    if mesh.tp == 1:
        return [value.detach()]
    shards = [torch.empty_like(value) for _ in range(mesh.tp)]
    dist.all_gather(shards, value.detach().contiguous(), group=mesh.tp_group)
    return shards


def _join_shards(parameter: ParameterSpec, config: GPTConfig, shards: Sequence[Tensor]) -> Tensor:
    """Return the full tensor of a parameter from the shards of all tensor-parallel ranks."""
    full_tensor = shards[0].new_empty(parameter.shape)
    for rank, shard in enumerate(shards):
        rank_shard = shard_spec(parameter, config, rank, len(shards))
        shard_offset = 0
        for range_start, range_end in rank_shard.ranges:
            size = range_end - range_start
            full_tensor.narrow(rank_shard.dim, range_start, size).copy_(
                shard.narrow(rank_shard.dim, shard_offset, size)
            )
            shard_offset += size
    return full_tensor


def _next_folder(output: Path, name: str) -> tuple[Path, Path | None]:
    """Return the folder for a new checkpoint, and the folder of the previous one or None.

    The folders are NAME-1, NAME-2, and so on.
    """
    number = 1
    while (output / f"{name}-{number}").exists():
        number += 1
    previous_folder = output / f"{name}-{number - 1}" if number > 1 else None
    return output / f"{name}-{number}", previous_folder


def _copy_tokenizer(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.mkdir()
        shutil.copy(source, target / source.name)


def _crc(path: Path) -> str:
    return f"{zlib.crc32(path.read_bytes()):08x}"
