"""Model split: the parallel sizes of one replica. The module does not import torch."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.weight_sharding import are_multiples, check_split
from planning.hardware import divisors

STAGES_MAX = 16  # Maximum number of pipeline stages of a candidate.


class ModelSplit(NamedTuple):
    """Tensor, pipeline and expert parallel sizes of a replica."""

    tp: int
    pp: int
    ep: int = 1

    @classmethod
    def of_settings(cls, settings: Mapping[str, object]) -> "ModelSplit":
        """Return the split of a plan's settings; `ep` is absent if it is 1."""
        return cls(*(int(str(settings.get(name, 1))) for name in ("tp", "pp", "ep")))

    @property
    def stage_ranks(self) -> int:
        return max(self.tp, self.ep)

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def name(self) -> str:
        """The name for display, such as TP4 PP1."""
        return f"TP{self.tp} PP{self.pp}" + (f" EP{self.ep}" if self.ep > 1 else "")


def model_splits(
    model: GPTConfig, gpus_per_node: int, gpus: int, stages_max: int = STAGES_MAX
) -> Iterator[ModelSplit]:
    """Yield the splits of a model to try, fewest GPUs first.

    Splitting each expert over the tensor ranks balances them better than expert parallelism, and
    with more expert than tensor ranks, all ranks compute the same attention. Therefore expert
    parallelism is tried only for numbers of ranks that cannot all be tensor ranks, or that do not
    divide the width of an expert.
    """
    stages = [pp for pp in divisors(model.num_layers) if pp <= stages_max]
    # The ranks of a stage divide the GPUs of a node; otherwise a group of them spans two nodes.
    for ranks, pp in sorted(
        ((ranks, pp) for ranks in divisors(gpus_per_node) for pp in stages),
        key=lambda sizes: (sizes[0] * sizes[1], sizes[1]),
    ):
        split = _split_of_stage(model, ranks, pp)
        if split is not None and split.ranks <= gpus:
            yield split


def _split_of_stage(model: GPTConfig, ranks: int, pp: int) -> ModelSplit | None:
    """Return the split with this number of ranks in a stage that has the most tensor ranks."""
    for tp in sorted(divisors(ranks), reverse=True):
        # With fewer tensor ranks, all ranks of the stage are expert parallel ranks.
        for ep in divisors(ranks) if tp == ranks else [ranks]:
            if are_multiples(tp, ep) and _is_valid(model, tp, pp, ep):
                return ModelSplit(tp, pp, ep)
    return None


def _is_valid(model: GPTConfig, tp: int, pp: int, ep: int) -> bool:
    try:
        check_split(model, tp, pp, ep=ep)
    except ConfigError:
        return False
    return True
