"""A server with a chat template, its checkpoint, and its client."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from checkpoints_tools.conversion.convert import write_native
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from tests.support.models import lively
from tests.support.servers import CONFIG, WAIT_S, Server, serving
from tests.support.trained_tokenizers import byte_level, sentencepiece_model

BASE = "checkpoint"
USER: list[Any] = [{"role": "user", "content": "twelve and thirty?"}]
PROMPT = "user: twelve and thirty?\nassistant:"


def write_chat_checkpoint(folder: Path, template: str) -> Path:
    """A random model with a sentencepiece tokenizer and a chat template."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    model = sentencepiece_model(model_type="bpe", byte_fallback=True)
    (tokenizer / "tokenizer.model").write_bytes(model)
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write_native(lively(CONFIG), folder / BASE, tokenizer=tokenizer)
    return folder / BASE


def write_byte_level_checkpoint(folder: Path, template: str) -> Path:
    """A random model with a chat template and a tokenizer that transformers opens too.

    The tokenizer is in the folder `tokenizer` of the checkpoint. All token ids have a text.
    """
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    library = byte_level()
    library.save(str(tokenizer / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    config["chat_template"] = template
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    model = lively(replace(CONFIG, vocab_size=library.get_vocab_size()))
    write_native(model, folder / BASE, tokenizer=tokenizer)
    return folder / BASE


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


@contextmanager
def chat_server(folder: Path, template: str) -> Iterator[ChatServer]:
    """A separate server of a checkpoint with this chat template."""
    checkpoint = write_chat_checkpoint(folder, template)
    with serving(checkpoint) as server:
        yield ChatServer(server, open_tokenizer(checkpoint / "tokenizer"))


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}
