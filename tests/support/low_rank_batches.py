"""Batches with adapters of one linear, for the kernels in gpt/linear/triton_low_rank.py.

The oracle is gpt/model/adapted_linear.py in fp64, with the tensors that the kernels read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.linear import low_rank
from gpt.linear.low_rank import LowRankKernels, PackedRows, TermTable
from gpt.linear_adapter import LinearTerm, OutputColumns
from gpt.model.adapted_linear import adapted_product

LINEAR = "decoder.layers.0.self_attention.linear_qkv"
OTHER_LINEARS = ("decoder.layers.0.self_attention.linear_proj", "decoder.layers.0.mlp.linear_fc2")
ALIGNMENT_BYTES = 64

Shape = tuple[int, int, tuple[OutputColumns, ...]]
# By name of a linear: its input channels, its output columns, and the columns of its parts.
SHAPES: Mapping[str, Shape] = {
    "qkv": (
        48,
        96,
        (
            OutputColumns(0, 32, 48, 2),
            OutputColumns(32, 8, 48, 2),
            OutputColumns(40, 8, 48, 2),
        ),
    ),
    "gated": (400, 300, (OutputColumns(0, 150, 150, 1), OutputColumns(150, 150, 150, 1))),
    "narrow": (1040, 20, ()),
}
# Linears of Llama-3.1-8B, which take too long in the interpreter.
LARGE_SHAPES: Mapping[str, Shape] = {
    "8B qkv": (
        4096,
        6144,
        (
            OutputColumns(0, 512, 768, 8),
            OutputColumns(512, 128, 768, 8),
            OutputColumns(640, 128, 768, 8),
        ),
    ),
    "8B fc2": (14336, 4096, ()),
}
KINDS = (
    "base",
    "lora",
    "lora parts",
    "dora",
    "dora parts",
    "ia3",
    "ia3 parts",
    "ia3 input",
    "all",
)


@dataclass(frozen=True)
class LowRankCase:
    """A batch whose rows have adapters of these kinds, in a random order."""

    shape: str
    kinds: Sequence[str]
    rows: int
    rank: int = 5
    bias: bool = False
    seed: int = 0


class LinearBatch:
    """The tensors of a case on a device: a linear, its input, and a memory with adapters."""

    def __init__(self, case: LowRankCase, device: torch.device, dtype: torch.dtype) -> None:
        self._draw = torch.Generator().manual_seed(case.seed)
        self._device, self._dtype, self._case = device, dtype, case
        is_large = case.shape in LARGE_SHAPES
        self.channels, self.columns, self._parts = (LARGE_SHAPES if is_large else SHAPES)[
            case.shape
        ]
        nbytes = 1 << (28 if is_large else 23)
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._end = 0
        self.x = self._normal(case.rows, self.channels)
        self.weight = self._normal(self.columns, self.channels) / self.channels**0.5
        self.bias = 3 * self._normal(self.columns) if case.bias else None
        self.table = TermTable(
            self._memory.view(dtype), [OTHER_LINEARS[0], LINEAR, OTHER_LINEARS[1]], slots=12
        )
        self.adapters = [
            self.draw_terms(kind, case.rank + 7 * index) for index, kind in enumerate(case.kinds)
        ]
        choice = torch.randint(len(case.kinds), (case.rows,), generator=self._draw)
        self.row_adapters = choice.numpy()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw).to(self._device, self._dtype)

    def draw_terms(self, kind: str, rank: int) -> list[LinearTerm]:
        """Return new terms of a kind, with tensors in the memory."""
        if kind == "base":
            return []
        parts: Sequence[OutputColumns | None] = (None,)
        if kind.endswith("parts") and self._parts:
            parts = self._parts[:1] + self._parts[2:]  # Without the keys.
        return [
            self._store(self._term(kind, part, rank + index)) for index, part in enumerate(parts)
        ]

    def _term(self, kind: str, part: OutputColumns | None, rank: int) -> LinearTerm:
        columns = self.columns if part is None else part.width * part.count
        term = LinearTerm(part)
        if kind.startswith(("lora", "dora", "all")):
            a = self._normal(rank, self.channels) / self.channels**0.5
            term = replace(term, lora_a=a, lora_b=self._normal(columns, rank), scale=0.3)
        if kind.startswith(("dora", "all")):
            term = replace(term, output_factor=1 + 0.3 * self._normal(columns))
        if kind in ("ia3", "ia3 parts", "all"):
            term = replace(term, output_scale=1 + 0.3 * self._normal(columns))
        if kind in ("ia3 input", "all"):
            term = replace(term, input_scale=1 + 0.3 * self._normal(self.channels))
        return term

    def _store(self, term: LinearTerm) -> LinearTerm:
        """Copy the tensors of a term into the memory."""

        def store(value: Tensor) -> Tensor:
            view = self._memory[self._end : self._end + value.nbytes].view(self._dtype)
            self._end += value.nbytes + -value.nbytes % ALIGNMENT_BYTES
            return view.view(value.shape).copy_(value)

        return _map_tensors(term, store)

    def kernels(self, rows: Sequence[int] | None = None) -> LowRankKernels:
        """Return the kernels of the batch, or of a batch of some of its rows."""
        row_adapters = self.row_adapters if rows is None else self.row_adapters[list(rows)]
        used = [index for index in np.unique(row_adapters).tolist() if self.adapters[index]]
        encoded = {index: self.table.encode({LINEAR: self.adapters[index]}) for index in used}
        slots = np.full(len(self.adapters), -1)
        slots[used] = self.table.assign_slots(encoded)
        packed = low_rank.pack_rows(slots[row_adapters])
        groups = int(packed[0])
        view = PackedRows.view(torch.from_numpy(packed).to(self._device), len(row_adapters), groups)
        return low_rank.batch_kernels(self.table, view, encoded.values())

    def output(self, kernels: LowRankKernels, rows: Sequence[int] | None = None) -> Tensor:
        """Return the linear's output, computed with the kernels."""
        x = self.x if rows is None else self.x[list(rows)]
        linear = kernels.for_linear(LINEAR)
        assert linear is not None
        scaled = linear.scale_input(x).double()
        bias = None if self.bias is None else self.bias.double()
        y = torch.nn.functional.linear(scaled, self.weight.double(), bias).to(self._dtype)
        return linear.add_terms(y, x, self.bias)

    def expected(self) -> Tensor:
        """Return the output of the reference, in fp64."""
        terms = []
        for index, adapter in enumerate(self.adapters):
            rows = torch.from_numpy(np.flatnonzero(self.row_adapters == index)).to(self._device)
            terms.append((rows, [_map_tensors(term, Tensor.double) for term in adapter]))
        bias = None if self.bias is None else self.bias.double()
        weight = self.weight.double()
        return adapted_product(self.x.double(), terms, lambda rows: rows @ weight.T, bias)


