"""In-process transport: it reports the same engine as a rank process with the same checkpoint."""

from pathlib import Path

import pytest

from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from gpt.reference_logits.replay import compute_proof
from serving.config import ServerConfig
from serving.ranks.supervisor import LocalSupervisor
from serving.service.service import open_in_process
from tests.support.engine_requests import start_engine
from tests.support.models import CLASSIC, MIXED_WINDOWS, build
from tests.support.recording_receiver import RecordingReceiver, until_ready
from tests.support.servers import START_S, write_checkpoint


def test_an_in_process_engine_reports_the_same_ready_message_as_a_rank_process(
    tmp_path: Path,
) -> None:
    checkpoint = write_checkpoint(tmp_path, tokenizer=False)
    compute_proof(open_checkpoint(checkpoint)).save(checkpoint)
    config = ServerConfig(str(checkpoint), dtype="float64", kv_tokens_max=640)
    supervisor = LocalSupervisor(config)
    ear = RecordingReceiver()
    supervisor.start(ear)
    rank_process = until_ready(supervisor, ear, START_S)
    supervisor.close()
    with open_in_process(config) as service:
        in_process = service.engine.ready_message
    assert in_process is not None
    assert in_process.kv_tokens == rank_process.kv_tokens == 640
    assert in_process.weight_bytes == rank_process.weight_bytes
    assert in_process.dtype == rank_process.dtype == "float64"
    assert in_process.batch_invariant == rank_process.batch_invariant
    assert in_process.divergence is rank_process.divergence is None
    assert in_process.proof is not None and rank_process.proof is not None
    # The difference depends on the number of threads in its last digits.
    assert in_process.proof[1:] == rank_process.proof[1:]
    assert in_process.proof[0] == pytest.approx(rank_process.proof[0], abs=1e-6)


@pytest.mark.parametrize(("config", "groups"), [(CLASSIC, 1), (MIXED_WINDOWS, 3)])
def test_the_ready_message_counts_the_blocks_of_all_kv_groups(
    config: GPTConfig, groups: int
) -> None:
    engine = start_engine(build(config))
    ready = engine.ready_message
    engine.close()
    assert ready is not None
    assert (ready.kv_tokens, ready.kv_blocks) == (512, 512 // 4 * groups)
