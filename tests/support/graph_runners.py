"""Model runners of a CPU whose decode steps are captured, and replayed by running them again."""

import msgspec
import torch

from serving.config import ServerConfig
from serving.messages import Outcome, Step
from serving.worker import cuda_graphs
from serving.worker.kv_cache_size import available_kv_blocks
from serving.worker.model_runner import ModelRunner
from tests.support.capturable_attention import CapturableAttention
from tests.support.models import CONFIGS, build

BLOCK, SLOTS = 4, 6
CONFIG = ServerConfig(
    "model",
    kv_block_tokens=BLOCK,
    kv_tokens_max=200,
    running_requests_max=SLOTS,
    step_tokens_max=60,
    adapter_rows_max=8,
)


def eager_capturer(work: cuda_graphs.Work) -> cuda_graphs.Work:
    return work


def make_runner(
    name: str,
    capturer: cuda_graphs.Capturer | None,
    config: ServerConfig = CONFIG,
    dtype: torch.dtype = torch.float64,
) -> ModelRunner:
    model = build(CONFIGS[name], dtype=dtype, attention_backend=CapturableAttention())
    return ModelRunner(
        model,
        config.scheduler_config,
        config.cache_config,
        async_scheduling=config.uses_async_scheduling("cpu"),
        blocks=available_kv_blocks(model, config.scheduler_config, config.cache_config),
        slots=SLOTS,
        capturer=capturer,
    )


def run_step(runner: ModelRunner, step: Step) -> Outcome:
    outcome = runner.run_step(msgspec.structs.replace(step, may_capture_graph=True))
    assert outcome is not None
    return outcome


def sampled_token(slot: int, token: int) -> int:
    """The next input of a slot: the token that it sampled in the last step."""
    return token
