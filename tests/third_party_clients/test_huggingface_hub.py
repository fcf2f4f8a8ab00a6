"""huggingface_hub's InferenceClient, unmodified, for chats by the OpenAI API and texts by TGI's.

The oracles are OpenAI's client and preamble.v1 on the same server.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from clients.client import Options
from tests.support.chat_server import BASE, USER, ChatServer, chat_server, tool
from tests.support.chat_templates import HERMES
from tests.support.servers import WAIT_S

pytestmark = pytest.mark.clients

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

TEXT = "twelve and thirty? answer:"
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    with chat_server(tmp_path_factory.mktemp("hub"), HERMES) as deployment:
        yield deployment


@pytest.fixture
def client(deployment: ChatServer) -> Any:
    return hub.InferenceClient(f"http://{deployment.server.http_address}", timeout=WAIT_S)


def chat_stream_text(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("model", [None, BASE])
def test_chats_equal_those_of_openais_client(
    deployment: ChatServer, client: Any, model: str | None
) -> None:
    expected = deployment.chat(**GREEDY)
    chat = client.chat_completion(USER, model=model, **GREEDY)
    streamed = client.chat_completion(USER, model=model, stream=True, **GREEDY)
    alias = client.chat.completions.create(messages=USER, **GREEDY)

    assert chat.choices[0].message.content == expected.choices[0].message.content
    assert chat_stream_text(streamed) == expected.choices[0].message.content
    assert alias.choices[0].message.content == expected.choices[0].message.content
    assert expected.usage is not None
    assert chat.usage.total_tokens == expected.usage.total_tokens


def test_base_urls_of_openai_work_too(deployment: ChatServer) -> None:
    client = hub.InferenceClient(base_url=deployment.url, api_key="none", timeout=WAIT_S)
    chat = client.chat_completion(USER, logprobs=True, top_logprobs=2, **GREEDY)
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens


def test_schemas_and_forced_tool_calls_are_enforced(client: Any) -> None:
    schema = {"name": "weather", "schema": SCHEMA, "strict": True}
    for response_format in (
        {"type": "json_schema", "json_schema": schema},
        {"type": "json", "value": SCHEMA},
    ):
        chat = client.chat_completion(
            USER, response_format=response_format, max_tokens=600, temperature=0
        )
        assert 1 <= json.loads(chat.choices[0].message.content)["days"] <= 9
    chat = client.chat_completion(
        USER,
        tools=[tool("get_weather", parameters=SCHEMA)],
        tool_choice="required",
        max_tokens=2000,
        temperature=0,
    )
    calls = chat.choices[0].message.tool_calls
    assert calls and chat.choices[0].finish_reason == "tool_calls"
    for call in calls:
        assert call.function.name == "get_weather"
        assert 1 <= json.loads(call.function.arguments)["days"] <= 9


def test_generated_texts_equal_those_of_preamble_v1(deployment: ChatServer, client: Any) -> None:
    with deployment.server.client() as preamble_client:
        expected = preamble_client.generate(TEXT, Options(max_new_tokens=12)).text
        sampling = Options(max_new_tokens=12, temperature=0.9, top_k=20, seed=7)
        sampled = preamble_client.generate(TEXT, sampling).text
    text = client.text_generation(TEXT, max_new_tokens=12)
    streamed = client.text_generation(TEXT, max_new_tokens=12, stream=True)
    details = client.text_generation(
        TEXT, max_new_tokens=12, temperature=0.9, top_k=20, seed=7, details=True
    )
    assert text == "".join(streamed) == expected
    assert details.generated_text == sampled
    assert details.details.generated_tokens == len(details.details.tokens)


def test_async_client(deployment: ChatServer, client: Any) -> None:
    async def texts() -> tuple[str, str]:
        address = f"http://{deployment.server.http_address}"
        async with hub.AsyncInferenceClient(address, timeout=WAIT_S) as async_client:
            text = await async_client.text_generation(TEXT, max_new_tokens=12)
            chunks = await async_client.chat_completion(USER, stream=True, **GREEDY)
            return text, chat_stream_text([chunk async for chunk in chunks])

    text, chat_text = asyncio.run(texts())
    assert text == client.text_generation(TEXT, max_new_tokens=12)
    assert chat_text == deployment.chat(**GREEDY).choices[0].message.content


def test_errors_have_the_clients_type(client: Any) -> None:
    with pytest.raises(hub.errors.HfHubHTTPError, match="404"):
        client.chat_completion(USER, model="unknown-model")
