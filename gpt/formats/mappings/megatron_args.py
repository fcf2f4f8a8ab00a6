"""Megatron's `args`, as any of its versions saved them, turned into the fields of a GPTConfig.

They say what weights cannot: heads, activation, positions, norm. Names and defaults moved over the
years, and some were set but not obeyed by the classes of their time. What the model would not
compute exactly is refused by name; a file without args answers from its shapes, and asks the rest.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt.checkpoint.logical_tensor import refuse_larger_vocabulary
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.mappings.megatron_names import EMBEDDING, POSITIONS
from gpt.settings import shown

# How a user gives what the files do not say.
HOW = "(config= in Python, --config-json FILE on the command line)"
AS_FIELDS = f"as fields of config {HOW}"
UNTIED = f"give untie_embeddings_and_output_weights in config {HOW}"

# Every argument that describes the network; all ranks of one model agree on them.
DESCRIBING: tuple[str, ...] = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
    *("group_query_attention", "num_query_groups", "max_position_embeddings", "seq_length"),
    *("position_embedding_type", "use_rotary_position_embeddings", "add_position_embedding"),
    *("rotary_percent", "rotary_base", "rotary_interleaved", "use_rope_scaling"),
    *("rope_scaling_factor", "rotary_seq_len_interpolation_factor", "window_size"),
    *("window_attn_skip_freq", "normalization", "layernorm_epsilon", "norm_epsilon"),
    *("apply_layernorm_1p", "layernorm_zero_centered_gamma", "swiglu", "squared_relu"),
    *("openai_gelu", "onnx_safe", "bias_gelu_fusion", "add_bias_linear", "add_qkv_bias"),
    *("untie_embeddings_and_output_weights", "qk_layernorm", "num_experts", "moe_router_topk"),
    *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk_scaling_factor"),
    *("moe_ffn_hidden_size", "moe_router_enable_expert_bias", "padded_vocab_size", "vocab_size"),
    *("moe_router_num_groups", "moe_router_group_topk"),
    *("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", "model_parallel_size"),
    *("pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)

# What changes the function and is not computed here, and the values that mean: not used.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "multi_latent_attention": (False,),
    "softmax_type": ("vanilla",),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (),
    "linear_attention_freq": (),
    "linear_attention_type": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "use_mup": (False,),
    "moe_latent_size": (),
    "glu_linear_offset": (0, 0.0),
    "activation_func_clamp_value": (),
    "quick_geglu": (False,),
    "glu_activation": (),
    "apply_residual_connection_post_layernorm": (False,),
    "post_ln": (False,),
    "normformer": (False,),
    "headscale": (False,),
    "use_alibi": (False,),
    "qk_l2_norm": (False,),
    "no_rope_freq": (0,),
    "window_attn_skip_freq": (0, 1),
    "moe_router_force_load_balancing": (False,),
    "moe_apply_probs_on_input": (False,),
    "retro_add_retriever": (False,),
    "spec": ([],),
    "softmax_scale": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "apply_embedding_scaling": (False,),
}

# Functions by the last part of their names, where a config names one: by itself a GELU is erf's.
FUNCTIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "openai_gelu": "gelu_tanh",
    "fast_gelu": "gelu_tanh",
    "squared_relu": "relu2",
}

QUESTIONS: Mapping[str, str] = {
    "num_attention_heads": "how many heads share the attention",
    "num_query_groups": "equal to the heads if not grouped",
    "activation": "gelu for erf, gelu_tanh, silu or relu2",
    "position_embedding_type": "rope or none",
    "max_position_embeddings": "the context that it was trained with",
    "layernorm_epsilon": "often 1e-5 or 1e-6",
    "layernorm_zero_centered_gamma": "true for layernorm1p",
    "rotary_base": "often 10000",
    "rotary_percent": "1.0 if all channels turn",
    "moe_router_topk": "experts of each token",
    "moe_router_pre_softmax": "false if the softmax is over the chosen ones",
}


class Args:
    """One file's arguments. None, which argparse gives what was not set, counts as absent.

    In messages they are called `args.x`, or as `called` says, in a dialect of its own.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, called: Mapping[str, str] | None = None
    ) -> None:
        self.values, self.where, self.called = values, where, called

    def name(self, name: str) -> str:
        return f"args.{name}" if self.called is None else self.called.get(name, name)

    def get(self, name: str, absent: Any = None) -> Any:
        value = self.values.get(name)
        return absent if value is None else value

    def whole(self, name: str, absent: int = 0) -> int:
        value = self.get(name, absent)
        if type(value) is not int or value < 0:
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str, absent: float) -> float:
        value = self.get(name, absent)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "a number") from None

    def flag(self, name: str, absent: bool = False) -> bool:
        value = self.get(name, absent)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def literal(self, name: str) -> Any:
        """A value that some versions save as the text that the command line had."""
        value = self.get(name)
        if isinstance(value, str):
            try:
                return ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise self.wrong(name, "a plain value") from None
        return value

    def wrong(self, name: str, need: str) -> CheckpointError:
        found = shown(self.values.get(name))
        return CheckpointError(
            f"{self.where}: {self.name(name)} is {found}, where {need} is needed; take the file "
            "from the training run again"
        )

    def refused(self, name: str) -> CheckpointError:
        found = shown(self.values.get(name))
        return CheckpointError(
            f"{self.where}: {self.name(name)} is {found}, which Preamble does not compute; the "
            "model cannot be read"
        )


