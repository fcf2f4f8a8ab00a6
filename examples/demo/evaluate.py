"""Evaluation of the demo model on held-out inputs, with and without an instruction.

The score is the share of greedy completions that equal the expected completion. Without an
instruction the score should be low, because the input alone does not determine the task. The score
of a control task should be low, because the model was not trained on it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.demo.tasks import CHANCE, CONTROLS, FORM_OF, TASKS, Record, held_out_records
from gpt.formats.registry import open_checkpoint
from gpt.generation.completions import complete_prompts
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer

# Number of records per task that have an instruction; the same number have none.
RECORDS = 200
SEED = 1
ANSWER_TOKENS_MAX = 48


@dataclass(frozen=True)
class Score:
    task: str
    instructed: float  # Score with an instruction.
    bare: float  # Score without an instruction.

    @property
    def guess(self) -> float:
        """Chance level: the expected score of the better of two ways to guess.

        - Know the task, and choose one of its answers at random.
        - Choose one of the form's tasks at random, and give the correct answer of that task.
        """
        return max(CHANCE.get(self.task, 0.0), 1 / len(FORM_OF[self.task].tasks))


def answers(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    table: torch.Tensor | None = None,
) -> list[str]:
    """Return the texts of greedy completions, without the space at their start."""
    completions = complete_prompts(
        model, tokenizer, prompts, adapter_table=table, max_new_tokens=ANSWER_TOKENS_MAX
    )
    return [completion.text.removeprefix(" ") for completion in completions]


def accuracy(
    model: GPT, tokenizer: Tokenizer, records: Sequence[Record], table: torch.Tensor | None = None
) -> float:
    """Return the fraction of records for which the model generates exactly the completion.

    `table` is an adapter's table. Its rows are inserted before every prompt as virtual tokens.
    """
    vocab_size = model.config.vocab_size
    virtual_ids = range(vocab_size, vocab_size + (0 if table is None else len(table)))
    prompts = [[*virtual_ids, *tokenizer.encode(record.prompt)] for record in records]
    pairs = zip(answers(model, tokenizer, prompts, table), records, strict=True)
    return sum(answer == record.completion for answer, record in pairs) / len(records)


def evaluate(model: GPT, tokenizer: Tokenizer, count: int = RECORDS) -> list[Score]:
    """Return the scores of all tasks.

    For each task, `count` records with an instruction and `count` records without one are used.
    """
    return [
        Score(
            task,
            accuracy(model, tokenizer, held_out_records(task, count, SEED, instruct=True)),
            accuracy(model, tokenizer, held_out_records(task, count, SEED, instruct=False)),
        )
        for task in (*TASKS, *CONTROLS)
    ]


def report(scores: Sequence[Score]) -> str:
    """Return the scores as a Markdown table."""
    lines = [
        "| form | task | with instruction | without | chance level |",
        "|---|---|---|---|---|",
    ]
    for score in scores:
        form = FORM_OF[score.task].name
        control = score.task in CONTROLS
        name, guess = (
            (f"{score.task} (never taught)", 0.0) if control else (score.task, score.guess)
        )
        lines.append(
            f"| {form} | {name} | {score.instructed:.3f} | {score.bare:.3f} | {guess:.2f} |"
        )
    return "\n".join(lines)


def examples() -> list[Record]:
    """Return example prompts with their expected completions."""
    lines = (Path(__file__).parent / "prompts.jsonl").read_text("utf-8").splitlines()
    return [Record("", **json.loads(line)) for line in lines]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--count", type=int, default=RECORDS, help="records per task")
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args(argv)
    torch.set_num_threads(flags.threads)
    checkpoint = open_checkpoint(flags.checkpoint)
    assert checkpoint.tokenizer is not None
    model = load_model(checkpoint, Mesh.single())
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    prompts = [tokenizer.encode(record.prompt) for record in examples()]
    for record, answer in zip(examples(), answers(model, tokenizer, prompts), strict=True):
        print(f"{record.prompt} {answer}  ({'right' if answer == record.completion else 'wrong'})")
    print(report(evaluate(model, tokenizer, flags.count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
