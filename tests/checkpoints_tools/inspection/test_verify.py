"""`preamble verify`: every difference between two checkpoints is reported, and nothing else."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import preamble
from checkpoints_tools.conversion.convert import write_native
from checkpoints_tools.inspection.parallel_read import WorkerScratch
from checkpoints_tools.inspection.parallel_read import run_jobs as run_jobs
from checkpoints_tools.inspection.tensor_diff import TensorDiff
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.logical_tensor import checkpoint_from_tensors
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints import distcp_writer, megatron_writer
from tests.support.checkpoints.hf_models import model_of
from tests.support.checkpoints.mcore_models import CASES, save_and_run
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, Layout, edit
from tests.support.inspect_commands import Run, json_command, read_weights, write_native_model
from tests.support.models import MODERN, lively
from tests.support.process_memory import PeakMemory, anonymous_bytes
from tests.support.ranks import ranks
from tests.support.servers import WAIT_S

EMBEDDING = "embedding.word_embeddings.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return json_command("verify", capsys)


def changed_tensors(
    name: str, change: Callable[[Tensor], object], config: GPTConfig = DENSE
) -> Any:
    """Tensors of a random model, one of them changed in place."""
    tensors = read_weights(lively(config))
    change(tensors[name])
    return tensors


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (DENSE, Layout(tp=2, pp=2, names="2021", version=None)),
        (GATED, Layout(tp=2, pp=2, vpp=2)),
        (GROUPED, Layout(tp=2, pp=2, ep=2, experts="grouped")),
    ],
)
def test_any_two_formats_and_splits_of_one_model_are_equal(
    config: GPTConfig, layout: Layout, run: Run, tmp_path: Path
) -> None:
    source = megatron_writer.saved(config, layout, tmp_path / "megatron")
    # Layers of several kinds do not share keys.
    form = distcp_writer.Form(tp=2, stacked=config is not GROUPED)
    distcp_writer.saved(config, form, tmp_path / "dist")
    write_native(source, tmp_path / "native")
    digest = base_digest(source)
    for pair in (("megatron", "dist"), ("dist", "native"), ("native", "megatron")):
        code, verdict = run(*(tmp_path / name for name in pair))
        assert (code, verdict["equal"], verdict["differences"]) == (0, True, [])
        assert verdict["tensors"] == len(source.tensors)
        assert verdict["a"]["digest"] == verdict["b"]["digest"] == digest


def test_hugging_face_model_equals_its_conversion(run: Run, tmp_path: Path) -> None:
    model_of("gpt2").save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    write_native(open_checkpoint(tmp_path / "hf"), tmp_path / "native")
    code, verdict = run(tmp_path / "hf", tmp_path / "native")
    assert (code, verdict["equal"]) == (0, True)
    assert verdict["b"]["recorded_digest"] == verdict["a"]["digest"]


def test_changed_value_is_counted_and_located(run: Run, tmp_path: Path) -> None:
    def change(value: Tensor) -> None:
        value[3, 4] += 0.5
        value[7, 1] -= 2.0

    write_native_model(tmp_path / "b", DENSE, changed_tensors(FC2, change))
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2), tmp_path / "a")
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    assert code == 1
    (difference,) = verdict["differences"]
    assert (difference["name"], difference["kind"]) == (FC2, "values")
    assert (difference["differing"], difference["elements"]) == (2, 32 * 128)
    assert difference["first"] == [3, 4]
    assert difference["largest"] == pytest.approx(2.0, abs=1e-6)
    assert (
        "mp_rank_00_000" in difference["sources"][0] and "safetensors" in difference["sources"][1]
    )
    assert verdict["a"]["digest"] == base_digest(lively(DENSE))
    assert verdict["b"]["digest"] == base_digest(open_checkpoint(tmp_path / "b"))


def test_one_bit_and_the_sign_of_zero_are_differences(run: Run, tmp_path: Path) -> None:
    name = "decoder.final_layernorm.bias"
    zero = changed_tensors(name, lambda value: value.zero_())
    write_native_model(tmp_path / "a", DENSE, zero)
    zero[name][5] = -0.0
    write_native_model(tmp_path / "b", DENSE, zero)
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    (difference,) = verdict["differences"]
    assert (code, difference["name"], difference["first"], difference["largest"]) == (
        1,
        name,
        [5, 0],
        0,
    )


def test_differences_of_every_kind_are_reported(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_config = MODERN.with_fields(
        rotary_base=500.0,
        layernorm_epsilon=1e-6,
        vocab_size=90,
        qk_layernorm=False,
        hidden_dropout=0.1,
        max_position_embeddings=2048,
    )
    tensors = read_weights(lively(other_config))
    tensors[FC2] = tensors[FC2] + 1
    write_native_model(tmp_path / "a", MODERN)
    write_native_model(tmp_path / "b", other_config, tensors)
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    assert code == 1
    by_kind: dict[str, list[str]] = {}
    for difference in verdict["differences"]:
        by_kind.setdefault(difference["kind"], []).append(difference["name"])
    fields = ["layernorm_epsilon", "qk_layernorm", "rotary_base", "vocab_size"]
    assert sorted(by_kind["config"]) == fields
    assert by_kind["shape"] == [EMBEDDING, "output_layer.weight"]
    norms = [name for name in lively(MODERN).tensors if "q_layernorm" in name or "k_lay" in name]
    assert by_kind["missing"] == norms
    assert by_kind["values"] == [FC2]
    assert preamble.main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("different: ") for line in lines) == len(verdict["differences"]) + 1
    assert "different: rotary_base is 10000.0 in A, 500.0 in B" in lines
    assert f"different: {norms[0]} is in A, but not in B" in lines
    assert lines[-1].startswith("different: ")


def test_dtype_is_a_difference_and_values_are_compared_exactly(run: Run, tmp_path: Path) -> None:
    half_model = lively(DENSE).in_dtype(torch.bfloat16)
    fp32_model = checkpoint_from_tensors(
        DENSE, {name: value.float() for name, value in read_weights(half_model).items()}
    )
    write_native(half_model, tmp_path / "half")
    write_native(fp32_model, tmp_path / "wide")
    write_native(lively(DENSE), tmp_path / "full")
    code, verdict = run(tmp_path / "half", tmp_path / "wide")
    kinds = {
        (difference["kind"], difference["same_values"]) for difference in verdict["differences"]
    }
    assert (code, kinds) == (1, {("dtype", True)})
    assert len(verdict["differences"]) == len(half_model.tensors)
    code, verdict = run(tmp_path / "full", tmp_path / "half")
    matrix = next(difference for difference in verdict["differences"] if difference["name"] == FC2)
    assert (matrix["kind"], matrix["same_values"], matrix["rounded"]) == ("values", False, True)
    assert "B's values are A's, rounded" in matrix["what"]
    tensors = read_weights(half_model)
    tensors[FC2][0, 0] += 1
    write_native((DENSE, tensors), tmp_path / "other")
    _, verdict = run(tmp_path / "full", tmp_path / "other")
    matrix = next(difference for difference in verdict["differences"] if difference["name"] == FC2)
    assert not matrix["rounded"]


def test_dtype_conversion_is_reported_as_rounding_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native_model(tmp_path / "full", DENSE)
    write_native(lively(DENSE), tmp_path / "half", dtype=torch.bfloat16)
    assert preamble.main(["verify", str(tmp_path / "full"), str(tmp_path / "half")]) == 1
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert "all of them only by rounding to another dtype; 0 tensors are equal" in last_line


def test_padding_rows_are_distinguished_from_vocabulary(run: Run, tmp_path: Path) -> None:
    layout = Layout(tp=2, changes={"vocab_size": None})
    megatron_writer.saved(DENSE, layout, tmp_path / "a")
    write_native_model(tmp_path / "b", DENSE)
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "--true-vocab-size" in next(
        difference["what"]
        for difference in verdict["differences"]
        if difference["name"] == EMBEDDING
    )
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--true-vocab-size", "101")
    assert (code, verdict["equal"]) == (0, True)


def test_config_json_supplies_fields_that_old_files_lack(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(tp=2, names="2020", version=None, args=False)
    megatron_writer.saved(DENSE, layout, tmp_path / "a")
    write_native_model(tmp_path / "b", DENSE)
    assert preamble.main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "num_attention_heads" in capsys.readouterr().err
    (tmp_path / "fields.json").write_text('{"num_attention_heads": 4, "vocab_size": 101}')
    code, _ = run(tmp_path / "a", tmp_path / "b", "--config-json", tmp_path / "fields.json")
    assert code == 0


def test_memory_is_a_few_blocks_for_any_tensor_size(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers with two blocks each; the embedding alone exceeds the allowed memory."""
    config = DENSE.with_fields(vocab_size=300_000, num_layers=1, moe_layers=())
    write_native_model(tmp_path / "a", config, read_weights(lively(config)))
    arguments = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert preamble.main(["convert", *arguments, "--to", "megatron", "--tp", "2"]) == 0
    capsys.readouterr()
    run(*arguments)  # Warm-up: imports and caches do not count.
    memory_before = anonymous_bytes()
    with PeakMemory() as peak:
        assert run(*arguments, "--deep")[0] == 0
    largest = config.vocab_size * config.hidden_size * 4
    assert peak.bytes - memory_before < 36e6 < largest


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        ('{"heads": 4}', [], "has an unknown key 'heads'; choose one of"),
        ('{"vocabsize": 4}', [], "did you mean 'vocab_size'?"),
        ("[4]", [], "is not a JSON object"),
        ("{", [], "is not JSON"),
        ('{"vocab_size": 4}', ["--true-vocab-size", "5"], "remove one of them"),
        ("{}", ["--true-vocab-size", "0"], "must be a whole number of at least 1"),
    ],
)
def test_invalid_flag_is_refused_by_name(
    text: str, flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fields.json").write_text(text)
    arguments = ["verify", "nothing", "--config-json", str(tmp_path / "fields.json"), *flags]
    assert preamble.main(arguments) == 1
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def damage(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def test_single_checkpoint_is_compared_with_its_manifest(run: Run, tmp_path: Path) -> None:
    folder = write_native_model(tmp_path / "whole", DENSE)
    code, verdict = run(folder)
    assert (code, verdict["good"], verdict["equal"], verdict["b"]) == (0, True, None, None)
    assert verdict["a"]["digest"] == verdict["a"]["recorded_digest"]
    weights_file = next(folder.glob("*.safetensors"))
    damage(weights_file, weights_file.stat().st_size - 1)
    code, verdict = run(folder)
    assert (code, verdict["good"]) == (1, False)
    file, digest = verdict["a"]["faults"]
    assert file.startswith(f"{weights_file}: its ") and "preamble.json records" in file
    assert "records the digest" in digest


def test_converted_checkpoint_keeps_the_digest_of_its_origin(run: Run, tmp_path: Path) -> None:
    write_native(lively(DENSE), tmp_path / "half", dtype=torch.bfloat16)
    code, verdict = run(tmp_path / "half")
    assert code == 0
    assert verdict["a"]["recorded_digest"] == base_digest(lively(DENSE))
    assert verdict["a"]["digest"] != verdict["a"]["recorded_digest"]
    assert "of the original checkpoint" in verdict["a"]["remarks"][0]


def test_single_checkpoint_without_checksums_is_refused(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path / "a")
    assert preamble.main(["verify", str(tmp_path / "a")]) == 1
    err = capsys.readouterr().err
    assert "has no preamble.json" in err and "give a second checkpoint" in err
    assert run(tmp_path / "a", "--deep")[0] == 0


def test_deep_scan_finds_faults_that_both_sides_share(run: Run, tmp_path: Path) -> None:
    def set_nan(value: Tensor) -> None:
        value[2, 3] = torch.nan

    for name in ("a", "b"):
        write_native_model(tmp_path / name, DENSE, changed_tensors(FC2, set_nan))
    assert run(tmp_path / "a", tmp_path / "b")[0] == 0
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--deep", "--workers", "1")
    assert (code, verdict["equal"], verdict["good"]) == (1, True, False)
    for side in "ab":
        (fault,) = verdict[side]["faults"]
        assert fault.startswith(f"{FC2}: 1 NaN of 4,096 values, the first at [2, 3]")


def test_nan_equals_nan_only_with_the_same_bits() -> None:
    equal_nan = TensorDiff()
    equal_nan.add_block(0, torch.tensor([[torch.nan, 1.0]]), torch.tensor([[torch.nan, 1.0]]))
    assert equal_nan.differing_elements == 0
    fp32_nan = TensorDiff()
    fp32_nan.add_block(
        0, torch.tensor([[torch.nan, 1.0]]), torch.tensor([[torch.nan, 1.0]]).bfloat16()
    )
    assert (
        fp32_nan.differing_elements,
        fp32_nan.right_is_rounded_left,
        fp32_nan.left_is_rounded_right,
    ) == (
        0,
        True,
        True,
    )
    different_nan = TensorDiff()
    different_nan.add_block(4, torch.tensor([[1.0, torch.nan]]), torch.tensor([[1.0, 1.0]]))
    assert (
        different_nan.differing_elements,
        different_nan.first_index,
        different_nan.to_dict()["largest"],
    ) == (
        1,
        (4, 1),
        None,
    )
    assert "some in values that are not finite" in different_nan.summary


KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", KINDS)
def test_comparison_matches_a_simple_reference(left: torch.dtype, right: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    left_values = torch.randn(40, 9, generator=generator, dtype=torch.float64).to(left)
    right_values = torch.where(
        torch.rand(40, 9, generator=generator) < 0.1, 2 * left_values, left_values
    ).to(right)
    difference = TensorDiff()
    for start in range(0, 40, 7):
        difference.add_block(start, left_values[start : start + 7], right_values[start : start + 7])
    differ = left_values.double() != right_values.double()
    assert difference.differing_elements == int(differ.sum())
    assert difference.first_index == tuple(differ.nonzero()[0].tolist())
    assert difference.abs_diff_max == float(
        (left_values.double() - right_values.double()).abs().max()
    )
    assert difference.elements == 360


def test_proof_is_replayed_on_both_checkpoints(run: Run, tmp_path: Path) -> None:
    from gpt.reference_logits.replay import compute_proof

    write_native_model(tmp_path / "a", DENSE)
    compute_proof(open_checkpoint(tmp_path / "a")).save(tmp_path / "a")
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2), tmp_path / "b")
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--prove")
    assert (code, verdict["a"]["proven"], verdict["b"]["proven"]) == (0, True, True)
    shutil.rmtree(tmp_path / "b")
    megatron_writer.saved(DENSE, Layout(tp=2, version=1.0), tmp_path / "b")
    edit(tmp_path / "b", "*", lambda record: record.update(checkpoint_version=3.0))
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--prove")
    assert (code, verdict["a"]["proven"], verdict["b"]["proven"]) == (1, True, False)
    assert "over the limit" in verdict["b"]["proof"]


def test_prove_without_a_proof_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native_model(tmp_path / "a", DENSE)
    assert preamble.main(["verify", str(tmp_path / "a"), "--prove"]) == 1
    assert (
        "preamble.proof.safetensors, the file with the reference logits that --prove needs"
        in capsys.readouterr().err
    )


def test_failed_job_stops_the_others() -> None:
    started = threading.Event()

    def run_until_stopped(scratch: WorkerScratch) -> None:
        while True:
            scratch.report_bytes(1)
            started.set()

    def fail(scratch: WorkerScratch) -> None:
        started.wait(WAIT_S)
        raise CheckpointError("this one")

    with pytest.raises(CheckpointError, match="this one"):
        run_jobs([run_until_stopped, fail, run_until_stopped], 2, lambda size: None)


# A case for each kind of replicas and of file names; tests/gpt/formats/megatron/test_reader.py
# saves and reads all cases.
SAVED_CASES = (
    "classic, TP 2 x PP 2 x VPP 2",
    "modern, fewer groups than ranks, TP 4",
    "uneven stages, PP 3",
    "experts, TP 2 x EP 2",
    "as GPT-OSS, PP 2 x EP 2",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED_CASES)
def test_checkpoint_saved_by_megatron_core_has_no_fault(
    case: str, run: Run, tmp_path: Path
) -> None:
    """Replicas on its ranks are equal, and its files record their own ranks."""
    ranks(CASES[case].ranks, save_and_run, CASES[case], tmp_path / "a", timeout_s=120.0)
    source = open_checkpoint(tmp_path / "a")
    assert source.copies
    write_native(source, tmp_path / "b")
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--deep")
    assert (code, verdict["equal"], verdict["a"]["faults"]) == (0, True, [])
