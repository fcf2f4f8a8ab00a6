"""Optimizer: Adafactor with plain steps as in Lester et al., and bit-identical resumption."""

import math

import pytest
import safetensors.torch
import torch
from torch import Tensor

from gpt.errors import ConfigError
from gpt.parallel.mesh import Mesh
from ptuning.config import METHOD_LEARNING_RATES, TuneConfig
from ptuning.data.dataset import Example
from ptuning.run_facts import StepMetrics
from ptuning.training.gradient_reduction import Replication, TrainableTensor
from ptuning.training.learning_rate import learning_rate_factor
from ptuning.training.optimizer import Optimizer
from ptuning.training.trainer import Trainer
from tests.support.models import CLASSIC, build
from tests.support.ranks import ranks
from tests.support.trainers import examples, settings, trainer

ADAFACTOR = {"optimizer": "adafactor", "steps": 8, "warmup_steps": 2}


def optimizer_of(parameter: Tensor, config: TuneConfig) -> Optimizer:
    return Optimizer(
        [TrainableTensor("a", parameter, Replication.REPLICATED)],
        config.training_config,
        Mesh.single(),
        peak_learning_rates=config.group_learning_rates,
    )


def paper_adafactor(value: Tensor, grads: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Algorithms 4 and 5 of Shazeer and Stern with clipping at 1 and absolute steps."""
    value = value.clone()
    rows = torch.zeros(value.shape[:1])
    columns = torch.zeros(value.shape[-1:])
    momentum_free_estimate = torch.zeros_like(value)
    rows = rows.to(value)
    columns = columns.to(value)
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), 1):
        decay_rate = 1 - step**-0.8
        squares = grad.square() + 1e-30
        if value.ndim > 1:
            rows = decay_rate * rows + (1 - decay_rate) * squares.sum(1)
            columns = decay_rate * columns + (1 - decay_rate) * squares.sum(0)
            estimate = torch.outer(rows, columns) / rows.sum()
        else:
            estimate = momentum_free_estimate = (
                decay_rate * momentum_free_estimate + (1 - decay_rate) * squares
            )
        update = grad / estimate.sqrt()
        update /= max(1.0, math.sqrt(float(update.square().mean())))
        value -= rate * decay * value if value.ndim > 1 else 0.0
        value -= rate * update
    return value


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
@pytest.mark.parametrize("shape", [(5, 7), (6,)])
def test_adafactor_steps_equal_the_paper_at_any_scale(shape: tuple[int, ...], size: float) -> None:
    config = settings(**ADAFACTOR, weight_decay=1e-2)
    draws = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=draws, dtype=torch.float64) * size
    grads = [
        torch.randn(shape, generator=draws, dtype=torch.float64) * size * step
        for step in range(1, 7)
    ]
    parameter = value.clone()
    optimizer = optimizer_of(parameter, config)
    rates = []
    for step, grad in enumerate(grads, 1):
        parameter.grad = grad.clone()
        optimizer.reduce_gradients(CLASSIC)
        rates += optimizer.step(step, {0: 1.0})
    factors = [learning_rate_factor(step, config.training_config) for step in range(1, 7)]
    assert rates == [0.3 * factor for factor in factors]
    expected = paper_adafactor(value, grads, rates, 1e-2)
    assert torch.allclose(parameter, expected, rtol=1e-9, atol=1e-9)
    assert (parameter - value).abs().min() > 0.01


def test_rows_without_gradients_do_not_change() -> None:
    parameter = torch.ones(3, 4)
    optimizer = optimizer_of(parameter, settings(**ADAFACTOR))
    parameter.grad = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 4).clone()
    optimizer.reduce_gradients(CLASSIC)
    optimizer.step(1, {0: 1.0})
    assert torch.equal(parameter[[0, 2]], torch.ones(2, 4)) and bool((parameter[1] < 1).all())


def train_steps(trainer_: Trainer, steps: int) -> list[StepMetrics]:
    """Train some steps; full training has no table, so word tokens replace the virtual tokens."""
    size = trainer_.model_config.vocab_size
    batch = [
        example
        if trainer_.encoder is not None
        else Example([token % size for token in example.ids], example.answer_start)
        for example in examples(size)
    ]
    return [trainer_.step(batch) for _ in range(steps)]


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("prompt-tuning", torch.float32),
        ("lstm", torch.float32),
        ("full", torch.float32),
        ("full", torch.bfloat16),
    ],
)
def test_resumed_optimizer_state_is_bit_identical(method: str, dtype: torch.dtype) -> None:
    settings = {**ADAFACTOR, "method": method}
    uninterrupted = trainer(build(CLASSIC, dtype=dtype), **settings)
    metrics = train_steps(uninterrupted, 3)
    saved_state = safetensors.torch.save(
        {key: value.contiguous() for key, value in uninterrupted.optimizer.state_dict().items()}
    )
    metrics += train_steps(uninterrupted, 3)

    resumed = trainer(build(CLASSIC, dtype=dtype), **settings)
    loaded_state = safetensors.torch.load(saved_state)
    kinds = {key.split("/", 1)[0] for key in loaded_state}
    assert kinds >= {"value", "step", "row_var", "col_var"}
    assert ("variance" in kinds) == (method != "prompt-tuning")
    resumed.optimizer.load_state_dict(loaded_state)
    resumed.step_number = 3
    resumed_metrics = train_steps(resumed, 3)

    assert [step_metrics.loss for step_metrics in resumed_metrics] == [
        step_metrics.loss for step_metrics in metrics[3:]
    ]
    assert metrics[-1].loss < metrics[0].loss
    resumed_state = resumed.optimizer.state_dict()
    expected_state = uninterrupted.optimizer.state_dict()
    assert resumed_state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert torch.equal(resumed_state[key], value), key


def test_default_adafactor_rate_depends_on_the_method() -> None:
    assert settings(**ADAFACTOR).group_learning_rates[0] == 0.3
    assert settings(**ADAFACTOR, learning_rate=0.1).group_learning_rates[0] == 0.1
    for method in METHOD_LEARNING_RATES.keys() - {"prompt-tuning"}:
        needed = {"invocation": "text"} if method == "alora" else {}
        assert (
            settings(**ADAFACTOR, method=method, **needed).group_learning_rates[0]
            == settings(method=method, **needed).group_learning_rates[0]
        )


@pytest.mark.parametrize("method", ["tpmlp", "full"])
def test_adafactor_refuses_sharded_tensors(method: str) -> None:
    with pytest.raises(ConfigError, match=f"{method} shards them over 2 tensor ranks"):
        settings(**ADAFACTOR, method=method, tp=2)
    settings(**ADAFACTOR, method=method, pp=2, dp=2)
    settings(**ADAFACTOR, tp=2)
    with pytest.raises(
        ConfigError, match=r"beta1 is 0\.5, but has an effect only if optimizer is adamw"
    ):
        settings(**ADAFACTOR, beta1=0.5)


def learn_split(rank: int) -> tuple[list[float], Tensor | None]:
    model = build(CLASSIC, Mesh.create(2, 1, 1))
    split_trainer = trainer(model, **ADAFACTOR, tp=2, method="mlp")
    return [
        step_metrics.loss for step_metrics in train_steps(split_trainer, 4)
    ], split_trainer.current_table()


@pytest.mark.slow
def test_replicas_on_tensor_ranks_train_like_one_rank() -> None:
    single_rank = trainer(build(CLASSIC), **ADAFACTOR, method="mlp")
    losses = [step_metrics.loss for step_metrics in train_steps(single_rank, 4)]
    table = single_rank.current_table()
    assert table is not None
    for split_losses, split_table in ranks(2, learn_split):
        assert split_losses == pytest.approx(losses, rel=1e-9)
        assert split_table is not None and torch.allclose(split_table, table, rtol=1e-7, atol=1e-9)
