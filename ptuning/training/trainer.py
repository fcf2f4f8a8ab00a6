"""Trainer: a step of learning, over any split; the frozen model and the whole one by the same code.

Each rank has its chunks of the model and takes its share of every batch. The table of virtual
tokens is made once for a step, goes through all its micro-batches, and takes their gradients back
to what made it. All ranks learn of each other what a step came to, and so decide alike.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.adapters.adapter_file import table_width
from gpt.batch import Dropout
from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh, share_from_first
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import MicroBatch, micro_batch, portions
from ptuning.prompt.prefix_tuning import Prefix, prefix_parts
from ptuning.prompt.prompt_encoder import Encoder
from ptuning.run_facts import Progress
from ptuning.training.optimizer import Learned, Optimizer, Scale, of_encoder, of_model, of_prefix
from ptuning.training.pipeline import Channels, run_passes
from ptuning.training.pipeline_schedule import Pass, forward_only, interleaved, one_f_one_b

SKIPPED_MAX = 50  # Steps in a row whose gradients overflowed, until that is an error.


@dataclass(frozen=True)
class _Told:
    """What a step came to, over all ranks."""

    loss: float  # The sum over all learned tokens.
    squares: float  # Of the gradients.
    stop: bool  # Somebody was asked to end.


class Trainer:
    """One rank's part of a run. Every rank calls every method, in the same order."""

    def __init__(
        self,
        chunks: Sequence[GPT],
        config: TuneConfig,
        encoder: Encoder | None = None,
        *,
        prefix: Prefix | None = None,
        channels: Channels | None = None,
    ) -> None:
        """`encoder` makes the table, on the first stage; a `prefix` is on every rank instead, and
        neither is there if the model itself is learned."""
        self.chunks, self.config, self.encoder = list(chunks), config, encoder
        self.prefix = prefix
        self.mesh: Mesh = chunks[0].mesh
        self.sizes = chunks[0].config
        self.step_number = 0  # Steps that were made.
        self.stop_asked = False  # May be set on any rank, at any time.
        self.stops = False  # So all ranks know after a step, and end after the same one.
        self.scale = Scale.of(chunks[0].dtype)
        self._rows = 0 if config.method == "full" else sum(t.virtual_tokens for t in config.wanted)
        self._skipped = 0
        self._channels = channels or Channels(self.mesh)
        self.optimizer = Optimizer(self._learned(), config, self.mesh)

    def step(self, examples: Sequence[Example]) -> Progress:
        """Learn from a batch, of which each data rank computes its share."""
        started = time.monotonic()
        self.step_number += 1
        micros = self._micros(examples, train=True)
        learned = sum(len(example.learned) for example in examples)
        made, table = self._table()
        losses = run_passes(
            self.chunks,
            self._passes(len(micros), train=True),
            micros,
            self._channels,
            table=table,
            prefix=None if self.prefix is None else self.prefix.layers,
            scale=self.scale.value / learned,
        )
        if made is not None and table is not None:
            made.backward(torch.zeros_like(table) if table.grad is None else table.grad)
        told = self._tell(losses, self.optimizer.gather(self.sizes))
        self.stops = told.stop
        loss = told.loss / learned
        norm = math.sqrt(told.squares) / self.scale.value if told.squares >= 0 else math.nan
        finite = math.isfinite(norm)
        self._check(loss, finite)
        rate = 0.0
        if finite:
            clip = min(1.0, self.config.gradient_norm_max / (norm + 1e-6))
            rate = self.optimizer.move(self.step_number, clip / self.scale.value)
        else:
            self.optimizer.forget()
        self.scale.learn(finite=finite)
        return Progress(
            step=self.step_number,
            steps=self.config.steps,
            loss=loss,
            tokens=sum(len(example.ids) for example in examples),
            text_tokens=sum(
                token < self.sizes.vocab_size for example in examples for token in example.ids
            ),
            seconds=time.monotonic() - started,
            rate=rate,
            gradient_norm=norm,
            skipped=not finite,
        )

    @torch.no_grad()
    def loss(self, examples: Sequence[Example], table: Tensor | None) -> float:
        """The mean over the learned tokens of all examples, with nothing learned."""
        total, size = 0.0, self.config.batch_examples
        prefix = None
        if table is not None and self.config.kind == "prefix":
            prefix = prefix_parts(table, self.chunks)
            table = None
        for start in range(0, len(examples), size):
            micros = self._micros(examples[start : start + size], train=False)
            losses = run_passes(
                self.chunks,
                self._passes(len(micros), train=False),
                micros,
                self._channels,
                table=table,
                prefix=prefix,
                scale=0.0,
            )
            total += self._tell(losses, 0.0).loss
        return total / sum(len(example.learned) for example in examples)

    @torch.no_grad()
    def table(self) -> Tensor | None:
        """All tasks' rows as they are now, on every rank."""
        if not self._rows:
            return None
        if self.prefix is not None:
            return self.prefix.table()
        return self.shared(None if self.encoder is None else self.encoder().detach().clone())

    def shared(self, table: Tensor | None) -> Tensor:
        """The first stage's table, on every rank."""
        if table is None:
            shape = self._rows, table_width(self.config.kind, self.sizes)
            table = torch.zeros(shape, dtype=self._dtype)
        return share_from_first(table.to(self.mesh.device), self.mesh)

    @property
    def model(self) -> GPT | list[GPT]:
        """What this rank decodes with."""
        return self.chunks[0] if len(self.chunks) == 1 else self.chunks

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.chunks[0].dtype, torch.float32)

    def _learned(self) -> list[Learned]:
        if self.config.method == "full":
            return of_model(self.chunks)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        if self.prefix is not None:
            return of_prefix(self.prefix.named_parameters(), self.sizes, self.mesh)
        if self.encoder is None:
            return []
        return of_encoder(self.encoder.named_parameters(), self.encoder.split)

    def _table(self) -> tuple[Tensor | None, Tensor | None]:
        """What the encoder made, and the leaf that goes through the model in its place."""
        if self.encoder is None:
            return None, None
        made: Tensor = self.encoder(self._dropout(0))
        return made, made.detach().clone().requires_grad_()

    def _micros(self, examples: Sequence[Example], *, train: bool) -> list[MicroBatch]:
        """This data rank's share of a batch; in a pipeline everybody needs to have some."""
        config, mesh = self.config, self.mesh
        own = examples[mesh.dp_rank :: mesh.dp]
        # A frozen model never drops, whatever its checkpoint was trained with.
        learns = train and config.method == "full"
        drops = learns and (self.sizes.hidden_dropout or self.sizes.attention_dropout)
        found = []
        for number, some in enumerate(
            portions(own, config.micro_batch_examples, config.micro_batch_tokens)
        ):
            dropout = self._dropout(1 + mesh.dp_rank, number) if drops else None
            found.append(micro_batch(some, mesh.device, dropout=dropout))
        return found

    def _dropout(self, *site: int) -> Dropout:
        """Of this step: a run that goes on draws what it would have drawn."""
        seed = 0
        for part in (self.config.seed, self.step_number, *site):
            seed = (seed * 1_000_003 + part) % 2**63
        return Dropout(seed)

    def _passes(self, micros: int, *, train: bool) -> list[Pass]:
        mesh, chunks = self.mesh, len(self.chunks)
        if not train:
            return forward_only(mesh.pp, micros, chunks)
        if chunks == 1:
            return one_f_one_b(mesh.pp_rank, mesh.pp, micros)
        return interleaved(mesh.pp_rank, mesh.pp, micros, chunks)

    def _tell(self, losses: Tensor, squares: float) -> _Told:
        mesh = self.mesh
        counted = mesh.pp_rank == mesh.pp - 1 and mesh.tp_rank == 0
        numbers = [float(losses) if counted else 0.0, squares, float(self.stop_asked)]
        if mesh.tp * mesh.dp * mesh.pp > 1:
            told = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
            dist.all_reduce(told)
            numbers = told.tolist()
        return _Told(numbers[0], numbers[1], numbers[2] > 0)

    def _check(self, loss: float, finite: bool) -> None:
        scaled = self.scale.value != 1.0
        self._skipped = 0 if finite else self._skipped + 1
        if math.isfinite(loss) and (finite or (scaled and self._skipped <= SKIPPED_MAX)):
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradients are not finite"
        raise ConfigError(
            f"{what} at step {self.step_number}; try a smaller learning_rate than "
            f"{self.config.rate:g}, or dtype: float32; the last state that was saved is good"
        )
