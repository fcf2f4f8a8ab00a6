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

READABLE = "preamble.json (native), config.json (Hugging Face) or mp_rank_00 (Megatron-LM)"


def open_checkpoint(
    path: str | Path, config: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """The checkpoint at a path, checked but not read: names, shapes, sizes, and its config.

    `config` is what the user knows better than the files: a whole GPTConfig, or some of its fields.
    """
    path = Path(path).expanduser()
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
    ("metadata.json", "a Megatron-Core distributed checkpoint (torch_dist or zarr)"),
    (".metadata", "an unfinished torch_dist save, or a torch DCP or FSDP checkpoint"),
    ("common.pt", "a torch_dist save that did not finish"),
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
