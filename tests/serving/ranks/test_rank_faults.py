"""Each rank of a split model in turn, killed and stopped, under load: drills of minutes.

And what must not be taken for a fault: a step that is long because its prompt is.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.digest import identify
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.model.reference_logits import prove
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.messages import Submission
from serving.ranks.supervisor import Supervisor
from tests.support.models import lively
from tests.support.recording_receiver import Ear, complete
from tests.support.servers import CONFIG, Stalls, eventually, write_checkpoint

START_S = 90.0
NOTICED_S = 2.0
STEP_S = 5.0
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 30]
TOKENS = 12
LONG_S, LONG_TOKENS = 10.0, 7000


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
def oracle(config: ServerConfig) -> list[list[int]]:
    model = load(config.model, dtype=torch.float64)
    sampling = Sampling(max_new_tokens=TOKENS)
    return [one.token_ids for one in generate(model, PROMPTS, sampling)]


@pytest.fixture(scope="module")
def square(config: ServerConfig) -> Iterator[tuple[Supervisor, Ear]]:
    supervisor, ear = Supervisor(config), Ear()
    supervisor.start(ear)
    started = time.monotonic()
    supervisor.wait_ready(START_S)
    print(f"ready after {time.monotonic() - started:.1f} s")
    yield supervisor, ear
    supervisor.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number"),
    [*((rank, signal.SIGKILL) for rank in range(4)), (0, signal.SIGSTOP), (3, signal.SIGSTOP)],
)
def test_any_rank_may_be_lost_under_load(
    square: tuple[Supervisor, Ear], oracle: list[list[int]], rank: int, number: signal.Signals
) -> None:
    supervisor, ear = square
    first = 1_000_000 * (rank + 1) + 100_000 * number
    for place in range(8):
        supervisor.send(Submission(first + place, [place + 1], Sampling(max_new_tokens=1500)))
    ear.until(lambda: all(ear.tokens[first + place] for place in range(8)), 20)
    losses, readies, old = len(ear.losses), len(ear.readies), supervisor.pids
    hit = time.monotonic()

    with Stalls() as stalls:
        os.kill(old[rank], number)
        ear.until(lambda: len(ear.losses) > losses, 40)
    noticed_s = ear.losses[-1][0] - hit - stalls.seconds
    ear.until(lambda: len(ear.readies) > readies, START_S)
    back_s = ear.readies[-1][0] - hit
    print(f"rank {rank} {number.name}: noticed after {noticed_s:.2f} s, back after {back_s:.1f} s")
    assert noticed_s < (NOTICED_S if number == signal.SIGKILL else STEP_S + NOTICED_S)
    assert len(ear.losses) == losses + 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in old)
    assert complete(supervisor, ear, PROMPTS, TOKENS, first=first + 50, within_s=30) == oracle


@pytest.mark.slow
def test_ranks_that_do_not_get_ready_in_their_time_are_started_again(config: ServerConfig) -> None:
    """Three times, since it may be bad luck; then it is said, and that is the end."""
    supervisor, ear = Supervisor(replace(config, tp=1, pp=1, load_s=0.2)), Ear()
    supervisor.start(ear)
    with pytest.raises(CheckpointError, match=r"3 times before they answered.*while loading"):
        supervisor.wait_ready(30)
    eventually(lambda: len(ear.losses) == 3)
    eventually(lambda: not supervisor.pids)
    supervisor.close()


@pytest.mark.slow
def test_a_split_model_replays_its_proof_and_one_that_says_something_else_is_refused(
    config: ServerConfig, tmp_path: Path
) -> None:
    for name, source, proved in (("same", 0, 0), ("other", 1, 0)):
        folder = tmp_path / name
        write_native(lively(CONFIG, source), folder)
        checkpoint = lively(CONFIG, proved)
        prove(checkpoint, identify(checkpoint)).save(folder)
        supervisor, ear = Supervisor(replace(config, model=str(folder))), Ear()
        supervisor.start(ear)
        if name == "same":
            facts = supervisor.wait_ready(START_S)
            assert facts.proof is not None and facts.proof[0] <= facts.proof[1]
        else:
            with pytest.raises(CheckpointError, match="does not give the logits that its proof"):
                supervisor.wait_ready(START_S)
            eventually(lambda ear=ear: len(ear.losses) == 1)  # type: ignore[misc]
        supervisor.close()


@pytest.mark.slow
def test_a_long_step_that_is_legal_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """The limit is learned, not given: several times the floor, for a chunk that takes so long."""
    took_s = 0.0
    for layers in (7, 14, 28, 56):  # As many as this machine needs for it.
        took_s = long_step_s(layers, tmp_path / str(layers))
        print(f"a step of {LONG_TOKENS} tokens through {layers} layers took {took_s:.1f} s")
        if took_s > LONG_S:
            break
    assert took_s > LONG_S


def long_step_s(layers: int, folder: Path) -> float:
    """Seconds of one step that has a whole prompt, and is not to be called lost."""
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
        model=str(folder), dtype="float64", kv_tokens_max=8192, step_tokens_max=LONG_TOKENS
    )
    supervisor, ear = Supervisor(config), Ear()
    supervisor.start(ear)
    supervisor.wait_ready(config.warmup_s)
    started = time.monotonic()
    prompt = [n % 600 for n in range(LONG_TOKENS)]
    supervisor.send(Submission(1, prompt, Sampling(max_new_tokens=1)))
    ear.until(lambda: 1 in ear.ends, 200)
    took_s = time.monotonic() - started
    supervisor.close()
    assert ear.ends[1].end == "length"
    assert [reason for _, reason in ear.losses] == ["the engine was closed"]
    return took_s
