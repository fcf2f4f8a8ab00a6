"""Adapters' rows are read aside from the steps, kept within a number of bytes, and checked."""

import queue
from pathlib import Path

import pytest
import torch

from gpt.adapters.adapter_file import Adapter, Card, build_adapter, save_adapter, table_width
from gpt.config import GPTConfig
from serving.messages import Rows
from serving.worker.adapter_cache import FILL_BYTES_MAX, Loaded, Tables, fill_tokens_max

WIDTH = 4
NETWORK = GPTConfig(
    num_layers=2, hidden_size=WIDTH, num_attention_heads=1, vocab_size=9, max_position_embeddings=16
)
ROWS = 3
BYTES = ROWS * WIDTH * 4
WAIT_S = 10.0


class Shelf:
    """Adapters on disk, and tables that read them."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self.folder = folder
        self.came: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self.tables = Tables(NETWORK, bytes_max, self.came.put)

    def save(self, name: str, seed: int, kind: str = "rows") -> tuple[Adapter, Rows]:
        generator = torch.Generator().manual_seed(seed)
        width = table_width(kind, NETWORK)
        adapter = build_adapter(
            Card(name, kind=kind), torch.randn(ROWS, width, generator=generator)
        )
        path = self.folder / f"{name}.safetensors"
        save_adapter(adapter, path)
        return adapter, Rows(adapter.digest, ROWS, str(path), kind)

    def take(self) -> Loaded:
        loaded = self.came.get(timeout=WAIT_S)
        self.tables.take(loaded)
        return loaded

    def fetch(self, rows: Rows) -> None:
        """Read it and pin it."""
        assert self.tables.pin(rows) == "coming"
        assert self.take().reason == ""
        assert self.tables.pin(rows) == "here"


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 10 * BYTES)
    adapter, rows = shelf.save("one", 1)
    shelf.fetch(rows)
    held = torch.frombuffer(bytearray(shelf.tables.data(rows.digest)), dtype=torch.float32)
    assert torch.equal(held.view(ROWS, WIDTH), adapter.table)
    shelf.tables.close()


def test_an_adapter_that_many_wait_for_is_read_once(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 10 * BYTES)
    _, rows = shelf.save("one", 1)
    assert [shelf.tables.pin(rows) for _ in range(3)] == ["coming"] * 3
    shelf.take()
    assert shelf.tables.pin(rows) == "here"
    assert shelf.came.empty()
    shelf.tables.close()


def test_the_longest_unused_goes_first_and_what_is_named_stays(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 2 * BYTES)
    all_rows = [shelf.save(name, seed)[1] for seed, name in enumerate("abc")]
    for rows in all_rows[:2]:
        shelf.fetch(rows)
    shelf.tables.release(all_rows[1].digest)
    shelf.fetch(all_rows[2])
    assert shelf.tables.held_bytes == 2 * BYTES
    assert shelf.tables.pin(all_rows[0]) == "here"  # Older than the one that went, and named.
    assert shelf.tables.pin(all_rows[1]) == "full"  # All room is named now.
    shelf.tables.release(all_rows[2].digest)
    assert shelf.tables.pin(all_rows[1]) == "coming"
    shelf.tables.close()


def test_one_that_is_larger_than_all_may_be_is_read_if_it_is_alone(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, BYTES // 2)
    _, one = shelf.save("one", 1)
    _, two = shelf.save("two", 2)
    shelf.fetch(one)
    assert shelf.tables.pin(two) == "full"
    shelf.tables.release(one.digest)
    assert shelf.tables.held_bytes == 0
    shelf.fetch(two)
    shelf.tables.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("gone", "there is no adapter"),
        ("other", "a version must not change"),
        ("rows", "use an adapter of this model"),
        ("kind", "use an adapter of this model"),
        ("torn", "one"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_a_sentence(
    wrong: str, said: str, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path, 10 * BYTES)
    _, rows = shelf.save("one", 1)
    path = Path(rows.file)
    if wrong == "gone":
        path.unlink()
    elif wrong == "other":
        shelf.save("one", 2)
    elif wrong == "rows":
        rows = Rows(rows.digest, ROWS + 1, rows.file)
    elif wrong == "kind":
        rows = Rows(rows.digest, ROWS, rows.file, "prefix")
    else:
        path.write_bytes(path.read_bytes()[:-5])
    assert shelf.tables.pin(rows) == "coming"
    loaded = shelf.take()
    assert said in loaded.reason
    assert ";" in loaded.reason  # What is wrong; what to do.
    # The next one that asks may find it mended.
    assert shelf.tables.pin(rows) == "coming"
    shelf.tables.close()


def test_a_prefix_counts_its_own_bytes_and_is_handed_out_in_parts(tmp_path: Path) -> None:
    size = 4 * NETWORK.prefix_width
    shelf = Shelf(tmp_path, ROWS * size + BYTES)
    adapter, prefix = shelf.save("prefix", 1, "prefix")
    _, other = shelf.save("other", 2, "prefix")
    _, rows = shelf.save("rows", 3)
    shelf.fetch(prefix)
    assert shelf.tables.held_bytes == ROWS * size == ROWS * 2 * 2 * WIDTH * 4
    assert shelf.tables.pin(other) == "full"
    assert shelf.tables.pin(rows) == "coming"
    data = adapter.table.numpy().tobytes()
    assert shelf.tables.prefix(prefix.digest, 0, ROWS) == data
    assert shelf.tables.prefix(prefix.digest, 1, 1) == data[size : 2 * size]
    shelf.tables.close()


def test_a_step_brings_a_bounded_part_of_a_prefix() -> None:
    large = NETWORK.with_fields(num_layers=96, moe_layers=(), kv_channels=12288)
    assert fill_tokens_max(large) == FILL_BYTES_MAX // (96 * 2 * 12288 * 4) == 1
    assert fill_tokens_max(large.with_fields(kv_channels=10**6)) == 1
    assert fill_tokens_max(NETWORK) == FILL_BYTES_MAX // (2 * 2 * WIDTH * 4)
