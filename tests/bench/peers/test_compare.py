"""The comparison with other engines: what is compared, and what becomes of an engine that ends."""

import sys
from pathlib import Path

import numpy as np
import pytest

from bench.harness.machine_limits import Limits
from bench.harness.model_shapes import GPT2, LLAMA
from bench.harness.roofline import Limit, Model
from bench.harness.targets import PROMISES, Row
from bench.peers.compare import TABLES, Engine, Work, measured
from bench.peers.llama_cpp_engine import _turned
from gpt.formats.registry import open_checkpoint

TINY = {"vocab_size": 320, "n_positions": 256, "n_embd": 32, "n_layer": 1, "n_head": 2}
LIMIT = Limit("bandwidth", "B", {"a way": [1e9]})
LIMITS = Limits(LIMIT, LIMIT, LIMIT)


def test_every_promise_beside_a_peer_belongs_to_a_row_of_a_table() -> None:
    found = {
        table.promised(work, peer)
        for table in TABLES
        for work in table.works
        for peer in table.peers
    }
    assert found - {None} == {name for name in PROMISES if name.startswith("peers/")}


def test_decoding_alone_does_not_count_the_first_token() -> None:
    whole, alone = Work(1, 128, 128), Work(1, 128, 128, decoding=True)
    assert (whole.tokens, alone.tokens, Work(1, 960, 1).tokens) == (128, 127, 960)


def test_an_engine_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is missing; make peers installs it"):
        Engine("vllm", tmp_path / "bin" / "python", tmp_path / "model")


def test_llama_cpp_gets_rotated_channels_beside_their_partners() -> None:
    """Halves of a head are partners to transformers, neighbours to llama.cpp."""
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    rows = np.arange(8, dtype=np.float32)[:, None]  # Two heads of four channels.
    turned = _turned("model.layers.0.self_attn.q_proj.weight", rows, config)
    assert turned[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    shared = _turned("model.layers.0.self_attn.k_proj.weight", rows[:4], config)
    assert shared[:, 0].tolist() == [0, 2, 1, 3]
    kept = _turned("model.layers.0.self_attn.v_proj.weight", rows[:4], config)
    assert kept[:, 0].tolist() == [0, 1, 2, 3]


def test_llama_cpp_gets_gpt2s_matrices_turned_and_its_tables_as_they_are() -> None:
    table, config = np.arange(6, dtype=np.float32).reshape(2, 3), {"model_type": "gpt2"}
    assert _turned("transformer.h.0.attn.c_attn.weight", table, config).tolist() == table.T.tolist()
    assert _turned("transformer.wte.weight", table, config).tolist() == table.tolist()


@pytest.mark.slow
def test_both_shapes_are_read_by_us_as_transformers_wrote_them(tmp_path: Path) -> None:
    for shape, layers in ((GPT2, 12), (LLAMA, 24)):
        shape.write(tmp_path / shape.kind)
        config = open_checkpoint(tmp_path / shape.kind).config
        assert (config.num_layers, config.dtype) == (layers, "bfloat16")


@pytest.mark.slow
def test_an_engine_that_ends_is_told_and_costs_no_row(tmp_path: Path) -> None:
    GPT2.write(tmp_path / "model", **TINY)
    python = Path(sys.executable)
    ours = Engine("ours", python, tmp_path / "model")
    peer = Engine("transformers", python, tmp_path / "model")
    peer.name = "vllm"  # Beside which something is promised.
    works = [Work(8, 8, 2), Work(32, 8, 2)]
    network = Model(open_checkpoint(tmp_path / "model").config)
    try:
        peer._process.kill()
        told = list(measured(TABLES[0], works, [ours, peer], network, LIMITS, 1))
    finally:
        for engine in (ours, peer):
            engine.close()
    rows = [item for item in told if isinstance(item, Row)]
    assert [row.promise.name for row in rows] == ["peers/gpt2/8/vllm", "peers/gpt2/32/vllm"]
    assert all(row.verdict == "not run" and "failed at 8" in row.missing for row in rows)
    lines_ = [str(item) for item in told if "failed" in str(item) and "+-" in str(item)]
    assert len(lines_) == 2, told  # Ours was measured all the same.
