"""Choice of a replica for the calls of an adapter: rendezvous hashing with a bound on the load.

The cached beginning of a prompt is its adapter, so calls of an adapter should go to one replica,
unless it has more than LOAD_BOUND times the mean of open calls. The choice depends only on the
names of the replicas and on their load, so all proxies make the same choice.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

LOAD_BOUND = 1.5

T = TypeVar("T")


def choose_by_affinity(
    replicas: Sequence[T],
    affinity: str,
    name_of: Callable[[T], str],
    open_calls: Callable[[T], int],
) -> T:
    """Return the replica with the highest hash among those that are not overloaded."""
    limit = math.ceil(LOAD_BOUND * (1 + sum(map(open_calls, replicas))) / len(replicas))
    available = [replica for replica in replicas if open_calls(replica) < limit]
    return max(available, key=lambda replica: _weight(name_of(replica), affinity))


def _weight(name: str, affinity: str) -> bytes:
    return hashlib.sha256(f"{name}\n{affinity}".encode()).digest()
