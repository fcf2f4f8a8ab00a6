"""Number of replicas by waiting requests and used capacity."""

from dataclasses import dataclass, field

import pytest

from serving.ray.scaling import DEPLOYED_AT, START_S_MAX, choose_replica_count, replica_count


@pytest.mark.parametrize(
    ("replicas", "calls", "running", "waiting", "used", "replica_target"),
    [
        (0, 0, 0, 0, 0.0, 0),  # No load, no replica.
        (0, 3, 0, 0, 0.0, 1),  # Calls wait in the proxies.
        (1, 0, 0, 0, 0.0, 0),
        (1, 1, 1, 0, 0.02, 1),
        (1, 64, 64, 0, 1.0, 1),  # Full, but nothing waits.
        (1, 128, 64, 64, 1.0, 2),  # As many wait as run.
        (2, 130, 128, 2, 2.0, 3),
        (3, 60, 60, 0, 0.9, 2),  # Two replicas would be used at 0.45.
        (3, 150, 150, 0, 2.4, 3),
    ],
)
def test_waiting_requests_add_replicas_and_unused_capacity_removes_them(
    replicas: int, calls: int, running: int, waiting: int, used: float, replica_target: int
) -> None:
    count = replica_count(replicas, calls=calls, running=running, waiting=waiting, used=used)
    assert count == replica_target


@pytest.mark.parametrize(
    ("replicas", "starting", "calls", "waiting", "replica_target"),
    [
        (1, 2, 6, 0, 3),  # The waiting requests of the last report are gone, the calls are not.
        (1, 2, 6, 4, 3),
        (1, 1, 16, 14, 8),
        (0, 1, 3, 0, 1),
        (1, 2, 0, 0, 3),
        (0, 1, 0, 0, 1),  # The first replica of a deployment.
        (3, -1, 6, 0, 2),  # One is stopping.
    ],
)
def test_replicas_that_start_are_kept(
    replicas: int, starting: int, calls: int, waiting: int, replica_target: int
) -> None:
    count = replica_count(
        replicas, starting=starting, calls=calls, running=2, waiting=waiting, used=1.0
    )
    assert count == replica_target


@dataclass
class Context:
    """The part of Ray Serve's AutoscalingContext that the policy reads."""

    current_num_replicas: int
    target_num_replicas: int
    last_scale_up_time: float | None
    current_time: float = 10_000.0
    total_num_requests: float = 6.0
    aggregated_metrics: dict[str, dict[str, float]] | None = None
    policy_state: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("increased_at", "deployed_at", "replica_target"),
    [
        (9_990.0, 0.0, 3),
        (None, 9_990.0, 3),
        (10_000.0 - START_S_MAX, 0.0, 1),
        (None, 10_000.0 - START_S_MAX, 1),
    ],
)
def test_a_replica_without_a_place_is_not_kept_for_ever(
    increased_at: float | None, deployed_at: float, replica_target: int
) -> None:
    state = {DEPLOYED_AT: deployed_at}
    context = Context(1, 3, increased_at, policy_state=state)
    assert choose_replica_count(context) == (replica_target, state)


def test_the_first_replica_of_a_deployment_is_kept_without_calls() -> None:
    context = Context(0, 1, None, total_num_requests=0.0)
    count, context.policy_state = choose_replica_count(context)
    assert count == 1
    context.current_time += START_S_MAX
    assert choose_replica_count(context)[0] == 0
