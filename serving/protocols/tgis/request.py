"""TGIS requests: checks parameters against TGIS's limits and builds an `Ask`.

A 0 in a numeric field without field presence (not `optional` in the proto) means unset. An unset
field becomes None or the neutral value of the `Ask`. The admission then checks the `Ask`; its
errors are translated to this protocol's field names.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt.errors import RequestError
from gpt.settings import short_repr
from protos.foreign.descriptor_pools import load_package
from serving.config import LimitsConfig
from serving.frontend.field_names import translate_error
from serving.messages import Guide
from serving.request import Ask, UnknownAdapterError

pb = load_package("tgis")

SEED_BITS = 32  # Size of the seed that is drawn for a request without a seed.
STOPS_MAX = 6
STOP_BYTES_MAX = 240
TOP_TOKENS_MAX = 10
TEMPERATURE_MIN = 0.05  # Smallest temperature other than 0.
DECODING_METHODS = ("GREEDY", "SAMPLE")

# Maps the field names in the admission's errors to this protocol's paths, which the callers know.
# The admission names fields of an `Ask`, and parts of fields, such as `guide.json`.
FIELD_PATHS = {
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
def translate_errors() -> Iterator[None]:
    """Convert errors of the admission to this protocol's field names."""
    try:
        yield
    except UnknownAdapterError as error:
        # TGIS reports an unknown adapter as INVALID_ARGUMENT, not as NOT_FOUND.
        raise RequestError(str(error), "adapter_id") from None
    except RequestError as error:
        raise translate_error(error, FIELD_PATHS) from None


def build_ask(message: Any, text: str, config: LimitsConfig, tokens_max: int) -> Ask:
    """Build the `Ask` for one text.

    `message` is the request with the parameters. `tokens_max` limits the sum of prompt tokens and
    new tokens.
    """
    params = message.params
    _check_parameters(params, config, tokens_max)
    sampling = params.sampling
    stopping = params.stopping
    decoding = params.decoding
    response_options = params.response
    top_tokens = response_options.top_n_tokens if wants_token_details(response_options) else None
    stops = tuple(stopping.stop_sequences)
    # By default, a stop sequence of the request is included in the text. The adapter's stop
    # sequences, which apply to a request without stop sequences, are not included.
    include_stop = bool(stops)
    if stopping.HasField("include_stop_sequence"):
        include_stop = stopping.include_stop_sequence
    penalty = decoding.length_penalty
    sampling_fields: dict[str, Any] = {}
    if is_sampling(params):
        sampling_fields = {
            "temperature": sampling.temperature if sampling.HasField("temperature") else 1.0,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p or None,
            "typical_p": sampling.typical_p or 1.0,
            "seed": sampling.seed if sampling.HasField("seed") else secrets.randbits(SEED_BITS),
        }
    return Ask(
        text,
        adapters=requested_adapters(message),
        parse_by_default=True,
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
        stop_in_text=include_stop,
        logprobs=top_tokens if response_options.generated_tokens else None,
        prompt_logprobs=top_tokens if response_options.input_tokens else None,
        guide=_read_guide(decoding),
        truncate_tokens=params.truncate_input_tokens or None,
        time_limit_s=stopping.time_limit_millis / 1000 or None,
        **sampling_fields,
    )


def is_sampling(params: Any) -> bool:
    """Return whether tokens are sampled. An explicit temperature of 0 is greedy."""
    sampling = params.sampling
    is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
    return params.method == DECODING_METHODS.index("SAMPLE") and not is_greedy


def wants_token_details(response_options: Any) -> bool:
    """Return whether the request asks for the logprob, rank or top tokens of each token."""
    return bool(
        response_options.token_logprobs
        or response_options.token_ranks
        or response_options.top_n_tokens
    )


