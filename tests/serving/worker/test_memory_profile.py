"""Memory profile: the largest steps, on a fake device, on ranks, and their part of the memory."""

import gc
import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch

from bench.gpu_proof.proof_sizes import LLAMA_8B
from gpt.errors import ConfigError
from gpt.linear.fused_linear import fuse_layers
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.memory_budget import DEVICE_MEMORY_FRACTION
from serving.messages import BlockTableUpdate, SlotInit, Step
from serving.worker.cuda_graphs import graph_bytes_max
from serving.worker.kv_cache_size import available_kv_blocks, size_kv_cache
from serving.worker.memory_profile import largest_steps, run_largest_steps
from serving.worker.model_runner import ModelRunner
from serving.worker.sampler import SampledTokens, Sampler
from serving.worker.startup import combine_reports, measure_model
from tests.support.models import CLASSIC, MODERN, build
from tests.support.ranks import ranks

needs_fake_device = pytest.mark.skipif(
    find_spec("triton") is None or torch.version.cuda is not None,
    reason="the fake device needs Triton (make tools) and a CPU build of torch",
)

# The width and the vocabulary of a real model. The layers are computed one after another.
MODEL = LLAMA_8B.with_fields(num_layers=1, moe_layers=())
BLOCK_TOKENS = 16
# Bytes of a block in one layer: keys and values of 8 heads of 128 channels in bf16.
BLOCK_BYTES = BLOCK_TOKENS * 2 * 8 * 128 * 2
CONFIG = ServerConfig(
    "model",
    kv_block_tokens=BLOCK_TOKENS,
    running_requests_max=12,
    step_tokens_max=256,
    speculate_tokens_max=3,
    speculate_rows_max=8,
    adapter_rows_max=64,
    adapter_memory_mb=1,
    cuda_graphs="off",
)
# A fake device reads each score of a prompt one by one, so most tests have short steps.
SHORT = CONFIG.with_fields(running_requests_max=3, step_tokens_max=16, speculate_tokens_max=0)
FREE_BYTES = 150 << 20  # Enough for 65 tokens of 3 prompts; not for 64 rows of logits.
GREEDY = SamplingParams()
CONTEXT = MODEL.max_position_embeddings


def make_model() -> GPT:
    """A model on the fake device, prepared as in a server."""
    from gpt.attention.triton_paged import TritonAttention
    from tests.support.fake_device import DEVICE

    model = GPT(
        MODEL, Mesh.single(DEVICE), dtype=torch.bfloat16, attention_backend=TritonAttention()
    )
    model.requires_grad_(False)
    fuse_layers(model)
    return model


def device_context() -> AbstractContextManager[Any]:
    from tests.support.fake_device import fake_device

    return fake_device()


@dataclass(frozen=True)
class Shape:
    """The sequences of a step: their new tokens, past tokens and draft tokens."""

    lengths: Sequence[int]
    past: Sequence[int] = ()
    drafts: Sequence[int] = ()
    draws: bool = True
    scores: int = 0  # Tokens of the first prompt that are scored.


