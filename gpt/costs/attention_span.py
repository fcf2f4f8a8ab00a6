"""Attention span: the numbers of keys that the queries of a model's layers attend to.

A query attends to its own key and to the keys before it; in a layer with a window of w tokens, to
at most w keys. All numbers are means over the layers of a model, so a cost per key of a model
without windows also applies to a model with windows. The module does not import torch.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gpt.config import GPTConfig


@dataclass(frozen=True)
class AttentionSpan:
    """Counts attended keys. `layer_counts`: pairs of a window and its number of layers."""

    layer_counts: tuple[tuple[int | None, int], ...]

    @cached_property
    def _layers(self) -> int:
        return sum(count for _, count in self.layer_counts)

    @cached_property
    def has_windows(self) -> bool:
        return any(window is not None for window, _ in self.layer_counts)

    def keys(self, tokens: float) -> float:
        """Return the number of keys that the last of `tokens` tokens attends to."""
        keys = sum(
            count * (tokens if window is None else min(tokens, window))
            for window, count in self.layer_counts
        )
        return keys / self._layers

    def pairs(self, start: int, end: int) -> float:
        """Return the number of pairs of a query and a key, for the queries from `start` to `end`.

        `end` is not included. Position 0 is the first token of the sequence.
        """
        pairs = sum(
            count * (causal_pairs(window, end) - causal_pairs(window, start))
            for window, count in self.layer_counts
        )
        return pairs / self._layers

    def score_area(self, sequence: int, *, causal: bool) -> float:
        """Return the area of the scores of a sequence, as the literature counts it.

        Without a window the area is sequence * sequence, and half of it with `causal`. With a
        window it is sequence * window; with `causal`, it is this area without the triangle of the
        scores before the first token.
        """
        area = 0.0
        for window, count in self.layer_counts:
            span = sequence if window is None else min(sequence, window)
            area += count * (span * sequence - (span * span / 2 if causal else 0))
        return area / self._layers


FULL_ATTENTION = AttentionSpan(((None, 1),))


def causal_pairs(window: int | None, tokens: int) -> int:
    """Return the number of pairs of the first `tokens` queries of a sequence."""
    span = tokens if window is None else min(tokens, window)
    return span * (span + 1) // 2 + (tokens - span) * span


@lru_cache(maxsize=64)
def attention_span(config: GPTConfig) -> AttentionSpan:
    return AttentionSpan(tuple(Counter(layer.window_size for layer in config.layers).items()))