def requested_adapters(message: Any) -> tuple[str, ...]:
    names = {message.prefix_id, message.adapter_id} - {""}
    if len(names) > 1:
        raise RequestError(
            f"prefix_id is {short_repr(message.prefix_id)} and adapter_id is "
            f"{short_repr(message.adapter_id)}; both fields mean the adapter: set only one of them",
            "adapter_id",
        )
    return tuple(names)


def _check_parameters(params: Any, config: LimitsConfig, tokens_max: int) -> None:
    """Raise a RequestError for the parameters that TGIS refuses. NaN fails every range check."""
    sampling = params.sampling
    stopping = params.stopping
    decoding = params.decoding
    new_tokens_max = tokens_max - 1
    top_tokens_max = min(TOP_TOKENS_MAX, config.logprobs_max)
    temperature, penalty = sampling.temperature, decoding.repetition_penalty
    decay_factor = (
        decoding.length_penalty.decay_factor if decoding.HasField("length_penalty") else 1.0
    )
    min_new_tokens = stopping.min_new_tokens
    max_new_tokens = stopping.max_new_tokens or new_tokens_max
    for field, value, is_valid, requirement in (
        (
            "method",
            params.method,
            0 <= params.method < len(DECODING_METHODS),
            "0 (GREEDY) or 1 (SAMPLE)",
        ),
        (
            "sampling.temperature",
            temperature,
            temperature == 0 or TEMPERATURE_MIN <= temperature <= 100,
            f"0, or from {TEMPERATURE_MIN} to 100",
        ),
        ("sampling.top_p", sampling.top_p, 0 <= sampling.top_p <= 1, "in (0, 1], or 0 for unset"),
        (
            "sampling.typical_p",
            sampling.typical_p,
            0 <= sampling.typical_p <= 1,
            "in (0, 1], or 0 for unset",
        ),
        (
            "decoding.repetition_penalty",
            penalty,
            penalty == 0 or 0.01 <= penalty <= 2,
            "from 0.01 to 2, or 0 for unset",
        ),
        (
            "decoding.length_penalty.decay_factor",
            decay_factor,
            1 <= decay_factor <= 10,
            "from 1 to 10",
        ),
        (
            "stopping.max_new_tokens",
            max_new_tokens,
            max_new_tokens <= new_tokens_max,
            f"at most {new_tokens_max}",
        ),
        (
            "stopping.min_new_tokens",
            min_new_tokens,
            min_new_tokens <= max_new_tokens,
            f"at most max_new_tokens, {max_new_tokens}",
        ),
        (
            "response.top_n_tokens",
            params.response.top_n_tokens,
            params.response.top_n_tokens <= top_tokens_max,
            f"at most {top_tokens_max}",
        ),
    ):
        if not is_valid:
            value = f"{value:.6g}" if isinstance(value, float) else value
            raise RequestError(f"{field} is {value}; it must be {requirement}", f"params.{field}")
    _check_stops(stopping.stop_sequences)
    response_options = params.response
    if wants_token_details(response_options) and not (
        response_options.input_tokens or response_options.generated_tokens
    ):
        raise RequestError(
            "response requests token details, but no tokens; set generated_tokens, input_tokens or "
            "both",
            "params.response",
        )


def _check_stops(stops: Any) -> None:
    sizes = [len(stop.encode()) for stop in stops]
    if len(sizes) > STOPS_MAX or not all(0 < size <= STOP_BYTES_MAX for size in sizes):
        raise RequestError(
            f"stop_sequences has {len(sizes)} entries of {sizes[:STOPS_MAX]} bytes; at most "
            f"{STOPS_MAX} are allowed, each of 1 to {STOP_BYTES_MAX} bytes",
            "params.stopping.stop_sequences",
        )


def _read_guide(decoding: Any) -> Guide | None:
    match decoding.WhichOneof("guided"):
        case "format":
            if decoding.format not in (0, 1):
                raise RequestError(
                    f"decoding.format is {decoding.format}; choose 0 (TEXT) or 1 (JSON)",
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
