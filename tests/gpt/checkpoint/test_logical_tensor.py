"""The map of pieces: any box of a tensor, from wherever its pieces lie."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.checkpoint.logical_tensor import (
    InMemory,
    Logical,
    Piece,
    alike,
    common_dtype,
    in_memory,
    overridden,
    some,
    stack,
)
from gpt.errors import CheckpointError, ConfigError
from gpt.parallel.sharding import Part
from tests.support.models import CLASSIC, lively


def stored(value: Tensor, where: str = "file: key") -> InMemory:
    return InMemory(value, where)


def numbered(rows: int, columns: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + rows * columns, dtype=torch.float32).view(rows, columns)


def test_a_part_takes_rows_of_both_halves_of_a_gated_matrix() -> None:
    gate, up = numbered(4, 1), numbered(4, 1, first=10)
    fc1 = stack([(stored(gate), 0, 4), (stored(up), 0, 4)])
    second = fc1.read(Part(0, ((2, 4), (6, 8)), 4))
    assert second.flatten().tolist() == [2, 3, 12, 13]


def test_a_part_takes_columns_across_stacked_pieces() -> None:
    tensor = stack([(stored(numbered(2, 4)), 0, 2), (stored(numbered(2, 4, first=8)), 0, 2)])
    assert tensor.read(Part(1, ((1, 3),), 2)).tolist() == [[1, 2], [5, 6], [9, 10], [13, 14]]


def test_what_a_padded_vocabulary_has_too_much_is_zero() -> None:
    words = stack([(stored(numbered(5, 2, first=1)), 0, 5)])
    out = torch.full((4, 2), torch.nan)
    words.read(Part(0, ((4, 5),), 4), out)
    assert out.tolist() == [[9, 10], [0, 0], [0, 0], [0, 0]]
    assert words.read(Part(0, ((5, 5),), 4)).tolist() == [[0, 0]] * 4


def test_a_transposed_piece_counts_rows_in_the_logical_direction() -> None:
    tensor = stack([(stored(numbered(2, 6)), 4, 2)], transposed=True)
    assert tensor.shape == (2, 2)
    assert tensor.read().tolist() == [[4, 10], [5, 11]]


def test_rows_can_be_taken_at_a_step() -> None:
    # Version 1 of Megatron's files interleaves: q0 k0 v0 q1 k1 v1.
    interleaved = stored(torch.tensor([0.0, 10, 20, 1, 11, 21]))
    pieces = tuple(Piece(interleaved, (2 * n, 2 * n + 2), None, n, row_step=3) for n in range(3))
    assert Logical((6,), torch.float32, pieces).read().tolist() == [0, 1, 10, 11, 20, 21]


def test_reading_converts_to_what_the_target_has() -> None:
    values = torch.tensor([1.0, 1 / 3, 1e-8, 70000.0])
    tensor = stack([(stored(values), 0, 4)])
    assert torch.equal(tensor.read(out=torch.empty(4, dtype=torch.bfloat16)), values.bfloat16())
    assert torch.equal(tensor.read(out=torch.empty(4, dtype=torch.float64)), values.double())


def test_pieces_of_mixed_precision_lose_nothing() -> None:
    half, brain = torch.tensor([1 + 2**-10]).half(), torch.tensor([3e38]).bfloat16()
    tensor = stack([(stored(half), 0, 1), (stored(brain), 0, 1)])
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor.read(), torch.cat([half.float(), brain.float()]))


def test_reading_keeps_clear_of_gradients() -> None:
    parameter = torch.nn.Parameter(torch.empty(3))
    stack([(stored(torch.nn.Parameter(torch.ones(3))), 0, 3)]).read(out=parameter.data)
    assert parameter.is_leaf and parameter.grad_fn is None and parameter.sum() == 3


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[Tensor, Logical]:
    """A matrix, and a map of it in bands of boxes, each lying somewhere else in its own file."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    whole, pieces = numbered(rows, columns), []
    cuts = sorted(draw(st.sets(st.integers(1, rows), max_size=3)) | {0, rows})
    for top, bottom in pairwise(cuts):
        across = sorted(draw(st.sets(st.integers(1, columns), max_size=2)) | {0, columns})
        for left, right in pairwise(across):
            step, turned = draw(st.integers(1, 3)), draw(st.booleans())
            above, before = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            file = torch.full((above + (bottom - top) * step, before + right - left), -1.0)
            file[above::step, before:] = whole[top:bottom, left:right]
            source = stored(file.T.contiguous() if turned else file)
            spot = (above, step, before, turned)
            pieces.append(Piece(source, (top, bottom), (left, right), *spot))
    order = draw(st.permutations(pieces))
    return whole, Logical((rows, columns), torch.float32, tuple(order))


