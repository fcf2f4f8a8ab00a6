"""`preamble inspect`: the description of a checkpoint, and the detection of planted faults."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import preamble
from checkpoints_tools.inspection.report import InspectReport, _smallest_gpu_gb
from gpt.attention.kv_cache import BLOCK_TOKENS
from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count, rank_costs
from gpt.formats.native import open_native
from tests.support.checkpoints import distcp_writer, megatron_writer, nemo_writer
from tests.support.checkpoints.hf_models import model_of
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, Layout, edit
from tests.support.checkpoints.nemo_writer import Nemo
from tests.support.inspect_commands import Run, json_command, read_weights, write_native_model
from tests.support.models import (
    EIGHT_EXPERTS,
    EXPERTS,
    MODERN,
    MULTIPLIERS,
    XIELU,
    lively,
)
from tests.support.trained_tokenizers import sentencepiece_model

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return json_command("inspect", capsys)


def test_megatron_checkpoint_is_described(run: Run, tmp_path: Path) -> None:
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


def test_json_keys_are_the_report_fields(run: Run, tmp_path: Path) -> None:
    _, report = run(write_native_model(tmp_path / "a", DENSE))
    assert list(report) == list(InspectReport.__dataclass_fields__)
    split = report["splits"][0]
    assert list(split) == [
        *("tp", "pp", "weight_bytes", "kv_bytes_per_token", "kv_bytes_per_context"),
        *("dtype", "gpu_gb", "ep"),
    ]


def test_serving_memory_matches_the_cost_model(run: Run, tmp_path: Path) -> None:
    _, report = run(write_native_model(tmp_path / "a", MODERN))
    fp32_splits = {
        (split["tp"], split["pp"]): split
        for split in report["splits"]
        if split["dtype"] == "float32"
    }
    assert (4, 1) in fp32_splits and (1, 4) in fp32_splits
    assert (8, 1) not in fp32_splits and (3, 1) not in fp32_splits  # 44 columns do not divide by 8.
    costs = rank_costs(MODERN, 2, 2)
    assert fp32_splits[2, 2]["weight_bytes"] == max(cost.weight_bytes for cost in costs)
    token = max(cost.kv_bytes_per_token for cost in costs)
    assert fp32_splits[2, 2]["kv_bytes_per_token"] == token
    # A window of 7 tokens is in two blocks at most.
    assert fp32_splits[2, 2]["kv_bytes_per_context"] == token * 2 * BLOCK_TOKENS
    assert fp32_splits[2, 2]["gpu_gb"] == 16, "the smallest that is listed"
    halves = [split for split in report["splits"] if split["dtype"] == "bfloat16"]
    assert 2 * halves[0]["weight_bytes"] == fp32_splits[1, 1]["weight_bytes"]


def test_serving_memory_of_expert_parallel_ranks(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_native_model(tmp_path / "a", EIGHT_EXPERTS)
    _, report = run(path)
    weight_bytes = {
        (split["tp"], split["pp"], split["ep"]): split["weight_bytes"]
        for split in report["splits"]
        if split["dtype"] == "float32"
    }
    assert {(1, 1, 2), (1, 1, 8), (2, 1, 4)} < weight_bytes.keys()
    assert (1, 1, 16) not in weight_bytes and (2, 2, 4) not in weight_bytes
    costs = rank_costs(EIGHT_EXPERTS, ep=4)
    assert weight_bytes[1, 1, 4] == max(cost.weight_bytes for cost in costs)
    capsys.readouterr()
    assert preamble.main(["inspect", str(path)]) == 0
    assert "TP 1  x PP 1  x EP 8 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights_gb", "kv_gb", "gpu_gb"), [(10, 1, 16), (40, 20, 80), (150, 0, 180), (170, 9, None)]
)
def test_named_gpu_keeps_a_tenth_of_memory_free(
    weights_gb: int, kv_gb: int, gpu_gb: int | None
) -> None:
    assert _smallest_gpu_gb(int((weights_gb + kv_gb) * 1e9), int(weights_gb * 1e9)) == gpu_gb


def test_active_parameters_count_only_routed_experts(run: Run, tmp_path: Path) -> None:
    _, report = run(write_native_model(tmp_path / "a", EXPERTS))
    per_expert = 3 * 32 * 24 + 2 * 24 + 24 * 0 + 32  # Gate, up, down and their biases.
    idle = 3 * 3 * per_expert  # Three layers, with three of five experts idle in each.
    assert report["parameters"] - report["active_parameters"] == idle


@pytest.mark.parametrize(
    ("write", "name", "evidence"),
    [
        (lambda root: write_native_model(root, DENSE), "native", "preamble.json"),
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
def test_every_format_lists_its_evidence_and_has_no_fault(
    write: Callable[[Path], Any], name: str, evidence: str, run: Run, tmp_path: Path
) -> None:
    write(tmp_path / "a")
    code, report = run(tmp_path / "a", "--deep")
    assert (code, report["format"], report["faults"], report["deep"]) == (0, name, [], True)
    assert evidence in report["evidence"]


@pytest.mark.parametrize("folded", [False, True])
def test_split_of_torch_dist_files_comes_from_their_args(
    folded: bool, run: Run, tmp_path: Path
) -> None:
    distcp_writer.saved(DENSE, distcp_writer.Form(tp=2, folded=folded), tmp_path)
    assert run(tmp_path)[1]["split"] == {"tp": 2, "pp": 1, "ep": 1}


def test_text_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron_writer.saved(GROUPED, Layout(tp=2, pp=2, ep=2, experts="te grouped"), tmp_path)
    assert preamble.main(["inspect", str(tmp_path), "--deep"]) == 0
    out, _ = capsys.readouterr()
    for line in (
        "written at   TP 2 x PP 2 x EP 2",
        "attention    4 heads of 8 in 2 groups (GQA)",
        "experts      4 in each of 2 layers, 2 per token, 24 wide, sigmoid, and a shared one 16 "
        "wide",
        "head         tied to the embedding",
        "every byte was read, and no fault was found",
    ):
        assert line in out, line
    assert "  TP 2  x PP 1 " in out


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        (
            MULTIPLIERS,
            [
                "multipliers  embeddings by 1.5, virtual tokens too; attention scores by 0.3; "
                "outputs of attention and MLP by 0.6; logits divided by 0.8",
            ],
        ),
        (
            XIELU,
            [
                "multipliers  queries by 1 + 0.4 ln(1 + floor(position / 5))",
                "longrope with the factors for long contexts (original length 16)",
                "44 wide, xielu",
            ],
        ),
        (
            XIELU.with_fields(max_position_embeddings=16),
            ["longrope with the factors for short contexts (original length 16)"],
        ),
    ],
)
def test_text_output_of_multipliers_and_longrope(
    config: GPTConfig, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native_model(tmp_path / "model", config)
    assert preamble.main(["inspect", str(tmp_path / "model"), "--deep"]) == 0
    out, _ = capsys.readouterr()
    for line in lines:
        assert line in out, line


def test_digest_is_shown_after_verify_computed_it(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron_writer.saved(DENSE, Layout(), tmp_path / "m")
    folder = write_native_model(tmp_path / "n", DENSE)
    assert run(tmp_path / "m")[1]["digest"] is None
    assert preamble.main(["verify", str(tmp_path / "m"), str(folder)]) == 0
    capsys.readouterr()
    identity = open_native(folder).identity
    assert identity is not None
    assert run(tmp_path / "m")[1]["digest"] == run(folder)[1]["digest"] == identity.digest


def test_tokenizer_problems_are_reported(run: Run, tmp_path: Path) -> None:
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
    assert any("is a broken symbolic link" in line for line in run(tmp_path / "a")[1]["remarks"])
    (tmp_path / "gone.model").write_bytes(sentencepiece_model(model_type="bpe"))
    assert run(tmp_path / "a")[1]["tokenizer"]["kind"] == "sentencepiece"


def test_newer_iteration_and_mixed_dtypes_are_remarks(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(), tmp_path)
    edit(
        tmp_path,
        "*",
        lambda record: record["model"].update({NORM: record["model"][NORM].bfloat16()}),
    )
    (tmp_path / "iter_0000200").mkdir()
    _, report = run(tmp_path)
    assert any(line.startswith("iter_0000200 is newer") for line in report["remarks"])
    assert not any("newer" in line for line in report["notes"])
    assert any("32 of bfloat16" in line for line in report["remarks"])


def test_untied_head_equal_to_the_embedding_is_a_remark(run: Run, tmp_path: Path) -> None:
    tensors = read_weights(lively(GATED))
    tensors[HEAD] = tensors[EMBEDDING].clone()
    write_native_model(tmp_path / "a", GATED, tensors)
    _, report = run(tmp_path / "a")
    (line,) = [line for line in report["remarks"] if line.startswith(HEAD)]
    assert f"{GATED.vocab_size * 32 * 4:,} bytes smaller" in line
    tensors[HEAD][5, 5] += 1  # Not in a sampled row.
    write_native_model(tmp_path / "b", GATED, tensors)
    for flags, is_reported in (((), True), (("--deep",), False)):
        remarks = run(tmp_path / "b", *flags)[1]["remarks"]
        assert any(line.startswith(HEAD) for line in remarks) is is_reported


def test_weights_that_do_not_match_the_manifest_are_a_fault(run: Run, tmp_path: Path) -> None:
    write_native_model(tmp_path / "a", DENSE)
    write_native_model(
        tmp_path / "b", DENSE, {k: v * 2 for k, v in read_weights(lively(DENSE)).items()}
    )
    for file in (tmp_path / "b").glob("*.safetensors"):
        shutil.copy(file, tmp_path / "a" / file.name)
    code, report = run(tmp_path / "a")
    assert code == 1
    assert "do not match the fingerprint in the manifest" in report["faults"][0]


def fault_of(run: Run, path: Path) -> str:
    code, report = run(path, "--deep")
    assert code == 1
    (fault,) = report["faults"]
    return str(fault)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({(3, 4): torch.nan, (9, 0): torch.nan}, "2 NaN of 4,096 values, the first at [3, 4]"),
        ({(0, 0): torch.inf}, "1 infinite of 4,096 values, the first at [0, 0]"),
        ({(31, 127): -torch.inf, (8, 1): torch.nan}, "1 NaN and 1 infinite of 4,096 values"),
    ],
)
def test_nan_and_infinity_are_counted_and_located(
    values: dict[tuple[int, int], float], message: str, run: Run, tmp_path: Path
) -> None:
    tensors = read_weights(lively(DENSE))
    for index, value in values.items():
        tensors[FC2][index] = value
    megatron_writer.write(DENSE, tensors, tmp_path, Layout(tp=2, pp=2))
    assert run(tmp_path)[0] == 0
    fault = fault_of(run, tmp_path)
    assert fault.startswith(f"{FC2}: {message}")
    assert "mp_rank_0" in fault and "model_optim_rng.pt" in fault


def test_constant_matrix_is_a_fault_and_constant_vectors_are_a_remark(
    run: Run, tmp_path: Path
) -> None:
    tensors = read_weights(lively(DENSE))
    tensors[FC2].zero_()
    tensors[NORM].fill_(1)
    tensors["decoder.final_layernorm.bias"].zero_()
    write_native_model(tmp_path / "a", DENSE, tensors)
    assert fault_of(run, tmp_path / "a") == f"{FC2}: all 4,096 values are zero"
    _, report = run(tmp_path / "a", "--deep")
    line = f"{NORM}, decoder.final_layernorm.bias: 2 vectors are constant"
    assert any(remark.startswith(line) for remark in report["remarks"])


def test_norm_that_differs_on_a_tensor_rank_is_found(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2), tmp_path)

    def change(record: dict[str, Any]) -> None:
        record["model"]["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"][7] += 0.25

    edit(tmp_path, "mp_rank_01_001", change)
    fault = fault_of(run, tmp_path)
    assert "mp_rank_01_001/model_optim_rng.pt" in fault.split(" is not equal to ")[0]
    assert "both store decoder.layers.3.mlp.linear_fc1.layer_norm_weight" in fault
    assert "1 of 32 values differ, the first at [7, 0]" in fault and "at most by 0.25" in fault


def test_replica_that_differs_on_an_expert_rank_is_found(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(GROUPED, Layout(tp=2, ep=2, experts="grouped"), tmp_path)
    assert run(tmp_path, "--deep")[0] == 0
    key = "decoder.layers.0.self_attention.linear_proj.weight"
    edit(tmp_path, "mp_rank_01_001", lambda record: record["model"][key].mul_(2))
    fault = fault_of(run, tmp_path)
    assert "mp_rank_01_001" in fault.split(" is not equal to ")[0]
    assert "mp_rank_01_000" in fault.split(" is not equal to ")[1]


@pytest.mark.parametrize("names", ["te", "2021"])
def test_copy_of_a_tied_embedding_is_compared_completely(
    names: str, run: Run, tmp_path: Path
) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2, pp=2, names=names), tmp_path)

    def change(record: dict[str, Any]) -> None:
        model = record["model"]
        copy = model["word_embeddings_for_head"]["weight"] if names == "2021" else model[HEAD]
        copy[9, 2] += 1  # Not in a row that the reader samples.

    edit(tmp_path, "mp_rank_01_001", change)
    assert run(tmp_path)[0] == 0
    fault = fault_of(run, tmp_path)
    assert "the first at [9, 2]" in fault and f"both store {EMBEDDING}" in fault


def test_copy_of_a_tied_head_in_hugging_face_files_is_compared_completely(
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
    """Flip one bit in the middle of a zip member."""
    with zipfile.ZipFile(file) as archive:
        member = next(info for info in archive.infolist() if info.filename.endswith(record))
    content = bytearray(file.read_bytes())
    head = member.header_offset
    start = (
        head
        + 30
        + sum(
            int.from_bytes(content[head + offset : head + offset + 2], "little")
            for offset in (26, 28)
        )
    )
    content[start + member.file_size // 2] ^= 1
    file.write_bytes(content)


def test_flipped_bit_in_a_rank_file_is_found_by_its_crc(run: Run, tmp_path: Path) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)
    file = tmp_path / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt"
    flip(file, "/data/3")
    assert run(tmp_path)[0] == 0
    _, report = run(tmp_path, "--deep")
    assert any(
        fault.startswith(f"{file}: ") and "/data/3 is damaged: its bytes" in fault
        for fault in report["faults"]
    )


def test_file_without_checksums_is_no_fault(run: Run, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert run(tmp_path, "--deep")[0] == 0


def test_flipped_bit_in_a_distributed_chunk_is_found(run: Run, tmp_path: Path) -> None:
    source = distcp_writer.saved(DENSE, distcp_writer.Form(tp=2), tmp_path)
    value = source.read(FC2)[:4, :64].contiguous().view(torch.uint8).numpy().tobytes()[:64]
    for file in tmp_path.glob("*/*.distcp"):
        content = bytearray(file.read_bytes())
        offset = content.find(value)
        if offset >= 0:
            content[offset + 1] ^= 1
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
def test_archives_inside_a_nemo_file_are_checked(nemo: Nemo, run: Run, tmp_path: Path) -> None:
    source = nemo_writer.saved(DENSE, nemo, tmp_path)
    code, report = run(tmp_path / "gpt.nemo", "--deep")
    assert (code, report["format"], report["faults"]) == (0, "nemo", [])
    assert report["split"] == ({} if nemo.form else {"tp": 2, "pp": nemo.pp, "ep": 1, "vpp": 1})
    if nemo.pack == "gz":
        return  # gzip has checked the CRCs while unpacking.
    files = [path for path in (tmp_path / "gpt.nemo").rglob("*") if path.is_file()]
    value = source.read(FC2)[0, :64].numpy().tobytes()
    for file in files or [tmp_path / "gpt.nemo"]:
        content = bytearray(file.read_bytes())
        offset = content.find(value)
        if offset >= 0:
            content[offset + 1] ^= 1
            file.write_bytes(content)
            break
    else:
        pytest.fail("the weights are in no file")
    fault = fault_of(run, tmp_path / "gpt.nemo")
    assert fault.startswith(str(tmp_path / "gpt.nemo")) and "CRC-32" in fault


def test_replicas_inside_a_nemo_file_are_compared(run: Run, tmp_path: Path) -> None:
    source = nemo_writer.saved(DENSE, Nemo(tp=2), tmp_path)
    norm = source.read(NORM).numpy().tobytes()
    content = bytearray((tmp_path / "gpt.nemo").read_bytes())
    assert content.count(norm) == 2
    content[content.rfind(norm) + 1] ^= 1
    (tmp_path / "gpt.nemo").write_bytes(content)
    _, report = run(tmp_path / "gpt.nemo", "--deep")
    assert any("is not equal to" in fault and NORM in fault for fault in report["faults"])


def test_changed_byte_is_found_by_the_manifest_checksum(run: Run, tmp_path: Path) -> None:
    folder = write_native_model(tmp_path / "a", DENSE)
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    weight_bytes = open_native(folder).tensors[FC2].slices[0].source.tensor()[9:10]
    content[content.find(weight_bytes.view(torch.uint8).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    assert run(folder)[0] == 0
    assert fault_of(run, folder).startswith(f"{file}: its ")


def swap_rank_files(root: Path, first_folder: str, second_folder: str) -> None:
    folder = root / "iter_0000100"
    (folder / first_folder).rename(folder / "between")
    (folder / second_folder).rename(folder / first_folder)
    (folder / "between").rename(folder / second_folder)


@pytest.mark.parametrize(
    ("layout", "first_folder", "second_folder"),
    [
        (Layout(tp=2), "mp_rank_00", "mp_rank_01"),
        (Layout(tp=2, pp=2), "mp_rank_00_000", "mp_rank_01_000"),
    ],
)
def test_swapped_rank_files_are_found_by_their_args(
    layout: Layout, first_folder: str, second_folder: str, run: Run, tmp_path: Path
) -> None:
    megatron_writer.saved(GATED, layout, tmp_path)
    assert run(tmp_path, "--deep")[0] == 0
    swap_rank_files(tmp_path, first_folder, second_folder)
    code, report = run(tmp_path, "--deep")
    assert code == 1
    for name in (first_folder, second_folder):
        assert any(f"/{name}/" in fault and "saved by rank" in fault for fault in report["faults"])


def test_swapped_stages_are_found_by_their_args(run: Run, tmp_path: Path) -> None:
    """Middle pipeline stages have tensors of the same names and shapes."""
    megatron_writer.saved(GATED, Layout(pp=4), tmp_path)
    swap_rank_files(tmp_path, "mp_rank_00_001", "mp_rank_00_002")
    assert "mp_rank_00_002" in fault_of(run, tmp_path).split(" ")[0]


def test_swapped_rank_files_without_a_rank_are_found_by_their_padding(
    run: Run, tmp_path: Path
) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)
    edit(tmp_path, "*", lambda record: delattr(record["args"], "rank"))
    assert run(tmp_path, "--deep")[0] == 0
    swap_rank_files(tmp_path, "mp_rank_00", "mp_rank_01")
    fault = fault_of(run, tmp_path)
    assert "mp_rank_00" in fault and "its last 11 rows are equal" in fault


def test_rank_recorded_by_older_files_is_compared_with_the_directory(
    run: Run, tmp_path: Path
) -> None:
    megatron_writer.saved(DENSE, Layout(tp=2), tmp_path)

    def change(record: dict[str, Any]) -> None:
        record["args"].tensor_model_parallel_rank = 0

    edit(tmp_path, "*", change)
    fault = fault_of(run, tmp_path)
    assert "mp_rank_01" in fault
    assert "args.tensor_model_parallel_rank is 0, but the directory is rank 1's" in fault


def test_unreadable_checkpoint_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preamble.main(["inspect", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("preamble inspect: ") and err.count("\n") == 1
    with pytest.raises(SystemExit) as exit_error:
        preamble.main(["inspect"])
    assert exit_error.value.code == 2
