"""Client libraries over the OpenAI API: langchain-openai, litellm, llama-index and instructor.

Each library runs unmodified, in a process of its own environment. The oracle is OpenAI's client on
the same server, which computes in fp64, where equal requests have equal answers. The model has
random weights, so it calls tools and writes JSON only if the server enforces it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.support.chat_server import BASE, USER, ChatServer, chat_server
from tests.support.chat_templates import HERMES
from tests.support.client_environments import run_program

pytestmark = pytest.mark.clients

QUESTION = USER[0]["content"]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    with chat_server(tmp_path_factory.mktemp("libraries"), HERMES) as deployment:
        yield deployment


@pytest.fixture
def chat(deployment: ChatServer) -> ChatCompletion:
    return deployment.chat(**GREEDY)


@pytest.fixture
def chat_text(chat: ChatCompletion) -> str:
    text = chat.choices[0].message.content
    assert text
    return text


@pytest.fixture
def chat_tokens(chat: ChatCompletion) -> int:
    assert chat.usage is not None
    return chat.usage.completion_tokens


@pytest.fixture
def completion_text(deployment: ChatServer) -> str:
    completion = deployment.client.completions.create(model=BASE, prompt=QUESTION, **GREEDY)
    assert completion.choices[0].text
    return str(completion.choices[0].text)


def check_weather(fields: dict[str, Any], *names: str) -> None:
    """Check the schema that the programs of all libraries declare."""
    assert set(fields) == set(names)
    assert len(fields["city"]) <= 12
    assert fields.get("unit", "celsius") in ("celsius", "fahrenheit")
    assert 1 <= fields.get("days", 1) <= 9


def test_langchain_openai(
    deployment: ChatServer, chat_text: str, chat_tokens: int, completion_text: str
) -> None:
    report = run_program(
        "langchain-openai", "langchain_openai_calls.py", deployment.url, BASE, QUESTION
    )
    assert report["texts"] == dict.fromkeys(report["texts"], chat_text)
    assert report["completion"] == report["completion_stream"] == completion_text
    assert report["usage"]["output_tokens"] == report["logprob_tokens"] == chat_tokens
    for fields in (*report["structured"].values(), report["structured_strict"]):
        check_weather(fields, "city", "unit", "days")
    for calls in report["calls"].values():
        assert calls
        for name, arguments in calls:
            assert name == "Weather"
            check_weather(arguments, "city", "unit", "days")
    assert report["streamed_calls"] == report["calls"]["named"]
    assert report["reply"]
    assert "checkpoint-unknown" in report["error"]


def test_litellm(
    deployment: ChatServer, chat_text: str, chat_tokens: int, completion_text: str
) -> None:
    address = deployment.server.http_address
    report = run_program("litellm", "litellm_calls.py", address, BASE, QUESTION)
    assert set(report["chats"]) == {"openai", "hosted_vllm"}
    for calls in report["chats"].values():
        assert calls["texts"] == [chat_text] * 6
        assert calls["tokens"] == chat_tokens
        name, arguments = calls["call"]
        assert name == "get_weather"
        check_weather(arguments, "city", "days")
        check_weather(calls["structured"], "city", "days")
    assert report["completions"] == [completion_text] * 2
    # A complete answer of Triton's text backends begins with the prompt.
    assert report["triton"] == [QUESTION + completion_text, completion_text]
    assert report["error"] == "NotFoundError"


def test_llama_index(deployment: ChatServer, chat_text: str, completion_text: str) -> None:
    report = run_program("llama-index", "llama_index_calls.py", deployment.url, BASE, QUESTION)
    assert report["chats"] == [chat_text] * 4
    assert report["completions"] == [completion_text] * 2
    check_weather(report["structured"], "city", "unit")


def test_instructor(deployment: ChatServer) -> None:
    report = run_program("instructor", "instructor_calls.py", deployment.url, BASE, QUESTION)
    assert set(report) == {"TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"}
    for response, streamed in report.values():
        check_weather(response, "city", "unit")
        assert streamed == response
