"""The simulation of call routing: its policies keep what they promise, at small sizes."""

import pytest

from bench.routing_simulation import (
    POLICIES,
    Figures,
    HashRing,
    SimulationSizes,
    main,
    moved_adapters,
    simulate,
)

SIZES = SimulationSizes(
    replicas=20, adapters=2_000, resident=50, in_flight=8, calls=5_000, changed=0.1
)


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    return {name: simulate(policy, SIZES) for name, policy in POLICIES.items()}


def test_a_bound_limits_the_load_and_keeps_most_hits(figures: dict[str, Figures]) -> None:
    plain = figures["hash"]
    bounded = figures["hash, bounded load, then the next on the ring"]
    in_turn = figures["round robin"]
    assert bounded.peak <= SIZES.bound < plain.peak
    assert bounded.share < 1.1 * SIZES.bound < plain.share
    assert bounded.hit_rate > 0.9 * plain.hit_rate > 1.5 * in_turn.hit_rate


def test_calls_by_their_number_are_spread_evenly(figures: dict[str, Figures]) -> None:
    assert figures["round robin"].share == pytest.approx(1.0)
    assert figures["fewer calls of two replicas"].share < 1.2


def test_only_the_adapters_of_lost_and_new_replicas_move() -> None:
    before, fewer, more = (HashRing(replicas, 100) for replicas in (range(10), range(9), range(11)))
    for number in range(500):
        owner, without_last, with_new = (
            next(ring.replicas_from(ring.position_of(f"key {number}")))
            for ring in (before, fewer, more)
        )
        assert without_last == owner or owner == 9
        assert with_new in (owner, 10)
    lost, added = moved_adapters(SIZES)
    assert 0.5 * SIZES.changed < lost < 2 * SIZES.changed
    assert 0.5 * SIZES.changed < added < 2 * SIZES.changed


def test_the_program_prints_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--replicas", "10", "--adapters", "100", "--calls", "200", "--changed", "0.1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:-1]] == list(POLICIES)
