"""OpenAI tools: the fields of a request, forced calls, deltas, and the tools in a chat's prompt."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import msgspec
import pytest

from gpt.errors import RequestError
from gpt.generation.stop_strings import StopStringDetokenizer
from gpt.tokenizers.tokenizer import NullTokenizer, piece_decoder
from serving.admission.template_sandbox import TemplateRenderer, TemplateSetup
from serving.admission.tool_prompt import describe_tools, find_call_format, template_takes_tools
from serving.config import CallFormat
from serving.frontend.json_body import JSON_NULL, parse_request
from serving.messages import Guide
from serving.protocols.openai import tool_calls
from serving.protocols.openai.chat import ChatCompletionRequest
from serving.protocols.openai.tokenization import TokenizeRequest
from serving.protocols.openai.tool_call_chunks import ToolCallChunks, merge_deltas
from serving.protocols.openai.tool_calls import (
    FORCED_CALLS_MAX,
    ToolChoice,
    new_call_id,
    read_tool_choice,
)
from serving.worker.guided_decoding import GuideMatchers, check_guide
from tests.support.chat_templates import CHATML
from tests.support.trained_tokenizers import all_cases

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SUM = {
    "$defs": {"term": {"type": "integer"}},
    "properties": {"a": {"$ref": "#/$defs/term"}, "b": {"$ref": "#/$defs/term"}},
    "required": ["a", "b"],
}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


WEATHER, ADD, NOW = tool("weather", parameters=CITY), tool("add", parameters=SUM), tool("now")


def read(tools: Any, choice: Any = None, parallel: bool | None = None) -> ToolChoice | None:
    raw_tools = None if tools is None else [msgspec.Raw(msgspec.json.encode(t)) for t in tools]
    raw_choice = JSON_NULL if choice is None else msgspec.Raw(msgspec.json.encode(choice))
    return read_tool_choice(raw_tools, raw_choice, parallel)


def test_the_tools_of_a_request_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    read_tool = tool_calls._read_tool

    def count(path: str, declaration: Any) -> Any:
        parsed.append(path)
        return read_tool(path, declaration)

    monkeypatch.setattr(tool_calls, "_read_tool", count)
    user = {"role": "user", "content": "a"}
    fields = {"messages": [user], "tools": [WEATHER], "tool_choice": "required"}
    chat = parse_request(msgspec.json.encode(fields), ChatCompletionRequest)
    for _ in range(2):
        assert chat.parsed_tool_choice is not None and chat.guide_field == "tools"
    text = TokenizeRequest(messages=[], tools=[msgspec.Raw(msgspec.json.encode(WEATHER))])
    assert text.tool_declarations == text.tool_declarations == [WEATHER]
    assert len(parsed) == 2


def guide_schema(choice: Any, tools: Any, parallel: bool | None = None) -> Any:
    tool_choice = read(tools, choice, parallel)
    assert tool_choice is not None
    guide = tool_choice.guide()
    assert guide is not None and guide.kind == "json"
    check_guide(guide, (1,))
    return json.loads(guide.text)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_chats_without_usable_tools_have_no_choice(choice: Any) -> None:
    assert read(None, choice) is None
    assert read([], choice) is None
    assert (read([WEATHER], choice) is None) == (choice == "none")


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", ["weather", "add"]),
        ("auto", "auto", ["weather", "add"]),
        ("required", "required", ["weather", "add"]),
        ("any", "required", ["weather", "add"]),
        ({"type": "function", "function": {"name": "add"}}, "named", ["add"]),
        ({"type": "function", "name": "add"}, "named", ["add"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
            "required",
            ["weather"],
        ),
    ],
    ids=str,
)
def test_choices_name_the_tools_that_may_be_called(
    choice: Any, mode: str, names: list[str]
) -> None:
    tool_choice = read([WEATHER, ADD], choice)
    assert tool_choice is not None
    assert (tool_choice.mode, [t.name for t in tool_choice.tools]) == (mode, names)
    assert all(declaration in (WEATHER, ADD) for declaration in tool_choice.declarations)


@pytest.mark.parametrize(
    ("tools", "choice", "field", "words"),
    [
        (None, "required", "tool_choice", "needs tools"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice", "needs tools"),
        ([WEATHER], "always", "tool_choice", "it must be 'none', 'auto', 'required' or"),
        ([WEATHER], 7, "tool_choice", "tool_choice is 7"),
        ([WEATHER], {"type": "function"}, "tool_choice", "it must be"),
        (
            [WEATHER],
            {"type": "function", "function": {"name": "x"}},
            "tool_choice",
            "names 'x', which is not in tools; choose one of: 'weather'",
        ),
        (
            [WEATHER],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}},
            "tool_choice",
            "without a function's name",
        ),
        ([WEATHER, WEATHER], None, "tools", r"tools\[1\] has the name 'weather' of an earlier"),
        ([{"type": "web_search"}], None, "tools", r"tools\[0\] is not a function"),
        ([{"type": "function"}], None, "tools", "is not a function"),
        (["f"], None, "tools", "is not a function"),
        ([tool("a b")], None, "tools", "function.name is 'a b'"),
        ([tool("")], None, "tools", "1 to 128 letters"),
        ([tool("x" * 129)], None, "tools", "1 to 128 letters"),
        ([tool(parameters=[1])], None, "tools", "give a JSON schema"),
    ],
)
def test_invalid_tools_are_refused(tools: Any, choice: Any, field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read(tools, choice)
    assert caught.value.field == field


def test_tools_that_are_nested_too_deeply_are_refused() -> None:
    deep = msgspec.Raw(b'{"a":' * 5000 + b"1" + b"}" * 5000)
    with pytest.raises(RequestError, match="nested too deeply"):
        read_tool_choice([deep], JSON_NULL, None)
    schema: Any = {}
    for _ in range(400):
        schema = {"items": schema}
    tool_choice = read([tool(parameters=schema)], "required")
    assert tool_choice is not None
    guide = tool_choice.guide()
    assert guide is not None
    with pytest.raises(RequestError, match=r"guide\.json is invalid or unsupported"):
        check_guide(guide, (1,))


def test_a_named_choice_has_the_format_of_the_functions_arguments() -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    assert guide_schema(choice, [WEATHER, ADD]) == {**SUM, "type": "object"}
    choice["function"] = {"name": "now"}
    assert guide_schema(choice, [NOW]) == {"type": "object", "properties": {}}


def test_strict_tools_have_closed_arguments() -> None:
    open_schema = {"type": "object", "properties": {}, "additionalProperties": True}
    strict_tool = tool(strict=True, parameters=open_schema)
    choice = {"type": "function", "function": {"name": "f"}}
    assert guide_schema(choice, [strict_tool])["additionalProperties"] is False


def test_a_required_choice_has_the_format_of_a_list_of_calls() -> None:
    schema = guide_schema("required", [WEATHER, ADD])
    assert (schema["minItems"], schema["maxItems"]) == (1, FORCED_CALLS_MAX)
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["weather", "add"]
    # The references of a tool's schema lead to its own definitions.
    assert schema["$defs"]["1"]["properties"]["a"] == {"$ref": "#/$defs/1/$defs/term"}
    assert guide_schema("required", [ADD, NOW], parallel=False)["maxItems"] == 1


def test_auto_has_no_format() -> None:
    tool_choice = read([WEATHER])
    assert tool_choice is not None and tool_choice.guide() is None


def generate(guide: Guide, text: str, special: Mapping[str, int] = MappingProxyType({})) -> str:
    """Write as much of `text` as the guide allows, with a token for each byte."""
    tokenizer = ByteTokenizer(special)
    matchers = GuideMatchers(tokenizer, tokenizer.vocab_size)
    matchers.init_slot(0, guide, (tokenizer.end_id,), ())
    written = ""
    for token, token_text in tokenizer.encode_with_special(text):
        if not matchers.allowed_mask([0])[0][token]:
            return written + "|"
        assert matchers.accept_token(0, token)
        written += token_text
    return written + ("." if matchers.allowed_mask([0])[0][tokenizer.end_id] else "")


class ByteTokenizer(NullTokenizer):
    """A tokenizer with a token for each byte, special tokens, and an end token."""

    def __init__(self, special: Mapping[str, int]) -> None:
        super().__init__(256 + len(special) + 1)
        self._special = special
        self.end_id = self.vocab_size - 1

    def _decode_piece(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    def encode_with_special(self, text: str) -> Iterator[tuple[int, str]]:
        pattern = "|".join(map(re.escape, self._special)) or "(?!)"
        for part in re.split(f"({pattern})", text):
            if part in self._special:
                yield self._special[part], part
            else:
                yield from ((byte, chr(byte)) for byte in part.encode())


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize("special", [{}, {"<tool_call>": 256, "</tool_call>": 257}], ids=str)
@pytest.mark.parametrize(
    ("text", "written"),
    [
        # A dot: the answer may end here. A bar: the next character is not allowed.
        ("Just a text {}.\n\n<tool", "Just a text {}.\n\n<tool."),
        (CALL, CALL + "."),
        (f"First:\n{CALL}\n{CALL} Then.", f"First:\n{CALL}\n{CALL} Then.."),
        ("<tool_call>text", "<tool_call>|"),
        (CALL.replace("add", "sub"), '<tool_call>\n{"name": "|'),
        (CALL.replace("1", '"1"'), CALL[: CALL.index("1")] + "|"),
        (CALL.replace('"b"', '"c"'), CALL[: CALL.index('b"')] + "|"),
        (CALL.replace(" 2", "\n\n2"), CALL[: CALL.index(" 2")] + "\n|"),
        (CALL[:-1], CALL[:-1]),
    ],
    ids=repr,
)
def test_calls_in_hermes_format_are_valid(
    special: Mapping[str, int], text: str, written: str
) -> None:
    if special and text.endswith("</tool_call"):
        return  # The marker is one token.
    tool_choice = read([ADD, NOW])
    assert tool_choice is not None
    guide = tool_choice.optional_guide("hermes", special)
    assert guide is not None
    assert generate(guide, text, special) == written


def test_without_parallel_calls_the_answer_ends_after_the_first_call() -> None:
    tool_choice = read([ADD], parallel=False)
    assert tool_choice is not None
    guide = tool_choice.optional_guide("hermes", {})
    assert guide is not None
    assert generate(guide, f"One: {CALL}{CALL}") == f"One: {CALL}|"
    assert generate(guide, "None.") == "None.."


def test_calls_without_a_format_are_only_parsed() -> None:
    tool_choice = read([tool(parameters={"properties": {"a": {"type": "obj"}}})])
    assert tool_choice is not None
    assert tool_choice.optional_guide("hermes", {}) is None
    weather_choice = read([WEATHER])
    assert weather_choice is not None
    assert weather_choice.optional_guide("llama3_json", {}) is None


def test_deltas_have_the_form_of_openai() -> None:
    tool_choice = read([WEATHER])
    assert tool_choice is not None
    chunks = ToolCallChunks(tool_choice, "hermes")
    assert chunks.render("Let me see.", is_last=False) == {"content": "Let me see."}
    assert chunks.render('\n<tool_call>\n{"name": "weather", ', is_last=False) == {}
    first = chunks.render('"arguments": {"city"', is_last=False)
    (call,) = first["tool_calls"]
    assert (call["index"], call["type"]) == (0, "function")
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city"'}
    second = chunks.render(': "Oslo"}}\n</tool_call>', is_last=False)
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": ': "Oslo"}'}}]}
    assert chunks.render("", is_last=True) == {}
    assert chunks.has_calls
    merged = merge_deltas(merge_deltas({"content": "a"}, first), second)
    assert merged["content"] == "a"
    assert merged["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_ids_of_calls_fit_the_templates_of_the_format() -> None:
    formats: tuple[CallFormat, ...] = get_args(CallFormat)
    for call_format in formats:
        ids = {new_call_id(call_format) for _ in range(100)}
        assert len(ids) == 100
        if call_format == "mistral":
            assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "takes_tools", "call_format"),
    [
        (CHATML, False, "json"),
        (CHATML + "{# tools #}No tools.", False, "json"),
        # Constant expressions are not computed.
        (CHATML + "{{ 'a' * 10 ** 10 }}", False, "json"),
        (WITH_TOOLS, True, "json"),
        (WITH_TOOLS + "<tool_call>", True, "hermes"),
        (WITH_TOOLS + "{{ '<|python_tag|>' }}", True, "llama3_json"),
        (WITH_TOOLS + """{{ '"parameters": ' }}""", True, "llama3_json"),
        (WITH_TOOLS + "[TOOL_CALLS]", True, "mistral"),
    ],
)
def test_the_format_of_calls_is_derived_from_the_template(
    template: str, takes_tools: bool, call_format: str
) -> None:
    assert template_takes_tools(template) is takes_tools
    assert find_call_format(template) == call_format


def test_templates_get_the_tools_as_they_were_declared() -> None:
    renderer = TemplateRenderer(TemplateSetup(WITH_TOOLS, {}, 10_000))
    messages = [{"role": "user", "content": "a"}]
    assert renderer.render(messages, {"tools": [WEATHER]}).startswith(json.dumps([WEATHER]))
    assert renderer.render(messages) == renderer.render(messages, {"tools": None})


def test_other_templates_get_a_description_of_the_tools() -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
    ]
    described = describe_tools(messages, [NOW], with_calls=True)
    assert described[0]["content"].endswith("hi") and json.dumps(NOW) in described[0]["content"]
    assert described[1]["content"] == (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    assert "tool_calls" not in described[1] and described[2] == messages[2]
    assert describe_tools(messages, [NOW], with_calls=False)[1:] == messages[1:]
    system = [{"role": "system", "content": "Be brief."}, *messages]
    described = describe_tools(system, [NOW], with_calls=True)
    assert described[0]["content"].startswith("Be brief.\n\n")
    assert described[1] == messages[0]


def test_marked_special_tokens_are_part_of_the_text(tmp_path: Path) -> None:
    for case in all_cases(tmp_path).values():
        tokenizer = case.ours
        special = next((c for c in tokenizer.control_tokens.values() if c.special), None)
        if special is None:
            continue
        ids = [*tokenizer.encode("ab"), special.id, *tokenizer.encode("cd", continues_text=True)]
        for token_ids in ((), (special.id,)):
            decoder = piece_decoder(tokenizer, keep_special_tokens=False, text_token_ids=token_ids)
            detokenizer = StopStringDetokenizer(decoder, ())
            text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
            assert (tokenizer.id_to_token(special.id) in text) is bool(token_ids)
