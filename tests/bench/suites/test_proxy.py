"""The proxy benchmark at small sizes."""

import pytest

from bench.harness.targets import Row
from bench.suites.proxy import ProxySizes, run_suite
from tests.support.client_environments import interpreter
from tests.support.envoy import envoy_binary


@pytest.mark.slow
def test_the_ratio_of_the_rates_is_measured() -> None:
    envoy_binary()
    sizes = ProxySizes(rounds=1, replicas=2, calls=2, new_tokens=8, requests={"demo": 8})
    *lines, row = run_suite(["demo"], sizes)
    assert isinstance(row, Row) and row.target.name == "proxy/demo"
    assert 0.1 < row.value < 10
    assert len(lines) == 2 and set(row.samples) == {"direct", "Envoy"}


@pytest.mark.soak
def test_the_proxies_of_ray_are_compared_with_a_server() -> None:
    interpreter("ray")
    sizes = ProxySizes(rounds=1, ray_calls=2, new_tokens=8, requests={"ray": 8})
    *lines, row = run_suite(["ray"], sizes)
    assert isinstance(row, Row) and row.target.name == "proxy/ray-haproxy"
    assert 0.05 < row.value < 10
    assert len(lines) == 4 and set(row.samples) == {"direct", "HAProxy"}
