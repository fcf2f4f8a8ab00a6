"""What a program asks of a server: a prompt and how to complete it, as plain values.

Both clients make their messages here, so they ask alike. What is None or empty is not sent, and is
the server's choice. Knows no connection, and checks nothing that the server checks.
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

CLASSES: Mapping[ServiceClass, pb.ServiceClass] = {
    "latency": pb.SERVICE_CLASS_LATENCY,
    "throughput": pb.SERVICE_CLASS_THROUGHPUT,
}
EARLY: Mapping[EarlyStopping, pb.EarlyStopping] = {
    False: pb.EARLY_STOPPING_UNSPECIFIED,
    True: pb.EARLY_STOPPING_FIRST,
    "never": pb.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True)
class Guide:
    """What a completion must match: one of these."""

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None  # EBNF, as Lark has it.


@dataclass(frozen=True)
class Beams:
    """Search for the likeliest completions; the answers are the best, best first."""

    width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping = False


@dataclass(frozen=True)
class Options:
    """How to complete a prompt. None, 0 where nothing else is said, or empty: not sent."""

    adapter: str = ""  # `name` or `name@version`.
    adapters: Sequence[str] = ()  # Many tasks on one prompt, instead; "" is the model alone.
    answers: int = 1  # To each task; they differ by their seeds.
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
    # After so many new tokens, the stop tokens' logits grow by this factor with each more.
    length_decay: tuple[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    stop_in_text: bool = False
    ignore_ends: bool = False  # The tokens that end the model's texts are like any others.
    guide: Guide | None = None
    beams: Beams | None = None
    logprobs: int | None = None  # With each token its log-probability and so many alternatives.
    prompt_logprobs: int | None = None
    service_class: ServiceClass | None = None
    priority: int = 0
    truncate_prompt_tokens: int = 0  # Keep so many of the prompt, the last ones.
    time_limit_ms: int = 0  # Then the answers end well, with what there is of them.


DEFAULTS = Options()

# Fields whose names and values are the message's own.
_REQUEST = (
    *("max_new_tokens", "min_new_tokens", "priority", "answers"),
    *("truncate_prompt_tokens", "time_limit_ms"),
)
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "no_repeat_ngram_size"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def request(message: M, prompt: Prompt, options: Options) -> M:
    """A message filled in. What no message can hold is refused as the server would refuse it."""
    try:
        _fill(message, options)
        add_prompt(message, prompt)
    except (ValueError, TypeError, KeyError) as error:
        raise CallError("INVALID_ARGUMENT", str(error), "INVALID_FIELD") from None
    return message


def score_request(
    prompt: Prompt, continuations: Sequence[str], adapter: str, logprobs: int
) -> pb.ScoreRequest:
    try:
        message = pb.ScoreRequest(adapter=adapter, continuations=continuations, logprobs=logprobs)
        add_prompt(message, prompt)
    except (ValueError, TypeError) as error:
        raise CallError("INVALID_ARGUMENT", str(error), "INVALID_FIELD") from None
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


def _fill(message: Any, options: Options) -> None:
    message.adapter = options.adapter
    message.adapters.extend(options.adapters)
    _copy(options, _REQUEST, message)
    _copy(options, _SAMPLING, message.sampling)
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
    _copy(options, ("logprobs", "prompt_logprobs"), message.details)
    if options.service_class is not None:
        message.service_class = CLASSES[options.service_class]
    if options.guide is not None:
        _guide(message.guide, options.guide)
    if options.beams is not None:
        message.beams.width = options.beams.width
        message.beams.early_stopping = EARLY[options.beams.early_stopping]
        _copy(options.beams, ("length_penalty",), message.beams)


def _copy(source: Any, names: Sequence[str], message: Any) -> None:
    for name in names:
        if getattr(source, name) is not None:
            setattr(message, name, getattr(source, name))


def _guide(message: pb.Guide, guide: Guide) -> None:
    said = [one.name for one in fields(guide) if getattr(guide, one.name) is not None]
    if len(said) != 1:
        raise ValueError(
            f"a guide is one of its kinds; this one has {' and '.join(said) or 'none'}"
        )
    message.SetInParent()
    match guide:
        case Guide(choices=[*texts]):
            message.choices.SetInParent()
            message.choices.texts.extend(texts)
        case Guide(json_schema=Mapping() as schema):
            message.json_schema = json.dumps(schema)
        case _:
            _copy(guide, said, message)
