"""GPTConfig: the model configuration that comes with a checkpoint, in Megatron-Core's names.

The configuration is read from the checkpoint. Checkpoint readers convert the names of other formats
to these names. The constructor of GPTConfig refuses values that the model does not support, so
other modules do not check them again.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import isfinite, log
from typing import Any, Literal, Self, TypeVar, get_args

from gpt.errors import ConfigError
from gpt.settings import type_hints

PositionEmbeddingType = Literal[
    "learned_absolute", "rope", "learned_absolute+rope", "alibi", "none"
]
Normalization = Literal["LayerNorm", "RMSNorm"]
# Where a layer has norms: in front of attention and MLP, behind them (before their outputs are
# added to the residual), or both.
NormPlacement = Literal["pre", "post", "pre_and_post"]
QKNormScope = Literal["head", "all_heads"]
EmbeddingMultiplierScope = Literal["token_ids", "all"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2", "xielu"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
ScoreFunction = Literal["softmax", "sigmoid"]

# quick_gelu(x) is x * sigmoid(QUICK_GELU_FACTOR * x).
QUICK_GELU_FACTOR = 1.702

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# The largest number of layers, of experts per layer, and of experts in all layers. A larger number
# means a damaged file, and the table of all parameters would not fit in memory.
LAYERS_OR_EXPERTS_MAX = 65535
LAYERS_TIMES_EXPERTS_MAX = 1 << 18


ROPE_SCALING_KINDS = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for contexts longer than the training context.

    `linear` divides all frequencies by `factor`; `longrope` divides each frequency by its own
    factor, in `frequency_factors`, or in `long_frequency_factors` if the model's context is longer
    than `original_max_position_embeddings` (`for_context`). The other kinds divide some
    frequencies, leave others unchanged, and interpolate between the two:

    - `llama3` depends on the number of rotations that a frequency gives within
      `original_max_position_embeddings` positions. With at most `low_freq_factor` rotations, the
      frequency is divided; with at least `high_freq_factor` rotations, it is unchanged. The
      interpolation is linear in the number of rotations.
    - `yarn` (https://arxiv.org/abs/2309.00071) does the same with `beta_slow` and `beta_fast`
      rotations, but its interpolation is linear in the index of the frequency. `truncate` rounds
      the indices of the two limits to whole numbers.

    With `yarn` and `longrope`, cos and sin are multiplied by `attention_factor`.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()
    long_frequency_factors: tuple[float, ...] = ()  # Empty: `frequency_factors`, for all contexts.

    def __post_init__(self) -> None:
        _check_types(self, "rope_scaling.")
        if self.kind not in ROPE_SCALING_KINDS:
            raise ConfigError(
                f"rope_scaling.kind is {self.kind!r}; choose one of: "
                + ", ".join(ROPE_SCALING_KINDS)
            )
        if self.original_max_position_embeddings < 1:
            raise ConfigError(
                "rope_scaling.original_max_position_embeddings is "
                f"{self.original_max_position_embeddings}; it must be a whole number of at least 1"
            )
        if self.factor <= 0 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling has factor {self.factor}, low_freq_factor {self.low_freq_factor} "
                f"and high_freq_factor {self.high_freq_factor}; all three must be above 0, and "
                "high_freq_factor must be larger than low_freq_factor"
            )
        for name in ("frequency_factors", "long_frequency_factors"):
            if any(factor <= 0 for factor in getattr(self, name)):
                raise ConfigError(f"rope_scaling.{name} must be above 0")
        if self.attention_factor <= 0 or not 0 < self.beta_slow < self.beta_fast:
            raise ConfigError(
                f"rope_scaling has beta_slow {self.beta_slow}, beta_fast {self.beta_fast} and "
                f"attention_factor {self.attention_factor}; all three must be above 0, and "
                "beta_fast must be larger than beta_slow"
            )
        if self.kind == "longrope" and self.long_frequency_factors in ((), self.frequency_factors):
            # With one list of factors, the original length has no effect.
            object.__setattr__(self, "long_frequency_factors", ())
            object.__setattr__(self, "original_max_position_embeddings", 8192)

    def for_context(self, context_tokens: int) -> Self:
        """Return the scaling for a model with a context of `context_tokens` tokens.

        All positions of all sequences have the same factors, because keys of earlier positions are
        in the KV cache when a sequence exceeds the original length.
        """
        if not self.long_frequency_factors:
            return self
        is_long = context_tokens > self.original_max_position_embeddings
        factors = self.long_frequency_factors if is_long else self.frequency_factors
        return replace(self, frequency_factors=factors, long_frequency_factors=())


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Return the factor of cos and sin that YaRN's authors propose for a scaling by `factor`.

    With both `mscale` and `mscale_all_dim`, it is a quotient, as in DeepSeek's models.
    """

    def magnitude(scale: float) -> float:
        return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0

    if mscale is None or mscale_all_dim is None:
        return magnitude(1.0)
    return magnitude(mscale) / magnitude(mscale_all_dim)


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a layer."""

    base: float = 10000.0
    percent: float = 1.0  # The share of a head's channels that is rotated.
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _check_types(self, "window_rope.")
        if self.base < 1:
            raise ConfigError(f"rotary_base is {self.base}; it must be at least 1")
        if self.scaling is not None and self.scaling.kind == "yarn" and self.base == 1:
            raise ConfigError("rotary_base is 1; YaRN needs a base above 1")
        if not 0 < self.percent <= 1:
            raise ConfigError(f"rotary_percent is {self.percent}; it must be in (0, 1]")

    def rotary_dim(self, head_width: int) -> int:
        """The number of leading channels of each head that are rotated."""
        return int(head_width * self.percent)

    def for_context(self, context_tokens: int) -> Self:
        """Return the rotary embedding for a model with a context of `context_tokens` tokens."""
        if self.scaling is None:
            return self
        return replace(self, scaling=self.scaling.for_context(context_tokens))


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between the layers of a model."""

    # Number of tokens that a token attends to, itself included. None: all tokens up to itself.
    window_size: int | None
    rope: RopeConfig | None  # None: queries and keys are not rotated.
    # Whether the softmax has one more term in its denominator, a learned logit for each head.
    attention_sinks: bool
    has_experts: bool


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT.

    `layers` says for each layer what may differ between layers; the other fields apply to the
    model. The constructor replaces some values of 0 and an empty `moe_layers`; the comments
    "0: ..." and "Empty: ..." give the value that it stores instead. It removes settings without
    effect, such as a window that no layer has, so that equal models have equal configurations.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # Without vocabulary padding.
    max_position_embeddings: int

    # Width of the MLP. The weight of fc1 has this number of rows, or twice the number if gated.
    # 0: 4 x hidden_size.
    ffn_hidden_size: int = 0
    num_query_groups: int = 0  # 0: one group per head (multi-head attention).
    kv_channels: int = 0  # Width of a head. 0: hidden_size / num_attention_heads.

    position_embedding_type: PositionEmbeddingType = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    rotary_interleaved: bool = False
    rope_scaling: RopeScaling | None = None
    # For each layer, whether it rotates queries and keys. Empty: all layers, if the model has RoPE.
    rope_layers: tuple[bool, ...] = ()
    # The rotary embedding of the layers with a window. None: that of the other layers.
    window_rope: RopeConfig | None = None

    normalization: Normalization = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False  # The stored weight is gamma - 1.
    norm_placement: NormPlacement = "pre"
    embedding_layernorm: bool = False  # A norm of the embeddings, before the first layer.
    activation: Activation = "gelu_tanh"
    gated: bool = False  # fc1 is [gate; up]: SwiGLU with silu, GeGLU with gelu.
    # In a gated MLP: gate is at most this value, and up is at least -value and at most value.
    # 0: no limit.
    activation_func_clamp_value: float = 0.0
    glu_linear_offset: float = 0.0  # Added to up in a gated MLP.
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    untie_embeddings_and_output_weights: bool = False
    qk_layernorm: bool = False
    # Whether q/k norms normalize each head, or the queries (keys) of all heads together.
    qk_layernorm_scope: QKNormScope = "head"
    # Factor of the attention scores. 0: 1 / sqrt(kv_channels).
    softmax_scale: float = 0.0
    attention_sinks: bool = False  # One learned logit for each query head and layer.
    # The query of the token at position p is multiplied by 1 + beta * ln(1 + floor(p / length)).
    # A beta of 0: no factor.
    query_scaling_beta: float = 0.0
    query_scaling_length: int = 0
    embedding_multiplier: float = 1.0  # Factor of the embeddings.
    # Whether the factor applies to the embeddings of token ids only, or to virtual tokens too.
    embedding_multiplier_scope: EmbeddingMultiplierScope = "token_ids"
    # Factor of the outputs of attention and MLP, before they are added to the residual.
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0  # The logits are divided by this number.
    parallel_residual: bool = False
    # Number of tokens that a token attends to, itself included. None: all tokens up to itself.
    window_size: int | None = None
    # For each layer, whether it has the window. Empty: all layers, if there is a window.
    window_layers: tuple[bool, ...] = ()

    num_experts: int = 0
    # For each layer, whether it has experts. Empty: all layers have experts if num_experts > 0.
    moe_layers: tuple[bool, ...] = ()
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0  # 0: ffn_hidden_size.
    # True: softmax over all experts before top-k. False: softmax over the top-k experts.
    moe_router_pre_softmax: bool = False
    moe_router_score_function: ScoreFunction = "softmax"
    # Whether a bias is added to the scores that choose the experts. The routing weights of the
    # chosen experts are computed without this bias.
    moe_router_expert_bias: bool = False
    moe_router_bias: bool = False  # Whether the router's linear has a bias.
    moe_router_topk_scaling_factor: float = 1.0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False

    # Only training uses the dropout probabilities.
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    dtype: DType = "float32"  # The dtype of the stored weights.

    def __post_init__(self) -> None:
        _check_types(self)
        self._check_head_width()
        defaults = {
            "ffn_hidden_size": 4 * self.hidden_size,
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.hidden_size // max(1, self.num_attention_heads),
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        if not self.moe_ffn_hidden_size:
            object.__setattr__(self, "moe_ffn_hidden_size", self.ffn_hidden_size)
        self._check_values()
        self._check_expert_count()
        self._check_layer_lists()
        if not self.moe_layers:
            object.__setattr__(self, "moe_layers", (self.num_experts > 0,) * self.num_layers)
        self._check_experts()
        self._remove_unused_settings()

    def _remove_unused_settings(self) -> None:
        unused: dict[str, Any] = {}
        if self.window_layers and not any(self.window_layers):
            unused["window_size"] = None
        if all(self.window_layers) or not any(self.window_layers):
            unused["window_layers"] = ()
        if all(self.rope_layers) or not self.uses_rope:
            unused["rope_layers"] = ()
        has_window = self.window_size is not None and "window_size" not in unused
        if not has_window or not self.uses_rope or self._layer_rope(True) == self.rope:
            unused["window_rope"] = None
        if self.softmax_scale == self.kv_channels**-0.5:
            unused["softmax_scale"] = 0.0
        if self.embedding_multiplier == 1:
            unused["embedding_multiplier_scope"] = "token_ids"
        if not self.query_scaling_beta:
            unused["query_scaling_length"] = 0
        for name, value in unused.items():
            object.__setattr__(self, name, value)

    def _check_head_width(self) -> None:
        heads = self.num_attention_heads
        if not self.kv_channels and heads and self.hidden_size % heads:
            raise ConfigError(
                f"hidden_size is {self.hidden_size}, which the {heads} attention heads do not "
                "divide; correct num_attention_heads, or give kv_channels, the width of a head"
            )

    def _check_values(self) -> None:
        for name in _POSITIVE_FIELDS:
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value}; it must be a whole number of at least 1")
        for name in ("num_layers", "num_experts"):
            if getattr(self, name) > LAYERS_OR_EXPERTS_MAX:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at most {LAYERS_OR_EXPERTS_MAX}"
                )
        for name in (
            "layernorm_epsilon",
            "moe_router_topk_scaling_factor",
            "residual_multiplier",
            "logits_scaling",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.layernorm_epsilon >= 1:
            raise ConfigError(f"layernorm_epsilon is {self.layernorm_epsilon}; it must be below 1")
        for name in ("softmax_scale", "activation_func_clamp_value", "query_scaling_beta"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        for name, literal in _LITERAL_FIELDS.items():
            if getattr(self, name) not in get_args(literal):
                choices = ", ".join(get_args(literal))
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of: {choices}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"num_query_groups is {self.num_query_groups}, but {self.num_attention_heads} "
                f"attention heads do not divide into {self.num_query_groups} query groups; it "
                "must divide the heads"
            )
        for rope in (self._unresolved_rope, self.window_rope):
            rotary_dim = 2 if rope is None else rope.rotary_dim(self.kv_channels)
            if rope is not None and rope.scaling is not None:
                self._check_frequency_factors(rope.scaling, rotary_dim)
            if rope is not None and self.uses_rope and (rotary_dim < 2 or rotary_dim % 2):
                raise ConfigError(
                    f"kv_channels is {self.kv_channels}, and rotary_percent {rope.percent} of "
                    f"{self.kv_channels} channels gives {rotary_dim} rotary channels; the number "
                    "must be even and at least 2"
                )
        is_wide_layer_norm = self.qk_layernorm_scope != "head" and self.normalization != "RMSNorm"
        if self.qk_layernorm and is_wide_layer_norm:
            raise ConfigError(
                f"qk_layernorm_scope is {self.qk_layernorm_scope!r} and normalization is "
                f"{self.normalization!r}; a q/k norm of all heads must be an RMSNorm"
            )
        has_gate_settings = self.activation_func_clamp_value or self.glu_linear_offset
        if has_gate_settings and not self.gated:
            raise ConfigError(
                "activation_func_clamp_value and glu_linear_offset need a gated MLP; set gated"
            )
        if self.norm_placement == "post" and self.parallel_residual:
            raise ConfigError("norm_placement is 'post'; it needs parallel_residual false")
        if self.activation == "xielu" and (self.gated or self.num_experts):
            raise ConfigError("activation is 'xielu'; it needs an MLP without a gate or experts")
        if self.query_scaling_beta and self.query_scaling_length < 1:
            raise ConfigError(
                f"query_scaling_length is {self.query_scaling_length}; with query_scaling_beta, it "
                "must be at least 1"
            )
        if self.window_size is not None and self.window_size < 1:
            raise ConfigError(f"window_size is {self.window_size}; it must be at least 1 token")

    def _check_expert_count(self) -> None:
        if self.num_layers * self.num_experts > LAYERS_TIMES_EXPERTS_MAX:
            raise ConfigError(
                f"num_layers is {self.num_layers} and num_experts is {self.num_experts}; their "
                f"product must be at most {LAYERS_TIMES_EXPERTS_MAX}"
            )

    def _check_frequency_factors(self, scaling: RopeScaling, rotary_dim: int) -> None:
        count = rotary_dim // 2 if scaling.kind == "longrope" else 0
        for name in ("frequency_factors", "long_frequency_factors"):
            factors = getattr(scaling, name)
            is_absent = name == "long_frequency_factors" and not factors
            if len(factors) != count and not is_absent:
                raise ConfigError(
                    f"rope_scaling.{name} has {len(factors)} entries; it must have {count}, one "
                    "for each frequency of LongRoPE"
                )

    def _check_layer_lists(self) -> None:
        for name in ("moe_layers", "window_layers", "rope_layers"):
            length = len(getattr(self, name))
            if length and length != self.num_layers:
                raise ConfigError(
                    f"{name} has {length} entries; it must have one for each of the "
                    f"{self.num_layers} layers"
                )
        if any(self.window_layers) and self.window_size is None:
            raise ConfigError("window_layers is set without window_size; give the window's tokens")

    def _check_experts(self) -> None:
        if any(self.moe_layers) and not 1 <= self.moe_router_topk <= self.num_experts:
            raise ConfigError(
                f"moe_router_topk is {self.moe_router_topk}, and num_experts is "
                f"{self.num_experts}; in a model with experts, moe_router_topk must be from 1 to "
                "num_experts"
            )
        if any(self.moe_layers) and self.norm_placement != "pre":
            raise ConfigError(
                f"norm_placement is {self.norm_placement!r} in a model with experts; it must be "
                "'pre'"
            )
        if self.moe_shared_expert_gate and not self.moe_shared_expert_intermediate_size:
            raise ConfigError(
                "moe_shared_expert_gate is set without a shared expert; it needs "
                "moe_shared_expert_intermediate_size above 0"
            )

    @property
    def has_learned_positions(self) -> bool:
        return self.position_embedding_type.startswith("learned_absolute")

    @property
    def uses_rope(self) -> bool:
        return self.position_embedding_type.endswith("rope")

    @cached_property
    def rope(self) -> RopeConfig:
        """The rotary embedding of the layers without a window, and by default of all layers."""
        return self._unresolved_rope.for_context(self.max_position_embeddings)

    @property
    def _unresolved_rope(self) -> RopeConfig:
        """`rope` with the factors for all lengths of the context."""
        return RopeConfig(
            self.rotary_base, self.rotary_percent, self.rotary_interleaved, self.rope_scaling
        )

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The configuration of each layer, by its global number."""
        everywhere = (True,) * self.num_layers
        has_window = everywhere if self.window_size is not None else ()
        return tuple(
            LayerConfig(
                window_size=self.window_size if windowed else None,
                rope=self._layer_rope(windowed) if rotates and self.uses_rope else None,
                attention_sinks=self.attention_sinks,
                has_experts=has_experts,
            )
            for windowed, rotates, has_experts in zip(
                self.window_layers or has_window or (False,) * self.num_layers,
                self.rope_layers or everywhere,
                self.moe_layers,
                strict=True,
            )
        )

    def _layer_rope(self, has_window: bool) -> RopeConfig:
        if not has_window or self.window_rope is None:
            return self.rope
        return self.window_rope.for_context(self.max_position_embeddings)

    @property
    def prefix_width(self) -> int:
        """The number of key and value elements of one token in all layers.

        It is the width of a prefix adapter's table.
        """
        return self.num_layers * 2 * self.num_query_groups * self.kv_channels

    def with_fields(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Build a configuration from the output of `to_dict`; an unknown key raises ConfigError."""
        field_names = {field.name for field in fields(cls)}
        unknown = sorted(set(record) - field_names)
        if unknown:
            matches = difflib.get_close_matches(unknown[0], field_names, n=1)
            advice = f"did you mean {matches[0]!r}?" if matches else "remove it"
            raise ConfigError(f"unknown key {unknown[0]!r} in the model's config; {advice}")
        values = dict(record)
        if isinstance(values.get("rope_scaling"), Mapping):
            values["rope_scaling"] = _from_mapping(
                RopeScaling, values["rope_scaling"], "rope_scaling"
            )
        if isinstance(values.get("window_rope"), Mapping):
            window_rope = dict(values["window_rope"])
            if isinstance(window_rope.get("scaling"), Mapping):
                window_rope["scaling"] = _from_mapping(
                    RopeScaling, window_rope["scaling"], "window_rope.scaling"
                )
            values["window_rope"] = _from_mapping(RopeConfig, window_rope, "window_rope")
        for name in ("moe_layers", "window_layers", "rope_layers"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"the model's config is incomplete: {error}") from None


T = TypeVar("T")


def _from_mapping(kind: type[T], values: Mapping[str, Any], name: str) -> T:
    arguments = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from None


_LITERAL_FIELDS = {
    "position_embedding_type": PositionEmbeddingType,
    "normalization": Normalization,
    "norm_placement": NormPlacement,
    "qk_layernorm_scope": QKNormScope,
    "embedding_multiplier_scope": EmbeddingMultiplierScope,
    "activation": Activation,
    "moe_router_score_function": ScoreFunction,
    "dtype": DType,
}

_POSITIVE_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "ffn_hidden_size",
    "num_query_groups",
    "kv_channels",
)

