"""GPTConfig: the model configuration that comes with a checkpoint, in Megatron-Core's names.

The configuration is read from the checkpoint. Checkpoint readers convert the names of other formats
to these names. The constructor of GPTConfig refuses values that the model does not support, so
other modules do not check them again.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any, Literal, Self, get_args, get_type_hints

from gpt.errors import ConfigError

PositionEmbeddingType = Literal["learned_absolute", "rope", "learned_absolute+rope", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu2"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
ScoreFunction = Literal["softmax", "sigmoid"]

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# The largest number of layers, of experts per layer, and of experts in all layers. A larger number
# means a damaged file, and the table of all parameters would not fit in memory.
LAYERS_OR_EXPERTS_MAX = 65535
LAYERS_TIMES_EXPERTS_MAX = 1 << 18


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for contexts longer than the training context.

    `linear` divides all frequencies by `factor`. `llama3` depends on the number of rotations r that
    a frequency gives within `original_max_position_embeddings` positions:

    - r <= low_freq_factor: the frequency is divided by `factor`.
    - r >= high_freq_factor: the frequency is unchanged.
    - Between the limits: linear interpolation between the divided and the unchanged frequency.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _check_types(self, "rope_scaling.")
        if self.kind not in ("linear", "llama3"):
            raise ConfigError(f"rope_scaling.kind is {self.kind!r}; choose one of: linear, llama3")
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


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT.

    The constructor replaces some values of 0 and an empty `moe_layers`. The comments "0: ..." and
    "Empty: ..." give the value that it stores instead.
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

    normalization: Normalization = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False  # The stored weight is gamma - 1.
    activation: Activation = "gelu_tanh"
    gated: bool = False  # fc1 is [gate; up]: SwiGLU with silu, GeGLU with gelu.
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    untie_embeddings_and_output_weights: bool = False
    qk_layernorm: bool = False
    parallel_residual: bool = False
    # Number of tokens that a token attends to, itself included. None: all tokens up to itself.
    window_size: int | None = None

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
        if not self.moe_layers:
            object.__setattr__(self, "moe_layers", (self.num_experts > 0,) * self.num_layers)
        self._check_experts()

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
        for name in ("layernorm_epsilon", "moe_router_topk_scaling_factor"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.layernorm_epsilon >= 1:
            raise ConfigError(f"layernorm_epsilon is {self.layernorm_epsilon}; it must be below 1")
        if self.rotary_base < 1:
            raise ConfigError(f"rotary_base is {self.rotary_base}; it must be at least 1")
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
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(f"rotary_percent is {self.rotary_percent}; it must be in (0, 1]")
        if self.uses_rope and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ConfigError(
                f"kv_channels is {self.kv_channels}, and rotary_percent {self.rotary_percent} of "
                f"{self.kv_channels} channels gives {self.rotary_dim} rotary channels; the number "
                "must be even and at least 2"
            )
        if self.window_size is not None and self.window_size < 1:
            raise ConfigError(f"window_size is {self.window_size}; it must be at least 1 token")

    def _check_expert_count(self) -> None:
        if self.num_layers * self.num_experts > LAYERS_TIMES_EXPERTS_MAX:
            raise ConfigError(
                f"num_layers is {self.num_layers} and num_experts is {self.num_experts}; their "
                f"product must be at most {LAYERS_TIMES_EXPERTS_MAX}"
            )

    def _check_experts(self) -> None:
        if len(self.moe_layers) != self.num_layers:
            raise ConfigError(
                f"moe_layers has {len(self.moe_layers)} entries; it must have one for each of the "
                f"{self.num_layers} layers"
            )
        if any(self.moe_layers) and not 1 <= self.moe_router_topk <= self.num_experts:
            raise ConfigError(
                f"moe_router_topk is {self.moe_router_topk}, and num_experts is "
                f"{self.num_experts}; in a model with experts, moe_router_topk must be from 1 to "
                "num_experts"
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

    @property
    def rotary_dim(self) -> int:
        """The number of leading channels of each head that are rotated."""
        return int(self.kv_channels * self.rotary_percent)

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
            raise ConfigError(
                f"unknown key {unknown[0]!r} in the model's config; choose one of: "
                + ", ".join(sorted(field_names))
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


_LITERAL_FIELDS = {
    "position_embedding_type": PositionEmbeddingType,
    "normalization": Normalization,
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
    RopeScaling | None: (lambda x: x is None or isinstance(x, RopeScaling), "a mapping or null"),
}


def _check_types(config: Any, prefix: str = "") -> None:
    """Raise ConfigError if a value fails the check of its field's type (`_TYPE_CHECKS`).

    Fields of all other types must be text. Damaged and malicious files can have wrong values.
    `prefix` is added to the names in messages.
    """
    for name, annotation in get_type_hints(type(config)).items():
        is_valid, requirement = _TYPE_CHECKS.get(
            annotation, (lambda x: isinstance(x, str), "a text")
        )
        value = getattr(config, name)
        if not is_valid(value):
            raise ConfigError(f"{prefix}{name} is {_short_repr(value)}; it must be {requirement}")


def _short_repr(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1e30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:60]}..."
