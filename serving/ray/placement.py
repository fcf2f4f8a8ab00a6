"""Placement of a replica: bundles of resources for its ranks, and what a cluster lacks for them.

A bundle is on one node, and has the resources of consecutive ranks. Ray reserves all bundles of a
replica together, so replicas never hold parts of what others need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpt.errors import ConfigError
from serving.config import ParallelConfig

Resources = Mapping[str, float]


@dataclass(frozen=True)
class NodeResources:
    """The resources of a node: all of them, and those that are free."""

    address: str
    total: Resources
    free: Resources


def divide_ranks(ranks: int, bundles: int) -> list[range]:
    """Return the ranks of each bundle."""
    size = ranks // bundles
    return [range(start, start + size) for start in range(0, ranks, size)]


def replica_bundles(
    parallel: ParallelConfig, node_ranks: int, rank_resources: Resources
) -> list[dict[str, float]]:
    """Return the bundles of a replica with `node_ranks` ranks on each node."""
    sizes = _node_ranks_choices(parallel)
    if node_ranks not in sizes:
        raise ConfigError(
            f"--node-ranks is {node_ranks}, but {parallel.flags} can have "
            f"{', '.join(map(str, sizes))} ranks on a node"
        )
    bundle = {name: node_ranks * amount for name, amount in rank_resources.items()}
    return [dict(bundle) for _ in range(parallel.ranks // node_ranks)]


def choose_node_ranks(
    parallel: ParallelConfig,
    rank_resources: Resources,
    nodes: Sequence[NodeResources],
    node_ranks: int | None = None,
) -> int:
    """Return the largest number of ranks of a bundle for which the cluster has nodes.

    `node_ranks`: the value of --node-ranks, which is checked instead. Raise ConfigError if a
    replica does not fit into the cluster.
    """
    choices = [node_ranks] if node_ranks else reversed(_node_ranks_choices(parallel))
    for choice in choices:
        bundles = replica_bundles(parallel, choice, rank_resources)
        if not missing_bundles(bundles, [node.total for node in nodes]):
            return choice
    on_nodes = f" with {node_ranks} on a node" if node_ranks else ""
    raise ConfigError(
        f"a replica of {parallel.ranks} ranks ({parallel.flags}){on_nodes}, each with "
        f"{describe(rank_resources)}, does not fit into this cluster, even without its other work: "
        f"{describe_nodes(nodes, 'total')}; add nodes, or deploy with --node-ranks and "
        "--later if an autoscaler adds them"
    )


def missing_bundles(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> list[Resources]:
    """Return the bundles that have no place on nodes with these resources."""
    free_resources = [dict(node) for node in nodes]
    missing = []
    for bundle in sorted(bundles, key=lambda bundle: -sum(bundle.values())):
        for free in free_resources:
            if all(free.get(name, 0.0) >= amount for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    free[name] -= amount
                break
        else:
            missing.append(bundle)
    return missing


def describe_shortage(bundles: Sequence[Resources], nodes: Sequence[NodeResources]) -> str:
    """Say what a replica that waits for its bundles lacks; empty if it has a place."""
    missing = missing_bundles(bundles, [node.free for node in nodes])
    if not missing:
        return ""
    kinds: dict[str, int] = {}
    for bundle in missing:
        kinds[describe(bundle)] = kinds.get(describe(bundle), 0) + 1
    lacking = ", ".join(f"{count} x ({kind})" for kind, count in kinds.items())
    return (
        f"lacks {lacking} of its {len(bundles)} bundles, each on one node; free: "
        f"{describe_nodes(nodes, 'free')}"
    )


def describe_nodes(nodes: Sequence[NodeResources], part: str) -> str:
    """Return the CPUs, GPUs and other resources of each node."""
    texts = [f"{node.address} {describe(getattr(node, part)) or 'nothing'}" for node in nodes]
    return "; ".join(texts) or "no node"


def describe(resources: Resources) -> str:
    """Return resources as text, such as `CPU 4, GPU 1`."""
    # Ray itself adds resources for each node and for memory.
    names = [name for name in resources if not name.startswith(("node:", "bundle", "CPU_", "GPU_"))]
    names = [name for name in names if name not in ("memory", "object_store_memory")]
    return ", ".join(f"{name} {resources[name]:g}" for name in sorted(names) if resources[name])


def _node_ranks_choices(parallel: ParallelConfig) -> list[int]:
    """Return the possible numbers of ranks on a node: a part of a stage, or whole stages."""
    stage = parallel.stage_ranks
    return [
        size
        for size in range(1, parallel.ranks + 1)
        if parallel.ranks % size == 0 and (stage % size == 0 or size % stage == 0)
    ]
