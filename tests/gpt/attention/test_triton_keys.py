"""Kernels compiled after the warm-up: none, as Triton's JIT sees the launches of random steps."""

import random
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from gpt.attention.kv_cache import FP8_DTYPE
from gpt.attention.options import AttentionOptions

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools")

# (KV heads, queries per KV head, channels): MHA of several widths, GQA, MQA.
HEADS = [(8, 1, 128), (8, 4, 128), (3, 5, 64), (12, 1, 80), (1, 48, 64), (2, 8, 256)]
# Dtypes of the queries and of the KV pool.
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, FP8_DTYPE),
]
KERNELS_MAX = 40


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_steps_after_the_warm_up_compile_no_kernel(
    heads: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], rotary: bool
) -> None:
    assert_no_new_kernel(heads, *dtypes, 40, rotary=rotary)


@pytest.mark.slow
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("heads", "dtypes"), list(zip(HEADS, DTYPES * 2, strict=True)))
def test_many_steps_after_the_warm_up_compile_no_kernel(
    heads: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], rotary: bool
) -> None:
    assert_no_new_kernel(heads, *dtypes, 1000, rotary=rotary)


@pytest.mark.parametrize("heads", HEADS[:2])
def test_steps_with_quantized_outputs_compile_no_kernel(heads: tuple[int, int, int]) -> None:
    assert_no_new_kernel(heads, torch.bfloat16, torch.bfloat16, 40, quantizes=True)


@pytest.mark.parametrize("heads", HEADS[:3])
def test_layers_with_sinks_and_alibi_share_the_kernels_of_each_window(
    heads: tuple[int, int, int],
) -> None:
    count = heads[0] * heads[1]
    # Views, so that the addresses have different alignments.
    numbers = torch.zeros(count + 3)
    layers = [
        AttentionOptions(window, numbers[start : start + count], numbers[start : start + count])
        for window in (None, 300)
        for start in range(3)
    ]
    compiled = [
        assert_no_new_kernel(heads, torch.bfloat16, torch.bfloat16, 20, options=options)
        for options in (layers[::3], layers)
    ]
    assert compiled[0] == compiled[1]


def assert_no_new_kernel(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    steps: int,
    **layer_options: Any,
) -> int:
    """Run random steps after the warm-up, and return the number of kernels.

    `layer_options`: of `ServedLayer`.
    """
    from tests.support.served_attention import ServedLayer
    from tests.support.triton_compiled import recorded_launches

    draw = random.Random(1)
    with recorded_launches() as launches:
        layer = ServedLayer(heads, dtype, kv_dtype, **layer_options)
        layer.warm_up()
        prepared = set(launches)
        assert 0 < len(prepared) <= KERNELS_MAX
        for _ in range(steps):
            count, kind = draw.randint(1, 60), draw.random()
            lengths = [1] * count
            if kind < 0.2:
                layer.run_captured(count)
                continue
            if kind < 0.6:
                lengths += [draw.choice([3, 5, 8, 17, 33, 65, 100, 200, 333, 450])]
            elif kind < 0.9:
                lengths = [draw.randint(1, 5) for _ in range(count)]
            layer.run_lengths(lengths, [draw.randint(1, 1400) for _ in lengths])
        assert sorted(launches.keys() - prepared) == []
    return len(prepared)


def test_short_runs_beside_a_chunk_have_work_items_of_their_own() -> None:
    from gpt.attention.triton_paged import TritonMetadata
    from tests.support.paged_steps import case

    step = case([1, 3, 100, 2], [5, 900, 40, 7], (8, 1, 128), 16, torch.bfloat16)
    metadata = TritonMetadata.from_batch(step.batch, 1, step.q)
    assert metadata.decode_items.indices.tolist() == [[0, 0]]
    assert metadata.short_items.indices.tolist() == [[1, 0], [3, 0]]
    assert metadata.prefill_items.indices.tolist() == [[2, 0]]
    assert (metadata.short_items.tokens_max, metadata.prefill_items.tokens_max) == (4, 128)
