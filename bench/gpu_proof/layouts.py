"""Layouts of ranks (TP, PP, TP x PP) in a proof of a node, and engines over their processes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.offline_engine import engine_over
from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.logical_tensor import Checkpoint
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.ranks.supervisor import LocalSupervisor


@dataclass(frozen=True)
class Layout:
    """The numbers of tensor ranks and of pipeline stages."""

    tp: int
    pp: int

    def __str__(self) -> str:
        names = [f"TP {self.tp}"] * (self.tp > 1) + [f"PP {self.pp}"] * (self.pp > 1)
        return " x ".join(names) or "one rank"


SINGLE_RANK = Layout(1, 1)


def layouts(ranks: int) -> list[Layout]:
    """Return the layouts that use all ranks; TP x PP has two stages, and needs four ranks."""
    both = [Layout(ranks // 2, 2)] if ranks >= 4 else []
    return [Layout(ranks, 1), Layout(1, ranks), *both]


@contextmanager
def saved_model(checkpoint: Checkpoint) -> Iterator[Path]:
    """Write the checkpoint to a temporary folder, from which each rank reads its shard."""
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
        model = Path(folder) / "model"
        write_native(checkpoint, model)
        yield model


@contextmanager
def open_layout(
    layout: Layout, vocab_size: int, config: ServerConfig
) -> Iterator[tuple[Engine, LocalSupervisor]]:
    """Open an engine whose ranks are processes, as `preamble serve` starts them.

    `config.model` must be a folder, because the rank processes read it.
    """
    config = config.with_fields(tp=layout.tp, pp=layout.pp)
    supervisor = LocalSupervisor(config)
    with engine_over(supervisor, vocab_size, config) as engine:
        yield engine, supervisor
