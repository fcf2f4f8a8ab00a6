"""A tuning run's settings and a plan: what `tune` reads tells the job, and takes the split back.

Only what says how the run is spread over ranks is changed; all else stays as it was written, so
what is planned is what runs. What `tune` would refuse is refused here, in its own words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.settings import read_yaml
from planning.training.estimate import TrainingJob, TrainingSplit
from ptuning.config import TuneConfig


@dataclass(frozen=True)
class Tuning:
    """A settings file of `preamble tune`, and the model that it names."""

    path: str
    record: Mapping[str, Any]
    config: TuneConfig
    model: GPTConfig

    @classmethod
    def read(cls, path: str) -> "Tuning":
        record = read_yaml(Path(path))
        config = TuneConfig.of(record, path)
        from gpt.formats.overrides import open_overridden, read_overrides

        changes = read_overrides(config.config_json, config.true_vocab_size)
        checkpoint = open_overridden(config.model, changes, config.tokenizer)
        return cls(path, record, config, checkpoint.config)

    @property
    def gpus(self) -> int:
        """As many ranks as the file asks for."""
        return self.config.tp * self.config.pp * self.config.dp

    @property
    def trainable(self) -> str:
        return "all" if self.config.method == "full" else "adapter"

    def job(self, sequence: int | None) -> TrainingJob:
        """Examples are counted as long as they may be, where nobody says how long they are."""
        context = self.model.max_position_embeddings
        longest = min(self.config.tokens_max or context, context)
        virtual = sum(task.virtual_tokens for task in self.config.wanted)
        return TrainingJob(
            self.model,
            sequence or longest,
            self.config.batch_examples,
            "all" if self.trainable == "all" else "adapter",
            0 if self.trainable == "all" else virtual,
            # Of 16 bits each; fp32 is for CPUs, and is planned for as if it were 16.
            self.config.dtype if self.config.dtype in ("bfloat16", "float16") else "bfloat16",
            flash=True,  # No probabilities are kept.
            distributed_optimizer=False,
        )

    def refusal(self, split: TrainingSplit) -> str:
        """Why `tune` would not take the split; empty: it would."""
        try:
            self.planned(split)
        except ConfigError as error:
            return str(error)
        if split.pp * split.vpp > self.model.num_layers:
            return f"{split.pp} x {split.vpp} pieces are more than {self.model.num_layers} layers"
        return ""

    def planned(self, split: TrainingSplit) -> TuneConfig:
        return replace(self.config, **_settings(split))

    def yaml(self, split: TrainingSplit, notes: Sequence[str]) -> str:
        """The same file, with the split; predictions stand in comments."""
        known = {one.name: one.default for one in fields(TuneConfig)}
        changed = {
            name: value
            for name, value in _settings(split).items()
            if name in self.record or value != known[name]
        }
        record = {**self.record, **changed}
        if record.get("micro_batch_tokens") is None:
            record.pop("micro_batch_tokens", None)
        head = "".join(f"# {line}\n" for line in notes)
        return head + yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=100)


def _settings(split: TrainingSplit) -> dict[str, Any]:
    """A split, by the names that `tune` has for its parts."""
    layers = split.recompute_layers // split.vpp if split.recompute == "block" else 1
    return {
        "tp": split.tp,
        "pp": split.pp,
        "dp": split.dp,
        "virtual_stages": split.vpp,
        "sequence_parallel": split.sequence_parallel,
        "recompute": split.recompute,
        "recompute_layers": max(1, layers),
        "micro_batch_examples": split.micro_batch,
        "micro_batch_tokens": None,
    }
