"""Validation: held-out loss and generated answers of each task during a run, with baselines.

Answers are generated as in serving, with the stop strings of each task, up to a length limit from
the expected answers (`new_tokens_limit`). The expected answers are the drafts of the generation, so
a correct answer needs one forward pass. The baselines are the model without the adapter, and the
model with the `oracle` instruction in place of the adapter. They are evaluated each time the run
starts or resumes. All ranks must call the validator's methods together, because the model is
sharded over the ranks. This module needs a run; ptuning/evaluation/adapter_evaluation.py scores an
adapter file for `tune --evaluate`.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor

from gpt.adapters.prompt_template import PART_PATTERN, VIRTUAL_PROMPT_MARK, PromptTemplate
from gpt.errors import RequestError
from gpt.generation.completions import NEW_TOKENS_DEFAULT, TextCompletion, complete_prompts
from gpt.generation.generate import SequenceAdapter
from gpt.linear_adapter import last_occurrence
from ptuning.activity import MEASURING, ActivityCallback, ignore_activity
from ptuning.config import ValidationConfig
from ptuning.data.dataset import ExampleSet, TaskData, new_tokens_limit, task_template
from ptuning.evaluation.answer_metrics import compute_metrics, macro_average
from ptuning.run.preparation import PreparedRun
from ptuning.run_facts import (
    ADAPTER,
    NO_PROMPT,
    ORACLE,
    Sample,
    Validation,
    describe_selection,
)
from ptuning.training.trainer import Trainer

SAMPLES_PER_TASK = 12  # Number of sample answers per task in the report.


@dataclass
class TaskValidation:
    """Held-out records, loss, metrics and answers of one task.

    The keys of `metrics_by_variant` (metrics of the answers) and of `answers` are the evaluated
    variants: NO_PROMPT (without the adapter), ORACLE (the instruction in place of the adapter) and
    ADAPTER.
    """

    examples: ExampleSet  # The evaluated records.
    records: int = 0  # Number of records in the file.
    answer_tokens_max: int = 0  # Length limit of the evaluated answers in tokens.
    loss: float = 0.0  # Loss of the last validation.
    metrics_by_variant: dict[str, Mapping[str, float]] = field(default_factory=dict)
    answers: dict[str, list[TextCompletion]] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        """Return the first records with the answers generated without and with the adapter."""
        adapter_answers = self.answers.get(ADAPTER)
        if adapter_answers is None:
            return []
        baseline_answers = self.answers.get(NO_PROMPT, [TextCompletion()] * len(adapter_answers))
        return [
            Sample(
                inputs,
                expected,
                baseline_answer.text,
                adapter_answer.text,
                adapter_answer.is_truncated,
            )
            for inputs, expected, baseline_answer, adapter_answer, _ in zip(
                self.examples.records,
                self.examples.answers,
                baseline_answers,
                adapter_answers,
                range(SAMPLES_PER_TASK),
                strict=False,
            )
        ]

    @property
    def answers_cut(self) -> int:
        """Number of the adapter's answers that reached the length limit."""
        return sum(answer.is_truncated for answer in self.answers.get(ADAPTER, []))


