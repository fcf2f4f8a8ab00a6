"""OpenAI completion requests: validates OpenAI's fields and vLLM's extensions, and builds `Ask`s.

Each request class lists OpenAI's own fields, then vLLM's extensions under vLLM's names, and then
Preamble's extensions.
`BaseCompletionRequest` has the fields that plain completions and chats share. An unknown field is
an error, because ignoring a misspelled field would change completions silently. This module checks
types and combinations of fields; the admission checks the ranges of values.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from gpt.errors import RequestError
from gpt.settings import suggest_nearest
from serving.messages import Guide, ServiceClass
from serving.request import Ask, RefusedError

MAX_TOKENS_DEFAULT = 16  # OpenAI's default.
TEMPERATURE_DEFAULT = 1.0
COMPLETIONS_PATH = "/v1/completions"
CHAT_COMPLETIONS_PATH = "/v1/chat/completions"

# Maps the field names in the admission's errors to OpenAI's names, which the callers know.
FIELD_NAMES = {
    "adapter": "model",
    "answers": "n",
    "early_stopping": "early_stopping",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_in_text": "include_stop_str_in_output",
    "stops.strings": "stop",
    "stops.token_ids": "stop_token_ids",
    "text": "prompt",
    "token_ids": "prompt",
    "truncate_tokens": "truncate_prompt_tokens",
}


class RequestPart(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object in a request. Unknown fields are errors."""


class StreamOptions(RequestPart):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    # vLLM's extension: each event contains the usage so far.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# The value of an unset schema. Schemas stay raw JSON in this module, so that a large schema does
# not become Python objects.
JSON_NULL = msgspec.Raw(b"null")


class JsonSchema(RequestPart):
    """The `json_schema` of a response format."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = JSON_NULL
    strict: bool | None = None


class StructuredOutputs(RequestPart):
    """vLLM's `structured_outputs`: what a completion must match."""

    json: msgspec.Raw = JSON_NULL
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ResponseFormat(RequestPart):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class BaseCompletionRequest(RequestPart):
    """The fields that plain completions and chats share. None (JSON null) means unset."""

    # Advice in errors, by the name of a field that this endpoint does not have.
    FIELD_HINTS: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None  # Ignored: the bearer token identifies the caller.

    # vLLM's extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    guided_json: msgspec.Raw = JSON_NULL
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    priority: int | None = None  # As in vLLM, requests with lower values run earlier.
    # Each of these flags has only one allowed value: see `FIXED_FLAGS`.
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Preamble's extensions.
    beam_width: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    typical_p: float | None = None
    no_repeat_ngram_size: int | None = None
    service_class: ServiceClass | None = None
    timeout: float | None = None  # Seconds from the call's arrival to its deadline.

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def field_names(self) -> Mapping[str, str]:
        """Maps the field names in the admission's errors to OpenAI's names."""
        return FIELD_NAMES

    def check(self) -> None:
        """Raise a RequestError if two fields contradict each other, or a value is unsupported."""
        options = self.stream_options
        if options is not None and not self.stream:
            raise RequestError("stream_options needs stream; set stream to true", "stream_options")
        if options is not None and options.include_obfuscation:
            raise RequestError(
                "stream_options.include_obfuscation can only be false here; remove it",
                "stream_options",
            )
        for name, required_flag in FIXED_FLAGS.items():
            if getattr(self, name, None) not in (None, required_flag):
                raise RequestError(
                    f"{name} can only be {str(required_flag).lower()} here; remove it", name
                )
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise RequestError(
                f"timeout is {self.timeout}; it must be more than 0 seconds, or unset", "timeout"
            )
        if self.beam_width is not None and not self.use_beam_search:
            raise RequestError(
                "beam_width needs use_beam_search; set use_beam_search to true", "beam_width"
            )


class CompletionRequest(BaseCompletionRequest):
    """A request for completions of prompts."""

    FIELD_HINTS = dict.fromkeys(
        ("messages", "tools"), "it is a field of chats: use " + CHAT_COMPLETIONS_PATH
    )

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    truncate_prompt_tokens: int | None = None  # This field and the next are extensions of vLLM.
    prompt_logprobs: int | None = None
    inputs: dict[str, str] | None = None  # Fields of the adapter's prompt template.

    def check(self) -> None:
        if self.suffix:
            raise RequestError(
                "suffix is not supported: the models cannot infill text; remove suffix", "suffix"
            )
        if self.best_of is not None and self.best_of != self.answers:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.answers}; this server returns every "
                "completion that it generates: remove best_of, or replace it by use_beam_search",
                "best_of",
            )
        super().check()


# Flags that have only one allowed value here.
FIXED_FLAGS = {
    "add_special_tokens": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
}
RequestT = TypeVar("RequestT", bound=BaseCompletionRequest)
_decoder = cache(msgspec.json.Decoder)
_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_PATH = re.compile(r" - at `(.*)`$", re.DOTALL)
QUOTED_CHARACTERS_MAX = 200
# JSON parsing holds the GIL, even in a thread, and the parsed objects take more memory than the
# text. Therefore the strings, lists and objects of a body over LARGE_BODY_BYTES are counted before
# parsing. No valid request needs more than JSON_PARTS_MAX of them.
LARGE_BODY_BYTES = 64 << 10
JSON_PARTS_MAX = 100_000


