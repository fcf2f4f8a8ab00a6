"""PEFT config of LoRA and IA3: the targets, the kind, the ranks and scales.

A field that changes the computation is honoured, or refused by name. A field that this release does
not know is refused too, unless it is null, false or empty.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.adapters.card import INTEGER_MAX, INVOCATION_TOKENS_MAX
from gpt.adapters.linear_check import LINEARS_MAX, RANK_MAX, SCALE_MAX, is_scale
from gpt.adapters.module_pattern import Budget, ModulePattern, PatternList, path_ends
from gpt.errors import AdapterError
from gpt.settings import short_repr

LORA, IA3 = "LORA", "IA3"
LINEAR_PEFT_TYPES = (LORA, IA3)

# Fields without an effect on a saved adapter. `fan_in_fan_out` describes only the base weight.
_IGNORED_FIELDS = {
    "peft_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "fan_in_fan_out",
    "lora_dropout",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
    "init_ia3_weights",
}
_TARGET_FIELDS = {"target_modules", "exclude_modules"}
_LORA_FIELDS = {
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "alora_invocation_tokens",
    "init_lora_weights",
    "target_parameters",
}
_READ_FIELDS = {
    LORA: _TARGET_FIELDS | _LORA_FIELDS | {"task_type", "bias"},
    IA3: _TARGET_FIELDS | {"feedforward_modules", "task_type", "bias"},
}
_REFUSED_FIELDS = {
    "modules_to_save": "train the adapter without modules_to_save",
    "trainable_token_indices": "train the adapter without trainable tokens",
    "lora_bias": "train the adapter with lora_bias=False",
    "layer_replication": "train the adapter on the model with its own layers",
    "use_qalora": "train the adapter with use_qalora=False",
    "use_bdlora": "train the adapter without BD-LoRA",
    "kasa_config": "train the adapter without KaSA",
    "arrow_config": "give one of the adapters that Arrow combines",
    "velora_config": "train the adapter without VeLoRA",
    "monteclora_config": "train the adapter without MonteCLoRA",
}
# With these, the file holds W + s B A of the weight W that the training began with. With the
# others, the training also changed the base weight.
_PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica", "true", "false")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraScale:
    """The rank and the factor of the low-rank product of a module, as the config states them."""

    rank: int
    scale: float


class PeftLinearConfig:
    """The checked config of a LoRA or IA3 adapter."""

    def __init__(self, record: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.is_ia3 = record["peft_type"] == IA3
        self._record = record
        self._budget = Budget()
        self._check_fields()
        self._parameters = self._read_parameters()
        self._targets: _ModuleNames | None = None
        # With target_parameters, there may be no target_modules.
        if record.get("target_modules") or not self._parameters:
            self._targets = self._read_names("target_modules")
            if self._targets is None:
                raise self._error("target_modules", "null", "a list of modules")
        self._excluded = self._read_names("exclude_modules")
        self._feedforward = self._read_names("feedforward_modules") if self.is_ia3 else None
        self._layers = self._read_layers()
        self._layer_names = self._read_layer_names()
        self.invocation = self._read_invocation()
        self.has_magnitudes = not self.is_ia3 and self._flag("use_dora")
        if self.invocation and self.has_magnitudes:
            raise AdapterError(
                f"{path} has use_dora and alora_invocation_tokens, which cannot be combined; train "
                "the adapter with one of them"
            )
        if self._parameters and (self.invocation or self.has_magnitudes):
            raise AdapterError(
                f"{path} has target_parameters {self.target_parameters_text} and use_dora or "
                "alora_invocation_tokens, which PEFT does not apply to parameters; train the "
                "adapter with one of them"
            )
        if not self.is_ia3:
            self._read_scales()

    @property
    def has_target_parameters(self) -> bool:
        return bool(self._parameters)

    @property
    def has_target_modules(self) -> bool:
        return self._targets is not None

    @property
    def target_parameters_text(self) -> str:
        return short_repr(self._record["target_parameters"])

    def targets_parameter(self, path: str) -> bool:
        """Tell whether the config targets the parameter with this path."""
        return any(end in self._parameters for end in path_ends(path))

    @property
    def method(self) -> str:
        if self.is_ia3:
            return "ia3"
        return "alora" if self.invocation else "dora" if self.has_magnitudes else "lora"

    def targets(self, path: str) -> bool:
        """Tell whether the config targets the module with this path."""
        if self._excluded is not None and self._excluded.match(path):
            return False
        return self._targets is not None and self._targets.match(path) and self._has_layer(path)

    def is_feedforward(self, path: str) -> bool:
        """Tell whether the IA3 vector of a module scales its input instead of its output."""
        names = self._feedforward
        if names is None:
            return False
        # As in PEFT, the end of a path needs no dot before it.
        return names.match(path) or path.endswith(tuple(names.names))

    def scale(self, path: str) -> LoraScale:
        """Return the rank and scale of a module's low-rank product."""
        rank_key = self._rank_patterns.first_match(path)
        alpha_key = self._alpha_patterns.first_match(path)
        rank = self._rank if rank_key is None else self._ranks[rank_key]
        alpha = self._alpha if alpha_key is None else self._alphas[alpha_key]
        return LoraScale(rank, alpha / (math.sqrt(rank) if self._flag("use_rslora") else rank))

    def _check_fields(self) -> None:
        record, peft_type = self._record, self._record["peft_type"]
        self._check_task_type()
        if record.get("bias", "none") not in ("none", None):
            raise AdapterError(
                f"{self.path} has bias {short_repr(record['bias'])}, so it also replaces biases of "
                "the model; train the adapter with bias none"
            )
        for field, value in record.items():
            if not value or field in _IGNORED_FIELDS | _READ_FIELDS[peft_type]:
                continue
            cure = _REFUSED_FIELDS.get(field)
            if cure is None:
                raise AdapterError(
                    f"{self.path} has the field {short_repr(field)} with the value "
                    f"{short_repr(value)}, which this release does not know; save the adapter "
                    "without it, or use a newer release"
                )
            raise AdapterError(
                f"{self.path} has {field} {short_repr(value)}, which is not supported; {cure}, or "
                "merge it into the model"
            )
        if peft_type == LORA:
            self._check_init()

    def _check_task_type(self) -> None:
        task_type = self._record.get("task_type")
        if task_type not in (None, "CAUSAL_LM"):
            raise AdapterError(
                f"{self.path} has task_type {short_repr(task_type)}; only CAUSAL_LM is supported: "
                "train the adapter for CAUSAL_LM"
            )
        if task_type is None and self._record.get("alora_invocation_tokens"):
            raise AdapterError(
                f"{self.path} has alora_invocation_tokens but no task_type, so PEFT would not "
                "activate the adapter; set task_type to CAUSAL_LM"
            )

    def _check_init(self) -> None:
        init = self._record.get("init_lora_weights")
        name = "true" if init is None else str(init).lower()
        if name.startswith(_BASE_CHANGING_INITS):
            raise AdapterError(
                f"{self.path} has init_lora_weights {short_repr(init)}: the training also changed "
                "the base weights, so the file is no change of its base model; save the adapter "
                "with path_initial_model_for_weight_conversion, which converts it to LoRA, or "
                "train with init_lora_weights=True"
            )
        if name not in _PLAIN_INITS:
            raise self._error("init_lora_weights", init, f"one of {', '.join(_PLAIN_INITS)}")

    def _flag(self, field: str) -> bool:
        value = self._record.get(field)
        if not isinstance(value, bool | None):
            raise self._error(field, value, "true or false")
        return bool(value)

    def _read_names(self, field: str) -> "_ModuleNames | None":
        value = self._record.get(field)
        if value is None or (field != "target_modules" and not value):
            return None
        if isinstance(value, str):
            if value == "all-linear":
                return _ModuleNames(are_all=True)
            return _ModuleNames(pattern=self._pattern(field, value))
        is_list = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
        if not is_list or not 1 <= len(value) <= LINEARS_MAX:
            raise self._error(field, value, "a list of names or a regular expression")
        return _ModuleNames(frozenset(value))

    def _read_parameters(self) -> frozenset[str]:
        value = self._record.get("target_parameters")
        if self.is_ia3 or not value:
            return frozenset()
        is_list = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
        if not is_list or len(value) > LINEARS_MAX:
            raise self._error("target_parameters", value, "a list of names of parameters")
        return frozenset(value)

    def _pattern(self, field: str, text: str) -> ModulePattern:
        return ModulePattern(text, f"{self.path}: {field}", self._budget)

    def _pattern_list(self, field: str, keys: Iterable[str]) -> PatternList:
        return PatternList(keys, f"{self.path}: {field}", self._budget)

    def _read_layers(self) -> frozenset[int] | None:
        value = self._record.get("layers_to_transform")
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list) else [value]
        if not all(type(layer) is int and layer >= 0 for layer in layers):
            raise self._error("layers_to_transform", value, "a list of layer numbers")
        if isinstance(self._record.get("target_modules"), str):
            raise AdapterError(
                f"{self.path} has layers_to_transform beside a target_modules that is a regular "
                "expression; give a list of target_modules"
            )
        return frozenset(layers)

    def _read_layer_names(self) -> frozenset[str]:
        """Return the names of the lists of layers; empty: any name."""
        value = self._record.get("layers_pattern") or []
        names = [value] if isinstance(value, str) else value
        are_names = isinstance(names, list) and all(
            isinstance(name, str) and name.isidentifier() for name in names
        )
        if not are_names:
            raise self._error("layers_pattern", value, "the name of a list of layers, as layers")
        if names and self._layers is None:
            raise AdapterError(
                f"{self.path} has layers_pattern without layers_to_transform; save the adapter "
                "without layers_pattern"
            )
        return frozenset(names)

    def _has_layer(self, path: str) -> bool:
        if self._layers is None:
            return True
        segments = path.split(".")
        # Without names, the list must not be the first segment, as in PEFT.
        first = 1 if self._layer_names else 2
        for number, name in zip(segments[first:-1], segments[first - 1 :], strict=False):
            if number.isdecimal() and (not self._layer_names or name in self._layer_names):
                return int(number) in self._layers
        return False

    def _read_invocation(self) -> tuple[int, ...]:
        value = self._record.get("alora_invocation_tokens")
        if self.is_ia3 or value is None:
            return ()
        are_ids = isinstance(value, list) and all(
            type(token) is int and 0 <= token <= INTEGER_MAX for token in value
        )
        if not are_ids or not 1 <= len(value) <= INVOCATION_TOKENS_MAX:
            expected = f"a list of 1 to {INVOCATION_TOKENS_MAX} token ids"
            raise self._error("alora_invocation_tokens", value, expected)
        return tuple(value)

    def _read_scales(self) -> None:
        self._flag("use_rslora")
        self._rank = self._checked_rank("r", self._record.get("r", 8))
        self._alpha = self._checked_alpha("lora_alpha", self._record.get("lora_alpha", 8))
        self._ranks = {
            key: self._checked_rank(f"rank_pattern {short_repr(key)}", value)
            for key, value in self._mapping("rank_pattern").items()
        }
        self._alphas = {
            key: self._checked_alpha(f"alpha_pattern {short_repr(key)}", value)
            for key, value in self._mapping("alpha_pattern").items()
        }
        self._rank_patterns = self._pattern_list("rank_pattern", self._ranks)
        self._alpha_patterns = self._pattern_list("alpha_pattern", self._alphas)

    def _mapping(self, field: str) -> Mapping[str, Any]:
        value = self._record.get(field) or {}
        if not isinstance(value, dict):
            raise self._error(field, value, "a mapping")
        return value

    def _checked_rank(self, field: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= RANK_MAX:
            raise self._error(field, value, f"a rank from 1 to {RANK_MAX}")
        return value

    def _checked_alpha(self, field: str, value: object) -> float:
        if not is_scale(value):
            raise self._error(field, value, f"a number below {SCALE_MAX:g}")
        return value

    def _error(self, field: str, value: object, expected: str) -> AdapterError:
        return AdapterError(
            f"{self.path} has {field} {short_repr(value)}; it must be {expected}: save the adapter "
            "again"
        )


@dataclass(frozen=True)
class _ModuleNames:
    """The modules that a field selects: by name, by an expression, or all linears."""

    names: frozenset[str] = frozenset()
    pattern: ModulePattern | None = None
    are_all: bool = False

    def match(self, path: str) -> bool:
        if self.pattern is not None:
            return self.pattern.matches(path)
        return self.are_all or any(end in self.names for end in path_ends(path))
