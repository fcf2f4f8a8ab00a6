"""What a client of OpenAI's completions may say, and the `Ask`s that it becomes.

OpenAI's own fields, and behind them vLLM's extensions under vLLM's names; `Common` are those that
chats have too. What is not here is refused by its name: a misspelt field that is passed over
changes answers silently. Bounds are the admission's; here are only kinds, and what one field means
to another.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from gpt.errors import RequestError
from gpt.settings import nearest
from serving.messages import Guide, ServiceClass
from serving.request import Ask, RefusedError

MAX_TOKENS = 16  # What OpenAI makes of none.
TEMPERATURE = 1.0
CHATS = "/v1/chat/completions"

# What an `Ask` calls differently, for errors.
NAMES = {
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


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """An object in a request."""


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with each event, what was made so far.
    include_obfuscation: bool | None = None


# JSON that is handed on as it came. Nothing is built from it here, however much it is.
NONE = msgspec.Raw(b"null")


class JsonSchema(Part):
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = NONE
    strict: bool | None = None


class StructuredOutputs(Part):
    json: msgspec.Raw = NONE
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Common(Part):
    """What all completions take. None: not said, as with a null."""

    # Fields that others have, or once had, and where to go with them or why not.
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}

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
    user: str | None = None  # Whoever that is; tokens say who calls.

    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    guided_json: msgspec.Raw = NONE
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    priority: int | None = None  # Lower is earlier, as there.
    # Of these each can have one value here: see `FIXED`.
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Ours.
    beam_width: int | None = None
    early_stopping: bool | Literal["never"] | None = None
    typical_p: float | None = None
    no_repeat_ngram_size: int | None = None
    service_class: ServiceClass | None = None
    timeout: float | None = None  # Seconds, by which the answer is to be done.

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def names(self) -> Mapping[str, str]:
        """What an `Ask` calls differently."""
        return NAMES

    def check(self) -> None:
        """What one field means to another."""
        options = self.stream_options
        if options is not None and not self.stream:
            raise RequestError("stream_options are for a stream; set stream", "stream_options")
        if options is not None and options.include_obfuscation:
            raise RequestError(
                "stream_options.include_obfuscation can only be false here; leave it out",
                "stream_options",
            )
        for name, only in FIXED.items():
            if getattr(self, name, None) not in (None, only):
                raise RequestError(f"{name} can only be {str(only).lower()} here", name)
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise RequestError(
                f"timeout is {self.timeout}; it must be more than 0 seconds, or left out", "timeout"
            )
        if self.beam_width is not None and not self.use_beam_search:
            raise RequestError("beam_width is for use_beam_search; set that too", "beam_width")


class Body(Common):
    """A request for completions of prompts."""

    ELSEWHERE = dict.fromkeys(("messages", "tools"), "it is of chats: POST it to " + CHATS)

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    truncate_prompt_tokens: int | None = None  # This and the next are vLLM's.
    prompt_logprobs: int | None = None
    inputs: dict[str, str] | None = None  # The fields of the adapter's template, for a prompt.

    def check(self) -> None:
        if self.suffix:
            raise RequestError(
                "suffix is not supported: these models write on; leave it out", "suffix"
            )
        if self.best_of is not None and self.best_of != self.answers:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.answers}; every answer that is made is "
                "told: leave best_of out, or search with use_beam_search",
                "best_of",
            )
        super().check()


# What can be said in one way here, and is refused in the other.
FIXED = {
    "add_special_tokens": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
}
Said = TypeVar("Said", bound=Common)
_decoder = cache(msgspec.json.Decoder)
_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_PLACE = re.compile(r" - at `(.*)`$", re.DOTALL)
SHOWN_CHARACTERS_MAX = 200
# Reading JSON holds everyone else up, in a thread too, and what is built costs more than its bytes.
# A body over so many bytes is counted first, and none needs more strings, lists and objects.
LARGE_BYTES = 64 << 10
PARTS_MAX = 100_000


def parsed(data: bytes, kind: type[Said]) -> Said:
    """A request's body, or what is wrong with it. A large one takes a while: not for a loop."""
    if len(data) > LARGE_BYTES and _parts(data) > PARTS_MAX:
        raise RefusedError(
            "BODY_TOO_LARGE",
            f"the body has more than {PARTS_MAX} strings, lists and objects; send several requests",
        )
    try:
        body: Said = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise RefusedError("UNREADABLE", f"the body is not JSON: {_short(str(error))}") from None
    except UnicodeDecodeError:
        raise RefusedError("UNREADABLE", "the body is not UTF-8, as JSON has to be") from None
    except RecursionError:
        raise RefusedError("UNREADABLE", "the body is nested too deeply to be a request") from None
    body.check()
    return body


