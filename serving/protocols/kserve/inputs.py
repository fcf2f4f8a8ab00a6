"""What a KServe v2 request asks: the text inputs of Triton's vLLM and TensorRT-LLM backends.

Both spell the same wishes in their own ways: as tensors, as JSON in one tensor, as parameters of
the request. Here each name has one meaning and one kind, wherever it stands, and may be said once.
A name that is not known is refused, as it would have changed what is asked.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpt.errors import RequestError
from gpt.settings import nearest, shown
from serving.messages import Guide
from serving.protocols.kserve.metadata import (
    FIXED,
    KINDS,
    NAME_SHOWN,
    NAMES,
    OUTPUTS,
    RESERVED,
    SAMPLING,
    SCORED,
    Kind,
    known,
)
from serving.protocols.kserve.tensors import BYTES, Tensor, read_tensors
from serving.request import Ask, RefusedError

# What a request without a level has; 1 is the most urgent, as in Triton, and this is in the middle.
PRIORITY_LEVEL_DEFAULT, PRIORITY_LEVEL_MAX = 100, 200
TIMEOUT_US_MAX = 10**15


@dataclass(frozen=True)
class Wanted:
    ask: Ask
    outputs: frozenset[str]
    stream: bool  # Whether each piece is a response, or the whole one.
    prepend: str  # Before each answer's text.
    timeout_s: float | None
    names: Mapping[str, str]  # What the caller calls the fields of the ask.


@dataclass(frozen=True)
class _Given:
    name: str  # As the caller spelled it.
    value: Any


def read_request(message: Any, adapter: str, text_bytes_max: int) -> Wanted:
    """What a message asks of the model, or of the adapter that it is for."""
    given = _given(message, text_bytes_max)
    settings = {name: one.value for name, one in given.items()}
    stream = settings.get("stream", False)
    listed = frozenset(_listed(one) for one in message.outputs)
    flagged = {name for name, (_, flag) in OUTPUTS.items() if flag and settings.get(flag)}
    outputs = listed or frozenset({"text_output", *flagged})
    asked = {field: settings[name] for name, (_, field) in SAMPLING.items() if name in settings}
    if outputs & SCORED:
        asked.setdefault("logprobs", 0)
    _check_sequence(message)
    prompt = _prompt(settings)
    ask = Ask(
        prompt,
        adapters=_adapters(settings, adapter),
        guide=_guide(settings),
        logit_bias=_bias(settings.get("logit_bias", {})),
        priority=_priority(message),
        **_mended(asked, settings),
    )
    prepend = _prepended(settings, prompt, stream)
    return Wanted(ask, outputs, stream, prepend, _timeout_s(message), _names(given))


def _names(given: Mapping[str, _Given]) -> Mapping[str, str]:
    spelled = {name: one.name for name, one in given.items()}
    names = {field: spelled.get(name, name) for field, name in NAMES.items()}
    if "input_ids" in given:
        names["prompt"] = spelled["input_ids"]
    return names


# ---------------------------------------------------------------------------------- what was given


def _given(message: Any, text_bytes_max: int) -> dict[str, _Given]:
    """Everything that the request says, wherever it does, each in its kind."""
    given: dict[str, _Given] = {}

    def add(spelled: str, value: Any) -> None:
        name = known(spelled)
        if value is None:  # JSON's way to say nothing.
            return
        if name in given:
            also = given[name].name
            ways = "twice" if also == spelled else f"and {also} too, which means the same"
            raise RequestError(f"{spelled} is given {ways}; give it once", spelled)
        if KINDS[name] == "object" and isinstance(value, str) and len(value) > text_bytes_max:
            raise RequestError(  # Reading JSON holds everyone else up.
                f"{spelled} is {len(value)} characters; this server takes at most "
                f"{text_bytes_max} (text_bytes_max)",
                spelled,
            )
        given[name] = _Given(spelled, _value(KINDS[name], value, spelled))

    for one in message.inputs:
        known(one.name)  # Before anything is made of what it holds.
    for tensor in read_tensors(message).values():
        if tensor.values:
            add(tensor.name, _plain(KINDS[known(tensor.name)], tensor))
    for name, parameter in message.parameters.items():
        if name not in RESERVED and not name.startswith("triton_"):
            add(name, getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None))
    nested = given.pop("sampling_parameters", None)
    if nested is not None:
        for name, value in nested.value.items():
            if name == "sampling_parameters":
                raise RequestError(f"{name} has {name} in it; take it out", name)
            add(name, value)
    for name, only in FIXED.items():
        if name in given and given[name].value != only:
            raise RefusedError(
                "UNSUPPORTED", f"{name} can only be {str(only).lower()} here; leave it out", name
            )
    return given


def _plain(kind: Kind, tensor: Tensor) -> Any:
    """A tensor's one value, or its list where its kind is one. Strings may be of numbers."""
    values = tensor.values
    if tensor.datatype == BYTES:
        values = tuple(_decoded(value, tensor.name) for value in values)
    if kind in ("texts", "integers"):
        return list(values)
    if len(values) != 1:
        raise RequestError(
            f"{tensor.name} has {len(values)} elements; it takes 1, and each text a request of "
            "its own",
            tensor.name,
        )
    return values[0]


