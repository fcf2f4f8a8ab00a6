"""Calls of langchain-openai to an OpenAI server, for a separate process.

    python langchain_openai_calls.py BASE_URL MODEL QUESTION

Prints the responses as JSON.
"""

import asyncio
import json
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

TIMEOUT_S = 60.0


class Weather(BaseModel):
    """Get the weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]
    days: int = Field(ge=1, le=9)


def chat_model(base_url: str, model: str, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 12, **options}
    return ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model=model,
        max_retries=0,
        timeout=TIMEOUT_S,
        **options,
    )


def text_calls(base_url: str, model: str, question: str) -> dict[str, Any]:
    chat = chat_model(base_url, model)
    response = chat.invoke(question)
    with_logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
    # Fields with values that have no effect.
    neutral_fields = chat_model(
        base_url,
        model,
        seed=-1,
        logprobs=True,
        top_logprobs=0,
        service_tier="auto",
        verbosity="low",
        reasoning_effort="none",
        use_responses_api=False,
    )
    completions = OpenAI(
        base_url=base_url, api_key="none", model=model, temperature=0, max_tokens=12
    )
    return {
        "texts": {
            "invoke": response.content,
            "stream": "".join(chunk.content for chunk in chat.stream(question)),
            "batch": chat.batch([question, question])[1].content,
            "async": asyncio.run(chat.ainvoke(question)).content,
            "logprobs": with_logprobs.content,
            "neutral_fields": neutral_fields.invoke(question).content,
            "responses": chat_model(base_url, model, use_responses_api=True).invoke(question).text,
        },
        "completion": completions.invoke(question),
        "completion_stream": "".join(completions.stream(question)),
        "usage": response.usage_metadata,
        "logprob_tokens": len(with_logprobs.response_metadata["logprobs"]["content"]),
    }


def structured_calls(base_url: str, model: str, question: str) -> dict[str, Any]:
    chat = chat_model(base_url, model, max_tokens=1500)
    forced: dict[str, Any] = {
        "any": chat.bind_tools([Weather], tool_choice="any"),
        "named": chat.bind_tools([Weather], tool_choice="Weather"),
        "strict": chat.bind_tools([Weather], tool_choice="Weather", strict=True),
    }
    streamed = reduce(add, forced["named"].stream(question))
    response = forced["named"].invoke(question)
    results = [ToolMessage("7", tool_call_id=call["id"]) for call in response.tool_calls]
    reply = chat_model(base_url, model).bind_tools([Weather], tool_choice="none")
    return {
        "structured": {
            method: chat.with_structured_output(Weather, method=method)
            .invoke(question)
            .model_dump()
            for method in ("json_schema", "function_calling")
        },
        "structured_strict": chat.with_structured_output(Weather, method="json_schema", strict=True)
        .invoke(question)
        .model_dump(),
        "calls": {
            name: [(call["name"], call["args"]) for call in bound.invoke(question).tool_calls]
            for name, bound in forced.items()
        },
        "streamed_calls": [(call["name"], call["args"]) for call in streamed.tool_calls],
        "reply": reply.invoke([HumanMessage(question), response, *results]).content,
    }


def error_of(base_url: str, model: str, question: str) -> str:
    try:
        chat_model(base_url, f"{model}-unknown").invoke(question)
    except openai.NotFoundError as error:
        return str(error)
    return "none"


def main(base_url: str, model: str, question: str) -> None:
    report = {
        **text_calls(base_url, model, question),
        **structured_calls(base_url, model, question),
        "error": error_of(base_url, model, question),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
