"""Scores the demo model on inputs that it never saw, with instruction and without.

The score is the share of greedy answers that are the right text to the last letter. Without an
instruction nothing says which task is meant, so a good score there would be a leak; controls were
never taught, so a good score there would be a mistake. Knows no training.
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
from gpt.generation.completions import write_answers
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer

RECORDS = 200  # Of each task, for each column.
SEED = 1  # Not the training's; held-out inputs are others than training inputs anyway.
ANSWER_TOKENS_MAX = 48


@dataclass(frozen=True)
class Score:
    task: str
    instructed: float
    bare: float  # Without instruction.

    @property
    def guess(self) -> float:
        """What guessing gives: an even choice among the form's tasks, or a lucky answer."""
        return max(CHANCE.get(self.task, 0.0), 1 / len(FORM_OF[self.task].tasks))


def answers(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    table: torch.Tensor | None = None,
) -> list[str]:
    """Greedy answers, as text; the space after the mark is nobody's."""
    written = write_answers(
        model, tokenizer, prompts, table=table, max_new_tokens=ANSWER_TOKENS_MAX
    )
    return [answer.text.removeprefix(" ") for answer in written]


def accuracy(
    model: GPT, tokenizer: Tokenizer, records: Sequence[Record], table: torch.Tensor | None = None
) -> float:
    """The share of exact answers. The rows of `table`, if any, stand before every prompt."""
    virtual = range(0 if table is None else len(table))
    prompts = [
        [*(model.config.vocab_size + row for row in virtual), *tokenizer.encode(record.prompt)]
        for record in records
    ]
    pairs = zip(answers(model, tokenizer, prompts, table), records, strict=True)
    return sum(answer == record.completion for answer, record in pairs) / len(records)


def evaluate(model: GPT, tokenizer: Tokenizer, count: int = RECORDS) -> list[Score]:
    return [
        Score(
            task,
            accuracy(model, tokenizer, held_out_records(task, count, SEED, instruct=True)),
            accuracy(model, tokenizer, held_out_records(task, count, SEED, instruct=False)),
        )
        for task in (*TASKS, *CONTROLS)
    ]


def report(scores: Sequence[Score]) -> str:
    """A Markdown table."""
    lines = [
        "| form | task | with instruction | without | by guessing |",
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
    """A few prompts to show, with their right answers."""
    lines = (Path(__file__).parent / "prompts.jsonl").read_text("utf-8").splitlines()
    return [Record("", **json.loads(line)) for line in lines]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--count", type=int, default=RECORDS, help="records of each task")
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args(argv)
    torch.set_num_threads(flags.threads)
    found = open_checkpoint(flags.checkpoint)
    assert found.tokenizer is not None
    model, tokenizer = load_model(found, Mesh.single()), open_tokenizer(found.tokenizer)
    prompts = [tokenizer.encode(record.prompt) for record in examples()]
    for record, answer in zip(examples(), answers(model, tokenizer, prompts), strict=True):
        print(f"{record.prompt} {answer}  ({'right' if answer == record.completion else 'wrong'})")
    print(report(evaluate(model, tokenizer, flags.count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
