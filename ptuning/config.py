"""TuneConfig: what to learn, from which examples, and how, with a unit and a default for each.

Built once from a YAML file. What the model is comes from its checkpoint, never from here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpt.errors import ConfigError
from gpt.settings import read_yaml, settings, shown

PLAIN = "<|VIRTUAL_PROMPT_0|>{prompt}{completion}"

POSITIVE = (
    *("virtual_tokens", "tokens_max", "max_new_tokens", "steps", "batch_examples"),
    *("learning_rate", "gradient_norm_max"),
)


@dataclass(frozen=True)
class TuneConfig:
    """What `preamble tune` needs to know. A relative path starts at the working directory."""

    model: str  # The checkpoint's path.
    data: str  # A jsonl file: one example on each line, as an object of texts.
    name: str  # The adapter's.
    output: str = "adapters"  # The directory for it, made if need be; a server's may be one.

    task: str = ""  # What it is for, in a few words.
    template: str = PLAIN  # Its fields are the examples' keys.
    answer_field: str = "completion"  # What is learned; it must end the template.
    truncate_field: str | None = None  # Is cut in what is too long; None: that is left out.
    tokens_max: int | None = None  # Of an example; None, or more than it: the model's context.
    stop: tuple[str, ...] = ()  # Texts that end an answer, beside the model's own end.
    max_new_tokens: int | None = None  # Of an answer, if a request does not say.

    virtual_tokens: int = 20
    splits: tuple[int, ...] = ()  # Of them, for each of the template's places; empty: it has one.
    initial_text: str = ""  # The table starts as its rows; empty: rows of random tokens.

    steps: int = 200
    batch_examples: int = 16  # Of one step; all of them, if they are fewer.
    learning_rate: float = 1e-2  # Good for a bare table; a model's own 1e-4 learns nothing here.
    warmup_steps: int = 20
    weight_decay: float = 0.0  # It would pull towards zero, not towards words.
    gradient_norm_max: float = 1.0
    seed: int = 0

    tokenizer: str | None = None  # A file or a directory; None: what lies beside the weights.
    true_vocab_size: int | None = None  # Where the checkpoint does not tell it from the padding.
    config_json: str | None = None  # Fields of the model that the checkpoint lacks or has wrong.
    device: str = "cpu"
    dtype: str | None = None  # What to compute in; None: as stored. The table is always fp32.

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            path = getattr(self, name)
            if not path or "\0" in path or path != path.encode(errors="replace").decode():
                raise ConfigError(f"{name} is {shown(path)}; it must be a path")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; it must be more than 0, and finite")
        for name in ("warmup_steps", "weight_decay", "seed"):
            value = getattr(self, name)
            if not 0 <= value < 2**63:
                way = "must not be negative" if value < 0 else "must be less than 2^63"
                raise ConfigError(f"{name} is {value}; it {way}")

        if self.splits and sum(self.splits) != self.virtual_tokens:
            raise ConfigError(
                f"splits are {list(self.splits)}, {sum(self.splits)} in all; "
                f"they must sum to virtual_tokens, {self.virtual_tokens}"
            )

    @classmethod
    def read(cls, path: str) -> Self:
        return settings(cls, read_yaml(Path(path)), path)
