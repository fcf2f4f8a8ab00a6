"""Peers of a GPU proof: a plain GPT under torch.compile with CUDA graphs, and transformers.

No other serving engine can be installed without a network. The plain GPT is an upper bound for one
batch of equal lengths: a static KV cache, Inductor's kernels, torch's attention, one graph a step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.gpu_proof.model_checks import record_rows
from bench.gpu_proof.proof_sizes import ProofSizes
from bench.gpu_proof.stage_context import StageContext, StageFailure
from bench.suites.gpu import GpuSizes, time_call
from gpt.config import GPTConfig


class PlainLayer(nn.Module):
    """A GPT layer with learned positions and a static KV cache for one sequence."""

    cache: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        shape = (2, 1, self.heads, config.max_position_embeddings, width // self.heads)
        self.register_buffer("cache", torch.zeros(shape))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Compute new tokens `x` (1, tokens, width). Without a mask they are a whole prompt."""
        tokens = x.shape[1]
        q, k, v = (
            part.view(1, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        self.cache[0].index_copy_(2, positions, k)
        self.cache[1].index_copy_(2, positions, v)
        if mask is not None:
            k, v = self.cache[0], self.cache[1]
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.projection(attended.transpose(1, 2).reshape(1, tokens, -1))
        hidden = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        output: Tensor = x + self.down(hidden)
        return output


class PlainGPT(nn.Module):
    """A GPT of plain torch modules, with the shape of `config`. `compiler` compiles one layer."""

    def __init__(self, config: GPTConfig, compiler: Callable[[Any], Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        # All layers share the compiled code, so that it is compiled once.
        self._run_layer = compiler(_run_layer)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logits of the last token."""
        x = self.embedding(ids) + self.positions(positions)
        for layer in self.layers:
            x = self._run_layer(layer, x, positions, mask)
        return F.linear(self.norm(x[:, -1]), self.embedding.weight)


def _run_layer(layer: nn.Module, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    output: Tensor = layer(x, positions, mask)
    return output


def measure_transformers(stage: StageContext) -> None:
    """Run the row beside transformers."""
    not_run = record_rows(stage, ["gpu/batch"])
    if not_run and stage.on_gpu:
        raise StageFailure(f"not measured: {', '.join(not_run)}")


def measure_plain_gpt(stage: StageContext) -> None:
    """Time the plain GPT under torch.compile, for the workloads of two target rows."""
    sizes = ProofSizes.of(stage.device).suite
    for name, seconds in time_plain_gpt(sizes, on_gpu=stage.on_gpu).items():
        stage.figures.add(f"{name}, ms", round(1e3 * seconds, 4))


@torch.inference_mode()
def time_plain_gpt(sizes: GpuSizes, *, on_gpu: bool) -> dict[str, float]:
    """Return the seconds of a decode step and of a prompt, for the workloads of the target rows."""
    device, network = torch.device(sizes.device), sizes.network
    # A rehearsal runs without torch.compile, which takes half a minute at its first use.
    with device:
        model = PlainGPT(network, torch.compile if on_gpu else lambda function: function)
    model = model.to(getattr(torch, network.dtype)).eval()
    context_tokens = sizes.single_prompt_tokens + sizes.new_tokens // 2
    position = torch.tensor([context_tokens], device=device)
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    keys = torch.arange(network.max_position_embeddings, device=device)
    mask = (keys <= position).view(1, 1, 1, -1)
    step = _captured(lambda: model(ids, position, mask), on_gpu=on_gpu)
    prompt_ids = torch.zeros(1, sizes.prefill_tokens, dtype=torch.long, device=device)
    prompt_positions = torch.arange(sizes.prefill_tokens, device=device)
    prefill = _captured(lambda: model(prompt_ids, prompt_positions, None), on_gpu=on_gpu)
    return {
        "decode": time_call(device, step),
        f"prompt of {sizes.prefill_tokens}": time_call(device, prefill),
    }


def _captured(call: Callable[[], object], *, on_gpu: bool) -> Callable[[], object]:
    """Run `call` until it is compiled, and return the replay of its CUDA graph."""
    if not on_gpu:
        call()
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
