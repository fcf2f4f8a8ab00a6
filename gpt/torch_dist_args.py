"""The architecture of a distributed checkpoint without Megatron's args, as NeMo 2 writes them.

Shapes tell all sizes; the heads, the norm's epsilon, the activation and the positions cannot be
seen in them, and a wrong guess would give wrong logits in silence, so all are asked for at once.
It knows no files.
"""

from collections.abc import Mapping
from typing import Any

from gpt.errors import CheckpointError
from gpt.megatron_args import Answer, Weights, infer
from gpt.megatron_names import HEAD

ALWAYS: Mapping[str, str] = {
    "num_attention_heads": "how many heads share the attention",
    "num_query_groups": "equal to the heads if not grouped",
    "activation": "gelu for erf, gelu_tanh, silu or relu2",
    "layernorm_epsilon": "often 1e-5 or 1e-6",
    "layernorm_zero_centered_gamma": "true for layernorm1p",
}
ROTARY: Mapping[str, str] = {
    "position_embedding_type": "rope or none",
    "rotary_base": "often 10000",
    "rotary_percent": "1.0 if all channels turn",
    "max_position_embeddings": "the context that it was trained with",
}
EXPERTS: Mapping[str, str] = {
    "moe_router_topk": "experts of each token",
    "moe_router_pre_softmax": "false if the softmax is over the chosen ones",
}


def from_shapes(weights: Weights, changes: Mapping[str, Any], where: str) -> Answer:
    """What shapes tell; what they do not must stand in `changes`, or is asked for by name."""
    questions = {**ALWAYS, **({} if weights.positions else ROTARY)}
    sparse = any(weights.moe_layers)
    questions |= EXPERTS if sparse else {}
    if changes.get("position_embedding_type") == "none":
        questions = {name: why for name, why in questions.items() if "rotary" not in name}
    asked = [f"{name} ({why})" for name, why in questions.items() if name not in changes]
    if asked:
        raise CheckpointError(
            f"{where} keeps no Megatron args beside its weights and does not say "
            f"{', '.join(asked)}; look them up in the config that it was trained with, and give "
            "them as fields of config"
        )
    answer = infer(weights)
    answer.unknown = []
    answer.fields["untie_embeddings_and_output_weights"] = HEAD in weights.parts
    for note in ("activation", "layernorm_epsilon"):
        answer.notes.pop(note, None)
    if not {"window_size", "rope_scaling", "rotary_interleaved"} & set(changes):
        answer.notes["unseen"] = (
            "no args say whether attention has a window or positions are scaled or interleaved; "
            "taken as not, give window_size, rope_scaling or rotary_interleaved if they were"
        )
    if sparse:
        _experts(weights, answer.fields)
    return answer


def _experts(weights: Weights, fields: dict[str, Any]) -> None:
    first = weights.moe_layers.index(True)
    mlp = f"decoder.layers.{first}.mlp."
    expert = f"{mlp}experts.local_experts.0."
    fc1, fc2 = (
        weights.rows(f"{expert}linear_fc1.weight"),
        weights.columns(f"{expert}linear_fc2.weight"),
    )
    fields["num_experts"] = weights.rows(f"{mlp}router.weight")
    fields["moe_layers"] = weights.moe_layers
    fields["moe_ffn_hidden_size"] = fc2
    fields["gated"] = fc1 == 2 * fc2
    fields["mlp_bias"] = f"{expert}linear_fc2.bias" in weights.parts
    fields["moe_router_expert_bias"] = weights.has("router.expert_bias")
    shared = weights.columns(f"{mlp}shared_experts.linear_fc2.weight")
    fields["moe_shared_expert_intermediate_size"] = shared
    fields["moe_shared_expert_gate"] = weights.has("shared_experts.gate_weight")
    fields["ffn_hidden_size"] = fields["ffn_hidden_size"] or fc2
