"""kill -9 at random moments of a conversion: nothing looks complete, and a resumed one ends alike.

Each run is a process of its own, forked where everything is imported, so that the kill falls into
the conversion and not into its start.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion import copy_engine
from checkpoints_tools.conversion.convert import convert, plan, write_native
from checkpoints_tools.layout.layout import Division
from checkpoints_tools.writers.registry import Wish
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint

pytestmark = pytest.mark.slow

KILLS, RUNS_MAX = 75, 500
MODEL = GPTConfig(
    num_layers=12,
    hidden_size=256,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=704,
    vocab_size=2003,
    max_position_embeddings=128,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    untie_embeddings_and_output_weights=True,
)
WAYS = {
    "native": Wish(shard_bytes_max=8 << 20),
    "megatron": Wish("megatron", division=Division(2, 2)),
    "megatron-dist": Wish("megatron-dist", division=Division(2)),
    "nemo": Wish("nemo", division=Division(2, 2)),
    "hf": Wish("hf"),
}


def tree(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def started(source: Path, target: Path, wish: Wish) -> int:
    """A conversion in a process of its own; the number of the process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # Notes are taken as often as can be, so that kills fall between and into them.
        copy_engine.COMMIT_SECONDS, copy_engine.PROGRESS_SECONDS = 0.0, 0.001
        convert(plan(open_checkpoint(source), target, wish), resume=True)
        os._exit(0)
    except BaseException:
        os._exit(1)


def removed(target: Path) -> None:
    if target.is_file():
        target.unlink()
    else:
        shutil.rmtree(target)


def finished(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("way", WAYS)
def test_a_run_killed_at_any_moment_never_looks_complete_and_resumes_to_the_same(
    way: str, tmp_path: Path
) -> None:
    wish, draw, end = WAYS[way], random.Random(way), ".nemo" if way == "nemo" else ""
    torch.set_num_threads(1)  # A fork takes no threads along.
    write_native(fresh(MODEL, seed=0), tmp_path / "source")
    begun = time.monotonic()
    assert finished(started(tmp_path / "source", tmp_path / f"whole{end}", wish)) == 0
    length, whole = time.monotonic() - begun, tree(tmp_path / f"whole{end}")
    digest = base_digest(open_checkpoint(tmp_path / f"whole{end}"))
    target, killed, resumed = tmp_path / f"target{end}", 0, 0
    for _ in range(RUNS_MAX):
        if killed == KILLS // len(WAYS):
            break
        pid = started(tmp_path / "source", target, wish)
        time.sleep(draw.uniform(0, length))
        os.kill(pid, signal.SIGKILL)
        code = finished(pid)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        if target.exists():
            assert tree(target) == whole
            removed(target)
            continue
        with pytest.raises(CheckpointError, match="does not exist"):
            open_checkpoint(target)
        if killed % 2:  # Otherwise what is left is killed once more.
            resumed += 1
            assert finished(started(tmp_path / "source", target, wish)) == 0
            assert tree(target) == whole and not (tmp_path / f".target{end}.partial").exists()
            assert base_digest(open_checkpoint(target)) == digest
            removed(target)
    assert killed == KILLS // len(WAYS) and resumed >= 3
    print(f"{way}: {killed} kills in runs of {length:.2f} s, {resumed} resumed between them")
