"""Calls of litellm to an OpenAI and KServe server by four of its providers, for a separate process.

    python litellm_calls.py ADDRESS MODEL QUESTION

Prints the responses as JSON.
"""

import asyncio
import json
import sys
from typing import Any

import litellm

CHAT_PROVIDERS = ("openai", "hosted_vllm")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


def streamed_text(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def asynchronous_texts(fields: dict[str, Any]) -> list[str]:
    response = await litellm.acompletion(**fields)
    chunks = await litellm.acompletion(**fields, stream=True)
    streamed = [chunk.choices[0].delta.content or "" async for chunk in chunks]
    return [response.choices[0].message.content, "".join(streamed)]


def chat_calls(fields: dict[str, Any]) -> dict[str, Any]:
    """Chats, a forced tool call and an answer with a schema, by a chat provider."""
    # Fields with values that have no effect, and fields that litellm drops for some providers.
    additional = {
        "user": "a",
        "service_tier": "auto",
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "reasoning_effort": "none",
        "drop_params": True,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "a"},
    }
    response = litellm.completion(**fields)
    texts = [
        response.choices[0].message.content,
        streamed_text(litellm.completion(**fields, stream=True)),
        litellm.completion(**fields, **additional).choices[0].message.content,
        streamed_text(litellm.completion(**fields, **additional, stream=True)),
        *asyncio.run(asynchronous_texts(fields)),
    ]
    longer = {**fields, "max_tokens": 1500}
    tools = {"tools": [TOOL], "tool_choice": "required"}
    call = litellm.completion(**longer, **tools).choices[0].message.tool_calls[0].function
    schema = {"name": "weather", "schema": SCHEMA, "strict": True}
    structured = litellm.completion(
        **longer, response_format={"type": "json_schema", "json_schema": schema}
    )
    return {
        "texts": texts,
        "tokens": response.usage.completion_tokens,
        "call": [call.name, json.loads(call.arguments)],
        "structured": json.loads(structured.choices[0].message.content),
    }


def text_completion_calls(fields: dict[str, Any], question: str) -> list[str]:
    fields = {name: value for name, value in fields.items() if name != "messages"}
    response = litellm.text_completion(**fields, prompt=question)
    chunks = litellm.text_completion(**fields, prompt=question, stream=True)
    return [response.choices[0].text, "".join(chunk.choices[0].text or "" for chunk in chunks)]


def triton_calls(fields: dict[str, Any]) -> list[str]:
    response = litellm.completion(**fields)
    chunks = litellm.completion(**fields, stream=True)
    return [response.choices[0].message.content, streamed_text(chunks)]


def error_of(fields: dict[str, Any]) -> str:
    try:
        litellm.completion(**{**fields, "model": f"{fields['model']}-unknown"})
    except Exception as error:
        return type(error).__name__
    return "none"


def main(address: str, model: str, question: str) -> None:
    def fields_of(provider: str, path: str = "/v1") -> dict[str, Any]:
        return {
            "model": f"{provider}/{model}",
            "api_base": f"http://{address}{path}",
            "api_key": "none",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 12,
            **({} if provider == "triton" else {"temperature": 0}),
        }

    generate = f"/v2/models/{model}/generate"
    report = {
        "chats": {provider: chat_calls(fields_of(provider)) for provider in CHAT_PROVIDERS},
        "completions": text_completion_calls(fields_of("text-completion-openai"), question),
        "triton": triton_calls(fields_of("triton", generate)),
        "error": error_of(fields_of("openai")),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
