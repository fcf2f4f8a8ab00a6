"""Every kind of broken checkpoint ends with one sentence, or is found by a deep look.

The kinds stand in tables of their own, with what breaks them and the words that their sentence must
have. Good checkpoints are made once, and copied for each kind.
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
from tests.support.process_memory import Peak, anonymous_bytes

STRUCTURAL = {**IN_RANK_FILES, **IN_OTHER_FILES, **NEMO}

# What is wrong inside a chunk shows when it is first looked at: after the plan is printed, but
# before anything is written.
LATE = {
    "a chunk of no bytes",
    "a chunk in another's place",
    "another dtype than the chunk's",
}
REFUSAL_SECONDS = 1.0  # Of processor time; what is not broken may take as long as it is large.
SENTENCE_MAX = 1000

Good = Callable[[str], Path]
Told = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """A whole checkpoint of a format, as its root."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "source"
            GOOD[name](made[name])
        return made[name]

    return get


@pytest.fixture
def copy(good: Good, tmp_path: Path) -> Good:
    """The same as a copy of one's own, with a place for a target beside it."""

    def get(name: str) -> Path:
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "keep").touch()
        shutil.copytree(good(name), tmp_path / "source")
        return tmp_path / "source"

    return get


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: Told) -> Callable[..., Ended]:
    def call(*words: object) -> Ended:
        capsys.readouterr()
        code = preamble.main(list(map(str, words)))
        return Ended(code, *capsys.readouterr())

    return call


Run = Callable[..., Ended]


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """All that is there, links and pipes too."""
    found = {str(path.relative_to(root)): path.lstat() for path in root.rglob("*")}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found.items()}


def sentence(ended: Ended, command: str, *, late: bool = False) -> str:
    """The one line of error, without the command."""
    assert ended.code == 1, ended
    assert "Traceback" not in ended.err
    lines = ended.err.splitlines()
    assert late or len(lines) == 1, ended.err
    assert lines[-1].startswith(f"preamble {command}: "), ended.err
    assert len(lines[-1]) < SENTENCE_MAX and lines[-1].isprintable()
    return lines[-1].removeprefix(f"preamble {command}: ")


@pytest.mark.parametrize("name", STRUCTURAL)
def test_a_structural_fault_is_one_sentence_before_anything_is_written(
    name: str, copy: Good, run: Run, tmp_path: Path
) -> None:
    found = STRUCTURAL[name]
    source = copy(found.good)
    found.plant(source)
    before, late = tree(tmp_path), name in LATE
    began = time.process_time()
    converted = run("convert", source, tmp_path / "there" / "target", "--to", "native")
    seconds = time.process_time() - began
    told = sentence(converted, "convert", late=late)
    for word in found.words:
        assert word in told
    assert tree(tmp_path) == before
    assert seconds < REFUSAL_SECONDS
    inspected = run("inspect", source)
    if late:
        assert inspected.code == 1 and f"fault: {told}\n" in inspected.out
    else:
        # A stack's depth at an error is no part of what is said.
        assert plain(sentence(inspected, "inspect")) == plain(told)


def plain(text: str) -> str:
    return re.sub(r"\(.*\)", "()", text)


def test_there_are_many_kinds() -> None:
    assert len(STRUCTURAL) + len(CONTENT) >= 30
    assert set(STRUCTURAL) >= LATE
    assert {found.good for found in STRUCTURAL.values()} == set(GOOD)


def test_a_file_that_may_not_be_read_is_named(copy: Good, run: Run, tmp_path: Path) -> None:
    file = copy("megatron") / ITERATION / LAST_FILE
    file.chmod(0)
    before = tree(tmp_path)
    with plain_user():
        ended = run("convert", tmp_path / "source", tmp_path / "t", "--to", "hf")
    told = sentence(ended, "convert")
    assert LAST_FILE in told and "Permission denied; let this user read it" in told
    assert tree(tmp_path) == before


VAST = [name for name in STRUCTURAL if re.search(r"vast|terabyte|million|endless|bomb", name)]


def test_what_claims_to_be_vast_takes_no_memory(copy: Good, run: Run, tmp_path: Path) -> None:
    assert len(VAST) > 10
    for name in VAST:
        source = copy(STRUCTURAL[name].good)
        STRUCTURAL[name].plant(source)
        before = anonymous_bytes()
        with Peak() as peak:
            run("inspect", source)
        assert peak.bytes - before < 64 << 20, name
        shutil.rmtree(source)
        shutil.rmtree(tmp_path / "there")


