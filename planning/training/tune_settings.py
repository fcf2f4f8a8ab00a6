"""Tuning settings: converts a `preamble tune` file to a training job, and a split to a new file.

The new file differs from the user's file only in the keys of the split, so `preamble tune` starts
the planned run. For settings that `preamble tune` rejects, this module raises the same error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpt.config import GPTConfig
from gpt.costs.linear_adapter import METHODS, LinearAdapterSpec
from gpt.errors import ConfigError
from gpt.settings import read_yaml, setting_fields
from planning.training.estimate import TrainingJob, TrainingSplit
from ptuning.config import TuneConfig


@dataclass(frozen=True)
class TuningSettings:
    """A settings file of `preamble tune`, and the config of its model."""

    path: str
    record: Mapping[str, Any]
    config: TuneConfig
    model: GPTConfig

    @classmethod
    def read(cls, path: str) -> "TuningSettings":
        record = read_yaml(Path(path))
        config = TuneConfig.from_dict(record, path)
        from gpt.formats.overrides import open_with_overrides, read_overrides

        model_config = config.model_config
        changes = read_overrides(model_config.config_json, model_config.true_vocab_size)
        checkpoint = open_with_overrides(model_config.model, changes, model_config.tokenizer)
        return cls(path, record, config, checkpoint.config)

    @property
    def gpus(self) -> int:
        """The number of ranks in the file: tp x pp x dp."""
        return self.config.parallel_config.ranks

    @property
    def batch_examples(self) -> int:
        """The number of examples of a step, of all tasks together."""
        return self.config.training_config.batch_examples * len(self.config.task_groups)

    @property
    def trainable(self) -> str:
        return "all" if self.config.method_config.method == "full" else "adapter"

    @property
    def linears(self) -> LinearAdapterSpec | None:
        """The adapter weights that each task trains; None: another method."""
        method_config, *others = set(self.config.task_method_configs)
        if others:
            raise ConfigError(
                f"{self.path}: the tasks have different method settings, and a plan has one method "
                "and rank; plan the largest task alone, with batch_examples times the number of "
                "tasks"
            )
        for method in METHODS:
            if method == method_config.method:
                return LinearAdapterSpec(
                    method, method_config.rank, method_config.targets, method_config.layers
                )
        return None

    def training_job(self, sequence: int | None, context_tokens: int = 0) -> TrainingJob:
        """Return the training job, in which each example has `sequence` tokens.

        If `sequence` is None, each example has the maximum length that the settings allow.
        `context_tokens` of its tokens are before the invocation of an activated LoRA.
        """
        data_config, dtype = self.config.data_config, self.config.model_config.dtype
        context = self.model.max_position_embeddings
        sequence_max = min(data_config.tokens_max or context, context)
        tasks = data_config.resolved_tasks
        virtual_tokens = 0
        if self.config.method_config.has_virtual_tokens:
            virtual_tokens = sum(task.virtual_tokens for task in tasks)
        return TrainingJob(
            self.model,
            sequence or sequence_max,
            self.batch_examples,
            "all" if self.trainable == "all" else "adapter",
            virtual_tokens,
            # Other dtypes, such as float32 for a CPU, are planned as if they were bfloat16.
            dtype if dtype in ("bfloat16", "float16") else "bfloat16",
            flash=True,  # Like flash attention, `preamble tune` stores no attention scores.
            distributed_optimizer=False,
            linears=self.linears,
            adapter_count=len(tasks),
            context_tokens=context_tokens,
        )

    def refusal_reason(self, split: TrainingSplit) -> str:
        """Return why `preamble tune` rejects the split; "": it accepts the split."""
        try:
            self.with_split(split)
        except ConfigError as error:
            return str(error)
        if split.pp * split.vpp > self.model.num_layers:
            return (
                f"{split.pp} stages x {split.vpp} chunks are more than the model's "
                f"{self.model.num_layers} layers"
            )
        return ""

    def with_split(self, split: TrainingSplit) -> TuneConfig:
        return self.config.with_fields(**_split_settings(split))

    def to_yaml(self, split: TrainingSplit, notes: Sequence[str]) -> str:
        """Return the settings file with this split, and with `notes` as comments at its top."""
        defaults = {name: field.default for name, field in setting_fields(TuneConfig).items()}
        changed = {
            name: value
            for name, value in _split_settings(split).items()
            if name in self.record or value != defaults[name]
        }
        record = {**self.record, **changed}
        # The split sets `micro_batch_examples`, so the user's `micro_batch_tokens` is removed.
        if record.get("micro_batch_tokens") is None:
            record.pop("micro_batch_tokens", None)
        head = "".join(f"# {line}\n" for line in notes)
        return head + yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=100)


def _split_settings(split: TrainingSplit) -> dict[str, Any]:
    """Return the split as settings of `preamble tune`."""
    # `preamble tune` counts the recomputed layers per model chunk, TrainingSplit per stage.
    chunk_layers = split.recompute_layers // split.vpp if split.recompute == "block" else 1
    return {
        "tp": split.tp,
        "pp": split.pp,
        "dp": split.dp,
        "virtual_stages": split.vpp,
        "sequence_parallel": split.sequence_parallel,
        "recompute": split.recompute,
        "recompute_layers": max(1, chunk_layers),
        "micro_batch_examples": split.micro_batch,
        "micro_batch_tokens": None,
    }
