"""Prompt tuning: learn the rows of a table in front of a model that does not change.

Every step draws a ragged batch, with no padding and with logits only where an answer's token is
predicted. Gradients pass through the frozen weights to the table, which alone has an optimizer.
Knows no files.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.batch import Batch
from gpt.errors import ConfigError
from gpt.model import GPT
from ptuning.config import TuneConfig
from ptuning.dataset import Example


@dataclass(frozen=True)
class Progress:
    """One step that was made."""

    step: int  # From 1.
    loss: float  # Of the answers' tokens, the mean.
    tokens: int  # Text and virtual tokens that went through the model.


def initial_table(model: GPT, rows: int, text_ids: Sequence[int], seed: int) -> Tensor:
    """Rows of the vocabulary, as learning starts best from: a text's, or random tokens'."""
    assert model.embedding is not None
    if text_ids:
        ids = torch.tensor([text_ids[row % len(text_ids)] for row in range(rows)])
    else:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.config.vocab_size, (rows,), generator=generator)
    words = model.embedding.rows
    return words[ids.to(words.device)].detach().to(torch.float32, copy=True)


def tune(
    model: GPT,
    table: Tensor,
    examples: Sequence[Example],
    config: TuneConfig,
    report: Callable[[Progress], None],
) -> Tensor:
    """The learned table; `table` itself is where it starts, and is not changed."""
    model.requires_grad_(False)
    learned = table.clone().requires_grad_()
    optimizer = torch.optim.AdamW(
        [learned], lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate(step, config.warmup_steps, config.steps)
    )
    size = min(config.batch_examples, len(examples))  # More would be the same ones again.
    batches = _batches(examples, size, config.seed)
    for step in range(1, config.steps + 1):
        chosen = next(batches)
        loss = answer_loss(model, chosen, learned)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConfigError(
                f"the loss is {value} at step {step}; try a smaller learning_rate than "
                f"{config.learning_rate}, or dtype: float32"
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([learned], config.gradient_norm_max)
        optimizer.step()
        schedule.step()
        report(Progress(step, value, sum(len(example.ids) for example in chosen)))
    return learned.detach()


def answer_loss(model: GPT, examples: Sequence[Example], table: Tensor) -> Tensor:
    """Mean cross entropy over all answer tokens of the examples."""
    device = table.device
    # The last token of each predicts nothing.
    lengths = [len(example.ids) - 1 for example in examples]
    starts = [0, *accumulate(lengths)]
    ids = [token for example in examples for token in example.ids[:-1]]
    rows = [
        start + place
        for example, start, length in zip(examples, starts, lengths, strict=False)
        for place in range(example.answer_start - 1, length)
    ]
    answers = [token for example in examples for token in example.ids[example.answer_start :]]
    batch = Batch.plain(lengths, device, rows=torch.tensor(rows, device=device))
    logits = model(torch.tensor(ids, device=device), batch, table=table)
    return F.cross_entropy(logits, torch.tensor(answers, device=device))


def _batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Every example once in each round, in a new order."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(len(examples), generator=generator).tolist()
        yield [examples[index] for index in waiting[:size]]
        waiting = waiting[size:]


def _rate(step: int, warmup: int, steps: int) -> float:
    """Of the full learning rate: up in a line, then down a cosine to nothing."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
