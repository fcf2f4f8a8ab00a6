"""The plan for serving: what the search has found, in rows and in words, and the settings file.

The file is one that `preamble serve --config` starts from unchanged. Where nothing fits, the limit
that stands in the way is named, in the order in which one would lift them: weights, keys and
values, latency, throughput. Nothing is searched here. No torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import yaml

from planning.figures import label, number, say
from planning.inference.estimate import ADAPTER_ROWS, ServingSplit, serving_memory
from planning.inference.objective import Wish
from planning.inference.search import Candidate, Found, search_serving, splits
from planning.inference.service_levels import LATENCIES, Held, Objective
from planning.plan import SETTINGS_FILES, Axis, Cell, Plan, Row

WHY_NOT_MAX = 5
GROUPS_MAX = 6
SETTINGS = SETTINGS_FILES["serving"]
OBJECTIVE_WORDS: Mapping[Objective, str] = {
    "throughput": "as many tokens a second from each GPU as can be",
    "latency": "requests that end as soon as can be",
    "gpus": "as few GPUs as keep the limits",
}


def plan_serving(wish: Wish, path: str = "MODEL") -> Plan:
    """`path` is the model's in the settings file, where a placeholder is one to fill in."""
    found = search_serving(wish)
    plan = Plan(
        "serving",
        list(_asked(wish, path)),
        OBJECTIVE_WORDS[wish.objective],
        _rows(found),
        *_axes(wish),
        why_not=list(_why_not(found)),
        advice=list(_advice(found)),
    )
    return settle(plan, wish, path)


def settle(plan: Plan, wish: Wish, path: str) -> Plan:
    """With what binds, the command and the settings file of the row that is best."""
    best = plan.best
    if best is None:
        return replace(plan, binding=[], command="", settings_yaml="")
    settings = server_settings(best, wish, path)
    replicas = int(best.settings["replicas"])
    command = f"preamble serve --config {SETTINGS}"
    if replicas > 1:
        each = int(best.settings["tp"]) * int(best.settings["pp"])
        command += f"    # {replicas} times, on {each} GPUs each, behind one address"
    text = head(best) + yaml.safe_dump(settings, sort_keys=False)
    return replace(plan, binding=list(_binding(best, wish)), command=command, settings_yaml=text)


def head(best: Row) -> str:
    """The comments above its settings."""
    return "".join(f"# {line}\n" for line in (best.name, *_predictions(best)))


def server_settings(row: Row, wish: Wish, path: str) -> dict[str, Cell]:
    """What `preamble serve --config` reads: one replica."""
    kept = {name: value for name, value in row.settings.items() if name != "replicas"}
    settings: dict[str, Cell] = {
        "model": path,
        "device": wish.device,
        "dtype": wish.dtype,
        **kept,
    }
    rows = wish.workload.adapters * wish.workload.virtual_tokens
    if rows > ADAPTER_ROWS:
        settings["adapter_rows_max"] = rows
    return settings


# -------------------------------------------------------------------------------------------- rows


def name_of(split: ServingSplit, *, whole: bool = False) -> str:
    """As people say it."""
    words = [f"TP{split.tp}", f"PP{split.pp}"]
    if whole:
        return " ".join(words)
    stall = f"{split.prefill_stall_ms_max:g}"
    return " ".join(
        [
            *words,
            f"x{split.replicas}",
            f"batch {split.running_requests_max}",
            f"steps {split.step_tokens_max}/{stall} ms",
        ]
    )


def _rows(found: Found) -> list[Row]:
    """A curve for each number of GPUs; where there are too many, for each size of a copy."""
    usable = {one.split.gpus for one in found.all if one.standing != "rejected"}
    copies = len(usable) > GROUPS_MAX
    return [_row(found.wish, one, copies=copies) for one in found.all]


def _group(wish: Wish, split: ServingSplit, *, copies: bool) -> str:
    if wish.on_cpu:
        return ""
    count = split.tp * split.pp if copies else split.gpus
    return f"{count} GPU{'s' if count > 1 else ''}{' a copy' if copies else ''}"


def _row(wish: Wish, one: Candidate, *, copies: bool) -> Row:
    split, estimate = one.split, one.estimate
    settings: dict[str, Cell] = {
        "tp": split.tp,
        "pp": split.pp,
        "replicas": split.replicas,
        "running_requests_max": split.running_requests_max,
        "step_tokens_max": split.step_tokens_max,
        "prefill_stall_ms_max": split.prefill_stall_ms_max,
    }
    if split.kv_tokens is not None:
        settings["kv_tokens_max"] = split.kv_tokens
    figures = {name: value for name, value in one.figures.items() if math.isfinite(value)}
    return Row(
        name_of(split, whole=one.whole),
        one.standing,
        settings,
        figures,
        reason=one.reason,
        trust=estimate.trust if estimate is not None else None,
        group=_group(wish, split, copies=copies),
        memory=one.memory,
    )


