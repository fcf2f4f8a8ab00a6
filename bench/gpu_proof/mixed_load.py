"""Mixed load of a GPU proof: prompts that arrive beside running decodes, by chunk size of prompts.

The requests of `MixedLoad` arrive at fixed times, whether the earlier ones have ended or not. A
large chunk ends a prompt in fewer steps, and each of these steps delays the tokens of all running
sequences for longer. The stage measures both, and the memory of the steps beside the planner's
estimate of it.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench.gpu_proof.model_checks import open_network
from bench.gpu_proof.proof_sizes import MixedLoad, ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.harness.offline_engine import greedy_request, random_ids
from clients.load.percentiles import quantile
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from serving.engine.engine import Engine, run_in_thread
from serving.memory_budget import workspace_bytes
from serving.request import Request

COLUMNS = (
    "tokens of a chunk, at most",
    "requests",
    "new tokens/s",
    "prompt tokens/s",
    "time to first token, ms: p50 / p95",
    "between tokens, ms: p50 / p95",
    "steps",
    "peak of a step, MB / estimated by the planner, MB",
)


@dataclass
class RequestTimes:
    """The times of one request, in seconds since the first arrival."""

    arrival_s: float  # As scheduled, so that a late submission does not hide a wait.
    prompt_tokens: int
    # The time of each piece of the answer, and its number of tokens.
    pieces: list[tuple[float, int]] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def time_to_first_token_s(self) -> float:
        """The time from the arrival to the first token."""
        return self.pieces[0][0] - self.arrival_s

    @property
    def token_gaps_s(self) -> list[float]:
        """The time before each token after the first piece. Tokens of one piece share its time."""
        gaps = []
        for (earlier_s, _), (later_s, count) in zip(self.pieces, self.pieces[1:], strict=False):
            gaps += [(later_s - earlier_s) / count] * count
        return gaps


def measure_mixed_load(stage: StageContext) -> None:
    """Run the load once with each chunk size, and record a line of the table for each."""
    sizes = ProofSizes.of(stage.device)
    load, network = sizes.mixed_load, sizes.suite.network
    stage.figures.add("arrivals a second", load.arrivals_per_s)
    stage.figures.add("seconds of arrivals", load.seconds)
    lines: list[list[str]] = []
    faults = []
    for chunk_tokens in load.chunk_tokens:
        line, missing_tokens = _measure_chunk_size(stage, network, load, chunk_tokens)
        lines.append(line)
        stage.figures.add_table(COLUMNS, lines)
        if missing_tokens:
            faults.append(f"chunks of {chunk_tokens}: {missing_tokens} tokens are missing")
    if faults:
        raise StageFailure("; ".join(faults))


def _measure_chunk_size(
    stage: StageContext, network: GPTConfig, load: MixedLoad, chunk_tokens: int
) -> tuple[list[str], int]:
    """Return a line of the table, and the number of tokens that the requests did not get."""
    settings = {
        "step_tokens_max": chunk_tokens,
        "running_requests_max": load.running_requests_max,
        "kv_tokens_max": (load.running_requests_max + 1) * network.max_position_embeddings,
    }
    with open_network(stage, network, **settings) as engine:
        bytes_before = _allocated_bytes(stage)
        steps_before = engine.stats.steps
        times = run_load(engine, load, network.vocab_size)
        steps = engine.stats.steps - steps_before
        peak_bytes = torch.cuda.max_memory_allocated() - bytes_before if stage.on_gpu else None
    estimated_bytes = workspace_bytes(
        network,
        FLOAT_DTYPES[network.dtype].itemsize,
        step_tokens_max=chunk_tokens,
        logits_rows=load.running_requests_max,
    )
    answered = [x for x in times if x.pieces]
    if not answered:
        raise StageFailure(f"chunks of {chunk_tokens}: no request got a token")
    peak = "not measured" if peak_bytes is None else f"{peak_bytes / 1e6:.0f}"
    line = [str(chunk_tokens), *describe_times(answered), str(steps)]
    missing_tokens = load.requests * load.new_tokens - sum(x.new_tokens for x in times)
    return [*line, f"{peak} / {estimated_bytes / 1e6:.0f}"], missing_tokens


def _allocated_bytes(stage: StageContext) -> int:
    """Return the bytes of the weights and of the KV pool, and start a new peak."""
    if not stage.on_gpu:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def run_load(engine: Engine, load: MixedLoad, vocab_size: int) -> list[RequestTimes]:
    """Send all requests at their times, and wait for their ends."""
    rng = random.Random(0)
    requests = [
        greedy_request(random_ids(rng, vocab_size, tokens), load.new_tokens, "throughput")
        for _, tokens in load.arrivals
    ]
    return run_in_thread(_run_requests(engine, load, requests))


async def _run_requests(
    engine: Engine, load: MixedLoad, requests: Sequence[Request]
) -> list[RequestTimes]:
    start = time.monotonic()

    async def run_request(request: Request, arrival_s: float) -> RequestTimes:
        times = RequestTimes(arrival_s, request.answers[0].prompt_tokens)
        await asyncio.sleep(max(0.0, start + arrival_s - time.monotonic()))
        async for piece in engine.submit(request):
            if piece.error is not None:
                raise piece.error
            if piece.token_ids:
                times.pieces.append((time.monotonic() - start, len(piece.token_ids)))
        return times

    arrivals = [arrival_s for arrival_s, _ in load.arrivals]
    return await asyncio.gather(*map(run_request, requests, arrivals))


def describe_times(times: Sequence[RequestTimes]) -> list[str]:
    """Return the cells of the table that the times of the requests give."""
    end_s = max(x.pieces[-1][0] for x in times)
    first_ms = [1e3 * x.time_to_first_token_s for x in times]
    gaps_ms = [1e3 * gap_s for x in times for gap_s in x.token_gaps_s]
    return [
        str(len(times)),
        f"{sum(x.new_tokens for x in times) / end_s:.0f}",
        f"{sum(x.prompt_tokens for x in times) / end_s:.0f}",
        *(
            f"{quantile(values, 0.5):.1f} / {quantile(values, 0.95):.1f}"
            for values in (first_ms, gaps_ms)
        ),
    ]