def parse_request(data: bytes, request_type: type[RequestT]) -> RequestT:
    """Parse and check a request body. This may take long if the body is large."""
    if len(data) > LARGE_BODY_BYTES and _count_json_parts(data) > JSON_PARTS_MAX:
        raise RefusedError(
            "BODY_TOO_LARGE",
            f"the body has more than {JSON_PARTS_MAX} strings, lists and objects; send several "
            "requests",
        )
    try:
        body: RequestT = _decoder(request_type).decode(data)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), request_type) from None
    except msgspec.DecodeError as error:
        raise RefusedError("UNREADABLE", f"the body is not JSON: {_shorten(str(error))}") from None
    except UnicodeDecodeError:
        raise RefusedError("UNREADABLE", "the body is not UTF-8; send JSON in UTF-8") from None
    except RecursionError:
        raise RefusedError("UNREADABLE", "the body is nested too deeply") from None
    body.check()
    return body


def _count_json_parts(data: bytes) -> int:
    """Count the strings, lists and objects of a JSON text.

    If the strings alone are over the limit, the lists and objects are not counted.
    """
    text_without_escapes = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = text_without_escapes.count(b'"') // 2
    if strings > JSON_PARTS_MAX:
        return strings
    texts_outside_strings = text_without_escapes.split(b'"')[::2]
    return strings + sum(text.count(b"[") + text.count(b"{") for text in texts_outside_strings)


def _validation_error(message: str, request_type: type[BaseCompletionRequest]) -> RequestError:
    """Convert msgspec's message to a RequestError.

    The message can end with the JSON path of the invalid value, such as " - at `$.stop[0]`".
    """
    if len(message) > 4 * QUOTED_CHARACTERS_MAX:  # The message quotes a long field name.
        message = message[: 2 * QUOTED_CHARACTERS_MAX] + message[-2 * QUOTED_CHARACTERS_MAX :]
    path_match = _PATH.search(message)
    description = message[: path_match.start()] if path_match else message
    field = path_match[1].removeprefix("$").lstrip(".") if path_match else ""
    top_field = re.split(r"[.\[]", field)[0] or None
    unknown_field = _UNKNOWN.search(description)
    if unknown_field is None:
        return RequestError(f"{_shorten(field or 'the body')}: {_shorten(description)}", top_field)
    name = unknown_field[1]
    if top_field is not None:
        return RequestError(
            f"{_shorten(field)} has the unknown field {_shorten(name)!r}", top_field
        )
    fields = request_type.__struct_fields__
    suggestion = request_type.FIELD_HINTS.get(name) or suggest_nearest(
        name[:QUOTED_CHARACTERS_MAX], fields
    )
    return RequestError(
        f"{_shorten(name)!r} is not a field of this endpoint; {suggestion}", _shorten(name)
    )