@dataclass(frozen=True)
class Weights:
    """What the tensors themselves say: their shapes on each tensor rank."""

    parts: Mapping[str, Sequence[tuple[int, ...]]]
    num_layers: int
    legacy: bool  # Of the classes before Megatron-Core.

    def rows(self, name: str) -> int:
        """Of a tensor whose rows are shared out; 0 if there is none."""
        return sum(shape[0] for shape in self.parts.get(name, ()) if shape)

    def columns(self, name: str) -> int:
        return sum(shape[-1] for shape in self.parts.get(name, ()) if shape)

    def has(self, leaf: str) -> bool:
        return any(name.endswith(leaf) for name in self.parts)

    @property
    def positions(self) -> int:
        """Rows of the table of positions, which every rank has whole."""
        return self.parts[POSITIONS][0][0] if POSITIONS in self.parts else 0

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        routers = "decoder.layers.{}.mlp.router.weight"
        return tuple(routers.format(layer) in self.parts for layer in range(self.num_layers))


@dataclass
class Answer:
    """Fields of a GPTConfig, and those that nothing tells and that must be asked for.

    A note tells how a field was found, and is void if the user gives the field.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def describe(args: Args, weights: Weights) -> Answer:
    """The architecture, from arguments of any version."""
    for name, unused in REFUSED.items():
        value = args.get(name)
        plain = isinstance(value, bool | int | float | str | list | tuple)
        if value is not None and not (plain and value in unused):
            raise args.refused(name)
    answer = Answer()
    fields = answer.fields
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        fields[name] = args.whole(name)
    fields["ffn_hidden_size"] = args.whole("ffn_hidden_size")
    fields["kv_channels"] = args.whole("kv_channels")
    fields["num_query_groups"] = _groups(args, weights)
    biases = args.flag("add_bias_linear", not args.flag("disable_bias_linear"))
    fields["qkv_bias"] = biases or args.flag("add_qkv_bias")
    fields["proj_bias"] = fields["mlp_bias"] = biases
    fields["untie_embeddings_and_output_weights"] = args.flag("untie_embeddings_and_output_weights")
    fields["hidden_dropout"] = args.number("hidden_dropout", 0.0)
    fields["attention_dropout"] = args.number("attention_dropout", 0.0)
    fields["qk_layernorm"] = args.flag("qk_layernorm")
    _norm(args, answer)
    _positions(args, weights, answer)
    _window(args, weights, answer)
    _activation(args, weights, biases, answer)
    if any(weights.moe_layers):
        _experts(args, weights, answer)
    _vocabulary(args, weights, answer)
    return answer


def _groups(args: Args, weights: Weights) -> int:
    """`num_query_groups` is 1 by default, in models without groups too."""
    heads, grouped = args.whole("num_attention_heads"), args.get("group_query_attention")
    if grouped is None and args.get("num_query_groups") is not None:
        # Written by a converter; the rows tell what it meant.
        channels = args.whole("kv_channels") or args.whole("hidden_size") // max(1, heads)
        rows = weights.rows("decoder.layers.0.self_attention.linear_qkv.weight")
        return heads if rows == 3 * heads * channels else args.whole("num_query_groups")
    return args.whole("num_query_groups") if args.flag("group_query_attention") else heads


def _norm(args: Args, answer: Answer) -> None:
    values = {args.number(name, 0.0) for name in ("layernorm_epsilon", "norm_epsilon")} - {0.0}
    if len(values) == 1:
        answer.fields["layernorm_epsilon"] = values.pop()
    elif values:
        answer.unknown.append("layernorm_epsilon")
    answer.fields["normalization"] = args.get("normalization", "LayerNorm")
    names = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
    answer.fields["layernorm_zero_centered_gamma"] = any(args.flag(name) for name in names)


def _positions(args: Args, weights: Weights, answer: Answer) -> None:
    fields = answer.fields
    kind = args.get("position_embedding_type", "learned_absolute")
    if kind not in ("learned_absolute", "rope", "none"):
        raise args.refused("position_embedding_type")
    rotary = kind == "rope" or args.flag("use_rotary_position_embeddings")
    learned = kind == "learned_absolute" and not rotary
    if weights.legacy:  # These classes add both if a table was kept beside rotary positions.
        learned = weights.positions > 0
    names = {
        (True, True): "learned_absolute+rope",
        (True, False): "learned_absolute",
        (False, True): "rope",
        (False, False): "none",
    }
    fields["position_embedding_type"] = names[learned, rotary]
    most = args.whole("max_position_embeddings") or args.whole("seq_length")
    fields["max_position_embeddings"] = weights.positions or most
    if not rotary:
        return
    fields["rotary_percent"] = args.number("rotary_percent", 1.0)
    stretch = args.number("rotary_seq_len_interpolation_factor", 1.0)
    llama3 = args.flag("use_rope_scaling") and not weights.legacy
    if not weights.legacy:  # The older classes have 10000 in their code, and turn halves.
        fields["rotary_base"] = args.number("rotary_base", 10000.0)
        fields["rotary_interleaved"] = args.flag("rotary_interleaved")
    if llama3 and stretch != 1:
        raise args.refused("rotary_seq_len_interpolation_factor")
    if llama3:
        stretch = args.number("rope_scaling_factor", 8.0)
    ignored = 8.0 if llama3 else 1.0
    if llama3 or stretch != 1:
        fields["rope_scaling"] = {"kind": "llama3" if llama3 else "linear", "factor": stretch}
    if stretch != ignored and not weights.legacy:
        answer.notes["rope_scaling"] = (
            f"positions are scaled by {stretch:g} as args say, but Megatron-LM's own training did "
            f"not obey that before core 0.19: give rope_scaling if it was trained with {ignored:g}"
        )


def _window(args: Args, weights: Weights, answer: Answer) -> None:
    window = args.literal("window_size")
    if window is None:
        return
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise args.wrong("window_size", "a pair of numbers")
    left, right = window
    if type(left) is not int or right not in (0, -1) or (weights.legacy and left >= 0):
        raise args.refused("window_size")
    if left >= 0:
        answer.fields["window_size"] = left + 1  # As many before a token, and itself.


def _activation(args: Args, weights: Weights, biases: bool, answer: Answer) -> None:
    fields = answer.fields
    if args.get("activation_func") is not None:
        _named_activation(args, biases, fields)
        return
    fields["gated"] = args.flag("swiglu")
    kernels = weights.legacy and args.get("transformer_impl") == "transformer_engine"
    if kernels:  # Its layers as a whole obey at most `swiglu`, the first of them nothing.
        fc1, fc2 = (f"decoder.layers.0.mlp.linear_fc{number}.weight" for number in (1, 2))
        fields["gated"] = weights.rows(fc1) == 2 * weights.columns(fc2)
        if args.flag("apply_layernorm_1p"):  # The last norm alone would obey it.
            raise args.refused("apply_layernorm_1p")
    # Transformer Engine has no GELU but the tanh form.
    if fields["gated"] or kernels or args.flag("use_te_activation_func"):
        fields["activation"] = "silu" if fields["gated"] else "gelu_tanh"
        return
    if args.flag("squared_relu"):
        fields["activation"] = "relu2"
        return
    named = args.get("bias_gelu_fusion") is not None
    if weights.legacy and not named and args.get("openai_gelu") is not None:
        # Of 2020, before there was a kernel.
        fields["activation"] = "gelu_tanh" if args.flag("openai_gelu") else "gelu"
        return
    # The kernel that adds the bias computes the tanh form, plain torch the one with erf.
    fused = args.flag("bias_gelu_fusion", True) and biases
    if not named:
        answer.notes["activation"] = "args name no form of GELU; taken as the tanh one"
    if weights.legacy and args.flag("onnx_safe") and fused:
        answer.unknown.append("activation")  # Which of the two won changed with the version.
        return
    tanh = fused or (weights.legacy and args.flag("openai_gelu"))
    fields["activation"] = "gelu_tanh" if tanh else "gelu"


def _named_activation(args: Args, biases: bool, fields: dict[str, Any]) -> None:
    """As Megatron-Core's own config has it: a function, whether it gates, whether it is fused."""
    name = args.get("activation_func")
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise args.refused("activation_func")
    gated = fields["gated"] = args.flag("gated_linear_unit")
    # The kernel that adds the bias computes the tanh form; one that gates needs no bias.
    fused = args.flag("bias_activation_fusion") and (biases or gated)
    fields["activation"] = "gelu_tanh" if name == "gelu" and fused else FUNCTIONS[name]