def _decoded(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 from byte {error.start} on; send text", name
        ) from None


def _value(kind: Kind, value: Any, name: str) -> Any:
    try:
        return _READ[kind](value)
    except (ValueError, OverflowError, TypeError, RecursionError):
        raise RequestError(f"{name} is {shown(value)}; it must be {_SAID[kind]}", name) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        raise TypeError
    return value if isinstance(value, list) else [value]


def _texts(value: Any) -> tuple[str, ...]:
    # Clients that stop at nothing send one empty text.
    return tuple(_text(one) for one in _list(value) if one != "")


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    number = int(value)
    if not -(2**63) <= number < 2**64:
        raise ValueError
    return number


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(map(_integer, _list(value)))


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _flag(value: Any) -> bool:
    word = str(value).lower()
    if word not in ("true", "false", "1", "0"):
        raise ValueError
    return word in ("true", "1")


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        text, value = value, json.loads(value)
        if "\\u" in text:  # JSON can escape half a character, which nothing here can be.
            json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, dict):
        raise TypeError
    return value


def _early(value: Any) -> bool | str:
    return "never" if value == "never" else _flag(value)


_READ: Mapping[Kind, Callable[[Any], Any]] = {
    "text": _text,
    "texts": _texts,
    "integer": _integer,
    "integers": _integers,
    "number": _number,
    "flag": _flag,
    "object": _object,
    "early": _early,
}
_SAID: Mapping[Kind, str] = {
    "text": "a text (BYTES)",
    "texts": "texts (BYTES)",
    "integer": "a whole number",
    "integers": "whole numbers",
    "number": "a finite number",
    "flag": "true or false",
    "object": "a JSON object of valid text",
    "early": 'true, false or "never"',
}


# -------------------------------------------------------------------------------- what it all means


def _prompt(settings: Mapping[str, Any]) -> str | tuple[int, ...] | Mapping[str, str]:
    ways = [name for name in ("text_input", "input_ids", "inputs") if name in settings]
    if len(ways) > 1:
        raise RequestError(f"{ways[0]} and {ways[1]} are both there; send one of them", ways[1])
    if not ways:
        raise RequestError("text_input is not there; send it, input_ids or inputs", "text_input")
    prompt: Any = settings[ways[0]]
    if ways == ["inputs"]:
        for field, value in prompt.items():
            if not isinstance(value, str):
                raise RequestError(
                    f"inputs has {shown(field)}: {shown(value)}; each field must be a text",
                    "inputs",
                )
    return prompt  # type: ignore[no-any-return]


def _adapters(settings: Mapping[str, Any], adapter: str) -> tuple[str, ...]:
    named = settings.get("adapter_id", "")
    if adapter and named and named not in (adapter, adapter.partition("@")[0]):
        raise RequestError(
            f"adapter_id is {shown(named)}, and the model is the adapter {shown(adapter)}; name "
            "one of them",
            "adapter_id",
        )
    return (adapter or named,) if adapter or named else ()


