"""Rows of the adapter pool: never two adapters in one row, and what is in use stays."""

from random import Random

from serving.scheduler.adapter_slots import AdapterRows


def test_an_adapter_is_loaded_once_and_found_again() -> None:
    rows = AdapterRows(10)
    assert rows.pin("a", 4) == (0, True)
    assert rows.pin("a", 4) == (0, False)
    assert rows.pin("b", 4) == (4, True)
    assert (rows.loads, rows.resident) == (2, 2)


def test_the_least_recently_used_one_goes() -> None:
    rows = AdapterRows(8)
    for name in ("a", "b"):
        rows.pin(name, 4)
        rows.unpin(name)
    rows.pin("a", 4)
    rows.unpin("a")
    assert rows.pin("c", 4) == (4, True)
    assert rows.pin("a", 4) == (0, False)


def test_what_is_in_use_stays_and_others_wait() -> None:
    rows = AdapterRows(8)
    rows.pin("a", 4)
    rows.pin("b", 4)
    assert not rows.fits("c", 4)
    rows.unpin("b")
    assert rows.fits("c", 4) and not rows.fits("c", 5)
    assert rows.pin("c", 4) == (4, True)


def test_rows_of_neighbours_make_one_gap() -> None:
    rows = AdapterRows(9)
    for name in ("a", "b", "c"):
        rows.pin(name, 3)
        rows.unpin(name)
    rows.pin("c", 3)
    assert rows.pin("d", 6) == (0, True)


def test_random_adapters_never_overlap() -> None:
    random = Random(0)
    rows, pinned = AdapterRows(20), list[str]()
    for _ in range(3000):
        name = str(random.randrange(12))
        count = 1 + int(name) % 7
        if pinned and random.random() < 0.5:
            rows.unpin(pinned.pop(random.randrange(len(pinned))))
        elif rows.fits(name, count):
            start, _ = rows.pin(name, count)
            assert 0 <= start <= 20 - count
            pinned.append(name)
        else:
            assert pinned, "an empty pool has room for any one"
        rows.check(len(pinned))
