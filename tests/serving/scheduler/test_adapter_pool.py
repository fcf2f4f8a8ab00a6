"""Adapter row pool: row ranges never overlap, and pinned adapters are not evicted."""

from random import Random

from serving.scheduler.adapter_pool import AdapterPool


def test_a_resident_adapter_is_not_loaded_again() -> None:
    rows = AdapterPool(10)
    assert rows.pin("a", 4) == (0, True)
    assert rows.pin("a", 4) == (0, False)
    assert rows.pin("b", 4) == (4, True)
    assert (rows.loads, rows.resident_count) == (2, 2)


def test_the_least_recently_used_adapter_is_evicted() -> None:
    rows = AdapterPool(8)
    for name in ("a", "b"):
        rows.pin(name, 4)
        rows.unpin(name)
    rows.pin("a", 4)
    rows.unpin("a")
    assert rows.pin("c", 4) == (4, True)
    assert rows.pin("a", 4) == (0, False)


def test_changes_are_the_last_state_of_each_loaded_or_evicted_adapter() -> None:
    rows = AdapterPool(8)
    for name in ("a", "b", "c", "a"):
        rows.pin(name, 4)
        rows.unpin(name)
    # "a" was evicted for "c", and "b" for "a".
    assert rows.pop_changes() == {"a": True, "b": False, "c": True}
    rows.pin("a", 4)
    assert rows.pop_changes() == {}


def test_a_pinned_adapter_is_not_evicted() -> None:
    rows = AdapterPool(8)
    rows.pin("a", 4)
    rows.pin("b", 4)
    assert not rows.fits("c", 4)
    rows.unpin("b")
    assert rows.fits("c", 4) and not rows.fits("c", 5)
    assert rows.pin("c", 4) == (4, True)


def test_rows_of_adjacent_evicted_adapters_form_one_gap() -> None:
    rows = AdapterPool(9)
    for name in ("a", "b", "c"):
        rows.pin(name, 3)
        rows.unpin(name)
    rows.pin("c", 3)
    assert rows.pin("d", 6) == (0, True)


def test_random_adapters_never_overlap() -> None:
    random = Random(0)
    rows = AdapterPool(20)
    pinned_names = list[str]()
    for _ in range(3000):
        name = str(random.randrange(12))
        count = 1 + int(name) % 7
        if pinned_names and random.random() < 0.5:
            rows.unpin(pinned_names.pop(random.randrange(len(pinned_names))))
        elif rows.fits(name, count):
            start, _ = rows.pin(name, count)
            assert 0 <= start <= 20 - count
            pinned_names.append(name)
        else:
            assert pinned_names, "an adapter does not fit into an empty pool"
        rows.check(len(pinned_names))
