"""What a search of training splits has found, in sentences: what binds it, what was not taken and
why, what it saves, how long it takes, and what would fit where nothing does.

Every sentence is made of the figures of candidates; where it compares, both were predicted alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpt.costs.training import Recompute
from planning.figures import ledger_of, number, size
from planning.figures import say as said
from planning.hardware import DEVICES, Cluster, divisors
from planning.memory_ledger import FITS_SHARE
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    estimate_training,
)
from planning.training.search import TIE, Axes, Candidate, Found, name_of, search_training

DAY_S = 86_400
TOKENS = 300e9  # What the field's tables are told for.
BUBBLE = 0.05  # More is worth a sentence.
GPUS_MAX = 1 << 16
ADAPTER_BATCH = 128  # Records are few, and a table learns from little.


def asked(
    job: TrainingJob, cluster: Cluster, axes: Axes, name: str, tokens: float | None
) -> list[str]:
    virtual = f" of {job.virtual_tokens} virtual tokens" if job.virtual_tokens else ""
    frozen = f"an adapter{virtual}, the model frozen"
    what = "all parameters" if job.trainable == "all" else frozen
    per_node = min(cluster.gpus, cluster.gpus_per_node)
    lines = [
        f"train {what}: {name}, {job.model.num_layers} layers of "
        f"{job.model.hidden_size:,}, in {job.dtype}",
        f"sequences of {job.sequence:,} tokens, {job.global_batch:,} in a step",
        f"{cluster.gpus:,} {cluster.device.name}, {per_node} a node",
    ]
    if tokens is not None:
        lines.append(f"{_tokens(tokens)} tokens in all")
    if axes.memory_fraction != FITS_SHARE:
        lines.append(f"at most {100 * axes.memory_fraction:.0f} % of a GPU's memory")
    return lines


def binding(found: Found) -> list[str]:
    """What keeps the best from being better."""
    best = found.best
    assert best is not None and best.estimate is not None
    memory = best.estimate.memory
    faster = [
        one
        for one in found.others
        if one.standing in ("rejected", "tight")
        and one.iteration_s < best.iteration_s * (1 - TIE)
        and one.estimate is not None
        and not one.whole
    ]
    lines = []
    if faster:
        one = min(faster, key=lambda one: one.iteration_s)
        assert one.estimate is not None
        gain = 100 * (1 - one.iteration_s / best.iteration_s)
        lines.append(
            f"memory: {name_of(one.split)} would take {gain:.0f} % less time, and "
            f"{size(one.estimate.memory.total)} of {size(memory.capacity)}"
        )
    if best.estimate.bubble_fraction > BUBBLE:
        micros = best.split.micro_batches(found.job)
        lines.append(
            f"the pipeline: a bubble of {100 * best.estimate.bubble_fraction:.0f} %, with "
            f"{best.split.pp} stages for {micros} micro-batch{'es' * (micros > 1)}; a larger "
            "global batch makes it smaller"
        )
    part, seconds = max(best.estimate.seconds.items(), key=lambda one: one[1])
    lines.append(
        f"time: {100 * seconds / best.iteration_s:.0f} % of a step is {part.replace('_', ' ')}"
    )
    return lines


def why_not(found: Found) -> list[str]:
    """The nearest other choices on each axis, at their best."""
    best = found.best
    assert best is not None
    split = best.split
    axes: list[tuple[str, Callable[[TrainingSplit], object], list[object]]] = [
        ("TP", lambda one: one.tp, _around(found, "tp", split.tp)),
        ("PP", lambda one: one.pp, _around(found, "pp", split.pp)),
        (
            "micro-batch ",
            lambda one: one.micro_batch,
            _around(found, "micro_batch", split.micro_batch),
        ),
        ("recompute ", lambda one: one.recompute, _other(split.recompute)),
    ]
    if split.sequence_parallel:
        axes.append(("no SP", lambda one: one.sequence_parallel, [False]))
    lines = []
    for label, of, values in axes:
        for value in values:
            with_it = [one for one in found.others if of(one.split) == value]
            words = _instead(found, with_it)
            if words:
                lines.append(f"{label}{'' if value is False else value}: {words}")
    return lines


def _around(found: Found, axis: str, value: int) -> list[object]:
    """The nearest value below, and above."""
    values = {getattr(one.split, axis) for one in found.others}
    below = max((one for one in values if one < value), default=None)
    above = min((one for one in values if one > value), default=None)
    return [one for one in (below, above) if one is not None]


def _other(recompute: str) -> list[object]:
    return [one for one in ("none", "selective", "full") if one != recompute]


def _instead(found: Found, with_it: Sequence[Candidate]) -> str:
    best = found.best
    assert best is not None
    fits = [one for one in with_it if one.standing == "fits"]
    if fits:
        one = min(fits, key=lambda one: one.iteration_s)
        off = 100 * (one.iteration_s / best.iteration_s - 1)
        how = f"{off:.0f} % slower" if off >= 1 else "as fast"
        return f"{how} at best ({name_of(one.split)})"
    sized = [one for one in with_it if one.estimate is not None]
    if sized:
        least = min(_memory(one) for one in sized)
        capacity = found.cluster.device.memory_bytes
        tight = " (tight)" if any(one.standing == "tight" for one in sized) else ""
        return f"takes at least {size(least)} of {size(capacity)}{tight}"
    return with_it[0].reason if with_it else ""


def _memory(one: Candidate) -> int:
    assert one.estimate is not None
    return one.estimate.memory.total


# --------------------------------------------------------------------------- what is worth knowing


def advice(found: Found, tokens: float | None, other: Found | None) -> list[str]:
    best, job = found.best, found.job
    assert best is not None and best.estimate is not None
    lines = []
    if tokens is not None or job.trainable == "all":
        lines.append(days(best.estimate, tokens or TOKENS))
    lines.append(layout(found, best.split))
    if job.trainable == "all":
        lines.append(savings(job, best.split, found.cluster))
    if other is not None:
        lines += compared(found, other)
    if best.split.gpus < found.cluster.gpus:
        idle = found.cluster.gpus - best.split.gpus
        lines.append(
            f"idle are {idle:,} of {found.cluster.gpus:,} GPUs: none of the splits that use more, "
            f"of a global batch of {job.global_batch:,}, is faster"
        )
    return [line for line in lines if line]


def days(estimate: TrainingEstimate, tokens: float) -> str:
    taken = tokens / estimate.tokens_per_s / DAY_S
    error = estimate.trust_time.error
    return (
        f"{_tokens(tokens)} tokens take {number(taken)} days "
        f"({number(taken / (1 + error))} to {number(taken * (1 + error))}), at "
        f"{number(estimate.tokens_per_s)} tokens/s"
    )


def layout(found: Found, split: TrainingSplit) -> str:
    """Why the split lies over nodes as it does."""
    cluster, job = found.cluster, found.job
    link, network = cluster.device.link_bytes / 1e9, cluster.device.network_bytes / 1e9
    words = ""
    if split.tp > cluster.gpus_per_node:
        words = f"TP{split.tp} crosses nodes, at {network:.0f} GB/s: a last resort"
    elif split.tp > 1:
        words = f"TP{split.tp} stays inside a node, where links carry {link:.0f} GB/s"
    if split.pp > 1 and split.tp * split.pp > cluster.gpus_per_node:
        sent = 2 * split.micro_batch * job.sequence * job.model.hidden_size / split.tp
        words += "; " if words else ""
        words += (
            f"PP{split.pp} goes across nodes, at {network:.0f} GB/s, where a GPU hands on only "
            f"{size(sent)} for a micro-batch"
        )
    elif split.pp > 1:
        words = f"{words}; PP{split.pp} too" if words else f"PP{split.pp} stays inside a node"
    return words


def savings(job: TrainingJob, split: TrainingSplit, cluster: Cluster) -> str:
    """What sequence parallelism and selective recomputation are worth at this split."""
    if split.tp == 1:
        return ""
    plain = _at(job, split, cluster, sequence_parallel=False, recompute="none")
    both = _at(job, split, cluster, sequence_parallel=True, recompute="selective")
    full = _at(job, split, cluster, sequence_parallel=False, recompute="full")
    sequence = _at(job, split, cluster, sequence_parallel=True, recompute="none")
    fewer = plain.memory.activations / max(1, both.memory.activations)
    what, best = "sequence parallelism and selective recomputation keep", both
    if sequence.memory.activations == both.memory.activations:
        what, best = "with attention that keeps no scores, sequence parallelism keeps", sequence
    gain = 100 * (full.iteration_s / best.iteration_s - 1)
    words = (
        f"{what} {size(best.memory.activations)} of activations where TP alone keeps "
        f"{size(plain.memory.activations)}, {fewer:.1f} times less"
    )
    node = cluster.gpus_per_node
    if split.tp < node and job.model.num_query_groups % node == 0:
        wide = replace(split, tp=node, dp=1)
        least: Recompute = "selective" if best is both else "none"
        ways: tuple[tuple[bool, Recompute], ...] = ((False, "none"), (True, least))
        kept = [
            _at(job, wide, cluster, sequence_parallel=way, recompute=kind).memory.activations
            for way, kind in ways
        ]
        words += f" (at TP{node} {kept[0] / max(1, kept[1]):.1f} times)"
    return (
        f"{words}; a step takes {said('iteration_s', best.iteration_s)}, with full recomputation "
        f"{said('iteration_s', full.iteration_s)}: {gain:.0f} % faster"
    )


def _at(
    job: TrainingJob,
    split: TrainingSplit,
    cluster: Cluster,
    *,
    sequence_parallel: bool,
    recompute: Recompute,
) -> TrainingEstimate:
    changed = replace(
        split, sequence_parallel=sequence_parallel, recompute=recompute, recompute_layers=0
    )
    return estimate_training(job, changed, replace(cluster, gpus=changed.gpus))


def compared(found: Found, other: Found) -> list[str]:
    """How a frozen model's plan differs from one in which all of it learns, and why."""
    frozen, whole = (found, other) if found.job.trainable == "adapter" else (other, found)
    if frozen.best is None or frozen.best.estimate is None:
        return []
    split, estimate = frozen.best.split, frozen.best.estimate
    if found is whole:
        assert whole.best is not None
        gain = whole.best.iteration_s / frozen.best.iteration_s
        return [
            f"an adapter alone (--trainable adapter) would learn with {name_of(split)}, "
            f"{number(gain)} times as fast: frozen weights have no gradients and no optimizer"
        ]
    lines = [
        "frozen weights have no gradients and no optimizer: 2 bytes a parameter for 18, "
        f"{size(estimate.memory.weights)} on the fullest GPU; and linears keep no inputs for them"
    ]
    if whole.best is None:
        return [*lines, "to train all parameters does not fit on these GPUs at all"]
    assert whole.best.estimate is not None
    same = name_of(whole.best.split) == name_of(split)
    how = "takes the same split" if same else f"takes {name_of(whole.best.split)} instead"
    gain = whole.best.iteration_s / frozen.best.iteration_s
    flops = whole.best.estimate.model_flops / estimate.model_flops
    return [
        *lines,
        f"to train all parameters {how}: {size(whole.best.estimate.memory.total)} a GPU for "
        f"{size(estimate.memory.total)}, a step of {said('iteration_s', whole.best.iteration_s)}"
        f" for {said('iteration_s', frozen.best.iteration_s)}",
        f"a frozen step has {flops:.2f} times fewer FLOPs, as no gradient of a weight is computed, "
        f"and nothing of the weights is summed over copies: {gain:.2f} times as fast",
    ]


