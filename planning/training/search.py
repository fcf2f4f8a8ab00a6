"""Training search: tries tensor, pipeline and data parallel splits, micro-batches and recompute.

For each pair of a TP and a PP size, the split that needs the least memory is checked first. If this
split does not fit, one rejected candidate represents all candidates with these sizes. Otherwise
each candidate is estimated, and the candidates that fit are ranked by the time of a step. Each
rejected candidate has a reason. `planning.training.explanation` describes the result in text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpt.costs.training import RecomputeMode
from gpt.errors import ConfigError
from planning.hardware import Cluster, divisors
from planning.memory_ledger import FITS_SHARE, MemoryLedger, tight_share
from planning.plan import Feasibility, Row, SettingValue
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    check_split,
    estimate_training,
)

RECOMPUTE: tuple[RecomputeMode, ...] = ("none", "selective", "block", "full")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32, 64)
# Among the candidates that are slower than the fastest by at most this fraction, the simplest one
# is selected.
TIE_FRACTION = 0.02
FEWER_REPLICAS_TRIED = 40  # Number of fastest candidates that are also tried with fewer replicas.

# Returns the reason why a split must not be used; "": it may be used.
Refusal = Callable[[TrainingSplit], str]


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search tries. An empty tuple or None means all values."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    vpp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    sequence_parallel: bool | None = None
    internode_tp: bool = False  # Whether a TP group may span several nodes.
    memory_fraction: float = FITS_SHARE
    # Whether only the likely best candidates are tried, for a search whose rows are not printed.
    brief: bool = False

    @property
    def narrowing_flags(self) -> tuple[str, ...]:
        """The command-line flags that restrict the search."""
        axes = ("tp", "pp", "vpp", "micro_batch", "recompute")
        flags = [f"--{axis.replace('_', '-')}" for axis in axes if getattr(self, axis)]
        if self.sequence_parallel is not None:
            flags.append(
                "--sequence-parallel" if self.sequence_parallel else "--no-sequence-parallel"
            )
        return tuple(flags)

    def feasibility_of(self, memory: MemoryLedger) -> Feasibility:
        share = memory.total / memory.capacity
        if share <= self.memory_fraction:
            return "fits"
        return "tight" if share <= tight_share(self.memory_fraction) else "rejected"


@dataclass(frozen=True)
class TrainingCandidate:
    split: TrainingSplit
    feasibility: Feasibility
    estimate: TrainingEstimate | None = None
    reason: str = ""
    # Whether this rejected candidate represents all candidates with its tp and pp.
    covers_tp_pp: bool = False

    @property
    def iteration_s(self) -> float:
        return self.estimate.iteration_s if self.estimate else float("inf")


@dataclass(frozen=True)
class TrainingSearchResult:
    job: TrainingJob
    cluster: Cluster
    space: SearchSpace
    best: TrainingCandidate | None
    # All candidates except `best`: those that fit, then tight, then rejected candidates; in each
    # group, the fastest first.
    alternatives: Sequence[TrainingCandidate]

    @property
    def usable(self) -> list[TrainingCandidate]:
        """The candidates that fit, or the tight candidates if none fits."""
        candidates = [*([self.best] if self.best else []), *self.alternatives]
        fits = [candidate for candidate in candidates if candidate.feasibility == "fits"]
        return fits or [candidate for candidate in candidates if candidate.feasibility == "tight"]


def search_training(
    job: TrainingJob, cluster: Cluster, space: SearchSpace, refusal: Refusal = lambda split: ""
) -> TrainingSearchResult:
    """Search for the fastest split; `refusal` can reject splits for additional reasons."""
    # Errors of the job are raised here. Otherwise they would become the reason of each candidate.
    check_split(job, TrainingSplit(), replace(cluster, gpus=1))
    candidates = list(_candidates(job, cluster, space, refusal))
    usable_candidates = sorted(
        (candidate for candidate in candidates if candidate.feasibility == "fits"), key=_iteration_s
    )
    if not space.brief:
        candidates += [
            _evaluate(job, split, cluster, space)
            for candidate in usable_candidates[:FEWER_REPLICAS_TRIED]
            for split in _splits_with_fewer_replicas(job, candidate.split)
            if not refusal(split)
        ]
    for feasibility in ("fits", "tight"):
        usable_candidates = sorted(
            (candidate for candidate in candidates if candidate.feasibility == feasibility),
            key=_iteration_s,
        )
        if usable_candidates:
            best = _choose_simplest(usable_candidates)
            alternatives = sorted(
                (candidate for candidate in candidates if candidate is not best), key=_sort_key
            )
            return TrainingSearchResult(job, cluster, space, best, alternatives)
    return TrainingSearchResult(job, cluster, space, None, sorted(candidates, key=_sort_key))


def _iteration_s(candidate: TrainingCandidate) -> float:
    return candidate.iteration_s


def _sort_key(candidate: TrainingCandidate) -> tuple[int, float]:
    return ("fits", "tight", "rejected").index(candidate.feasibility), candidate.iteration_s


def _choose_simplest(candidates: Sequence[TrainingCandidate]) -> TrainingCandidate:
    """Return the simplest of the candidates that are within TIE_FRACTION of the fastest."""
    near_fastest = [
        candidate
        for candidate in candidates
        if candidate.iteration_s <= candidates[0].iteration_s * (1 + TIE_FRACTION)
    ]

    def complexity(candidate: TrainingCandidate) -> tuple[float, ...]:
        assert candidate.estimate is not None
        split = candidate.split
        # Ordered by the mode, then by the number of recomputed layers.
        recompute_rank = RECOMPUTE.index(split.recompute) + split.recompute_layers / 1e6
        return (
            split.tp * split.pp,
            recompute_rank,
            split.gpus,
            candidate.estimate.memory.total,
            candidate.iteration_s,
        )

    return min(near_fastest, key=complexity)


def _candidates(
    job: TrainingJob, cluster: Cluster, space: SearchSpace, refusal: Refusal
) -> Iterator[TrainingCandidate]:
    for tp in _tensor_sizes(job, cluster, space):
        for pp in _stage_counts(job, cluster, space, tp):
            base = _base_split(job, cluster, space, tp, pp)
            if isinstance(base, TrainingCandidate):
                yield base
                continue
            for micro_batch in _micro_batches(job, space):
                dp = _replicas_max(job.global_batch, micro_batch, cluster.gpus // (tp * pp))
                if dp:
                    split = replace(base, dp=dp, micro_batch=micro_batch)
                    yield from _candidates_of_batch(job, split, cluster, space, refusal)


def _candidates_of_batch(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, space: SearchSpace, refusal: Refusal
) -> Iterator[TrainingCandidate]:
    """Yield the candidates with the tp, pp, dp and micro-batch of `split`.

    They differ in vpp, sequence parallelism and recomputation.
    """
    for vpp in _chunk_counts(job, split, space):
        for sequence_parallel in _sequence_choices(split.tp, space):
            base = replace(split, vpp=vpp, sequence_parallel=sequence_parallel)
            refusal_reason = refusal(base)
            if refusal_reason:
                yield TrainingCandidate(base, "rejected", None, refusal_reason)
                continue
            non_block_candidates = [
                _evaluate(job, replace(base, recompute=kind), cluster, space)
                for kind in RECOMPUTE
                if kind != "block" and (not space.recompute or kind in space.recompute)
            ]
            yield from non_block_candidates
            # If the search tries both values of sequence parallelism, it tries "block" with True
            # only.
            skips_block = split.tp > 1 and not sequence_parallel and space.sequence_parallel is None
            if not skips_block and (not space.recompute or "block" in space.recompute):
                yield from _block_recompute_candidates(
                    job, base, cluster, space, non_block_candidates
                )


def _block_recompute_candidates(
    job: TrainingJob,
    base: TrainingSplit,
    cluster: Cluster,
    space: SearchSpace,
    non_block_candidates: Sequence[TrainingCandidate],
) -> Iterator[TrainingCandidate]:
    """Yield the candidate that fits in memory with the fewest fully recomputed layers.

    The candidate is found by binary search. Yield nothing in these cases:
    - A candidate with recompute "none" or "selective" already fits.
    - A model chunk has fewer than two layers.
    - Only candidates that recompute all layers fit, or no candidate fits.
    """
    chunk_layers = job.model.num_layers // base.pp // base.vpp
    fits_without_layer_recompute = any(
        candidate.feasibility == "fits"
        for candidate in non_block_candidates
        if candidate.split.recompute in ("none", "selective")
    )
    if fits_without_layer_recompute or chunk_layers < 2:
        return
    # Bounds of the number of recomputed layers per model chunk: `low` does not fit, `high` may fit.
    low, high = 0, chunk_layers
    best: TrainingCandidate | None = None
    while high - low > 1:
        middle = (low + high) // 2
        split = replace(base, recompute="block", recompute_layers=middle * base.vpp)
        candidate = _evaluate(job, split, cluster, space)
        if candidate.feasibility == "fits":
            best, high = candidate, middle
        else:
            low = middle
    if best is not None:
        yield best


def _evaluate(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, space: SearchSpace
) -> TrainingCandidate:
    try:
        # A candidate may leave GPUs of the cluster idle, but `check_split` rejects idle GPUs.
        estimate = estimate_training(job, split, replace(cluster, gpus=split.gpus))
    except ConfigError as error:
        return TrainingCandidate(split, "rejected", None, str(error))
    feasibility = space.feasibility_of(estimate.memory)
    return TrainingCandidate(
        split, feasibility, estimate, _memory_reason(estimate.memory, feasibility)
    )


def _memory_reason(memory: MemoryLedger, feasibility: Feasibility) -> str:
    if feasibility == "fits":
        return ""
    percent = 100 * memory.total / memory.capacity
    text = f"needs {memory.total / 1e9:.1f} of {memory.capacity / 1e9:.1f} GB, {percent:.0f} %"
    if feasibility == "tight":
        text += ": little is left for fragmentation and libraries"
    return text


def _base_split(
    job: TrainingJob, cluster: Cluster, space: SearchSpace, tp: int, pp: int
) -> TrainingSplit | TrainingCandidate:
    """Return the split from which all candidates with this tp and pp are made.

    If none of them fits, return a rejected candidate that represents all of them.
    """
    split = TrainingSplit(
        tp, pp, 1, sequence_parallel=tp > 1 and space.sequence_parallel is not False
    )
    if tp * pp > cluster.gpus:
        reason = f"one replica needs {tp * pp} GPUs, and there are {cluster.gpus}"
        return TrainingCandidate(split, "rejected", None, reason, covers_tp_pp=True)
    # With a distributed optimizer, a larger number of replicas needs less memory per GPU, so the
    # largest number is tried.
    micro_batches = [
        micro_batch
        for micro_batch in _micro_batches(job, space)
        if job.global_batch % micro_batch == 0
    ]
    replica_counts = [
        _replicas_max(job.global_batch, micro_batch, cluster.gpus // (tp * pp))
        for micro_batch in micro_batches
    ]
    if not any(replica_counts):
        reason = f"no micro-batch size to try divides the global batch of {job.global_batch}"
        return TrainingCandidate(split, "rejected", None, reason, covers_tp_pp=True)
    least_memory_split = replace(
        split, recompute="full", dp=max(replica_counts), micro_batch=micro_batches[0]
    )
    candidate = _evaluate(job, least_memory_split, cluster, space)
    if candidate.feasibility == "rejected":
        return replace(candidate, covers_tp_pp=True)
    return split


def _tensor_sizes(job: TrainingJob, cluster: Cluster, space: SearchSpace) -> list[int]:
    if space.tp:
        return sorted(set(space.tp))
    gpus_per_node = cluster.gpus_per_node
    heads, groups = job.model.num_attention_heads, job.model.num_query_groups
    # A TP group stays inside a node if its size divides the number of GPUs of a node.
    return [
        tp
        for tp in divisors(heads)
        if tp <= cluster.gpus
        and (gpus_per_node % tp == 0 or (space.internode_tp and tp % gpus_per_node == 0))
        and (groups % tp == 0 or tp % groups == 0)
    ]


def _stage_counts(job: TrainingJob, cluster: Cluster, space: SearchSpace, tp: int) -> list[int]:
    if space.pp:
        return sorted(set(space.pp))
    layers = job.model.num_layers
    # Powers of two divide most cluster sizes. If a power does not divide the number of layers, the
    # sizes of the stages differ by one layer.
    counts = {*divisors(layers), *(1 << power for power in range(layers.bit_length()))}
    count_max = min(layers, max(1, cluster.gpus // tp))
    return sorted(count for count in counts if count <= count_max)


def _micro_batches(job: TrainingJob, space: SearchSpace) -> list[int]:
    sizes = space.micro_batch or MICRO_BATCHES
    return [size for size in sizes if size <= job.global_batch]


def _chunk_counts(job: TrainingJob, split: TrainingSplit, space: SearchSpace) -> Sequence[int]:
    if space.vpp:
        return sorted(set(space.vpp))
    stage_layers, remainder = divmod(job.model.num_layers, split.pp)
    is_interleavable = split.micro_batches(job) % split.pp == 0
    if split.pp > 1 and not remainder and is_interleavable:
        return divisors(stage_layers)
    return [1]


def _sequence_choices(tp: int, space: SearchSpace) -> list[bool]:
    """Return the values of sequence parallelism to try.

    With several tensor ranks, a search that is not brief also tries False, to show how much memory
    sequence parallelism saves.
    """
    if space.sequence_parallel is not None:
        return [space.sequence_parallel]
    if tp == 1:
        return [False]
    return [True] if space.brief else [True, False]


def _replicas_max(batch: int, micro_batch: int, replicas_limit: int) -> int:
    """Return the largest divisor of the number of micro-batches, at most `replicas_limit`.

    Each replica then computes the same number of micro-batches. Return 0 if the micro-batch size
    does not divide the batch, or if `replicas_limit` is 0.
    """
    if batch % micro_batch:
        return 0
    return max((d for d in divisors(batch // micro_batch) if d <= replicas_limit), default=0)


def _splits_with_fewer_replicas(job: TrainingJob, split: TrainingSplit) -> Iterator[TrainingSplit]:
    """Yield `split` with each possible smaller number of replicas.

    A smaller number can be faster if the all-reduce then crosses fewer nodes.
    """
    for dp in divisors(job.global_batch // split.micro_batch):
        smaller_split = replace(split, dp=dp)
        is_interleavable = smaller_split.micro_batches(job) % split.pp == 0 or split.vpp == 1
        if dp < split.dp and is_interleavable:
            yield smaller_split


def plan_rows(search: TrainingSearchResult) -> list[Row]:
    best_rows = [_row(search, search.best, "best")] if search.best else []
    return best_rows + [
        _row(search, candidate, candidate.feasibility) for candidate in search.alternatives
    ]


def _row(
    search: TrainingSearchResult, candidate: TrainingCandidate, feasibility: Feasibility
) -> Row:
    estimate = candidate.estimate
    return Row(
        name=split_name(candidate.split, tp_pp_only=candidate.covers_tp_pp),
        feasibility=feasibility,
        settings=split_settings(candidate.split, search.job),
        figures=training_figures(estimate) if estimate else {},
        reason=candidate.reason,
        confidence=estimate.time_confidence if estimate else None,
        group=f"recompute {candidate.split.recompute}",
        memory=estimate.memory if estimate else None,
    )


def is_optimizer_distributed(estimate: TrainingEstimate) -> bool:
    """Infer from the sizes whether the optimizer state of trained weights is sharded.

    A weight has 2 bytes, and its unsharded optimizer state has 12 or 16 bytes. A state of less than
    five times the bytes of the weights is therefore sharded.
    """
    return estimate.memory.optimizer < 5 * estimate.memory.weights


def split_name(split: TrainingSplit, *, tp_pp_only: bool = False) -> str:
    """Return the name of a split for display, such as TP8 PP4 DP2 b1 v2 SP selective.

    b is the number of sequences per micro-batch, v is vpp, and SP is sequence parallelism.
    """
    name_parts = [f"TP{split.tp}", f"PP{split.pp}"]
    if tp_pp_only:
        return " ".join(name_parts)
    name_parts += [f"DP{split.dp}", f"b{split.micro_batch}"]
    if split.vpp > 1:
        name_parts.append(f"v{split.vpp}")
    if split.sequence_parallel:
        name_parts.append("SP")
    if split.recompute != "none":
        name_parts.append(split.recompute)
    if split.recompute == "block":
        name_parts.append(str(split.recompute_layers))
    return " ".join(name_parts)


def split_settings(split: TrainingSplit, job: TrainingJob) -> Mapping[str, SettingValue]:
    return {
        "tp": split.tp,
        "pp": split.pp,
        "dp": split.dp,
        "vpp": split.vpp,
        "micro_batch": split.micro_batch,
        "recompute": split.recompute,
        "recompute_layers": split.recompute_layers,
        "sequence_parallel": split.sequence_parallel,
        "gpus": split.gpus,
        "global_batch": job.global_batch,
    }


def split_from_settings(settings: Mapping[str, SettingValue]) -> TrainingSplit:
    """Return the split that `split_settings` converted to these settings."""
    names = [name for name in settings if name not in ("gpus", "global_batch")]
    return TrainingSplit(**{name: settings[name] for name in names})  # type: ignore[arg-type]


def training_figures(estimate: TrainingEstimate) -> Mapping[str, float]:
    return {
        "tokens_per_s": estimate.tokens_per_s,
        "memory_bytes": float(estimate.memory.total),
        "iteration_s": estimate.iteration_s,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble_fraction": estimate.bubble_fraction,
    }