def _axes(wish: Wish) -> tuple[Axis, Axis]:
    """The latency that matters, and what is made of it."""
    usual = "request_ms_p95" if wish.objective == "latency" else "itl_ms_p95"
    ranked = ("itl_ms_p95", "request_ms_p95", "ttft_ms_p95")
    limited = [name for name in ranked if getattr(wish.limits, name) is not None]
    figure = limited[0] if limited else usual
    x = Axis(figure, label(figure), "low", wish.limits.within(figure))
    return x, Axis("tokens_per_s_per_gpu", label("tokens_per_s_per_gpu"), "high")


# ------------------------------------------------------------------------------------------- words


def _asked(wish: Wish, path: str) -> Iterator[str]:
    asked, limits, cluster = wish.workload, wish.limits, wish.cluster
    where = "this CPU" if wish.on_cpu else f"{cluster.gpus} x {cluster.device.name}"
    yield f"{path} in {wish.dtype}, on {where}"
    lengths = [
        f"{what} {number(of.mean)} tokens"
        + (f" (p95 {number(of.p95)})" if of.p95 > of.mean else "")
        for what, of in (("input", asked.input_tokens), ("output", asked.output_tokens))
    ]
    if asked.adapters:
        lengths.append(f"{asked.adapters} adapters of {asked.virtual_tokens} virtual tokens")
    if wish.fill:
        load = "as many requests at once as run"
    elif asked.request_rate is not None:
        load = f"{asked.request_rate:g} requests/s"
    else:
        load = f"{asked.concurrency} requests at once"
    yield ", ".join([*lengths, load])
    held = [
        f"{label(name)} {say(name, limit)}"
        for name in LATENCIES
        if (limit := getattr(limits, name)) is not None
    ]
    if limits.tokens_per_s_min is not None:
        held.append(f"at least {number(limits.tokens_per_s_min)} tokens/s")
    if limits.gpus_max is not None:
        held.append(f"at most {limits.gpus_max} GPUs")
    if held:
        margin = f"{100 * limits.latency_margin:g} %"
        yield f"limits: {', '.join(held)}; {margin} of a latency is kept as a margin"


def _predictions(best: Row) -> Iterator[str]:
    measured = bool(best.measured)
    figures = {**best.figures, **best.measured}
    shown = ("tokens_per_s", "itl_ms_p95", "ttft_ms_p95", "request_ms_p95", "memory_bytes")
    told = [f"{label(name)} {say(name, figures[name])}" for name in shown if name in figures]
    yield f"{'measured' if measured else 'predicted'}: {', '.join(told)}"
    if best.trust is not None:
        yield f"[{best.trust}]"


def _binding(best: Row, wish: Wish) -> Iterator[str]:
    """The limit with the least room first; else what keeps the batch from growing."""
    figures = {**best.figures, **best.measured}
    held = sorted(wish.limits.held(figures), key=lambda one: one.slack)
    for one in held:
        yield f"{one}, {100 * one.slack:.0f} % left"
    batch = int(best.settings["running_requests_max"])
    tokens = int(best.settings.get("kv_tokens_max", 0))
    most = tokens // wish.usual
    if most < 2 * batch:
        yield f"keys and values: memory for {tokens:,} tokens, {most} requests of {wish.usual:,}"
    elif not held:
        yield "no limit is set; more requests at once would gain nothing, or are not asked for"


def _why_not(found: Found) -> Iterator[str]:
    """The best of each other split, and what speaks against it."""
    best = found.best
    if best is None:
        return
    seen = {(best.split.tp, best.split.pp)}
    for one in found.others:
        pair = (one.split.tp, one.split.pp)
        if pair in seen or len(seen) > WHY_NOT_MAX:
            continue
        seen.add(pair)
        name = name_of(one.split, whole=one.estimate is None)
        yield f"{name}: {_against(one, best, found.wish)}"


def _against(one: Candidate, best: Candidate, wish: Wish) -> str:
    if one.reason:
        return one.reason
    few = wish.objective == "gpus" or wish.workload.request_rate is not None
    quick = wish.objective == "latency" or (few and one.split.gpus == best.split.gpus)
    figure = "request_ms_p95" if quick else "tokens_per_s_per_gpu"
    here, there = one.figures[figure], best.figures[figure]
    words = f"{label(figure)} {say(figure, here)}"
    if there and math.isfinite(here):
        off = 100 * (here / there - 1)
        words += f", {off:+.0f} %" if abs(off) >= 1 else ", alike"
    if one.split.gpus != best.split.gpus:
        words += f", on {one.split.gpus} GPUs"
    return words


