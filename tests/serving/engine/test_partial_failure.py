"""One of a request's answers fails: our own wire tells the others, the wires that have no way to
say so end the call whole, as the servers do whose protocols they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import serving as program
from checkpoints_tools.conversion.convert import write_native
from clients.client import Options
from gpt.checkpoint.logical_tensor import Checkpoint, in_memory
from serving.config import ServerConfig
from serving.request import Ask, Completion
from tests.support.models import lively
from tests.support.servers import CONFIG, Server, serving

pytestmark = pytest.mark.slow  # A server of its own: too long for the fast suite.

EMBEDDING = "embedding.word_embeddings.weight"
LAYERED = CONFIG.with_fields(normalization="LayerNorm", dtype="float64")
ANSWERS, NEW = 4, 8
TEXT = "1 2 3"
DRAW: dict[str, Any] = {"temperature": 1.0, "seed": 5}


class World(NamedTuple):
    server: Server
    failing: int  # The answer that reads a word whose numbers overflow.
    healthy: list[Completion]


def answers(folder: Path) -> list[Completion]:
    config = ServerConfig(str(folder), dtype="float64", kv_tokens_max=1 << 12)
    with program.open_engine(config) as service:
        ask = Ask(TEXT, max_new_tokens=NEW, answers=ANSWERS, ignore_ends=True, **DRAW)
        return service.generate([ask])


def poisoned(model: Checkpoint, token: int) -> Checkpoint:
    """One word's numbers are finite and their sum is not, so whoever reads it has none any more."""
    tensors = {name: model.read(name) for name in model.tensors}
    tensors[EMBEDDING][token] = torch.finfo(torch.float64).max
    return in_memory(LAYERED, tensors)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("many")
    model = lively(LAYERED).in_dtype(torch.float64)
    write_native(model, folder / "healthy")
    healthy = answers(folder / "healthy")
    read = [set(one.token_ids[:-1]) for one in healthy]
    failing, token = next(
        (place, token)
        for place, own in enumerate(read)
        for token in sorted(own - {1, 2, 3}.union(*(read[:place] + read[place + 1 :])))
    )
    write_native(poisoned(model, token), folder / "model")
    with serving(folder / "model", folder / "s.yaml") as server:
        yield World(server, failing, healthy)


def test_our_own_wire_tells_which_answer_failed_and_what_the_others_are(world: World) -> None:
    with world.server.client() as client:
        options = Options(answers=ANSWERS, max_new_tokens=NEW, ignore_ends=True, **DRAW)
        done = client.completions(TEXT, options)
    for place, (one, healthy) in enumerate(zip(done, world.healthy, strict=True)):
        if place == world.failing:
            assert one.failure is not None and one.failure.reason == "NUMERIC_FAULT"
        else:
            assert one.failure is None and one.text == healthy.text


@pytest.mark.parametrize("stream", [False, True])
def test_openais_wire_ends_the_call_whole(world: World, stream: bool) -> None:
    address = f"http://{world.server.http_address}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"n": ANSWERS, "max_tokens": NEW, "stream": stream, **DRAW}

        def ask() -> list[Any]:
            more = {"ignore_eos": True}
            answer: Any = client.completions.create(
                model="preamble", prompt=TEXT, extra_body=more, **fields
            )
            return list(answer) if stream else [answer]

        with pytest.raises(openai.APIError, match="not finite") as failed:
            ask()
        assert failed.value.code == "NUMERIC_FAULT"


def test_kserves_wire_ends_the_call_whole(world: World) -> None:
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([TEXT.encode()], dtype=object))
    parameters = {"n": ANSWERS, "max_tokens": NEW, "ignore_eos": True, "seed": 5}
    with (
        triton.InferenceServerClient(world.server.address) as client,
        pytest.raises(InferenceServerException, match="not finite") as failed,
    ):
        client.infer("preamble", [text], parameters=parameters | {"temperature": "1.0"})
    assert failed.value.status() == "StatusCode.INTERNAL"
