"""Logical tensors: any range of a tensor is read from its pieces, wherever they are stored."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.checkpoint.logical_tensor import (
    ComputedTensor,
    InMemoryTensor,
    LogicalTensor,
    SourceSlice,
    apply_overrides,
    checkpoint_from_tensors,
    concat_rows,
    majority_dtype,
    samples_equal,
    summarize_names,
)
from gpt.errors import CheckpointError, ConfigError
from gpt.parallel.weight_sharding import ShardSpec
from tests.support.models import CLASSIC, lively


def stored(value: Tensor, location: str = "file: key") -> InMemoryTensor:
    return InMemoryTensor(value, location)


def counting_matrix(rows: int, columns: int, first_value: int = 0) -> Tensor:
    return torch.arange(first_value, first_value + rows * columns, dtype=torch.float32).view(
        rows, columns
    )


def test_shards_of_gated_matrices_take_rows_of_both_halves() -> None:
    gate = counting_matrix(4, 1)
    up = counting_matrix(4, 1, first_value=10)
    fc1 = concat_rows([(stored(gate), 0, 4), (stored(up), 0, 4)])
    second_shard = fc1.read(ShardSpec(0, ((2, 4), (6, 8)), 4))
    assert second_shard.flatten().tolist() == [2, 3, 12, 13]


def test_shards_take_columns_across_stacked_pieces() -> None:
    tensor = concat_rows(
        [
            (stored(counting_matrix(2, 4)), 0, 2),
            (stored(counting_matrix(2, 4, first_value=8)), 0, 2),
        ]
    )
    assert tensor.read(ShardSpec(1, ((1, 3),), 2)).tolist() == [[1, 2], [5, 6], [9, 10], [13, 14]]


def test_padding_rows_of_the_vocabulary_are_zero() -> None:
    embedding = concat_rows([(stored(counting_matrix(5, 2, first_value=1)), 0, 5)])
    out = torch.full((4, 2), torch.nan)
    embedding.read(ShardSpec(0, ((4, 5),), 4), out)
    assert out.tolist() == [[9, 10], [0, 0], [0, 0], [0, 0]]
    assert embedding.read(ShardSpec(0, ((5, 5),), 4)).tolist() == [[0, 0]] * 4


def test_transposed_pieces_count_rows_in_the_logical_direction() -> None:
    tensor = concat_rows([(stored(counting_matrix(2, 6)), 4, 2)], transposed=True)
    assert tensor.shape == (2, 2)
    assert tensor.read().tolist() == [[4, 10], [5, 11]]


def test_rows_can_be_read_with_a_stride() -> None:
    # Version 1 of Megatron's files interleaves: q0 k0 v0 q1 k1 v1.
    interleaved = stored(torch.tensor([0.0, 10, 20, 1, 11, 21]))
    pieces = tuple(
        SourceSlice(interleaved, (2 * n, 2 * n + 2), None, n, row_stride=3) for n in range(3)
    )
    assert LogicalTensor((6,), torch.float32, pieces).read().tolist() == [0, 1, 10, 11, 20, 21]


def test_read_converts_to_the_dtype_of_out() -> None:
    values = torch.tensor([1.0, 1 / 3, 1e-8, 70000.0])
    tensor = concat_rows([(stored(values), 0, 4)])
    assert torch.equal(tensor.read(out=torch.empty(4, dtype=torch.bfloat16)), values.bfloat16())
    assert torch.equal(tensor.read(out=torch.empty(4, dtype=torch.float64)), values.double())


def test_slices_of_mixed_dtypes_are_promoted() -> None:
    half = torch.tensor([1 + 2**-10]).half()
    bf16 = torch.tensor([3e38]).bfloat16()
    tensor = concat_rows([(stored(half), 0, 1), (stored(bf16), 0, 1)])
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor.read(), torch.cat([half.float(), bf16.float()]))


def test_read_does_not_record_gradients() -> None:
    parameter = torch.nn.Parameter(torch.empty(3))
    concat_rows([(stored(torch.nn.Parameter(torch.ones(3))), 0, 3)]).read(out=parameter.data)
    assert parameter.is_leaf and parameter.grad_fn is None and parameter.sum() == 3


class Halved(ComputedTensor):
    """Elements that are computed: half of the stored values."""

    stored_dtype_name = "doubled"
    location = "file: key"
    dtype = torch.float32

    def __init__(self, values: Tensor) -> None:
        self.values = 2 * values

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def compute_box(self, *box: slice) -> Tensor:
        assert all(
            0 <= part.start < part.stop <= n for part, n in zip(box, self.shape, strict=True)
        )
        return self.values[box] / 2


@st.composite
def draw_mapped_matrix(draw: st.DrawFn) -> tuple[Tensor, LogicalTensor]:
    """A matrix, and its map in bands of boxes, each at another offset of its own file."""
    rows = draw(st.integers(1, 12))
    columns = draw(st.integers(1, 9))
    matrix = counting_matrix(rows, columns)
    pieces = []
    row_cuts = sorted(draw(st.sets(st.integers(1, rows), max_size=3)) | {0, rows})
    for top, bottom in pairwise(row_cuts):
        column_cuts = sorted(draw(st.sets(st.integers(1, columns), max_size=2)) | {0, columns})
        for left, right in pairwise(column_cuts):
            step = draw(st.integers(1, 3))
            transposed = draw(st.booleans())
            above = draw(st.integers(0, 2))
            offset = draw(st.integers(0, 2))
            file = torch.full((above + (bottom - top) * step, offset + right - left), -1.0)
            file[above::step, offset:] = matrix[top:bottom, left:right]
            file = file.T.contiguous() if transposed else file
            source = Halved(file) if draw(st.booleans()) else stored(file)
            spot = (above, step, offset, transposed)
            pieces.append(SourceSlice(source, (top, bottom), (left, right), *spot))
    order = draw(st.permutations(pieces))
    return matrix, LogicalTensor((rows, columns), torch.float32, tuple(order))


@settings(max_examples=150, deadline=None)
@given(draw_mapped_matrix(), st.data())
def test_read_equals_indexing_for_random_maps(
    mapped: tuple[Tensor, LogicalTensor], data: st.DataObject
) -> None:
    matrix, tensor = mapped
    assert tensor.mapping_error() is None
    dim = data.draw(st.integers(0, 1))
    edges = st.integers(0, matrix.shape[dim])
    ranges = tuple(
        (min(a, b), max(a, b)) for a, b in data.draw(st.lists(st.tuples(edges, edges), max_size=3))
    )
    selected = [index for start, stop in ranges for index in range(start, stop)]
    part = ShardSpec(dim, ranges, len(selected))
    assert torch.equal(tensor.read(part), matrix.index_select(dim, torch.tensor(selected).int()))
    buffer = torch.empty(data.draw(st.integers(1, 200)), dtype=torch.uint8)
    joined = b"".join(bytes(block) for block in tensor.iter_blocks(buffer))
    assert joined == matrix.numpy().tobytes()


BOX = stored(counting_matrix(4, 3))
FAULTS: dict[str, tuple[tuple[SourceSlice, ...], str]] = {
    "rows missing": ((SourceSlice(BOX, (0, 3)),), "some rows are missing or stored twice"),
    "rows twice": (
        (SourceSlice(BOX, (0, 4)), SourceSlice(BOX, (3, 4))),
        "some rows are missing or stored twice",
    ),
    "columns missing": (
        (SourceSlice(BOX, (0, 4), (0, 2)),),
        "some elements of rows 0 to 4 are missing or stored twice",
    ),
    "columns twice": (
        (SourceSlice(BOX, (0, 4), (0, 2)), SourceSlice(BOX, (0, 4), (1, 3))),
        "some elements of rows 0 to 4 are missing or stored twice",
    ),
    "a file too short": ((SourceSlice(BOX, (0, 4), source_row=1),), "shape .4, 3., which does not"),
    "a step too long": ((SourceSlice(BOX, (0, 4), row_stride=2),), "not contain the slice"),
    "turned the wrong way": ((SourceSlice(BOX, (0, 4), transposed=True),), "not contain the"),
    "whole numbers": (
        (SourceSlice(stored(torch.ones(4, 3).char(), "f: k"), (0, 4)),),
        "f: k is torch.int8",
    ),
    "nothing": ((), "missing or stored twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_incomplete_map_has_a_mapping_error(fault: str) -> None:
    pieces, message = FAULTS[fault]
    error = LogicalTensor((4, 3), torch.float32, pieces).mapping_error()
    assert error is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def all_tensors() -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in lively(CLASSIC).tensors.items()}


NORM = "decoder.final_layernorm.weight"
BREAKS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        lambda model: model.pop(NORM),
        f"lacks {NORM}; the config does not fit the weights",
    ),
    "surplus": (
        lambda model: model.update(x=torch.ones(1)),
        "no parameter for 1 of the weights: x; without these weights",
    ),
    "other shape": (
        lambda model: model.update({NORM: torch.ones(31)}),
        r"found shape \(31,\), but the config requires \(32,\); the config does not fit the",
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_config_that_disagrees_with_the_weights_is_refused(fault: str) -> None:
    checkpoint_from_tensors(CLASSIC, all_tensors()).check()
    change, message = BREAKS[fault]
    model = all_tensors()
    change(model)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_from_tensors(CLASSIC, model).check()


def test_samples_distinguish_copies_from_other_weights() -> None:
    original = counting_matrix(5, 3)
    equal_copy = counting_matrix(5, 3)
    equal_copy[2, 1] += 1
    stored_original = stored(original)
    assert samples_equal([stored_original], [stored(original.clone())])
    assert not samples_equal([stored_original], [stored(equal_copy)])
    assert not samples_equal([stored_original], [stored(original[:4])])
    assert not samples_equal([stored_original], [stored_original, stored_original])
    for empty in (torch.ones(0, 3), torch.tensor(1.0)):
        assert samples_equal([stored(empty)], [stored(empty.clone())])
    assert not samples_equal([stored(torch.tensor(1.0))], [stored(torch.tensor(2.0))])


def test_message_lists_at_most_three_names() -> None:
    assert summarize_names(["a"]) == "a"
    assert summarize_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_config_fields_can_be_overridden_and_unknown_ones_are_refused() -> None:
    assert apply_overrides(CLASSIC, {"rotary_base": 5.0}).rotary_base == 5.0
    assert apply_overrides(CLASSIC, None) is CLASSIC
    assert apply_overrides(CLASSIC, CLASSIC.with_fields(vocab_size=7)).vocab_size == 7
    with pytest.raises(ConfigError, match="unknown key 'rotary_bass'"):
        apply_overrides(CLASSIC, {"rotary_bass": 5.0})


def test_common_dtype_is_that_of_most_elements() -> None:
    fewer = stored(torch.ones(9))
    more = stored(torch.ones(5, 2).bfloat16())
    assert majority_dtype([fewer, more, stored(torch.ones(99).char())]) == torch.bfloat16
    assert majority_dtype([]) is None
