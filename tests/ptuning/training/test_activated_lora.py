"""Activated LoRA: the tokens before the invocation are computed once, and never backward."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.linear_adapter import AdaptedRows, ExampleRows
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from ptuning.config import MethodConfig
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import MicroBatch, TaskSlice, build_micro_batch
from ptuning.linears.trainable_linears import TrainableLinears
from ptuning.training.pipeline import PipelineChannels, run_passes
from ptuning.training.pipeline_schedule import schedule_1f1b
from tests.support.models import ALIBI, CLASSIC, LAYERED, MODERN, build
from tests.support.trained_linears import random_trainable_linears

CONFIGS = {"classic": CLASSIC, "modern": MODERN, "layered": LAYERED, "ALiBi": ALIBI}
DOCUMENT = [7, 8, 9, 10, 11, 12, 13]
EXAMPLES = [
    # One document and three tasks; another document that begins alike; no context; a short one.
    Example([*DOCUMENT, 20, 21, 30, 31], 9, 0, invocation_start=7),
    Example([*DOCUMENT, 20, 22, 32, 33, 34], 9, 0, invocation_start=7),
    Example([*DOCUMENT, 23, 24, 35], 9, 1, invocation_start=7),
    Example([7, 8, 9, 14, 15, 20, 21, 36], 7, 0, invocation_start=5),
    Example([20, 21, 37, 38], 2, 0, invocation_start=0),
    Example([7, 8, 9, 20, 25, 39], 5, 1, invocation_start=3),
]


TASKS = (0, 1)


def trained(model: GPT) -> TrainableLinears:
    return random_trainable_linears([MethodConfig(method="alora", rank=3)] * 2, [model])


def loss_and_gradients(
    model: GPT, micro_batch: MicroBatch, linears: TrainableLinears
) -> list[Tensor]:
    passes = schedule_1f1b(0, 1, 1)
    channels = PipelineChannels(Mesh.single())
    losses = run_passes(
        [model], passes, [micro_batch], channels, table=None, loss_scales=[1.0, 1.0]
    )
    return [
        losses,
        *(value.grad for _, _, _, value in linears.named_tensors() if value.grad is not None),
    ]


def plain_micro_batch(examples: Sequence[Example], linears: TrainableLinears) -> MicroBatch:
    """Each example as one sequence; the adapter of its task acts from the invocation on."""
    adapters = linears.begin_step()
    ids: list[int] = []
    labels: list[int] = []
    logit_rows: list[int] = []
    rows: list[list[int]] = [[], []]
    logits = [0, 0]
    examples = sorted(examples, key=lambda example: example.task_index)
    for example in examples:
        logits[example.task_index] += len(example.loss_positions)
        logit_rows += [len(ids) + position - 1 for position in example.loss_positions]
        labels += [example.ids[position] for position in example.loss_positions]
        rows[example.task_index] += range(
            len(ids) + example.invocation_start, len(ids) + len(example.ids)
        )
        ids += example.ids
    batch = Batch.unpaged(
        [len(example.ids) for example in examples], logit_rows=torch.tensor(logit_rows)
    )
    adapted_rows = tuple(
        AdaptedRows(adapter, torch.tensor(task_rows))
        for adapter, task_rows in zip(adapters, rows, strict=True)
    )
    batch = replace(batch, adapted_rows=adapted_rows)
    tasks = tuple(
        TaskSlice(task, None, ExampleRows((), (), (tuple(range(count)),)))
        for task, count in enumerate(logits)
    )
    return MicroBatch(torch.tensor(ids), batch, torch.tensor(labels), tasks)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_equal_those_of_whole_sequences(name: str) -> None:
    config: GPTConfig = CONFIGS[name]
    model = build(config)
    linears = trained(model)
    expected = loss_and_gradients(model, plain_micro_batch(EXAMPLES, linears), linears)

    linears = trained(model)
    micro_batch = build_micro_batch(EXAMPLES, activated_tasks=TASKS).with_adapters(
        linears.begin_step()
    )
    actual = loss_and_gradients(model, micro_batch, linears)
    assert len(expected) == 1 + 2 * len(linears.linears)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_equal_contexts_are_computed_once() -> None:
    context = build_micro_batch(EXAMPLES, activated_tasks=TASKS).context
    assert context is not None
    # 7 8 9 is common to all; the rest of the document; 14 15.
    assert context.ids.tolist() == [7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert context.batch.parents == (None, 0, 0)
    starts = [*context.starts, len(context.rows)]
    by_task = sorted(EXAMPLES, key=lambda example: example.task_index)
    for number, example in enumerate(by_task):
        rows = context.rows[starts[number] : starts[number + 1]]
        assert context.ids[rows].tolist() == list(example.ids[: example.invocation_start])


def test_examples_without_context_need_no_context_batch() -> None:
    assert build_micro_batch([EXAMPLES[4]], activated_tasks=TASKS).context is None


def test_only_keys_and_values_of_the_context_are_saved() -> None:
    model = build(CLASSIC)
    linears = trained(model)
    context = list(range(40))
    examples = [Example([*context, 50, 51, 52, 53], 42, invocation_start=40)]
    micro_batch = build_micro_batch(examples, activated_tasks=TASKS).with_adapters(
        linears.begin_step()
    )
    weights = {tuple(parameter.shape) for parameter in model.parameters()}
    saved_shapes: set[tuple[int, ...]] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved_shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_and_gradients(model, micro_batch, linears)
    # The micro-batch itself has 3 tokens.
    long_shapes = {shape for shape in saved_shapes if shape and shape[0] in (40, 43)}
    assert long_shapes - weights == {(43, CLASSIC.num_query_groups, CLASSIC.kv_channels)}
