"""Quantized Hugging Face checkpoints: pairs values with scales, or refuses the form by its name.

`quantization_config` in config.json names the form. FP8 (`fp8`, and `compressed-tensors` with the
format `float-quantized`) and MXFP4 (`mxfp4`) are dequantized when they are read: the values and
their scales become one stored tensor, under the key that an unquantized checkpoint has. Modules
that a release leaves unquantized need no list, because the dtype of a tensor tells its form. Scales
of activations and of the KV cache are ignored. Other forms are refused with the way out.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from gpt.checkpoint.dequantization import (
    FP8_DTYPES,
    MXFP4_GROUP,
    SCALE_DTYPES,
    Fp8Tensor,
    Mxfp4Tensor,
)
from gpt.checkpoint.logical_tensor import StoredTensor, majority_dtype
from gpt.dtypes import FLOAT_DTYPE_NAMES, FLOAT_DTYPES
from gpt.errors import CheckpointError
from gpt.formats.huggingface.families.config_json import ConfigJson

SECTION = "quantization_config"

# Scales and zero points of quantized activations and of a quantized KV cache.
ACTIVATION_SCALES = re.compile(r"\.(activation|input|output|kv|[qkv])_(scale|zero_point)$")

UNQUANTIZED_RELEASE = "give the unquantized release of the model, or its FP8 release"
# Forms that other tools can dequantize. For all others the way out is `UNQUANTIZED_RELEASE`.
CONVERTERS: Mapping[str, str] = {
    "bitsandbytes": "load it in transformers, call the model's dequantize(), and save it with "
    "save_pretrained()",
    "higgs": "load it in transformers, call the model's dequantize(), and save it with "
    "save_pretrained()",
    "compressed-tensors": "load it in transformers with "
    "CompressedTensorsConfig(dequantize=True), and save it with save_pretrained()",
}
# Files that quantization tools write beside config.json, and the names of the forms. Old versions
# write no `quantization_config` into config.json.
QUANTIZATION_FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}

Tensors = dict[str, StoredTensor]


def read_quantization(fields: ConfigJson) -> ConfigJson | None:
    """Return `quantization_config`, or None for a model that is not quantized.

    A `quant_method` that is not supported is refused; the weights need not exist.
    """
    section = fields.record.get(SECTION)
    if section is None:
        _refuse_quantization_files(fields.path.parent)
        return None
    if not isinstance(section, dict):
        raise fields.invalid_field_error(SECTION, section, "a mapping")
    quantization = ConfigJson(section, fields.path, f"{SECTION}.")
    if _method(quantization) not in READERS:
        raise _unsupported_error(quantization, "quant_method", section.get("quant_method"))
    return quantization


def dequantize_tensors(
    stored: Tensors, fields: ConfigJson, quantization: ConfigJson | None
) -> tuple[Tensors, tuple[str, ...]]:
    """Replace quantized tensors by tensors that are dequantized when they are read.

    Return all tensors by key, and notes. The new tensors have the dtype that config.json records. A
    form that is not supported is refused.
    """
    if quantization is None:
        return stored, ()
    tensors = {key: stored[key] for key in stored if not ACTIVATION_SCALES.search(key)}
    dtype = _target_dtype(fields, tensors)
    form, keys = READERS[_method(quantization)](tensors, quantization, dtype)
    if not keys:
        return tensors, ()
    name = FLOAT_DTYPE_NAMES[dtype]
    logging.getLogger(__name__).info(
        "event=weights_dequantized form=%r dtype=%s tensors=%d path=%s",
        form,
        name,
        len(keys),
        fields.path.parent,
    )
    note = (
        f"weights stored as {form} are dequantized to {name} when they are read ({len(keys)} of "
        "the stored tensors)"
    )
    return tensors, (note,)


def _method(quantization: ConfigJson) -> str:
    return str(quantization.record.get("quant_method"))


def _target_dtype(fields: ConfigJson, tensors: Tensors) -> torch.dtype:
    """Return the dtype in config.json, else the dtype of most unquantized elements, else bf16."""
    name = fields.record.get("dtype") or fields.record.get("torch_dtype")
    if isinstance(name, str) and name in FLOAT_DTYPES:
        return FLOAT_DTYPES[name]
    scales = re.compile(r"_(scale|scale_inv|scales)$")
    unquantized = (tensor for key, tensor in tensors.items() if not scales.search(key))
    return majority_dtype(unquantized) or torch.bfloat16


def _read_fp8(
    tensors: Tensors, quantization: ConfigJson, dtype: torch.dtype
) -> tuple[str, list[str]]:
    """Pair the tensors of `quant_method` fp8: a scale per block, or one per tensor."""
    quantization.require("expert_dtype", "fp8")
    if quantization.record.get("weight_block_size") is None:
        # AutoFP8 writes `weight_scale`, transformers `weight_scale_inv`.
        is_inverse = any(key.endswith(".weight_scale_inv") for key in tensors)
        suffix = "_scale_inv" if is_inverse else "_scale"
        return "FP8 with one scale each", _pair_fp8(tensors, suffix, None, dtype)
    block_shape = _block_shape(quantization, "weight_block_size")
    form = f"FP8 with a scale per block of {block_shape[0]} x {block_shape[1]}"
    return form, _pair_fp8(tensors, "_scale_inv", block_shape, dtype)


def _read_compressed_tensors(
    tensors: Tensors, quantization: ConfigJson, dtype: torch.dtype
) -> tuple[str, list[str]]:
    """Pair the tensors of `compressed-tensors`: a scale per tensor, per row or per block."""
    groups = quantization.record.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise quantization.invalid_field_error("config_groups", groups, "a mapping of groups")
    blocks: set[tuple[int, int] | None] = set()
    for name, group in groups.items():
        group_format = group.get("format") or quantization.record.get("format")
        weights = group.get("weights")
        if group_format != "float-quantized" or not isinstance(weights, dict):
            raise _unsupported_error(quantization, "format", group_format)
        allowed_values: Mapping[str, Sequence[object]] = {
            "num_bits": (8,),
            "type": ("float",),
            "symmetric": (True, None),
            "strategy": ("tensor", "channel", "block"),
        }
        for key, allowed in allowed_values.items():
            if weights.get(key) not in allowed:
                raise _unsupported_error(quantization, f"{name}.weights.{key}", weights.get(key))
        is_block = weights["strategy"] == "block"
        fields = ConfigJson(
            weights, quantization.path, f"{quantization.section}config_groups.{name}.weights."
        )
        block_shape = _block_shape(fields, "block_structure") if is_block else None
        blocks.add(block_shape)
    for key in ("sparsity_config", "transform_config"):
        section = quantization.record.get(key)
        if isinstance(section, dict) and section and section.get("format") != "dense":
            raise _unsupported_error(quantization, key, section)
    if len(blocks) > 1:
        raise _unsupported_error(quantization, "config_groups", "of several block sizes")
    return "FP8", _pair_fp8(tensors, "_scale", blocks.pop() if blocks else None, dtype)


def _block_shape(fields: ConfigJson, key: str) -> tuple[int, int]:
    value = fields.record.get(key)
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and 0 < size < 1 << 31 for size in value)
    ):
        return value[0], value[1]
    raise fields.invalid_field_error(key, value, "two whole numbers of at least 1")


def _pair_fp8(
    tensors: Tensors, suffix: str, block_shape: tuple[int, int] | None, dtype: torch.dtype
) -> list[str]:
    """Replace each FP8 tensor and its scales; return the keys of the new tensors.

    The key of the scales is the tensor's key with `suffix`. Without a `block_shape`, a tensor has
    one scale, or one per row.
    """
    keys = [key for key in tensors if tensors[key].dtype in FP8_DTYPES]
    for key in keys:
        values = tensors[key]
        scales = _pop_scales(tensors, values, key + suffix)
        shape, scale_shape = tuple(values.shape), tuple(scales.shape)
        *experts, rows, columns = (1, 1, *shape) if len(shape) < 2 else shape
        block = block_shape or ((rows, columns) if scale_shape[-2:] != (rows, 1) else (1, columns))
        expected = (*experts, -(-rows // block[0]), -(-columns // block[1]))
        is_scalar = block_shape is None and scale_shape in ((), (1,))
        is_valid = len(shape) in (2, 3) and (is_scalar or scale_shape == expected)
        if not is_valid or scales.dtype not in SCALE_DTYPES:
            raise CheckpointError(
                f"{scales.location}: found {scales.dtype} of shape {scale_shape}, need scales of "
                f"shape {expected} for {key} of shape {shape}; config.json and the weights "
                "disagree: take both from the same model"
            )
        tensors[key] = Fp8Tensor(values, scales, block, dtype)
    return keys


def _read_mxfp4(
    tensors: Tensors, quantization: ConfigJson, dtype: torch.dtype
) -> tuple[str, list[str]]:
    """Pair the tensors of MXFP4: the keys X_blocks and X_scales become X, (experts, in, out)."""
    keys = []
    for blocks_key in [key for key in tensors if key.endswith("_blocks")]:
        key = blocks_key.removesuffix("_blocks")
        blocks = tensors.pop(blocks_key)
        scales = _pop_scales(tensors, blocks, f"{key}_scales")
        shape, scale_shape = tuple(blocks.shape), tuple(scales.shape)
        if (
            len(shape) != 4
            or shape[:3] != scale_shape
            or shape[3] != MXFP4_GROUP // 2
            or {blocks.dtype, scales.dtype} != {torch.uint8}
        ):
            raise CheckpointError(
                f"{blocks.location}: found {blocks.dtype} of shape {shape}, with scales of "
                f"{scales.dtype} and shape {scale_shape}; MXFP4 needs uint8 of shapes (experts, "
                f"out, in / {MXFP4_GROUP}, {MXFP4_GROUP // 2}) and (experts, out, in / "
                f"{MXFP4_GROUP}): fetch the files again"
            )
        tensors[key] = Mxfp4Tensor(blocks, scales, dtype)
        keys.append(key)
    return "MXFP4", keys


def _pop_scales(tensors: Tensors, values: StoredTensor, key: str) -> StoredTensor:
    if key not in tensors:
        raise CheckpointError(
            f"{values.location} is quantized, but the weights lack its scales {key!r}; the "
            "download is incomplete: fetch the whole directory again"
        )
    return tensors.pop(key)


Reader = Callable[[Tensors, ConfigJson, torch.dtype], tuple[str, list[str]]]
# By `quant_method`. A reader replaces the quantized tensors, and returns a name of the form and the
# keys of the new tensors.
READERS: Mapping[str, Reader] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "mxfp4": _read_mxfp4,
}


def _refuse_quantization_files(folder: Path) -> None:
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            raise CheckpointError(
                f"{folder / name} tells that the weights are quantized by {method}, which Preamble "
                f"does not support; {_way_out(method)}"
            )


def _unsupported_error(quantization: ConfigJson, key: str, value: object) -> CheckpointError:
    method = _method(quantization)
    subject = f"{quantization.path}: {SECTION}"
    if key == "quant_method":
        problem = f"{subject}.quant_method is {method[:60]!r}"
    else:
        problem = f"{subject}.{key} of {method[:60]!r} is {str(value)[:60]!r}"
    return CheckpointError(
        f"{problem}, which Preamble does not support; {_way_out(method)} (supported are fp8, "
        "mxfp4, and compressed-tensors in the format float-quantized)"
    )


def _way_out(method: str) -> str:
    converter = CONVERTERS.get(method)
    return f"{converter}, or {UNQUANTIZED_RELEASE}" if converter else UNQUANTIZED_RELEASE
