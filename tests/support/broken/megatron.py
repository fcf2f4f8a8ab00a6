"""Broken Megatron-LM rank files, and pickles of every format that run code.

Each kind has the words of its error message. All are refused before anything is written. A kind
that was seen in practice is added here.
"""

import math
import os
import pickle
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.broken import checkpoints
from tests.support.broken.checkpoints import (
    EMBEDDING,
    FIRST,
    FIRST_FILE,
    HEAD,
    LAST,
    LAST_FILE,
    RANK_FILE,
    Calls,
    Kind,
    argument,
    copied,
    cut,
    grown,
    kind,
    laughs,
    lost,
    many,
    nested,
    pointer,
    ranks,
    recipe,
    replace_content,
    replaced,
    saved,
    swapped,
    tensor,
)

TRACKER = "latest_checkpointed_iteration.txt"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
FC2_BIAS = "decoder.layers.0.mlp.linear_fc2.bias"


def dropped(record: dict[str, Any], layer: int) -> None:
    for key in [key for key in record["model"] if f".layers.{layer}." in key]:
        del record["model"][key]


def shift_layer_numbers(record: dict[str, Any]) -> None:
    model = record["model"]
    for key in sorted(model, reverse=True):
        for layer in (1, 0):
            if f".layers.{layer}." in key:
                model[key.replace(f".layers.{layer}.", f".layers.{layer + 1}.")] = model.pop(key)
                break


def of_another_width(record: dict[str, Any]) -> None:
    record["args"].hidden_size = 64


