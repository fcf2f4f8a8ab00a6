"""Triton's client on a running server: a unary completion, then two completions on one stream.

    python examples/tritonclient/generate.py HOST:PORT [ADAPTER]

The example needs `pip install tritonclient[grpc]` and uses only the API of docs/kserve.md.
"""

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def input_tensor(name: str, value: str | int | bool) -> triton.InferInput:
    """Return an input tensor of shape [1] that contains `value`."""
    datatypes: dict[type, tuple[str, Any]] = {
        str: ("BYTES", np.object_),
        int: ("INT32", np.int32),
        bool: ("BOOL", np.bool_),
    }
    datatype, dtype = datatypes[type(value)]
    element = value.encode() if isinstance(value, str) else value
    infer_input = triton.InferInput(name, [1], datatype)
    infer_input.set_data_from_numpy(np.array([element], dtype=dtype))
    return infer_input


def main(address: str, model: str = "preamble") -> int:
    with triton.InferenceServerClient(address) as client:
        try:
            generate(client, model)
        except InferenceServerException as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def generate(client: triton.InferenceServerClient, model: str) -> None:
    inputs = [input_tensor("text_input", "Once upon a time"), input_tensor("max_tokens", 16)]
    response = client.infer(model, [*inputs, input_tensor("exclude_input_in_output", True)])
    print("unary:", response.as_numpy("text_output")[0].decode())

    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    texts = {"0": "", "1": ""}  # Keyed by request id.
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    for request_id in texts:
        client.async_stream_infer(
            model, [*inputs, input_tensor("stream", True)], request_id=request_id
        )
    unfinished = len(texts)
    while unfinished:
        result, error = results.get(timeout=60)
        if error is not None:
            raise error
        part = result.get_response()
        texts[part.id] += result.as_numpy("text_output")[0].decode()
        unfinished -= part.parameters["triton_final_response"].bool_param
    client.stop_stream()
    for request_id, text in texts.items():
        print(f"streamed {request_id}:", text)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
