"""Random attention steps over a KV pool: a backend must agree with the torch reference.

As a program it draws cases for Triton's interpreter, which must be enabled before Triton is
loaded: TRITON_INTERPRET=1 python -m tests.support.attention_cases FIRST COUNT
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gpt.attention.backend import AttentionBackend, TorchAttention
from gpt.attention.fp8_kv_cache import Fp8KVAttention, quantize_fp8
from gpt.attention.kv_cache import FP8_DTYPE, KVPool
from gpt.attention.options import AttentionOptions
from gpt.attention.paged import store_kv
from gpt.batch import Batch
from gpt.linear.norm_activation import quantize_e4m3
from gpt.parallel.mesh import Mesh
from tests.support.models import CLASSIC, build
from tests.support.paged_steps import FULL, case, draw_options
from tests.support.plain_attention import plain_attention

# Limit of the error against fp64, relative to the largest value. Sums are in fp32; in bf16 each
# probability and the output are rounded, by about 2^-9 each; in fp16, by about 2^-12.
FAR_MAX = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SCALES = [[1.0, 1.0], [0.5, 2.0]]


Make = Callable[[Tensor | None], AttentionBackend]
# Contexts of a batch of which one is much longer than the others.
UNEVEN_CONTEXTS = [640] * 40 + [100_000] + [1, 0, 255, 257] + [640] * 19


@dataclass(frozen=True)
class AttentionCase:
    sizes: tuple[tuple[int, int], ...]  # Per sequence: new tokens, past tokens.
    heads: tuple[int, int, int]
    size: int
    window: int | None
    dtype: torch.dtype
    fp8_kv: bool = False
    scaled: bool = False
    sinks: bool = False
    alibi: bool = False

    @classmethod
    def draw(
        cls, seed: int, widths: tuple[int, ...] = (6, 16, 64, 80, 128, 256)
    ) -> "AttentionCase":
        draw = random.Random(seed)
        new_tokens = draw.choice([(1,), (1, 1, 2, 3), (1, 5, 20, 70)])
        pasts = (0, 1, 15, 16, 40, 100, 300)
        return cls(
            tuple((draw.choice(new_tokens), draw.choice(pasts)) for _ in range(draw.randint(1, 4))),
            (draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4, 5, 9]), draw.choice(widths)),
            draw.choice([16, 32, 128]),
            draw.choice([None, None, 1, 5, 40, 64]),
            draw.choice([torch.float32, torch.bfloat16, torch.float16]),
            fp8_kv=draw.random() < 0.4,
            scaled=draw.random() < 0.3,
            sinks=draw.random() < 0.4,
            alibi=draw.random() < 0.4,
        )


# Steps whose long contexts are split into segments.
UNEVEN_CASES = (
    AttentionCase(
        ((1, 3), (1, 2500), (1, 0), (1, 700)), (2, 1, 64), 16, None, torch.bfloat16, True, True
    ),
    AttentionCase(((1, 2500), (1, 30)), (3, 1, 80), 16, 1000, torch.float32),
    AttentionCase(((1, 3), (1, 2500), (4, 1000), (3, 5)), (2, 4, 64), 32, None, torch.float16),
    AttentionCase(((2, 2000), (1, 2500), (30, 600)), (1, 9, 16), 16, 1500, torch.bfloat16),
    AttentionCase(
        ((1, 3), (1, 2500), (1, 0)), (4, 1, 64), 16, 1500, torch.float32, sinks=True, alibi=True
    ),
    AttentionCase(
        ((1, 2500), (3, 900), (30, 600)), (2, 4, 64), 16, None, torch.bfloat16, sinks=True
    ),
    AttentionCase(
        ((1, 2500), (4, 900), (9, 70)), (2, 3, 64), 16, 1000, torch.float16, sinks=True, alibi=True
    ),
    AttentionCase(
        ((1, 2000), (1, 30)),
        (2, 4, 64),
        32,
        900,
        torch.bfloat16,
        True,
        True,
        sinks=True,
        alibi=True,
    ),
)


def check_store_and_attend(attention_case: AttentionCase, make: Make, device: torch.device) -> None:
    """The stored KV is bitwise equal to the reference's, and the output is close to fp64's."""
    lengths, past = ([size[column] for size in attention_case.sizes] for column in (0, 1))
    step = case(lengths, past, attention_case.heads, attention_case.size, attention_case.dtype)
    assert step.batch.block_tables is not None
    batch = Batch.paged(lengths, past, step.batch.block_tables.to(device), attention_case.size)
    q, k, v, kv = (x.to(device) for x in (step.q, step.k, step.v, step.kv))
    if attention_case.fp8_kv:
        k = k * 300  # Some values are too large for FP8.
        q = q / 300
        kv = quantize_fp8(kv).view(FP8_DTYPE)
    scales = (
        torch.tensor(SCALES, device=device)
        if attention_case.scaled and attention_case.fp8_kv
        else None
    )
    # The second layer of two, so that its scales differ from the first layer's.
    pools = [torch.stack([kv.view(torch.uint8)] * 2).view(kv.dtype)[1] for _ in range(2)]
    backend = make(scales)
    (Fp8KVAttention(scales).store if attention_case.fp8_kv else store_kv)(k, v, batch, pools[0])
    backend.store(k, v, batch, pools[1])
    assert torch.equal(*(pool.view(torch.uint8) for pool in pools)), "stored otherwise"
    exact_kv = pools[0].double()
    if scales is not None:
        exact_kv = exact_kv * scales[1].double().view(1, 2, 1, 1, 1)
    groups, queries, _ = attention_case.heads
    options = draw_options(
        attention_case.window,
        groups * queries,
        sinks=attention_case.sinks,
        alibi=attention_case.alibi,
        device=device,
    )
    want = plain_attention(q, k, v, batch, exact_kv, options).to(device)
    output = backend.attend(q, k, v, batch, pools[1], options)
    assert output.dtype == q.dtype and output.shape == q.shape
    error = (output.double() - want).abs().max() / exact_kv[:, 1].abs().max()
    assert error < FAR_MAX[attention_case.dtype], f"{float(error)} of the largest value away"


def both_terms(heads: tuple[int, int, int], device: torch.device) -> AttentionOptions:
    """Options with sinks and ALiBi."""
    return draw_options(None, heads[0] * heads[1], sinks=True, alibi=True, device=device)


def check_device_context_lengths(make: Make, device: torch.device) -> None:
    """Check that context lengths on the device give the same output, in longer block tables too.

    The layers of a step, which share the metadata of the batch, must give the same output too.
    """
    past_lengths = [0, 40, 700]
    for heads, has_terms in product(((2, 1, 64), (2, 4, 64)), (False, True)):
        options = both_terms(heads, device) if has_terms else FULL
        step = case([1] * 3, past_lengths, heads, 16, torch.float32)
        assert step.batch.block_tables is not None
        backend = make(None)
        tables = step.batch.block_tables.to(device)
        host_batch = Batch.paged([1] * 3, past_lengths, tables, 16)
        q, k, v, kv = (x.to(device) for x in (step.q, step.k, step.v, step.kv))
        want = backend.attend(q, k, v, host_batch, kv, options)
        assert torch.equal(backend.attend(q, k, v, host_batch, kv, options), want)
        ends = torch.tensor(host_batch.context_lengths, dtype=torch.int32, device=device)
        longer = torch.nn.functional.pad(tables.int(), (0, 7))
        recorded = Batch(
            (1,) * 3,
            (815,) * 3,
            host_batch.positions,
            host_batch.slot_mapping,
            longer,
            device_context_lengths=ends,
        )
        assert torch.equal(backend.attend(q, k, v, recorded, kv, options), want)


def check_layers_with_different_options(make: Make, device: torch.device) -> None:
    """Layers of one step, which share the metadata of the batch, attend with their own options."""
    for queries in (1, 2):
        step = case([1, 3, 20], [700, 100, 0], (2, queries, 16), 16, torch.float32)
        assert step.batch.block_tables is not None
        tables = step.batch.block_tables.to(device)
        batch = Batch.paged([1, 3, 20], [700, 100, 0], tables, 16)
        q, k, v, kv = (x.to(device) for x in (step.q, step.k, step.v, step.kv))
        backend = make(None)
        backend.store(k, v, batch, kv)
        for window, sinks, alibi, sign in product((None, 9), (False, True), (False, True), (1, -1)):
            options = draw_options(window, 2 * queries, sinks=sinks, alibi=alibi, device=device)
            if options.sinks is not None:
                options = replace(options, sinks=sign * options.sinks)
            want = plain_attention(q, k, v, batch, kv, options).to(device)
            output = backend.attend(q, k, v, batch, kv, options)
            error = (output.double() - want).abs().max() / kv[:, 1].abs().max()
            assert error < FAR_MAX[torch.float32], f"{options}: {float(error)}"


def check_padded_step(make: Make, device: torch.device) -> None:
    """Padding rows have no context and no slot, and the index tensors are unaligned views.

    A pointer of such a view is not a multiple of 16 bytes, as in a step of a server.
    """

    def unaligned(x: Tensor) -> Tensor:
        buffer = x.new_zeros(x.numel() + 1)
        buffer[1:] = x.flatten()
        return buffer[1:].view(x.shape)

    layers = (((2, 1, 64), torch.float16), ((2, 4, 64), torch.bfloat16))
    for (heads, dtype), has_terms in product(layers, (False, True)):
        options = both_terms(heads, device) if has_terms else FULL
        step = case([1] * 3, [0, 40, 130], heads, 16, dtype)
        assert step.batch.block_tables is not None and step.batch.slot_mapping is not None
        backend = make(None)
        q, k, v, kv = (x.to(device) for x in (step.q, step.k, step.v, step.kv))
        tables = step.batch.block_tables.to(device)
        batch = Batch.paged([1] * 3, [0, 40, 130], tables, 16)
        expected_kv = kv.clone()
        backend.store(k, v, batch, expected_kv)
        want = backend.attend(q, k, v, batch, expected_kv, options)
        q, k, v = (torch.cat([x, x[:2]]) for x in (q, k, v))
        assert batch.slot_mapping is not None
        block, offset = (
            unaligned(torch.nn.functional.pad(x, (0, 2), value=-1)) for x in batch.slot_mapping
        )
        ends = torch.tensor([*batch.context_lengths, 0, 0], dtype=torch.int32, device=device)
        padded = Batch(
            (1,) * 5,
            (255,) * 5,
            batch.positions,
            (block, offset),
            unaligned(torch.nn.functional.pad(tables.int(), (0, 7, 0, 2))),
            device_context_lengths=unaligned(ends),
        )
        backend.store(k, v, padded, kv)
        assert torch.equal(kv, expected_kv)
        output = backend.attend(q, k, v, padded, kv, options)
        assert torch.equal(output[:3], want)
        assert not output[3:].any()


def check_quantized_rows(make: Make, device: torch.device) -> None:
    """The merge kernel's rows in e4m3 equal those that are quantized separately, in each layer.

    Steps without a merge kernel for all of their rows have no such rows.
    """
    layers = (((2, 4, 64), torch.bfloat16), ((1, 9, 6), torch.float32))
    for (heads, dtype), has_terms in product(layers, (False, True)):
        options = both_terms(heads, device) if has_terms else FULL
        step = case([1] * 3, [0, 40, 700], heads, 16, dtype)
        assert step.batch.block_tables is not None
        tables = step.batch.block_tables.to(device)
        q, k, v, kv = (x.to(device) for x in (step.q, step.k, step.v, step.kv))
        backend = make(None)
        want = backend.attend(q, k, v, Batch.paged([1] * 3, [0, 40, 700], tables, 16), kv, options)
        # On the host, because on a CUDA device torch divides by a number inexactly.
        want_rows = quantize_e4m3(want.flatten(1).float().cpu())
        batch = Batch.paged([1] * 3, [0, 40, 700], tables, 16)
        for _ in range(2):
            output, rows = backend.attend_and_quantize(q, k, v, batch, kv, options)
            assert rows is not None and torch.equal(output, want)
            assert torch.equal(rows.scales.cpu(), want_rows.scales)
            values, want_values = rows.values.cpu(), want_rows.values
            assert torch.equal(values.view(torch.uint8), want_values.view(torch.uint8))
    for lengths, heads in (([1, 2], (2, 4, 16)), ([1, 1], (2, 1, 16))):
        step = case(lengths, [9, 9], heads, 16, torch.bfloat16)
        assert step.batch.block_tables is not None
        batch = Batch.paged(lengths, [9, 9], step.batch.block_tables.to(device), 16)
        q, k, v, kv = (x.to(device) for x in (step.q, step.k, step.v, step.kv))
        output, rows = make(None).attend_and_quantize(q, k, v, batch, kv, FULL)
        assert rows is None and torch.equal(output, make(None).attend(q, k, v, batch, kv, FULL))


def check_preparation(make: Make, device: torch.device) -> None:
    """Preparing runs every kernel without reading the pool."""
    for heads in ((2, 1, 16), (2, 3, 16)):
        step = case([1], [3], heads, 16, torch.float32)
        prepared: Any = make(None)
        kv = torch.full_like(step.kv, float("nan")).to(device)
        prepared.compile_kernels(step.q.to(device), kv, FULL, quantizes=heads[1] > 1)


def check_nan_isolation(make: Make, device: torch.device) -> None:
    """NaN stays in its sequence, and slots behind the end of a context are not read."""
    for new_tokens in (1, 3):
        step = case([new_tokens] * 3, [40] * 3, (2, 1, 64), 32, torch.float32)
        assert step.batch.block_tables is not None
        tables = step.batch.block_tables.to(device)
        batch = Batch.paged([new_tokens] * 3, [40] * 3, tables, 32)
        backend = make(None)
        q, k, v, kv = (x.to(device) for x in (step.q, step.k, step.v, step.kv))
        want = backend.attend(q, k, v, batch, kv, FULL)
        kv[tables[0, 1], :, :, 8 + new_tokens :] = float("nan")
        kv[tables[1, 0], 0, 1, 3] = float("nan")
        kv[tables[2, 0], 1, 0, 3] = float("inf")
        output = backend.attend(q, k, v, batch, kv, FULL)
        assert torch.equal(output[:new_tokens], want[:new_tokens])
        finite = output.isfinite().all(-1)[new_tokens:].view(2, new_tokens, 2)
        assert finite[0].tolist() == [[True, False]] * new_tokens
        assert finite[1].tolist() == [[False, True]] * new_tokens


def check_segment_lists(device: torch.device) -> None:
    """Check that segments contain each visible key once, and that a long context is split."""
    from gpt.attention import triton_paged

    for kv_heads, window in ((32, 0), (8, 0), (8, 3000)):
        contexts = torch.tensor(UNEVEN_CONTEXTS, dtype=torch.int32, device=device)
        starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device=device)
        indices = torch.stack([starts[:-1], torch.zeros_like(starts[:-1])], 1)
        items = triton_paged.WorkItems(indices, 1)
        metadata = triton_paged.TritonMetadata(contexts, starts, indices, items, items, items)
        segment_list = triton_paged.list_segments(items, metadata, window, kv_heads)
        count = int(segment_list.segments[0, 0])
        assert len(contexts) <= count <= segment_list.capacity
        segments = segment_list.segments[1 : count + 1].tolist()
        extra = segment_list.capacity - len(contexts)
        alignment = triton_paged.SEGMENT_ALIGNMENT
        keys_max = alignment + max(
            triton_paged.SEGMENT_KEYS_MIN,
            -(-sum(UNEVEN_CONTEXTS) // extra),
            -(-max(UNEVEN_CONTEXTS) // triton_paged.SEGMENTS_MAX),
        )
        for sequence, context in enumerate(UNEVEN_CONTEXTS):
            own = [(index, x) for index, x in enumerate(segments) if x[0] == sequence]
            first = own[0][0]
            assert [index for index, _ in own] == list(range(first, first + len(own)))
            ends = [max(0, context - window) // alignment * alignment if window else 0]
            for _, (_, row, tokens, position, begin, end, first_segment, count) in own:
                assert [row, tokens, position] == [sequence, 1, context - 1]
                assert begin * alignment == ends[-1] and end - ends[-1] <= keys_max
                assert [first_segment, count] == [first, len(own)]
                ends.append(end)
            assert ends[-1] == context


def check_row_without_slot(make: Make, device: torch.device) -> None:
    """Check that the keys and values of a row without a slot are not stored."""
    step = case([1] * 3, [5, 6, 7], (2, 1, 16), 16, torch.float32)
    assert step.batch.slot_mapping is not None
    k, v, kv = (x.to(device) for x in (step.k, step.v, step.kv))
    block, offset = (x.to(device) for x in step.batch.slot_mapping)
    block[1] = -1
    batch = Batch((1,) * 3, (5, 6, 7), step.batch.positions.to(device), (block, offset))
    want = kv.clone()
    for row in (0, 2):
        want[block[row], 0, :, offset[row]] = k[row]
        want[block[row], 1, :, offset[row]] = v[row]
    make(None).store(k, v, batch, kv)
    assert torch.equal(kv, want)


def paged_logits(backend: AttentionBackend, kind: torch.dtype, device: torch.device) -> Tensor:
    """Logits of a small model for a prompt in two chunks, with a pool of the dtype."""
    narrow = kind == FP8_DTYPE
    model = build(
        CLASSIC,
        Mesh.single(device),
        dtype=torch.float32,
        attention_backend=backend if narrow else TorchAttention(),
    )
    pool = KVPool(CLASSIC, model.layers, 4, block_tokens=16, dtype=kind, device=device)
    ids = torch.arange(40, device=device)
    tables = torch.tensor([[3, 1, 2]], device=device)
    with torch.inference_mode():
        pieces = [
            model(ids[start:end], Batch.paged([end - start], [start], tables, 16), pool)
            for start, end in ((0, 20), (20, 40))
        ]
    return torch.cat(pieces).cpu()


def patch_interpreter() -> None:
    """Correct three behaviours of Triton's interpreter that differ from a GPU.

    - The interpreter uses a loop's end as a number, but it is an array of one element, which NumPy
      no longer converts.
    - It rounds to FP8 incorrectly if a number is small or rounds up to a power of 2.
    - It multiplies bf16 matrices as the integers that hold their bits.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    patch = interpreter._patch_lang_tensor
    convert_float = interpreter._convert_float
    create_dot = interpreter.InterpreterBuilder.create_dot
    narrow = language.float8e4nv
    float32 = language.float32
    bf16 = language.bfloat16

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def convert_fp8(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == narrow:
            numbers = torch.from_numpy(x.view("uint8")).view(FP8_DTYPE).float().numpy()
            return (
                numbers if target == float32 else convert_float(numbers, float32, target, rounding)
            )
        if target == narrow:
            numbers = (
                x
                if source == float32
                else convert_float(x, source, float32, rounding).view("float32")
            )
            return torch.from_numpy(numbers).to(FP8_DTYPE).view(torch.uint8).numpy()
        return convert_float(x, source, target, rounding)

    def multiply_bf16(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        handle = interpreter.TensorHandle
        a, b = (
            handle(convert_float(x.data, x.dtype, float32, None).view("float32"), float32)
            if x.dtype == bf16
            else x
            for x in (a, b)
        )
        return create_dot(self, a, b, *arguments)

    interpreter._patch_lang_tensor = patch_tensor
    interpreter._convert_float = convert_fp8
    interpreter.InterpreterBuilder.create_dot = multiply_bf16


def main(first: int, count: int) -> None:
    from gpt.attention import triton_paged

    backend = triton_paged.TritonAttention
    torch.set_num_threads(1)
    patch_interpreter()
    device = torch.device("cpu")
    check_segment_lists(device)
    # An interpreted program is slow, so there are few; short contexts are split too.
    triton_paged.EXTRA_PROGRAMS, triton_paged.SEGMENT_KEYS_MIN = 40, 64
    for seed in range(first, first + count):
        attention_case = AttentionCase.draw(seed)
        try:
            check_store_and_attend(attention_case, backend, device)
        except Exception:
            print(f"case {seed}: {attention_case}")
            raise
    for check in (
        check_device_context_lengths,
        check_layers_with_different_options,
        check_padded_step,
        check_nan_isolation,
        check_row_without_slot,
        check_quantized_rows,
    ):
        check(backend, device)
    for attention_case in UNEVEN_CASES:
        check_store_and_attend(attention_case, backend, device)
    check_preparation(backend, device)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
