"""A server with a chat template, and its client."""

from typing import Any

import openai
from openai.types.chat import ChatCompletion

from gpt.tokenizers.tokenizer import Tokenizer
from tests.support.servers import WAIT_S, Server

BASE = "checkpoint"
USER: list[Any] = [{"role": "user", "content": "twelve and thirty?"}]
PROMPT = "user: twelve and thirty?\nassistant:"


class ChatServer:
    """A server with an adapter, its client, and its tokenizer."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.client = openai.OpenAI(
            base_url=self.url, api_key="none", max_retries=0, timeout=WAIT_S
        )

    @property
    def url(self) -> str:
        return f"http://{self.server.http_address}/v1"

    def chat(self, model: str = BASE, messages: Any = USER, **options: Any) -> ChatCompletion:
        completion: ChatCompletion = self.client.chat.completions.create(
            model=model, messages=messages, **options
        )
        return completion

    def ids(self, text: str) -> list[int]:
        """The ids of the template's text after the bos token."""
        assert self.tokenizer.bos_id is not None
        return [self.tokenizer.bos_id, *self.tokenizer.encode(text)]

    def plain(self, text: str = PROMPT, model: str = BASE, **options: Any) -> Any:
        return self.client.completions.create(model=model, prompt=self.ids(text), **options)


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}