# For each field type, a function that checks a value, and the requirement as the error message
# states it. A whole number of 2^31 or more means a damaged file.
_TYPE_CHECKS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda x: isinstance(x, bool), "true or false"),
    int: (
        lambda x: type(x) is int and 0 <= x < 2**31,
        "a whole number of at least 0 and below 2^31",
    ),
    float: (
        lambda x: type(x) in (int, float) and abs(x) < 1e30 and isfinite(x),
        "a number between -1e30 and 1e30",
    ),
    int | None: (
        lambda x: x is None or (type(x) is int and x < 2**31),
        "a whole number below 2^31, or null",
    ),
    tuple[bool, ...]: (
        lambda x: isinstance(x, tuple) and all(isinstance(y, bool) for y in x),
        "a list of true and false",
    ),
    tuple[float, ...]: (
        lambda x: isinstance(x, tuple) and all(type(y) in (int, float) and isfinite(y) for y in x),
        "a list of numbers",
    ),
    RopeScaling | None: (lambda x: x is None or isinstance(x, RopeScaling), "a mapping or null"),
    RopeConfig | None: (lambda x: x is None or isinstance(x, RopeConfig), "a mapping or null"),
}


def _check_types(config: Any, prefix: str = "") -> None:
    """Raise ConfigError if a value fails the check of its field's type (`_TYPE_CHECKS`).

    Fields of all other types must be text. Damaged and malicious files can have wrong values.
    `prefix` is added to the names in messages.
    """
    for name, annotation in type_hints(type(config)).items():
        is_valid, requirement = _TYPE_CHECKS.get(
            annotation, (lambda x: isinstance(x, str), "a text")
        )
        value = getattr(config, name)
        if not is_valid(value):
            raise ConfigError(f"{prefix}{name} is {_short_repr(value)}; it must be {requirement}")


def _short_repr(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1e30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:60]}..."