class Validator:
    """Evaluates the tasks of a run on their held-out records."""

    def __init__(
        self,
        prepared: PreparedRun,
        trainer: Trainer,
        report_activity: ActivityCallback = ignore_activity,
    ) -> None:
        self._prepared = prepared
        self._trainer = trainer
        self._report_activity = report_activity
        self.tasks = {
            task.task.name: _select_records(
                task, task.validation, prepared.config.validation_config
            )
            for task in prepared.tasks
            if task.validation is not None
        }
        self._task_data = {task.task.name: task for task in prepared.tasks}
        # The inner keys are task names.
        self._losses_by_step: dict[int, dict[str, float]] = defaultdict(dict)

    @property
    def generates_answers(self) -> bool:
        """Whether the answers of the tasks are evaluated, and not only the loss."""
        return bool(self.tasks) and self._prepared.config.validation_config.measure != "none"

    def describe_records(self) -> list[str]:
        """Return one line per task that says which validation records are evaluated."""
        lines = []
        measure = self._prepared.config.validation_config.measure
        for name, task in self.tasks.items():
            selection = describe_selection(len(task.examples.examples), task.records, measure)
            activity = "measuring on" if self.generates_answers else "computing only the loss on"
            prefix = f"{name}: " if len(self.tasks) > 1 else ""
            answer_note = (
                f", answers of at most {task.answer_tokens_max} tokens"
                if self.generates_answers
                else ""
            )
            lines.append(f"{prefix}{activity} {selection} validation records{answer_note}")
        return lines

    def measure_baselines(self) -> None:
        """Evaluate the answers of the model without the adapter.

        If a task has an `oracle` instruction, the answers with this instruction in place of the
        adapter are evaluated too, except for method `full`.
        """
        trains_model = self._prepared.config.method_config.method == "full"
        for name in self.tasks:
            task = self._task_data[name].task
            plain_template = task_template(
                task, self._prepared.tokenizer, with_virtual_tokens=False
            )
            self._measure_answers(name, NO_PROMPT, plain_template, None)
            if task.oracle and not trains_model:
                self._measure_answers(
                    name, ORACLE, self._instruction_template(self._task_data[name]), None
                )

    def validate(
        self,
        step: int,
        table: Tensor | None,
        *,
        answers: bool,
        names: Collection[str] | None = None,
    ) -> Validation:
        """Return the loss with `table`; if `answers` is set, also generate and score answers.

        The loss is the mean over all tokens with a loss, so a task with more of them has more
        weight. Each answer metric is the unweighted mean over the tasks. `names`: the tasks that
        are evaluated; None: all that have records.
        """
        by_task = {}
        for name in self.tasks:
            if names is None or name in names:
                self._losses_by_step[step][name] = self._mean_loss(name, table)
                by_task[name] = self._measure_task(name, step, table, answers=answers)
        return self._combine(step, by_task)

    def validate_best(
        self, best_steps: Mapping[str, int], table: Tensor | None, *, answers: bool
    ) -> list[Validation]:
        """Validate the values that are written; return a validation for each of their steps.

        `best_steps`: the step of each task's values. If this step was validated before, it was with
        the same values, so the loss is not computed again. The last validation has the loss and
        the metrics over all tasks, the others only those of their own tasks.
        """
        by_task: dict[str, dict[str, float]] = {}
        for name in self.tasks:
            step = best_steps[name]
            if name not in self._losses_by_step[step]:
                self._losses_by_step[step][name] = self._mean_loss(name, table)
            by_task[name] = self._measure_task(name, step, table, answers=answers)
        *earlier_steps, last_step = sorted({best_steps[name] for name in self.tasks})
        validations = [
            Validation(step, by_task=_of_step(step, by_task, best_steps)) for step in earlier_steps
        ]
        overall = self._combine(last_step, by_task)
        own_tasks = _of_step(last_step, overall.by_task, best_steps)
        return [*validations, replace(overall, by_task=own_tasks)]

    def _measure_task(
        self, name: str, step: int, table: Tensor | None, *, answers: bool
    ) -> dict[str, float]:
        """Return the loss of a task, which is known, and the metrics of its answers."""
        loss = self.tasks[name].loss = self._losses_by_step[step][name]
        if not answers:
            return {"loss": loss}
        data = self._task_data[name]
        return {"loss": loss, **self._measure_answers(name, ADAPTER, data.template, table)}

    def _combine(self, step: int, by_task: Mapping[str, Mapping[str, float]]) -> Validation:
        """Return the validation of some tasks, with the loss and the metrics over all of them."""
        loss_sum, loss_tokens = 0.0, 0
        for name, results in by_task.items():
            examples = self.tasks[name].examples.examples
            tokens = sum(len(example.loss_positions) for example in examples)
            loss_sum, loss_tokens = loss_sum + results["loss"] * tokens, loss_tokens + tokens
        macro_measures = macro_average(
            [
                {key: value for key, value in results.items() if key != "loss"}
                for results in by_task.values()
            ]
        )
        has_several_tasks = len(self._task_data) > 1
        return Validation(
            step, loss_sum / loss_tokens, macro_measures, by_task if has_several_tasks else {}
        )

    def _mean_loss(self, name: str, table: Tensor | None) -> float:
        activity = self._activity_name("computing the held-out loss", name)
        examples = self.tasks[name].examples.examples
        return self._trainer.mean_loss(
            examples,
            table,
            lambda completed: self._report_activity(activity, completed, len(examples)),
        )

    def _activity_name(self, activity: str, name: str) -> str:
        return f"{activity} ({name})" if len(self.tasks) > 1 else activity

    def _measure_answers(
        self, name: str, variant: str, template: PromptTemplate, table: Tensor | None
    ) -> Mapping[str, float]:
        """Generate the answers of a variant for the task `name`; store and return their metrics.

        `table` has the adapters of all tasks (`Trainer.current_table`); None: no adapter acts.
        """
        task_validation, task = self.tasks[name], self._task_data[name].task
        examples = task_validation.examples
        # A server reserves this number of tokens for the answer when it truncates a prompt.
        served_new_tokens = task.max_new_tokens or NEW_TOKENS_DEFAULT
        prompts = self.render_prompts(template, examples, served_new_tokens)
        activity = self._activity_name(MEASURING[variant], name)
        accepted_prompts = [prompt for prompt in prompts if prompt is not None]
        count = len(accepted_prompts)
        self._report_activity(activity, 0, count)
        answer_iterator = iter(
            complete_prompts(
                self._trainer.model,
                self._prepared.tokenizer,
                accepted_prompts,
                adapter_table=self._task_table(name, table),
                adapter_kind=self._prepared.config.method_config.adapter_kind,
                adapters=self._sequence_adapters(name, table, accepted_prompts),
                max_new_tokens=task_validation.answer_tokens_max,
                stop_strings=task.stop,
                drafts=[
                    example.ids[example.answer_start :]
                    for example, prompt in zip(examples.examples, prompts, strict=True)
                    if prompt is not None
                ],
                shares_prefix=True,
                report_progress=lambda completed: self._report_activity(activity, completed, count),
            )
        )
        # A server would refuse the prompts that are None; their answers are empty.
        answers = [
            TextCompletion() if prompt is None else next(answer_iterator) for prompt in prompts
        ]
        texts = [answer.text for answer in answers]
        metrics = compute_metrics(texts, examples.answers)
        task_validation.answers[variant] = answers
        task_validation.metrics_by_variant[variant] = metrics
        return metrics

    def _task_table(self, name: str, table: Tensor | None) -> Tensor | None:
        """Return the rows of a task in the table; None if it has no virtual tokens."""
        data = self._task_data[name]
        if table is None or self._trainer.linears is not None:
            return None
        return table[data.first_row : data.first_row + data.template.virtual_tokens]

    def _sequence_adapters(
        self, name: str, table: Tensor | None, prompts: Sequence[Sequence[int]]
    ) -> list[SequenceAdapter | None]:
        """Return the adapter weights for each prompt of a task; empty if there are none."""
        if table is None or self._trainer.linears is None:
            return []
        data = self._task_data[name]
        terms = self._trainer.shard_adapter(list(self._task_data).index(name), table)
        if not data.invocation:
            return [SequenceAdapter(terms)] * len(prompts)
        # The preparation has refused records without the invocation.
        starts = [last_occurrence(prompt, data.invocation) for prompt in prompts]
        return [None if start is None else SequenceAdapter(terms, start) for start in starts]

    def render_prompts(
        self, template: PromptTemplate, examples: ExampleSet, new_tokens: int
    ) -> list[list[int] | None]:
        """Render prompts as a server does; None stands for a prompt that a server would refuse.

        `truncate_field` is truncated so that `new_tokens` fit behind the prompt. Training examples
        are truncated so that the expected answer fits, but a server does not know this answer.
        """
        model_config = self._prepared.checkpoint.config
        adapter_kind = self._prepared.config.method_config.adapter_kind
        prefix_tokens = template.virtual_tokens if adapter_kind == "prefix" else 0
        # Without truncation, a prompt needs space for at least one new token.
        reserved_tokens = new_tokens if template.truncate_field is not None else 1
        prompts: list[list[int] | None] = []
        for inputs in examples.records:
            try:
                rendered = template.render(
                    self._prepared.tokenizer,
                    inputs,
                    vocab_size=model_config.vocab_size,
                    tokens_max=max(1, model_config.max_position_embeddings - reserved_tokens),
                    with_answer=False,
                )
            except RequestError:
                prompts.append(None)
                continue
            # If all text was truncated, the prompt is only a prefix, which predicts no token.
            prompts.append(rendered.ids if len(rendered.ids) > prefix_tokens else None)
        return prompts

    def _instruction_template(self, data: TaskData) -> PromptTemplate:
        """Return the task's template with the instruction in place of `<|VIRTUAL_PROMPT_0|>`.

        The template's other markers of virtual tokens are removed.
        """
        first_marker = f"{VIRTUAL_PROMPT_MARK}0|>"
        text = data.task.template.replace(first_marker, data.task.oracle)
        text = PART_PATTERN.sub(lambda match: "" if match[1] else match[0], text)
        base_template = task_template(
            data.task, self._prepared.tokenizer, with_virtual_tokens=False
        )
        return PromptTemplate(
            text,
            truncate_field=base_template.truncate_field,
            answer_field=base_template.answer_field,
            bos=base_template.bos,
            eos=base_template.eos,
        )


def _of_step(
    step: int, by_task: Mapping[str, Mapping[str, float]], best_steps: Mapping[str, int]
) -> dict[str, Mapping[str, float]]:
    """Return the results of the tasks with this best step."""
    return {name: results for name, results in by_task.items() if best_steps[name] == step}


def _select_records(
    data: TaskData, records: ExampleSet, validation_config: ValidationConfig
) -> TaskValidation:
    """Return the validation of a task on the records that `measure` selects."""
    measure, count = validation_config.measure, validation_config.validation_examples
    max_new_tokens = data.task.max_new_tokens
    if measure == "first":
        examples = records.head(count)
        limit = max_new_tokens or NEW_TOKENS_DEFAULT
    else:
        examples = records if measure == "all" else records.sample(count)
        all_examples = chain(data.examples.examples, records.examples)
        limit = new_tokens_limit(all_examples, max_new_tokens)
    return TaskValidation(examples, len(records.examples), limit)
