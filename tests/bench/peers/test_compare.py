"""Peer comparison: targets, model files for other engines, and engines that fail."""

import sys
from pathlib import Path

import numpy as np
import pytest

from bench.harness.machine_limits import MachineLimits
from bench.harness.model_shapes import GPT2, LLAMA
from bench.harness.roofline import MeasuredLimit, RooflineModel
from bench.harness.targets import TARGETS, Row
from bench.peers.compare import TABLES, EngineProcess, PeerWorkload, measure_table
from bench.peers.llama_cpp_engine import _gguf_layout
from bench.peers.lora_adapters import save_random_adapters
from gpt.formats.registry import open_checkpoint

TINY = {"vocab_size": 320, "n_positions": 256, "n_embd": 32, "n_layer": 1, "n_head": 2}
TINY_LLAMA = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LIMIT = MeasuredLimit("bandwidth", "B", {"a method": [1e9]})
LIMITS = MachineLimits(LIMIT, LIMIT, LIMIT)


def test_every_peer_target_belongs_to_a_table() -> None:
    names = {
        table.target_name(work, peer)
        for table in TABLES
        for work in table.workloads
        for peer in table.peers
    }
    assert names - {None} == {name for name in TARGETS if name.startswith("peers/")}


def test_decode_only_does_not_count_the_first_token() -> None:
    assert PeerWorkload(1, 128, 128).counted_tokens == 128
    assert PeerWorkload(1, 128, 128, decode_only=True).counted_tokens == 127
    assert PeerWorkload(1, 960, 1).counted_tokens == 960


def test_a_missing_engine_names_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="run: make peers"):
        EngineProcess("vllm", tmp_path / "bin" / "python", tmp_path / "model")


def test_gguf_interleaves_rotary_channels() -> None:
    """transformers pairs channel i with i + half a head; llama.cpp pairs adjacent channels."""
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    rows = np.arange(8, dtype=np.float32)[:, None]  # Two heads of four channels.
    query = _gguf_layout("model.layers.0.self_attn.q_proj.weight", rows, config)
    assert query[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    key = _gguf_layout("model.layers.0.self_attn.k_proj.weight", rows[:4], config)
    assert key[:, 0].tolist() == [0, 2, 1, 3]
    value = _gguf_layout("model.layers.0.self_attn.v_proj.weight", rows[:4], config)
    assert value[:, 0].tolist() == [0, 1, 2, 3]


def test_gguf_transposes_gpt2_linears_but_not_embeddings() -> None:
    config = {"model_type": "gpt2"}
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    linear = _gguf_layout("transformer.h.0.attn.c_attn.weight", weight, config)
    assert linear.tolist() == weight.T.tolist()
    embedding = _gguf_layout("transformer.wte.weight", weight, config)
    assert embedding.tolist() == weight.tolist()


@pytest.mark.slow
def test_saved_model_shapes_are_readable_checkpoints(tmp_path: Path) -> None:
    for shape, layers in ((GPT2, 12), (LLAMA, 24)):
        shape.save_random(tmp_path / shape.model_class)
        config = open_checkpoint(tmp_path / shape.model_class).config
        assert (config.num_layers, config.dtype) == (layers, "bfloat16")


@pytest.mark.slow
def test_our_engine_serves_the_adapters_of_the_comparison(tmp_path: Path) -> None:
    LLAMA.save_random(tmp_path / "model", **TINY_LLAMA)
    save_random_adapters(tmp_path / "model", tmp_path / "adapters", 2)
    python, model = Path(sys.executable), tmp_path / "model"
    engine = EngineProcess("ours", python, model, adapters=tmp_path / "adapters")
    try:
        seconds = engine.time_generation([[1, 2, 3], [4, 5], [6]], 3)
        assert engine.failure == "" and seconds > 0
    finally:
        engine.close()


@pytest.mark.slow
def test_rows_of_an_engine_that_exited_have_the_verdict_not_run(tmp_path: Path) -> None:
    GPT2.save_random(tmp_path / "model", **TINY)
    python = Path(sys.executable)
    ours = EngineProcess("ours", python, tmp_path / "model")
    peer = EngineProcess("transformers", python, tmp_path / "model")
    peer.name = "vllm"  # A name with targets.
    workloads = [PeerWorkload(8, 8, 2), PeerWorkload(32, 8, 2)]
    network = RooflineModel(open_checkpoint(tmp_path / "model").config)
    try:
        peer._process.kill()
        outputs = list(measure_table(TABLES[0], workloads, [ours, peer], network, LIMITS, 1))
    finally:
        for engine in (ours, peer):
            engine.close()
    rows = [output for output in outputs if isinstance(output, Row)]
    assert [row.target.name for row in rows] == ["peers/gpt2/8/vllm", "peers/gpt2/32/vllm"]
    assert all(row.verdict == "not run" and "failed at 8" in row.not_run_reason for row in rows)
    lines = [str(output) for output in outputs]
    measured_lines = [line for line in lines if "failed" in line and "+-" in line]
    assert len(measured_lines) == 2, outputs  # Our engine was still measured.