def value_of(key: str) -> Callable[[Path], torch.Tensor]:
    return lambda root: open_native(root).tensors[key].pieces[0].source.tensor()


def other_router(record: dict[str, Any]) -> None:
    record["model"]["decoder.layers.0.mlp.router.weight"][1, 1] += 1


def disowned(root: Path) -> None:
    record = {"algorithm": "sha256", "files": {"__0_0.distcp": "0" * 64}}
    (root / ITERATION / "integrity.json").write_text(json.dumps(record))


def poison(value: torch.Tensor) -> None:
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
        "megatron", tensor(LAST, FC2, poison), LAST_FILE, "1 NaN", "linear_fc2.weight"
    ),
    "a value that is no number in an expert": kind(
        "experts",
        tensor("mp_rank_01_001", "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
               poison),
        "mp_rank_01_001",
        "1 NaN",
        "local_experts.2.linear_fc2.weight",
    ),
    "a value that is no number in a pickle": kind(
        "bin",
        saved("pytorch_model.bin", lambda r: poison(r["lm_head.weight"])),
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
        "torch_dist", disowned, "__0_0.distcp", "integrity.json"
    ),
    "a bit of a chunk": kind(
        "torch_dist",
        flipped("*.distcp", lambda root: whole_of(root)),
        ".distcp at byte",
        "damaged",
    ),
}  # fmt: skip


def rank(root: Path) -> dict[str, torch.Tensor]:
    record = torch.load(checkpoints.one(root, LAST_FILE), weights_only=False)
    model: dict[str, torch.Tensor] = record["model"]
    return model


def whole_of(root: Path) -> torch.Tensor:
    """A part of a distributed tensor as one rank saved it."""
    from gpt.formats.megatron.torch_dist import open_torch_dist

    return open_torch_dist(root).read("decoder.layers.1.self_attention.linear_proj.weight")[:1, :24]


@pytest.mark.parametrize("name", CONTENT)
def test_what_only_the_numbers_tell_is_found_by_a_deep_look(
    name: str, copy: Good, run: Run, tmp_path: Path
) -> None:
    found = CONTENT[name]
    source = copy(found.good)
    assert run("inspect", "--deep", source).code == 0
    found.plant(source)
    converted = run("convert", source, tmp_path / "there" / "target", "--to", "native")
    assert converted.code == 0, converted.err
    assert ("warning: " in converted.err) is ("no number" in name)
    assert run("inspect", source).code == 0
    deep = run("inspect", "--deep", source)
    assert deep.code == 1 and deep.err == ""
    faults = [line for line in deep.out.splitlines() if line.startswith("fault: ")]
    assert any(all(word in line for word in found.words) for line in faults), faults


def test_weights_that_are_not_finite_can_be_refused(copy: Good, run: Run, tmp_path: Path) -> None:
    CONTENT["a value that is no number"].plant(copy("megatron"))
    words = ("convert", tmp_path / "source", tmp_path / "there" / "target", "--to", "megatron")
    before = set(tree(tmp_path))
    told = sentence(run(*words, "--refuse-nan"), "convert", late=True)
    assert "linear_fc2.weight holds values that are not finite" in told
    assert set(tree(tmp_path)) == before
    assert run(*words).code == 0


@pytest.mark.parametrize("place", ["sampled", "elsewhere"])
def test_a_changed_byte_of_a_native_checkpoint_is_not_copied_on(
    place: str, copy: Good, run: Run, tmp_path: Path
) -> None:
    source = copy("native")
    rows = slice(0, 1) if place == "sampled" else slice(9, 10)
    flipped("*.safetensors", lambda root: value_of(FC2)(root)[rows])(source)
    before = set(tree(tmp_path))
    converted = run("convert", source, tmp_path / "there" / "target", "--to", "hf")
    assert "manifest" in sentence(converted, "convert", late=True)
    assert set(tree(tmp_path)) == before
    deep = run("inspect", "--deep", source)
    assert deep.code == 1 and "it was changed after it was written" in deep.out
    assert run("verify", source).code == 1
