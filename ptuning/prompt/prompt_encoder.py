"""Prompt encoder: trainable virtual-token rows, or the MLP or LSTM that produces them.

The prompt encoder produces the soft prompt of every task. The tasks of a run share the network, and
each task has its own input rows. Before training, the last linear layer is fitted by least squares,
so that the network initially produces approximately the rows from which prompt tuning would start.
A later run can load the network for other tasks. This module does not use the training loop.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt.adapters.prompt_encoder_networks import (
    SPLIT_DIMENSIONS,
    EncoderKind,
    LstmDropout,
    encoder_features,
    encoder_kind,
    encoder_shapes,
    output_linear,
    run_encoder,
)
from gpt.checkpoint.files.safetensors_file import SafetensorsTensor, open_safetensors
from gpt.dropout import Dropout
from gpt.errors import CheckpointError, ConfigError
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.parallel.tensor_parallel import gather_columns
from ptuning.config import MethodConfig
from ptuning.prompt.initialization import initial_rows, seeded_generator
from ptuning.task import Task

# Maps each method with a prompt encoder to the kind of its network.
ENCODER_KINDS: dict[str, EncoderKind] = {
    "mlp": "linears",
    "peft-mlp": "linears",
    "lstm": "lstm",
    "tpmlp": "split",
}
PEFT_LINEARS = 3  # Number of linear layers of PEFT's MLP.
SPLIT_INIT_STD = 0.023  # Standard deviation of NeMo's initial `tpmlp` weights.
# The least-squares fit of the last linear layer ignores each direction of the inputs for which
# (singular value) / (largest singular value) is below this limit.
FIT_RTOL = 1e-2
ENCODER_FILE = "encoder.safetensors"  # File with the `encoder_tensors`, in a run's directory.
ROWS_NAME = "rows"  # Name of the input rows among the encoder's parameters.
NETWORK_PREFIX = "network."  # Prefix of the names of the network's parameters.


class PromptEncoder(nn.Module):
    """Trainable rows, and an optional network that maps them to the virtual-token table.

    Without a network, `rows` is the virtual-token table itself. Each tensor-parallel rank of the
    first stage has an instance, and all these ranks must call `forward` and `gather` together.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Tensor,
        network: Mapping[str, Tensor],
        mesh: Mesh,
        dropout: float = 0.0,
    ) -> None:
        """Create the parameters from full tensors; this rank keeps its shards of `network`.

        `lengths` has the number of rows of each task.
        """
        super().__init__()
        self.mesh = replace(mesh, sequence_parallel=False)
        self.dropout = dropout
        self.kind = encoder_kind(network)
        # An LSTM computes each output row from all input rows of a task, so tasks are encoded
        # separately. An MLP computes each output row from one input row, so all tasks are encoded
        # in one call.
        self.lengths = tuple(lengths) if self.kind == "lstm" else (sum(lengths),)
        dimensions = SPLIT_DIMENSIONS if self.kind == "split" and mesh.tp > 1 else {}
        # Maps each parameter that is sharded over the tensor ranks to its sharded dimension.
        self.split_dimensions = {
            NETWORK_PREFIX + name: dimension for name, dimension in dimensions.items()
        }
        self.rows = nn.Parameter(rows.to(mesh.device))
        for name, full_tensor in network.items():
            shard = self.shard(NETWORK_PREFIX + name, full_tensor).to(mesh.device, copy=True)
            _register_parameter(self, NETWORK_PREFIX + name, nn.Parameter(shard))

    def forward(self, dropout: Dropout | None = None) -> Tensor:
        """Return the virtual-token table: the rows of all tasks, task after task.

        `dropout` draws the dropout masks of the step; None: no dropout.
        """
        weights = self.weights
        if not weights:
            return self.rows
        return torch.cat(
            [
                run_encoder(rows, weights, self.mesh, self._dropout_function(dropout, task))
                for task, rows in enumerate(self.rows.split(self.lengths))
            ]
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        """The network's tensors, keyed by their names in `gpt.adapters.prompt_encoder_networks`."""
        return {
            name.removeprefix(NETWORK_PREFIX): parameter
            for name, parameter in self.named_parameters()
            if name != ROWS_NAME
        }

    def _dropout_function(self, dropout: Dropout | None, task: int) -> LstmDropout | None:
        if dropout is None or not self.dropout:
            return None

        def drop(x: Tensor, layer: int) -> Tensor:
            mask = dropout.keep_mask(tuple(x.shape), self.dropout, (task, layer), x)
            return x * mask / (1 - self.dropout)

        return drop

    def shard(self, name: str, full_tensor: Tensor) -> Tensor:
        """Return this rank's shard of the full tensor of the parameter `name`."""
        if name not in self.split_dimensions:
            return full_tensor
        return full_tensor.chunk(self.mesh.tp, self.split_dimensions[name])[
            self.mesh.tp_rank
        ].contiguous()

    @torch.no_grad()
    def gather(self, name: str, shard: Tensor) -> Tensor:
        """Return the full tensor of the parameter `name` from the shards of all ranks.

        All tensor-parallel ranks must call this function.
        """
        if name not in self.split_dimensions:
            return shard
        dimension = self.split_dimensions[name]
        gathered = gather_columns(shard.movedim(dimension, -1).contiguous(), self.mesh)
        return gathered.movedim(-1, dimension).contiguous()


def _register_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name; create the submodules."""
    *path, leaf = name.split(".")
    for child in path:
        if child not in dict(module.named_children()):
            module.add_module(child, nn.Module())
        module = module.get_submodule(child)
    module.register_parameter(leaf, parameter)


def encoder_hidden_size(method_config: MethodConfig, width: int) -> int:
    """Return the setting `encoder_hidden`, or its default.

    The default is `width`, the hidden size of the model. For `lstm` it is half of `width`, because
    the LSTM has two directions.
    """
    if method_config.encoder_hidden is not None:
        return method_config.encoder_hidden
    return max(1, width // 2) if method_config.method == "lstm" else width


def check_encoder(
    method_config: MethodConfig, tasks: Sequence[Task], width: int, *, tp: int
) -> None:
    """Raise ConfigError for encoder settings that cannot work; the model need not be loaded.

    `width` is the hidden size of the model.
    """
    method, layers = method_config.method, method_config.encoder_layers
    hidden = encoder_hidden_size(method_config, width)
    dropout, source = method_config.encoder_dropout, method_config.encoder_from
    if method == "mlp" and layers < 2:
        raise ConfigError(
            f"encoder_layers is {layers}, but method mlp needs at least 2; set encoder_layers: 2, "
            "or set method: prompt-tuning to train the table without a network"
        )
    if method == "tpmlp" and hidden % tp:
        raise ConfigError(
            f"encoder_hidden is {hidden}, but it is sharded over {tp} tensor ranks; set a "
            f"multiple of {tp}"
        )
    if dropout and (method != "lstm" or layers < 2):
        raise ConfigError(
            f"encoder_dropout is {dropout}; it applies between the layers of an lstm, but method "
            f"is {method} with encoder_layers {layers}; set encoder_dropout to 0"
        )
    if source is not None and method not in ENCODER_KINDS:
        raise ConfigError(
            f"encoder_from is set, but method {method} has no encoder; remove encoder_from, or set "
            f"method to the method of the earlier run, one of: {', '.join(ENCODER_KINDS)}"
        )
    if source is not None:
        if any(task.initial_text for task in tasks):
            raise ConfigError(
                "initial_text and encoder_from are both set, but a loaded network cannot start "
                "from given rows; remove one of them"
            )
        network_shapes = _network_shapes(method_config, width)
        expected_shapes = {NETWORK_PREFIX + name: shape for name, shape in network_shapes.items()}
        saved_shapes = _tensor_shapes(read_encoder(Path(source)))
        _check_shapes(saved_shapes, expected_shapes, source)


def build_encoder(
    method_config: MethodConfig,
    tasks: Sequence[Task],
    model: GPT,
    initial_ids: Sequence[Sequence[int]],
    *,
    seed: int,
) -> PromptEncoder:
    """Create the prompt encoder with its initial parameters, in fp32 (fp64 for an fp64 model).

    `initial_ids` has, for each task, the tokens whose embeddings are the initial virtual-token
    rows; if there are no tokens, `initial_rows` draws the rows. The full tensors are drawn before
    sharding, from generators that depend only on the seed and a name. Therefore the initial values
    are the same at every tensor-parallel size.
    """
    width = model.config.hidden_size
    check_encoder(method_config, tasks, width, tp=model.mesh.tp)
    dtype = torch.float64 if model.dtype is torch.float64 else torch.float32
    target_rows = [
        initial_rows(
            model,
            task.virtual_tokens,
            ids,
            kind=method_config.initial,
            seed=seed,
            name=f"{ROWS_NAME}.{task.name}",
        )
        for task, ids in zip(tasks, initial_ids, strict=True)
    ]
    lengths = [len(targets) for targets in target_rows]
    rows = torch.cat(target_rows)
    network: dict[str, Tensor] = {}
    if method_config.method in ENCODER_KINDS:
        network = _initial_network(method_config, width, seed)
        rows = torch.cat(
            [
                torch.randn(
                    (task.virtual_tokens, width),
                    generator=seeded_generator(seed, f"{NETWORK_PREFIX}{ROWS_NAME}.{task.name}"),
                    dtype=torch.float64,
                )
                for task in tasks
            ]
        )
        _fit_last_linear(network, rows.split(lengths), torch.cat(target_rows))
    network = {name: tensor.to(dtype) for name, tensor in network.items()}
    encoder = PromptEncoder(
        lengths, rows.to(dtype), network, model.mesh, method_config.encoder_dropout
    )
    if method_config.encoder_from is not None:
        saved_tensors = read_encoder(Path(method_config.encoder_from))
        tensors = {name: mapped.tensor() for name, mapped in saved_tensors.items()}
        load_encoder(encoder, tensors, method_config.encoder_from)
    return encoder


def _network_shapes(method_config: MethodConfig, width: int) -> dict[str, tuple[int, ...]]:
    method = method_config.method
    layers = PEFT_LINEARS if method == "peft-mlp" else method_config.encoder_layers
    hidden = encoder_hidden_size(method_config, width)
    return encoder_shapes(ENCODER_KINDS[method], width, hidden, layers)


def _initial_network(method_config: MethodConfig, width: int, seed: int) -> dict[str, Tensor]:
    """Return the full initial tensors of the network in fp64.

    The values have NeMo's initial distribution for `tpmlp`, and PyTorch's for the other methods.
    """
    kind = ENCODER_KINDS[method_config.method]
    hidden = encoder_hidden_size(method_config, width)
    tensor_shapes = _network_shapes(method_config, width)
    network = {}
    for name, shape in tensor_shapes.items():
        rng = seeded_generator(seed, NETWORK_PREFIX + name)
        if kind == "split":
            deviation = 0.0 if name.endswith("bias") else SPLIT_INIT_STD
            network[name] = torch.randn(shape, generator=rng, dtype=torch.float64) * deviation
            continue
        # PyTorch draws uniformly from -1 / sqrt(n) to 1 / sqrt(n), where n is the number of inputs
        # of a linear layer, or the hidden size of an LSTM.
        module = name.rpartition(".")[0]
        fan_in = hidden if module == "lstm_head" else tensor_shapes[f"{module}.weight"][1]
        uniform_draws = torch.rand(shape, generator=rng, dtype=torch.float64)
        network[name] = (uniform_draws * 2 - 1) / math.sqrt(fan_in)
    return network


def _fit_last_linear(network: dict[str, Tensor], rows: Sequence[Tensor], targets: Tensor) -> None:
    """Set the last linear layer to the least-squares map from its inputs to `targets`.

    `rows` are the input rows of each task; `targets` are the rows that the network must produce.
    """
    linear_name = output_linear(network)
    inputs = torch.cat([encoder_features(task_rows, network) for task_rows in rows])
    # Without rtol, the directions in which the inputs hardly differ would get huge weights.
    weight = torch.linalg.pinv(inputs, rtol=FIT_RTOL) @ targets
    network[f"{linear_name}.weight"] = weight.T.contiguous()
    network[f"{linear_name}.bias"] = torch.zeros_like(network[f"{linear_name}.bias"])


def encoder_tensors(encoder: PromptEncoder) -> dict[str, Tensor]:
    """Return the encoder's full parameters, with the input rows, on the CPU.

    All tensor-parallel ranks must call this function.
    """
    return {
        name: encoder.gather(name, value.detach()).cpu()
        for name, value in encoder.named_parameters()
    }


@torch.no_grad()
def load_encoder(encoder: PromptEncoder, tensors: Mapping[str, Tensor], source: object) -> None:
    """Load the network from the `encoder_tensors` of an earlier run.

    The input rows keep their initial values, because the saved rows belong to other tasks. `source`
    names the earlier run in error messages.
    """
    parameters = {name: value for name, value in encoder.named_parameters() if name != ROWS_NAME}
    full_shapes = {
        name: encoder.gather(name, value.detach()).shape for name, value in parameters.items()
    }
    _check_shapes(_tensor_shapes(tensors), full_shapes, source)
    for name, value in parameters.items():
        value.copy_(encoder.shard(name, tensors[name]))


def _tensor_shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the network's tensors, without the input rows."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name != ROWS_NAME}


def _check_shapes(
    saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: object
) -> None:
    for name in {**expected, **saved}:
        if saved.get(name) != expected.get(name):
            raise ConfigError(
                f"encoder_from: {source} has {_describe_shape(name, saved)}, "
                f"but this run's encoder has {_describe_shape(name, expected)}; set the same "
                "model, method, encoder_hidden and encoder_layers as in the earlier run"
            )


def _describe_shape(name: str, tensor_shapes: Mapping[str, tuple[int, ...]]) -> str:
    return f"{name} of {tuple(tensor_shapes[name])}" if name in tensor_shapes else f"no {name}"


def read_encoder(run_folder: Path) -> dict[str, SafetensorsTensor]:
    """Open the encoder file of a finished run.

    If `run_folder` contains the folders of several runs, open the encoder of the latest run that
    has one.
    """
    run_folders = [
        path
        for path in run_folder.glob("*")
        if path.name.isdecimal() and (path / ENCODER_FILE).is_file()
    ]
    if not (run_folder / ENCODER_FILE).is_file() and run_folders:
        run_folder = max(run_folders, key=lambda path: int(path.name))
    try:
        return open_safetensors(run_folder / ENCODER_FILE)
    except CheckpointError as error:
        raise ConfigError(
            f"encoder_from: {error}; set encoder_from to the directory of a finished run whose "
            "method has an encoder"
        ) from None
