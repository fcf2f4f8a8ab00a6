"""Rows of a node in a GPU proof: decode and prefill times of each layout beside one rank's."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

import torch

from bench.gpu_proof.layouts import SINGLE_RANK, Layout, layouts, open_layout, saved_model
from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.suites.gpu import GpuSizes, engine_timers, initial_vector
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.checkpoint.random_init import generated_checkpoint
from gpt.config import GPTConfig
from gpt.errors import PreambleError
from gpt.parallel.weight_sharding import ParameterSpec
from serving.config import ServerConfig

# A prime, so that no two rows of a matrix are equal.
TABLE_WEIGHTS = 1_000_003
WEIGHT_STD = 0.02


def measure_layouts(stage: StageContext) -> None:
    """Time the workloads of the target rows with each layout, one engine after the other.

    A rehearsal times one layout, because each start of ranks takes seconds.
    """
    proof_sizes = ProofSizes.of(stage.device)
    sizes = proof_sizes.suite
    measured = layouts(stage.ranks)
    if not stage.on_gpu:  # The suite's tiny model has too few layers for several stages.
        sizes, measured = replace(sizes, network=proof_sizes.node_network), measured[-1:]
    columns = {
        "single": "decode step of one request, ms",
        "decode": f"decode step of {sizes.decode_requests} requests, ms",
        "prefill": f"prompt of {sizes.prefill_tokens} tokens, ms",
    }
    lines: list[list[str]] = []
    baseline: dict[str, float] = {}
    faults = []
    with saved_model(repeated_checkpoint(sizes.network)) as model:
        config = sizes.server_config.with_fields(model=str(model))
        for layout in (SINGLE_RANK, *measured):
            try:
                seconds = _time_workloads(layout, config, sizes, list(columns))
            except PreambleError as error:
                faults.append(f"{layout}: {error}")
                continue
            if layout == SINGLE_RANK:
                baseline = seconds
            lines.append([str(layout), *(_cell(seconds, baseline, name) for name in columns)])
            stage.figures.add_table(["layout", *columns.values()], lines)
    if faults:
        raise StageFailure("; ".join(faults))


def _time_workloads(
    layout: Layout, config: ServerConfig, sizes: GpuSizes, names: list[str]
) -> dict[str, float]:
    """Return the median seconds of each workload, after a warm-up round."""
    with open_layout(layout, sizes.network.vocab_size, config) as (engine, _):
        timers = engine_timers(engine, sizes)
        rounds = [{name: timers[name]() for name in names} for _ in range(sizes.rounds + 1)]
    return {name: statistics.median(timed[name] for timed in rounds[1:]) for name in names}


def _cell(seconds: Mapping[str, float], baseline: Mapping[str, float], name: str) -> str:
    """Return the milliseconds, and the speed-up over one rank if that was measured."""
    speedup = f" ({baseline[name] / seconds[name]:.2f} x)" if baseline else ""
    return f"{1e3 * seconds[name]:.3f}{speedup}"


def repeated_checkpoint(network: GPTConfig) -> Checkpoint:
    """Make weights that repeat a table of random numbers.

    The host draws 5B numbers in minutes, and copies them in seconds; the values of the weights do
    not change the times.
    """
    table = torch.randn(TABLE_WEIGHTS, generator=torch.Generator().manual_seed(0)) * WEIGHT_STD

    def repeat_table(parameter: ParameterSpec) -> torch.Tensor:
        if len(parameter.shape) == 1:
            return initial_vector(parameter, torch.device("cpu"))
        count = math.prod(parameter.shape)
        return table.repeat(-(-count // TABLE_WEIGHTS))[:count].view(parameter.shape)

    return generated_checkpoint(network, repeat_table)
