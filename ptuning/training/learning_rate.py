"""Learning-rate schedule: linear warm-up, then constant, inverse square root or cosine decay."""

import math

from ptuning.config import TrainingConfig


def learning_rate_factor(step: int, training_config: TrainingConfig) -> float:
    """Return (learning rate of a step) / (peak learning rate); steps count from 1."""
    warmup, minimum_rate = training_config.warmup_steps, training_config.minimum_rate
    if step <= warmup:
        return step / warmup
    if training_config.schedule == "constant":
        return 1.0
    if training_config.schedule == "inverse-sqrt":
        return math.sqrt(max(1, warmup) / step)
    decay_progress = (step - 1 - warmup) / max(1, training_config.steps - warmup)
    cosine = math.cos(math.pi * min(1.0, decay_progress))
    return minimum_rate + (1 - minimum_rate) * 0.5 * (1 + cosine)
