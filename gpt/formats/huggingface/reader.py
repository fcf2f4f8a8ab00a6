"""Hugging Face reader: opens config.json and its weights as logical (unsharded) tensors.

The weights are safetensors or torch.save files; torch.save files are loaded weights-only. The
family's table lists the keys of each canonical tensor. The reader checks the shapes against the
config and maps the logical tensors to slices of the stored tensors:

- the rows of q, k and v are interleaved by query group;
- the gate rows are placed above the up rows;
- GPT-2's Conv1D weights are transposed;
- stacked experts are split.

No complete weight is read, and nothing is downloaded.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.files.object_checkpoint import open_weights
from gpt.checkpoint.files.safetensors_file import read_small_file
from gpt.checkpoint.files.torch_save import open_state_dict
from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    ComputedTensor,
    LogicalTensor,
    ReplicaPair,
    StoredTensor,
    apply_overrides,
    concat_rows,
    find_tokenizer,
    majority_dtype,
    refuse_unexpected_weights,
    refuse_untied_head,
    summarize_names,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.huggingface.families.config_json import ConfigJson, refuse_unknown_layer_types
from gpt.formats.huggingface.families.family import (
    Family,
    FusedExperts,
    FusedQKV,
    OffsetRows,
    ScalarKey,
)
from gpt.formats.huggingface.families.registry import FAMILIES
from gpt.formats.huggingface.quantization import dequantize_tensors, read_quantization
from gpt.formats.mappings.unsupported_architectures import refuse_hf_config
from gpt.parallel.vocabulary_padding import refuse_larger_vocabulary
from gpt.parallel.weight_sharding import ParameterSpec, ShardRule, parameter_specs

# Buffers (causal masks, rotary frequencies) that old files contain beside the weights.
BUFFER_KEYS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")

# Families of models with images, and the families of their text parts; by default, the first one.
TEXT_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral", "ministral3"),
}
# The keys of their parts for images, and what precedes the keys of their text part.
IMAGE_KEYS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
TEXT_KEY_PREFIXES = re.compile(r"^(model\.)?language_model\.")

# The longest file name that common file systems support.
NAME_BYTES_MAX = 255

HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def open_huggingface(
    path: Path, overrides: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open a directory with config.json and weights. `overrides` replaces fields of GPTConfig."""
    record = _read_json(path / "config.json")
    refuse_hf_config(record, str(path / "config.json"))
    has_images = str(record.get("model_type")) in TEXT_FAMILIES
    if has_images:
        record = _text_config(record, path / "config.json")
    family = _find_family(record, path / "config.json")
    fields = ConfigJson({**family.defaults, **record}, path / "config.json")
    refuse_unknown_layer_types(fields)
    quantization = read_quantization(fields)
    fields.check_end_ids()
    stored, files = _read_weights(path)
    stored, image_notes = _drop_image_parts(stored) if has_images else (stored, ())
    stored, quantization_notes = dequantize_tensors(stored, fields, quantization)
    stored = _normalize_keys(_add_missing_prefix(stored, family), family)
    stored, mtp_notes = _drop_mtp_layers(stored, family, fields)
    dtype = majority_dtype(stored.values())
    try:
        config = family.to_gpt_config(fields)
        if dtype is not None:
            config = config.with_fields(dtype=FLOAT_DTYPE_NAMES[dtype])
        stored_vocab_rows = config.vocab_size
        config = apply_overrides(config, overrides)
    except ConfigError as error:
        message = fields.name_key(str(error))
        raise CheckpointError(f"{path / 'config.json'}: {message}") from None
    notes = image_notes + quantization_notes + mtp_notes + _longrope_notes(config)
    refuse_larger_vocabulary(path, config.vocab_size, stored_vocab_rows)
    used_keys: set[str] = set()
    finder = _TensorFinder(path, stored, used_keys, stored_vocab_rows)
    tensors = {
        name: _pack_tensor(parameter, config, family, finder)
        for name, parameter in parameter_specs(config).items()
    }
    replica_pairs: tuple[ReplicaPair, ...] = ()
    if not config.untie_embeddings_and_output_weights:
        replica_pairs = _drop_tied_head(path, family, stored, used_keys)
    unexpected_keys = sorted(key for key in set(stored) - used_keys if not BUFFER_KEYS.search(key))
    file_by_key = {key: stored[key].location.rpartition(": ")[0] for key in unexpected_keys}
    refuse_unexpected_weights(path, [f"{key} in {file}" for key, file in file_by_key.items()])
    tokenizer = find_tokenizer(path)
    checkpoint = Checkpoint(
        path, "huggingface", config, tensors, files, tokenizer, notes=notes, copies=replica_pairs
    )
    checkpoint.check()
    return checkpoint


