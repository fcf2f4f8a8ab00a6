"""The best way to train on the GPUs at hand: every split that could be, its memory, then its time.

A candidate is looked at in the order of what it costs to refuse it: by whole numbers, by the bytes
that are left when all is computed again, by its own bytes. What is refused keeps its reason, for as
many as share it. Words for people are made elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpt.costs.training import Recompute
from gpt.errors import ConfigError
from planning.hardware import Cluster, divisors
from planning.memory_ledger import FITS_SHARE, Ledger, tight_share
from planning.plan import Cell, Row, Standing
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    check_split,
    estimate_training,
)

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "block", "full")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32, 64)
TIE = 0.02  # Predictions are no better than that: among such, what is simpler wins.
SMALLER_OF = 40  # Of so many of the fastest, fewer copies are tried too.

Refusal = Callable[[TrainingSplit], str]


@dataclass(frozen=True)
class Axes:
    """What a search may try; empty: anything."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    vpp: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    sequence_parallel: bool | None = None
    internode_tp: bool = False
    memory_fraction: float = FITS_SHARE
    brief: bool = False  # Only what may well be best: for a comparison, whose rows nobody sees.

    @property
    def narrowed(self) -> tuple[str, ...]:
        """The flags that leave something out."""
        flags = ("tp", "pp", "vpp", "micro_batch", "recompute")
        named = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(self, flag)]
        if self.sequence_parallel is not None:
            named.append(
                "--sequence-parallel" if self.sequence_parallel else "--no-sequence-parallel"
            )
        return tuple(named)

    def standing(self, memory: Ledger) -> Standing:
        share = memory.total / memory.capacity
        if share <= self.memory_fraction:
            return "fits"
        return "tight" if share <= tight_share(self.memory_fraction) else "rejected"


@dataclass(frozen=True)
class Candidate:
    split: TrainingSplit
    standing: Standing
    estimate: TrainingEstimate | None = None
    reason: str = ""
    whole: bool = False  # It stands for all that share its tp and pp.

    @property
    def iteration_s(self) -> float:
        return self.estimate.iteration_s if self.estimate else float("inf")


@dataclass(frozen=True)
class Found:
    job: TrainingJob
    cluster: Cluster
    axes: Axes
    best: Candidate | None
    others: Sequence[Candidate]  # The fastest first, then what is tight, then what is refused.

    @property
    def usable(self) -> list[Candidate]:
        """All that fit; what is tight, where nothing does."""
        all_of = [*([self.best] if self.best else []), *self.others]
        fits = [one for one in all_of if one.standing == "fits"]
        return fits or [one for one in all_of if one.standing == "tight"]


def search_training(
    job: TrainingJob, cluster: Cluster, axes: Axes, refusal: Refusal = lambda split: ""
) -> Found:
    """`refusal` says what else stands against a split; nothing: no more."""
    # What is wrong with the job itself is no candidate's fault.
    check_split(job, TrainingSplit(), replace(cluster, gpus=1))
    candidates = list(_candidates(job, cluster, axes, refusal))
    usable = sorted((one for one in candidates if one.standing == "fits"), key=_time)
    fewer = (
        []
        if axes.brief
        else [
            _judged(job, split, cluster, axes)
            for one in usable[:SMALLER_OF]
            for split in _fewer_copies(job, one.split)
            if not refusal(split)
        ]
    )
    candidates += fewer
    for standing in ("fits", "tight"):
        usable = sorted((one for one in candidates if one.standing == standing), key=_time)
        if usable:
            best = _simplest(usable)
            others = sorted((one for one in candidates if one is not best), key=_rank)
            return Found(job, cluster, axes, best, others)
    return Found(job, cluster, axes, None, sorted(candidates, key=_rank))


def _time(one: Candidate) -> float:
    return one.iteration_s


def _rank(one: Candidate) -> tuple[int, float]:
    return ("fits", "tight", "rejected").index(one.standing), one.iteration_s


def _simplest(usable: Sequence[Candidate]) -> Candidate:
    """Of those that are as fast as the fastest, as far as one can tell."""
    alike = [one for one in usable if one.iteration_s <= usable[0].iteration_s * (1 + TIE)]

    def effort(one: Candidate) -> tuple[float, ...]:
        assert one.estimate is not None
        split = one.split
        again = RECOMPUTE.index(split.recompute) + split.recompute_layers / 1e6
        return split.tp * split.pp, again, split.gpus, one.estimate.memory.total, one.iteration_s

    return min(alike, key=effort)


