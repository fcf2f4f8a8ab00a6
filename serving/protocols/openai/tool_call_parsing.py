"""Tool call parser: finds the calls of tools in the text that a chat model writes.

Model families write calls in different formats (`TOOL_CALL_FORMATS` in `serving.config`). A
`ToolCallParser` reads one format, from texts of any length: its output does not depend on where the
text of a stream is split. A call is reported when its name and the beginning of its arguments are
known; its arguments follow in fragments. Text that only looks like a call, for example the call of
a tool that the request does not have, remains text. The work is linear in the length of the text.
This module is independent of requests, chunks and tokens.
"""

import json
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import NoReturn, Protocol

from serving.config import CallFormat

HERMES_START, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA_START = "<|python_tag|>"
MISTRAL_START, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
# The texts that begin or separate calls. A tokenizer may have special tokens for them.
MARKERS = (
    HERMES_START,
    HERMES_END,
    LLAMA_START,
    MISTRAL_START,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALL_ID,
)
# A call begins with this text. None: only at the start of the answer.
_START_MARKERS: dict[CallFormat, str | None] = {
    "hermes": HERMES_START,
    "llama3_json": LLAMA_START,
    "mistral": MISTRAL_START,
    "json": None,
}
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEY_CHARACTERS_MAX = 256  # Characters of a key, or of a name, of a call.
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class TextDelta:
    """Text of the answer that is not part of a call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """The next fragment of a call's arguments, as JSON text."""

    index: int
    text: str


Delta = TextDelta | CallStart | ArgumentsDelta


class AnswerParser(Protocol):
    """Splits the text of an answer into text and calls."""

    def push(self, text: str) -> list[Delta]:
        """Add text to the answer; return what is known now."""
        ...

    def finish(self) -> list[Delta]:
        """End the answer; return the rest."""
        ...


class ArgumentsParser:
    """Parser of an answer that is the arguments of one call, because its format is enforced."""

    def __init__(self, name: str) -> None:
        self._deltas: list[Delta] = [CallStart(0, name)]

    def push(self, text: str) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return [*deltas, ArgumentsDelta(0, text)] if text else deltas

    def finish(self) -> list[Delta]:
        return self.push("")


class _NoCallError(Exception):
    """The text since the last start of a call is not a call."""


# A reader gets one character per `send`. It returns when the calls after a marker have ended.
_Reader = Generator[None, str, None]


