"""Quantized Hugging Face checkpoints: dequantized as by a plain formula, or refused by name."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints_tools.inspection.report import build_report
from gpt.checkpoint import logical_tensor
from gpt.checkpoint.dequantization import Fp8Tensor, Mxfp4Tensor
from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.files.safetensors_file import open_safetensors
from gpt.checkpoint.logical_tensor import InMemoryTensor, StoredTensor, concat_rows
from gpt.errors import CheckpointError
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.quantization import dequantize_tensors, read_quantization
from gpt.formats.huggingface.reader import open_huggingface
from gpt.parallel.weight_sharding import ShardSpec, parameter_specs, shard_spec
from tests.support.checkpoints.hf_models import edit_json, model_of, packed, random_model, sizes_of
from tests.support.checkpoints.quantized_writer import (
    decode_mxfp4,
    dequantize_fp8,
    is_linear,
    quantize_fp8,
    read_weights,
    write_weights,
)

LLAMA = "llama, llama3 positions, one group"
EXPERTS = "qwen3_moe, renormalized, wide heads"
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 20]}
COMPRESSED_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """The section that llm-compressor writes."""
    group = {
        "targets": ["Linear"],
        "weights": {**COMPRESSED_WEIGHTS, "strategy": strategy, **weights},
        "input_activations": {**COMPRESSED_WEIGHTS, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


# The section of config.json, the key of the scales, the shape of a block (None: the whole weight;
# 0 columns: a row), and a function that converts the scales.
FORMS: dict[str, tuple[dict[str, Any], str, tuple[int, int] | None, Callable[[Tensor], Tensor]]] = {
    "blocks that do not divide the weights": (BLOCK, "_scale_inv", (32, 20), Tensor.float),
    "blocks larger than the weights": (
        BLOCK | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        "_scale_inv",
        (128, 128),
        Tensor.float,
    ),
    "e8m0 scales": (
        BLOCK | {"scale_fmt": "ue8m0"},
        "_scale_inv",
        (32, 20),
        lambda scales: scales.to(torch.float8_e8m0fnu),
    ),
    "e8m0 scales as bytes": (
        BLOCK | {"scale_fmt": "ue8m0"},
        "_scale_inv",
        (32, 20),
        lambda scales: scales.to(torch.float8_e8m0fnu).view(torch.uint8),
    ),
    "one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "_scale_inv",
        None,
        lambda scales: scales.reshape(()),
    ),
    "one scale, as AutoFP8 writes it": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "_scale",
        None,
        lambda scales: scales.reshape(()).bfloat16(),
    ),
    "compressed-tensors, one scale": (
        compressed("tensor"),
        "_scale",
        None,
        lambda scales: scales.reshape(1).bfloat16(),
    ),
    "compressed-tensors, a scale per row": (
        compressed("channel"),
        "_scale",
        (1, 0),
        Tensor.bfloat16,
    ),
    "compressed-tensors, blocks": (
        compressed("block", block_structure=[32, 20]),
        "_scale",
        (32, 20),
        Tensor.float,
    ),
    "blocks that divide the weights": (
        BLOCK | {"weight_block_size": [4, 16]},
        "_scale_inv",
        (4, 16),
        Tensor.float,
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of an unquantized bf16 checkpoint. Do not write into it."""
    root = tmp_path_factory.mktemp("plain")

    def folder(case: str) -> Path:
        path = root / case.replace(", ", "-").replace(" ", "-")
        if not path.exists():
            model_of(case, torch.bfloat16).save_pretrained(path)
        return path

    return folder


