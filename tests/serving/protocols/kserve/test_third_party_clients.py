"""KServe's v2 wire as Triton's own tools, and the clients of its backends, speak it.

The oracle is our own wire on the same server.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from clients.client import Client, Options
from tests.support.servers import write_adapter
from tests.support.tritonclient_calls import (
    TEXT,
    World,
    infer,
    kserving,
    streaming,
    tensor,
    tensors,
    text_of,
)

pytestmark = pytest.mark.slow  # A server of its own: too long for the fast suite.


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with kserving(tmp_path_factory.mktemp("kserve")) as world:
        yield world


@pytest.fixture
def client(world: World) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(world.server.address) as client:
        yield client


@pytest.fixture
def own(world: World) -> Iterator[Client]:
    with world.server.client() as client:
        yield client


def test_a_client_of_tensorrt_llm_is_understood_with_all_that_it_sends(
    client: triton.InferenceServerClient, own: Client
) -> None:
    options = Options(max_new_tokens=8, temperature=1.0, top_k=3, seed=9)
    sent: dict[str, Any] = {
        "max_tokens": 8,
        "temperature": 1.0,
        "top_k": 3,
        "seed": 9,
        "beam_width": 1,
    }
    sent |= {"bad_words": "", "stop_words": "", "repetition_penalty": 1.0, "pad_id": 2}
    sent |= {"return_context_logits": False, "return_generation_logits": False, "min_length": 1}
    sent |= {"exclude_input_in_output": True, "stream": False}
    shaped = [tensor(name, value, [1, 1]) for name, value in {"text_input": TEXT, **sent}.items()]
    result = client.infer("preamble", shaped)
    assert text_of(result) == own.generate(TEXT, options).text
    names: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "top_k": 3, "seed": 9}
    prefixed = {f"sampling_param_{name}": value for name, value in names.items()}
    prefixed["sampling_param_seed"] = "9"
    result = infer(client, "preamble", **prefixed)
    assert text_of(result) == own.generate(TEXT, options).text
    greedy: list[Any] = [{"top_p": 0.0}, {"top_p": 0.0, "temperature": 1.0, "top_k": 0}]
    for none in greedy:  # As there.
        result = infer(client, "preamble", max_tokens=8, **none)
        assert text_of(result) == own.generate(TEXT, Options(max_new_tokens=8)).text
    beams = infer(client, "preamble", max_tokens=8, beam_width=3)
    assert len(set(beams.as_numpy("text_output"))) == 3
    vllms = {"skip_special_tokens": True, "detokenize": True, "max_tokens": 8}
    result = infer(client, "preamble", sampling_parameters=vllms)
    assert text_of(result) == own.generate(TEXT, Options(max_new_tokens=8)).text
    two = client.infer("preamble", tensors(exclude_input_in_output=True), parameters=names)
    assert text_of(two) == own.generate(TEXT, options).text


def test_the_calls_of_a_load_generator_in_its_order(
    client: triton.InferenceServerClient, own: Client
) -> None:
    expected = own.generate(TEXT, Options(max_new_tokens=6)).text
    assert "statistics" not in client.get_server_metadata().extensions
    outputs = [one.name for one in client.get_model_metadata("preamble").outputs]
    config = client.get_model_config("preamble").config
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert [one.name for one in config.input if not one.optional] == ["text_input"]
    assert client.is_model_ready("preamble")
    with streaming(client) as stream:
        for place in range(4):
            client.async_stream_infer(
                "preamble",
                tensors(
                    stream=True,
                    sampling_parameters={"max_tokens": "6", "ignore_eos": "true"},
                    exclude_input_in_output=True,
                ),
                outputs=[triton.InferRequestedOutput(name) for name in outputs],
                request_id=str(place),
                enable_empty_final_response=True,
            )
        results, errors = stream.until(4)
    assert errors == []
    assert {id: "".join(map(text_of, got)) for id, got in results.items()} == dict.fromkeys(
        "0123", expected
    )


def test_what_was_put_there_just_now_can_be_loaded_and_what_is_wrong_is_told(
    world: World, client: triton.InferenceServerClient
) -> None:
    for name in (world.model, "preamble", "sum", "fox@2"):
        client.load_model(name)
    write_adapter(world.adapters / "new.safetensors", world.checkpoint, [5, 6])
    (world.adapters / "broken.safetensors").write_bytes(b"no adapter")
    client.load_model("new")
    assert client.is_model_ready("new")
    for name, given, code, words in (
        ("nobody", None, "NOT_FOUND", "no adapter 'nobody'"),
        ("../sum", None, "NOT_FOUND", "no adapter's name"),
        ("broken", None, "FAILED_PRECONDITION", "broken"),
        ("sum", "{}", "UNIMPLEMENTED", "as they lie on the server"),
    ):
        with pytest.raises(InferenceServerException, match=words) as refused:
            client.load_model(name, config=given)
        assert refused.value.status() == f"StatusCode.{code}"
    for name in ("new", "broken"):
        (world.adapters / f"{name}.safetensors").unlink()