def _map_tensors(term: LinearTerm, change: Callable[[Tensor], Tensor]) -> LinearTerm:
    tensors: dict[str, Any] = {
        name: change(value) for name, value in vars(term).items() if isinstance(value, Tensor)
    }
    return replace(term, **tensors)


# The product of the base weight and u = A x are rounded to the dtype, and then the output. The
# interpreter's bf16 casts truncate.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def check_case(case: LowRankCase, device: torch.device, dtype: torch.dtype) -> None:
    """Check the output of a batch, whose rows without an adapter must be those of the base."""
    batch = LinearBatch(case, device, dtype)
    if all(not batch.adapters[index] for index in batch.row_adapters):
        return  # No adapter acts, and so the kernels are not launched.
    kernels = batch.kernels()
    assert kernels.for_linear(OTHER_LINEARS[0]) is None
    actual, expected = batch.output(kernels), batch.expected()
    assert actual.dtype == dtype
    error = (actual.double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) < TOLERANCES[dtype], (case, float(error.max()))
    for index, adapter in enumerate(batch.adapters):
        rows = batch.row_adapters == index
        if not adapter and rows.any():
            bias = None if batch.bias is None else batch.bias.double()
            base = torch.nn.functional.linear(batch.x.double(), batch.weight.double(), bias)
            assert torch.equal(actual[rows], base.to(dtype)[rows])


def check_rows_are_independent(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """A row's output is bit-equal in any batch, and NaN stays in its row."""
    for shape in SHAPES:
        batch = LinearBatch(LowRankCase(shape, KINDS, rows=40, bias=True), device, dtype)
        together = batch.output(batch.kernels())
        for rows in ([7], [3, 4, 5], [39, 0, 20, 21], list(range(20))):
            if any(batch.adapters[index] for index in batch.row_adapters[rows]):
                assert torch.equal(batch.output(batch.kernels(rows), rows), together[rows])
        batch.x[11] = float("nan")
        with_nan = batch.output(batch.kernels())
        others = [row for row in range(40) if row != 11]
        assert with_nan[11].isnan().any() and torch.equal(with_nan[others], together[others])


def check_selected_rows(device: torch.device) -> None:
    """The rows that the last layer computes have the output that they have in the whole batch."""
    batch = LinearBatch(LowRankCase("qkv", KINDS, rows=40, bias=True), device, torch.float32)
    kernels = batch.kernels()
    together = batch.output(kernels)
    for rows in ([39], [3, 3, 17], list(range(0, 40, 2))):
        selected = kernels.select_rows(torch.tensor(rows, device=device))
        assert isinstance(selected, LowRankKernels)
        assert torch.equal(batch.output(selected, rows), together[rows])


Work = Callable[[], object]


def check_replaced_descriptors(
    device: torch.device, capture: Callable[[Work], Work] = lambda work: work
) -> None:
    """The inputs of a CUDA graph, at fixed addresses and padded, serve other adapters and rows.

    `capture` returns a function that runs the work again.
    """
    rows, ranks = 8, 128
    batch = LinearBatch(LowRankCase("qkv", ("lora", "dora"), rows=rows), device, torch.float32)
    no_rows = low_rank.pack_rows(np.zeros(0, np.int64), rows=rows, group_count_max=rows)
    static = torch.from_numpy(no_rows).to(device)
    kernels = LowRankKernels(
        batch.table, PackedRows.view(static, rows, rows), batch.table.linears, [LINEAR], ranks
    )
    result = torch.empty(rows, batch.columns, device=device)
    run = capture(lambda: result.copy_(batch.output(kernels)))
    run()  # The number of groups is 0.
    base = result.clone()
    expected = torch.nn.functional.linear(batch.x.double(), batch.weight.double()).float()
    torch.testing.assert_close(base, expected, rtol=1e-6, atol=1e-6)
    for index, kinds in enumerate([("lora", "dora"), ("ia3", "all"), ("lora parts", "base")]):
        batch.adapters = [batch.draw_terms(kind, 3 + 20 * index) for kind in kinds]
        slots = np.array([-1, -1])
        for number, adapter in enumerate(batch.adapters):
            batch.table.forget(number)
            if adapter:
                encoded = batch.table.encode({LINEAR: adapter})
                [slots[number]] = batch.table.assign_slots({number: encoded})
        # The last rows are padding.
        count = rows - index
        packed = low_rank.pack_rows(
            slots[batch.row_adapters[:count]], rows=rows, group_count_max=rows
        )
        static.copy_(torch.from_numpy(packed))
        run()
        expected = batch.expected()[:count].float()
        torch.testing.assert_close(result[:count], expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(result[count:], base[count:])
