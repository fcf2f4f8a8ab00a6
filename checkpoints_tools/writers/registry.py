"""The formats that can be written, and what a user may wish of each.

A writer is imported only when it is asked for. Wishes that a format does not know are refused, so
that nobody believes them to be obeyed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.layout.layout import Division, Layout
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import ConfigError

WHOLE = Division()


@dataclass(frozen=True)
class Wish:
    """A target as its user wants it; None is the format's own default."""

    to: str = "native"
    dtype: str | None = None
    tokenizer: Path | None = None
    prove: bool = False
    division: Division = WHOLE
    vocabulary_multiple: int | None = None
    spec: str | None = None
    family: str | None = None
    shard_bytes_max: int | None = None


def lay_out(checkpoint: Checkpoint, wish: Wish) -> Layout:
    """The target's files; `checkpoint` is in the dtype that is to be stored."""
    writer, knows = WRITERS[wish.to]
    given = {
        "division": None if wish.division == WHOLE else wish.division,
        "vocabulary_multiple": wish.vocabulary_multiple,
        "spec": wish.spec,
        "family": wish.family,
        "shard_bytes_max": wish.shard_bytes_max,
    }
    for name, value in given.items():
        if value is not None and name not in knows:
            raise ConfigError(f"--to {wish.to} has no {FLAGS[name]}; leave it out")
    options = {name: value for name, value in given.items() if value is not None}
    layout = writer(checkpoint, options)
    if layout.alone and wish.prove:
        raise ConfigError(f"--to {wish.to} has no place for a proof (--prove); leave it out")
    return layout


FLAGS = {
    "division": "split (--tp, --pp, --vpp, --ep): its tensors are whole",
    "vocabulary_multiple": "padding of the vocabulary (--make-vocab-size-divisible-by)",
    "spec": "specs (--megatron-spec)",
    "family": "families (--family)",
    "shard_bytes_max": "shards (--shard-gb)",
}

Options = Mapping[str, Any]


def _native(checkpoint: Checkpoint, options: Options) -> Layout:
    from checkpoints_tools.writers.native import layout

    return layout(checkpoint, **options)


def _megatron(checkpoint: Checkpoint, options: Options) -> Layout:
    from checkpoints_tools.writers.megatron import layout

    return layout(checkpoint, **{"division": WHOLE, **options})


def _torch_dist(checkpoint: Checkpoint, options: Options) -> Layout:
    from checkpoints_tools.writers.torch_dist import layout

    return layout(checkpoint, **{"division": WHOLE, **options})


def _nemo(checkpoint: Checkpoint, options: Options) -> Layout:
    from checkpoints_tools.writers.nemo import layout

    return layout(checkpoint, **{"division": WHOLE, **options})


def _huggingface(checkpoint: Checkpoint, options: Options) -> Layout:
    from checkpoints_tools.writers.huggingface import layout

    return layout(checkpoint, **options)


MEGATRON_KNOWS = ("division", "vocabulary_multiple", "spec")
WRITERS: Mapping[str, tuple[Callable[[Checkpoint, Options], Layout], tuple[str, ...]]] = {
    "native": (_native, ("shard_bytes_max",)),
    "megatron": (_megatron, MEGATRON_KNOWS),
    "megatron-dist": (_torch_dist, MEGATRON_KNOWS),
    "nemo": (_nemo, ("division", "vocabulary_multiple")),
    "hf": (_huggingface, ("family", "shard_bytes_max")),
}
