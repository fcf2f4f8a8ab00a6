"""The tasks of the demo model, and the generator of its training and held-out records.

A prompt is an instruction, an input and MARK; the answer follows. Inputs have three forms (an
English sentence, a pair of numbers, a Japanese sentence). Several tasks share each form, so only
the instruction determines the task; without an instruction the model can only guess. Two tasks are
controls: they have records, but are not trained. The same seed gives the same records. The module
is independent of tokenizer and model.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from examples.demo.words import (
    ACTIONS_JA,
    ADJECTIVES,
    ADVERBS_JA,
    CITIES,
    FEELINGS,
    FILLERS,
    INSTRUCTIONS,
    NAMES,
    OBJECTS,
    PLACES_JA,
    SUBJECTS_JA,
    VERBS,
)

Split = Literal["train", "held-out"]
MARK = "=>"  # Ends the input; one space and the answer follow.
# Maximum number of fillers (words without meaning) at the start of a prompt.
FILLERS_USUAL = 8  # In nine of ten records.
FILLERS_MAX = 64  # In one of ten records.
HELD_OUT_PERCENT = 10
DRAWS_PER_RECORD = 50  # Limit of the draws per record in the search for distinct inputs.
NO_INSTRUCTION = 0.2  # Fraction of training records without an instruction.


@dataclass(frozen=True)
class Input:
    text: str
    answers: dict[str, str]  # The answer of every task of the form, by task.
    # Group number, by which `draw_uninstructed` chooses a task. All groups are equally likely.
    group: int


@dataclass(frozen=True)
class Form:
    """A kind of input and the tasks that accept it."""

    name: str
    draw: Callable[[random.Random], Input]
    tasks: tuple[str, ...]
    controls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    task: str
    prompt: str
    completion: str


def _sentence(rng: random.Random) -> Input:
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    verb, feeling = rng.choice(VERBS), rng.choice(FEELINGS)
    group = rng.randrange(len(OBJECTS))
    thing = f"a {rng.choice(ADJECTIVES)} {OBJECTS[group]}"
    order = rng.choice(
        (
            "{name} {verb} {thing} in {city} and {feeling}",
            "in {city} {name} {verb} {thing} and {feeling}",
            "{name} from {city} {verb} {thing} and {feeling}",
        )
    )

    def render(verb: str, feeling: str) -> str:
        return order.format(name=name, city=city, thing=thing, verb=verb, feeling=feeling)

    text = render(verb.present, feeling.present)
    words = text.split()
    answers = {
        "mood": feeling.mood,
        "name": name,
        "city": city,
        "backwards": " ".join(reversed(words)),
        "capitals": text.upper(),
        "past": render(verb.past, feeling.past),
        "sorted": " ".join(sorted(words, key=str.lower)),
    }
    return Input(text, answers, group)


def _numbers(rng: random.Random) -> Input:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    answers = {
        "sum": str(a + b),
        "difference": str(abs(a - b)),
        "larger": str(max(a, b)),
        "smaller": str(min(a, b)),
        "product": str(a * b),
    }
    return Input(f"{a} and {b}", answers, a % 2 * 2 + b % 2)


def _japanese(rng: random.Random) -> Input:
    group = rng.randrange(len(SUBJECTS_JA))
    subject, place = SUBJECTS_JA[group], rng.choice(PLACES_JA)
    adverb, action = rng.choice(ADVERBS_JA), rng.choice(ACTIONS_JA)
    when = f"{adverb.japanese}、" if adverb.japanese else ""
    scene = f"{when}{subject.japanese}が{place.japanese}で{action.object}を"
    english = f"{subject.english} {action.english} {place.english} {adverb.english}"
    answers = {
        "english": english.rstrip(),
        "subject": subject.japanese,
        "place": place.japanese,
        "polite": f"{scene}{action.polite}",
    }
    return Input(f"{scene}{action.plain}", answers, group)


FORMS = (
    Form(
        "sentence",
        _sentence,
        ("mood", "name", "city", "backwards", "capitals", "past"),
        controls=("sorted",),
    ),
    Form("numbers", _numbers, ("sum", "difference", "larger", "smaller"), controls=("product",)),
    Form("japanese", _japanese, ("english", "subject", "place", "polite")),
)
FORM_OF = {task: form for form in FORMS for task in (*form.tasks, *form.controls)}
TASKS = tuple(task for form in FORMS for task in form.tasks)
CONTROLS = tuple(task for form in FORMS for task in form.controls)
CHANCE = {"mood": 0.5}  # Probability that a random answer is right; other tasks: nearly 0.


def split_of(text: str) -> Split:
    """Return the split of an input, by a hash of its words, so that the splits are disjoint.

    The hash ignores the order of the words: inputs such as "3 and 5" and "5 and 3" have nearly the
    same answers, so they are in the same split.
    """
    key = " ".join(sorted(text.split()))
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    return "held-out" if bucket < HELD_OUT_PERCENT else "train"


def draw_input(form: Form, rng: random.Random, split: Split) -> Input:
    while True:
        candidate = form.draw(rng)
        if split_of(candidate.text) == split:
            return candidate


def build_prompt(text: str, instruction: str = "", fillers: tuple[str, ...] = ()) -> str:
    """Return the prompt: fillers, instruction, input text and MARK, joined by spaces."""
    return " ".join((*fillers, *([instruction] if instruction else []), text, MARK))


def draw_filler_count(rng: random.Random) -> int:
    """Return the number of fillers, which is random so that no word has a fixed position."""
    fillers_max = FILLERS_MAX if rng.random() < 0.1 else FILLERS_USUAL
    return rng.randint(0, fillers_max)


def build_record(task: str, drawn: Input, rng: random.Random, instruction: str = "") -> Record:
    fillers = tuple(rng.choices(FILLERS, k=draw_filler_count(rng)))
    return Record(task, build_prompt(drawn.text, instruction, fillers), drawn.answers[task])


def draw_instructed(task: str, rng: random.Random, split: Split) -> Record:
    """Return a record of one task with one of the task's instructions."""
    drawn = draw_input(FORM_OF[task], rng, split)
    return build_record(task, drawn, rng, rng.choice(INSTRUCTIONS[task]))


