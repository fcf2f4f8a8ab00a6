"""Hugging Face's form, written: config.json, and safetensors under a family's keys.

The inverse of the reader's packing, by the same table of keys: queries, keys and values are parts
of each query group's rows, gate and up are halves, GPT-2's matrices are turned. It only plans.
config.json comes last, so that a copy that was interrupted is never a model.
"""

import json
from collections.abc import Iterator
from typing import Any

from checkpoints_tools.layout.layout import Layout, text_file
from checkpoints_tools.layout.safetensors import Entry, safetensors_file, shard_name, shards
from checkpoints_tools.writers.huggingface_config import choose
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.huggingface.families import FAMILIES, Family, Packed
from gpt.parallel.sharding import Parameter, Part, Ranges, Split, parameters
from gpt.tokenizers.tokenizer import check_tokenizer, open_tokenizer

SHARD_BYTES_MAX = 5_000_000_000
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def layout(
    checkpoint: Checkpoint,
    *,
    family: str | None = None,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> Layout:
    """`checkpoint` is in the dtype that is to be stored; its tokenizer says how a text ends."""
    choice = choose(checkpoint.config, checkpoint.path, family)
    entries = [
        entry
        for parameter in parameters(checkpoint.config).values()
        for entry in _entries(checkpoint, parameter, FAMILIES[choice.family])
    ]
    runs = shards(entries, shard_bytes_max)
    names = [shard_name("model", number, len(runs)) for number in range(len(runs))]
    names = names if len(runs) > 1 else [WEIGHTS]
    files = [safetensors_file(name, run) for name, run in zip(names, runs, strict=True)]
    last = []
    if len(runs) > 1:
        places = {entry.key: name for name, run in zip(names, runs, strict=True) for entry in run}
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        last.append(text_file(f"{WEIGHTS}.index.json", _json(index)))
    ends, notes = _ends(checkpoint)
    last.append(text_file(CONFIG, _json(choice.record | ends)))
    return Layout("huggingface", tuple(files), last=tuple(last), notes=choice.notes + notes)


def _json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=2).encode() + b"\n"


def _ends(checkpoint: Checkpoint) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """Which tokens begin and end a text, and what there is to say about it.

    Null where it is not known: a field that is left out is answered from the vocabulary that the
    family's first model had.
    """
    ends: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if checkpoint.tokenizer is None:
        return ends, ()
    try:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, checkpoint.config.vocab_size, checkpoint.tokenizer)
    except CheckpointError as error:
        return ends, (f"config.json names no token that ends a text: {error}",)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}, ()


def _entries(checkpoint: Checkpoint, parameter: Parameter, family: Family) -> Iterator[Entry]:
    name, keys = parameter.name, family.keys_of(parameter.name)
    assert keys is not None, f"the family holds the model, but has no key for {name}"

    def entry(key: str, ranges: Ranges) -> Entry:
        part = Part(0, ranges, sum(stop - start for start, stop in ranges))
        dtype = checkpoint.tensors[name].dtype
        return Entry(key, name, part, parameter.shape, dtype, family.turns(parameter))

    rows = parameter.shape[0]
    match keys:
        case str():
            yield entry(keys, ((0, rows),))
        case Packed(key):
            yield entry(key, sum(_three(checkpoint.config), ()))
        case _ if parameter.split is Split.QKV:
            for key, ranges in zip(keys, _three(checkpoint.config), strict=True):
                yield entry(key, ranges)
        case gate, up:
            yield entry(gate, ((0, rows // 2),))
            yield entry(up, ((rows // 2, rows),))
        case _:
            raise AssertionError(f"{name} is not made of {len(keys)} tensors")


def _three(config: GPTConfig) -> tuple[Ranges, Ranges, Ranges]:
    """The rows of all queries, of all keys and of all values, each in the order of the groups."""
    d, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups * d
    starts = [group * (queries + 2 * d) for group in range(groups)]
    q = tuple((start, start + queries) for start in starts)
    k = tuple((start + queries, start + queries + d) for start in starts)
    v = tuple((start + queries + d, start + queries + 2 * d) for start in starts)
    return q, k, v
