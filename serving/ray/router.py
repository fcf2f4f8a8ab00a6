"""Request router of Ray Serve: calls of an adapter go to one replica, as long as it has capacity.

The cached beginning of a prompt is its adapter, so the rule is rendezvous hashing of the header
x-preamble-affinity (`tenant/adapter`, from the clients) with a bound on the load: a replica with
more than LOAD_BOUND times the mean of open calls is passed over. Every proxy makes the same choice
without knowing the others. Calls without the header go to the less loaded of two random replicas.
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

AFFINITY_HEADER = "x-preamble-affinity"
LOAD_BOUND = 1.5

T = TypeVar("T")


class AdapterRouter(RequestRouter):
    """Chooses the replica of each call, in a proxy of Serve."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the preferred group first. Serve takes the least loaded of it.

        A replica whose ranks are being restarted is in the last group.
        """
        if pending_request is not None:
            # If no replica accepts the call, Serve waits a little before it asks again.
            pending_request.routing_context.should_backoff = True
        ready = [
            replica for replica in candidate_replicas if replica.routing_stats.get("is_ready", True)
        ]
        others = [replica for replica in candidate_replicas if replica not in ready]
        if not ready:
            return [others]
        affinity = _affinity(pending_request)
        if affinity:
            preferred = [
                choose_by_affinity(
                    ready,
                    affinity,
                    lambda replica: replica.replica_id.unique_id,
                    self._open_calls,
                )
            ]
        else:
            preferred = random.sample(ready, min(2, len(ready)))
        rest = [replica for replica in ready if replica not in preferred]
        return [group for group in (preferred, rest, others) if group]

    def _open_calls(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


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


def _affinity(pending_request: PendingRequest | None) -> str:
    context = None if pending_request is None else pending_request.metadata.grpc_context
    if context is None:
        return ""
    return str(dict(context.invocation_metadata()).get(AFFINITY_HEADER, ""))
