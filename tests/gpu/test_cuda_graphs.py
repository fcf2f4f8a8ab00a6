"""CUDA graphs and asynchronous scheduling on a CUDA device: tokens equal those of plain steps."""

import time
from pathlib import Path

import pytest
import torch

from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from tests.support.models import CONFIGS, build, first_tie, recompute_greedy
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed, and the engine needs it")
pytest.importorskip("triton", reason="CUDA graphs need Triton, which is not installed")

from bench.harness.offline_engine import generate_all, greedy_request, running_engine  # noqa: E402
from gpt.attention.selector import select_backend  # noqa: E402
from gpt.linear import grouped_experts  # noqa: E402
from gpt.model.loading import load_model  # noqa: E402
from serving.config import ServerConfig  # noqa: E402
from serving.engine_core.warmup import warmup_steps  # noqa: E402
from serving.messages import Outcome, Step  # noqa: E402
from serving.request import AnswerSpec, Request  # noqa: E402
from serving.worker import cuda_graphs  # noqa: E402
from serving.worker.kv_cache_size import available_kv_blocks  # noqa: E402
from serving.worker.model_runner import ModelRunner  # noqa: E402
from serving.worker.startup import prepare_weights  # noqa: E402
from tests.support.graph_steps import RULES, next_step, prefill_step  # noqa: E402
from tests.support.models import lively  # noqa: E402

CONFIG = ServerConfig(
    "model",
    device="cuda",
    kv_block_tokens=16,
    kv_tokens_max=2048,
    running_requests_max=6,
    step_tokens_max=64,
    adapter_rows_max=8,
)
DENSE = ["classic", "modern", "odd"]


def cuda_model(name: str, mesh: Mesh | None = None, dtype: torch.dtype = torch.float32) -> GPT:
    """A model on the device with Triton's attention and its weights prepared as in a server."""
    torch.backends.cuda.matmul.allow_tf32 = False
    mesh = mesh or Mesh.single("cuda")
    config = CONFIGS[name].with_fields(dtype="float64")
    dtype_name = str(dtype).removeprefix("torch.")
    backend = select_backend("triton", config, mesh.device, dtype=dtype_name)
    model = load_model(lively(config), mesh, dtype=dtype, attention_backend=backend)
    prepare_weights(model.eval(), CONFIG.model_config)
    return model


def build_runner(model: GPT, config: ServerConfig = CONFIG) -> ModelRunner:
    return ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=config.uses_async_scheduling("cuda"),
        blocks=available_kv_blocks(model, config.scheduler_config, config.cache_config),
        slots=6,
    )


def run_step(runner: ModelRunner, step: Step) -> Outcome:
    outcome = runner.run_step(msgspec.structs.replace(step, may_capture_graph=True))
    assert outcome is not None
    return outcome


def first_sequences(count: int, step: Step) -> Step:
    """The decode step with only its first `count` sequences."""
    return Step(
        step.step_id,
        slots=step.slots[:count],
        past=step.past[:count],
        lengths=step.lengths[:count],
        token_ids=step.token_ids[:count],
        draws=step.draws[:count],
        prompt_score_counts=step.prompt_score_counts[:count],
    )


