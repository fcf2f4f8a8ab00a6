"""Run preparation: checks settings, opens the checkpoint's headers and renders the records.

Preparation raises the errors that can be detected before the weights are loaded. It reads the
headers of the checkpoint, but no weights; it reads and renders all records. The module writes
nothing to the terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.adapters.adapter_file import Card, check_publish_directory, parse_name, table_width
from gpt.adapters.card import GOLDEN_EXAMPLES_MAX, TABLE_BYTES_MAX
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.formats.overrides import open_with_overrides, read_overrides
from gpt.model.loading import parse_device
from gpt.parallel.weight_sharding import check_split
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example, TaskData, read_tasks
from ptuning.data.records import ProgressCallback
from ptuning.prompt.initialization import initial_ids
from ptuning.prompt.prompt_encoder import check_encoder
from ptuning.run.training_state import RunFingerprint


@dataclass(frozen=True)
class PreparedRun:
    """Checked inputs of a run; no weights are loaded yet."""

    config: TuneConfig
    checkpoint: Checkpoint  # Opened, but only its headers are read.
    tokenizer: Tokenizer
    tasks: Sequence[TaskData]
    # For each task, the tokens whose embeddings are its initial rows; see `initial_ids`.
    initial_token_ids: Sequence[Sequence[int]]
    # One card per task, still without the base model, template, method and metrics.
    cards: Sequence[Card]

    @property
    def examples(self) -> list[Example]:
        """Training examples of all tasks, task after task."""
        return [example for task in self.tasks for example in task.examples.examples]

    def fingerprint(self) -> RunFingerprint:
        """Return the fingerprint that is stored in the states of this run.

        This reads all weights, unless the digest of the base model is recorded or cached.
        """
        example_sets = [(task.examples, task.validation) for task in self.tasks]
        examples = [
            example
            for pair in example_sets
            for example_set in pair
            if example_set
            for example in example_set.examples
        ]
        return RunFingerprint.compute(self.config, examples, identify(self.checkpoint).digest)


def prepare(config: TuneConfig, progress: ProgressCallback | None = None) -> PreparedRun:
    """Check the settings and read the records; `progress` is called while records are read."""
    for task in config.resolved_tasks:
        _check_name(task.name, config)
    parse_device(config.device)
    if config.dtype not in (None, *FLOAT_DTYPES):
        raise ConfigError(f"dtype is {config.dtype!r}; choose one of: {', '.join(FLOAT_DTYPES)}")
    overrides = read_overrides(config.config_json, config.true_vocab_size)
    checkpoint = open_with_overrides(config.model, overrides, config.tokenizer)
    model_config = checkpoint.config
    tokenizer: Tokenizer = NullTokenizer(model_config.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, model_config.vocab_size, checkpoint.tokenizer)
    _check_split(config, model_config)
    if config.method != "full":
        check_encoder(config, model_config.hidden_size)
        _check_virtual_tokens(config, model_config)
    cards = [
        Card(task.name or "model", task.task, stop=task.stop, max_new_tokens=task.max_new_tokens)
        for task in config.resolved_tasks
    ]
    tasks = read_tasks(config, tokenizer, model_config, progress)
    initial_token_ids = [initial_ids(task, config, tokenizer) for task in tasks]
    _check_validation(config, tasks)
    try:
        # This check runs before training, so that a run does not fail after hours of training. It
        # is the last check, because it creates the directory.
        check_publish_directory(Path(config.output))
    except AdapterError as error:
        raise ConfigError(f"output: {error}") from None
    return PreparedRun(config, checkpoint, tokenizer, tasks, initial_token_ids, cards)


def _check_split(config: TuneConfig, model_config: GPTConfig) -> None:
    check_split(model_config, config.tp, config.pp)
    if config.pp * config.virtual_stages > model_config.num_layers:
        raise ConfigError(
            f"pp {config.pp} x virtual_stages {config.virtual_stages} is more than the model's "
            f"{model_config.num_layers} layers; reduce pp or virtual_stages: each chunk needs at "
            "least one layer"
        )
    if config.virtual_stages > 1 and config.pp == 1:
        raise ConfigError(
            f"virtual_stages is {config.virtual_stages}, but pp is 1; set virtual_stages to 1, or "
            "pp to 2 or more"
        )
    if config.batch_examples < config.dp:
        raise ConfigError(
            f"batch_examples is {config.batch_examples}, but {config.dp} data-parallel ranks share "
            f"a batch; set batch_examples to at least {config.dp}"
        )
    dropout = config.hidden_dropout or config.attention_dropout
    if dropout and config.method != "full":
        raise ConfigError(
            "hidden_dropout and attention_dropout have an effect only with method: full; a frozen "
            "model runs without dropout; remove them"
        )


def _check_virtual_tokens(config: TuneConfig, model_config: GPTConfig) -> None:
    """Raise ConfigError if a task has more virtual tokens than a server accepts."""
    width = table_width(config.adapter_kind, model_config)
    rows_max = min(model_config.max_position_embeddings // 2, TABLE_BYTES_MAX // (4 * width))
    for task in config.resolved_tasks:
        if task.virtual_tokens > rows_max:
            raise ConfigError(
                f"virtual_tokens is {task.virtual_tokens}; the maximum for this model is "
                f"{rows_max}, the smaller of half its context "
                f"({model_config.max_position_embeddings} tokens) and the number of rows in a "
                "table of 1 GiB; reduce virtual_tokens"
            )


def _check_validation(config: TuneConfig, tasks: Sequence[TaskData]) -> None:
    """Raise ConfigError for settings of the validation that cannot work.

    `golden_examples` may be too large, or a setting that needs validation records may be set
    without any.
    """
    if config.golden_examples > GOLDEN_EXAMPLES_MAX:
        raise ConfigError(
            f"golden_examples is {config.golden_examples}; set at most {GOLDEN_EXAMPLES_MAX}, the "
            "limit of an adapter's card"
        )
    has_validation = any(task.validation is not None for task in tasks)
    validation_settings = {
        "measure": config.measure != "loss",
        "patience": config.patience is not None,
        "validate_every": config.validate_every is not None,
        "golden_examples": config.golden_examples > 0,
    }
    for name, is_set in validation_settings.items():
        if is_set and not has_validation:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, but there are no validation records; set "
                "`validation` to a file of records"
            )


def _check_name(adapter_name: str, config: TuneConfig) -> None:
    if config.method == "full" and not adapter_name:
        return
    try:
        name = parse_name(adapter_name)
    except RequestError as error:
        raise ConfigError(f"name: {error}") from None
    if name.version is not None:
        raise ConfigError(
            f"name is {adapter_name!r}; remove the version: each run writes the next version"
        )