# ------------------------------------------------------------------------- where nothing can be had


def what_would_fit(found: Found) -> list[str]:
    """Which limit binds, in the order of how hard it is, and what would make it fit."""
    job, cluster, axes = found.job, found.cluster, found.axes
    if axes.narrowed:
        again = search_training(job, cluster, _free(axes))
        if again.best is not None:
            flags = ", ".join(axes.narrowed)
            without = f"nothing fits within {flags}; without, {name_of(again.best.split)} does"
            return [without, _what_binds(found)]
    lines = [_what_binds(found)]
    more = _more_gpus(job, cluster, axes)
    if more is not None:
        lines.append(f"{more[1].cluster.gpus:,} of these GPUs hold it, as {more[0]}")
    larger = _larger_gpu(job, cluster, axes)
    if larger:
        lines.append(larger)
    if job.trainable == "all":
        frozen = search_training(replace(job, trainable="adapter"), cluster, _free(axes))
        if frozen.best is not None:
            name = name_of(frozen.best.split)
            lines.append(f"an adapter alone (--trainable adapter) fits as {name}")
    if job.distributed_optimizer is not True and job.trainable == "all":
        shared = search_training(replace(job, distributed_optimizer=True), cluster, _free(axes))
        if shared.best is not None:
            name = name_of(shared.best.split)
            lines.append(f"with --distributed-optimizer {name} fits")
    if not more and not larger and job.sequence > 1024:
        lines.append(f"shorter sequences than {job.sequence:,} keep less")
    return lines


