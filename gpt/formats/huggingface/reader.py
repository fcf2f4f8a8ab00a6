"""Hugging Face checkpoints: config.json, and weights as safetensors or weights-only pickles.

The family's table says which keys make up a canonical tensor; here they are found, held against
the shapes that the config wants, and packed: q, k and v by query group, gate over up, GPT-2's
Conv1D turned, fused experts apart. Packing is a map of pieces; no weight is read. Nothing is
downloaded.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.files.safetensors_file import open_safetensors, read_text
from gpt.checkpoint.files.torch_save import open_torch
from gpt.checkpoint.logical_tensor import (
    Checkpoint,
    Copy,
    Logical,
    Stored,
    common_dtype,
    find_tokenizer,
    overridden,
    refuse_larger_vocabulary,
    refuse_leftover,
    refuse_untied,
    some,
    stack,
)
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.huggingface.config_json import Fields
from gpt.formats.huggingface.families import FAMILIES, Family, Packed
from gpt.parallel.sharding import Parameter, Split, parameters

# Buffers that old files hold and that are no weights: causal masks, rotary frequencies.
BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")

# The longest name that file systems take.
NAME_BYTES_MAX = 255

HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def open_huggingface(
    path: Path, changes: GPTConfig | Mapping[str, Any] | None = None
) -> Checkpoint:
    """A directory with config.json and weights. `changes` are fields of GPTConfig to override."""
    record = _read_json(path / "config.json")
    family = _family(record, path / "config.json")
    fields = Fields({**family.defaults, **record}, path / "config.json")
    fields.refuse("quantization_config", None)
    stored, files = _weights(path)
    stored = _respelled(_prefixed(stored, family), family)
    dtype = common_dtype(stored.values())
    try:
        config = family.config(fields)
        if dtype is not None:
            config = config.with_fields(dtype=FLOAT_NAMES[dtype])
        rows = config.vocab_size
        config = overridden(config, changes)
    except ConfigError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from None
    refuse_larger_vocabulary(path, config, rows)
    used: set[str] = set()
    tensors = {}
    for name, parameter in parameters(config).items():
        tensors[name] = _pack(parameter, config, family, _Finder(path, stored, used, rows))
    copies: tuple[Copy, ...] = ()
    if not config.untie_embeddings_and_output_weights:
        copies = _drop_tied_head(path, family, stored, used)
    left = sorted(key for key in set(stored) - used if not BUFFERS.search(key))
    files_of_left = {key: stored[key].where.rpartition(": ")[0] for key in left}
    refuse_leftover(path, [f"{key} in {file}" for key, file in files_of_left.items()])
    tokenizer = find_tokenizer(path)
    checkpoint = Checkpoint(path, "huggingface", config, tensors, files, tokenizer, copies=copies)
    checkpoint.check()
    return checkpoint


def _family(record: dict[str, Any], where: Path) -> Family:
    kind = str(record.get("model_type"))
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type {kind[:60]!r} is not a family that Preamble computes; known are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_text(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch it again") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} is not a JSON object; fetch it again")
    return record


Reader = Callable[[Path], Mapping[str, Stored]]
FORMS: tuple[tuple[str, Reader], ...] = (
    ("model.safetensors", open_safetensors),
    ("pytorch_model.bin", open_torch),
)


def _weights(path: Path) -> tuple[dict[str, Stored], tuple[Path, ...]]:
    """Every stored tensor by its key, and the files they are in."""
    for name, reader in FORMS:
        if (path / name).is_file():
            return dict(reader(path / name)), (path / name,)
        index = path / f"{name}.index.json"
        if index.is_file():
            return _sharded(index, reader)
        stem, suffix = name.split(".")
        shards = sorted(path.glob(f"{stem}-*-of-*.{suffix}"))
        if shards:
            raise CheckpointError(
                f"{path} has {len(shards)} shards as {shards[0].name}, but not {index.name}; fetch "
                "the index too"
            )
    raise CheckpointError(
        f"{path} has config.json but no weights; model.safetensors, or its shards with "
        "model.safetensors.index.json, or pytorch_model.bin is needed"
    )


def _sharded(index: Path, reader: Reader) -> tuple[dict[str, Stored], tuple[Path, ...]]:
    places = _read_json(index).get("weight_map")
    named = isinstance(places, dict) and all(isinstance(p, str) for p in places.values())
    if not named or not places:
        raise CheckpointError(f"{index} has no weight_map of keys to files; fetch it again")
    names = sorted(set(places.values()))
    for name in names:
        too_long = len(name.encode("utf-8", "replace")) > NAME_BYTES_MAX
        if Path(name).name != name or name in (".", "..") or too_long:
            raise CheckpointError(
                f"{index} names {name[:60]!r}, which is not a file beside it; fetch it again"
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(names)} shards, {len(missing)} of them missing: "
            f"{some(missing)}; fetch the missing ones"
        )
    shards = {name: reader(index.parent / name) for name in names}
    stored = {key: tensor for shard in shards.values() for key, tensor in shard.items()}
    for key, place in places.items():
        if key not in shards[place]:
            raise CheckpointError(
                f"{index} places {key!r} in {place}, which does not hold it; the index and the "
                "shards are of different versions: fetch them again"
            )
        stored[key] = shards[place][key]
    return stored, tuple(index.parent / name for name in names)


def _prefixed(stored: dict[str, Stored], family: Family) -> dict[str, Stored]:
    """Files of the bare model, without a head, leave the first name out."""
    if any(key.startswith(family.prefix) for key in stored):
        return stored
    heads = ("lm_head.weight", family.keys[HEAD])
    return {key if key in heads else family.prefix + key: stored[key] for key in stored}


@dataclass(frozen=True)
class _Slab:
    """Some rows of one matrix in a stored stack of matrices."""

    stack: Stored
    number: int
    rows: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows[1] - self.rows[0], self.stack.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    @property
    def where(self) -> str:
        return f"{self.stack.where}[{self.number}, {self.rows[0]}:{self.rows[1]}]"

    def tensor(self) -> Tensor:
        return self.stack.tensor()[self.number, slice(*self.rows)]


def _respelled(stored: dict[str, Stored], family: Family) -> dict[str, Stored]:
    """Keys as the family's table has them, and experts one by one, however they were saved."""
    result: dict[str, Stored] = {}
    for key, tensor in stored.items():
        name = key
        for theirs, ours in family.renamed.items():
            name = name.replace(theirs, ours)
        if name in stored:
            name = key  # The file has both; the one that is not asked for is refused as left over.
        stem = next((end for end in family.fused if name.endswith(end)), None)
        if stem is None or len(tensor.shape) != 3:
            result[name] = tensor
            continue
        ends = family.fused[stem]
        rows = tensor.shape[1] // len(ends)
        for expert in range(tensor.shape[0]):
            for part, end in enumerate(ends):
                # The last takes what does not divide, so that its shape is seen to be wrong.
                stop = tensor.shape[1] if part == len(ends) - 1 else (part + 1) * rows
                one = name.removesuffix(stem) + end.format(expert=expert)
                result[one] = _Slab(tensor, expert, (part * rows, stop))
    return result


