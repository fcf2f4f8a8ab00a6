"""On a CUDA device the model is the same model: logits, tokens, and several ranks on one device."""

import pytest
import torch

from gpt.batch import Batch
from gpt.generation.generate import generate
from gpt.model.loading import load_model
from gpt.model.pipeline import forward
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from tests.support.models import CONFIGS, MODERN, build, first_tie, lively, recompute_greedy
from tests.support.ranks import ranks
from tests.support.trainers import learn, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

PROMPTS = [[7, 3, 90, 12, 5], [64], list(range(1, 30))]


@pytest.mark.parametrize("name", CONFIGS)
def test_fp64_logits_and_tokens_equal_the_cpus(name: str) -> None:
    here = build(CONFIGS[name])
    there = build(CONFIGS[name], Mesh.single("cuda"))
    ids = torch.arange(24).view(2, 12)
    assert (there.logits(ids.cuda()).cpu() - here.logits(ids)).abs().max() < 1e-9
    rule = Sampling(max_new_tokens=20)
    want = [c.token_ids for c in generate(here, PROMPTS, rule)]
    assert [c.token_ids for c in generate(there, PROMPTS, rule)] == want


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_greedy_agrees_up_to_the_first_near_tie(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    oracle = build(CONFIGS[name], dtype=torch.float32)
    model = build(CONFIGS[name], Mesh.single("cuda"), dtype=torch.float32)
    for prompt, completion in zip(PROMPTS, generate(model, PROMPTS, Sampling(20)), strict=True):
        want = recompute_greedy(oracle, prompt, 20)
        until = first_tie(want)
        assert completion.token_ids[:until] == want.tokens[:until]


def test_bf16_stays_near_fp64() -> None:
    ids = torch.arange(24).view(2, 12)
    exact = build(MODERN).logits(ids)
    narrow = build(MODERN, Mesh.single("cuda"), dtype=torch.bfloat16).logits(ids.cuda()).cpu()
    # bf16 has 8 bits: an error of a tenth of the spread would be a wrong formula.
    assert (narrow - exact).std() < 0.1 * exact.std()


def test_loading_puts_weights_on_the_device_and_keeps_no_copy() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(lively(MODERN), Mesh.single("cuda"))
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(p.is_cuda for p in model.parameters())
    # The allocator rounds each tensor up to 512 bytes.
    slack = 512 * len(list(model.parameters()))
    assert torch.cuda.max_memory_allocated() - before <= held + slack


def split_logits(rank: int, tp: int, pp: int) -> torch.Tensor | None:
    mesh = Mesh.create(tp, pp, device="cuda", sequence_parallel=tp > 1)
    model = build(MODERN, mesh)
    with torch.inference_mode():
        logits = forward(model, torch.arange(15).cuda(), Batch.plain([5, 1, 9], "cuda"))
    return None if logits is None else logits.cpu()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_share_a_device_over_gloo_give_one_ranks_logits(tp: int, pp: int) -> None:
    want = build(MODERN)(torch.arange(15), Batch.plain([5, 1, 9]))
    got = ranks(tp * pp, split_logits, tp, pp, timeout_s=120)[-1]
    assert got is not None
    assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("method", ["prompt-tuning", "prefix"])
def test_learning_gives_the_cpus_losses_and_goes_on_from_a_state(method: str) -> None:
    changes = {"steps": 6, "method": method}
    here, there = (
        trainer(build(MODERN, Mesh.single(place)), **changes) for place in ("cpu", "cuda")
    )
    want = [made.loss for made in learn(here, 6)]
    assert [made.loss for made in learn(there, 3)] == pytest.approx(want[:3], rel=1e-9)
    later = trainer(build(MODERN, Mesh.single("cuda")), **changes)
    later.optimizer.load({name: one.cpu() for name, one in there.optimizer.tensors().items()})
    later.step_number = 3
    assert [made.loss for made in learn(later, 3)] == pytest.approx(want[3:], rel=1e-9)
