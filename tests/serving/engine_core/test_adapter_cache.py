"""Adapter cache: rows are read by a thread, kept within a limit of bytes, and checked."""

import queue
from pathlib import Path

import msgspec
import pytest
import torch

from gpt.adapters import adapter_file as adapter_file_module
from gpt.adapters.adapter_file import Adapter, Card, build_adapter, save_adapter, table_width
from gpt.config import GPTConfig
from gpt.files import file_identity as file_identity_module
from gpt.files.buffer_pool import POOLED_BYTES_MIN, BufferPool
from gpt.files.file_identity import UNKNOWN, file_identity
from gpt.linear_adapter import LinearAdapter
from serving.engine_core import adapter_cache as adapter_cache_module
from serving.engine_core.adapter_cache import (
    PREFIX_WRITE_BYTES_MAX,
    AdapterCache,
    prefix_write_tokens_max,
)
from serving.engine_core.adapter_reader import AdapterReadResult
from serving.messages import AdapterRef
from tests.support.servers import WAIT_S

WIDTH = 4
NETWORK = GPTConfig(
    num_layers=2, hidden_size=WIDTH, num_attention_heads=1, vocab_size=9, max_position_embeddings=16
)
ROWS = 3
BYTES = ROWS * WIDTH * 4


class CachedAdapters:
    """Adapters on disk, and an adapter cache that reads them."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self.folder = folder
        self.read_results: queue.SimpleQueue[AdapterReadResult] = queue.SimpleQueue()
        self.cache = AdapterCache(NETWORK, bytes_max, self.read_results.put)

    def save(self, name: str, seed: int, kind: str = "rows") -> tuple[Adapter, AdapterRef]:
        generator = torch.Generator().manual_seed(seed)
        width = table_width(kind, NETWORK)
        adapter = build_adapter(
            Card(name, kind=kind), torch.randn(ROWS, width, generator=generator)
        )
        path = self.folder / f"{name}.safetensors"
        save_adapter(adapter, path)
        return adapter, AdapterRef(adapter.digest, ROWS, str(path), kind)

    def save_linears(self, name: str, seed: int, rank: int = 64) -> AdapterRef:
        """Save a LoRA adapter. With rank 64, its weights take 2 MiB, which a pooled buffer has."""
        width = POOLED_BYTES_MIN // (4 * 64)
        generator = torch.Generator().manual_seed(seed)
        change = LinearAdapter(
            torch.randn(rank, width, generator=generator),
            torch.randn(width, rank, generator=generator),
        )
        linears = {"decoder.layers.0.self_attention.linear_proj": change}
        adapter = build_adapter(Card(name), None, linears)
        path = self.folder / f"{name}.safetensors"
        save_adapter(adapter, path)
        return AdapterRef(
            adapter.digest,
            0,
            str(path),
            "linears",
            linear_count=1,
            linear_bytes=adapter.nbytes,
            identity=file_identity(path),
        )

    def take(self) -> AdapterReadResult:
        read_result = self.read_results.get(timeout=WAIT_S)
        self.cache.insert(read_result)
        return read_result

    def has(self, adapter_ref: AdapterRef) -> bool:
        """Whether the cache has the adapter's rows; only rows that it has can be read."""
        try:
            self.cache.pinned_rows(adapter_ref.digest)
        except KeyError:
            return False
        return True

    def fetch(self, adapter_ref: AdapterRef) -> None:
        """Read an adapter into the cache and pin it."""
        assert self.cache.pin(adapter_ref) == "reading"
        assert self.take().reason == ""
        assert self.cache.pin(adapter_ref) == "pinned"


def test_cached_rows_equal_the_saved_adapter(tmp_path: Path) -> None:
    adapters = CachedAdapters(tmp_path, 10 * BYTES)
    adapter, adapter_ref = adapters.save("one", 1)
    adapters.fetch(adapter_ref)
    cached_rows = torch.frombuffer(
        bytearray(adapters.cache.pinned_rows(adapter_ref.digest)), dtype=torch.float32
    )
    assert torch.equal(cached_rows.view(ROWS, WIDTH), adapter.table)
    adapters.cache.close()


