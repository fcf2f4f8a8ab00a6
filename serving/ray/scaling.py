"""Autoscaling policy of Ray Serve: the number of replicas by waiting requests and used capacity.

A replica reports its running and waiting requests and the part of its capacity in use
(`Replica.record_autoscaling_stats`). Waiting requests need more replicas. Without them, fewer
replicas suffice if they can take over the capacity in use. Serve applies the delays and the bounds
of its autoscaling_config to the result. Without a replica, calls wait in the proxies of Serve, and
need the first one.

Starting replicas take processor time from the running ones, whose reports then show fewer waiting
requests for a moment, and a new deployment has no calls yet. Replicas that are starting are
therefore not removed.
"""

import math
from collections.abc import Mapping
from typing import Any

# The import path for Serve's autoscaling_config.
POLICY = "serving.ray.scaling:choose_replica_count"
# The part of the capacity that fewer replicas may use. The rest is for growth while one starts.
USED_MAX = 0.7
# Time after which a replica that is still starting counts as unschedulable.
START_S_MAX = 600.0
# In the state of the policy, which Serve resets at each `deploy`: the time of its first decision.
DEPLOYED_AT = "deployed_at"


def choose_replica_count(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the target number of replicas, and the state of this policy."""
    metrics = context.aggregated_metrics or {}
    # last_scale_up_time does not count the initial replicas of a deployment.
    deployed_at = context.policy_state.get(DEPLOYED_AT, context.current_time)
    scaled_up_at = max(context.last_scale_up_time or -math.inf, deployed_at)
    return (
        replica_count(
            context.current_num_replicas,
            starting=context.target_num_replicas - context.current_num_replicas
            if context.current_time - scaled_up_at < START_S_MAX
            else 0,
            calls=context.total_num_requests,
            running=_sum(metrics, "running"),
            waiting=_sum(metrics, "waiting"),
            used=_sum(metrics, "used"),
        ),
        {DEPLOYED_AT: deployed_at},
    )


def replica_count(
    replicas: int, *, starting: int = 0, calls: float, running: float, waiting: float, used: float
) -> int:
    """Return the target number of replicas.

    `replicas`, `starting`: running and starting replicas. `calls`: open calls, also those in the
    proxies. `used`: the sum over the replicas of the part of the capacity that each uses.
    """
    if calls == 0:
        needed = 0
    elif replicas == 0:
        needed = 1
    elif waiting >= 1:
        needed = math.ceil(replicas * (1 + waiting / max(1.0, running)))
    else:
        needed = max(1, min(replicas, math.ceil(used / USED_MAX)))
    return max(needed, replicas + starting) if starting > 0 else needed


def _sum(metrics: Mapping[str, Mapping[Any, float]], name: str) -> float:
    return sum(metrics.get(name, {}).values())
