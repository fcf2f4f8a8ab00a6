"""What a run leaves: adapters, with cards that say what they are worth; an encoder; or a model.

An adapter is a task's rows of the run's table, rounded to fp32, whatever made them. A run that went
on after a kill does not write again what it had written.
"""

import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    check_folder,
    latest_adapter,
    publish_adapter,
)
from gpt.adapters.golden_examples import make_golden
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import in_memory
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_NAMES, FLOATS
from gpt.errors import ConfigError
from gpt.formats.manifest import MANIFEST, NATIVE, Manifest
from gpt.formats.native import TOKENIZER
from gpt.formats.registry import open_checkpoint
from gpt.model.gpt_model import GPT
from gpt.parallel.sharding import Parameter, kept_dtype, parameters, part
from ptuning.data.dataset import TaskData
from ptuning.prompt.prompt_encoder import FILE
from ptuning.run.preparation import Prepared
from ptuning.run.validation import Measuring
from ptuning.training.trainer import Trainer


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    paths: tuple[Path, ...]  # Of what it wrote: adapters, or a checkpoint.
    cards: tuple[Card, ...]  # Of the adapters.
    folder: Path  # Its logs and report.
    state: str  # "finished", "stopped early" or "interrupted".
    step: int
    first_loss: float
    last_loss: float  # The mean of the last steps.
    best_step: int | None


def write_adapters(
    prepared: Prepared,
    trainer: Trainer,
    table: Tensor,
    metrics: Mapping[str, Any],
    measuring: Measuring,
    *,
    again: bool,
) -> list[tuple[Path, Card]]:
    """Every task's; rank 0 writes, all call. `again`: the run may have written them before."""
    found = []
    for data, card in zip(prepared.tasks, prepared.cards, strict=True):
        rows = table[data.first_row : data.first_row + data.template.rows]
        card = _card(prepared, data, card, {**metrics, **_worth(data, measuring)})
        adapter = build_adapter(card, rows.cpu())
        golden = _golden(prepared, trainer, data, adapter)
        if golden:
            adapter = build_adapter(replace(adapter.card, golden=golden), rows.cpu())
        if trainer.mesh.rank == 0:
            folder = Path(prepared.config.output)
            written = latest_adapter(folder, card.name) if again else None
            if written is not None and written[1].digest == adapter.digest:
                path = written[0]
            else:
                check_folder(folder)  # It was there when the run began.
                path = publish_adapter(adapter, folder)
            found.append((path, adapter.card))
    return found


