"""Loss scale of fp16 training: overflows halve it, steps without overflow double it."""

import torch

from ptuning.training.loss_scale import LossScale


def test_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale.for_dtype(torch.float16)
    initial_scale = scale.value
    scale.update(finite=False)
    assert scale.value == initial_scale / 2
    for _ in range(1000):
        scale.update(finite=True)
    assert scale.value == initial_scale
    assert LossScale.for_dtype(torch.bfloat16).value == 1.0
