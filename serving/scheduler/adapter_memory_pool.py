"""Adapter memory pool: the ranks' memory for adapter weights, and the writes into it.

Every rank has adapter memory of the same size, in pages. An adapter takes as many pages as the rank
needs that needs the most. Its changes are written in pieces, over several steps if they are large,
so that the sequences of a step do not wait long. A sequence pins its adapter from the beginning of
the write until it ends or is preempted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import AdapterLinearsWrite, AdapterRef
from serving.scheduler.adapter_pool import AdapterPool


@dataclass(slots=True)
class _Write:
    """A write in progress. Linears are numbered in the order of their keys."""

    adapter_ref: AdapterRef
    page_start: int
    written_count: int = 0  # Linears in steps that are planned.

    @property
    def linear_bytes(self) -> int:
        """The mean size of a linear, at least 1."""
        return max(1, self.adapter_ref.linear_bytes // self.adapter_ref.linear_count)


class AdapterMemoryPool:
    """Assigns pages to adapters, and divides their writes into pieces."""

    def __init__(self, pages: int) -> None:
        self._pool = AdapterPool(pages)
        self._writes: dict[str, _Write] = {}  # By digest, in the order of their beginning.
        # The bytes that the next step writes, and its limits (`begin_step`).
        self._step_bytes = self._step_bytes_max = self._prefill_bytes_max = 0
        self._last_pieces: set[str] = set()  # Digests of the adapters that the next step completes.

    @property
    def resident_count(self) -> int:
        return self._pool.resident_count

    @property
    def loads(self) -> int:
        return self._pool.loads

    @property
    def evictions(self) -> int:
        return self._pool.evictions

    @property
    def used_bytes(self) -> int:
        """The bytes on each rank that adapters have, also if no sequence uses the adapters."""
        return self._pool.used_count * ADAPTER_PAGE_BYTES

    def pop_changes(self) -> dict[str, bool]:
        """See `AdapterPool.pop_changes`."""
        return self._pool.pop_changes()

    def is_resident(self, adapter_ref: AdapterRef) -> bool:
        """Whether the adapter has pages, also while it is being written."""
        return self._pool.is_resident(adapter_ref.digest)

    def is_written(self, digest: str) -> bool:
        """Whether the next step, or an earlier one, completes the write of a pinned adapter."""
        return digest not in self._writes

    def allows_prefill(self, digest: str) -> bool:
        """Whether the next step may have the prefill of a sequence with a written adapter."""
        return digest not in self._last_pieces or self._step_bytes <= self._prefill_bytes_max

    def pin(self, adapter_ref: AdapterRef) -> int | None:
        """Pin an adapter for one more sequence, and return its first page; None: no space.

        If the adapter was not resident, its write begins.
        """
        pages = pages_for(adapter_ref)
        if not self._pool.fits(adapter_ref.digest, pages):
            return None
        page_start, must_write = self._pool.pin(adapter_ref.digest, pages)
        if must_write:
            self._writes[adapter_ref.digest] = _Write(adapter_ref, page_start)
        return page_start

    def unpin(self, digest: str) -> None:
        """Remove the pin of one sequence. The write of an adapter without pins is abandoned."""
        self._pool.unpin(digest)
        if digest in self._writes and not self._pool.is_pinned(digest):
            del self._writes[digest]
            self._pool.remove(digest)

    def begin_step(self, bytes_max: int, prefill_bytes_max: int) -> list[AdapterLinearsWrite]:
        """Return the writes in progress that the next step, of at most `bytes_max`, continues.

        A step writes at least one linear of the oldest write. If it writes more than
        `prefill_bytes_max`, it has no prefill with an adapter that it completes.
        """
        self._step_bytes, self._step_bytes_max = 0, bytes_max
        self._prefill_bytes_max = prefill_bytes_max
        self._last_pieces.clear()
        return [piece for digest in list(self._writes) for piece in self._next_pieces(digest)]

    def write_pieces(self, digest: str) -> list[AdapterLinearsWrite]:
        """Return the first piece of a write that was begun after `begin_step`, if it fits."""
        return list(self._next_pieces(digest)) if digest in self._writes else []

    def _next_pieces(self, digest: str) -> Iterator[AdapterLinearsWrite]:
        write = self._writes[digest]
        bytes_left = self._step_bytes_max - self._step_bytes
        if bytes_left <= 0:
            return
        adapter_ref, first = write.adapter_ref, write.written_count
        count = min(adapter_ref.linear_count - first, max(1, bytes_left // write.linear_bytes))
        self._step_bytes += count * write.linear_bytes
        write.written_count += count
        if write.written_count == adapter_ref.linear_count:
            del self._writes[digest]
            self._last_pieces.add(digest)
        start, nbytes = (
            pages * ADAPTER_PAGE_BYTES for pages in (write.page_start, pages_for(adapter_ref))
        )
        yield AdapterLinearsWrite(start, nbytes, digest, first, count)

    def check_running(self, users: int) -> None:
        """Assert that the pages are consistent; `users` running sequences have pinned adapters.

        Waiting sequences may have pinned adapters too.
        """
        assert self._pool.user_count >= users, "a running sequence has not pinned its adapter"
        self._pool.check(self._pool.user_count)
        assert all(self._pool.is_pinned(digest) for digest in self._writes)


def pages_for(adapter_ref: AdapterRef) -> int:
    """Return the number of pages that an adapter takes."""
    return -(-adapter_ref.rank_bytes // ADAPTER_PAGE_BYTES)
