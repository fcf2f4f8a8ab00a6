"""Proofs of checkpoints: computed layer by layer, stored in a file, and replayed.

The tests of resharding use files of tests/support/checkpoints/megatron_writer.py. Wrong models
differ in one tensor of one layer or in one field of the config, like the smallest real mistakes.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import gpt
from gpt.checkpoint.files.safetensors_file import encode_header
from gpt.checkpoint.logical_tensor import Checkpoint, checkpoint_from_tensors
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.reference_logits.proof_file import PROOF_FILE, Proof, find_proof, read_proof
from gpt.reference_logits.replay import (
    LOGIT_TOLERANCES,
    MOE_LOGIT_TOLERANCE,
    LogitDifference,
    check_proof,
    compute_proof,
    logit_tolerance,
    probe_token_ids,
    replay_proof,
)
from serving.__main__ import main, serve_parser
from serving.config import ServerConfig
from serving.service.service import ServableCheckpoint, open_in_process
from tests.support.checkpoints.megatron_writer import DENSE, GATED, MIXED, Layout, saved, write
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, lively
from tests.support.process_memory import PeakMemory, anonymous_bytes
from tests.support.servers import write_checkpoint

QKV = "decoder.layers.2.self_attention.linear_qkv.weight"
NORM = "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"


def in_memory(
    source: Checkpoint,
    dtype: torch.dtype | None = None,
    changed: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """The checkpoint in memory, stored in `dtype`, with some tensors replaced."""
    tensors = {name: source.read(name) for name in source.tensors} | dict(changed or {})
    return checkpoint_from_tensors(
        source.config,
        {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()},
    )


def replay_with_loaded_model(proof: Proof, checkpoint: Checkpoint, dtype: str) -> LogitDifference:
    """Replay the proof with all layers of the model loaded, as a server does."""
    model = load_model(checkpoint, Mesh.single(), dtype=dtype)
    return replay_proof(proof, model.logits, checkpoint, dtype)


@pytest.mark.parametrize("config", [DENSE, GATED, MIXED], ids=["learned", "untied", "experts"])
def test_a_proof_has_the_logits_of_the_loaded_model(config: GPTConfig, tmp_path: Path) -> None:
    saved(config, Layout(tp=2, pp=2), tmp_path)
    proof = compute_proof(open_checkpoint(tmp_path))
    logits = gpt.load(tmp_path, dtype="float32").logits(proof.ids)
    assert torch.allclose(proof.logits, logits[:, -1], rtol=0, atol=1e-4)
    assert torch.equal(proof.best, logits.argmax(-1))
    assert (proof.ids.shape, proof.logits.shape) == ((4, 32), (4, config.vocab_size))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_passes_its_proof_in_fp32_and_16_bit_dtypes(name: str) -> None:
    checkpoint = in_memory(lively(CONFIGS[name]))
    proof = compute_proof(checkpoint)
    exact = check_proof(checkpoint, proof)
    assert exact == LogitDifference(0.0, 1e-3, 128, 128, "float32")
    assert replay_with_loaded_model(proof, checkpoint, "float32").max_difference < 1e-5
    for dtype in ("bfloat16", "float16"):
        rounded = replay_with_loaded_model(proof, checkpoint, dtype)
        assert rounded.is_within_limit
        assert 0 < rounded.max_difference < rounded.limit / 2, "headroom for larger models"
        assert rounded.argmax_matches >= 115


def test_a_proof_of_a_model_with_one_layer_and_two_positions() -> None:
    checkpoint = lively(CLASSIC.with_fields(num_layers=1, moe_layers=(), max_position_embeddings=2))
    proof = compute_proof(checkpoint)
    assert proof.ids.shape == (4, 2)
    assert replay_with_loaded_model(proof, checkpoint, "float64").is_within_limit


def test_probe_ids_span_the_vocabulary_and_are_fixed() -> None:
    for vocabulary in (1, 2, 97, 128, 50257, 256_000):
        ids = probe_token_ids(vocabulary, 1024)
        assert (int(ids.min()), int(ids.max())) == (0, vocabulary - 1)
        steps = ids.flatten().sort().values.diff()
        assert int(steps.max() - steps.min()) <= 1 if vocabulary > 1 else not steps.any()
    # The ids of proof version 1. Proofs of a model are comparable only if they have the same ids.
    assert probe_token_ids(50257, 1024)[0, :4].tolist() == [21764, 20181, 15432, 19390]
    assert probe_token_ids(97, 3).shape == (4, 3)


def test_proof_bytes_are_deterministic_and_read_back(tmp_path: Path) -> None:
    proof = compute_proof(lively(MODERN))
    torch.manual_seed(3)
    assert compute_proof(lively(MODERN)).to_bytes() == proof.to_bytes()
    path = proof.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [PROOF_FILE]
    assert path.read_bytes() == proof.to_bytes()
    stored = read_proof(path)
    assert stored is not None
    assert stored.to_bytes() == proof.to_bytes()
    assert stored.software_versions.endswith(f"torch {torch.__version__}")
    assert set(safetensors.torch.load_file(path)) == {"ids", "best", "logits"}
    with pytest.raises(CheckpointError, match=r"cannot be written: .*writable and has free space"):
        proof.save(tmp_path / "absent")


def test_a_proof_holds_after_a_reshard_and_after_a_change_of_dtype(tmp_path: Path) -> None:
    source = saved(GATED, Layout(tp=2, pp=2), tmp_path / "source")
    proof = compute_proof(open_checkpoint(tmp_path / "source"))
    tensors = {name: source.read(name) for name in source.tensors}
    iteration = write(GATED, tensors, tmp_path / "target", Layout(tp=4, pp=1, names="local"))
    proof.save(iteration)
    target = open_checkpoint(tmp_path / "target")
    stored = find_proof(target)
    assert stored is not None
    assert check_proof(target, stored).max_difference < 1e-6

    bf16_tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write(GATED.with_fields(dtype="bfloat16"), bf16_tensors, tmp_path / "bf16", Layout(pp=2))
    rounded = check_proof(open_checkpoint(tmp_path / "bf16"), stored)
    assert rounded.limit == LOGIT_TOLERANCES["bfloat16"]
    assert 1e-3 < rounded.max_difference < 0.1
    assert rounded.is_within_limit


def test_the_tolerance_depends_on_dtypes_and_experts_only() -> None:
    fp32_weights, experts = in_memory(lively(CLASSIC)), in_memory(lively(EXPERTS))
    bf16_weights = in_memory(fp32_weights, torch.bfloat16)
    fp32_proof, bf16_proof = compute_proof(fp32_weights), compute_proof(bf16_weights)
    assert (fp32_proof.dtype, bf16_proof.dtype) == ("float32", "bfloat16")
    assert logit_tolerance(fp32_proof, fp32_weights, "float32") == 1e-3
    assert logit_tolerance(fp32_proof, bf16_weights, "float32") == LOGIT_TOLERANCES["bfloat16"]
    assert logit_tolerance(bf16_proof, bf16_weights, "float32") == 1e-3
    assert logit_tolerance(bf16_proof, in_memory(bf16_weights, torch.float32), "float32") == 1e-3
    assert (
        logit_tolerance(bf16_proof, in_memory(bf16_weights, torch.float16), "float32")
        == LOGIT_TOLERANCES["float16"]
    )
    assert logit_tolerance(bf16_proof, bf16_weights, "bfloat16") == LOGIT_TOLERANCES["bfloat16"]
    assert logit_tolerance(fp32_proof, experts, "bfloat16") == MOE_LOGIT_TOLERANCE
    assert logit_tolerance(fp32_proof, experts, "float32") == 1e-3
    # Weights that were rounded and widened again are inaccurate, although they are stored in fp32.
    assert not check_proof(in_memory(bf16_weights, torch.float32), fp32_proof).is_within_limit
    # A view in another dtype reads the same files.
    assert compute_proof(fp32_weights.in_dtype(torch.bfloat16)).dtype == "float32"


def swap_two_heads(weight: Tensor) -> Tensor:
    groups = weight.view(MODERN.num_query_groups, -1, MODERN.kv_channels, MODERN.hidden_size)
    swapped = groups.clone()
    swapped[0, [0, 1]] = groups[0, [1, 0]]
    return swapped.view(weight.shape)


WRONG_MODELS: Mapping[str, Callable[[Checkpoint], Checkpoint]] = {
    "one norm": lambda right: in_memory(right, changed={NORM: right.read(NORM) * 1.02}),
    "two heads swapped": lambda right: in_memory(
        right, changed={QKV: swap_two_heads(right.read(QKV))}
    ),
    "rotary base": lambda right: replace(
        right, config=right.config.with_fields(rotary_base=20000.0)
    ),
    "window": lambda right: replace(right, config=right.config.with_fields(window_size=8)),
}


@pytest.mark.parametrize("mistake", WRONG_MODELS)
def test_a_model_with_one_mistake_fails_in_fp32(mistake: str) -> None:
    right = in_memory(lively(MODERN))
    difference = check_proof(WRONG_MODELS[mistake](right), compute_proof(right))
    assert not difference.is_within_limit
    assert (
        "over the limit of 0.001, and the most likely token is the same at " in difference.summary
    )
    assert f" at {difference.argmax_matches} of " in difference.summary


@pytest.mark.parametrize("name", CONFIGS)
def test_another_model_fails_in_any_dtype(name: str) -> None:
    proof = compute_proof(lively(CONFIGS[name]))
    other = in_memory(lively(CONFIGS[name], seed=1))
    for dtype in LOGIT_TOLERANCES:
        difference = replay_with_loaded_model(proof, other, dtype)
        assert difference.max_difference > 2 * MOE_LOGIT_TOLERANCE
        assert not difference.is_within_limit


def test_non_finite_logits_fail_the_proof() -> None:
    checkpoint = lively(CLASSIC)
    proof = compute_proof(checkpoint)
    difference = replay_proof(proof, lambda ids: proof.logits * float("nan"), checkpoint, "float32")
    assert (difference.max_difference, difference.is_within_limit) == (float("inf"), False)


def test_logits_of_last_positions_are_sufficient_for_a_replay() -> None:
    checkpoint = lively(CLASSIC)
    proof = compute_proof(checkpoint)
    difference = replay_proof(proof, lambda ids: proof.logits, checkpoint, "float32")
    assert difference.max_difference == 0.0
    assert difference.argmax_matches == 4
    assert difference.positions == 4


def test_differences_in_half_of_the_rows_pass_for_moe_models_only() -> None:
    experts, dense = lively(EXPERTS), lively(CLASSIC)
    for checkpoint, rows, is_within_limit in (
        (experts, 0, True),
        (experts, 2, True),
        (experts, 3, False),
        (dense, 0, True),
        (dense, 1, False),
    ):
        proof = compute_proof(checkpoint)
        logits = proof.logits.clone()
        logits[:rows] += 0.3
        difference = replay_proof(proof, partial(fixed_logits, logits), checkpoint, "float32")
        assert difference.is_within_limit is is_within_limit


def fixed_logits(logits: Tensor, ids: Tensor) -> Tensor:
    assert ids.shape[0] == logits.shape[0]
    return logits


def test_a_proof_of_another_shape_is_refused_before_the_replay() -> None:
    proof = compute_proof(lively(CLASSIC))
    for config, message in (
        (
            MODERN,
            "the proof's vocabulary has 101 tokens, but the model's vocabulary has 103; the proof "
            "is of another model",
        ),
        (
            CLASSIC.with_fields(max_position_embeddings=16),
            "rows of 32 tokens, but the model has only 16 positions; the proof is of another model",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_proof(lively(config), proof)
        with pytest.raises(CheckpointError, match=message):
            replay_proof(proof, lambda ids: ids, lively(config), "float32")


def test_computing_a_proof_loads_one_layer_at_a_time(tmp_path: Path) -> None:
    config = GPTConfig(
        num_layers=6,
        hidden_size=384,
        num_attention_heads=8,
        vocab_size=384,
        max_position_embeddings=64,
    )
    source = lively(config)
    tensors = {name: source.read(name) for name in source.tensors}
    layer_bytes = 4 * sum(
        tensor.numel() for name, tensor in tensors.items() if name.startswith("decoder.layers.3.")
    )
    write(config, tensors, tmp_path, Layout())
    del tensors, source
    checkpoint = open_checkpoint(tmp_path)
    compute_proof(checkpoint)  # torch allocates its own buffers in the first call.
    idle = anonymous_bytes()
    with PeakMemory() as peak:
        compute_proof(checkpoint)
    proof_bytes = peak.bytes - idle
    assert proof_bytes < 2.5 * layer_bytes, f"{proof_bytes / layer_bytes:.1f} layers"


def changed_proof_file(proof: Proof, changed: Mapping[str, Tensor], **metadata: str) -> bytes:
    """A proof's file with some tensors and metadata replaced; "absent" removes a metadata field.

    The digest is that of the changed tensors unless it is replaced too.
    """
    fields = json.loads(proof.to_bytes()[8:].split(b"}}")[0] + b"}}")["__metadata__"]
    tensors = {**proof.tensors, **changed}
    if set(tensors) == set(proof.tensors):
        changed_proof = Proof(
            tensors["ids"], tensors["best"], tensors["logits"], proof.base, proof.dtype
        )
        fields["digest"] = changed_proof.digest
    fields |= metadata
    fields = {name: text for name, text in fields.items() if text != "absent"}
    shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    contents = [tensor.numpy().tobytes() for tensor in tensors.values()]
    return encode_header(shapes, fields) + b"".join(contents)


NEWER = "has proof version 2, but this release of Preamble reads version 1; use a newer release"
INVALID_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "another format": (
        {"format": "preamble.adapter"},
        "has metadata without the format 'preamble.proof'",
    ),
    "a newer version": ({"version": "2"}, NEWER),
    "no version": ({"version": "absent"}, "has the invalid version ''"),
    "a version that is not a number": ({"version": "²"}, "has the invalid version '²'"),
    "an unknown dtype": ({"dtype": "int4"}, "has the unknown dtype 'int4'"),
    "no base": ({"base": "absent"}, "has no valid base digest"),
    "another digest": ({"digest": "0" * 64}, "has a digest that does not match its contents"),
    "ids too large": ({"ids": torch.full((4, 32), 101)}, "ids from 101 to 101, but a vocabulary"),
    "ids below zero": ({"ids": torch.full((4, 32), -1)}, "has ids from -1 to -1"),
    "best too large": ({"best": torch.full((4, 32), 1 << 40)}, "has best from 1099511627776"),
    "best that contradicts the logits": (
        {"best": torch.zeros(4, 32, dtype=torch.int64)},
        "is inconsistent",
    ),
    "ids in fp32": ({"ids": torch.zeros(4, 32)}, "has 'ids' torch.float32"),
    "a fourth tensor": ({"x": torch.zeros(1)}, "instead of ids, best and logits"),
    "another number of rows in the logits": (
        {"logits": torch.zeros(3, 101)},
        "has shapes that disagree",
    ),
    "one row of ids": ({"ids": torch.zeros(128, dtype=torch.int64)}, "has shapes that disagree"),
    "no rows": (
        {
            "ids": torch.zeros(0, 32, dtype=torch.int64),
            "best": torch.zeros(0, 32, dtype=torch.int64),
            "logits": torch.zeros(0, 101),
        },
        "has 0 ids and 0 logits",
    ),
    "too many ids": (
        {
            "ids": torch.zeros(4, 2000, dtype=torch.int64),
            "best": torch.zeros(4, 2000, dtype=torch.int64),
        },
        "has 8000 ids and 404 logits; the limits are 4096 ids",
    ),
    "NaN": ({"logits": torch.full((4, 101), float("nan"))}, "has logits that are not finite"),
}


@pytest.mark.parametrize("fault", INVALID_FILES)
def test_an_invalid_proof_file_is_refused_in_one_sentence(fault: str, tmp_path: Path) -> None:
    changes, sentence = INVALID_FILES[fault]
    tensors = {name: change for name, change in changes.items() if isinstance(change, Tensor)}
    metadata = {name: change for name, change in changes.items() if isinstance(change, str)}
    proof = compute_proof(lively(CLASSIC))
    (tmp_path / PROOF_FILE).write_bytes(changed_proof_file(proof, tensors, **metadata))
    with pytest.raises(CheckpointError) as refused:
        read_proof(tmp_path / PROOF_FILE)
    message = str(refused.value)
    assert message.startswith(str(tmp_path / PROOF_FILE))
    assert sentence in message
    assert "\n" not in message


def test_a_damaged_proof_is_refused_and_a_missing_one_is_none(tmp_path: Path) -> None:
    content = compute_proof(lively(CLASSIC)).to_bytes()
    assert read_proof(tmp_path / PROOF_FILE) is None
    for size in (0, 7, 100, len(content) - 1):
        (tmp_path / PROOF_FILE).write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="is truncated"):
            read_proof(tmp_path / PROOF_FILE)
    flipped = bytearray(content)
    flipped[-3] ^= 1
    (tmp_path / PROOF_FILE).write_bytes(flipped)
    with pytest.raises(CheckpointError, match="does not match its contents; copy it again"):
        read_proof(tmp_path / PROOF_FILE)
    (tmp_path / PROOF_FILE).unlink()
    os.mkfifo(tmp_path / PROOF_FILE)
    with pytest.raises(CheckpointError, match="is not a file"):
        read_proof(tmp_path / PROOF_FILE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("proof"), tokenizer=False)


def test_a_server_refuses_a_model_that_fails_its_proof_unless_disabled(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    right = open_checkpoint(folder)
    norm = right.read("decoder.final_layernorm.weight")
    norm[3] *= 1.5
    wrong = in_memory(right, changed={"decoder.final_layernorm.weight": norm})
    compute_proof(wrong).save(folder)
    assert main(["serve", str(folder), "--port", "0", "--http-port", "0"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    refused = err.splitlines()[-1]
    assert f"preamble serve: the logits of {folder} differ from the reference logits" in refused
    assert f"`preamble verify SOURCE {folder}`" in refused
    assert "--no-prove (prove: false)" in refused

    flags = vars(serve_parser().parse_args([str(folder), "--no-prove"]))
    config = ServerConfig.read(flags.pop("config"), flags)
    with open_in_process(config) as service:
        assert service.proof_difference is None


def test_a_server_refuses_a_damaged_proof_before_loading(folder: Path) -> None:
    (folder / PROOF_FILE).write_bytes(b"no proof")
    with pytest.raises(CheckpointError, match=f"{PROOF_FILE} is truncated"):
        ServableCheckpoint.from_config(ServerConfig(str(folder)))
    assert ServableCheckpoint.from_config(ServerConfig(str(folder), prove=False)).proof is None
