"""Bad values of request fields, settings and config fields, each with its cause.

A cause is a field with a kind of wrong value, such as `temperature: a text`. The same cause can be
tried on several surfaces.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class BadValue(NamedTuple):
    field: str
    kind: str  # What is wrong with the value.
    value: Any

    @property
    def cause(self) -> str:
        return f"{self.field}: {self.kind}"


Values = Mapping[str, Any]

OBJECT: Values = {"an object": {"a": 1}}
NO_NUMBER: Values = {"a text": "two", "a list": [1], **OBJECT, "a boolean": True}
COUNT: Values = {**NO_NUMBER, "negative": -1, "a fraction": 1.5, "30 digits": 10**30}
NUMBER: Values = {**NO_NUMBER, "a thousand digits": 10**1000}
POSITIVE: Values = {**NUMBER, "negative": -0.5}
SHARE: Values = {**POSITIVE, "above 1": 1.5}
FLAG: Values = {"a text": "yes", "a number": 2, "a list": [True], **OBJECT}
TEXT: Values = {"a number": 5, "a list": ["a"], **OBJECT, "a boolean": True}
TEXTS: Values = {"a number": 5, **OBJECT, "a boolean": True, "a list of numbers": [1.5, 2]}
IDS: Values = {
    "a text": "two",
    **OBJECT,
    "a boolean": True,
    "a list of texts": ["a"],
    "a negative id": [-1],
    "an id above the vocabulary": [10**6],
    "an id of 30 digits": [10**30],
    "a fraction": [1.5],
}
CHOICE: Values = {**TEXT, "an unknown name": "fastest"}

# The fields that OpenAI's completions and chats share.
SAMPLING: Mapping[str, Values] = {
    "max_tokens": COUNT,
    "temperature": POSITIVE,
    "top_p": {**SHARE, "zero": 0},
    "n": {**COUNT, "zero": 0, "above the limit": 1000},
    "seed": {key: COUNT[key] for key in ("a text", "a list", "a fraction", "30 digits")},
    "stop": {**TEXTS, "a long text": "x" * 1000, "too many": ["x"] * 1000, "empty": [""]},
    "stream": FLAG,
    "presence_penalty": {**NUMBER, "above 2": 3},
    "frequency_penalty": {**NUMBER, "below -2": -3},
    "logit_bias": {
        "a text": "x",
        "a list": [1],
        "a text for an id": {"one": 1},
        "a negative id": {"-1": 1},
        "an id above the vocabulary": {"1000000": 1},
        "a text for a value": {"1": "more"},
        "too many": {str(number): 1 for number in range(5000)},
    },
    "top_k": {**NO_NUMBER, "a fraction": 1.5, "below -1": -5},
    "min_p": SHARE,
    "repetition_penalty": {**POSITIVE, "zero": 0},
    "min_tokens": COUNT,
    "ignore_eos": FLAG,
    "stop_token_ids": {**IDS, "too many": [1] * 5000},
    "include_stop_str_in_output": FLAG,
    "allowed_token_ids": {**IDS, "none": []},
    "bad_words": {**TEXTS, "too many": ["x"] * 5000},
    "guided_regex": {**TEXT, "an open bracket": "(a", "an open class": "[a", "huge": "a{1,999999}"},
    "guided_choice": {**TEXTS, "none": []},
    "guided_grammar": {**TEXT, "no rules": "?", "an unknown rule": "start: nothing"},
    "structured_outputs": {**TEXT, "two guides": {"regex": "a", "choice": ["a"]}},
    "response_format": {
        **TEXT,
        "an unknown type": {"type": "xml"},
        "no schema": {"type": "json_schema"},
        "a text for a schema": {"type": "json_schema", "json_schema": {"schema": "integer"}},
    },
    "use_beam_search": FLAG,
    "beam_width": {**COUNT, "above the limit": 1000},
    "length_penalty": NUMBER,
    "early_stopping": {"a number": 5, "an unknown name": "soon"},
    "priority": {**NO_NUMBER, "a fraction": 1.5, "30 digits": 10**30},
    "prompt_logprobs": {**COUNT, "above the limit": 1000},
    "add_special_tokens": FLAG,
    "skip_special_tokens": FLAG,
    "return_token_ids": FLAG,
    "request_id": TEXT,
    "cache_salt": TEXT,
    "parse_special_tokens": FLAG,
    "typical_p": {**SHARE, "zero": 0},
    "no_repeat_ngram_size": COUNT,
    "service_class": CHOICE,
    "timeout": {**POSITIVE, "zero": 0},
    "stream_options": TEXT,
    "user": TEXT,
    "model": TEXT,
    "unheard_of": {"an unknown field": 1},
}
SCHEMAS: Values = {
    "a reference to nothing": {"$ref": "#/nowhere"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "an unknown type": {"type": "spaceship"},
    "a number as type": {"type": 5},
    "an open pattern": {"type": "string", "pattern": "(a"},
    "properties of texts": {"type": "object", "properties": {"a": "b"}},
    "a text for required": {"type": "object", "required": "a"},
    "a number for items": {"type": "array", "items": 5},
    "a text for anyOf": {"anyOf": "a"},
    "no choice in anyOf": {"anyOf": []},
    "a text for enum": {"enum": "a"},
    "no value in enum": {"enum": []},
    "a text for minItems": {"type": "array", "minItems": "a"},
    "a negative minItems": {"type": "array", "minItems": -1},
    "a text for maxLength": {"type": "string", "maxLength": "a"},
    "a list": [],
    "too long": {"description": "x" * 100_000},
}

MESSAGES: Mapping[str, Values] = {
    "messages": {
        **TEXT,
        "none": [],
        "null": None,
        "a list of texts": ["a"],
        "no role": [{"content": "a"}],
        "an unknown role": [{"role": "king", "content": "a"}],
        "a number as role": [{"role": 5, "content": "a"}],
        "a number as content": [{"role": "user", "content": 5}],
        "an image": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ],
        "a part without type": [{"role": "user", "content": [{"text": "a"}]}],
        "a part of text without text": [{"role": "user", "content": [{"type": "text"}]}],
        "too many": [{"role": "user", "content": "a"}] * 2000,
        "a lone surrogate": [{"role": "user", "content": "\ud800"}],
    },
    "tools": {
        **TEXT,
        "a list of texts": ["a"],
        "no function": [{"type": "function"}],
        "an unknown type": [{"type": "hammer", "function": {"name": "a"}}],
        "no name": [{"type": "function", "function": {}}],
        "a name with spaces": [{"type": "function", "function": {"name": "a b"}}],
        "a text for parameters": [
            {"type": "function", "function": {"name": "a", "parameters": "b"}}
        ],
        "too many": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(500)],
        "the same name twice": [{"type": "function", "function": {"name": "a"}}] * 2,
    },
    "tool_choice": {
        "an unknown name": "maybe",
        "required without tools": "required",
        "a function without tools": {"type": "function", "function": {"name": "a"}},
        "a number": 5,
        "a list": [],
    },
    "max_completion_tokens": COUNT,
    "logprobs": {"a text": "yes", "a list": [True], **OBJECT},
    "top_logprobs": {**COUNT, "above the limit": 1000},
    "chat_template_kwargs": {key: TEXT[key] for key in ("a number", "a list", "a boolean")},
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "parallel_tool_calls": FLAG,
    "reasoning_effort": TEXT,
}
COMPLETIONS: Mapping[str, Values] = {
    "prompt": {
        "a number": 5,
        **OBJECT,
        "a boolean": True,
        "none": [],
        "a negative id": [-1],
        "an id above the vocabulary": [10**6],
        "an id of 30 digits": [10**30],
        "a fraction": [1.5],
        "texts and ids": ["a", 1],
        "a list of objects": [{}],
        "too many": ["a"] * 1000,
        "a long text": "x" * (2 << 20),
        "a lone surrogate": "\ud800",
    },
    "best_of": {**COUNT, "zero": 0, "above the limit": 1000},
    "echo": FLAG,
    "logprobs": {**COUNT, "above the limit": 1000},
    "suffix": {"a text": "the end", "a number": 5},
    "truncate_prompt_tokens": {**NO_NUMBER, "a fraction": 1.5, "below -1": -5},
    "inputs": {
        "a text": "a",
        "a list": [],
        "a number as value": {"text": 5},
        "without an adapter": {"text": "a"},
    },
}
RESPONSES: Mapping[str, Values] = {
    "input": {"a number": 5, **OBJECT, "a boolean": True, "a list of numbers": [5], "null": None},
    "max_output_tokens": COUNT,
    "temperature": POSITIVE,
    "top_p": SHARE,
    "stream": FLAG,
    "text": {"a text": "json", "an unknown format": {"format": {"type": "xml"}}},
    "instructions": {"a number": 5, "a list of numbers": [5]},
    "model": TEXT,
    "previous_response_id": {"a text": "resp_1", "a number": 5},
    "top_logprobs": {**COUNT, "above the limit": 1000},
    "background": {"true": True, "a text": "yes"},
    "unheard_of": {"an unknown field": 1},
}
TOKENIZE: Mapping[str, Values] = {
    "prompt": {**TEXT, "null": None, "a lone surrogate": "\ud800"},
    "add_special_tokens": FLAG,
    "return_token_strs": FLAG,
    "parse_special_tokens": FLAG,
    "model": TEXT,
    "messages": {"a text": "a", "beside a prompt": [{"role": "user", "content": "a"}]},
    "unheard_of": {"an unknown field": 1},
}
DETOKENIZE: Mapping[str, Values] = {
    "tokens": {**IDS, "null": None, "a number": 5},
    "model": TEXT,
    "unheard_of": {"an unknown field": 1},
}
TGI: Mapping[str, Values] = {
    "max_new_tokens": COUNT,
    "best_of": {**COUNT, "zero": 0, "above the limit": 1000},
    "decoder_input_details": FLAG,
    "details": FLAG,
    "do_sample": FLAG,
    "frequency_penalty": {**NUMBER, "below -2": -3},
    "grammar": {
        **TEXT,
        "an unknown type": {"type": "xml", "value": "a"},
        "no value": {"type": "regex"},
        "an open bracket": {"type": "regex", "value": "(a"},
    },
    "repetition_penalty": {**POSITIVE, "zero": 0},
    "return_full_text": FLAG,
    "seed": {"a text": "a", "a fraction": 1.5, "30 digits": 10**30, "negative": -1},
    "stop": {**TEXTS, "a long text": ["x" * 1000], "too many": ["x"] * 1000},
    "temperature": POSITIVE,
    "top_k": COUNT,
    "top_n_tokens": {**COUNT, "above the limit": 1000},
    "top_p": SHARE,
    "truncate": COUNT,
    "typical_p": SHARE,
    "watermark": {**FLAG, "true": True},
    "adapter_id": {"a number": 5, "an unknown name": "nobody", "a path": "../../etc/passwd"},
    "unheard_of": {"an unknown field": 1},
}
KSERVE_GENERATE: Mapping[str, Values] = {
    "text_input": {"a number": 5, "a list of numbers": [5], **OBJECT, "null": None},
    "max_tokens": COUNT,
    "temperature": POSITIVE,
    "top_p": SHARE,
    "top_k": {"a text": "x", "a fraction": 1.5, "negative": -5},
    "stop": {**TEXTS, "a long text": ["x" * 1000]},
    "stream": FLAG,
    "seed": {"a text": "a", "a fraction": 1.5, "30 digits": 10**30},
    "unheard_of": {"an unknown field": 1},
}


def bad_values(*tables: Mapping[str, Values]) -> Iterator[BadValue]:
    for table in tables:
        for field, values in table.items():
            for kind, value in values.items():
                yield BadValue(field, kind, value)
