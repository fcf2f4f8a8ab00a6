"""Adapter residency: the reported names follow the adapter pool, bounded and without private names.

Random use of an adapter row pool is the oracle. The metrics of a server with adapters are tested in
tests/serving/service/test_metrics.py.
"""

from dataclasses import replace
from random import Random

from msgspec import structs

from gpt.sampling_params import SamplingParams
from serving.engine.adapter_residency import ADAPTER_NAMES_MAX, AdapterResidency
from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import AdapterRef
from serving.request import AdapterInfo, AnswerSpec
from serving.scheduler.adapter_pool import AdapterPool

ROWS = 20


def answer(name: str, rows: int = 4, *, private: bool = False, kind: str = "rows") -> AnswerSpec:
    return AnswerSpec(
        (1,),
        SamplingParams(max_new_tokens=1),
        adapter=f"{name}@1",
        is_private=private,
        adapter_ref=AdapterRef(f"digest of {name}", rows, f"{name}.safetensors", kind),
    )


def test_reported_names_equal_the_adapters_in_a_pool_that_is_used_at_random() -> None:
    random = Random(0)
    pool, residency = AdapterPool(ROWS), AdapterResidency(ROWS, requests_max=3)
    used_names: list[str] = []
    pinned_digests: list[str] = []
    for _ in range(3000):
        name = str(random.randrange(12))
        spec = answer(name, rows=1 + int(name) % 7)
        assert spec.adapter_ref is not None
        digest, rows = spec.adapter_ref.digest, spec.adapter_ref.row_count
        if pinned_digests and (len(pinned_digests) == 3 or random.random() < 0.5):
            pool.unpin(pinned_digests.pop(random.randrange(len(pinned_digests))))
        elif pool.fits(digest, rows):
            residency.record_use(spec)
            used_names = [other for other in used_names if other != name] + [name]
            pool.pin(digest, rows)
            pinned_digests.append(digest)
        if random.random() < 0.3:  # An update may have the changes of several plans.
            residency.apply_changes(pool.pop_changes())
            resident = residency.snapshot([]).resident
            assert len(resident) == pool.resident_count
            in_pool = [other for other in used_names if f"digest of {other}" in pool._ranges]
            assert list(resident) == in_pool[::-1]


def test_waiting_adapters_are_those_that_are_not_on_the_device() -> None:
    residency = AdapterResidency(ROWS, requests_max=8)
    answers = [answer("sum"), answer("mood"), answer("own", private=True)]
    answers.append(answer("prefix", kind="prefix"))
    for spec in answers:
        residency.record_use(spec)
    base = AnswerSpec((1,), SamplingParams(max_new_tokens=1))
    assert residency.snapshot([*answers, base]).waiting == ("mood", "sum")
    residency.apply_changes({"digest of sum": True, "digest of own": True})
    snapshot = residency.snapshot([*answers, base])
    assert (snapshot.resident, snapshot.waiting) == (("sum",), ("mood",))
    assert snapshot.adapters_max == 5  # 20 rows for adapters of 4 rows.
    residency.clear()
    after_loss = residency.snapshot([])
    assert after_loss.resident == () and after_loss.changed_at >= snapshot.changed_at


def test_adapters_of_linears_are_counted_by_their_pages() -> None:
    residency = AdapterResidency(ROWS, requests_max=8, pages_max=30)
    assert residency.snapshot([]).adapters_max == ROWS  # With one row each.
    sizes = {"small": (0, 1), "large": (0, 5), "both": (4, 3), "prefix": (9, 0)}
    for name, (rows, pages) in sizes.items():
        kind = "prefix" if name == "prefix" else "rows" if rows else "linears"
        spec = answer(name, rows, kind=kind)
        assert spec.adapter_ref is not None
        adapter_ref = structs.replace(
            spec.adapter_ref, linear_count=1 if pages else 0, rank_bytes=pages * ADAPTER_PAGE_BYTES
        )
        info = AdapterInfo("lora" if pages else "prefix", 8 * pages, 100 * pages)
        residency.record_use(replace(spec, adapter_ref=adapter_ref, adapter_info=info))
    assert residency.snapshot([]).resident == ()
    residency.apply_changes({"digest of small": True, "digest of large": True})
    snapshot = residency.snapshot([])
    assert snapshot.adapters_max == 10  # 30 pages for adapters of 3 pages.
    assert snapshot.infos == {
        "large": AdapterInfo("lora", 40, 500),
        "small": AdapterInfo("lora", 8, 100),
    }
    residency.apply_changes({"digest of both": True, "digest of small": False})
    # 30 pages for adapters of 4 pages; there are rows for 10 adapters of 2 rows.
    assert residency.snapshot([]).adapters_max == 7
    assert "prefix" not in residency.snapshot([]).infos


def test_names_are_bounded_and_the_last_used_ones_are_reported() -> None:
    count = 3 * ADAPTER_NAMES_MAX
    residency = AdapterResidency(rows_max=count, requests_max=1)
    answers = [answer(f"task{number}", rows=1) for number in range(count)]
    for spec in answers:
        residency.record_use(spec)
        residency.apply_changes({f"digest of {spec.adapter.partition('@')[0]}": True})
    residency.record_use(replace(answers[0], adapter="task0@2"))
    snapshot = residency.snapshot([answer(f"new{number}") for number in range(count)])
    newest = [f"task{number}" for number in reversed(range(count))]
    assert list(snapshot.resident) == ["task0", *newest][:ADAPTER_NAMES_MAX]
    assert snapshot.waiting[0] == f"new{count - 1}"
    assert len(snapshot.waiting) == ADAPTER_NAMES_MAX and snapshot.adapters_max == count
    for number in range(10 * count):  # Adapters that are used, but never loaded.
        residency.record_use(answer(f"other{number}"))
    assert len(residency._uses) <= count + 1
    assert list(residency.snapshot([]).resident) == list(snapshot.resident)
