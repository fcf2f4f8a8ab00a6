"""What is learned in front of a frozen model: every task's rows, or a network that makes them.

Tasks of a run share the network, and each has rows of its own for it to read. Before learning, the
network's last linear is aimed: what comes out are rows of the vocabulary, whatever the method. A
network alone can go on to another run, with other tasks. Knows neither examples nor optimizers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt.adapters.prompt_encoders import (
    SPLITS,
    Drop,
    Kind,
    encode,
    features,
    kind_of,
    last_linear,
    shapes,
)
from gpt.batch import Dropout
from gpt.checkpoint.files.safetensors_file import Mapped, open_safetensors
from gpt.errors import CheckpointError, ConfigError
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh, gather_columns
from ptuning.config import TuneConfig
from ptuning.prompt.initialization import generator, initial_rows
from ptuning.task import Task

KINDS: dict[str, Kind] = {
    "mlp": "linears",
    "peft-mlp": "linears",
    "lstm": "lstm",
    "tpmlp": "split",
}
PEFT_LINEARS = 3
SPLIT_DEVIATION = 0.023
AIM_RTOL = 1e-2
FILE = "encoder.safetensors"  # In a run's directory: what `encoder_tensors` gave.
ROWS, NETWORK = "rows", "network."


class Encoder(nn.Module):
    """Every tensor rank of the first stage has one, and all call together.

    `rows` are the tables themselves where there is no network.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Tensor,
        network: Mapping[str, Tensor],
        mesh: Mesh,
        dropout: float = 0.0,
    ) -> None:
        """`lengths` are the tasks'; tensors are whole, and this rank keeps its part of them."""
        super().__init__()
        self.mesh, self.dropout = replace(mesh, sequence_parallel=False), dropout
        self.kind = kind_of(network)
        # Only an LSTM's rows know of each other; else one task's are as good as all.
        self.lengths = tuple(lengths) if self.kind == "lstm" else (sum(lengths),)
        parts = SPLITS if self.kind == "split" and mesh.tp > 1 else {}
        # Which parameters the tensor ranks share out, and along which dimension.
        self.split = {NETWORK + name: dimension for name, dimension in parts.items()}
        self.rows = nn.Parameter(rows.to(mesh.device))
        for name, whole in network.items():
            held = self.part(NETWORK + name, whole).to(mesh.device, copy=True)
            _hold(self, NETWORK + name, nn.Parameter(held))

    def forward(self, dropout: Dropout | None = None) -> Tensor:
        """All tasks' rows, one task after another. `dropout` is the step's; None: there is none."""
        weights = self.weights
        if not weights:
            return self.rows
        return torch.cat(
            [
                encode(rows, weights, self.mesh, self._drop(dropout, task))
                for task, rows in enumerate(self.rows.split(self.lengths))
            ]
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        """The network's tensors, as `gpt.adapters.prompt_encoders` names them."""
        found = self.named_parameters()
        return {name.removeprefix(NETWORK): one for name, one in found if name != ROWS}

    def _drop(self, dropout: Dropout | None, task: int) -> Drop | None:
        if dropout is None or not self.dropout:
            return None

        def drop(x: Tensor, layer: int) -> Tensor:
            keep = dropout.keep(tuple(x.shape), self.dropout, (task, layer), x)
            return x * keep / (1 - self.dropout)

        return drop

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of what has a parameter's shape."""
        if name not in self.split:
            return whole
        return whole.chunk(self.mesh.tp, self.split[name])[self.mesh.tp_rank].contiguous()

    @torch.no_grad()
    def whole(self, name: str, part: Tensor) -> Tensor:
        """The inverse of `part`; all tensor ranks call together."""
        if name not in self.split:
            return part
        dimension = self.split[name]
        joined = gather_columns(part.movedim(dimension, -1).contiguous(), self.mesh)
        return joined.movedim(-1, dimension).contiguous()


def _hold(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a name with dots."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in dict(module.named_children()):
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    module.register_parameter(leaf, parameter)


def hidden_size(config: TuneConfig, width: int) -> int:
    """An encoder's width where no setting says: the model's, and of an LSTM half for each way."""
    if config.encoder_hidden is not None:
        return config.encoder_hidden
    return max(1, width // 2) if config.method == "lstm" else width


def check_encoder(config: TuneConfig, width: int) -> None:
    """Refuse settings of which no encoder can be made, before a model is loaded."""
    hidden, tp = hidden_size(config, width), config.tp
    if config.method == "mlp" and config.encoder_layers < 2:
        raise ConfigError(
            f"encoder_layers is {config.encoder_layers}; an mlp needs at least 2, or there is none:"
            " set method: prompt-tuning for a table without a network"
        )
    if config.method == "tpmlp" and hidden % tp:
        raise ConfigError(
            f"encoder_hidden is {hidden}, shared out over {tp} tensor ranks; set a multiple of {tp}"
        )
    if config.encoder_dropout and (config.method != "lstm" or config.encoder_layers < 2):
        raise ConfigError(
            f"encoder_dropout is {config.encoder_dropout}; it is between the layers of an lstm, and"
            f" this is {config.method} with {config.encoder_layers}: set it to 0"
        )
    if config.encoder_from is not None and config.method not in KINDS:
        raise ConfigError(
            f"encoder_from is set, and {config.method} has no encoder to start from; take it out, "
            f"or set the method of that run: {', '.join(KINDS)}"
        )
    if config.encoder_from is not None:
        if any(task.initial_text for task in config.wanted):
            raise ConfigError(
                "initial_text stands beside encoder_from, whose network knows no such rows; take "
                "one of them out"
            )
        wanted = {NETWORK + name: shape for name, shape in _sizes(config, width).items()}
        found = _shapes(read_encoder(Path(config.encoder_from)))
        _check_same(found, wanted, config.encoder_from)


def build_encoder(
    config: TuneConfig, tasks: Sequence[Task], model: GPT, initial_ids: Sequence[Sequence[int]]
) -> Encoder:
    """What a run starts from. `initial_ids` are each task's initial text; empty: it has none.

    Drawn whole from the seed and names, so it is the same at every split. fp32, or fp64 as the
    model is.
    """
    width = model.config.hidden_size
    check_encoder(config, width)
    dtype = torch.float64 if model.dtype is torch.float64 else torch.float32
    aims = [
        initial_rows(
            *(model, task.virtual_tokens, ids),
            kind=config.initial,
            seed=config.seed,
            name=f"{ROWS}.{task.name}",
        )
        for task, ids in zip(tasks, initial_ids, strict=True)
    ]
    lengths, rows = [len(aim) for aim in aims], torch.cat(aims)
    network: dict[str, Tensor] = {}
    if config.method in KINDS:
        network = _network(config, width)
        rows = torch.cat(
            [
                torch.randn(
                    (task.virtual_tokens, width),
                    generator=generator(config.seed, f"{NETWORK}{ROWS}.{task.name}"),
                    dtype=torch.float64,
                )
                for task in tasks
            ]
        )
        _aim(network, rows.split(lengths), torch.cat(aims))
    network = {name: tensor.to(dtype) for name, tensor in network.items()}
    encoder = Encoder(lengths, rows.to(dtype), network, model.mesh, config.encoder_dropout)
    if config.encoder_from is not None:
        kept = read_encoder(Path(config.encoder_from))
        tensors = {name: mapped.tensor() for name, mapped in kept.items()}
        load_encoder(encoder, tensors, config.encoder_from)
    return encoder


def _sizes(config: TuneConfig, width: int) -> dict[str, tuple[int, ...]]:
    layers = PEFT_LINEARS if config.method == "peft-mlp" else config.encoder_layers
    return shapes(KINDS[config.method], width, hidden_size(config, width), layers)


def _network(config: TuneConfig, width: int) -> dict[str, Tensor]:
    """Whole, in fp64, as NeMo draws a split one, and torch all others."""
    kind, hidden, sizes = KINDS[config.method], hidden_size(config, width), _sizes(config, width)
    found = {}
    for name, shape in sizes.items():
        draws = generator(config.seed, NETWORK + name)
        if kind == "split":
            spread = 0.0 if name.endswith("bias") else SPLIT_DEVIATION
            found[name] = torch.randn(shape, generator=draws, dtype=torch.float64) * spread
            continue
        module = name.rpartition(".")[0]
        inputs = hidden if module == "lstm_head" else sizes[f"{module}.weight"][1]
        values = torch.rand(shape, generator=draws, dtype=torch.float64)
        found[name] = (values * 2 - 1) / math.sqrt(inputs)
    return found


def _aim(network: dict[str, Tensor], rows: Sequence[Tensor], wanted: Tensor) -> None:
    """Make the last linear the smallest one that turns what it reads into the wanted rows."""
    last = last_linear(network)
    read = torch.cat([features(some, network) for some in rows])
    # What it hardly reads is left out, or it would need weights without measure.
    weight = torch.linalg.pinv(read, rtol=AIM_RTOL) @ wanted
    network[f"{last}.weight"] = weight.T.contiguous()
    network[f"{last}.bias"] = torch.zeros_like(network[f"{last}.bias"])


def encoder_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """All of it, whole, on the CPU: what a run keeps; all tensor ranks call together."""
    return {
        name: encoder.whole(name, value.detach()).cpu()
        for name, value in encoder.named_parameters()
    }


@torch.no_grad()
def load_encoder(encoder: Encoder, tensors: Mapping[str, Tensor], where: object) -> None:
    """Take over the network of an earlier run, as `encoder_tensors` gave it.

    The tasks' own rows stay as they began: those there are other tasks'. `where` is for messages.
    """
    held = {name: value for name, value in encoder.named_parameters() if name != ROWS}
    whole = {name: encoder.whole(name, value.detach()).shape for name, value in held.items()}
    _check_same(_shapes(tensors), whole, where)
    for name, value in held.items():
        value.copy_(encoder.part(name, tensors[name]))


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a network's, among what a run left."""
    return {name: tuple(one.shape) for name, one in tensors.items() if name != ROWS}


def _check_same(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: object
) -> None:
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            theirs, own = (
                f"{name} of {tuple(one[name])}" if name in one else f"no {name}"
                for one in (found, wanted)
            )
            raise ConfigError(
                f"encoder_from: {where} has {theirs}, and this run's encoder has {own}; set the "
                "method, encoder_hidden and encoder_layers of that run, and its model"
            )


def read_encoder(run: Path) -> dict[str, Mapped]:
    """What a finished run left in its directory, or the latest of the runs that are in there."""
    runs = [one for one in run.glob("*") if one.name.isdecimal() and (one / FILE).is_file()]
    if not (run / FILE).is_file() and runs:
        run = max(runs, key=lambda one: int(one.name))
    try:
        return open_safetensors(run / FILE)
    except CheckpointError as error:
        raise ConfigError(
            f"encoder_from: {error}; needed is the directory of a finished run whose method has an "
            "encoder"
        ) from None