def _shorten(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= QUOTED_CHARACTERS_MAX else text[:QUOTED_CHARACTERS_MAX] + "..."


def build_asks(body: CompletionRequest, adapters: tuple[str, ...], prompts_max: int) -> list[Ask]:
    """Build one `Ask` for each prompt. `adapters`: empty for the base model."""
    fields = ask_fields(body) | drop_none(
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        truncate_tokens=body.truncate_prompt_tokens,
    )
    # For a request with an adapter, max_new_tokens stays unset here, and the admission applies the
    # adapter's default.
    if body.max_tokens is None and not adapters:
        fields["max_new_tokens"] = MAX_TOKENS_DEFAULT
    return [Ask(prompt, adapters=adapters, **fields) for prompt in _read_prompts(body, prompts_max)]


def unknown_model_error(model: str) -> RefusedError:
    quoted_model = ascii(model)[:100]
    return RefusedError(
        "UNKNOWN_MODEL",
        f"there is no model {quoted_model} here; GET /v1/models lists all models",
        "model",
    )


def drop_none(**values: Any) -> dict[str, Any]:
    """Return the keyword arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _read_prompts(body: CompletionRequest, prompts_max: int) -> list[Any]:
    prompt = body.prompt
    if body.inputs is not None:
        if prompt is not None:
            raise RequestError("prompt and inputs are both set; give one of them", "inputs")
        return [body.inputs]
    if prompt is None or prompt == []:
        raise RequestError(
            "prompt is not set; send a text, token ids, or a list of either", "prompt"
        )
    if isinstance(prompt, str):
        return [prompt]
    prompts = [element for element in prompt if not isinstance(element, int)]
    if not prompts:
        return [tuple(prompt)]
    if len(prompts) < len(prompt):
        raise RequestError(
            "prompt mixes token ids and whole prompts; send token ids, or a list of prompts",
            "prompt",
        )
    if len(prompt) > prompts_max:
        raise RequestError(
            f"prompt has {len(prompt)} prompts; at most {prompts_max} are allowed in one request "
            "(prompts_max)",
            "prompt",
        )
    return [element if isinstance(element, str) else tuple(element) for element in prompts]


def ask_fields(body: BaseCompletionRequest) -> dict[str, Any]:
    """Return the `Ask` fields of plain completions and chats, without prompt and adapters."""
    # -1 turns top_k off in vLLM; 0 turns it off in an `Ask`.
    top_k = 0 if body.top_k in (None, -1) else body.top_k
    temperature = body.temperature
    if temperature is None and not body.use_beam_search:
        temperature = TEMPERATURE_DEFAULT
    fields = {
        "answers": body.n,
        "max_new_tokens": body.max_tokens,
        "min_new_tokens": body.min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "typical_p": body.typical_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": None if body.logit_bias is None else _logit_bias(body.logit_bias),
        "allowed_token_ids": _as_tuple(body.allowed_token_ids),
        "bad_words": _as_tuple(body.bad_words),
        "no_repeat_ngram_size": body.no_repeat_ngram_size,
        "seed": body.seed,
        "stop_strings": (body.stop,) if isinstance(body.stop, str) else _as_tuple(body.stop),
        "stop_token_ids": _as_tuple(body.stop_token_ids),
        "guide": _read_guide(body),
        "ignore_ends": body.ignore_eos,
        "stop_in_text": body.include_stop_str_in_output,
        "beam_width": _beam_width(body),
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "service": body.service_class,
        "priority": None if body.priority is None else -body.priority,
    }
    return drop_none(**fields)


def _as_tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise RequestError(
                f"logit_bias has the key {_shorten(name)!r}; keys must be token ids, such as "
                "'50256'",
                "logit_bias",
            )
    return {int(name): value for name, value in bias.items()}


def _beam_width(body: BaseCompletionRequest) -> int | None:
    if not body.use_beam_search:
        return None
    width = body.answers if body.beam_width is None else body.beam_width
    if width < 2:
        raise RequestError(
            f"the beam search has width {width}; set n or beam_width to 2 or more",
            "beam_width",
        )
    return width


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    counts = [body.prompt_logprobs] if body.prompt_logprobs is not None else []
    if body.echo and body.logprobs is not None:
        counts.append(body.logprobs)
    if body.max_tokens == 0:
        # Such a request only scores the prompt: `Admission` refuses it without prompt_logprobs.
        counts.append(0)
    if counts and min(counts) < 0:
        return min(counts)  # Invalid: the admission refuses a negative count.
    return max(counts, default=None)


def _read_guide(body: BaseCompletionRequest) -> Guide | None:
    guides: dict[str, Guide] = {}
    if body.guided_json != JSON_NULL:
        guides["guided_json"] = Guide("json", _schema_text(body.guided_json, "guided_json"))
    if body.guided_regex is not None:
        guides["guided_regex"] = Guide("regex", body.guided_regex)
    if body.guided_choice is not None:
        guides["guided_choice"] = Guide("choice", json.dumps(body.guided_choice))
    if body.guided_grammar is not None:
        guides["guided_grammar"] = Guide("grammar", body.guided_grammar)
    outputs = body.structured_outputs
    if outputs is not None:
        field = "structured_outputs"
        if outputs.json != JSON_NULL:
            guides[f"{field}.json"] = Guide("json", _schema_text(outputs.json, field))
        if outputs.regex is not None:
            guides[f"{field}.regex"] = Guide("regex", outputs.regex)
        if outputs.choice is not None:
            guides[f"{field}.choice"] = Guide("choice", json.dumps(outputs.choice))
        if outputs.grammar is not None:
            guides[f"{field}.grammar"] = Guide("grammar", outputs.grammar)
    if body.response_format is not None and body.response_format.type != "text":
        guides["response_format"] = Guide("json", _response_schema(body.response_format))
    if len(guides) > 1:
        raise RequestError(f"{' and '.join(guides)} are set; set only one of them", list(guides)[1])
    return next(iter(guides.values()), None)


def _response_schema(response_format: ResponseFormat) -> str:
    if response_format.type == "json_object":
        return '{"type": "object"}'
    if response_format.json_schema is None or response_format.json_schema.schema == JSON_NULL:
        raise RequestError(
            "response_format has type json_schema without json_schema.schema; add the schema",
            "response_format",
        )
    return _schema_text(response_format.json_schema.schema, "response_format")


def _schema_text(schema: msgspec.Raw, field: str) -> str:
    """Return the JSON text of a schema, which the request contains as an object or as a string."""
    try:
        text = bytes(schema).decode()
    except UnicodeDecodeError:
        raise RefusedError("UNREADABLE", f"{field} is not UTF-8; send JSON in UTF-8") from None
    return str(msgspec.json.decode(schema)) if text.startswith('"') else text


def guide_field(body: BaseCompletionRequest) -> str:
    """Return the name of the field that sets the request's `Guide` (guided decoding)."""
    fields = ("guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    if body.guided_json != JSON_NULL:
        return "guided_json"
    return next((field for field in fields if getattr(body, field) is not None), "response_format")