MEGATRON: Mapping[str, Kind] = {
    "a rank file without its zip directory": kind(
        "megatron", cut(LAST_FILE, -60), LAST_FILE, "truncated or broken"
    ),
    "half a rank file": kind("megatron", cut(LAST_FILE, 0.5), LAST_FILE, "truncated or broken"),
    "three bytes of a rank file": kind(
        "megatron", replace_content(LAST_FILE, b"PK\x03"), LAST_FILE, "3 bytes"
    ),
    "an empty rank file": kind("megatron", replace_content(LAST_FILE, b""), LAST_FILE, "0 bytes"),
    "text for a rank file": kind(
        "megatron", replace_content(LAST_FILE, "<!doctype html>"), LAST_FILE
    ),
    "a git-lfs pointer for a rank file": kind("megatron", pointer(LAST_FILE), LAST_FILE, "git-lfs"),
    "half an old rank file": kind(
        "legacy", cut(f"mp_rank_01/{RANK_FILE}", 0.5), f"mp_rank_01/{RANK_FILE}", "truncated"
    ),
    "a missing rank": kind("megatron", lost(LAST), "iter_0000100", "lacks mp_rank_01_001 of the 4"),
    "a missing file of a rank": kind("megatron", lost(LAST_FILE), "iter_0000100", f"lacks {LAST}"),
    "a missing stage": kind("megatron", many(lost(LAST), lost("mp_rank_00_001")), "lacks", LAST),
    "the first rank missing": kind("megatron", lost(FIRST), "iter_0000100", f"lacks {FIRST}"),
    "a surplus rank": kind(
        "megatron", copied(LAST, "mp_rank_02_001"), "iter_0000100", "has mp_rank_02_001 beyond"
    ),
    "a directory for a rank file": kind(
        "megatron", replaced(LAST_FILE, Path.mkdir), "iter_0000100", f"lacks {LAST}"
    ),
    "a link to nothing for a rank file": kind(
        "megatron", replaced(LAST_FILE, checkpoints.to_nothing), "iter_0000100", f"lacks {LAST}"
    ),
    "a pipe for a rank file": kind(
        "megatron", replaced(LAST_FILE, os.mkfifo), "iter_0000100", f"lacks {LAST}"
    ),
    "two iterations mixed": kind(
        "megatron", ranks(LAST, lambda r: r.update(iteration=99)), LAST_FILE, "100", "has 99"
    ),
    "two models mixed": kind(
        "megatron", argument("layernorm_epsilon", 1e-6, LAST), LAST_FILE, "args.layernorm_epsilon"
    ),
    "two widths mixed": kind(
        "megatron", ranks(LAST, of_another_width), LAST_FILE, "args.hidden_size"
    ),
    "two versions mixed": kind(
        "megatron", ranks(LAST, lambda r: r.update(checkpoint_version=1.0)), LAST_FILE, "version"
    ),
    "integers for weights": kind(
        "megatron", tensor(LAST, FC2, torch.Tensor.long), LAST_FILE, FC2, "torch.int64"
    ),
    "FP8 for weights": kind(
        "megatron", tensor(LAST, FC2, lambda t: t.to(torch.float8_e4m3fn)), LAST_FILE, "quantized"
    ),
    "stages swapped on one tensor rank": kind(
        "megatron", swapped("mp_rank_00_000", "mp_rank_00_001"), "mp_rank_00_000", "the same stage"
    ),
    "tensor ranks of one stage swapped": kind(
        "megatron", swapped(FIRST, "mp_rank_01_000"), RANK_FILE, "not equal"
    ),
    "stages swapped": kind(
        "megatron",
        many(swapped(FIRST, "mp_rank_00_001"), swapped("mp_rank_01_000", LAST)),
        "mp_rank_00_00",
        "stage",
    ),
    "layers that count from 1": kind(
        "megatron",
        ranks("mp_rank_*_001", shift_layer_numbers),
        "mp_rank_00_001",
        "all layers from 0 on",
    ),
    "a lost layer": kind(
        "megatron", ranks("mp_rank_*_001", lambda r: dropped(r, 1)), "iter_0000100", "4 layers"
    ),
    "a lost tensor": kind(
        "megatron",
        ranks("mp_rank_*_001", lambda r: r["model"].pop(FC2_BIAS)),
        "iter_0000100",
        "lacks decoder.layers.2.mlp.linear_fc2.bias",
    ),
    "a tensor lost on one rank": kind(
        "megatron", ranks(LAST, lambda r: r["model"].pop(FC2)), LAST_FILE, "only one of them has"
    ),
    "an unknown tensor": kind(
        "megatron",
        ranks("mp_rank_*_001", lambda r: r["model"].update(x=torch.ones(1))),
        f"mp_rank_00_001/{RANK_FILE}: x",
        "no parameter for 1",
    ),
    "a narrow tensor": kind(
        "megatron", tensor(LAST, FC2, lambda t: t[:, :4].clone()), LAST_FILE, "found (32, 4)"
    ),
    "a scalar tensor": kind(
        "megatron", tensor(LAST, FC2, lambda _: torch.tensor(1.0)), LAST_FILE, "found ()"
    ),
    "a sparse tensor": kind(
        "megatron", tensor(LAST, FC2, lambda t: t.to_sparse()), LAST_FILE, "dense tensor"
    ),
    "a tensor under two names": kind(
        "megatron",
        ranks("mp_rank_*_001", lambda r: r["model"].update({f"module.{FC2}": torch.ones(1)})),
        f"mp_rank_00_001/{RANK_FILE}",
        "twice",
    ),
    "a line break in a tensor's name": kind(
        "megatron",
        ranks("mp_rank_*_001", lambda r: r["model"].update({"x\n\x1b[31my": torch.ones(1)})),
        f"mp_rank_00_001/{RANK_FILE}",
        "x\\n\\x1b[31my",
    ),
    "a string for a tensor": kind("megatron", tensor(LAST, FC2, lambda _: "w"), LAST_FILE, "a str"),
    "keys that are numbers": kind(
        "megatron", ranks("mp_rank_*", lambda r: r["model"].update({7: torch.ones(1)})), "7"
    ),
    "no model in a rank file": kind(
        "megatron", ranks(LAST, lambda r: r.pop("model")), LAST_FILE, "no model"
    ),
    "a model that is a list": kind(
        "megatron", ranks(LAST, lambda r: r.update(model=[1])), LAST_FILE, "no model"
    ),
    "another padding of the vocabulary": kind(
        "megatron", argument("padded_vocab_size", 128), "iter_0000100", "128", "112 rows"
    ),
    "an embedding of no rows": kind(
        "megatron", tensor("mp_rank_*_000", EMBEDDING, lambda t: t[:0].clone()), "iter_0000100"
    ),
    "a tied copy that was trained apart": kind(
        "megatron", tensor("mp_rank_*_001", HEAD, torch.Tensor.zero_), RANK_FILE, "not equal"
    ),
    "an untied model without a head": kind(
        "megatron",
        many(
            argument("untie_embeddings_and_output_weights", True),
            ranks("mp_rank_*_001", lambda r: r["model"].pop(HEAD)),
        ),
        "iter_0000100",
        f"lacks {HEAD}",
    ),
    "a quantized model": kind(
        "megatron", ranks(LAST, lambda r: r.update(modelopt_state={})), LAST_FILE, "quantized"
    ),
    "experts lost": kind("experts", lost(LAST), "iter_0000100", f"lacks {LAST}"),
    "a false number of experts": kind(
        "experts", argument("num_experts", 1 << 30), "iter_0000100", "num_experts"
    ),
    "an expert lost": kind(
        "experts",
        ranks(
            "mp_rank_*",
            lambda r: [r["model"].pop(k) for k in list(r["model"]) if "local_experts.1." in k],
        ),
        "iter_0000100",
        "lacks",
        "local_experts",
    ),
}


