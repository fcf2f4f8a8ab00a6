"""Hugging Face writer: lays out config.json and safetensors shards under a family's keys.

The reader's key table (`Family`) says how a family stores each logical tensor. With the same table
the writer splits the QKV matrix into queries, keys and values, splits the MLP's first matrix into
gate and up, and transposes GPT-2's matrices. The module only plans; it reads no weights.
config.json is written last, so that no software loads an incomplete target as a model.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from checkpoints_tools.layout.layout import Layout, literal_file
from checkpoints_tools.layout.safetensors import (
    SafetensorsEntry,
    plan_safetensors_file,
    shard_file_name,
    split_into_shards,
)
from checkpoints_tools.writers.huggingface_config import choose_family
from checkpoints_tools.writers.huggingface_tokenizer import plan_tokenizer
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.formats.huggingface.families.family import (
    EXPERT_NUMBER,
    Family,
    FusedQKV,
    OffsetRows,
    ScalarKey,
)
from gpt.formats.huggingface.families.registry import FAMILIES
from gpt.parallel.weight_sharding import (
    ParameterSpec,
    Ranges,
    ShardRule,
    ShardSpec,
    parameter_specs,
)

SHARD_BYTES_MAX = 5_000_000_000  # Default of --shard-gb.
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def plan_layout(
    checkpoint: Checkpoint,
    *,
    family: str | None = None,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> Layout:
    """Plan the target's files; `checkpoint` already has the target's dtype.

    The layout includes the checkpoint's tokenizer, which provides the BOS and EOS ids of
    config.json.
    """
    choice = choose_family(checkpoint.config, checkpoint.path, family)
    entries = [
        entry
        for parameter in parameter_specs(checkpoint.config).values()
        for entry in _parameter_entries(checkpoint, parameter, FAMILIES[choice.family])
    ]
    shards = split_into_shards(entries, shard_bytes_max)
    names = [
        shard_file_name("model", shard_index, len(shards)) for shard_index in range(len(shards))
    ]
    names = names if len(shards) > 1 else [WEIGHTS_FILE]
    files = [plan_safetensors_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    last_files = []
    if len(shards) > 1:
        weight_map = {
            entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard
        }
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        last_files.append(literal_file(f"{WEIGHTS_FILE}.index.json", _encode_json(index)))
    tokenizer = plan_tokenizer(checkpoint.tokenizer, checkpoint.config, choice.family)
    # An unknown id is written as null, because without the field transformers would use the
    # family's default id.
    special_tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    last_files.append(literal_file(CONFIG_FILE, _encode_json(choice.record | special_tokens)))
    return Layout(
        "huggingface",
        (*files, *tokenizer.files),
        last_files=tuple(last_files),
        notes=choice.notes + tokenizer.notes,
        includes_tokenizer=True,
    )


def _encode_json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=2).encode() + b"\n"


def _parameter_entries(
    checkpoint: Checkpoint, parameter: ParameterSpec, family: Family
) -> Iterator[SafetensorsEntry]:
    """Split one canonical parameter into the tensors that the family stores for it."""
    name, keys = parameter.name, family.tensor_keys(parameter.name)
    assert keys is not None, f"the family was chosen for this model, but has no key for {name}"
    expert = EXPERT_NUMBER.search(name)
    if expert is not None and family.writes_fused_experts:
        if expert[0] == "0":
            yield _stacked_experts(checkpoint, parameter, family)
        return

    def make_entry(key: str, ranges: Ranges) -> SafetensorsEntry:
        part = ShardSpec(0, ranges, sum(stop - start for start, stop in ranges))
        dtype = checkpoint.tensors[name].dtype
        return SafetensorsEntry(
            key, (name,), part, parameter.shape, dtype, family.stores_transposed(parameter)
        )

    rows = parameter.shape[0]
    match keys:
        case str():
            yield make_entry(keys, ((0, rows),))
        case ScalarKey(key):
            yield replace(make_entry(key, ((0, rows),)), scalar=True)
        case OffsetRows(key, zero_rows):
            yield replace(make_entry(key, ((0, rows),)), zero_rows=zero_rows)
        case FusedQKV(key):
            yield make_entry(key, sum(_qkv_ranges(checkpoint.config), ()))
        case _ if parameter.shard_rule is ShardRule.QKV:
            for key, ranges in zip(keys, _qkv_ranges(checkpoint.config), strict=True):
                yield make_entry(key, ranges)
        case gate, up:
            yield make_entry(gate, ((0, rows // 2),))
            yield make_entry(up, ((rows // 2, rows),))
        case _:
            raise AssertionError(f"{name} cannot be split into {len(keys)} tensors")


def _stacked_experts(
    checkpoint: Checkpoint, parameter: ParameterSpec, family: Family
) -> SafetensorsEntry:
    """Return the tensor that stacks a parameter of all experts; `parameter` is expert 0's."""
    keys = family.tensor_keys(parameter.name)
    keys = (keys,) if isinstance(keys, str) else keys
    assert isinstance(keys, tuple)
    suffix, fused = next(
        (suffix, fused)
        for suffix, fused in family.fused_experts.items()
        if keys[0].endswith(fused.parts[0].format(expert=0))
    )
    rows = parameter.shape[0]
    ranges = _alternating_rows(rows, len(keys)) if fused.interleaved else ((0, rows),)
    experts = range(checkpoint.config.num_experts)
    return SafetensorsEntry(
        keys[0].removesuffix(fused.parts[0].format(expert=0)) + suffix,
        tuple(EXPERT_NUMBER.sub(str(expert), parameter.name) for expert in experts),
        ShardSpec(0, ranges, rows),
        parameter.shape,
        checkpoint.tensors[parameter.name].dtype,
        fused.transposed and len(parameter.shape) == 2,
        stacked=True,
    )


@cache  # The tensors of all experts share the long result.
def _alternating_rows(rows: int, parts: int) -> Ranges:
    """Return the first row of each of the equal parts, then the second row of each part, ..."""
    if parts == 1:
        return ((0, rows),)
    height = rows // parts
    starts = [part * height + row for row in range(height) for part in range(parts)]
    return tuple((start, start + 1) for start in starts)


def _qkv_ranges(config: GPTConfig) -> tuple[Ranges, Ranges, Ranges]:
    """Return the row ranges of queries, of keys and of values in the fused QKV matrix.

    In the matrix, each query group has its queries, then its key and its value.
    """
    d, groups = config.kv_channels, config.num_query_groups
    query_rows = config.num_attention_heads // groups * d
    starts = [group * (query_rows + 2 * d) for group in range(groups)]
    q = tuple((start, start + query_rows) for start in starts)
    k = tuple((start + query_rows, start + query_rows + d) for start in starts)
    v = tuple((start + query_rows + d, start + query_rows + 2 * d) for start in starts)
    return q, k, v