def draw_uninstructed(form: Form, rng: random.Random) -> Record:
    """Return a record without an instruction.

    In half of the records the task is random; in the other half the input's group determines it.
    With random tasks alone, all tasks of a form would be almost equally likely for each input, and
    greedy decoding would do the same task for almost every input. With the groups, greedy decoding
    does each task about equally often.
    """
    drawn = draw_input(form, rng, "train")
    task = rng.choice(form.tasks)
    if rng.random() < 0.5:
        task = form.tasks[drawn.group % len(form.tasks)]
    return build_record(task, drawn, rng)


def training_records(seed: int, weights: dict[str, float] | None = None) -> Iterator[Record]:
    """Yield training records without end.

    `weights` are the relative frequencies of the tasks (default: 1.0) among the records with an
    instruction.
    """
    rng = random.Random(seed)
    task_weights = [(weights or {}).get(task, 1.0) for task in TASKS]
    while True:
        if rng.random() < NO_INSTRUCTION:
            yield draw_uninstructed(rng.choice(FORMS), rng)
        else:
            (task,) = rng.choices(TASKS, task_weights)
            yield draw_instructed(task, rng, "train")


def held_out_records(task: str, count: int, seed: int, *, instruct: bool) -> list[Record]:
    """Return `count` records of one task, with distinct prompts from held-out inputs."""
    rng = random.Random(f"{seed} {task}")
    records: dict[str, Record] = {}
    while len(records) < count:
        if instruct:
            record = draw_instructed(task, rng, "held-out")
        else:
            record = build_record(task, draw_input(FORM_OF[task], rng, "held-out"), rng)
        records.setdefault(record.prompt, record)
    return list(records.values())


def plain_records(task: str, count: int, seed: int, split: Split) -> list[Record]:
    """Return records for p-tuning: inputs and answers, without instructions and fillers."""
    rng = random.Random(f"{seed} {split} {task}")
    records: dict[str, Record] = {}
    for _ in range(DRAWS_PER_RECORD * count + 1000):
        if len(records) == count:
            return list(records.values())
        drawn = draw_input(FORM_OF[task], rng, split)
        records.setdefault(drawn.text, Record(task, build_prompt(drawn.text), drawn.answers[task]))
    raise ValueError(
        f"the task {task} has fewer than {count} distinct {split} inputs; give a smaller --count"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.tasks",
        description="Write records of demo tasks, without instructions, for p-tuning.",
    )
    parser.add_argument(
        "--task",
        required=True,
        nargs="+",
        choices=(*TASKS, *CONTROLS),
        help="tasks of the records; with several tasks, each record has a `taskname` field, as in "
        "NeMo's data",
    )
    parser.add_argument("--count", type=int, default=200, help="records per task (default: 200)")
    parser.add_argument("--split", choices=("train", "held-out"), default="train")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    try:
        records = [
            record
            for task in flags.task
            for record in plain_records(task, flags.count, flags.seed, flags.split)
        ]
    except ValueError as error:
        parser.error(str(error))
    for record in records:
        named = {"taskname": record.task} if len(flags.task) > 1 else {}
        line = {**named, "prompt": record.prompt, "completion": record.completion}
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
