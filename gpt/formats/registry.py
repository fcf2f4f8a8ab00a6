"""Opens any checkpoint: looks at what is there, names the format, and asks its reader.

The evidence is tested from the most to the least specific. A format that is known but not read yet
is refused by its name; what is no checkpoint at all is told what was looked for and what was found.
Readers import nothing from here.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.checkpoint.digest import function
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.huggingface.reader import open_huggingface
from gpt.formats.manifest import MANIFEST, is_native, read_manifest
from gpt.formats.megatron.rank_files import find_iteration
from gpt.formats.megatron.reader import open_megatron
from gpt.formats.megatron.torch_dist import find_torch_dist, open_torch_dist
from gpt.formats.native import open_native
from gpt.formats.nemo.lightning import find_lightning, open_lightning
from gpt.formats.nemo.reader import find_nemo, open_nemo

READABLE = (
    "preamble.json (native), config.json (Hugging Face), mp_rank_00 (Megatron-LM), metadata.json "
    "(Megatron-Core, torch_dist), a .nemo file or model_config.yaml (NeMo), context and weights "
    "(NeMo 2)"
)


def open_checkpoint(
    path: str | Path, config: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """The checkpoint at a path, checked but not read: names, shapes, sizes, and its config.

    `config` is what the user knows better than the files: a whole GPTConfig, or some of its fields.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:  # What pathlib raises.
        raise CheckpointError(
            f"{path} begins with a user who has no home here; give the path from / on"
        ) from None
    try:
        return _recognised(_open(found, config))
    except OSError as error:
        # Any reader may meet it in any file; its name says where.
        raise CheckpointError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give the directory "
            "of a checkpoint that exists here, and that this user may read"
        ) from None
    except RecursionError:
        raise CheckpointError(
            f"{path} holds values inside each other, deeper than any model's; it is broken or "
            "hostile: copy it again from where it was trained"
        ) from None


def _open(path: Path, config: GPTConfig | Mapping[str, Any] | None) -> Checkpoint:
    if path.name in (MANIFEST, "config.json"):
        path = path.parent
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give the directory of a checkpoint (nothing is downloaded)"
        )
    if path.is_dir() and is_native(path):
        return open_native(path, config)
    if find_nemo(path):
        return open_nemo(path, config)
    iteration = find_iteration(path)
    if iteration is not None:
        return open_megatron(iteration, config)
    if find_torch_dist(path):
        return open_torch_dist(path, config)
    if find_lightning(path):
        return open_lightning(path, config)
    if path.is_dir() and (root := _foreign(path, ROOTS)) is not None:
        raise CheckpointError(
            f"{path} is {root}, but it has no weights in a form that is read; copy what is missing,"
            f" or save them so: readable are {READABLE}"
        )
    if path.is_dir() and (path / "config.json").is_file():
        return open_huggingface(path, config)
    if alone := _one_archive(path):
        checkpoint = open_nemo(alone, config)
        note = f"{alone.name} is read, the only archive in {path}"
        return replace(checkpoint, notes=(note, *checkpoint.notes))
    foreign = _foreign(path, OTHERS)
    if foreign is not None:
        raise CheckpointError(
            f"{path} is {foreign}, which this version does not read; convert it to Hugging Face's "
            f"format first: readable are directories with {READABLE}"
        )
    names = sorted(child.name for child in path.iterdir())[:5] if path.is_dir() else ["a file"]
    raise CheckpointError(
        f"{path} is not a checkpoint: looked for {READABLE}, found {', '.join(names) or 'nothing'};"
        " give the directory that holds them"
    )


def _recognised(checkpoint: Checkpoint) -> Checkpoint:
    """The same, and which model it is, where Preamble wrote that beside another format's files.

    Those files are their own format's, and may be edited; then the record is of another model.
    """
    if checkpoint.identity is not None or not (checkpoint.path / MANIFEST).is_file():
        return checkpoint
    try:
        manifest = read_manifest(checkpoint.path)
    except CheckpointError as error:
        return replace(checkpoint, notes=(*checkpoint.notes, f"not used: {error}"))
    if function(manifest.config) != function(checkpoint.config):
        note = f"the config is not the one of {MANIFEST}, which is not used"
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    notes = (manifest.identity.note,) if manifest.identity.note else ()
    return replace(checkpoint, identity=manifest.identity, notes=(*checkpoint.notes, *notes))


Evidence = tuple[tuple[str, str], ...]  # A pattern of paths, and what it is a sign of.

# What trainers leave around weights.
ROOTS: Evidence = (
    ("context/model.yaml", "a NeMo 2.0 checkpoint"),
    ("context/io.json", "a NeMo 2.0 checkpoint"),
    ("latest_checkpointed_iteration.txt", "a Megatron checkpoint root"),
    ("latest_train_state.pt", "a Megatron-Bridge checkpoint root"),
)

OTHERS: Evidence = (
    ("global_step*/*model_states.pt", "a DeepSpeed checkpoint"),
    ("layer_*-model_*-model_states.pt", "a DeepSpeed checkpoint"),
    ("mp_rank_*_model_states.pt", "a DeepSpeed checkpoint"),
    ("zero_pp_rank_*", "a DeepSpeed checkpoint"),
    ("*.gguf", "a directory of GGUF files"),
    ("params.json", "a checkpoint in Meta's or Mistral's own form"),
    ("adapter_config.json", "an adapter, not a model"),
)

FILES: Mapping[str, str] = {
    ".gguf": "a GGUF file",
    ".safetensors": "one file of weights without its directory",
    ".bin": "one file of weights without its directory",
    ".pt": "one file of weights without its directory",
}


def _one_archive(path: Path) -> Path | None:
    archives = [file for file in path.glob("*.nemo") if file.is_file()] if path.is_dir() else []
    return archives[0] if len(archives) == 1 else None


def _foreign(path: Path, evidence: Evidence) -> str | None:
    """The name of a format that has no reader here; None if there is no sign of one."""
    if path.is_file():
        return FILES.get(path.suffix)
    for pattern, name in evidence:
        if any(path.glob(pattern)):
            return name
    return None
