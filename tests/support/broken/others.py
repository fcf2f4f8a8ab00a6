"""Broken distributed, Hugging Face and native checkpoints.

Each kind has the words of its error message. All are refused before anything is written. A kind
that was seen in practice is added here.
"""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.broken import checkpoints
from tests.support.broken.checkpoints import (
    SHARD,
    Kind,
    Plant,
    cut,
    entry,
    fields,
    grown,
    header,
    index,
    json_of,
    kind,
    laughs,
    lost,
    nested,
    pointer,
    recipe,
    replace_content,
    replaced,
    saved,
    storage,
    swapped,
)

STACKED = "decoder.layers.mlp.linear_fc2.weight"
VAST = 1 << 60


def _span(change: Any) -> Plant:
    """The location of the first chunk of a key, changed."""
    return index(lambda record: [vars(storage(record, STACKED)[1]).update(**change)])


def _chunk(number: int, **values: Any) -> Plant:
    def change(record: Any) -> None:
        for name, value in values.items():
            object.__setattr__(entry(record, STACKED).chunks[number], name, value)

    return index(change)


def _moved(record: Any) -> None:
    """The second chunk over the first, in the storage too."""
    chunks = entry(record, STACKED).chunks
    locations = {
        location: span for location, span in record.storage_data.items() if location.fqn == STACKED
    }
    second_chunk = next(
        location for location in locations if tuple(location.offset) == tuple(chunks[1].offsets)
    )
    chunks[1] = chunks[0]
    del record.storage_data[second_chunk]


def _hole(record: Any) -> None:
    del entry(record, STACKED).chunks[1]


