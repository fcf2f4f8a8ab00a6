"""Partial failure of a request: the preamble protocol reports the failed and the other answers.

The OpenAI and KServe protocols cannot express this and fail the call.
"""

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
from gpt.checkpoint.logical_tensor import Checkpoint, checkpoint_from_tensors
from serving.config import ServerConfig
from serving.request import Ask, Completion
from tests.support.models import lively
from tests.support.servers import CONFIG, Server, serving

pytestmark = pytest.mark.slow  # Starts its own server: too slow for the fast suite.

EMBEDDING = "embedding.word_embeddings.weight"
LAYERED = CONFIG.with_fields(normalization="LayerNorm", dtype="float64")
ANSWERS, NEW = 4, 8
TEXT = "1 2 3"
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 5}


class PartialFailure(NamedTuple):
    server: Server
    failing: int  # Index of the answer that contains the overflowing token.
    healthy: list[Completion]


def generate_answers(folder: Path) -> list[Completion]:
    config = ServerConfig(str(folder), dtype="float64", kv_tokens_max=1 << 12)
    with program.open_engine(config) as service:
        ask = Ask(TEXT, max_new_tokens=NEW, answers=ANSWERS, ignore_ends=True, **SAMPLING)
        return service.generate([ask])


def with_overflowing_embedding(model: Checkpoint, token: int) -> Checkpoint:
    """The embedding of a token is finite but overflows in a sum, so prompts with it give NaN."""
    tensors = {name: model.read(name) for name in model.tensors}
    tensors[EMBEDDING][token] = torch.finfo(torch.float64).max
    return checkpoint_from_tensors(LAYERED, tensors)


@pytest.fixture(scope="module")
def partial_failure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartialFailure]:
    folder = tmp_path_factory.mktemp("partial-failure")
    model = lively(LAYERED).in_dtype(torch.float64)
    write_native(model, folder / "healthy")
    healthy = generate_answers(folder / "healthy")
    inputs = [set(completion.token_ids[:-1]) for completion in healthy]
    # A token that exactly one answer reads.
    failing, token = next(
        (index, token)
        for index, ids in enumerate(inputs)
        for token in sorted(ids - {1, 2, 3}.union(*(inputs[:index] + inputs[index + 1 :])))
    )
    write_native(with_overflowing_embedding(model, token), folder / "model")
    with serving(folder / "model", folder / "s.yaml") as server:
        yield PartialFailure(server, failing, healthy)


def test_the_preamble_protocol_reports_the_failed_answer_and_the_others(
    partial_failure: PartialFailure,
) -> None:
    with partial_failure.server.client() as client:
        options = Options(answers=ANSWERS, max_new_tokens=NEW, ignore_ends=True, **SAMPLING)
        completions = client.completions(TEXT, options)
    for index, (completion, healthy) in enumerate(
        zip(completions, partial_failure.healthy, strict=True)
    ):
        if index == partial_failure.failing:
            assert completion.failure is not None and completion.failure.reason == "NUMERIC_FAULT"
        else:
            assert completion.failure is None and completion.text == healthy.text


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_protocol_fails_the_call(partial_failure: PartialFailure, stream: bool) -> None:
    address = f"http://{partial_failure.server.http_address}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"n": ANSWERS, "max_tokens": NEW, "stream": stream, **SAMPLING}

        def complete() -> list[Any]:
            extra = {"ignore_eos": True}
            response: Any = client.completions.create(
                model="preamble", prompt=TEXT, extra_body=extra, **fields
            )
            return list(response) if stream else [response]

        with pytest.raises(openai.APIError, match="not finite") as raised:
            complete()
        assert raised.value.code == "NUMERIC_FAULT"


def test_the_kserve_protocol_fails_the_call(partial_failure: PartialFailure) -> None:
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([TEXT.encode()], dtype=object))
    parameters = {"n": ANSWERS, "max_tokens": NEW, "ignore_eos": True, "seed": 5}
    with (
        triton.InferenceServerClient(partial_failure.server.address) as client,
        pytest.raises(InferenceServerException, match="not finite") as raised,
    ):
        client.infer("preamble", [text], parameters=parameters | {"temperature": "1.0"})
    assert raised.value.status() == "StatusCode.INTERNAL"
