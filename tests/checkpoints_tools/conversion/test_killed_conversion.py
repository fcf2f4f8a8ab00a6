"""kill -9 at random moments of a conversion: no target looks complete; resumed runs are equal.

Each run is its own process, forked after all imports, so that the kill happens during the
conversion and not during start-up.
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
from checkpoints_tools.layout.layout import ParallelSplit
from checkpoints_tools.writers.registry import ConversionOptions
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from tests.support.suites import by_suite

RUNS_MAX = 500
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
CASES = {
    "native": ConversionOptions(shard_bytes_max=8 << 20),
    "megatron": ConversionOptions("megatron", split=ParallelSplit(2, 2)),
    "megatron-dist": ConversionOptions("megatron-dist", split=ParallelSplit(2)),
    "nemo": ConversionOptions("nemo", split=ParallelSplit(2, 2)),
    "hf": ConversionOptions("hf"),
}


def tree(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def start_conversion(source: Path, target: Path, options: ConversionOptions) -> int:
    """Start a conversion in its own process; returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # The journal is written often, so that kills fall between and into its lines.
        copy_engine.COMMIT_SECONDS = 0.0
        copy_engine.PROGRESS_SECONDS = 0.001
        convert(plan(open_checkpoint(source), target, options), resume=True)
        os._exit(0)
    except BaseException:
        os._exit(1)


def remove(target: Path) -> None:
    if target.is_file():
        target.unlink()
    else:
        shutil.rmtree(target)


def wait_for_exit(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("kills", by_suite(6, 15))
@pytest.mark.parametrize("case", CASES)
def test_killed_run_never_looks_complete_and_resumes_to_the_same_files(
    case: str, kills: int, tmp_path: Path
) -> None:
    options = CASES[case]
    draw = random.Random(case)
    end = ".nemo" if case == "nemo" else ""
    torch.set_num_threads(1)  # A fork does not copy threads.
    write_native(random_init_checkpoint(MODEL, seed=0), tmp_path / "source")
    start = time.monotonic()
    assert (
        wait_for_exit(start_conversion(tmp_path / "source", tmp_path / f"whole{end}", options)) == 0
    )
    length = time.monotonic() - start
    expected_tree = tree(tmp_path / f"whole{end}")
    digest = base_digest(open_checkpoint(tmp_path / f"whole{end}"))
    target = tmp_path / f"target{end}"
    killed = 0
    resumed = 0
    for _ in range(RUNS_MAX):
        if killed == kills:
            break
        pid = start_conversion(tmp_path / "source", target, options)
        time.sleep(draw.uniform(0, length))
        os.kill(pid, signal.SIGKILL)
        code = wait_for_exit(pid)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        if target.exists():
            assert tree(target) == expected_tree
            remove(target)
            continue
        with pytest.raises(CheckpointError, match="does not exist"):
            open_checkpoint(target)
        if killed % 2:  # Otherwise the resumed run is killed once more.
            resumed += 1
            assert wait_for_exit(start_conversion(tmp_path / "source", target, options)) == 0
            assert (
                tree(target) == expected_tree and not (tmp_path / f".target{end}.partial").exists()
            )
            assert base_digest(open_checkpoint(target)) == digest
            remove(target)
    assert killed == kills and resumed >= kills // 5
    print(f"{case}: {killed} kills in runs of {length:.2f} s, {resumed} resumed between them")
