"""Native checkpoints: round trips, manifests, and atomic writes."""

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.digest import base_digest, identify
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.manifest import MANIFEST
from gpt.formats.native import open_native
from gpt.formats.registry import open_checkpoint
from gpt.parallel.weight_sharding import check_split, parameter_specs, shard_spec
from tests.support.models import CLASSIC, CONFIGS, MODERN, lively

GOLDEN = Path(__file__).parents[2] / "golden" / "native-v1"
GOLDEN_DIGEST = "c61e1e3e72471c9a14777d827fd46438214301854db96e01dd4d28a063ca2b90"


@st.composite
def configs(draw: st.DrawFn) -> GPTConfig:
    """Any tiny architecture, including unusual ones."""
    groups = draw(st.sampled_from([1, 2, 4]))
    share = draw(st.sampled_from([1, 2, 4]))
    heads = groups * share
    experts = draw(st.sampled_from([0, 0, 3]))
    layers = draw(st.integers(1, 3))
    return GPTConfig(
        num_layers=layers,
        hidden_size=draw(st.sampled_from([8, 12])),
        num_attention_heads=heads,
        vocab_size=draw(st.integers(1, 23)),
        max_position_embeddings=draw(st.integers(1, 9)),
        ffn_hidden_size=draw(st.sampled_from([4, 12])),
        num_query_groups=groups,
        kv_channels=draw(st.sampled_from([2, 4, 6])),
        position_embedding_type=draw(st.sampled_from(["learned_absolute", "rope", "none"])),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        gated=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        proj_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_layernorm=draw(st.booleans()),
        untie_embeddings_and_output_weights=draw(st.booleans()),
        num_experts=experts,
        moe_layers=tuple(draw(st.booleans()) for _ in range(layers)) if experts else (),
        moe_ffn_hidden_size=4,
        moe_shared_expert_intermediate_size=draw(st.sampled_from([0, 8])),
        rope_scaling=draw(st.sampled_from([None, RopeScaling("linear", 2.0)])),
        dtype=draw(st.sampled_from(["float64", "float32", "bfloat16", "float16"])),
    )


def join(checkpoint: Checkpoint, name: str, tp: int) -> Tensor:
    """The tensor joined from all ranks' shards; overlapping parts must be equal."""
    parameter = parameter_specs(checkpoint.config)[name]
    joined = torch.full(parameter.shape, torch.nan, dtype=checkpoint.tensors[name].dtype)
    for rank in range(tp):
        shard = shard_spec(parameter, checkpoint.config, rank, tp)
        values = checkpoint.read(name, shard)
        rows_done = 0
        assert values.shape == shard.local_shape(parameter.shape)
        for start, stop in shard.ranges:
            target = joined.narrow(shard.dim, start, stop - start)
            piece = values.narrow(shard.dim, rows_done, stop - start)
            assert bool(target.isnan().all()) or torch.equal(target, piece)
            target.copy_(piece)
            rows_done += stop - start
        assert not values.narrow(shard.dim, rows_done, shard.size - rows_done).any()
    return joined


@settings(max_examples=25, deadline=None)
@given(
    config=configs(), tp=st.sampled_from([1, 2, 4]), shard_bytes=st.sampled_from([1, 900, 1 << 30])
)
def test_any_architecture_round_trips_bitwise_at_any_split(
    config: GPTConfig, tp: int, shard_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("native") / "model"
    source = lively(config)
    write_native(source, target, shard_bytes_max=shard_bytes)
    loaded = open_native(target)
    assert loaded.config == config and list(loaded.tensors) == list(source.tensors)
    try:
        check_split(config, tp, 1)
    except ConfigError:
        tp = 1
    for name in source.tensors:
        assert torch.equal(join(loaded, name, tp), source.read(name)), name
    shutil.rmtree(target)


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    source = lively(MODERN)
    write_native(source, tmp_path / "m", shard_bytes_max=20000)
    library_tensors: dict[str, Tensor] = {}
    for file in (tmp_path / "m").glob("*.safetensors"):
        library_tensors |= load_file(file)
    assert set(library_tensors) == set(source.tensors)
    assert all(torch.equal(library_tensors[name], source.read(name)) for name in library_tensors)


def test_manifest_lists_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    tokenizer = tmp_path / "words"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "weights.safetensors").write_text("not a tokenizer's")
    write_native(lively(CLASSIC), tmp_path / "m", tokenizer=tokenizer, shard_bytes_max=30000)
    files = json.loads((tmp_path / "m" / MANIFEST).read_text())["files"]
    on_disk = {p.relative_to(tmp_path / "m").as_posix() for p in (tmp_path / "m").rglob("*.*")}
    assert set(files) == on_disk - {MANIFEST}
    assert "tokenizer/tokenizer.json" in files and len(files) > 3
    for name, record in files.items():
        text = (tmp_path / "m" / name).read_bytes()
        assert record == {"bytes": len(text), "crc32": f"{zlib.crc32(text):08x}"}


