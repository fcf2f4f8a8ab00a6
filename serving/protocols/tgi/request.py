"""TGI requests: the fields and parameters of text-generation-inference, and the `Ask` they build.

Decoding is greedy, as in TGI, unless `do_sample` is true or a sampling rule is set. `best_of`
completions are generated, and the one with the highest log-probability is returned. This module
checks types and combinations of fields; the admission checks the ranges of values.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from gpt.errors import RequestError
from serving.frontend.json_body import JSON_NULL, RequestBody, RequestPart
from serving.messages import Guide
from serving.request import Ask, RefusedError

MAX_NEW_TOKENS_DEFAULT = 100  # TGI's default; an adapter may have its own.

# Maps the field names in the admission's errors to TGI's names, which the callers know.
FIELD_NAMES = {
    "adapter": "adapter_id",
    "answers": "best_of",
    "logprobs": "top_n_tokens",
    "prompt": "inputs",
    "prompt_logprobs": "decoder_input_details",
    "stops.strings": "stop",
    "text": "inputs",
    "truncate_tokens": "truncate",
    **dict.fromkeys(("guide", "guide.json", "guide.regex"), "grammar"),
    **{
        name: name
        for name in (
            "frequency_penalty",
            "max_new_tokens",
            "repetition_penalty",
            "seed",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        )
    },
}


class Grammar(RequestPart):
    """What a completion must match."""

    type: Literal["json", "json_schema", "regex"]
    value: msgspec.Raw = JSON_NULL


class Parameters(RequestPart):
    """The parameters of a request. None (JSON null) means unset."""

    adapter_id: str | None = None
    best_of: int | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_sequences: list[str] | None = None  # The name of `stop` in older clients.
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None
    watermark: bool | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether tokens are sampled; a temperature of 0 is greedy."""
        if self.temperature == 0:
            return False
        return bool(
            self.do_sample
            or self.temperature not in (None, 1)
            or self.top_k
            or self.top_p not in (None, 1)
            or self.typical_p not in (None, 1)
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or self.stop_sequences or ())


class GenerateRequest(RequestBody):
    """A request for the completion of one text."""

    FIELD_HINTS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        Parameters.__struct_fields__, "it belongs into parameters"
    )

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None
    # Options of Hugging Face's hosted API, such as `use_cache`. They ask this server for nothing.
    options: dict[str, Any] | None = None

    @property
    def settings(self) -> Parameters:
        return Parameters() if self.parameters is None else self.parameters

    def check(self) -> None:
        parameters = self.settings
        if parameters.watermark:
            raise RefusedError(
                "UNSUPPORTED", "watermark is not supported here; remove it", "watermark"
            )
        if parameters.stop and parameters.stop_sequences:
            raise RequestError(
                "stop and stop_sequences are both set, and mean the same; set only stop", "stop"
            )
        if (parameters.best_of or 1) > 1 and not parameters.is_sampling:
            raise RequestError(
                f"best_of is {parameters.best_of}, but greedy decoding has one completion; set "
                "do_sample to true, or remove best_of",
                "best_of",
            )

    def check_stream(self) -> None:
        """Raise a RequestError if a stream cannot return what the request asks for."""
        parameters = self.settings
        if (parameters.best_of or 1) > 1:
            raise RequestError(
                f"best_of is {parameters.best_of}, but a stream has one completion; remove it",
                "best_of",
            )
        if parameters.decoder_input_details:
            raise RequestError(
                "decoder_input_details is true, but a stream does not return the prompt's tokens; "
                "remove it",
                "decoder_input_details",
            )


def build_ask(body: GenerateRequest, *, stream: bool) -> Ask:
    """Build the `Ask` of a request."""
    parameters = body.settings
    adapters = (parameters.adapter_id,) if parameters.adapter_id else ()
    max_new_tokens = parameters.max_new_tokens
    if max_new_tokens is None and not adapters:
        max_new_tokens = MAX_NEW_TOKENS_DEFAULT
    sampling: dict[str, Any] = {}
    if parameters.is_sampling:
        sampling = {
            "temperature": 1.0 if parameters.temperature is None else parameters.temperature,
            "top_k": parameters.top_k,
            "top_p": parameters.top_p,
            "typical_p": parameters.typical_p,
            "seed": parameters.seed,
        }
    best_of = parameters.best_of
    # A response without details has no top tokens, but their number is checked all the same.
    needs_logprobs = stream or parameters.details or parameters.top_n_tokens or (best_of or 1) > 1
    fields = {
        **sampling,
        "answers": best_of,
        "max_new_tokens": max_new_tokens,
        "repetition_penalty": parameters.repetition_penalty,
        "frequency_penalty": parameters.frequency_penalty,
        "stop_strings": parameters.stops or None,
        "guide": _read_guide(parameters.grammar),
        "logprobs": (parameters.top_n_tokens or 0) if needs_logprobs else None,
        "prompt_logprobs": 0 if _wants_prompt_scores(parameters) else None,
        "truncate_tokens": parameters.truncate,
    }
    return Ask(
        body.inputs,
        parse_by_default=True,
        adapters=adapters,
        fit_new_tokens=parameters.max_new_tokens is None,
        # A stop sequence of the request is part of the text. The adapter's stop sequences, which
        # apply to a request without stop sequences, are not.
        stop_in_text=bool(parameters.stops),
        **{name: value for name, value in fields.items() if value is not None},
    )


def _wants_prompt_scores(parameters: Parameters) -> bool:
    return bool(parameters.details and parameters.decoder_input_details)


def _read_guide(grammar: Grammar | None) -> Guide | None:
    """Return the guide of a grammar. A JSON schema is an object, or the text of an object."""
    if grammar is None:
        return None
    try:
        value = msgspec.json.decode(grammar.value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise RequestError("grammar has type regex, but value is not a string", "grammar")
        return Guide("regex", value)
    # The type "json_schema" may have the schema in a field, beside a name.
    if grammar.type == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if not isinstance(value, str | dict):
        raise RequestError(
            f"grammar has type {grammar.type}, but value is not a JSON schema; send an object",
            "grammar",
        )
    return Guide("json", value if isinstance(value, str) else json.dumps(value))
