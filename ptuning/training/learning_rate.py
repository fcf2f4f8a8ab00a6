"""Learning-rate schedule: linear warm-up, then constant, inverse square root or cosine decay."""

import math

from ptuning.config import TuneConfig


def learning_rate_factor(step: int, config: TuneConfig) -> float:
    """Return the learning rate of a step as a share of the peak; steps count from 1."""
    warmup = config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse-sqrt":
        return math.sqrt(max(1, warmup) / step)
    decay_progress = (step - 1 - warmup) / max(1, config.steps - warmup)
    return config.minimum_rate + (1 - config.minimum_rate) * 0.5 * (
        1 + math.cos(math.pi * min(1.0, decay_progress))
    )
