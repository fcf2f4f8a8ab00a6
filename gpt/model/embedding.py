"""Embedding: word and position embeddings, and the embeddings of virtual tokens."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.batch import Batch
from gpt.model.build_context import BuildContext
from gpt.model.norm import Norm
from gpt.model.residual_dropout import apply_hidden_dropout
from gpt.parallel.sequence_parallel import scatter_to_sequence_parallel
from gpt.parallel.tensor_parallel import all_reduce


class Embedding(nn.Module):
    """Converts token ids to hidden states.

    Ids at or above the vocabulary size select embeddings of virtual tokens. No other module inserts
    these embeddings. Virtual tokens have positions like other tokens.
    """

    def __init__(self, build: BuildContext, *, has_positions: bool) -> None:
        """`has_positions`: whether to add learned position embeddings and the embedding norm.

        Only the first stage applies them, if the model has them. On the last stage, a tied LM head
        uses the word embeddings.
        """
        super().__init__()
        self.config = build.config
        self.mesh = build.mesh
        self.word_embeddings = nn.Module()
        build.allocate_parameters(self.word_embeddings, "embedding.word_embeddings")
        self.word_embeddings_layernorm: Norm | None = None
        if has_positions and self.config.embedding_layernorm:
            self.word_embeddings_layernorm = Norm(build, "embedding.word_embeddings_layernorm")
        self.position_embeddings: nn.Module | None = None
        if has_positions and self.config.has_learned_positions:
            self.position_embeddings = nn.Module()
            build.allocate_parameters(self.position_embeddings, "embedding.position_embeddings")

    @property
    def weight_shard(self) -> Tensor:
        """This rank's rows of the embedding matrix; a tied LM head uses the same rows."""
        return cast(Tensor, self.word_embeddings.weight)

    def _scale_tokens(self, x: Tensor) -> Tensor:
        """Apply a factor for the embeddings of token ids only, rounded to their dtype."""
        factor = self.config.embedding_multiplier
        if factor == 1.0 or self.config.embedding_multiplier_scope != "token_ids":
            return x
        return x * torch.tensor(factor, dtype=x.dtype, device=x.device)

    def forward(self, ids: Tensor, batch: Batch, virtual_embeddings: Tensor | None) -> Tensor:
        x = self.embed_tokens(ids, virtual_embeddings)
        if self.config.embedding_multiplier_scope == "all":
            x = x * self.config.embedding_multiplier
        if self.word_embeddings_layernorm is not None:
            x = self.word_embeddings_layernorm(x)
        if self.position_embeddings is not None:
            x = x + F.embedding(batch.positions, cast(Tensor, self.position_embeddings.weight))
        x = scatter_to_sequence_parallel(x, self.mesh)
        return apply_hidden_dropout(x, self.config, self.mesh, batch, (0, 0))

    def embed_tokens(self, ids: Tensor, virtual_embeddings: Tensor | None = None) -> Tensor:
        """Return the embeddings of tokens and virtual tokens, without position embeddings.

        A factor of all embeddings is not applied, so an embedding of a token can be that of a
        virtual token.
        """
        if virtual_embeddings is None and self.mesh.tp == 1:
            return self._scale_tokens(F.embedding(ids, self.weight_shard))
        is_virtual = ids >= self.config.vocab_size
        vocab_start = self.mesh.tp_rank * self.weight_shard.shape[0]
        local_ids = ids - vocab_start
        out_of_shard = (local_ids < 0) | (local_ids >= self.weight_shard.shape[0]) | is_virtual
        x = F.embedding(local_ids.masked_fill(out_of_shard, 0), self.weight_shard)
        x = all_reduce(x.masked_fill(out_of_shard.unsqueeze(-1), 0), self.mesh)
        x = self._scale_tokens(x)
        if virtual_embeddings is not None and torch.is_grad_enabled():
            virtual_rows = is_virtual.nonzero().squeeze(-1)
            x = x.index_put(
                (virtual_rows,),
                virtual_embeddings[ids[virtual_rows] - self.config.vocab_size].to(x.dtype),
            )
        elif virtual_embeddings is not None:
            # Without gradients, torch.where avoids nonzero(), which synchronizes the device.
            replacements = virtual_embeddings.index_select(
                0, (ids - self.config.vocab_size).clamp_min(0)
            )
            x = torch.where(is_virtual.unsqueeze(-1), replacements.to(x.dtype), x)
        return x
