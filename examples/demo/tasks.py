"""The demo model's tasks and the records that teach them.

Inputs come in three forms (an English sentence, a pair of numbers, a Japanese sentence), each
shared by several tasks, so that nothing but the instruction says which one is meant: a record
without instruction can only be guessed. Two tasks are controls: they have records but no place in
training. The same seed gives the same records; this file knows neither tokenizer nor model.
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
MARK = "=>"  # Ends the input; the answer follows after one space.
FILLERS_USUAL = 8  # Fillers before most records
FILLERS_MAX = 64  # Fillers before one record in ten, where long virtual prompts would end
HELD_OUT_PERCENT = 10
DRAWS_PER_RECORD = 50  # Before a search for yet another input is given up.
NO_INSTRUCTION = 0.2  # Share of training records whose task must be guessed.


@dataclass(frozen=True)
class Input:
    text: str
    answers: dict[str, str]  # Of every task of the form.
    group: int  # Inputs fall into groups of one size; each task is the guess in as many of them.


@dataclass(frozen=True)
class Form:
    """A kind of input, and the tasks that take it."""

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

    def tell(verb: str, feeling: str) -> str:
        return order.format(name=name, city=city, thing=thing, verb=verb, feeling=feeling)

    text = tell(verb.present, feeling.present)
    words = text.split()
    answers = {
        "mood": feeling.mood,
        "name": name,
        "city": city,
        "backwards": " ".join(reversed(words)),
        "capitals": text.upper(),
        "past": tell(verb.past, feeling.past),
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
CHANCE = {"mood": 0.5}  # Where an answer can be right without being understood


def split_of(text: str) -> Split:
    """The side of the split that an input is on: a function of its words, so the two never meet.

    Their order does not count: 3 + 5 in training would give 5 + 3 away.
    """
    key = " ".join(sorted(text.split()))
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100
    return "held-out" if bucket < HELD_OUT_PERCENT else "train"


def draw_input(form: Form, rng: random.Random, split: Split) -> Input:
    while True:
        drawn = form.draw(rng)
        if split_of(drawn.text) == split:
            return drawn


def compose(text: str, instruction: str = "", fillers: tuple[str, ...] = ()) -> str:
    """The prompt: fillers, instruction, input and the mark, one space between them."""
    return " ".join((*fillers, *([instruction] if instruction else []), text, MARK))


def draw_offset(rng: random.Random) -> int:
    """How many fillers come first, so that no word has its own position."""
    most = FILLERS_MAX if rng.random() < 0.1 else FILLERS_USUAL
    return rng.randint(0, most)


def finish(task: str, drawn: Input, rng: random.Random, instruction: str = "") -> Record:
    fillers = tuple(rng.choices(FILLERS, k=draw_offset(rng)))
    return Record(task, compose(drawn.text, instruction, fillers), drawn.answers[task])


def draw_taught(task: str, rng: random.Random, split: Split) -> Record:
    """A record of one task, its instruction at a random offset."""
    drawn = draw_input(FORM_OF[task], rng, split)
    return finish(task, drawn, rng, rng.choice(INSTRUCTIONS[task]))


def draw_guess(form: Form, rng: random.Random) -> Record:
    """A record without instruction, its task drawn at random.

    Half of the draws are made once for all inputs of a group. They break the tie between tasks that
    are equally likely, each way equally often; greedy decoding would break it by a hair, and then
    one task of the form would always come out, as if it had been asked for.
    """
    drawn = draw_input(form, rng, "train")
    task = rng.choice(form.tasks)
    if rng.random() < 0.5:
        task = form.tasks[drawn.group % len(form.tasks)]
    return finish(task, drawn, rng)


def training_records(seed: int, weights: dict[str, float] | None = None) -> Iterator[Record]:
    """Endless training records. Weights say how often a task is taught; guesses stay even."""
    rng = random.Random(seed)
    shares = [(weights or {}).get(task, 1.0) for task in TASKS]
    while True:
        if rng.random() < NO_INSTRUCTION:
            yield draw_guess(rng.choice(FORMS), rng)
        else:
            (task,) = rng.choices(TASKS, shares)
            yield draw_taught(task, rng, "train")


def held_out_records(task: str, count: int, seed: int, *, instruct: bool) -> list[Record]:
    """Records of one task over `count` different inputs that training never shows."""
    rng = random.Random(f"{seed} {task}")
    records: dict[str, Record] = {}
    while len(records) < count:
        if instruct:
            record = draw_taught(task, rng, "held-out")
        else:
            record = finish(task, draw_input(FORM_OF[task], rng, "held-out"), rng)
        records.setdefault(record.prompt, record)
    return list(records.values())


def plain_records(task: str, count: int, seed: int, split: Split) -> list[Record]:
    """What a user would tune on: bare inputs and answers, neither instruction nor filler."""
    rng = random.Random(f"{seed} {split} {task}")
    records: dict[str, Record] = {}
    for _ in range(DRAWS_PER_RECORD * count + 1000):
        if len(records) == count:
            return list(records.values())
        drawn = draw_input(FORM_OF[task], rng, split)
        records.setdefault(drawn.text, Record(task, compose(drawn.text), drawn.answers[task]))
    raise ValueError(
        f"{count} different inputs of {task} are too many; it has fewer {split} inputs"
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
        help="of several, each record says by its `taskname` whose it is, as in NeMo's data",
    )
    parser.add_argument("--count", type=int, default=200, help="records of each (default 200)")
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
