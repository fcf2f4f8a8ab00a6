"""KServe v2 inputs: validates Triton's tensors, parameters and JSON and builds an `Ask`.

Triton's vLLM and TensorRT-LLM backends take the same settings in different places: as tensors, as
JSON in one tensor, or as request parameters. Here a name has the same meaning and the same type of
value in each of these places, and may occur once per request. An unknown name is an error, because
ignoring it would change the result of the request.
"""

import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpt.errors import RequestError
from gpt.settings import short_repr, suggest_nearest
from serving.messages import Guide
from serving.protocols.kserve.metadata import (
    FIELD_NAMES,
    INPUT_KINDS,
    LOGPROB_OUTPUTS,
    NAME_CHARACTERS_MAX,
    NEUTRAL_INPUTS,
    OUTPUTS,
    RESERVED_PARAMETERS,
    SAMPLING_INPUTS,
    InputKind,
    canonical_name,
)
from serving.protocols.kserve.tensors import BYTES, InputTensor, read_tensors
from serving.request import Ask, RefusedError

# As in Triton, level 1 is the most urgent. A request without a level gets the middle level.
PRIORITY_LEVEL_DEFAULT, PRIORITY_LEVEL_MAX = 100, 200
TIMEOUT_US_MAX = 10**15


class RequestedOutput(NamedTuple):
    """An output that a request lists."""

    name: str
    parameters: Container[str]  # The names of the output's parameters.


@dataclass(frozen=True)
class InferContent:
    """What an inference request contains, in the same form for gRPC and HTTP."""

    tensors: Mapping[str, InputTensor]
    parameters: Mapping[str, Any]
    outputs: Sequence[RequestedOutput]


def read_message(message: Any) -> InferContent:
    """Return the content of a ModelInferRequest."""
    for input_tensor in message.inputs:
        canonical_name(input_tensor.name)  # Refuse unknown names before any tensor is decoded.
    return InferContent(
        read_tensors(message),
        {
            name: getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)
            for name, parameter in message.parameters.items()
        },
        [RequestedOutput(output.name, output.parameters) for output in message.outputs],
    )


@dataclass(frozen=True)
class InferRequest:
    """A validated inference request: the `Ask`, and how to build the response."""

    ask: Ask
    outputs: frozenset[str]
    stream: bool  # True: one response per piece; False: one response.
    prompt_prefix: str  # Text that precedes each completion in the response: the prompt, or empty.
    timeout_s: float | None
    field_names: Mapping[str, str]  # The caller's name for each field of the `Ask`.


@dataclass(frozen=True)
class _Parameter:
    """A parsed setting of a request."""

    name: str  # As the caller spelled it.
    value: Any


def read_request(content: InferContent, adapter: str, text_bytes_max: int) -> InferRequest:
    """Validate an inference request.

    `adapter` is the adapter that the request names as its model; empty for the base model.
    """
    parameters = _collect_parameters(content, text_bytes_max)
    values = {name: parameter.value for name, parameter in parameters.items()}
    stream = values.get("stream", False)
    listed_outputs = frozenset(map(_check_output, content.outputs))
    flagged_outputs = {name for name, (_, flag) in OUTPUTS.items() if flag and values.get(flag)}
    outputs = listed_outputs or frozenset({"text_output", *flagged_outputs})
    sampling = {
        field: values[name] for name, (_, field) in SAMPLING_INPUTS.items() if name in values
    }
    if outputs & LOGPROB_OUTPUTS:
        sampling.setdefault("logprobs", 0)
    _check_sequence_id(content.parameters)
    prompt = _read_prompt(values)
    ask = Ask(
        prompt,
        adapters=_read_adapters(values, adapter),
        parse_by_default=True,
        guide=_read_guide(values),
        logit_bias=_read_logit_bias(values.get("logit_bias", {})),
        priority=_read_priority(content.parameters),
        **_normalize_sampling(sampling, values),
    )
    prompt_prefix = _prompt_prefix(values, prompt, stream)
    timeout_s = _read_timeout_s(content.parameters)
    return InferRequest(ask, outputs, stream, prompt_prefix, timeout_s, _field_names(parameters))