def _in_itself() -> dict[str, Any]:
    record: dict[str, Any] = {}
    record["a"] = record
    return record


MEGATRON_ARGS: Mapping[str, Kind] = {
    "a pattern with Mamba layers": kind(
        "hybrid", argument("hybrid_layer_pattern", "M-*-*-*-"), "args.hybrid_layer_pattern", "Mamba"
    ),
    "a pattern of other layers": kind(
        "hybrid", argument("hybrid_layer_pattern", "*E*-*-*-"), "the layers of the weights are"
    ),
    "a pattern of a hundred thousand layers": kind(
        "hybrid", argument("hybrid_layer_pattern", "*-" * 50_000), "more than the limit of 65536"
    ),
    "a pattern that is a tensor": kind(
        "hybrid",
        argument("hybrid_layer_pattern", torch.ones(3)),
        "args.hybrid_layer_pattern is tensor",
    ),
    "nested layers for a spec of a hybrid model": kind(
        "hybrid", argument("spec", [laughs()]), "args.spec"
    ),
    "a tensor for prediction heads": kind(
        "hybrid",
        argument("mtp_hybrid_override_pattern", torch.ones(3)),
        "args.mtp_hybrid_override_pattern is tensor",
    ),
    "tensors for windows of a hybrid model": kind(
        "hybrid",
        many(
            argument("window_size", (3, 0)),
            argument("window_attn_skip_freq", [torch.ones(3)] * 8),
        ),
        "args.window_attn_skip_freq",
    ),
    "swapped stages of a hybrid model": kind(
        "hybrid", swapped(FIRST, "mp_rank_00_001"), "two stages are swapped"
    ),
    "no last layer of a hybrid model": kind(
        "hybrid", ranks("mp_rank_00_001", lambda r: dropped(r, 4)), "layer 6 has no MLP after it"
    ),
    "args that are a list": kind(
        "megatron", ranks(FIRST, lambda r: r.update(args=[1])), FIRST_FILE, "args"
    ),
    "a string for a number": kind(
        "megatron", argument("num_layers", "4"), "iter_0000100", "args.num_layers is '4'"
    ),
    "a negative number": kind(
        "megatron", argument("hidden_size", -32), "iter_0000100", "args.hidden_size is -32"
    ),
    "a tensor for a number": kind(
        "megatron",
        argument("num_attention_heads", torch.tensor(4)),
        "iter_0000100",
        "args.num_attention_heads is tensor(4)",
    ),
    "a number that is huge": kind(
        "megatron", argument("ffn_hidden_size", 10**30), "iter_0000100", "ffn_hidden_size"
    ),
    "an integer of 65,537 bits": kind(
        "megatron", argument("ffn_hidden_size", 1 << (1 << 16)), FIRST_FILE, "more than 255 bytes"
    ),
    "a million tensor ranks": kind(
        "megatron",
        argument("tensor_model_parallel_size", 10**6),
        FIRST_FILE,
        "impossible parallel sizes",
    ),
    "a thousand tensor ranks": kind(
        "megatron",
        argument("tensor_model_parallel_size", 1000),
        "iter_0000100",
        "lacks",
        "1993 more",
    ),
    "no tensor ranks": kind(
        "megatron",
        argument("tensor_model_parallel_size", 0),
        FIRST_FILE,
        "impossible parallel sizes",
    ),
    "NaN for a number": kind(
        "megatron", argument("layernorm_epsilon", math.nan), "iter_0000100", "layernorm_epsilon"
    ),
    "an integer beyond float64": kind(
        "megatron", argument("layernorm_epsilon", 10**400), "iter_0000100", "layernorm_epsilon"
    ),
    "a norm that is a list": kind(
        "megatron", argument("normalization", ["LayerNorm"]), "iter_0000100", "normalization"
    ),
    "positions that are a dict": kind(
        "megatron", argument("position_embedding_type", {}), "iter_0000100", "position_embedding"
    ),
    "a window that runs code": kind(
        "megatron", argument("window_size", "__import__('os').system('true')"), "window_size"
    ),
    "a window of a million brackets": kind(
        "megatron", argument("window_size", "(" * 1_000_000), "iter_0000100", "window_size"
    ),
    "NaN for a version": kind(
        "legacy", ranks("*", lambda r: r.update(checkpoint_version=math.nan)), RANK_FILE, "version"
    ),
    "a negative version": kind(
        "legacy", ranks("*", lambda r: r.update(checkpoint_version=-1)), RANK_FILE, "version"
    ),
    "a string for a version": kind(
        "megatron", ranks(FIRST, lambda r: r.update(checkpoint_version="3")), FIRST_FILE, "version"
    ),
    "a version beyond float64": kind(
        "megatron", ranks(FIRST, lambda r: r.update(checkpoint_version=10**400)), FIRST_FILE
    ),
    "a string for an iteration": kind(
        "megatron", ranks(FIRST, lambda r: r.update(iteration="1")), FIRST_FILE, "iteration"
    ),
    "a NaN tensor for an iteration": kind(
        "megatron", ranks(FIRST, lambda r: r.update(iteration=torch.tensor(math.nan))), FIRST_FILE
    ),
    "an exponential list for a number": kind(
        "megatron", argument("num_layers", laughs()), "iter_0000100", "args.num_layers"
    ),
    "an exponential list for a refused argument": kind(
        "megatron", argument("spec", laughs()), "iter_0000100", "args.spec"
    ),
    "an exponential list for a version": kind(
        "megatron", ranks(FIRST, lambda r: r.update(checkpoint_version=laughs())), FIRST_FILE
    ),
    "a dict that holds itself": kind(
        "megatron", ranks(FIRST, lambda r: r.update(model=_in_itself())), FIRST_FILE
    ),
}

