"""OpenAI routes, by OpenAI's own client, compared with gRPC on the same server.

The model computes in fp64, where tokens do not depend on the batch.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import yaml
from openai.types import Completion

from gpt.adapters.prompt_template import PromptTemplate
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
from serving.server import LIVENESS_PATHS, READINESS_PATHS
from tests.support.broken.openai_requests import REFUSED
from tests.support.servers import (
    ROOT,
    WAIT_S,
    Server,
    eventually,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

BASE = "checkpoint"
TEXT = "twelve and thirty? answer:"
TOKEN = "a-token-for-these-tests"
PLACES = 8
QUEUE = 8
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


class OpenAIServer:
    """A server with two adapters and one token, its clients, and its tokenizer."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.url = f"http://{server.ready_field('http')}/v1"
        self.client = self.new_client()
        self.stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(server.address))

    def new_client(self, **options: Any) -> openai.OpenAI:
        defaults: dict[str, Any] = {"api_key": TOKEN, "max_retries": 0, "timeout": WAIT_S}
        return openai.OpenAI(base_url=self.url, **{**defaults, **options})

    def complete(self, model: str = BASE, prompt: Any = TEXT, **options: Any) -> Completion:
        completion: Completion = self.client.completions.create(
            model=model, prompt=prompt, **options
        )
        return completion

    def stream(
        self, model: str = BASE, prompt: Any = TEXT, **options: Any
    ) -> openai.Stream[Completion]:
        stream: openai.Stream[Completion] = self.client.completions.create(
            model=model, prompt=prompt, stream=True, **options
        )
        return stream

    def generate_grpc(self, **fields: Any) -> pb.GenerateResponse:
        """The same request by gRPC."""
        metadata = [("authorization", f"Bearer {TOKEN}")]
        response: pb.GenerateResponse = self.stub.Generate(
            pb.GenerateRequest(**fields), timeout=WAIT_S, metadata=metadata
        )
        return response


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    folder = tmp_path_factory.mktemp("openai")
    checkpoint = write_checkpoint(folder)
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    adapters = folder / "adapters"
    tokens = folder / "tokens.yaml"
    adapters.mkdir()
    tokens.write_text(
        yaml.safe_dump({"ours": {"token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest()}})
    )
    write(adapters / "sum.safetensors", checkpoint, tokenizer.encode("what is the sum of"))
    template = PromptTemplate(
        "<|VIRTUAL_PROMPT_0|>{numbers}? answer:{result}", (3,), answer_field="result"
    )
    fox = tokenizer.encode("the quick brown")[:3]
    write(adapters / "fox@2.safetensors", checkpoint, fox, template=template)
    limits: dict[str, Any] = {
        "adapters": str(adapters),
        "tokens": str(tokens),
        "running_requests_max": PLACES,
        "queue_requests_max": QUEUE,
        "prompts_max": 5,
    }
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield OpenAIServer(server, tokenizer)


def write(path: Path, *args: Any, **options: Any) -> None:
    write_adapter(path, *args, **options)


def sampling(**fields: Any) -> pb.Sampling:
    return pb.Sampling(**fields)


def numbers(values: list[Any]) -> dict[str, Any]:
    """Log-probabilities, alternatives or texts as one mapping, so that they can be compared."""
    flat: dict[str, Any] = {}
    for index, value in enumerate(values):
        for name, logprob in value.items() if isinstance(value, dict) else [("", value)]:
            flat[f"{index} {name}"] = logprob
    return flat


def test_the_example_runs_on_any_server(deployment: OpenAIServer) -> None:
    example = [sys.executable, str(ROOT / "examples" / "openai" / "complete.py"), deployment.url]
    environment = {**os.environ, "OPENAI_API_KEY": TOKEN}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=False)

    completed = run([*example, "sum"], timeout=600)

    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("models: checkpoint, preamble, fox, fox@2, sum, sum@1\n")
    expected = deployment.complete("sum", "the quick brown", max_tokens=16, temperature=0)
    assert expected.choices[0].text in completed.stdout


def test_every_adapter_is_a_model(deployment: OpenAIServer) -> None:
    models = {model.id: model for model in deployment.client.models.list()}

    assert list(models)[:2] == [BASE, "preamble"]
    assert set(models) == {BASE, "preamble", "sum", "sum@1", "fox", "fox@2"}
    assert deployment.client.models.retrieve("fox@2").to_dict()["parent"] == BASE
    assert deployment.client.models.retrieve("preamble").id == "preamble"  # The base, as in KServe.
    names = "preamble", BASE, "", "dummy", "tgi", "default"
    completions = [deployment.complete(name, "the quick", **GREEDY, seed=7) for name in names]
    for completion in completions:
        assert completion.choices == completions[0].choices and completion.model == BASE
    for name in ("dog", "gpt-4o", "Dummy", f"{BASE}/iter_0000001"):
        with pytest.raises(openai.NotFoundError, match="no model"):
            deployment.complete(name, **GREEDY)
    with pytest.raises(openai.NotFoundError, match="no model 'dog'"):
        deployment.client.models.retrieve("dog")


def test_the_operator_names_the_model(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    for name in ("default", "checkpoint"):
        write(adapters / f"{name}.safetensors", checkpoint, tokenizer.encode("what is the sum"))
    names = ["org/chat-7b", "gpt-4o"]
    settings: dict[str, Any] = {"adapters": str(adapters), "served_model_name": names}
    with serving(checkpoint, tmp_path / "s.yaml", **settings) as server:
        client = openai.OpenAI(
            base_url=f"http://{server.ready_field('http')}/v1", api_key="none", max_retries=0
        )
        models = [model.id for model in client.models.list()]
        retrieved = client.models.retrieve("org/chat-7b")
        answers = {
            name: client.completions.create(model=name, prompt=TEXT, **GREEDY)
            for name in (*names, "preamble", "", str(checkpoint), "default", "checkpoint")
        }

    assert models[:3] == ["org/chat-7b", "gpt-4o", "preamble"]
    assert server.ready_field("model") == retrieved.id == "org/chat-7b"
    for name in (*names, "preamble", "", str(checkpoint)):
        assert answers[name].model == "org/chat-7b", name
    # The adapter's name precedes a placeholder, and the folder's name, which is only an alias.
    assert answers["default"].model == "default@1"
    assert answers["checkpoint"].model == "checkpoint@1"


def test_paths_of_probes_and_final_slashes(deployment: OpenAIServer) -> None:
    server = deployment.server
    for path in ("/version", "/load", *LIVENESS_PATHS, *READINESS_PATHS):
        for spelling in (path, f"{path}/"):
            assert server.get(spelling)[0] == 200, spelling
    assert {"/health", "/ping", "/readyz", "/v1/health"} <= {*READINESS_PATHS}
    assert set(json.loads(server.get("/version")[1])) == {"version"}
    assert json.loads(server.get("/load")[1]) == {"server_load": 0}
    assert server.get("/healthier")[0] == 404
    body = {"prompt": TEXT, **GREEDY}
    slashed = json.loads(server.request("/v1/completions/", body, token=TOKEN)[1])
    assert slashed["choices"][0]["text"] == deployment.complete(**GREEDY).choices[0].text


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (GREEDY, {"sampling": sampling(temperature=0)}),
        ({"seed": 7, "max_tokens": 12}, {"sampling": sampling(temperature=1, seed=7)}),
        (
            {
                "seed": 3,
                "max_tokens": 12,
                "temperature": 0.7,
                "top_p": 0.9,
                "n": 3,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "logit_bias": {"5": 4},
                "extra_body": {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
            },
            {
                "answers": 3,
                "sampling": sampling(
                    temperature=0.7,
                    top_p=0.9,
                    top_k=40,
                    min_p=0.01,
                    seed=3,
                    presence_penalty=0.5,
                    frequency_penalty=0.25,
                    repetition_penalty=1.1,
                    logit_bias={5: 4},
                ),
            },
        ),
        (
            {**GREEDY, "n": 2, "extra_body": {"use_beam_search": True, "length_penalty": 0.5}},
            {"answers": 2, "beams": pb.Beams(width=2, length_penalty=0.5)},
        ),
        (
            {**GREEDY, "extra_body": {"guided_regex": "[0-9]{4}"}},
            {"guide": pb.Guide(regex="[0-9]{4}"), "sampling": sampling(temperature=0)},
        ),
    ],
    ids=["greedy", "seeded", "filtered", "beams", "guided"],
)
def test_completions_equal_those_of_grpc(
    deployment: OpenAIServer, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    for model in (BASE, "sum"):
        adapter = {} if model == BASE else {"adapter": model}
        grpc_response = deployment.generate_grpc(text=TEXT, max_new_tokens=12, **fields, **adapter)
        completion = deployment.complete(model, **options)

        assert [choice.text for choice in completion.choices] == [
            completion.text for completion in grpc_response.completions
        ]
        finishes = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
        finish_reasons = [finishes[str(choice.finish_reason)] for choice in completion.choices]
        assert finish_reasons == [
            completion.finish_reason for completion in grpc_response.completions
        ]
        assert completion.model == (grpc_response.adapter or BASE)
        assert completion.usage is not None
        usage = completion.usage.to_dict()
        assert usage["prompt_tokens"] == grpc_response.usage.prompt_tokens
        assert usage["virtual_tokens"] == grpc_response.usage.virtual_tokens
        token_count = sum(
            completion.usage.completion_tokens for completion in grpc_response.completions
        )
        assert usage["completion_tokens"] == token_count
        assert usage["total_tokens"] == token_count + grpc_response.usage.prompt_tokens


def test_prompts_are_texts_or_ids_single_or_batched(deployment: OpenAIServer) -> None:
    ids = deployment.tokenizer.encode(TEXT)
    single = deployment.complete(**GREEDY).choices[0].text
    second_single = deployment.complete(prompt="the quick", **GREEDY).choices[0].text

    assert deployment.complete(prompt=ids, **GREEDY).choices[0].text == single
    batch = deployment.complete(prompt=[TEXT, "the quick"], n=2, **GREEDY)
    assert [(choice.index, choice.text) for choice in batch.choices] == list(
        enumerate([single, single, second_single, second_single])
    )
    lists = deployment.complete(prompt=[ids, ids[:2]], **GREEDY)
    assert [choice.index for choice in lists.choices] == [0, 1]
    assert lists.choices[0].text == single


def test_adapter_templates_take_inputs(deployment: OpenAIServer) -> None:
    inputs = {"numbers": "twelve and thirty"}
    completion = deployment.complete("fox", None, extra_body={"inputs": inputs}, **GREEDY)
    grpc_response = deployment.generate_grpc(
        inputs=pb.Inputs(fields=inputs),
        adapter="fox",
        max_new_tokens=12,
        sampling=sampling(temperature=0),
    )
    assert completion.choices[0].text == grpc_response.text
    assert completion.model == "fox@2"


def test_streamed_completions_join_to_the_unary_one(deployment: OpenAIServer) -> None:
    options: dict[str, Any] = {**GREEDY, "n": 2, "logprobs": 2, "echo": True}
    unary_completion = deployment.complete("sum", [TEXT, "the quick"], **options)
    usage = {"include_usage": True}

    chunks = list(deployment.stream("sum", [TEXT, "the quick"], stream_options=usage, **options))

    assert [chunk.choices for chunk in chunks[-1:]] == [[]]
    assert chunks[-1].usage is not None
    assert unary_completion.usage is not None
    usage_fields = ("prompt_tokens", "completion_tokens", "total_tokens", "virtual_tokens")
    counts = [
        response.usage.to_dict() for response in (chunks[-1], unary_completion) if response.usage
    ]
    assert [counts[0][name] for name in usage_fields] == [counts[1][name] for name in usage_fields]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(chunks) > 1 + len(unary_completion.choices)  # A busy machine may merge two.
    for choice in unary_completion.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        lists: dict[str, Any] = choice.logprobs.to_dict()
        for name, values in lists.items():
            logprobs_of_parts = [part.logprobs for part in parts if part.logprobs]
            joined = [
                value
                for part_logprobs in logprobs_of_parts
                for value in getattr(part_logprobs, name)
            ]
            assert numbers(joined) == pytest.approx(numbers(values)), name


def test_async_client_streams_concurrently(deployment: OpenAIServer) -> None:
    async def work() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=deployment.url, api_key=TOKEN, max_retries=0, timeout=WAIT_S
        ) as client:

            async def complete(seed: int) -> str:
                stream = await client.completions.create(
                    model=BASE, prompt=TEXT, stream=True, seed=seed, max_tokens=12
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(complete(seed) for seed in range(8)))

    texts = asyncio.run(work())

    separate = [deployment.complete(seed=seed, max_tokens=12).choices[0].text for seed in range(8)]
    assert texts == separate
    assert len(set(texts)) > 4


@pytest.mark.parametrize("model", [BASE, "sum"])
@pytest.mark.parametrize("new_tokens", [0, 1, 6])
def test_echo_and_logprobs_equal_those_of_grpc(
    deployment: OpenAIServer, model: str, new_tokens: int
) -> None:
    grpc_response = deployment.generate_grpc(
        text=TEXT,
        adapter="" if model == BASE else model,
        max_new_tokens=new_tokens,
        sampling=sampling(temperature=0),
        details=pb.Details(logprobs=2, prompt_logprobs=2),
    ).completions[0]

    choice = deployment.complete(
        model, max_tokens=new_tokens, temperature=0, echo=True, logprobs=2
    ).choices[0]

    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    prompt = [score for score in grpc_response.prompt_scores if not score.virtual]
    scores = [*prompt, *grpc_response.scores]
    ids = deployment.tokenizer.encode(TEXT)
    assert [score.token_id for score in scores] == [*ids, *grpc_response.token_ids]
    assert logprobs.token_logprobs == pytest.approx(
        [score.logprob if score.HasField("logprob") else None for score in scores]
    )
    assert (logprobs.token_logprobs[0] is None) == (model == BASE)
    assert choice.text == TEXT + grpc_response.text
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens[: len(ids)]) == TEXT
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[: len(ids)] == [
        len("".join(logprobs.tokens[:index])) for index in range(len(ids))
    ]
    assert logprobs.top_logprobs is not None
    for token, logprob, best, score in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, scores, strict=True
    ):
        if logprob is None:
            assert best is None
            continue
        # Evaluation harnesses test whether a token is the best one by this equality.
        assert (best[token] == max(best.values())) == (score.rank == 1)
        assert best[token] == logprob
        assert len(best) <= 3


