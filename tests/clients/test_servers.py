"""The choice among the servers of a client, without servers: channels connect only for a call."""

from collections import Counter
from typing import Any

import pytest

from clients.servers import Balance, Route, Server, Servers, split_addresses
from clients.transport import Attempts, CallError, Retries

LOST = CallError("UNAVAILABLE", "the connection was reset")


def open_servers(count: int, balance: Balance = "adapter") -> Servers:
    addresses = [f"host{number}:9000" for number in range(count)]

    def open_channel(address: str, options: list[tuple[str, Any]]) -> "StubFactory":
        return StubFactory()

    return Servers(addresses, open_channel, None, balance, "acme")


class StubFactory:
    """Stands for a channel, from which stubs are made; no call is made."""

    def _method(self, *args: Any, **options: Any) -> None:
        return None

    unary_unary = unary_stream = stream_unary = stream_stream = _method


def chosen(route: Route) -> str:
    return route.next_server().address


def choices(servers: Servers, adapters: int = 1000) -> dict[str, str]:
    return {f"a{number}": chosen(servers.route(f"a{number}")) for number in range(adapters)}


def test_each_adapter_has_one_server_and_the_servers_share_them() -> None:
    first = choices(open_servers(4))
    assert choices(open_servers(4)) == first
    counts = Counter(first.values())
    assert len(counts) == 4 and max(counts.values()) < 1.2 * 1000 / 4


def test_a_new_server_takes_adapters_and_no_others_move() -> None:
    before, after = choices(open_servers(4)), choices(open_servers(5))
    moved = [name for name in before if before[name] != after[name]]
    assert {after[name] for name in moved} == {"host4:9000"}
    assert 150 < len(moved) < 250


def test_all_versions_of_an_adapter_have_one_server_and_one_header() -> None:
    servers = open_servers(8)
    routes = [servers.route(name) for name in ("read", "read@1", "read@22")]
    assert len({chosen(route) for route in routes}) == 1
    assert {route.metadata for route in routes} == {(("x-preamble-affinity", "acme/read"),)}
    assert servers.route("").metadata == ()


@pytest.mark.parametrize("balance", ["adapter", "round_robin"])
def test_the_next_attempt_is_at_another_server(balance: Balance) -> None:
    servers = open_servers(3, balance)
    route = servers.route("read")
    tried: list[Server] = []
    for attempt in range(3):
        tried.append(route.next_server())
        assert route.record_failure(LOST) == (attempt < 2)
    assert len(set(tried)) == 3
    # Other calls avoid a lost server while others are left; here all are lost.
    assert servers.route("read").next_server() in tried


def test_a_lost_server_is_avoided_and_its_adapters_return_to_it() -> None:
    servers = open_servers(3)
    route = servers.route("read")
    lost = route.next_server()
    route.record_failure(LOST)
    assert servers.route("read").next_server() is not lost
    lost.unreachable_until = 0.0
    assert servers.route("read").next_server() is lost


def test_a_refusal_makes_no_server_unreachable() -> None:
    servers = open_servers(2)
    route = servers.route("read")
    server = route.next_server()
    route.record_failure(CallError("RESOURCE_EXHAUSTED", "full", "QUEUE_FULL", retry_s=1.0))
    assert servers.route("read").next_server() is server
    assert route.next_server() is not server


def test_a_storage_timeout_makes_no_server_unreachable_and_is_not_retried_at_once() -> None:
    servers = open_servers(2)
    route = servers.route("read")
    server = route.next_server()
    error = CallError("UNAVAILABLE", "try again later", "STORAGE_TIMEOUT", retry_s=5.0)
    assert route.record_failure(error), "the next server was not called yet"
    assert servers.route("read").next_server() is server
    assert Attempts(Retries(), 60.0).next_wait_s(error, fails_over=True) >= 5.0
    loading = CallError("UNAVAILABLE", "try again later", "LOADING", retry_s=5.0)
    assert Attempts(Retries(), 60.0).next_wait_s(loading, fails_over=True) == 0.0


def test_a_lost_call_is_repeated_at_the_same_address_if_it_may_be() -> None:
    lost = CallError("UNAVAILABLE", "socket closed")
    assert 0.2 <= Attempts(Retries(), 60.0).next_wait_s(lost) < 0.3
    with pytest.raises(CallError, match="socket closed"):
        Attempts(Retries(), 60.0).next_wait_s(lost, idempotent=False)
    with pytest.raises(CallError, match="socket closed"):
        Attempts(Retries(attempts_max=1), 60.0).next_wait_s(lost)
    draining = CallError("UNAVAILABLE", "use another server", "DRAINING")
    assert 0.2 <= Attempts(Retries(), 60.0).next_wait_s(draining, idempotent=False) < 0.3
    stopped = CallError("UNAVAILABLE", "the server has stopped", "STOPPED")
    with pytest.raises(CallError, match="has stopped"):
        Attempts(Retries(), 60.0).next_wait_s(stopped)


def test_calls_without_an_adapter_take_turns() -> None:
    servers = open_servers(3)
    assert len({chosen(servers.route("")) for _ in range(3)}) == 3


def test_addresses_are_separated_by_commas_except_those_of_grpc() -> None:
    assert split_addresses("a:1,b:2") == ["a:1", "b:2"]
    assert split_addresses("ipv4:127.0.0.1:1,127.0.0.1:2") == ["ipv4:127.0.0.1:1,127.0.0.1:2"]
    assert split_addresses(["a:1"]) == ["a:1"]
    with pytest.raises(ValueError, match="no address"):
        split_addresses([])
    with pytest.raises(ValueError, match="choose one of: round_robin, adapter"):
        open_servers(1, "least")  # type: ignore[arg-type]
