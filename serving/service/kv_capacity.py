"""KV capacity: how many requests fit in the KV cache, and the blocks that each KV group uses.

`window_label` names the KV groups of a window in metrics. Groups with equal windows have one name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gpt.config import GPTConfig
from gpt.kv_groups import KVGroup, SequenceBlocks, kv_groups
from serving.messages import EngineStats


def context_concurrency(config: GPTConfig, kv_blocks: int, block_tokens: int) -> float:
    """Return the number of requests that fit in the KV cache if each of them fills the context.

    `kv_blocks`: the blocks of the KV cache that requests can use.
    """
    blocks = SequenceBlocks(tuple(group.window for group in kv_groups(config)), block_tokens)
    return kv_blocks / blocks.held_max(config.max_position_embeddings, 1)


def window_label(window: int | None) -> str:
    return "full" if window is None else f"window_{window}"


@dataclass(frozen=True)
class KVGroupGauges(Collector):
    """Gauges of the KV groups, summed over the groups with equal windows."""

    prefix: str  # Of the names of metrics.
    groups: Sequence[KVGroup]
    read_stats: Callable[[], EngineStats]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats = self.read_stats()
        held_blocks = dict.fromkeys((window_label(group.window) for group in self.groups), 0)
        for group, blocks in zip(self.groups, stats.group_blocks_held, strict=False):
            held_blocks[window_label(group.window)] += blocks
        help_text = "Layers and block tables by attention window, as labels."
        labels = ["group", "window", "layers", "block_tables"]
        family = GaugeMetricFamily(f"{self.prefix}kv_group_info", help_text, labels=labels)
        for name in held_blocks:
            members = [group for group in self.groups if window_label(group.window) == name]
            layers = sum(len(group.layers) for group in members)
            window = members[0].window or ""
            family.add_metric([name, str(window), str(layers), str(len(members))], 1)
        yield family
        help_text = "KV cache blocks held by requests, by attention window."
        family = GaugeMetricFamily(
            f"{self.prefix}kv_group_blocks_held", help_text, labels=["group"]
        )
        for name, blocks in held_blocks.items():
            family.add_metric([name], blocks)
        yield family
        help_text = "Fraction of all KV cache blocks that requests hold, by attention window."
        family = GaugeMetricFamily(
            f"{self.prefix}kv_group_usage_ratio", help_text, labels=["group"]
        )
        for name, blocks in held_blocks.items():
            family.add_metric([name], blocks / max(1, stats.blocks))
        yield family