DISTRIBUTED: Mapping[str, Kind] = {
    "half an index": kind("torch_dist", cut(".metadata", 0.5), ".metadata", "broken or hostile"),
    "an index that claims a vast memo": kind(
        "torch_dist", replace_content(".metadata", b"\x80\x02}r\xff\xff\xff\x0f."), ".metadata"
    ),
    "an empty index": kind("torch_dist", replace_content(".metadata", b""), ".metadata", "0 bytes"),
    "a git-lfs pointer for an index": kind("torch_dist", pointer(".metadata"), "git-lfs"),
    "a git-lfs pointer for chunks": kind(
        "torch_dist", pointer("__0_0.distcp"), "__0_0.distcp", "git-lfs"
    ),
    "an index that is a list": kind(
        "torch_dist",
        replace_content(".metadata", pickle.dumps([1])),
        ".metadata",
        "not a readable index",
    ),
    "an index of lists twenty thousand deep": kind(
        "torch_dist", replace_content(".metadata", nested(20_000)), ".metadata"
    ),
    "an index of a terabyte": kind("torch_dist", grown(".metadata"), ".metadata"),
    "no index": kind("torch_dist", lost(".metadata"), "no .metadata", "did not finish"),
    "no metadata.json": kind(
        "torch_dist", lost("metadata.json"), "metadata.json", "did not finish"
    ),
    "half a metadata.json": kind("torch_dist", cut("metadata.json", 0.5), "metadata.json"),
    "the zarr format": kind(
        "torch_dist", fields("metadata.json", sharded_backend="zarr"), "iter_0000100", "zarr"
    ),
    "the format of torch's FSDP": kind(
        "torch_dist",
        fields("metadata.json", sharded_backend="torch_dcp"),
        "iter_0000100",
        "torch_dcp",
    ),
    "a missing file of chunks": kind(
        "torch_dist", lost("__0_1.distcp"), "iter_0000100", "lacks __0_1.distcp of the 2"
    ),
    "half a file of chunks": kind(
        "torch_dist", cut("__0_1.distcp", 0.5), "__0_1.distcp", "truncated"
    ),
    "a file of chunks that leads out": kind(
        "torch_dist",
        _span({"relative_path": "../../../../etc/passwd"}),
        ".metadata",
        "../../../../etc/passwd",
    ),
    "a file of chunks with an absolute path": kind(
        "torch_dist", _span({"relative_path": "/etc/passwd"}), ".metadata", "/etc/passwd"
    ),
    "a chunk beyond its file": kind(
        "torch_dist", _span({"offset": 1 << 40}), ".distcp", "truncated"
    ),
    "a chunk of a terabyte": kind("torch_dist", _span({"length": 1 << 40}), ".distcp", "truncated"),
    "a chunk of no bytes": kind("torch_dist", _span({"length": 0}), ".distcp", STACKED),
    "a chunk at the offset of another": kind(
        "torch_dist", _span({"offset": 0}), ".distcp", STACKED
    ),
    "a chunk at a negative offset": kind("torch_dist", _span({"offset": -1}), ".metadata"),
    "a compressed chunk": kind(
        "torch_dist", _span({"transform_descriptors": ["zstd"]}), "iter_0000100", "zstd"
    ),
    "chunks that overlap": kind("torch_dist", index(_moved), "iter_0000100", "linear_fc2"),
    "chunks with a hole": kind("torch_dist", index(_hole), "iter_0000100", "linear_fc2"),
    "a chunk outside its tensor": kind(
        "torch_dist", _chunk(0, sizes=torch.Size([9, 32, 22])), ".distcp", "outside the"
    ),
    "a chunk of a vast size": kind(
        "torch_dist", _chunk(0, sizes=torch.Size([1, VAST, 22])), ".distcp", "outside the"
    ),
    "a chunk of other dimensions": kind(
        "torch_dist", _chunk(0, sizes=torch.Size([1, 32])), ".metadata", "dimensions"
    ),
    "a chunk with exponential sizes": kind(
        "torch_dist", _chunk(0, sizes=laughs()), ".metadata", "expected sizes"
    ),
    "a tensor of a vast size": kind(
        "torch_dist",
        index(lambda r: setattr(entry(r, STACKED), "size", torch.Size([4, VAST, 44]))),
        "linear_fc2",
    ),
    "a vast number of layers": kind(
        "torch_dist",
        index(lambda r: setattr(entry(r, STACKED), "size", torch.Size([VAST, 32, 44]))),
        STACKED,
    ),
    "a layer too many": kind(
        "torch_dist",
        index(lambda r: setattr(entry(r, STACKED), "size", torch.Size([5, 32, 44]))),
        "iter_0000100",
        "layers",
    ),
    "a lost key": kind(
        "torch_dist",
        index(lambda r: r.state_dict_metadata.pop(STACKED)),
        "iter_0000100",
        "lacks decoder.layers.0.mlp.linear_fc2.weight",
    ),
    "an unknown key": kind(
        "torch_dist",
        index(
            lambda r: (
                r.state_dict_metadata.update(
                    {"decoder.x.weight": entry(r, "decoder.final_layernorm.weight")}
                ),
                r.storage_data.update(
                    {
                        type(location)("decoder.x.weight", location.offset, location.index): span
                        for location, span in [storage(r, "decoder.final_layernorm.weight")]
                    }
                ),
            )
        ),
        "iter_0000100",
        "decoder.x.weight",
    ),
    "integers in an index": kind(
        "torch_dist",
        index(lambda r: setattr(entry(r, STACKED).properties, "dtype", torch.int64)),
        "torch.int64",
    ),
    "another dtype than the chunk's": kind(
        "torch_dist",
        index(lambda r: setattr(entry(r, STACKED).properties, "dtype", torch.bfloat16)),
        ".distcp",
        "need (1, 32, 22) of torch.bfloat16",
    ),
    "no common state": kind("torch_dist", lost("common.pt"), "iter_0000100", "--config-json"),
    "half a common state": kind("torch_dist", cut("common.pt", 0.5), "common.pt", "truncated"),
}


