"""Prefix tuning: trainable keys and values of every layer in place of virtual tokens.

Each rank has one parameter per layer of its stage, with the keys and values of the rank's KV heads.
The initial values are the keys and values that the model computes from the initial rows of prompt
tuning, so prefix tuning and prompt tuning start with the same loss. The parameters of all ranks
together are the prefix table: one row per virtual token, in the layout of adapter files. This
module does not use the training loop.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt.attention.kv_cache import BLOCK_TOKENS, KVPool, prefix_shard
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from gpt.model.pipeline import forward
from gpt.parallel.mesh import Mesh
from gpt.parallel.weight_sharding import first_kv_head
from ptuning.config import MethodConfig
from ptuning.prompt.initialization import initial_rows
from ptuning.prompt.prompt_encoder import ROWS_NAME
from ptuning.task import Task


class PrefixEncoder(nn.Module):
    """Keys and values of this rank's layers and KV heads, for the virtual tokens of all tasks."""

    def __init__(self, table: Tensor, chunks: Sequence[GPT]) -> None:
        """Shard the full prefix table.

        All ranks must give the same table, because the replicas of a KV head must start with equal
        values.
        """
        super().__init__()
        self.config = chunks[0].config
        self.mesh = chunks[0].mesh
        self.tokens = len(table)
        # Each parameter is a matrix with one row per virtual token. Adafactor keeps one second
        # moment per row and one per column, so each virtual token has its own row moment.
        self.learned = nn.ParameterDict(
            {
                str(layer): nn.Parameter(key_values.flatten(1))
                for layer, key_values in shard_prefix_table(table, chunks).items()
            }
        )

    @property
    def key_values(self) -> dict[int, Tensor]:
        """Keys and values of each layer of this rank: (virtual tokens, 2, KV heads, channels)."""
        shape = (self.tokens, 2, -1, self.config.kv_channels)
        return {int(layer): parameter.view(shape) for layer, parameter in self.learned.items()}

    @torch.no_grad()
    def gather_table(self) -> Tensor:
        """Return the full prefix table on every rank. All ranks must call this function."""
        return _gather_table(self.key_values, self.tokens, self.config, self.mesh)


def shard_prefix_table(table: Tensor, chunks: Sequence[GPT]) -> dict[int, Tensor]:
    """Return copies of this rank's shards of a prefix table, keyed by layer.

    The shape of a shard is (virtual tokens, keys and values, KV heads, channels).
    """
    mesh, config = chunks[0].mesh, chunks[0].config
    layers = [layer for chunk in chunks for layer in chunk.layers]
    shard = prefix_shard(table.to(mesh.device), config, layers, mesh.tp_rank, mesh.tp)
    return {layer: shard[:, index].clone() for index, layer in enumerate(layers)}


@torch.no_grad()
def build_prefix(
    method_config: MethodConfig,
    tasks: Sequence[Task],
    chunks: Sequence[GPT],
    initial_ids: Sequence[Sequence[int]],
    *,
    seed: int,
) -> PrefixEncoder:
    """Create the initial prefix, in at least fp32. All ranks must call this function.

    The initial rows of each task are the embeddings of its `initial_ids`; if these are empty, the
    setting `initial` selects the rows. The rows pass through the model once; the keys and values
    that this pass writes to a KV cache are the initial parameters.
    """
    first_chunk = chunks[0]
    mesh = first_chunk.mesh
    model_config = first_chunk.config
    lengths = [task.virtual_tokens for task in tasks]
    wide_dtype = torch.promote_types(first_chunk.dtype, torch.float32)
    rows: Tensor | None = None
    if first_chunk.is_first_stage:
        task_rows = [
            initial_rows(
                first_chunk,
                task.virtual_tokens,
                ids,
                kind=method_config.initial,
                seed=seed,
                name=f"{ROWS_NAME}.{task.name}",
            )
            for task, ids in zip(tasks, initial_ids, strict=True)
        ]
        rows = torch.cat(task_rows).to(mesh.device, wide_dtype)
    block_tokens = -(-max(lengths) // BLOCK_TOKENS) * BLOCK_TOKENS  # One block for each task.
    layers = [layer for chunk in chunks for layer in chunk.layers]
    pool = KVPool(
        model_config,
        layers,
        len(tasks),
        tp=mesh.tp,
        block_tokens=block_tokens,
        dtype=first_chunk.dtype,
        device=mesh.device,
    )
    blocks = torch.arange(len(tasks), device=mesh.device).unsqueeze(1)
    batch = Batch.paged(lengths, [0] * len(tasks), blocks, block_tokens)
    ids = torch.arange(sum(lengths), device=mesh.device) + model_config.vocab_size
    forward(chunks, ids, batch, kv=pool, virtual_embeddings=rows)
    assert batch.slot_mapping is not None
    slot_blocks, slot_offsets = batch.slot_mapping
    key_values = {
        layer: pool.layer(layer)[slot_blocks, :, :, slot_offsets].to(wide_dtype) for layer in layers
    }
    return PrefixEncoder(_gather_table(key_values, sum(lengths), model_config, mesh), chunks)


def _gather_table(
    key_values: Mapping[int, Tensor], tokens: int, model_config: GPTConfig, mesh: Mesh
) -> Tensor:
    """Return the full prefix table on every rank.

    Each rank writes its layers and KV heads into a table of zeros, and an all-reduce sums the
    tables. If several ranks have the same KV head, only the first of these ranks writes it, so
    that each value is added once.
    """
    dtype = next(iter(key_values.values())).dtype
    shape = (
        tokens,
        model_config.num_layers,
        2,
        model_config.num_query_groups,
        model_config.kv_channels,
    )
    full_table = torch.zeros(shape, dtype=dtype, device=mesh.device)
    first_head = first_kv_head(model_config, mesh.tp_rank, mesh.tp)
    is_replica = (
        mesh.tp_rank and first_kv_head(model_config, mesh.tp_rank - 1, mesh.tp) == first_head
    )
    if not is_replica and not mesh.dp_rank:
        for layer, values in key_values.items():
            full_table[:, layer, :, first_head : first_head + values.shape[2]] = values
    if mesh.tp * mesh.dp * mesh.pp > 1:
        buffer = full_table.cpu() if mesh.stages_through_host else full_table
        dist.all_reduce(buffer)
        full_table = buffer.to(mesh.device)
    return full_table.flatten(1)
