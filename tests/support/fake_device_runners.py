"""Model runners on a fake device, with the configs of all families.

The models have shapes, but no values. They use the backends of a GPU: Triton's attention, and fused
linears, which may have fp8 weights. Grouped matmuls compute the experts where the dtype allows it.
"""

from itertools import pairwise

import torch

from gpt.config import GPTConfig
from gpt.linear import grouped_experts
from gpt.linear.fused_linear import fuse_layers
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from serving.config import ServerConfig
from serving.worker.cuda_graphs import Recorder, Work
from serving.worker.model_runner import ModelRunner
from tests.support.fake_device import DEVICE, FakeDevice
from tests.support.models import CLASSIC, EXPERTS, MODERN, ODD, SIGMOID_EXPERTS

BLOCK_TOKENS, BLOCKS, SLOTS = 16, 64, 8
# The shape of Llama: rotary positions, grouped queries, RMSNorm, SwiGLU, no biases.
LLAMA = MODERN.with_fields(
    kv_channels=8, rotary_percent=1.0, qk_layernorm=False, window_size=None, qkv_bias=False
)
# Every config of tests/support/models.py, and Llama's shape.
FAMILIES = {
    "classic": CLASSIC,
    "llama": LLAMA,
    "modern": MODERN,
    "odd": ODD,
    "experts": EXPERTS,
    "sigmoid experts": SIGMOID_EXPERTS,
}


def make_runner(
    config: GPTConfig,
    dtype: torch.dtype,
    *,
    fp8_linears: bool = False,
    fp8_kv: bool = False,
    recorder: Recorder | None = None,
) -> ModelRunner:
    """Return a runner, inside of `fake_device`. Without a recorder it captures no CUDA graphs."""
    from gpt.attention.triton_paged import TritonAttention

    server_config = ServerConfig(
        "model",
        kv_block_tokens=BLOCK_TOKENS,
        kv_dtype="fp8" if fp8_kv else "auto",
        running_requests_max=SLOTS,
        cuda_graph_rows_max=SLOTS,
        step_tokens_max=256,
        adapter_rows_max=8,
        cuda_graphs="auto" if recorder else "off",
    )
    mesh = Mesh.single(DEVICE)
    model = GPT(config, mesh, dtype=dtype, attention_backend=TritonAttention())
    model.requires_grad_(False)
    # The first and the last layer are never fp8 (gpt/linear/fp8_linear.py).
    fuse_layers(
        model,
        range(1, config.num_layers - 1) if fp8_linears else (),
        groups_experts=grouped_experts.unsupported_model_reason(model) is None,
    )
    return ModelRunner(
        model,
        server_config.scheduler_config,
        server_config.cache_config,
        async_scheduling=True,
        blocks=BLOCKS,
        slots=SLOTS,
        recorder=recorder,
    )


def capture_graph(
    device: FakeDevice, config: GPTConfig, dtype: torch.dtype, **options: bool
) -> int:
    """Capture the CUDA graph of a new model runner; return the maximum launches of a middle layer.

    An operation that a graph cannot capture raises an error.
    """
    marks: list[int] = []  # By layer of the captured pass: the number of launches before it.

    def record(work: Work) -> Work:
        work()  # The first pass also compiles kernels.
        with device.captures():
            marks.clear()
            work()
        return work

    runner = make_runner(config, dtype, recorder=record, **options)
    for layer in runner.model.decoder_layers:
        layer.register_forward_pre_hook(lambda *_: marks.append(len(device.counts.launches)))
    assert runner._graphs is not None
    runner._graphs.capture_missing()
    assert len(marks) == config.num_layers
    return max(end - start for start, end in pairwise(marks[1:]))
