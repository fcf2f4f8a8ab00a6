"""Decode keys: the numbers of keys that decoding requests attend to, in steps of all requests.

Each step adds a token to every request, so the sums over the requests that stay below a window, or
are beyond it, are linear in the number of steps. Only the requests that reach the window while they
decode are counted one by one.
"""

from dataclasses import dataclass, field

from gpt.costs.attention_span import AttentionSpan, causal_pairs


@dataclass(slots=True)
class _WindowKeys:
    """The requests in the layers with one window; an offset is tokens minus number of steps."""

    window: int | None
    layers: int
    below_count: int = 0  # Requests that never have more tokens than the window.
    below_offsets: int = 0  # Sum of their offsets.
    beyond_count: int = 0  # Requests that have at least as many tokens as the window.
    # The offsets of the other requests, by number.
    crossing: dict[int, int] = field(default_factory=dict)

    def add(self, number: int, offset: int, tokens: int, tokens_max: int) -> None:
        if self.window is None or tokens_max <= self.window:
            self.below_count += 1
            self.below_offsets += offset
        elif tokens >= self.window:
            self.beyond_count += 1
        else:
            self.crossing[number] = offset

    def remove(self, number: int, offset: int, tokens_max: int) -> None:
        if self.window is None or tokens_max <= self.window:
            self.below_count -= 1
            self.below_offsets -= offset
        elif self.crossing.pop(number, None) is None:
            self.beyond_count -= 1

    def pairs(self, step: int, steps: int) -> int:
        """Return the number of keys in the next `steps` steps, in one layer."""
        below_tokens = self.below_offsets + self.below_count * step
        pairs = steps * below_tokens + self.below_count * steps * (steps + 1) // 2
        window = self.window
        if window is None:
            return pairs
        for number, offset in list(self.crossing.items()):
            if offset + step >= window:
                del self.crossing[number]
                self.beyond_count += 1
            else:
                pairs += causal_pairs(window, offset + step + steps)
                pairs -= causal_pairs(window, offset + step)
        return pairs + self.beyond_count * window * steps


class DecodeKeys:
    """Sums the keys of decoding requests, which are added and removed by number."""

    def __init__(self, span: AttentionSpan) -> None:
        self._windows = [_WindowKeys(window, layers) for window, layers in span.layer_counts]
        self._layers = sum(layers for _, layers in span.layer_counts)
        self._step = 0
        # By number: the offset, and the number of tokens at the end of the request.
        self._requests: dict[int, tuple[int, int]] = {}

    def add(self, number: int, tokens: int, tokens_max: int) -> None:
        """Add a request that has `tokens` tokens with keys and values now, `tokens_max` finally."""
        offset = tokens - self._step
        self._requests[number] = offset, tokens_max
        for window_keys in self._windows:
            window_keys.add(number, offset, tokens, tokens_max)

    def remove(self, number: int) -> None:
        offset, tokens_max = self._requests.pop(number)
        for window_keys in self._windows:
            window_keys.remove(number, offset, tokens_max)

    def advance(self, steps: int) -> None:
        """Add `steps` tokens to each request."""
        self._step += steps

    def pairs(self, steps: int) -> float:
        """Return the number of keys that the tokens of the next `steps` steps attend to.

        As in `AttentionSpan`, it is a mean over the layers.
        """
        pairs = sum([keys.layers * keys.pairs(self._step, steps) for keys in self._windows])
        return pairs / self._layers