TRACKERS: Mapping[str, Kind] = {
    "an empty tracker": kind("megatron", replace_content(TRACKER, ""), TRACKER, "contains ''"),
    "a tracker of invalid UTF-8": kind(
        "megatron", replace_content(TRACKER, b"\xff\x00\n\n7"), TRACKER, "neither a number"
    ),
    "a tracker that names a missing iteration": kind(
        "megatron",
        replace_content(TRACKER, "200"),
        TRACKER,
        "names iter_0000200",
        "found: iter_0000100",
    ),
    "a tracker that leads out": kind(
        "megatron", replace_content(TRACKER, "../x"), TRACKER, "'../x'"
    ),
    "a torch_dist tracker that names a missing iteration": kind(
        "torch_dist", replace_content(TRACKER, "200"), TRACKER, "names iter_0000200"
    ),
    "a tracker as large as a file of weights": kind(
        "megatron", replace_content(TRACKER, b"7" * (8 << 20)), TRACKER, "neither a number"
    ),
    "a tracker of a terabyte": kind("megatron", grown(TRACKER), TRACKER),
    "a directory for a tracker": kind(
        "megatron", replaced(TRACKER, Path.mkdir), "source", "a Megatron checkpoint root"
    ),
}


def deep(tail: bytes) -> bytes:
    """`tail` ends up on the stack of a protocol 2 pickle."""
    return b"\x80\x02" + tail + b"."