def test_vllm_prompt_logprobs_are_keyed_by_token_id(deployment: OpenAIServer) -> None:
    ids = deployment.tokenizer.encode(TEXT)
    extra = {"prompt_logprobs": 1}
    choice = deployment.complete(max_tokens=1, logprobs=0, echo=True, extra_body=extra).choices[0]

    prompt_logprobs: Any = choice.to_dict()["prompt_logprobs"]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert prompt_logprobs[0] is None
    for token, entry, logprob in zip(
        ids[1:], prompt_logprobs[1:], choice.logprobs.token_logprobs[1 : len(ids)], strict=True
    ):
        assert entry[str(token)]["logprob"] == logprob
        assert min(logprob["rank"] for logprob in entry.values()) == 1


def test_token_ids_are_returned_whole_and_streamed(deployment: OpenAIServer) -> None:
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    completion = deployment.complete("sum", logprobs=1, extra_body=extra, **GREEDY)
    choice: Any = completion.choices[0].to_dict()
    grpc_response = deployment.generate_grpc(
        text=TEXT, adapter="sum", max_new_tokens=12, sampling=sampling(temperature=0)
    )
    ids = list(grpc_response.completions[0].token_ids)

    assert choice["prompt_token_ids"] == deployment.tokenizer.encode(TEXT)
    assert choice["token_ids"] == ids
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["top_logprobs"][0])
    parts: list[Any] = [
        chunk.choices[0].to_dict() for chunk in deployment.stream("sum", extra_body=extra, **GREEDY)
    ]
    assert [token for part in parts for token in part["token_ids"]] == ids
    assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert not any("prompt_token_ids" in part for part in parts[1:])


