"""Calls of instructor to an OpenAI server in each of its structured modes, for a separate process.

    python instructor_calls.py BASE_URL MODEL QUESTION

Prints the responses as JSON.
"""

import json
import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field

MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["celsius", "fahrenheit"]


def main(base_url: str, model: str, question: str) -> None:
    report = {}
    for mode in MODES:
        openai_client = openai.OpenAI(base_url=base_url, api_key="none", timeout=60.0)
        client: Any = instructor.from_openai(openai_client, mode=getattr(instructor.Mode, mode))
        fields: dict[str, Any] = {
            "model": model,
            "response_model": Weather,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 1500,
            "temperature": 0,
            "max_retries": 0,
        }
        *_, last = client.chat.completions.create_partial(**fields)
        report[mode] = [client.chat.completions.create(**fields).model_dump(), last.model_dump()]
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
