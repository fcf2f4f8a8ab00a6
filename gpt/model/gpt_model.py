"""GPT model: embedding, decoder layers and LM head of one pipeline stage and tensor rank.

Layers are keyed by their global number: on every stage, `decoder.layers.7` is layer 7 of the model,
and a parameter has the same name in the model and in the logical checkpoint. The KV pool and the
batch are arguments, so training, prefill and decode use the same forward pass. Replaceable backends
compute the linears, the decoder and the LM head. A greedy head, which only some models have,
computes greedy tokens without logits.
"""

from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from gpt.attention.backend import AttentionBackend, QKTransformBackend, TorchAttention
from gpt.attention.kv_cache import KVPool
from gpt.batch import Batch
from gpt.config import GPTConfig, RopeConfig
from gpt.linear_adapter import HostAllocator, ModelAdapter
from gpt.model.activation_checkpointing import NO_RECOMPUTE, RecomputePolicy
from gpt.model.attention_layer import PrefixKV
from gpt.model.build_context import BuildContext
from gpt.model.decoder import DecoderBackend, DecoderLayer, LayerwiseDecoder
from gpt.model.embedding import Embedding
from gpt.model.linear import LinearBackend, TorchLinear
from gpt.model.norm import Norm
from gpt.model.rotary_embedding import build_rotary_table, rope_configs
from gpt.parallel.collectives import gather_columns_on_first_rank
from gpt.parallel.mesh import Mesh
from gpt.parallel.tensor_parallel import gather_columns, to_column_parallel
from gpt.parallel.weight_sharding import check_split

NO_LINEARS: ModelAdapter = MappingProxyType({})