def test_special_tokens_can_be_kept_in_the_text(deployment: OpenAIServer) -> None:
    tokenizer = deployment.tokenizer
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert bos is not None and eos is not None
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(bos): 100}}
    for skip, text in ((True, ""), (False, "<s><s><s>")):
        extra = {"skip_special_tokens": skip, "spaces_between_special_tokens": False}
        completion = deployment.complete(extra_body=extra, **options)
        assert completion.choices[0].text == text
        streamed = deployment.stream(extra_body=extra, **options)
        assert "".join(chunk.choices[0].text for chunk in streamed) == text
    # The token that ends an answer is no part of its text. A stop string may be a special token.
    ended = {**options, "logit_bias": {str(eos): 100}}
    extra = {"skip_special_tokens": False}
    assert deployment.complete(extra_body=extra, **ended).choices[0].text == ""
    stopped = deployment.complete(extra_body=extra, stop="<s>", **options).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


def test_salts_separate_cached_prefixes(deployment: OpenAIServer) -> None:
    prompt = "salted prompts share no blocks with the quick brown fox or the lazy dog " * 4

    def cached_tokens(**extra: str) -> int:
        completion = deployment.complete(prompt=prompt, max_tokens=1, extra_body=extra)
        assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
        return completion.usage.prompt_tokens_details.cached_tokens or 0

    assert cached_tokens(cache_salt="a") == 0
    assert cached_tokens(cache_salt="a") > 0
    assert cached_tokens(cache_salt="b") == cached_tokens() == 0
    assert cached_tokens() > 0


