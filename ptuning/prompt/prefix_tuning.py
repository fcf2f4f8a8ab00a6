"""A prefix: keys and values of every layer, learned in place of those that virtual tokens have.

A rank has a parameter for each of its layers, of its own KV heads. They start as what the model
itself makes of rows that a table would start as, so that the first step answers as a prompt of
words would. Whole, they are a table as adapters have it. Knows neither examples nor optimizers.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt.attention.kv_cache import BLOCK_TOKENS, KVPool, prefix_part
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from gpt.model.pipeline import forward
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import first_group
from ptuning.config import TuneConfig
from ptuning.prompt.initialization import initial_rows
from ptuning.prompt.prompt_encoder import ROWS
from ptuning.task import Task


class Prefix(nn.Module):
    """Every rank has one, of its own layers and KV heads; all tasks' tokens, one after another."""

    def __init__(self, table: Tensor, chunks: Sequence[GPT]) -> None:
        """`table` is whole, and the same on all ranks: copies of a head must start as equals."""
        super().__init__()
        self.config, self.mesh, self.tokens = chunks[0].config, chunks[0].mesh, len(table)
        # In two dimensions, a row for each token, as whatever learns by rows and columns needs it.
        self.learned = nn.ParameterDict(
            {
                str(layer): nn.Parameter(one.flatten(1))
                for layer, one in prefix_parts(table, chunks).items()
            }
        )

    @property
    def layers(self) -> dict[int, Tensor]:
        """Of each layer that is here, (tokens, 2, KV heads, channels)."""
        shape = (self.tokens, 2, -1, self.config.kv_channels)
        return {int(layer): one.view(shape) for layer, one in self.learned.items()}

    @torch.no_grad()
    def table(self) -> Tensor:
        """All of it, on every rank; all ranks call together."""
        return _joined(self.layers, self.tokens, self.config, self.mesh)


def prefix_parts(table: Tensor, chunks: Sequence[GPT]) -> dict[int, Tensor]:
    """Of a whole table what this rank's layers read, in memory of its own."""
    mesh, config = chunks[0].mesh, chunks[0].config
    layers = [layer for chunk in chunks for layer in chunk.layers]
    part = prefix_part(table.to(mesh.device), config, layers, mesh.tp_rank, mesh.tp)
    return {layer: part[:, place].clone() for place, layer in enumerate(layers)}


@torch.no_grad()
def build_prefix(
    config: TuneConfig,
    tasks: Sequence[Task],
    chunks: Sequence[GPT],
    initial_ids: Sequence[Sequence[int]],
) -> Prefix:
    """What a run starts from, in fp32 at least; all ranks call together.

    Each task's rows, `initial_ids` or as the settings say, go through the model once, and what its
    layers would keep of them in a cache is where learning starts.
    """
    first, mesh, sizes = chunks[0], chunks[0].mesh, chunks[0].config
    lengths = [task.virtual_tokens for task in tasks]
    wide = torch.promote_types(first.dtype, torch.float32)
    rows: Tensor | None = None
    if first.first:
        aims = [
            initial_rows(
                *(first, task.virtual_tokens, ids),
                kind=config.initial,
                seed=config.seed,
                name=f"{ROWS}.{task.name}",
            )
            for task, ids in zip(tasks, initial_ids, strict=True)
        ]
        rows = torch.cat(aims).to(mesh.device, wide)
    size = -(-max(lengths) // BLOCK_TOKENS) * BLOCK_TOKENS  # A block for each task.
    layers = [layer for chunk in chunks for layer in chunk.layers]
    pool = KVPool(
        *(sizes, layers, len(tasks)),
        tp=mesh.tp,
        block_tokens=size,
        dtype=first.dtype,
        device=mesh.device,
    )
    blocks = torch.arange(len(tasks), device=mesh.device).unsqueeze(1)
    batch = Batch.paged(lengths, [0] * len(tasks), blocks, size)
    ids = torch.arange(sum(lengths), device=mesh.device) + sizes.vocab_size
    forward(chunks, ids, batch, kv=pool, table=rows)
    assert batch.slots is not None
    block, place = batch.slots
    made = {layer: pool.layer(layer)[block, :, :, place].to(wide) for layer in layers}
    return Prefix(_joined(made, sum(lengths), sizes, mesh), chunks)


def _joined(own: Mapping[int, Tensor], tokens: int, sizes: GPTConfig, mesh: Mesh) -> Tensor:
    """The whole table of all ranks' layers and heads; of copies, the first ones' numbers."""
    dtype = next(iter(own.values())).dtype
    shape = (tokens, sizes.num_layers, 2, sizes.num_query_groups, sizes.kv_channels)
    whole = torch.zeros(shape, dtype=dtype, device=mesh.device)
    start = first_group(sizes, mesh.tp_rank, mesh.tp)
    copied = mesh.tp_rank and first_group(sizes, mesh.tp_rank - 1, mesh.tp) == start
    if not copied and not mesh.dp_rank:
        for layer, values in own.items():
            whole[:, layer, :, start : start + values.shape[2]] = values
    if mesh.tp * mesh.dp * mesh.pp > 1:
        sent = whole.cpu() if mesh.staged else whole
        dist.all_reduce(sent)
        whole = sent.to(mesh.device)
    return whole.flatten(1)
