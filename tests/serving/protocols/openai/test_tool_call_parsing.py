"""Tool call parser: recorded answers of each format, whole and in every split, and hostile ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import CallFormat
from serving.protocols.openai.tool_call_parsing import (
    MARKERS,
    AnswerParser,
    ArgumentsDelta,
    ArgumentsParser,
    CallStart,
    TextDelta,
    ToolCallParser,
)

OUTPUTS = Path(__file__).parent / "tool_call_outputs"
FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)
RECORDED_FORMATS: tuple[CallFormat, ...] = ("hermes", "llama3_json", "mistral")
NAMES = {"f", "get_time", "a.b-c"}

Parsed = tuple[str, list[tuple[str, str]]]


def parse(parser: AnswerParser, parts: Iterator[str] | list[str]) -> Parsed:
    """Parse an answer in parts; return its text, and the name and the arguments of each call."""
    deltas = [delta for part in parts for delta in parser.push(part)] + parser.finish()
    text = ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case TextDelta(added_text):
                assert added_text
                text += added_text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsDelta(index, fragment):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + fragment)
    return text, calls


def parse_answer(call_format: CallFormat, answer: str, **options: Any) -> Parsed:
    return parse(ToolCallParser(call_format, NAMES, **options), [answer])


def recorded_answers(call_format: CallFormat) -> tuple[set[str], list[dict[str, Any]]]:
    record = json.loads((OUTPUTS / f"{call_format}.json").read_text())
    return set(record["tools"]), record["answers"]


@pytest.mark.parametrize("call_format", RECORDED_FORMATS)
def test_recorded_answers_are_parsed_equally_in_every_split(call_format: CallFormat) -> None:
    names, answers = recorded_answers(call_format)
    assert len(answers) == 50
    for answer in answers:
        output = answer["output"]
        parsed = parse(ToolCallParser(call_format, names), [output])
        text, calls = parsed
        assert text == answer["text"]
        expected = [(call["name"], call["arguments"]) for call in answer["calls"]]
        assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
        for split in range(1, len(output)):
            parts = [output[:split], output[split:]]
            assert parse(ToolCallParser(call_format, names), parts) == parsed
        for size in (1, 2, 3, 7):
            parts = [output[start : start + size] for start in range(0, len(output), size)]
            assert parse(ToolCallParser(call_format, names), parts) == parsed


# Pieces of calls and of texts that look like calls.
FRAGMENTS = (
    *MARKERS,
    *(marker[:3] for marker in MARKERS),
    *('{"name": "f", ', '"arguments": ', '"parameters": {', '{"a": "}"}', "}", "]", "[", "{"),
    *(";", ",", " ", "\n", '"', "\\", "é", "text", "f", "null", "1", '{"name": "zzz", '),
    '{"name": "f", "arguments": {"a": [1, {"b": "\\"}"}]}}',
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    '[TOOL_CALLS]f[ARGS]{"a": 1}',
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.sampled_from([None, 1, 2]),
)
def test_any_answer_is_parsed_equally_in_every_split(
    call_format: CallFormat, fragments: list[str], calls_max: int | None
) -> None:
    answer = "".join(fragments)
    parsed = parse_answer(call_format, answer, calls_max=calls_max)
    assert calls_max is None or len(parsed[1]) <= calls_max
    assert all(name in NAMES for name, _ in parsed[1])
    for parts in (fragments, list(answer)):
        parser = ToolCallParser(call_format, NAMES, calls_max=calls_max)
        assert parse(parser, parts) == parsed


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.sampled_from(FORMATS), st.text(st.sampled_from('<tol_ca>[TOOL]{}" \nfé'), max_size=40))
def test_text_without_a_call_is_unchanged(call_format: CallFormat, text: str) -> None:
    assert parse_answer(call_format, text) == (text, [])


@pytest.mark.parametrize(
    ("call_format", "answer"),
    [
        # The names of undeclared tools, and other objects.
        ("hermes", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("hermes", "Write <tool_call> before a call and </tool_call> after it."),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"name": "f"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>get_time()</tool_call>"),
        ("hermes", '<tool_call>{"name": "f'),
        ("hermes", "<tool_c"),
        ("llama3_json", '{"name": "Ann", "parameters": {"age": 3}}'),
        ("llama3_json", '{"city": "Paris", "population": 2100000}'),
        ("llama3_json", 'The call is {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("llama3_json", "[1, 2, 3]"),
        ("llama3_json", "{"),
        ("llama3_json", '{"name": "f", "parame'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f[ARGX]{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS]1"),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("mistral", "[ARGS]{}"),
        ("json", 'text {"name": "f", "arguments": {}}'),
        ("json", '{"nested": {"name": "f", "arguments": {}}}'),
    ],
)
def test_texts_that_only_look_like_calls_are_text(call_format: CallFormat, answer: str) -> None:
    assert parse_answer(call_format, answer) == (answer, [])


@pytest.mark.parametrize(
    ("call_format", "answer", "text", "calls"),
    [
        # A call after a text that looks like one.
        (
            "hermes",
            'Use <tool_call>.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "Use <tool_call>.",
            [("f", "{}")],
        ),
        (
            "hermes",
            '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call> end',
            "<tool_call>end",
            [("f", "{}")],
        ),
        # Arguments that contain calls.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>{"}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call><tool_call>{"}')],
        ),
        ("mistral", '[TOOL_CALLS]f{"a": "[ARGS]"}', "", [("f", '{"a": "[ARGS]"}')]),
        # Arguments as a text, as null, or missing; a line break inside of a string.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": "1\n2"}}',
            "",
            [("f", '{"a": "1\\n2"}')],
        ),
        # A missing end marker, and text after a call.
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\nDone.', "Done.", [("f", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {}}\n\nDone.', "Done.", [("f", "{}")]),
        # The answer was cut off at its length limit.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "b',
            "",
            [("f", '{"a": "b')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool', "", [("f", "{}")]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name',
            "",
            [("f", "{}")],
        ),
        ("json", '[{"name": "f", "parameters": {"a": 1}},', "", [("f", '{"a": 1}')]),
        ("json", '[{"name": "f", "parameters": {}}]', "", [("f", "{}")]),
    ],
)
def test_unusual_calls(
    call_format: CallFormat, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    assert parse_answer(call_format, answer) == (text, calls)
    assert parse(ToolCallParser(call_format, NAMES), list(answer)) == (text, calls)


def test_the_rest_of_an_answer_is_dropped_after_the_last_allowed_call() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    answer = f"One call. {call} and {call}"
    assert parse_answer("hermes", answer, calls_max=1) == ("One call.", [("f", '{"a": 1}')])


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = ToolCallParser("hermes", NAMES)
    assert parser.push('<tool_call>{"name": "f", "arg') == []
    assert parser.push('uments": {"a": "x') == [CallStart(0, "f"), ArgumentsDelta(0, '{"a": "x')]
    assert parser.push("y") == [ArgumentsDelta(0, "y")]
    assert parser.push('"}}') == [ArgumentsDelta(0, '"}')]


def test_the_answer_to_a_named_choice_is_the_arguments() -> None:
    assert parse(ArgumentsParser("f"), list('{"a": 1}')) == ("", [("f", '{"a": 1}')])
    assert parse(ArgumentsParser("f"), []) == ("", [("f", "")])


@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize(
    "beginning",
    ["<tool_call>", '<tool_call>{"arguments":"', "[TOOL_CALLS]", "[TOOL_CALLS][{", "{["],
)
def test_thousands_of_beginnings_of_calls_are_text(call_format: CallFormat, beginning: str) -> None:
    answer = beginning * 5000
    assert parse_answer(call_format, answer) == (answer, [])
