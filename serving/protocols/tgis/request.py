"""What TGIS's clients ask for: a message's parameters, held against TGIS's bounds, as an `Ask`.

On that wire 0 stands for what was not said, so each number is turned to None or its neutral value
here. Whatever else can be wrong the admission finds; its refusals get this wire's field names.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt.errors import RequestError
from protos.foreign import package
from serving.config import ServerConfig
from serving.frontend.field_names import said_as
from serving.messages import Guide
from serving.request import Ask, UnknownAdapterError

pb = package("tgis")

SEED_BITS = 32  # Of a seed that is drawn.
STOPS_MAX = 6
STOP_BYTES_MAX = 240
TOPS_MAX = 10
TEMPERATURE_MIN = 0.05  # But for 0.
METHODS = ("GREEDY", "SAMPLE")

# What the admission calls the fields of this wire.
FIELDS = {
    "text": "request.text",
    "prompt": "request.text",
    "adapter": "adapter_id",
    "stops.strings": "params.stopping.stop_sequences",
    "truncate_tokens": "params.truncate_input_tokens",
    "time_limit_s": "params.stopping.time_limit_millis",
    "length_decay": "params.decoding.length_penalty",
    "repetition_penalty": "params.decoding.repetition_penalty",
    "logprobs": "params.response.top_n_tokens",
    "prompt_logprobs": "params.response.top_n_tokens",
    **{f"guide.{kind}": f"params.decoding.{kind}" for kind in ("regex", "choice", "grammar")},
    "guide.json": "params.decoding.json_schema",
    "guide": "params.decoding.guided",
    **{name: f"params.stopping.{name}" for name in ("max_new_tokens", "min_new_tokens")},
    **{name: f"params.sampling.{name}" for name in ("temperature", "top_k", "top_p", "typical_p")},
}


@contextmanager
def refusals() -> Iterator[None]:
    """Around what the admission does: what it refuses is told as this wire has it."""
    try:
        yield
    except UnknownAdapterError as error:
        # To these clients an unknown adapter is a bad argument, not something not found.
        raise RequestError(str(error), "adapter_id") from None
    except RequestError as error:
        raise said_as(error, FIELDS) from None


def ask_of(message: Any, text: str, config: ServerConfig, tokens_max: int) -> Ask:
    """`message`: whatever has the parameters. `tokens_max`: of a prompt and its answer."""
    params = message.params
    _check(params, config, tokens_max)
    sampling, stopping, decoding = params.sampling, params.stopping, params.decoding
    told = params.response
    detail = told.top_n_tokens if details(told) else None
    stops = tuple(stopping.stop_sequences)
    included = bool(stops)  # Those of an adapter's own are not told unless it is asked for.
    if stopping.HasField("include_stop_sequence"):
        included = stopping.include_stop_sequence
    penalty = decoding.length_penalty
    drawn: dict[str, Any] = {}
    if draws(params):
        drawn = {
            "temperature": sampling.temperature if sampling.HasField("temperature") else 1.0,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p or None,
            "typical_p": sampling.typical_p or 1.0,
            "seed": sampling.seed if sampling.HasField("seed") else secrets.randbits(SEED_BITS),
        }
    return Ask(
        text,
        adapters=adapters_of(message),
        max_new_tokens=stopping.max_new_tokens or None,
        fit_new_tokens=True,
        min_new_tokens=stopping.min_new_tokens,
        repetition_penalty=decoding.repetition_penalty or 1.0,
        length_decay=(
            (penalty.start_index, penalty.decay_factor)
            if decoding.HasField("length_penalty")
            else None
        ),
        stop_strings=stops,
        stop_in_text=included,
        logprobs=detail if told.generated_tokens else None,
        prompt_logprobs=detail if told.input_tokens else None,
        guide=_guide(decoding),
        truncate_tokens=params.truncate_input_tokens or None,
        time_limit_s=stopping.time_limit_millis / 1000 or None,
        **drawn,
    )


def draws(params: Any) -> bool:
    """Whether tokens are drawn. A temperature of 0 that was said is greedy."""
    sampling = params.sampling
    greedy = sampling.HasField("temperature") and sampling.temperature == 0
    return params.method == METHODS.index("SAMPLE") and not greedy


def details(told: Any) -> bool:
    """Whether more than a token's text is told."""
    return bool(told.token_logprobs or told.token_ranks or told.top_n_tokens)