HOSTILE: Mapping[str, Kind] = {
    "a call of the shell": kind(
        "megatron",
        ranks(LAST, lambda r: r.update(args=Calls(os.system, "true"))),
        LAST_FILE,
        "asks to run",
        "system",
    ),
    "a call of eval": kind(
        "megatron", ranks(LAST, lambda r: r.update(x=Calls(eval, "1"))), LAST_FILE, "eval"
    ),
    "a call of eval in an old file": kind(
        "legacy",
        lambda root: _old(root, Calls(eval, "1")),
        f"mp_rank_01/{RANK_FILE}",
        "asks to run",
        "eval",
    ),
    "a call of getattr": kind(
        "megatron",
        ranks(LAST, lambda r: r.update(x=Calls(getattr, torch.Tensor, "tolist"))),
        LAST_FILE,
        "asks to run builtins.getattr",
    ),
    "a BUILD opcode on a module": kind(
        "megatron", recipe(LAST_FILE, deep(b"ctorch\nnn\n}X\x01\x00\x00\x00aK\x01sb")), LAST_FILE
    ),
    "a BUILD opcode on getattr": kind(
        "megatron",
        recipe(LAST_FILE, deep(b"cbuiltins\ngetattr\n}X\x01\x00\x00\x00aK\x01sb")),
        LAST_FILE,
    ),
    "lists twenty thousand deep": kind(
        "megatron", recipe(LAST_FILE, nested(20_000)), LAST_FILE, "cannot be read"
    ),
    "arguments twenty thousand deep": kind(
        "megatron",
        recipe(LAST_FILE, b"\x80\x02}(X\x04\x00\x00\x00args" + nested(20_000)[2:-1] + b"u."),
        LAST_FILE,
    ),
    "a string with a vast length": kind(
        "megatron", recipe(LAST_FILE, deep(b"X\xff\xff\xff\x7fa")), LAST_FILE
    ),
    "a memo with a vast index": kind(
        "megatron", recipe(LAST_FILE, deep(b"}r\xff\xff\xff\x7f")), LAST_FILE
    ),
    "a pickle without an end": kind("megatron", recipe(LAST_FILE, b"\x80\x02}"), LAST_FILE),
    "an unknown protocol": kind("megatron", recipe(LAST_FILE, b"\x80\x63}."), LAST_FILE),
    "a tensor of a terabyte": kind(
        "megatron",
        tensor("mp_rank_*_001", FC2, lambda _: torch.zeros(1).expand(1 << 38)),
        f"mp_rank_00_001/{RANK_FILE}",
        "found (274877906944,)",
    ),
    "a position table of a terabyte": kind(
        "megatron",
        tensor(
            "mp_rank_*_000",
            "embedding.position_embeddings.weight",
            lambda _: torch.zeros(1, 32).expand(1 << 33, 32),
        ),
        "iter_0000100",
        "max_position_embeddings",
    ),
    "hostile common state": kind(
        "torch_dist",
        saved("common.pt", lambda r: r.update(args=Calls(os.system, "true"))),
        "common.pt",
        "asks to run",
        "system",
    ),
    "a hostile index": kind(
        "torch_dist",
        lambda root: checkpoints.only_match(root, ".metadata").write_bytes(
            pickle.dumps(Calls(os.system, "true"))
        ),
        ".metadata",
        "asks to run",
    ),
    "hostile weights of a Hugging Face model": kind(
        "bin",
        saved("pytorch_model.bin", lambda r: r.update(x=Calls(os.system, "true"))),
        "pytorch_model.bin",
        "asks to run",
        "system",
    ),
    "a class that is not tensors in weights": kind(
        "bin",
        saved("pytorch_model.bin", lambda r: r.update(x=types.SimpleNamespace(a=1))),
        "pytorch_model.bin",
    ),
}


def _old(root: Path, hostile: object) -> None:
    path = checkpoints.only_match(root, f"mp_rank_01/{RANK_FILE}")
    torch.save({"args": hostile, "model": {}}, path, _use_new_zipfile_serialization=False)


IN_RANK_FILES: Mapping[str, Kind] = {**MEGATRON, **MEGATRON_ARGS, **TRACKERS, **HOSTILE}
