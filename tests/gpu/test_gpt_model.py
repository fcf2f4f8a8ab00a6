"""GPT on a CUDA device: logits, tokens and losses equal the CPU's, also with several ranks."""

import pytest
import torch

from gpt.batch import Batch
from gpt.generation.generate import generate
from gpt.model.loading import load_model
from gpt.model.pipeline import forward
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from tests.support.models import (
    CONFIGS,
    EIGHT_EXPERTS,
    MODERN,
    build,
    first_tie,
    lively,
    recompute_greedy,
)
from tests.support.ranks import ranks
from tests.support.trainers import learn, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

PROMPTS = [[7, 3, 90, 12, 5], [64], list(range(1, 30))]


@pytest.mark.parametrize("name", CONFIGS)
def test_fp64_logits_and_tokens_equal_the_cpus(name: str) -> None:
    cpu_model = build(CONFIGS[name])
    cuda_model = build(CONFIGS[name], Mesh.single("cuda"))
    ids = torch.arange(24).view(2, 12)
    assert (cuda_model.logits(ids.cuda()).cpu() - cpu_model.logits(ids)).abs().max() < 1e-9
    rule = SamplingParams(max_new_tokens=20)
    want = [c.token_ids for c in generate(cpu_model, PROMPTS, rule)]
    assert [c.token_ids for c in generate(cuda_model, PROMPTS, rule)] == want


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_in_fp32_equal_the_cpus_up_to_the_first_near_tie(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    oracle = build(CONFIGS[name], dtype=torch.float32)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.float32)
    completions = generate(model, PROMPTS, SamplingParams(20))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert completion.token_ids[:until] == want.tokens[:until]


def test_bf16_logits_are_close_to_fp64() -> None:
    ids = torch.arange(24).view(2, 12)
    exact = build(MODERN).logits(ids)
    bf16 = build(MODERN, Mesh.single("cuda"), dtype=torch.bfloat16).logits(ids.cuda()).cpu()
    # bf16 has 8 significant bits; only a wrong formula has an error of a tenth of the spread.
    assert (bf16 - exact).std() < 0.1 * exact.std()


def test_loading_allocates_only_the_weights_on_the_device() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(lively(MODERN), Mesh.single("cuda"))
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(p.is_cuda for p in model.parameters())
    # The allocator rounds each tensor up to 512 bytes.
    rounding = 512 * len(list(model.parameters()))
    assert torch.cuda.max_memory_allocated() - before <= weight_bytes + rounding


def split_logits(rank: int, tp: int, pp: int) -> torch.Tensor | None:
    mesh = Mesh.create(tp, pp, device="cuda", sequence_parallel=tp > 1)
    model = build(MODERN, mesh)
    with torch.inference_mode():
        logits = forward(model, torch.arange(15).cuda(), Batch.unpaged([5, 1, 9], "cuda"))
    return None if logits is None else logits.cpu()


def expert_parallel_logits(rank: int, tp: int, ep: int) -> torch.Tensor:
    model = build(EIGHT_EXPERTS, Mesh.create(tp, 1, ep=ep, device="cuda"))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(15).cuda(), Batch.unpaged([5, 1, 9], "cuda"))
    return logits.cpu()


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (1, 2)])
def test_logits_of_expert_parallel_ranks_equal_those_of_a_single_rank(tp: int, ep: int) -> None:
    want = build(EIGHT_EXPERTS)(torch.arange(15), Batch.unpaged([5, 1, 9]))
    for got in ranks(2, expert_parallel_logits, tp, ep, timeout_s=120):
        assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_logits_of_ranks_on_one_device_equal_those_of_a_single_rank(tp: int, pp: int) -> None:
    want = build(MODERN)(torch.arange(15), Batch.unpaged([5, 1, 9]))
    got = ranks(tp * pp, split_logits, tp, pp, timeout_s=120)[-1]
    assert got is not None
    assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("method", ["prompt-tuning", "prefix"])
def test_training_losses_equal_the_cpus_also_after_restoring_the_optimizer(method: str) -> None:
    changes = {"steps": 6, "method": method}
    cpu_trainer = trainer(build(MODERN, Mesh.single("cpu")), **changes)
    cuda_trainer = trainer(build(MODERN, Mesh.single("cuda")), **changes)
    want = [metrics.loss for metrics in learn(cpu_trainer, 6)]
    assert [metrics.loss for metrics in learn(cuda_trainer, 3)] == pytest.approx(want[:3], rel=1e-9)
    resumed = trainer(build(MODERN, Mesh.single("cuda")), **changes)
    optimizer_state = cuda_trainer.optimizer.state_dict()
    resumed.optimizer.load_state_dict(
        {name: state.cpu() for name, state in optimizer_state.items()}
    )
    resumed.step_number = 3
    assert [metrics.loss for metrics in learn(resumed, 3)] == pytest.approx(want[3:], rel=1e-9)
