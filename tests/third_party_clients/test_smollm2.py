"""SmolLM2-135M-Instruct, a real model in bf16: forced tool calls, and scores of lm_eval.

Forced calls must be valid for any random number, so a hundred chats draw different ones. The scores
of the harness by the server must equal those by transformers, within the rounding of bf16.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.chat_server import tool
from tests.support.evaluation_harness import CHOICES, Document, Harness
from tests.support.servers import Server, serving
from tests.support.smollm2 import NAME, smollm2_checkpoint

pytestmark = pytest.mark.soak

CHATS = 100
CONCURRENT = 20
TIMEOUT_S = 900.0
QUESTIONS = (
    "What is the weather in Paris?",
    "Add 3 and 9.",
    "Is it cold in Oslo today?",
    "Tell me a joke.",
    "sum of 12 and 30",
)
TERM = {"type": "integer", "minimum": -1000, "maximum": 1000}
ADD = tool(
    "add",
    description="Add two numbers",
    parameters={
        "type": "object",
        "$defs": {"term": TERM},
        "properties": {"a": {"$ref": "#/$defs/term"}, "b": {"$ref": "#/$defs/term"}},
        "required": ["a", "b"],
    },
)
GET_WEATHER = tool(
    "get_weather",
    description="Get the weather of a city",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 40},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
    },
)
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Hungary": "Budapest",
}
# Differences of bf16 results between two orders of summation: of one log-probability, and of the
# share of correct documents.
LOGPROB_ATOL = 0.25
ACCURACY_ATOL = 1 / len(CAPITALS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = tmp_path_factory.mktemp("smollm2") / "s.yaml"
    with serving(smollm2_checkpoint(), settings, dtype="bfloat16") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    base_url = f"http://{server.http_address}/v1"
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S)


def test_answers_are_those_of_a_chat_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=16,
    )
    assert "Paris" in (completion.choices[0].message.content or "")


def is_valid(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        terms = list(arguments.values())
        return set(arguments) == {"a", "b"} and all(
            isinstance(term, int) and -1000 <= term <= 1000 for term in terms
        )
    return (
        call.function.name == "get_weather"
        and set(arguments) == {"city", "unit"}
        and arguments["unit"] in ("celsius", "fahrenheit")
        and len(arguments["city"]) <= 40
    )


def test_a_hundred_forced_tool_calls_are_valid(client: openai.OpenAI) -> None:
    def call_tools(number: int) -> str | None:
        """Send a chat with a required or a named tool call; return a description of an error."""
        name = ("add", "get_weather")[number // 2 % 2]
        named = {"type": "function", "function": {"name": name}}
        is_named = number % 2 == 0
        options: dict[str, Any] = {"tools": [GET_WEATHER, ADD]}
        options["tool_choice"] = named if is_named else "required"
        completion: Any = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            seed=number,
            temperature=1.0,
            **options,
        )
        (choice,) = completion.choices
        calls = choice.message.tool_calls or []
        names = {call.function.name for call in calls}
        valid = choice.finish_reason == "tool_calls" and calls and all(map(is_valid, calls))
        if valid and (not is_named or names == {name}):
            return None
        return f"chat {number}: {choice.finish_reason} {choice.message}"

    with ThreadPoolExecutor(CONCURRENT) as executor:
        errors = list(filter(None, executor.map(call_tools, range(CHATS))))
    assert errors == []


def capital_documents() -> list[Document]:
    capitals = list(CAPITALS.values())
    return [
        {
            "question": f"The capital of {country} is",
            "choices": [f" {capitals[(index + step) % len(capitals)]}" for step in range(4)],
            "answer": 0,
        }
        for index, country in enumerate(CAPITALS)
    ]


@pytest.mark.parametrize("tokenizer", ["local", "remote"])
def test_lm_eval_scores_equal_those_of_transformers(
    server: Server, tmp_path: Path, tokenizer: str
) -> None:
    harness = Harness(tmp_path)
    harness.write_documents(CHOICES, capital_documents())
    checkpoint = smollm2_checkpoint()
    arguments: dict[str, object] = {"tokenizer_backend": "remote"}
    if tokenizer == "local":
        arguments = {"tokenizer_backend": "huggingface", "tokenizer": checkpoint}
    scores = harness.score_completions(server.http_address, NAME, [CHOICES], **arguments)
    expected = harness.score_transformers(checkpoint, "bfloat16", [CHOICES])
    assert scores.accuracy == pytest.approx(expected.accuracy, abs=ACCURACY_ATOL)
    assert expected.accuracy > 0.5
    for choices, expected_choices in zip(scores.choices, expected.choices, strict=True):
        assert [logprob for logprob, _ in choices] == pytest.approx(
            [logprob for logprob, _ in expected_choices], abs=LOGPROB_ATOL
        )