def _parts(data: bytes) -> int:
    """Strings, lists and objects, as far as it is JSON; no more is looked at than is needed."""
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    if strings > PARTS_MAX:
        return strings
    between = bare.split(b'"')[::2]
    return strings + sum(text.count(b"[") + text.count(b"{") for text in between)


def _wrong(message: str, kind: type[Common]) -> RequestError:
    """In our words; the library's tell a place as a path from `$`."""
    if len(message) > 4 * SHOWN_CHARACTERS_MAX:  # A name of the caller's is in it.
        message = message[: 2 * SHOWN_CHARACTERS_MAX] + message[-2 * SHOWN_CHARACTERS_MAX :]
    place = _PLACE.search(message)
    what = message[: place.start()] if place else message
    field = place[1].removeprefix("$").lstrip(".") if place else ""
    top = re.split(r"[.\[]", field)[0] or None
    unknown = _UNKNOWN.search(what)
    if unknown is None:
        return RequestError(f"{_short(field or 'the body')}: {_short(what)}", top)
    name = unknown[1]
    if top is not None:
        return RequestError(f"{_short(field)} has {_short(name)!r}, which is unknown", top)
    fields = kind.__struct_fields__
    way = kind.ELSEWHERE.get(name) or nearest(name[:SHOWN_CHARACTERS_MAX], fields)
    return RequestError(f"{_short(name)!r} is no field of this endpoint; {way}", _short(name))


