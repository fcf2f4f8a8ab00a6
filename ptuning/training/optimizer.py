"""Optimizer: fp32 master copies of the trainable tensors, their steps and the saved state.

Master values and optimizer moments have at least fp32 precision; parameters of a narrower dtype
have separate master copies, in which the gradients of micro-batches are accumulated. A missing
gradient counts as zero.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.mesh import Mesh
from ptuning.config import TuneConfig
from ptuning.training.gradient_reduction import (
    TrainableTensor,
    reduce_gradient,
    squared_norm_share,
)
from ptuning.training.learning_rate import learning_rate_factor

# torch.optim.Adafactor scales its steps by the tensor's RMS and limits the rate to 1 / sqrt(step).
# Lester et al. use plain steps, which are neither scaled nor limited. The steps are plain if the
# minimum RMS (eps[1]) is 2**20 and the learning rate is divided by 2**20; a power of two causes no
# rounding errors.
ADAFACTOR_SIZE_MIN = 2.0**20
# Square root of the minimum squared gradient (1e-30) of the Adafactor paper.
ADAFACTOR_GRADIENT_MIN = 1e-15


class Optimizer:
    """Updates the trainable tensors of this rank; does nothing on a rank without such tensors."""

    def __init__(
        self, trainables: Sequence[TrainableTensor], config: TuneConfig, mesh: Mesh
    ) -> None:
        self._trainables = list(trainables)
        self._mesh = mesh
        self._config = config
        self._masters = [_master_copy(trainable.value) for trainable in self._trainables]
        self._optimizer = _create_optimizer(self._masters, config)

    def reduce_gradients(self, model_config: GPTConfig) -> float:
        """Reduce the gradients over ranks; return this rank's share of the squared gradient norm.

        The shares of all ranks sum to the squared norm of all gradients.
        """
        total = 0.0
        for trainable, master in zip(self._trainables, self._masters, strict=True):
            if master is not trainable.value and trainable.value.grad is not None:
                _accumulate_gradient(master, trainable.value)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            reduce_gradient(trainable, master.grad, model_config, self._mesh)
            total += squared_norm_share(trainable, master.grad, model_config, self._mesh)
        return total

    def step(self, step_number: int, factor: float) -> float:
        """Multiply the gradients by `factor`, make one step and return its learning rate."""
        rate = self._config.peak_learning_rate * learning_rate_factor(step_number, self._config)
        if self._optimizer is None:
            return rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate / group["unit"]
        for master in self._masters:
            assert master.grad is not None
            master.grad.mul_(factor)
        self._optimizer.step()
        with torch.no_grad():
            for trainable, master in zip(self._trainables, self._masters, strict=True):
                if master is not trainable.value:
                    trainable.value.copy_(master)
        self.zero_grad()
        return rate

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for trainable, master in zip(self._trainables, self._masters, strict=True):
            trainable.value.grad = master.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the master values, moments and step counts.

        A run that is resumed from them continues bit for bit.
        """
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
            self._optimizer.state[master] = {
                # PyTorch keeps step counts (0-d tensors) on the CPU.
                kind: saved.clone() if saved.ndim == 0 else saved.to(master.device, copy=True)
                for kind in sorted(kinds - {"value"})
                for saved in [tensors[f"{kind}/{key}"]]
            }


def _create_optimizer(values: Sequence[Tensor], config: TuneConfig) -> torch.optim.Optimizer | None:
    if not values:
        return None
    unit = ADAFACTOR_SIZE_MIN if config.optimizer == "adafactor" else 1.0
    decays = {True: config.weight_decay * unit, False: 0.0}
    tensors_by_decay = {
        is_matrix: [tensor for tensor in values if (tensor.ndim > 1) == is_matrix]
        for is_matrix in decays
    }
    groups = [
        {"params": group_tensors, "weight_decay": decays[is_matrix], "unit": unit}
        for is_matrix, group_tensors in tensors_by_decay.items()
        if group_tensors
    ]
    match config.optimizer:
        case "adamw":
            betas = (config.beta1, config.beta2)
            return torch.optim.AdamW(
                groups, lr=config.peak_learning_rate, betas=betas, eps=config.epsilon
            )
        case "adafactor":
            return torch.optim.Adafactor(groups, eps=(ADAFACTOR_GRADIENT_MIN, ADAFACTOR_SIZE_MIN))
    raise ConfigError(f"optimizer {config.optimizer!r} is unknown; set adamw or adafactor")


def _master_copy(value: Tensor) -> Tensor:
    """Return the tensor itself if it is fp32 or fp64, else an fp32 copy.

    The gradients of the tensor are accumulated in the copy.
    """
    if value.dtype in (torch.float32, torch.float64):
        return value
    master = value.detach().float()

    def accumulate(parameter: Tensor) -> None:
        # Called after each micro-batch, so the gradients of micro-batches are summed in fp32.
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
