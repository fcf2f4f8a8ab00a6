"""Worker start-up: the order of its checks and of its steps, alone and with other ranks."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from gpt.cpu import int8_linear
from gpt.errors import CheckpointError, ConfigError, PreambleError
from gpt.formats.registry import open_checkpoint
from gpt.parallel.mesh import Mesh
from gpt.reference_logits.proof_file import PROOF_FILE
from gpt.reference_logits.replay import compute_proof
from serving.config import ServerConfig
from serving.worker.startup import (
    WorkerReport,
    build_worker,
    combine_reports,
    measure_model,
    open_for_serving,
)
from tests.support.servers import CONFIG as MODEL
from tests.support.servers import write_checkpoint
from tests.support.trained_tokenizers import sentencepiece_model

T = TypeVar("T")

CPU = torch.device("cpu")
KV_TOKENS = 640


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a proof."""
    folder = write_checkpoint(tmp_path_factory.mktemp("startup"), tokenizer=False)
    compute_proof(open_checkpoint(folder)).save(folder)
    return folder


def config_of(folder: Path, **settings: object) -> ServerConfig:
    return ServerConfig(str(folder), **{"kv_tokens_max": KV_TOKENS, **settings})


class RecordedPhases:
    """Runs phases, and records the log events of each."""

    def __init__(self, caplog: pytest.LogCaptureFixture, failing_phase: int | None = None) -> None:
        self.events: list[list[str]] = []
        self._caplog = caplog
        self._failing_phase = failing_phase

    def run_phase(self, phase: Callable[[], T], /) -> T:
        self._caplog.clear()
        with self._caplog.at_level(logging.INFO):
            output = phase()
        messages = self._caplog.messages
        self.events.append([message.split()[0].removeprefix("event=") for message in messages])
        if len(self.events) == self._failing_phase:
            raise RuntimeError("another rank has failed")
        return output


def test_checks_before_loading_run_in_a_fixed_order(folder: Path, tmp_path: Path) -> None:
    """A checkpoint has every fault at first; each refusal names the first fault that remains."""
    faulty = shutil.copytree(folder, tmp_path / "checkpoint")
    (faulty / PROOF_FILE).write_bytes(b"no proof")
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"no tokenizer")
    config = config_of(
        tmp_path / "none", tp=3, kv_dtype="fp8", tokenizer=str(tokenizer), true_vocab_size=100
    )

    def refusal() -> str:
        with pytest.raises(PreambleError) as refused:
            open_for_serving(config, CPU)
        return str(refused.value)

    assert str(tmp_path / "none") in refusal()
    config = config.with_fields(model=str(faulty))
    assert "tp" in refusal()
    config = config.with_fields(tp=1)
    assert "the device is cpu" in refusal()
    config = config.with_fields(kv_dtype="auto")
    assert PROOF_FILE in refusal()
    config = config.with_fields(prove=False)
    assert str(tokenizer) in refusal()
    tokenizer.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    assert "the model's vocabulary ends at 99" in refusal()
    opened = open_for_serving(config.with_fields(true_vocab_size=None), CPU)
    assert opened.proof is None
    assert opened.checkpoint.config.vocab_size == MODEL.vocab_size


def test_the_proof_is_verified_after_packing_once_all_ranks_have_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder, dtype="bfloat16")
    phases = RecordedPhases(caplog)
    opened = open_for_serving(config, CPU)
    worker = build_worker(opened, Mesh.single(), config, run_phase=phases.run_phase)
    loading_events, proving_events = phases.events
    assert {"weights_packed", "weights_not_packed"} & set(loading_events)
    assert proving_events == ["proof_replayed"]
    assert worker.report.proof is not None
    difference, limit, matches, positions = worker.report.proof
    assert difference <= limit
    assert 0 < matches <= positions
    assert worker.report.divergence is None


@pytest.mark.skipif(not int8_linear.has_int8_gemm(), reason="this machine does not multiply bytes")
def test_the_proof_is_verified_before_weights_are_quantized(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder, dtype="bfloat16", weights="int8", divergence_max=100.0)
    phases = RecordedPhases(caplog)
    opened = open_for_serving(config, CPU)
    worker = build_worker(opened, Mesh.single(), config, run_phase=phases.run_phase)
    loading_events, proving_events = phases.events
    assert "weights_packed" not in loading_events
    assert proving_events.index("proof_replayed") < proving_events.index("weights_packed")
    assert worker.report.divergence is not None
    plain_config = config.with_fields(weights="auto")
    plain_worker = build_worker(opened, Mesh.single(), plain_config)
    assert 0 < worker.report.weight_bytes < plain_worker.report.weight_bytes


def test_the_second_phase_does_not_begin_after_a_failure_elsewhere(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder)
    phases = RecordedPhases(caplog, failing_phase=1)
    with pytest.raises(RuntimeError, match="another rank has failed"):
        build_worker(
            open_for_serving(config, CPU), Mesh.single(), config, run_phase=phases.run_phase
        )
    assert len(phases.events) == 1
    assert "event=proof_replayed" not in caplog.text


def test_weights_that_differ_from_the_proof_are_refused(folder: Path) -> None:
    config = config_of(folder)
    opened = open_for_serving(config, CPU)
    assert opened.proof is not None
    wrong_proof = replace(opened.proof, logits=opened.proof.logits + 3.0)
    with pytest.raises(CheckpointError, match="differ from the reference logits in its proof file"):
        build_worker(replace(opened, proof=wrong_proof), Mesh.single(), config)


def test_a_model_that_the_caller_has_loaded_is_measured_in_the_same_way(folder: Path) -> None:
    config = config_of(folder, prove=False, linear_backend="torch")
    worker = build_worker(open_for_serving(config, CPU), Mesh.single(), config)
    assert worker.report == measure_model(
        worker.model, config.scheduler_config, config.cache_config
    )
    assert (worker.report.kv_blocks - 1) * config.cache_config.kv_block_tokens == KV_TOKENS


def test_kv_blocks_must_fit_into_this_ranks_share_of_memory(folder: Path) -> None:
    config = config_of(folder, prove=False)
    opened = open_for_serving(config, CPU)
    assert build_worker(opened, Mesh.single(), config).report.kv_blocks > 1
    with pytest.raises(ConfigError, match="but 0 are available"):
        build_worker(opened, Mesh.single(), config, ranks_sharing_memory=1 << 60)


def test_a_report_of_all_ranks_has_the_smallest_pool_and_the_last_stages_numbers() -> None:
    first_stage = WorkerReport(kv_blocks=70, weight_bytes=100, step_bytes=7)
    last_stage = WorkerReport(50, 20, proof=[0.1, 1.0, 8.0, 9.0], divergence=[0.2, 0.9, 9.0])
    assert combine_reports([first_stage, last_stage]) == WorkerReport(
        50, 120, last_stage.proof, last_stage.divergence, step_bytes=7
    )
    assert combine_reports([first_stage]) == first_stage