# ------------------------------------------------------------------------- where there is none


def _advice(found: Found) -> Iterator[str]:
    """What stands in the way first, and what would make it fit."""
    if found.best is not None:
        if found.best.memory is not None and found.best.memory.verdict != "fits":
            yield "memory is tight: have it run once (--measure) before you rely on it"
        return
    played = [one for one in found.others if one.estimate is not None]
    if not played:
        crowded = [one for one in found.others if one.gpus_needed]
        yield from _too_slow(crowded) if crowded else _no_room(found)
    else:
        yield from _floors(found.wish, played)


def _no_room(found: Found) -> Iterator[str]:
    """Nothing holds the weights, or nothing holds a request's keys and values beside them."""
    wish = found.wish
    weights = [one for one in found.others if "weights take" in one.reason]
    least = _smallest(wish)
    if len(weights) == len(found.others):
        largest = weights[-1] if weights else None
        if largest is not None:
            yield f"{name_of(largest.split, whole=True)}: {largest.reason}"
    else:
        roomy = max(
            (one for one in found.others if one not in weights),
            key=lambda one: one.split.tp * one.split.pp,
        )
        yield f"{name_of(roomy.split, whole=True)}: {roomy.reason}; shorter requests would fit"
    if least is None:
        yield "no split of this model over such GPUs holds it; take GPUs with more memory"
    else:
        tp, pp = least
        yield (
            f"TP{tp} PP{pp}, {tp * pp} GPUs, is the smallest split that holds it, and "
            f"{wish.gpus} may be used"
        )


def _smallest(wish: Wish) -> tuple[int, int] | None:
    """The fewest devices that hold the weights and one request, however many there are."""
    node, layers = wish.cluster.gpus_per_node, wish.model.num_layers
    for tp, pp in splits(wish.model, node, node * layers, layers):
        split = ServingSplit(tp, pp, 1, 1, kv_tokens=wish.longest)
        held, _ = serving_memory(wish.model, wish.dtype, split, wish.cluster, on_cpu=wish.on_cpu)
        if held.total <= wish.limits.memory_share * held.capacity:
            return tp, pp
    return None


def _too_slow(refused: Sequence[Candidate]) -> Iterator[str]:
    """Requests come faster than all replicas there is room for can answer."""
    yield min(refused, key=lambda one: one.gpus_needed).reason
    yield "fewer requests a second, or more GPUs, would do"


def _floors(wish: Wish, played: Sequence[Candidate]) -> Iterator[str]:
    """Which limit nobody keeps; else which ones nobody keeps together."""
    floors: dict[str, tuple[Held, Candidate]] = {}
    for one in played:
        for held in wish.limits.held(one.figures):
            if held.figure not in floors or held.slack > floors[held.figure][0].slack:
                floors[held.figure] = (held, one)
    impossible = [(held, one) for held, one in floors.values() if held.slack < 0]
    for held, one in impossible:
        if held.most:
            yield _floor(wish, held, one)
        else:
            yield from _replicas_needed(wish, held, one)
    if not impossible:
        nearest = played[0]
        yield f"each limit is kept by some, and no candidate keeps all; {nearest.reason} is nearest"
        yield f"that is {name_of(nearest.split)}; raise that limit, or lower the load"


def _floor(wish: Wish, held: Held, one: Candidate) -> str:
    assert one.estimate is not None
    limit = held.value / (1 - wish.limits.latency_margin)
    words = (
        f"no candidate has {label(held.figure)} under {say(held.figure, held.value)} "
        f"({name_of(one.split)}), and the limit is {say(held.figure, held.limit)} after the "
        f"margin; {say(held.figure, math.ceil(limit))} could be kept"
    )
    if held.figure.startswith("itl") and one.memory is not None:
        read_ms = 1e3 * one.memory.weights / wish.cluster.device.bandwidth_bytes
        words += f"; reading the weights alone takes {say('itl_ms', read_ms)}"
    return words


def _replicas_needed(wish: Wish, held: Held, one: Candidate) -> Iterator[str]:
    each = held.value / one.split.replicas
    if each <= 0:
        return
    replicas = math.ceil(held.limit / each)
    gpus = replicas * one.split.tp * one.split.pp
    yield (
        f"at most {number(held.value)} tokens/s can be made ({name_of(one.split)}), and at least "
        f"{number(held.limit)} are asked for: that takes {replicas} replicas, {gpus} GPUs, if as "
        f"many more requests come; {wish.gpus} may be used"
    )
