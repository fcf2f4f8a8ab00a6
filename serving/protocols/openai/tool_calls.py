"""OpenAI tools: the tools of a chat, the choice among them, and the format of forced calls.

A request declares tools (functions with a JSON schema for their arguments), and `tool_choice` says
whether the model must call one. Forced calls (`required`, or a function's name) have the same
format for all models, which guided decoding enforces: the arguments alone for a named function,
else a list of objects with `name` and `parameters`. Other calls are parsed from the text
(`tool_call_parsing`); in Hermes' format, guided decoding makes them valid. This module is
independent of streams and templates.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gpt.errors import RequestError
from serving.config import CallFormat
from serving.frontend.json_body import JSON_NULL
from serving.json_schemas import close_schema
from serving.messages import Guide
from serving.protocols.openai.tool_call_parsing import (
    HERMES_END,
    HERMES_START,
    AnswerParser,
    ArgumentsParser,
    ToolCallParser,
)
from serving.worker.guided_decoding import JSON_WHITESPACE, check_guide

JsonObject = dict[str, Any]

# Limit of the list of forced calls. Without a limit, a small model may repeat calls up to its
# length limit, which would cut the last call off.
FORCED_CALLS_MAX = 16
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NAMES_QUOTED_MAX = 10


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: JsonObject  # The JSON schema of the arguments.
    strict: bool
    declaration: JsonObject  # As in the request, for the chat template.


@dataclass(frozen=True)
class ToolChoice:
    """The tools that a chat may call, and whether it must call one of them.

    `mode` "named": the only tool must be called.
    """

    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "named"]
    parallel: bool = True  # Whether an answer may have several calls.

    @property
    def declarations(self) -> list[JsonObject]:
        return [tool.declaration for tool in self.tools]

    def guide(self) -> Guide | None:
        """Return the format of forced calls; None if calls are not forced."""
        if self.mode == "auto":
            return None
        try:
            return Guide("json", json.dumps(self._forced_schema()))
        except RecursionError:
            raise RequestError("tools has a schema that is nested too deeply", "tools") from None

    def _forced_schema(self) -> JsonObject:
        if self.mode == "named":
            return _arguments_schema(self.tools[0])
        schema = self._call_schema("parameters")
        return {
            "type": "array",
            "items": {"anyOf": schema["anyOf"]},
            "minItems": 1,
            "maxItems": FORCED_CALLS_MAX if self.parallel else 1,
            "$defs": schema["$defs"],
        }

    def _call_schema(self, arguments_key: str) -> JsonObject:
        """Return the schema of one call: an object with the name and the arguments of a tool."""
        definitions = {
            str(index): _move_refs(_arguments_schema(tool), f"#/$defs/{index}")
            for index, tool in enumerate(self.tools)
        }
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    arguments_key: {"$ref": f"#/$defs/{index}"},
                },
                "required": ["name", arguments_key],
            }
            for index, tool in enumerate(self.tools)
        ]
        return {"anyOf": calls, "$defs": definitions}

    def optional_guide(self, call_format: CallFormat, markers: Mapping[str, int]) -> Guide | None:
        """Return the format of an answer of text and valid calls; None if there is no such format.

        `markers`: the ids of the markers of calls that are special tokens. Only in Hermes' format,
        a marker tells where a call begins and where it ends.
        """
        if call_format != "hermes":
            return None
        try:
            schema = close_schema(self._call_schema("arguments"))
            schema["x-guidance"] = {"whitespace_pattern": JSON_WHITESPACE}
            guide = Guide("grammar", _hermes_grammar(schema, markers, self.parallel))
            # Any stop token serves for the check.
            check_guide(guide, (0,))
        except (RequestError, RecursionError):
            return None  # A schema is too large or not supported: calls are parsed only.
        return guide

    def parser(self, call_format: CallFormat) -> AnswerParser:
        """Return a parser of one answer. `call_format`: the format of calls that are not forced."""
        if self.mode == "named":
            return ArgumentsParser(self.tools[0].name)
        names = {tool.name for tool in self.tools}
        return ToolCallParser(
            "json" if self.mode == "required" else call_format,
            names,
            None if self.parallel else 1,
        )


def _hermes_grammar(schema: JsonObject, markers: Mapping[str, int], parallel: bool) -> str:
    """Return a grammar (Lark) of texts with calls in Hermes' format."""
    end = f"<[{markers[HERMES_END]}]>" if HERMES_END in markers else json.dumps(HERMES_END)
    lines = [
        "start: call* text" if parallel else "start: text | call",
        "text: TEXT",
        f"call: call_start /\\n?/ object /\\n?/ {end}",
        f"object: %json {json.dumps(schema)}",
        r"TEXT: /(.|\n)*/",
    ]
    if HERMES_START in markers:
        lines.append(f"call_start: TEXT <[{markers[HERMES_START]}]>")
    else:
        lines.append(f"call_start[lazy]: TEXT {json.dumps(HERMES_START)}")
    return "\n".join(lines) + "\n"


