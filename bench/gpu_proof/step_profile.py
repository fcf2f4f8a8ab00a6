"""Step profile of a GPU proof: kernels, gaps and host waits of steps, and late compilations.

torch.profiler records the kernels of all threads. A kernel that is compiled after the warm-up stops
a step for up to seconds, so the stage fails if there is one.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_proof.model_checks import open_network
from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.harness.offline_engine import generate_all, random_ids
from gpt.config import GPTConfig
from gpt.sampling_params import SamplingParams
from serving.engine.engine import Engine
from serving.request import AnswerSpec, Request

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
# Calls of the CUDA runtime with which the host waits for the device.
WAITS = re.compile(r"cuda(Stream|Event|Device)Synchronize|cudaMemcpy")
LONGEST_KERNELS = 8  # Recorded kernels of a workload.
KERNEL_NAME_CHARACTERS = 100
# By name: the lengths of the prompts, and the sampling parameters.
Workloads = Mapping[str, tuple[Sequence[int], Mapping[str, Any]]]


class CompilationCounter:
    """Counts the kernels that Triton compiles, or loads from its cache on disk, while it is open.

    Both stop the step in which they happen. Without Triton the count stays 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self._knobs: Any = None

    def __enter__(self) -> "CompilationCounter":
        try:
            from triton import knobs
        except ImportError:
            return self
        self._knobs = knobs.runtime
        self._knobs.jit_post_compile_hook = self._on_compilation
        return self

    def __exit__(self, *exception: object) -> None:
        if self._knobs is not None:
            self._knobs.jit_post_compile_hook = None

    def _on_compilation(self, *arguments: object, **named_arguments: object) -> None:
        self.count += 1


def profile_workloads(stage: StageContext) -> None:
    """Profile decode steps, mixed steps and sampled steps, and decode steps with rotary positions.

    Each model has a warmed-up engine.
    """
    sizes = ProofSizes.of(stage.device)
    network = sizes.suite.network
    short, long = network.max_position_embeddings // 32, network.max_position_embeddings // 3
    workloads: Workloads = {
        "decode": ([short] * sizes.profiled_requests, GREEDY),
        "one request": ([short], GREEDY),
        # Prompts of several chunks beside decodes.
        "mixed": ([short] * (sizes.profiled_requests - 1) + [long], GREEDY),
        "sampled": ([short] * sizes.profiled_requests, SAMPLED),
    }
    if stage.on_gpu:
        with profile(activities=[ProfilerActivity.CUDA]):  # The first profile starts for a second.
            torch.zeros(1, device=stage.device)
    compilations = _profile_network(stage, network, workloads)
    compilations += _profile_network(
        stage, sizes.rotary_network, {"rotary, one request": ([short], GREEDY)}
    )
    stage.figures.add("compilations after the warm-up", compilations)
    if compilations:
        raise StageFailure(f"{compilations} kernels were compiled after the warm-up")


def _profile_network(stage: StageContext, network: GPTConfig, workloads: Workloads) -> int:
    """Record the figures of each workload; return the number of compilations after the warm-up."""
    new_tokens = ProofSizes.of(stage.device).profiled_tokens
    with open_network(stage, network) as engine, CompilationCounter() as compilations:
        for name, (prompts, sampling) in workloads.items():
            requests = _requests(network.vocab_size, prompts, new_tokens, sampling)
            figures = _profile(stage, engine, partial(generate_all, engine, requests))
            for figure, value in figures.items():
                stage.figures.add(f"{name}: {figure}", value)
    return compilations.count


def _requests(
    vocab_size: int, prompt_lengths: Sequence[int], new_tokens: int, sampling: Mapping[str, Any]
) -> list[Request]:
    rng = random.Random(0)
    rules = SamplingParams(new_tokens, **sampling)
    return [
        Request((AnswerSpec(random_ids(rng, vocab_size, length), rules),), service="throughput")
        for length in prompt_lengths
    ]


def _profile(stage: StageContext, engine: Engine, run: Callable[[], object]) -> dict[str, Any]:
    """Return the figures of the steps that `run` makes; without a GPU, only their number."""
    steps_before, replayed_before = engine.stats.steps, engine.stats.replayed_steps
    if not stage.on_gpu:
        run()
        return {"steps": engine.stats.steps - steps_before}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    steps = max(1, engine.stats.steps - steps_before)
    events = profiler.events() or []
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    spans = sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    waits = sum(bool(WAITS.fullmatch(event.name)) for event in events)
    replayed = engine.stats.replayed_steps - replayed_before
    return {"steps": steps, "replayed steps": replayed, **span_figures(spans, steps)} | {
        "host waits a step": round(waits / steps, 2),
        "longest kernels": longest_kernels(
            [(kernel.name, kernel.time_range.elapsed_us()) for kernel in kernels], steps
        ),
    }


def longest_kernels(kernels: Sequence[tuple[str, float]], steps: int) -> list[str]:
    """Describe the kernels with the longest times in all steps. `kernels`: names and us."""
    times_us: dict[str, list[float]] = defaultdict(list)
    for name, elapsed_us in kernels:
        times_us[name].append(elapsed_us)
    longest = sorted(times_us.items(), key=lambda item: -sum(item[1]))[:LONGEST_KERNELS]
    return [
        f"{sum(values) / steps:.1f} us a step, {len(values) / steps:.1f} launches: "
        f"{name[:KERNEL_NAME_CHARACTERS]}"
        for name, values in longest
    ]


def span_figures(spans: Sequence[tuple[float, float]], steps: int) -> dict[str, float]:
    """Return kernels a step, busy share and longest gap. `spans`: sorted, in microseconds."""
    if not spans:
        return {"kernels a step": 0.0}
    busy_us, longest_gap_us, busy_until = 0.0, 0.0, spans[0][0]
    for start, end in spans:
        longest_gap_us = max(longest_gap_us, start - busy_until)
        busy_us += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    total_us = busy_until - spans[0][0]
    return {
        "kernels a step": round(len(spans) / steps, 1),
        "busy, %": round(100 * busy_us / max(total_us, 1e-9), 1),
        "longest gap, ms": round(longest_gap_us / 1e3, 3),
    }