def _field_names(parameters: Mapping[str, _Parameter]) -> Mapping[str, str]:
    """Map the field names in the admission's errors to input names, as the caller spelled them."""
    spellings = {name: parameter.name for name, parameter in parameters.items()}
    names = {field: spellings.get(name, name) for field, name in FIELD_NAMES.items()}
    if "input_ids" in parameters:
        names["prompt"] = spellings["input_ids"]
    if "end_id" in parameters and "stop_token_ids" not in parameters:
        names |= dict.fromkeys(("stop_token_ids", "stops.token_ids"), spellings["end_id"])
    return names


# ----------------------------------------------------------------------- collecting the parameters


def _collect_parameters(content: InferContent, text_bytes_max: int) -> dict[str, _Parameter]:
    """Return the settings of a request by name: from its tensors, parameters and nested JSON."""
    parameters: dict[str, _Parameter] = {}

    def add_parameter(spelling: str, value: Any) -> None:
        if value is None:  # A JSON null means unset.
            return
        name = canonical_name(spelling)
        if name in parameters:
            other_spelling = parameters[name].name
            conflict = (
                f"{spelling} is set twice; set it once"
                if other_spelling == spelling
                else f"{spelling} and {other_spelling} are both set, and mean the same; set only "
                "one of them"
            )
            raise RequestError(conflict, spelling)
        if INPUT_KINDS[name] == "object" and isinstance(value, str) and len(value) > text_bytes_max:
            raise RequestError(  # Parsing a long JSON text would delay all calls.
                f"{spelling} is {len(value)} characters; this server takes at most "
                f"{text_bytes_max} (text_bytes_max)",
                spelling,
            )
        parameters[name] = _Parameter(
            spelling, _parse_parameter(INPUT_KINDS[name], value, spelling)
        )

    for tensor in content.tensors.values():
        if tensor.values:
            add_parameter(
                tensor.name, _unwrap_tensor(INPUT_KINDS[canonical_name(tensor.name)], tensor)
            )
    for name, value in content.parameters.items():
        if name not in RESERVED_PARAMETERS and not name.startswith("triton_"):
            add_parameter(name, value)
    nested_json = parameters.pop("sampling_parameters", None)
    if nested_json is not None:
        for name, value in nested_json.value.items():
            if name == "sampling_parameters":
                raise RequestError(f"{name} contains {name}; remove the inner one", name)
            add_parameter(name, value)
    for name, (_, neutral_value) in NEUTRAL_INPUTS.items():
        if name in parameters and parameters[name].value != neutral_value:
            raise RefusedError(
                "UNSUPPORTED",
                f"{name} can only be {json.dumps(neutral_value)} here; remove it",
                name,
            )
    return parameters


def _unwrap_tensor(kind: InputKind, tensor: InputTensor) -> Any:
    """Return the value of a tensor: a list for list kinds, else the tensor's only element.

    BYTES elements become text. A number that was sent as text is parsed later, by
    `_parse_parameter`.
    """
    values = tensor.values
    if tensor.datatype == BYTES:
        values = tuple(_decode_text(value, tensor.name) for value in values)
    if kind in ("texts", "integers"):
        return list(values)
    if len(values) != 1:
        raise RequestError(
            f"{tensor.name} has {len(values)} elements; it must have 1: send one request for each "
            "element",
            tensor.name,
        )
    return values[0]


def _decode_text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 at byte {error.start}; send UTF-8 text", name
        ) from None


def _parse_parameter(kind: InputKind, value: Any, name: str) -> Any:
    try:
        return _PARSERS[kind](value)
    except (ValueError, OverflowError, TypeError, RecursionError):
        raise RequestError(
            f"{name} is {short_repr(value)}; it must be {_EXPECTED_TYPES[kind]}", name
        ) from None


def _parse_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        raise TypeError
    return value if isinstance(value, list) else [value]


def _parse_texts(value: Any) -> tuple[str, ...]:
    # Clients that want no stop strings send one empty string.
    return tuple(_parse_text(text) for text in _as_list(value) if text != "")


def _parse_integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    number = int(_number_text(value))
    if not -(2**63) <= number < 2**64:
        raise ValueError
    return number


