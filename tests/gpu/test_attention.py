"""On a CUDA device each attention says what the plain twin says, recorded or not; and how fast."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

import pytest
import torch
from torch import Tensor

from gpt.attention.flashinfer import FlashInferAttention
from gpt.attention.fp8_kv_cache import EightBits, narrowed
from gpt.attention.kv_cache import NARROW
from gpt.attention.paged import ragged
from gpt.batch import Batch
from gpt.generation.generate import generate
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from tests.support.attention_cases import (
    Backend,
    Drawn,
    Make,
    check,
    check_ends,
    check_faults,
    check_skipped,
    paged_logits,
)
from tests.support.models import CONFIGS, build, first_tie, recompute_greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

CUDA = torch.device("cuda")
PROMPTS = [[7, 3, 90, 12, 5], [64], list(range(1, 30))]
# The H200's specification: what a decode's bandwidth is printed beside.
SPEC_BYTES = 4.8e12


def triton() -> Make:
    pytest.importorskip("triton", reason="Triton is not installed")
    from gpt.attention.triton_paged import TritonAttention

    return TritonAttention


@pytest.mark.parametrize("seed", range(150))
def test_triton_equals_the_plain_twin(seed: int) -> None:
    check(Drawn.by(seed), triton(), CUDA)


@pytest.mark.parametrize("seed", range(30))
def test_eight_bits_in_torch_equal_the_plain_twin(seed: int) -> None:
    check(Drawn(**{**vars(Drawn.by(seed)), "eight_bits": True}), EightBits, CUDA)


@pytest.mark.parametrize("seed", range(30))
def test_flashinfer_equals_the_plain_twin(seed: int) -> None:
    try:
        import_module("flashinfer")
    except Exception as error:
        pytest.skip(f"FlashInfer cannot be imported: {type(error).__name__}: {error}")
    drawn = Drawn.by(seed, widths=(64, 128))
    drawn = Drawn(**{**vars(drawn), "dtype": torch.bfloat16})
    check(
        drawn,
        lambda scales: FlashInferAttention(CUDA, queries=drawn.heads[1], scales=scales),
        CUDA,
    )


@pytest.mark.parametrize("checked", [check_ends, check_faults, check_skipped])
def test_triton_keeps_sequences_apart(checked: Callable[[Make, torch.device], None]) -> None:
    checked(triton(), CUDA)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_in_fp32_are_those_of_a_cpu_up_to_the_first_near_tie(name: str) -> None:
    attention = triton()(None)
    oracle = build(CONFIGS[name], dtype=torch.float32)
    model = build(
        CONFIGS[name],
        Mesh.single("cuda"),
        dtype=torch.float32,
        attend=attention.attend,
        store=attention.store,
    )
    for prompt, made in zip(PROMPTS, generate(model, PROMPTS, Sampling(20)), strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert made.token_ids[:until] == want.tokens[:until]


def test_a_model_over_a_pool_of_eight_bits_says_nearly_what_it_says_over_a_wide_one() -> None:
    backend = triton()(None)
    near, far = (paged_logits(backend, kind, CUDA) for kind in (NARROW, torch.float32))
    assert 0 < (near - far).std() < 0.1 * far.std()


def step(
    sequences: int, context: int, heads: tuple[int, int, int], *, eight_bits: bool = False
) -> tuple[Batch, Tensor, Tensor]:
    """A step of decoding, its queries and a pool of blocks in any order."""
    groups, queries, width = heads
    blocks = -(-context // 16)
    order = torch.randperm(sequences * blocks, device=CUDA)
    batch = Batch.paged([1] * sequences, [context - 1] * sequences, order.view(-1, blocks), 16)
    kv = torch.randn(sequences * blocks, 2, groups, 16, width, device=CUDA).bfloat16()
    q = torch.randn(sequences, groups * queries, width, device=CUDA).bfloat16()
    return batch, q, narrowed(kv).view(NARROW) if eight_bits else kv


@pytest.mark.parametrize("heads", [(8, 1, 128), (4, 8, 128)])
def test_what_was_recorded_serves_other_contexts(heads: tuple[int, int, int]) -> None:
    attention = triton()(None)
    known, q, kv = step(3, 700, heads)
    assert known.tables is not None
    tables, ends = known.tables.int(), torch.full((3,), 1, dtype=torch.int32, device=CUDA)

    def work() -> Tensor:
        batch = Batch((1,) * 3, (2047,) * 3, known.positions, known.slots, tables, ends=ends)
        return attention.attend(q, q, q, batch, kv, None)

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    for contexts in ([700, 1, 17], [16, 500, 699]):
        ends.copy_(torch.tensor(contexts))
        graph.replay()
        past = [context - 1 for context in contexts]
        now = Batch.paged([1] * 3, past, known.tables, 16)
        assert torch.equal(made, attention.attend(q, q, q, now, kv, None))


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize(
    ("sequences", "context"), [(1, 640), (1, 8192), (8, 2048), (32, 640), (64, 2048)]
)
def test_the_bandwidth_of_decoding(sequences: int, context: int, eight_bits: bool) -> None:
    """Of the target model's heads (32 x 128). Each turn reads a pool of its own."""
    attention = triton()(None)
    turns = [
        step(sequences, context, (32, 1, 128), eight_bits=eight_bits)
        for _ in range(max(2, (256 << 20) // (sequences * context * 32 * 128 * 4)))
    ]
    twin = cast(Backend, EightBits()).attend if eight_bits else ragged
    for batch, q, kv in turns:  # What is compiled and laid out is so now.
        got, want = (x(q, q, q, batch, kv, None) for x in (attention.attend, twin))
        assert (got - want).abs().max() < 0.05 * want.abs().max()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch, q, kv in turns:
            attention.attend(q, q, q, batch, kv, None)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1000 / 5 / len(turns)
    rate = 2 * sequences * context * 32 * 128 * turns[0][2].element_size() / seconds
    print(
        f"decode of {sequences} x {context} tokens{' in eight bits' * eight_bits}: "
        f"{seconds * 1e6:.0f} us, {rate / 1e12:.2f} TB/s, {rate / SPEC_BYTES:.0%} of the H200's"
    )
    assert seconds > 0
