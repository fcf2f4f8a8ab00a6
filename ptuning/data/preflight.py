"""What a run would learn from, before anything is spent: what `preamble tune --check` says.

Facts are counted from rendered examples and from the very batches of the run's first steps. What
looks like a mistake, and is none that stops a run, is a warning. Knows a model's sizes, no weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.training import (
    Kept,
    Recompute,
    layer_activation_bytes,
    layers_in_flight,
    stage_parameters,
    state_bytes,
)
from gpt.tokenizers.tokenizer import Tokenizer
from ptuning.config import TuneConfig
from ptuning.data.batch_order import Order
from ptuning.data.dataset import Example, Examples, TaskData
from ptuning.data.micro_batch import MicroBatch, micro_batch, portions

SHOWN = 3  # Examples of a task, and reasons, that are told.
STEPS = 8  # Whose batches are made to count their tokens.
LONG_SHARE = 0.01  # Of the answers may be longer than an answer may be, without a warning.


@dataclass(frozen=True)
class Spread:
    """Numbers of tokens, from the least to the most."""

    least: int
    half: int
    nine_of_ten: int
    all_but_one_percent: int
    most: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Spread":
        found = sorted(numbers)
        last = len(found) - 1
        return cls(*(found[last * share // 100] for share in (0, 50, 90, 99, 100)))

    def __str__(self) -> str:
        return (
            f"{self.least:,} to {self.most:,}, half of them up to {self.half:,}, 90% up to "
            f"{self.nine_of_ten:,}, 99% up to {self.all_but_one_percent:,}"
        )


@dataclass(frozen=True)
class FileFacts:
    """What came of one task's records in one file."""

    file: str
    examples: int
    cut: int
    left_out: int
    reasons: tuple[str, ...]  # The first ones.
    prompt_tokens: Spread  # Virtual ones counted.
    answer_tokens: Spread
    empty_answers: int
    repeated: int  # Examples that stand above already.


@dataclass(frozen=True)
class TaskFacts:
    name: str
    virtual_tokens: int
    virtual_share: float  # Of all tokens of the examples.
    tokens_max: int  # Of an example.
    learning: FileFacts
    validation: FileFacts | None
    known_prompts: int  # Of the validation's, that are learned from as well.


@dataclass(frozen=True)
class StepFacts:
    """A step's batch, on all data ranks together; means over the first steps."""

    examples: int
    passes: float  # Micro-batches.
    tokens: float  # That the model computes.
    tokens_of_pass_max: int
    shared_tokens: float  # That it need not compute, as several examples begin with them.
    learned_tokens: float
    rounds: float  # How often the whole run sees each example.


@dataclass(frozen=True)
class Facts:
    """All that `--check` tells, as plain numbers and texts (`dataclasses.asdict`)."""

    tasks: tuple[TaskFacts, ...]
    step: StepFacts
    warnings: tuple[str, ...]


def check_facts(tasks: Sequence[TaskData], tokenizer: Tokenizer, config: TuneConfig) -> Facts:
    told = tuple(_task(one) for one in tasks)
    step = _step(tasks, config)
    warnings = []
    for one, facts in zip(tasks, told, strict=True):
        whose = f"{facts.name}: " if len(told) > 1 else ""
        warnings += [whose + text for text in _warnings(one, facts)]
    if tokenizer.eos_id is None:
        warnings.append("the tokenizer has no token that ends a text: answers learn no end")
    if step.rounds < 1:
        warnings.append(
            f"the run ends before it saw each example once ({step.rounds:.0%} of them); more steps "
            "or larger batches would"
        )
    if config.warmup_steps >= config.steps:
        warnings.append(
            f"the warm-up's {config.warmup_steps} steps are all of the run's {config.steps}, which "
            "never comes to its learning rate"
        )
    return Facts(told, step, tuple(warnings))