@pytest.mark.parametrize("name", DENSE)
def test_replayed_steps_have_the_tokens_of_plain_steps(name: str) -> None:
    model = cuda_model(name)
    plain = build_runner(model, CONFIG.with_fields(cuda_graphs="off"))
    capturing = build_runner(model)
    assert capturing.graph_sizes == (1, 2, 4, 6) and plain.graph_sizes == ()
    step = prefill_step(RULES, blocks=2)
    outcomes = [run_step(runner, step) for runner in (plain, capturing)]
    for index in range(8):
        expected, captured = outcomes
        assert captured.replayed == (index > 0) and not expected.replayed
        assert captured.tokens == expected.tokens
        assert (captured.faults, captured.stuck) == (expected.faults, expected.stuck)
        for score, expected_score in zip(captured.scores, expected.scores, strict=True):
            assert abs(score.logprob - expected_score.logprob) < 1e-3
        # The batch shrinks, so that graphs of other sizes are captured too.
        step = first_sequences(5 - index // 2, next_step(step, expected, lambda slot, token: token))
        outcomes = [run_step(runner, step) for runner in (plain, capturing)]


@pytest.mark.parametrize("name", ["experts", "sigmoid experts"])
def test_replayed_steps_of_grouped_experts_have_the_tokens_of_plain_steps(name: str) -> None:
    model = cuda_model(name, dtype=torch.bfloat16)
    reason = grouped_experts.unsupported_reason(model)
    if reason is not None:
        pytest.skip(f"grouped experts are unavailable: {reason}")
    config = CONFIG.with_fields(running_requests_max=len(RULES))
    plain = build_runner(model, config.with_fields(cuda_graphs="off"))
    capturing = build_runner(model, config)
    step = prefill_step(RULES, blocks=2)
    outcomes = [run_step(runner, step) for runner in (plain, capturing)]
    # In bf16 the number of rows can change a token, so these are sizes of graphs: no row is added.
    for rows in (5, 4, 4, 2, 1):
        assert rows in capturing.graph_sizes
        step = first_sequences(rows, next_step(step, outcomes[0], lambda slot, token: token))
        expected, captured = outcomes = [run_step(runner, step) for runner in (plain, capturing)]
        assert captured.replayed and not expected.replayed
        assert captured.tokens == expected.tokens
        assert (captured.faults, captured.stuck) == (expected.faults, expected.stuck)


def test_steps_of_experts_in_fp32_are_not_captured() -> None:
    assert build_runner(cuda_model("experts")).graph_sizes == ()


def test_captured_graphs_use_no_more_memory_than_was_reserved_for_them() -> None:
    model = cuda_model("classic", dtype=torch.bfloat16)
    runner = build_runner(model)
    block_tokens = CONFIG.cache_config.kv_block_tokens
    for step in warmup_steps(CONFIG.scheduler_config, block_tokens, runner)[:-1]:
        runner.run_step(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    while runner.has_missing_graphs:
        run_step(runner, Step(0))
    assert runner.failed_captures == 0
    graph_bytes = torch.cuda.memory_reserved() - before
    assert graph_bytes <= cuda_graphs.graph_bytes_max(model, CONFIG.scheduler_config)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("ahead", ["auto", "off"])
def test_the_engines_tokens_equal_the_reference_loops_with_graphs_and_async_scheduling(
    name: str, ahead: str
) -> None:
    prompts = [[7, 3, 90, 12, 5], [64], list(range(1, 30)), [5, 5, 9]]
    oracle = build(CONFIGS[name], dtype=torch.float32)
    with running_engine(cuda_model(name), CONFIG.with_fields(step_ahead=ahead)) as engine:
        answers = generate_all(engine, [greedy_request(tuple(prompt), 20) for prompt in prompts])
        stats = engine.stats
    assert stats.replayed_steps > 10
    assert (stats.early_steps > 10) == (ahead == "auto")
    for prompt, answer in zip(prompts, answers, strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert list(answer.token_ids[:until]) == want.tokens[:until]


def test_sampled_tokens_are_independent_of_graphs_and_async_scheduling() -> None:
    rules = [SamplingParams(20, temperature=0.9, top_p=0.9, seed=seed) for seed in range(4)]
    model = build(CONFIGS["classic"], Mesh.single("cuda"))
    want = [generate(model, [[7, 3, 9]], rule)[0].token_ids for rule in rules]
    without_graphs = CONFIG.with_fields(cuda_graphs="off")
    without_ahead = CONFIG.with_fields(step_ahead="off")
    for config in (CONFIG, without_graphs, without_ahead):
        with running_engine(cuda_model("classic"), config) as engine:
            requests = [Request((AnswerSpec((7, 3, 9), rule),)) for rule in rules]
            answers = generate_all(engine, requests)
        # Rounding may decide a draw that falls between two tokens, but rarely in several answers.
        same = [
            list(answer.token_ids) == tokens for answer, tokens in zip(answers, want, strict=True)
        ]
        assert sum(same) >= len(rules) - 1


def run_stage(rank: int, folder: str) -> list[int]:
    """Run both runners of one stage. Hidden states go over gloo, through host memory."""
    model = cuda_model("modern", Mesh.create(1, 2, device="cuda"))
    config = CONFIG.with_fields(pp=2)
    plain = build_runner(model, config.with_fields(cuda_graphs="off"))
    capturing = build_runner(model, config)
    step = prefill_step(RULES, blocks=2)
    all_tokens: list[int] = []
    outcomes = [runner.run_step(step) for runner in (plain, capturing)]
    shared = Path(folder) / "tokens"
    for index in range(5):
        # Only the last stage has tokens; the first stage reads them from a file.
        step_tokens = [[] if outcome is None else outcome.tokens for outcome in outcomes]
        if rank == 1:
            assert step_tokens[0] == step_tokens[1]
            partial = shared.with_suffix(".part")
            partial.write_text(" ".join(map(str, step_tokens[0])))
            partial.rename(f"{shared}-{index}")
        else:
            _wait_for(Path(f"{shared}-{index}"))
        tokens = [int(word) for word in Path(f"{shared}-{index}").read_text().split()]
        all_tokens += tokens
        step = next_step(step, Outcome(step.step_id, tokens), lambda slot, token: token)
        step = msgspec.structs.replace(step, may_capture_graph=True)
        outcomes = [runner.run_step(step) for runner in (plain, capturing)]
        assert not any(outcome is not None and outcome.replayed for outcome in outcomes)
    for runner in (plain, capturing):
        runner.wait_for_sends()  # The last stage would never receive the sends of a freed runner.
    return all_tokens


def _wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)


def test_pipeline_stages_that_share_a_device_have_the_same_tokens_without_graphs(
    tmp_path: Path,
) -> None:
    first, last = ranks(2, run_stage, str(tmp_path), timeout_s=180)
    assert first == last and len(first) == 5 * len(RULES)
