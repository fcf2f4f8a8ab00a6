"""Number of replicas by waiting requests and used capacity."""

import pytest

from serving.ray.scaling import replica_count


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
    counts = replica_count(replicas, calls=calls, running=running, waiting=waiting, used=used)
    assert counts == replica_target
