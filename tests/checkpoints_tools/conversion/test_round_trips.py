"""Any architecture, from any split and form to any other and back: bit for bit.

Each example draws a model, a way there and a way on; what comes back is compared tensor by tensor.
The fast suite tries a few, the slow one hundreds.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.layout.layout import Division
from checkpoints_tools.writers.registry import Wish
from gpt.checkpoint.digest import base_digest, function
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.formats.registry import open_checkpoint
from tests.support.models import lively

FEW, MANY = 12, 250


# Traits that a Hugging Face family can hold; the rest is drawn as for any other model.
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
    """What Megatron can train, with sizes that eight tensor ranks divide."""
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
def wishes(draw: st.DrawFn, config: GPTConfig) -> Wish:
    """A form and a split; those that the model cannot have are drawn too, and refused."""
    to = draw(st.sampled_from(["native", "megatron", "megatron", "megatron-dist", "hf"]))
    tp, ep = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    ep = ep if any(config.moe_layers) else 1
    if to == "megatron":
        pp = draw(st.integers(1, min(5, config.num_layers)))
        most = config.num_layers // pp if pp > 1 else 1
        vpp = draw(st.integers(1, min(3, most)))
        return Wish(to, division=Division(tp, pp, vpp, ep))
    if to == "megatron-dist":
        return Wish(to, division=Division(tp=tp))
    return Wish(to, shard_bytes_max=draw(st.sampled_from([None, 4000])))


def carried(source: Checkpoint, target: Path, wish: Wish) -> Checkpoint:
    try:
        convert(plan(source, target, wish))
    except PreambleError as error:
        if wish.to == "native":
            raise
        event(f"{wish.to}: refused")
        note(f"{wish}: {error}")
        return source
    event(f"{wish.to}: written")
    return open_checkpoint(target)


def there_and_back(data: st.DataObject) -> None:
    config = data.draw(configs())
    origin = lively(config).in_dtype(getattr(torch, config.dtype))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = origin
        for step in range(2):
            here = carried(here, folder / str(step), data.draw(wishes(config)))
        back = carried(here, folder / "back", Wish())
        assert function(back.config) == function(origin.config)
        assert list(back.tensors) == list(origin.tensors)
        for tensor in origin.tensors:
            found, meant = back.read(tensor), origin.read(tensor)
            assert found.dtype == meant.dtype, tensor
            assert torch.equal(found.view(torch.uint8), meant.view(torch.uint8)), tensor
        assert base_digest(back) == base_digest(origin)


calm = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@settings(calm, max_examples=FEW, derandomize=True)
@given(st.data())
def test_a_model_comes_back_bit_for_bit(data: st.DataObject) -> None:
    there_and_back(data)


@pytest.mark.slow
@settings(calm, max_examples=MANY)
@given(st.data())
def test_many_models_come_back_bit_for_bit(data: st.DataObject) -> None:
    there_and_back(data)
