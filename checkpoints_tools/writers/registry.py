"""Checkpoint writer registry: maps each target format to its writer and its options.

A writer's module is imported only when its format is requested. An option that the format does not
support is an error, because an ignored option would mislead the user.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.layout.layout import Layout, ParallelSplit
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import ConfigError

UNSPLIT = ParallelSplit()


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion. For an option of the writer, None selects the format's default."""

    target_format: str = "native"
    dtype: str | None = None  # None: the source's dtype.
    tokenizer: Path | None = None  # None: the source's tokenizer.
    prove: bool = False  # Whether to store a proof (reference logits) in the target.
    # Options of the writer.
    split: ParallelSplit = UNSPLIT
    vocabulary_multiple: int | None = None
    spec: str | None = None
    model: str | None = None
    family: str | None = None
    shard_bytes_max: int | None = None


def plan_target(checkpoint: Checkpoint, conversion: ConversionOptions) -> Layout:
    """Plan the target's files; `checkpoint` already has the target's dtype."""
    writer, supported_options = WRITERS[conversion.target_format]
    options_by_name = {
        "split": None if conversion.split == UNSPLIT else conversion.split,
        "vocabulary_multiple": conversion.vocabulary_multiple,
        "spec": conversion.spec,
        "model": conversion.model,
        "family": conversion.family,
        "shard_bytes_max": conversion.shard_bytes_max,
    }
    for name, value in options_by_name.items():
        if value is not None and name not in supported_options:
            raise ConfigError(
                f"--to {conversion.target_format} has no {OPTION_FLAGS[name]}; remove the flag"
            )
    options = {name: value for name, value in options_by_name.items() if value is not None}
    layout = writer(checkpoint, options)
    if layout.is_single_file and conversion.prove:
        raise ConfigError(
            f"--to {conversion.target_format} cannot store reference logits (a proof); remove "
            "--prove"
        )
    return layout


# Descriptions of the writers' options, as the end of the error "--to FORMAT has no ...".
OPTION_FLAGS = {
    "split": "parallel split (--tp, --pp, --vpp, --ep): its tensors are unsharded",
    "vocabulary_multiple": "vocabulary padding (--make-vocab-size-divisible-by)",
    "spec": "layer specs (--megatron-spec)",
    "model": "model classes (--model)",
    "family": "model families (--family)",
    "shard_bytes_max": "limit of file sizes (--shard-gb)",
}

WriterOptions = Mapping[str, Any]


def _plan_native(checkpoint: Checkpoint, options: WriterOptions) -> Layout:
    from checkpoints_tools.writers.native import plan_layout

    return plan_layout(checkpoint, **options)


def _plan_megatron(checkpoint: Checkpoint, options: WriterOptions) -> Layout:
    from checkpoints_tools.writers.megatron import plan_layout

    return plan_layout(checkpoint, **{"split": UNSPLIT, **options})


def _plan_torch_dist(checkpoint: Checkpoint, options: WriterOptions) -> Layout:
    from checkpoints_tools.writers.torch_dist import plan_layout

    return plan_layout(checkpoint, **{"split": UNSPLIT, **options})


def _plan_nemo(checkpoint: Checkpoint, options: WriterOptions) -> Layout:
    from checkpoints_tools.writers.nemo import plan_layout

    return plan_layout(checkpoint, **{"split": UNSPLIT, **options})


def _plan_huggingface(checkpoint: Checkpoint, options: WriterOptions) -> Layout:
    from checkpoints_tools.writers.huggingface import plan_layout

    return plan_layout(checkpoint, **options)


MEGATRON_OPTIONS = ("split", "vocabulary_multiple", "spec", "model")
WRITERS: Mapping[str, tuple[Callable[[Checkpoint, WriterOptions], Layout], tuple[str, ...]]] = {
    "native": (_plan_native, ("shard_bytes_max",)),
    "megatron": (_plan_megatron, MEGATRON_OPTIONS),
    "megatron-dist": (_plan_torch_dist, MEGATRON_OPTIONS),
    "nemo": (_plan_nemo, ("split", "vocabulary_multiple")),
    "hf": (_plan_huggingface, ("family", "shard_bytes_max")),
}
