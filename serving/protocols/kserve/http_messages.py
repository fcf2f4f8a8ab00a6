"""KServe v2 JSON messages: converts HTTP bodies to request contents, and output tensors to bodies.

A body of `infer` is a JSON object, which binary tensor data may follow (Triton's extension
"binary tensor data"): the header `Inference-Header-Content-Length` is then the size of the JSON
object. A body of `generate` is a flat JSON object (Triton's extension "generate"). The values of a
JSON tensor get the precision of its datatype, as in gRPC. This module knows no transport.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpt.errors import RequestError
from gpt.settings import short_repr
from serving.frontend.json_body import (
    JSON_NULL,
    RequestBody,
    RequestPart,
    count_outside_strings,
    parse_object,
    parse_request,
)
from serving.protocols.kserve.inputs import InferContent, RequestedOutput
from serving.protocols.kserve.metadata import canonical_name
from serving.protocols.kserve.models import ServedModel
from serving.protocols.kserve.tensors import (
    BYTES,
    DATATYPES,
    DIMS_MAX,
    ELEMENTS_MAX,
    InputTensor,
    OutputTensor,
    build_tensor,
    check_count,
    check_header,
    check_headers,
    read_raw,
)

JSON_SIZE_HEADER = "Inference-Header-Content-Length"
# Parameter of a tensor: the number of its bytes after the JSON object.
BINARY_SIZE = "binary_data_size"
# Parameters that request binary data. BINARY_OUTPUT is set on one output, BINARY_OUTPUTS on the
# whole request.
BINARY_OUTPUT, BINARY_OUTPUTS = "binary_data", "binary_data_output"
# The JSON values of a BOOL element. 1 and 0 are accepted too, because they equal these keys.
_FLAGS = {True: True, False: False}


class JsonTensor(RequestPart):
    """An input tensor in JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] | None = None
    data: msgspec.Raw = JSON_NULL


class JsonOutput(RequestPart):
    """An output that a request lists."""

    name: str
    parameters: dict[str, Any] | None = None


