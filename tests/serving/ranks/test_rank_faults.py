"""Each rank of a split model is killed or stopped in turn, under load; these tests take minutes.

One test checks what must not count as a fault: a long step of a long prompt.
"""

import os
import signal
import time
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.digest import identify
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.reference_logits.replay import compute_proof
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import Submission
from serving.ranks.supervisor import LocalSupervisor
from tests.support.models import lively
from tests.support.recording_receiver import RecordingReceiver, complete, until_ready
from tests.support.servers import CONFIG, START_S, WAIT_S, Stalls, eventually, write_checkpoint
from tests.support.suites import cases_by_suite

DETECTION_S_MAX = 2.0
STEP_S = 5.0
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 30]
TOKENS = 12
LONG_STEP_S = 5.0
LONG_STEP_TOKENS = 7000


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = tmp_path_factory.mktemp("faults")
    return ServerConfig(
        model=str(write_checkpoint(folder, tokenizer=False)),
        dtype="float64",
        kv_tokens_max=16384,
        step_tokens_max=64,
        step_timeout_s=STEP_S,
        tp=2,
        pp=2,
        flight_dir=str(folder),
    )


@pytest.fixture(scope="module")
def expected_tokens(config: ServerConfig) -> list[list[int]]:
    model = load(config.model_config.model, dtype=torch.float64)
    sampling = SamplingParams(max_new_tokens=TOKENS)
    return [completion.token_ids for completion in generate(model, PROMPTS, sampling)]


@pytest.fixture(scope="module")
def four_ranks(config: ServerConfig) -> Iterator[tuple[LocalSupervisor, RecordingReceiver]]:
    supervisor = LocalSupervisor(config)
    receiver = RecordingReceiver()
    with pytest.MonkeyPatch.context() as patch:
        # Each loss of ready ranks counts as the first one, so that no restart waits.
        patch.setattr("serving.ranks.supervisor.HEALTHY_RESET_S", 1e-6)
        supervisor.start(receiver)
        started_s = time.monotonic()
        until_ready(supervisor, receiver, START_S)
        print(f"ready after {time.monotonic() - started_s:.1f} s")
        yield supervisor, receiver
        supervisor.close()


@pytest.mark.parametrize(
    ("rank", "signal_number"),
    cases_by_suite(
        [(0, signal.SIGKILL), (3, signal.SIGKILL), (3, signal.SIGSTOP)],
        [(1, signal.SIGKILL), (2, signal.SIGKILL), (0, signal.SIGSTOP)],
    ),
)
def test_any_rank_can_be_killed_or_stopped_under_load(
    four_ranks: tuple[LocalSupervisor, RecordingReceiver],
    expected_tokens: list[list[int]],
    rank: int,
    signal_number: signal.Signals,
) -> None:
    supervisor, receiver = four_ranks
    first_id = 1_000_000 * (rank + 1) + 100_000 * signal_number
    for offset in range(8):
        supervisor.send(
            Submission(first_id + offset, [offset + 1], SamplingParams(max_new_tokens=1500))
        )
    receiver.until(lambda: all(receiver.tokens[first_id + offset] for offset in range(8)), WAIT_S)
    losses = len(receiver.losses)
    readies = len(receiver.readies)
    pids = supervisor.pids
    signalled_at = time.monotonic()

    with Stalls() as stalls:
        os.kill(pids[rank], signal_number)
        receiver.until(lambda: len(receiver.losses) > losses, WAIT_S)
    detection_s = receiver.losses[-1][0] - signalled_at - stalls.seconds
    receiver.until(lambda: len(receiver.readies) > readies, START_S)
    restart_s = receiver.readies[-1][0] - signalled_at
    print(
        f"rank {rank} {signal_number.name}: detected after {detection_s:.2f} s, "
        f"ready after {restart_s:.1f} s"
    )
    assert detection_s < (
        DETECTION_S_MAX if signal_number == signal.SIGKILL else STEP_S + DETECTION_S_MAX
    )
    assert len(receiver.losses) == losses + 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    tokens = complete(supervisor, receiver, PROMPTS, TOKENS, first=first_id + 50, within_s=WAIT_S)
    assert tokens == expected_tokens


@pytest.mark.slow
def test_ranks_that_exceed_the_load_limit_are_restarted_up_to_three_times(
    config: ServerConfig,
) -> None:
    """Three starts, since a failure may be temporary; then the supervisor gives up."""
    supervisor = LocalSupervisor(config.with_fields(tp=1, pp=1, load_s=0.2))
    receiver = RecordingReceiver()
    supervisor.start(receiver)
    with pytest.raises(CheckpointError, match=r"3 times before they were ready.*while loading"):
        until_ready(supervisor, receiver, START_S)
    eventually(lambda: len(receiver.losses) == 3)
    eventually(lambda: not supervisor.pids)
    supervisor.close()


@pytest.mark.slow
def test_a_split_model_is_checked_against_its_proof(config: ServerConfig, tmp_path: Path) -> None:
    for name, seed, proof_seed in (("same", 0, 0), ("other", 1, 0)):
        folder = tmp_path / name
        write_native(lively(CONFIG, seed), folder)
        checkpoint = lively(CONFIG, proof_seed)
        compute_proof(checkpoint, identify(checkpoint)).save(folder)
        supervisor = LocalSupervisor(config.with_fields(model=str(folder)))
        receiver = RecordingReceiver()
        supervisor.start(receiver)
        if name == "same":
            ready = until_ready(supervisor, receiver, START_S)
            assert ready.proof is not None and ready.proof[0] <= ready.proof[1]
        else:
            with pytest.raises(
                CheckpointError, match="differ from the reference logits in its proof"
            ):
                until_ready(supervisor, receiver, START_S)
            eventually(lambda receiver=receiver: len(receiver.losses) == 1)  # type: ignore[misc]
        supervisor.close()


@pytest.mark.slow
def test_a_long_prefill_step_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """The learned limit of a large prefill chunk is more than twice the minimum limit."""
    layers = 4
    while (step_s := prefill_step_s(layers, tmp_path / str(layers))) <= LONG_STEP_S:
        print(f"a step of {LONG_STEP_TOKENS} tokens through {layers} layers took {step_s:.1f} s")
        layers = ceil(1.2 * layers * LONG_STEP_S / step_s)


def prefill_step_s(layers: int, folder: Path) -> float:
    """Seconds of a step that prefills the complete prompt; its ranks must not count as hung."""
    network = GPTConfig(
        num_layers=layers,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=640,
        max_position_embeddings=8192,
        position_embedding_type="rope",
        dtype="float32",
    )
    write_native(lively(network), folder)
    config = ServerConfig(
        model=str(folder), dtype="float64", kv_tokens_max=8192, step_tokens_max=LONG_STEP_TOKENS
    )
    supervisor = LocalSupervisor(config)
    receiver = RecordingReceiver()
    supervisor.start(receiver)
    until_ready(supervisor, receiver, config.parallel_config.warmup_s)
    started_s = time.monotonic()
    prompt = [position % 600 for position in range(LONG_STEP_TOKENS)]
    supervisor.send(Submission(1, prompt, SamplingParams(max_new_tokens=1)))
    receiver.until(lambda: 1 in receiver.ends, 200)
    step_s = time.monotonic() - started_s
    supervisor.close()
    assert receiver.ends[1].end == "length"
    assert [reason for _, reason in receiver.losses] == ["the engine was closed"]
    return step_s
