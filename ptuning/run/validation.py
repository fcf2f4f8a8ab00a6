"""Measures a run by records that it does not learn from: the loss, and the answers it writes.

Answers come from the very path that serves, with each task's own stops and limits. What the model
does without the adapter, and with an instruction in its place, is measured once and kept beside.
Every rank calls alike, since the model is split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gpt.adapters.prompt_template import MARK, PART, Template
from gpt.errors import RequestError
from gpt.generation.completions import NEW_TOKENS, Answer, write_answers
from ptuning.data.dataset import Examples, TaskData, task_template
from ptuning.evaluation.answer_metrics import macro, measures
from ptuning.run.preparation import Prepared
from ptuning.run_facts import ADAPTER, NO_PROMPT, ORACLE, Sample, Validation
from ptuning.training.trainer import Trainer

SAMPLES = 12  # Answers that a report shows, of each task.


@dataclass
class Measured:
    """One task's answers and what they are worth, by what stood before the text."""

    examples: Examples
    loss: float = 0.0
    baselines: dict[str, Mapping[str, float]] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        """The first records, with what was written before and what is now."""
        after = self.answers.get(ADAPTER)
        if after is None:
            return []
        before = self.answers.get(NO_PROMPT, [Answer()] * len(after))
        return [
            Sample(inputs, expected, first.text, last.text, last.cut)
            for inputs, expected, first, last, _ in zip(
                self.examples.records,
                self.examples.answers,
                before,
                after,
                range(SAMPLES),
                strict=False,
            )
        ]

    @property
    def cut(self) -> int:
        return sum(answer.cut for answer in self.answers.get(ADAPTER, []))


class Measuring:
    """A run's measures, task by task."""

    def __init__(self, prepared: Prepared, trainer: Trainer) -> None:
        self._prepared, self._trainer = prepared, trainer
        count = prepared.config.validation_examples
        self.tasks = {
            task.task.name: Measured(task.validation.first(count))
            for task in prepared.tasks
            if task.validation is not None
        }
        self._data = {task.task.name: task for task in prepared.tasks}

    def baselines(self) -> None:
        """What the model answers by itself; the answers that a report shows as before."""
        full = self._prepared.config.method == "full"
        for name in self.tasks:
            task = self._data[name].task
            plain = task_template(task, self._prepared.tokenizer, virtual=False)
            self._write(name, NO_PROMPT, plain, None)
            if task.oracle and not full:
                self._write(name, ORACLE, self._instructed(self._data[name]), None)

    def now(self, step: int, table: Tensor | None, *, answers: bool) -> Validation:
        """The loss with this table and, if asked for, the answers."""
        by_task: dict[str, dict[str, float]] = {}
        total, learned = 0.0, 0
        for name, measured in self.tasks.items():
            examples = measured.examples.examples
            loss = measured.loss = self._trainer.loss(examples, table)
            tokens = sum(len(example.learned) for example in examples)
            total, learned = total + loss * tokens, learned + tokens
            by_task[name] = {"loss": loss}
            if answers:
                data = self._data[name]
                own = slice(data.first_row, data.first_row + data.template.rows)
                rows = None if table is None else table[own]
                by_task[name] |= self._write(name, ADAPTER, data.template, rows)
        shares = macro(
            [
                {key: value for key, value in one.items() if key != "loss"}
                for one in by_task.values()
            ]
        )
        return Validation(step, total / learned, shares, by_task if len(by_task) > 1 else {})

    def _write(
        self, name: str, what: str, template: Template, table: Tensor | None
    ) -> Mapping[str, float]:
        measured, task = self.tasks[name], self._data[name].task
        new_tokens = task.max_new_tokens or NEW_TOKENS
        prompts = self.prompts(template, measured.examples, new_tokens)
        answers = iter(
            write_answers(
                self._trainer.model,
                self._prepared.tokenizer,
                [prompt for prompt in prompts if prompt is not None],
                table=table,
                kind=self._prepared.config.kind,
                max_new_tokens=new_tokens,
                stops=task.stop,
            )
        )
        # Where nothing can be asked, nothing is answered.
        written = [Answer() if prompt is None else next(answers) for prompt in prompts]
        texts = [answer.text for answer in written]
        measured.answers[what] = written
        measured.baselines[what] = measures(texts, measured.examples.answers)
        return measured.baselines[what]

    def prompts(
        self, template: Template, examples: Examples, new_tokens: int
    ) -> list[list[int] | None]:
        """As a server makes them: what can be cut is cut to leave room for any answer.

        An example was cut for its own answer, which nobody knows who asks. None: it is refused.
        """
        sizes = self._prepared.checkpoint.config
        silent = template.rows if self._prepared.config.kind == "prefix" else 0
        room = new_tokens if template.truncate_field is not None else 1
        found: list[list[int] | None] = []
        for inputs in examples.records:
            try:
                rendered = template.render(
                    self._prepared.tokenizer,
                    inputs,
                    vocab_size=sizes.vocab_size,
                    tokens_max=max(1, sizes.max_position_embeddings - room),
                    answer=False,
                )
            except RequestError:
                found.append(None)
                continue
            # Behind a prefix alone nothing is computed, if all of the text had to be cut.
            found.append(rendered.ids if len(rendered.ids) > silent else None)
        return found

    def _instructed(self, data: TaskData) -> Template:
        """The task's template with its instruction where its first virtual tokens stand."""
        first = f"{MARK}0|>"
        text = data.task.template.replace(first, data.task.oracle)
        text = PART.sub(lambda part: "" if part[1] else part[0], text)
        own = task_template(data.task, self._prepared.tokenizer, virtual=False)
        return Template(
            text,
            truncate_field=own.truncate_field,
            answer_field=own.answer_field,
            bos=own.bos,
            eos=own.eos,
        )