def test_an_adapter_requested_twice_is_read_once(tmp_path: Path) -> None:
    adapters = CachedAdapters(tmp_path, 10 * BYTES)
    _, adapter_ref = adapters.save("one", 1)
    assert [adapters.cache.pin(adapter_ref) for _ in range(3)] == ["reading"] * 3
    adapters.take()
    assert adapters.cache.pin(adapter_ref) == "pinned"
    assert adapters.read_results.empty()
    adapters.cache.close()


def test_a_prefetched_adapter_is_read_once_and_not_pinned(tmp_path: Path) -> None:
    adapters = CachedAdapters(tmp_path, BYTES)
    _, first = adapters.save("first", 1)
    _, second = adapters.save("second", 2)
    adapters.cache.prefetch(first)
    assert adapters.cache.pin(first) == "reading"
    assert adapters.take().adapter_ref == first
    adapters.cache.prefetch(first)  # It is cached.
    adapters.cache.prefetch(second)
    assert adapters.take().adapter_ref == second
    assert not adapters.has(first) and adapters.read_results.empty()
    assert adapters.cache.pin(second) == "pinned"
    adapters.cache.prefetch(first)  # It does not fit beside the pinned adapter.
    assert adapters.cache.pin(first) == "full"
    adapters.cache.close()


def test_eviction_is_lru_and_spares_pinned_adapters(tmp_path: Path) -> None:
    adapters = CachedAdapters(tmp_path, 2 * BYTES)
    adapter_refs = [adapters.save(name, seed)[1] for seed, name in enumerate("abc")]
    for adapter_ref in adapter_refs[:2]:
        adapters.fetch(adapter_ref)
    adapters.cache.unpin(adapter_refs[1].digest)
    adapters.fetch(adapter_refs[2])
    assert [adapters.has(ref) for ref in adapter_refs] == [True, False, True]
    assert adapters.cache.pin(adapter_refs[0]) == "pinned"  # Older than the evicted adapter.
    assert adapters.cache.pin(adapter_refs[1]) == "full"  # All of the cache is pinned now.
    adapters.cache.unpin(adapter_refs[2].digest)
    assert adapters.cache.pin(adapter_refs[1]) == "reading"
    adapters.cache.close()


def test_an_adapter_is_evicted_if_the_next_read_would_need_new_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that prefaults buffers is late; an adapter's weights take more than a MiB."""
    buffers = BufferPool(free_bytes_max=64 << 20)
    monkeypatch.setattr(buffers, "prefault_next", lambda: None)
    for module in (adapter_file_module, adapter_cache_module):
        monkeypatch.setattr(module, "BUFFERS", buffers)
    monkeypatch.setattr(file_identity_module, "TIME_RESOLUTION_NS", 0)
    adapters = CachedAdapters(tmp_path, 64 << 20)
    first, second, third, fourth = (adapters.save_linears(f"task{seed}", seed) for seed in range(4))
    _, rows = adapters.save("rows", 9)
    adapters.fetch(rows)
    adapters.cache.unpin(rows.digest)
    adapters.fetch(first)
    adapters.fetch(second)  # No other adapter may be evicted: the first one is pinned.
    assert adapters.has(first) and buffers.lacks(second.linear_bytes)
    adapters.cache.unpin(first.digest)
    adapters.fetch(third)
    assert not adapters.has(first) and adapters.has(second) and adapters.has(third)
    assert not buffers.lacks(second.linear_bytes)
    adapters.cache.unpin(second.digest)
    adapters.fetch(fourth)
    assert not adapters.has(second) and adapters.has(third)
    assert adapters.has(rows), "without it, the next read would still need new memory"
    adapters.cache.unpin(third.digest)
    adapters.cache.unpin(fourth.digest)
    adapters.fetch(adapters.save_linears("large", 4, rank=256))
    assert adapters.has(third) and adapters.has(fourth), "their buffers are too small"
    adapters.cache.close()


