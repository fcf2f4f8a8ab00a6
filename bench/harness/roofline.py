"""Roofline model: the least time a pass can take, from its bytes and operations.

A forward pass reads each weight once, and the keys and values of every earlier token. It performs
two operations (multiply and add) per weight and token. The bound is
    max(bytes / memory bandwidth, operations / matmul throughput)
with measured limits of the machine. All other work is ignored, so no engine reaches the bound.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.attention_span import attention_span
from gpt.costs.inference import kv_bytes_per_token, parameter_count

# (Time of an int8 multiplication) / (time of a bf16 multiplication). A vector register holds two
# int8 values in the space of one bf16 value.
INT8_TIME_SHARE = 0.5


@dataclass(frozen=True)
class MeasuredLimit:
    """A measured machine limit: the rates of every method, in `unit` per second."""

    name: str
    unit: str
    rates_by_method: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def best_method(self) -> str:
        return max(
            self.rates_by_method, key=lambda method: statistics.median(self.rates_by_method[method])
        )

    @property
    def value(self) -> float:
        return statistics.median(self.rates_by_method[self.best_method])

    def __str__(self) -> str:
        other_methods = sorted(
            self.rates_by_method.items(), key=lambda pair: -statistics.median(pair[1])
        )[1:]
        others_text = ", ".join(
            f"{method} {statistics.median(rates) / 1e9:.1f}" for method, rates in other_methods
        )
        best_rates = self.rates_by_method[self.best_method]
        spread = f"{min(best_rates) / 1e9:.1f} to {max(best_rates) / 1e9:.1f}"
        text = f"{self.name}: {self.value / 1e9:.1f} G{self.unit}/s ({self.best_method}; {spread}"
        return f"{text}; {others_text})" if others_text else f"{text})"


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a machine, measured or assumed."""

    read_bytes_per_s: float
    operations_per_s: float  # Rate of matmuls in the dtype of the weights.

    def seconds(self, cost: "PassCost") -> float:
        return max(cost.read_bytes / self.read_bytes_per_s, cost.operations / self.operations_per_s)


@dataclass(frozen=True)
class PassCost:
    """Bytes read and operations performed in one forward pass."""

    read_bytes: float
    operations: float


@dataclass(frozen=True)
class RooflineModel:
    """The cost of forward passes through a model; the KV cache has the dtype of the model."""

    config: GPTConfig
    bytes_per_weight: float = 0.0  # 0: the bytes of the model's dtype.
    # Up to this batch size, the argmax reads an int8 copy of the LM head. 0: there is no copy.
    int8_head_rows_max: int = 0

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def layer_weights(self) -> int:
        """Return the number of matmul weights without the LM head.

        Embedding tables do not count, because a pass looks up only a few of their rows.
        """
        config = self.config
        tables = self.head_weights * (1 + config.untie_embeddings_and_output_weights)
        if config.has_learned_positions:
            tables += config.max_position_embeddings * config.hidden_size
        return parameter_count(config) - tables

    @property
    def expert_weights(self) -> int:
        """Return the number of weights of all experts of all layers, without shared experts."""
        config = self.config
        weights = (2 + config.gated) * config.moe_ffn_hidden_size * config.hidden_size
        return sum(config.moe_layers) * config.num_experts * weights

    def unchosen_experts_share(self, rows: int) -> float:
        """Return the share of the experts that no row chooses, if all are equally likely."""
        config = self.config
        if not config.num_experts:
            return 0.0
        return (1 - config.moe_router_topk / config.num_experts) ** rows

    @property
    def last_token_weights(self) -> int:
        """Return the number of last-layer weights that only the last token of a sequence uses.

        Every token needs the key and value projections of the last layer. The layer's other weights
        compute the hidden states for the logits, which only the last token of each sequence needs.
        """
        config = self.config
        kv_weights = 2 * config.num_query_groups * config.kv_channels * config.hidden_size
        return self.layer_weights // config.num_layers - kv_weights

    def cost(self, contexts: Sequence[int], new_tokens: Sequence[int]) -> PassCost:
        """Return the cost of one forward pass over a batch of sequences.

        Sequence i has `contexts[i]` cached tokens and `new_tokens[i]` new ones. Logits are computed
        for the last token of each sequence only.
        """
        config = self.config
        bytes_per_weight = self.bytes_per_weight or DTYPE_BYTES[config.dtype]
        kv_bytes = kv_bytes_per_token(config, config.num_layers)
        attention_operations = 4 * config.num_attention_heads * config.kv_channels
        rows, sequences = sum(new_tokens), len(new_tokens)
        uses_int8_head = sequences <= self.int8_head_rows_max and bytes_per_weight > 1
        head_bytes = self.head_weights * (1 if uses_int8_head else bytes_per_weight)
        layer_weights = self.layer_weights - self.expert_weights * self.unchosen_experts_share(rows)
        multiplications: float = self.layer_weights * rows - self.last_token_weights * (
            rows - sequences
        )
        # A row is multiplied by the weights of its own experts only.
        multiplications -= self.expert_weights * self.unchosen_experts_share(1) * rows
        multiplications += (
            self.head_weights * sequences * (INT8_TIME_SHARE if uses_int8_head else 1)
        )
        # Causal attention: each token attends to all earlier tokens and to itself.
        pairs = list(zip(contexts, new_tokens, strict=True))
        span = attention_span(config)
        attended_keys = sum(span.pairs(context, context + count) for context, count in pairs)
        last_layer_keys = sum(span.keys(context + count) for context, count in pairs)
        attended_keys = (config.num_layers - 1) * attended_keys + last_layer_keys
        return PassCost(
            read_bytes=layer_weights * bytes_per_weight
            + head_bytes
            + sum(map(span.keys, contexts)) * kv_bytes,
            operations=2 * multiplications + attention_operations * attended_keys,
        )

    def prefill_s(self, prompts: int, tokens: int, peaks: Peaks) -> float:
        """Return the seconds to prefill `prompts` prompts of `tokens` tokens in one pass."""
        return peaks.seconds(self.cost([0] * prompts, [tokens] * prompts))

    def decode_s(self, sequences: int, context: int, steps: int, peaks: Peaks) -> float:
        """Return the seconds for `steps` decode steps of `sequences` sequences.

        Before the first step, each sequence has `context` cached tokens.
        """
        return sum(
            peaks.seconds(self.cost([context + step] * sequences, [1] * sequences))
            for step in range(steps)
        )
