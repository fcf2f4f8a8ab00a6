"""Run preparation: checks the settings, opens the checkpoint and renders the records.

Preparation raises the errors that can be detected before the weights are loaded. Of the checkpoint,
only the headers are read; all records are read and rendered. The module writes nothing to the
terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt.adapters.adapter_file import Card, check_publish_directory, parse_name, table_width
from gpt.adapters.card import GOLDEN_EXAMPLES_MAX, INVOCATION_TOKENS_MAX, TABLE_BYTES_MAX
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.formats.overrides import open_with_overrides, read_overrides
from gpt.model.loading import parse_device
from gpt.parallel.weight_sharding import check_split
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from ptuning.config import DataConfig, MethodConfig, OutputConfig, TuneConfig, ValidationConfig
from ptuning.data.dataset import Example, TaskData, read_tasks
from ptuning.data.records import ProgressCallback
from ptuning.linears.layout import LinearsLayout
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
    def group_examples(self) -> list[list[Example]]:
        """Training examples of each task group, task after task."""
        return [
            [example for task in group for example in self.tasks[task].examples.examples]
            for group in self.config.task_groups
        ]

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
    model_config, method_config = config.model_config, config.method_config
    resolved_tasks = config.data_config.resolved_tasks
    for task in resolved_tasks:
        _check_name(task.name, method_config)
    parse_device(model_config.device)
    if model_config.dtype not in (None, *FLOAT_DTYPES):
        raise ConfigError(
            f"dtype is {model_config.dtype!r}; choose one of: {', '.join(FLOAT_DTYPES)}"
        )
    overrides = read_overrides(model_config.config_json, model_config.true_vocab_size)
    checkpoint = open_with_overrides(model_config.model, overrides, model_config.tokenizer)
    gpt_config = checkpoint.config
    tokenizer: Tokenizer = NullTokenizer(gpt_config.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, gpt_config.vocab_size, checkpoint.tokenizer)
    _check_split(config, gpt_config)
    if method_config.changes_linears:
        LinearsLayout.create(config.task_method_configs, gpt_config)
    if method_config.has_virtual_tokens:
        tp = config.parallel_config.tp
        check_encoder(method_config, resolved_tasks, gpt_config.hidden_size, tp=tp)
        _check_virtual_tokens(config.data_config, method_config, gpt_config)
    cards = [
        Card(task.name or "model", task.task, stop=task.stop, max_new_tokens=task.max_new_tokens)
        for task in resolved_tasks
    ]
    tasks = read_tasks(config.data_config, method_config, tokenizer, gpt_config, progress)
    seed = config.training_config.seed
    initial_token_ids = [
        initial_ids(task, method_config, tokenizer, seed=seed)
        if method_config.has_virtual_tokens
        else []
        for task in tasks
    ]
    for task_data in tasks:
        _check_invocation(task_data, gpt_config)
    _check_validation(config.validation_config, config.output_config, tasks)
    try:
        # This check runs before training, so that a run does not fail after hours of training. It
        # is the last check, because it creates the directory.
        check_publish_directory(Path(config.output_config.output))
    except AdapterError as error:
        raise ConfigError(f"output: {error}") from None
    return PreparedRun(config, checkpoint, tokenizer, tasks, initial_token_ids, cards)


def _check_split(config: TuneConfig, gpt_config: GPTConfig) -> None:
    parallel, training = config.parallel_config, config.training_config
    check_split(gpt_config, parallel.tp, parallel.pp)
    if parallel.pp * parallel.virtual_stages > gpt_config.num_layers:
        raise ConfigError(
            f"pp {parallel.pp} x virtual_stages {parallel.virtual_stages} is more than the model's "
            f"{gpt_config.num_layers} layers; reduce pp or virtual_stages: each chunk needs at "
            "least one layer"
        )
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        raise ConfigError(
            f"virtual_stages is {parallel.virtual_stages}, but pp is 1; set virtual_stages to 1, "
            "or pp to 2 or more"
        )
    if training.batch_examples < parallel.dp:
        raise ConfigError(
            f"batch_examples is {training.batch_examples}, but {parallel.dp} data-parallel ranks "
            f"share a batch; set batch_examples to at least {parallel.dp}"
        )
    dropout = training.hidden_dropout or training.attention_dropout
    if dropout and config.method_config.method != "full":
        raise ConfigError(
            "hidden_dropout and attention_dropout have an effect only with method: full, because a "
            "frozen model runs without dropout; remove them"
        )


def _check_invocation(task: TaskData, gpt_config: GPTConfig) -> None:
    """Raise ConfigError if a server would refuse the invocation."""
    if len(task.invocation) > INVOCATION_TOKENS_MAX:
        raise ConfigError(
            f"the invocation has {len(task.invocation)} tokens; the maximum is "
            f"{INVOCATION_TOKENS_MAX}: give a shorter one"
        )
    invalid_id = next(
        (token for token in task.invocation if not 0 <= token < gpt_config.vocab_size), None
    )
    if invalid_id is not None:
        raise ConfigError(
            f"invocation_ids has {invalid_id}, outside the vocabulary of {gpt_config.vocab_size}; "
            "give the ids of tokens"
        )


def _check_virtual_tokens(
    data_config: DataConfig, method_config: MethodConfig, gpt_config: GPTConfig
) -> None:
    """Raise ConfigError if a task has more virtual tokens than a server accepts."""
    width = table_width(method_config.adapter_kind, gpt_config)
    rows_max = min(gpt_config.max_position_embeddings // 2, TABLE_BYTES_MAX // (4 * width))
    for task in data_config.resolved_tasks:
        if task.virtual_tokens > rows_max:
            raise ConfigError(
                f"virtual_tokens is {task.virtual_tokens}; the maximum for this model is "
                f"{rows_max}, the smaller of two limits: half of the context of "
                f"{gpt_config.max_position_embeddings} tokens, and the number of rows in a "
                "table of 1 GiB; reduce virtual_tokens"
            )


def _check_validation(
    validation_config: ValidationConfig, output_config: OutputConfig, tasks: Sequence[TaskData]
) -> None:
    """Raise ConfigError if a setting needs validation records and the run has none.

    Also raise ConfigError if `golden_examples` is too large.
    """
    golden_examples = output_config.golden_examples
    if golden_examples > GOLDEN_EXAMPLES_MAX:
        raise ConfigError(
            f"golden_examples is {golden_examples}; set at most {GOLDEN_EXAMPLES_MAX}, the limit "
            "of an adapter's card"
        )
    if any(task.validation is not None for task in tasks):
        return
    # The allowed values need no validation records.
    for name, setting, allowed in (
        ("measure", validation_config.measure, ("none", "sample", "first")),
        ("monitor", validation_config.monitor, ("loss",)),
        ("patience", validation_config.patience, (None, 0)),
        ("validate_every", validation_config.validate_every, (None, 0)),
        ("golden_examples", golden_examples, (0,)),
    ):
        if setting not in allowed:
            raise ConfigError(
                f"{name} is {setting}, but there are no validation records; set `validation` to a "
                "file of records"
            )


def _check_name(adapter_name: str, method_config: MethodConfig) -> None:
    if method_config.method == "full" and not adapter_name:
        return
    try:
        name = parse_name(adapter_name)
    except RequestError as error:
        raise ConfigError(f"name: {error}") from None
    if name.version is not None:
        raise ConfigError(
            f"name is {adapter_name!r}; remove the version: each run writes the next version"
        )
