"""Preflight check: examples, token counts and memory of a run, for `preamble tune --check`.

The counts come from the rendered examples and from the batches of the run's first steps. A probable
mistake in the data or settings is reported as a warning. The check reads the model's sizes, but no
weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.activation_memory import layer_activation_bytes, layers_in_flight
from gpt.costs.training import (
    RecomputeMode,
    TrainingSetup,
    stage_parameters,
    state_bytes,
)
from gpt.tokenizers.tokenizer import Tokenizer
from ptuning.config import TuneConfig
from ptuning.data.batch_order import BatchOrders
from ptuning.data.dataset import Example, ExampleSet, TaskData
from ptuning.data.micro_batch import MicroBatch, build_micro_batch, split_into_micro_batches

EXAMPLES_SHOWN = 3  # Number of examples per task, and of drop reasons per file, in the output.
STEPS_SAMPLED = 8  # Number of steps whose batches are built to count their tokens.
# A warning is given if (answers longer than max_new_tokens) / (all answers) exceeds this limit.
LONG_ANSWERS_SHARE_MAX = 0.01


@dataclass(frozen=True)
class LengthQuantiles:
    """Quantiles of lengths in tokens. The field names are keys of the JSON output."""

    least: int  # Minimum.
    half: int  # Median.
    nine_of_ten: int  # 90th percentile.
    all_but_one_percent: int  # 99th percentile.
    most: int  # Maximum.

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "LengthQuantiles":
        ordered = sorted(lengths)
        last_index = len(ordered) - 1
        return cls(*(ordered[last_index * percent // 100] for percent in (0, 50, 90, 99, 100)))

    def __str__(self) -> str:
        return (
            f"{self.least:,} to {self.most:,}, 50% up to {self.half:,}, 90% up to "
            f"{self.nine_of_ten:,}, 99% up to {self.all_but_one_percent:,}"
        )


@dataclass(frozen=True)
class FileStats:
    """Counts of one task's records in one file."""

    file: str  # Path of the file.
    examples: int  # Number of examples, without dropped records.
    cut: int  # Number of truncated examples.
    left_out: int  # Number of dropped records.
    reasons: tuple[str, ...]  # The reasons for the first EXAMPLES_SHOWN dropped records.
    prompt_tokens: LengthQuantiles  # Lengths of the prompts, including virtual tokens.
    answer_tokens: LengthQuantiles  # Lengths of the answers, including the end-of-text token.
    empty_answers: int  # Number of examples whose answer is empty.
    repeated: int  # Number of examples that equal an earlier example of the file.


@dataclass(frozen=True)
class TaskStats:
    """Counts of one task."""

    name: str
    virtual_tokens: int  # Number of virtual tokens of an example.
    virtual_share: float  # (Virtual tokens) / (all tokens), over all training examples.
    tokens_max: int  # Length limit of an example.
    learning: FileStats  # Counts of the training records.
    validation: FileStats | None  # Counts of the validation records; None: there are none.
    known_prompts: int  # Number of validation prompts that also occur in the training records.


@dataclass(frozen=True)
class StepStats:
    """Counts of a training step over all data-parallel ranks, from the sampled steps."""

    examples: int  # Number of examples.
    passes: float  # Mean number of micro-batches; a pass is the computation of one micro-batch.
    tokens: float  # Mean number of tokens that the model computes.
    tokens_of_pass_max: int  # Number of tokens of the largest micro-batch of the sampled steps.
    shared_tokens: float  # Mean number of tokens that prefix sharing saves.
    learned_tokens: float  # Mean number of tokens with a loss.
    rounds: float  # Number of epochs of the whole run; the least of independent tasks.


@dataclass(frozen=True)
class PreflightReport:
    """The output of `--check --json`, as converted by `dataclasses.asdict`."""

    tasks: tuple[TaskStats, ...]
    step: StepStats
    warnings: tuple[str, ...]


