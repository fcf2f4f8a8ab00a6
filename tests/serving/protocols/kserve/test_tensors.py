"""KServe's v2 messages: the published names and numbers, and what is made of any tensors.

Both stubs live in this process: ours in a descriptor pool of their own.
"""

from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2, service_pb2

from gpt.errors import PreambleError
from protos.foreign import package
from serving.messages import Guide
from serving.protocols.kserve import service as kserve
from serving.protocols.kserve.inputs import read_request
from serving.protocols.kserve.metadata import ALIASES, KINDS
from serving.protocols.kserve.tensors import (
    DATATYPES,
    Tensor,
    read_tensors,
    write_tensor,
    write_values,
)
from serving.request import Ask
from tests.support.broken.kserve_requests import framed, request, sampling

ours = package("kserve")


def test_names_and_numbers_are_the_published_ones_and_both_stubs_live_together() -> None:
    theirs = service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR
    assert ours.ModelInferRequest is not service_pb2.ModelInferRequest
    assert ours.file.package == theirs[0].package == "inference"
    checked = 0

    def same(mine: Any, other: Any) -> None:
        nonlocal checked
        for field in mine.fields:
            twin = other.fields_by_name[field.name]
            assert (field.number, field.type) == (twin.number, twin.type), field.full_name
            assert field.is_repeated == twin.is_repeated, field.full_name
            if field.message_type is not None:
                assert field.message_type.full_name == twin.message_type.full_name
            checked += 1
        for nested in mine.nested_types:
            same(nested, other.nested_types_by_name[nested.name])

    for name, message in ours.file.message_types_by_name.items():
        found = [file.message_types_by_name.get(name) for file in theirs]
        same(message, found[0] or found[1])
    assert checked > 70
    mine = ours.file.enum_types_by_name["DataType"].values_by_number
    other = theirs[1].enum_types_by_name["DataType"].values_by_number
    assert {n: v.name for n, v in mine.items()} == {n: v.name for n, v in other.items()}
    service = theirs[0].services_by_name["GRPCInferenceService"]
    handled = {method.name for method in kserve.methods()}
    assert handled == {method.name for method in service.methods}
    for method in ours.file.services_by_name["GRPCInferenceService"].methods:
        twin = service.methods_by_name[method.name]
        assert method.input_type.full_name == twin.input_type.full_name
        assert method.output_type.full_name == twin.output_type.full_name
    served = set(ours.file.services_by_name["GRPCInferenceService"].methods_by_name)
    assert handled - served == set(kserve.UNSERVED)


MESSAGES = st.builds(
    lambda name, datatype, shape, raw: ours.ModelInferRequest(
        inputs=[{"name": name, "datatype": datatype, "shape": shape}], raw_input_contents=raw
    ),
    st.sampled_from([*KINDS, *ALIASES]),
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
def test_any_tensor_is_read_or_refused(message: Any) -> None:
    with suppress(PreambleError):
        assert read_request(message, "", 1 << 20).ask.prompt is not None


@given(
    values=st.lists(st.text(max_size=9), max_size=5),
    numbers=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4), max_size=4),
)
@settings(deadline=None, derandomize=True)
def test_what_is_written_is_read_again(values: list[str], numbers: list[list[int]]) -> None:
    response = ours.ModelInferResponse()
    write_values(response, "a", "BYTES", values)
    write_tensor(response, "b", "INT32", numbers)
    sent = ours.ModelInferRequest(
        inputs=[
            {"name": one.name, "datatype": one.datatype, "shape": one.shape}
            for one in response.outputs
        ],
        raw_input_contents=response.raw_output_contents,
    )
    width = max(map(len, numbers), default=0)
    padded = tuple(n for row in numbers for n in (*row, *[-1] * (width - len(row))))
    texts = tuple(value.encode() for value in values)
    assert read_tensors(sent) == {
        "a": Tensor("a", "BYTES", (len(values),), texts),
        "b": Tensor("b", "INT32", (len(numbers), width), padded),
    }


def test_typed_and_raw_contents_are_the_same_tensor() -> None:
    for datatype, kind in DATATYPES.items():
        if kind.contents is None:
            continue
        response = ours.ModelInferResponse()
        write_values(response, "a", datatype, [1, 0])
        shape = {"name": "a", "datatype": datatype, "shape": [2]}
        raw = ours.ModelInferRequest(
            inputs=[shape], raw_input_contents=response.raw_output_contents
        )
        typed = ours.ModelInferRequest(inputs=[{**shape, "contents": {kind.contents: [1, 0]}}])
        assert read_tensors(raw) == read_tensors(typed)


def asked(text: str, **parameters: int) -> Ask:
    message = sampling(text)
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return read_request(message, "", 1 << 20).ask


def test_what_those_backends_say_in_numbers_is_said_in_ours() -> None:
    assert [asked("{}", priority=level).priority for level in (0, 1, 100, 200)] == [0, 99, 0, -100]
    assert read_request(request(parameters={}), "", 1 << 20).timeout_s is None
    assert asked('{"top_k": -1}').top_k == 0
    assert asked('{"end_id": 5, "stop_token_ids": [4]}').stop_token_ids == (4, 5)
    assert asked('{"end_id": -1}').ignore_ends
    assert asked('{"early_stopping": "never"}').early_stopping == "never"
    assert asked('{"logit_bias": {"3": "0.5"}}').logit_bias == {3: 0.5}
    assert asked('{"stop": "a", "bad_words": ["b", ""]}').bad_words == ("b",)
    assert asked('{"seed": null, "n": 2, "best_of": 2}').seed is None
    for text, guide in (
        ('{"json": {"type": "object"}}', Guide("json", '{"type": "object"}')),
        ('{"choice": ["a", "b"]}', Guide("choice", '["a", "b"]')),
        ('{"regex": "a+"}', Guide("regex", "a+")),
    ):
        assert asked(f'{{"guided_decoding": {text}}}').guide == guide
    flat = '{"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "g"}'
    assert asked(flat).guide == Guide("grammar", "g")
