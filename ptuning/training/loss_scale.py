"""Dynamic loss scale of fp16 training, similar to Megatron-Core's DynamicGradScaler."""

from dataclasses import dataclass

import torch

LOSS_SCALE_INITIAL = 2.0**16
LOSS_SCALE_WINDOW = 1000  # Number of consecutive steps without overflow before the scale doubles.


@dataclass
class LossScale:
    """Dynamic loss scale that keeps fp16 gradients from underflowing."""

    value: float = 1.0  # 1: no scaling, for dtypes other than fp16.
    good: int = 0  # Number of consecutive steps without overflow.

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> "LossScale":
        return cls(LOSS_SCALE_INITIAL if dtype is torch.float16 else 1.0)

    def update(self, *, finite: bool) -> None:
        """Adapt the scale after a step; `finite` says whether the gradients were finite.

        The scale is halved after an overflow, and doubled after LOSS_SCALE_WINDOW steps without
        overflow. It stays between 2 and 2^24. A scale of 1 (no scaling) does not change.
        """
        if self.value == 1.0:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(2.0, self.value / 2)
        elif self.good % LOSS_SCALE_WINDOW == 0:
            self.value = min(2.0**24, self.value * 2)