def _number_text(value: Any) -> Any:
    """Return the value; raise a ValueError for a text that is a number only in Python."""
    # Python ignores underscores between digits, and accepts the digits of all scripts.
    if isinstance(value, str) and ("_" in value or not value.isascii()):
        raise ValueError
    return value


def _parse_integers(value: Any) -> tuple[int, ...]:
    return tuple(map(_parse_integer, _as_list(value)))


def _parse_number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(_number_text(value))
    if not math.isfinite(number):
        raise ValueError
    return number


def _parse_flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false", "1", "0"):
        raise ValueError
    return text in ("true", "1")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise a ValueError if a key occurs twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError
    return record


def _parse_object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        text, value = value, json.loads(value, object_pairs_hook=_unique_pairs)
        if "\\u" in text:
            # The text may have the escape of a lone surrogate, which UTF-8 cannot encode. `encode`
            # then raises a ValueError, which `_parse_parameter` reports.
            json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, dict):
        raise TypeError
    return value


def _parse_early_stopping(value: Any) -> bool | str:
    return "never" if value == "never" else _parse_flag(value)


_PARSERS: Mapping[InputKind, Callable[[Any], Any]] = {
    "text": _parse_text,
    "texts": _parse_texts,
    "integer": _parse_integer,
    "integers": _parse_integers,
    "number": _parse_number,
    "flag": _parse_flag,
    "object": _parse_object,
    "early": _parse_early_stopping,
}
_EXPECTED_TYPES: Mapping[InputKind, str] = {
    "text": "a string (BYTES)",
    "texts": "strings (BYTES)",
    "integer": "a whole number",
    "integers": "whole numbers",
    "number": "a finite number",
    "flag": "true or false",
    "object": "a JSON object in valid UTF-8, whose keys occur once",
    "early": 'true, false or "never"',
}


# ------------------------------------------------------------------------------- building the `Ask`


def _read_prompt(settings: Mapping[str, Any]) -> str | tuple[int, ...] | Mapping[str, str]:
    prompt_names = [name for name in ("text_input", "input_ids", "inputs") if name in settings]
    if len(prompt_names) > 1:
        raise RequestError(
            f"{prompt_names[0]} and {prompt_names[1]} are both set; send one of them",
            prompt_names[1],
        )
    if not prompt_names:
        raise RequestError(
            "text_input is not set; send text_input, input_ids or inputs", "text_input"
        )
    prompt: Any = settings[prompt_names[0]]
    if prompt_names == ["inputs"]:
        for field, value in prompt.items():
            if not isinstance(value, str):
                raise RequestError(
                    f"inputs has {short_repr(field)}: {short_repr(value)}; each field must be a "
                    "string",
                    "inputs",
                )
    return prompt  # type: ignore[no-any-return]


def _read_adapters(settings: Mapping[str, Any], adapter: str) -> tuple[str, ...]:
    adapter_id = settings.get("adapter_id", "")
    if adapter and adapter_id and adapter_id not in (adapter, adapter.partition("@")[0]):
        raise RequestError(
            f"adapter_id is {short_repr(adapter_id)}, but the model is the adapter "
            f"{short_repr(adapter)}; name only one of them",
            "adapter_id",
        )
    name = adapter or adapter_id
    return (name,) if name else ()


