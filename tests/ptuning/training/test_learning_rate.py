"""Learning-rate schedule: linear warm-up, then constant, inverse square root or cosine decay."""

import pytest

from ptuning.config import TrainingConfig
from ptuning.training.learning_rate import learning_rate_factor


def test_learning_rate_warms_up_linearly_then_follows_the_schedule() -> None:
    cosine = TrainingConfig(steps=100, warmup_steps=10, minimum_rate=0.1)
    assert [learning_rate_factor(step, cosine) for step in (1, 5, 10, 11)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate_factor(56, cosine) == pytest.approx(0.55)
    assert 0.1 < learning_rate_factor(100, cosine) < 0.101
    assert learning_rate_factor(90, TrainingConfig(schedule="constant")) == 1.0
    roots = TrainingConfig(schedule="inverse-sqrt", warmup_steps=16)
    assert learning_rate_factor(64, roots) == 0.5