def test_unset_seeds_are_random(deployment: OpenAIServer) -> None:
    seeds = {
        deployment.complete(seed=-1, max_tokens=1).choices[0].to_dict()["seed"] for _ in range(3)
    }
    assert len(seeds) == 3


def test_every_response_has_a_request_id(deployment: OpenAIServer) -> None:
    ids = {deployment.complete(**GREEDY)._request_id for _ in range(2)}
    assert len(ids) == 2 and None not in ids
    with pytest.raises(openai.BadRequestError) as refused:
        deployment.complete(max_tokens=-1)
    assert refused.value.request_id
    headers = {"X-Request-Id": "ours"}
    assert deployment.complete(**GREEDY, extra_headers=headers)._request_id == "ours"


def test_refusals_of_slow_streams_are_error_events(deployment: OpenAIServer) -> None:
    """A stream that waits in the queue gets its headers, and later the error of its deadline."""
    running_stream = deployment.stream(n=PLACES, **LONG)
    next(running_stream)
    body = {"prompt": TEXT, "stream": True, "timeout": 2.5}
    with (
        deployment.new_client() as client,
        client.completions.with_streaming_response.create(
            model=BASE, prompt=TEXT, stream=True, extra_body=body
        ) as response,
    ):
        assert response.status_code == 200
        lines = list(response.iter_lines())
    running_stream.close()

    assert lines[0].startswith(": ")
    events = [line for line in lines if line.startswith("data: ")]
    assert len(events) == 1 and "DEADLINE_PASSED" in events[0]


