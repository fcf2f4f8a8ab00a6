"""Tools by OpenAI's client, on a model with random weights and a template that takes tools.

Calls that are not forced are tested in `test_tool_call_parsing`, because this model never writes
one.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.support.chat_server import BASE, PROMPT, USER, ChatServer, chat_server, tool

pytestmark = pytest.mark.slow

# Hermes' format, in short.
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if false %}<tool_call>{% endif %}assistant:"
)
TERM = {"type": "integer", "minimum": -99, "maximum": 99}
SUM = {
    "type": "object",
    "$defs": {"term": TERM},
    "properties": {"a": {"$ref": "#/$defs/term"}, "b": {"$ref": "#/$defs/term"}},
    "required": ["a", "b"],
}
COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "note": {"type": "string", "maxLength": 6}},
    "required": ["color"],
}
ADD = tool("add", parameters=SUM, description="Adds </s> two terms.")
PAINT = tool("paint", parameters=COLOR, strict=True)
NOW = tool("now")
TOOLS: list[Any] = [ADD, PAINT, NOW]
NAMED_ADD: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    with chat_server(tmp_path_factory.mktemp("tools"), TEMPLATE) as deployment:
        yield deployment


def check_calls(completion: ChatCompletion) -> list[str]:
    """Check that each choice has valid calls; return the names of the first one's."""
    for choice in completion.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        calls = choice.message.tool_calls
        assert calls
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            if call.function.name == "add":
                assert set(arguments) == {"a", "b"}
                assert all(-99 <= term <= 99 for term in arguments.values())
            elif call.function.name == "paint":
                assert arguments["color"] in ("red", "blue")
                assert set(arguments) <= {"color", "note"} and len(arguments.get("note", "")) <= 6
            else:
                assert (call.function.name, arguments) == ("now", {})
    first_calls: list[Any] = completion.choices[0].message.tool_calls or []
    return [call.function.name for call in first_calls]


def test_forced_calls_are_valid_for_any_seed(deployment: ChatServer) -> None:
    names = set()
    for seed in range(4):
        sampled: dict[str, Any] = {"seed": seed, "temperature": 1.5, "n": 4}
        completion = deployment.chat(messages=USER, tools=TOOLS, tool_choice="required", **sampled)
        names |= set(check_calls(completion))
        completion = deployment.chat(messages=USER, tools=TOOLS, tool_choice=NAMED_ADD, **sampled)
        assert check_calls(completion) == ["add"]
        completion = deployment.chat(
            messages=USER,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            **sampled,
        )
        assert len(check_calls(completion)) == 1
    assert len(names) > 1


@pytest.mark.parametrize("choice", ["required", NAMED_ADD], ids=str)
def test_streamed_calls_equal_those_of_the_response(deployment: ChatServer, choice: Any) -> None:
    options: dict[str, Any] = {
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": choice,
        "seed": 3,
        "logprobs": True,
    }
    completion = deployment.chat(**options)
    calls: list[list[str]] = []
    tokens = 0
    finish_reasons = []
    with deployment.client.chat.completions.stream(model=BASE, **options) as stream:
        for event in stream:
            if event.type != "chunk":
                continue
            (choice_chunk,) = event.chunk.choices
            finish_reasons.append(choice_chunk.finish_reason)
            tokens += len((choice_chunk.logprobs and choice_chunk.logprobs.content) or ())
            for call in choice_chunk.delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(calls) and call.function.name
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
        streamed = stream.get_final_completion()
    message_calls: list[Any] = completion.choices[0].message.tool_calls or []
    assert calls == [[call.function.name, call.function.arguments] for call in message_calls]
    assert check_calls(streamed) == check_calls(completion)
    assert (finish_reasons[-1], set(finish_reasons[:-1])) == ("tool_calls", {None})
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert tokens == len(logprobs.content)


def test_a_resumed_stream_has_the_rest_of_the_calls(deployment: ChatServer) -> None:
    options: dict[str, Any] = {
        "model": BASE,
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": NAMED_ADD,
        "seed": 3,
        "stream": True,
    }

    def stream(**fields: Any) -> list[Any]:
        extra_body = {"return_token_ids": True, **fields}
        return list(deployment.client.chat.completions.create(**options, extra_body=extra_body))

    chunks = stream()
    assert len(chunks) > 5
    token_ids: list[int] = []
    for index, chunk in enumerate(chunks[:-1]):
        token_ids += chunk.choices[0].token_ids
        resume = {
            "seed": 3,
            "token_ids": token_ids,
            "base_fingerprint": chunk.system_fingerprint,
        }
        rest = stream(resume=resume)
        assert _call_texts(rest) == _call_texts(chunks[index + 1 :])
        assert rest[-1].choices[0].finish_reason == "tool_calls"


def _call_texts(chunks: list[Any]) -> tuple[str, str]:
    """The names and the arguments of all deltas, each joined."""
    functions = [
        call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()
    ]
    return (
        "".join(function.name or "" for function in functions),
        "".join(function.arguments or "" for function in functions),
    )


def test_a_call_at_the_length_limit_is_unfinished(deployment: ChatServer) -> None:
    completion = deployment.chat(
        messages=USER, tools=TOOLS, tool_choice=NAMED_ADD, max_tokens=3, temperature=0
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "length"
    calls: list[Any] = choice.message.tool_calls or []
    assert calls[0].function.arguments.startswith("{")


def test_the_template_gets_the_tools_and_their_control_tokens_stay_text(
    deployment: ChatServer,
) -> None:
    # With ignore_eos, calls are only parsed, so that this model may write any token.
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    declarations = "".join(json.dumps(declaration) + "\n" for declaration in TOOLS)
    chat = deployment.chat(messages=USER, tools=TOOLS, **options)
    ids = deployment.ids(declarations + PROMPT)
    completion = deployment.client.completions.create(model=BASE, prompt=ids, **options)
    assert chat.usage is not None and chat.usage.prompt_tokens == len(ids)
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.choices[0].message.tool_calls is None
    without_tools = deployment.chat(messages=USER, tools=TOOLS, tool_choice="none", **options)
    assert without_tools.usage is not None
    assert without_tools.usage.prompt_tokens == len(deployment.ids(PROMPT))
