"""Serving search: tries splits, batch sizes, prefill presets and replicas; picks the best.

A candidate that does not fit in memory is rejected without simulation. The other candidates are
simulated by `planning.inference.estimate`. If there are few combinations of TP, PP and replicas,
all batch sizes and presets are tried. Otherwise a coarse grid is tried first, and then the
neighbors of the best candidates. The objective selects the best of the candidates that satisfy the
limits with their margins. Each rejected candidate has a reason. The module does not import torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planning.inference.estimate import (
    ServingEstimate,
    ServingSplit,
    Workload,
    estimate_serving,
)
from planning.inference.model_split import ModelSplit, model_splits
from planning.inference.requirements import (
    DEFAULT_PREFILL_PRESET,
    PREFILL_PRESETS,
    MemoryCapacity,
    PrefillPreset,
    Requirements,
    kv_tokens_needed,
    memory_capacity,
)
from planning.inference.service_levels import UTILIZATION_MAX, score, violated_limit
from planning.memory_ledger import MemoryLedger
from planning.plan import Feasibility
from serving.memory_budget import KV_BLOCK_TOKENS

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
COARSE_BATCH_SIZES = (1, 4, 16, 64, 256)
STAGE_COUNTS_MAX = 2  # Number of PP sizes to try per TP and EP size: the smallest that fit.
# The grid of batch sizes for splits with more stages than the memory requires
# (`_is_deep_pipeline`). The grid is small, because these splits are rarely the best and are slow
# to simulate.
SPARSE_BATCH_SIZES = (16, 64)
# Among the candidates that are worse than the best by at most this fraction, the simplest one is
# selected.
TIE_FRACTION = 0.02
# If there are at most this many combinations of TP, PP and replicas, all batch sizes and presets
# are tried. Otherwise a coarse grid is tried first, and then the neighbors of the
# REFINED_CANDIDATES_MAX best candidates.
EXHAUSTIVE_SPLITS_MAX = 3
REFINED_CANDIDATES_MAX = 3


@dataclass(frozen=True)
class ServingCandidate:
    split: ServingSplit
    feasibility: Feasibility
    estimate: ServingEstimate | None = None
    reason: str = ""
    memory: MemoryLedger | None = None
    # Whether this rejected candidate represents all candidates with its parallel sizes.
    covers_model_split: bool = False
    # The number of GPUs that the request rate needs if the available GPUs are too few; else 0.
    gpus_needed: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServingSearchResult:
    requirements: Requirements
    best: ServingCandidate | None
    alternatives: Sequence[ServingCandidate]  # Best candidates first, rejected candidates last.

    @property
    def candidates(self) -> list[ServingCandidate]:
        return [*([self.best] if self.best else []), *self.alternatives]


def search_serving(requirements: Requirements) -> ServingSearchResult:
    """Search for the best candidate; return it and all other candidates."""
    return _ServingSearch(requirements).run_search()


def serving_figures(
    workload: Workload, split: ServingSplit, estimate: ServingEstimate
) -> dict[str, float]:
    requests_per_s, tokens_per_s = estimate.requests_per_s, estimate.tokens_per_s
    concurrency = estimate.concurrency
    if workload.request_rate is not None and math.isfinite(estimate.request_ms.mean):
        # All arriving requests are answered, so the rates follow from the workload. The simulated
        # rates are less accurate, because the simulated requests are a sample.
        requests_per_s = workload.request_rate
        tokens_per_s = requests_per_s * workload.output_tokens.mean
        concurrency = requests_per_s * estimate.request_ms.mean / 1000
    return {
        "tokens_per_s_per_gpu": tokens_per_s / split.gpus,
        "itl_ms_p95": estimate.itl_ms.p95,
        "ttft_ms_p95": estimate.ttft_ms.p95,
        "request_ms_p95": estimate.request_ms.p95,
        "tokens_per_s": tokens_per_s,
        "gpus": float(split.gpus),
        "memory_bytes": float(estimate.memory.total),
        "requests_per_s": requests_per_s,
        "concurrency": concurrency,
        "itl_ms_p50": estimate.itl_ms.p50,
        "ttft_ms_p50": estimate.ttft_ms.p50,
        "request_ms_p50": estimate.request_ms.p50,
        "itl_ms_mean": estimate.itl_ms.mean,
        "ttft_ms_mean": estimate.ttft_ms.mean,
        "request_ms_mean": estimate.request_ms.mean,
    }


@dataclass
class _ServingSearch:
    requirements: Requirements
    candidates: dict[ServingSplit, ServingCandidate] = field(default_factory=dict)
    _requests_per_s_cache: dict[ServingSplit, float] = field(default_factory=dict)
    _deep_pipelines: set[ModelSplit] = field(default_factory=set)

    def run_search(self) -> ServingSearchResult:
        requirements = self.requirements
        capacities: dict[ModelSplit, MemoryCapacity] = {}
        for model_split in model_splits(
            requirements.model, requirements.cluster.gpus_per_node, requirements.gpus
        ):
            # Only the smallest PP sizes that fit are tried: more stages do not make a request
            # faster, and the second size already allows a larger batch.
            stage_counts_tried = sum(_has_equal_stages(split, model_split) for split in capacities)
            if stage_counts_tried == STAGE_COUNTS_MAX:
                continue
            capacity = memory_capacity(requirements, model_split, 1, DEFAULT_PREFILL_PRESET)
            if capacity.kv_tokens:
                capacities[model_split] = capacity
            else:
                split = ServingSplit(**model_split._asdict(), running_requests_max=1)
                self.candidates[split] = ServingCandidate(
                    split,
                    "rejected",
                    None,
                    capacity.reason,
                    capacity.memory,
                    covers_model_split=True,
                )
        self._deep_pipelines = {
            split for split in capacities if self._is_deep_pipeline(split, capacities)
        }
        combinations = [
            (split, replicas) for split in capacities for replicas in self._replica_counts(split)
        ]
        is_exhaustive = len(combinations) <= EXHAUSTIVE_SPLITS_MAX
        presets = PREFILL_PRESETS if is_exhaustive else [DEFAULT_PREFILL_PRESET]
        for model_split, replicas in combinations:
            self._reject_oversized_batch(model_split, replicas, capacities[model_split])
            grid: Sequence[int] = BATCH_SIZES if is_exhaustive else COARSE_BATCH_SIZES
            if model_split in self._deep_pipelines:
                grid = SPARSE_BATCH_SIZES
            batches = self._batch_sizes(capacities[model_split], replicas, grid)
            self._try_batches(model_split, replicas, batches, presets)
        if not is_exhaustive:
            for candidate in self._best_by_split():
                self._refine_candidate(candidate, capacities[candidate.split.model_split])
        return self._rank_candidates()

    # ------------------------------------------------------------------------------ the grid

    @staticmethod
    def _is_deep_pipeline(
        model_split: ModelSplit, capacities: Mapping[ModelSplit, MemoryCapacity]
    ) -> bool:
        """Return whether a split has more stages than the memory requires.

        This is true if a split with the same TP and EP sizes and fewer stages fits in memory, or if
        the split has several stages and any split with one stage fits in memory.
        """
        fits_single_stage = any(split.pp == 1 for split in capacities)
        stages_min = min(split.pp for split in capacities if _has_equal_stages(split, model_split))
        return model_split.pp > stages_min or (model_split.pp > 1 and fits_single_stage)

    def _replica_counts(self, model_split: ModelSplit) -> list[int]:
        """Return the numbers of replicas to try; [0]: `_try_batch` chooses by the request rate."""
        requirements = self.requirements
        replicas_max = requirements.gpus // model_split.ranks
        if requirements.workload.request_rate is not None:
            return [0]
        if requirements.saturate:
            if requirements.objective == "gpus":
                return replica_counts(replicas_max)
            return [replicas_max]
        if model_split in self._deep_pipelines:
            return [max(1, min(replicas_max, requirements.workload.concurrency or 1))]
        assert requirements.workload.concurrency is not None
        return replica_counts(min(replicas_max, requirements.workload.concurrency))

    def _batch_sizes(
        self, capacity: MemoryCapacity, replicas: int, grid: Sequence[int]
    ) -> list[int]:
        """Return the batch sizes to try: sizes of the grid, then the largest useful batch size.

        The largest useful batch size is the smallest of these numbers:
        - The number of requests that fit in the KV cache.
        - The last size of the grid.
        - In a closed loop that does not saturate the server, the concurrency of a replica.
        """
        concurrency = self.requirements.workload.concurrency
        useful_max = capacity.running_requests_max
        if concurrency is not None and not self.requirements.saturate:
            useful_max = min(useful_max, -(-concurrency // max(1, replicas)))
        batch_sizes = [batch for batch in grid if batch < useful_max]
        return [*batch_sizes, min(useful_max, grid[-1])]

    def _reject_oversized_batch(
        self, model_split: ModelSplit, replicas: int, capacity: MemoryCapacity
    ) -> None:
        """Add a rejected candidate for the smallest batch size that does not fit in memory.

        Add none if the load does not need this batch size.
        """
        oversized_batches = [
            batch_size for batch_size in BATCH_SIZES if batch_size > capacity.running_requests_max
        ]
        if not oversized_batches:
            return
        batch = oversized_batches[0]
        larger_capacity = replace(capacity, running_requests_max=batch)
        if batch in self._batch_sizes(larger_capacity, replicas, BATCH_SIZES):
            split = ServingSplit(
                **model_split._asdict(),
                replicas=max(1, replicas),
                running_requests_max=batch,
                step_tokens_max=max(batch, DEFAULT_PREFILL_PRESET.step_tokens_max),
                adapter_memory_mb=self.requirements.adapter_memory_mb(model_split, batch),
            )
            reason = (
                f"the KV cache holds {capacity.kv_tokens:,} tokens, enough for "
                f"{capacity.running_requests_max} requests of "
                f"{self.requirements.request_tokens_mean:,} tokens"
            )
            self.candidates[split] = ServingCandidate(split, "rejected", None, reason)

    def _best_by_split(self) -> list[ServingCandidate]:
        """Return the best candidates, at most one for each split and number of replicas.

        The list has up to REFINED_CANDIDATES_MAX candidates. If no candidate satisfies the limits,
        the candidates nearest to the limits are the best.
        """
        best_of: dict[tuple[ModelSplit, int], ServingCandidate] = {}
        for candidate in sorted(self.candidates.values(), key=self._sort_key, reverse=True):
            split = candidate.split
            if candidate.estimate is not None:
                best_of.setdefault((split.model_split, split.replicas), candidate)
        return list(best_of.values())[:REFINED_CANDIDATES_MAX]

    def _refine_candidate(self, candidate: ServingCandidate, capacity: MemoryCapacity) -> None:
        """Try batch sizes near the candidate's, with each prefill preset."""
        split = candidate.split
        factor = 2 if split.pp > 1 else 4  # Pipelines are slow to simulate.
        batch_min = split.running_requests_max // factor
        batch_max = split.running_requests_max * factor
        batches = self._batch_sizes(capacity, split.replicas, BATCH_SIZES)
        replicas = 0 if self.requirements.workload.request_rate is not None else split.replicas
        nearby_batches = [batch for batch in batches if batch_min <= batch <= batch_max]
        self._try_batches(split.model_split, replicas, nearby_batches, PREFILL_PRESETS)

    def _try_batches(
        self,
        model_split: ModelSplit,
        replicas: int,
        batches: Sequence[int],
        presets: Sequence[PrefillPreset],
    ) -> None:
        """Try increasing batch sizes with each preset.

        Unless the load saturates the server, stop after a batch size that is more than twice the
        number of requests in a replica, because larger batch sizes have no effect.
        """
        for preset in presets:
            for batch in batches:
                candidate = self._try_batch(model_split, replicas, batch, preset)
                if (
                    candidate is None
                    or candidate.feasibility == "rejected"
                    or self.requirements.saturate
                ):
                    continue
                if 2 * candidate.figures["concurrency"] < batch * candidate.split.replicas:
                    break

    # ---------------------------------------------------------------------------- one candidate

    def _try_batch(
        self, model_split: ModelSplit, replicas: int, batch: int, preset: PrefillPreset
    ) -> ServingCandidate | None:
        """Try a batch size with `replicas` replicas.

        If `replicas` is 0, try increasing numbers, beginning with the fewest replicas that answer
        the request rate. Return the last candidate, or None if the batch does not fit in memory.
        """
        requirements = self.requirements
        # A step must have a token for each running request.
        step_tokens = max(preset.step_tokens_max, -(-batch // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS)
        capacity = memory_capacity(
            requirements,
            model_split,
            batch,
            PrefillPreset(step_tokens, preset.prefill_stall_ms_max),
        )
        split = ServingSplit(
            **model_split._asdict(),
            running_requests_max=batch,
            step_tokens_max=step_tokens,
            prefill_stall_ms_max=preset.prefill_stall_ms_max,
            adapter_memory_mb=requirements.adapter_memory_mb(model_split, batch),
        )
        if batch > capacity.running_requests_max:
            return None
        split = replace(
            split, kv_tokens=kv_tokens_needed(requirements, capacity, batch, step_tokens)
        )
        if replicas:
            return self._evaluate_cached(replace(split, replicas=replicas), capacity)
        replicas_min = self._replicas_needed_min(split)
        replicas_max = requirements.gpus // model_split.ranks
        if replicas_min > replicas_max:
            rejected_split = replace(split, replicas=max(1, replicas_max))
            requests_per_s = self._replica_requests_per_s(split)
            gpus_needed = replicas_min * model_split.ranks
            reason = (
                f"a replica answers at most {requests_per_s:.3g} requests/s; with a load of at "
                f"most {100 * UTILIZATION_MAX:.0f} %, {requirements.workload.request_rate:g} "
                f"requests/s need {replicas_min} replicas with {gpus_needed} GPUs, but only "
                f"{requirements.gpus} may be used"
            )
            candidate = ServingCandidate(
                rejected_split, "rejected", None, reason, gpus_needed=gpus_needed
            )
            self.candidates[rejected_split] = candidate
            return candidate
        replica_counts_tried = [
            replicas_min,
            *(count for count in replica_counts(replicas_max) if count > replicas_min),
        ]
        last_request_ms = math.inf
        for count in replica_counts_tried:
            candidate = self._evaluate_cached(replace(split, replicas=count), capacity)
            request_ms = candidate.figures.get("request_ms_p95", math.inf)
            gain_ms = last_request_ms - request_ms
            last_request_ms = request_ms
            # The first number that satisfies the limits is enough, except for the objective
            # "latency". For "latency", the number increases until an increase makes requests faster
            # by less than TIE_FRACTION.
            is_fast_enough = (
                requirements.objective != "latency" or gain_ms < TIE_FRACTION * request_ms
            )
            if candidate.feasibility != "rejected" and is_fast_enough:
                break
        return candidate

    def _evaluate_cached(self, split: ServingSplit, capacity: MemoryCapacity) -> ServingCandidate:
        if split not in self.candidates:
            self.candidates[split] = self._evaluate(split, capacity)
        return self.candidates[split]

    def _evaluate(self, split: ServingSplit, capacity: MemoryCapacity) -> ServingCandidate:
        requirements = self.requirements
        estimate = estimate_serving(
            requirements.model,
            requirements.dtype,
            self._workload(split),
            split,
            requirements.cluster,
            requirements.calibration,
        )
        # The estimate may reject a KV cache that `memory_capacity` accepts.
        if math.isinf(estimate.utilization):
            reason = f"the KV cache holds only {estimate.kv_tokens} tokens"
            return ServingCandidate(split, "rejected", None, reason, estimate.memory)
        workload = self._workload(split)
        figures = serving_figures(workload, split, estimate)
        reason = violated_limit(requirements.limits, workload, figures)
        if math.isinf(estimate.request_ms.mean):
            reason = "overloaded: more requests arrive than the servers can answer"
        feasibility: Feasibility = "rejected" if reason else capacity.feasibility
        return ServingCandidate(
            split, feasibility, estimate, reason, estimate.memory, figures=figures
        )

    def _workload(self, split: ServingSplit) -> Workload:
        return self.requirements.workload_for(split.running_requests_max, split.replicas)

    def _replicas_needed_min(self, split: ServingSplit) -> int:
        """Return the fewest replicas that answer the request rate at UTILIZATION_MAX."""
        request_rate = self.requirements.workload.request_rate
        assert request_rate is not None
        requests_per_s_max = self._replica_requests_per_s(split)
        if requests_per_s_max <= 0:
            return self.requirements.gpus + 1  # No available number of replicas is enough.
        return max(1, math.ceil(request_rate / (UTILIZATION_MAX * requests_per_s_max)))

    def _replica_requests_per_s(self, split: ServingSplit) -> float:
        """Return the requests per second of one saturated replica."""
        requirements = self.requirements
        if split not in self._requests_per_s_cache:
            saturated_workload = replace(
                requirements.workload, request_rate=None, concurrency=split.running_requests_max
            )
            estimate = estimate_serving(
                requirements.model,
                requirements.dtype,
                saturated_workload,
                split,
                requirements.cluster,
                requirements.calibration,
            )
            self._requests_per_s_cache[split] = estimate.requests_per_s
        return self._requests_per_s_cache[split]

    # ------------------------------------------------------------------------------ ranking

    def _rank_candidates(self) -> ServingSearchResult:
        ranked = sorted(self.candidates.values(), key=self._sort_key, reverse=True)
        for feasibility in ("fits", "tight"):
            feasible = [candidate for candidate in ranked if candidate.feasibility == feasibility]
            if feasible:
                best = self._choose_simplest(feasible)
                return ServingSearchResult(
                    self.requirements,
                    replace(best, feasibility="best"),
                    [candidate for candidate in ranked if candidate is not best],
                )
        return ServingSearchResult(self.requirements, None, ranked)

    def _sort_key(self, candidate: ServingCandidate) -> tuple[int, float, float]:
        """Return the sort key: feasibility, then the violation of limits, then the objective."""
        feasibility_rank = ("rejected", "tight", "fits").index(candidate.feasibility)
        if candidate.estimate is None:  # The candidate has no figures.
            return feasibility_rank - 1, 0.0, 0.0
        figures = candidate.figures
        # Among candidates that violate a limit, the candidate with the smallest violation is best.
        slack = min(
            [check.slack for check in self.requirements.limits.check_figures(figures)], default=0.0
        )
        return feasibility_rank, min(0.0, slack), self._score(candidate)

    def _score(self, candidate: ServingCandidate) -> float:
        return score(
            self.requirements.objective, self._workload(candidate.split), candidate.figures
        )

    def _choose_simplest(self, feasible: Sequence[ServingCandidate]) -> ServingCandidate:
        """Return the simplest of the candidates that are within TIE_FRACTION of the best."""
        requirements = self.requirements
        prefers_fewest_gpus = (
            requirements.objective == "gpus" or requirements.workload.request_rate is not None
        )
        if prefers_fewest_gpus and requirements.objective != "latency":
            fewest = min(candidate.split.gpus for candidate in feasible)
            feasible = [candidate for candidate in feasible if candidate.split.gpus == fewest]
            return self._simplest_near_minimum(
                feasible, lambda candidate: candidate.figures["request_ms_p95"]
            )
        return self._simplest_near_minimum(
            feasible,
            lambda candidate: (
                -score(requirements.objective, requirements.workload, candidate.figures)
            ),
        )

    def _simplest_near_minimum(
        self, candidates: Sequence[ServingCandidate], metric: Callable[[ServingCandidate], float]
    ) -> ServingCandidate:
        """Return the simplest candidate whose metric is within TIE_FRACTION of the minimum."""
        metric_min = min(map(metric, candidates))
        near_minimum = [
            candidate
            for candidate in candidates
            if metric(candidate) <= metric_min + TIE_FRACTION * abs(metric_min)
        ]

        def complexity(candidate: ServingCandidate) -> tuple[float, ...]:
            split, ledger = candidate.split, candidate.memory
            total_bytes = ledger.total if ledger is not None else 0
            # In a closed loop, a smaller batch size is simpler. In an open loop, a larger batch
            # size counts as simpler, because it allows more requests at once at no cost.
            batch = split.running_requests_max * (1 if self.requirements.is_closed_loop else -1)
            return split.gpus, split.model_split.ranks, batch, total_bytes, metric(candidate)

        return min(near_minimum, key=complexity)


def _has_equal_stages(first: ModelSplit, second: ModelSplit) -> bool:
    """Return whether the splits differ only in the number of stages."""
    return (first.tp, first.ep) == (second.tp, second.ep)


def replica_counts(replicas_max: int) -> list[int]:
    """Return `replicas_max` and the powers of two below it; [] if `replicas_max` is 0."""
    powers = [1 << exponent for exponent in range(replicas_max.bit_length())]
    return sorted({*(count for count in powers if count <= replicas_max), replicas_max} - {0})