class _Finder:
    """Finds keys among the stored tensors, holds their shapes to what is needed, ticks them off."""

    def __init__(
        self, path: Path, stored: Mapping[str, Stored], used: set[str], vocab_rows: int
    ) -> None:
        self.path, self.stored, self.used, self.vocab_rows = path, stored, used, vocab_rows

    def find(self, key: str, shape: tuple[int, ...], name: str) -> Stored:
        self.used.add(key)
        stored = self.stored.get(key)
        if stored is None:
            raise CheckpointError(
                f"{self.path}: none of the weights is {key!r}, which config.json asks for; the "
                "download is incomplete, or config.json is another model's"
            )
        if tuple(stored.shape) != shape:
            raise CheckpointError(
                f"{stored.where}: found {tuple(stored.shape)}, need {shape} for {name}; "
                "config.json and the weights disagree: take both from the same model"
            )
        return stored


def _pack(parameter: Parameter, config: GPTConfig, family: Family, finder: _Finder) -> Logical:
    """The map of one canonical tensor onto the stored ones."""
    name, keys = parameter.name, family.keys_of(parameter.name)
    if keys is None:
        raise CheckpointError(
            f"{finder.path}: a model with {name} is no model of its family; correct the override"
        )
    turned = family.turns(parameter)

    def find(key: str, rows: int) -> Stored:
        shape = (rows, *parameter.shape[1:])
        return finder.find(key, shape[::-1] if turned else shape, name)

    rows = parameter.shape[0]
    d, heads, groups = config.kv_channels, config.num_attention_heads, config.num_query_groups
    if isinstance(keys, Packed):
        whole = find(keys.key, rows)
        starts = ((whole, 0), (whole, heads * d), (whole, (heads + groups) * d))
        return stack(_grouped(config, starts), transposed=turned)
    if isinstance(keys, str):
        stored = find(keys, finder.vocab_rows if parameter.split is Split.VOCAB else rows)
        return stack([(stored, 0, rows)], transposed=turned)
    if parameter.split is Split.QKV:
        sizes = (heads * d, groups * d, groups * d)
        parts = [find(key, size) for key, size in zip(keys, sizes, strict=True)]
        return stack(_grouped(config, [(part, 0) for part in parts]), transposed=turned)
    assert parameter.split is Split.GATED, f"{name} is not made of {len(keys)} tensors"
    return stack([(find(key, rows // 2), 0, rows // 2) for key in keys], transposed=turned)


def _grouped(
    config: GPTConfig, starts: Sequence[tuple[Stored, int]]
) -> Iterator[tuple[Stored, int, int]]:
    """Runs of rows, group by group: its queries, its key, its value."""
    (q, q_first), (k, k_first), (v, v_first) = starts
    d, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups * d
    for group in range(groups):
        yield q, q_first + group * queries, queries
        yield k, k_first + group * d, d
        yield v, v_first + group * d, d


def _drop_tied_head(
    path: Path, family: Family, stored: Mapping[str, Stored], used: set[str]
) -> tuple[Copy, ...]:
    head_key, key = family.keys[HEAD], family.keys[EMBEDDING]
    assert isinstance(head_key, str) and isinstance(key, str)
    head = stored.get(head_key)
    if head is None:
        return ()
    used.add(head_key)
    remedy = "set tie_word_embeddings to false in config.json"
    refuse_untied(path, [head], [stored[key]], remedy)
    return (Copy(EMBEDDING, stored[key], head),)