def _short(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "..."


def asks_of(body: Body, base: Sequence[str], prompts_max: int) -> list[Ask]:
    """One for each prompt. `base`: what the model alone is called."""
    adapters = adapters_of(body, base)
    given = fields_of(body) | said(
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        truncate_tokens=body.truncate_prompt_tokens,
    )
    if body.max_tokens is None and not adapters:
        given["max_new_tokens"] = MAX_TOKENS
    # An adapter knows how long its answers are.
    return [Ask(prompt, adapters=adapters, **given) for prompt in _prompts(body, prompts_max)]


def adapters_of(body: Common, base: Sequence[str]) -> tuple[str, ...]:
    return () if body.model in (None, *base) else (str(body.model),)


def said(**values: Any) -> dict[str, Any]:
    """Those that are."""
    return {name: value for name, value in values.items() if value is not None}


def _prompts(body: Body, prompts_max: int) -> list[Any]:
    prompt = body.prompt
    if body.inputs is not None:
        if prompt is not None:
            raise RequestError("prompt and inputs are both set; give one of them", "inputs")
        return [body.inputs]
    if prompt is None or prompt == []:
        raise RequestError(
            "prompt is not set; give a text, token ids, or a list of either", "prompt"
        )
    if isinstance(prompt, str):
        return [prompt]
    whole = [one for one in prompt if not isinstance(one, int)]
    if not whole:
        return [tuple(prompt)]
    if len(whole) < len(prompt):
        raise RequestError(
            "prompt has token ids beside whole prompts; give ids, or a list of lists of them",
            "prompt",
        )
    if len(prompt) > prompts_max:
        raise RequestError(
            f"prompt has {len(prompt)} prompts; at most {prompts_max} may be in one request "
            "(prompts_max)",
            "prompt",
        )
    return [one if isinstance(one, str) else tuple(one) for one in whole]


def fields_of(body: Common) -> dict[str, Any]:
    """Of an `Ask`, all but what is asked of whom."""
    # Some say so that a filter is off.
    top_k = 0 if body.top_k in (None, -1) else body.top_k
    temperature = body.temperature
    if temperature is None and not body.use_beam_search:
        temperature = TEMPERATURE
    given = {
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
        "logit_bias": None if body.logit_bias is None else _bias(body.logit_bias),
        "allowed_token_ids": _tuple(body.allowed_token_ids),
        "bad_words": _tuple(body.bad_words),
        "no_repeat_ngram_size": body.no_repeat_ngram_size,
        "seed": body.seed,
        "stop_strings": (body.stop,) if isinstance(body.stop, str) else _tuple(body.stop),
        "stop_token_ids": _tuple(body.stop_token_ids),
        "guide": _guide(body),
        "ignore_ends": body.ignore_eos,
        "stop_in_text": body.include_stop_str_in_output,
        "beam_width": _beam_width(body),
        "length_penalty": body.length_penalty,
        "early_stopping": body.early_stopping,
        "service": body.service_class,
        "priority": None if body.priority is None else -body.priority,
    }
    return said(**given)


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _bias(bias: dict[str, float]) -> dict[int, float]:
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise RequestError(
                f"logit_bias has {_short(name)!r}; its keys are token ids, as '50256'", "logit_bias"
            )
    return {int(name): value for name, value in bias.items()}


def _beam_width(body: Common) -> int | None:
    if not body.use_beam_search:
        return None
    width = body.answers if body.beam_width is None else body.beam_width
    if width < 2:
        raise RequestError(
            f"a beam search of width {width} is none; set n or beam_width to 2 at least",
            "beam_width",
        )
    return width


def _prompt_logprobs(body: Body) -> int | None:
    wanted = [body.prompt_logprobs] if body.prompt_logprobs is not None else []
    if body.echo and body.logprobs is not None:
        wanted.append(body.logprobs)
    if body.max_tokens == 0:
        wanted.append(0)  # Then the prompt is all there is to run.
    # One that is out of bounds is not to hide behind another.
    return min(wanted) if wanted and min(wanted) < 0 else max(wanted, default=None)


def _guide(body: Common) -> Guide | None:
    guides: dict[str, Guide] = {}
    if body.guided_json != NONE:
        guides["guided_json"] = Guide("json", _schema(body.guided_json, "guided_json"))
    if body.guided_regex is not None:
        guides["guided_regex"] = Guide("regex", body.guided_regex)
    if body.guided_choice is not None:
        guides["guided_choice"] = Guide("choice", json.dumps(body.guided_choice))
    if body.guided_grammar is not None:
        guides["guided_grammar"] = Guide("grammar", body.guided_grammar)
    if (wanted := body.structured_outputs) is not None:
        within = "structured_outputs"
        if wanted.json != NONE:
            guides[f"{within}.json"] = Guide("json", _schema(wanted.json, within))
        if wanted.regex is not None:
            guides[f"{within}.regex"] = Guide("regex", wanted.regex)
        if wanted.choice is not None:
            guides[f"{within}.choice"] = Guide("choice", json.dumps(wanted.choice))
        if wanted.grammar is not None:
            guides[f"{within}.grammar"] = Guide("grammar", wanted.grammar)
    if body.response_format is not None and body.response_format.type != "text":
        guides["response_format"] = Guide("json", _format(body.response_format))
    if len(guides) > 1:
        raise RequestError(f"{' and '.join(guides)} are set; give one of them", list(guides)[1])
    return next(iter(guides.values()), None)


def _format(wanted: ResponseFormat) -> str:
    if wanted.type == "json_object":
        return '{"type": "object"}'
    if wanted.json_schema is None or wanted.json_schema.schema == NONE:
        raise RequestError(
            "response_format is json_schema and has no json_schema.schema", "response_format"
        )
    return _schema(wanted.json_schema.schema, "response_format")


def _schema(schema: msgspec.Raw, field: str) -> str:
    """Its text, which may be in a string."""
    try:
        text = bytes(schema).decode()
    except UnicodeDecodeError:
        raise RefusedError("UNREADABLE", f"{field} is not UTF-8, as JSON has to be") from None
    return str(msgspec.json.decode(schema)) if text.startswith('"') else text


def guide_field(body: Common) -> str:
    """Which field it was that said what an answer must match."""
    fields = ("guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    if body.guided_json != NONE:
        return "guided_json"
    return next((one for one in fields if getattr(body, one) is not None), "response_format")
