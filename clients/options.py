"""Client options: builds gRPC requests from a prompt and the options of its completion.

Both clients use this module. An unset option (see `Options`) is not sent, so the server's default
applies. The server validates values; this module does not repeat the server's checks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from clients.transport import CallError
from protos.preamble.v1 import generation_pb2 as pb

Prompt = str | Sequence[int] | Mapping[str, str]  # A text, token ids, or a template's fields.
ServiceClass = Literal["latency", "throughput"]
EarlyStopping = bool | Literal["never"]
M = TypeVar("M", pb.GenerateRequest, pb.GenerateStreamRequest)

SERVICE_CLASSES: Mapping[ServiceClass, pb.ServiceClass] = {
    "latency": pb.SERVICE_CLASS_LATENCY,
    "throughput": pb.SERVICE_CLASS_THROUGHPUT,
}
EARLY_STOPPING: Mapping[EarlyStopping, pb.EarlyStopping] = {
    False: pb.EARLY_STOPPING_UNSPECIFIED,
    True: pb.EARLY_STOPPING_FIRST,
    "never": pb.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True)
class Guide:
    """Guided decoding: the pattern that a completion must match. Set exactly one field."""

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None  # EBNF in Lark's syntax.


@dataclass(frozen=True)
class Beams:
    """Beam search; the completions are the best beams, best first."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping = False


@dataclass(frozen=True)
class Options:
    """Options of a completion.

    A field that has its default value is unset, so the server's default applies.
    """

    adapter: str = ""  # `name` or `name@version`.
    adapters: Sequence[str] = ()  # Several adapters for one prompt; "" is the base model.
    answers: int = 1  # Completions per adapter, each with its own seed.
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float | None = None  # 0: greedy.
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    no_repeat_ngram_size: int = 0
    # (start, factor): at n tokens after `start`, |logit| * (factor**n - 1) is added to the logit of
    # each stop token.
    length_decay: tuple[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    stop_in_text: bool = False  # Include the stop string in the text.
    ignore_ends: bool = False  # Do not stop at the model's end tokens.
    guide: Guide | None = None
    beams: Beams | None = None
    # Alternatives per token. 0: only the token's own log-probability. None: no log-probabilities.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # Like `logprobs`, but for the tokens of the prompt.
    service_class: ServiceClass | None = None
    priority: int = 0
    # Maximum number of prompt tokens. A longer prompt keeps its last tokens. 0: no truncation.
    truncate_prompt_tokens: int = 0
    time_limit_ms: int = 0  # After this time, return the completions as they are. 0: no limit.
    # Whether control tokens in a text or in the values of fields become their ids.
    parse_special_tokens: bool = False
    # Whether the tokenizer's control tokens, such as BOS, are added to a text. None: yes.
    add_special_tokens: bool | None = None

    @property
    def requested_adapter(self) -> str:
        """The adapter that decides which server of several is called; "" for the base model."""
        return self.adapter or next(iter(self.adapters), "")


DEFAULT_OPTIONS = Options()

# Options that are copied to a message field of the same name.
_REQUEST_FIELDS = (
    "max_new_tokens",
    "min_new_tokens",
    "priority",
    "answers",
    "truncate_prompt_tokens",
    "time_limit_ms",
    "parse_special_tokens",
    "add_special_tokens",
)
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "seed",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def fill_request(message: M, prompt: Prompt, options: Options) -> M:
    """Set the fields of a request message, and return the message.

    A value of the wrong type raises a CallError, as if the server had refused the field.
    """
    try:
        _set_options(message, options)
        add_prompt(message, prompt)
    except (ValueError, TypeError, KeyError) as error:
        raise CallError("INVALID_ARGUMENT", str(error), "INVALID_FIELD") from None
    return message


def build_score_request(
    prompt: Prompt,
    continuations: Sequence[str],
    adapter: str,
    logprobs: int,
    parse_special_tokens: bool,
    add_special_tokens: bool | None,
) -> pb.ScoreRequest:
    try:
        message = pb.ScoreRequest(
            adapter=adapter,
            continuations=continuations,
            logprobs=logprobs,
            parse_special_tokens=parse_special_tokens,
        )
        if add_special_tokens is not None:
            message.add_special_tokens = add_special_tokens
        add_prompt(message, prompt)
    except (ValueError, TypeError) as error:
        raise CallError("INVALID_ARGUMENT", str(error), "INVALID_FIELD") from None
    return message


def build_tokenize_request(
    text: str, parse_special_tokens: bool, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    message = pb.TokenizeRequest(text=text, parse_special_tokens=parse_special_tokens)
    if add_special_tokens is not None:
        message.add_special_tokens = add_special_tokens
    return message


def add_prompt(message: Any, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif isinstance(prompt, Mapping):
        message.inputs.SetInParent()
        message.inputs.fields.update(prompt)
    else:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(prompt)


def _set_options(message: Any, options: Options) -> None:
    message.adapter = options.adapter
    message.adapters.extend(options.adapters)
    _copy_fields(options, _REQUEST_FIELDS, message)
    _copy_fields(options, _SAMPLING_FIELDS, message.sampling)
    sampling = message.sampling
    sampling.logit_bias.update(options.logit_bias)
    sampling.allowed_token_ids.extend(options.allowed_token_ids)
    sampling.bad_words.extend(options.bad_words)
    if options.length_decay is not None:
        sampling.length_decay.start, sampling.length_decay.factor = options.length_decay
    message.stops.strings.extend(options.stop)
    message.stops.token_ids.extend(options.stop_token_ids)
    message.stops.include_in_text = options.stop_in_text
    message.stops.ignore_model_ends = options.ignore_ends
    _copy_fields(options, ("logprobs", "prompt_logprobs"), message.details)
    if options.service_class is not None:
        message.service_class = SERVICE_CLASSES[options.service_class]
    if options.guide is not None:
        _set_guide(message.guide, options.guide)
    if options.beams is not None:
        message.beams.width = options.beams.width
        message.beams.early_stopping = EARLY_STOPPING[options.beams.early_stopping]
        _copy_fields(options.beams, ("length_penalty",), message.beams)


def _copy_fields(source: Any, names: Sequence[str], message: Any) -> None:
    for name in names:
        if getattr(source, name) is not None:
            setattr(message, name, getattr(source, name))


def _set_guide(message: pb.Guide, guide: Guide) -> None:
    guide_kinds = [
        guide_field.name
        for guide_field in fields(guide)
        if getattr(guide, guide_field.name) is not None
    ]
    if len(guide_kinds) != 1:
        raise ValueError(
            f"guide sets {' and '.join(guide_kinds) or 'no field'}; set exactly one field"
        )
    message.SetInParent()
    match guide:
        case Guide(choices=[*texts]):
            message.choices.SetInParent()
            message.choices.texts.extend(texts)
        case Guide(json_schema=Mapping() as schema):
            message.json_schema = json.dumps(schema)
        case _:
            _copy_fields(guide, guide_kinds, message)