def write_encoder(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """For a later run that starts from it; see `encoder_from`."""
    half = folder / f".{FILE}.part"
    try:
        half.write_bytes(safetensors.torch.save(dict(tensors)))
        os.replace(half, folder / FILE)
    except OSError as error:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        raise _no_room(folder / FILE, error.strerror) from None


def write_model(prepared: Prepared, chunks: Sequence[GPT], *, again: bool) -> list[Path]:
    """A native checkpoint of a model that was learned whole; rank 0 gathers and writes it.

    `again`: the run may have written it before.
    """
    tensors = gathered(chunks)
    if chunks[0].mesh.rank != 0:
        return []
    source = prepared.checkpoint
    config = source.config.with_fields(dtype=FLOAT_NAMES[chunks[0].dtype])
    identity = identify(in_memory(config, tensors))
    folder, last = _next_folder(Path(prepared.config.output), prepared.cards[0].name)
    if again and last is not None and identify(open_checkpoint(last)).digest == identity.digest:
        return [last]
    half = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir(parents=True)
        weights = "model-00001-of-00001.safetensors"
        safetensors.torch.save_file(tensors, half / weights)
        if source.tokenizer is not None:
            _copy_tokenizer(source.tokenizer, half / TOKENIZER)
        files = {
            str(path.relative_to(half)): {"bytes": path.stat().st_size, "crc32": _crc(path)}
            for path in sorted(half.rglob("*"))
            if path.is_file()
        }
        (half / MANIFEST).write_bytes(Manifest(NATIVE, config, identity, files).to_bytes())
        os.rename(half, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise _no_room(folder, getattr(error, "strerror", None) or error) from None
    return [folder]


def _no_room(path: Path, why: object) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written ({why}); make room, and give the same command: it goes on from "
        "the last state"
    )


@torch.no_grad()
def gathered(chunks: Sequence[GPT]) -> dict[str, Tensor]:
    """The whole model on rank 0, tensor by tensor; nothing elsewhere. All ranks call together."""
    mesh, config = chunks[0].mesh, chunks[0].config
    own = {name: value for chunk in chunks for name, value in chunk.named_parameters()}
    if mesh.tp * mesh.pp * mesh.dp == 1:
        return {name: own[name].detach().clone() for name in parameters(config)}
    found: dict[str, Tensor] = {}
    for name, parameter in parameters(config).items():
        owner = torch.tensor([mesh.pp_rank if name in own else mesh.pp], device=mesh.device)
        dist.all_reduce(owner, op=dist.ReduceOp.MIN)
        stage = int(owner)
        if mesh.pp_rank == stage and mesh.dp_rank == 0:
            pieces = _pieces(own[name], mesh)
            whole = _joined(parameter, config, pieces) if mesh.tp_rank == 0 else None
        else:
            whole = None
        first = stage * mesh.tp * mesh.dp
        if mesh.rank == 0:
            if whole is None:
                dtype = FLOATS[kept_dtype(name, FLOAT_NAMES[chunks[0].dtype])]
                whole = torch.empty(parameter.shape, dtype=dtype, device=mesh.device)
                dist.recv(whole, first)
            found[name] = whole.cpu()
        elif mesh.rank == first:
            assert whole is not None
            dist.send(whole.contiguous(), 0)
    return found


def _card(prepared: Prepared, data: TaskData, card: Card, metrics: Mapping[str, Any]) -> Card:
    identity = identify(prepared.checkpoint)
    return replace(
        card,
        template=data.template,
        method=prepared.config.method,
        kind=prepared.config.kind,
        base_digest=identity.digest,
        base_fingerprint=identity.fingerprint,
        metrics={**metrics, "examples": len(data.examples.examples)},
        notes=(identity.note,) if identity.note else (),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _worth(data: TaskData, measuring: Measuring) -> dict[str, Any]:
    measured = measuring.tasks.get(data.task.name)
    if measured is None:
        return {}
    shares = {what: dict(values) for what, values in measured.baselines.items()}
    count = len(measured.examples.examples)
    return {"validation": {**shares, "loss": measured.loss, "examples": count}}


def _golden(prepared: Prepared, trainer: Trainer, data: TaskData, adapter: Adapter) -> Any:
    count = prepared.config.golden_examples
    if not count or data.validation is None:
        return ()
    inputs = data.validation.first(count).records
    return make_golden(trainer.model, prepared.tokenizer, adapter, inputs)


def _pieces(value: Tensor, mesh: Any) -> list[Tensor]:
    if mesh.tp == 1:
        return [value.detach()]
    pieces = [torch.empty_like(value) for _ in range(mesh.tp)]
    dist.all_gather(pieces, value.detach().contiguous(), group=mesh.tp_group)
    return pieces


def _joined(parameter: Parameter, config: GPTConfig, pieces: Sequence[Tensor]) -> Tensor:
    whole = pieces[0].new_empty(parameter.shape)
    for rank, piece in enumerate(pieces):
        held, start = part(parameter, config, rank, len(pieces)), 0
        for first, last in held.ranges:
            size = last - first
            whole.narrow(held.dim, first, size).copy_(piece.narrow(held.dim, start, size))
            start += size
    return whole


def _next_folder(output: Path, name: str) -> tuple[Path, Path | None]:
    """One that is free, and the one before it."""
    number = 1
    while (output / f"{name}-{number}").exists():
        number += 1
    return output / f"{name}-{number}", output / f"{name}-{number - 1}" if number > 1 else None


def _copy_tokenizer(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.mkdir()
        shutil.copy(source, target / source.name)


def _crc(path: Path) -> str:
    return f"{zlib.crc32(path.read_bytes()):08x}"
