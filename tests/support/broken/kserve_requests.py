"""Invalid messages to a KServe v2 server, each with one fault, and the expected error of each.

They are built from the bare stubs: tritonclient itself would refuse most of them.
"""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.support.tritonclient_calls import TEXT


def request(*inputs: dict[str, Any], raw: Sequence[bytes] = (), **fields: Any) -> Any:
    text = texts("text_input", TEXT.encode())
    fields.setdefault("model_name", "preamble")
    sent_inputs = (
        inputs if raw or (inputs and inputs[0]["name"] == "text_input") else (text, *inputs)
    )
    return service_pb2.ModelInferRequest(inputs=sent_inputs, raw_input_contents=raw, **fields)


def input_tensor(name: str, datatype: str, shape: Sequence[int], **contents: Any) -> dict[str, Any]:
    fields = {"contents": contents} if contents else {}
    return {"name": name, "datatype": datatype, "shape": list(shape), **fields}


def texts(name: str, *values: bytes, shape: Sequence[int] = (1,)) -> dict[str, Any]:
    return input_tensor(name, "BYTES", shape, bytes_contents=values)


def sampling(text: str) -> Any:
    return request(texts("sampling_parameters", text.encode()))


def framed(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


NO_BYTES = b""
PROMPT = input_tensor("text_input", "BYTES", [1])
FLAG = service_pb2.InferParameter(bool_param=True)
NUMBER = service_pb2.InferParameter(int64_param=-1)
# The message, the field in the error, and a part of the error message.
FAULTS: dict[str, tuple[Any, str, str]] = {
    "raw and typed": (
        request(texts("text_input", b"a"), raw=[framed(b"a")]),
        "text_input",
        "has contents, but the request has raw_input_contents too",
    ),
    "too few raw": (
        request(PROMPT, input_tensor("stream", "BOOL", [1]), raw=[framed(b"a")]),
        "raw_input_contents",
        "raw_input_contents has 1 entries and inputs has 2",
    ),
    "shape": (request(texts("text_input", b"a", shape=[2])), "text_input", "2 elements, but"),
    "raw shape": (
        request(PROMPT, input_tensor("top_k", "INT32", [2]), raw=[framed(b"a"), b"\0" * 4]),
        "top_k",
        "4 bytes; 2 elements of INT32 (shape [2]) need 8",
    ),
    "negative": (request(texts("text_input", b"a", shape=[-1])), "text_input", "0 or more"),
    "both negative": (request(texts("text_input", b"a", shape=[-1, -1])), "text_input", "0 or"),
    "huge": (
        request(texts("text_input", b"a", shape=[2**40, 2**40])),
        "text_input",
        "at most 1048576 are allowed",
    ),
    "many dimensions": (request(texts("text_input", b"a", shape=[1] * 9)), "text_input", "9 dim"),
    "element length beyond the data": (
        request(PROMPT, raw=[b"\xff\xff\xff\xffab"]),
        "text_input",
        "of length 4294967295 bytes, but only 2 bytes remain",
    ),
    "half a length": (request(PROMPT, raw=[b"\1\0"]), "text_input", "2 bytes of an element's len"),
    "bytes after the last element": (
        request(PROMPT, raw=[framed(b"a", b"b")]),
        "text_input",
        "5 bytes after its 1",
    ),
    "no elements in raw contents": (request(PROMPT, raw=[b""]), "text_input", "1 elements, but"),
    "no element": (request(texts("text_input", shape=[0])), "text_input", "is not set"),
    "two texts": (
        request(texts("text_input", b"a", b"b", shape=[2])),
        "text_input",
        "has 2 elements; it must have 1",
    ),
    "not utf-8": (request(texts("text_input", b"a\xff")), "text_input", "not UTF-8 at byte 1"),
    "empty": (request(texts("text_input", b"")), "text_input", "text_input is empty"),
    "not a text": (
        request(input_tensor("text_input", "INT32", [1], int_contents=[1])),
        "text_input",
        "it must be a string (BYTES)",
    ),
    "datatype": (request(input_tensor("top_k", "INT23", [1])), "top_k", "did you mean 'INT32'?"),
    "no datatype": (request(input_tensor("top_k", "", [1])), "top_k", "unknown datatype"),
    "typed half": (request(input_tensor("top_p", "FP16", [1])), "top_p", "no typed contents"),
    "contents of another kind": (
        request(input_tensor("top_k", "INT32", [1], int64_contents=[1])),
        "top_k",
        "contents.int_contents",
    ),
    "contents of two kinds": (
        request(input_tensor("top_k", "INT32", [1], int_contents=[1], bytes_contents=[b"2"])),
        "top_k",
        "has values in contents.bytes_contents; send values of INT32 in contents.int_contents only",
    ),
    "300 of INT8": (
        request(input_tensor("max_tokens", "INT8", [1], int_contents=[300])),
        "max_tokens",
        "out of the range of INT8",
    ),
    "2^16 of UINT16": (
        request(input_tensor("top_k", "UINT16", [2], uint_contents=[1, 2**16])),
        "top_k",
        "out of the range of UINT16",
    ),
    "a key twice": (
        sampling('{"top_k": 1, "top_k": 2}'),
        "sampling_parameters",
        "whose keys occur once",
    ),
    "an underscore in a number": (sampling('{"max_tokens": "1_0"}'), "max_tokens", "a whole numb"),
    "digits of another script": (sampling('{"top_p": "\u0660.\u0665"}'), "top_p", "a finite num"),
    "an end's id": (sampling('{"end_id": -5}'), "end_id", "end_id has -5"),
    "a pattern that ends in an escape": (
        sampling('{"guided_decoding": {"regex": "a\\\\"}}'),
        "guided_decoding",
        "ends with a backslash that escapes nothing",
    ),
    "a guide that no text matches": (
        sampling('{"guided_decoding": {"regex": "[^\\\\s\\\\S]"}}'),
        "guided_decoding",
        "the guide allows none of this model's tokens next",
    ),
    "unknown": (request(texts("text_inputs", b"a")), "text_inputs", "did you mean 'text_input'?"),
    "twice": (
        request(texts("text_input", b"a"), texts("text_input", b"a")),
        "text_input",
        "occurs twice",
    ),
    "adapter by two names": (
        request(texts("adapter_id", b"sum"), texts("lora_name", b"sum")),
        "lora_name",
        "mean the same",
    ),
    "set in two inputs": (
        request(
            texts("sampling_parameters", b'{"top_k": 1}'),
            input_tensor("top_k", "INT32", [1], int_contents=[1]),
        ),
        "top_k",
        "set twice",
    ),
    "two prompts": (
        request(input_tensor("input_ids", "INT32", [1], int_contents=[5])),
        "input_ids",
        "both set",
    ),
    "not JSON": (sampling("{"), "sampling_parameters", "must be a JSON object"),
    "deep JSON": (sampling("[" * 100_000), "sampling_parameters", "must be a JSON object"),
    "unpaired surrogate": (
        sampling('{"stop": "\\ud800"}'),
        "sampling_parameters",
        "must be a JSON object in valid UTF-8",
    ),
    "an object of stops": (sampling('{"stop": {"a": 1}}'), "stop", "must be strings"),
    "long name": (request(texts("x" * 100_000, b"a")), "x" * 80, "not an input of this model"),
    "long output": (request(outputs=[{"name": "x" * 100_000}]), "x" * 80, "not an output of"),
    "long JSON": (sampling(" " * (1 << 20) + "{}"), "sampling_parameters", "(text_bytes_max)"),
    "a list": (sampling("[1]"), "sampling_parameters", "must be a JSON object"),
    "nested sampling_parameters": (
        sampling('{"sampling_parameters": {}}'),
        "sampling_parameters",
        "remove the inner one",
    ),
    "unknown in JSON": (sampling('{"temprature": 1}'), "temprature", "mean 'temperature'?"),
    "text for a number": (sampling('{"top_p": "much"}'), "top_p", "must be a finite number"),
    "NaN": (sampling('{"top_p": NaN}'), "top_p", "must be a finite number"),
    "infinite": (sampling('{"temperature": 1e999}'), "temperature", "must be a finite number"),
    "fractional number of tokens": (
        sampling('{"max_tokens": 1.5}'),
        "max_tokens",
        "must be a whole number",
    ),
    "boolean for a number": (
        sampling('{"max_tokens": true}'),
        "max_tokens",
        "must be a whole number",
    ),
    "5000 digits": (sampling('{"seed": "%s"}' % ("9" * 5000)), "seed", "must be a whole number"),
    "huge seed": (sampling('{"seed": 99999999999999999999}'), "seed", "must be a whole number"),
    "huge top_k": (sampling('{"top_k": 5000000000}'), "top_k", "from 0 to 2^32 - 1"),
    "invalid boolean": (sampling('{"ignore_eos": "maybe"}'), "ignore_eos", "must be true or false"),
    "stops": (sampling('{"stop": [1]}'), "stop", "must be strings"),
    "bias": (sampling('{"logit_bias": {"a": 1}}'), "logit_bias", "map token ids to numbers"),
    "guide": (
        sampling('{"guided_decoding": {"jso": {}}}'),
        "guided_decoding",
        "must have exactly one of",
    ),
    "best of": (sampling('{"best_of": 4}'), "best_of", "best_of differs from n"),
    "field": (
        request(input_tensor("inputs", "BYTES", [1]), raw=[framed(b'{"numbers": 1}')]),
        "inputs",
        "each field must be a string",
    ),
    "unknown token id": (
        request(input_tensor("input_ids", "INT32", [1]), raw=[struct.pack("<i", 640)]),
        "input_ids",
        "input_ids has 640; token ids of this model are 0 to 639",
    ),
    "adapter twice": (
        request(texts("adapter_id", b"fox"), model_name="sum"),
        "adapter_id",
        "name only one of them",
    ),
    "stream": (
        request(input_tensor("stream", "BOOL", [1], bool_contents=[True])),
        "stream",
        "sends one response",
    ),
    "stream with prompt": (
        request(
            input_tensor("stream", "BOOL", [1], bool_contents=[True]),
            input_tensor("exclude_input_in_output", "BOOL", [1], bool_contents=[False]),
        ),
        "exclude_input_in_output",
        "stream responses never repeat",
    ),
    "output": (request(outputs=[{"name": "text_out"}]), "text_out", "did you mean 'text_output'?"),
    "parameter": (request(parameters={"temprature": FLAG}), "temprature", "mean 'temperature'?"),
    "priority": (request(parameters={"priority": NUMBER}), "priority", "from 0 to 200"),
    "timeout": (request(parameters={"timeout": NUMBER}), "timeout", "from 0 to"),
}
# Errors of every API, with KServe's parameter names, as the caller spelled them.
FAULTS |= {
    "a long prompt": (request(texts("text_input", b"a " * 5000)), "text_input", "shorten the"),
    "a long text": (request(texts("text_input", b"a" * (2 << 20))), "text_input", "text_bytes_max"),
    "no ids": (
        request(input_tensor("input_ids", "INT32", [1]), raw=[NO_BYTES]),
        "input_ids",
        "1 elements",
    ),
    "a negative id": (
        request(input_tensor("input_ids", "INT32", [2]), raw=[struct.pack("<ii", 5, -1)]),
        "input_ids",
        "input_ids has -1",
    ),
    "too many tokens": (sampling('{"max_tokens": 4095}'), "max_tokens", "max_tokens (4095)"),
    "no tokens": (sampling('{"max_tokens": 0}'), "max_tokens", "max_tokens is 0"),
    "negative tokens": (sampling('{"max_tokens": -1}'), "max_tokens", "max_tokens is -1"),
    "min_tokens over max_tokens": (
        sampling('{"min_tokens": 9, "max_tokens": 8}'),
        "min_tokens",
        "min_tokens is 9; it must be at most",
    ),
    "negative temperature": (
        sampling('{"temperature": -1}'),
        "temperature",
        "from 0 (greedy) to 100",
    ),
    "raw NaN": (
        request(
            PROMPT,
            input_tensor("temperature", "FP32", [1]),
            raw=[framed(b"a"), struct.pack("<f", math.nan)],
        ),
        "temperature",
        "finite number",
    ),
    "top_p": (sampling('{"top_p": 1.1}'), "top_p", "in (0, 1]"),
    "top_k": (sampling('{"top_k": -2}'), "top_k", "top_k is -2"),
    "min_p": (sampling('{"min_p": 2}'), "min_p", "from 0 (off) to 1"),
    "typical_p": (sampling('{"typical_p": 0}'), "typical_p", "in (0, 1]"),
    "penalty": (sampling('{"repetition_penalty": 0}'), "repetition_penalty", "from 0.01"),
    "presence": (sampling('{"presence_penalty": 9}'), "presence_penalty", "from -2 to 2"),
    "answers": (sampling('{"n": 2147483648}'), "n", "n is 2147483648; a request may have at most"),
    "sequences": (
        request(input_tensor("num_return_sequences", "INT32", [1], int_contents=[0])),
        "num_return_sequences",
        "num_return_sequences is 0",
    ),
    "beams": (sampling('{"beam_width": 99}'), "beam_width", "beam_width_max"),
    "many stops": (sampling(json.dumps({"stop": ["a"] * 99})), "stop", "stop has 99"),
    "a long stop": (sampling(json.dumps({"stop": "a" * 999})), "stop", "999 bytes"),
    "stop words": (
        request(texts("stop_words", b"a" * 999)),
        "stop_words",
        "stop_words has an entry",
    ),
    "a stop's id": (sampling('{"stop_token_ids": [640]}'), "stop_token_ids", "has 640"),
    "alternatives": (sampling('{"logprobs": 99}'), "logprobs", "logprobs_max"),
    "a bias": (sampling('{"logit_bias": {"5": 101}}'), "logit_bias", "from -100 to 100"),
    "bias of an unknown token": (sampling('{"logit_bias": {"640": 1}}'), "logit_bias", "has 640"),
    "allowed": (sampling('{"allowed_token_ids": [-1]}'), "allowed_token_ids", "has -1"),
    "seed": (sampling('{"seed": -2}'), "seed", "seed is -2"),
    "negative truncation": (
        sampling('{"truncate_prompt_tokens": -1}'),
        "truncate_prompt_tokens",
        "prompt_tokens",
    ),
    "regex": (
        sampling('{"guided_decoding": {"regex": "("}}'),
        "guided_decoding",
        "guided_decoding is invalid or unsupported",
    ),
    "schema": (
        sampling('{"structured_outputs": {"json": "{"}}'),
        "structured_outputs",
        "structured_outputs is invalid or unsupported",
    ),
    "path traversal": (
        request(texts("adapter_id", b"../sum")),
        "adapter_id",
        "not an adapter name",
    ),
    "a NUL": (request(texts("lora_name", b"su\0m")), "lora_name", "not an adapter name"),
    "inputs without an adapter": (
        request(input_tensor("inputs", "BYTES", [1]), raw=[framed(b"{}")]),
        "inputs",
        "name",
    ),
    "input that the template lacks": (
        request(
            input_tensor("inputs", "BYTES", [1]), raw=[framed(b'{"a": "b"}')], model_name="fox"
        ),
        "inputs.a",
        "not in the template",
    ),
}
# Known but unsupported or missing parameters, with their status codes.
UNSERVED: dict[str, tuple[Any, str, str, grpc.StatusCode]] = {
    "prompt embedding table": (
        request(input_tensor("prompt_embedding_table", "FP16", [0])),
        "prompt_embedding_table",
        "adapter_id",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "logits": (
        request(input_tensor("return_context_logits", "BOOL", [1], bool_contents=[True])),
        "return_context_logits",
        "remove it",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "use_beam_search flag": (
        sampling('{"use_beam_search": true}'),
        "use_beam_search",
        "can only be false",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "no text": (
        sampling('{"detokenize": false}'),
        "detokenize",
        "can only be true",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "draft tokens": (
        sampling('{"num_draft_tokens": 3}'),
        "num_draft_tokens",
        "can only be 0",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "shared memory": (
        request({**PROMPT, "parameters": {"shared_memory_region": FLAG}}),
        "text_input",
        "is in shared memory",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "output in shared memory": (
        request(outputs=[{"name": "text_output", "parameters": {"shared_memory_region": FLAG}}]),
        "text_output",
        "has shared_memory_region",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "sequence": (
        request(parameters={"sequence_id": service_pb2.InferParameter(int64_param=1)}),
        "sequence_id",
        "keeps no state",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "no such model": (
        request(model_name="nobody"),
        "model_name",
        "there is no model 'nobody'",
        grpc.StatusCode.NOT_FOUND,
    ),
    "no such version": (
        request(model_name="sum", model_version="7"),
        "model_name",
        "'sum@7'",
        grpc.StatusCode.NOT_FOUND,
    ),
    "no such adapter": (
        request(texts("adapter_id", b"nobody")),
        "adapter_id",
        "adapter 'nobody' does not exist",
        grpc.StatusCode.NOT_FOUND,
    ),
}
INVALID = grpc.StatusCode.INVALID_ARGUMENT
