"""KV groups: layers with equal attention windows, which share one block table per sequence.

A sequence has a block table in each group. In a group with a window, the blocks behind the window
are freed while the sequence runs; in a group without one, all blocks are kept. All groups allocate
from one block pool. A block stores the keys and values of `layers_per_block` layers, and belongs to
one group at a time: layer i of each group uses part i of the group's blocks.

The layers with equal windows are divided into groups of about equal size, as in vLLM. The size is
the number of layers of the rarest window, so that little memory is unused in the blocks of the
smallest group. The layers of a group are spread over the depth of the model, so that the groups
have about equal numbers of layers in each pipeline stage.
"""

from collections.abc import Collection
from dataclasses import dataclass

from gpt.config import GPTConfig

# If the most frequent window has less than this multiple of the layers of the rarest one, a group
# has as many layers as the most frequent window.
EQUAL_SIZE_RATIO = 1.5


@dataclass(frozen=True)
class KVGroup:
    """Layers (global numbers) that share a block table. `window`: as `LayerConfig.window_size`."""

    window: int | None
    layers: tuple[int, ...]


def kv_groups(config: GPTConfig) -> tuple[KVGroup, ...]:
    """Return the KV groups of a model; a group without a window, if there is one, is the first."""
    layers_by_window: dict[int | None, list[int]] = {}
    for number, layer in enumerate(config.layers):
        layers_by_window.setdefault(layer.window_size, []).append(number)
    counts = [len(layers) for layers in layers_by_window.values()]
    size = min(counts)
    if max(counts) < EQUAL_SIZE_RATIO * size:
        size = max(counts)
    groups = []
    for window in sorted(layers_by_window, key=lambda window: (window is not None, window or 0)):
        layers = layers_by_window[window]
        group_count = -(-len(layers) // size)
        groups += [KVGroup(window, tuple(layers[i::group_count])) for i in range(group_count)]
    return tuple(groups)


def layers_per_block(groups: Collection[KVGroup], layers: Collection[int]) -> int:
    """Return how many layers a block stores keys and values for, on the rank with `layers`."""
    own_layers = frozenset(layers)
    return max(len(own_layers.intersection(group.layers)) for group in groups)


def cached_tokens_max(group: KVGroup, context_tokens: int, block_tokens: int) -> int:
    """Return for how many tokens of a context the group keeps keys and values, at most."""
    if group.window is None:
        return context_tokens
    return min(context_tokens, group.window + block_tokens)


def window_blocks_max(window: int, new_tokens: int, block_tokens: int) -> int:
    """Return how many blocks a sequence holds in a group with this window, at most.

    They are the blocks that `new_tokens` tokens are written to, and those of the `window` - 1
    tokens before them.
    """
    return -(-(window - 1 + new_tokens) // block_tokens) + 1
