"""Memory of a step on a GPU, counted on a fake device: no more than the planner estimates."""

from importlib.util import find_spec

import pytest
import torch

from bench.gpu_proof.proof_sizes import LLAMA_8B
from gpt.linear.fused_linear import fuse_layers
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.memory_budget import workspace_bytes
from serving.messages import BlockTableUpdate, SlotInit, Step
from serving.worker.model_runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools"),
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="the fake device needs a CPU build of torch"
    ),
]

BLOCK_TOKENS = 16
# The width and the vocabulary of a real model. The layers are computed one after another.
MODEL = LLAMA_8B.with_fields(num_layers=2, moe_layers=())
RULES = {
    "greedy": SamplingParams(),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "log-probabilities": SamplingParams(temperature=0.8, top_p=0.9, logprobs=5),
    # Rules that the kernel of the sampler does not support, so that torch sorts the logits in fp64.
    "typical-p": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, typical_p=0.9, repetition_penalty=1.1
    ),
}


def largest_step(rows: int, tokens: int, rules: SamplingParams) -> Step:
    """A step with prompts of equal lengths, after each of which a token is sampled."""
    length = tokens // rows
    block_count = -(-length // BLOCK_TOKENS)
    return Step(
        1,
        slots=list(range(rows)),
        past=[0] * rows,
        lengths=[length] * rows,
        token_ids=[1] * (length * rows),
        draws=[True] * rows,
        prompt_score_counts=[0] * rows,
        slot_inits=[SlotInit(slot, rules, [1] * length, []) for slot in range(rows)],
        block_table_updates=[
            BlockTableUpdate(slot, 0, [1 + slot * block_count + i for i in range(block_count)])
            for slot in range(rows)
        ],
    )


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("rows", "tokens"), [(256, 512), (16, 8192)])
def test_the_largest_step_fits_into_the_estimated_workspace(
    rows: int, tokens: int, rules: str
) -> None:
    from gpt.attention.triton_paged import TritonAttention
    from tests.support.fake_device import DEVICE, fake_device

    config = ServerConfig(
        "model",
        kv_block_tokens=BLOCK_TOKENS,
        running_requests_max=rows,
        step_tokens_max=tokens,
        adapter_rows_max=8,
        cuda_graphs="off",
    )
    with fake_device() as device:
        model = GPT(
            MODEL, Mesh.single(DEVICE), dtype=torch.bfloat16, attention_backend=TritonAttention()
        )
        model.requires_grad_(False)
        fuse_layers(model)
        runner = ModelRunner(
            model,
            config.scheduler_config,
            config.cache_config,
            async_scheduling=True,
            blocks=rows * -(-tokens // rows // BLOCK_TOKENS) + 1,
            slots=rows,
        )
        with device.memory.peak() as peak_bytes:
            runner.run_step(largest_step(rows, tokens, RULES[rules]))
        estimated_bytes = workspace_bytes(
            MODEL, model.dtype.itemsize, step_tokens_max=tokens, logits_rows=rows
        )
        logits_bytes = 4 * rows * MODEL.vocab_size
        assert logits_bytes < peak_bytes() <= estimated_bytes
