"""Serving plan: turns a search result into rows, explanations, a command and serve_config.yaml.

`preamble serve --config` accepts serve_config.yaml unchanged. If no candidate fits, the plan
explains the obstacle: the memory for weights or KV cache, the request rate, or the limits of
latency and throughput. The search itself is in `planning.inference.search`. The module does not
import torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import yaml

from gpt.config import GPTConfig
from gpt.costs.linear_adapter import describe_spec
from planning.figures import format_bytes, format_figure, format_number, label
from planning.inference.adapter_memory import ServedAdapters, server_memory_mb
from planning.inference.estimate import ServingSplit, serving_memory
from planning.inference.kv_capacity import kv_tokens_for_requests, requests_that_fit
from planning.inference.model_split import ModelSplit, model_splits
from planning.inference.requirements import Requirements
from planning.inference.search import (
    ServingCandidate,
    ServingSearchResult,
    search_serving,
)
from planning.inference.service_levels import LATENCIES, LimitCheck, Objective
from planning.plan import SETTINGS_FILES, Axis, Plan, Row, SettingValue
from serving.memory_budget import ADAPTER_MEMORY_MB, ADAPTER_ROWS_MAX

ALTERNATIVES_MAX = 5  # Maximum number of TP/PP splits that `Plan.why_not` compares with the best.
GROUPS_MAX = 6  # Maximum number of curves in a plot with one curve per number of GPUs.
SETTINGS_FILE = SETTINGS_FILES["serving"]
OBJECTIVE_TEXTS: Mapping[Objective, str] = {
    "throughput": "the most tokens per second per GPU",
    "latency": "the shortest duration of a request",
    "gpus": "the fewest GPUs that satisfy the limits",
}


def plan_serving(requirements: Requirements, path: str = "MODEL") -> Plan:
    """Search for the best configuration, and return the plan with explanations.

    `path` is the model's path in the settings file.
    """
    search = search_serving(requirements)
    x, y = _axes(requirements)
    plan = Plan(
        title="serving",
        request=list(_request_lines(requirements, path)),
        objective=OBJECTIVE_TEXTS[requirements.objective],
        rows=_rows(search),
        x=x,
        y=y,
        why_not=list(_alternative_lines(search)),
        advice=list(_advice(search)),
    )
    return finalize_plan(plan, requirements, path)


def finalize_plan(plan: Plan, requirements: Requirements, path: str) -> Plan:
    """Return the plan with the binding limits, the command and the settings file of its best row.

    Without a best row, these fields are empty.
    """
    best = plan.best
    if best is None:
        return replace(plan, binding=[], command="", settings_yaml="")
    settings = server_settings(best, requirements, path)
    replicas = int(best.settings["replicas"])
    command = f"preamble serve --config {SETTINGS_FILE}"
    if replicas > 1:
        gpus_per_replica = ModelSplit.of_settings(best.settings).ranks
        command += (
            f"    # {replicas} replicas on {gpus_per_replica} GPUs each, behind a load balancer"
        )
    text = settings_header(best) + yaml.safe_dump(settings, sort_keys=False)
    return replace(
        plan, binding=list(_binding(best, requirements)), command=command, settings_yaml=text
    )


def settings_header(best: Row) -> str:
    """Return the comment lines at the top of a settings file."""
    return "".join(f"# {line}\n" for line in (best.name, *_figure_comments(best)))


def server_settings(row: Row, requirements: Requirements, path: str) -> dict[str, SettingValue]:
    """Return the settings of one replica, for `preamble serve --config`."""
    server_fields = {name: value for name, value in row.settings.items() if name != "replicas"}
    settings: dict[str, SettingValue] = {
        "model": path,
        "device": requirements.device,
        "dtype": requirements.dtype,
        **server_fields,
    }
    adapter_rows = requirements.workload.adapters * requirements.workload.virtual_tokens
    if adapter_rows > ADAPTER_ROWS_MAX:  # The server's default is not enough.
        settings["adapter_rows_max"] = adapter_rows
    return settings


# -------------------------------------------------------------------------------------------- rows


def split_name(split: ServingSplit, *, sizes_only: bool = False) -> str:
    """Return the name of a split for display, such as TP4 PP1 x2 batch 64 steps 512/15 ms.

    In this example there are 2 replicas, `running_requests_max` is 64, `step_tokens_max` is 512,
    and `prefill_stall_ms_max` is 15.
    """
    if sizes_only:
        return split.model_split.name
    stall = f"{split.prefill_stall_ms_max:g}"
    return " ".join(
        [
            split.model_split.name,
            f"x{split.replicas}",
            f"batch {split.running_requests_max}",
            f"steps {split.step_tokens_max}/{stall} ms",
        ]
    )


def _rows(search: ServingSearchResult) -> list[Row]:
    """Return the rows of a plan, each with its group in plots.

    The rows of a group have the same number of GPUs. If this results in more than GROUPS_MAX
    groups, the rows of a group have the same number of GPUs per replica instead.
    """
    gpu_counts = {
        candidate.split.gpus
        for candidate in search.candidates
        if candidate.feasibility != "rejected"
    }
    by_replica_size = len(gpu_counts) > GROUPS_MAX
    return [
        _row(search.requirements, candidate, by_replica_size=by_replica_size)
        for candidate in search.candidates
    ]


def _group(requirements: Requirements, split: ServingSplit, *, by_replica_size: bool) -> str:
    if requirements.on_cpu:
        return ""
    count = split.model_split.ranks if by_replica_size else split.gpus
    return f"{count} GPU{'s' if count > 1 else ''}{' per replica' if by_replica_size else ''}"


def _row(requirements: Requirements, candidate: ServingCandidate, *, by_replica_size: bool) -> Row:
    split, estimate = candidate.split, candidate.estimate
    settings: dict[str, SettingValue] = {
        "tp": split.tp,
        "pp": split.pp,
        **({"ep": split.ep} if split.ep > 1 else {}),
        "replicas": split.replicas,
        "running_requests_max": split.running_requests_max,
        "step_tokens_max": split.step_tokens_max,
        "prefill_stall_ms_max": split.prefill_stall_ms_max,
    }
    if split.kv_tokens is not None:
        settings["kv_tokens_max"] = split.kv_tokens
    memory_mb = server_memory_mb(split.adapter_memory_mb)
    if memory_mb > ADAPTER_MEMORY_MB:  # The server's default is not enough.
        settings["adapter_memory_mb"] = memory_mb
    figures = {name: value for name, value in candidate.figures.items() if math.isfinite(value)}
    return Row(
        name=split_name(split, sizes_only=candidate.covers_model_split),
        feasibility=candidate.feasibility,
        settings=settings,
        figures=figures,
        reason=candidate.reason,
        confidence=estimate.confidence if estimate is not None else None,
        group=_group(requirements, split, by_replica_size=by_replica_size),
        memory=candidate.memory,
    )


def _axes(requirements: Requirements) -> tuple[Axis, Axis]:
    """Return the axes of a plot: x is a latency, y is the throughput per GPU.

    The latency is the first of ITL, request duration and TTFT (95th percentiles) that has a limit.
    If none has a limit, the latency is the request duration for the objective "latency", and ITL
    for the other objectives.
    """
    default_figure = "request_ms_p95" if requirements.objective == "latency" else "itl_ms_p95"
    latencies = ("itl_ms_p95", "request_ms_p95", "ttft_ms_p95")
    limited_latencies = [
        name for name in latencies if getattr(requirements.limits, name) is not None
    ]
    figure = limited_latencies[0] if limited_latencies else default_figure
    x = Axis(figure, label(figure), "low", requirements.limits.limit_with_margin(figure))
    return x, Axis("tokens_per_s_per_gpu", label("tokens_per_s_per_gpu"), "high")


# ------------------------------------------------------------------------------------ explanations


def _request_lines(requirements: Requirements, path: str) -> Iterator[str]:
    workload = requirements.workload
    limits = requirements.limits
    cluster = requirements.cluster
    hardware_text = "this CPU" if requirements.on_cpu else f"{cluster.gpus} x {cluster.device.name}"
    yield f"{path} in {requirements.dtype}, on {hardware_text}"
    load_texts = []
    for direction, lengths in (
        ("input", workload.input_tokens),
        ("output", workload.output_tokens),
    ):
        p95_text = f" (p95 {format_number(lengths.p95)})" if lengths.p95 > lengths.mean else ""
        load_texts.append(f"{direction} {format_number(lengths.mean)} tokens{p95_text}")
    adapters = workload.served_adapters
    if adapters is not None:
        plural = "s" if adapters.count > 1 else ""
        load_texts.append(f"{adapters.count} adapter{plural}: {describe_spec(adapters.spec)}")
    elif workload.adapters:
        load_texts.append(
            f"{workload.adapters} adapters of {workload.virtual_tokens} virtual tokens"
        )
    if requirements.saturate:
        load_texts.append("saturated: each replica runs its maximum number of requests")
    elif workload.request_rate is not None:
        load_texts.append(f"{workload.request_rate:g} requests/s")
    else:
        load_texts.append(f"{workload.concurrency} requests at once")
    yield ", ".join(load_texts)
    limit_texts = []
    for name in LATENCIES:
        limit = getattr(limits, name)
        if limit is not None:
            limit_texts.append(f"{label(name)} {format_figure(name, limit)}")
    if limits.tokens_per_s_min is not None:
        limit_texts.append(f"at least {format_number(limits.tokens_per_s_min)} tokens/s")
    if limits.gpus_max is not None:
        limit_texts.append(f"at most {limits.gpus_max} GPUs")
    if limit_texts:
        margin = f"{100 * limits.latency_margin:g} %"
        yield f"limits: {', '.join(limit_texts)}; safety margin {margin} of each latency limit"


def _figure_comments(best: Row) -> Iterator[str]:
    source = "measured" if best.measured else "predicted"
    figures = {**best.figures, **best.measured}
    shown_figures = ("tokens_per_s", "itl_ms_p95", "ttft_ms_p95", "request_ms_p95", "memory_bytes")
    figure_texts = [
        f"{label(name)} {format_figure(name, figures[name])}"
        for name in shown_figures
        if name in figures
    ]
    yield f"{source}: {', '.join(figure_texts)}"
    if best.confidence is not None:
        yield f"[{best.confidence}]"


def _binding(best: Row, requirements: Requirements) -> Iterator[str]:
    """Yield each limit with its slack, smallest slack first.

    Also yield the size of the KV cache if it holds fewer than two full batches of average requests.
    """
    figures = {**best.figures, **best.measured}
    checks = sorted(requirements.limits.check_figures(figures), key=lambda check: check.slack)
    for check in checks:
        yield f"{check} ({100 * check.slack:.0f} % left)"
    batch = int(best.settings["running_requests_max"])
    tokens = int(best.settings.get("kv_tokens_max", 0))
    kv_requests_max = requests_that_fit(
        requirements.model, tokens, requirements.request_tokens_mean
    )
    if kv_requests_max < 2 * batch:
        yield (
            f"KV cache: {tokens:,} tokens, enough for {kv_requests_max} requests of "
            f"{requirements.request_tokens_mean:,} tokens"
        )
    elif not checks:
        yield (
            "no limit is set, and the KV cache holds at least twice the requests that run at once"
        )


def _alternative_lines(search: ServingSearchResult) -> Iterator[str]:
    """Yield why other parallel sizes are worse than those of the best candidate.

    Each split is represented by its own best candidate. At most ALTERNATIVES_MAX splits are
    explained.
    """
    best = search.best
    if best is None:
        return
    explained_splits = {best.split.model_split}
    for candidate in search.alternatives:
        model_split = candidate.split.model_split
        if model_split in explained_splits or len(explained_splits) > ALTERNATIVES_MAX:
            continue
        explained_splits.add(model_split)
        name = split_name(candidate.split, sizes_only=candidate.estimate is None)
        yield f"{name}: {_disadvantage(candidate, best, search.requirements)}"


def _disadvantage(
    candidate: ServingCandidate, best: ServingCandidate, requirements: Requirements
) -> str:
    if candidate.reason:
        return candidate.reason
    prefers_fewest_gpus = (
        requirements.objective == "gpus" or requirements.workload.request_rate is not None
    )
    by_latency = requirements.objective == "latency" or (
        prefers_fewest_gpus and candidate.split.gpus == best.split.gpus
    )
    figure = "request_ms_p95" if by_latency else "tokens_per_s_per_gpu"
    amount, best_amount = candidate.figures[figure], best.figures[figure]
    text = f"{label(figure)} {format_figure(figure, amount)}"
    if best_amount and math.isfinite(amount):
        difference_percent = 100 * (amount / best_amount - 1)
        is_different = abs(difference_percent) >= 1
        text += f", {difference_percent:+.0f} %" if is_different else ", about the same"
    if candidate.split.gpus != best.split.gpus:
        text += f", on {candidate.split.gpus} GPUs"
    return text


# --------------------------------------------------------------------------- if nothing fits


def _advice(search: ServingSearchResult) -> Iterator[str]:
    """If no candidate fits, yield the obstacle, and changes with which a candidate would fit.

    If a candidate fits, the only advice is a warning about tight memory.
    """
    if search.best is not None:
        if search.best.memory is not None and search.best.memory.verdict != "fits":
            yield "memory is tight: run the best candidates (--measure) before you rely on the plan"
        yield from _adapter_advice(search.requirements, search.best.split)
        return
    simulated = [candidate for candidate in search.alternatives if candidate.estimate is not None]
    if not simulated:
        overloaded = [candidate for candidate in search.alternatives if candidate.gpus_needed]
        yield from _capacity_advice(overloaded) if overloaded else _memory_advice(search)
    else:
        yield from _limit_advice(search.requirements, simulated)


def _adapter_advice(requirements: Requirements, split: ServingSplit) -> Iterator[str]:
    """Yield the size of the linear adapters, and the memory that holds them."""
    if requirements.workload.served_adapters is not None:
        yield adapter_memory_text(
            requirements.model, requirements.dtype, split, requirements.workload.served_adapters
        )


def adapter_memory_text(
    model: GPTConfig, dtype: str, split: ServingSplit, adapters: ServedAdapters
) -> str:
    """Return the size of an adapter, and how many the planned and larger memories hold."""
    sizes = model, dtype, split.model_split
    memory_mb = server_memory_mb(split.adapter_memory_mb)
    resident = adapters.resident(split.running_requests_max)
    capacity = adapters.capacity(*sizes, memory_mb)
    text = (
        f"an adapter takes {format_bytes(adapters.rank_bytes(*sizes))} on each rank: "
        f"adapter_memory_mb {memory_mb} holds {capacity:,}, and running requests use up to "
        f"{resident:,}"
    )
    if capacity < adapters.count:
        all_mb = adapters.memory_mb(*sizes, adapters.count)
        text += f"; all {adapters.count:,} adapters need {all_mb}"
    return text


def _memory_advice(search: ServingSearchResult) -> Iterator[str]:
    """Yield advice for a model whose weights, or the KV cache of one request, fit in no split."""
    requirements = search.requirements
    weights_too_large = [
        candidate for candidate in search.alternatives if "weights take" in candidate.reason
    ]
    smallest_split = _smallest_fitting_split(requirements)
    if len(weights_too_large) == len(search.alternatives):
        if weights_too_large:
            last = weights_too_large[-1]
            yield f"{split_name(last.split, sizes_only=True)}: {last.reason}"
    else:
        largest_candidate = max(
            (candidate for candidate in search.alternatives if candidate not in weights_too_large),
            key=lambda candidate: candidate.split.model_split.ranks,
        )
        name = split_name(largest_candidate.split, sizes_only=True)
        yield f"{name}: {largest_candidate.reason}; shorter requests would fit"
    if smallest_split is None:
        yield "no TP/PP split of this model fits on GPUs of this type; use GPUs with more memory"
    else:
        yield (
            f"the smallest split that fits is {smallest_split.name}, with {smallest_split.ranks} "
            f"GPUs, but only {requirements.gpus} may be used"
        )


def _smallest_fitting_split(requirements: Requirements) -> ModelSplit | None:
    """Return the smallest split whose memory holds the weights and one request.

    The split may need more GPUs than are available. Return None if no split is large enough.
    """
    node, layers = requirements.cluster.gpus_per_node, requirements.model.num_layers
    for model_split in model_splits(requirements.model, node, node * layers, layers):
        kv_tokens = kv_tokens_for_requests(requirements.model, 1, requirements.request_tokens_p95)
        split = ServingSplit(
            **model_split._asdict(),
            running_requests_max=1,
            kv_tokens=kv_tokens,
            adapter_memory_mb=requirements.adapter_memory_mb(model_split, 1),
        )
        ledger, _ = serving_memory(
            requirements.model,
            requirements.dtype,
            split,
            requirements.cluster,
            on_cpu=requirements.on_cpu,
        )
        if ledger.total <= requirements.limits.usable_memory_share * ledger.capacity:
            return model_split
    return None


def _capacity_advice(overloaded: Sequence[ServingCandidate]) -> Iterator[str]:
    """Yield advice for a request rate that exceeds the capacity of all GPUs."""
    yield min(overloaded, key=lambda candidate: candidate.gpus_needed).reason
    yield "reduce the request rate, or use more GPUs"


def _limit_advice(
    requirements: Requirements, candidates: Sequence[ServingCandidate]
) -> Iterator[str]:
    """Yield advice about each limit that no candidate satisfies.

    If there is no such limit, yield advice about the combination of all limits.
    """
    best_checks: dict[str, tuple[LimitCheck, ServingCandidate]] = {}
    for candidate in candidates:
        for check in requirements.limits.check_figures(candidate.figures):
            if check.figure not in best_checks or check.slack > best_checks[check.figure][0].slack:
                best_checks[check.figure] = (check, candidate)
    impossible = [
        (check, candidate) for check, candidate in best_checks.values() if check.slack < 0
    ]
    for check, candidate in impossible:
        if check.is_maximum:
            yield _unreachable_limit_text(requirements, check, candidate)
        else:
            yield from _replicas_needed(requirements, check, candidate)
    if not impossible:
        nearest = candidates[0]
        yield (
            "each limit is satisfied by a candidate, but no candidate satisfies all limits; the "
            f"nearest candidate, {split_name(nearest.split)}, is rejected: {nearest.reason}"
        )
        yield "relax the violated limit, or reduce the load"


def _unreachable_limit_text(
    requirements: Requirements, check: LimitCheck, candidate: ServingCandidate
) -> str:
    assert candidate.estimate is not None
    possible_limit = check.value / (1 - requirements.limits.latency_margin)
    text = (
        f"the lowest {label(check.figure)} is {format_figure(check.figure, check.value)} "
        f"({split_name(candidate.split)}), and the limit minus its margin is "
        f"{format_figure(check.figure, check.limit)}; a limit of "
        f"{format_figure(check.figure, math.ceil(possible_limit))} is possible"
    )
    if check.figure.startswith("itl") and candidate.memory is not None:
        read_ms = 1e3 * candidate.memory.weights / requirements.cluster.device.memory_bytes_per_s
        text += f"; reading the weights alone takes {format_figure('itl_ms', read_ms)}"
    return text


def _replicas_needed(
    requirements: Requirements, check: LimitCheck, candidate: ServingCandidate
) -> Iterator[str]:
    tokens_per_s_per_replica = check.value / candidate.split.replicas
    if tokens_per_s_per_replica <= 0:
        return
    replicas = math.ceil(check.limit / tokens_per_s_per_replica)
    gpus = replicas * candidate.split.model_split.ranks
    yield (
        f"at most {format_number(check.value)} tokens/s are possible "
        f"({split_name(candidate.split)}), but the limits require at least "
        f"{format_number(check.limit)}; this needs {replicas} replicas with {gpus} GPUs and "
        f"proportionally more requests, and only {requirements.gpus} GPUs may be used"
    )