def step_of(shape: Shape, rules: SamplingParams) -> Step:
    """A step of this shape, in which each sequence has its own blocks."""
    count = len(shape.lengths)
    past = list(shape.past) or [0] * count
    ends = [start + length for start, length in zip(past, shape.lengths, strict=True)]
    block_counts = [-(-end // BLOCK_TOKENS) for end in ends]
    firsts = [1 + sum(block_counts[:index]) for index in range(count)]
    return Step(
        1,
        slots=list(range(count)),
        past=past,
        lengths=list(shape.lengths),
        token_ids=[1] * sum(shape.lengths),
        draws=[shape.draws] * count,
        prompt_score_counts=[shape.scores] + [0] * (count - 1),
        draft_counts=list(shape.drafts),
        slot_inits=[SlotInit(slot, rules, [1] * end, []) for slot, end in enumerate(ends)],
        block_table_updates=[
            BlockTableUpdate(slot, 0, list(range(first, first + blocks)))
            for slot, (first, blocks) in enumerate(zip(firsts, block_counts, strict=True))
        ],
    )


SHAPES = {
    "a prompt": Shape([256]),
    "a chunk without a token": Shape([256], [512], draws=False),
    "two prompts": Shape([131, 125]),
    "prompts of similar lengths": Shape([44, 45, 40, 41, 43, 43]),
    "a scored prompt": Shape([240, 16], scores=239),
    "the most sequences": Shape([21] * 12),
    "short prompts": Shape([2] * 6 + [3] * 6),
    "decodes": Shape([1] * 12, [40] * 12),
    "decodes of long contexts": Shape([1] * 12, [CONTEXT - 1] * 12),
    "a chunk beside decodes": Shape([245] + [1] * 11, [CONTEXT - 245] + [100] * 11),
    "drafts": Shape([4, 4], [200, 30], [3, 3]),
    "drafts beside prompts": Shape([4, 4] + [24] * 10, [200, 30] + [0] * 10, [3, 3] + [0] * 10),
}
RULES = {
    # First, because the history of penalties stays allocated.
    "penalties": SamplingParams(
        temperature=0.8,
        top_p=0.9,
        typical_p=0.9,
        repetition_penalty=1.2,
        logprobs=3,
        prompt_logprobs=3,
        min_new_tokens=2,
        stop_token_ids=(3,),
    ),
    "greedy": GREEDY,
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "log-probabilities": SamplingParams(logprobs=5),
    "kernel": SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.05, logprobs=10),
    "torch": SamplingParams(temperature=0.9, top_k=40, top_p=0.9, typical_p=0.8, logprobs=10),
    "masks": SamplingParams(temperature=0.8, allowed_token_ids=(1, 2), bad_words=((1,),)),
}


# With many rows, sampling needs more memory in the kernel, which computes all rows at once, than in
# torch. Without draft tokens, the history of penalties is not hidden by the rows of draft tokens.
LIMITS: dict[str, tuple[ServerConfig, dict[str, Shape]]] = {
    "drafts": (CONFIG, SHAPES),
    "no drafts": (
        CONFIG.with_fields(speculate_tokens_max=0),
        {name: shape for name, shape in SHAPES.items() if not shape.drafts},
    ),
    "many rows": (
        CONFIG.with_fields(running_requests_max=400, step_tokens_max=400, speculate_tokens_max=0),
        {"many decodes": Shape([1] * 400, [40] * 400), "a prompt": Shape([400])},
    ),
}


@needs_fake_device
@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
def test_no_step_within_the_limits_needs_more_memory_than_the_profile(limits: str) -> None:
    """The pool of the tested runner is not counted."""
    config, shapes = LIMITS[limits]
    with device_context() as device:
        model = make_model()
        model_bytes = device.memory.used_bytes
        step_bytes = size_kv_cache(model, config.scheduler_config, config.cache_config).step_bytes
        assert device.memory.used_bytes == model_bytes
        blocks = 12 * CONTEXT // BLOCK_TOKENS + 1
        runner = ModelRunner(
            model,
            config.scheduler_config,
            config.cache_config,
            async_scheduling=True,
            blocks=blocks,
            slots=config.scheduler_config.running_requests_max,
        )
        for rules_name, rules in RULES.items():
            for name, shape in shapes.items():
                if shape.scores and rules.prompt_logprobs is None:
                    continue
                device.memory.reset_peak()
                runner.run_step(step_of(shape, rules))
                needed = device.memory.peak_bytes - model_bytes - blocks * BLOCK_BYTES
                assert 0 < needed <= step_bytes, f"{name}, {rules_name}"


@needs_fake_device
@pytest.mark.slow
def test_the_pool_gets_what_the_largest_step_leaves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sampling needs some more gigabytes here, so that it is the largest part of a step."""
    launch_sampling = Sampler.launch_sampling
    extra_bytes, other_bytes = 4 << 30, 0

    def sample(sampler: Sampler, *args: Any) -> SampledTokens:
        extra = torch.empty(extra_bytes, dtype=torch.uint8, device=args[0].device)
        device.memory.other_bytes = other_bytes
        sampled_tokens = launch_sampling(sampler, *args)
        del extra
        return sampled_tokens

    monkeypatch.setattr(Sampler, "launch_sampling", sample)
    with device_context() as device, caplog.at_level(logging.INFO):
        model = make_model()
        size = size_kv_cache(model, SHORT.scheduler_config, SHORT.cache_config)
        assert size.step_bytes > extra_bytes
        pool_bytes = int(DEVICE_MEMORY_FRACTION * device.memory.free_bytes) - size.step_bytes
        assert size.blocks == pool_bytes // BLOCK_BYTES
        extra_bytes += 1000 * BLOCK_BYTES
        larger_step = size_kv_cache(model, SHORT.scheduler_config, SHORT.cache_config)
        assert size.blocks - larger_step.blocks == 1000
        # Memory outside of torch's allocator is no longer free after the profile.
        other_bytes = 10_000 * BLOCK_BYTES
        less_free = size_kv_cache(model, SHORT.scheduler_config, SHORT.cache_config)
        assert larger_step.blocks - less_free.blocks in (9000, 9001)
        assert less_free.step_bytes == larger_step.step_bytes
    (line, *_) = [message for message in caplog.messages if "device_memory" in message]
    sizes = dict(re.findall(r"(\w+)_mib=([\d.]+)", line))
    assert float(sizes["kv"]) == pytest.approx(size.blocks * BLOCK_BYTES / 2**20, abs=0.1)
    assert float(sizes["step"]) == pytest.approx(size.step_bytes / 2**20, abs=0.1)
    assert list(sizes) == ["weights", "step", "other", "graphs", "kv", "free"]


@needs_fake_device
@pytest.mark.slow
def test_ranks_with_different_free_memory_use_the_smaller_pool() -> None:
    reports = []
    for gibibytes in (24, 16, 20):
        with device_context() as device:
            device.memory.capacity_bytes = gibibytes << 30
            reports.append(measure_model(make_model(), SHORT.scheduler_config, SHORT.cache_config))
    report = combine_reports(reports)
    assert report.kv_blocks == reports[1].kv_blocks < reports[2].kv_blocks < reports[0].kv_blocks
    assert report.step_bytes == reports[0].step_bytes > 0


@needs_fake_device
@pytest.mark.slow
def test_the_pool_leaves_memory_for_cuda_graphs() -> None:
    with device_context():
        model = make_model()
        blocks = available_kv_blocks(model, SHORT.scheduler_config, SHORT.cache_config)
        scheduler_config = replace(SHORT.scheduler_config, cuda_graphs="auto")
        graph_bytes = graph_bytes_max(model, scheduler_config, SHORT.cache_config.adapter_pages)
        reserved = blocks - available_kv_blocks(model, scheduler_config, SHORT.cache_config)
        # One more block is the scratch block of padding rows.
        assert reserved - 1 in (graph_bytes // BLOCK_BYTES, graph_bytes // BLOCK_BYTES + 1)


@needs_fake_device
@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"adapter_memory_mb": 1 << 10}, "lower adapter_memory_mb, which is 1024"),
        ({"adapter_rows_max": 1 << 16}, "lower adapter_rows_max, which is 65536"),
        ({"step_tokens_max": 1 << 15}, "lower step_tokens_max, which is 32768"),
        ({"running_requests_max": 64, "step_tokens_max": 64}, "lower running_requests_max"),
        (
            {"speculate_rows_max": 64, "speculate_tokens_max": 63, "step_tokens_max": 65},
            "lower speculate_rows_max, which is 64",
        ),
    ],
)
def test_exhausted_memory_names_the_setting_to_lower(
    settings: dict[str, int], limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = SHORT.with_fields(**settings)
    with device_context() as device, caplog.at_level(logging.WARNING):
        model = make_model()
        device.memory.capacity_bytes = device.memory.used_bytes + FREE_BYTES
        used_bytes = device.memory.used_bytes
        with pytest.raises(ConfigError, match=limit) as error:
            available_kv_blocks(model, config.scheduler_config, config.cache_config)
        assert "CUDA out of memory" in str(error.value)
        assert "step_halved" not in caplog.text
        assert error.value.__context__ is None
        gc.collect()  # Some tensors of the step are in reference cycles.
        assert device.memory.used_bytes == used_bytes


@needs_fake_device
def test_a_library_without_memory_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(GPT, "forward_hidden", fail)
    with device_context():
        model = make_model()
        message = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        with pytest.raises(
            ConfigError, match=r"lower running_requests_max, .* \(CUDA error: CUBLAS"
        ):
            run_largest_steps(model, SHORT.scheduler_config, SHORT.cache_config)
        message = "shapes do not match"
        with pytest.raises(RuntimeError, match="shapes do not match"):
            run_largest_steps(model, SHORT.scheduler_config, SHORT.cache_config)


@needs_fake_device
@pytest.mark.slow
def test_kv_tokens_max_must_fit_beside_the_largest_step() -> None:
    with device_context() as device:
        model = make_model()
        device.memory.capacity_bytes = device.memory.used_bytes + (2 << 30)
        cache_config = replace(SHORT.cache_config, kv_tokens_max=1 << 20)
        with pytest.raises(ConfigError, match=r"set it to at most \d+") as error:
            available_kv_blocks(model, SHORT.scheduler_config, cache_config)
        tokens = int(re.findall(r"at most (\d+)", str(error.value))[0])
        cache_config = replace(SHORT.cache_config, kv_tokens_max=tokens)
        size = size_kv_cache(model, SHORT.scheduler_config, cache_config)
        left_bytes = device.memory.free_bytes - size.step_bytes - size.blocks * BLOCK_BYTES
        assert 0 <= left_bytes < BLOCK_BYTES
        with_graphs = replace(SHORT.scheduler_config, cuda_graphs="auto")
        with pytest.raises(ConfigError, match=r"set it to at most \d+"):
            size_kv_cache(model, with_graphs, cache_config)


@needs_fake_device
@pytest.mark.slow
def test_too_little_memory_for_two_blocks_names_the_settings_of_a_step() -> None:
    with device_context() as device:
        model = make_model()
        size = size_kv_cache(model, SHORT.scheduler_config, SHORT.cache_config)
        device.memory.capacity_bytes = device.memory.used_bytes + size.step_bytes
        with pytest.raises(ConfigError, match="lower step_tokens_max, running_requests_max"):
            available_kv_blocks(model, SHORT.scheduler_config, SHORT.cache_config)


def test_the_largest_steps_reach_the_limits_and_do_not_exceed_them() -> None:
    cases = product([1, 2, 50, 2304], [64, 65, 300], [1, 2, 7, 64], [None, 60], [0, 5])
    for context, tokens, requests, kv_tokens_max, drafts_max in cases:
        config = ServerConfig(
            "model",
            running_requests_max=requests,
            step_tokens_max=tokens,
            kv_tokens_max=kv_tokens_max,
            speculate_tokens_max=drafts_max,
            speculate_rows_max=20,
        )
        model_config = MODEL.with_fields(max_position_embeddings=context)
        steps = [
            largest.step
            for largest in largest_steps(model_config, config.scheduler_config, config.cache_config)
        ]
        context_max = min(context, 64) if kv_tokens_max else context  # 60 tokens are 4 blocks.
        for step in steps:
            ends = [past + length for past, length in zip(step.past, step.lengths, strict=True)]
            assert 0 < sum(step.lengths) == len(step.token_ids) <= tokens
            assert 0 < len(step.slots) <= requests and max(ends) <= context_max
            assert min(step.lengths) > 0 and min(step.past) >= 0
            rows = [count + 1 for count in step.draft_counts if count]
            assert sum(rows) <= 20 and max(rows, default=0) <= 1 + drafts_max
        assert max(sum(step.lengths) for step in steps) == min(tokens, requests * context_max)
        assert max(len(step.slots) for step in steps) == requests
        assert max(past for step in steps for past in step.past) == context_max - 1
        assert any(step.draft_counts for step in steps) == (drafts_max > 0 and context_max > 1)


def run_steps(rank: int, tp: int, pp: int, name: str) -> int:
    """Run the largest steps on a rank; return the number of its forward passes."""
    config = CONFIG.with_fields(step_tokens_max=40)
    mesh = Mesh.create(tp, pp)
    model_config = {"classic": CLASSIC, "modern": MODERN}[name]
    model = build(model_config, mesh, dtype=torch.float32)
    forward, passes = model.forward_hidden, 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return forward(*args)

    vars(model)["forward_hidden"] = counted
    run_largest_steps(model, config.scheduler_config, config.cache_config)
    torch.distributed.barrier()
    return passes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "passes", "name"),
    [(2, 1, 8, "modern"), (1, 2, 12, "classic"), (2, 2, 12, "modern")],
)
def test_all_ranks_run_the_same_steps(tp: int, pp: int, passes: int, name: str) -> None:
    """A pipeline runs the largest step 2 x pp times more: its stages keep as many outputs."""
    assert ranks(tp * pp, run_steps, tp, pp, name) == [passes] * (tp * pp)
