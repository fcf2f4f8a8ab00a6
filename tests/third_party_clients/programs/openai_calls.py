"""Calls of OpenAI's Python client, sync and async, to an OpenAI server, for a separate process.

    python openai_calls.py BASE_URL MODEL QUESTION

Prints the responses as JSON, with the same keys as `openai_calls.mjs`.
"""

import asyncio
import json
import sys
from typing import Any

import openai

SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
# Fields with values that have no effect.
NEUTRAL_FIELDS: dict[str, Any] = {
    "service_tier": "auto",
    "modalities": ["text"],
    "verbosity": "low",
    "seed": -1,
    "audio": None,
}


def error_report(client: openai.OpenAI, **fields: Any) -> dict[str, Any]:
    try:
        client.chat.completions.create(**fields)
    except openai.APIStatusError as error:
        return {
            "type": type(error).__name__,
            "status": error.status_code,
            "request_id": error.request_id,
        }
    return {"type": "none", "status": 200, "request_id": None}


async def asynchronous_text(base_url: str, fields: dict[str, Any]) -> str | None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        completion = await client.chat.completions.create(**fields)
    text: str | None = completion.choices[0].message.content
    return text


def structured_calls(client: openai.OpenAI, fields: dict[str, Any]) -> dict[str, Any]:
    longer = {**fields, "max_tokens": 600}
    forced: dict[str, Any] = {**longer, "tools": TOOLS, "tool_choice": "required"}
    forced["parallel_tool_calls"] = False
    response: Any = client.chat.completions.create(**forced)
    with client.chat.completions.stream(**forced) as stream:
        streamed: Any = stream.get_final_completion()
    calls = [
        message.choices[0].message.tool_calls[0].function.model_dump(include={"name", "arguments"})
        for message in (response, streamed)
    ]
    json_schema = {"name": "weather", "schema": SCHEMA, "strict": True}
    response_format: Any = {"type": "json_schema", "json_schema": json_schema}
    structured = client.chat.completions.create(**longer, response_format=response_format)
    return {
        "call": calls[0],
        "streamed_call": calls[1],
        "structured": structured.choices[0].message.content,
    }


def main(base_url: str, model: str, question: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60.0)
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 12,
    }
    chat: Any = client.chat.completions.create(**fields, **NEUTRAL_FIELDS, logprobs=True)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    responses = client.responses.create(
        model=model, input=question, temperature=0, max_output_tokens=12
    )
    prompt: dict[str, Any] = {"model": model, "prompt": question}
    prompt |= {"temperature": 0, "max_tokens": 12}
    pieces = client.completions.create(**prompt, stream=True)
    long: dict[str, Any] = {**fields, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**long, stream=True) as stream:
        first_event = next(iter(stream))
    report = {
        "models": [listed.id for listed in client.models.list()],
        "chats": [
            chat.choices[0].message.content,
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            responses.output_text,
            asyncio.run(asynchronous_text(base_url, fields)),
        ],
        "completions": [
            client.completions.create(**prompt).choices[0].text,
            "".join(piece.choices[0].text for piece in pieces),
        ],
        "usages": [
            chat.usage.total_tokens,
            chunks[-1].usage and chunks[-1].usage.total_tokens,
            responses.usage and responses.usage.total_tokens,
        ],
        "logprobs": len(chat.choices[0].logprobs.content),
        **structured_calls(client, fields),
        "request_id": chat._request_id,
        "errors": [
            error_report(client, **{**fields, "model": "unknown-model"}),
            error_report(client, **fields, n=0),
        ],
        "aborted": first_event.object == "chat.completion.chunk",
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
