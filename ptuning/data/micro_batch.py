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

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from gpt.batch import Batch, FrozenContext
from gpt.dropout import Dropout
from gpt.linear_adapter import AdaptedRows, ExampleRows, ModelAdapter
from ptuning.data.dataset import Example


@dataclass(frozen=True)
class ContextBatch:
    """The tokens before the invocations of a micro-batch's sequences; equal ones occur once."""

    ids: Tensor
    batch: Batch  # It has no logit rows.
    # The row in `ids` of each sequence's tokens before the invocation, sequence after sequence.
    rows: Tensor
    starts: tuple[int, ...]  # The index in `rows` of each sequence's first token.

    def frozen(self, recorded_kv: Mapping[int, tuple[Tensor, Tensor]]) -> FrozenContext:
        """Return the context of the sequences, from the keys and values of the context batch."""
        kv_by_layer = {
            layer: (k.index_select(0, self.rows), v.index_select(0, self.rows))
            for layer, (k, v) in recorded_kv.items()
        }
        return FrozenContext(self.starts, kv_by_layer)


@dataclass(frozen=True)
class TaskSlice:
    """The tokens and examples of a task in a micro-batch, which are consecutive."""

    task: int  # Index among the tasks of the run.
    rows: Tensor | None  # The rows of its tokens, with those of its common prefix; None: all rows.
    examples: ExampleRows

    @property
    def logits(self) -> int:
        """The number of logit rows."""
        return sum(map(len, self.examples.logit_rows))


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass, and the tokens that it must predict."""

    ids: Tensor  # (tokens,) token ids; virtual tokens have ids at or above vocab_size.
    batch: Batch  # Has one logit row for each token whose next token has a loss.
    labels: Tensor  # (logit rows,) the token id that each logit row must predict.
    tasks: tuple[TaskSlice, ...] = ()  # The tasks, in the order of their rows.
    context: ContextBatch | None = None  # Only for activated LoRA.

    @property
    def tokens(self) -> int:
        """The number of tokens that the model computes."""
        context_tokens = 0 if self.context is None else self.context.batch.tokens
        return self.batch.tokens + context_tokens

    def with_adapters(self, adapters: Sequence[ModelAdapter]) -> "MicroBatch":
        """Return the micro-batch with the adapter of each task on the rows of the task."""
        adapted_rows = tuple(AdaptedRows(adapters[own.task], own.rows) for own in self.tasks)
        return replace(self, batch=replace(self.batch, adapted_rows=adapted_rows))


@dataclass(frozen=True)
class _Sequence:
    """A sequence of a micro-batch: an example, or the common prefix of a task's examples."""

    task: int
    ids: Sequence[int]  # The tokens that are computed.
    positions: Sequence[int] = ()  # Positions in `ids` of the tokens that have logits.
    labels: Sequence[int] = ()  # The token that each of them must predict.
    context: tuple[int, ...] = ()  # The tokens before the invocation of an activated LoRA.
    has_parent: bool = False  # Whether it continues the common prefix of its task.
    number: int | None = None  # `Example.number`; None: a common prefix.


def build_micro_batch(
    examples: Sequence[Example],
    device: torch.device | str = "cpu",
    *,
    share_prefix: bool | Container[int] = True,
    activated_tasks: Container[int] = (),
    dropout: Dropout | None = None,
) -> MicroBatch:
    """Pack examples into one flat batch, task after task.

    `share_prefix` computes the common prefix of a task's examples once; it may name the tasks. It
    has no effect with `dropout`, because examples must not share the dropout masks of their
    prefixes. The examples of `activated_tasks`, which train an activated LoRA, have only the tokens
    from their invocation on; those before it are the context.
    """
    sequences: list[_Sequence] = []
    parents: list[int | None] = []
    for task in sorted({example.task_index for example in examples}):
        task_examples = [example for example in examples if example.task_index == task]
        shares = share_prefix if isinstance(share_prefix, bool) else task in share_prefix
        prefix_length = 0
        if task not in activated_tasks and shares and dropout is None:
            prefix_length = _common_prefix_length(task_examples)
        parent = None
        if prefix_length:
            parent = len(sequences)
            sequences.append(_Sequence(task, task_examples[0].ids[:prefix_length]))
            parents.append(None)
        for example in task_examples:
            start = example.invocation_start if task in activated_tasks else prefix_length
            sequences.append(_example_sequence(example, start, has_parent=parent is not None))
            parents.append(parent)
    lengths = [len(sequence.ids) for sequence in sequences]
    past_lengths = [
        len(sequence.context) if parent is None else lengths[parent]
        for sequence, parent in zip(sequences, parents, strict=True)
    ]
    starts = [0, *accumulate(lengths)][:-1]
    logit_rows = [
        start + position
        for start, sequence in zip(starts, sequences, strict=True)
        for position in sequence.positions
    ]
    batch = Batch.continued(
        lengths,
        past_lengths,
        device,
        logit_rows=torch.tensor(logit_rows, device=device),
        dropout=dropout,
        parents=parents if any(parent is not None for parent in parents) else (),
    )
    return MicroBatch(
        torch.tensor([token for sequence in sequences for token in sequence.ids], device=device),
        batch,
        torch.tensor([label for sequence in sequences for label in sequence.labels], device=device),
        tuple(_task_slices(sequences, device)),
        _context_batch([sequence.context for sequence in sequences], device),
    )


def _example_sequence(example: Example, start: int, *, has_parent: bool) -> _Sequence:
    """Return the tokens of an example from `start` on, which has earlier tokens."""
    return _Sequence(
        example.task_index,
        example.ids[start:-1],  # The last token predicts no token, so it is not computed.
        # The token before a position predicts the token at the position.
        [position - 1 - start for position in example.loss_positions],
        [example.ids[position] for position in example.loss_positions],
        () if has_parent else tuple(example.ids[:start]),
        has_parent,
        example.number,
    )


def _task_slices(sequences: Sequence[_Sequence], device: torch.device | str) -> Iterator[TaskSlice]:
    """Yield the rows of each task; its sequences are consecutive."""
    tasks = list(dict.fromkeys(sequence.task for sequence in sequences))
    start = 0
    for task in tasks:
        own = [sequence for sequence in sequences if sequence.task == task]
        stop = start + sum(len(sequence.ids) for sequence in own)
        examples = [sequence for sequence in own if sequence.number is not None]
        yield TaskSlice(
            task,
            torch.arange(start, stop, device=device) if len(tasks) > 1 else None,
            ExampleRows(
                tuple(example.number or 0 for example in examples),
                tuple(len(example.ids) for example in examples),
                tuple(tuple(example.positions) for example in examples),
            ),
        )
        start = stop


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


def _common_prefix_length(examples: Sequence[Example]) -> int:
    """Return the length of the common prefix of a task's examples; 0 for a single example."""
    if len(examples) == 1:
        return 0
    # The common prefix is computed once for all examples. It must end before the first token that
    # predicts a label, because each example has its own label and needs its own logits.
    limit = min(example.loss_positions[0] - 1 for example in examples)
    first_example, *other_examples = examples
    length = 0
    while length < limit and all(
        example.ids[length] == first_example.ids[length] for example in other_examples
    ):
        length += 1
    return length


def number_examples(examples: Sequence[Example]) -> list[Example]:
    """Return the examples of a step with their numbers, counted for each task."""
    counts: Counter[int] = Counter()
    numbered = []
    for example in examples:
        numbered.append(replace(example, number=counts[example.task_index]))
        counts[example.task_index] += 1
    return numbered


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
