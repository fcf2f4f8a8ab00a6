"""Broken checkpoints: every fault ends with one sentence, or is found by a full scan.

The faults are tables of their own, with the change and the words of the error message. Valid
checkpoints are written once, and copied for each fault.
"""

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import preamble
from gpt.formats.native import open_native
from tests.support.broken import checkpoints
from tests.support.broken.checkpoints import (
    EMBEDDING,
    FIRST,
    FIRST_FILE,
    GOOD,
    HEAD,
    ITERATION,
    LAST,
    LAST_FILE,
    RANK_FILE,
    Kind,
    flipped,
    kind,
    many,
    saved,
    swapped,
    tensor,
)
from tests.support.broken.megatron import FC2, FC2_BIAS, IN_RANK_FILES
from tests.support.broken.nemo import NEMO
from tests.support.broken.others import IN_OTHER_FILES
from tests.support.privileges import plain_user
from tests.support.process_memory import PeakMemory, anonymous_bytes

STRUCTURAL = {**IN_RANK_FILES, **IN_OTHER_FILES, **NEMO}

# Faults inside a chunk show when it is first read: after the plan is printed, but before anything
# is written.
AFTER_PLAN = {
    "a chunk of no bytes",
    "a chunk at the offset of another",
    "another dtype than the chunk's",
}
# Processor time, more than ten times that of the slowest case on a quiet machine. Valid files may
# take time proportional to their size.
REFUSAL_SECONDS = 3.0
SENTENCE_MAX = 1000

CheckpointFactory = Callable[[str], Path]
CapturedOutput = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def valid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """Returns the root of a valid checkpoint of a format."""
    checkpoints: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in checkpoints:
            checkpoints[name] = tmp_path_factory.mktemp(name) / "source"
            GOOD[name](checkpoints[name])
        return checkpoints[name]

    return get


@pytest.fixture
def copy(valid_checkpoint: CheckpointFactory, tmp_path: Path) -> CheckpointFactory:
    """Returns a copy of a valid checkpoint for the test, with space for a target beside it."""

    def get(name: str) -> Path:
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "keep").touch()
        shutil.copytree(valid_checkpoint(name), tmp_path / "source")
        return tmp_path / "source"

    return get


@dataclass(frozen=True)
class Completed:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: CapturedOutput) -> Callable[..., Completed]:
    def call(*words: object) -> Completed:
        capsys.readouterr()
        code = preamble.main(list(map(str, words)))
        return Completed(code, *capsys.readouterr())

    return call


Run = Callable[..., Completed]


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """All files, links and pipes too."""
    stats_by_path = {str(path.relative_to(root)): path.lstat() for path in root.rglob("*")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in stats_by_path.items()}


def sentence(ended: Completed, command: str, *, after_plan: bool = False) -> str:
    """The one line of error, without the command."""
    assert ended.code == 1, ended
    assert "Traceback" not in ended.err
    lines = ended.err.splitlines()
    assert after_plan or len(lines) == 1, ended.err
    assert lines[-1].startswith(f"preamble {command}: "), ended.err
    assert len(lines[-1]) < SENTENCE_MAX and lines[-1].isprintable()
    return lines[-1].removeprefix(f"preamble {command}: ")


@pytest.mark.parametrize("name", STRUCTURAL)
def test_structural_fault_is_refused_before_anything_is_written(
    name: str, copy: CheckpointFactory, run: Run, tmp_path: Path
) -> None:
    fault = STRUCTURAL[name]
    source = copy(fault.good)
    fault.plant(source)
    tree_before = tree(tmp_path)
    after_plan = name in AFTER_PLAN
    start = time.process_time()
    converted = run("convert", source, tmp_path / "there" / "target", "--to", "native")
    seconds = time.process_time() - start
    message = sentence(converted, "convert", after_plan=after_plan)
    for word in fault.words:
        assert word in message
    assert tree(tmp_path) == tree_before
    assert seconds < REFUSAL_SECONDS
    inspected = run("inspect", source)
    if after_plan:
        assert inspected.code == 1 and f"fault: {message}\n" in inspected.out
    else:
        # The recursion depth of an error may vary.
        assert plain(sentence(inspected, "inspect")) == plain(message)


