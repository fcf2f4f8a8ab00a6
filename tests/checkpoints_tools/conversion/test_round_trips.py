"""Conversions of any architecture between any formats and splits are bit-exact.

Each example draws a model and two conversions in sequence, and compares the result tensor by
tensor. The fast suite runs a few examples, the slow suite a hundred.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.layout.layout import ParallelSplit
from checkpoints_tools.writers.registry import ConversionOptions
from gpt.checkpoint.digest import base_digest, functional_config
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.formats.registry import open_checkpoint
from tests.support.models import lively

EXAMPLES = 12
SLOW_EXAMPLES, SOAK_EXAMPLES = 50, 100


# Fields that a Hugging Face family can express; the rest is drawn as for any other model.
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "position_embedding_type": "rope",
    "activation": "silu",
    "gated": True,
    "qkv_bias": False,
    "proj_bias": False,
    "mlp_bias": False,
}
STARCODER: dict[str, Any] = {
    "normalization": "LayerNorm",
    "layernorm_zero_centered_gamma": False,
    "position_embedding_type": "rope",
    "activation": "gelu_tanh",
    "gated": False,
    "qkv_bias": True,
    "proj_bias": True,
    "mlp_bias": True,
    "qk_layernorm": False,
    "num_experts": 0,
    "moe_layers": (),
}


@st.composite
def configs(draw: st.DrawFn) -> GPTConfig:
    """Configs that Megatron can train, with sizes that divide by eight tensor ranks."""
    heads = draw(st.sampled_from([8, 16]))
    biases = draw(st.sampled_from(["all", "none", "qkv"]))
    gated = draw(st.booleans())
    activations = ["silu"] if gated else ["gelu", "relu2", *(["gelu_tanh"] * (biases == "all"))]
    fields: dict[str, Any] = {
        "num_layers": draw(st.integers(1, 6)),
        "hidden_size": draw(st.sampled_from([16, 24])),
        "num_attention_heads": heads,
        "num_query_groups": draw(st.sampled_from([1, 2, 4, 8, heads])),
        "kv_channels": draw(st.sampled_from([2, 4, 6])),
        "ffn_hidden_size": 8 * draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(3, 200)),
        "max_position_embeddings": draw(st.integers(4, 40)),
        "position_embedding_type": draw(st.sampled_from(["learned_absolute", "rope", "none"])),
        "normalization": draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        "layernorm_epsilon": draw(st.sampled_from([1e-5, 1e-6])),
        "layernorm_zero_centered_gamma": draw(st.booleans()),
        "activation": draw(st.sampled_from(activations)),
        "gated": gated,
        "qkv_bias": biases != "none",
        "proj_bias": biases == "all",
        "mlp_bias": biases == "all",
        "untie_embeddings_and_output_weights": draw(st.booleans()),
        "qk_layernorm": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    }
    if biases != "all" and draw(st.booleans()):
        layers = st.lists(
            st.booleans(), min_size=fields["num_layers"], max_size=fields["num_layers"]
        )
        fields |= {
            "num_experts": 4,
            "moe_layers": tuple(draw(layers.filter(any))),
            "moe_ffn_hidden_size": 8 * draw(st.integers(1, 3)),
            "moe_router_topk": 2,
        }
    traits = draw(st.sampled_from([{}, {}, LLAMA, STARCODER]))
    return GPTConfig(**(fields | traits))


@st.composite
def conversion_options(draw: st.DrawFn, config: GPTConfig) -> ConversionOptions:
    """A target format and split, including impossible ones, which must be refused."""
    target_format = draw(st.sampled_from(["native", "megatron", "megatron", "megatron-dist", "hf"]))
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    ep = draw(st.sampled_from([1, 2]))
    ep = ep if any(config.moe_layers) else 1
    if target_format == "megatron":
        pp = draw(st.integers(1, min(5, config.num_layers)))
        virtual_stages_max = config.num_layers // pp if pp > 1 else 1
        vpp = draw(st.integers(1, min(3, virtual_stages_max)))
        return ConversionOptions(target_format, split=ParallelSplit(tp, pp, vpp, ep))
    if target_format == "megatron-dist":
        return ConversionOptions(target_format, split=ParallelSplit(tp=tp))
    return ConversionOptions(target_format, shard_bytes_max=draw(st.sampled_from([None, 4000])))


def carried(source: Checkpoint, target: Path, options: ConversionOptions) -> Checkpoint:
    try:
        convert(plan(source, target, options))
    except PreambleError as error:
        if options.target_format == "native":
            raise
        event(f"{options.target_format}: refused")
        note(f"{options}: {error}")
        return source
    event(f"{options.target_format}: written")
    return open_checkpoint(target)


def check_round_trip(draws: st.DataObject) -> None:
    config = draws.draw(configs())
    origin = lively(config).in_dtype(getattr(torch, config.dtype))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        current = origin
        for step in range(2):
            current = carried(current, folder / str(step), draws.draw(conversion_options(config)))
        restored = carried(current, folder / "back", ConversionOptions())
        assert functional_config(restored.config) == functional_config(origin.config)
        assert list(restored.tensors) == list(origin.tensors)
        for tensor in origin.tensors:
            restored_tensor = restored.read(tensor)
            original_tensor = origin.read(tensor)
            assert restored_tensor.dtype == original_tensor.dtype, tensor
            assert torch.equal(
                restored_tensor.view(torch.uint8), original_tensor.view(torch.uint8)
            ), tensor
        assert base_digest(restored) == base_digest(origin)


without_health_checks = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@settings(without_health_checks, max_examples=EXAMPLES, derandomize=True)
@given(st.data())
def test_round_trip_is_bit_exact(draws: st.DataObject) -> None:
    check_round_trip(draws)


@pytest.mark.slow
@settings(without_health_checks, max_examples=SLOW_EXAMPLES)
@given(st.data())
def test_many_round_trips_are_bit_exact(draws: st.DataObject) -> None:
    check_round_trip(draws)


@pytest.mark.soak
@settings(without_health_checks, max_examples=SOAK_EXAMPLES)
@given(st.data())
def test_more_round_trips_are_bit_exact(draws: st.DataObject) -> None:
    check_round_trip(draws)
