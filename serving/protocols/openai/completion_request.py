"""OpenAI completion requests: validates OpenAI's fields and vLLM's extensions, and builds `Ask`s.

Each request class lists OpenAI's own fields, then vLLM's extensions under vLLM's names, and then
Preamble's extensions.
`BaseCompletionRequest` has the fields that plain completions and chats share. An unknown field is
an error, because ignoring a misspelled field would change completions silently; exceptions are
fields without effect (`unsupported_fields`). This module checks types and combinations of fields;
the admission checks the ranges of values.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from gpt.errors import RequestError
from serving.frontend.call_origin import REQUEST_ID_CHARACTERS_MAX, printable_request_id
from serving.frontend.json_body import (
    JSON_NULL,
    RequestBody,
    RequestPart,
    shorten,
)
from serving.json_schemas import close_schema
from serving.messages import Guide, ServiceClass
from serving.protocols.openai.unsupported_fields import UNSUPPORTED_FIELDS
from serving.request import Ask, RefusedError, ResumedOutput

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


class StreamOptions(RequestPart):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    # vLLM's extension: each event contains the usage so far.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


ANY_OBJECT_SCHEMA = '{"type": "object"}'


class JsonSchema(RequestPart):
    """The `json_schema` of a response format."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = JSON_NULL
    strict: bool | None = None


class StructuredOutputs(RequestPart):
    """vLLM's `structured_outputs`: what a completion must match."""

    json: msgspec.Raw = JSON_NULL
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ResponseFormat(RequestPart):
    """OpenAI's `response_format`, or TGI's, which has the schema or the regex in `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    value: msgspec.Raw = JSON_NULL


class OpenAIBody(RequestBody):
    """A request body that accepts fields of other servers with values that have no effect."""

    @classmethod
    def has_no_effect(cls, name: str, value: Any) -> bool:
        return name in UNSUPPORTED_FIELDS and UNSUPPORTED_FIELDS[name].is_neutral(value)

    @classmethod
    def unknown_field_error(cls, name: str) -> str | None:
        return UNSUPPORTED_FIELDS[name].refusal(name) if name in UNSUPPORTED_FIELDS else None


class Resume(RequestPart):
    """An extension of Preamble's: the output so far of a completion that another server began."""

    seed: int
    token_ids: list[int]
    base_fingerprint: str


