"""NeMo prompt encoder: recomputes the virtual-token rows that a .nemo file does not contain.

NeMo stores a valid table of rows only if a validation ran before the save. A NeMo file can also
have the prompt encoder: a matrix of input rows, and the network that computes the table from these
rows. With tensor parallelism, each rank stores a shard of the network. Up to NeMo 1.16, embeddings
of the task's name replace the first input rows. An incomplete encoder is refused. `import_nemo`
handles templates and position embeddings.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.adapters.import_peft import checked_table
from gpt.adapters.prompt_encoder_networks import (
    SPLIT_DIMENSIONS,
    encoder_kind,
    expected_shapes,
    run_encoder,
)
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.formats.mappings.nemo_yaml import NemoConfig
from gpt.tokenizers.tokenizer import open_tokenizer

WORD_EMBEDDING_KEY = "embedding.word_embeddings.weight"
NETWORK_KEY = re.compile(r"(?:mlp_head\.\d{1,3}|first|second)\.(?:weight|bias)|lstm_head\.\w+")


@dataclass(frozen=True)
class _EncoderLayout:
    """The tensor names of the encoder in one of NeMo's file layouts."""

    input_suffix: str  # Name suffix of the tensor with the input rows.
    prefixes: tuple[str, ...]  # Name prefixes of the network's tensors.
    # Whether embeddings of the task's name replace the first input rows.
    uses_task_name: bool = False


MODEL_LAYOUT = _EncoderLayout("ptuning_adapter.embedding.weight", ("ptuning_adapter.",))
LAYOUTS = (
    _EncoderLayout("prompt_encoder.embedding.weight", ("prompt_encoder.",), uses_task_name=True),
    MODEL_LAYOUT,
    _EncoderLayout("embeddings.weight", ("", "tpmlp.")),
)


@dataclass(frozen=True)
class SavedEncoder:
    """Access to the prompt encoder in a NeMo file; not every file has a prompt encoder."""

    path: Path
    state: Mapping[str, Any]  # State dict of the first tensor parallel rank.
    # Reads the state dicts of the other tensor parallel ranks, in order.
    other_ranks: Callable[[], Iterable[Mapping[str, Any]]]
    fields: NemoConfig
    base: Checkpoint | None

    @property
    def is_in_model(self) -> bool:
        """Whether the encoder is in an adapter module of the model (NeMo 1.20 and newer)."""
        return _find_layout(_flatten_state_dict(self.state)) is MODEL_LAYOUT

    @property
    def is_per_task(self) -> bool:
        """Whether the encoder belongs to NeMo's prompt learning, in which tasks have names."""
        return _find_layout(_flatten_state_dict(self.state)) not in (None, MODEL_LAYOUT)

    @torch.no_grad()
    def compute_rows(self, task: str) -> Tensor:
        """Compute the table's rows, as NeMo's validation does before a save.

        Raises AdapterError if the file does not have a complete encoder.
        """
        layout = _find_layout(_flatten_state_dict(self.state))
        if layout is None:
            raise self._unusable_error("the file has no encoder to compute it")
        states = [_flatten_state_dict(state) for state in (self.state, *self.other_ranks())]
        name, *duplicates = (
            name for name in states[0] if f".{name}".endswith(f".{layout.input_suffix}")
        )
        if duplicates:
            raise self._unusable_error(f"the file has several encoders, {name} and {duplicates[0]}")
        rows = checked_table(states[0][name], f"{self.path}: {name}")
        shards = [
            self._read_shard(flat_state, name.removesuffix(layout.input_suffix), layout)
            for flat_state in states
        ]
        if rows.ndim != 2:
            raise self._unusable_error(
                f"the input of its encoder is not a matrix, but has the shape {tuple(rows.shape)}"
            )
        if encoder_kind(shards[0]) is None:
            encoder_type = self.fields.section("p_tuning").text("encoder_type")
            if layout.uses_task_name or encoder_type != "embedding":
                raise self._unusable_error("its encoder is incomplete")
            return rows
        weights = self._merge_shards(shards, rows)
        if layout.uses_task_name:
            rows = self._set_task_name_rows(rows, task)
        return run_encoder(rows, weights)

    def _read_shard(
        self, state: Mapping[str, Any], root: str, layout: _EncoderLayout
    ) -> dict[str, Tensor]:
        """Return one rank's tensors under the names of `gpt.adapters.prompt_encoder_networks`."""
        weights = {}
        for prefix in layout.prefixes:
            for name, value in state.items():
                network_key = name.removeprefix(root + prefix)
                if name.startswith(root + prefix) and NETWORK_KEY.fullmatch(network_key):
                    weights[network_key] = checked_table(value, f"{self.path}: {name}")
        return weights

    def _merge_shards(
        self, shards: Sequence[Mapping[str, Tensor]], rows: Tensor
    ) -> dict[str, Tensor]:
        """Return the unsharded network; refuse missing tensors and wrong shapes."""
        weights = dict(shards[0])
        error = self._unusable_error("its encoder is incomplete")
        if encoder_kind(weights) == "split":
            ranks = self.fields.get("tensor_model_parallel_size", len(shards))
            if ranks != len(shards):
                raise self._unusable_error(
                    f"its encoder has {ranks} shards, but the file has {len(shards)}"
                )
            for name, dimension in SPLIT_DIMENSIONS.items():
                if any(name not in shard or shard[name].ndim <= dimension for shard in shards):
                    raise error
                if any(shard[name].shape != weights[name].shape for shard in shards):
                    raise error
            for name, dimension in SPLIT_DIMENSIONS.items():
                weights[name] = torch.cat([shard[name] for shard in shards], dimension)
        try:
            required_shapes = expected_shapes(weights, rows)
        except LookupError:
            raise error from None
        if required_shapes != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
            raise error
        return weights

    def _set_task_name_rows(self, rows: Tensor, task: str) -> Tensor:
        """Return the rows with the embeddings of the task's name in place of the first rows."""
        base = self.base
        if base is None or base.tokenizer is None:
            raise self._unusable_error(
                "its encoder also uses embeddings of the task's name, which need the base model "
                "and its tokenizer (give the model with --model)"
            )
        ids = open_tokenizer(base.tokenizer).encode(task)[: len(rows)]
        word_embeddings = base.tensors[WORD_EMBEDDING_KEY]
        if rows.shape[1] != base.config.hidden_size:
            raise self._unusable_error(
                f"the encoder's rows have width {rows.shape[1]}, but the base model has "
                f"hidden_size {base.config.hidden_size}"
            )
        name_rows = [word_embeddings.read_sample(token, 1, rows.shape[1]).float() for token in ids]
        return torch.cat([*name_rows, rows[len(ids) :]])

    def _unusable_error(self, reason: str) -> AdapterError:
        return AdapterError(
            f"the prompt in {self.path} is missing, all zeros or not finite, probably because "
            f"training stopped before a validation, and {reason}; give a file that NeMo saved "
            "after a validation, or train longer"
        )


def _find_layout(state: Mapping[str, Any]) -> _EncoderLayout | None:
    dotted_names = [f".{name}" for name in state]
    return next(
        (
            layout
            for layout in LAYOUTS
            if any(dotted_name.endswith(f".{layout.input_suffix}") for dotted_name in dotted_names)
        ),
        None,
    )


def _flatten_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Join the names of two levels of nested dicts; deeper levels have no encoder tensors."""
    flat_state: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            flat_state |= {f"{key}.{nested_key}": tensor for nested_key, tensor in value.items()}
        else:
            flat_state[str(key)] = value
    return flat_state
