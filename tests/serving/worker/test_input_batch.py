"""A step as tensors: what is laid out in few operations is what any step would be."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.messages import Step
from serving.worker import input_batch

SIZE, WIDTH, SLOTS = 4, 9, 12
TABLES = np.arange(1, SLOTS * WIDTH + 1).reshape(SLOTS, WIDTH)
LAST = torch.arange(100, 100 + SLOTS)


def step(slots: list[int], past: list[int], ids: list[int]) -> Step:
    count = len(slots)
    return Step(
        0,
        slots=slots,
        past=past,
        lengths=[1] * count,
        ids=ids,
        draws=[True] * count,
        scores=[0] * count,
    )


@given(st.permutations(range(SLOTS)), st.data())
def test_plain_steps_are_laid_out_as_any_step_is(slots: list[int], data: st.DataObject) -> None:
    slots = slots[: data.draw(st.integers(1, SLOTS))]
    past = [data.draw(st.integers(0, SIZE * WIDTH - 1)) for _ in slots]
    ids = [data.draw(st.integers(0, 99)) for _ in slots]
    one = step(slots, past, ids)
    width = max(past) // SIZE + 1
    device = torch.device("cpu")
    got = input_batch.lay_out(one, TABLES, SIZE, LAST)
    want = input_batch._mixed(one, np.array(ids), TABLES[slots, :width], SIZE, device)
    for name in ("ids", "rows"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    for name in ("sequence", "drawing", "positions", "scored"):
        assert np.array_equal(getattr(got, name), getattr(want, name))
    assert got.largest == want.largest == max(ids) and got.all_draw and want.all_draw
    for name in ("lengths", "past", "rows"):
        assert getattr(got.batch, name) == getattr(want.batch, name)
    assert torch.equal(got.batch.positions, want.batch.positions)
    assert got.batch.tables is not None and want.batch.tables is not None
    assert torch.equal(got.batch.tables, want.batch.tables)
    assert got.batch.slots is not None and want.batch.slots is not None
    assert all(torch.equal(a, b) for a, b in zip(got.batch.slots, want.batch.slots, strict=True))


def test_what_a_slot_drew_last_only_the_device_knows() -> None:
    plain = input_batch.lay_out(step([3, 1], [5, 6], [7, -1]), TABLES, SIZE, LAST)
    assert plain.ids.tolist() == [7, 101]
    mixed = Step(
        0,
        slots=[2, 5],
        past=[4, 0],
        lengths=[1, 3],
        ids=[-1, 8, 9, 6],
        draws=[True, False],
        scores=[0, 0],
    )
    got = input_batch.lay_out(mixed, TABLES, SIZE, LAST)
    assert got.ids.tolist() == [102, 8, 9, 6]
    assert not got.all_draw and got.rows.tolist() == [0] and got.batch.lengths == (1, 3)