def check_lines(
    tasks: Sequence[TaskData], tokenizer: Tokenizer, config: TuneConfig, model: GPTConfig
) -> list[str]:
    """All that a person needs to see, a line each."""
    facts = check_facts(tasks, tokenizer, config)
    lines = []
    for one, told in zip(tasks, facts.tasks, strict=True):
        if told.name:
            lines.append(f"task {told.name}")
        for example in one.examples.examples[:SHOWN]:
            lines += _shown(example, tokenizer, model.vocab_size)
        lines += _file_lines("learns from", told.learning)
        if told.validation is not None:
            lines += _file_lines("validates with", told.validation)
        if told.virtual_tokens:
            lines.append(
                f"{told.virtual_tokens} virtual tokens: {told.virtual_share:.0%} of all tokens, "
                f"and {told.virtual_tokens / told.tokens_max:.0%} of the {told.tokens_max:,} that "
                "an example may have"
            )
    step = facts.step
    lines.append(
        f"a step: {step.examples:,} examples in {_count(step.passes, 'pass', 'passes')}, "
        f"{step.tokens:,.0f} tokens computed (at most {step.tokens_of_pass_max:,} in a pass), "
        f"{step.shared_tokens:,.0f} more shared, {step.learned_tokens:,.0f} learned"
    )
    rounds = _count(step.rounds, "round", "rounds")
    lines.append(f"{_count(config.steps, 'step is', 'steps are')} {rounds} of all examples")
    lines.append(memory_line(config, model, step))
    return lines + [f"warning: {text}" for text in facts.warnings]


