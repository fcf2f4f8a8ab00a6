"""Bundles of a replica, and what a cluster lacks for them."""

import pytest

from gpt.errors import ConfigError
from serving.config import ParallelConfig
from serving.ray.placement import (
    NodeResources,
    choose_node_ranks,
    describe_shortage,
    divide_ranks,
    replica_bundles,
)

GPU = {"CPU": 1.0, "GPU": 1.0}


def nodes(*gpus: int) -> list[NodeResources]:
    """Idle nodes with these numbers of GPUs."""
    resources = [{"CPU": 64.0, "GPU": float(count), "node:10.0.0.1": 1.0} for count in gpus]
    return [NodeResources(f"n{index}", total, total) for index, total in enumerate(resources)]


@pytest.mark.parametrize(
    ("tp", "pp", "gpus", "node_ranks"),
    [
        (2, 2, (8,), 4),  # The whole replica on one node.
        (8, 2, (8, 8), 8),  # A stage on each node.
        (8, 2, (4, 4, 4, 4), 4),  # Half a stage.
        (2, 2, (1, 1, 1, 1), 1),
        (2, 3, (4, 4), 2),  # Four ranks would be two stages, which do not divide three.
        (3, 2, (4, 4), 3),
    ],
)
def test_a_bundle_has_as_many_ranks_as_nodes_have_space_for(
    tp: int, pp: int, gpus: tuple[int, ...], node_ranks: int
) -> None:
    parallel = ParallelConfig(tp=tp, pp=pp)
    assert choose_node_ranks(parallel, GPU, nodes(*gpus)) == node_ranks
    bundles = replica_bundles(parallel, node_ranks, GPU)
    assert sum(bundle["GPU"] for bundle in bundles) == parallel.ranks
    ranks = [rank for ranks in divide_ranks(parallel.ranks, len(bundles)) for rank in ranks]
    assert ranks == list(range(parallel.ranks))


def test_a_model_that_fits_nowhere_is_refused_with_the_resources_of_the_nodes() -> None:
    with pytest.raises(ConfigError, match="n0 CPU 64, GPU 1; n1 CPU 64, GPU 2; add nodes"):
        choose_node_ranks(ParallelConfig(tp=4), GPU, nodes(1, 2))


def test_a_requested_number_of_ranks_must_fit() -> None:
    parallel = ParallelConfig(tp=4)
    assert choose_node_ranks(parallel, GPU, nodes(4, 4), node_ranks=2) == 2
    with pytest.raises(ConfigError, match=r"with 4 on a node, .* does not fit into this cluster"):
        choose_node_ranks(parallel, GPU, nodes(2, 2), node_ranks=4)


def test_ranks_that_do_not_divide_a_stage_are_refused() -> None:
    with pytest.raises(ConfigError, match="--node-ranks is 3, but --tp 4 --pp 1 can have 1, 2, 4"):
        replica_bundles(ParallelConfig(tp=4), 3, GPU)


def test_a_waiting_replica_says_what_it_lacks() -> None:
    free = [{"GPU": 1.0, "CPU": 8.0}, {"CPU": 8.0}]
    cluster = [NodeResources(f"n{index}", {}, part) for index, part in enumerate(free)]
    assert describe_shortage([GPU, GPU, GPU], cluster) == (
        "lacks 2 x (CPU 1, GPU 1) of its 3 bundles, each on one node; free: n0 CPU 8, GPU 1; "
        "n1 CPU 8"
    )
    assert describe_shortage([GPU], cluster) == ""
