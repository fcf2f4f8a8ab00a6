"""`preamble verify`: every difference between two checkpoints is named, and nothing else is."""

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
from checkpoints_tools.inspection.parallel_read import Desk
from checkpoints_tools.inspection.parallel_read import run as run_jobs
from checkpoints_tools.inspection.tensor_diff import Comparison
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.logical_tensor import in_memory
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints import distcp_writer, megatron_writer
from tests.support.checkpoints.hf_models import model_of
from tests.support.checkpoints.mcore_models import CASES, save_and_run
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, Layout, edit
from tests.support.inspect_commands import Run, answering, native, weights
from tests.support.models import MODERN, lively
from tests.support.process_memory import Peak, anonymous_bytes
from tests.support.ranks import ranks

EMBEDDING = "embedding.word_embeddings.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return answering("verify", capsys)


def changed(name: str, change: Callable[[Tensor], object], config: GPTConfig = DENSE) -> Any:
    """A lively model's tensors, one of them changed in place."""
    tensors = weights(lively(config))
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
    # Layers that are not all of one kind do not share keys.
    form = distcp_writer.Form(tp=2, stacked=config is not GROUPED)
    distcp_writer.saved(config, form, tmp_path / "dist")
    write_native(source, tmp_path / "native")
    digest = base_digest(source)
    for pair in (("megatron", "dist"), ("dist", "native"), ("native", "megatron")):
        code, verdict = run(*(tmp_path / name for name in pair))
        assert (code, verdict["equal"], verdict["differences"]) == (0, True, [])
        assert verdict["tensors"] == len(source.tensors)
        assert verdict["a"]["digest"] == verdict["b"]["digest"] == digest


def test_a_model_of_hugging_face_equals_its_conversion(run: Run, tmp_path: Path) -> None:
    model_of("gpt2").save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    write_native(open_checkpoint(tmp_path / "hf"), tmp_path / "native")
    code, verdict = run(tmp_path / "hf", tmp_path / "native")
    assert (code, verdict["equal"]) == (0, True)
    assert verdict["b"]["recorded_digest"] == verdict["a"]["digest"]


def test_a_changed_value_is_found_counted_and_placed(run: Run, tmp_path: Path) -> None:
    def change(value: Tensor) -> None:
        value[3, 4] += 0.5
        value[7, 1] -= 2.0

    native(tmp_path / "b", DENSE, changed(FC2, change))
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2), tmp_path / "a")
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    assert code == 1
    (found,) = verdict["differences"]
    assert (found["name"], found["kind"]) == (FC2, "values")
    assert (found["differing"], found["elements"]) == (2, 32 * 128)
    assert found["first"] == [3, 4]
    assert found["largest"] == pytest.approx(2.0, abs=1e-6)
    assert "mp_rank_00_000" in found["sources"][0] and "safetensors" in found["sources"][1]
    assert verdict["a"]["digest"] == base_digest(lively(DENSE))
    assert verdict["b"]["digest"] == base_digest(open_checkpoint(tmp_path / "b"))


def test_one_bit_and_the_sign_of_zero_are_differences(run: Run, tmp_path: Path) -> None:
    name = "decoder.final_layernorm.bias"
    zero = changed(name, lambda value: value.zero_())
    native(tmp_path / "a", DENSE, zero)
    zero[name][5] = -0.0
    native(tmp_path / "b", DENSE, zero)
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    (found,) = verdict["differences"]
    assert (code, found["name"], found["first"], found["largest"]) == (1, name, [5, 0], 0)


