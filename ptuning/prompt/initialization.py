"""What a table of virtual tokens starts as: rows of a text, of some tokens, or random ones.

Rows are drawn by generators that the seed and a name decide, so they are the same on every rank and
at every split. Rows that only pad the vocabulary are never among them. Knows no encoder.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gpt.errors import ConfigError, RequestError
from gpt.model.gpt_model import GPT
from gpt.tokenizers.tokenizer import Tokenizer
from ptuning.config import TuneConfig
from ptuning.data.dataset import TaskData

SAMPLED_EXAMPLES = 1000  # Of a task, whose tokens are drawn from.
SAMPLED_ROWS = 1024  # Of the vocabulary, that its rows' spread is measured by.


def generator(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def initial_ids(data: TaskData, config: TuneConfig, tokenizer: Tokenizer) -> list[int]:
    """The tokens whose rows a task's table starts as, if any are said: a text's, or records'."""
    task = data.task
    if task.initial_text:
        try:
            return tokenizer.encode(task.initial_text)
        except RequestError as error:
            raise ConfigError(f"initial_text: {error}") from None
    if config.initial != "records":
        return []
    vocab_size = data.vocab_size
    some = data.examples.examples[:SAMPLED_EXAMPLES]
    known = sorted({token for one in some for token in one.ids if token < vocab_size})
    draws = generator(config.seed, f"records.{task.name}")
    picks = torch.randint(len(known), (task.virtual_tokens,), generator=draws)
    return [known[pick] for pick in picks.tolist()]


def initial_rows(
    model: GPT, count: int, text_ids: Sequence[int], *, kind: str, seed: int, name: str
) -> Tensor:
    """(count, hidden) in fp64 on the CPU; all tensor ranks of the first stage call together.

    A text's rows come again from its start if it is short, and are cut if it is long. Without a
    text, `kind` says: rows of "vocabulary", or "random" ones that are spread as those are.
    """
    draws = generator(seed, name)
    if text_ids:
        return words(model, [text_ids[row % len(text_ids)] for row in range(count)])
    if kind != "random":
        return words(model, _some(model, count, draws))
    spread = words(model, _some(model, SAMPLED_ROWS, draws)).std()
    shape = count, model.config.hidden_size
    return torch.randn(shape, generator=draws, dtype=torch.float64) * spread


def _some(model: GPT, count: int, draws: torch.Generator) -> list[int]:
    return torch.randint(model.config.vocab_size, (count,), generator=draws).tolist()


@torch.no_grad()
def words(model: GPT, ids: Sequence[int]) -> Tensor:
    """Rows of the embedding, without positions, as the model looks them up itself."""
    assert model.embedding is not None
    wanted = torch.tensor(ids, device=model.mesh.device)
    return model.embedding.words(wanted).double().cpu()
