"""Adapter residency: the adapters whose rows are on the device, and those that requests wait for.

The scheduler puts adapters on the device and evicts them; it knows only their digests, and reports
changes in `Update`s. The front end knows the names, from the requests that it submits. Routers read
the names in the metrics, so the names of private adapters of tenants are omitted. Prefix adapters
are not counted: their keys and values are in KV blocks, not in the adapter pool. The module has no
locks; the engine calls it under its own lock.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.request import AdapterInfo, AnswerSpec

ADAPTER_NAMES_MAX = 100  # Names in each list of a `ResidencySnapshot`.


@dataclass(frozen=True)
class ResidencySnapshot:
    """Adapters on the device and waiting ones: names without versions, the last used first."""

    resident: tuple[str, ...]
    waiting: tuple[str, ...]  # Requests wait for these adapters, which are not on the device.
    # Number of adapters that fit on the device, if they have the average size of those on it.
    adapters_max: int
    changed_at: float  # Unix time of the last change of the adapters on the device.
    # The adapters in `resident` by name, each in the version that was used last.
    infos: Mapping[str, AdapterInfo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _AdapterUse:
    name: str  # Without version; empty: a tenant's private adapter.
    row_count: int  # Rows of the adapter pool.
    page_count: int  # Pages of the adapter memory.
    info: AdapterInfo


class AdapterResidency:
    """Joins the digests of the adapters on the device with the names in requests.

    `rows_max` is the size of the adapter pool, and `pages_max` that of the adapter memory, of
    which adapters with adapter weights use pages. At most
    `rows_max` + `pages_max` + `requests_max` adapters are remembered: all that can be on the
    device, and one for each unfinished request.
    """

    def __init__(self, rows_max: int, requests_max: int, pages_max: int = 0) -> None:
        self._rows_max = rows_max
        self._pages_max = pages_max
        self._uses_max = rows_max + pages_max + requests_max
        # By digest, the last used adapter last.
        self._uses: OrderedDict[str, _AdapterUse] = OrderedDict()
        self._resident: set[str] = set()
        self._changed_at = time.time()

    def record_use(self, answer: AnswerSpec) -> None:
        """Remember the adapter of an answer that is submitted to the engine loop."""
        adapter_ref = answer.adapter_ref
        if adapter_ref is None or not adapter_ref.uses_device_pools:
            return
        self._uses[adapter_ref.digest] = _AdapterUse(
            _shared_name(answer),
            adapter_ref.row_count if adapter_ref.has_pool_rows else 0,
            -(-adapter_ref.rank_bytes // ADAPTER_PAGE_BYTES),
            answer.adapter_info,
        )
        self._uses.move_to_end(adapter_ref.digest)
        if len(self._uses) > self._uses_max:
            del self._uses[next(digest for digest in self._uses if digest not in self._resident)]

    def apply_changes(self, changes: Mapping[str, bool]) -> None:
        """Apply `Update.adapter_changes`."""
        for digest, is_resident in changes.items():
            if is_resident:
                self._resident.add(digest)
            else:
                self._resident.discard(digest)
        if changes:
            self._changed_at = time.time()

    def clear(self) -> None:
        """Forget the adapters on the device, because the ranks were lost."""
        self.apply_changes(dict.fromkeys(self._resident, False))

    def snapshot(self, waiting_answers: Iterable[AnswerSpec]) -> ResidencySnapshot:
        """Return the current state. `waiting_answers` have no token yet, the newest last."""
        resident = [
            self._uses[digest] for digest in reversed(self._uses) if digest in self._resident
        ]
        waiting = [
            _shared_name(answer)
            for answer in waiting_answers
            if answer.adapter_ref is not None
            and answer.adapter_ref.uses_device_pools
            and answer.adapter_ref.digest not in self._resident
        ]
        names = _distinct_names(use.name for use in resident)
        infos = {use.name: use.info for use in reversed(resident)}  # The last used version wins.
        return ResidencySnapshot(
            names,
            _distinct_names(reversed(waiting)),
            max(len(self._resident), self._capacity(resident)),
            self._changed_at,
            {name: infos[name] for name in names},
        )

    def _capacity(self, resident: Sequence[_AdapterUse]) -> int:
        """Return how many adapters fit that have the average size of the resident ones.

        The pool that is full first decides. Without resident adapters, an adapter has one row.
        """
        rows = sum(use.row_count for use in resident)
        pages = sum(use.page_count for use in resident)
        capacities = []
        if rows or not pages:
            average_rows = -(-rows // len(resident)) if resident else 1
            capacities.append(self._rows_max // max(1, average_rows))
        if pages:
            capacities.append(self._pages_max // -(-pages // len(resident)))
        return min(capacities)


def _shared_name(answer: AnswerSpec) -> str:
    """Return the adapter's name without version; empty: a tenant's private adapter."""
    return "" if answer.is_private else answer.adapter.partition("@")[0]


def _distinct_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first ADAPTER_NAMES_MAX names, without repetitions and private adapters."""
    distinct_names = dict.fromkeys(name for name in names if name)
    return tuple(distinct_names)[:ADAPTER_NAMES_MAX]
