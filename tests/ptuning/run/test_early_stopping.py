"""Early stopping: the best validation, patience, and its part of a training state."""

import math

import pytest
import torch

from ptuning.config import TuneConfig
from ptuning.linears.trainable_linears import build_trainable_linears
from ptuning.prompt.prompt_encoder import encoder_tensors
from ptuning.run.early_stopping import EarlyStopping
from ptuning.run_facts import Validation
from ptuning.training.trainer import Trainer
from tests.support.models import CLASSIC, build
from tests.support.trainers import trainer

VALIDATED: dict[str, object] = {"validation": "v", "validate_every": 1}


def early_stopping(**changes: object) -> EarlyStopping:
    return early_stopping_of(trainer(build(CLASSIC), **VALIDATED, **changes))


def early_stopping_of(trainer_: Trainer) -> EarlyStopping:
    config = trainer_.config
    return EarlyStopping(config.validation_config, config.method_config, trainer_)


def test_lowest_loss_is_the_best_and_patience_ends_the_run() -> None:
    stopping = early_stopping(monitor="loss", patience=2)
    losses = [3.0, 2.0, math.nan, 2.0]
    best_steps, stops = [], []
    for step, loss in enumerate(losses, 1):
        stopping.update(Validation(step, loss), torch.full((2, 3), float(step)))
        best_steps.append(stopping.best_step)
        stops.append(stopping.should_stop)
    assert best_steps == [1, 2, 2, 2]
    assert stops == [False, False, False, True]
    assert stopping.best_table is not None
    assert torch.equal(stopping.best_table, torch.full((2, 3), 2.0))


def test_loss_decides_equal_scores_without_resetting_the_patience() -> None:
    stopping = early_stopping(monitor="exact_match", patience=2)
    for step, (score, loss) in enumerate([(0.5, 3.0), (0.5, 2.0), (0.5, 4.0)], 1):
        assert not stopping.should_stop
        stopping.update(Validation(step, loss, {"exact_match": score}), torch.ones(2, 3))
    assert stopping.best_step == 2
    assert stopping.should_stop


def test_with_a_patience_of_zero_no_run_stops_early() -> None:
    stopping = early_stopping(monitor="loss", patience=0)
    for step in range(1, 50):
        stopping.update(Validation(step, float(step)), torch.ones(2, 3))
    assert stopping.best_step == 1
    assert not stopping.should_stop


def test_a_run_stops_by_default_after_three_eighths_of_its_steps() -> None:
    stopping = early_stopping(steps=16)
    stops = []
    for step in range(1, 9):
        stopping.update(Validation(step, float(step)), torch.ones(2, 3))
        stops.append(stopping.should_stop)
    assert stops == [False] * 6 + [True] * 2
    trainer_ = trainer(build(CLASSIC), validation="v", steps=16, method="full")
    full_stopping = early_stopping_of(trainer_)
    for step in range(1, 9):
        full_stopping.update(Validation(step, float(step)), None)
    assert not full_stopping.should_stop


def test_full_training_has_no_best_step() -> None:
    stopping = early_stopping(method="full", monitor="loss", patience=1)
    stopping.update(Validation(1, 1.0), None)
    assert stopping.best_step is None
    assert stopping.state_tensors() == {}
    assert stopping.state_facts()["best_step"] == 1
    stopping.update(Validation(2, 1.0), None)
    assert stopping.should_stop


@pytest.mark.parametrize("method", ["prompt-tuning", "mlp"])
def test_restored_state_is_equal(method: str) -> None:
    trainer_ = trainer(build(CLASSIC), **VALIDATED, method=method, monitor="loss", patience=3)
    stopping = early_stopping_of(trainer_)
    assert trainer_.encoder is not None
    best_encoder = {name: t.clone() for name, t in encoder_tensors(trainer_.encoder).items()}
    stopping.update(Validation(4, 2.0), trainer_.current_table())
    with torch.no_grad():
        for parameter in trainer_.encoder.parameters():
            parameter.zero_()
    stopping.update(Validation(8, 2.5), trainer_.current_table())
    assert list(stopping.state_facts().items()) == [
        ("best_step", 4),
        ("best", -2.0),
        ("best_loss", 2.0),
        ("waited", 1),
    ]
    assert stopping.state_tensors().keys() == {"table", *best_encoder}

    restored = early_stopping_of(trainer_)
    restored.load_state(stopping.state_facts(), stopping.state_tensors())

    assert restored.state_facts() == stopping.state_facts()
    assert restored.best_step == 4
    assert restored.best_table is not None and stopping.best_table is not None
    assert torch.equal(restored.best_table, stopping.best_table)
    assert restored.best_encoder.keys() == best_encoder.keys()
    for name, tensor in best_encoder.items():
        assert torch.equal(restored.best_encoder[name], tensor), name


def test_each_task_of_linear_adapters_keeps_its_own_values() -> None:
    model = build(CLASSIC)
    tasks = [{"name": "a", "rank": 2}, {"name": "b", "rank": 1, "layers": [0]}]
    config = {"method": "lora", "monitor": "loss", "patience": 2, "validate_every": 1}
    settings = TuneConfig.from_dict({"model": "m", "data": "d", "tasks": tasks, **config}, "here")
    linears = build_trainable_linears(
        settings.task_method_configs, settings.data_config.resolved_tasks, [model], seed=0
    )
    trainer_ = Trainer([model], settings, linears=linears)
    stoppings = [
        EarlyStopping(
            trainer_.config.validation_config, trainer_.config.method_config, trainer_, task=task
        )
        for task in range(2)
    ]
    layout = linears.layout
    parts = [layout.task_values(task) for task in range(2)]
    assert (parts[0].start, parts[0].stop, parts[1].stop) == (0, parts[1].start, layout.size)
    for step, losses in enumerate([(3.0, 1.0), (2.0, 2.0), (1.0, 3.0)], 1):
        by_task = {name: {"loss": loss} for name, loss in zip("ab", losses, strict=True)}
        table = torch.full((layout.size,), float(step))
        for stopping in stoppings:
            stopping.update(Validation(step, 9.0, {}, by_task), table)
    assert [stopping.best_step for stopping in stoppings] == [3, 1]
    assert [stopping.should_stop for stopping in stoppings] == [False, True]
    table = torch.zeros(layout.size)
    for stopping in stoppings:
        best = stopping.put_best(table)
        assert best is not None
        table = best
    assert torch.equal(table[parts[0]], torch.full_like(table[parts[0]], 3.0))
    assert torch.equal(table[parts[1]], torch.full_like(table[parts[1]], 1.0))