def preflight_report(
    tasks: Sequence[TaskData], tokenizer: Tokenizer, config: TuneConfig
) -> PreflightReport:
    training_config = config.training_config
    task_stats = tuple(_task_stats(task) for task in tasks)
    step_stats = _step_stats(tasks, config)
    warnings = []
    for task, stats in zip(tasks, task_stats, strict=True):
        task_prefix = f"{stats.name}: " if len(task_stats) > 1 else ""
        warnings += [task_prefix + text for text in _warnings(task, stats)]
    if tokenizer.eos_id is None:
        warnings.append(
            "the tokenizer has no end-of-text token, so the adapter does not learn to end an answer"
        )
    if step_stats.rounds < 1:
        warnings.append(
            f"the run trains on only {step_stats.rounds:.0%} of the examples; more steps or larger "
            "batches would use all of them"
        )
    steps, warmup_steps = training_config.steps, training_config.warmup_steps
    if warmup_steps >= steps:
        warnings.append(
            f"warmup_steps is {warmup_steps} and the run has {steps} steps, so the learning rate "
            "rises until the end of the run; set a smaller warmup_steps"
        )
    return PreflightReport(task_stats, step_stats, tuple(warnings))


def preflight_lines(
    tasks: Sequence[TaskData], tokenizer: Tokenizer, config: TuneConfig, gpt_config: GPTConfig
) -> list[str]:
    """Return the lines that `--check` prints without `--json`."""
    report = preflight_report(tasks, tokenizer, config)
    lines = []
    for task, task_stats in zip(tasks, report.tasks, strict=True):
        if task_stats.name:
            lines.append(f"task {task_stats.name}")
        for example in task.examples.examples[:EXAMPLES_SHOWN]:
            lines += _example_lines(example, tokenizer, gpt_config.vocab_size)
        lines += _file_lines("trains on", task_stats.learning)
        if task_stats.validation is not None:
            lines += _file_lines("validates on", task_stats.validation)
        if task_stats.virtual_tokens:
            lines.append(
                f"{task_stats.virtual_tokens} virtual tokens: "
                f"{task_stats.virtual_share:.0%} of all tokens, "
                f"and {task_stats.virtual_tokens / task_stats.tokens_max:.0%} of an example's "
                f"limit of {task_stats.tokens_max:,}"
            )
    step_stats = report.step
    lines.append(
        f"each step: {step_stats.examples:,} examples in "
        f"{_format_count(step_stats.passes, 'micro-batch', 'micro-batches')}, "
        f"{step_stats.tokens:,.0f} tokens computed (at most {step_stats.tokens_of_pass_max:,} in "
        f"a micro-batch), {step_stats.shared_tokens:,.0f} saved by shared prefixes, "
        f"{step_stats.learned_tokens:,.0f} with a loss"
    )
    epochs = _format_count(step_stats.rounds, "epoch", "epochs")
    lines.append(f"{_format_count(config.training_config.steps, 'step is', 'steps are')} {epochs}")
    lines.append(memory_line(config, gpt_config, step_stats))
    return lines + [f"warning: {text}" for text in report.warnings]


