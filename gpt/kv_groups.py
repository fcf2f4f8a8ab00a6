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

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from gpt.config import GPTConfig

# If the most frequent window has less than this multiple of the layers of the rarest one, a group
# has as many layers as the most frequent window.
EQUAL_SIZE_RATIO = 1.5
UNLIMITED_TOKENS = 1 << 62  # More tokens than any sequence has.


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


def blocks_behind_window(window: int | None, tokens: int, block_tokens: int) -> int:
    """Return the number of leading blocks that no token from position `tokens` on attends to.

    The token at this position attends to the `window` - 1 tokens before it.
    """
    return 0 if window is None else max(0, tokens - window + 1) // block_tokens


def window_blocks_max(window: int, new_tokens: int, block_tokens: int) -> int:
    """Return how many blocks a sequence holds in a group with this window, at most.

    They are the blocks that `new_tokens` tokens are written to, and those of the `window` - 1
    tokens before them.
    """
    tokens = window - 1 + new_tokens
    # The first of the tokens may be the last one of its block.
    return (tokens - 2) // block_tokens + 2


@dataclass(frozen=True)
class SequenceBlocks:
    """The number of KV blocks of one sequence, summed over the KV groups.

    The scheduler, the planner and `inspect` count with it. `windows`: the window of each KV group.
    """

    windows: tuple[int | None, ...]
    block_tokens: int

    @cached_property
    def _groups_by_window(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a window and its number of KV groups."""
        return tuple(Counter(window for window in self.windows if window is not None).items())

    @cached_property
    def _full_groups(self) -> int:
        return self.windows.count(None)

    @cached_property
    def has_windows(self) -> bool:
        return bool(self._groups_by_window)

    def held(self, planned_tokens: int, computed_tokens: int) -> int:
        """Return the number of blocks of a sequence in a step.

        The blocks are allocated for `planned_tokens` tokens. Completed steps have computed
        `computed_tokens` of them, and have freed the blocks behind the windows.
        """
        block_tokens = self.block_tokens
        blocks = len(self.windows) * -(-planned_tokens // block_tokens)
        for window, groups in self._groups_by_window:
            blocks -= groups * blocks_behind_window(window, computed_tokens, block_tokens)
        return blocks

    def held_max(self, tokens: int, new_tokens: int) -> int:
        """Return the largest number of blocks that a sequence holds until it has `tokens` tokens.

        `new_tokens`: the largest number of tokens that its steps in flight compute.
        """
        return self.held_max_of_several(1, -(-tokens // self.block_tokens), new_tokens)

    def held_max_of_several(self, sequences: int, table_length: int, new_tokens: int = 1) -> int:
        """Return an upper bound of the number of blocks that several sequences hold together.

        `table_length`: the sum of the lengths of their block tables, in one KV group.
        """
        total = self._full_groups * table_length
        for window, groups in self._groups_by_window:
            window_blocks = window_blocks_max(window, new_tokens, self.block_tokens)
            total += groups * min(table_length, sequences * window_blocks)
        return total

    def tokens_max(self, blocks: int) -> int | None:
        """Return the largest number of tokens of a sequence that runs alone in `blocks` blocks.

        None: there is no such number, because the sequence frees a block before it needs the next
        one.
        """
        if not self._full_groups and self.held_max(UNLIMITED_TOKENS, 1) <= blocks:
            return None
        table_lengths = range(blocks + 1)
        length = bisect_right(
            table_lengths, blocks, key=lambda length: self.held_max(length * self.block_tokens, 1)
        )
        return (length - 1) * self.block_tokens
