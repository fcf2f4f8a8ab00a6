"""Tools in chat prompts: the format of calls in a chat template, and a description of the tools.

A template that has the variable `tools` describes the tools to the model. For other templates,
`describe_tools` adds a description to the messages, in the format that most models with tools
know (Hermes). The format in which the model writes calls is derived from the template's text. This
module renders no template, and is independent of the protocols.
"""

import json
from collections.abc import Sequence
from typing import Any

import jinja2.nodes

from serving.admission.template_sandbox import parse_template
from serving.config import CallFormat

JsonObject = dict[str, Any]

# Texts of templates, and the call format of the models that have such templates. The first match
# counts. Llama 3's templates differ in the rest.
_FORMAT_TEXTS: Sequence[tuple[str, CallFormat]] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
_DESCRIPTION = """\
You can call functions to answer the user. The functions are described in <tools></tools>, one \
JSON object per line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments in <tool_call></tool_call>:
<tool_call>
{{"name": FUNCTION_NAME, "arguments": ARGUMENTS_OBJECT}}
</tool_call>"""


def template_takes_tools(template: str) -> bool:
    """Whether a template reads the variable `tools`. The template must have no syntax error."""
    # The template is only parsed: jinja2's compiler, and so `jinja2.meta`, computes constant
    # expressions, which could exhaust the memory of this process.
    names = parse_template(template).find_all(jinja2.nodes.Name)
    return any(name.name == "tools" and name.ctx == "load" for name in names)


def find_call_format(template: str) -> CallFormat:
    """Return the format in which a template writes calls; "json" if the template does not say."""
    return next((name for text, name in _FORMAT_TEXTS if text in template), "json")


def describe_tools(
    messages: list[JsonObject], tools: list[JsonObject], *, with_calls: bool
) -> list[JsonObject]:
    """Return the messages with a description of the tools.

    `with_calls`: write the calls of earlier messages into their content, because the template
    ignores them.

    The description is part of the system message, else of the first message, because some
    templates accept no system message.
    """
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = _DESCRIPTION.format(tools=lines)
    first, *others = map(_calls_as_text, messages) if with_calls else messages
    content = f"{first['content']}\n\n{description}"
    if first["role"] != "system":
        content = f"{description}\n\n{first['content']}"
    return [{**first, "content": content}, *others]


def _calls_as_text(message: JsonObject) -> JsonObject:
    """Write the tool calls of an earlier message into its content."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, (message["content"], *texts)))
    return {name: field for name, field in message.items() if name != "tool_calls"} | {
        "content": content
    }