def new_call_id(call_format: CallFormat) -> str:
    """Return a random id of a call. Mistral's templates accept only ids of nine letters."""
    if call_format == "mistral":
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def read_tool_choice(
    raw_tools: list[msgspec.Raw] | None, raw_choice: msgspec.Raw, parallel: bool | None
) -> ToolChoice | None:
    """Read the fields `tools`, `tool_choice` and `parallel_tool_calls`; None: no tool is used."""
    choice = _decode(raw_choice, "tool_choice") if raw_choice != JSON_NULL else "auto"
    if choice == "none":
        return None
    if not raw_tools:
        # Without tools, "auto" has the effect of "none".
        if choice == "auto":
            return None
        raise RequestError(
            "tool_choice needs tools; add tools, or remove tool_choice", "tool_choice"
        )
    tools = {}
    for index, raw_tool in enumerate(raw_tools):
        tool = _read_tool(f"tools[{index}]", _decode(raw_tool, "tools"))
        if tool.name in tools:
            raise RequestError(
                f"tools[{index}] has the name {tool.name!r} of an earlier tool; rename one of them",
                "tools",
            )
        tools[tool.name] = tool
    is_parallel = parallel is not False
    match choice:
        case "auto":
            return ToolChoice(tuple(tools.values()), "auto", is_parallel)
        case "required" | "any":  # "any" is Mistral's name.
            return ToolChoice(tuple(tools.values()), "required", is_parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice((_find_tool(tools, name),), "named")
        case {"type": "function", "name": str(name)}:
            return ToolChoice((_find_tool(tools, name),), "named")
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed},
        }:
            names = [_declared_name(declaration) for declaration in allowed]
            allowed_tools = {name: _find_tool(tools, name) for name in names}
            return ToolChoice(tuple(allowed_tools.values()), mode, is_parallel)
    raise RequestError(
        f"tool_choice is {json.dumps(choice)[:100]}; it must be 'none', 'auto', 'required' or "
        '{"type": "function", "function": {"name": NAME}}',
        "tool_choice",
    )


def _decode(raw: msgspec.Raw, field: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(f"{field} has invalid JSON or text that is not UTF-8", field) from None
    except RecursionError:
        raise RequestError(f"{field} is nested too deeply", field) from None


def _declared_name(declaration: Any) -> str:
    match declaration:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise RequestError(
        "tool_choice.allowed_tools.tools has an entry without a function's name", "tool_choice"
    )


def _find_tool(tools: dict[str, Tool], name: str) -> Tool:
    if name in tools:
        return tools[name]
    names = ", ".join(map(repr, list(tools)[:_NAMES_QUOTED_MAX]))
    raise RequestError(
        f"tool_choice names {name[:100]!r}, which is not in tools; choose one of: {names}",
        "tool_choice",
    )


def _read_tool(path: str, declaration: Any) -> Tool:
    match declaration:
        case {"type": "function", "function": dict(function)}:
            pass
        case _:
            raise RequestError(
                f'{path} is not a function; send {{"type": "function", "function": '
                '{"name": NAME, "parameters": SCHEMA}}',
                "tools",
            )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
        raise RequestError(
            f"{path}.function.name is {ascii(name)[:100]}; it must have 1 to 128 letters, digits "
            "or characters of _.:/-",
            "tools",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestError(
            f"{path}.function.parameters is not an object; give a JSON schema", "tools"
        )
    return Tool(name, parameters, function.get("strict") is True, declaration)


def _arguments_schema(tool: Tool) -> JsonObject:
    """Return the schema of a tool's arguments, which are always an object."""
    schema: JsonObject = tool.parameters
    if "$ref" not in schema:
        schema = {**schema, "type": "object"}
    if tool.strict:
        schema = close_schema(schema, strict=True)
    return schema


def _move_refs(schema: Any, prefix: str) -> Any:
    """Adapt the references of a schema that becomes the part `prefix` of another schema."""
    if isinstance(schema, list):
        return [_move_refs(part, prefix) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: prefix + content[1:]
        if name == "$ref" and isinstance(content, str) and content.startswith("#")
        else _move_refs(content, prefix)
        for name, content in schema.items()
    }
