"""Optimizer: AdamW or Adafactor on fp32 master values of the trainable tensors, and its state.

Master values and optimizer moments have at least fp32 precision. A parameter of a narrower dtype
has a separate fp32 master copy, and its gradients are summed over the micro-batches in fp32. A
missing gradient counts as zero.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.mesh import Mesh
from ptuning.config import TrainingConfig
from ptuning.training.gradient_reduction import (
    TrainableTensor,
    reduce_gradient,
    squared_norm_share,
)
from ptuning.training.learning_rate import learning_rate_factor

# torch.optim.Adafactor multiplies the normalized gradient by
#     max(eps[1], RMS of the tensor) * min(lr, 1 / sqrt(step)).
# Lester et al. multiply by the learning rate only. With eps[1] = 2**20 and lr = rate / 2**20, the
# product equals the rate. A power of two causes no rounding errors.
ADAFACTOR_RMS_MIN = 2.0**20
# eps[0] of torch.optim.Adafactor. The square of eps[0] is the minimum of the squared gradient; this
# minimum is 1e-30 in the Adafactor paper.
ADAFACTOR_GRADIENT_MIN = 1e-15


class Optimizer:
    """Updates the trainable tensors of this rank; does nothing on a rank without such tensors."""

    def __init__(
        self,
        trainables: Sequence[TrainableTensor],
        training_config: TrainingConfig,
        mesh: Mesh,
        *,
        peak_learning_rates: Sequence[float],
    ) -> None:
        """`peak_learning_rates` has the rate of each group of trainable tensors."""
        self._trainables = list(trainables)
        self._training_config = training_config
        self._mesh = mesh
        self._peak_learning_rates = tuple(peak_learning_rates)
        self._masters = [_master_copy(trainable.value) for trainable in self._trainables]
        peak_rates = [
            self._peak_learning_rates[trainable.group] * trainable.rate_factor
            for trainable in self._trainables
        ]
        self._optimizer = _create_optimizer(self._masters, peak_rates, training_config)

    def reduce_gradients(
        self, model_config: GPTConfig, groups: Container[int] | None = None
    ) -> list[float]:
        """Reduce the gradients over ranks; return this rank's share of each squared gradient norm.

        There is a norm for each group of trainable tensors; the shares of all ranks sum to its
        square. The tensors of other groups than `groups` (None: all groups) have no gradients, and
        their share is 0.
        """
        totals = [0.0 for _ in self._peak_learning_rates]
        for trainable, master in zip(self._trainables, self._masters, strict=True):
            if groups is not None and trainable.group not in groups:
                continue
            if master is not trainable.value and trainable.value.grad is not None:
                _accumulate_gradient(master, trainable.value)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            reduce_gradient(trainable, master.grad, model_config, self._mesh)
            totals[trainable.group] += squared_norm_share(
                trainable, master.grad, model_config, self._mesh
            )
        return totals

    def step(self, step_number: int, factors: Mapping[int, float]) -> list[float]:
        """Update the parameters of some groups; return the learning rate of each group.

        `factors` has the groups; the gradients of a group are multiplied by its factor first. The
        parameters of other groups do not change. `step_number` counts from 1 and selects the
        learning rate.
        """
        peak_share = learning_rate_factor(step_number, self._training_config)
        if self._optimizer is not None:
            for settings in self._optimizer.param_groups:
                settings["lr"] = settings["peak_rate"] * peak_share / settings["rate_divisor"]
            for trainable, master in zip(self._trainables, self._masters, strict=True):
                if trainable.group in factors:
                    assert master.grad is not None
                    master.grad.mul_(factors[trainable.group])
                else:
                    master.grad = None  # torch does not update a tensor without a gradient.
            self._optimizer.step()
            with torch.no_grad():
                for trainable, master in zip(self._trainables, self._masters, strict=True):
                    if master is not trainable.value:
                        trainable.value.copy_(master)
            self.zero_grad()
        return [peak_rate * peak_share for peak_rate in self._peak_learning_rates]

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for trainable, master in zip(self._trainables, self._masters, strict=True):
            trainable.value.grad = master.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the master values, moments and step counts, from which a run resumes."""
        tensors: dict[str, Tensor] = {}
        for trainable, master in zip(self._trainables, self._masters, strict=True):
            key = _state_key(trainable)
            tensors[f"value/{key}"] = master.detach()
            state = self._optimizer.state.get(master, {}) if self._optimizer else {}
            for kind, tensor in state.items():
                tensors[f"{kind}/{key}"] = torch.as_tensor(tensor)
        return tensors

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `state_dict`."""
        for trainable, master in zip(self._trainables, self._masters, strict=True):
            key = _state_key(trainable)
            master.copy_(tensors[f"value/{key}"])
            if master is not trainable.value:
                trainable.value.copy_(master)
            assert self._optimizer is not None
            kinds = {name.split("/", 1)[0] for name in tensors if name.endswith(f"/{key}")}
            state: dict[str, Tensor] = {}
            for kind in sorted(kinds - {"value"}):
                saved = tensors[f"{kind}/{key}"]
                if saved.ndim == 0:  # PyTorch keeps step counts on the CPU.
                    state[kind] = saved.clone()
                else:
                    state[kind] = saved.to(master.device, copy=True)
            self._optimizer.state[master] = state


def _create_optimizer(
    values: Sequence[Tensor], peak_rates: Sequence[float], training_config: TrainingConfig
) -> torch.optim.Optimizer | None:
    """`peak_rates` has the peak learning rate of each value."""
    if not values:
        return None
    rate_divisor = ADAFACTOR_RMS_MIN if training_config.optimizer == "adafactor" else 1.0
    # Biases and norm weights, which are vectors, have no weight decay. torch multiplies the decay
    # by `lr`, which is (learning rate / rate_divisor). The decay is therefore multiplied by
    # rate_divisor here.
    matrix_decay = training_config.weight_decay * rate_divisor
    tensors_by_group: dict[tuple[bool, float], list[Tensor]] = {}
    for value, peak_rate in zip(values, peak_rates, strict=True):
        tensors_by_group.setdefault((value.ndim <= 1, peak_rate), []).append(value)
    groups: list[dict[str, Any]] = [
        {
            "params": tensors,
            "weight_decay": 0.0 if is_vector else matrix_decay,
            "rate_divisor": rate_divisor,
            "peak_rate": peak_rate,
        }
        for (is_vector, peak_rate), tensors in sorted(
            tensors_by_group.items(), key=lambda entry: entry[0]
        )
    ]
    match training_config.optimizer:
        case "adamw":
            betas = (training_config.beta1, training_config.beta2)
            return torch.optim.AdamW(groups, betas=betas, eps=training_config.epsilon)
        case "adafactor":
            return torch.optim.Adafactor(groups, eps=(ADAFACTOR_GRADIENT_MIN, ADAFACTOR_RMS_MIN))
    raise ConfigError(f"optimizer {training_config.optimizer!r} is unknown; set adamw or adafactor")


def _master_copy(value: Tensor) -> Tensor:
    """Return the tensor itself if it is fp32 or fp64, else an fp32 copy.

    A hook adds the gradients of the tensor to the gradient of the copy.
    """
    if value.dtype in (torch.float32, torch.float64):
        return value
    master = value.detach().float()

    def accumulate(parameter: Tensor) -> None:
        # PyTorch calls the hook in each backward pass, so micro-batches are summed in fp32.
        _accumulate_gradient(master, parameter)

    value.register_post_accumulate_grad_hook(accumulate)
    return master


def _accumulate_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def _state_key(trainable: TrainableTensor) -> str:
    return f"{trainable.name}/again" if trainable.is_tied_copy else trainable.name
