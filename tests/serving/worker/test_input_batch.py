"""Input batch: the shorter decode path gives the same tensors as the general one."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving.messages import Step
from serving.worker import input_batch

BLOCK_TOKENS = 4
TABLE_BLOCKS = 9
SLOTS = 12
BLOCK_TABLES = np.arange(1, SLOTS * TABLE_BLOCKS + 1).reshape(SLOTS, TABLE_BLOCKS)
LAST_SAMPLED_TOKENS = torch.arange(100, 100 + SLOTS)


def decode_step(slots: list[int], past: list[int], ids: list[int]) -> Step:
    count = len(slots)
    return Step(
        0,
        slots=slots,
        past=past,
        lengths=[1] * count,
        token_ids=ids,
        draws=[True] * count,
        prompt_score_counts=[0] * count,
    )


@given(st.permutations(range(SLOTS)), st.data())
def test_the_decode_batch_equals_the_mixed_batch(slots: list[int], data: st.DataObject) -> None:
    slots = slots[: data.draw(st.integers(1, SLOTS))]
    past = [data.draw(st.integers(0, BLOCK_TOKENS * TABLE_BLOCKS - 1)) for _ in slots]
    ids = [data.draw(st.integers(0, 99)) for _ in slots]
    step = decode_step(slots, past, ids)
    device = torch.device("cpu")
    actual = input_batch.build_input_batch(
        step, BLOCK_TABLES[None], BLOCK_TOKENS, LAST_SAMPLED_TOKENS
    )
    tables = BLOCK_TABLES[slots, : max(past) // BLOCK_TOKENS + 1]
    expected = input_batch._mixed_batch(step, np.array(ids), tables, BLOCK_TOKENS, device)
    for name in ("token_ids", "logits_rows"):
        assert torch.equal(getattr(actual, name), getattr(expected, name))
    for name in ("row_sequences", "sampled_sequences", "positions", "scored_rows"):
        assert np.array_equal(getattr(actual, name), getattr(expected, name))
    assert actual.token_id_max == expected.token_id_max == max(ids)
    assert actual.samples_every_row
    assert expected.samples_every_row
    for name in ("query_lengths", "past_lengths", "logit_rows"):
        assert getattr(actual.batch, name) == getattr(expected.batch, name)
    assert torch.equal(actual.batch.positions, expected.batch.positions)
    assert actual.batch.block_tables is not None
    assert expected.batch.block_tables is not None
    assert torch.equal(actual.batch.block_tables, expected.batch.block_tables)
    assert actual.batch.slot_mapping is not None
    assert expected.batch.slot_mapping is not None
    for indices, expected_indices in zip(
        actual.batch.slot_mapping, expected.batch.slot_mapping, strict=True
    ):
        assert torch.equal(indices, expected_indices)


def test_negative_ids_take_the_last_sampled_token() -> None:
    decode = decode_step([3, 1], [5, 6], [7, -1])
    decode_batch = input_batch.build_input_batch(
        decode, BLOCK_TABLES[None], BLOCK_TOKENS, LAST_SAMPLED_TOKENS
    )
    assert decode_batch.token_ids.tolist() == [7, 101]
    mixed = Step(
        0,
        slots=[2, 5],
        past=[4, 0],
        lengths=[1, 3],
        token_ids=[-1, 8, 9, 6],
        draws=[True, False],
        prompt_score_counts=[0, 0],
    )
    mixed_batch = input_batch.build_input_batch(
        mixed, BLOCK_TABLES[None], BLOCK_TOKENS, LAST_SAMPLED_TOKENS
    )
    assert mixed_batch.token_ids.tolist() == [102, 8, 9, 6]
    assert not mixed_batch.samples_every_row
    assert mixed_batch.logits_rows.tolist() == [0]
    assert mixed_batch.batch.query_lengths == (1, 3)