class BaseCompletionRequest(OpenAIBody):
    """The fields that plain completions and chats share. None (JSON null) means unset."""

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
    metadata: dict[str, Any] | None = None  # This field and the next three are ignored.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None

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
    # Whether to add the BOS and EOS tokens of the tokenizer. Default: true for texts, else false.
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    # Ignored: this server writes special tokens without spaces between them, as vLLM does for
    # byte-level tokenizers.
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None  # Part of the response's id.
    cache_salt: str | None = None

    # Preamble's extensions.
    # Whether control tokens in texts become their ids. Default: true for `prompt`, else false.
    parse_special_tokens: bool | None = None
    beam_width: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    typical_p: float | None = None
    no_repeat_ngram_size: int | None = None
    service_class: ServiceClass | None = None
    resume: Resume | None = None
    timeout: float | None = None  # Seconds from the call's arrival to its deadline.

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def field_names(self) -> Mapping[str, str]:
        return FIELD_NAMES

    @property
    def guide_field(self) -> str:
        """The name of the field that sets the request's `Guide` (guided decoding)."""
        fields = ("guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
        if self.guided_json != JSON_NULL:
            return "guided_json"
        return next(
            (field for field in fields if getattr(self, field) is not None), "response_format"
        )

    def check(self) -> None:
        options = self.stream_options
        if options is not None and not self.stream:
            raise RequestError("stream_options needs stream; set stream to true", "stream_options")
        if options is not None and options.include_obfuscation:
            raise RequestError(
                "stream_options.include_obfuscation can only be false here; remove it",
                "stream_options",
            )
        if self.store:
            raise RequestError("this server stores no completions; remove store", "store")
        if self.cache_salt == "":
            raise RequestError("cache_salt is empty; give a text, or remove it", "cache_salt")
        request_id = self.request_id
        if request_id is not None and request_id != (printable_request_id(request_id) or None):
            raise RequestError(
                f"request_id is {shorten(ascii(request_id))}; it must have 1 to "
                f"{REQUEST_ID_CHARACTERS_MAX} printable ASCII characters",
                "request_id",
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

    FIELD_HINTS: ClassVar[Mapping[str, str]] = {
        "messages": "it is a field of chats: use " + CHAT_COMPLETIONS_PATH
    }

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    truncate_prompt_tokens: int | None = None  # An extension of vLLM.
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
        if self.echo and self.resume is not None:
            raise RequestError(
                "echo returns the prompt, which a resumed completion has returned; remove echo",
                "echo",
            )
        super().check()


RequestT = TypeVar("RequestT", bound=BaseCompletionRequest)


def build_asks(body: CompletionRequest, adapters: tuple[str, ...], prompts_max: int) -> list[Ask]:
    """Build one `Ask` for each prompt. `adapters`: empty for the base model."""
    fields = ask_fields(body) | drop_none(
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        truncate_tokens=body.truncate_prompt_tokens,
        add_special_tokens=body.add_special_tokens,
        parse_by_default=True,
    )
    # For a request with an adapter, max_new_tokens stays unset here, and the admission applies the
    # adapter's default.
    if body.max_tokens is None and not adapters:
        fields["max_new_tokens"] = MAX_TOKENS_DEFAULT
    prompts = _read_prompts(body, prompts_max)
    if body.resume is not None and len(prompts) > 1:
        raise RequestError(
            f"resume continues one completion, but prompt has {len(prompts)} prompts; send one",
            "resume",
        )
    return [Ask(prompt, adapters=adapters, **fields) for prompt in prompts]


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
        # vLLM's clients and llama.cpp's send -1 for an unset seed.
        "seed": None if body.seed == -1 else body.seed,
        "stop_strings": (body.stop,) if isinstance(body.stop, str) else _as_tuple(body.stop),
        "stop_token_ids": _as_tuple(body.stop_token_ids),
        "guide": _read_guide(body),
        "ignore_ends": body.ignore_eos,
        "stop_in_text": body.include_stop_str_in_output,
        "keep_special_tokens": body.skip_special_tokens is False or None,
        "prompt_logprobs": body.prompt_logprobs,
        "cache_salt": body.cache_salt,
        "beam_width": _beam_width(body),
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "service": body.service_class,
        "priority": None if body.priority is None else -body.priority,
        "parse_special_tokens": body.parse_special_tokens,
        "resume": None if body.resume is None else _read_resume(body.resume),
    }
    return drop_none(**fields)


def _read_resume(resume: Resume) -> ResumedOutput:
    return ResumedOutput(resume.seed, tuple(resume.token_ids), resume.base_fingerprint)


def _as_tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise RequestError(
                f"logit_bias has the key {shorten(name)!r}; keys must be token ids, such as "
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
        if outputs.json_object:
            guides[f"{field}.json_object"] = Guide("json", ANY_OBJECT_SCHEMA)
        if outputs.regex is not None:
            guides[f"{field}.regex"] = Guide("regex", outputs.regex)
        if outputs.choice is not None:
            guides[f"{field}.choice"] = Guide("choice", json.dumps(outputs.choice))
        if outputs.grammar is not None:
            guides[f"{field}.grammar"] = Guide("grammar", outputs.grammar)
    if body.response_format is not None and body.response_format.type != "text":
        guides["response_format"] = _response_guide(body.response_format)
    if len(guides) > 1:
        raise RequestError(f"{' and '.join(guides)} are set; set only one of them", list(guides)[1])
    return next(iter(guides.values()), None)


def _response_guide(response_format: ResponseFormat) -> Guide:
    format_type, field = response_format.type, "response_format"
    if response_format.json_schema is not None and response_format.value != JSON_NULL:
        raise RequestError(
            "response_format has json_schema and value; set only one of them", "response_format"
        )
    if format_type == "json_schema" and response_format.json_schema is not None:
        return _json_schema_guide(response_format.json_schema, field)
    if response_format.value == JSON_NULL:
        if format_type == "json_object":
            return Guide("json", ANY_OBJECT_SCHEMA)
        missing_field = "json_schema.schema" if format_type == "json_schema" else "value"
        raise RequestError(
            f"response_format has type {format_type} without {missing_field}; add it", field
        )
    if format_type == "regex":
        pattern = msgspec.json.decode(response_format.value)
        if not isinstance(pattern, str):
            raise RequestError(
                "response_format has type regex and a value that is not a text; give a regular "
                "expression",
                field,
            )
        return Guide("regex", pattern)
    if format_type == "json_schema":
        # TGI's value of this type has OpenAI's fields: name and schema.
        try:
            json_schema = msgspec.json.decode(response_format.value, type=JsonSchema)
        except msgspec.ValidationError as error:
            raise RequestError(f"response_format.value: {shorten(str(error))}", field) from None
        return _json_schema_guide(json_schema, field)
    return Guide("json", _schema_text(response_format.value, field))


def _json_schema_guide(json_schema: JsonSchema, field: str) -> Guide:
    if json_schema.schema == JSON_NULL:
        raise RequestError(
            "response_format has type json_schema without json_schema.schema; add the schema", field
        )
    text = _schema_text(json_schema.schema, field)
    return Guide("json", strict_schema_text(text, field) if json_schema.strict else text)


def strict_schema_text(text: str, field: str) -> str:
    """Return the JSON text of a schema with all objects closed, as `strict` demands."""
    try:
        return json.dumps(close_schema(json.loads(text), strict=True))
    except (ValueError, RecursionError):
        raise RequestError(f"{field}: the schema is no JSON, or nested too deeply", field) from None


def _schema_text(schema: msgspec.Raw, field: str) -> str:
    """Return the JSON text of a schema, which the request contains as an object or as a string."""
    try:
        text = bytes(schema).decode()
    except UnicodeDecodeError:
        raise RefusedError("UNREADABLE", f"{field} is not UTF-8; send JSON in UTF-8") from None
    return str(msgspec.json.decode(schema)) if text.startswith('"') else text
