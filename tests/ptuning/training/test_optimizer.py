"""Adafactor is Lester's: plain steps, no momentum; and goes on from a state to the last bit."""

import math

import pytest
import safetensors.torch
import torch
from torch import Tensor

from gpt.errors import ConfigError
from gpt.parallel.mesh import Mesh
from ptuning.config import METHODS
from ptuning.data.dataset import Example
from ptuning.run_facts import Progress
from ptuning.training.optimizer import Copies, Learned, Optimizer, share_of_rate
from ptuning.training.trainer import Trainer
from tests.support.models import CLASSIC, build
from tests.support.ranks import ranks
from tests.support.trainers import examples, settings, trainer

WAYS = {"optimizer": "adafactor", "steps": 8, "warmup_steps": 2}


def papers(value: Tensor, grads: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Algorithms 4 and 5 of Shazeer and Stern with clipping at 1, steps not relative."""
    value = value.clone()
    rows, columns = torch.zeros(value.shape[:1]), torch.zeros(value.shape[-1:])
    whole = torch.zeros_like(value)
    rows, columns = rows.to(value), columns.to(value)
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), 1):
        keep = 1 - step**-0.8
        squares = grad.square() + 1e-30
        if value.ndim > 1:
            rows = keep * rows + (1 - keep) * squares.sum(1)
            columns = keep * columns + (1 - keep) * squares.sum(0)
            estimate = torch.outer(rows, columns) / rows.sum()
        else:
            estimate = whole = keep * whole + (1 - keep) * squares
        move = grad / estimate.sqrt()
        move /= max(1.0, math.sqrt(float(move.square().mean())))
        value -= rate * decay * value if value.ndim > 1 else 0.0
        value -= rate * move
    return value


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
@pytest.mark.parametrize("shape", [(5, 7), (6,)])
def test_steps_are_the_papers_whatever_the_size_of_values_and_gradients(
    shape: tuple[int, ...], size: float
) -> None:
    config = settings(**WAYS, weight_decay=1e-2)
    draws = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=draws, dtype=torch.float64) * size
    grads = [
        torch.randn(shape, generator=draws, dtype=torch.float64) * size * step
        for step in range(1, 7)
    ]
    held = value.clone()
    made = Optimizer([Learned("a", held, Copies.EQUAL)], config, Mesh.single())
    rates = []
    for step, grad in enumerate(grads, 1):
        held.grad = grad.clone()
        made.gather(CLASSIC)
        rates.append(made.move(step, 1.0))
    assert rates == [0.3 * share_of_rate(step, config) for step in range(1, 7)]
    wanted = papers(value, grads, rates, 1e-2)
    assert torch.allclose(held, wanted, rtol=1e-9, atol=1e-9)
    assert (held - value).abs().min() > 0.01


def test_rows_without_gradients_stay() -> None:
    held = torch.ones(3, 4)
    made = Optimizer([Learned("a", held, Copies.EQUAL)], settings(**WAYS), Mesh.single())
    held.grad = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 4).clone()
    made.gather(CLASSIC)
    made.move(1, 1.0)
    assert torch.equal(held[[0, 2]], torch.ones(2, 4)) and bool((held[1] < 1).all())


def learned(made: Trainer, steps: int) -> list[Progress]:
    """A whole model has no rows, so other words stand for them."""
    size = made.sizes.vocab_size
    batch = [
        one
        if made.encoder is not None
        else Example([token % size for token in one.ids], one.answer_start)
        for one in examples(size)
    ]
    return [made.step(batch) for _ in range(steps)]


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("prompt-tuning", torch.float32),
        ("lstm", torch.float32),
        ("full", torch.float32),
        ("full", torch.bfloat16),
    ],
)
def test_what_goes_on_from_a_state_ends_the_same_to_the_last_bit(
    method: str, dtype: torch.dtype
) -> None:
    ways = {**WAYS, "method": method}
    whole = trainer(build(CLASSIC, dtype=dtype), **ways)
    told = learned(whole, 3)
    kept = safetensors.torch.save(
        {key: value.contiguous() for key, value in whole.optimizer.tensors().items()}
    )
    told += learned(whole, 3)

    second = trainer(build(CLASSIC, dtype=dtype), **ways)
    saved = safetensors.torch.load(kept)
    kinds = {key.split("/", 1)[0] for key in saved}
    assert kinds >= {"value", "step", "row_var", "col_var"}
    assert ("variance" in kinds) == (method != "prompt-tuning")
    second.optimizer.load(saved)
    second.step_number = 3
    more = learned(second, 3)

    assert [one.loss for one in more] == [one.loss for one in told[3:]]
    assert told[-1].loss < told[0].loss
    ended, wanted = second.optimizer.tensors(), whole.optimizer.tensors()
    assert ended.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(ended[key], value), key


def test_a_bare_table_takes_lesters_rate_and_a_network_adams() -> None:
    assert settings(**WAYS).rate == 0.3
    assert settings(**WAYS, learning_rate=0.1).rate == 0.1
    for method in METHODS.keys() - {"prompt-tuning"}:
        assert settings(**WAYS, method=method).rate == settings(method=method).rate


@pytest.mark.parametrize("method", ["tpmlp", "full"])
def test_parts_of_tensors_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=f"{method} shares them out over 2 tensor ranks"):
        settings(**WAYS, method=method, tp=2)
    settings(**WAYS, method=method, pp=2, dp=2)
    settings(**WAYS, tp=2)
    with pytest.raises(ConfigError, match=r"beta1 is 0\.5, and does nothing here"):
        settings(**WAYS, beta1=0.5)


def learn_split(rank: int) -> tuple[list[float], Tensor | None]:
    model = build(CLASSIC, Mesh.create(2, 1, 1))
    made = trainer(model, **WAYS, tp=2, method="mlp")
    return [one.loss for one in learned(made, 4)], made.table()


@pytest.mark.slow
def test_copies_on_tensor_ranks_learn_what_one_learns() -> None:
    alone = trainer(build(CLASSIC), **WAYS, method="mlp")
    losses, table = [one.loss for one in learned(alone, 4)], alone.table()
    assert table is not None
    for told, own in ranks(2, learn_split):
        assert told == pytest.approx(losses, rel=1e-9)
        assert own is not None and torch.allclose(own, table, rtol=1e-7, atol=1e-9)
