"""Triton's own client, on a running server: a whole answer, then two at once on one stream.

    python examples/tritonclient/generate.py HOST:PORT [ADAPTER]

Needs `pip install tritonclient[grpc]`, and knows nothing of the server but docs/kserve.md.
"""

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def tensor(name: str, value: str | int | bool) -> triton.InferInput:
    """One value, as an input of shape [1]."""
    kinds: dict[type, tuple[str, Any]] = {
        str: ("BYTES", np.object_),
        int: ("INT32", np.int32),
        bool: ("BOOL", np.bool_),
    }
    datatype, kind = kinds[type(value)]
    made = triton.InferInput(name, [1], datatype)
    made.set_data_from_numpy(
        np.array([value.encode() if isinstance(value, str) else value], dtype=kind)
    )
    return made


def main(address: str, model: str = "preamble") -> int:
    with triton.InferenceServerClient(address) as client:
        try:
            show(client, model)
        except InferenceServerException as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def show(client: triton.InferenceServerClient, model: str) -> None:
    inputs = [tensor("text_input", "Once upon a time"), tensor("max_tokens", 16)]
    answer = client.infer(model, [*inputs, tensor("exclude_input_in_output", True)])
    print("whole:", answer.as_numpy("text_output")[0].decode())

    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    texts = {"0": "", "1": ""}
    client.start_stream(callback=lambda result, error: came.put((result, error)))
    for place in texts:
        client.async_stream_infer(model, [*inputs, tensor("stream", True)], request_id=place)
    left = len(texts)
    while left:
        result, error = came.get(timeout=60)
        if error is not None:
            raise error
        response = result.get_response()
        texts[response.id] += result.as_numpy("text_output")[0].decode()
        left -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    for place, text in texts.items():
        print(f"streamed {place}:", text)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(*sys.argv[1:]))
