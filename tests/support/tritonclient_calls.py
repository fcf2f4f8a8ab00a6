"""A server with adapters, and a program that calls it by tritonclient: values in, texts out."""

import json
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as triton

from gpt.adapters.prompt_template import Template
from gpt.tokenizers.tokenizer import open_tokenizer
from tests.support.servers import WAIT_S, Server, serving, write_adapter, write_checkpoint

TEXT = "twelve and thirty? answer:"
MOST = 6  # Requests at once on a stream of this server.
NUMPY = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}


class World(NamedTuple):
    server: Server
    checkpoint: Path
    adapters: Path
    ids: list[int]

    @property
    def model(self) -> str:
        return self.checkpoint.name


@contextmanager
def kserving(folder: Path) -> Iterator[World]:
    """A server of its own with two adapters, one of which has a template."""
    checkpoint, adapters = write_checkpoint(folder), folder / "adapters"
    adapters.mkdir()
    encode = open_tokenizer(checkpoint / "tokenizer").encode
    write_adapter(adapters / "sum.safetensors", checkpoint, encode("what is the sum of"))
    template = Template(
        "<|VIRTUAL_PROMPT_0|>{numbers}? answer:{result}", (3,), answer_field="result"
    )
    quick = encode("the quick brown")[:3]
    write_adapter(adapters / "fox@2.safetensors", checkpoint, quick, template=template)
    limits: dict[str, Any] = {"adapters": str(adapters), "stream_requests_max": MOST}
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield World(server, checkpoint, adapters, encode(TEXT))


def tensor(name: str, value: Any, shape: Sequence[int] | None = None) -> triton.InferInput:
    """An input as a program would make it."""
    values = value if isinstance(value, list) else [value]
    kind = {bool: "BOOL", int: "INT32", float: "FP32"}.get(type(values[0]), "BYTES")
    kind = "UINT64" if name == "seed" else kind
    if kind == "BYTES":
        array = np.array([one.encode() for one in values], dtype=np.object_)
    else:
        array = np.array(values, dtype=NUMPY[kind])
    array = array.reshape(shape or [len(values)])
    one = triton.InferInput(name, list(array.shape), kind)
    one.set_data_from_numpy(array)
    return one


def tensors(text: str | None = TEXT, **inputs: Any) -> list[triton.InferInput]:
    if isinstance(inputs.get("sampling_parameters"), dict):
        inputs["sampling_parameters"] = json.dumps(inputs["sampling_parameters"])
    given = {} if text is None else {"text_input": text}
    return [tensor(name, value) for name, value in {**given, **inputs}.items()]


def infer(client: Any, model: str, *, outputs: Sequence[str] = (), **inputs: Any) -> Any:
    inputs.setdefault("exclude_input_in_output", True)
    asked = [triton.InferRequestedOutput(name) for name in outputs] or None
    sent = tensors(inputs.pop("text", TEXT), **inputs)
    return client.infer(model, sent, outputs=asked, client_timeout=WAIT_S)


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output").flatten()[0].decode())


class Streamed:
    """What comes on a stream, in its order."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = client

    def take(self, result: Any, error: Any) -> None:
        self._came.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self._came.get(timeout=WAIT_S)

    def until(self, finals: int) -> tuple[dict[str, list[Any]], list[Any]]:
        """Results by the ids of their requests, and errors, of so many requests."""
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
def streaming(client: triton.InferenceServerClient) -> Iterator[Streamed]:
    streamed = Streamed(client)
    client.start_stream(callback=streamed.take)
    try:
        yield streamed
    finally:
        client.stop_stream(cancel_requests=True)
