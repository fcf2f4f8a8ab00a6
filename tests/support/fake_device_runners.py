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
from serving.worker.cuda_graphs import Capturer, Work
from serving.worker.model_runner import ModelRunner
from tests.support.fake_device import DEVICE, Counts, FakeDevice
from tests.support.models import ALIBI, CLASSIC, EXPERTS, MODERN, ODD, SIGMOID_EXPERTS

BLOCK_TOKENS, BLOCKS, SLOTS = 16, 64, 8
# The shape of Llama: rotary positions, grouped queries, RMSNorm, SwiGLU, no biases, and widths that
# are multiples of 16 on each of two tensor ranks.
LLAMA = MODERN.with_fields(
    kv_channels=8,
    ffn_hidden_size=64,
    rotary_percent=1.0,
    qk_layernorm=False,
    window_size=None,
    qkv_bias=False,
)
# Every config of tests/support/models.py, and Llama's shape.
FAMILIES = {
    "classic": CLASSIC,
    "llama": LLAMA,
    "modern": MODERN,
    "odd": ODD,
    "ALiBi": ALIBI,
    "experts": EXPERTS,
    "sigmoid experts": SIGMOID_EXPERTS,
}


def make_runner(
    config: GPTConfig,
    dtype: torch.dtype,
    *,
    mesh: Mesh | None = None,
    fp8_linears: bool = False,
    fp8_kv: bool = False,
    capturer: Capturer | None = None,
) -> ModelRunner:
    """Return a runner, inside of `fake_device`. Without a capturer it captures no CUDA graphs.

    A `mesh` of several tensor ranks needs `stub_collectives`.
    """
    from gpt.attention.triton_paged import TritonAttention

    server_config = ServerConfig(
        "model",
        kv_block_tokens=BLOCK_TOKENS,
        kv_dtype="fp8" if fp8_kv else "auto",
        running_requests_max=SLOTS,
        cuda_graph_rows_max=SLOTS,
        step_tokens_max=256,
        adapter_rows_max=8,
        cuda_graphs="auto" if capturer else "off",
    )
    model = GPT(
        config, mesh or Mesh.single(DEVICE), dtype=dtype, attention_backend=TritonAttention()
    )
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
        capturer=capturer,
    )


def capture_graph(
    device: FakeDevice, config: GPTConfig, dtype: torch.dtype, mesh: Mesh | None = None, **fp8: bool
) -> list[str]:
    """Capture the CUDA graph of a new model runner; return the launches of a middle layer.

    It is the middle layer with the most launches. An operation that a graph cannot capture raises
    an error. `fp8`: options of `make_runner`.
    """
    captured: list[Counts] = []
    marks: list[int] = []  # By layer of the captured pass: the number of launches before it.

    def capture(work: Work) -> Work:
        work()  # The first pass also compiles kernels.
        with device.captures() as counts:
            marks.clear()
            work()
        captured.append(counts)
        return work

    runner = make_runner(config, dtype, mesh=mesh, capturer=capture, **fp8)
    for layer in runner.model.decoder_layers:
        layer.register_forward_pre_hook(lambda *_: marks.append(len(device.counts.launches)))
    assert runner._graphs is not None
    runner._graphs.capture_next()
    assert len(marks) == config.num_layers
    launches = captured[0].launches
    return max((launches[start:end] for start, end in pairwise(marks[1:])), key=len)