@settings(max_examples=150, deadline=None)
@given(cut_up(), st.data())
def test_any_ranges_of_any_map_are_what_indexing_gives(
    cut: tuple[Tensor, Logical], data: st.DataObject
) -> None:
    whole, tensor = cut
    assert tensor.fault() is None
    dim = data.draw(st.integers(0, 1))
    edges = st.integers(0, whole.shape[dim])
    ranges = tuple(
        (min(a, b), max(a, b)) for a, b in data.draw(st.lists(st.tuples(edges, edges), max_size=3))
    )
    picked = [n for start, stop in ranges for n in range(start, stop)]
    part = Part(dim, ranges, len(picked))
    assert torch.equal(tensor.read(part), whole.index_select(dim, torch.tensor(picked).int()))
    room = torch.empty(data.draw(st.integers(1, 200)), dtype=torch.uint8)
    joined = b"".join(bytes(block) for block in tensor.blocks(room))
    assert joined == whole.numpy().tobytes()


BOX = stored(numbered(4, 3))
FAULTS: dict[str, tuple[tuple[Piece, ...], str]] = {
    "rows missing": ((Piece(BOX, (0, 3)),), "not covered once"),
    "rows twice": ((Piece(BOX, (0, 4)), Piece(BOX, (3, 4))), "not covered once"),
    "columns missing": ((Piece(BOX, (0, 4), (0, 2)),), "rows 0 to 4 are not covered exactly once"),
    "columns twice": ((Piece(BOX, (0, 4), (0, 2)), Piece(BOX, (0, 4), (1, 3))), "exactly once"),
    "a file too short": ((Piece(BOX, (0, 4), source_row=1),), "shape .4, 3., too small"),
    "a step too long": ((Piece(BOX, (0, 4), row_step=2),), "too small"),
    "turned the wrong way": ((Piece(BOX, (0, 4), transposed=True),), "too small"),
    "whole numbers": (
        (Piece(stored(torch.ones(4, 3).char(), "f: k"), (0, 4)),),
        "f: k is torch.int8",
    ),
    "nothing": ((), "not covered"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_map_that_does_not_make_up_its_tensor_says_why(fault: str) -> None:
    pieces, message = FAULTS[fault]
    found = Logical((4, 3), torch.float32, pieces).fault()
    assert found is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found)


def whole_model() -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in lively(CLASSIC).tensors.items()}


NORM = "decoder.final_layernorm.weight"
BREAKS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda model: model.pop(NORM), f"lacks {NORM}; the config and the weights"),
    "surplus": (
        lambda model: model.update(x=torch.ones(1)),
        "no place for 1 of the weights: x; they would",
    ),
    "other shape": (
        lambda model: model.update({NORM: torch.ones(31)}),
        r"found \(31,\), need \(32,\) by the config; the config and the weights disagree",
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_config_that_disagrees_with_the_weights_is_one_sentence(what: str) -> None:
    in_memory(CLASSIC, whole_model()).check()
    change, message = BREAKS[what]
    model = whole_model()
    change(model)
    with pytest.raises(CheckpointError, match=message):
        in_memory(CLASSIC, model).check()


def test_a_copy_is_told_from_weights_that_were_trained_apart() -> None:
    left, other = numbered(5, 3), numbered(5, 3)
    other[2, 1] += 1
    whole = stored(left)
    assert alike([whole], [stored(left.clone())])
    assert not alike([whole], [stored(other)])
    assert not alike([whole], [stored(left[:4])])
    assert not alike([whole], [whole, whole])
    for empty in (torch.ones(0, 3), torch.tensor(1.0)):
        assert alike([stored(empty)], [stored(empty.clone())])
    assert not alike([stored(torch.tensor(1.0))], [stored(torch.tensor(2.0))])


def test_of_many_names_a_message_has_three() -> None:
    assert some(["a"]) == "a"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_fields_override_and_unknown_ones_are_refused() -> None:
    assert overridden(CLASSIC, {"rotary_base": 5.0}).rotary_base == 5.0
    assert overridden(CLASSIC, None) is CLASSIC
    assert overridden(CLASSIC, CLASSIC.with_fields(vocab_size=7)).vocab_size == 7
    with pytest.raises(ConfigError, match="unknown key 'rotary_bass'"):
        overridden(CLASSIC, {"rotary_bass": 5.0})


def test_the_common_dtype_is_that_of_most_elements() -> None:
    few, many = stored(torch.ones(9)), stored(torch.ones(5, 2).bfloat16())
    assert common_dtype([few, many, stored(torch.ones(99).char())]) == torch.bfloat16
    assert common_dtype([]) is None