class ToolCallParser:
    """Parser of one format. Calls of tools that are not in `names` are text.

    After `calls_max` calls, the rest of the answer is dropped.
    """

    def __init__(
        self, parser_format: CallFormat, names: Collection[str], calls_max: int | None = None
    ) -> None:
        self._format = parser_format
        self._marker = _START_MARKERS[parser_format]
        self._names = names
        self._calls_max = calls_max
        self._calls = 0  # Number of calls that were reported.
        self._deltas: list[Delta] = []
        self._buffer = ""  # Text outside of calls that was not searched yet.
        # Whitespace at the end of the text. It is dropped if a call follows.
        self._trailing_whitespace = ""
        self._follows_call = False  # Whether only whitespace was read since the last call.
        self._at_start = parser_format in ("llama3_json", "json")  # A call needs no marker now.
        self._reader: _Reader | None = None
        self._unreported: list[str] = []  # What the reader has read since the last call.
        self._returned = ""  # A character that a reader has read, but that is not part of a call.

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._buffer and not self._is_complete:
            if self._reader is not None:
                self._feed_reader()
            elif not self._find_start():
                break
        if self._is_complete:
            self._buffer = ""
        return self._take_deltas()

    def finish(self) -> list[Delta]:
        if self._reader is not None:
            # The length limit has cut the text off. The beginning of a second call, or of an end
            # marker, is not a text that the model wrote for its user.
            self._end_reader("" if self._follows_call else "".join(self._unreported))
        if not self._is_complete:
            self._add_text(self._buffer)
            if self._trailing_whitespace and not self._follows_call:
                self._deltas.append(TextDelta(self._trailing_whitespace))
        self._buffer = self._trailing_whitespace = ""
        return self._take_deltas()

    @property
    def _is_complete(self) -> bool:
        """Whether the rest of the answer is dropped."""
        return (
            self._reader is None and self._calls_max is not None and self._calls >= self._calls_max
        )

    def _take_deltas(self) -> list[Delta]:
        """Remove and return the deltas; adjacent texts and fragments are joined."""
        joined: list[Delta] = []
        for delta in self._deltas:
            last = joined[-1] if joined else None
            if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
                joined[-1] = TextDelta(last.text + delta.text)
            elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
                joined[-1] = ArgumentsDelta(last.index, last.text + delta.text)
            else:
                joined.append(delta)
        self._deltas = []
        return joined

    # ------------------------------------------------------------------------------ text

    def _find_start(self) -> bool:
        """Search the buffer for a call; return False if more text is needed."""
        if self._at_start:
            rest = self._buffer.lstrip(_SPACE)
            if not rest:
                return False
            self._at_start = False
            if rest[0] in "{[":
                self._trailing_whitespace = self._buffer[: -len(rest)]
                self._start_reader("", rest)
                return True
        if self._marker is None:
            self._add_text(self._buffer)
            self._buffer = ""
            return False
        start = self._buffer.find(self._marker)
        if start >= 0:
            self._add_text(self._buffer[:start])
            self._start_reader(self._marker, self._buffer[start + len(self._marker) :])
            return True
        prefix_length = _common_length(self._buffer, self._marker)
        self._add_text(self._buffer[: len(self._buffer) - prefix_length])
        self._buffer = self._buffer[len(self._buffer) - prefix_length :]
        return False

    def _add_text(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
        text = self._trailing_whitespace + text
        stripped = text.rstrip()
        self._trailing_whitespace = text[len(stripped) :]
        if stripped:
            self._deltas.append(TextDelta(stripped))
            self._follows_call = False

    # ----------------------------------------------------------------------------- calls

    def _start_reader(self, marker: str, rest: str) -> None:
        self._unreported = [marker]
        self._buffer = rest
        self._reader = {
            "hermes": self._read_hermes,
            "llama3_json": self._read_json_calls,
            "json": self._read_json_calls,
            "mistral": self._read_mistral,
        }[self._format]()
        next(self._reader)

    def _feed_reader(self) -> None:
        assert self._reader is not None
        for position, character in enumerate(self._buffer, 1):
            self._unreported.append(character)
            try:
                self._reader.send(character)
            except StopIteration:
                self._buffer = self._returned + self._buffer[position:]
                self._end_reader("")
                return
            except _NoCallError:
                # The last character may begin the next marker.
                self._buffer = self._buffer[position - 1 :]
                self._end_reader("".join(self._unreported[:-1]))
                return
        self._buffer = ""

    def _end_reader(self, text: str) -> None:
        """Return to text. `text`: what was read as a call, but is not a call."""
        self._reader, self._unreported, self._returned = None, [], ""
        self._add_text(text)

    def _report_call(self, name: str) -> None:
        self._deltas.append(CallStart(self._calls, name))
        self._calls += 1
        self._unreported = []
        self._trailing_whitespace = ""
        self._follows_call = True

    def _add_arguments(self, text: str) -> None:
        self._deltas.append(ArgumentsDelta(self._calls - 1, text))
        self._unreported = []

    def _check_call(self, name: str | None) -> str:
        """Return the name of a call that may be reported; raise _NoCallError otherwise."""
        if name is None or name not in self._names:
            _refuse()
        return name

    def _may_continue(self) -> bool:
        return self._calls_max is None or self._calls < self._calls_max

    def _read_hermes(self) -> _Reader:
        """Read an object with name and arguments, and the end marker, which may be missing."""
        yield from self._read_call_object((yield from _read_after_space()))
        self._unreported = []
        character = yield from _read_after_space()
        if character != HERMES_END[0]:
            self._returned = character
            return
        for expected in HERMES_END[1:]:
            character = yield
            if character != expected:
                _refuse()
        self._unreported = []

    def _read_json_calls(self) -> _Reader:
        """Read a list of objects, or objects that are separated by semicolons."""
        character = yield from _read_after_space()
        if character == "[":
            yield from self._read_call_list()
            return
        while True:
            yield from self._read_call_object(character)
            if not self._may_continue():
                return
            self._unreported = []
            character = yield from _read_after_space(_SPACE + ";")
            if character != "{":
                self._returned = character
                return

    def _read_call_list(self) -> _Reader:
        while True:
            yield from self._read_call_object((yield from _read_after_space()))
            if not self._may_continue():
                return
            self._unreported = []
            character = yield from _read_after_space()
            if character == "]":
                self._unreported = []
                return
            if character != ",":
                _refuse()

    def _read_mistral(self) -> _Reader:
        """Read a list of objects, or a name, an optional id, and arguments."""
        character = yield from _read_after_space()
        if character == "[":
            yield from self._read_call_list()
            return
        if character == "{":
            yield from self._read_call_object(character)
            return
        name = ""
        while character not in "[{":
            name += character
            if len(name) > _KEY_CHARACTERS_MAX:
                _refuse()
            character = yield
        name = self._check_call(name.strip())
        if character == "[":
            character = yield from _read_arguments_marker()
        if character != "{":
            _refuse()
        self._report_call(name)
        yield from self._stream_arguments()

    def _read_call_object(self, character: str) -> Generator[None, str, None]:
        """Read an object with a name and arguments, in any order; `character` is its first one."""
        if character != "{":
            _refuse()
        name: str | None = None
        arguments: str | None = None  # Arguments that precede the name.
        reported = False
        while True:
            character = yield from _read_after_space()
            if character == "}":
                break
            key = yield from _read_string(character)
            if (yield from _read_after_space()) != ":":
                _refuse()
            character = yield from _read_after_space()
            if key == "name" and name is None:
                name = self._check_call((yield from _read_string(character)))
                character = yield from _read_after_space()
            elif key in _ARGUMENT_KEYS and not reported and arguments is None:
                if name is not None and character == "{":
                    self._report_call(name)
                    reported = True
                    yield from self._stream_arguments()
                    character = yield from _read_after_space()
                else:
                    value, character = yield from _read_value(character)
                    arguments = _object_text(value)
            else:
                _, character = yield from _read_value(character)
            if character == "}":
                break
            if character != ",":
                _refuse()
        if not reported:
            self._report_call(self._check_call(name))
            self._add_arguments(arguments or "{}")

    def _stream_arguments(self) -> Generator[None, str, None]:
        """Report an object, whose first brace was read, in fragments."""
        self._add_arguments("{")
        scanner = _ValueScanner()
        scanner.push("{")
        while not scanner.is_complete:
            self._add_arguments(scanner.push((yield)))


class _ValueScanner:
    """Finds the end of a JSON object or list.

    Control characters in strings, which JSON forbids but models write, are replaced by escapes.
    Other syntax is not checked.
    """

    def __init__(self) -> None:
        self._brackets: list[str] = []  # The closing brackets that are expected.
        self._in_string = self._after_backslash = False

    @property
    def is_complete(self) -> bool:
        return not self._brackets

    def push(self, character: str) -> str:
        """Add a character; return its JSON text."""
        if self._in_string:
            if self._after_backslash:
                self._after_backslash = False
            elif character == "\\":
                self._after_backslash = True
            elif character == '"':
                self._in_string = False
            if character < " ":
                return json.dumps(character)[1:-1]
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._brackets.append("}" if character == "{" else "]")
        elif character in "}]" and self._brackets.pop() != character:
            _refuse()
        return character


def _refuse() -> NoReturn:
    raise _NoCallError


def _read_after_space(space: str = _SPACE) -> Generator[None, str, str]:
    """Read the next character that is not whitespace."""
    while (character := (yield)) in space:
        pass
    return character


def _read_string(character: str) -> Generator[None, str, str]:
    """Read a short JSON string; `character` is its first character."""
    if character != '"':
        _refuse()
    text, escaped = character, False
    while True:
        character = yield
        text += character
        if len(text) > _KEY_CHARACTERS_MAX:
            _refuse()
        if character == '"' and not escaped:
            break
        escaped = character == "\\" and not escaped
    try:
        string = json.loads(text, strict=False)
    except ValueError:
        _refuse()
    assert isinstance(string, str)
    return string


def _read_value(character: str) -> Generator[None, str, tuple[str, str]]:
    """Read any JSON value; return its text and the first character after it and its whitespace."""
    if character in "{[":
        scanner = _ValueScanner()
        parts = [scanner.push(character)]
        while not scanner.is_complete:
            parts.append(scanner.push((yield)))
        return "".join(parts), (yield from _read_after_space())
    parts = [character]
    if character == '"':
        escaped = False
        while True:
            character = yield
            parts.append(character)
            if character == '"' and not escaped:
                return "".join(parts), (yield from _read_after_space())
            escaped = character == "\\" and not escaped
    while (character := (yield)) not in ",}]":
        parts.append(character)
    return "".join(parts).strip(), character


def _read_arguments_marker() -> Generator[None, str, str]:
    """Read [ARGS], or [CALL_ID], an id and [ARGS]; return the first character of the arguments.

    The first bracket was read already.
    """
    text = "["
    while not text.endswith(MISTRAL_ARGUMENTS):
        text += yield
        is_marker = MISTRAL_ARGUMENTS.startswith(text)
        is_id = MISTRAL_CALL_ID.startswith(text[: len(MISTRAL_CALL_ID)])
        if not (is_marker or is_id) or len(text) > _KEY_CHARACTERS_MAX:
            _refuse()
    return (yield from _read_after_space())


def _object_text(value: str) -> str:
    """Return the text of the arguments: an object, the text of an object as a string, or null."""
    try:
        content = json.loads(value, strict=False)
        if isinstance(content, str):
            value, content = content, json.loads(content, strict=False)
    except (ValueError, RecursionError):
        _refuse()
    if content is None:
        return "{}"
    if not isinstance(content, dict):
        _refuse()
    return value.strip()


def _common_length(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` begins."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
