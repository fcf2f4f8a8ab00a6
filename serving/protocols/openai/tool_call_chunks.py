"""OpenAI tool call chunks: the deltas of an answer that may contain calls of tools.

`ToolCallChunks` converts the text of an answer to deltas: the first delta of a call has its id and
name, and the following deltas have fragments of its arguments. `merge_deltas` joins the deltas of
an answer for a response without `stream`. This module does not know how a model writes calls.
"""

from typing import Any

from serving.config import CallFormat
from serving.protocols.openai.tool_call_parsing import CallStart, Delta, TextDelta
from serving.protocols.openai.tool_calls import ToolChoice, new_call_id

JsonObject = dict[str, Any]


class ToolCallChunks:
    """The deltas of one answer. `call_format`: the format in which the model writes calls."""

    def __init__(self, tool_choice: ToolChoice, call_format: CallFormat) -> None:
        self._parser = tool_choice.parser(call_format)
        self._call_format = call_format
        self.has_calls = False

    def render(self, text: str, *, is_last: bool) -> JsonObject:
        """Return the delta of the next text of the answer; empty if nothing is known yet."""
        rendered: JsonObject = {}
        for delta in self._parser.push(text) + (self._parser.finish() if is_last else []):
            rendered = merge_deltas(rendered, self._render_delta(delta))
        return rendered

    def _render_delta(self, delta: Delta) -> JsonObject:
        if isinstance(delta, TextDelta):
            return {"content": delta.text}
        call: JsonObject = {"index": delta.index}
        if isinstance(delta, CallStart):
            self.has_calls = True
            call |= {"id": new_call_id(self._call_format), "type": "function"}
            call["function"] = {"name": delta.name, "arguments": ""}
        else:
            call["function"] = {"arguments": delta.text}
        return {"tool_calls": [call]}


def merge_deltas(delta: JsonObject, next_delta: JsonObject) -> JsonObject:
    """Join two consecutive deltas of an answer."""
    merged = {**delta, **next_delta}
    if "content" in delta and "content" in next_delta:
        merged["content"] = delta["content"] + next_delta["content"]
    if "tool_calls" in delta and "tool_calls" in next_delta:
        calls = {call["index"]: call for call in delta["tool_calls"]}
        for call in next_delta["tool_calls"]:
            earlier = calls.get(call["index"])
            calls[call["index"]] = call if earlier is None else _extend_call(earlier, call)
        merged["tool_calls"] = list(calls.values())
    return merged


def _extend_call(call: JsonObject, fragment: JsonObject) -> JsonObject:
    arguments = call["function"]["arguments"] + fragment["function"]["arguments"]
    return {**call, "function": {**call["function"], "arguments": arguments}}
