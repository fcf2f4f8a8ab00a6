"""`preamble inspect`: what a checkpoint is, and whether a planted fault is found and named."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import preamble
from checkpoints_tools.inspection.report import Report, _gpu_gb
from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count, rank_costs
from gpt.formats.native import open_native
from tests.support.checkpoints import distcp_writer, megatron_writer, nemo_writer
from tests.support.checkpoints.hf_models import model_of
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, Layout, edit
from tests.support.checkpoints.nemo_writer import Nemo
from tests.support.inspect_commands import Run, answering, native, weights
from tests.support.models import EXPERTS, MODERN, lively
from tests.support.trained_tokenizers import sentencepiece_model

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return answering("inspect", capsys)


def test_a_megatron_checkpoint_is_described(run: Run, tmp_path: Path) -> None:
    layout = Layout(tp=2, pp=2, changes={"hidden_dropout": 0.1})
    megatron_writer.saved(DENSE, layout, tmp_path, "bfloat16")
    code, report = run(tmp_path)
    assert code == 0
    assert (report["format"], report["given"]) == ("megatron", str(tmp_path))
    assert report["path"] == str(tmp_path / "iter_0000100")
    tracker, ranks = report["evidence"]
    assert tracker == "latest_checkpointed_iteration.txt (names iter_0000100)"
    assert ranks == "mp_rank_00_000 to mp_rank_01_001"
    assert report["split"] == {"tp": 2, "pp": 2, "ep": 1, "vpp": 1}
    files = list(tmp_path.glob("*/*/*.pt"))
    assert report["files"] == 4
    assert report["file_bytes"] == sum(file.stat().st_size for file in files)
    assert list(report["dtypes"]) == ["bfloat16"]
    assert report["parameters"] == report["active_parameters"] == parameter_count(DENSE)
    assert (report["vocabulary_rows"], report["padding_rows"]) == (112, 11)
    assert GPTConfig.from_dict(report["config"]).dtype == "bfloat16"
    assert report["tokenizer"] is None and report["digest"] is None
    assert any("no tokenizer" in line for line in report["remarks"])
    assert any("hidden_dropout was 0.1" in line for line in report["remarks"])
    assert report["faults"] == [] and report["deep"] is False


def test_the_keys_of_the_object_are_those_of_the_report(run: Run, tmp_path: Path) -> None:
    _, report = run(native(tmp_path / "a", DENSE))
    assert list(report) == list(Report.__dataclass_fields__)
    split = report["splits"][0]
    assert list(split) == [
        *("tp", "pp", "weight_bytes", "kv_bytes_per_token", "kv_bytes_per_context"),
        *("dtype", "gpu_gb"),
    ]


def test_what_serving_takes_is_what_the_ledger_says(run: Run, tmp_path: Path) -> None:
    _, report = run(native(tmp_path / "a", MODERN))
    found = {(one["tp"], one["pp"]): one for one in report["splits"] if one["dtype"] == "float32"}
    assert (4, 1) in found and (1, 4) in found
    assert (8, 1) not in found and (3, 1) not in found  # 44 columns are not cut in 8.
    costs = rank_costs(MODERN, 2, 2)
    assert found[2, 2]["weight_bytes"] == max(cost.weight_bytes for cost in costs)
    token = max(cost.kv_bytes_per_token for cost in costs)
    assert found[2, 2]["kv_bytes_per_token"] == token
    assert found[2, 2]["kv_bytes_per_context"] == token * MODERN.max_position_embeddings
    assert found[2, 2]["gpu_gb"] == 16, "the smallest that is listed"
    halves = [one for one in report["splits"] if one["dtype"] == "bfloat16"]
    assert 2 * halves[0]["weight_bytes"] == found[1, 1]["weight_bytes"]


@pytest.mark.parametrize(
    ("weights_gb", "kv_gb", "gpu_gb"), [(10, 1, 16), (40, 20, 80), (150, 0, 180), (170, 9, None)]
)
def test_a_gpu_is_named_that_leaves_a_tenth_free(
    weights_gb: int, kv_gb: int, gpu_gb: int | None
) -> None:
    assert _gpu_gb(int((weights_gb + kv_gb) * 1e9), int(weights_gb * 1e9)) == gpu_gb


def test_only_some_experts_are_active(run: Run, tmp_path: Path) -> None:
    _, report = run(native(tmp_path / "a", EXPERTS))
    per_expert = 3 * 32 * 24 + 2 * 24 + 24 * 0 + 32  # Gate, up, down and their biases.
    idle = 3 * 3 * per_expert  # Three layers, in each three of five.
    assert report["parameters"] - report["active_parameters"] == idle


@pytest.mark.parametrize(
    ("write", "name", "evidence"),
    [
        (lambda root: native(root, DENSE), "native", "preamble.json"),
        (
            lambda root: model_of("gpt2").save_pretrained(root),
            "huggingface",
            "config.json",
        ),
        (
            lambda root: distcp_writer.saved(DENSE, distcp_writer.Form(tp=2), root),
            "torch_dist",
            "metadata.json",
        ),
    ],
    ids=["native", "huggingface", "torch_dist"],
)
def test_every_format_says_how_it_was_recognised_and_is_whole(
    write: Callable[[Path], Any], name: str, evidence: str, run: Run, tmp_path: Path
) -> None:
    write(tmp_path / "a")
    code, report = run(tmp_path / "a", "--deep")
    assert (code, report["format"], report["faults"], report["deep"]) == (0, name, [], True)
    assert evidence in report["evidence"]


@pytest.mark.parametrize("folded", [False, True])
def test_distributed_files_say_the_split_only_in_their_args(
    folded: bool, run: Run, tmp_path: Path
) -> None:
    distcp_writer.saved(DENSE, distcp_writer.Form(tp=2, folded=folded), tmp_path)
    assert run(tmp_path)[1]["split"] == {"tp": 2, "pp": 1, "ep": 1}


def test_people_get_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron_writer.saved(GROUPED, Layout(tp=2, pp=2, ep=2, experts="te grouped"), tmp_path)
    assert preamble.main(["inspect", str(tmp_path), "--deep"]) == 0
    out, _ = capsys.readouterr()
    for line in (
        "written at   TP 2 x PP 2 x EP 2",
        "attention    4 heads of 8 in 2 groups (GQA)",
        "experts      4 in 2 layers, 2 for a token, 24 wide, sigmoid, and a shared one 16 wide",
        "head         tied to the embedding",
        "every byte was read, and no fault found",
    ):
        assert line in out, line
    assert "  TP 2  x PP 1 " in out


def test_a_digest_is_told_once_verify_has_computed_it(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron_writer.saved(DENSE, Layout(), tmp_path / "m")
    whole = native(tmp_path / "n", DENSE)
    assert run(tmp_path / "m")[1]["digest"] is None
    assert preamble.main(["verify", str(tmp_path / "m"), str(whole)]) == 0
    capsys.readouterr()
    known = open_native(whole).identity
    assert known is not None
    assert run(tmp_path / "m")[1]["digest"] == run(whole)[1]["digest"] == known.digest


def test_tokenizers_are_looked_at(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "iter_0000100"
    megatron_writer.saved(DENSE, Layout(changes={"vocab_size": None}), tmp_path / "a")
    assert any("give --true-vocab-size" in line for line in run(tmp_path / "a")[1]["remarks"])
    assert run(tmp_path / "a", "--true-vocab-size", "101")[1]["padding_rows"] == 3
    (folder / "null.json").write_text('{"vocab_size": 101}')
    _, report = run(tmp_path / "a")
    assert (report["tokenizer"]["kind"], report["tokenizer"]["vocab_size"]) == ("null", 101)
    assert any("give --true-vocab-size 101" in line for line in report["remarks"])
    (folder / "null.json").write_text('{"vocab_size": 105}')
    assert any("has ids up to 104" in line for line in run(tmp_path / "a")[1]["remarks"])
    (folder / "null.json").write_text("{}")
    assert any(line.startswith("tokenizer: ") for line in run(tmp_path / "a")[1]["remarks"])
    (folder / "null.json").unlink()
    (folder / "tokenizer.model").symlink_to(tmp_path / "gone.model")
    assert any("is a link to nothing" in line for line in run(tmp_path / "a")[1]["remarks"])
    (tmp_path / "gone.model").write_bytes(sentencepiece_model(model_type="bpe"))
    assert run(tmp_path / "a")[1]["tokenizer"]["kind"] == "sentencepiece"


def test_a_newer_iteration_and_mixed_dtypes_look_wrong(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(), tmp_path)
    edit(tmp_path, "*", lambda record: record["model"].update(
        {NORM: record["model"][NORM].bfloat16()}))  # fmt: skip
    (tmp_path / "iter_0000200").mkdir()
    _, report = run(tmp_path)
    assert any(line.startswith("iter_0000200 is newer") for line in report["remarks"])
    assert not any("newer" in line for line in report["notes"])
    assert any("32 of bfloat16" in line for line in report["remarks"])


def test_a_head_that_equals_the_embedding_is_a_waste(run: Run, tmp_path: Path) -> None:
    tensors = weights(lively(GATED))
    tensors[HEAD] = tensors[EMBEDDING].clone()
    native(tmp_path / "a", GATED, tensors)
    _, report = run(tmp_path / "a")
    (line,) = [line for line in report["remarks"] if line.startswith(HEAD)]
    assert f"{GATED.vocab_size * 32 * 4:,} bytes smaller" in line
    tensors[HEAD][5, 5] += 1  # No row that is sampled.
    native(tmp_path / "b", GATED, tensors)
    for flags, seen in (((), True), (("--deep",), False)):
        remarks = run(tmp_path / "b", *flags)[1]["remarks"]
        assert any(line.startswith(HEAD) for line in remarks) is seen


def test_weights_that_their_manifest_does_not_know_are_a_fault(run: Run, tmp_path: Path) -> None:
    native(tmp_path / "a", DENSE)
    native(tmp_path / "b", DENSE, {k: v * 2 for k, v in weights(lively(DENSE)).items()})
    for file in (tmp_path / "b").glob("*.safetensors"):
        shutil.copy(file, tmp_path / "a" / file.name)
    code, report = run(tmp_path / "a")
    assert code == 1
    assert "not those that its manifest describes" in report["faults"][0]


def fault_of(run: Run, path: Path) -> str:
    code, report = run(path, "--deep")
    assert code == 1
    (fault,) = report["faults"]
    return str(fault)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({(3, 4): torch.nan, (9, 0): torch.nan}, "2 NaN of 4,096 values, the first at [3, 4]"),
        ({(0, 0): torch.inf}, "1 infinite of 4,096 values, the first at [0, 0]"),
        ({(31, 127): -torch.inf, (8, 1): torch.nan}, "1 NaN and 1 infinite of 4,096 values"),
    ],
)
def test_values_that_are_not_finite_are_counted_and_placed(
    values: dict[tuple[int, int], float], words: str, run: Run, tmp_path: Path
) -> None:
    tensors = weights(lively(DENSE))
    for place, value in values.items():
        tensors[FC2][place] = value
    megatron_writer.write(DENSE, tensors, tmp_path, Layout(tp=2, pp=2))
    assert run(tmp_path)[0] == 0
    fault = fault_of(run, tmp_path)
    assert fault.startswith(f"{FC2}: {words}")
    assert "mp_rank_0" in fault and "model_optim_rng.pt" in fault


def test_a_matrix_of_one_value_is_a_fault_and_vectors_are_worth_a_look(
    run: Run, tmp_path: Path
) -> None:
    tensors = weights(lively(DENSE))
    tensors[FC2].zero_()
    tensors[NORM].fill_(1)
    tensors["decoder.final_layernorm.bias"].zero_()
    native(tmp_path / "a", DENSE, tensors)
    assert fault_of(run, tmp_path / "a") == f"{FC2}: all 4,096 values are zero"
    _, report = run(tmp_path / "a", "--deep")
    line = f"{NORM}, decoder.final_layernorm.bias: 2 vectors hold one value each"
    assert any(remark.startswith(line) for remark in report["remarks"])


def test_a_norm_that_differs_on_a_tensor_rank_is_found(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2), tmp_path)

    def change(record: dict[str, Any]) -> None:
        record["model"]["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"][7] += 0.25

    edit(tmp_path, "mp_rank_01_001", change)
    fault = fault_of(run, tmp_path)
    assert "mp_rank_01_001/model_optim_rng.pt" in fault.split(" is not equal to ")[0]
    assert "both are decoder.layers.3.mlp.linear_fc1.layer_norm_weight" in fault
    assert "1 of 32 values differ, the first at [7, 0]" in fault and "at most by 0.25" in fault


def test_what_differs_on_an_expert_rank_is_found(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(GROUPED, Layout(tp=2, ep=2, experts="grouped"), tmp_path)
    assert run(tmp_path, "--deep")[0] == 0
    key = "decoder.layers.0.self_attention.linear_proj.weight"
    edit(tmp_path, "mp_rank_01_001", lambda record: record["model"][key].mul_(2))
    fault = fault_of(run, tmp_path)
    assert "mp_rank_01_001" in fault.split(" is not equal to ")[0]
    assert "mp_rank_01_000" in fault.split(" is not equal to ")[1]


@pytest.mark.parametrize("names", ["te", "2021"])
def test_the_copy_of_a_tied_embedding_is_compared_whole(
    names: str, run: Run, tmp_path: Path
) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2, names=names), tmp_path)

    def change(record: dict[str, Any]) -> None:
        model = record["model"]
        copy = model["word_embeddings_for_head"]["weight"] if names == "2021" else model[HEAD]
        copy[9, 2] += 1  # No row that the reader samples.

    edit(tmp_path, "mp_rank_01_001", change)
    assert run(tmp_path)[0] == 0
    fault = fault_of(run, tmp_path)
    assert "the first at [9, 2]" in fault and f"both are {EMBEDDING}" in fault


def test_the_copy_of_a_tied_head_in_hugging_face_files_is_compared_whole(
    run: Run, tmp_path: Path
) -> None:
    model = model_of("gpt2")
    model.save_pretrained(tmp_path)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["lm_head.weight"][9, 2] += 1
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    fault = fault_of(run, tmp_path)
    assert fault.startswith(f"{tmp_path}/pytorch_model.bin: lm_head.weight: is not equal to ")


def flip(file: Path, record: str) -> None:
    """One bit in the middle of a record of a zip."""
    with zipfile.ZipFile(file) as archive:
        member = next(one for one in archive.infolist() if one.filename.endswith(record))
    content = bytearray(file.read_bytes())
    head = member.header_offset
    start = (
        head
        + 30
        + sum(int.from_bytes(content[head + at : head + at + 2], "little") for at in (26, 28))
    )
    content[start + member.file_size // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_in_a_rank_file_is_found_by_its_checksum(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)
    file = tmp_path / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt"
    flip(file, "/data/3")
    assert run(tmp_path)[0] == 0
    _, report = run(tmp_path, "--deep")
    assert any(
        fault.startswith(f"{file}: ") and "/data/3 is damaged: its bytes" in fault
        for fault in report["faults"]
    )


def test_a_file_without_checksums_is_no_fault(run: Run, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert run(tmp_path, "--deep")[0] == 0


def test_a_flipped_bit_in_a_distributed_chunk_is_found(run: Run, tmp_path: Path) -> None:
    source = distcp_writer.saved(DENSE, distcp_writer.Form(tp=2), tmp_path)
    value = source.read(FC2)[:4, :64].contiguous().view(torch.uint8).numpy().tobytes()[:64]
    for file in tmp_path.glob("*/*.distcp"):
        content = bytearray(file.read_bytes())
        place = content.find(value)
        if place >= 0:
            content[place + 1] ^= 1
            file.write_bytes(content)
            break
    else:
        pytest.fail("the chunk is in no file")
    assert fault_of(run, tmp_path).startswith(f"{file} at byte ")


@pytest.mark.parametrize(
    "nemo",
    [
        Nemo(tp=2, pp=2),
        Nemo(tp=2, pp=2, pack="gz"),
        Nemo(tp=2, pack="dir"),
        Nemo(form=distcp_writer.Form(tp=2)),
    ],
)
def test_an_archive_of_nemo_is_looked_into(nemo: Nemo, run: Run, tmp_path: Path) -> None:
    source = nemo_writer.saved(DENSE, nemo, tmp_path)
    code, report = run(tmp_path / "gpt.nemo", "--deep")
    assert (code, report["format"], report["faults"]) == (0, "nemo", [])
    assert report["split"] == ({} if nemo.form else {"tp": 2, "pp": nemo.pp, "ep": 1, "vpp": 1})
    if nemo.pack == "gz":
        return  # What it was unpacked to has been checked by gzip.
    files = [path for path in (tmp_path / "gpt.nemo").rglob("*") if path.is_file()]
    value = source.read(FC2)[0, :64].numpy().tobytes()
    for file in files or [tmp_path / "gpt.nemo"]:
        content = bytearray(file.read_bytes())
        place = content.find(value)
        if place >= 0:
            content[place + 1] ^= 1
            file.write_bytes(content)
            break
    else:
        pytest.fail("the weights are in no file")
    fault = fault_of(run, tmp_path / "gpt.nemo")
    assert fault.startswith(str(tmp_path / "gpt.nemo")) and "CRC-32" in fault


def test_copies_in_an_archive_of_nemo_are_compared(run: Run, tmp_path: Path) -> None:
    source = nemo_writer.saved(DENSE, Nemo(tp=2), tmp_path)
    norm = source.read(NORM).numpy().tobytes()
    content = bytearray((tmp_path / "gpt.nemo").read_bytes())
    assert content.count(norm) == 2
    content[content.rfind(norm) + 1] ^= 1
    (tmp_path / "gpt.nemo").write_bytes(content)
    _, report = run(tmp_path / "gpt.nemo", "--deep")
    assert any("is not equal to" in fault and NORM in fault for fault in report["faults"])


def test_a_changed_byte_is_found_by_the_manifest(run: Run, tmp_path: Path) -> None:
    whole = native(tmp_path / "a", DENSE)
    file = next(whole.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    place = open_native(whole).tensors[FC2].pieces[0].source.tensor()[9:10]
    content[content.find(place.view(torch.uint8).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    assert run(whole)[0] == 0
    assert fault_of(run, whole).startswith(f"{file}: its ")


def swap(root: Path, one: str, other: str) -> None:
    folder = root / "iter_0000100"
    (folder / one).rename(folder / "between")
    (folder / other).rename(folder / one)
    (folder / "between").rename(folder / other)


@pytest.mark.parametrize(
    ("layout", "one", "other"),
    [
        (Layout(tp=2), "mp_rank_00", "mp_rank_01"),
        (Layout(tp=2, pp=2), "mp_rank_00_000", "mp_rank_01_000"),
    ],
)
def test_swapped_rank_files_are_found_by_what_they_say(
    layout: Layout, one: str, other: str, run: Run, tmp_path: Path
) -> None:
    megatron_writer.saved(GATED, layout, tmp_path)
    assert run(tmp_path, "--deep")[0] == 0
    swap(tmp_path, one, other)
    code, report = run(tmp_path, "--deep")
    assert code == 1
    for name in (one, other):
        assert any(f"/{name}/" in fault and "saved by rank" in fault for fault in report["faults"])


def test_swapped_stages_are_found_by_what_they_say(run: Run, tmp_path: Path) -> None:
    """Stages in the middle of a pipeline hold tensors of the same names and shapes."""
    megatron_writer.saved(GATED, Layout(pp=4), tmp_path)
    swap(tmp_path, "mp_rank_00_001", "mp_rank_00_002")
    assert "mp_rank_00_002" in fault_of(run, tmp_path).split(" ")[0]


def test_swapped_rank_files_without_a_rank_are_found_by_their_padding(
    run: Run, tmp_path: Path
) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)
    edit(tmp_path, "*", lambda record: delattr(record["args"], "rank"))
    assert run(tmp_path, "--deep")[0] == 0
    swap(tmp_path, "mp_rank_00", "mp_rank_01")
    fault = fault_of(run, tmp_path)
    assert "mp_rank_00" in fault and "its last 11 rows are all alike" in fault


def test_an_older_files_own_place_is_held_against_its_directory(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)

    def change(record: dict[str, Any]) -> None:
        record["args"].tensor_model_parallel_rank = 0

    edit(tmp_path, "*", change)
    fault = fault_of(run, tmp_path)
    assert "mp_rank_01" in fault
    assert "args.tensor_model_parallel_rank is 0, but its directory is that of 1" in fault


def test_what_cannot_be_read_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preamble.main(["inspect", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("preamble inspect: ") and err.count("\n") == 1
    with pytest.raises(SystemExit) as done:
        preamble.main(["inspect"])
    assert done.value.code == 2
