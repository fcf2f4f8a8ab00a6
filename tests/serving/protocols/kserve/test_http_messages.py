"""KServe v2 JSON messages: contents that equal those of gRPC, and errors that name the tensor."""

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import PreambleError
from protos.foreign.descriptor_pools import load_package
from serving.protocols.kserve.http_messages import (
    HttpInferRequest,
    generate_fields,
    infer_body,
    parse_generate,
    parse_infer,
)
from serving.protocols.kserve.inputs import read_message, read_request
from serving.protocols.kserve.models import ServedModel
from serving.protocols.kserve.tensors import DATATYPES, OutputTensor

kserve_package = load_package("kserve")
MODEL = ServedModel("chat", "1", "")
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["café"]}
FIELDS = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "INT32": "int_contents"}
FIELDS |= {"FP32": "fp32_contents", "UINT64": "uint64_contents"}


def tensor(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def parse(*tensors: dict[str, Any], binary: bytes = b"", **fields: Any) -> HttpInferRequest:
    text = json.dumps({"inputs": tensors, **fields}).encode()
    return parse_infer(text + binary, str(len(text)) if binary else None)


def grpc_message(*tensors: dict[str, Any]) -> Any:
    """The same request as a message of gRPC, with typed contents."""
    message = kserve_package.ModelInferRequest()
    for fields in tensors:
        message_tensor = message.inputs.add(
            name=fields["name"], datatype=fields["datatype"], shape=fields["shape"]
        )
        values = [
            value.encode() if isinstance(value, str) else value
            for row in fields["data"]
            for value in (row if isinstance(row, list) else [row])
        ]
        getattr(message_tensor.contents, FIELDS[fields["datatype"]]).extend(values)
    return message


TENSORS = [
    TEXT,
    tensor("max_tokens", "INT32", [1, 1], [[7]]),
    tensor("temperature", "FP32", [1], [0.7]),
    tensor("seed", "UINT64", [1], [2**64 - 1]),
    tensor("stop", "BYTES", [2], ["a", "b"]),
    tensor("stop_token_ids", "INT32", [2, 2], [[1, 2], [3, 4]]),
    tensor("ignore_eos", "BOOL", [1], [True]),
]


def test_json_tensors_equal_those_of_grpc() -> None:
    assert parse(*TENSORS).content.tensors == read_message(grpc_message(*TENSORS)).tensors
    request = read_request(parse(*TENSORS).content, "", 1 << 20)
    assert request == read_request(read_message(grpc_message(*TENSORS)), "", 1 << 20)
    assert request.ask.temperature == struct.unpack("<f", struct.pack("<f", 0.7))[0]


def test_flat_json_has_the_same_meaning_as_tensors() -> None:
    flat: dict[str, Any] = {
        "text_input": "café",
        "max_tokens": 7,
        "stop": ["a", "b"],
        "parameters": {"seed": 5, "top_k": "3", "priority": 1, "bad_words": None},
    }
    parsed = parse_generate(json.dumps(flat).encode(), stream=False)
    request = read_request(parsed.content, "", 1 << 20)
    seed, top_k = tensor("seed", "UINT64", [1], [5]), tensor("top_k", "INT32", [1], [3])
    tensors = [TEXT, TENSORS[1], TENSORS[4], seed, top_k]
    expected = read_request(parse(*tensors, parameters={"priority": 1}).content, "", 1 << 20)
    assert request.ask == expected.ask and request.ask.priority == 99
    assert not request.stream
    assert read_request(
        parse_generate(b'{"text_input": "a"}', stream=True).content, "", 1 << 20
    ).stream


@pytest.mark.parametrize("datatype", [*DATATYPES, "BYTES"])
def test_binary_data_equals_json_data(datatype: str) -> None:
    values: Any = ["a", ""] if datatype == "BYTES" else [1, 0]
    raw = OutputTensor("stop_token_ids", datatype, (2,), tuple(values)).to_raw()
    sized: dict[str, Any] = {"name": "stop_token_ids", "datatype": datatype, "shape": [2]}
    sized["parameters"] = {"binary_data_size": len(raw)}
    by_json = tensor("stop_token_ids", datatype, [2], values)
    both = parse(TEXT, sized, binary=raw).content.tensors
    assert both == parse(TEXT, by_json).content.tensors


FAULTS: dict[str, tuple[bytes, str | None, str]] = {
    "not JSON": (b"{", None, "not JSON"),
    "no inputs": (b"{}", None, "`inputs`"),
    "unknown field": (b'{"inputs": [], "output": []}', None, "did you mean 'outputs'"),
    "JSON size over the body": (b"{}", "3", "at most the 2 bytes"),
    "JSON size of a text": (b"{}", "two", "must be the number of bytes"),
    "negative JSON size": (b"{}", "-1", "must be the number of bytes"),
    "bytes after the inputs": (b'{"inputs": []}ab', "14", "2 bytes more than the sum of"),
}
TENSOR_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown input": ({"name": "max_tokns"}, "did you mean 'max_tokens'"),
    "unknown datatype": ({"datatype": "INT31"}, "unknown datatype 'INT31'"),
    "wrong shape": ({"shape": [2]}, "which is 2 elements, but data has 1"),
    "negative shape": ({"shape": [-1]}, "0 or more"),
    "many dimensions": ({"shape": [1] * 9}, "at most 8"),
    "no data": ({"data": None}, "has no data"),
    "not a list": ({"data": 7}, "not a list"),
    "text for a number": ({"data": ["7"]}, "must be a value of INT32"),
    "fraction": ({"data": [7.5]}, "must be a value of INT32"),
    "null": ({"data": [None]}, "must be a value of INT32"),
    "object": ({"data": [{}]}, "must be a value of INT32"),
    "out of range": ({"data": [2**31]}, "must be a value of INT32"),
    "over FP32": ({"datatype": "FP32", "data": [1e300]}, "must be a value of FP32"),
    "text for a flag": ({"datatype": "BOOL", "data": ["false"]}, "must be a value of BOOL"),
    "object for a flag": ({"datatype": "BOOL", "data": [{}]}, "must be a value of BOOL"),
    "number for a text": ({"datatype": "BYTES"}, "must be a value of BYTES"),
    "deep data": ({"data": [[[[[[[[[7]]]]]]]]]}, "more than 8 nested lists"),
    "binary data without bytes": ({"data": None, "parameters": {"binary_data_size": 4}}, "remain"),
    "binary size of a text": ({"data": None, "parameters": {"binary_data_size": "4"}}, "remain"),
    "data and binary data": ({"parameters": {"binary_data_size": 4}}, "send only one"),
    "shared memory": ({"parameters": {"shared_memory_region": "a"}}, "shared memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_bodies_are_refused(fault: str) -> None:
    body, json_size, message = FAULTS[fault]
    with pytest.raises(PreambleError) as caught:
        parse_infer(body, json_size)
    assert message in str(caught.value)


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_invalid_tensors_are_refused_by_name(fault: str) -> None:
    fields, message = TENSOR_FAULTS[fault]
    with pytest.raises(PreambleError) as caught:
        parse(TEXT, {**TENSORS[1], "shape": [1], "data": [7], **fields})
    assert message in str(caught.value)
    assert getattr(caught.value, "field", None) == fields.get("name", "max_tokens")


def test_tensors_with_too_many_elements_are_refused_before_parsing() -> None:
    data = b"[" + b"1," * (1 << 20) + b"1]"
    body = (
        b'{"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [1], "data": %s}]}' % data
    )
    with pytest.raises(PreambleError, match="more than 1048576 elements"):
        parse_infer(body, None)


GENERATE_FAULTS = {
    "not an object": (b"[]", "Expected `object`"),
    "an unknown field": (b'{"text_inputs": "a"}', "did you mean 'text_input'"),
    "set twice": (b'{"text_input": "a", "n": 1, "parameters": {"n": 1}}', "'n' is set twice"),
    "parameters of a text": (b'{"text_input": "a", "parameters": "n"}', "must be a JSON object"),
    "id of a number": (b'{"text_input": "a", "id": 3}', "must be a string"),
    "unpaired surrogate": (b'{"text_input": "\\ud800"}', "not JSON"),
}


@pytest.mark.parametrize("fault", GENERATE_FAULTS)
def test_invalid_flat_bodies_are_refused(fault: str) -> None:
    body, message = GENERATE_FAULTS[fault]
    with pytest.raises(PreambleError) as caught:
        read_request(parse_generate(body, stream=False).content, "", 1 << 20)
    assert message in str(caught.value)


BODIES = st.builds(
    lambda name, datatype, shape, data: parse_text(tensor(name, datatype, shape, data)),
    st.sampled_from(["text_input", "max_tokens", "stop", "input_ids", "ignore_eos"]),
    st.sampled_from(["BYTES", "BOOL", "INT8", "UINT64", "FP16", "FP64", "x"]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=6,
    ),
)


def parse_text(*tensors: dict[str, Any]) -> bytes:
    return json.dumps({"inputs": [TEXT, *tensors]}).encode()


@given(body=BODIES)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_arbitrary_tensors_are_parsed_or_refused(body: bytes) -> None:
    try:
        content = parse_infer(body, None).content
    except PreambleError:
        return
    assert all(len(parsed.values) == math.prod(parsed.shape) for parsed in content.tensors.values())


OUTPUTS = [
    OutputTensor.from_values("text_output", "BYTES", ["a", "bé"]),
    OutputTensor.from_rows("output_ids", "INT32", [[1], [2, 3]]),
]


def test_outputs_are_json_or_binary_data_as_the_request_says() -> None:
    text, binary = infer_body(parse(TEXT, id="7"), MODEL, OUTPUTS)
    assert binary == b"" and json.loads(text) == {
        "model_name": "chat",
        "model_version": "1",
        "id": "7",
        "outputs": [
            tensor("text_output", "BYTES", [2], ["a", "bé"]),
            tensor("output_ids", "INT32", [2, 2], [1, -1, 2, 3]),
        ],
    }
    all_binary = parse(TEXT, parameters={"binary_data_output": True})
    text, binary = infer_body(all_binary, MODEL, OUTPUTS)
    sizes = [output["parameters"]["binary_data_size"] for output in json.loads(text)["outputs"]]
    assert binary == OUTPUTS[0].to_raw() + OUTPUTS[1].to_raw() and sizes == [12, 16]
    listed = [{"name": "text_output"}, {"name": "output_ids", "parameters": {"binary_data": True}}]
    _, binary = infer_body(parse(TEXT, outputs=listed), MODEL, OUTPUTS)
    assert binary == OUTPUTS[1].to_raw()


def test_flat_outputs_of_one_completion_are_values() -> None:
    request = parse_generate(b'{"text_input": "a", "id": "7"}', stream=False)
    single = [
        OutputTensor.from_values("text_output", "BYTES", ["a"]),
        OutputTensor.from_rows("output_ids", "INT32", [[1, 2]]),
    ]
    names = {"model_name": "chat", "model_version": "1", "id": "7"}
    assert generate_fields(request, MODEL, single) == {
        **names,
        "text_output": "a",
        "output_ids": [1, 2],
    }
    assert generate_fields(request, MODEL, OUTPUTS) == {
        **names,
        "text_output": ["a", "bé"],
        "output_ids": [[1, -1], [2, 3]],
    }
