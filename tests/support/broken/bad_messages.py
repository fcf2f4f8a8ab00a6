"""Bad values of gRPC messages: fields by path, with the values in protobuf's JSON form."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from tests.support.broken.bad_values import SCHEMAS, Values

NOT_FINITE: Values = {"not a number": "NaN", "infinite": "Infinity"}
POSITIVE: Values = {**NOT_FINITE, "negative": -1}
SHARE: Values = {**POSITIVE, "above 1": 1.5}
COUNT_MAX = 2**32 - 1

# Fields of GenerateRequest.
GENERATE: Mapping[str, Values] = {
    "text": {"a long text": "x" * (2 << 20)},
    "token_ids.ids": {
        "none": [],
        "an id above the vocabulary": [10**6],
        "a virtual token": [640],
        "too many": [1] * 5000,
    },
    "inputs.fields": {
        "none": {},
        "without an adapter": {"text": "a"},
        "a long text": {"a": "x" * (2 << 20)},
    },
    "adapter": {
        "an unknown name": "nobody",
        "a path": "../../etc/passwd",
        "a hidden file": ".hidden",
        "spaces": "a b",
        "a version of zeros": "a@0",
        "a long name": "a" * 5000,
        "a zero byte": "a\0b",
        "a version that is no number": "a@one",
    },
    "adapters": {
        "too many": ["a"] * 1000,
        "an unknown name": ["nobody"],
        "the base twice": ["", ""],
    },
    "sampling.temperature": POSITIVE,
    "sampling.top_p": SHARE,
    "sampling.min_p": SHARE,
    "sampling.typical_p": SHARE,
    "sampling.repetition_penalty": {**POSITIVE, "zero": 0},
    "sampling.presence_penalty": {**NOT_FINITE, "above 2": 3},
    "sampling.frequency_penalty": {**NOT_FINITE, "below -2": -3},
    "sampling.logit_bias": {
        "not a number": {"1": "NaN"},
        "an id above the vocabulary": {"1000000": 1},
        "too many": {str(number): 1 for number in range(5000)},
    },
    "sampling.allowed_token_ids": {
        "an id above the vocabulary": [10**6],
        "too many": list(range(5000)),
    },
    "sampling.bad_words": {"too many": ["x"] * 5000, "empty": [""], "a long text": ["x" * 5000]},
    "sampling.no_repeat_ngram_size": {"above 32 bits less one": COUNT_MAX},
    "sampling.length_decay.factor": {**NOT_FINITE, "below 1": 0.5, "above 10": 11},
    "max_new_tokens": {"zero": 0, "above the context": COUNT_MAX},
    "min_new_tokens": {"above max_new_tokens": 1000, "above the context": COUNT_MAX},
    "stops.strings": {"too many": ["x"] * 1000, "a long text": ["x" * 1000], "empty": [""]},
    "stops.token_ids": {"too many": [1] * 1000, "an id above the vocabulary": [10**6]},
    "answers": {"above the limit": 1000, "the largest number": COUNT_MAX},
    "beams.width": {"above the limit": 1000, "the largest number": COUNT_MAX},
    "beams.length_penalty": NOT_FINITE,
    "guide.json_schema": {
        "no JSON": "{",
        "a number": "5",
        "a long text": '"' + "x" * 100_000 + '"',
        **{kind: schema for kind, schema in SCHEMAS.items() if kind == "empty"},
    },
    "guide.regex": {"an open bracket": "(a", "an open class": "[a", "a long text": "a" * 100_000},
    "guide.choices.texts": {"none": [], "a long text": ["x" * 100_000]},
    "guide.grammar": {"no rules": "?", "an unknown rule": "start: nothing"},
    "details.logprobs": {"above the limit": 1000, "the largest number": COUNT_MAX},
    "details.prompt_logprobs": {"above the limit": 1000},
    "service_class": {"an unknown number": 99},
    "priority": {"above the limit": 10**6, "below the limit": -(10**6)},
    "time_limit_ms": {"the largest number": COUNT_MAX},
}
# Fields of the requests of AdapterService, by method.
ADAPTER_NAMES: Values = {
    "empty": "",
    "an unknown name": "nobody@1",
    "a path": "../../etc/passwd@1",
    "a hidden file": ".gone-sum@1",
    "a zero byte": "a\0b@1",
    "a long name": "a" * 5000,
    "a version of zeros": "sum@0",
    "a version with a sign": "sum@-1",
    "a version of ten digits": "sum@1234567890",
    "spaces": "a b@1",
    "no ASCII": "größe@1",
}
ADAPTER_METHODS = ("GetAdapter", "LoadAdapter", "UnloadAdapter", "PromoteAdapter")


def with_field(message: Message, path: str, value: Any) -> Message:
    """Return a copy of the message with one field replaced."""
    *parents, name = path.split(".")
    record: Any = value
    for part in (name, *reversed(parents)):
        record = {part: record}
    copy = type(message)()
    copy.CopyFrom(message)
    first = path.partition(".")[0]
    oneof = copy.DESCRIPTOR.fields_by_name[first].containing_oneof
    if oneof is not None and (present := copy.WhichOneof(oneof.name)):
        copy.ClearField(present)
    ParseDict(record, copy)
    return copy
