"""Simulation of call routing: many replicas and adapters under Zipf's law, without any server.

    python -m bench.routing_simulation

A call needs one adapter, drawn by Zipf's law, and occupies a replica until it ends. A fixed number
of calls is in flight, and each of them is equally likely to end next. A policy chooses the replica
of a call by the hash of the adapter and by the calls in flight. Each replica keeps the adapters
that it used last. The simulation counts calls, hits (the replica had the adapter), and the adapters
that get another replica when replicas are lost or added. It knows no times, tokens or prefixes.
"""

import argparse
import hashlib
import random
import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

CHURN_WINDOW = 0.1  # Share of the calls that are measured after replicas are lost or added.


@dataclass(frozen=True)
class SimulationSizes:
    """Sizes of the simulated fleet and of its load."""

    replicas: int = 1000
    adapters: int = 100_000
    resident: int = 64  # Adapters that a replica keeps.
    in_flight: int = 16  # Calls in flight for each replica, on average.
    calls: int = 1_000_000  # Measured calls; as many are sent before.
    exponent: float = 1.0  # Of Zipf's law.
    bound: float = 1.5  # Maximum of calls in flight of a replica, relative to the mean.
    positions: int = 100  # Of a replica on the ring of hashes.
    changed: float = 0.01  # Share of the replicas that are lost, and that are added afterwards.
    seed: int = 0


