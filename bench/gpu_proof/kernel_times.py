"""Single figures of a GPU proof: attention with one long context, rotary decode, sampling cost."""

import random
import time

import torch

from bench.gpu_proof.model_checks import open_network
from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext
from bench.harness.offline_engine import generate_all, greedy_request, random_ids
from bench.suites.gpu import time_call
from gpt.attention.options import AttentionOptions
from gpt.attention.selector import select_backend
from gpt.batch import Batch
from gpt.sampling_params import SamplingParams
from serving.messages import SlotInit
from serving.worker.sampler import Sampler

BLOCK_TOKENS = 16
SAMPLED_ROWS = 64
REPEATS = 10


def measure_kernels(stage: StageContext) -> None:
    """Measure the figures, the quickest first."""
    sizes = ProofSizes.of(stage.device)
    for vocab_size in sizes.vocab_sizes:
        for name, rules in {
            "greedy": SamplingParams(),
            "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
        }.items():
            milliseconds = 1e3 * _sampling_s(stage.device, vocab_size, rules)
            figure = f"{name} tokens of {SAMPLED_ROWS} rows, V {vocab_size}, ms"
            stage.figures.add(figure, round(milliseconds, 4))
    equal = [sizes.context_tokens] * sizes.attention_sequences
    uneven = [*equal[1:], sizes.long_context_tokens]
    for name, contexts in {"equal contexts": equal, "one long context": uneven}.items():
        microseconds = 1e6 * _attention_s(stage.device, sizes, contexts)
        stage.figures.add(f"decode attention, {name}, us", round(microseconds, 2))
    stage.figures.add("rotary decode, ms", round(1e3 * _rotary_decode_s(stage, sizes), 4))


def _sampling_s(device: str, vocab_size: int, rules: SamplingParams) -> float:
    """Return the wall time of sampling one token for each of the rows, results on the host."""
    sampler = Sampler(SAMPLED_ROWS, vocab_size, device)
    for slot in range(SAMPLED_ROWS):
        sampler.init_slot(SlotInit(slot, rules, [0], []))
    logits = torch.randn(SAMPLED_ROWS, vocab_size, device=device) * 3
    rows = list(range(SAMPLED_ROWS))
    sampler.sample(logits.clone(), rows, [1] * SAMPLED_ROWS)
    start = time.perf_counter()
    for step in range(REPEATS):
        sampler.sample(logits.clone(), rows, [2 + step] * SAMPLED_ROWS)
    return (time.perf_counter() - start) / REPEATS


@torch.inference_mode()
def _attention_s(device: str, sizes: ProofSizes, contexts: list[int]) -> float:
    """Return the seconds of one layer's decode attention over sequences with these contexts."""
    heads, channels = sizes.heads
    network = sizes.suite.network.with_fields(
        num_attention_heads=heads, num_query_groups=heads, kv_channels=channels
    )
    backend = select_backend("auto", network, torch.device(device))
    block_counts = [-(-context // BLOCK_TOKENS) for context in contexts]
    tables = torch.zeros(len(contexts), max(block_counts), dtype=torch.int64)
    first_block = 0
    for row, count in enumerate(block_counts):
        tables[row, :count] = torch.arange(first_block, first_block + count)
        first_block += count
    past = [context - 1 for context in contexts]
    batch = Batch.paged([1] * len(contexts), past, tables.to(device), BLOCK_TOKENS)
    dtype = getattr(torch, network.dtype)
    shape = (first_block, 2, heads, BLOCK_TOKENS, channels)
    kv = torch.randn(shape, device=device, dtype=dtype)
    q = torch.randn(len(contexts), heads, channels, device=device, dtype=dtype)
    options = AttentionOptions()
    return time_call(torch.device(device), lambda: backend.attend(q, q, q, batch, kv, options))


def _rotary_decode_s(stage: StageContext, sizes: ProofSizes) -> float:
    """Return the seconds of a decode step of one request, for a model with rotary positions."""
    network, new_tokens = sizes.rotary_network, sizes.profiled_tokens
    rng = random.Random(0)

    def generate_s(count: int) -> float:
        prompt = random_ids(rng, network.vocab_size, BLOCK_TOKENS)
        start = time.perf_counter()
        generate_all(engine, [greedy_request(prompt, count, "throughput")])
        return time.perf_counter() - start

    with open_network(stage, network) as engine:
        generate_s(1)
        return (generate_s(new_tokens + 1) - generate_s(1)) / new_tokens
