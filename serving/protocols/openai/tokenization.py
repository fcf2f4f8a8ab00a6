"""Tokenization requests of the HTTP port: vLLM's /tokenize, /detokenize and /tokenizer_info.

Clients such as lm-evaluation-harness tokenize through a server instead of a local tokenizer. A
request has the fields of vLLM's request, and the ids are those of a completion (or a chat) with the
same text (or messages), without the virtual tokens of an adapter. This module does not know HTTP;
`routes` calls it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from gpt.errors import RequestError
from serving.frontend.call import Call
from serving.frontend.json_body import JSON_NULL, RequestBody
from serving.protocols.openai.chat import (
    ChatMessage,
    check_prompt_fields,
    encode_messages,
    prompt_options,
    to_template_messages,
)
from serving.protocols.openai.completion_request import (
    OpenAIBody,
    drop_none,
    unknown_model_error,
)
from serving.protocols.openai.responses import JsonObject
from serving.protocols.openai.tool_calls import read_tool_choice
from serving.request import Ask

TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"
TOKENIZER_INFO_PATH = "/tokenizer_info"

# Fields that change only the prompt of a chat.
CHAT_FIELDS = ("continue_final_message", "chat_template_kwargs", "tools")


class TokenizeRequest(OpenAIBody, dict=True):
    """A text or a chat to tokenize. None (JSON null) means unset."""

    FIELD_HINTS: ClassVar[Mapping[str, str]] = {
        "chat_template": "the template comes from the model or the operator, not from requests",
    }

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # Default: true for a prompt, false for messages.
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None  # Default: true.
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Further variables of the chat template.
    tools: list[msgspec.Raw] | None = None
    parse_special_tokens: bool | None = None  # Default: true for a prompt, false for messages.

    @property
    def field_names(self) -> Mapping[str, str]:
        return {"text": "messages" if self.prompt is None else "prompt"}

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            state = "unset" if self.prompt is None else "set"
            raise RequestError(f"prompt and messages are both {state}; set one of them", "prompt")
        for name in CHAT_FIELDS:
            if self.messages is None and getattr(self, name):
                raise RequestError(f"{name} needs messages; remove it, or send messages", name)
        check_prompt_fields(self)
        _ = self.tool_declarations  # Raises an error if they are invalid.

    @cached_property
    def tool_declarations(self) -> list[JsonObject] | None:
        """The declarations of the tools that the chat template describes, if any."""
        tool_choice = read_tool_choice(self.tools, JSON_NULL, None)
        return tool_choice.declarations if tool_choice else None


class DetokenizeRequest(RequestBody):
    """Token ids to convert to text."""

    model: str | None = None
    tokens: list[int] | None = None

    @property
    def field_names(self) -> Mapping[str, str]:
        return {"token_ids": "tokens"}

    def check(self) -> None:
        if self.tokens is None:
            raise RequestError("tokens is not set; send a list of token ids", "tokens")


async def tokenize(body: TokenizeRequest, call: Call) -> dict[str, Any]:
    """Return the ids of a text, or of the prompt of a chat."""
    service = call.service
    adapters = await _requested_adapters(body.model, call)
    if body.prompt is not None:
        special_token_fields = drop_none(
            add_special_tokens=body.add_special_tokens,
            parse_special_tokens=body.parse_special_tokens,
        )
        ask = Ask(
            body.prompt,
            adapters=adapters,
            parse_by_default=True,
            tenant=call.caller.tenant,
            **special_token_fields,
        )
        ids = await asyncio.to_thread(service.admission.text_ids, ask)
    else:
        ids = await encode_messages(
            await asyncio.to_thread(to_template_messages, body.messages or ()),
            call,
            prompt_options(body),
            body.tool_declarations,
            add_special_tokens=bool(body.add_special_tokens),
        )
    token_texts = None
    if body.return_token_strs:
        token_texts = await asyncio.to_thread(_token_texts, ids, call)
    return {
        "count": len(ids),
        "max_model_len": service.admission.context_tokens_max,
        "tokens": ids,
        "token_strs": token_texts,
    }


async def detokenize(body: DetokenizeRequest, call: Call) -> dict[str, Any]:
    """Return the text of ids. As in vLLM, control tokens are written as their texts."""
    await _requested_adapters(body.model, call)
    ids = tuple(body.tokens or ())
    detokenize = call.service.admission.detokenize
    return {"prompt": await asyncio.to_thread(detokenize, ids, keep_special_tokens=True)}


async def _requested_adapters(model: str | None, call: Call) -> tuple[str, ...]:
    """Return the adapter that the model means, if any; raise if there is no such model."""
    adapters = call.requested_adapters(model)
    await call.service.load_new_adapters(adapters, call.caller.tenant)
    for name in adapters:
        try:
            call.service.adapters.lookup(name, call.caller.tenant)
        except RequestError:  # There is no adapter of this name, or it is not a valid name.
            raise unknown_model_error(name) from None
    return adapters


def _token_texts(ids: Sequence[int], call: Call) -> list[str]:
    return list(map(call.service.tokenizer.id_to_token, ids))
