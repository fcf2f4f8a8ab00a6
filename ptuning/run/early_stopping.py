"""Early stopping of a training run, and the best table: the best validation, and those since then.

Without `patience` a run never stops early, but the best table is kept. The score is the measure of
the configuration, or the negative validation loss. Rank 0's score and loss decide on all ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.parallel.mesh import Mesh
from ptuning.config import TuneConfig
from ptuning.prompt.prompt_encoder import encoder_tensors
from ptuning.run_facts import Validation
from ptuning.training.trainer import Trainer

# Name of the best table among the tensors of a state; the other tensors are the encoder's.
TABLE_KEY = "table"


@dataclass
class BestValidation:
    """The best validation so far; saved in each state."""

    best_step: int | None = None
    best: float | None = None  # Score at best_step; higher is better.
    best_loss: float = 0.0  # Validation loss at best_step.
    waited: int = 0  # Number of validations since the best score last improved.


class EarlyStopping:
    """Keeps the table of the best validation, and stops a run that no longer improves."""

    def __init__(self, config: TuneConfig, trainer: Trainer) -> None:
        self._config = config
        self._trainer = trainer
        self._best = BestValidation()
        self._table: Tensor | None = None
        # Encoder tensors that produced _table; empty on stages other than the first.
        self._encoder: dict[str, Tensor] = {}

    @property
    def should_stop(self) -> bool:
        """Whether `patience` validations have passed since the best score last improved."""
        patience = self._config.patience
        return patience is not None and self._best.waited >= patience

    @property
    def best_step(self) -> int | None:
        """Step of the best table; None for `full`, which writes the last weights."""
        return None if self._table is None else self._best.best_step

    @property
    def best_table(self) -> Tensor | None:
        """Table of the best validation; None before the first validation, and for `full`."""
        return self._table

    @property
    def best_encoder(self) -> Mapping[str, Tensor]:
        """Encoder tensors that produced the best table; empty if this rank has no encoder."""
        return self._encoder

    def update(self, validation: Validation, table: Tensor | None) -> None:
        """Compare a validation of `table` with the best; all ranks must call it together."""
        best, mesh = self._best, self._trainer.mesh
        score = _broadcast_from_rank_zero(self._score(validation), mesh)
        # With equal scores, the table with the lower loss is kept, but the patience is not reset.
        loss = (
            math.inf if validation.loss is None or math.isnan(validation.loss) else validation.loss
        )
        loss = _broadcast_from_rank_zero(loss, mesh)
        is_better = best.best is None or score > best.best
        if is_better or (score == best.best and loss < best.best_loss):
            best.best = score
            best.best_loss = loss
            best.best_step = validation.step
            best.waited = 0 if is_better else best.waited + 1
            self._table = table
            if self._trainer.encoder is not None:
                tensors = encoder_tensors(self._trainer.encoder)
                self._encoder = {name: tensor.clone() for name, tensor in tensors.items()}
        else:
            best.waited += 1

    def state_facts(self) -> dict[str, Any]:
        """Return the facts of the best validation for a state."""
        return asdict(self._best)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the best table and its encoder tensors for a state.

        They are empty before the first validation, for `full`, and on stages other than the first.
        """
        if self._table is None or self._trainer.mesh.pp_rank != 0:
            return {}
        return {TABLE_KEY: self._table} | self._encoder

    def load_state(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore `state_facts` and `state_tensors`; all ranks must call it together."""
        self._best = BestValidation(**facts)
        if self._best.best_step is not None and self._config.method != "full":
            self._table = self._trainer.broadcast_table(tensors.get(TABLE_KEY))
            self._encoder = {name: tensor for name, tensor in tensors.items() if name != TABLE_KEY}

    def _score(self, validation: Validation) -> float:
        """Return the score; higher is better, and NaN is the worst."""
        measure = self._config.measure
        score = -validation.loss if measure == "loss" and validation.loss is not None else 0.0
        if measure != "loss":
            score = validation.measures[measure]
        return -math.inf if math.isnan(score) else score


def _broadcast_from_rank_zero(value: float, mesh: Mesh) -> float:
    """Return rank 0's value on all ranks, so that rounding cannot make their decisions differ."""
    if mesh.tp * mesh.dp * mesh.pp == 1:
        return value
    buffer = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    dist.broadcast(buffer, 0)
    return float(buffer)
