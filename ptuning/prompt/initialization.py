"""Soft-prompt initialization: embeddings of a text, sampled token embeddings, or random rows.

Each random generator is seeded with the run's seed and a name, so the initial rows are the same on
every rank and for every parallel layout. Padding rows of the vocabulary are never sampled.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gpt.errors import ConfigError, RequestError
from gpt.model.gpt_model import GPT
from gpt.tokenizers.tokenizer import Tokenizer
from ptuning.config import MethodConfig
from ptuning.data.dataset import TaskData

SAMPLED_EXAMPLES = 1000  # Maximum number of examples per task that provide initial tokens.
SAMPLED_ROWS = 1024  # Number of rows from which the embedding's standard deviation is estimated.


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a random generator; generators with different names are independent."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def initial_ids(
    data: TaskData, method_config: MethodConfig, tokenizer: Tokenizer, *, seed: int
) -> list[int]:
    """Return the tokens whose embeddings are a task's initial rows.

    The tokens are those of `initial_text` if this is set. Otherwise the setting `initial` decides:
    for "records", tokens are sampled from the task's records; for "vocabulary" and "random", the
    list is empty, and `initial_rows` draws the rows.
    """
    task = data.task
    if task.initial_text:
        try:
            return tokenizer.encode(task.initial_text)
        except RequestError as error:
            raise ConfigError(f"initial_text: {error}") from None
    if method_config.initial != "records":
        return []
    vocab_size = data.vocab_size
    sampled_examples = data.examples.examples[:SAMPLED_EXAMPLES]
    token_ids = sorted(
        {token for example in sampled_examples for token in example.ids if token < vocab_size}
    )
    rng = seeded_generator(seed, f"records.{task.name}")
    indices = torch.randint(len(token_ids), (task.virtual_tokens,), generator=rng)
    return [token_ids[index] for index in indices.tolist()]


def initial_rows(
    model: GPT, count: int, text_ids: Sequence[int], *, kind: str, seed: int, name: str
) -> Tensor:
    """Return the initial rows (count, hidden) in fp64 on the CPU.

    The rows are the embeddings of `text_ids`, repeated or truncated to `count`. If `text_ids` is
    empty, `kind`, the setting `initial`, decides: "random" draws numbers with the embedding's
    standard deviation; any other kind samples embedding rows. All tensor-parallel ranks of the
    first stage must call this function.
    """
    rng = seeded_generator(seed, name)
    if text_ids:
        return embedding_rows(model, [text_ids[row % len(text_ids)] for row in range(count)])
    if kind != "random":
        return embedding_rows(model, _random_token_ids(model, count, rng))
    deviation = embedding_rows(model, _random_token_ids(model, SAMPLED_ROWS, rng)).std()
    shape = count, model.config.hidden_size
    return torch.randn(shape, generator=rng, dtype=torch.float64) * deviation


def _random_token_ids(model: GPT, count: int, rng: torch.Generator) -> list[int]:
    return torch.randint(model.config.vocab_size, (count,), generator=rng).tolist()


@torch.no_grad()
def embedding_rows(model: GPT, ids: Sequence[int]) -> Tensor:
    """Return the word embeddings of tokens, without position embeddings, in fp64 on the CPU."""
    assert model.embedding is not None
    token_ids = torch.tensor(ids, device=model.mesh.device)
    return model.embedding.embed_tokens(token_ids).double().cpu()
