"""Calls of llama-index's OpenAILike to an OpenAI server, for a separate process.

    python llama_index_calls.py BASE_URL MODEL QUESTION

Prints the responses as JSON.
"""

import asyncio
import json
import sys
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


def language_model(base_url: str, model: str, **options: Any) -> Any:
    options = {"max_tokens": 12, "is_chat_model": True, **options}
    return OpenAILike(
        model=model,
        api_base=base_url,
        api_key="none",
        context_window=4096,
        temperature=0,
        max_retries=0,
        timeout=60.0,
        **options,
    )


def main(base_url: str, model: str, question: str) -> None:
    chat = language_model(base_url, model)
    completions = language_model(base_url, model, is_chat_model=False)
    caller = language_model(base_url, model, is_function_calling_model=True, max_tokens=1500)
    messages = [ChatMessage(role="user", content=question)]
    weather = caller.structured_predict(Weather, PromptTemplate("{question}"), question=question)
    report = {
        "chats": [
            chat.chat(messages).message.content,
            "".join(response.delta for response in chat.stream_chat(messages)),
            chat.complete(question).text,
            asyncio.run(chat.achat(messages)).message.content,
        ],
        "completions": [
            completions.complete(question).text,
            "".join(response.delta for response in completions.stream_complete(question)),
        ],
        "structured": weather.model_dump(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