class JsonInferRequest(RequestBody):
    """The JSON object of an `infer` request."""

    inputs: list[JsonTensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[JsonOutput] | None = None


@dataclass(frozen=True)
class HttpInferRequest:
    """A parsed request of `infer` or `generate`."""

    id: str
    content: InferContent
    # The outputs that the response has as binary data. None: all of them.
    binary_outputs: frozenset[str] | None = frozenset()


def parse_infer(body: bytes, json_size: str | None) -> HttpInferRequest:
    """Parse a body of `infer`. `json_size`: the header with the size of the JSON object, if any."""
    text, binary = _split_body(body, json_size)
    message = parse_request(text, JsonInferRequest)
    for tensor in message.inputs:
        canonical_name(tensor.name)  # Refuse unknown names before any tensor is decoded.
    check_headers(message.inputs)
    parameters = _without_nulls(message.parameters)
    all_binary = parameters.pop(BINARY_OUTPUTS, False) is True
    outputs = message.outputs or []
    listed = {output.name: (output.parameters or {}).get(BINARY_OUTPUT) for output in outputs}
    binary_outputs = None
    if listed or not all_binary:
        is_binary = {name: all_binary if flag is None else flag for name, flag in listed.items()}
        binary_outputs = frozenset(name for name, flag in is_binary.items() if flag is True)
    content = InferContent(
        _read_tensors(message.inputs, binary),
        parameters,
        [RequestedOutput(output.name, output.parameters or {}) for output in outputs],
    )
    return HttpInferRequest(message.id or "", content, binary_outputs)


def parse_generate(body: bytes, *, stream: bool) -> HttpInferRequest:
    """Parse a body of `generate`. `stream`: the value of the input `stream` if the body has none.

    The fields of the object `parameters` have the same meaning as those beside it.
    """
    fields = _without_nulls(parse_object(body))
    request_id, nested = fields.pop("id", ""), fields.pop("parameters", {})
    if not isinstance(request_id, str):
        raise RequestError(f"id is {short_repr(request_id)}; it must be a string", "id")
    if not isinstance(nested, dict):
        raise RequestError(
            f"parameters is {short_repr(nested)}; it must be a JSON object", "parameters"
        )
    for name, value in _without_nulls(nested).items():
        if name in fields:
            raise RequestError(f"{short_repr(name)} is set twice; set it once", name[:80])
        fields[name] = value
    if not {"stream", "streaming"} & fields.keys():
        fields["stream"] = stream
    return HttpInferRequest(request_id, InferContent({}, fields, ()))


def _without_nulls(fields: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}


def _split_body(body: bytes, json_size: str | None) -> tuple[bytes, bytes]:
    """Return the JSON object of a body, and the binary data after it."""
    if json_size is None:
        return body, b""
    size = int(json_size) if json_size.isdecimal() and len(json_size) < 20 else -1
    if not 0 <= size <= len(body):
        raise RequestError(
            f"{JSON_SIZE_HEADER} is {json_size[:80]!a}; it must be the number of bytes of the JSON "
            f"object, at most the {len(body)} bytes of the body",
            JSON_SIZE_HEADER,
        )
    return body[:size], body[size:]


def _read_tensors(tensors: Iterable[JsonTensor], binary: bytes) -> dict[str, InputTensor]:
    """Return the tensors by name. Binary data is in the order of the tensors that it belongs to."""
    input_tensors: dict[str, InputTensor] = {}
    offset = 0
    for tensor in tensors:
        size = (tensor.parameters or {}).get(BINARY_SIZE)
        if size is None:
            input_tensors[tensor.name] = _read_json_data(tensor)
            continue
        end = offset + _check_binary_size(tensor, size, len(binary) - offset)
        input_tensors[tensor.name] = read_raw(tensor, binary[offset:end], "its binary data")
        offset = end
    if offset < len(binary):
        raise RequestError(
            f"the body has {len(binary) - offset} bytes more than the sum of {BINARY_SIZE} of the "
            f"inputs; correct {BINARY_SIZE}, or remove these bytes",
            BINARY_SIZE,
        )
    return input_tensors


def _check_binary_size(tensor: JsonTensor, size: Any, remaining: int) -> int:
    name = short_repr(tensor.name)
    if tensor.data != JSON_NULL:
        raise RequestError(
            f"input {name} has data and {BINARY_SIZE}; send only one of them", tensor.name
        )
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= remaining:
        raise RequestError(
            f"input {name} has {BINARY_SIZE} {short_repr(size)}, but {remaining} bytes remain "
            f"after the JSON object; append the data of the input, and set {JSON_SIZE_HEADER} to "
            "the number of bytes of the JSON object",
            tensor.name,
        )
    return size


def _read_json_data(tensor: JsonTensor) -> InputTensor:
    """Return a tensor whose values are JSON: one list, or nested lists in row-major order."""
    name, count = short_repr(tensor.name), check_header(tensor)
    if tensor.data == JSON_NULL:
        raise RequestError(f"input {name} has no data; send its values in data", tensor.name)
    if count_outside_strings(bytes(tensor.data), ",") >= ELEMENTS_MAX:
        raise RequestError(
            f"input {name} has more than {ELEMENTS_MAX} elements in data; send fewer", tensor.name
        )
    try:
        data = msgspec.json.decode(tensor.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        data = None
    if not isinstance(data, list):
        raise RequestError(
            f"input {name} has data that is not a list of values in UTF-8; send a list", tensor.name
        )
    elements = _flatten(data, tensor.name)
    check_count(tensor, count, elements, "data")
    return build_tensor(tensor, _convert(tensor, elements))


def _flatten(data: list[Any], name: str, depth: int = 1) -> list[Any]:
    if depth > DIMS_MAX:
        raise RequestError(
            f"input {short_repr(name)} has data with more than {DIMS_MAX} nested lists", name
        )
    if not any(isinstance(value, list) for value in data):
        return data
    elements: list[Any] = []
    for value in data:
        elements += _flatten(value, name, depth + 1) if isinstance(value, list) else [value]
    return elements


def _convert(tensor: JsonTensor, elements: Sequence[Any]) -> Sequence[Any]:
    """Return the elements as values of the tensor's datatype."""
    try:
        if tensor.datatype == BYTES:
            return [element.encode() for element in elements]
        if tensor.datatype == "BOOL":  # `struct` would accept any object.
            elements = [_FLAGS[element] for element in elements]
        # Packing checks the type and the range, and rounds to the precision of the datatype.
        form = f"<{len(elements)}{DATATYPES[tensor.datatype].code}"
        return struct.unpack(form, struct.pack(form, *elements))
    except (AttributeError, KeyError, TypeError, struct.error, OverflowError):
        raise RequestError(
            f"input {short_repr(tensor.name)} has data {short_repr(list(elements[:10]))}; each "
            f"element must be a value of {tensor.datatype}",
            tensor.name,
        ) from None


# ---------------------------------------------------------------------------------------- responses


def infer_body(
    request: HttpInferRequest, model: ServedModel, outputs: Sequence[OutputTensor]
) -> tuple[bytes, bytes]:
    """Return the JSON object of a response of `infer`, and the binary data that follows it."""
    json_outputs = []
    binary = []
    for output in outputs:
        fields: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": output.shape,
        }
        if request.binary_outputs is None or output.name in request.binary_outputs:
            binary.append(output.to_raw())
            fields["parameters"] = {BINARY_SIZE: len(binary[-1])}
        else:
            fields["data"] = output.values
        json_outputs.append(fields)
    response = {**_common_fields(request, model), "outputs": json_outputs}
    return msgspec.json.encode(response), b"".join(binary)


def generate_fields(
    request: HttpInferRequest, model: ServedModel, outputs: Iterable[OutputTensor]
) -> dict[str, Any]:
    """Return the JSON object of a response of `generate`: the outputs by name.

    If there is one completion, each output is the completion's value. If there are several, it is
    the list of their values.
    """
    return {**_common_fields(request, model), **{output.name: _plain(output) for output in outputs}}


def _plain(output: OutputTensor) -> Any:
    values: list[Any] = list(output.values)
    if len(output.shape) == 2:
        rows, width = output.shape
        values = [values[row * width : (row + 1) * width] for row in range(rows)]
    return values[0] if len(values) == 1 else values


def _common_fields(request: HttpInferRequest, model: ServedModel) -> dict[str, Any]:
    id_field = {"id": request.id} if request.id else {}
    return {"model_name": model.name, "model_version": model.version, **id_field}