def test_stop_truncation_and_length_parameters(deployment: OpenAIServer) -> None:
    text = deployment.complete(**GREEDY).choices[0].text
    stop = text[4:6]
    stopped = deployment.complete(stop=stop, **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    assert stopped.to_dict()["stop_reason"] == stop
    extra = {"include_stop_str_in_output": True}
    with_stop = deployment.complete(stop=[stop, "never"], extra_body=extra, **GREEDY).choices[0]
    assert with_stop.text == text[: text.index(stop)] + stop

    ids = deployment.tokenizer.encode(TEXT)
    truncated = deployment.complete(extra_body={"truncate_prompt_tokens": 3}, echo=True, **GREEDY)
    assert truncated.usage is not None
    assert truncated.usage.prompt_tokens == 3
    assert truncated.choices[0].text.startswith(deployment.tokenizer.decode(ids[-3:]))

    unlimited = deployment.complete(temperature=0, extra_body={"ignore_eos": True})
    assert unlimited.usage is not None
    assert unlimited.usage.completion_tokens == 16
    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": shape}}
    guided = deployment.complete(
        max_tokens=60, extra_body={"response_format": response_format}, seed=1
    )
    assert guided.choices[0].text.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("options", "param", "message"), REFUSED, ids=lambda param_value: str(param_value)[:40]
)
def test_invalid_fields_are_reported_by_their_openai_names(
    deployment: OpenAIServer, options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        deployment.complete(**options)

    error = caught.value
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert error.code in ("INVALID_FIELD", "PROMPT_TOO_LONG")
    assert message in str(error)


def test_errors_are_the_exceptions_of_the_client(deployment: OpenAIServer) -> None:
    for name in ("dog", "a/b", "sum@9"):
        with pytest.raises(openai.NotFoundError) as unknown:
            deployment.complete(name)
        assert (unknown.value.code, unknown.value.param) == ("UNKNOWN_MODEL", "model")
    for client in (
        deployment.new_client(api_key="not-the-token-of-anyone"),
        deployment.new_client(api_key="x"),
    ):
        with pytest.raises(openai.AuthenticationError) as wrong_token:
            client.models.list()
        assert wrong_token.value.response.headers["www-authenticate"] == "Bearer"
    assert deployment.server.get("/metrics")[0] == deployment.server.get("/health/live")[0] == 200
    extra = {"timeout": 0.05, "ignore_eos": True}
    with pytest.raises(openai.APIStatusError) as timeout:
        deployment.complete(max_tokens=4000, extra_body=extra)
    assert (timeout.value.status_code, timeout.value.code) == (504, "DEADLINE_PASSED")


def test_failed_streams_end_with_an_error_event(deployment: OpenAIServer) -> None:
    extra = {"timeout": 3.0, "ignore_eos": True}  # Too short for the whole answer.
    stream = deployment.stream(n=PLACES, max_tokens=4000, extra_body=extra)
    next(stream)
    with pytest.raises(openai.APIError, match="deadline") as caught:
        list(stream)
    assert caught.value.code == "DEADLINE_PASSED"


def test_overload_refusals_have_a_useful_retry_time(deployment: OpenAIServer) -> None:
    # A request of the previous test ends within one step.
    states = [f"preamble_scheduler_{state}_requests" for state in ("running", "waiting")]
    eventually(lambda: not any(map(deployment.server.metric, states)))
    running_stream = deployment.stream(n=PLACES + QUEUE, **LONG)
    next(running_stream)
    with pytest.raises(openai.RateLimitError) as full:
        deployment.complete(**GREEDY)
    assert full.value.code == "QUEUE_FULL"
    assert full.value.response.headers["retry-after"] == "1"
    assert full.value.response.headers["retry-after-ms"] == "1000"

    leaving = threading.Timer(0.3, running_stream.close)
    leaving.start()
    retrying_client = deployment.new_client(max_retries=15)
    completion = retrying_client.completions.create(model=BASE, prompt=TEXT, **GREEDY)

    leaving.join()
    assert completion.choices[0].text == deployment.complete(**GREEDY).choices[0].text
    eventually(lambda: deployment.server.metric("preamble_scheduler_running_requests") == 0)
