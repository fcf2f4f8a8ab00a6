"""OpenAI Responses API, by OpenAI's client, compared with chats on the same server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types.responses import Response

from tests.support.servers import WAIT_S, Server, eventually, serving, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

BASE = "checkpoint"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION = "twelve and thirty?"


class Deployment:
    """A server of a model with a chat template, and a client of it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = f"http://{server.http_address}/v1"
        self.client = openai.OpenAI(
            base_url=self.url, api_key="none", max_retries=0, timeout=WAIT_S
        )

    def create(self, input: Any = QUESTION, **options: Any) -> Any:
        options = {"model": BASE, "max_output_tokens": 12, "temperature": 0, **options}
        return self.client.responses.create(input=input, **options)

    def chat(self, messages: list[Any], **options: Any) -> Any:
        options = {"model": BASE, "max_tokens": 12, "temperature": 0, **options}
        return self.client.chat.completions.create(messages=messages, **options)

    def chat_text(self, *messages: tuple[str, str], **options: Any) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        return str(self.chat(conversation, **options).choices[0].message.content)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("responses")
    (folder / "template.jinja").write_text(TEMPLATE)
    settings: dict[str, Any] = {"chat_template": str(folder / "template.jinja")}
    with serving(write_checkpoint(folder), folder / "s.yaml", **settings) as server:
        yield Deployment(server)


def test_responses_equal_chats(deployment: Deployment) -> None:
    response = deployment.create()
    chat = deployment.chat([{"role": "user", "content": QUESTION}])

    assert isinstance(response, Response) and response.id.startswith("resp_")
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"  # The length limit ended it.
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.model == BASE and response.error is None
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens == 12
    assert response.usage.total_tokens == chat.usage.total_tokens
    sampled = deployment.create(temperature=0.9, top_p=0.8, extra_body={"seed": 7})
    expected = deployment.chat_text(("user", QUESTION), temperature=0.9, top_p=0.8, seed=7)
    assert sampled.output_text == expected
    assert (sampled.temperature, sampled.top_p) == (0.9, 0.8)


def test_inputs_are_messages_and_earlier_outputs(deployment: Deployment) -> None:
    expected = deployment.chat_text(
        ("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c\nd")
    )
    earlier = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
    }
    parts = [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]
    messages = [{"role": "user", "content": "a"}, earlier, {"role": "user", "content": parts}]

    by_instructions = deployment.create(messages, instructions="be brief")
    by_role = deployment.create([{"role": "developer", "content": "be brief"}, *messages])

    assert by_instructions.output_text == by_role.output_text == expected
    assert by_instructions.instructions == "be brief"
    first = deployment.create()
    conversation = [{"role": "user", "content": QUESTION}, *first.output]
    second = deployment.create([*conversation, {"role": "user", "content": "and?"}])
    assert second.output_text == deployment.chat_text(
        ("user", QUESTION), ("assistant", first.output_text), ("user", "and?")
    )


def test_events_add_up_to_the_response(deployment: Deployment) -> None:
    unary = deployment.create()
    events = list(deployment.create(stream=True))

    types = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    # On a busy machine an event may have the tokens of several steps.
    assert types[4:-4] == ["response.output_text.delta"] * len(deltas) and deltas
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == unary.output_text == events[-4].text
    assert {event.item_id for event in deltas} == {events[2].item.id}
    final = events[-1].response
    assert final.output_text == unary.output_text and final.usage == unary.usage
    assert events[0].response.id == final.id and events[0].response.status == "in_progress"


def test_structured_outputs_match_their_schema(deployment: Deployment) -> None:
    schema = {
        "type": "object",
        "properties": {"digit": {"type": "integer", "enum": [1, 2]}},
        "required": ["digit"],
        "additionalProperties": False,
    }
    text_format: Any = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = deployment.create(text={"format": text_format}, max_output_tokens=60)
    assert json.loads(response.output_text)["digit"] in (1, 2)
    assert response.status == "completed" and response.text.format.name == "answer"
    with deployment.client.responses.stream(
        model=BASE,
        input=QUESTION,
        temperature=0,
        text={"format": text_format},
        max_output_tokens=60,
    ) as stream:
        assert stream.get_final_response().output_text == response.output_text
    json_object = deployment.create(text={"format": {"type": "json_object"}}, max_output_tokens=5)
    assert json_object.output_text.lstrip().startswith("{")