def _experts(args: Args, weights: Weights, answer: Answer) -> None:
    fields = answer.fields
    fields["num_experts"] = args.whole("num_experts")
    fields["moe_layers"] = weights.moe_layers
    fields["moe_router_topk"] = args.whole("moe_router_topk", 2)
    fields["moe_ffn_hidden_size"] = args.whole("moe_ffn_hidden_size")
    fields["moe_router_pre_softmax"] = args.flag("moe_router_pre_softmax")
    fields["moe_router_score_function"] = args.get("moe_router_score_function", "softmax")
    fields["moe_router_topk_scaling_factor"] = (
        args.number("moe_router_topk_scaling_factor", 0.0) or 1.0
    )
    biased = args.flag("moe_router_enable_expert_bias")
    fields["moe_router_expert_bias"] = biased
    if biased and fields["moe_router_score_function"] != "sigmoid":
        raise args.refused("moe_router_enable_expert_bias")
    fields["moe_shared_expert_intermediate_size"] = args.whole(
        "moe_shared_expert_intermediate_size"
    )
    fields["moe_shared_expert_gate"] = weights.has("shared_experts.gate_weight")
    groups = args.whole("moe_router_group_topk")
    if groups and groups != args.whole("moe_router_num_groups"):  # All of them are no limit.
        raise args.refused("moe_router_group_topk")
    balancing = args.get("moe_router_load_balancing_type", "none")
    if "sinkhorn" in (balancing if isinstance(balancing, list | tuple) else [balancing]):
        raise args.refused("moe_router_load_balancing_type")
    if args.get("moe_expert_capacity_factor") is not None:
        answer.notes["capacity"] = (
            "it was trained with a capacity for each expert; here no expert drops a token"
        )


