"""GPT: embed, blocks, logits. A stage holds the layers that it owns, and passes hidden states on.

Layers are keyed by their global number, so `decoder.layers.7` is layer 7 on every stage, and a
parameter's name is the checkpoint's name for it. The KV pool and the batch are arguments: the same
forward serves training, prefill and decoding.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.attention.kv_cache import KVPool
from gpt.attention.paged import KV, Attend, Store, ragged, store
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.cpu.exact_argmax import ROWS_MAX, Shortlist
from gpt.model.activation_checkpointing import NOTHING, Recompute, again
from gpt.model.layers import (
    MLP,
    Attention,
    Build,
    Embedding,
    Norm,
    Normed,
    Onto,
    Prefix,
    Product,
    Step,
    drop_hidden,
    rotation,
)
from gpt.model.moe import Experts
from gpt.parallel.mesh import Mesh, enter, gather_columns
from gpt.parallel.sharding import check_split

# The best token of each row; None: not every logit is finite.
Likeliest = Callable[[Tensor], Tensor | None]


class Walk(Protocol):
    """Rows through all layers of this stage at once. See gpt/backends/cpu_decoder.py."""

    def takes(self, batch: Batch) -> bool: ...

    def __call__(self, x: Tensor, batch: Batch, kv: KVPool) -> Tensor: ...


class Block(nn.Module):
    """Attention and an MLP, dense or of experts, each added to what came in."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        self.layer, self.config, self.mesh = layer, build.config, build.mesh
        self.self_attention = Attention(build, layer)
        self.pre_mlp_layernorm: Norm | None = None
        self.mlp: MLP | Experts
        if build.config.moe_layers[layer]:
            self.pre_mlp_layernorm = Norm(build, f"decoder.layers.{layer}.pre_mlp_layernorm")
            self.mlp = Experts(build, layer)
        else:
            self.mlp = MLP(build, f"decoder.layers.{layer}.mlp")

    def forward(self, x: Tensor, step: Step, kv: KV | None) -> Tensor:
        kept = x if step.rows is None else x.index_select(0, step.rows)
        attended = cast(Tensor, self.self_attention(x, step, kv, self._onto(kept, step, 1)))
        return self.finish(kept if self.config.parallel_residual else attended, attended, step)

    def finish(self, x: Tensor, attended: Tensor, step: Step) -> Tensor:
        """The second half: an MLP of `x`, added to what the first half came to."""
        if self.pre_mlp_layernorm is not None:
            x = self.pre_mlp_layernorm(x)
        return cast(Tensor, self.mlp(x, step.batch.tokens, self._onto(attended, step, 2)))

    def _onto(self, x: Tensor, step: Step, half: int) -> Onto:
        if step.batch.dropout is None:
            return Onto(x, None)
        site = (self.layer, half)
        return Onto(x, lambda y: drop_hidden(y, self.config, self.mesh, step.batch, site))


