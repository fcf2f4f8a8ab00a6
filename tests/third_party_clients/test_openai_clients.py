"""OpenAI's own client packages, for Python and for Node, unmodified against a real server.

The programs of both languages print the same report. tests/serving/protocols/openai has the tests
of each field by the Python client.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.chat_server import BASE, USER, ChatServer, chat_server
from tests.support.chat_templates import HERMES
from tests.support.client_environments import PROGRAMS, run_node_program, run_program
from tests.support.servers import eventually

pytestmark = pytest.mark.clients

QUESTION = USER[0]["content"]
RUNNING = "preamble_scheduler_running_requests"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    with chat_server(tmp_path_factory.mktemp("openai"), HERMES) as deployment:
        yield deployment


def check_report(deployment: ChatServer, report: dict[str, Any]) -> None:
    greedy: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    chat = deployment.chat(**greedy)
    completion = deployment.client.completions.create(model=BASE, prompt=QUESTION, **greedy)
    assert chat.usage is not None
    assert report["models"][0] == BASE
    assert report["chats"] == [chat.choices[0].message.content] * len(report["chats"])
    assert len(report["chats"]) == 4
    assert report["completions"] == [completion.choices[0].text] * 2
    assert report["usages"] == [chat.usage.total_tokens] * 3
    assert report["logprobs"] == chat.usage.completion_tokens
    # The calls and the structured text are valid, because the server enforces the schema.
    for call in (report["call"], report["streamed_call"]):
        assert call["name"] == "get_weather"
        assert 1 <= json.loads(call["arguments"])["days"] <= 9
    assert report["streamed_call"] == report["call"]
    assert 1 <= json.loads(report["structured"])["days"] <= 9
    (unknown_model, invalid) = report["errors"]
    assert unknown_model["status"] == 404 and invalid["status"] == 400
    assert unknown_model["type"] == "NotFoundError" and invalid["type"] == "BadRequestError"
    ids = [report["request_id"], unknown_model["request_id"], invalid["request_id"]]
    assert all(ids) and len(set(ids)) == 3
    # The program left a stream after its first event.
    assert report["aborted"]
    eventually(lambda: deployment.server.metric(RUNNING) == 0)


def test_openai_for_python(deployment: ChatServer) -> None:
    check_report(deployment, run_program(None, "openai_calls.py", deployment.url, BASE, QUESTION))


def test_openai_for_node(deployment: ChatServer) -> None:
    program = str(PROGRAMS / "openai_calls.mjs")
    (report,) = run_node_program(program, deployment.url, BASE, QUESTION)
    check_report(deployment, report)