def _vocabulary(args: Args, weights: Weights, answer: Answer) -> None:
    """The rows without padding, as far as args tell."""
    rows = weights.rows(EMBEDDING)
    padded = args.whole("padded_vocab_size")
    if padded and padded != rows:
        raise CheckpointError(
            f"{args.where}: args.padded_vocab_size is {padded}, but the embedding has {rows} rows"
            "; rank files are of different checkpoints: take them from one"
        )
    size = args.whole("vocab_size")
    if size and "Null" in str(args.get("tokenizer_type")):
        size += 1  # Its own count leaves out the token that ends a text.
    if 0 < size <= rows:
        answer.fields["vocab_size"] = size
        return
    answer.fields["vocab_size"] = rows
    answer.notes["vocab_size"] = _unpadded(rows)


def _unpadded(rows: int) -> str:
    return (
        f"the true vocabulary size is not recorded: all {rows} rows count, padding included; give "
        "vocab_size if the tokenizer has fewer"
    )


def infer(weights: Weights) -> Answer:
    """The architecture of a file without args, as those of 2019 and 2020, from its shapes."""
    answer = Answer()
    rows, hidden = weights.rows(EMBEDDING), weights.parts[EMBEDDING][0][1]
    fc1 = weights.rows("decoder.layers.0.mlp.linear_fc1.weight")
    fc2 = weights.columns("decoder.layers.0.mlp.linear_fc2.weight")
    answer.fields = {
        "num_layers": weights.num_layers,
        "hidden_size": hidden,
        "ffn_hidden_size": fc2,
        "vocab_size": rows,
        "normalization": "LayerNorm" if weights.has("final_layernorm.bias") else "RMSNorm",
        "gated": fc1 == 2 * fc2,
        "qkv_bias": weights.has("linear_qkv.bias"),
        "proj_bias": weights.has("linear_proj.bias"),
        "mlp_bias": weights.has("linear_fc2.bias"),
        "qk_layernorm": weights.has("q_layernorm.weight"),
    }
    answer.unknown.append("num_attention_heads")
    if fc1 == 2 * fc2:
        answer.unknown.append("activation")
    else:
        answer.fields["activation"] = "gelu_tanh"
        answer.notes["activation"] = "the files have no args; GELU is taken as the tanh form"
    answer.notes["layernorm_epsilon"] = "the files have no args; epsilon is taken as 1e-5"
    if weights.positions:
        answer.fields["max_position_embeddings"] = weights.positions
        answer.fields["position_embedding_type"] = "learned_absolute"
    else:
        answer.unknown += ["position_embedding_type", "max_position_embeddings"]
    answer.notes["vocab_size"] = _unpadded(rows)
    return answer


