"""An adapter's weights for the prompts of `generate`, on the model of this rank."""

from collections.abc import Sequence

import torch

from gpt.adapters.card import Adapter
from gpt.errors import RequestError
from gpt.generation.generate import SequenceAdapter
from gpt.linear_adapter import last_occurrence
from gpt.model.gpt_model import GPT
from gpt.model.pipeline import model_chunks
from gpt.parallel.adapter_sharding import shard_adapter


def sequence_adapters(
    adapter: Adapter, model: GPT | Sequence[GPT], prompts: Sequence[Sequence[int]]
) -> list[SequenceAdapter | None]:
    """Return the adapter for each prompt; an empty list if it changes no linear.

    Raise RequestError if a prompt lacks the invocation of an activated LoRA.
    """
    if not adapter.linears:
        return []
    chunks = model_chunks(model)
    first, mesh = chunks[0], chunks[0].mesh
    terms = shard_adapter(
        adapter.linears,
        first.config,
        [layer for chunk in chunks for layer in chunk.layers],
        rank=mesh.in_stage.rank,
        tp=mesh.tp,
        ep=mesh.ep,
        # The layout of the only chunk may have some tensors in fp32.
        dtype=torch.float32 if len(chunks) == 1 else first.dtype,
        device=mesh.device,
    )
    prepared = first.prepare_adapter(terms) if len(chunks) == 1 else terms
    return [SequenceAdapter(prepared, adapted_from(adapter, prompt)) for prompt in prompts]


def adapted_from(adapter: Adapter, prompt: Sequence[int]) -> int:
    """Return the position of the first token on which the adapter's weights act."""
    if not adapter.card.invocation:
        return 0
    position = last_occurrence(prompt, adapter.card.invocation)
    if position is None:
        raise RequestError(
            f"a prompt does not contain the invocation of adapter {adapter.card.name!r}, from "
            "which on the adapter acts; add the text of the invocation to the prompt",
            "prompt",
        )
    return position