def plain(text: str) -> str:
    return re.sub(r"\(.*\)", "()", text)


def test_fault_tables_are_large() -> None:
    assert len(STRUCTURAL) + len(CONTENT) >= 30
    assert set(STRUCTURAL) >= AFTER_PLAN
    assert {fault.good for fault in STRUCTURAL.values()} == set(GOOD)


def test_unreadable_files_are_named(copy: CheckpointFactory, run: Run, tmp_path: Path) -> None:
    file = copy("megatron") / ITERATION / LAST_FILE
    file.chmod(0)
    tree_before = tree(tmp_path)
    with plain_user():
        completed = run("convert", tmp_path / "source", tmp_path / "t", "--to", "hf")
    message = sentence(completed, "convert")
    assert (
        LAST_FILE in message
        and "Permission denied; give this user the permission to read it" in message
    )
    assert tree(tmp_path) == tree_before


VAST = [name for name in STRUCTURAL if re.search(r"vast|terabyte|million|endless|bomb", name)]


def test_huge_claimed_sizes_allocate_no_memory(
    copy: CheckpointFactory, run: Run, tmp_path: Path
) -> None:
    assert len(VAST) > 10
    for name in VAST:
        source = copy(STRUCTURAL[name].good)
        STRUCTURAL[name].plant(source)
        memory_before = anonymous_bytes()
        with PeakMemory() as peak:
            run("inspect", source)
        assert peak.bytes - memory_before < 64 << 20, name
        shutil.rmtree(source)
        shutil.rmtree(tmp_path / "there")


def tensor_of(key: str) -> Callable[[Path], torch.Tensor]:
    return lambda root: open_native(root).tensors[key].slices[0].source.tensor()


def other_router(record: dict[str, Any]) -> None:
    record["model"]["decoder.layers.0.mlp.router.weight"][1, 1] += 1


def remove_owner(root: Path) -> None:
    record = {"algorithm": "sha256", "files": {"__0_0.distcp": "0" * 64}}
    (root / ITERATION / "integrity.json").write_text(json.dumps(record))


def set_nan(value: torch.Tensor) -> None:
    value[3, 4] = torch.nan


NORM = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
CONTENT: dict[str, Kind] = {
    "tensor ranks swapped": kind(
        "megatron",
        many(swapped(FIRST, "mp_rank_01_000"), swapped("mp_rank_00_001", LAST)),
        FIRST_FILE,
        "swapped",
    ),
    "old tensor ranks swapped": kind(
        "legacy", swapped("mp_rank_00", "mp_rank_01"), f"mp_rank_00/{RANK_FILE}", "swapped"
    ),
    "a norm that differs on a tensor rank": kind(
        "megatron", tensor(LAST, NORM, lambda t: t[7].add_(0.25) and None), LAST_FILE, NORM
    ),
    "a bias that differs on a tensor rank": kind(
        "megatron", tensor(LAST, FC2_BIAS, lambda t: t[7].add_(1) and None), LAST_FILE, FC2_BIAS
    ),
    "a tied copy that differs in one value": kind(
        "megatron", tensor(LAST, HEAD, lambda t: t[9, 2].add_(1) and None), LAST_FILE, EMBEDDING
    ),
    "a router that differs on an expert rank": kind(
        "experts",
        checkpoints.ranks("mp_rank_00_001", other_router),
        "mp_rank_00_001",
        "router.weight",
    ),
    "a value that is no number": kind(
        "megatron", tensor(LAST, FC2, set_nan), LAST_FILE, "1 NaN", "linear_fc2.weight"
    ),
    "a value that is no number in an expert": kind(
        "experts",
        tensor(
            "mp_rank_01_001",
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
            set_nan,
        ),
        "mp_rank_01_001",
        "1 NaN",
        "local_experts.2.linear_fc2.weight",
    ),
    "a value that is no number in a pickle": kind(
        "bin",
        saved("pytorch_model.bin", lambda r: set_nan(r["lm_head.weight"])),
        "pytorch_model.bin: lm_head.weight",
        "1 NaN",
    ),
    "a matrix of zeros": kind(
        "bin",
        saved("pytorch_model.bin", lambda r: r["lm_head.weight"].zero_()),
        "output_layer.weight",
        "zero",
    ),
    "a bit of a rank file": kind(
        "megatron",
        flipped(LAST_FILE, lambda root: rank(root)[FC2]),
        LAST_FILE,
        "damaged",
    ),
    "a file that integrity.json knows otherwise": kind(
        "torch_dist", remove_owner, "__0_0.distcp", "integrity.json"
    ),
    "a bit of a chunk": kind(
        "torch_dist",
        flipped("*.distcp", lambda root: saved_shard(root)),
        ".distcp at byte",
        "damaged",
    ),
}


