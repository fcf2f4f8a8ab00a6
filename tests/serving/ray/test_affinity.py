"""Choice of a replica by adapter: the same for all proxies, and with a bound on the load."""

from collections import Counter

from serving.ray.affinity import LOAD_BOUND, choose_by_affinity

REPLICAS = ["a", "b", "c", "d"]
AFFINITIES = [f"tenant/adapter{number}" for number in range(400)]


def choose(affinity: str, replicas: list[str], load: Counter[str]) -> str:
    return choose_by_affinity(replicas, affinity, lambda name: name, lambda name: load[name])


def test_an_adapter_has_one_replica_and_all_replicas_have_adapters() -> None:
    choices = {affinity: choose(affinity, REPLICAS, Counter()) for affinity in AFFINITIES}
    assert choices == {
        affinity: choose(affinity, REPLICAS[::-1], Counter()) for affinity in AFFINITIES
    }
    assert set(choices.values()) == set(REPLICAS)


def test_a_lost_replica_moves_only_its_adapters() -> None:
    before = {affinity: choose(affinity, REPLICAS, Counter()) for affinity in AFFINITIES}
    after = {affinity: choose(affinity, REPLICAS[1:], Counter()) for affinity in AFFINITIES}
    moved = {affinity for affinity in AFFINITIES if before[affinity] != after[affinity]}
    assert moved == {affinity for affinity, replica in before.items() if replica == REPLICAS[0]}


def test_calls_of_one_adapter_spill_over_when_their_replica_is_overloaded() -> None:
    load: Counter[str] = Counter()
    for _ in range(100):
        load[choose("tenant/popular", REPLICAS, load)] += 1
    assert max(load.values()) <= LOAD_BOUND * 100 / len(REPLICAS) + 1
    assert load.most_common(1)[0][0] == choose("tenant/popular", REPLICAS, Counter())
