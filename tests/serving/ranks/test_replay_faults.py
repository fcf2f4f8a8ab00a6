"""A tensor rank exits or hangs in the replay of a CUDA graph: all ranks are started again."""

from pathlib import Path

import pytest
import torch

from gpt.generation.generate import generate
from gpt.model.loading import load
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.messages import Submission
from serving.ranks import supervisor as supervisor_module
from serving.ranks.supervisor import LocalSupervisor
from tests.support import replaying_rank_process
from tests.support.recording_receiver import RecordingReceiver, complete, until_ready
from tests.support.replaying_rank_process import EXIT, EXIT_CODE, HANG
from tests.support.servers import START_S, WAIT_S, write_checkpoint

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
TOKENS = 12
STEP_S = 5.0


@pytest.mark.slow
def test_ranks_are_restarted_after_a_fault_in_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", tokenizer=False)
    sampling = SamplingParams(max_new_tokens=TOKENS)
    model = load(str(checkpoint), dtype=torch.float64)
    expected = [completion.token_ids for completion in generate(model, PROMPTS, sampling)]
    fault_file = tmp_path / "fault"
    monkeypatch.setenv(replaying_rank_process.FAULT_FILE, str(fault_file))
    monkeypatch.setattr(supervisor_module, "RANK_MODULE", replaying_rank_process.MODULE)
    config = ServerConfig(
        model=str(checkpoint),
        dtype="float64",
        kv_tokens_max=8192,
        step_tokens_max=64,
        running_requests_max=4,
        step_timeout_s=STEP_S,
        step_ahead="on",
        tp=2,
        flight_dir=str(tmp_path),
    )
    supervisor, receiver = LocalSupervisor(config), RecordingReceiver()
    supervisor.start(receiver)
    until_ready(supervisor, receiver, START_S)
    for number, fault in enumerate((EXIT, HANG)):
        assert (
            complete(supervisor, receiver, PROMPTS, TOKENS, first=100 * number, within_s=WAIT_S)
            == expected
        )
        pids = supervisor.pids
        fault_file.write_text(fault)
        supervisor.send(Submission(100 * number + 50, [1, 2], SamplingParams(max_new_tokens=500)))
        receiver.until(lambda: len(receiver.losses) > number, WAIT_S)  # noqa: B023
        assert not fault_file.exists(), "the fault was not in a replay"
        reason = receiver.losses[-1][1]
        if fault == EXIT:
            assert "rank 1" in reason and f"exited with code {EXIT_CODE}" in reason
        else:
            assert f"{STEP_S:g}" in reason or "no message" in reason
        receiver.until(lambda: len(receiver.readies) > number + 1, START_S)  # noqa: B023
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    tokens = complete(supervisor, receiver, PROMPTS, TOKENS, first=900, within_s=WAIT_S)
    assert tokens == expected
    supervisor.close()
