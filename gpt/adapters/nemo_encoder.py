"""Rows that NeMo did not write down, made again by the encoder that was saved beside them.

NeMo keeps a table only where a validation came before the save; its encoder is there at any time,
each tensor rank having a part of a split one. Up to 1.16 it read the task's name as well, as the
model embeds it. What is not whole is refused. Knows no templates and no positions.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.adapters.import_peft import plain_table
from gpt.adapters.prompt_encoders import SPLITS, encode, kind_of, shapes_like
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.formats.mappings.nemo_yaml import Fields
from gpt.tokenizers.tokenizer import open_tokenizer

WORDS = "embedding.word_embeddings.weight"
NETWORK = re.compile(r"(?:mlp_head\.\d{1,3}|first|second)\.(?:weight|bias)|lstm_head\.\w+")


@dataclass(frozen=True)
class _Place:
    """Where one layout has an encoder."""

    rows: str  # The end of the name of what it reads.
    before: tuple[str, ...]  # What stands before the network's names.
    named: bool = False  # The task's name takes the place of the first rows.


INSIDE = _Place("ptuning_adapter.embedding.weight", ("ptuning_adapter.",))
PLACES = (
    _Place("prompt_encoder.embedding.weight", ("prompt_encoder.",), named=True),
    INSIDE,
    _Place("embeddings.weight", ("", "tpmlp.")),
)


@dataclass(frozen=True)
class SavedEncoder:
    """What may be in a file that has a prompt, or should have."""

    path: Path
    state: Mapping[str, Any]  # Of the first tensor rank.
    others: Callable[[], Iterable[Mapping[str, Any]]]  # Of the other ranks, in order.
    fields: Fields
    base: Checkpoint | None

    @property
    def inside(self) -> bool:
        """Whether there is one inside the model."""
        return _place(_flat(self.state)) is INSIDE

    @property
    def beside(self) -> bool:
        """Whether there is one of prompt learning, which knows its tasks."""
        return _place(_flat(self.state)) not in (None, INSIDE)

    @torch.no_grad()
    def rows(self, task: str) -> Tensor:
        """What a validation would have put into the table."""
        place = _place(_flat(self.state))
        if place is None:
            raise self._refusal("there is no encoder beside it to make it again")
        flat = [_flat(state) for state in (self.state, *self.others())]
        name, *more = (name for name in flat[0] if f".{name}".endswith(f".{place.rows}"))
        if more:
            raise self._refusal(f"there are several encoders, {name} and {more[0]}")
        rows = plain_table(flat[0][name], f"{self.path}: {name}")
        parts = [self._network(one, name.removesuffix(place.rows), place) for one in flat]
        if rows.ndim != 2:
            raise self._refusal(f"its encoder reads rows of the shape {tuple(rows.shape)}")
        if kind_of(parts[0]) is None:
            kind = self.fields.under("p_tuning").text("encoder_type")
            if place.named or kind != "embedding":
                raise self._refusal("its encoder is not whole")
            return rows
        network = self._joined(parts, rows)
        if place.named:
            rows = self._with_name(rows, task)
        return encode(rows, network)

    def _network(self, flat: Mapping[str, Any], root: str, place: _Place) -> dict[str, Tensor]:
        """One rank's part, by the names that `gpt.adapters.prompt_encoders` knows."""
        found = {}
        for before in place.before:
            for name, value in flat.items():
                inner = name.removeprefix(root + before)
                if name.startswith(root + before) and NETWORK.fullmatch(inner):
                    found[inner] = plain_table(value, f"{self.path}: {name}")
        return found

    def _joined(self, parts: Sequence[Mapping[str, Tensor]], rows: Tensor) -> dict[str, Tensor]:
        network, problem = dict(parts[0]), self._refusal("its encoder is not whole")
        if kind_of(network) == "split":
            ranks = self.fields.get("tensor_model_parallel_size", len(parts))
            if ranks != len(parts):
                raise self._refusal(
                    f"its encoder is in {ranks} parts, of which {len(parts)} lie here"
                )
            for name, dimension in SPLITS.items():
                if any(name not in part or part[name].ndim <= dimension for part in parts):
                    raise problem
                if any(part[name].shape != network[name].shape for part in parts):
                    raise problem
            for name, dimension in SPLITS.items():
                network[name] = torch.cat([part[name] for part in parts], dimension)
        try:
            wanted = shapes_like(network, rows)
        except LookupError:
            raise problem from None
        if wanted != {name: tuple(value.shape) for name, value in network.items()}:
            raise problem
        return network

    def _with_name(self, rows: Tensor, task: str) -> Tensor:
        base = self.base
        if base is None or base.tokenizer is None:
            raise self._refusal(
                "its encoder also read the task's name as the model embeds it, which takes the "
                "model that it was trained with, and its tokenizer: give it with --model"
            )
        ids = open_tokenizer(base.tokenizer).encode(task)[: len(rows)]
        words = base.tensors[WORDS]
        if rows.shape[1] != base.config.hidden_size:
            raise self._refusal(f"it is another model's: its rows have {rows.shape[1]} numbers")
        name = [words.corner(token, 1, rows.shape[1]).float() for token in ids]
        return torch.cat([*name, rows[len(ids) :]])

    def _refusal(self, why: str) -> AdapterError:
        return AdapterError(
            f"the prompt in {self.path} is all zeros, or not finite, as NeMo saves it where "
            f"training stopped before a validation, and {why}; take a save that followed one, or "
            "train some steps more"
        )


def _place(flat: Mapping[str, Any]) -> _Place | None:
    ends = [f".{name}" for name in flat]
    return next((p for p in PLACES if any(end.endswith(f".{p.rows}") for end in ends)), None)


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Names with their nests'; those below the second are nobody's here."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": one for inner, one in value.items()}
        else:
            found[str(key)] = value
    return found
