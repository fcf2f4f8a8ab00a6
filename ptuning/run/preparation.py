"""What a run starts from: everything that can go wrong before anything is computed.

Only headers of the checkpoint are read here; the records are read and rendered whole. Nothing here
talks to a terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.adapters.adapter_file import Card, check_folder, parse_name, table_width
from gpt.adapters.card import GOLDEN_MAX, TABLE_BYTES_MAX
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.dtypes import FLOATS
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.formats.overrides import open_overridden, read_overrides
from gpt.model.loading import device_of
from gpt.parallel.sharding import check_split
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example, TaskData, read_tasks
from ptuning.data.records import Reading
from ptuning.prompt.initialization import initial_ids
from ptuning.prompt.prompt_encoder import check_encoder
from ptuning.run.training_state import Origin


@dataclass(frozen=True)
class Prepared:
    """Everything that a run starts from, checked; no weight is loaded yet."""

    config: TuneConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    tasks: Sequence[TaskData]
    starts: Sequence[Sequence[int]]  # Of each task, the tokens whose rows it starts as, if any.
    cards: Sequence[Card]  # Each task's, but for what the base and the run will add.

    @property
    def examples(self) -> list[Example]:
        """All tasks', one after another."""
        return [example for task in self.tasks for example in task.examples.examples]

    def origin(self) -> Origin:
        """What a state of this run has come from."""
        files = [(task.examples, task.validation) for task in self.tasks]
        examples = [example for pair in files for one in pair if one for example in one.examples]
        return Origin.of(self.config, examples, identify(self.checkpoint).digest)


def prepare(config: TuneConfig, reading: Reading | None = None) -> Prepared:
    for task in config.wanted:
        _check_name(task.name, config)
    device_of(config.device)
    if config.dtype not in (None, *FLOATS):
        raise ConfigError(f"dtype is {config.dtype!r}; known are: {', '.join(FLOATS)}")
    changes = read_overrides(config.config_json, config.true_vocab_size)
    checkpoint = open_overridden(config.model, changes, config.tokenizer)
    sizes = checkpoint.config
    tokenizer: Tokenizer = NullTokenizer(sizes.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, sizes.vocab_size, checkpoint.tokenizer)
    _check_split(config, sizes)
    if config.method != "full":
        check_encoder(config, sizes.hidden_size)
        _check_rows(config, sizes)
    cards = [
        Card(task.name or "model", task.task, stop=task.stop, max_new_tokens=task.max_new_tokens)
        for task in config.wanted
    ]
    tasks = read_tasks(config, tokenizer, sizes, reading)
    starts = [initial_ids(task, config, tokenizer) for task in tasks]
    _check_measures(config, tasks)
    try:
        # Last, as it makes the directory. Hours of learning should not end where nobody can write.
        check_folder(Path(config.output))
    except AdapterError as error:
        raise ConfigError(f"output: {error}") from None
    return Prepared(config, checkpoint, tokenizer, tasks, starts, cards)


def _check_split(config: TuneConfig, sizes: GPTConfig) -> None:
    check_split(sizes, config.tp, config.pp)
    if config.pp * config.virtual_stages > sizes.num_layers:
        raise ConfigError(
            f"pp {config.pp} x virtual_stages {config.virtual_stages} is more than the model's "
            f"{sizes.num_layers} layers; each piece needs one"
        )
    if config.virtual_stages > 1 and config.pp == 1:
        raise ConfigError("virtual_stages is for a pipeline; set it to 1, or pp to more")
    if config.batch_examples < config.dp:
        raise ConfigError(
            f"batch_examples is {config.batch_examples}, and {config.dp} data-parallel ranks share "
            f"a batch; set it to {config.dp} at least"
        )
    drops = config.hidden_dropout or config.attention_dropout
    if drops and config.method != "full":
        raise ConfigError(
            "hidden_dropout and attention_dropout are for method: full; a frozen model has none: "
            "take them out"
        )


def _check_rows(config: TuneConfig, sizes: GPTConfig) -> None:
    """As many as a server will take, before any prompt is made of them."""
    width = table_width(config.kind, sizes)
    rows_max = min(sizes.max_position_embeddings // 2, TABLE_BYTES_MAX // (4 * width))
    for task in config.wanted:
        if task.virtual_tokens > rows_max:
            raise ConfigError(
                f"virtual_tokens is {task.virtual_tokens}; this model takes at most {rows_max}: "
                f"half its context of {sizes.max_position_embeddings}, and a table of 1 GiB"
            )


def _check_measures(config: TuneConfig, tasks: Sequence[TaskData]) -> None:
    """What is measured needs records to measure it with."""
    if config.golden_examples > GOLDEN_MAX:
        raise ConfigError(
            f"golden_examples is {config.golden_examples}; at most {GOLDEN_MAX} travel in a card"
        )
    measured = any(task.validation is not None for task in tasks)
    wishes = {
        "measure": config.measure != "loss",
        "patience": config.patience is not None,
        "validate_every": config.validate_every is not None,
        "golden_examples": config.golden_examples > 0,
    }
    for name, wished in wishes.items():
        if wished and not measured:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, and there are no records to measure with; "
                "name a file of some as `validation`"
            )


def _check_name(given: str, config: TuneConfig) -> None:
    if config.method == "full" and not given:
        return
    try:
        name = parse_name(given)
    except RequestError as error:
        raise ConfigError(f"name: {error}") from None
    if name.version is not None:
        raise ConfigError(
            f"name is {given!r}; leave the version out, as each run makes the next one"
        )