def _normalize_sampling(sampling: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values whose meaning in Triton's backends differs from that in an `Ask`."""
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    if sampling.get("seed") == -1:  # vLLM's clients send it for an unset seed.
        del sampling["seed"]
    if settings.get("skip_special_tokens") is False:
        sampling["keep_special_tokens"] = True
    # top_p 0 means unset: TensorRT-LLM's clients send it. If top_k is off too, decoding is greedy.
    if sampling.get("top_p") == 0:
        del sampling["top_p"]
        if not sampling.get("top_k"):
            sampling["top_k"] = 1
    if sampling.get("beam_width", 1) > 1:
        sampling.setdefault("answers", sampling["beam_width"])  # As in Triton's backends.
    end_id = settings.get("end_id")
    if end_id == -1:
        sampling["ignore_ends"] = True
    elif end_id is not None:
        sampling["stop_token_ids"] = (*sampling.get("stop_token_ids", ()), end_id)
    if settings.get("best_of", 1) not in (1, sampling.get("answers", 1)):
        raise RequestError(
            "best_of differs from n; this server returns every completion that it generates: set n "
            "only",
            "best_of",
        )
    return sampling


def _read_logit_bias(biases: Mapping[str, Any]) -> dict[int, float]:
    try:
        return {_parse_integer(token): _parse_number(bias) for token, bias in biases.items()}
    except (ValueError, TypeError, OverflowError):
        raise RequestError(
            f"logit_bias is {short_repr(dict(biases))}; it must map token ids to numbers",
            "logit_bias",
        ) from None


def _read_guide(settings: Mapping[str, Any]) -> Guide | None:
    guide_kinds: Mapping[str, Any] = {
        "json": "json",
        "json_schema": "json",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
        "ebnf_grammar": "grammar",
    }
    guides = {
        name: pattern
        for name, pattern in settings.get("guided_decoding", {}).items()
        if pattern is not None
    }
    kind, text = settings.get("guided_decoding_guide_type"), settings.get("guided_decoding_guide")
    if kind is not None and text is not None:
        guides[kind] = text
    elif kind or text:
        guides[kind or ""] = None  # The kind or the pattern is missing: an error below.
    if not guides:
        return None
    name, pattern = next(iter(guides.items()))
    if len(guides) > 1 or name not in guide_kinds or pattern is None:
        raise RequestError(
            f"guided_decoding is {short_repr(guides)}; it must have exactly one of "
            f"{', '.join(guide_kinds)}, with the pattern that the text must match",
            "guided_decoding",
        )
    return Guide(guide_kinds[name], pattern if isinstance(pattern, str) else json.dumps(pattern))


def _prompt_prefix(settings: Mapping[str, Any], prompt: object, stream: bool) -> str:
    """Return the prompt if it must precede the text of the response, else an empty text.

    As in the vLLM backend, a unary response repeats the prompt if the caller does not exclude it.
    """
    exclude_prompt = settings.get("exclude_input_in_output")
    if stream and exclude_prompt is False:
        raise RequestError(
            "exclude_input_in_output is false and stream is true, but stream responses never "
            "repeat the prompt; remove one of them",
            "exclude_input_in_output",
        )
    return prompt if isinstance(prompt, str) and not stream and not exclude_prompt else ""


def _check_output(output: RequestedOutput) -> str:
    for name in ("classification", "shared_memory_region"):
        if name in output.parameters:
            raise RefusedError(
                "UNSUPPORTED",
                f"output {short_repr(output.name)} has {name}, which is not supported; remove it",
                output.name[:NAME_CHARACTERS_MAX],
            )
    if output.name not in OUTPUTS:
        suggestion = suggest_nearest(output.name, OUTPUTS)
        name = output.name[:NAME_CHARACTERS_MAX]
        raise RequestError(
            f"{short_repr(output.name)} is not an output of this model; {suggestion}", name
        )
    return output.name


# ------------------------------------------------------------------------------ reserved parameters


def _read_reserved_number(parameters: Mapping[str, Any], name: str, number_max: int) -> int:
    """Return a numeric reserved parameter; 0 if it is unset."""
    if name not in parameters:
        return 0
    number = _parse_parameter("integer", parameters[name], name)
    if not 0 <= number <= number_max:
        raise RequestError(f"{name} is {number}; it must be from 0 to {number_max}", name)
    return int(number)


def _read_priority(parameters: Mapping[str, Any]) -> int:
    level = _read_reserved_number(parameters, "priority", PRIORITY_LEVEL_MAX)
    return PRIORITY_LEVEL_DEFAULT - (level or PRIORITY_LEVEL_DEFAULT)


def _read_timeout_s(parameters: Mapping[str, Any]) -> float | None:
    return _read_reserved_number(parameters, "timeout", TIMEOUT_US_MAX) / 1e6 or None


def _check_sequence_id(parameters: Mapping[str, Any]) -> None:
    if parameters.get("sequence_id"):
        raise RefusedError(
            "UNSUPPORTED",
            "sequence_id is set, but this server keeps no state between requests; remove it, and "
            "send the whole text in each request",
            "sequence_id",
        )