def memory_line(config: TuneConfig, model: GPTConfig, step: StepFacts) -> str:
    """What the fullest rank holds, by count. Rows, logits and libraries are not counted."""
    whole, dtype = config.method == "full", config.dtype or model.dtype
    kept = Kept(
        config.tp,
        config.sequence_parallel and config.tp > 1,
        trainable="all" if whole else "adapter",
        dropout=config.hidden_dropout > 0,
    )
    # Our attention keeps no scores, as if they were always computed again.
    ways: tuple[Recompute, Recompute] = ("selective", "full")
    most, least = (
        layer_activation_bytes(model, 1, step.tokens_of_pass_max, way, kept) for way in ways
    )
    blocks = config.recompute_layers * config.virtual_stages / -(-model.num_layers // config.pp)
    again = {"full": 1.0, "block": min(1.0, blocks)}.get(config.recompute, 0.0)
    # They are counted for values of 16 bits.
    layer = (again * least + (1 - again) * most) * DTYPE_BYTES[dtype] / 2
    passes = math.ceil(step.passes / config.dp)
    found = []
    for stage in range(config.pp):
        held = stage_parameters(model, config.tp, config.pp, stage)
        states = state_bytes(held, kept.trainable, 0, 1, dtype)
        flight = layers_in_flight(
            *(model.num_layers, config.pp, passes, config.virtual_stages, stage)
        )
        found.append((states.weights + states.gradients + states.optimizer, flight * layer))
    weights, passing = max(found, key=sum)
    learning = ", gradients and optimizer" if whole else ""
    return (
        f"memory of the fullest rank: {weights / 1e9:,.3f} GB of weights{learning}, and "
        f"{passing / 1e9:,.3f} GB kept for the backward pass; rows, logits, libraries come on top"
    )


def _task(one: TaskData) -> TaskFacts:
    examples = one.examples.examples
    known = 0
    if one.validation is not None:
        prompts = {_prompt(example) for example in examples}
        known = sum(_prompt(example) in prompts for example in one.validation.examples)
    tokens = sum(len(example.ids) for example in examples)
    return TaskFacts(
        one.task.name,
        one.template.rows,
        one.template.rows * len(examples) / tokens,
        one.tokens_max,
        _file(one.task.data or "", one.examples),
        None if one.validation is None else _file(one.task.validation or "", one.validation),
        known,
    )


def _file(path: str, found: Examples) -> FileFacts:
    distinct = {hash(tuple(example.ids)) for example in found.examples}
    return FileFacts(
        path,
        len(found.examples),
        found.truncated,
        len(found.dropped),
        tuple(found.dropped[:SHOWN]),
        Spread.of([example.answer_start for example in found.examples]),
        Spread.of([len(example.ids) - example.answer_start for example in found.examples]),
        sum(not answer.strip() for answer in found.answers),
        len(found.examples) - len(distinct),
    )


def _prompt(example: Example) -> int:
    return hash(tuple(example.ids[: example.answer_start]))


def _step(tasks: Sequence[TaskData], config: TuneConfig) -> StepFacts:
    examples = [example for one in tasks for example in one.examples.examples]
    order = Order(examples, config.batch_examples, config.seed)
    made: list[MicroBatch] = []
    whole = 0
    steps = min(STEPS, config.steps)
    dropout = max(config.hidden_dropout, config.attention_dropout) > 0
    for step in range(1, steps + 1):
        batch = order.batch(step)
        # The last token of each predicts nothing, and is not computed.
        whole += sum(len(example.ids) - 1 for example in batch)
        for rank in range(config.dp):
            passes = portions(
                batch[rank :: config.dp], config.micro_batch_examples, config.micro_batch_tokens
            )
            made += [micro_batch(some, share=not dropout) for some in passes if some]
    tokens = sum(one.batch.tokens for one in made)
    return StepFacts(
        examples=order.size,
        passes=len(made) / steps,
        tokens=tokens / steps,
        tokens_of_pass_max=max(one.batch.tokens for one in made),
        shared_tokens=(whole - tokens) / steps,
        learned_tokens=sum(len(one.answers) for one in made) / steps,
        rounds=config.steps * order.size / len(examples),
    )


def _warnings(one: TaskData, facts: TaskFacts) -> list[str]:
    found = []
    if facts.known_prompts and facts.validation is not None:
        found.append(
            f"{facts.known_prompts:,} of {facts.validation.examples:,} validation prompts are "
            "learned from as well; what they measure is memory: take them out of one of the files"
        )
    for file in filter(None, (facts.learning, facts.validation)):
        if file.empty_answers:
            found.append(f"{file.file} has {file.empty_answers:,} empty answers")
    if facts.learning.repeated:
        found.append(
            f"{facts.learning.file} has {facts.learning.repeated:,} examples that are repeated"
        )
    most = one.task.max_new_tokens
    if most is not None:
        starts = (len(example.ids) - example.answer_start for example in one.examples.examples)
        long = sum(length > most for length in starts)
        if long > LONG_SHARE * facts.learning.examples:
            found.append(f"{long:,} answers are longer than max_new_tokens, {most}")
    if facts.virtual_share > 0.5:
        found.append("over half of all tokens are virtual; fewer may do as well")
    return found


def _shown(example: Example, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """An example as the model sees it, and which of it is learned."""
    start = example.answer_start
    prompt, answer = example.ids[:start], example.ids[start:]
    text = ""
    for virtual, ids in groupby(prompt, lambda token: token >= vocab_size):
        run = list(ids)
        text += f"<{len(run)} virtual>" if virtual else tokenizer.decode(run)
    ended = bool(answer) and answer[-1] == tokenizer.eos_id
    end = f" {tokenizer.spelling(answer[-1])}" if ended else ""
    before = sum(place < start for place in example.learned)
    learned = f", {before:,} of them learned" if before else ""
    return [
        f"prompt ({len(prompt)} tokens{learned}): {text!r}",
        f"answer ({len(answer)} tokens, learned): {tokenizer.decode(answer, started=True)!r}{end}",
    ]


def _file_lines(verb: str, file: FileFacts) -> list[str]:
    lines = [
        f"{verb} {file.file}: {file.examples:,} examples; {file.cut:,} were cut, "
        f"{file.left_out:,} left out",
        f"prompt tokens: {file.prompt_tokens}",
        f"answer tokens: {file.answer_tokens}",
    ]
    lines += [f"left out: {reason}" for reason in file.reasons]
    if file.left_out > len(file.reasons):
        lines.append(f"left out: {file.left_out - len(file.reasons):,} more")
    return lines


def _count(value: float, one: str, many: str) -> str:
    number = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return f"{number} {one if value == 1 else many}"