class GPT(nn.Module):
    """One rank's share of the network: its tensor part of the layers in `layers`."""

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh | None = None,
        *,
        layers: range | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attend: Attend = ragged,
        store: Store = store,
        recompute: Recompute = NOTHING,
    ) -> None:
        """Parameters are allocated, not initialised: `gpt.model.loading` fills them."""
        super().__init__()
        mesh = mesh or Mesh.single(device or "cpu")
        check_split(config, mesh.tp, mesh.pp)
        self.config, self.mesh = config, mesh
        self.dtype = dtype or cast(torch.dtype, getattr(torch, config.dtype))
        self.layers = range(config.num_layers) if layers is None else layers
        self.first = self.layers.start == 0
        self.last = self.layers.stop == config.num_layers
        place = torch.device(device) if device is not None else mesh.device
        build = Build(config, mesh, self.dtype, place, attend, recompute, store)
        self.recompute = recompute
        tied = not config.untie_embeddings_and_output_weights
        self.embedding: Embedding | None = None
        if self.first or (self.last and tied):
            self.embedding = Embedding(build, positions=self.first)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleDict({str(n): Block(build, n) for n in self.layers})
        self.output_layer: nn.Module | None = None
        self.product: Product | None = None  # The head's,
        self.whole: Normed | None = None  # and with the norm before it,
        self.likeliest: Likeliest | None = None  # of which only the best are wanted.
        self.walk: Walk | None = None
        self.shortlist: Shortlist | None = None
        if self.last:
            self.decoder.final_layernorm = Norm(build, "decoder.final_layernorm")
            if not tied:
                self.output_layer = nn.Module()
                build.fill(self.output_layer, "output_layer")

    def forward(
        self, x: Tensor, batch: Batch, kv: KVPool | None = None, table: Tensor | None = None
    ) -> Tensor:
        """The first stage takes ids (T,), the others hidden states; the last gives logits.

        `table` holds the rows that ids at or above the vocabulary name. Logits are fp32 (fp64 of
        an fp64 model) of the batch's `rows`, on every tensor rank, the vocabulary unpadded.
        """
        x = self.hidden(x, batch, kv, table)
        return self.head(x, batch) if self.last else x

    def hidden(
        self,
        x: Tensor,
        batch: Batch,
        kv: KVPool | None = None,
        table: Tensor | None = None,
        *,
        prefix: Prefix | None = None,
    ) -> Tensor:
        """This stage without the head: ids or hidden states in, hidden states out.

        The last stage leaves out what the head would not read: see `head_shard`. Over a pool the
        rows that are not asked for stay, as they came to the last layer or to its second half. With
        a `prefix` no table is read: what its virtual tokens are beside their keys and values,
        nobody sees.
        """
        if self.first:
            assert self.embedding is not None
            x = x if prefix is None else x.index_fill(0, prefix.places, 0)
            x = self.embedding(x, batch, table)
        if self.walk is not None and kv is not None and self.walk.takes(batch):
            return self.walk(x, batch, kv)
        turned = None
        if self.config.rotary:
            turned = rotation(self.config, batch.positions, self.dtype)
        step = Step(batch, turned, prefix=prefix)
        for place, block in enumerate(self.blocks):
            held = None if kv is None else kv.layer(self.layers[place])
            if place == len(self.layers) - 1 and self._picks_early(batch, kv):
                step = replace(step, rows=batch.rows)
            y = again(block, x, step, held) if self.recompute.whole(place) else block(x, step, held)
            some = step.rows is not None and kv is not None
            x = x.index_copy(0, cast(Tensor, step.rows), y) if some else y
        return x

    def _picks_early(self, batch: Batch, kv: KVPool | None) -> bool:
        """Whether what follows the last attention is computed for the batch's rows alone."""
        apart = self.mesh.sequence_parallel or batch.dropout is not None  # Both count all rows.
        # There the last keys may overflow where nothing before them does: who reads them must tell
        # before others find them in the pool.
        narrow = kv is not None and self.dtype == torch.float16
        fewer = batch.rows is not None and len(batch.rows) < batch.tokens
        return self.last and fewer and not apart and not narrow

    def head(self, x: Tensor, batch: Batch) -> Tensor:
        """Logits of the rows that the batch asks for."""
        return gather_columns(self.head_shard(x, batch), self.mesh)[..., : self.config.vocab_size]

    def head_shard(self, x: Tensor, batch: Batch) -> Tensor:
        """Logits over this rank's part of the padded vocabulary, for `x` as `hidden` gave it."""
        apart = self.mesh.sequence_parallel  # Then rows can be picked only once they are together.
        whole = len(x) == batch.tokens  # Else these are the rows already, which are fewer.
        if batch.rows is not None and whole and not apart:
            x = x.index_select(0, batch.rows)
        if self.whole is not None:
            return self.whole(x, None)
        x = enter(cast(Norm, self.decoder.final_layernorm)(x), self.mesh, batch.tokens)
        if batch.rows is not None and apart:
            x = x.index_select(0, batch.rows)
        if self.product is not None:
            logits = self.product(x, None, None, None)
        else:
            logits = F.linear(x, self.head_weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def best(self, x: Tensor) -> Tensor | None:
        """The likeliest token of each of these rows, as `hidden` gave them, without their logits.

        None: there is no such way here, or not every logit is finite. Look at `head` then.
        """
        found: Tensor | None = None
        if self.shortlist is not None and len(x) <= ROWS_MAX:
            found = self.shortlist.best(x)
        if found is None and self.likeliest is not None:
            found = self.likeliest(x)
        return found

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, one) for one in cast(nn.ModuleDict, self.decoder.layers).values()]

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the output layer, or of the embedding that serves as one."""
        if self.output_layer is not None:
            return cast(Tensor, self.output_layer.weight)
        assert self.embedding is not None
        return self.embedding.rows

    def logits(self, ids: Tensor, table: Tensor | None = None) -> Tensor:
        """Logits (b, s, vocabulary) of whole rows of ids (b, s), for a model in one stage."""
        assert self.mesh.pp == 1, "a stage of a pipeline has no logits of its own"
        batch = Batch.plain((ids.shape[1],) * ids.shape[0], ids.device)
        logits: Tensor = self(ids.flatten(), batch, table=table)
        return logits.view(*ids.shape, -1)
