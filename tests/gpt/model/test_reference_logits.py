"""A checkpoint's proof: made layer by layer, kept in a file, replayed by whoever runs the model.

That a proof holds after a reshard is seen on files that
tests/support/checkpoints/megatron_writer.py cuts. Wrong models differ in one tensor of one layer,
as little as a real mistake could.
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
from gpt.checkpoint.files.safetensors_file import header
from gpt.checkpoint.logical_tensor import Checkpoint, in_memory
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.model.reference_logits import (
    EXPERTS_LIMIT,
    FILE,
    LIMITS,
    Difference,
    Proof,
    check_proof,
    draw_ids,
    find_proof,
    prove,
    read_proof,
    replay,
    tolerance,
)
from gpt.parallel.mesh import Mesh
from serving.__main__ import main, serve_parser
from serving.config import ServerConfig
from serving.service.service import Found, open_inside
from tests.support.checkpoints.megatron_writer import DENSE, GATED, MIXED, Layout, saved, write
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, lively
from tests.support.process_memory import Peak, anonymous_bytes
from tests.support.servers import write_checkpoint

QKV = "decoder.layers.2.self_attention.linear_qkv.weight"
NORM = "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"


def held(
    source: Checkpoint,
    dtype: torch.dtype | None = None,
    changed: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """The same in memory, stored in `dtype`, some tensors replaced."""
    tensors = {name: source.read(name) for name in source.tensors} | dict(changed or {})
    return in_memory(source.config, {n: v.to(dtype or v.dtype) for n, v in tensors.items()})


def replayed(proof: Proof, checkpoint: Checkpoint, dtype: str) -> Difference:
    """By the model whole, as a server does."""
    model = load_model(checkpoint, Mesh.single(), dtype=dtype)
    return replay(proof, model.logits, checkpoint, dtype)


@pytest.mark.parametrize("config", [DENSE, GATED, MIXED], ids=["learned", "untied", "experts"])
def test_a_proof_has_the_logits_of_the_model_that_is_loaded(
    config: GPTConfig, tmp_path: Path
) -> None:
    saved(config, Layout(tp=2, pp=2), tmp_path)
    proof = prove(open_checkpoint(tmp_path))
    logits = gpt.load(tmp_path, dtype="float32").logits(proof.ids)
    assert torch.allclose(proof.logits, logits[:, -1], rtol=0, atol=1e-4)
    assert torch.equal(proof.best, logits.argmax(-1))
    assert (proof.ids.shape, proof.logits.shape) == ((4, 32), (4, config.vocab_size))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_proves_itself_in_fp32_and_in_narrow_dtypes(name: str) -> None:
    checkpoint = held(lively(CONFIGS[name]))
    proof = prove(checkpoint)
    exact = check_proof(checkpoint, proof)
    assert exact == Difference(0.0, 1e-3, 128, 128, "float32")
    assert replayed(proof, checkpoint, "float32").largest < 1e-5
    for dtype in ("bfloat16", "float16"):
        narrow = replayed(proof, checkpoint, dtype)
        assert narrow.same
        assert 0 < narrow.largest < narrow.limit / 2, "headroom for larger models"
        assert narrow.best >= 115


def test_a_model_of_one_layer_and_two_positions_is_proved_too() -> None:
    checkpoint = lively(CLASSIC.with_fields(num_layers=1, moe_layers=(), max_position_embeddings=2))
    proof = prove(checkpoint)
    assert proof.ids.shape == (4, 2)
    assert replayed(proof, checkpoint, "float64").same


def test_the_ids_reach_from_the_first_to_the_last_and_never_change() -> None:
    for vocabulary in (1, 2, 97, 128, 50257, 256_000):
        ids = draw_ids(vocabulary, 1024)
        assert (int(ids.min()), int(ids.max())) == (0, vocabulary - 1)
        steps = ids.flatten().sort().values.diff()
        assert int(steps.max() - steps.min()) <= 1 if vocabulary > 1 else not steps.any()
    # Those of version 1: proofs of one model are comparable only if they ask the same.
    assert draw_ids(50257, 1024)[0, :4].tolist() == [21764, 20181, 15432, 19390]
    assert draw_ids(97, 3).shape == (4, 3)


def test_the_same_model_gives_the_same_bytes_and_they_are_read_back(tmp_path: Path) -> None:
    proof = prove(lively(MODERN))
    torch.manual_seed(3)
    assert prove(lively(MODERN)).to_bytes() == proof.to_bytes()
    path = proof.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert path.read_bytes() == proof.to_bytes()
    found = read_proof(path)
    assert found is not None
    assert found.to_bytes() == proof.to_bytes()
    assert found.made_by.endswith(f"torch {torch.__version__}")
    assert set(safetensors.torch.load_file(path)) == {"ids", "best", "logits"}
    with pytest.raises(CheckpointError, match=r"cannot be written: .*writable and has room"):
        proof.save(tmp_path / "absent")


def test_a_proof_holds_after_a_reshard_and_after_a_change_of_dtype(tmp_path: Path) -> None:
    source = saved(GATED, Layout(tp=2, pp=2), tmp_path / "source")
    proof = prove(open_checkpoint(tmp_path / "source"))
    tensors = {name: source.read(name) for name in source.tensors}
    iteration = write(GATED, tensors, tmp_path / "target", Layout(tp=4, pp=1, names="local"))
    proof.save(iteration)
    target = open_checkpoint(tmp_path / "target")
    found = find_proof(target)
    assert found is not None
    assert check_proof(target, found).largest < 1e-6

    narrow = {name: value.bfloat16() for name, value in tensors.items()}
    write(GATED.with_fields(dtype="bfloat16"), narrow, tmp_path / "narrow", Layout(pp=2))
    rounded = check_proof(open_checkpoint(tmp_path / "narrow"), found)
    assert rounded.limit == LIMITS["bfloat16"]
    assert 1e-3 < rounded.largest < 0.1
    assert rounded.same


def test_the_limit_is_of_what_was_rounded_and_of_nothing_else() -> None:
    wide, experts = held(lively(CLASSIC)), held(lively(EXPERTS))
    narrow = held(wide, torch.bfloat16)
    of_wide, of_narrow = prove(wide), prove(narrow)
    assert (of_wide.dtype, of_narrow.dtype) == ("float32", "bfloat16")
    assert tolerance(of_wide, wide, "float32") == 1e-3
    assert tolerance(of_wide, narrow, "float32") == LIMITS["bfloat16"]
    assert tolerance(of_narrow, narrow, "float32") == 1e-3
    assert tolerance(of_narrow, held(narrow, torch.float32), "float32") == 1e-3
    assert tolerance(of_narrow, held(narrow, torch.float16), "float32") == LIMITS["float16"]
    assert tolerance(of_narrow, narrow, "bfloat16") == LIMITS["bfloat16"]
    assert tolerance(of_wide, experts, "bfloat16") == EXPERTS_LIMIT
    assert tolerance(of_wide, experts, "float32") == 1e-3
    # What was rounded on the way and widened again has lost something, whatever it is stored in.
    assert not check_proof(held(narrow, torch.float32), of_wide).same
    # A view in another dtype reads the same files.
    assert prove(wide.in_dtype(torch.bfloat16)).dtype == "float32"


def two_heads_swapped(weight: Tensor) -> Tensor:
    groups = weight.view(MODERN.num_query_groups, -1, MODERN.kv_channels, MODERN.hidden_size)
    swapped = groups.clone()
    swapped[0, [0, 1]] = groups[0, [1, 0]]
    return swapped.view(weight.shape)


WRONG: Mapping[str, Callable[[Checkpoint], Checkpoint]] = {
    "one norm": lambda one: held(one, changed={NORM: one.read(NORM) * 1.02}),
    "two heads swapped": lambda one: held(one, changed={QKV: two_heads_swapped(one.read(QKV))}),
    "rotary base": lambda one: replace(one, config=one.config.with_fields(rotary_base=20000.0)),
    "window": lambda one: replace(one, config=one.config.with_fields(window_size=8)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_model_with_one_thing_wrong_is_caught_in_fp32(what: str) -> None:
    right = held(lively(MODERN))
    found = check_proof(WRONG[what](right), prove(right))
    assert not found.same
    assert f"over the limit of 0.001, and the best token is the same in {found.best}" in (
        found.sentence
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_another_is_caught_in_any_dtype(name: str) -> None:
    proof = prove(lively(CONFIGS[name]))
    other = held(lively(CONFIGS[name], seed=1))
    for dtype in LIMITS:
        found = replayed(proof, other, dtype)
        assert found.largest > 2 * EXPERTS_LIMIT
        assert not found.same


def test_logits_that_are_not_finite_are_no_answer() -> None:
    checkpoint = lively(CLASSIC)
    proof = prove(checkpoint)
    found = replay(proof, lambda ids: proof.logits * float("nan"), checkpoint, "float32")
    assert (found.largest, found.same) == (float("inf"), False)


def test_last_positions_alone_can_be_compared() -> None:
    checkpoint = lively(CLASSIC)
    proof = prove(checkpoint)
    found = replay(proof, lambda ids: proof.logits, checkpoint, "float32")
    assert (found.largest, found.best, found.places) == (0.0, 4, 4)


def test_a_choice_of_experts_that_flips_in_a_few_rows_is_forgiven_and_in_most_is_not() -> None:
    experts, dense = lively(EXPERTS), lively(CLASSIC)
    for checkpoint, rows, same in (
        *((experts, 0, True), (experts, 2, True), (experts, 3, False)),
        *((dense, 0, True), (dense, 1, False)),
    ):
        proof = prove(checkpoint)
        logits = proof.logits.clone()
        logits[:rows] += 0.3
        found = replay(proof, partial(_always, logits), checkpoint, "float32")
        assert found.same is same


def _always(logits: Tensor, ids: Tensor) -> Tensor:
    assert ids.shape[0] == logits.shape[0]
    return logits


def test_a_proof_of_another_shape_is_refused_before_it_is_run() -> None:
    proof = prove(lively(CLASSIC))
    for config, sentence in (
        (MODERN, "logits of 101 tokens, the model's vocabulary is 103; it is another model's"),
        (CLASSIC.with_fields(max_position_embeddings=16), "rows of 32 tokens, the model has 16 po"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            check_proof(lively(config), proof)
        with pytest.raises(CheckpointError, match=sentence):
            replay(proof, lambda ids: ids, lively(config), "float32")


def test_proving_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    config = GPTConfig(
        num_layers=6,
        hidden_size=384,
        num_attention_heads=8,
        vocab_size=384,
        max_position_embeddings=64,
    )
    source = lively(config)
    tensors = {name: source.read(name) for name in source.tensors}
    layer = 4 * sum(v.numel() for n, v in tensors.items() if n.startswith("decoder.layers.3."))
    write(config, tensors, tmp_path, Layout())
    del tensors, source
    checkpoint = open_checkpoint(tmp_path)
    prove(checkpoint)  # What torch keeps for itself is taken now.
    idle = anonymous_bytes()
    with Peak() as peak:
        prove(checkpoint)
    assert peak.bytes - idle < 2.5 * layer, f"{(peak.bytes - idle) / layer:.1f} layers"


def file_of(proof: Proof, tensors: Mapping[str, Tensor], **metadata: str) -> bytes:
    """A proof's file with some things other than they are, its digest true unless given."""
    good = json.loads(proof.to_bytes()[8:].split(b"}}")[0] + b"}}")["__metadata__"]
    values = {**proof.tensors, **tensors}
    if set(values) == set(proof.tensors):
        own = Proof(values["ids"], values["best"], values["logits"], proof.base, proof.dtype)
        good["digest"] = own.digest
    good = {name: value for name, value in {**good, **metadata}.items() if value != "absent"}
    shapes = [(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    return header(shapes, good) + b"".join(value.numpy().tobytes() for value in values.values())


NEWER = "is a proof of version 2, this Preamble reads version 1; use a newer Preamble"
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "preamble.adapter"}, "does not say that it is a proof"),
    "a newer version": ({"version": "2"}, NEWER),
    "no version": ({"version": "absent"}, "says that its version is ''"),
    "a version that is no number": ({"version": "²"}, "says that its version is '²'"),
    "a dtype unknown": ({"dtype": "int4"}, "says that its dtype is 'int4'"),
    "no base": ({"base": "absent"}, "does not say which model it is of"),
    "another digest": ({"digest": "0" * 64}, "is not what was written"),
    "ids too large": ({"ids": torch.full((4, 32), 101)}, "ids from 101 to 101, its vocabulary is"),
    "ids below zero": ({"ids": torch.full((4, 32), -1)}, "has ids from -1 to -1"),
    "best too large": ({"best": torch.full((4, 32), 1 << 40)}, "has best from 1099511627776"),
    "a best of no logits": ({"best": torch.zeros(4, 32, dtype=torch.int64)}, "contradicts itself"),
    "ids in fp32": ({"ids": torch.zeros(4, 32)}, "holds 'ids' torch.float32"),
    "a fourth tensor": ({"x": torch.zeros(1)}, "not ids, best and logits"),
    "rows that disagree": ({"logits": torch.zeros(3, 101)}, "has shapes that disagree"),
    "one row of ids": ({"ids": torch.zeros(128, dtype=torch.int64)}, "has shapes that disagree"),
    "no rows": (
        {
            "ids": torch.zeros(0, 32, dtype=torch.int64),
            "best": torch.zeros(0, 32, dtype=torch.int64),
            "logits": torch.zeros(0, 101),
        },
        "has 0 ids and 0 logits",
    ),
    "too much to run": (
        {
            "ids": torch.zeros(4, 2000, dtype=torch.int64),
            "best": torch.zeros(4, 2000, dtype=torch.int64),
        },
        "has 8000 ids and 404 logits; from 1 to 4096",
    ),
    "NaN": ({"logits": torch.full((4, 101), float("nan"))}, "has logits that are not finite"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused_in_one_sentence(lie: str, tmp_path: Path) -> None:
    changes, sentence = LIES[lie]
    tensors = {name: value for name, value in changes.items() if isinstance(value, Tensor)}
    words = {name: value for name, value in changes.items() if isinstance(value, str)}
    (tmp_path / FILE).write_bytes(file_of(prove(lively(CLASSIC)), tensors, **words))
    with pytest.raises(CheckpointError) as refused:
        read_proof(tmp_path / FILE)
    message = str(refused.value)
    assert message.startswith(str(tmp_path / FILE))
    assert sentence in message
    assert "\n" not in message


def test_a_file_that_is_broken_or_no_file_is_refused_and_none_is_none(tmp_path: Path) -> None:
    content = prove(lively(CLASSIC)).to_bytes()
    assert read_proof(tmp_path / FILE) is None
    for cut in (0, 7, 100, len(content) - 1):
        (tmp_path / FILE).write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match="is truncated"):
            read_proof(tmp_path / FILE)
    flipped = bytearray(content)
    flipped[-3] ^= 1
    (tmp_path / FILE).write_bytes(flipped)
    with pytest.raises(CheckpointError, match="its digest is another; copy it again"):
        read_proof(tmp_path / FILE)
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(CheckpointError, match="is not a file"):
        read_proof(tmp_path / FILE)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("proof"), tokenizer=False)


def test_a_server_refuses_a_model_that_its_proof_is_not_of_unless_it_is_told_not_to_ask(
    served: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    right = open_checkpoint(served)
    norm = right.read("decoder.final_layernorm.weight")
    norm[3] *= 1.5
    prove(held(right, changed={"decoder.final_layernorm.weight": norm})).save(served)
    assert main(["serve", str(served), "--port", "0", "--http-port", "0"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    refused = err.splitlines()[-1]
    assert f"preamble serve: {served} does not give the logits that its proof has" in refused
    assert f"`preamble verify SOURCE {served}`" in refused
    assert "--no-prove (prove: false)" in refused

    flags = vars(serve_parser().parse_args([str(served), "--no-prove"]))
    config = ServerConfig.read(flags.pop("config"), flags)
    with open_inside(config) as service:
        assert service.proved is None


def test_a_server_refuses_a_broken_proof_before_it_loads_anything(served: Path) -> None:
    (served / FILE).write_bytes(b"no proof")
    with pytest.raises(CheckpointError, match=f"{FILE} is truncated"):
        Found.at(ServerConfig(str(served)))
    assert Found.at(ServerConfig(str(served), prove=False)).proof is None
