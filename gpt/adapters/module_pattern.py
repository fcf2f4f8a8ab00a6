"""Regular expressions of adapter files, matched against module names in bounded time.

A file can come from anyone, and Python's `re` takes exponential time for some expressions. Here, a
set of positions in the name passes through the expression, so each step is quick, and a budget
limits the number of steps. The syntax is that of `re` without back references, conditions,
lookbehinds, flags and possessive repeats; an expression with these is refused.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpt.errors import AdapterError
from gpt.settings import short_repr

PATTERN_CHARACTERS_MAX = 1 << 16
NESTING_MAX = 40
REPEATS_MAX = 1000
STEPS_MAX = 1_000_000  # Half a second.

PLAIN_NAME = re.compile(r"[\w.-]*", re.ASCII)
_ESCAPED_SETS: Mapping[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "D": lambda character: not character.isdecimal(),
    "s": str.isspace,
    "S": lambda character: not character.isspace(),
    "w": lambda character: character.isalnum() or character == "_",
    "W": lambda character: not (character.isalnum() or character == "_"),
}
_SPECIAL = set("\\[](){}*+?|^$.")


class _PatternError(Exception):
    """Why an expression is refused: it is invalid, not supported, or too complex."""


class Budget:
    """The steps that all expressions of a file may take together."""

    def __init__(self, steps: int = STEPS_MAX) -> None:
        self._steps = steps

    def spend(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _PatternError("it takes too many steps")


@dataclass(frozen=True)
class _Subject:
    """A text, and the budget. A set of positions is an integer with a bit for each position."""

    text: str
    budget: Budget
    _masks: dict[Callable[[str], bool], int] = field(default_factory=dict)

    def characters(self, condition: Callable[[str], bool]) -> int:
        """Return the positions of the characters for which a condition holds."""
        mask = self._masks.get(condition)
        if mask is None:
            positions = (1 << len(self.text)) - 1
            mask = self.select(positions, lambda text, position: condition(text[position]))
            self._masks[condition] = mask
        return mask

    def select(self, positions: int, holds: Callable[[str, int], bool]) -> int:
        """Return the positions for which a condition holds."""
        self.budget.spend(2 * positions.bit_count() + 1)
        selected = 0
        while positions:
            lowest = positions & -positions
            if holds(self.text, lowest.bit_length() - 1):
                selected |= lowest
            positions ^= lowest
        return selected


class _Node(Protocol):
    def ends(self, starts: int, subject: _Subject) -> int:
        """Return the positions where a match from one of the positions `starts` can end."""
        ...


@dataclass(frozen=True)
class _Literal:
    text: str

    def ends(self, starts: int, subject: _Subject) -> int:
        subject.budget.spend()
        matches, position = 0, subject.text.find(self.text)
        while position >= 0:
            matches |= 1 << position
            position = subject.text.find(self.text, position + 1)
        return (starts & matches) << len(self.text)


@dataclass(frozen=True)
class _CharacterSet:
    condition: Callable[[str], bool]

    def ends(self, starts: int, subject: _Subject) -> int:
        subject.budget.spend()
        return (starts & subject.characters(self.condition)) << 1


@dataclass(frozen=True)
class _Sequence:
    items: tuple[_Node, ...]

    def ends(self, starts: int, subject: _Subject) -> int:
        for item in self.items:
            if not starts:
                break
            starts = item.ends(starts, subject)
        return starts


@dataclass(frozen=True)
class _Alternatives:
    branches: tuple[_Node, ...]

    def ends(self, starts: int, subject: _Subject) -> int:
        ends = 0
        for branch in self.branches:
            ends |= branch.ends(starts, subject)
        return ends


@dataclass(frozen=True)
class _Repeat:
    item: _Node
    count_min: int
    count_max: int | None  # None: no limit.

    def ends(self, starts: int, subject: _Subject) -> int:
        for _ in range(self.count_min):
            subject.budget.spend()
            starts = self.item.ends(starts, subject)
            if not starts:
                return 0
        if isinstance(self.item, _CharacterSet) and self.count_max is None:
            # The carry of the sum passes through each run of matching characters with a start.
            run = subject.characters(self.item.condition)
            return (((starts & run) + run) ^ run) | starts
        ends = new = starts
        extra = None if self.count_max is None else self.count_max - self.count_min
        while new and extra != 0:
            subject.budget.spend()
            new = self.item.ends(new, subject) & ~ends
            ends |= new
            extra = None if extra is None else extra - 1
        return ends


@dataclass(frozen=True)
class _Position:
    """An assertion about a position: ^, $, \\b and \\B."""

    holds: Callable[[str, int], bool]

    def ends(self, starts: int, subject: _Subject) -> int:
        return subject.select(starts, self.holds)


@dataclass(frozen=True)
class _Lookahead:
    item: _Node
    negative: bool

    def ends(self, starts: int, subject: _Subject) -> int:
        def holds(text: str, position: int) -> bool:
            return (self.item.ends(1 << position, subject) != 0) != self.negative

        return subject.select(starts, holds)


def _is_no_newline(character: str) -> bool:
    return character != "\n"


def _is_word_boundary(text: str, position: int) -> bool:
    def is_word(index: int) -> bool:
        return 0 <= index < len(text) and _ESCAPED_SETS["w"](text[index])

    return is_word(position - 1) != is_word(position)


def _is_end(text: str, position: int) -> bool:
    return position == len(text) or (position == len(text) - 1 and text[-1] == "\n")


class _Parser:
    """Parses an expression to nodes."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.index = 0

    def parse(self) -> _Node:
        node = self._alternatives(0)
        if self.index < len(self.pattern):
            raise _PatternError("it has a ) without a (")
        return node

    def _peek(self) -> str:
        return self.pattern[self.index : self.index + 1]

    def _take(self, text: str) -> bool:
        if self.pattern.startswith(text, self.index):
            self.index += len(text)
            return True
        return False

    def _alternatives(self, depth: int) -> _Node:
        if depth > NESTING_MAX:
            raise _PatternError(f"it has more than {NESTING_MAX} nested groups")
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _Alternatives(tuple(branches))

    def _sequence(self, depth: int) -> _Node:
        items: list[_Node] = []
        literal = ""
        while self._peek() not in ("", "|", ")"):
            item = self._repeated(self._item(depth))
            if isinstance(item, _Literal):
                literal += item.text
                continue
            if literal:
                items.append(_Literal(literal))
                literal = ""
            items.append(item)
        if literal:
            items.append(_Literal(literal))
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _item(self, depth: int) -> _Node:
        character = self._peek()
        self.index += 1
        match character:
            case "(":
                return self._group(depth)
            case "[":
                return _CharacterSet(self._bracket())
            case ".":
                return _CharacterSet(_is_no_newline)
            case "^":
                return _Position(lambda text, position: position == 0)
            case "$":
                return _Position(_is_end)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise _PatternError(f"it has a {character} without anything to repeat")
        return _Literal(character)

    def _group(self, depth: int) -> _Node:
        lookahead = None
        if self._take("?"):
            if self._take("=") or self._take("!"):
                lookahead = self.pattern[self.index - 1]
            elif self._take("P<"):
                name, _, _ = self.pattern[self.index :].partition(">")
                if not name.isidentifier():
                    raise _PatternError("it has a group whose name is invalid")
                self.index += len(name) + 1
            elif not self._take(":"):
                raise _PatternError(
                    f"it has a group that begins with (?{self._peek()}, which is not supported"
                )
        item = self._alternatives(depth + 1)
        if not self._take(")"):
            raise _PatternError("it has a ( without a )")
        # A group is never merged with the literals beside it, so it can be repeated.
        item = _Sequence((item,))
        return item if lookahead is None else _Lookahead(item, lookahead == "!")

    def _repeated(self, item: _Node) -> _Node:
        bounds = self._repeat_bounds()
        if bounds is None:
            return item
        self._take("?")  # A lazy repeat has the same matches.
        if self._peek() == "+" or self._repeat_bounds() is not None:
            raise _PatternError("it has a repeat of a repeat, or a possessive repeat")
        return _Repeat(item, *bounds)

    def _repeat_bounds(self) -> tuple[int, int | None] | None:
        for symbol, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._take(symbol):
                return bounds
        match = re.compile(r"\{(\d{0,6})(?:(,)(\d{0,6}))?\}").match(self.pattern, self.index)
        if match is None or not (match[1] or match[2]):
            return None  # As in `re`, other braces are literals.
        self.index = match.end()
        count_min = int(match[1] or 0)
        count_max = count_min if match[2] is None else int(match[3]) if match[3] else None
        if max(count_min, count_max or 0) > REPEATS_MAX:
            raise _PatternError(f"it has a repeat of more than {REPEATS_MAX}")
        if count_max is not None and count_max < count_min:
            raise _PatternError("it has a repeat whose limits are in the wrong order")
        return count_min, count_max

    def _escape(self) -> _Node:
        character = self._peek()
        self.index += 1
        match character:
            case "b":
                return _Position(_is_word_boundary)
            case "B":
                return _Position(lambda text, at: not _is_word_boundary(text, at))
            case "A":
                return _Position(lambda text, at: at == 0)
            case "Z":
                return _Position(lambda text, at: at == len(text))
        condition = _ESCAPED_SETS.get(character)
        if condition is not None:
            return _CharacterSet(condition)
        return _Literal(self._escaped_character(character))

    def _escaped_character(self, character: str) -> str:
        if not character or character.isalnum():
            raise _PatternError(f"it has \\{character}, which is not supported")
        return character

    def _bracket(self) -> Callable[[str], bool]:
        is_negative = self._take("^")
        ranges: list[tuple[str, str]] = []
        sets: set[Callable[[str], bool]] = set()
        is_first = True
        while is_first or not self._take("]"):
            is_first = False
            first = self._member()
            if callable(first):
                sets.add(first)
                continue
            last = first
            if self._peek() == "-" and self.pattern[self.index + 1 : self.index + 2] not in "]":
                self.index += 1
                end = self._member()
                if callable(end) or end < first:
                    raise _PatternError("it has a range of characters that is invalid")
                last = end
            ranges.append((first, last))
        starts, ends = _disjoint_ranges(ranges)

        def contains(other: str) -> bool:
            index = bisect_right(starts, other) - 1
            is_in_range = index >= 0 and other <= ends[index]
            return (is_in_range or any(holds(other) for holds in sets)) != is_negative

        return contains

    def _member(self) -> str | Callable[[str], bool]:
        character = self._peek()
        if not character:
            raise _PatternError("it has a [ without a ]")
        self.index += 1
        if character != "\\":
            return character
        escaped = self._peek()
        self.index += 1
        condition = _ESCAPED_SETS.get(escaped)
        return self._escaped_character(escaped) if condition is None else condition


