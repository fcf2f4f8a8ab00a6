"""Linear adapters on a CUDA device: the kernels, and steps with and without CUDA graphs."""

from dataclasses import replace

import pytest
import torch

from gpt.linear import low_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed, and the engine needs it")
pytest.importorskip("triton", reason="the kernels need Triton, which is not installed")

from bench.suites.gpu_adapters import LinearShapes, LowRankSizes, run_suite  # noqa: E402
from gpt.attention.selector import select_backend  # noqa: E402
from gpt.config import GPTConfig  # noqa: E402
from gpt.linear import fp8_linear  # noqa: E402
from gpt.linear.fused_linear import fuse_layers  # noqa: E402
from gpt.model.gpt_model import GPT  # noqa: E402
from gpt.model.loading import load_model  # noqa: E402
from gpt.parallel.mesh import Mesh  # noqa: E402
from serving.config import ServerConfig  # noqa: E402
from serving.engine_core.warmup import warmup_steps  # noqa: E402
from serving.messages import Outcome, Step  # noqa: E402
from serving.worker import cuda_graphs  # noqa: E402
from serving.worker.kv_cache_size import available_kv_blocks  # noqa: E402
from serving.worker.model_runner import ModelRunner  # noqa: E402
from serving.worker.startup import prepare_weights  # noqa: E402
from tests.support.adapter_steps import (  # noqa: E402
    LORA,
    check_equal_outcomes,
    linears_write,
    run_adapter_steps,
)
from tests.support.linear_adapters import random_linears  # noqa: E402
from tests.support.low_rank_batches import (  # noqa: E402
    KINDS,
    LARGE_SHAPES,
    SHAPES,
    LowRankCase,
    Work,
    check_case,
    check_replaced_descriptors,
    check_rows_are_independent,
    check_selected_rows,
)
from tests.support.models import CONFIGS, lively  # noqa: E402

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CONFIG = ServerConfig(
    "model",
    device="cuda",
    kv_block_tokens=16,
    kv_tokens_max=2048,
    running_requests_max=6,
    step_tokens_max=64,
    adapter_rows_max=8,
    adapter_memory_mb=8,
)
# Wide enough for fp8 layers.
WIDE = GPTConfig(
    num_layers=4,
    hidden_size=1280,
    num_attention_heads=10,
    vocab_size=1000,
    max_position_embeddings=128,
)


@pytest.fixture(autouse=True)
def kernels_are_supported() -> None:
    reason = low_rank.unsupported_reason(CUDA, torch.float32)
    if reason is not None:
        pytest.skip(f"the kernels are unavailable: {reason}")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_kernels_equal_the_torch_reference(shape: str, rows: int, dtype: torch.dtype) -> None:
    for bias in (False, True):
        check_case(LowRankCase(shape, KINDS, rows, bias=bias, seed=rows), CUDA, dtype)
        for kind in KINDS:
            check_case(LowRankCase(shape, (kind,), rows, bias=bias), CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 8, 15, 16, 17, 64, 100, 512])
def test_all_ranks_equal_the_torch_reference(rank: int, dtype: torch.dtype) -> None:
    check_case(LowRankCase("gated", ("lora parts", "dora"), 9, rank=rank, bias=True), CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LARGE_SHAPES)
@pytest.mark.parametrize("rows", [1, 32, 1000])
def test_linears_of_8b_models_equal_the_torch_reference(
    shape: str, rows: int, dtype: torch.dtype
) -> None:
    check_case(LowRankCase(shape, KINDS, rows, rank=16), CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    check_rows_are_independent(CUDA, dtype)


def test_selected_rows_equal_those_of_the_whole_batch() -> None:
    check_selected_rows(CUDA)


def test_a_replayed_graph_serves_other_adapters() -> None:
    graph = torch.cuda.CUDAGraph()

    def capture(work: Work) -> Work:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    check_replaced_descriptors(CUDA, capture)


def cuda_model(config: GPTConfig, dtype: torch.dtype) -> GPT:
    """A model on the device, with Triton's attention and its weights as loaded."""
    dtype_name = str(dtype).removeprefix("torch.")
    backend = select_backend("triton", config, CUDA, dtype=dtype_name)
    checkpoint = lively(config.with_fields(dtype="float64"))
    model = load_model(checkpoint, Mesh.single("cuda"), dtype=dtype, attention_backend=backend)
    return model.eval().requires_grad_(False)


def build_runner(model: GPT, *, graphs: bool, kernels: bool = True) -> ModelRunner:
    config = CONFIG if graphs else CONFIG.with_fields(cuda_graphs="off")
    runner = ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=config.uses_async_scheduling("cuda"),
        blocks=available_kv_blocks(model, config.scheduler_config, config.cache_config),
        slots=6,
    )
    assert runner._adapter_memory.table is not None
    if not kernels:
        runner._adapter_memory.table = None
    return runner