def _what_binds(found: Found) -> str:
    sized = [one for one in found.others if one.estimate is not None]
    if not sized:
        return found.others[0].reason if found.others else "there is no split to try"
    least = min(sized, key=_memory)
    assert least.estimate is not None
    memory = least.estimate.memory
    state = memory.weights + memory.gradients + memory.optimizer
    what = "weights do not fit" if memory.weights > memory.capacity else (
        "weights, gradients and optimizer do not fit"
        if state > found.axes.memory_fraction * memory.capacity
        else "activations do not fit, however little is kept"
    )  # fmt: skip
    return f"{what}: {name_of(least.split)} needs {ledger_of(memory)}"


def _free(axes: Axes) -> Axes:
    return Axes(memory_fraction=axes.memory_fraction, internode_tp=axes.internode_tp)


def _more_gpus(job: TrainingJob, cluster: Cluster, axes: Axes) -> tuple[str, Found] | None:
    """The fewest, by doubling and then by halves."""
    low, high, good = cluster.gpus, cluster.gpus, None
    while high < GPUS_MAX and good is None:
        low, high = high, high * 2
        found = search_training(job, replace(cluster, gpus=high), _free(axes))
        good = found if found.best is not None else None
    while good is not None and high - low > max(1, cluster.gpus_per_node if high > 64 else 1):
        middle = (low + high) // 2
        found = search_training(job, replace(cluster, gpus=middle), _free(axes))
        if found.best is not None:
            high, good = middle, found
        else:
            low = middle
    if good is None or good.best is None:
        return None
    least = replace(good, cluster=replace(cluster, gpus=good.best.split.gpus))
    return name_of(good.best.split), least


def _larger_gpu(job: TrainingJob, cluster: Cluster, axes: Axes) -> str:
    have = cluster.device.memory_bytes
    for device in sorted(DEVICES.values(), key=lambda one: one.memory_bytes):
        if device.memory_bytes > have:
            found = search_training(job, replace(cluster, device=device), _free(axes))
            if found.best is not None:
                return f"{cluster.gpus:,} {device.name} hold it, as {name_of(found.best.split)}"
    return ""


def default_batch(parameters: int, trainable: str, gpus: int) -> int:
    """What models of that size are trained with, near which all GPUs can have a share of it."""
    sizes = ((1e9, 256), (4e9, 1024), (300e9, 2048))
    base = next((batch for most, batch in sizes if parameters <= most), 3072)
    if trainable == "adapter":
        base = ADAPTER_BATCH
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    unit = odd * min(gpus // odd, 256)
    fitting = [one for one in divisors(unit) if one % odd == 0 and one <= base]
    unit = max(fitting, default=unit)
    return max(1, round(base / unit)) * unit


def _tokens(count: float) -> str:
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= power:
            return f"{number(count / power)}{letter}"
    return number(count)
