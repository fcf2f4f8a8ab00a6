"""The comparison with other engines: one that ends is a line that says so, and the others go on."""

import sys
from pathlib import Path

import pytest

from bench.peers import Engine, Work, table

pytestmark = pytest.mark.slow


def test_an_engine_that_ends_is_told_and_costs_no_row(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    engines = [Engine("transformers", Path(sys.executable), tmp_path / "model") for _ in range(2)]
    try:
        engines[1]._process.kill()
        head, *rows, told, _, _ = table(engines, [Work(2, 8, 2), Work(4, 8, 2)], rounds=1)
    finally:
        for engine in engines:
            engine.close()
    assert "transformers" in head
    assert [row.split()[0] for row in rows] == ["2", "4"], (rows, told)
    assert all(row.split()[-2] == "nan" and "nan" not in row.split()[3:5] for row in rows)
    assert told.startswith("transformers failed at 2 requests")