def test_an_adapter_over_the_limit_is_cached_if_nothing_else_is_pinned(tmp_path: Path) -> None:
    adapters = CachedAdapters(tmp_path, BYTES // 2)
    _, first = adapters.save("one", 1)
    _, second = adapters.save("two", 2)
    adapters.fetch(first)
    assert adapters.cache.pin(second) == "full"
    adapters.cache.unpin(first.digest)
    assert not adapters.has(first)
    adapters.fetch(second)
    adapters.cache.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("deleted", "does not exist"),
        ("replaced", "versions are immutable"),
        ("rows", "use an adapter of this model"),
        ("kind", "use an adapter of this model"),
        ("truncated", "one"),
    ],
)
@pytest.mark.parametrize("is_identified", [False, True])
def test_an_unusable_adapter_file_gives_a_reason(
    is_identified: bool,
    fault: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_identity_module, "TIME_RESOLUTION_NS", 0)
    adapters = CachedAdapters(tmp_path, 10 * BYTES)
    _, adapter_ref = adapters.save("one", 1)
    path = Path(adapter_ref.file)
    identity = file_identity(path) if is_identified else UNKNOWN
    adapter_ref = msgspec.structs.replace(adapter_ref, identity=identity)
    if fault == "deleted":
        path.unlink()
    elif fault == "replaced":
        adapters.save("one", 2)
    elif fault == "rows":
        adapter_ref = msgspec.structs.replace(adapter_ref, row_count=ROWS + 1)
    elif fault == "kind":
        adapter_ref = msgspec.structs.replace(adapter_ref, kind="prefix")
    else:
        path.write_bytes(path.read_bytes()[:-5])
    assert adapters.cache.pin(adapter_ref) == "reading"
    read_result = adapters.take()
    assert reason in read_result.reason
    assert ";" in read_result.reason  # The reason, then the remedy.
    # The next request reads the file again, which may be repaired.
    assert adapters.cache.pin(adapter_ref) == "reading"
    adapters.cache.close()


def test_a_file_that_was_checked_before_is_read_without_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = CachedAdapters(tmp_path, 10 * BYTES)
    adapter, adapter_ref = adapters.save("one", 1)
    path = Path(adapter_ref.file)
    assert file_identity(path) == UNKNOWN  # The file is new.
    monkeypatch.setattr(file_identity_module, "TIME_RESOLUTION_NS", 0)
    adapter_ref = msgspec.structs.replace(adapter_ref, identity=file_identity(path))
    # This function computes the digest; here it would raise an error.
    monkeypatch.setattr(adapter_cache_module, "open_adapter", None)
    adapters.fetch(adapter_ref)
    assert adapters.cache.pinned_rows(adapter.digest) == adapter.table.numpy().tobytes()
    adapters.cache.close()


def test_a_prefix_adapter_is_sized_by_its_width_and_read_in_parts(tmp_path: Path) -> None:
    token_bytes = 4 * NETWORK.prefix_width
    adapters = CachedAdapters(tmp_path, ROWS * token_bytes + BYTES)
    adapter, prefix = adapters.save("prefix", 1, "prefix")
    _, other = adapters.save("other", 2, "prefix")
    _, adapter_ref = adapters.save("rows", 3)
    adapters.fetch(prefix)
    cached_bytes = len(adapters.cache.pinned_rows(prefix.digest))
    assert cached_bytes == ROWS * token_bytes == ROWS * 2 * 2 * WIDTH * 4
    assert adapters.cache.pin(other) == "full"
    assert adapters.cache.pin(adapter_ref) == "reading"
    prefix_bytes = adapter.table.numpy().tobytes()
    assert adapters.cache.pinned_prefix_rows(prefix.digest, 0, ROWS) == prefix_bytes
    assert (
        adapters.cache.pinned_prefix_rows(prefix.digest, 1, 1)
        == prefix_bytes[token_bytes : 2 * token_bytes]
    )
    adapters.cache.close()


def test_prefix_tokens_per_step_are_bounded() -> None:
    large = NETWORK.with_fields(num_layers=96, moe_layers=(), kv_channels=12288)
    assert prefix_write_tokens_max(large) == PREFIX_WRITE_BYTES_MAX // (96 * 2 * 12288 * 4) == 1
    assert prefix_write_tokens_max(large.with_fields(kv_channels=10**6)) == 1
    assert prefix_write_tokens_max(NETWORK) == PREFIX_WRITE_BYTES_MAX // (2 * 2 * WIDTH * 4)