def test_tokenizers_are_copied(tmp_path: Path) -> None:
    (tmp_path / "spm.model").write_bytes(b"pieces")
    assert (
        write_native(lively(CLASSIC), tmp_path / "a")
        and open_native(tmp_path / "a").tokenizer is None
    )
    write_native(lively(CLASSIC), tmp_path / "b", tokenizer=tmp_path / "spm.model")
    write_native(open_native(tmp_path / "b"), tmp_path / "c")
    tokenizer = open_native(tmp_path / "c").tokenizer
    assert tokenizer is not None and (tokenizer / "spm.model").read_bytes() == b"pieces"


def test_tensors_in_memory_are_written(tmp_path: Path) -> None:
    tensors = {name: tensor.read() for name, tensor in lively(CLASSIC).tensors.items()}
    identity = write_native((CLASSIC, tensors), tmp_path / "m")
    assert identity.digest == base_digest(open_native(tmp_path / "m"))
    half_tensors = {name: value.half() for name, value in tensors.items()}
    write_native((CLASSIC, half_tensors), tmp_path / "half")
    assert open_native(tmp_path / "half").config.dtype == "float16"


@pytest.mark.parametrize("name", CONFIGS)
def test_converted_dtypes_keep_the_original_identity(name: str, tmp_path: Path) -> None:
    origin = lively(CONFIGS[name])
    write_native(origin, tmp_path / "a")
    write_native(open_native(tmp_path / "a"), tmp_path / "b", dtype=torch.bfloat16)
    write_native(open_native(tmp_path / "b"), tmp_path / "c")
    half = open_native(tmp_path / "c")
    assert half.config.dtype == "bfloat16"
    assert half.notes == ("converted from float32 to bfloat16",)
    identity = identify(half)
    first = identify(open_native(tmp_path / "a"))
    assert (identity.digest, identity.fingerprint) == (first.digest, first.fingerprint)
    assert base_digest(half) != first.digest
    for tensor in half.tensors:
        # Expert routing must not depend on rounding.
        exact = tensor.endswith(".expert_bias")
        dtype = torch.float32 if exact else torch.bfloat16
        assert torch.equal(half.read(tensor), origin.read(tensor).to(dtype))


class Unreadable:
    """A stored tensor whose disk fails when it is read."""

    shape = (32,)
    dtype = torch.float32
    location = "a bad disk"

    def tensor(self) -> Tensor:
        raise OSError(5, "Input/output error")


