"""Bytes of headers, pickles and configs changed at random: a sentence or a model, nothing else.

Seeds are fixed, so a failure names the one to run again. What a file holds besides weights is where
a reader can be led astray; the weights themselves are anything.
"""

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from checkpoints_tools.conversion.convert import plan
from checkpoints_tools.inspection.report import look
from checkpoints_tools.writers.registry import Wish
from gpt.errors import PreambleError
from gpt.formats.registry import open_checkpoint
from tests.support.broken.checkpoints import GOOD

pytestmark = pytest.mark.slow

SEEDS = 60  # Of each format and each way; all together take less than twenty seconds.
HANGS_SECONDS = 5
PICKLE, PICKLE_END = b"\x80\x02", b"PK\x07\x08"
DIRECTORY, TAR = b"PK\x01\x02", b"ustar"
LARGE_NUMBERS = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x07", b"\0\0\0\0", b"9999", b"null", b"[[[[")

VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 3, 10**9, 10**30, -(10**30), 0.5, -1.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "4", "rope", "../x", "a\nb", "\x1b[31m", "x" * 9999),
    *([], [1], [[]], ["x"], {}, {"a": 1}),
]


class HangError(BaseException):
    """Raised into whatever takes too long."""


@contextmanager
def hurried() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError

    # Of a processor's time; of the clock's, which others use too, much more.
    clocks = {signal.ITIMER_PROF: (signal.SIGPROF, 1), signal.ITIMER_REAL: (signal.SIGALRM, 12)}
    before = {number: signal.signal(number, ring) for number, _ in clocks.values()}
    for clock, (_, times) in clocks.items():
        signal.setitimer(clock, HANGS_SECONDS * times)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def opened(root: Path) -> str:
    """The one sentence, or nothing; any other error is a bug, and goes on."""
    try:
        with hurried():
            checkpoint = open_checkpoint(root)
            look(checkpoint, str(root))
            plan(checkpoint, root.with_name("target"), Wish())
    except PreambleError as error:
        return str(error)
    return ""


def spans(path: Path) -> list[tuple[int, int]]:
    """Where a file holds anything but weights."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return [(0, 8 + int.from_bytes(content[:8], "little"))]
    found = []
    if path.suffix in (".pt", ".bin", ".distcp", ".nemo"):
        for place in places(content, PICKLE):
            end = content.find(PICKLE_END, place)
            found.append((place, end if end > 0 else place + 3000))
        found += [(max(0, place - 257), place + 250) for place in places(content, TAR)]
        if (directory := content.find(DIRECTORY)) > 0:
            found.append((directory, len(content)))
    return found or [(0, len(content))]


def places(content: bytes, needle: bytes) -> Iterator[int]:
    place = content.find(needle)
    while place >= 0:
        yield place
        place = content.find(needle, place + len(needle))


def mutated(draw: random.Random, content: bytes, span: tuple[int, int]) -> bytes:
    made = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        place = draw.randrange(span[0], min(span[1], len(made)))
        match draw.randrange(5):
            case 0:
                made[place] = draw.randrange(256)
            case 1:
                made[place] ^= 1 << draw.randrange(8)
            case 2:
                number = draw.choice(LARGE_NUMBERS)
                made[place : place + len(number)] = number
            case 3:
                other = draw.randrange(span[0], min(span[1], len(made)))
                size = draw.randrange(1, 40)
                made[place : place + size] = made[other : other + size]
            case _:
                made = made[:place] if draw.random() < 0.1 else made[:place] + made[place + 1 :]
        if len(made) <= span[0]:
            break
    return bytes(made)


@pytest.mark.parametrize("name", GOOD)
def test_random_bytes_in_headers_end_with_a_model_or_a_sentence(name: str, tmp_path: Path) -> None:
    root = tmp_path / "source"
    GOOD[name](root)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if len(files) > 5:  # Of many shards, one is as good as another.
        files = [path for path in files if path.suffix != ".safetensors" or "00002" in path.name]
    told = []
    for seed in range(SEEDS):
        draw = random.Random(f"{name} {seed}")
        path = draw.choice(files)
        whole = path.read_bytes()
        path.write_bytes(mutated(draw, whole, draw.choice(spans(path))))
        try:
            told.append(opened(root))
        except BaseException as error:
            error.add_note(f"seed {seed}, {path.name}")
            raise
        path.write_bytes(whole)
    assert any(told)
    assert all(line.isprintable() for line in told)
    assert opened(root) == ""


def scrambled(draw: random.Random, record: Any) -> None:
    """A value somewhere inside becomes another, or is lost."""
    place: Any = record
    key: Any = None
    while isinstance(place, dict | list) and place and (key is None or draw.random() < 0.8):
        holder = place
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        place = place[key]
    if draw.random() < 0.15:
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)


def scrambled_json(draw: random.Random, content: bytes) -> bytes:
    record = json.loads(content)
    scrambled(draw, record)
    return json.dumps(record).encode()


def scrambled_header(draw: random.Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text = scrambled_json(draw, content[8 : 8 + length])
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


Scramble = Callable[[random.Random, bytes], bytes]
RECORDS: list[tuple[str, str, Scramble]] = [
    ("huggingface", "config.json", scrambled_json),
    ("huggingface", "model.safetensors.index.json", scrambled_json),
    ("huggingface", "model-00002-of-00012.safetensors", scrambled_header),
    ("native", "preamble.json", scrambled_json),
    ("torch_dist", "iter_0000100/metadata.json", scrambled_json),
]


@pytest.mark.parametrize(
    ("name", "file", "scramble"), RECORDS, ids=[file for _, file, _ in RECORDS]
)
def test_random_values_in_records_end_with_a_model_or_a_sentence(
    name: str, file: str, scramble: Scramble, tmp_path: Path
) -> None:
    root = tmp_path / "source"
    GOOD[name](root)
    whole = (root / file).read_bytes()
    told = []
    for seed in range(SEEDS):
        draw = random.Random(f"{file} {seed}")
        (root / file).write_bytes(scramble(draw, whole))
        try:
            told.append(opened(root))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert any(told)
    assert all(line.isprintable() for line in told)
    shutil.rmtree(root)