def _mended(asked: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that mean something else in those backends than in an Ask."""
    if asked.get("top_k") == -1:
        asked["top_k"] = 0
    if asked.get("top_p") == 0:  # TensorRT-LLM's clients send it for none; nothing else, greedy.
        del asked["top_p"]
        if not asked.get("top_k"):
            asked["top_k"] = 1
    if asked.get("beam_width", 1) > 1:
        asked.setdefault("answers", asked["beam_width"])  # All of them are told there.
    end = settings.get("end_id")
    if end == -1:
        asked["ignore_ends"] = True
    elif end is not None:
        asked["stop_token_ids"] = (*asked.get("stop_token_ids", ()), end)
    if settings.get("best_of", 1) not in (1, asked.get("answers", 1)):
        raise RequestError(
            "best_of is not n; every answer that is made is told here, so ask for n of them",
            "best_of",
        )
    return asked


def _bias(given: Mapping[str, Any]) -> dict[int, float]:
    try:
        return {_integer(token): _number(bias) for token, bias in given.items()}
    except (ValueError, TypeError, OverflowError):
        raise RequestError(
            f"logit_bias is {shown(dict(given))}; it must be token ids with a number each",
            "logit_bias",
        ) from None


def _guide(settings: Mapping[str, Any]) -> Guide | None:
    kinds: Mapping[str, Any] = {
        "json": "json",
        "json_schema": "json",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
        "ebnf_grammar": "grammar",
    }
    nested = {k: v for k, v in settings.get("guided_decoding", {}).items() if v is not None}
    kind, text = settings.get("guided_decoding_guide_type"), settings.get("guided_decoding_guide")
    if kind is not None and text is not None:
        nested[kind] = text
    elif kind or text:
        nested[kind or ""] = None
    if not nested:
        return None
    name, what = next(iter(nested.items()))
    if len(nested) > 1 or name not in kinds or what is None:
        raise RequestError(
            f"guided_decoding is {shown(nested)}; it must be one of {', '.join(kinds)} with what "
            "the text must match",
            "guided_decoding",
        )
    return Guide(kinds[name], what if isinstance(what, str) else json.dumps(what))


def _prepended(settings: Mapping[str, Any], prompt: object, stream: bool) -> str:
    """As the vLLM backend does: an answer that comes whole has its prompt's text before it."""
    excluded = settings.get("exclude_input_in_output")
    if stream and excluded is False:
        raise RequestError(
            "exclude_input_in_output is false, and stream is true; pieces never repeat the prompt, "
            "so leave one of them out",
            "exclude_input_in_output",
        )
    return prompt if isinstance(prompt, str) and not stream and not excluded else ""


def _listed(one: Any) -> str:
    for name in ("classification", "shared_memory_region"):
        if name in one.parameters:
            raise RefusedError(
                "UNSUPPORTED",
                f"output {shown(one.name)} asks for {name}; leave it out",
                one.name[:NAME_SHOWN],
            )
    if one.name not in OUTPUTS:
        way = nearest(one.name, OUTPUTS)
        name = one.name[:NAME_SHOWN]
        raise RequestError(f"{shown(one.name)} is no output of this model; {way}", name)
    return str(one.name)


# ------------------------------------------------------------------------------ reserved parameters


def _parameter(message: Any, name: str, most: int) -> int:
    """A reserved parameter that is a number; 0: as if it were not there."""
    if name not in message.parameters:
        return 0
    parameter = message.parameters[name]
    value = getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)
    number = _value("integer", value, name)
    if not 0 <= number <= most:
        raise RequestError(f"{name} is {number}; it must be from 0 to {most}", name)
    return int(number)


def _priority(message: Any) -> int:
    level = _parameter(message, "priority", PRIORITY_LEVEL_MAX)
    return PRIORITY_LEVEL_DEFAULT - (level or PRIORITY_LEVEL_DEFAULT)


def _timeout_s(message: Any) -> float | None:
    return _parameter(message, "timeout", TIMEOUT_US_MAX) / 1e6 or None


def _check_sequence(message: Any) -> None:
    if "sequence_id" not in message.parameters:
        return
    one = message.parameters["sequence_id"]
    if one.int64_param or one.uint64_param or one.string_param:
        raise RefusedError(
            "UNSUPPORTED",
            "sequence_id is set, and no state is kept from one request to the next; send all of "
            "the text each time",
            "sequence_id",
        )