def adapters_of(message: Any) -> tuple[str, ...]:
    names = {message.prefix_id, message.adapter_id} - {""}
    if len(names) > 1:
        raise RequestError(
            f"prefix_id is {message.prefix_id!r} and adapter_id {message.adapter_id!r}; they are "
            "two names of the same, so give one",
            "adapter_id",
        )
    return tuple(names)


def _check(params: Any, config: ServerConfig, tokens_max: int) -> None:
    """Refuse what TGIS refuses. A NaN is in no range."""
    sampling, stopping, decoding = params.sampling, params.stopping, params.decoding
    new_max = tokens_max - 1
    tops_max = min(TOPS_MAX, config.logprobs_max)
    temperature, penalty = sampling.temperature, decoding.repetition_penalty
    decay = decoding.length_penalty.decay_factor if decoding.HasField("length_penalty") else 1.0
    least, most = stopping.min_new_tokens, stopping.max_new_tokens or new_max
    for field, value, fits, wanted in (
        ("method", params.method, 0 <= params.method < len(METHODS), "0 (GREEDY) or 1 (SAMPLE)"),
        (
            "sampling.temperature",
            temperature,
            temperature == 0 or TEMPERATURE_MIN <= temperature <= 100,
            f"0, or from {TEMPERATURE_MIN} to 100",
        ),
        ("sampling.top_p", sampling.top_p, 0 <= sampling.top_p <= 1, "in (0, 1], or 0 for none"),
        (
            "sampling.typical_p",
            sampling.typical_p,
            0 <= sampling.typical_p <= 1,
            "in (0, 1], or 0 for none",
        ),
        (
            "decoding.repetition_penalty",
            penalty,
            penalty == 0 or 0.01 <= penalty <= 2,
            "from 0.01 to 2, or 0 for none",
        ),
        ("decoding.length_penalty.decay_factor", decay, 1 <= decay <= 10, "from 1 to 10"),
        ("stopping.max_new_tokens", most, most <= new_max, f"at most {new_max}"),
        ("stopping.min_new_tokens", least, least <= most, f"at most max_new_tokens, {most}"),
        (
            "response.top_n_tokens",
            params.response.top_n_tokens,
            params.response.top_n_tokens <= tops_max,
            f"at most {tops_max}",
        ),
    ):
        if not fits:
            value = f"{value:.6g}" if isinstance(value, float) else value
            raise RequestError(f"{field} is {value}; it must be {wanted}", f"params.{field}")
    _check_stops(stopping.stop_sequences)
    told = params.response
    if details(told) and not (told.input_tokens or told.generated_tokens):
        raise RequestError(
            "response asks for details of tokens, and for no tokens; set generated_tokens, "
            "input_tokens or both",
            "params.response",
        )


def _check_stops(stops: Any) -> None:
    sizes = [len(stop.encode()) for stop in stops]
    if len(sizes) > STOPS_MAX or not all(0 < size <= STOP_BYTES_MAX for size in sizes):
        raise RequestError(
            f"stop_sequences has {len(sizes)} of {sizes[:STOPS_MAX]} bytes; at most {STOPS_MAX} "
            f"may be, each of 1 to {STOP_BYTES_MAX} bytes",
            "params.stopping.stop_sequences",
        )


def _guide(decoding: Any) -> Guide | None:
    match decoding.WhichOneof("guided"):
        case "format":
            if decoding.format not in (0, 1):
                raise RequestError(
                    f"decoding.format is {decoding.format}; known are 0 (TEXT) and 1 (JSON)",
                    "params.decoding.format",
                )
            return Guide("json", '{"type": "object"}') if decoding.format else None
        case "json_schema":
            return Guide("json", decoding.json_schema)
        case "regex":
            return Guide("regex", decoding.regex)
        case "choice":
            return Guide("choice", json.dumps(list(decoding.choice.choices)))
        case "grammar":
            return Guide("grammar", decoding.grammar)
    return None