def _candidates(
    job: TrainingJob, cluster: Cluster, axes: Axes, refusal: Refusal
) -> Iterator[Candidate]:
    for tp in _tensor_sizes(job, cluster, axes):
        for pp in _stage_counts(job, cluster, axes, tp):
            smallest = _smallest(job, cluster, axes, tp, pp)
            if isinstance(smallest, Candidate):
                yield smallest
                continue
            for micro_batch in _micro_batches(job, axes):
                dp = _copies(job.global_batch, micro_batch, cluster.gpus // (tp * pp))
                if dp:
                    split = replace(smallest, dp=dp, micro_batch=micro_batch)
                    yield from _of_batch(job, split, cluster, axes, refusal)


def _of_batch(
    job: TrainingJob, split: TrainingSplit, cluster: Cluster, axes: Axes, refusal: Refusal
) -> Iterator[Candidate]:
    """All schedules, and all that may be computed again, of one tp, pp, dp and micro-batch."""
    for vpp in _chunk_counts(job, split, axes):
        for sequence_parallel in _sequence_choices(split.tp, axes):
            base = replace(split, vpp=vpp, sequence_parallel=sequence_parallel)
            against = refusal(base)
            if against:
                yield Candidate(base, "rejected", None, against)
                continue
            found = [
                _judged(job, replace(base, recompute=kind), cluster, axes)
                for kind in RECOMPUTE
                if kind != "block" and (not axes.recompute or kind in axes.recompute)
            ]
            yield from found
            plain = split.tp > 1 and not sequence_parallel and axes.sequence_parallel is None
            if not plain and (not axes.recompute or "block" in axes.recompute):
                yield from _some_layers(job, base, cluster, axes, found)


def _some_layers(
    job: TrainingJob,
    base: TrainingSplit,
    cluster: Cluster,
    axes: Axes,
    found: Sequence[Candidate],
) -> Iterator[Candidate]:
    """As few layers computed again as fit, where none is too few and all are too many."""
    layers = job.model.num_layers // base.pp
    light = [one for one in found if one.split.recompute in ("none", "selective")]
    if any(one.standing == "fits" for one in light) or layers // base.vpp < 2:
        return
    low, high = 0, layers // base.vpp  # Layers of each piece of a stage; `high` fits.
    best: Candidate | None = None
    while high - low > 1:
        middle = (low + high) // 2
        split = replace(base, recompute="block", recompute_layers=middle * base.vpp)
        one = _judged(job, split, cluster, axes)
        if one.standing == "fits":
            best, high = one, middle
        else:
            low = middle
    if best is not None:
        yield best


def _judged(job: TrainingJob, split: TrainingSplit, cluster: Cluster, axes: Axes) -> Candidate:
    try:
        # What is not used is idle, and no part of the cluster that is judged.
        estimate = estimate_training(job, split, replace(cluster, gpus=split.gpus))
    except ConfigError as error:
        return Candidate(split, "rejected", None, str(error))
    standing = axes.standing(estimate.memory)
    return Candidate(split, standing, estimate, _over(estimate.memory, standing))


def _over(memory: Ledger, standing: Standing) -> str:
    if standing == "fits":
        return ""
    share = 100 * memory.total / memory.capacity
    words = "" if standing == "rejected" else ", little is left for what nobody counts"
    return f"needs {memory.total / 1e9:.1f} of {memory.capacity / 1e9:.1f} GB, {share:.0f} %{words}"


def _smallest(
    job: TrainingJob, cluster: Cluster, axes: Axes, tp: int, pp: int
) -> TrainingSplit | Candidate:
    """The split of this tp and pp that needs least memory; the candidate for all, if none fits."""
    split = TrainingSplit(
        tp, pp, 1, sequence_parallel=tp > 1 and axes.sequence_parallel is not False
    )
    if tp * pp > cluster.gpus:
        words = f"{tp * pp} GPUs hold one copy, and there are {cluster.gpus}"
        return Candidate(split, "rejected", None, words, whole=True)
    # Copies share the optimizer's values where it is distributed, so as many as can be.
    batches = [b for b in _micro_batches(job, axes) if job.global_batch % b == 0]
    copies = [_copies(job.global_batch, b, cluster.gpus // (tp * pp)) for b in batches]
    if not any(copies):
        words = f"no micro-batch divides a global batch of {job.global_batch}"
        return Candidate(split, "rejected", None, words, whole=True)
    least = replace(split, recompute="full", dp=max(copies), micro_batch=batches[0])
    judged = _judged(job, least, cluster, axes)
    if judged.standing == "rejected":
        return replace(judged, whole=True)
    return split


def _tensor_sizes(job: TrainingJob, cluster: Cluster, axes: Axes) -> list[int]:
    if axes.tp:
        return sorted(set(axes.tp))
    node = cluster.gpus_per_node
    heads, groups = job.model.num_attention_heads, job.model.num_query_groups
    sizes = [t for t in divisors(heads) if t <= cluster.gpus]
    # Such as divide a node lie inside one; others would cross its edge somewhere.
    placed = [t for t in sizes if node % t == 0 or (axes.internode_tp and t % node == 0)]
    return [t for t in placed if groups % t == 0 or t % groups == 0]


def _stage_counts(job: TrainingJob, cluster: Cluster, axes: Axes, tp: int) -> list[int]:
    if axes.pp:
        return sorted(set(axes.pp))
    layers = job.model.num_layers
    # Powers of two divide most clusters; stages then differ by one layer.
    counts = {*divisors(layers), *(1 << power for power in range(layers.bit_length()))}
    return sorted(p for p in counts if p <= min(layers, max(1, cluster.gpus // tp)))


def _micro_batches(job: TrainingJob, axes: Axes) -> list[int]:
    sizes = axes.micro_batch or MICRO_BATCHES
    return [size for size in sizes if size <= job.global_batch]


def _chunk_counts(job: TrainingJob, split: TrainingSplit, axes: Axes) -> Sequence[int]:
    layers, rest = divmod(job.model.num_layers, split.pp)
    if axes.vpp:
        return sorted(set(axes.vpp))
    whole_rounds = split.micro_batches(job) % split.pp == 0
    return divisors(layers) if split.pp > 1 and not rest and whole_rounds else [1]


def _sequence_choices(tp: int, axes: Axes) -> list[bool]:
    """It costs nothing where there are tensor ranks; both ways, to show what it saves."""
    if axes.sequence_parallel is not None:
        return [axes.sequence_parallel]
    return [True] * (tp > 1) + [False] * (tp == 1 or not axes.brief)


def _copies(batch: int, micro_batch: int, most: int) -> int:
    """As many copies of the model as share the batch evenly; 0: none do."""
    if batch % micro_batch:
        return 0
    return max((d for d in divisors(batch // micro_batch) if d <= most), default=0)


def _fewer_copies(job: TrainingJob, split: TrainingSplit) -> Iterator[TrainingSplit]:
    """More copies are not always faster: what they sum may cross more than it did."""
    for dp in divisors(job.global_batch // split.micro_batch):
        fewer = replace(split, dp=dp)
        rounds = fewer.micro_batches(job) % split.pp == 0 or split.vpp == 1
        if dp < split.dp and rounds:
            yield fewer


def rows_of(found: Found) -> list[Row]:
    first = [_row(found, found.best, "best")] if found.best else []
    return first + [_row(found, one, one.standing) for one in found.others]


def _row(found: Found, one: Candidate, standing: Standing) -> Row:
    return Row(
        name_of(one.split, whole=one.whole),
        standing,
        settings_of(one.split, found.job),
        figures_of(one.estimate) if one.estimate else {},
        reason=one.reason,
        trust=one.estimate.trust_time if one.estimate else None,
        group=f"recompute {one.split.recompute}",
        memory=one.estimate.memory if one.estimate else None,
    )


def distributed(estimate: TrainingEstimate) -> bool:
    """Whether copies share the optimizer's values: each would hold six times the weights' bytes."""
    return estimate.memory.optimizer < 5 * estimate.memory.weights


def name_of(split: TrainingSplit, *, whole: bool = False) -> str:
    """As people say it."""
    words = [f"TP{split.tp}", f"PP{split.pp}"]
    if whole:
        return " ".join(words)
    words += [f"DP{split.dp}", f"b{split.micro_batch}"]
    if split.vpp > 1:
        words.append(f"v{split.vpp}")
    if split.sequence_parallel:
        words.append("SP")
    if split.recompute != "none":
        words.append(split.recompute)
    if split.recompute == "block":
        words.append(str(split.recompute_layers))
    return " ".join(words)


def settings_of(split: TrainingSplit, job: TrainingJob) -> Mapping[str, Cell]:
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


def split_of(settings: Mapping[str, Cell]) -> TrainingSplit:
    """What `settings_of` was made from."""
    names = [name for name in settings if name not in ("gpus", "global_batch")]
    return TrainingSplit(**{name: settings[name] for name in names})  # type: ignore[arg-type]


def figures_of(estimate: TrainingEstimate) -> Mapping[str, float]:
    return {
        "tokens_per_s": estimate.tokens_per_s,
        "memory_bytes": float(estimate.memory.total),
        "iteration_s": estimate.iteration_s,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble_fraction": estimate.bubble_fraction,
    }