def write_both(source: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """Write the weights in FP8, and as the bf16 values that the formula gives."""
    section, suffix, block_shape, convert = FORMS[form]
    quantized: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for key, weight in read_weights(source).items():
        if not is_linear(key):
            quantized[key] = expected[key] = weight
            continue
        rows, columns = weight.shape
        block = block_shape or (rows, columns)
        block = (block[0], block[1] or columns)
        values, scales = quantize_fp8(weight, block, power_of_two="e8m0" in form)
        stored = convert(scales)
        exact = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
        exact = exact.float().reshape(scales.shape)
        quantized |= {key: values, key + suffix: stored}
        expected[key] = dequantize_fp8(values, exact, block).float().bfloat16()
    if block_shape is None:  # Scales of activations and of the KV cache, which are ignored.
        attention = "model.layers.0.self_attn."
        for key in ("q_proj.activation_scale", "q_proj.input_scale", "k_scale", "kv_scale"):
            quantized[attention + key] = torch.tensor(0.5)
    folders = folder / "quantized", folder / "expected"
    for path, tensors, config in zip(folders, (quantized, expected), (section, None), strict=True):
        shutil.copytree(source, path)
        write_weights(path, tensors, config, "bfloat16")
    return folders


@pytest.mark.parametrize("form", FORMS)
def test_weights_equal_the_formula_bitwise(
    form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized, expected = map(open_huggingface, write_both(plain(LLAMA), tmp_path, form))
    assert quantized.config == expected.config and quantized.config.dtype == "bfloat16"
    for name, tensor in expected.tensors.items():
        assert torch.equal(quantized.read(name), tensor.read()), name
    assert base_digest(quantized) == base_digest(expected)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_cut_through_blocks(
    tp: int, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    form = "blocks that do not divide the weights"
    quantized, expected = map(open_huggingface, write_both(plain(LLAMA), tmp_path, form))
    for name, parameter in parameter_specs(expected.config).items():
        for rank in range(tp):
            shard = shard_spec(parameter, expected.config, rank, tp)
            assert torch.equal(quantized.read(name, shard), expected.read(name, shard)), name


def test_stacked_experts_are_split(plain: Callable[[str], Path], tmp_path: Path) -> None:
    quantized = {k: t for k, t in read_weights(plain(EXPERTS)).items() if ".experts." not in k}
    expected = dict(quantized)
    weights = model_of(EXPERTS, torch.bfloat16).state_dict()
    for key in [key for key in weights if ".experts." in key]:
        pairs = [quantize_fp8(weight, (32, 20)) for weight in weights[key]]
        quantized[key] = torch.stack([values for values, _ in pairs])
        quantized[f"{key}_scale_inv"] = torch.stack([scales for _, scales in pairs])
        matrices = [dequantize_fp8(*pair, (32, 20)).bfloat16() for pair in pairs]
        expected[key] = torch.stack(matrices)
    for name, tensors, config in (("fp8", quantized, BLOCK), ("plain", expected, None)):
        shutil.copytree(plain(EXPERTS), tmp_path / name)
        write_weights(tmp_path / name, tensors, config, "bfloat16")
    stacked, unquantized = (open_huggingface(tmp_path / name) for name in ("fp8", "plain"))
    assert base_digest(stacked) == base_digest(unquantized)


def test_experts_are_dequantized(plain: Callable[[str], Path], tmp_path: Path) -> None:
    paths = write_both(plain(EXPERTS), tmp_path, "blocks that do not divide the weights")
    quantized, expected = map(open_huggingface, paths)
    assert base_digest(quantized) == base_digest(expected)


def test_transformers_dequantizes_to_the_same_weights(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    import transformers

    # transformers accepts only blocks that divide the weights.
    path, _ = write_both(plain(LLAMA), tmp_path, "blocks that divide the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    checkpoint = open_huggingface(path)
    for name, tensor in packed(model, checkpoint.config).items():
        assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize(
    ("fields", "target"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "float8_e4m3fn"}, "bfloat16"),  # The dtype of the other weights.
    ],
)
def test_weights_get_the_dtype_of_the_config(
    fields: dict[str, Any], target: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    path, _ = write_both(plain(LLAMA), tmp_path, "one scale")
    edit_json(path / "config.json", lambda record: record.update(fields))
    checkpoint = open_huggingface(path)
    weight = checkpoint.read("decoder.layers.0.mlp.linear_fc2.weight")
    assert weight.dtype == getattr(torch, target) and checkpoint.config.dtype == target


def test_the_note_the_log_and_inspect_say_what_is_dequantized(
    plain: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, expected = write_both(plain(LLAMA), tmp_path, "blocks that do not divide the weights")
    with caplog.at_level(logging.INFO):
        checkpoint = open_huggingface(path)
    form = "FP8 with a scale per block of 32 x 20"
    assert checkpoint.notes == (
        f"weights stored as {form} are dequantized to bfloat16 when they are read (21 of the "
        "stored tensors)",
    )
    assert f"event=weights_dequantized form='{form}' dtype=bfloat16 tensors=21" in caplog.text
    report = build_report(checkpoint, str(path))
    elements = sum(t.numel() for key, t in read_weights(expected).items() if is_linear(key))
    assert report.dtypes["float8_e4m3fn"] == elements
    assert report.notes == list(checkpoint.notes)
    assert not any("several dtypes" in remark for remark in report.remarks)


def test_an_unquantized_copy_with_the_section_is_read(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(plain(LLAMA), tmp_path / "copy")
    edit_json(tmp_path / "copy/config.json", lambda r: r.update(quantization_config=BLOCK))
    checkpoint = open_huggingface(tmp_path / "copy")
    assert checkpoint.notes == ()
    assert base_digest(checkpoint) == base_digest(open_huggingface(plain(LLAMA)))


def test_a_read_dequantizes_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes: list[tuple[slice, ...]] = []
    compute_box = Fp8Tensor.compute_box

    def record(self: Fp8Tensor, *box: slice) -> Tensor:
        boxes.append(box)
        return compute_box(self, *box)

    monkeypatch.setattr(Fp8Tensor, "compute_box", record)
    monkeypatch.setattr(logical_tensor, "BLOCK_BYTES", 4 * 40 * 7)  # 7 rows of 40 columns.
    values, scales = quantize_fp8(torch.randn(60, 80), (32, 20))
    stored = Fp8Tensor(
        InMemoryTensor(values, "q"), InMemoryTensor(scales, "s"), (32, 20), torch.float32
    )
    logical = concat_rows([(stored, 0, 60)])
    shard = logical.read(ShardSpec(1, ((30, 70),), 40))
    assert torch.equal(shard, dequantize_fp8(values, scales, (32, 20)).float()[:, 30:70])
    assert [box[0].stop - box[0].start for box in boxes] == [7] * 8 + [4]
    assert {(box[1].start, box[1].stop) for box in boxes} == {(30, 70)}
    boxes.clear()
    logical.read_rows(10, 12, torch.empty(2 * 80 * 4, dtype=torch.uint8))
    assert [(box[0].start, box[0].stop) for box in boxes] == [(10, 12)]


@pytest.fixture(scope="module")
def mxfp4() -> tuple[Tensor, Tensor]:
    """The blocks and scales of three experts with 10 outputs and 64 inputs."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 140, (3, 10, 2), dtype=torch.uint8, generator=generator)
    blocks[0, 0, 0] = torch.arange(16) * 17  # Each code in both nibbles.
    scales[0, 0] = torch.tensor([0, 254])
    return blocks, scales


def open_mxfp4(tensors: dict[str, Tensor], folder: Path, dtype: str) -> dict[str, StoredTensor]:
    """The stored tensors of a GPT-OSS checkpoint."""
    save_file(tensors, folder / "model.safetensors")
    record = {"quantization_config": {"quant_method": "mxfp4"}, "torch_dtype": dtype}
    fields = ConfigJson(record, folder / "config.json")
    stored: dict[str, StoredTensor] = {**open_safetensors(folder / "model.safetensors")}
    return dequantize_tensors(stored, fields, read_quantization(fields))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_equals_transformers_and_the_formula_bitwise(
    dtype: torch.dtype, mxfp4: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    key = "model.layers.0.mlp.experts.down_proj"
    tensors = {f"{key}_blocks": mxfp4[0], f"{key}_scales": mxfp4[1], f"{key}_bias": torch.ones(3)}
    stored = open_mxfp4(tensors, tmp_path, str(dtype).removeprefix("torch."))
    assert set(stored) == {key, f"{key}_bias"}
    weight = stored[key]
    assert isinstance(weight, Mxfp4Tensor) and weight.shape == (3, 64, 10)
    result = weight.tensor()
    assert result.dtype == dtype
    # Compared as bytes, so that -0 differs from 0.
    expected = convert_moe_packed_tensors(*mxfp4, dtype=dtype)
    assert torch.equal(as_integers(result), as_integers(expected))
    formula = decode_mxfp4(*mxfp4).transpose(1, 2).to(dtype)
    assert torch.equal(as_integers(result), as_integers(formula))


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_of_gpt_oss_in_mxfp4_equal_the_dequantized_model(tp: int, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    fields = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    model = random_model("gpt_oss", {**sizes_of("gpt_oss"), **fields})
    for name in ("plain", "quantized"):
        model.bfloat16().save_pretrained(tmp_path / name)
    weights = read_weights(tmp_path / "plain")
    quantized = dict(weights)
    generator = torch.Generator().manual_seed(4)
    for key in [key for key in weights if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights[key].shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 124, shape, dtype=torch.uint8, generator=generator)
        weights[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        quantized |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        del quantized[key]
    write_weights(tmp_path / "plain", weights, None, "bfloat16")
    write_weights(tmp_path / "quantized", quantized, {"quant_method": "mxfp4"}, "bfloat16")
    plain, read = (open_huggingface(tmp_path / name) for name in ("plain", "quantized"))
    assert plain.config == read.config
    for name, parameter in parameter_specs(plain.config).items():
        for rank in range(tp):
            shard = shard_spec(parameter, plain.config, rank, tp)
            got, want = (checkpoint.tensors[name].read(shard) for checkpoint in (read, plain))
            assert torch.equal(got, want), name


def as_integers(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def test_boxes_of_mxfp4_cut_through_groups(mxfp4: tuple[Tensor, Tensor]) -> None:
    blocks, scales = (InMemoryTensor(tensor, "x") for tensor in mxfp4)
    stored = Mxfp4Tensor(blocks, scales, torch.bfloat16)
    weights = stored.tensor()
    for start in (0, 5, 31, 32, 33):
        for stop in (34, 63, 64):
            box = (slice(1, 3), slice(start, stop), slice(1, 10, 2))
            assert torch.equal(stored.compute_box(*box), weights[box])


REFUSED: dict[str, tuple[object, str]] = {
    **{
        method: (
            {"quant_method": method},
            f"quantization_config.quant_method is '{method}'.*{way_out}",
        )
        for method, way_out in {
            "awq": "give the unquantized release",
            "gptq": "give the unquantized release",
            "modelopt": "give the unquantized release",
            "fbgemm_fp8": "give the unquantized release",
            "bitsandbytes": r"call the model's dequantize\(\).* or give the unquantized release",
        }.items()
    },
    "no method": ({"bits": 4}, "quantization_config.quant_method is 'None'"),
    "compressed-tensors in INT4": (
        compressed("group") | {"format": "pack-quantized"},
        "quantization_config.format of 'compressed-tensors' is 'pack-quantized'.*dequantize=True",
    ),
    "compressed-tensors in groups": (
        compressed("group"),
        "group_0.weights.strategy of 'compressed-tensors' is 'group'.*dequantize=True",
    ),
    **{
        f"compressed-tensors, {key} {value}": (
            compressed("tensor", **{key: value}),
            f"group_0.weights.{key} of 'compressed-tensors' is '{value}'.*dequantize=True",
        )
        for key, value in {"num_bits": 4, "type": "int", "symmetric": False}.items()
    },
    "compressed-tensors with a rotation": (
        compressed("tensor") | {"transform_config": {"config_groups": {"R1": {}}}},
        "quantization_config.transform_config of 'compressed-tensors'",
    ),
    "compressed-tensors that are sparse": (
        compressed("tensor") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "quantization_config.sparsity_config of 'compressed-tensors'",
    ),
    "FP4 experts": (BLOCK | {"expert_dtype": "fp4"}, 'expert_dtype is "fp4"'),
    "a block of one size": (
        BLOCK | {"weight_block_size": [128]},
        r"quantization_config.weight_block_size is \[128\]; it must be two whole numbers",
    ),
    "a block of size 0": (BLOCK | {"weight_block_size": [0, 128]}, "it must be two whole numbers"),
    "blocks of another size": (
        BLOCK | {"weight_block_size": [64, 64]},
        r"_scale_inv: found torch.float32 of shape \(2, 4\), need scales of shape \(1, 2\)",
    ),
    "one scale, although there are blocks": (
        {"quant_method": "fp8"},
        r"_scale_inv: found torch.float32 of shape \(2, 4\), need scales",
    ),
    "scales under another key": (compressed("tensor"), "the weights lack its scales '.*_scale'"),
    "a list": ([], r"quantization_config is \[\]; it must be a mapping"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_forms_are_refused_by_name(
    case: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    section, words = REFUSED[case]
    path, _ = write_both(plain(LLAMA), tmp_path, "blocks that do not divide the weights")
    edit_json(path / "config.json", lambda record: record.update(quantization_config=section))
    with pytest.raises(CheckpointError, match=words) as refusal:
        open_huggingface(path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def test_forms_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    record = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="quant_method is 'gptq'"):
        open_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("name", "method"),
    [("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq")],
)
def test_files_of_quantization_tools_are_refused(
    name: str, method: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(plain(LLAMA), tmp_path / "copy"))
    (path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{name} tells .* quantized by {method}"):
        open_huggingface(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("x_scales"), "the weights lack its scales 'x_scales'"),
        (lambda t: t.update(x_blocks=t["x_blocks"][..., :8].contiguous()), "MXFP4 needs uint8"),
        (lambda t: t.update(x_scales=t["x_scales"][:2].contiguous()), "MXFP4 needs uint8"),
        (lambda t: t.update(x_scales=t["x_scales"].float()), "MXFP4 needs uint8"),
    ],
)
def test_broken_mxfp4_is_refused(
    change: Callable[[dict[str, Tensor]], object],
    words: str,
    mxfp4: tuple[Tensor, Tensor],
    tmp_path: Path,
) -> None:
    tensors = dict(zip(("x_blocks", "x_scales"), mxfp4, strict=True))
    change(tensors)
    with pytest.raises(CheckpointError, match=words):
        open_mxfp4(tensors, tmp_path, "bfloat16")
