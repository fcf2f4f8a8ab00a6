"""Checks of a node in a GPU proof: tokens of all layouts, and the recovery from a killed rank."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

from bench.gpu_proof.layouts import SINGLE_RANK, Layout, layouts, open_layout, saved_model
from bench.gpu_proof.model_checks import (
    DEFICIT_MAX,
    NEW_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    WEIGHT_STD,
    token_deficit,
)
from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.harness.offline_engine import generate_all, greedy_request, random_ids
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.request import UnavailableError

Tokens = tuple[int, ...]

# After the kill, the answer must end and new ranks must be ready within these times.
ERROR_S = 20.0
RECOVERY_S = 60.0
POLL_S = 0.01


def compare_layouts(stage: StageContext) -> None:
    """Compare the greedy tokens of all layouts with one rank's, and with the CPU's logits.

    Sums over ranks round differently, so two tokens with almost equal logits may change places. The
    verdict is therefore the deficit (`token_deficit`), as for one GPU; the number of answers that
    equal one rank's is a figure.
    """
    network = _fp32_network(stage)
    checkpoint = random_init_checkpoint(network, 0, WEIGHT_STD)
    twin = load_model(checkpoint, Mesh.single("cpu"), dtype="float32").eval()
    prompts = _prompts(network)
    dtypes = DEFICIT_MAX if stage.on_gpu else {"float32": DEFICIT_MAX["float32"]}
    lines: list[list[str]] = []
    faults = []
    with saved_model(checkpoint) as model:
        for dtype, deficit_max in dtypes.items():
            reference: list[Tokens] = []
            for layout in (SINGLE_RANK, *layouts(stage.ranks)):
                config = _server_config(stage.device, model, network, dtype=dtype)
                with open_layout(layout, network.vocab_size, config) as (engine, _):
                    answers = _generate(engine, prompts)
                reference = reference or answers
                equal = sum(map(Tokens.__eq__, answers, reference))
                deficit = max(map(token_deficit, [twin] * PROMPTS, prompts, answers))
                lines.append([dtype, str(layout), f"{equal} of {PROMPTS}", f"{deficit:.3g}"])
                stage.figures.add_table(
                    ["dtype", "layout", "answers equal to one rank's", "largest deficit"], lines
                )
                if deficit > deficit_max:
                    faults.append(
                        f"{dtype}, {layout}: a token is {deficit:.3g} deviations below the CPU's"
                    )
    stage.figures.add("layouts", ", ".join(map(str, layouts(stage.ranks))))
    if faults:
        raise StageFailure("; ".join(faults))


def check_rank_loss(stage: StageContext) -> None:
    """Kill the last rank in the middle of an answer.

    The answer must end with an error that names the rank and the signal. New ranks must then give
    the same tokens as the ranks before them.
    """
    network, layout = _fp32_network(stage), Layout(stage.ranks, 1)
    prompts = _prompts(network)
    with saved_model(random_init_checkpoint(network, 0, WEIGHT_STD)) as model:
        config = _server_config(stage.device, model, network, dtype="float32")
        with open_layout(layout, network.vocab_size, config) as (engine, supervisor):
            expected = _generate(engine, prompts)
            long_answer = network.max_position_embeddings - PROMPT_TOKENS
            pid = supervisor.pids[-1]
            killed_at, error = asyncio.run(
                _kill_during_answer(engine, pid, prompts[0], long_answer)
            )
            stage.figures.add("error after the kill, s", round(time.monotonic() - killed_at, 3))
            stage.figures.add("error", error)
            if f"rank {stage.ranks - 1} was ended by SIGKILL" not in error:
                raise StageFailure(f"the error does not name the killed rank: {error}")
            _wait_until_ready(engine, killed_at)
            stage.figures.add("ready after the kill, s", round(time.monotonic() - killed_at, 3))
            stage.figures.add("restarts", engine.restarts)
            if _generate(engine, prompts) != expected:
                raise StageFailure("the new ranks give other tokens than the ranks before them")


async def _kill_during_answer(
    engine: Engine, pid: int, prompt: Tokens, new_tokens: int
) -> tuple[float, str]:
    """Kill a rank after the first token of an answer; return the time, and the answer's error."""
    stream = engine.submit(greedy_request(prompt, new_tokens))
    await anext(stream)
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(ERROR_S):
            async for _ in stream:
                pass
    except UnavailableError as error:
        return killed_at, str(error)
    except TimeoutError:
        raise StageFailure(f"no error within {ERROR_S:g} s after the rank was killed") from None
    raise StageFailure("the answer was complete although the rank was killed")


def _wait_until_ready(engine: Engine, killed_at: float) -> None:
    while not engine.up:
        if engine.has_failed:
            raise StageFailure(f"the engine did not recover: {engine.down_reason}")
        if time.monotonic() > killed_at + RECOVERY_S:
            raise StageFailure(f"no new ranks were ready within {RECOVERY_S:g} s")
        time.sleep(POLL_S)


def _fp32_network(stage: StageContext) -> GPTConfig:
    return ProofSizes.of(stage.device).node_network.with_fields(dtype="float32")


def _prompts(network: GPTConfig) -> list[Tokens]:
    rng = random.Random(0)
    return [random_ids(rng, network.vocab_size, PROMPT_TOKENS) for _ in range(PROMPTS)]


def _generate(engine: Engine, prompts: list[Tokens]) -> list[Tokens]:
    requests = [greedy_request(prompt, NEW_TOKENS) for prompt in prompts]
    return [tuple(completion.token_ids) for completion in generate_all(engine, requests)]


def _server_config(device: str, model: Path, network: GPTConfig, *, dtype: str) -> ServerConfig:
    return ServerConfig(
        str(model),
        device=device,
        dtype=dtype,
        kv_tokens_max=2 * network.max_position_embeddings,
        running_requests_max=PROMPTS,
    )
