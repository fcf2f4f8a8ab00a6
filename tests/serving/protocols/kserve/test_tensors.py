"""KServe v2 messages: published names and numbers, and parsing of arbitrary tensors.

Both stubs are loaded in this process: ours in a descriptor pool of its own.
"""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2, service_pb2

from gpt.errors import PreambleError, RequestError
from protos.foreign.descriptor_pools import load_package
from serving.messages import Guide
from serving.protocols.kserve import service as kserve
from serving.protocols.kserve.inputs import InferRequest, read_message, read_request
from serving.protocols.kserve.metadata import INPUT_ALIASES, INPUT_KINDS, NEUTRAL_INPUTS
from serving.protocols.kserve.tensors import (
    DATATYPES,
    InputTensor,
    OutputTensor,
    read_tensors,
    write_tensors,
)
from serving.request import Ask
from tests.support.broken.kserve_requests import FAULTS, framed, request, sampling

kserve_package = load_package("kserve")


def test_field_names_and_numbers_equal_the_published_ones() -> None:
    published = service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR
    assert kserve_package.ModelInferRequest is not service_pb2.ModelInferRequest
    assert kserve_package.file.package == published[0].package == "inference"
    checked = 0

    def assert_same_fields(mine: Any, published_message: Any) -> None:
        nonlocal checked
        for field in mine.fields:
            published_field = published_message.fields_by_name[field.name]
            assert (field.number, field.type) == (published_field.number, published_field.type), (
                field.full_name
            )
            assert field.is_repeated == published_field.is_repeated, field.full_name
            if field.message_type is not None:
                assert field.message_type.full_name == published_field.message_type.full_name
            checked += 1
        for nested in mine.nested_types:
            assert_same_fields(nested, published_message.nested_types_by_name[nested.name])

    for name, message in kserve_package.file.message_types_by_name.items():
        published_messages = [file.message_types_by_name.get(name) for file in published]
        assert_same_fields(message, published_messages[0] or published_messages[1])
    assert checked > 70
    our_types = kserve_package.file.enum_types_by_name["DataType"].values_by_number
    published_types = published[1].enum_types_by_name["DataType"].values_by_number
    assert {n: v.name for n, v in our_types.items()} == {
        n: v.name for n, v in published_types.items()
    }
    service = published[0].services_by_name["GRPCInferenceService"]
    handled_methods = {method.name for method in kserve.methods()}
    assert handled_methods == {method.name for method in service.methods}
    for method in kserve_package.file.services_by_name["GRPCInferenceService"].methods:
        published_method = service.methods_by_name[method.name]
        assert method.input_type.full_name == published_method.input_type.full_name
        assert method.output_type.full_name == published_method.output_type.full_name
    served_methods = set(
        kserve_package.file.services_by_name["GRPCInferenceService"].methods_by_name
    )
    assert handled_methods - served_methods == set(kserve.UNSUPPORTED_METHODS)


def read(message: Any) -> InferRequest:
    return read_request(read_message(message), "", 1 << 20)