def without_failures(runner: ModelRunner, model: GPT) -> list[Outcome]:
    outcomes = run_adapter_steps(runner, model.config, blocks=2, has_bottlenecks=True)
    assert runner.failed_captures == 0
    return outcomes


# Networks with one KV group, as the steps have.
@pytest.mark.parametrize("name", ["classic", "modern", "odd", "ALiBi"])
def test_replayed_steps_have_the_tokens_of_plain_steps_and_of_torch(name: str) -> None:
    """Adapters are loaded, replaced and evicted between the steps."""
    model = cuda_model(CONFIGS[name], torch.float32)
    prepare_weights(model, CONFIG.model_config)
    reference = without_failures(build_runner(model, graphs=False, kernels=False), model)
    plain = without_failures(build_runner(model, graphs=False), model)
    assert not any(outcome.replayed for outcome in plain)
    check_equal_outcomes(plain, reference, 1e-3)
    captured = without_failures(build_runner(model, graphs=True), model)
    assert all(outcome.replayed for outcome in captured[:-1])
    assert not captured[-1].replayed, "bottlenecks"
    check_equal_outcomes(captured, plain, 1e-3)


@pytest.mark.parametrize("fp8", [False, True])
def test_replayed_bf16_and_fp8_steps_are_close_to_plain_steps(fp8: bool) -> None:
    if fp8 and (reason := fp8_linear.unsupported_reason(CUDA, torch.bfloat16)) is not None:
        pytest.skip(f"FP8 matmuls are unavailable: {reason}")
    model = cuda_model(WIDE, torch.bfloat16)
    model.head_weight.mul_(0.1)
    fuse_layers(model, fp8_linear.fp8_layers(model) if fp8 else ())
    write_range = CONFIG.with_fields(adapter_memory_mb=64)
    config = write_range.with_fields(cuda_graphs="off")
    outcomes = []
    for server_config in (config, write_range):
        runner = ModelRunner(
            model,
            server_config.scheduler_config,
            server_config.cache_config,
            async_scheduling=False,
            blocks=64,
            slots=6,
        )
        outcomes.append(run_adapter_steps(runner, WIDE, blocks=2, range_bytes=8 << 20))
        assert runner.failed_captures == 0
    plain, captured = outcomes
    assert all(outcome.replayed for outcome in captured)
    # The steps have other numbers of rows, and bf16 matmuls then sum in another order.
    check_close_scores(captured, plain)


def check_close_scores(actual: list[Outcome], expected: list[Outcome]) -> None:
    """Check the log-probabilities of the sampled tokens that are equal, which most are."""
    pairs = [
        (token == other_token, score.logprob, other_score.logprob)
        for outcome, other in zip(actual, expected, strict=True)
        for token, other_token, score, other_score in zip(
            outcome.tokens, other.tokens, outcome.scores, other.scores, strict=True
        )
    ]
    equal = [(logprob, other) for is_equal, logprob, other in pairs if is_equal]
    assert len(equal) >= 0.8 * len(pairs)
    assert all(abs(logprob - other) < 0.25 for logprob, other in equal)


def test_graphs_with_adapters_use_no_more_memory_than_was_reserved_for_them() -> None:
    model = cuda_model(CONFIGS["classic"], torch.bfloat16)
    prepare_weights(model, CONFIG.model_config)
    runner = build_runner(model, graphs=True)
    scheduler_config, cache_config = CONFIG.scheduler_config, CONFIG.cache_config
    for step in warmup_steps(scheduler_config, cache_config.kv_block_tokens, runner)[:-1]:
        runner.run_step(step)
    write = linears_write(LORA, random_linears(model.config))
    runner.run_step(Step(0, linear_writes=[write]))
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    while runner.has_missing_graphs:
        runner.run_step(Step(0, may_capture_graph=True))
    assert runner.failed_captures == 0
    graph_bytes = torch.cuda.memory_reserved() - before
    limit = cuda_graphs.graph_bytes_max(model, scheduler_config, cache_config.adapter_pages)
    print(f"graphs use {graph_bytes / 2**20:.0f} MiB, {limit / 2**20:.0f} MiB are reserved")
    assert graph_bytes <= limit


def test_the_benchmark_runs() -> None:
    sizes = replace(LowRankSizes(), copy_bytes=1 << 24, repeats=3)
    lines = list(run_suite((), sizes, {"small": LinearShapes(2, ((768, 768), (256, 1024)))}))
    assert len(lines) == 7
    print(*lines, sep="\n")
