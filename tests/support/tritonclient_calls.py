"""A server with adapters, and calls of tritonclient: arguments in, texts out."""

import json
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as triton

from gpt.adapters.prompt_template import PromptTemplate
from gpt.tokenizers.tokenizer import open_tokenizer
from tests.support.servers import WAIT_S, Server, serving, write_adapter, write_checkpoint

TEXT = "twelve and thirty? answer:"
STREAM_REQUESTS_MAX = 6  # Concurrent requests on a stream of this server.
NUMPY = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}


class KServeServer(NamedTuple):
    server: Server
    checkpoint: Path
    adapters: Path
    ids: list[int]

    @property
    def model(self) -> str:
        return self.checkpoint.name


@contextmanager
def kserve_server(folder: Path, **settings: Any) -> Iterator[KServeServer]:
    """A separate server with two adapters; one has a template."""
    checkpoint = write_checkpoint(folder)
    adapters = folder / "adapters"
    adapters.mkdir()
    encode = open_tokenizer(checkpoint / "tokenizer").encode
    write_adapter(adapters / "sum.safetensors", checkpoint, encode("what is the sum of"))
    template = PromptTemplate(
        "<|VIRTUAL_PROMPT_0|>{numbers}? answer:{result}", (3,), answer_field="result"
    )
    prompt_ids = encode("the quick brown")[:3]
    write_adapter(adapters / "fox@2.safetensors", checkpoint, prompt_ids, template=template)
    limits: dict[str, Any] = {"adapters": str(adapters), "stream_requests_max": STREAM_REQUESTS_MAX}
    with serving(checkpoint, folder / "s.yaml", **limits, **settings) as server:
        yield KServeServer(server, checkpoint, adapters, encode(TEXT))


def tensor(name: str, value: Any, shape: Sequence[int] | None = None) -> triton.InferInput:
    """An input tensor as a client program builds it."""
    values = value if isinstance(value, list) else [value]
    kind = {bool: "BOOL", int: "INT32", float: "FP32"}.get(type(values[0]), "BYTES")
    kind = "UINT64" if name == "seed" else kind
    if kind == "BYTES":
        array = np.array([infer_input.encode() for infer_input in values], dtype=np.object_)
    else:
        array = np.array(values, dtype=NUMPY[kind])
    array = array.reshape(shape or [len(values)])
    infer_input = triton.InferInput(name, list(array.shape), kind)
    infer_input.set_data_from_numpy(array)
    return infer_input


def tensors(text: str | None = TEXT, **inputs: Any) -> list[triton.InferInput]:
    if isinstance(inputs.get("sampling_parameters"), dict):
        inputs["sampling_parameters"] = json.dumps(inputs["sampling_parameters"])
    defaults = {} if text is None else {"text_input": text}
    return [tensor(name, value) for name, value in {**defaults, **inputs}.items()]


def infer(client: Any, model: str, *, outputs: Sequence[str] = (), **inputs: Any) -> Any:
    inputs.setdefault("exclude_input_in_output", True)
    requested = [triton.InferRequestedOutput(name) for name in outputs] or None
    infer_inputs = tensors(inputs.pop("text", TEXT), **inputs)
    return client.infer(model, infer_inputs, outputs=requested, client_timeout=WAIT_S)


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output").flatten()[0].decode())


class StreamResponses:
    """The responses on a stream, in order."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = client

    def take(self, result: Any, error: Any) -> None:
        self._responses.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self._responses.get(timeout=WAIT_S)

    def until(self, finals: int) -> tuple[dict[str, list[Any]], list[Any]]:
        """Results by request id, and errors, until `finals` requests have ended."""
        results: dict[str, list[Any]] = {}
        errors: list[Any] = []
        while finals:
            result, error = self.next()
            if error is not None:
                errors.append(error)
                finals -= 1
                continue
            response = result.get_response()
            results.setdefault(response.id, []).append(result)
            finals -= response.parameters["triton_final_response"].bool_param
        return results, errors

    def send(self, model: str, id: str, **inputs: Any) -> None:
        text = inputs.pop("text", TEXT)
        self.client.async_stream_infer(
            model,
            tensors(text, stream=True, **inputs),
            request_id=id,
            enable_empty_final_response=True,
        )


@contextmanager
def streaming(client: triton.InferenceServerClient) -> Iterator[StreamResponses]:
    streamed = StreamResponses(client)
    client.start_stream(callback=streamed.take)
    try:
        yield streamed
    finally:
        client.stop_stream(cancel_requests=True)