def rank(root: Path) -> dict[str, torch.Tensor]:
    record = torch.load(checkpoints.only_match(root, LAST_FILE), weights_only=False)
    model: dict[str, torch.Tensor] = record["model"]
    return model


def saved_shard(root: Path) -> torch.Tensor:
    """A shard of a distributed tensor as one rank saved it."""
    from gpt.formats.megatron.torch_dist import open_torch_dist

    return open_torch_dist(root).read("decoder.layers.1.self_attention.linear_proj.weight")[:1, :24]


@pytest.mark.parametrize("name", CONTENT)
def test_value_faults_are_found_by_a_full_scan(
    name: str, copy: CheckpointFactory, run: Run, tmp_path: Path
) -> None:
    fault = CONTENT[name]
    source = copy(fault.good)
    assert run("inspect", "--deep", source).code == 0
    fault.plant(source)
    converted = run("convert", source, tmp_path / "there" / "target", "--to", "native")
    assert converted.code == 0, converted.err
    assert ("warning: " in converted.err) is ("no number" in name)
    assert run("inspect", source).code == 0
    deep = run("inspect", "--deep", source)
    assert deep.code == 1 and deep.err == ""
    faults = [line for line in deep.out.splitlines() if line.startswith("fault: ")]
    assert any(all(word in line for word in fault.words) for line in faults), faults


def test_non_finite_weights_can_be_refused(
    copy: CheckpointFactory, run: Run, tmp_path: Path
) -> None:
    CONTENT["a value that is no number"].plant(copy("megatron"))
    arguments = ("convert", tmp_path / "source", tmp_path / "there" / "target", "--to", "megatron")
    files_before = set(tree(tmp_path))
    message = sentence(run(*arguments, "--refuse-nan"), "convert", after_plan=True)
    assert "linear_fc2.weight holds values that are not finite" in message
    assert set(tree(tmp_path)) == files_before
    assert run(*arguments).code == 0


@pytest.mark.parametrize("location", ["sampled", "elsewhere"])
def test_changed_bytes_of_a_native_checkpoint_are_not_copied(
    location: str, copy: CheckpointFactory, run: Run, tmp_path: Path
) -> None:
    source = copy("native")
    rows = slice(0, 1) if location == "sampled" else slice(9, 10)
    flipped("*.safetensors", lambda root: tensor_of(FC2)(root)[rows])(source)
    files_before = set(tree(tmp_path))
    converted = run("convert", source, tmp_path / "there" / "target", "--to", "hf")
    assert "manifest" in sentence(converted, "convert", after_plan=True)
    assert set(tree(tmp_path)) == files_before
    deep = run("inspect", "--deep", source)
    assert deep.code == 1 and "the file was changed after it was written" in deep.out
    assert run("verify", source).code == 1