def test_failed_writes_leave_no_files(tmp_path: Path) -> None:
    source = lively(CLASSIC)
    tensors = dict(source.tensors)
    last_tensor = tensors["decoder.final_layernorm.bias"]
    tensors["decoder.final_layernorm.bias"] = replace(
        last_tensor, slices=(replace(last_tensor.slices[0], source=Unreadable()),)
    )
    with pytest.raises(CheckpointError, match=r"cannot write .*m: Input/output error"):
        write_native(replace(source, tensors=tensors), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_native(lively(CLASSIC), tmp_path / "empty")
    with pytest.raises(CheckpointError, match="already exists; remove it or choose another"):
        write_native(lively(CLASSIC), tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        write_native(lively(CLASSIC), tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot write .*Not a directory"):
        write_native(lively(CLASSIC), tmp_path / "file" / "below")


def test_vocab_size_can_be_overridden_with_a_smaller_one(tmp_path: Path) -> None:
    write_native(lively(MODERN), tmp_path / "m")
    smaller = open_native(tmp_path / "m", {"vocab_size": 90})
    assert smaller.tensors["output_layer.weight"].shape == (90, 32)
    # A model with another function is another model: its recorded identity does not apply.
    assert smaller.identity is None and identify(smaller).digest == base_digest(smaller)
    with pytest.raises(
        CheckpointError, match="vocab_size is set to 104, but the embedding has only 103 rows; "
    ):
        open_native(tmp_path / "m", {"vocab_size": 104})


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        record = json.loads((folder / MANIFEST).read_text())
        change(record)
        (folder / MANIFEST).write_text(json.dumps(record))

    return edit


FIRST = "model-00001-of-00003.safetensors"


def swap_weights(folder: Path) -> None:
    """Other values in files of the same name and size."""
    source = lively(CLASSIC, seed=7)
    write_native(source, folder.parent / "other", shard_bytes_max=100_000)
    for file in (folder.parent / "other").glob("*.safetensors"):
        shutil.copy(file, folder / file.name)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a newer version": (
        manifest(lambda record: record.update(version=2)),
        "has format version 2, but this release of Preamble reads versions up to 1",
    ),
    "no version": (manifest(lambda record: record.pop("version")), "format version None"),
    "another format": (manifest(lambda record: record.update(format="x")), "not a manifest of"),
    "no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), "is not JSON"),
    "no files": (
        manifest(lambda record: record.pop("files")),
        "has no valid config, files or iden",
    ),
    "no identity": (
        manifest(lambda record: record["identity"].pop("digest")),
        "has no valid config",
    ),
    "an identity of numbers": (
        manifest(lambda record: record["identity"].update(digest=1)),
        "has no valid config, files or identity",
    ),
    "a name too long": (
        manifest(lambda record: record["files"].update({"a" * 256: {"bytes": 1}})),
        "cannot read .*: File name too long; give the directory",
    ),
    "a field of the future": (
        manifest(lambda record: record["config"].update(quantum=True)),
        f"{MANIFEST}: unknown key 'quantum'",
    ),
    "an impossible field": (
        manifest(lambda record: record["config"].update(num_layers=0)),
        "num_layers is 0; it must be",
    ),
    "another width": (
        manifest(lambda record: record["config"].update(ffn_hidden_size=96)),
        r"linear_fc1.weight in .*found shape \(128, 32\), but the config requires \(96, 32\)",
    ),
    "more layers": (
        manifest(lambda record: record["config"].update(num_layers=6, moe_layers=[False] * 6)),
        "lacks decoder.layers.5.self_attention.linear_qkv.layer_norm_weight, .* and 9 more",
    ),
    "a missing shard": (lambda folder: (folder / FIRST).unlink(), f"lacks {FIRST}, which its"),
    "a truncated shard": (
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1]),
        "bytes, but the manifest records .*; copy it again",
    ),
    "a file that is not listed": (
        manifest(lambda record: record["files"].pop(FIRST)),
        "lacks embedding.word_embeddings.weight",
    ),
    "a file outside": (
        manifest(lambda record: record["files"].update({"../x": {"bytes": 1}})),
        "names '../x', which is not inside",
    ),
    "an absolute file": (
        manifest(lambda record: record["files"].update({"/etc/passwd": {"bytes": 1}})),
        "names '/etc/passwd', which is not inside",
    ),
    "a file without a size": (
        manifest(lambda record: record["files"].update({FIRST: 1})),
        "has no size in bytes",
    ),
    "a tensor twice": (
        lambda folder: repeat_shard(folder),
        "which another file contains too",
    ),
}


def repeat_shard(folder: Path) -> None:
    duplicate = "model-00004-of-00004.safetensors"
    size = (folder / FIRST).stat().st_size
    shutil.copy(folder / FIRST, folder / duplicate)
    manifest(lambda r: r["files"].update({duplicate: {"bytes": size}}))(folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_checkpoints_raise_one_sentence(fault: str, tmp_path: Path) -> None:
    write_native(lively(CLASSIC), tmp_path / "m", shard_bytes_max=100_000)
    assert (tmp_path / "m" / FIRST).exists()
    change, message = FAULTS[fault]
    change(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path / "m")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_differ_from_the_manifest_have_no_identity(tmp_path: Path) -> None:
    write_native(lively(CLASSIC), tmp_path / "m", shard_bytes_max=100_000)
    swap_weights(tmp_path / "m")
    with pytest.raises(CheckpointError, match="do not match the fingerprint in the manifest"):
        identify(open_native(tmp_path / "m"))


def test_version_1_is_read() -> None:
    """golden/native-v1 was written once, by the first release, from GOLDEN_CONFIG."""
    checkpoint = open_checkpoint(GOLDEN)
    assert checkpoint.config == GOLDEN_CONFIG
    assert identify(checkpoint).digest == GOLDEN_DIGEST == base_digest(checkpoint)
    assert checkpoint.tokenizer == GOLDEN / "tokenizer"


GOLDEN_CONFIG = GPTConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=11,
    max_position_embeddings=6,
    num_query_groups=1,
    ffn_hidden_size=12,
    position_embedding_type="rope",
    rope_scaling=RopeScaling("llama3", 8.0),
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    proj_bias=False,
    mlp_bias=False,
    dtype="bfloat16",
)