def test_every_difference_is_named_whatever_its_kind(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = MODERN.with_fields(
        rotary_base=500.0, layernorm_epsilon=1e-6, vocab_size=90, qk_layernorm=False,
        hidden_dropout=0.1, max_position_embeddings=2048,
    )  # fmt: skip
    tensors = weights(lively(other))
    tensors[FC2] = tensors[FC2] + 1
    native(tmp_path / "a", MODERN)
    native(tmp_path / "b", other, tensors)
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    assert code == 1
    by_kind: dict[str, list[str]] = {}
    for one in verdict["differences"]:
        by_kind.setdefault(one["kind"], []).append(one["name"])
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


def test_a_dtype_is_a_difference_and_the_values_are_compared_exactly(
    run: Run, tmp_path: Path
) -> None:
    half = lively(DENSE).in_dtype(torch.bfloat16)
    wide = in_memory(DENSE, {name: value.float() for name, value in weights(half).items()})
    write_native(half, tmp_path / "half")
    write_native(wide, tmp_path / "wide")
    write_native(lively(DENSE), tmp_path / "full")
    code, verdict = run(tmp_path / "half", tmp_path / "wide")
    kinds = {(one["kind"], one["same_values"]) for one in verdict["differences"]}
    assert (code, kinds) == (1, {("dtype", True)})
    assert len(verdict["differences"]) == len(half.tensors)
    code, verdict = run(tmp_path / "full", tmp_path / "half")
    matrix = next(one for one in verdict["differences"] if one["name"] == FC2)
    assert (matrix["kind"], matrix["same_values"], matrix["rounded"]) == ("values", False, True)
    assert "B's values being A's, rounded" in matrix["what"]
    tensors = weights(half)
    tensors[FC2][0, 0] += 1
    write_native((DENSE, tensors), tmp_path / "other")
    _, verdict = run(tmp_path / "full", tmp_path / "other")
    matrix = next(one for one in verdict["differences"] if one["name"] == FC2)
    assert not matrix["rounded"]


def test_a_conversion_is_told_to_be_rounding_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native(tmp_path / "full", DENSE)
    write_native(lively(DENSE), tmp_path / "half", dtype=torch.bfloat16)
    assert preamble.main(["verify", str(tmp_path / "full"), str(tmp_path / "half")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "all of them by rounding to another dtype alone; 0 tensors are equal" in last


def test_rows_of_padding_are_told_from_a_vocabulary(run: Run, tmp_path: Path) -> None:
    layout = Layout(tp=2, changes={"vocab_size": None})
    megatron_writer.saved(DENSE, layout, tmp_path / "a")
    native(tmp_path / "b", DENSE)
    code, verdict = run(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "--true-vocab-size" in next(
        one["what"] for one in verdict["differences"] if one["name"] == EMBEDDING
    )
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--true-vocab-size", "101")
    assert (code, verdict["equal"]) == (0, True)


def test_a_file_of_fields_answers_what_old_files_do_not_say(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(tp=2, names="2020", version=None, args=False)
    megatron_writer.saved(DENSE, layout, tmp_path / "a")
    native(tmp_path / "b", DENSE)
    assert preamble.main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "num_attention_heads" in capsys.readouterr().err
    (tmp_path / "fields.json").write_text('{"num_attention_heads": 4, "vocab_size": 101}')
    code, _ = run(tmp_path / "a", tmp_path / "b", "--config-json", tmp_path / "fields.json")
    assert code == 0


def test_memory_is_a_few_blocks_whatever_the_tensors_size(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers, two blocks each; the embedding alone is larger than all that is allowed."""
    config = DENSE.with_fields(vocab_size=300_000, num_layers=1, moe_layers=())
    native(tmp_path / "a", config, weights(lively(config)))
    words = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert preamble.main(["convert", *words, "--to", "megatron", "--tp", "2"]) == 0
    capsys.readouterr()
    run(*words)  # What is imported and kept once does not count.
    before = anonymous_bytes()
    with Peak() as peak:
        assert run(*words, "--deep")[0] == 0
    largest = config.vocab_size * config.hidden_size * 4
    assert peak.bytes - before < 36e6 < largest


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        ('{"heads": 4}', [], "has an unknown key 'heads'; known are: "),
        ('{"vocabsize": 4}', [], "did you mean 'vocab_size'?"),
        ("[4]", [], "is not a JSON object"),
        ("{", [], "is not JSON"),
        ('{"vocab_size": 4}', ["--true-vocab-size", "5"], "give one of them"),
        ("{}", ["--true-vocab-size", "0"], "must be a whole number of at least 1"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_by_name(
    text: str, flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fields.json").write_text(text)
    words = ["verify", "nothing", "--config-json", str(tmp_path / "fields.json"), *flags]
    assert preamble.main(words) == 1
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def damage(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_alone_is_held_against_its_manifest(run: Run, tmp_path: Path) -> None:
    whole = native(tmp_path / "whole", DENSE)
    code, verdict = run(whole)
    assert (code, verdict["good"], verdict["equal"], verdict["b"]) == (0, True, None, None)
    assert verdict["a"]["digest"] == verdict["a"]["recorded_digest"]
    weights_file = next(whole.glob("*.safetensors"))
    damage(weights_file, weights_file.stat().st_size - 1)
    code, verdict = run(whole)
    assert (code, verdict["good"]) == (1, False)
    file, digest = verdict["a"]["faults"]
    assert file.startswith(f"{weights_file}: its ") and "preamble.json says" in file
    assert "records the digest" in digest


def test_a_converted_checkpoint_keeps_the_digest_of_its_origin(run: Run, tmp_path: Path) -> None:
    write_native(lively(DENSE), tmp_path / "half", dtype=torch.bfloat16)
    code, verdict = run(tmp_path / "half")
    assert code == 0
    assert verdict["a"]["recorded_digest"] == base_digest(lively(DENSE))
    assert verdict["a"]["digest"] != verdict["a"]["recorded_digest"]
    assert "of its origin" in verdict["a"]["remarks"][0]


def test_without_checksums_there_is_nothing_to_hold_one_checkpoint_against(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path / "a")
    assert preamble.main(["verify", str(tmp_path / "a")]) == 1
    err = capsys.readouterr().err
    assert "has no preamble.json" in err and "give a second checkpoint" in err
    assert run(tmp_path / "a", "--deep")[0] == 0


def test_a_deep_look_finds_what_equality_does_not(run: Run, tmp_path: Path) -> None:
    def poison(value: Tensor) -> None:
        value[2, 3] = torch.nan

    for name in ("a", "b"):
        native(tmp_path / name, DENSE, changed(FC2, poison))
    assert run(tmp_path / "a", tmp_path / "b")[0] == 0
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--deep", "--workers", "1")
    assert (code, verdict["equal"], verdict["good"]) == (1, True, False)
    for side in "ab":
        (fault,) = verdict[side]["faults"]
        assert fault.startswith(f"{FC2}: 1 NaN of 4,096 values, the first at [2, 3]")


def test_what_is_not_a_number_equals_itself_only_bit_by_bit() -> None:
    same = Comparison()
    same.add(0, torch.tensor([[torch.nan, 1.0]]), torch.tensor([[torch.nan, 1.0]]))
    assert same.differing == 0
    wide = Comparison()
    wide.add(0, torch.tensor([[torch.nan, 1.0]]), torch.tensor([[torch.nan, 1.0]]).bfloat16())
    assert (wide.differing, wide.left_rounded, wide.right_rounded) == (0, True, True)
    other = Comparison()
    other.add(4, torch.tensor([[1.0, torch.nan]]), torch.tensor([[1.0, 1.0]]))
    assert (other.differing, other.first, other.record()["largest"]) == (1, (4, 1), None)
    assert "in what is not finite" in other.sentence


KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", KINDS)
def test_a_comparison_agrees_with_the_plain_one(left: torch.dtype, right: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mine = torch.randn(40, 9, generator=generator, dtype=torch.float64).to(left)
    its = torch.where(torch.rand(40, 9, generator=generator) < 0.1, 2 * mine, mine).to(right)
    found = Comparison()
    for start in range(0, 40, 7):
        found.add(start, mine[start : start + 7], its[start : start + 7])
    differ = mine.double() != its.double()
    assert found.differing == int(differ.sum())
    assert found.first == tuple(differ.nonzero()[0].tolist())
    assert found.largest == float((mine.double() - its.double()).abs().max())
    assert found.elements == 360


def test_a_proof_is_replayed_on_both(run: Run, tmp_path: Path) -> None:
    from gpt.model.reference_logits import prove

    native(tmp_path / "a", DENSE)
    prove(open_checkpoint(tmp_path / "a")).save(tmp_path / "a")
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2), tmp_path / "b")
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--prove")
    assert (code, verdict["a"]["proven"], verdict["b"]["proven"]) == (0, True, True)
    shutil.rmtree(tmp_path / "b")
    megatron_writer.saved(DENSE, Layout(tp=2, version=1.0), tmp_path / "b")
    edit(tmp_path / "b", "*", lambda record: record.update(checkpoint_version=3.0))
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--prove")
    assert (code, verdict["a"]["proven"], verdict["b"]["proven"]) == (1, True, False)
    assert "over the limit" in verdict["b"]["proof"]


def test_a_proof_that_is_not_there_cannot_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native(tmp_path / "a", DENSE)
    assert preamble.main(["verify", str(tmp_path / "a"), "--prove"]) == 1
    assert "preamble.proof.safetensors, which is what --prove replays" in capsys.readouterr().err


def test_a_job_that_fails_stops_the_others() -> None:
    began = threading.Event()

    def endless(desk: Desk) -> None:
        while True:
            desk.report(1)
            began.set()

    def failing(desk: Desk) -> None:
        began.wait(10)
        raise CheckpointError("this one")

    with pytest.raises(CheckpointError, match="this one"):
        run_jobs([endless, failing, endless], 2, lambda size: None)


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name, one in CASES.items() if one.ranks > 1])
def test_what_megatron_core_saved_has_no_fault(case: str, run: Run, tmp_path: Path) -> None:
    """Replicas on its ranks are equal, and its files say their own places."""
    ranks(CASES[case].ranks, save_and_run, CASES[case], tmp_path / "a", timeout_s=120.0)
    source = open_checkpoint(tmp_path / "a")
    assert source.copies
    write_native(source, tmp_path / "b")
    code, verdict = run(tmp_path / "a", tmp_path / "b", "--deep")
    assert (code, verdict["equal"], verdict["a"]["faults"]) == (0, True, [])
