"""How fast a machine could be at best: a model's bytes and operations against measured limits.

A pass through the model reads each weight once, and the keys and values of every token before; it
multiplies and adds twice per weight and row. It can take no less than the longer of both. What else
there is to do counts as nothing, so no engine gets quite there. Measures nothing itself.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.inference import kv_bytes_per_token, parameter_count

# Of a product's time, where it is one of bytes and not of bf16: a vector holds twice as many.
BYTE_WORK = 0.5


@dataclass(frozen=True)
class Limit:
    """One of them, with every way's median and samples, in `unit` a second."""

    name: str
    unit: str
    ways: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return max(self.ways, key=lambda way: statistics.median(self.ways[way]))

    @property
    def value(self) -> float:
        return statistics.median(self.ways[self.best])

    def __str__(self) -> str:
        others = sorted(self.ways.items(), key=lambda one: -statistics.median(one[1]))[1:]
        also = ", ".join(f"{way} {statistics.median(some) / 1e9:.1f}" for way, some in others)
        one = self.ways[self.best]
        spread = f"{min(one) / 1e9:.1f} to {max(one) / 1e9:.1f}"
        told = f"{self.name}: {self.value / 1e9:.1f} G{self.unit}/s ({self.best}; {spread}"
        return f"{told}; {also})" if also else f"{told})"


@dataclass(frozen=True)
class Peaks:
    """What a machine does in a second at best; as the bench's limits are, or made up."""

    read_bytes: float
    operations: float  # Of the dtype that is multiplied in.

    def seconds(self, cost: "Cost") -> float:
        return max(cost.read_bytes / self.read_bytes, cost.operations / self.operations)


@dataclass(frozen=True)
class Cost:
    """Of one pass."""

    read_bytes: float
    operations: float


@dataclass(frozen=True)
class Model:
    """A network whose weights take so many bytes each; keys and values are as its dtype."""

    config: GPTConfig
    weight_bytes: float = 0.0  # 0: as its dtype.
    # For so many rows at most, the best token is found by a byte of each of the head's weights.
    few_rows: int = 0

    @property
    def head(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def layers(self) -> int:
        """Weights that a pass multiplies by, but for the head; tables are looked up."""
        config = self.config
        tables = self.head * (1 + config.untie_embeddings_and_output_weights)
        if config.learned_positions:
            tables += config.max_position_embeddings * config.hidden_size
        return parameter_count(config) - tables

    @property
    def unread(self) -> int:
        """Weights of the last layer that only each sequence's last token needs: all but those of
        keys and values.
        """
        config = self.config
        kept = 2 * config.num_query_groups * config.kv_channels * config.hidden_size
        return self.layers // config.num_layers - kept

    def cost(self, contexts: Sequence[int], new: Sequence[int]) -> Cost:
        """Of a pass with so many `new` tokens for each sequence, behind `contexts` tokens.

        Each sequence's last one is scored against the vocabulary.
        """
        config = self.config
        each = self.weight_bytes or DTYPE_BYTES[config.dtype]
        kv_bytes = kv_bytes_per_token(config, config.num_layers)
        width = 4 * config.num_attention_heads * config.kv_channels
        rows, last = sum(new), len(new)
        by_bytes = last <= self.few_rows and each > 1
        head_bytes = self.head * (1 if by_bytes else each)
        products: float = self.layers * rows - self.unread * (rows - last)
        products += self.head * last * (BYTE_WORK if by_bytes else 1)
        # The token at a place attends to all before it, and to itself.
        pairs = list(zip(contexts, new, strict=True))
        attended = sum(count * before + count * (count + 1) / 2 for before, count in pairs)
        seen_last = sum(before + count for before, count in pairs)
        attended = (config.num_layers - 1) * attended + seen_last
        return Cost(
            read_bytes=self.layers * each + head_bytes + sum(contexts) * kv_bytes,
            operations=2 * products + width * attended,
        )

    def prefill_s(self, prompts: int, tokens: int, peaks: Peaks) -> float:
        """Seconds for the first tokens of as many prompts."""
        return peaks.seconds(self.cost([0] * prompts, [tokens] * prompts))

    def decode_s(self, sequences: int, context: int, steps: int, peaks: Peaks) -> float:
        """Seconds for so many further tokens of each, the first of them behind `context`."""
        return sum(
            peaks.seconds(self.cost([context + step] * sequences, [1] * sequences))
            for step in range(steps)
        )
