"""Adapters trained in one run: each has the losses, norms and values of a run of its own, in fp64.

The oracle is a trainer of one task with the same settings, for the same batches.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.model.gpt_model import GPT
from ptuning.config import TuneConfig
from ptuning.data.batch_order import BatchOrders
from ptuning.data.dataset import Example
from ptuning.linears.trainable_linears import build_trainable_linears
from ptuning.run_facts import GroupMetrics, StepMetrics
from ptuning.training.trainer import Trainer
from tests.support.models import CLASSIC, LAYERED, MODERN, build

STEPS = 4
RUN: dict[str, Any] = {
    "model": "m",
    "method": "lora",
    "rank": 3,
    "learning_rate": 2e-2,
    "batch_examples": 4,
    "steps": STEPS,
    "warmup_steps": 2,
    "gradient_norm_max": 0.3,
    "weight_decay": 0.01,
}
# Methods, ranks, rates, targets and layers differ; the last task is the first one with other data.
TASKS: list[dict[str, Any]] = [
    {"name": "a", "alpha": 5.0, "lora_plus_ratio": 2.0},
    {"name": "b", "method": "dora", "rank": 2, "learning_rate": 1e-2, "rslora": True},
    {"name": "c", "method": "ia3", "learning_rate": 5e-2, "layers": [0]},
    {"name": "d", "method": "alora", "invocation_ids": [5], "targets": ["linear_qkv.query"]},
    {"name": "e", "rank": 1, "dropout": 0.3, "targets": ["linear_fc1", "linear_fc2"]},
    {"name": "f"},
]
COUNTS = (9, 5, 7, 6, 4, 2)


def records(task: int) -> list[Example]:
    """Examples of different lengths, with a common prefix."""
    draw = torch.Generator().manual_seed(task)
    examples = []
    for number in range(COUNTS[task]):
        ids = torch.randint(60, (6 + (number * 5 + task) % 9,), generator=draw).tolist()
        ids[:2] = 3, 4
        examples.append(Example(ids, len(ids) - 1 - number % 3, task, invocation_start=number % 3))
    return examples


def configs(**changes: object) -> tuple[TuneConfig, list[TuneConfig]]:
    """The settings of the run with all tasks, and of a run of each task."""
    run = {**RUN, **changes}
    tasks = [{"data": "d", **task} for task in TASKS]
    single_runs = []
    for task in tasks:
        settings = {**run, **task}
        if settings["method"] == "ia3":
            del settings["rank"]
        single_runs.append(TuneConfig.from_dict(settings, "one"))
    return TuneConfig.from_dict({**run, "tasks": tasks}, "all"), single_runs


def trainer_of(model: GPT, config: TuneConfig) -> Trainer:
    tasks = config.data_config.resolved_tasks
    linears = build_trainable_linears(config.task_method_configs, tasks, [model], seed=0)
    return Trainer([model], config, linears=linears)


def orders(example_sets: Sequence[Sequence[Example]], config: TuneConfig) -> BatchOrders:
    return BatchOrders(example_sets, config.training_config.batch_examples, 0)


def values_of(trainer: Trainer, task: int) -> Tensor:
    table = trainer.current_table()
    assert table is not None and trainer.linears is not None
    return table[trainer.linears.layout.task_values(task)]


def single_run(model: GPT, config: TuneConfig, task: int) -> tuple[list[StepMetrics], Tensor]:
    trainer = trainer_of(model, config)
    order = orders([[replace(example, task_index=0) for example in records(task)]], config)
    steps = [trainer.step(order.batch(step)) for step in range(1, STEPS + 1)]
    return steps, values_of(trainer, 0)


def group_metrics(metrics: StepMetrics) -> GroupMetrics:
    return GroupMetrics(metrics.loss, metrics.rate, metrics.gradient_norm, metrics.skipped)


def check_same(actual: GroupMetrics, expected: GroupMetrics) -> None:
    assert actual.loss == pytest.approx(expected.loss, rel=1e-12)
    assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-10)
    assert (actual.rate, actual.skipped) == (expected.rate, expected.skipped)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("modern", {"micro_batch_examples": 3}),
        pytest.param("classic", {}, marks=pytest.mark.slow),
        pytest.param(
            "layered", {"micro_batch_tokens": 40, "schedule": "constant"}, marks=pytest.mark.slow
        ),
    ],
)
def test_each_task_has_the_losses_and_values_of_its_own_run(
    name: str, changes: dict[str, object]
) -> None:
    model = build({"classic": CLASSIC, "modern": MODERN, "layered": LAYERED}[name])
    config, single_configs = configs(**changes)
    trainer = trainer_of(model, config)
    order = orders([records(task) for task in range(len(TASKS))], config)
    steps = [trainer.step(order.batch(step)) for step in range(1, STEPS + 1)]
    for task, (settings, single_config) in enumerate(zip(TASKS, single_configs, strict=True)):
        expected, values = single_run(model, single_config, task)
        assert expected[-1].loss != expected[0].loss
        for metrics, single_metrics in zip(steps, expected, strict=True):
            check_same(metrics.by_task[settings["name"]], group_metrics(single_metrics))
        torch.testing.assert_close(values_of(trainer, task), values, rtol=1e-10, atol=1e-12)


def test_a_task_without_examples_in_a_step_does_not_change() -> None:
    """Although weight decay would change a matrix without a gradient."""
    config, _ = configs()
    trainer = trainer_of(build(CLASSIC), config)
    order = orders([records(task) for task in range(len(TASKS))], config)
    trainer.step(order.batch(1))
    before = [values_of(trainer, task).clone() for task in range(len(TASKS))]
    metrics = trainer.step(order.batch(2, [0, 3]))
    assert list(metrics.by_task) == ["a", "d"]
    for task, values in enumerate(before):
        assert torch.equal(values_of(trainer, task), values) == (task not in (0, 3))


def test_only_the_task_whose_gradients_overflow_skips_a_step() -> None:
    config, _ = configs()
    model = build(CLASSIC, dtype=torch.float16)
    trainer = trainer_of(model, config)
    order = orders([records(task) for task in range(len(TASKS))], config)
    trainer.step(order.batch(1))
    before = [values_of(trainer, task).clone() for task in range(len(TASKS))]
    scales = [scale.value for scale in trainer.loss_scales]
    trainer.loss_scales[1].value = 2.0**40
    metrics = trainer.step(order.batch(2))
    assert [own.skipped for own in metrics.by_task.values()] == [
        name == "b" for name in metrics.by_task
    ]
    for task, values in enumerate(before):
        assert torch.equal(values_of(trainer, task), values) == (task == 1)
    scales[1] = 2.0**39
    assert [scale.value for scale in trainer.loss_scales] == scales
