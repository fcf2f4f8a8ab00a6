"""Writes pipeline saves of Megatron-DeepSpeed in the simplest way: one file per layer and rank.

It shares no code with the reader: names are literal, and parts are chunks.
"""

import enum
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from tests.support.models import CLASSIC, lively

BLOOM = CLASSIC.with_fields(
    num_layers=3,
    moe_layers=(),
    position_embedding_type="alibi",
    embedding_layernorm=True,
    vocab_size=96,
)
ABSOLUTE = CLASSIC.with_fields(num_layers=2, moe_layers=(), vocab_size=96, activation="gelu")
ROTARY = CLASSIC.with_fields(
    num_layers=2,
    moe_layers=(),
    vocab_size=96,
    position_embedding_type="rope",
    embedding_layernorm=True,
)

# The tensors of a layer in the file, by their name in Preamble, and the dimension that is split.
LAYER_NAMES: Mapping[str, tuple[str, int | None]] = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_bias": ("input_layernorm.bias", None),
    "self_attention.linear_qkv.weight": ("self_attention.query_key_value.weight", 0),
    "self_attention.linear_qkv.bias": ("self_attention.query_key_value.bias", 0),
    "self_attention.linear_proj.weight": ("self_attention.dense.weight", 1),
    "self_attention.linear_proj.bias": ("self_attention.dense.bias", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_bias": ("post_attention_layernorm.bias", None),
    "mlp.linear_fc1.weight": ("mlp.dense_h_to_4h.weight", 0),
    "mlp.linear_fc1.bias": ("mlp.dense_h_to_4h.bias", 0),
    "mlp.linear_fc2.weight": ("mlp.dense_4h_to_h.weight", 1),
    "mlp.linear_fc2.bias": ("mlp.dense_4h_to_h.bias", None),
}
OTHER_NAMES: Mapping[str, tuple[str, int | None]] = {
    "embedding.word_embeddings.weight": ("word_embeddings.weight", 0),
    "embedding.word_embeddings_layernorm.weight": ("word_embeddings.norm.weight", None),
    "embedding.word_embeddings_layernorm.bias": ("word_embeddings.norm.bias", None),
    "embedding.position_embeddings.weight": ("position_embeddings.weight", None),
    "decoder.final_layernorm.weight": ("weight", None),
    "decoder.final_layernorm.bias": ("bias", None),
}


def saved(config: GPTConfig, root: Path, tp: int, changes: Mapping[str, Any] = {}) -> Checkpoint:
    """Write a random model; return the tensors that were cut. `changes` are of the args."""
    source = lively(config)
    folder = root / "global_step100"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step100")
    for rank in range(tp):
        layers: dict[int, dict[str, Tensor]] = {}
        for name in source.tensors:
            number, key, dim = _layer_file_key(name, config.num_layers)
            value = source.read(name)
            part = value.clone() if dim is None else value.chunk(tp, dim)[rank].clone()
            layers.setdefault(number, {})[key] = part
        for number, tensors in layers.items():
            torch.save(tensors, folder / f"layer_{number:02}-model_{rank:02}-model_states.pt")
        with megatron_enums() as position_types:
            args = Namespace(**_args(config, tp, position_types) | dict(changes))
            record = {"module": None, "args": args, "iteration": 100, "checkpoint_version": 3.0}
            torch.save(record, folder / f"mp_rank_{rank:02}_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim.pt")
    return source


def _layer_file_key(name: str, num_layers: int) -> tuple[int, str, int | None]:
    """The layer's number in the pipeline, the key in its file, and the dimension that is split."""
    if name in OTHER_NAMES:
        number = 1 if name.startswith("embedding.") else num_layers + 4
        return number, *OTHER_NAMES[name]
    _, _, layer, suffix = name.split(".", 3)
    return int(layer) + 3, *LAYER_NAMES[suffix]


def _args(config: GPTConfig, tp: int, position_types: Any) -> dict[str, Any]:
    names = {"rope": "rotary", "learned_absolute": "absolute", "alibi": "alibi"}
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        "kv_channels": config.kv_channels,
        "seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "position_embedding_type": position_types[names[config.position_embedding_type]],
        "embed_layernorm": config.embedding_layernorm,
        "layernorm_epsilon": config.layernorm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "glu_activation": None,
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "openai_gelu": False,
        "onnx_safe": None,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 2,
        "padded_vocab_size": config.vocab_size,
    }


@contextmanager
def megatron_enums() -> Iterator[Any]:
    """`megatron.enums.PositionEmbeddingType`, importable while a file is saved."""

    class PositionEmbeddingType(enum.Enum):
        rotary = 1
        absolute = 2
        alibi = 3

    PositionEmbeddingType.__module__ = "megatron.enums"
    PositionEmbeddingType.__qualname__ = "PositionEmbeddingType"
    module = ModuleType("megatron.enums")
    vars(module)["PositionEmbeddingType"] = PositionEmbeddingType
    replaced = {name: sys.modules.get(name) for name in ("megatron", "megatron.enums")}
    sys.modules.update({"megatron": ModuleType("megatron"), "megatron.enums": module})
    try:
        yield PositionEmbeddingType
    finally:
        for name, previous in replaced.items():
            sys.modules.pop(name)
            if previous is not None:
                sys.modules[name] = previous
