"""Fuzzing of checkpoints: changed headers, pickles and configs give a sentence or a model.

Seeds are fixed, so a failure names the seed to repeat. Only the bytes besides weights are changed,
because weights may have any value.
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
from checkpoints_tools.inspection.report import build_report
from checkpoints_tools.writers.registry import ConversionOptions
from gpt.errors import PreambleError
from gpt.formats.registry import open_checkpoint
from tests.support.broken.checkpoints import GOOD

pytestmark = pytest.mark.slow

SEEDS = 60  # Per format and kind of change; all together take less than twenty seconds.
HANGS_SECONDS = 5
PICKLE = b"\x80\x02"
PICKLE_END = b"PK\x07\x08"
DIRECTORY = b"PK\x01\x02"
TAR = b"ustar"
LARGE_NUMBERS = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x07", b"\0\0\0\0", b"9999", b"null", b"[[[[")

VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 3, 10**9, 10**30, -(10**30), 0.5, -1.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "4", "rope", "../x", "a\nb", "\x1b[31m", "x" * 9999),
    *([], [1], [[]], ["x"], {}, {"a": 1}),
]


class HangError(BaseException):
    """Raised into code that exceeds its time limit."""


@contextmanager
def limit_time() -> Iterator[None]:
    def raise_hang(number: int, frame: FrameType | None) -> None:
        raise HangError

    # Limits of processor time and, much larger, of wall time, which other processes use too.
    clocks = {signal.ITIMER_PROF: (signal.SIGPROF, 1), signal.ITIMER_REAL: (signal.SIGALRM, 12)}
    handlers_before = {number: signal.signal(number, raise_hang) for number, _ in clocks.values()}
    for clock, (_, times) in clocks.items():
        signal.setitimer(clock, HANGS_SECONDS * times)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


def open_or_message(root: Path) -> str:
    """The error message, or an empty string; any other error is a bug, and is raised."""
    try:
        with limit_time():
            checkpoint = open_checkpoint(root)
            build_report(checkpoint, str(root))
            plan(checkpoint, root.with_name("target"), ConversionOptions())
    except PreambleError as error:
        return str(error)
    return ""


def spans(path: Path) -> list[tuple[int, int]]:
    """Spans of a file without weights."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return [(0, 8 + int.from_bytes(content[:8], "little"))]
    fuzzed_spans = []
    if path.suffix in (".pt", ".bin", ".distcp", ".nemo"):
        for offset in offsets_of(content, PICKLE):
            end = content.find(PICKLE_END, offset)
            fuzzed_spans.append((offset, end if end > 0 else offset + 3000))
        fuzzed_spans += [
            (max(0, offset - 257), offset + 250) for offset in offsets_of(content, TAR)
        ]
        if (directory := content.find(DIRECTORY)) > 0:
            fuzzed_spans.append((directory, len(content)))
    return fuzzed_spans or [(0, len(content))]


def offsets_of(content: bytes, needle: bytes) -> Iterator[int]:
    offset = content.find(needle)
    while offset >= 0:
        yield offset
        offset = content.find(needle, offset + len(needle))


def mutate(draw: random.Random, content: bytes, span: tuple[int, int]) -> bytes:
    mutated_content = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        offset = draw.randrange(span[0], min(span[1], len(mutated_content)))
        match draw.randrange(5):
            case 0:
                mutated_content[offset] = draw.randrange(256)
            case 1:
                mutated_content[offset] ^= 1 << draw.randrange(8)
            case 2:
                number = draw.choice(LARGE_NUMBERS)
                mutated_content[offset : offset + len(number)] = number
            case 3:
                other_offset = draw.randrange(span[0], min(span[1], len(mutated_content)))
                size = draw.randrange(1, 40)
                mutated_content[offset : offset + size] = mutated_content[
                    other_offset : other_offset + size
                ]
            case _:
                mutated_content = (
                    mutated_content[:offset]
                    if draw.random() < 0.1
                    else mutated_content[:offset] + mutated_content[offset + 1 :]
                )
        if len(mutated_content) <= span[0]:
            break
    return bytes(mutated_content)


@pytest.mark.parametrize("name", GOOD)
def test_random_header_bytes_open_or_raise_a_checkpoint_error(name: str, tmp_path: Path) -> None:
    root = tmp_path / "source"
    GOOD[name](root)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if len(files) > 5:  # Of many shards, three are enough.
        files = [path for path in files if path.suffix != ".safetensors" or "00002" in path.name]
    messages = []
    for seed in range(SEEDS):
        draw = random.Random(f"{name} {seed}")
        path = draw.choice(files)
        content = path.read_bytes()
        path.write_bytes(mutate(draw, content, draw.choice(spans(path))))
        try:
            messages.append(open_or_message(root))
        except BaseException as error:
            error.add_note(f"seed {seed}, {path.name}")
            raise
        path.write_bytes(content)
    assert any(messages)
    assert all(line.isprintable() for line in messages)
    assert open_or_message(root) == ""


def scramble_value(draw: random.Random, record: Any) -> None:
    """Replace or delete a random value of the record."""
    container: Any = record
    key: Any = None
    while isinstance(container, dict | list) and container and (key is None or draw.random() < 0.8):
        holder = container
        key = (
            draw.choice(list(container))
            if isinstance(container, dict)
            else draw.randrange(len(container))
        )
        container = container[key]
    if draw.random() < 0.15:
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)


def scramble_json(draw: random.Random, content: bytes) -> bytes:
    record = json.loads(content)
    scramble_value(draw, record)
    return json.dumps(record).encode()


def scramble_header(draw: random.Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    text = scramble_json(draw, content[8 : 8 + length])
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


Scramble = Callable[[random.Random, bytes], bytes]
RECORDS: list[tuple[str, str, Scramble]] = [
    ("huggingface", "config.json", scramble_json),
    ("huggingface", "model.safetensors.index.json", scramble_json),
    ("huggingface", "model-00002-of-00012.safetensors", scramble_header),
    ("native", "preamble.json", scramble_json),
    ("torch_dist", "iter_0000100/metadata.json", scramble_json),
]


@pytest.mark.parametrize(
    ("name", "file", "scramble"), RECORDS, ids=[file for _, file, _ in RECORDS]
)
def test_random_record_values_open_or_raise_a_checkpoint_error(
    name: str, file: str, scramble: Scramble, tmp_path: Path
) -> None:
    root = tmp_path / "source"
    GOOD[name](root)
    content = (root / file).read_bytes()
    messages = []
    for seed in range(SEEDS):
        draw = random.Random(f"{file} {seed}")
        (root / file).write_bytes(scramble(draw, content))
        try:
            messages.append(open_or_message(root))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert any(messages)
    assert all(line.isprintable() for line in messages)
    shutil.rmtree(root)