MESSAGES = st.builds(
    lambda name, datatype, shape, raw: kserve_package.ModelInferRequest(
        inputs=[{"name": name, "datatype": datatype, "shape": shape}], raw_input_contents=raw
    ),
    st.sampled_from([*INPUT_KINDS, *INPUT_ALIASES]),
    st.sampled_from(["BYTES", "BOOL", "INT8", "INT32", "UINT64", "FP16", "FP32", "FP64"]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.lists(
        st.one_of(
            st.binary(max_size=24), st.text(max_size=8).map(lambda text: framed(text.encode()))
        ),
        max_size=2,
    ),
)


@given(message=MESSAGES)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_arbitrary_tensors_are_parsed_or_refused(message: Any) -> None:
    with suppress(PreambleError):
        assert read(message).ask.prompt is not None


def test_values_that_ask_for_nothing_have_no_effect() -> None:
    neutral_values = {name: value for name, (_, value) in NEUTRAL_INPUTS.items()}
    unset = {"seed": -1, "skip_special_tokens": True, "spaces_between_special_tokens": False}
    nulls = {"top_k": None, "prompt_logprobs": None, "never_heard_of": None}
    text = json.dumps({**neutral_values, **unset, **nulls})
    assert read(sampling(text)).ask == read(request()).ask


def test_special_tokens_and_salts_reach_the_ask() -> None:
    text = json.dumps({"skip_special_tokens": False, "cache_salt": "a"})
    ask = read(sampling(text)).ask
    assert (ask.keep_special_tokens, ask.cache_salt) == (True, "a")


@given(
    values=st.lists(st.text(max_size=9), max_size=5),
    numbers=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4), max_size=4),
)
@settings(deadline=None, derandomize=True)
def test_written_tensors_round_trip(values: list[str], numbers: list[list[int]]) -> None:
    response = kserve_package.ModelInferResponse()
    texts_output = OutputTensor.from_values("a", "BYTES", values)
    write_tensors(response, [texts_output, OutputTensor.from_rows("b", "INT32", numbers)])
    request = kserve_package.ModelInferRequest(
        inputs=[
            {"name": output.name, "datatype": output.datatype, "shape": output.shape}
            for output in response.outputs
        ],
        raw_input_contents=response.raw_output_contents,
    )
    width = max(map(len, numbers), default=0)
    padded = tuple(n for row in numbers for n in (*row, *[-1] * (width - len(row))))
    texts = tuple(value.encode() for value in values)
    assert read_tensors(request) == {
        "a": InputTensor("a", "BYTES", (len(values),), texts),
        "b": InputTensor("b", "INT32", (len(numbers), width), padded),
    }


@pytest.mark.parametrize(
    "fault",
    [
        "contents of two kinds",
        "300 of INT8",
        "2^16 of UINT16",
        "a key twice",
        "an underscore in a number",
        "digits of another script",
    ],
)
def test_values_that_are_not_of_their_type_are_refused(fault: str) -> None:
    message, field, words = FAULTS[fault]
    with pytest.raises(RequestError) as refused:
        read(message)
    assert refused.value.field == field and words in str(refused.value)


def test_typed_and_raw_contents_are_equal() -> None:
    for datatype, kind in DATATYPES.items():
        if kind.contents_field is None:
            continue
        response = kserve_package.ModelInferResponse()
        write_tensors(response, [OutputTensor.from_values("a", datatype, [1, 0])])
        shape = {"name": "a", "datatype": datatype, "shape": [2]}
        raw = kserve_package.ModelInferRequest(
            inputs=[shape], raw_input_contents=response.raw_output_contents
        )
        typed = kserve_package.ModelInferRequest(
            inputs=[{**shape, "contents": {kind.contents_field: [1, 0]}}]
        )
        assert read_tensors(raw) == read_tensors(typed)


def build_ask(text: str, **parameters: int) -> Ask:
    message = sampling(text)
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return read(message).ask


def test_numeric_parameters_of_triton_backends_are_translated() -> None:
    assert [build_ask("{}", priority=level).priority for level in (0, 1, 100, 200)] == [
        0,
        99,
        0,
        -100,
    ]
    assert read(request(parameters={})).timeout_s is None
    assert build_ask('{"top_k": -1}').top_k == 0
    assert build_ask('{"end_id": 5, "stop_token_ids": [4]}').stop_token_ids == (4, 5)
    assert build_ask('{"end_id": -1}').ignore_ends
    assert build_ask('{"early_stopping": "never"}').early_stopping == "never"
    assert build_ask('{"logit_bias": {"3": "0.5"}}').logit_bias == {3: 0.5}
    assert build_ask('{"stop": "a", "bad_words": ["b", ""]}').bad_words == ("b",)
    assert build_ask('{"seed": null, "n": 2, "best_of": 2}').seed is None
    for text, guide in (
        ('{"json": {"type": "object"}}', Guide("json", '{"type": "object"}')),
        ('{"choice": ["a", "b"]}', Guide("choice", '["a", "b"]')),
        ('{"regex": "a+"}', Guide("regex", "a+")),
    ):
        assert build_ask(f'{{"guided_decoding": {text}}}').guide == guide
    flat = '{"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "g"}'
    assert build_ask(flat).guide == Guide("grammar", "g")
