"""Explanations of a training plan: binding limits, alternatives, and changes that make a split fit.

The explanations also describe the placement over nodes, the memory that recomputation saves, and
the duration of a whole run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpt.costs.linear_adapter import describe_spec
from gpt.costs.training import RecomputeMode
from planning.figures import format_bytes, format_figure, format_ledger, format_number
from planning.hardware import DEVICES, Cluster, divisors
from planning.memory_ledger import FITS_SHARE
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    estimate_training,
)
from planning.training.search import (
    TIE_FRACTION,
    SearchSpace,
    TrainingCandidate,
    TrainingSearchResult,
    search_training,
    split_name,
)

DAY_S = 86_400
DEFAULT_TOKENS = 300e9  # Number of training tokens that published tables assume.
BUBBLE_FRACTION_MIN = 0.05  # A smaller bubble is not mentioned.
GPUS_MAX = 1 << 16  # The search for a cluster that is large enough stops at this size.
ADAPTER_BATCH = 128  # Adapters are trained on few records, with small batches.


def request_lines(
    job: TrainingJob, cluster: Cluster, space: SearchSpace, name: str, tokens: float | None
) -> list[str]:
    virtual_text = f" with {job.virtual_tokens} virtual tokens" if job.virtual_tokens else ""
    trained_part = f"an adapter{virtual_text} for a frozen model"
    if job.trainable == "all":
        trained_part = "all parameters"
    elif job.linears is not None:
        millions = format_number(job.adapter_parameters / 1e6)
        trained_part = f"{describe_spec(job.linears)} ({millions} M parameters) for a frozen model"
    per_node = min(cluster.gpus, cluster.gpus_per_node)
    lines = [
        f"train {trained_part}: {name}, {job.model.num_layers} layers, "
        f"hidden size {job.model.hidden_size:,}, in {job.dtype}",
        f"sequences of {job.sequence:,} tokens, {job.global_batch:,} per step",
        f"{cluster.gpus:,} {cluster.device.name}, {per_node} per node",
    ]
    if job.context_tokens:
        lines[1] += f"; {job.context_tokens:,} of them before the invocation, without backward"
    if tokens is not None:
        lines.append(f"{_format_token_count(tokens)} tokens in total")
    if space.memory_fraction != FITS_SHARE:
        lines.append(f"at most {100 * space.memory_fraction:.0f} % of a GPU's memory")
    return lines


def binding_lines(search: TrainingSearchResult) -> list[str]:
    """Return the reasons why the best candidate is not faster."""
    best = search.best
    assert best is not None and best.estimate is not None
    memory = best.estimate.memory
    faster = [
        candidate
        for candidate in search.alternatives
        if candidate.feasibility in ("rejected", "tight")
        and candidate.iteration_s < best.iteration_s * (1 - TIE_FRACTION)
        and candidate.estimate is not None
        and not candidate.covers_tp_pp
    ]
    lines = []
    if faster:  # These candidates are faster, but need too much memory.
        fastest = min(faster, key=lambda candidate: candidate.iteration_s)
        assert fastest.estimate is not None
        gain = 100 * (1 - fastest.iteration_s / best.iteration_s)
        lines.append(
            f"memory: {split_name(fastest.split)} would take {gain:.0f} % less time, but needs "
            f"{format_bytes(fastest.estimate.memory.total)}; a GPU has "
            f"{format_bytes(memory.capacity)}"
        )
    if best.estimate.bubble_fraction > BUBBLE_FRACTION_MIN:
        micro_batches = best.split.micro_batches(search.job)
        plural_suffix = "es" if micro_batches > 1 else ""
        lines.append(
            f"pipeline: the bubble is {100 * best.estimate.bubble_fraction:.0f} %, with "
            f"{best.split.pp} stages and {micro_batches} micro-batch{plural_suffix}; a larger "
            "global batch makes the bubble smaller"
        )
    part_name, seconds = max(best.estimate.seconds.items(), key=lambda pair: pair[1])
    lines.append(
        f"time: the largest part of a step is {part_name.replace('_', ' ')}, with "
        f"{100 * seconds / best.iteration_s:.0f} %"
    )
    return lines


def alternative_lines(search: TrainingSearchResult) -> list[str]:
    """Explain why the best candidate does not have other settings, one line per value.

    A line takes another value of one setting, such as the next larger TP, and compares the fastest
    candidate that has this value with the best candidate.
    """
    best = search.best
    assert best is not None
    split = best.split
    # Each entry: a setting's label, a function that reads the setting, and the values to explain.
    axis_choices: list[tuple[str, Callable[[TrainingSplit], object], list[object]]] = [
        (
            "TP",
            lambda candidate_split: candidate_split.tp,
            _neighboring_values(search, "tp", split.tp),
        ),
        (
            "PP",
            lambda candidate_split: candidate_split.pp,
            _neighboring_values(search, "pp", split.pp),
        ),
        (
            "micro-batch ",
            lambda candidate_split: candidate_split.micro_batch,
            _neighboring_values(search, "micro_batch", split.micro_batch),
        ),
        (
            "recompute ",
            lambda candidate_split: candidate_split.recompute,
            _other_recompute(split.recompute),
        ),
    ]
    if split.sequence_parallel:
        axis_choices.append(
            ("no SP", lambda candidate_split: candidate_split.sequence_parallel, [False])
        )
    lines = []
    for label, axis_of, values in axis_choices:
        for value in values:
            matching = [
                candidate for candidate in search.alternatives if axis_of(candidate.split) == value
            ]
            text = _compare_to_best(search, matching)
            if text:
                lines.append(f"{label}{'' if value is False else value}: {text}")
    return lines


def _neighboring_values(search: TrainingSearchResult, axis: str, value: int) -> list[object]:
    """Return the next smaller and the next larger value that the search has tried."""
    tried_values = {getattr(candidate.split, axis) for candidate in search.alternatives}
    smaller = max((setting for setting in tried_values if setting < value), default=None)
    larger = min((setting for setting in tried_values if setting > value), default=None)
    return [setting for setting in (smaller, larger) if setting is not None]


def _other_recompute(recompute: str) -> list[object]:
    return [kind for kind in ("none", "selective", "full") if kind != recompute]


def _compare_to_best(search: TrainingSearchResult, matching: Sequence[TrainingCandidate]) -> str:
    """Describe the speed of the fastest matching candidate that fits.

    If none fits, describe the least memory that a matching candidate needs.
    """
    best = search.best
    assert best is not None
    fitting = [candidate for candidate in matching if candidate.feasibility == "fits"]
    if fitting:
        fastest = min(fitting, key=lambda candidate: candidate.iteration_s)
        slower_percent = 100 * (fastest.iteration_s / best.iteration_s - 1)
        speed_text = f"{slower_percent:.0f} % slower" if slower_percent >= 1 else "as fast"
        return f"{speed_text} at best ({split_name(fastest.split)})"
    estimated = [candidate for candidate in matching if candidate.estimate is not None]
    if estimated:
        bytes_min = min(_total_bytes(candidate) for candidate in estimated)
        capacity = search.cluster.device.memory_bytes
        is_tight = any(candidate.feasibility == "tight" for candidate in estimated)
        tight_note = " (tight)" if is_tight else ""
        return f"needs at least {format_bytes(bytes_min)} of {format_bytes(capacity)}{tight_note}"
    return matching[0].reason if matching else ""


def _total_bytes(candidate: TrainingCandidate) -> int:
    assert candidate.estimate is not None
    return candidate.estimate.memory.total


# ----------------------------------------------------------------------------------------- remarks


def advice_lines(
    search: TrainingSearchResult, tokens: float | None, other_search: TrainingSearchResult | None
) -> list[str]:
    """Return remarks on the best candidate.

    `other_search` is the search for an adapter if `search` is for all parameters, and vice versa.
    """
    best, job = search.best, search.job
    assert best is not None and best.estimate is not None
    lines = []
    if tokens is not None or job.trainable == "all":
        lines.append(training_days_line(best.estimate, tokens or DEFAULT_TOKENS))
    lines.append(layout_line(search, best.split))
    if job.trainable == "all":
        lines.append(recompute_savings_line(job, best.split, search.cluster))
    if other_search is not None:
        lines += frozen_comparison(search, other_search)
    if best.split.gpus < search.cluster.gpus:
        idle_gpus = search.cluster.gpus - best.split.gpus
        lines.append(
            f"{idle_gpus:,} of {search.cluster.gpus:,} GPUs are idle: with a global batch of "
            f"{job.global_batch:,}, no split that fits and uses more GPUs is more than "
            f"{100 * TIE_FRACTION:.0f} % faster"
        )
    return [line for line in lines if line]


def training_days_line(estimate: TrainingEstimate, tokens: float) -> str:
    days_taken = tokens / estimate.tokens_per_s / DAY_S
    error = estimate.time_confidence.error
    return (
        f"{_format_token_count(tokens)} tokens take {format_number(days_taken)} days "
        f"({format_number(days_taken / (1 + error))} to "
        f"{format_number(days_taken * (1 + error))}), at "
        f"{format_number(estimate.tokens_per_s)} tokens/s"
    )


def layout_line(search: TrainingSearchResult, split: TrainingSplit) -> str:
    """Describe the placement of tensor and pipeline ranks over nodes."""
    cluster, job = search.cluster, search.job
    link_gb_per_s = cluster.device.link_bytes_per_s / 1e9
    network_gb_per_s = cluster.device.network_bytes_per_s / 1e9
    text = ""
    if split.tp > cluster.gpus_per_node:
        text = f"TP{split.tp} crosses nodes, at only {network_gb_per_s:.0f} GB/s"
    elif split.tp > 1:
        text = f"TP{split.tp} stays inside a node, with links of {link_gb_per_s:.0f} GB/s"
    if split.pp > 1 and split.tp * split.pp > cluster.gpus_per_node:
        bytes_sent = 2 * split.micro_batch * job.sequence * job.model.hidden_size / split.tp
        text += "; " if text else ""
        text += (
            f"PP{split.pp} crosses nodes, at {network_gb_per_s:.0f} GB/s, where a GPU sends only "
            f"{format_bytes(bytes_sent)} per micro-batch"
        )
    elif split.pp > 1:
        text = f"{text}; PP{split.pp} too" if text else f"PP{split.pp} stays inside a node"
    return text


def recompute_savings_line(job: TrainingJob, split: TrainingSplit, cluster: Cluster) -> str:
    """Describe the memory and time that sequence parallelism and selective recomputation save.

    Without tensor parallelism, the description is empty.
    """
    if split.tp == 1:
        return ""
    tp_only = _estimate_with(job, split, cluster, sequence_parallel=False, recompute="none")
    with_both = _estimate_with(job, split, cluster, sequence_parallel=True, recompute="selective")
    full_recompute = _estimate_with(job, split, cluster, sequence_parallel=False, recompute="full")
    sequence_parallel_only = _estimate_with(
        job, split, cluster, sequence_parallel=True, recompute="none"
    )
    reduction = tp_only.memory.activations / max(1, with_both.memory.activations)
    subject, best = "sequence parallelism and selective recomputation store", with_both
    if sequence_parallel_only.memory.activations == with_both.memory.activations:
        # Flash attention stores no scores, so selective recomputation saves nothing.
        subject = "with flash attention, sequence parallelism stores"
        best = sequence_parallel_only
    gain = 100 * (full_recompute.iteration_s / best.iteration_s - 1)
    text = (
        f"{subject} {format_bytes(best.memory.activations)} of activations per GPU instead of "
        f"{format_bytes(tp_only.memory.activations)} with TP alone: a factor of {reduction:.1f}"
    )
    gpus_per_node = cluster.gpus_per_node
    if split.tp < gpus_per_node and job.model.num_query_groups % gpus_per_node == 0:
        node_wide_split = replace(split, tp=gpus_per_node, dp=1)
        lightest_recompute: RecomputeMode = "selective" if best is with_both else "none"
        variants: tuple[tuple[bool, RecomputeMode], ...] = (
            (False, "none"),
            (True, lightest_recompute),
        )
        activation_bytes = [
            _estimate_with(
                job,
                node_wide_split,
                cluster,
                sequence_parallel=with_sequence_parallel,
                recompute=kind,
            ).memory.activations
            for with_sequence_parallel, kind in variants
        ]
        node_wide_reduction = activation_bytes[0] / max(1, activation_bytes[1])
        text += f" (at TP{gpus_per_node}: {node_wide_reduction:.1f})"
    return (
        f"{text}; a step takes {format_figure('iteration_s', best.iteration_s)}, "
        f"{gain:.0f} % faster than with full recomputation "
        f"({format_figure('iteration_s', full_recompute.iteration_s)})"
    )


def _estimate_with(
    job: TrainingJob,
    split: TrainingSplit,
    cluster: Cluster,
    *,
    sequence_parallel: bool,
    recompute: RecomputeMode,
) -> TrainingEstimate:
    changed = replace(
        split, sequence_parallel=sequence_parallel, recompute=recompute, recompute_layers=0
    )
    return estimate_training(job, changed, replace(cluster, gpus=changed.gpus))


def frozen_comparison(
    search: TrainingSearchResult, other_search: TrainingSearchResult
) -> list[str]:
    """Compare training an adapter of a frozen model with training all parameters."""
    frozen, full_search = (
        (search, other_search) if search.job.trainable == "adapter" else (other_search, search)
    )
    if frozen.best is None or frozen.best.estimate is None:
        return []
    split, estimate = frozen.best.split, frozen.best.estimate
    if search is full_search:
        assert full_search.best is not None
        gain = full_search.best.iteration_s / frozen.best.iteration_s
        return [
            f"training only an adapter (--trainable adapter) would use {split_name(split)} and be "
            f"{format_number(gain)} times as fast: frozen weights have no gradients and no "
            "optimizer state"
        ]
    lines = [
        "frozen weights have no gradients and no optimizer state: 2 bytes per parameter instead of "
        f"18, so the weights of the fullest GPU need {format_bytes(estimate.memory.weights)}; "
        + (
            "linear layers also store no inputs for weight gradients"
            if frozen.job.linears is None
            else "the gradients and moments of the adapter need "
            f"{format_bytes(estimate.memory.gradients + estimate.memory.optimizer)}"
        )
    ]
    if full_search.best is None:
        return [*lines, "training all parameters does not fit on these GPUs"]
    assert full_search.best.estimate is not None
    is_same_split = split_name(full_search.best.split) == split_name(split)
    split_text = (
        "would use the same split"
        if is_same_split
        else f"would use {split_name(full_search.best.split)}"
    )
    gain = full_search.best.iteration_s / frozen.best.iteration_s
    flops = full_search.best.estimate.model_flops / estimate.model_flops
    return [
        *lines,
        f"training all parameters {split_text}: "
        f"{format_bytes(full_search.best.estimate.memory.total)} per GPU instead of "
        f"{format_bytes(estimate.memory.total)}, a step of "
        f"{format_figure('iteration_s', full_search.best.iteration_s)} instead of "
        f"{format_figure('iteration_s', frozen.best.iteration_s)}",
        f"a step with frozen weights is {gain:.2f} times as fast: weight gradients are neither "
        f"computed (training all parameters takes {flops:.2f} times the FLOPs) nor reduced over "
        "the replicas",
    ]


# ---------------------------------------------------------------------------------- if nothing fits


def fit_advice_lines(search: TrainingSearchResult) -> list[str]:
    """Explain why no candidate fits, and suggest changes with which a candidate would fit."""
    job = search.job
    cluster = search.cluster
    space = search.space
    if space.narrowing_flags:
        unrestricted_search = search_training(job, cluster, _unrestricted_space(space))
        if unrestricted_search.best is not None:
            flags = ", ".join(space.narrowing_flags)
            flags_line = (
                f"nothing fits with {flags}; without these flags "
                f"{split_name(unrestricted_search.best.split)} fits"
            )
            return [flags_line, _binding_memory_line(search)]
    lines = [_binding_memory_line(search)]
    larger_cluster_split = _smallest_fitting_split(job, cluster, space)
    if larger_cluster_split is not None:
        lines.append(
            f"{larger_cluster_split.gpus:,} of these GPUs are enough, with "
            f"{split_name(larger_cluster_split)}"
        )
    larger_gpu_line = _larger_gpu_line(job, cluster, space)
    if larger_gpu_line:
        lines.append(larger_gpu_line)
    if job.trainable == "all":
        adapter_search = search_training(
            replace(job, trainable="adapter"), cluster, _unrestricted_space(space)
        )
        if adapter_search.best is not None:
            name = split_name(adapter_search.best.split)
            lines.append(f"training only an adapter (--trainable adapter) fits with {name}")
    if job.distributed_optimizer is not True and job.trainable == "all":
        distributed_search = search_training(
            replace(job, distributed_optimizer=True), cluster, _unrestricted_space(space)
        )
        if distributed_search.best is not None:
            name = split_name(distributed_search.best.split)
            lines.append(f"with --distributed-optimizer, {name} fits")
    if larger_cluster_split is None and not larger_gpu_line and job.sequence > 1024:
        lines.append(f"sequences shorter than {job.sequence:,} tokens need less memory")
    return lines


def _binding_memory_line(search: TrainingSearchResult) -> str:
    estimated = [candidate for candidate in search.alternatives if candidate.estimate is not None]
    if not estimated:
        return search.alternatives[0].reason if search.alternatives else "there is no split to try"
    smallest = min(estimated, key=_total_bytes)
    assert smallest.estimate is not None
    memory = smallest.estimate.memory
    state_bytes = memory.weights + memory.gradients + memory.optimizer
    if memory.weights > memory.capacity:
        problem = "weights do not fit"
    elif state_bytes > search.space.memory_fraction * memory.capacity:
        problem = "weights, gradients and optimizer do not fit"
    else:
        problem = "activations do not fit, even with full recomputation"
    return f"{problem}: {split_name(smallest.split)} needs {format_ledger(memory)}"


def _unrestricted_space(space: SearchSpace) -> SearchSpace:
    return SearchSpace(memory_fraction=space.memory_fraction, internode_tp=space.internode_tp)


def _smallest_fitting_split(
    job: TrainingJob, cluster: Cluster, space: SearchSpace
) -> TrainingSplit | None:
    """Return the best split on the smallest larger cluster on which the job fits.

    The number of GPUs of `cluster` is doubled until the job fits, and then reduced by bisection.
    Above 64 GPUs, the bisection stops when its interval is at most one node; the cluster found may
    then have up to `gpus_per_node` - 1 GPUs too many. Return None if the job does not fit on the
    first doubled number that is at least GPUS_MAX.
    """
    low = cluster.gpus
    high = cluster.gpus
    best: TrainingCandidate | None = None
    while high < GPUS_MAX and best is None:
        low, high = high, high * 2
        best = search_training(job, replace(cluster, gpus=high), _unrestricted_space(space)).best
    if best is None:
        return None
    while high - low > (cluster.gpus_per_node if high > 64 else 1):
        middle = (low + high) // 2
        search = search_training(job, replace(cluster, gpus=middle), _unrestricted_space(space))
        if search.best is not None:
            high, best = middle, search.best
        else:
            low = middle
    return best.split


def _larger_gpu_line(job: TrainingJob, cluster: Cluster, space: SearchSpace) -> str:
    """Name the GPU model with the least memory on which the job fits.

    Only GPU models with more memory than the GPUs of `cluster` are tried. Return "" if the job fits
    on none of them.
    """
    for device in sorted(DEVICES.values(), key=lambda device_choice: device_choice.memory_bytes):
        if device.memory_bytes > cluster.device.memory_bytes:
            search = search_training(
                job, replace(cluster, device=device), _unrestricted_space(space)
            )
            if search.best is not None:
                name = split_name(search.best.split)
                return f"{cluster.gpus:,} {device.name} are enough, with {name}"
    return ""


def default_batch(parameters: int, trainable: str, gpus: int) -> int:
    """Return the usual global batch for a model of this size, rounded to a multiple of a unit.

    The unit is the number of GPUs with its power of two limited to 256: 48 for 48 GPUs (3 x 16),
    and 768 for 3072 GPUs (3 x 1024). The replicas can then usually divide the batch evenly.
    """
    # (maximum number of parameters, batch).
    batch_of_size = ((1e9, 256), (4e9, 1024), (300e9, 2048))
    usual_batch = next(
        (batch for parameters_max, batch in batch_of_size if parameters <= parameters_max), 3072
    )
    if trainable == "adapter":
        usual_batch = ADAPTER_BATCH
    odd_factor = gpus
    while odd_factor % 2 == 0:
        odd_factor //= 2
    unit = odd_factor * min(gpus // odd_factor, 256)
    # If the unit exceeds the usual batch, its power of two is reduced until the unit is at most the
    # usual batch. If even the odd factor exceeds the usual batch, the unit is not changed.
    fitting_units = [
        divisor
        for divisor in divisors(unit)
        if divisor % odd_factor == 0 and divisor <= usual_batch
    ]
    unit = max(fitting_units, default=unit)
    return max(1, round(usual_batch / unit)) * unit


def _format_token_count(count: float) -> str:
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= power:
            return f"{format_number(count / power)}{letter}"
    return format_number(count)
