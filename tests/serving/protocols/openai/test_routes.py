"""OpenAI's wire, by OpenAI's own client; and by its side the gRPC wire, which must say the same.

The model computes in fp64, where tokens are equal in whatever company they are made.
"""

import asyncio
import hashlib
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

from gpt.adapters.prompt_template import Template
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from protos.preamble.v1 import generation_pb2 as pb
from protos.preamble.v1 import generation_pb2_grpc
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
PLACES, QUEUE = 8, 8
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


class World:
    """A server with two adapters and one token, its clients, and its tokenizer."""

    def __init__(self, server: Server, tokenizer: Tokenizer) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.url = f"http://{server._said('http')}/v1"
        self.client = self.made()
        self.stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(server.address))

    def made(self, **options: Any) -> openai.OpenAI:
        given: dict[str, Any] = {"api_key": TOKEN, "max_retries": 0, "timeout": WAIT_S}
        return openai.OpenAI(base_url=self.url, **{**given, **options})

    def complete(self, model: str = BASE, prompt: Any = TEXT, **options: Any) -> Completion:
        answer: Completion = self.client.completions.create(model=model, prompt=prompt, **options)
        return answer

    def stream(
        self, model: str = BASE, prompt: Any = TEXT, **options: Any
    ) -> openai.Stream[Completion]:
        stream: openai.Stream[Completion] = self.client.completions.create(
            model=model, prompt=prompt, stream=True, **options
        )
        return stream

    def own(self, **fields: Any) -> pb.GenerateResponse:
        """The same by gRPC."""
        metadata = [("authorization", f"Bearer {TOKEN}")]
        answer: pb.GenerateResponse = self.stub.Generate(
            pb.GenerateRequest(**fields), timeout=WAIT_S, metadata=metadata
        )
        return answer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("openai")
    checkpoint = write_checkpoint(folder)
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    adapters, tokens = folder / "adapters", folder / "tokens.yaml"
    adapters.mkdir()
    tokens.write_text(
        yaml.safe_dump({"ours": {"token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest()}})
    )
    write(adapters / "sum.safetensors", checkpoint, tokenizer.encode("what is the sum of"))
    template = Template(
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
        yield World(server, tokenizer)


def write(path: Path, *args: Any, **options: Any) -> None:
    write_adapter(path, *args, **options)


def sampling(**fields: Any) -> pb.Sampling:
    return pb.Sampling(**fields)


def numbers(values: list[Any]) -> dict[str, Any]:
    """A list of log-probabilities, of alternatives or of texts, so that they can be compared."""
    flat: dict[str, Any] = {}
    for place, value in enumerate(values):
        for name, one in value.items() if isinstance(value, dict) else [("", value)]:
            flat[f"{place} {name}"] = one
    return flat


def test_the_example_runs_on_a_server_that_it_knows_nothing_of(world: World) -> None:
    example = [sys.executable, str(ROOT / "examples" / "openai" / "complete.py"), world.url]
    environment = {**os.environ, "OPENAI_API_KEY": TOKEN}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=False)

    done = run([*example, "sum"], timeout=60)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("models: checkpoint, fox, fox@2, sum, sum@1\n")
    told = world.complete("sum", "the quick brown", max_tokens=16, temperature=0)
    assert told.choices[0].text in done.stdout


def test_every_adapter_is_a_model(world: World) -> None:
    models = {model.id: model for model in world.client.models.list()}

    assert set(models) == {BASE, "sum", "sum@1", "fox", "fox@2"}
    assert world.client.models.retrieve("fox@2").to_dict()["parent"] == BASE
    assert world.client.models.retrieve("preamble").id == "preamble"  # The base, as KServe has it.
    known = [world.complete(name, "the quick", **GREEDY, seed=7) for name in ("preamble", BASE)]
    assert known[0].choices == known[1].choices and known[0].model == BASE
    with pytest.raises(openai.NotFoundError, match="no model 'dog'"):
        world.client.models.retrieve("dog")


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
def test_an_answer_is_the_one_of_the_other_wire(
    world: World, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    for model in (BASE, "sum"):
        adapter = {} if model == BASE else {"adapter": model}
        own = world.own(text=TEXT, max_new_tokens=12, **fields, **adapter)
        answer = world.complete(model, **options)

        assert [one.text for one in answer.choices] == [one.text for one in own.completions]
        finishes = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
        told = [finishes[str(one.finish_reason)] for one in answer.choices]
        assert told == [one.finish_reason for one in own.completions]
        assert answer.model == (own.adapter or BASE)
        assert answer.usage is not None
        usage = answer.usage.to_dict()
        assert usage["prompt_tokens"] == own.usage.prompt_tokens
        assert usage["virtual_tokens"] == own.usage.virtual_tokens
        made = sum(one.usage.completion_tokens for one in own.completions)
        assert usage["completion_tokens"] == made
        assert usage["total_tokens"] == made + own.usage.prompt_tokens


def test_prompts_may_be_texts_or_ids_one_or_many(world: World) -> None:
    ids = world.tokenizer.encode(TEXT)
    one = world.complete(**GREEDY).choices[0].text
    other = world.complete(prompt="the quick", **GREEDY).choices[0].text

    assert world.complete(prompt=ids, **GREEDY).choices[0].text == one
    many = world.complete(prompt=[TEXT, "the quick"], n=2, **GREEDY)
    assert [(each.index, each.text) for each in many.choices] == list(
        enumerate([one, one, other, other])
    )
    lists = world.complete(prompt=[ids, ids[:2]], **GREEDY)
    assert [each.index for each in lists.choices] == [0, 1]
    assert lists.choices[0].text == one


def test_an_adapters_own_template_takes_inputs(world: World) -> None:
    inputs = {"numbers": "twelve and thirty"}
    answer = world.complete("fox", None, extra_body={"inputs": inputs}, **GREEDY)
    own = world.own(
        inputs=pb.Inputs(fields=inputs),
        adapter="fox",
        max_new_tokens=12,
        sampling=sampling(temperature=0),
    )
    assert answer.choices[0].text == own.text
    assert answer.model == "fox@2"


def test_a_stream_joined_is_the_whole_answer(world: World) -> None:
    asked: dict[str, Any] = {**GREEDY, "n": 2, "logprobs": 2, "echo": True}
    whole = world.complete("sum", [TEXT, "the quick"], **asked)
    usage = {"include_usage": True}

    chunks = list(world.stream("sum", [TEXT, "the quick"], stream_options=usage, **asked))

    assert [chunk.choices for chunk in chunks[-1:]] == [[]]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    told = ("prompt_tokens", "completion_tokens", "total_tokens", "virtual_tokens")
    counts = [answer.usage.to_dict() for answer in (chunks[-1], whole) if answer.usage]
    assert [counts[0][name] for name in told] == [counts[1][name] for name in told]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len(chunks) > 1 + len(whole.choices)  # A busy machine may tell one of them at once.
    for choice in whole.choices:
        parts = [part for one in chunks for part in one.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        lists: dict[str, Any] = choice.logprobs.to_dict()
        for name, values in lists.items():
            told_in = [part.logprobs for part in parts if part.logprobs]
            joined = [value for one in told_in for value in getattr(one, name)]
            assert numbers(joined) == pytest.approx(numbers(values)), name


def test_the_asynchronous_client_streams_many_at_once(world: World) -> None:
    async def work() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=world.url, api_key=TOKEN, max_retries=0, timeout=WAIT_S
        ) as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model=BASE, prompt=TEXT, stream=True, seed=seed, max_tokens=12
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    texts = asyncio.run(work())

    alone = [world.complete(seed=seed, max_tokens=12).choices[0].text for seed in range(8)]
    assert texts == alone
    assert len(set(texts)) > 4


@pytest.mark.parametrize("model", [BASE, "sum"])
@pytest.mark.parametrize("new_tokens", [0, 1, 6])
def test_echo_and_logprobs_have_the_shape_and_the_other_wires_numbers(
    world: World, model: str, new_tokens: int
) -> None:
    own = world.own(
        text=TEXT,
        adapter="" if model == BASE else model,
        max_new_tokens=new_tokens,
        sampling=sampling(temperature=0),
        details=pb.Details(logprobs=2, prompt_logprobs=2),
    ).completions[0]

    choice = world.complete(
        model, max_tokens=new_tokens, temperature=0, echo=True, logprobs=2
    ).choices[0]

    told = choice.logprobs
    assert told is not None
    assert told.token_logprobs is not None
    prompt = [score for score in own.prompt_scores if not score.virtual]
    scores = [*prompt, *own.scores]
    ids = world.tokenizer.encode(TEXT)
    assert [score.token_id for score in scores] == [*ids, *own.token_ids]
    assert told.token_logprobs == pytest.approx(
        [score.logprob if score.HasField("logprob") else None for score in scores]
    )
    assert (told.token_logprobs[0] is None) == (model == BASE)
    assert choice.text == TEXT + own.text
    assert told.tokens is not None
    assert "".join(told.tokens[: len(ids)]) == TEXT
    assert told.text_offset is not None
    assert told.text_offset[: len(ids)] == [
        len("".join(told.tokens[:place])) for place in range(len(ids))
    ]
    assert told.top_logprobs is not None
    for token, logprob, best, score in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, scores, strict=True
    ):
        if logprob is None:
            assert best is None
            continue
        # What scores texts asks whether a token is the best one by whether these are equal.
        assert (best[token] == max(best.values())) == (score.rank == 1)
        assert best[token] == logprob
        assert len(best) <= 3


def test_vllms_prompt_logprobs_go_by_token_id(world: World) -> None:
    ids = world.tokenizer.encode(TEXT)
    extra = {"prompt_logprobs": 1}
    choice = world.complete(max_tokens=1, logprobs=0, echo=True, extra_body=extra).choices[0]

    told: Any = choice.to_dict()["prompt_logprobs"]
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert told[0] is None
    for token, entry, logprob in zip(
        ids[1:], told[1:], choice.logprobs.token_logprobs[1 : len(ids)], strict=True
    ):
        assert entry[str(token)]["logprob"] == logprob
        assert min(one["rank"] for one in entry.values()) == 1


def test_stops_truncation_and_lengths_are_as_they_are_named(world: World) -> None:
    text = world.complete(**GREEDY).choices[0].text
    stop = text[4:6]
    cut = world.complete(stop=stop, **GREEDY).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    assert cut.to_dict()["stop_reason"] == stop
    extra = {"include_stop_str_in_output": True}
    kept = world.complete(stop=[stop, "never"], extra_body=extra, **GREEDY).choices[0]
    assert kept.text == text[: text.index(stop)] + stop

    ids = world.tokenizer.encode(TEXT)
    short = world.complete(extra_body={"truncate_prompt_tokens": 3}, echo=True, **GREEDY)
    assert short.usage is not None
    assert short.usage.prompt_tokens == 3
    assert short.choices[0].text.startswith(world.tokenizer.decode(ids[-3:]))

    unsaid = world.complete(temperature=0, extra_body={"ignore_eos": True})
    assert unsaid.usage is not None
    assert unsaid.usage.completion_tokens == 16
    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": shape}}
    guided = world.complete(max_tokens=60, extra_body={"response_format": wanted}, seed=1)
    assert guided.choices[0].text.lstrip().startswith("{")


@pytest.mark.parametrize(("options", "param", "said"), REFUSED, ids=lambda one: str(one)[:40])
def test_a_bad_field_is_told_by_the_name_that_it_has_here(
    world: World, options: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        world.complete(**options)

    error = caught.value
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert error.code in ("INVALID_FIELD", "PROMPT_TOO_LONG")
    assert said in str(error)


def test_errors_are_the_clients_own_kinds(world: World) -> None:
    for name in ("dog", "a/b", "sum@9"):
        with pytest.raises(openai.NotFoundError) as unknown:
            world.complete(name)
        assert (unknown.value.code, unknown.value.param) == ("UNKNOWN_MODEL", "model")
    for client in (world.made(api_key="not-the-token-of-anyone"), world.made(api_key="x")):
        with pytest.raises(openai.AuthenticationError) as stranger:
            client.models.list()
        assert stranger.value.response.headers["www-authenticate"] == "Bearer"
    assert world.server.get("/metrics")[0] == world.server.get("/health/live")[0] == 200
    extra = {"timeout": 0.05, "ignore_eos": True}
    with pytest.raises(openai.APIStatusError) as late:
        world.complete(max_tokens=4000, extra_body=extra)
    assert (late.value.status_code, late.value.code) == (504, "DEADLINE_PASSED")


def test_a_stream_that_ends_badly_says_so_in_its_last_event(world: World) -> None:
    extra = {"timeout": 3.0, "ignore_eos": True}  # For what nobody makes in that time.
    stream = world.stream(n=PLACES, max_tokens=4000, extra_body=extra)
    next(stream)
    with pytest.raises(openai.APIError, match="deadline") as ended:
        list(stream)
    assert ended.value.code == "DEADLINE_PASSED"


def test_overload_is_refused_with_a_time_after_which_a_retry_is_accepted(world: World) -> None:
    # What a test before this one left is over a step later.
    states = [f"preamble_scheduler_{state}_requests" for state in ("running", "waiting")]
    eventually(lambda: not any(map(world.server.metric, states)))
    held = world.stream(n=PLACES + QUEUE, **LONG)
    next(held)
    with pytest.raises(openai.RateLimitError) as full:
        world.complete(**GREEDY)
    assert full.value.code == "QUEUE_FULL"
    assert full.value.response.headers["retry-after"] == "1"
    assert full.value.response.headers["retry-after-ms"] == "1000"

    leaving = threading.Timer(0.3, held.close)
    leaving.start()
    patient = world.made(max_retries=15)
    answer = patient.completions.create(model=BASE, prompt=TEXT, **GREEDY)

    leaving.join()
    assert answer.choices[0].text == world.complete(**GREEDY).choices[0].text
    eventually(lambda: world.server.metric("preamble_scheduler_running_requests") == 0)