class HashRing:
    """Consistent hashing: each replica is at several positions of a ring."""

    def __init__(self, replicas: Sequence[int], positions: int) -> None:
        points = sorted(
            (_hash(f"replica {replica} {number}"), replica)
            for replica in replicas
            for number in range(positions)
        )
        self._hashes = [point for point, _ in points]
        self._replicas = [replica for _, replica in points]

    def position_of(self, key: str) -> int:
        """Return the position on the ring at which the replicas of a key begin."""
        return bisect(self._hashes, _hash(key)) % len(self._replicas)

    def replicas_from(self, position: int) -> Iterator[int]:
        """Yield the replicas in the order of the ring, with repetitions."""
        for index in range(position, position + len(self._replicas)):
            yield self._replicas[index % len(self._replicas)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Fleet:
    """The replicas: their adapters, their calls in flight, and the counters."""

    def __init__(self, sizes: SimulationSizes, policy: "Policy") -> None:
        self.sizes = sizes
        self.rng = random.Random(sizes.seed)
        self.load: dict[int, int] = {}  # Calls in flight, by replica.
        self.sent = 0
        self._policy = policy
        self._running: list[int] = []  # The replica of each call in flight.
        self._residents: dict[int, dict[int, None]] = {}  # The last one was used last.
        weights = (1 / rank**sizes.exponent for rank in range(1, sizes.adapters + 1))
        self._cumulative_weights = list(accumulate(weights))
        self.set_replicas(range(sizes.replicas))

    def set_replicas(self, replicas: Sequence[int]) -> None:
        """Replace the replicas. The calls of lost ones end, and new ones have no adapter yet."""
        self.load = {replica: self.load.get(replica, 0) for replica in replicas}
        self._residents = {replica: self._residents.get(replica, {}) for replica in replicas}
        self._running = [replica for replica in self._running if replica in self.load]
        self.replicas = list(replicas)
        self.ring = HashRing(replicas, self.sizes.positions)
        # By adapter: its position on the ring, and the replica there.
        self.position = [
            self.ring.position_of(f"adapter {adapter}") for adapter in range(self.sizes.adapters)
        ]
        self.owner = [next(self.ring.replicas_from(position)) for position in self.position]
        mean_load = self.sizes.in_flight * self.sizes.replicas / len(replicas)
        self.load_max = self.sizes.bound * mean_load
        self.reset_counters()

    def reset_counters(self) -> None:
        self.calls = dict.fromkeys(self.replicas, 0)
        self.hits = 0
        self.load_peak = 0

    def send_calls(self, count: int) -> None:
        """Send calls for adapters by Zipf's law."""
        adapters = range(self.sizes.adapters)
        for adapter in self.rng.choices(adapters, cum_weights=self._cumulative_weights, k=count):
            self._send(adapter)

    def _send(self, adapter: int) -> None:
        load, running = self.load, self._running
        slot = len(running)
        if slot < self.sizes.in_flight * self.sizes.replicas:
            running.append(-1)
        else:
            slot = int(self.rng.random() * slot)
            load[running[slot]] -= 1
        replica = self._policy(self, adapter)
        self.sent += 1
        running[slot] = replica
        load[replica] += 1
        self.load_peak = max(self.load_peak, load[replica])
        self.calls[replica] += 1
        residents = self._residents[replica]
        if adapter in residents:
            del residents[adapter]
            self.hits += 1
        elif len(residents) == self.sizes.resident:
            del residents[next(iter(residents))]
        residents[adapter] = None


Policy = Callable[[Fleet, int], int]  # Chooses the replica of a call for an adapter.


def choose_in_turn(fleet: Fleet, adapter: int) -> int:
    return fleet.replicas[fleet.sent % len(fleet.replicas)]


def choose_fewer_calls(fleet: Fleet, adapter: int) -> int:
    """Choose the one of two random replicas that has fewer calls in flight."""
    replicas, rng = fleet.replicas, fleet.rng
    first = replicas[int(rng.random() * len(replicas))]
    second = replicas[int(rng.random() * len(replicas))]
    return first if fleet.load[first] <= fleet.load[second] else second


def choose_by_hash(fleet: Fleet, adapter: int) -> int:
    return fleet.owner[adapter]


def choose_by_bounded_hash(fleet: Fleet, adapter: int) -> int:
    """Choose the first replica, in the order of the ring, that is below the bound."""
    load, limit = fleet.load, fleet.load_max - 1
    replica = fleet.owner[adapter]
    if load[replica] <= limit:
        return replica
    candidates = fleet.ring.replicas_from(fleet.position[adapter])
    return next(candidate for candidate in candidates if load[candidate] <= limit)


def choose_by_hash_then_load(fleet: Fleet, adapter: int) -> int:
    """Choose the adapter's replica if it is below the bound, else one with few calls."""
    replica = fleet.owner[adapter]
    if fleet.load[replica] <= fleet.load_max - 1:
        return replica
    return choose_fewer_calls(fleet, adapter)


POLICIES: Mapping[str, Policy] = {
    "round robin": choose_in_turn,
    "fewer calls of two replicas": choose_fewer_calls,
    "hash": choose_by_hash,
    "hash, bounded load, then the next on the ring": choose_by_bounded_hash,
    "hash, bounded load, then fewer calls of two": choose_by_hash_then_load,
}


@dataclass(frozen=True)
class Figures:
    """The figures of one policy."""

    share: float  # Calls of the most used replica, relative to the mean.
    peak: float  # Most calls in flight of a replica, relative to the mean.
    hit_rate: float
    hit_rate_after_loss: float  # Of the first calls after replicas were lost.
    hit_rate_after_addition: float


def simulate(policy: Policy, sizes: SimulationSizes) -> Figures:
    """Send the load by a policy; then lose replicas, and add as many."""
    fleet = Fleet(sizes, policy)
    fleet.send_calls(sizes.calls)
    fleet.reset_counters()
    fleet.send_calls(sizes.calls)
    share = max(fleet.calls.values()) * sizes.replicas / sizes.calls
    peak, hit_rate = fleet.load_peak / sizes.in_flight, fleet.hits / sizes.calls
    count, window = int(sizes.changed * sizes.replicas), int(CHURN_WINDOW * sizes.calls)
    hit_rates = []
    for replicas in (
        range(count, sizes.replicas),
        range(count, sizes.replicas + count),
    ):
        fleet.set_replicas(replicas)
        fleet.send_calls(window)
        hit_rates.append(fleet.hits / window)
    return Figures(share, peak, hit_rate, *hit_rates)


def moved_adapters(sizes: SimulationSizes) -> tuple[float, float]:
    """Return the share of the adapters that get another replica, by loss and by addition."""
    count = int(sizes.changed * sizes.replicas)
    fleets = (
        range(sizes.replicas),
        range(count, sizes.replicas),
        range(count, sizes.replicas + count),
    )
    owners = []
    for replicas in fleets:
        ring = HashRing(replicas, sizes.positions)
        keys = (f"adapter {adapter}" for adapter in range(sizes.adapters))
        owners.append([next(ring.replicas_from(ring.position_of(key))) for key in keys])
    all_owners, fewer_owners, new_owners = owners
    return _moved(all_owners, fewer_owners), _moved(fewer_owners, new_owners)


def _moved(before: Sequence[int], after: Sequence[int]) -> float:
    return sum(a != b for a, b in zip(before, after, strict=True)) / len(before)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing_simulation")
    for size in fields(SimulationSizes):
        flag = f"--{size.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(size.default), default=size.default)
    sizes = SimulationSizes(**vars(parser.parse_args(arguments)))
    _write_line("| policy | largest share | peak load | hits | after loss | after addition |")
    _write_line("|---|---|---|---|---|---|")
    for name, policy in POLICIES.items():
        figures = simulate(policy, sizes)
        rates = (figures.hit_rate, figures.hit_rate_after_loss, figures.hit_rate_after_addition)
        shares = " | ".join(f"{100 * rate:.1f} %" for rate in rates)
        _write_line(f"| {name} | {figures.share:.2f} x | {figures.peak:.2f} x | {shares} |")
    lost, added = moved_adapters(sizes)
    loss, addition = f"{100 * lost:.2f} %", f"{100 * added:.2f} %"
    _write_line(f"adapters that move: {loss} by the loss, {addition} by the addition")


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
