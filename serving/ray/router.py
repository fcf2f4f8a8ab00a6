"""Request router of Ray Serve: calls of an adapter go to one replica (`serving.ray.affinity`).

The header x-preamble-affinity names the adapter (`tenant/adapter`, from the clients). Calls without
it go to the less loaded of two random replicas.
"""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving.ray.affinity import choose_by_affinity

AFFINITY_HEADER = "x-preamble-affinity"


class AdapterRouter(RequestRouter):
    """Chooses the replica of each call, in a proxy of Serve."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the preferred group first. Serve takes the least loaded of it.

        A replica whose ranks are being restarted gets calls only if there is no other one.
        """
        if pending_request is not None:
            # If no replica accepts the call, Serve waits a little before it asks again.
            pending_request.routing_context.should_backoff = True
        ready = [
            replica for replica in candidate_replicas if replica.routing_stats.get("is_ready", True)
        ] or candidate_replicas
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
        return [group for group in (preferred, rest) if group]

    def _open_calls(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _affinity(pending_request: PendingRequest | None) -> str:
    context = None if pending_request is None else pending_request.metadata.grpc_context
    if context is None:
        return ""
    return str(dict(context.invocation_metadata()).get(AFFINITY_HEADER, ""))
