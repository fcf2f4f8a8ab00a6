"""Engine stages of a GPU proof: greedy tokens compared with the CPU's, and the target rows."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.harness.offline_engine import (
    generate_all,
    greedy_request,
    load_for_serving,
    random_ids,
    running_engine,
)
from bench.harness.record import limit_record, row_record
from bench.harness.roofline import MeasuredLimit
from bench.harness.targets import Row
from bench.suites import gpu
from gpt.batch import Batch
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from serving.config import ServerConfig
from serving.engine.engine import Engine

# A greedy token may have a smaller logit than the best token of the CPU in fp32, because rounding
# differs. The limits are in standard deviations of the logits.
DEFICIT_MAX = {"float32": 1e-3, "bfloat16": 0.2}
PROMPTS = 4
PROMPT_TOKENS = 24
NEW_TOKENS = 24
# Of random weights; larger than usual, so that each logit depends on the whole context.
WEIGHT_STD = 0.1
MODES = {
    "graphs and steps ahead": {},
    "graphs": {"step_ahead": "off"},
    "plain steps": {"cuda_graphs": "off", "step_ahead": "off"},
}


def check_tokens(stage: StageContext) -> None:
    """Compare the engine's greedy tokens with the CPU's logits, in all modes and both dtypes.

    The CPU computes the logits of each whole answer, so that one different token does not change
    the comparison of the tokens after it.
    """
    network = ProofSizes.of(stage.device).checked_network
    checkpoint = random_init_checkpoint(network.with_fields(dtype="float32"), 0, WEIGHT_STD)
    twin = load_model(checkpoint, Mesh.single("cpu"), dtype="float32").eval()
    rng = random.Random(0)
    prompts = [random_ids(rng, network.vocab_size, PROMPT_TOKENS) for _ in range(PROMPTS)]
    torch.backends.cuda.matmul.allow_tf32 = False
    faults = []
    for dtype, deficit_max in DEFICIT_MAX.items():
        for mode, settings in MODES.items():
            config = _server_config(stage.device, network, dtype=dtype, **settings)
            with running_engine(load_for_serving(checkpoint, config), config) as engine:
                requests = [greedy_request(prompt, NEW_TOKENS) for prompt in prompts]
                answers = [completion.token_ids for completion in generate_all(engine, requests)]
                stats = engine.stats
            deficit = max(
                token_deficit(twin, prompt, answer)
                for prompt, answer in zip(prompts, answers, strict=True)
            )
            name = f"{dtype}, {mode}"
            stage.figures.add(f"{name}: largest deficit", round(deficit, 6))
            stage.figures.add(f"{name}: replayed steps", stats.replayed_steps)
            if deficit > deficit_max:
                faults.append(f"{name}: a token is {deficit:.3g} deviations below the CPU's")
            if stage.on_gpu and "graphs" in mode and not stats.replayed_steps:
                faults.append(f"{name}: no step was replayed")
    if faults:
        raise StageFailure("; ".join(faults))


@torch.inference_mode()
def token_deficit(twin: GPT, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Return how far the answer's tokens are below the twin's best tokens, at worst.

    The unit is the standard deviation of the logits.
    """
    ids = torch.tensor([*prompt, *answer])
    logits = twin(ids, Batch.unpaged([len(ids)], "cpu")).float()[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    return float(((logits.amax(1) - chosen) / logits.std(1)).max())


def _server_config(device: str, network: GPTConfig, **settings: Any) -> ServerConfig:
    return ServerConfig(
        "",
        device=device,
        kv_tokens_max=PROMPTS * network.max_position_embeddings,
        running_requests_max=PROMPTS,
        **settings,
    )


def measure_rows(stage: StageContext) -> None:
    """Measure the target rows that compare our engine with the device and with itself."""
    not_run = record_rows(stage, [name for name in gpu.ROW_TIMERS if name != "gpu/batch"])
    if not_run and stage.on_gpu:
        raise StageFailure(f"not measured: {', '.join(not_run)}")


def record_rows(stage: StageContext, names: list[str]) -> list[str]:
    """Run the GPU suite for the target rows `names`, and record its output as it comes.

    Return the names of the rows that could not be measured.
    """
    sizes = ProofSizes.of(stage.device)
    not_run: list[str] = []
    texts, limits = [], []
    for output in gpu.run_suite(sizes.rounds, sizes.suite, names):
        match output:
            case Row():
                stage.figures.add_row(output.target.name, row_record(output))
                not_run += [output.target.name] if output.not_run_reason else []
            case MeasuredLimit():
                limits.append(limit_record(output))
                stage.figures.add("limits", limits)
            case _:
                texts.append(str(output))
                stage.figures.add("texts", texts)
    return not_run


@contextmanager
def open_network(stage: StageContext, network: GPTConfig, **settings: Any) -> Iterator[Engine]:
    """Open a warmed-up engine of random weights that are drawn on the device."""
    sizes = ProofSizes.of(stage.device)
    checkpoint = gpu.device_checkpoint(network, torch.device(stage.device))
    defaults = {
        "kv_tokens_max": (sizes.profiled_requests + 1) * network.max_position_embeddings,
        "running_requests_max": sizes.profiled_requests,
        "prefix_cache": False,
    }
    config = ServerConfig("", device=stage.device, **(defaults | settings))
    model = load_for_serving(checkpoint, config)
    with running_engine(model, config, warm_up=True) as engine:
        yield engine
