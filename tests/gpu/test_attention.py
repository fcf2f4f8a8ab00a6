"""Attention on a CUDA device: backends equal the reference, CUDA graphs, and decode bandwidth."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from gpt.attention.flashinfer import FlashInferAttention
from gpt.attention.fp8_kv_cache import Fp8KVAttention, quantize_fp8
from gpt.attention.kv_cache import FP8_DTYPE
from gpt.attention.options import AttentionOptions
from gpt.attention.paged import ragged_attention
from gpt.batch import Batch
from gpt.generation.generate import generate
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from tests.support.attention_cases import (
    UNEVEN_CASES,
    AttentionCase,
    Make,
    check_device_context_lengths,
    check_layers_with_different_options,
    check_nan_isolation,
    check_padded_step,
    check_quantized_rows,
    check_row_without_slot,
    check_segment_lists,
    check_store_and_attend,
    paged_logits,
)
from tests.support.models import CONFIGS, build, first_tie, recompute_greedy
from tests.support.rotary_cases import (
    RotaryCase,
    RotaryMake,
    check_rotary_models,
    check_transform_and_store,
    check_transformed_row_without_slot,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

CUDA = torch.device("cuda")
PROMPTS = [[7, 3, 90, 12, 5], [64], list(range(1, 30))]
# Size of the buffer whose copy gives the memory bandwidth; much larger than the L2 cache.
COPY_BYTES = 1 << 30


def triton_attention() -> Make:
    pytest.importorskip("triton", reason="Triton is not installed")
    from gpt.attention.triton_paged import TritonAttention

    return TritonAttention


def rotary_attention() -> RotaryMake:
    pytest.importorskip("triton", reason="Triton is not installed")
    from gpt.attention.triton_paged import TritonAttention

    return TritonAttention


@pytest.mark.parametrize("seed", range(36))  # Most cases compile kernels of their own.
def test_triton_attention_equals_the_reference(seed: int) -> None:
    check_store_and_attend(AttentionCase.draw(seed), triton_attention(), CUDA)


@pytest.mark.parametrize("attention_case", UNEVEN_CASES)
def test_triton_attention_over_uneven_contexts_equals_the_reference(
    attention_case: AttentionCase,
) -> None:
    check_store_and_attend(attention_case, triton_attention(), CUDA)


def test_the_segments_of_uneven_contexts_contain_each_key_once() -> None:
    triton_attention()
    check_segment_lists(CUDA)


@pytest.mark.parametrize("seed", range(20))  # Each case compiles a kernel of its own.
def test_the_triton_kernel_for_rope_and_the_kv_store_equals_the_reference(seed: int) -> None:
    check_transform_and_store(RotaryCase.draw(seed), rotary_attention(), CUDA)


@pytest.mark.parametrize("check", [check_transformed_row_without_slot, check_rotary_models])
def test_rotary_models_on_the_triton_backend_equal_the_torch_path(
    check: Callable[[RotaryMake, torch.device], None],
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check(rotary_attention(), CUDA)


@pytest.mark.parametrize("seed", range(30))
def test_fp8_kv_attention_in_torch_equals_the_reference(seed: int) -> None:
    attention_case = replace(AttentionCase.draw(seed), fp8_kv=True)
    check_store_and_attend(attention_case, Fp8KVAttention, CUDA)


@pytest.mark.parametrize("seed", range(30))
def test_flashinfer_attention_equals_the_reference(seed: int) -> None:
    try:
        import_module("flashinfer")
    except Exception as error:
        pytest.skip(f"FlashInfer cannot be imported: {type(error).__name__}: {error}")
    attention_case = replace(
        AttentionCase.draw(seed, widths=(64, 128)), dtype=torch.bfloat16, sinks=False, alibi=False
    )
    queries_per_kv_head = attention_case.heads[1]
    check_store_and_attend(
        attention_case,
        lambda scales: FlashInferAttention(
            CUDA, queries_per_kv_head=queries_per_kv_head, scales=scales
        ),
        CUDA,
    )


@pytest.mark.parametrize(
    "check",
    [
        check_device_context_lengths,
        check_layers_with_different_options,
        check_nan_isolation,
        check_padded_step,
        check_quantized_rows,
        check_row_without_slot,
    ],
)
def test_triton_attention_isolates_sequences(check: Callable[[Make, torch.device], None]) -> None:
    check(triton_attention(), CUDA)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_in_fp32_equal_the_cpus_up_to_the_first_near_tie(name: str) -> None:
    attention = triton_attention()(None)
    oracle = build(CONFIGS[name], dtype=torch.float32)
    model = build(
        CONFIGS[name],
        Mesh.single("cuda"),
        dtype=torch.float32,
        attention_backend=attention,
    )
    completions = generate(model, PROMPTS, SamplingParams(20))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert completion.token_ids[:until] == want.tokens[:until]


def test_logits_over_an_fp8_kv_pool_are_close_to_those_over_an_fp32_pool() -> None:
    backend = triton_attention()(None)
    fp8_logits = paged_logits(backend, FP8_DTYPE, CUDA)
    fp32_logits = paged_logits(backend, torch.float32, CUDA)
    assert 0 < (fp8_logits - fp32_logits).std() < 0.1 * fp32_logits.std()


def decode_step(
    contexts: list[int], heads: tuple[int, int, int], *, fp8_kv: bool = False
) -> tuple[Batch, Tensor, Tensor]:
    """The batch of a decode step, its queries, and a KV pool with its blocks in random order."""
    groups, queries, width = heads
    counts = [-(-context // 16) for context in contexts]
    blocks = torch.randperm(sum(counts), device=CUDA).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    batch = Batch.paged([1] * len(contexts), [context - 1 for context in contexts], tables, 16)
    kv = torch.randn(sum(counts), 2, groups, 16, width, device=CUDA, dtype=torch.bfloat16)
    q = torch.randn(len(contexts), groups * queries, width, device=CUDA).bfloat16()
    if fp8_kv:
        kv = quantize_fp8(kv).view(FP8_DTYPE)
    return batch, q, kv


@pytest.mark.parametrize("heads", [(8, 1, 128), (4, 8, 128)])
def test_a_captured_graph_replays_with_other_context_lengths(heads: tuple[int, int, int]) -> None:
    attention = triton_attention()(None)
    captured_batch, q, kv = decode_step([5000] * 3, heads)
    assert captured_batch.block_tables is not None
    tables = captured_batch.block_tables.int()
    context_lengths = torch.full((3,), 1, dtype=torch.int32, device=CUDA)

    def attend() -> Tensor:
        batch = Batch(
            (1,) * 3,
            (5007,) * 3,
            captured_batch.positions,
            captured_batch.slot_mapping,
            tables,
            device_context_lengths=context_lengths,
        )
        return attention.attend(q, q, q, batch, kv, AttentionOptions())

    warmup_stream = torch.cuda.Stream()
    warmup_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup_stream):
        attend()
    torch.cuda.current_stream().wait_stream(warmup_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attend()
    for contexts in ([700, 1, 17], [16, 500, 699], [1, 5000, 300], [4990, 4000, 2]):
        context_lengths.copy_(torch.tensor(contexts))
        graph.replay()
        first = replayed.clone()
        graph.replay()
        assert torch.equal(replayed, first)
        past = [context - 1 for context in contexts]
        batch = Batch.paged([1] * 3, past, captured_batch.block_tables, 16)
        assert torch.equal(replayed, attention.attend(q, q, q, batch, kv, AttentionOptions()))


@pytest.fixture(scope="module")
def copy_bytes_per_s() -> float:
    """The memory bandwidth of this device: bytes read and written by a large copy, per second."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1000
    return 2 * COPY_BYTES * 10 / seconds


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize("heads", [(32, 1, 128), (8, 4, 128)])
@pytest.mark.parametrize(
    "contexts",
    [
        [100],
        [640],
        [8192],
        [100] * 8,
        [640] * 64,
        [100_000] + [640] * 63,
    ],
    ids=lambda contexts: f"{len(contexts)} x {contexts[0]}-{contexts[-1]}",
)
def test_decode_bandwidth(
    contexts: list[int], heads: tuple[int, int, int], fp8_kv: bool, copy_bytes_per_s: float
) -> None:
    """Each decode step reads its own KV pool."""
    attention = triton_attention()(None)
    groups, queries, width = heads
    step_elements = 2 * sum(contexts) * groups * width
    steps = [
        decode_step(contexts, heads, fp8_kv=fp8_kv)
        for _ in range(max(2, min(64, (256 << 20) // (2 * step_elements))))
    ]
    reference = Fp8KVAttention().attend if fp8_kv else ragged_attention
    # The first calls also compile the kernels and make the metadata, before the capture.
    outputs = [
        attention.attend(q, q[:, :groups], q[:, :groups], batch, kv, AttentionOptions())
        for batch, q, kv in steps
    ]
    got, (batch, q, kv) = outputs[0], steps[0]
    for row in {0, len(contexts) - 1}:
        assert batch.block_tables is not None
        alone = Batch.paged([1], [contexts[row] - 1], batch.block_tables[row : row + 1], 16)
        row_q = q[row : row + 1]
        row_kv = row_q[:, :groups]  # Only its shape matters: all keys are in the pool.
        want = reference(row_q, row_kv, row_kv, alone, kv, AttentionOptions())
        assert (got[row] - want[0]).abs().max() < 0.05 * want.abs().max()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch, q, kv in steps:
            attention.attend(q, q[:, :groups], q[:, :groups], batch, kv, AttentionOptions())
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1000 / 5 / len(steps)
    rate = step_elements * steps[0][2].element_size() / seconds
    print(
        f"decode of {len(contexts)} contexts of {contexts[0]} to {contexts[-1]} tokens, {groups} x "
        f"{queries} heads{', FP8 KV' * fp8_kv}: {seconds * 1e6:.1f} us, {rate / 1e12:.2f} TB/s, "
        f"{rate / copy_bytes_per_s:.0%} of a copy"
    )
    assert seconds > 0