class GreedyHead(Protocol):
    """Computes greedy tokens from the hidden states after the last layer, without storing logits.

    A greedy head is an optional, faster alternative to the LM head. `CpuGreedyHead` in
    gpt/cpu/exact_argmax.py is the implementation for CPUs.
    """

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return for each row the token with the largest logit; in a tie, the lowest token id.

        Return None if the head does not support these rows, or if a logit is not finite.
        """


class NoGreedyHead:
    """The default greedy head: supports no rows, so the caller must compute logits."""

    def argmax(self, x: Tensor) -> Tensor | None:
        return None


class GPT(nn.Module):
    """One rank's part of the model: its tensor-parallel shard of the layers in `layers`."""

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh | None = None,
        *,
        layers: range | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attention_backend: AttentionBackend | None = None,
        recompute: RecomputePolicy = NO_RECOMPUTE,
    ) -> None:
        """Allocate the parameters without initial values; `gpt.model.loading` reads the values.

        The defaults: a mesh of one rank, all layers, the config's dtype, the mesh's device, and
        attention in torch.
        """
        super().__init__()
        mesh = mesh or Mesh.single(device or "cpu")
        check_split(config, mesh.tp, mesh.pp, ep=mesh.ep)
        self.config = config
        self.mesh = mesh
        self.dtype = dtype or cast(torch.dtype, getattr(torch, config.dtype))
        self.layers = range(config.num_layers) if layers is None else layers
        self.is_first_stage = self.layers.start == 0
        self.is_last_stage = self.layers.stop == config.num_layers
        target_device = torch.device(device) if device is not None else mesh.device
        self.attention_backend = attention_backend or TorchAttention()
        self.recompute = recompute
        build = BuildContext(
            config, mesh, self.dtype, target_device, self.attention_backend, self.recompute
        )
        is_tied = not config.untie_embeddings_and_output_weights
        self.embedding: Embedding | None = None
        if self.is_first_stage or (self.is_last_stage and is_tied):
            self.embedding = Embedding(build, has_positions=self.is_first_stage)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleDict({str(n): DecoderLayer(build, n) for n in self.layers})
        self.output_layer: nn.Module | None = None
        if self.is_last_stage:
            self.decoder.final_layernorm = Norm(build, "decoder.final_layernorm")
            if not is_tied:
                self.output_layer = nn.Module()
                build.allocate_parameters(self.output_layer, "output_layer")
        # Allocated before the KV pool, because the pool takes most of the memory that is then free.
        self._rotary_tables: dict[RopeConfig, Tensor] = {}
        norms_heads = not config.qk_layernorm or config.qk_layernorm_scope == "head"
        if isinstance(self.attention_backend, QKTransformBackend) and norms_heads:
            positions = config.max_position_embeddings
            self._rotary_tables = {
                rope: build_rotary_table(rope, config.kv_channels, positions, target_device)
                for rope in rope_configs(config, self.layers)
            }
        self.decoder_backend: DecoderBackend = self.layerwise_decoder()
        self.head_backend: LinearBackend | None = None
        if self.is_last_stage:
            self.head_backend = TorchLinear(self.head_weight)
        self.greedy_head: GreedyHead = NoGreedyHead()

    def use_decoder_backend(self, backend: DecoderBackend) -> None:
        """Run the layers of this stage with `backend`."""
        self.decoder_backend = backend

    def use_head_backend(self, backend: LinearBackend, *, keep_weight: bool = False) -> None:
        """Compute the LM head with `backend`.

        The head's weight is removed unless it is tied, because the backend has its own copy.
        `keep_weight` keeps it, for a backend that uses it instead of a copy.
        """
        self.head_backend = backend
        if self.output_layer is not None and not keep_weight:
            self.output_layer._parameters["weight"] = None

    def use_greedy_head(self, greedy_head: GreedyHead) -> None:
        """Compute greedy tokens with `greedy_head` for the rows that it supports."""
        self.greedy_head = greedy_head

    def prepare_adapter(
        self,
        adapter: ModelAdapter,
        prepared: ModelAdapter = NO_LINEARS,
        allocate: HostAllocator | None = None,
    ) -> ModelAdapter:
        """Return a copy of the adapter in the layout of this model's backends, for many steps.

        `prepared`: other linears of the adapter, which were prepared before; the result has them,
        too. `allocate`: memory for the copies, which some backends use once. A batch may have an
        adapter that is not prepared, if its tensors have the model's dtype, but some backends then
        convert it in each step.
        """
        return self.decoder_backend.prepare_adapter(adapter, prepared, allocate)

    def layerwise_decoder(self) -> LayerwiseDecoder:
        """Return a decoder backend that runs this stage's layers one after another."""
        return LayerwiseDecoder(
            self.decoder_layers,
            self.config,
            self.mesh,
            self.dtype,
            self.recompute,
            is_last_stage=self.is_last_stage,
            rotary_tables=self._rotary_tables,
        )

    def forward(
        self,
        x: Tensor,
        batch: Batch,
        kv: KVPool | None = None,
        virtual_embeddings: Tensor | None = None,
    ) -> Tensor:
        """Run this stage. The last stage returns logits, the other stages return hidden states.

        The input `x` is token ids (T,) on the first stage, and hidden states on the other stages.
        Row i of `virtual_embeddings` is the embedding of the token id vocab_size + i. The logits
        are those of the batch's `logit_rows`, in fp32 (fp64 for an fp64 model), without vocabulary
        padding. Every tensor rank returns the logits of the whole vocabulary.
        """
        x = self.forward_hidden(x, batch, kv, virtual_embeddings)
        return self.compute_logits(x, batch) if self.is_last_stage else x

    def forward_hidden(
        self,
        x: Tensor,
        batch: Batch,
        kv: KVPool | None = None,
        virtual_embeddings: Tensor | None = None,
        *,
        prefix: PrefixKV | None = None,
    ) -> Tensor:
        """Run this stage without the LM head; return hidden states.

        `DecoderBackend.forward` says which rows the result has. With a `prefix`, virtual tokens
        have learned keys and values instead of embeddings.
        """
        if self.is_first_stage:
            assert self.embedding is not None
            if prefix is not None:
                # The prefix has the keys and values of the virtual tokens, so the embeddings of
                # these tokens have no effect. Id 0, a valid id, replaces their ids.
                x = x.index_fill(0, prefix.batch_rows, 0)
            x = self.embedding(x, batch, virtual_embeddings)
        return self.decoder_backend.forward(x, batch, kv, prefix)

    def compute_logits(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the logits of the batch's `logit_rows`, without vocabulary padding."""
        # Gathered in the model's dtype, because logits in fp32 have twice the bytes of bf16 ones.
        logits = gather_columns(self._compute_head(x, batch), self.mesh)
        return self._finish_logits(logits[..., : self.config.vocab_size])

    def compute_logits_on_first_rank(self, x: Tensor, batch: Batch) -> Tensor | None:
        """Return `compute_logits` on the first tensor rank, and None on the others.

        All tensor ranks must call this together. It has no backward pass.
        """
        logits = gather_columns_on_first_rank(self._compute_head(x, batch), self.mesh)
        if logits is None:
            return None
        return self._finish_logits(logits[..., : self.config.vocab_size])

    def compute_logits_shard(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the logits of the batch's `logit_rows` over this rank's shard of the vocabulary.

        The shard includes vocabulary padding. `x` is the output of `forward_hidden`.
        """
        return self._finish_logits(self._compute_head(x, batch))

    def _finish_logits(self, logits: Tensor) -> Tensor:
        """Return the head's output in fp32 (fp64 if it is fp64), divided by `logits_scaling`.

        The quotients are not rounded to the dtype of the head, so they have the same order as its
        outputs, and a greedy head needs no division.
        """
        promoted = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaling = self.config.logits_scaling
        if scaling == 1.0:
            return promoted
        return promoted / scaling if promoted is logits else promoted.div_(scaling)

    def _compute_head(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the shard of `compute_logits_shard` in the dtype of the LM head."""
        assert self.head_backend is not None, "only the last stage has an LM head"
        # With sequence parallelism, rows can be selected only after the all-gather.
        is_sequence_parallel = self.mesh.sequence_parallel
        has_all_rows = len(x) == batch.tokens  # False: the last layer has selected the rows.
        if batch.logit_rows is not None and has_all_rows and not is_sequence_parallel:
            x = x.index_select(0, batch.logit_rows)
        if not self.head_backend.includes_norm:
            norm = cast(Norm, self.decoder.final_layernorm)
            x = to_column_parallel(norm(x), self.mesh, batch.tokens)
            if batch.logit_rows is not None and is_sequence_parallel:
                x = x.index_select(0, batch.logit_rows)
        return self.head_backend.forward(x, None, None, None)

    def greedy_tokens(self, x: Tensor) -> Tensor | None:
        """Return the argmax token of each row of `x`, computed without storing the logits.

        The rows of `x` are taken from the output of `forward_hidden`. The result is None if the
        greedy head does not support the rows, or if a logit is not finite; the caller must then
        use `compute_logits`.
        """
        return self.greedy_head.argmax(x)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [
            cast(DecoderLayer, layer) for layer in cast(nn.ModuleDict, self.decoder.layers).values()
        ]

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the LM head's weight: the output layer, or the tied embedding."""
        if self.output_layer is not None:
            return cast(Tensor, self.output_layer.weight)
        assert self.embedding is not None
        return self.embedding.weight_shard

    def logits(self, ids: Tensor, virtual_embeddings: Tensor | None = None) -> Tensor:
        """Return the logits (batch, length, vocabulary) of token ids (batch, length).

        All layers must be in this model: pipeline parallelism is not supported.
        """
        assert self.mesh.pp == 1, "logits() needs all layers, not one pipeline stage"
        batch = Batch.unpaged((ids.shape[1],) * ids.shape[0], ids.device)
        logits: Tensor = self(ids.flatten(), batch, virtual_embeddings=virtual_embeddings)
        return logits.view(*ids.shape, -1)
