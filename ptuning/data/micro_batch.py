"""Micro-batches: examples packed without padding, each task's common prefix computed once.

A micro-batch is one flat batch. The examples of a task often begin with the same tokens, such as
leading virtual tokens. This common prefix is one sequence of the batch; the remainder of each
example is another sequence that attends to the common prefix as its parent (`Batch.parents`).
Because attention is causal, the results equal those of separate examples. A token has a loss if the
model is trained to predict it.

An activated LoRA does not change the tokens before its invocation. They are a context batch, which
the base model computes without gradients, once for all examples that begin alike, also of several
tasks. The micro-batch itself has the tokens from the invocation on. This module does not depend on
a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from gpt.batch import Batch, FrozenContext
from gpt.dropout import Dropout
from gpt.linear_adapter import AdaptedRows, ModelAdapter
from ptuning.data.dataset import Example


@dataclass(frozen=True)
class ContextBatch:
    """The tokens before the invocations of a micro-batch's examples; equal ones occur once."""

    ids: Tensor
    batch: Batch  # It has no logit rows.
    # The row in `ids` of each example's tokens before the invocation, example after example.
    rows: Tensor
    starts: tuple[int, ...]  # The index in `rows` of each example's first token.

    def frozen(self, recorded_kv: Mapping[int, tuple[Tensor, Tensor]]) -> FrozenContext:
        """Return the context of the examples, from the keys and values of the context batch."""
        kv_by_layer = {
            layer: (k.index_select(0, self.rows), v.index_select(0, self.rows))
            for layer, (k, v) in recorded_kv.items()
        }
        return FrozenContext(self.starts, kv_by_layer)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass, and the tokens that it must predict."""

    ids: Tensor  # (tokens,) token ids; virtual tokens have ids at or above vocab_size.
    batch: Batch  # Has one logit row for each token whose next token has a loss.
    labels: Tensor  # (logit rows,) the token id that each logit row must predict.
    # For each task in the micro-batch: its index, and the rows of its tokens (None: all rows).
    task_rows: tuple[tuple[int, Tensor | None], ...] = ()
    context: ContextBatch | None = None  # Only for activated LoRA.

    @property
    def tokens(self) -> int:
        """The number of tokens that the model computes."""
        context_tokens = 0 if self.context is None else self.context.batch.tokens
        return self.batch.tokens + context_tokens

    def with_adapters(self, adapters: Sequence[ModelAdapter]) -> "MicroBatch":
        """Return the micro-batch with the adapter of each task on the rows of the task."""
        adapted_rows = tuple(AdaptedRows(adapters[task], rows) for task, rows in self.task_rows)
        return replace(self, batch=replace(self.batch, adapted_rows=adapted_rows))


def build_micro_batch(
    examples: Sequence[Example],
    device: torch.device | str = "cpu",
    *,
    share_prefix: bool = True,
    dropout: Dropout | None = None,
) -> MicroBatch:
    """Pack examples into one flat batch.

    `share_prefix` computes the common prefix of a task's examples once. It has no effect with
    `dropout`, because examples must not share the dropout masks of their prefixes.
    """
    examples = sorted(examples, key=lambda example: example.task_index)
    prefix_lengths = _common_prefix_lengths(examples) if share_prefix and dropout is None else {}
    lengths = list(prefix_lengths.values())
    parents: list[int | None] = [None] * len(prefix_lengths)
    ids: list[int] = []
    for task, length in prefix_lengths.items():
        ids += next(example.ids[:length] for example in examples if example.task_index == task)
    logit_rows: list[int] = []
    prefix_tasks = list(prefix_lengths)
    for example in examples:
        prefix_length = prefix_lengths.get(example.task_index, 0)
        # The last token predicts no token, so it is not computed.
        suffix = example.ids[prefix_length:-1]
        # The token before a position predicts the token at the position.
        suffix_positions = [position - 1 - prefix_length for position in example.loss_positions]
        logit_rows += [len(ids) + position for position in suffix_positions]
        parents.append(prefix_tasks.index(example.task_index) if prefix_length else None)
        lengths.append(len(suffix))
        ids += suffix
    batch = Batch.unpaged(
        lengths,
        device,
        logit_rows=torch.tensor(logit_rows, device=device),
        dropout=dropout,
        parents=parents if prefix_lengths else (),
    )
    labels = [example.ids[position] for example in examples for position in example.loss_positions]
    tasks = [*prefix_tasks, *(example.task_index for example in examples)]
    return MicroBatch(
        torch.tensor(ids, device=device),
        batch,
        torch.tensor(labels, device=device),
        _task_rows(tasks, lengths, device),
    )


def build_activated_micro_batch(
    examples: Sequence[Example], device: torch.device | str = "cpu"
) -> MicroBatch:
    """Pack the tokens of examples from the invocation on, and the context before it."""
    contexts = [tuple(example.ids[: example.invocation_start]) for example in examples]
    ids: list[int] = []
    lengths: list[int] = []
    logit_rows: list[int] = []
    for example in examples:
        start = example.invocation_start
        # The token before a position predicts the token at the position.
        logit_rows += [len(ids) + position - 1 - start for position in example.loss_positions]
        suffix = example.ids[start:-1]  # The last token predicts no token.
        lengths.append(len(suffix))
        ids += suffix
    batch = Batch.continued(
        lengths,
        list(map(len, contexts)),
        device,
        logit_rows=torch.tensor(logit_rows, device=device),
    )
    labels = [example.ids[position] for example in examples for position in example.loss_positions]
    return MicroBatch(
        torch.tensor(ids, device=device),
        batch,
        torch.tensor(labels, device=device),
        _task_rows([example.task_index for example in examples], lengths, device),
        _context_batch(contexts, device),
    )


def _context_batch(
    contexts: Sequence[tuple[int, ...]], device: torch.device | str
) -> ContextBatch | None:
    """Return the batch of the distinct contexts, whose common beginning is one sequence.

    None if all contexts are empty.
    """
    distinct = [context for context in dict.fromkeys(contexts) if context]
    if not distinct:
        return None
    shared = _common_length(min(distinct), max(distinct)) if len(distinct) > 1 else 0
    sequences = [context[shared:] for context in distinct if len(context) > shared]
    parents: list[int | None] = [None] * len(sequences)
    if shared:
        parents = [None, *(0 for _ in sequences)]
        sequences = [distinct[0][:shared], *sequences]
    lengths = [len(sequence) for sequence in sequences]
    first_rows = [0, *accumulate(lengths)]
    # The rows of each distinct context: those of the common beginning, and its own.
    rows_by_context = {
        context: [
            *range(shared),
            *range(first_rows[index], first_rows[index] + len(context) - shared),
        ]
        for index, context in enumerate(
            (context for context in distinct if len(context) > shared), start=1 if shared else 0
        )
    }
    rows = [
        row for context in contexts for row in rows_by_context.get(context, range(len(context)))
    ]
    starts = [0, *accumulate(map(len, contexts))][:-1]
    batch = Batch.unpaged(
        lengths,
        device,
        logit_rows=torch.empty(0, dtype=torch.long, device=device),
        parents=parents if shared else (),
    )
    ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    return ContextBatch(ids, batch, torch.tensor(rows, device=device), tuple(starts))


def _common_length(first: Sequence[int], last: Sequence[int]) -> int:
    """Return the number of equal leading tokens.

    For the smallest and the largest of several sequences, these are equal in all of them.
    """
    pairs = enumerate(zip(first, last, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(last)))


def _task_rows(
    tasks: Sequence[int], lengths: Sequence[int], device: torch.device | str
) -> tuple[tuple[int, Tensor | None], ...]:
    """Return the rows of each task, from the task and the number of tokens of each sequence."""
    if len(set(tasks)) == 1:
        return ((tasks[0], None),)
    task_of_row = torch.tensor(tasks, device=device).repeat_interleave(
        torch.tensor(lengths, device=device)
    )
    return tuple((task, (task_of_row == task).nonzero().flatten()) for task in dict.fromkeys(tasks))


def _common_prefix_lengths(examples: Sequence[Example]) -> dict[int, int]:
    """Return the length of each task's common prefix, keyed by task index.

    A task is omitted if it has a single example, or if its examples have no common prefix.
    """
    prefix_lengths: dict[int, int] = {}
    for task in dict.fromkeys(example.task_index for example in examples):
        task_examples = [example for example in examples if example.task_index == task]
        # The common prefix is computed once for all examples. It must end before the first token
        # that predicts a label, because each example has its own label and needs its own logits.
        limit = min(example.loss_positions[0] - 1 for example in task_examples)
        first_example, *other_examples = task_examples
        length = 0
        while length < limit and all(
            example.ids[length] == first_example.ids[length] for example in other_examples
        ):
            length += 1
        if other_examples and length > 0:
            prefix_lengths[task] = length
    return prefix_lengths


def split_into_micro_batches(
    examples: Sequence[Example], examples_max: int | None, tokens_max: int | None
) -> list[list[Example]]:
    """Split a step's examples, in order, so that each micro-batch keeps both limits.

    None means no limit. An example longer than `tokens_max` is the only one in its micro-batch.
    """
    micro_batches: list[list[Example]] = [[]]
    tokens = 0
    for example in examples:
        size = len(example.ids)
        is_full = examples_max is not None and len(micro_batches[-1]) >= examples_max
        exceeds_tokens = tokens_max is not None and tokens + size > tokens_max
        if micro_batches[-1] and (is_full or exceeds_tokens):
            micro_batches.append([])
            tokens = 0
        micro_batches[-1].append(example)
        tokens += size
    return micro_batches if micro_batches[0] else []
