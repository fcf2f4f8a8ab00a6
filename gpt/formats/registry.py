"""Checkpoint format registry: detects a path's format and opens it with that format's reader.

Formats with the most specific file patterns are tested first. A recognized format without a reader
is refused, and the error names the format. For a path that is not a checkpoint, the error lists the
expected and the actual files. Readers do not import this module.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.checkpoint.digest import functional_config
from gpt.checkpoint.files.object_checkpoint import open_object_checkpoint
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.huggingface.reader import open_huggingface
from gpt.formats.manifest import MANIFEST, is_native, read_manifest
from gpt.formats.megatron.deepspeed import find_deepspeed, open_deepspeed
from gpt.formats.megatron.rank_files import find_iteration
from gpt.formats.megatron.reader import open_megatron
from gpt.formats.megatron.torch_dist import find_torch_dist, open_torch_dist
from gpt.formats.native import open_native
from gpt.formats.nemo.lightning import find_lightning, open_lightning
from gpt.formats.nemo.reader import find_nemo, open_nemo
from gpt.object_store.object_store import is_object_url

READABLE_FORMATS = (
    "preamble.json (native), config.json (Hugging Face), mp_rank_00 (Megatron-LM), "
    "layer_01-model_00-model_states.pt (Megatron-DeepSpeed), metadata.json "
    "(Megatron-Core, torch_dist), a .nemo file or model_config.yaml (NeMo), context and weights "
    "(NeMo 2)"
)


def open_checkpoint(
    path: str | Path, config: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open the checkpoint at a path, and check its config and the names and shapes of its tensors.

    The path may be `s3://BUCKET/PREFIX` (`gpt.checkpoint.files.object_checkpoint`). No complete
    weight is read. `config` overrides the config in the files: a GPTConfig replaces the
    whole config, and a mapping replaces single fields.
    """
    if isinstance(path, str) and is_object_url(path):
        path = open_object_checkpoint(path)
    try:
        resolved_path = Path(path).expanduser()
    except RuntimeError:
        raise CheckpointError(
            f"{path} begins with ~ and the name of a user without a home directory; give an "
            "absolute path"
        ) from None
    try:
        return _with_recorded_identity(_open_detected(resolved_path, config))
    except OSError as error:
        # A reader opens many files; `filename` is the path of the file that failed.
        raise CheckpointError(
            f"cannot read {error.filename or path}: {error.strerror or error}; give the directory "
            "of a checkpoint that exists and that this user may read"
        ) from None
    except RecursionError:
        raise CheckpointError(
            f"{path} contains values that are nested more deeply than in any model; it is broken "
            "or hostile: copy it again from the training run"
        ) from None


def _open_detected(path: Path, config: GPTConfig | Mapping[str, Any] | None) -> Checkpoint:
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
    deepspeed = find_deepspeed(path)
    if deepspeed is not None:
        return open_deepspeed(deepspeed, config)
    if find_torch_dist(path):
        return open_torch_dist(path, config)
    if find_lightning(path):
        return open_lightning(path, config)
    root_format = _detect_format(path, CHECKPOINT_ROOTS) if path.is_dir() else None
    if root_format is not None:
        raise CheckpointError(
            f"{path} is {root_format}, but has no weights in a supported format; copy the missing "
            f"files, or save the weights as one of: {READABLE_FORMATS}"
        )
    if path.is_dir() and (path / "config.json").is_file():
        return open_huggingface(path, config)
    if only_archive := _find_only_archive(path):
        checkpoint = open_nemo(only_archive, config)
        note = f"{only_archive.name} was read, because it is the only archive in {path}"
        return replace(checkpoint, notes=(note, *checkpoint.notes))
    unsupported_format = _detect_format(path, UNSUPPORTED_FORMATS)
    if unsupported_format is not None:
        raise CheckpointError(
            f"{path} is {unsupported_format}, which cannot be opened as a model; give a model in "
            f"one of these formats: {READABLE_FORMATS}; if the model exists only in another "
            "format, convert it to Hugging Face's format first"
        )
    names = sorted(child.name for child in path.iterdir())[:5] if path.is_dir() else ["a file"]
    raise CheckpointError(
        f"{path} is not a checkpoint: looked for {READABLE_FORMATS}, found "
        f"{', '.join(names) or 'nothing'}; give the directory of a checkpoint"
    )


def _with_recorded_identity(checkpoint: Checkpoint) -> Checkpoint:
    """Add the identity from a manifest that Preamble wrote beside files of another format.

    Other tools may have changed the files after Preamble wrote the manifest. Therefore a manifest
    that is unreadable, or whose config differs from the config in the files, is not used, and the
    checkpoint gets a note.
    """
    if checkpoint.identity is not None or not (checkpoint.path / MANIFEST).is_file():
        return checkpoint
    try:
        manifest = read_manifest(checkpoint.path)
    except CheckpointError as error:
        return replace(checkpoint, notes=(*checkpoint.notes, f"the manifest is not used: {error}"))
    if functional_config(manifest.config) != functional_config(checkpoint.config):
        note = f"{MANIFEST} is not used: its config differs from the checkpoint's"
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    notes = (manifest.identity.note,) if manifest.identity.note else ()
    return replace(checkpoint, identity=manifest.identity, notes=(*checkpoint.notes, *notes))


FormatPatterns = tuple[tuple[str, str], ...]  # Pairs of a path pattern and the format's name.

# Files that training frameworks write beside the weights.
CHECKPOINT_ROOTS: FormatPatterns = (
    ("context/model.yaml", "a NeMo 2.0 checkpoint"),
    ("context/io.json", "a NeMo 2.0 checkpoint"),
    ("latest_checkpointed_iteration.txt", "a Megatron checkpoint root"),
    ("latest_train_state.pt", "a Megatron-Bridge checkpoint root"),
)

UNSUPPORTED_FORMATS: FormatPatterns = (
    ("global_step*/*model_states.pt", "a DeepSpeed checkpoint"),
    ("mp_rank_*_model_states.pt", "a DeepSpeed checkpoint"),
    ("zero_pp_rank_*", "a DeepSpeed checkpoint"),
    ("*.gguf", "a directory of GGUF files"),
    ("params.json", "a checkpoint in Meta's or Mistral's format"),
    ("adapter_config.json", "an adapter"),
)

UNSUPPORTED_FILES: Mapping[str, str] = {
    ".gguf": "a GGUF file",
    ".safetensors": "a single weight file without the rest of its directory",
    ".bin": "a single weight file without the rest of its directory",
    ".pt": "a single weight file without the rest of its directory",
}


def _find_only_archive(path: Path) -> Path | None:
    archives = [file for file in path.glob("*.nemo") if file.is_file()] if path.is_dir() else []
    return archives[0] if len(archives) == 1 else None


def _detect_format(path: Path, patterns: FormatPatterns) -> str | None:
    """Return the format that a file's suffix or a directory's files indicate; None if no match."""
    if path.is_file():
        return UNSUPPORTED_FILES.get(path.suffix)
    for pattern, name in patterns:
        if any(path.glob(pattern)):
            return name
    return None