def _first(record: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(value for key, value in record.items() if key != "__metadata__")
    return entry


def _json(record: dict[str, Any]) -> str:
    import json

    return json.dumps(record)


def _deep_json(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


def _overlapping(record: dict[str, Any]) -> None:
    """The second entry begins where the first does."""
    first_entry, second_entry = [entry for key, entry in record.items() if key != "__metadata__"][
        :2
    ]
    start = first_entry["data_offsets"][1] // 2
    second_entry["data_offsets"] = [
        start,
        start + second_entry["data_offsets"][1] - second_entry["data_offsets"][0],
    ]


SECOND = "model-00002-of-00012.safetensors"
SAFETENSORS: Mapping[str, Kind] = {
    "half a shard": kind("huggingface", cut(SECOND, 0.5), SECOND, "truncated"),
    "a shard without its last bytes": kind("huggingface", cut(SECOND, -4), SECOND, "truncated"),
    "three bytes of a shard": kind(
        "huggingface", replace_content(SECOND, b"abc"), SECOND, "3 bytes"
    ),
    "a header that claims to be vast": kind(
        "huggingface",
        replace_content(SECOND, (1 << 62).to_bytes(8, "little") + b"{}"),
        SECOND,
        "truncated",
    ),
    "a shard with surplus bytes": kind(
        "huggingface",
        lambda root: checkpoints.only_match(root, SECOND).write_bytes(
            checkpoints.only_match(root, SECOND).read_bytes() + b"1234"
        ),
        SECOND,
        "does not describe",
    ),
    "spans that overlap": kind(
        "huggingface",
        header(SHARD, _overlapping),
        SECOND,
        "has an overlap",
    ),
    "a duplicate name in a header": kind(
        "huggingface",
        header(SHARD, lambda r: _json(r)[:-1].encode() + b"," + _json(r)[1:].encode()),
        SECOND,
        "occurs twice",
    ),
    "NaN in a header": kind(
        "huggingface", header(SHARD, lambda r: _first(r).update(shape=[math.nan])), SECOND
    ),
    "a negative shape": kind(
        "huggingface", header(SHARD, lambda r: _first(r).update(shape=[-1, 48])), SECOND
    ),
    "a vast shape": kind(
        "huggingface", header(SHARD, lambda r: _first(r).update(shape=[VAST, VAST])), SECOND
    ),
    "an unknown dtype": kind(
        "huggingface", header(SHARD, lambda r: _first(r).update(dtype="F4")), SECOND, "dtype F4"
    ),
    "a dtype of another width": kind(
        "huggingface", header(SHARD, lambda r: _first(r).update(dtype="BF16")), SECOND, "needs"
    ),
    "integers in a shard": kind(
        "huggingface", header(SHARD, lambda r: _first(r).update(dtype="I32")), SECOND, "torch.int32"
    ),
    "a header that is a list": kind("huggingface", header(SHARD, lambda r: b"[]"), SECOND),
    "a deep header": kind(
        "huggingface", header(SHARD, lambda r: _deep_json(20_000).encode()), SECOND
    ),
    "a git-lfs pointer for a shard": kind("huggingface", pointer(SECOND), SECOND, "git-lfs"),
    "a missing shard": kind(
        "huggingface", lost(SECOND), "model.safetensors.index.json", f"1 of them missing: {SECOND}"
    ),
    "a shard that is a directory": kind(
        "huggingface", replaced(SECOND, Path.mkdir), "model.safetensors.index.json", SECOND
    ),
    "a shard that leads out": kind(
        "huggingface",
        json_of("*.index.json", lambda r: r["weight_map"].update(x="../other.safetensors")),
        "model.safetensors.index.json",
        "'../other.safetensors'",
    ),
    "a shard with a null in its name": kind(
        "huggingface",
        json_of("*.index.json", lambda r: r["weight_map"].update(x="a\0b.safetensors")),
        "model.safetensors.index.json",
    ),
    "an index of another version": kind(
        "huggingface",
        json_of("*.index.json", lambda r: r["weight_map"].update(x=SECOND)),
        "model.safetensors.index.json",
        "does not contain it",
    ),
    "a line break in a shard's name": kind(
        "huggingface",
        json_of("*.index.json", lambda r: r["weight_map"].update(x="a\nb.safetensors")),
        "model.safetensors.index.json",
        "a\\nb.safetensors",
    ),
    "an index without a map": kind(
        "huggingface",
        replace_content("*.index.json", "{}"),
        "model.safetensors.index.json",
        "weight_map",
    ),
    "no index beside shards": kind(
        "huggingface", lost("*.index.json"), "model.safetensors.index.json"
    ),
    "a git-lfs pointer for an index of shards": kind(
        "huggingface", pointer("*.index.json"), "model.safetensors.index.json", "git-lfs"
    ),
    "a swapped key": kind(
        "huggingface",
        header(SHARD, lambda r: r.update(x=r.pop(next(k for k in r if k != "__metadata__")))),
        "model.safetensors.index.json",
        SECOND,
    ),
    "half a file of weights": kind(
        "bin", cut("pytorch_model.bin", 0.5), "pytorch_model.bin", "truncated"
    ),
    "a file of weights without its zip directory": kind(
        "bin", cut("pytorch_model.bin", -60), "pytorch_model.bin", "truncated"
    ),
    "a git-lfs pointer for weights": kind("bin", pointer("pytorch_model.bin"), "git-lfs"),
    "weights that are a list": kind(
        "bin", recipe("pytorch_model.bin", nested(3)), "pytorch_model.bin", "state dict"
    ),
    "a key of weights lost": kind(
        "bin", saved("pytorch_model.bin", lambda r: r.pop("model.norm.weight")), "model.norm.weight"
    ),
    "a key of weights too many": kind(
        "bin",
        saved("pytorch_model.bin", lambda r: r.update({"model.x": torch.ones(1)})),
        "pytorch_model.bin",
        "model.x",
    ),
    "weights without storage": kind(
        "bin",
        saved(
            "pytorch_model.bin",
            lambda r: r.update({"model.norm.weight": torch.empty(48, device="meta")}),
        ),
        "pytorch_model.bin",
        "model.norm.weight",
    ),
}

CONFIGS: Mapping[str, Kind] = {
    "half a config": kind("huggingface", cut("config.json", 0.5), "config.json", "not JSON"),
    "a git-lfs pointer for a config": kind(
        "huggingface", pointer("config.json"), "config.json", "git-lfs"
    ),
    "a config of a terabyte": kind("huggingface", grown("config.json"), "config.json", "more than"),
    "a config that is a list": kind(
        "huggingface", replace_content("config.json", "[]"), "config.json"
    ),
    "a deep config": kind(
        "huggingface", replace_content("config.json", _deep_json(20_000)), "config.json", "not JSON"
    ),
    "a config that is not text": kind(
        "huggingface", replace_content("config.json", b"\xff\xfe{}"), "config.json"
    ),
    "a string for the number of layers": kind(
        "huggingface", fields("config.json", num_hidden_layers="3"), "config.json", '"3"'
    ),
    "a boolean for the number of layers": kind(
        "huggingface", fields("config.json", num_hidden_layers=True), "config.json", "true"
    ),
    "too many layers": kind(
        "huggingface", fields("config.json", num_hidden_layers=10**9), "config.json", "1000000000"
    ),
    "a huge width": kind("huggingface", fields("config.json", hidden_size=10**30), "config.json"),
    "a negative width": kind("huggingface", fields("config.json", hidden_size=-48), "-48"),
    "no heads": kind("huggingface", fields("config.json", num_attention_heads=0), "config.json"),
    "heads that do not divide": kind(
        "huggingface", fields("config.json", num_key_value_heads=3), "config.json", "3"
    ),
    "an infinite epsilon": kind(
        "huggingface", fields("config.json", rms_norm_eps=math.inf), "config.json", "rms_norm_eps"
    ),
    "nested rope_parameters": kind(
        "huggingface", fields("config.json", rope_parameters={"a": {"b": 1}}), "rope_parameters"
    ),
    "a family that is a list": kind(
        "huggingface", fields("config.json", model_type=["llama"]), "config.json", "model_type"
    ),
    "an unknown family": kind(
        "huggingface", fields("config.json", model_type="rwkv"), "config.json", "'rwkv'"
    ),
    "quantized weights": kind(
        "huggingface", fields("config.json", quantization_config={"bits": 4}), "quantization_config"
    ),
    "an activation that is a list": kind(
        "huggingface", fields("config.json", hidden_act=["silu"]), "config.json", "hidden_act"
    ),
    "a config of a wider model": kind(
        "huggingface", fields("config.json", hidden_size=96), "config.json and the weights disagree"
    ),
    "a vocabulary of another model": kind(
        "huggingface", fields("config.json", vocab_size=32000), "need (32000, 48)"
    ),
}

MANIFEST = "preamble.json"
OF_TEN = "model-00002-of-00010.safetensors"
NATIVE: Mapping[str, Kind] = {
    "half a manifest": kind("native", cut(MANIFEST, 0.5), MANIFEST, "not JSON"),
    "a git-lfs pointer for a manifest": kind("native", pointer(MANIFEST), MANIFEST, "git-lfs"),
    "a manifest of a terabyte": kind("native", grown(MANIFEST), MANIFEST, "more than"),
    "a newer manifest": kind("native", fields(MANIFEST, version=99), MANIFEST, "version 99"),
    "a boolean for the version": kind(
        "native", fields(MANIFEST, version=True), MANIFEST, "version"
    ),
    "a manifest of another format": kind("native", fields(MANIFEST, format="x"), MANIFEST),
    "a manifest without files": kind("native", fields(MANIFEST, files=[]), MANIFEST, "files"),
    "a file of another size": kind("native", cut(OF_TEN, -1), OF_TEN, "the manifest records"),
    "a missing file": kind("native", lost(OF_TEN), "source", f"lacks {OF_TEN}"),
    "a file that leads out": kind(
        "native",
        json_of(MANIFEST, lambda r: r["files"].update({"../x": {"bytes": 1}})),
        MANIFEST,
        "'../x'",
    ),
    "a file with an absolute path": kind(
        "native",
        json_of(MANIFEST, lambda r: r["files"].update({"/etc/passwd": {"bytes": 1}})),
        MANIFEST,
        "/etc/passwd",
    ),
    "a file with a null in its name": kind(
        "native",
        json_of(MANIFEST, lambda r: r["files"].update({"a\0\nb": {"bytes": 1}})),
        MANIFEST,
        "which is not inside",
    ),
    "a file with a name that is too long": kind(
        "native",
        json_of(MANIFEST, lambda r: r["files"].update({"a" * 300: {"bytes": 1}})),
        "source/aaa",
        "File name too long",
    ),
    "a string for a size": kind(
        "native",
        json_of(MANIFEST, lambda r: r["files"][OF_TEN].update(bytes="1")),
        MANIFEST,
        "size in bytes",
    ),
    "an unknown config key": kind(
        "native",
        json_of(MANIFEST, lambda r: r["config"].update(wings=2)),
        MANIFEST,
        "unknown key 'wings'",
    ),
    "a config of a wrong type": kind(
        "native", json_of(MANIFEST, lambda r: r["config"].update(num_layers="4")), MANIFEST
    ),
    "a manifest config of a wider model": kind(
        "native",
        json_of(MANIFEST, lambda r: r["config"].update(hidden_size=64)),
        "source",
        "requires (",
    ),
    "a layout of other files": kind(
        "native", fields(MANIFEST, layout="megatron"), "source", "not a checkpoint"
    ),
    "swapped files of weights": kind(
        "native", swapped(OF_TEN, "model-00003-of-00010.safetensors"), OF_TEN, "bytes"
    ),
    "a number for the digest": kind(
        "native", json_of(MANIFEST, lambda r: r["identity"].update(digest=7)), MANIFEST, "identity"
    ),
}


IN_OTHER_FILES: Mapping[str, Kind] = {**DISTRIBUTED, **SAFETENSORS, **CONFIGS, **NATIVE}
