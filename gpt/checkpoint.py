"""Opens any checkpoint: looks at what is there, names the format, and asks its reader.

The evidence is tested from the most to the least specific. A format that is known but not read yet
is refused by its name; what is no checkpoint at all is told what was looked for and what was found.
Readers import nothing from here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.huggingface import open_huggingface
from gpt.logical import Checkpoint
from gpt.megatron import open_megatron
from gpt.megatron_files import find_iteration
from gpt.native import MANIFEST, open_native
from gpt.torch_dist import find_torch_dist, open_torch_dist

READABLE = (
    "preamble.json (native), config.json (Hugging Face), mp_rank_00 (Megatron-LM) or metadata.json "
    "(Megatron-Core, torch_dist)"
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
        return _open(found, config)
    except OSError as error:
        # Any reader may meet it in any file; its name says where.
        raise CheckpointError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give the directory "
            "of a checkpoint that exists here, and that this user may read"
        ) from None


def _open(path: Path, config: GPTConfig | Mapping[str, Any] | None) -> Checkpoint:
    if path.name in (MANIFEST, "config.json"):
        path = path.parent
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give the directory of a checkpoint (nothing is downloaded)"
        )
    if path.is_dir() and (path / MANIFEST).is_file():
        return open_native(path, config)
    iteration = find_iteration(path)
    if iteration is not None:
        return open_megatron(iteration, config)
    distributed = find_torch_dist(path)
    if distributed is not None:
        return open_torch_dist(distributed, config)
    foreign = _foreign(path, MEGATRON)
    if foreign is None and path.is_dir() and (path / "config.json").is_file():
        return open_huggingface(path, config)
    foreign = foreign or _foreign(path, OTHERS)
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


Evidence = tuple[tuple[str, str], ...]  # A pattern of paths, and what it is a sign of.

MEGATRON: Evidence = (
    ("context/model.yaml", "a NeMo 2.0 checkpoint"),
    ("context/io.json", "a NeMo 2.0 checkpoint"),
    ("model_config.yaml", "an unpacked NeMo checkpoint"),
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
    ".nemo": "a NeMo archive",
    ".gguf": "a GGUF file",
    ".safetensors": "one file of weights without its directory",
    ".bin": "one file of weights without its directory",
    ".pt": "one file of weights without its directory",
    ".ckpt": "a Lightning checkpoint",
}


def _foreign(path: Path, evidence: Evidence) -> str | None:
    """The name of a format that has no reader here; None if there is no sign of one."""
    if path.is_file():
        return FILES.get(path.suffix)
    for pattern, name in evidence:
        if any(path.glob(pattern)):
            return name
    return None
