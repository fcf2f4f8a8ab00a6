"""Tensor keys that several families with experts share."""

from collections.abc import Mapping

from gpt.formats.huggingface.families.family import FusedExperts, TensorKeys
from gpt.formats.huggingface.families.llama import LLAMA_KEYS

# The experts of Qwen2-MoE, Qwen3-MoE and GLM-4 MoE.
MOE_KEYS: Mapping[str, TensorKeys] = {
    **LLAMA_KEYS,
    "pre_mlp_layernorm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp.router.weight": "model.layers.{n}.mlp.gate.weight",
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": (
        "model.layers.{n}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{n}.mlp.experts.{expert}.up_proj.weight",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": (
        "model.layers.{n}.mlp.experts.{expert}.down_proj.weight"
    ),
}

MOE_FUSED_EXPERTS = {
    "experts.gate_up_proj": FusedExperts(
        (
            "experts.{expert}.gate_proj.weight",
            "experts.{expert}.up_proj.weight",
        )
    ),
    "experts.down_proj": FusedExperts(("experts.{expert}.down_proj.weight",)),
}