def settle(answer: Answer, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields with what the user knows better; what is still unknown is asked for by name."""
    asked = [name for name in answer.unknown if name not in changes]
    if asked:
        raise CheckpointError(
            f"{where} does not say {questions(asked)}; look {'it' if len(asked) == 1 else 'them'} "
            f"up where it was trained, and give {'it' if len(asked) == 1 else 'them'} {AS_FIELDS}"
        )
    return {**answer.fields, **changes}


def questions(names: Sequence[str]) -> str:
    """Fields by name, with what tells an answer from another."""
    return ", ".join(f"{name} ({QUESTIONS[name]})" if name in QUESTIONS else name for name in names)


def architecture(
    where: Path,
    weights: Weights,
    dtype: str,
    changes: GPTConfig | Mapping[str, Any],
    ask: Callable[[Weights], Answer],
) -> tuple[GPTConfig, dict[str, str]]:
    """The config, and what a user should know of how it was found, by field.

    `ask` gets it from wherever the format keeps it; a whole config makes that needless.
    """
    try:
        if isinstance(changes, GPTConfig):
            config, notes = changes, {}
        else:
            answer = ask(weights)
            answer.fields["dtype"] = dtype
            config = GPTConfig.from_dict(settle(answer, changes, str(where)))
            notes = {name: note for name, note in answer.notes.items() if name not in changes}
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    refuse_larger_vocabulary(where, config, weights.rows(EMBEDDING))
    if config.num_layers != weights.num_layers:
        raise CheckpointError(
            f"{where}: the config has {config.num_layers} layers, the weights have "
            f"{weights.num_layers}; files are lost or of another checkpoint: take all from one"
        )
    return config, notes