def _disjoint_ranges(ranges: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Return the first and the last characters of the ranges, sorted and merged.

    A character class can have thousands of members; a binary search takes few comparisons.
    """
    starts: list[str] = []
    ends: list[str] = []
    for first, last in sorted(ranges):
        if ends and first <= ends[-1]:
            ends[-1] = max(ends[-1], last)
        else:
            starts.append(first)
            ends.append(last)
    return starts, ends


class ModulePattern:
    """An expression that can be matched against module names."""

    def __init__(self, pattern: str, source: str, budget: Budget) -> None:
        """`source`: the file and field of the expression, for messages."""
        self._budget = budget
        self._source = source
        self._pattern = pattern
        if len(pattern) > PATTERN_CHARACTERS_MAX:
            problem = f"it has {len(pattern)} characters, over {PATTERN_CHARACTERS_MAX}"
            raise self._error(_PatternError(problem))
        try:
            budget.spend(len(pattern) // 8)
            self._node = _Parser(pattern).parse()
        except _PatternError as error:
            raise self._error(error) from None

    def matches(self, name: str) -> bool:
        """Tell whether the expression matches the whole name."""
        return bool(self._ends(1, name) >> len(name) & 1)

    def matches_end(self, name: str) -> bool:
        """Tell whether the expression matches the whole name, or its end after a dot."""
        starts = 1 | sum(2 << index for index, character in enumerate(name) if character == ".")
        return bool(self._ends(starts, name) >> len(name) & 1)

    def _ends(self, starts: int, name: str) -> int:
        try:
            return self._node.ends(starts, _Subject(name, self._budget))
        except _PatternError as error:
            raise self._error(error) from None

    def _error(self, error: _PatternError) -> AdapterError:
        return AdapterError(
            f"{self._source} has the regular expression {short_repr(self._pattern)}, which cannot "
            f"be used: {error}; list the names of the modules instead"
        )


class PatternList:
    """Expressions in order, of which the first that matches a name counts."""

    def __init__(self, patterns: Iterable[str], source: str, budget: Budget) -> None:
        self._budget = budget
        self._expressions: list[tuple[int, ModulePattern]] = []
        # Names and dots alone are the usual case, and there can be one for each module. A dot
        # matches any character, so plain names are looked up without their dots: by the length,
        # then by the positions of the dots, then by the other characters.
        self._names: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        self._patterns = list(patterns)
        for number, pattern in enumerate(self._patterns):
            if PLAIN_NAME.fullmatch(pattern):
                dots = tuple(index for index, letter in enumerate(pattern) if letter == ".")
                by_dots = self._names.setdefault(len(pattern), {}).setdefault(dots, {})
                by_dots.setdefault(_without_positions(pattern, dots), number)
            else:
                self._expressions.append((number, ModulePattern(pattern, source, budget)))
        self._source = source

    def first_match(self, name: str) -> str | None:
        """Return the first expression that matches the name, or its end after a dot."""
        first = self._first_name(name)
        for number, expression in self._expressions:
            if first is not None and number > first:
                break
            if expression.matches_end(name):
                first = number
                break
        return None if first is None else self._patterns[first]

    def _first_name(self, name: str) -> int | None:
        numbers = []
        for end in path_ends(name):
            for dots, by_letters in self._names.get(len(end), {}).items():
                try:
                    self._budget.spend()
                except _PatternError as error:
                    raise AdapterError(
                        f"{self._source} has too many keys: {error}; save the adapter again"
                    ) from None
                number = by_letters.get(_without_positions(end, dots))
                if number is not None:
                    numbers.append(number)
        return min(numbers, default=None)


def _without_positions(text: str, positions: tuple[int, ...]) -> str:
    bounds = zip((-1, *positions), (*positions, len(text)), strict=True)
    return "\0".join(text[start + 1 : stop] for start, stop in bounds)


def path_ends(path: str) -> Iterable[str]:
    """Yield a path, and its ends after each dot."""
    yield path
    for index, character in enumerate(path):
        if character == ".":
            yield path[index + 1 :]