def read_family_name(path: Path) -> str:
    """Return the family of a directory's model; of a model with images, the text part's family."""
    record = _read_json(path / "config.json")
    if str(record.get("model_type")) in TEXT_FAMILIES:
        record = _text_config(record, path / "config.json")
    _find_family(record, path / "config.json")
    return str(record["model_type"])


def _text_config(record: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the config of the text part of a model with images."""
    text_config = record.get("text_config")
    if not isinstance(text_config, dict):
        raise CheckpointError(f"{path}: text_config is absent or no mapping; fetch the file again")
    shared = {
        key: record[key]
        for key in ("dtype", "torch_dtype", "quantization_config", "eos_token_id")
        if key in record
    }
    families = TEXT_FAMILIES[record["model_type"]]
    family = text_config.get("model_type", families[0])
    if family not in families:
        raise CheckpointError(
            f"{path}: text_config.model_type is {str(family)[:60]!r}, which Preamble does not "
            f"support in {record['model_type']}; it must be {' or '.join(families)}"
        )
    # The head is tied, or not, by the key of the whole model, if the file has it.
    heads = {key: record[key] for key in ("tie_word_embeddings",) if key in record}
    return {**shared, **text_config, **heads, "model_type": family}


def _drop_image_parts(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the tensors of the text part, under the keys of a text model, and a note."""
    text_tensors: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        if not IMAGE_KEYS.match(key):
            text_tensors[TEXT_KEY_PREFIXES.sub("", key, count=1)] = tensor
    prefixed = {
        key if key.startswith(("model.", "lm_head.")) else f"model.{key}": tensor
        for key, tensor in text_tensors.items()
    }
    return prefixed, ("the parts for images are ignored; the text model is complete",)


def _find_family(record: dict[str, Any], path: Path) -> Family:
    model_type = str(record.get("model_type"))
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type {model_type[:60]!r} is not supported; it must be one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_small_file(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch it again") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} is not a JSON object; fetch it again")
    return record


WeightsReader = Callable[[Path], Mapping[str, StoredTensor]]
WEIGHT_FORMATS: tuple[tuple[str, WeightsReader], ...] = (
    ("model.safetensors", open_weights),
    ("pytorch_model.bin", open_state_dict),
)


def _read_weights(path: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Return all stored tensors by key, and the files of the weights."""
    for name, reader in WEIGHT_FORMATS:
        if (path / name).is_file():
            return dict(reader(path / name)), (path / name,)
        index = path / f"{name}.index.json"
        if index.is_file():
            return _read_sharded(index, reader)
        stem, suffix = name.split(".")
        shards = sorted(path.glob(f"{stem}-*-of-*.{suffix}"))
        if shards:
            raise CheckpointError(
                f"{path} has {len(shards)} shards such as {shards[0].name}, but not {index.name}; "
                "fetch the index too"
            )
    raise CheckpointError(
        f"{path} has config.json but no weights; it needs model.safetensors, or shards with "
        "model.safetensors.index.json, or pytorch_model.bin"
    )


def _read_sharded(
    index: Path, reader: WeightsReader
) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    weight_map = _read_json(index).get("weight_map")
    is_valid_map = isinstance(weight_map, dict) and all(
        isinstance(name, str) for name in weight_map.values()
    )
    if not is_valid_map or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of keys to files; fetch it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        is_too_long = len(name.encode("utf-8", "replace")) > NAME_BYTES_MAX
        if Path(name).name != name or name in (".", "..") or is_too_long:
            raise CheckpointError(
                f"{index} names {name[:60]!r}, which is not a file beside it; fetch it again"
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(names)} shards, {len(missing)} of them missing: "
            f"{summarize_names(missing)}; fetch the missing files"
        )
    shards = {name: reader(index.parent / name) for name in names}
    stored = {key: tensor for shard in shards.values() for key, tensor in shard.items()}
    for key, shard_name in weight_map.items():
        if key not in shards[shard_name]:
            raise CheckpointError(
                f"{index} lists {key!r} in {shard_name}, but that file does not contain it; the "
                "index and the shards are of different versions: fetch them again"
            )
        stored[key] = shards[shard_name][key]
    return stored, tuple(index.parent / name for name in names)


def _add_missing_prefix(stored: dict[str, StoredTensor], family: Family) -> dict[str, StoredTensor]:
    """Add the family's prefix to all keys except the head's if no key has this prefix.

    The files of a base model without a head lack the prefix.
    """
    if any(key.startswith(family.prefix) for key in stored):
        return stored
    head_keys = ("lm_head.weight", family.key_table[HEAD])
    return {key if key in head_keys else family.prefix + key: stored[key] for key in stored}


@dataclass(frozen=True)
class _ExpertSlice:
    """A parameter of one expert in a tensor that stacks the parameter of all experts.

    `outputs`: the expert's outputs, rows of a matrix or elements of a bias.
    """

    stacked_tensor: StoredTensor
    expert: int
    outputs: slice
    transposed: bool  # The expert's matrix is stored as (in, out).

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stacked_tensor.shape[1:]
        outputs, *inputs = shape[::-1] if self.transposed else shape
        return len(range(*self.outputs.indices(outputs))), *inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.stacked_tensor.dtype

    @property
    def location(self) -> str:
        start, stop, step = self.outputs.start, self.outputs.stop or "", self.outputs.step or ""
        return f"{self.stacked_tensor.location}[{self.expert}, {start}:{stop}:{step}]"

    def tensor(self) -> Tensor:
        matrix = self.stacked_tensor.tensor()[self.expert]
        return (matrix.T if self.transposed else matrix)[self.outputs]


@dataclass(frozen=True)
class _ComputedExpertSlice(ComputedTensor):
    """A parameter of one expert in a computed tensor, of which a read computes only a box."""

    source: _ExpertSlice
    stacked_tensor: ComputedTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def location(self) -> str:
        return self.source.location

    @property
    def stored_dtype_name(self) -> str:
        return self.stacked_tensor.stored_dtype_name

    @property
    def block_bytes(self) -> int:
        return self.stacked_tensor.block_bytes

    def compute_box(self, *box: slice) -> Tensor:
        rows, *columns = box  # A bias has no columns.
        stacked_outputs = self.stacked_tensor.shape[2 if self.source.transposed else 1]
        outputs = range(stacked_outputs)[self.source.outputs][rows]
        output_box = slice(outputs.start, outputs.stop, outputs.step)
        expert = slice(self.source.expert, self.source.expert + 1)
        if self.source.transposed:
            return self.stacked_tensor.compute_box(expert, *columns, output_box)[0].T
        return self.stacked_tensor.compute_box(expert, output_box, *columns)[0]


@dataclass(frozen=True)
class _ScalarVector:
    """A tensor without dimensions as a vector of one element."""

    scalar: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    @property
    def dtype(self) -> torch.dtype:
        return self.scalar.dtype

    @property
    def location(self) -> str:
        return self.scalar.location

    def tensor(self) -> Tensor:
        return self.scalar.tensor().view(1)


def _normalize_keys(stored: dict[str, StoredTensor], family: Family) -> dict[str, StoredTensor]:
    """Rename keys to the keys of the family's table, and split fused experts."""
    normalized_tensors: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        name = key
        for alias_part, table_part in family.key_renames.items():
            name = name.replace(alias_part, table_part)
        if name in stored:
            # If the files also contain the new key, the old key is kept. It then stays unused, and
            # `open_huggingface` refuses it.
            name = key
        suffix = next((end for end in family.fused_experts if name.endswith(end)), None)
        if suffix is None or len(tensor.shape) < 2:
            normalized_tensors[name] = tensor
        else:
            prefix = name.removesuffix(suffix)
            slices = _split_experts(tensor, family.fused_experts[suffix])
            normalized_tensors |= {prefix + end: expert for end, expert in slices}
    return normalized_tensors


def _split_experts(tensor: StoredTensor, fused: FusedExperts) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the suffix of each expert's key, and its tensor."""
    transposed = fused.transposed and len(tensor.shape) == 3
    outputs, parts = tensor.shape[2 if transposed else 1], len(fused.parts)
    for expert in range(tensor.shape[0]):
        for index, suffix in enumerate(fused.parts):
            if fused.interleaved:
                part_outputs = slice(index, None, parts)
            else:
                # The last part includes any remaining outputs, which `_TensorFinder` then refuses.
                stop = None if index == parts - 1 else (index + 1) * (outputs // parts)
                part_outputs = slice(index * (outputs // parts), stop)
            part = _ExpertSlice(tensor, expert, part_outputs, transposed)
            if isinstance(tensor, ComputedTensor):
                computed = _ComputedExpertSlice(part, tensor, tensor.dtype)
                yield suffix.format(expert=expert), computed
            else:
                yield suffix.format(expert=expert), part


def _drop_mtp_layers(
    stored: dict[str, StoredTensor], family: Family, fields: ConfigJson
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Drop the layers for multi-token prediction; return the other tensors, and a note."""
    mtp_layers = family.mtp_layers(fields)
    if not mtp_layers:
        return stored, ()
    first_layer = fields.count("num_hidden_layers")
    prefixes = tuple(
        f"{family.prefix}layers.{layer}." for layer in range(first_layer, first_layer + mtp_layers)
    )
    model_tensors = {key: tensor for key, tensor in stored.items() if not key.startswith(prefixes)}
    has_mtp_layers = len(model_tensors) < len(stored)
    note = "layers for multi-token prediction are ignored; the main head is complete"
    return model_tensors, (note,) if has_mtp_layers else ()


def _longrope_notes(config: GPTConfig) -> tuple[str, ...]:
    """Return a note about the factors of LongRoPE that the model's context selects."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.long_frequency_factors:
        return ()
    original, context = scaling.original_max_position_embeddings, config.max_position_embeddings
    if context <= original:
        return (f"LongRoPE: a context of {context} tokens, with the factors for short contexts",)
    return (
        f"LongRoPE: a context of {context} tokens, with the factors for long contexts in all "
        f"sequences; set max_position_embeddings to {original} to use those for short contexts",
    )


class _TensorFinder:
    """Looks up stored tensors by key, checks their shapes, and records the used keys.

    `vocab_rows` is the number of rows of the stored embedding.
    """

    def __init__(
        self, path: Path, stored: Mapping[str, StoredTensor], used_keys: set[str], vocab_rows: int
    ) -> None:
        self.path = path
        self.stored = stored
        self.used_keys = used_keys
        self.vocab_rows = vocab_rows

    def find_tensor(self, key: str, shape: tuple[int, ...], name: str) -> StoredTensor:
        self.used_keys.add(key)
        stored = self.stored.get(key)
        if stored is None:
            raise CheckpointError(
                f"{self.path}: the weights lack {key!r}, which config.json requires; the download "
                "is incomplete, or config.json is of another model: fetch the whole directory "
                "again"
            )
        if tuple(stored.shape) != shape:
            raise CheckpointError(
                f"{stored.location}: found {tuple(stored.shape)}, need {shape} for {name}; "
                "config.json and the weights disagree: take both from the same model"
            )
        return stored


def _pack_tensor(
    parameter: ParameterSpec, config: GPTConfig, family: Family, finder: _TensorFinder
) -> LogicalTensor:
    """Map one canonical tensor to stored tensors."""
    name = parameter.name
    keys = family.tensor_keys(name)
    if keys is None:
        raise CheckpointError(
            f"{finder.path}: models of this family have no {name}; correct the overridden config "
            "fields"
        )
    transposed = family.stores_transposed(parameter)

    def find_source(key: str, rows: int) -> StoredTensor:
        shape = (rows, *parameter.shape[1:])
        return finder.find_tensor(key, shape[::-1] if transposed else shape, name)

    rows = parameter.shape[0]
    d = config.kv_channels
    heads = config.num_attention_heads
    groups = config.num_query_groups
    if isinstance(keys, FusedQKV):
        fused_tensor = find_source(keys.key, rows)
        starts = (
            (fused_tensor, 0),
            (fused_tensor, heads * d),
            (fused_tensor, (heads + groups) * d),
        )
        return concat_rows(_qkv_row_runs(config, starts), transposed=transposed)
    if isinstance(keys, ScalarKey):
        scalar = finder.find_tensor(keys.key, (), name)
        return concat_rows([(_ScalarVector(scalar), 0, 1)])
    if isinstance(keys, OffsetRows):
        return concat_rows([(find_source(keys.key, rows + keys.rows), keys.rows, rows)])
    if isinstance(keys, str):
        stored = find_source(
            keys, finder.vocab_rows if parameter.shard_rule is ShardRule.VOCAB else rows
        )
        return concat_rows([(stored, 0, rows)], transposed=transposed)
    if parameter.shard_rule is ShardRule.QKV:
        sizes = (heads * d, groups * d, groups * d)
        parts = [find_source(key, size) for key, size in zip(keys, sizes, strict=True)]
        return concat_rows(
            _qkv_row_runs(config, [(part, 0) for part in parts]), transposed=transposed
        )
    assert parameter.shard_rule is ShardRule.GATED, f"{name} is not made of {len(keys)} tensors"
    return concat_rows(
        [(find_source(key, rows // 2), 0, rows // 2) for key in keys], transposed=transposed
    )


def _qkv_row_runs(
    config: GPTConfig, starts: Sequence[tuple[StoredTensor, int]]
) -> Iterator[tuple[StoredTensor, int, int]]:
    """Yield the row runs of each query group: its queries, then its key, then its value.

    A row run is (stored tensor, first row, row count). `starts` has the stored tensor and first row
    of all queries, of all keys and of all values.
    """
    (q, q_first), (k, k_first), (v, v_first) = starts
    d, groups = config.kv_channels, config.num_query_groups
    query_rows = config.num_attention_heads // groups * d
    for group in range(groups):
        yield q, q_first + group * query_rows, query_rows
        yield k, k_first + group * d, d
        yield v, v_first + group * d, d


def _drop_tied_head(
    path: Path, family: Family, stored: Mapping[str, StoredTensor], used_keys: set[str]
) -> tuple[ReplicaPair, ...]:
    """Mark the head of a tied model as used, and return the pair of embedding and head.

    A head that is not a copy of the embedding is refused. Without a stored head, no pair is
    returned.
    """
    head_key, embedding_key = family.key_table[HEAD], family.key_table[EMBEDDING]
    assert isinstance(head_key, str) and isinstance(embedding_key, str)
    head = stored.get(head_key)
    if head is None:
        return ()
    used_keys.add(head_key)
    remedy = "set tie_word_embeddings to false in config.json"
    refuse_untied_head(path, [head], [stored[embedding_key]], remedy)
    return (ReplicaPair(EMBEDDING, stored[embedding_key], head),)