def test_log_probabilities_equal_those_of_chats(deployment: Deployment) -> None:
    include = ["message.output_text.logprobs"]
    response = deployment.create(include=include, top_logprobs=2)
    chat = deployment.chat([{"role": "user", "content": QUESTION}], logprobs=True, top_logprobs=2)
    tokens = response.output[0].content[0].logprobs
    assert [token.to_dict() for token in tokens] == [
        token.to_dict() for token in chat.choices[0].logprobs.content
    ]


def test_fields_that_ask_for_nothing_are_accepted(deployment: Deployment) -> None:
    expected = deployment.create().output_text
    for fields in (
        {"store": False, "previous_response_id": None, "background": False},
        {"truncation": "disabled", "service_tier": "auto", "parallel_tool_calls": True},
        {"tools": [], "tool_choice": "auto", "reasoning": {"effort": "none"}},
        {"metadata": {"a": "b"}, "user": "a", "prompt_cache_key": "a", "max_tool_calls": 3},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "include": []},
        {"extra_body": {"conversation": None, "prompt": None, "reasoning": None}},
    ):
        assert deployment.create(**fields).output_text == expected, fields


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"input": None}, 400, "input", "send a text or messages"),
        ({"input": []}, 400, "input", "send a text or messages"),
        ({"input": [{"role": "robot", "content": "a"}]}, 400, "input", "role"),
        ({"input": [{"content": "a"}]}, 400, "input", "input[0] has no role"),
        ({"input": [{"role": "user"}]}, 400, "input", "has no content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            400,
            "input",
            "accept text only",
        ),
        ({"input": [{"type": "function_call_output"}]}, 501, "input", "only messages"),
        ({"store": True}, 501, "store", "stores no responses"),
        ({"background": True}, 501, "background", "stores no responses"),
        ({"previous_response_id": "resp_1"}, 501, "previous_response_id", "stores no responses"),
        ({"conversation": "c"}, 501, "conversation", "stores no responses"),
        ({"truncation": "auto"}, 501, "truncation", "disabled"),
        ({"reasoning": {"effort": "high"}}, 501, "reasoning", "reasoning effort"),
        ({"tools": [{"type": "function", "name": "f"}]}, 400, "tools", "tools"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "max_output_tokens is 0"),
        (
            {"input": "word " * 3900, "max_output_tokens": 5},
            400,
            "input",
            "max_output_tokens (5)",
        ),
        ({"max_tokens": 5}, 400, "max_tokens", "use max_output_tokens"),
        ({"messages": []}, 400, "messages", "use input"),
        ({"max_output_token": 5}, 400, "max_output_token", "did you mean 'max_output_tokens'"),
        ({"temperature": -1}, 400, "temperature", "temperature is -1"),
        ({"model": "dog"}, 404, "model", "no model 'dog'"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            400,
            "text.format",
            "add the schema",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            400,
            "text.format",
            "",
        ),
    ],
)
def test_invalid_requests_are_refused(
    deployment: Deployment, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    body = {"input": QUESTION, "max_output_tokens": 4, **fields}
    for stream in (False, True):
        response = httpx.post(
            f"{deployment.url}/responses", json={**body, "stream": stream}, timeout=WAIT_S
        )
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param and message in error["message"]


def test_stored_responses_do_not_exist(deployment: Deployment) -> None:
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        deployment.client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        deployment.client.responses.cancel("resp_1")


def test_a_disconnect_cancels_the_response(deployment: Deployment) -> None:
    options = {"max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with deployment.create(stream=True, **options) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    eventually(lambda: deployment.server.metric("preamble_scheduler_running_requests") == 0)