def memory_line(config: TuneConfig, gpt_config: GPTConfig, step_stats: StepStats) -> str:
    """Return a line with the estimated memory of the rank that needs the most memory.

    The estimate excludes virtual-token rows, logits and libraries.
    """
    parallel = config.parallel_config
    trains_model = config.method_config.method == "full"
    dtype = config.model_config.dtype or gpt_config.dtype
    activation_config = TrainingSetup(
        parallel.tp,
        parallel.sequence_parallel and parallel.tp > 1,
        trainable="all" if trains_model else "adapter",
        dropout=config.training_config.hidden_dropout > 0,
    )
    # Without attention dropout, Preamble's attention stores no scores, so the mode "none" needs as
    # much memory as "selective". The scores that attention dropout stores are not counted.
    recompute_modes: tuple[RecomputeMode, RecomputeMode] = ("selective", "full")
    selective_bytes, full_bytes = (
        layer_activation_bytes(
            gpt_config, 1, step_stats.tokens_of_pass_max, mode, activation_config
        )
        for mode in recompute_modes
    )
    stage_layers_max = -(-gpt_config.num_layers // parallel.pp)
    recomputed_layers = parallel.recompute_layers * parallel.virtual_stages
    block_share = min(1.0, recomputed_layers / stage_layers_max)
    recomputed_share = {"full": 1.0, "block": block_share}.get(parallel.recompute, 0.0)
    # layer_activation_bytes counts 2 bytes per value; convert to the size of the compute dtype.
    layer_bytes = (
        (recomputed_share * full_bytes + (1 - recomputed_share) * selective_bytes)
        * DTYPE_BYTES[dtype]
        / 2
    )
    rank_passes = math.ceil(step_stats.passes / parallel.dp)
    stage_bytes = []
    for stage in range(parallel.pp):
        stage_params = stage_parameters(gpt_config, parallel.tp, parallel.pp, stage)
        states = state_bytes(stage_params, activation_config.trainable, 0, 1, dtype)
        in_flight_layers = layers_in_flight(
            gpt_config.num_layers, parallel.pp, rank_passes, parallel.virtual_stages, stage
        )
        stage_bytes.append(
            (states.weights + states.gradients + states.optimizer, in_flight_layers * layer_bytes)
        )
    weight_bytes, activation_bytes = max(stage_bytes, key=sum)
    state_suffix = ", gradients and optimizer" if trains_model else ""
    return (
        f"memory of the rank that needs the most: {weight_bytes / 1e9:,.3f} GB of weights"
        f"{state_suffix}, and {activation_bytes / 1e9:,.3f} GB of activations for the backward "
        "pass; virtual-token rows, logits and libraries need memory in addition"
    )


def _task_stats(task: TaskData) -> TaskStats:
    examples = task.examples.examples
    repeated_prompts = 0
    if task.validation is not None:
        prompts = {_prompt_hash(example) for example in examples}
        repeated_prompts = sum(
            _prompt_hash(example) in prompts for example in task.validation.examples
        )
    tokens = sum(len(example.ids) for example in examples)
    validation_stats = None
    if task.validation is not None:
        validation_stats = _file_stats(task.task.validation or "", task.validation)
    return TaskStats(
        name=task.task.name,
        virtual_tokens=task.template.virtual_tokens,
        virtual_share=task.template.virtual_tokens * len(examples) / tokens,
        tokens_max=task.tokens_max,
        learning=_file_stats(task.task.data or "", task.examples),
        validation=validation_stats,
        known_prompts=repeated_prompts,
    )


def _file_stats(path: str, example_set: ExampleSet) -> FileStats:
    examples = example_set.examples
    distinct_hashes = {hash(tuple(example.ids)) for example in examples}
    return FileStats(
        file=path,
        examples=len(examples),
        cut=example_set.truncated,
        left_out=len(example_set.dropped),
        reasons=tuple(example_set.dropped[:EXAMPLES_SHOWN]),
        prompt_tokens=LengthQuantiles.from_lengths([example.answer_start for example in examples]),
        answer_tokens=LengthQuantiles.from_lengths(
            [len(example.ids) - example.answer_start for example in examples]
        ),
        empty_answers=sum(not answer.strip() for answer in example_set.answers),
        repeated=len(examples) - len(distinct_hashes),
    )


def _prompt_hash(example: Example) -> int:
    return hash(tuple(example.ids[: example.answer_start]))


def _step_stats(tasks: Sequence[TaskData], config: TuneConfig) -> StepStats:
    training_config, parallel_config = config.training_config, config.parallel_config
    group_examples = [
        [example for task in group for example in tasks[task].examples.examples]
        for group in config.task_groups
    ]
    order = BatchOrders(group_examples, training_config.batch_examples, training_config.seed)
    micro_batches: list[MicroBatch] = []
    unshared_tokens = 0
    steps = min(STEPS_SAMPLED, training_config.steps)
    has_dropout = max(training_config.hidden_dropout, training_config.attention_dropout) > 0
    for step in range(1, steps + 1):
        batch = order.batch(step)
        # The last token of an example predicts no token and is not computed.
        unshared_tokens += sum(len(example.ids) - 1 for example in batch)
        for rank in range(parallel_config.dp):
            groups = split_into_micro_batches(
                batch[rank :: parallel_config.dp],
                training_config.micro_batch_examples,
                training_config.micro_batch_tokens,
            )
            micro_batches += [
                build_micro_batch(group, share_prefix=not has_dropout) for group in groups if group
            ]
    tokens = sum(micro_batch.batch.tokens for micro_batch in micro_batches)
    return StepStats(
        examples=order.batch_size,
        passes=len(micro_batches) / steps,
        tokens=tokens / steps,
        tokens_of_pass_max=max(micro_batch.batch.tokens for micro_batch in micro_batches),
        shared_tokens=(unshared_tokens - tokens) / steps,
        learned_tokens=sum(len(micro_batch.labels) for micro_batch in micro_batches) / steps,
        rounds=order.epochs(training_config.steps),
    )


def _warnings(task: TaskData, stats: TaskStats) -> list[str]:
    warnings = []
    if stats.known_prompts and stats.validation is not None:
        warnings.append(
            f"{stats.known_prompts:,} of {stats.validation.examples:,} validation prompts also "
            "occur in the training data, so the validation measures memorization too; remove these "
            "prompts from one of the two files"
        )
    for file in filter(None, (stats.learning, stats.validation)):
        if file.empty_answers:
            warnings.append(f"{file.file} has {file.empty_answers:,} records with an empty answer")
    if stats.learning.repeated:
        warnings.append(f"{stats.learning.file} has {stats.learning.repeated:,} duplicate examples")
    new_tokens_max = task.task.max_new_tokens
    if new_tokens_max is not None:
        answer_lengths = (
            len(example.ids) - example.answer_start for example in task.examples.examples
        )
        long_answers = sum(length > new_tokens_max for length in answer_lengths)
        if long_answers > LONG_ANSWERS_SHARE_MAX * stats.learning.examples:
            warnings.append(
                f"{long_answers:,} answers are longer than max_new_tokens ({new_tokens_max}), so "
                "by default a server cuts such answers"
            )
    if stats.virtual_share > 0.5:
        warnings.append(
            "over half of all tokens are virtual tokens; fewer virtual tokens may be as good"
        )
    return warnings


def _example_lines(example: Example, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Return two lines: an example's prompt and its answer, with their numbers of tokens."""
    answer_start = example.answer_start
    prompt, answer = example.ids[:answer_start], example.ids[answer_start:]
    text = ""
    for is_virtual, group in groupby(prompt, lambda token: token >= vocab_size):
        group_ids = list(group)
        text += f"<{len(group_ids)} virtual>" if is_virtual else tokenizer.decode(group_ids)
    ends_with_eos = bool(answer) and answer[-1] == tokenizer.eos_id
    eos_text = f" {tokenizer.id_to_token(answer[-1])}" if ends_with_eos else ""
    prompt_loss_tokens = sum(position < answer_start for position in example.loss_positions)
    loss_note = f", {prompt_loss_tokens:,} of them with a loss" if prompt_loss_tokens else ""
    return [
        f"prompt ({len(prompt)} tokens{loss_note}): {text!r}",
        f"answer ({len(answer)} tokens, with a loss): "
        f"{tokenizer.decode(answer, continues_text=True)!r}{eos_text}",
    ]


def _file_lines(verb: str, file: FileStats) -> list[str]:
    lines = [
        f"{verb} {file.file}: {file.examples:,} examples; {file.cut:,} truncated, "
        f"{file.left_out:,} dropped",
        f"prompt tokens: {file.prompt_tokens}",
        f"answer tokens: {file.answer_tokens}",
    ]
    lines += [f"dropped: {reason}" for reason in file.reasons]
    if file.left_out > len(file.reasons):
        lines.append(f"dropped: {file.left_out - len(file.reasons):,} more")
    return lines


def _format_count(value: float, singular: str, plural: str) -> str:
    number = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return f"{number} {singular if value == 1 else plural}"
