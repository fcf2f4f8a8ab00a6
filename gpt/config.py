"""GPTConfig: everything that a checkpoint's weights do not say about the network.

It comes from a checkpoint, never from flags. The names are Megatron-Core's; other dialects are
translated by the readers. A value that the model cannot compute is refused here, by its name, so
that nothing later has to wonder.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any, Literal, Self, get_args, get_type_hints

from gpt.errors import ConfigError

Positions = Literal["learned_absolute", "rope", "learned_absolute+rope", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu2"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
ScoreFunction = Literal["softmax", "sigmoid"]

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


# Layers, and experts of a layer. More is a broken file, and each has parameters to list.
COUNT_MAX = 65535


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides positions by `factor`; `llama3` does so for low frequencies only.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _check_types(self)
        if self.kind not in ("linear", "llama3"):
            raise ConfigError(f"rope_scaling.kind is {self.kind!r}; known are: linear, llama3")
        if self.factor <= 0 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling has factor {self.factor} and frequency factors "
                f"{self.low_freq_factor} and {self.high_freq_factor}; all must be above 0, the "
                "second frequency factor the larger one"
            )


@dataclass(frozen=True)
class GPTConfig:
    """One GPT, as Megatron-Core would describe it. Zero in a width means: derive it."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # The true one: padding rows do not exist outside a rank's own memory.
    max_position_embeddings: int

    ffn_hidden_size: int = 0  # One half of a gated fc1. Derived: 4 x hidden_size.
    num_query_groups: int = 0  # Derived: one per head, that is MHA.
    kv_channels: int = 0  # Width of a head. Derived: hidden_size / num_attention_heads.

    position_embedding_type: Positions = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    rotary_interleaved: bool = False
    rope_scaling: RopeScaling | None = None

    normalization: Normalization = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False  # The stored weight is gamma - 1.
    activation: Activation = "gelu_tanh"
    gated: bool = False  # fc1 is [gate; up]: silu gives SwiGLU, gelu gives GeGLU.
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    untie_embeddings_and_output_weights: bool = False
    qk_layernorm: bool = False
    parallel_residual: bool = False
    window_size: int | None = None  # Tokens that a token sees, itself included.

    num_experts: int = 0
    moe_layers: tuple[bool, ...] = ()  # Which layers have experts. Derived: all, if any.
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0  # Derived: ffn_hidden_size.
    moe_router_pre_softmax: bool = False  # Softmax over all experts, then the best; not again.
    moe_router_score_function: ScoreFunction = "softmax"
    moe_router_expert_bias: bool = False  # A bias for choosing experts only, not for weighing.
    moe_router_topk_scaling_factor: float = 1.0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False

    hidden_dropout: float = 0.0  # Used in training only.
    attention_dropout: float = 0.0
    dtype: DType = "float32"  # As stored.

    def __post_init__(self) -> None:
        _check_types(self)
        derived = {
            "ffn_hidden_size": 4 * self.hidden_size,
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.hidden_size // max(1, self.num_attention_heads),
        }
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if not self.moe_ffn_hidden_size:
            object.__setattr__(self, "moe_ffn_hidden_size", self.ffn_hidden_size)
        self._check()
        if not self.moe_layers:
            object.__setattr__(self, "moe_layers", (self.num_experts > 0,) * self.num_layers)
        self._check_experts()

    def _check(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value}; it must be a whole number of at least 1")
        for name in ("num_layers", "num_experts"):
            if getattr(self, name) > COUNT_MAX:
                raise ConfigError(f"{name} is {getattr(self, name)}; at most {COUNT_MAX} can be")
        for name in ("rotary_base", "layernorm_epsilon", "moe_router_topk_scaling_factor"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ConfigError(f"{name} is {getattr(self, name)!r}; known are: {known}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads do not divide into "
                f"{self.num_query_groups} query groups; num_query_groups must divide the heads"
            )
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(f"rotary_percent is {self.rotary_percent}; it must be in (0, 1]")
        if self.rotary and (self.rotary_channels < 2 or self.rotary_channels % 2):
            raise ConfigError(
                f"rotary_percent {self.rotary_percent} of {self.kv_channels} channels rotates "
                f"{self.rotary_channels}; it must be an even number of at least 2"
            )
        if self.window_size is not None and self.window_size < 1:
            raise ConfigError(f"window_size is {self.window_size}; it must be at least 1 token")

    def _check_experts(self) -> None:
        if len(self.moe_layers) != self.num_layers:
            raise ConfigError(
                f"moe_layers names {len(self.moe_layers)} layers, the model has {self.num_layers}"
            )
        if any(self.moe_layers) and not 1 <= self.moe_router_topk <= self.num_experts:
            raise ConfigError(
                f"moe_router_topk is {self.moe_router_topk}; with {self.num_experts} experts it "
                f"must be from 1 to {self.num_experts}"
            )
        if self.moe_shared_expert_gate and not self.moe_shared_expert_intermediate_size:
            raise ConfigError("moe_shared_expert_gate needs moe_shared_expert_intermediate_size")

    @property
    def learned_positions(self) -> bool:
        return self.position_embedding_type.startswith("learned_absolute")

    @property
    def rotary(self) -> bool:
        return self.position_embedding_type.endswith("rope")

    @property
    def rotary_channels(self) -> int:
        """How many of a head's first channels are rotated."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def prefix_width(self) -> int:
        """How many keys and values a token has in all layers together."""
        return self.num_layers * 2 * self.num_query_groups * self.kv_channels

    def with_fields(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; an unknown key is an error."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown:
            raise ConfigError(
                f"unknown key {unknown[0]!r} in the model's config; known are: "
                + ", ".join(sorted(known))
            )
        values = dict(record)
        if isinstance(values.get("rope_scaling"), Mapping):
            try:
                values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
            except TypeError as error:
                raise ConfigError(f"rope_scaling: {error}") from None
        if isinstance(values.get("moe_layers"), list):
            values["moe_layers"] = tuple(values["moe_layers"])
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"the model's config is incomplete: {error}") from None


_CHOICES = {
    "position_embedding_type": Positions,
    "normalization": Normalization,
    "activation": Activation,
    "moe_router_score_function": ScoreFunction,
    "dtype": DType,
}

_AT_LEAST_ONE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "ffn_hidden_size",
    "num_query_groups",
    "kv_channels",
)

# What a field's type asks of its value, and in words. A number beyond 2^31 is a broken file.
_NEEDS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda x: isinstance(x, bool), "true or false"),
    int: (lambda x: type(x) is int and 0 <= x < 2**31, "a whole number of at least 0"),
    float: (lambda x: type(x) in (int, float) and abs(x) < 1e30 and isfinite(x), "a number"),
    int | None: (lambda x: x is None or (type(x) is int and x < 2**31), "a whole number or null"),
    tuple[bool, ...]: (
        lambda x: isinstance(x, tuple) and all(isinstance(y, bool) for y in x),
        "a list of true and false",
    ),
    RopeScaling | None: (lambda x: x is None or isinstance(x, RopeScaling), "a table or null"),
}


def _check_types(config: Any) -> None:
    """Hold every field against its annotation: configs come from files that anyone can write."""
    for name, kind in get_type_hints(type(config)).items():
        fits, need = _NEEDS.get(kind, (lambda x: isinstance(x, str), "a word"))
        value = getattr(config, name)
        if not fits(value):
            raise ConfigError(f"{name} is {_shortened(value)}; it must be {need}")


def _shortened(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1e30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:60]}..."
