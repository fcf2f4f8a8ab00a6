"""`preamble.v1.GenerationService`: what texts are worth, and how calls end badly.

Scores are held against the plain loop; a bad end against what a program can branch on: the code,
the reason, the field, and when to come again.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.json_format import Parse
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

import gpt
from examples.grpc import ask
from gpt.adapters.adapter_file import open_adapter
from gpt.generation.generate import generate
from gpt.sampling_params import Sampling
from protos.preamble.v1 import generation_pb2 as pb
from serving.request import Ask
from tests.support.generation_service import (
    INPUTS,
    NUMBERS,
    QUEUED,
    RUNNING,
    TEXT,
    WAIT_S,
    Sets,
    World,
    wired,
)
from tests.support.servers import ROOT, eventually

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with wired(tmp_path_factory.mktemp("wire")) as world:
        yield world


MOST = 2**32 - 1  # That a number of a message can be.
nan, inf = math.nan, math.inf


def sampled(**fields: Any) -> Sets:
    return {"sampling": pb.Sampling(**fields)}


def decaying(factor: float) -> Sets:
    return sampled(length_decay=pb.LengthDecay(start=1, factor=factor))


greedy = sampled(temperature=0)


# ------------------------------------------------------------------------------------------- scores


def test_a_prompts_score_is_the_sum_of_its_tokens_by_the_plain_loop(world: World) -> None:
    ids = [5, 6, 7, 9, 11]
    model = gpt.load(world.checkpoint, dtype="float64")
    (plain,) = generate(model, [ids], Sampling(0, prompt_logprobs=1))
    assert plain.prompt_scores is not None
    known = [one for one in plain.prompt_scores if one is not None]

    request = pb.ScoreRequest(token_ids=pb.TokenIds(ids=ids), logprobs=1)
    (score,) = world.stub.Score(request, timeout=WAIT_S).scores

    assert score.logprob == pytest.approx(sum(one.logprob for one in known), abs=1e-9)
    assert [token.token_id for token in score.tokens] == ids
    assert [token.rank for token in score.tokens] == [0, *(one.rank for one in known)]
    assert not score.greedy


@pytest.mark.parametrize("adapter", ["", "sum", "late"])
def test_continuations_are_worth_what_they_are_worth_in_a_prompt(
    world: World, adapter: str
) -> None:
    prompt: Any = {"inputs": INPUTS} if adapter == "late" else {"text": TEXT}
    texts = [" the sum", "x", f"{TEXT} " * 6, "the lazy dog"]
    encode = world.oracle.tokenizer.encode

    request = pb.ScoreRequest(adapter=adapter, continuations=texts, **prompt)
    answer = world.stub.Score(request, timeout=WAIT_S)

    plain = pb.GenerateRequest(
        adapter=adapter, max_new_tokens=0, details=pb.Details(prompt_logprobs=0), **prompt
    )
    before = world.ask(plain)
    assert answer.usage.prompt_tokens == before.usage.prompt_tokens
    assert answer.usage.virtual_tokens == before.usage.virtual_tokens
    asked = Ask(
        NUMBERS if adapter == "late" else TEXT,
        adapters=(adapter,),
        continuations=tuple(texts),
        prompt_logprobs=0,
        max_new_tokens=0,
    )
    prompts = [one.prompt for one in world.oracle.admission.admit(asked).answers]
    model = gpt.load(world.checkpoint, dtype="float64")
    for text, score, whole in zip(texts, answer.scores, prompts, strict=True):
        ids = encode(text, started=True)
        assert [token.token_id for token in score.tokens] == ids
        assert whole[-len(ids) :] == tuple(ids)
        table = None
        if adapter:
            table = open_adapter(world.adapters / f"{adapter}.safetensors").table
        rule = Sampling(0, prompt_logprobs=0)
        (alone,) = generate(model, [list(whole)], rule, table=table)
        assert alone.prompt_scores is not None
        tail = [one for one in alone.prompt_scores[-len(ids) :] if one is not None]
        assert score.logprob == pytest.approx(sum(one.logprob for one in tail), abs=1e-9)
        assert score.greedy == all(one.rank == 1 for one in tail)
    assert answer.usage.completion_tokens == sum(len(encode(t, started=True)) for t in texts)


def test_the_likeliest_continuation_is_greedy_though_no_alternatives_are_told(
    world: World,
) -> None:
    tokenizer = world.oracle.tokenizer
    for start in range(30, 90):  # Until a choice is a text that is read as the token it was.
        greedy = world.ask(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, start]), max_new_tokens=1)
        )
        if greedy.text and tokenizer.encode(greedy.text, started=True) == list(greedy.token_ids):
            break
    else:
        pytest.fail("no text to try")
    request = pb.ScoreRequest(
        token_ids=pb.TokenIds(ids=[5, start]), continuations=[greedy.text, "the quick brown"]
    )
    best, other = world.stub.Score(request, timeout=WAIT_S).scores
    assert (best.greedy, other.greedy) == (True, False)
    assert [token.rank for token in best.tokens] == [1]


# ----------------------------------------------------------------------------------------- bad ends


class Refusal(NamedTuple):
    """How a call ended badly, with the details of google.rpc by their names."""

    code: str
    text: str
    trailers: dict[str, Any]
    details: dict[str, Any]

    @property
    def reason(self) -> str:
        assert self.details["ErrorInfo"].domain == "preamble"
        return str(self.details["ErrorInfo"].reason)

    @property
    def fields(self) -> list[str]:
        violations = self.details["BadRequest"].field_violations
        assert [one.description for one in violations] == [self.text]
        return [one.field for one in violations]


def refusal(call: Callable[[], Any]) -> Refusal:
    with pytest.raises(grpc.RpcError) as ended:
        call()
    error: Any = ended.value
    trailers = dict(error.trailing_metadata())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    details: dict[str, Any] = {}
    for detail in status.details:
        for kind in (ErrorInfo, BadRequest, RetryInfo):
            one = kind()
            if detail.Unpack(one):
                details[kind.DESCRIPTOR.name] = one
    return Refusal(error.code().name, error.details(), trailers, details)


BAD: dict[str, tuple[Sets, str, str, str]] = {
    "both adapters": ({"adapter": "sum", "adapters": ["late"]}, "", "adapters", "both set"),
    "unknown adapter": ({"adapter": "none"}, "UNKNOWN_ADAPTER", "adapter", "'none'"),
    "temperature": (sampled(temperature=-1), "", "sampling.temperature", "temperature is -1.0"),
    "top_p": (sampled(top_p=0), "", "sampling.top_p", "top_p is 0.0"),
    "penalty": (sampled(repetition_penalty=0.001), "", "sampling.repetition_penalty", "is 0.001;"),
    "bias": (sampled(logit_bias={640: 1}), "", "sampling.logit_bias", "logit_bias has 640"),
    "bad words": (sampled(bad_words=[""]), "", "sampling.bad_words", "0 bytes"),
    "stops": ({"stops": pb.Stops(strings=[""])}, "", "stops.strings", "0 bytes"),
    "logprobs": ({"details": pb.Details(logprobs=21)}, "", "details.logprobs", "from 0 to 20"),
    "beams": ({"beams": pb.Beams(width=1)}, "", "beams.width", "at least 2"),
    "wide beams": ({"beams": pb.Beams(width=17)}, "", "beams.width", "width is 17"),
    "beams that sample": ({"beams": pb.Beams(width=2)}, "", "sampling.temperature", "beams"),
    "a guide of no kind": ({"guide": pb.Guide()}, "", "guide", "says nothing"),
    "a guide that is none": ({"guide": pb.Guide(regex="(")}, "", "guide.regex", "regex"),
    "answers": ({"answers": 65}, "", "answers", "at most 64"),
    "priority": ({"priority": 101}, "", "priority", "from -100 to 100"),
    "a class of the future": ({"service_class": 9}, "", "service_class", "does not know"),
    "stopping of the future": (
        {"beams": pb.Beams.FromString(bytes([8, 2, 24, 7]))},
        *("", "beams.early_stopping", "does not know"),
    ),
    "a cut of inputs": (
        {"adapter": "fox", "inputs": INPUTS, "truncate_prompt_tokens": 3},
        *("", "truncate_prompt_tokens", "truncate_prompt_tokens does not go"),
    ),
    "a long prompt": ({"text": "a " * 5000}, "PROMPT_TOO_LONG", "prompt", "shorten the prompt"),
    "long inputs": (
        {"adapter": "fox", "inputs": pb.Inputs(fields={"numbers": "a " * 5000})},
        *("PROMPT_TOO_LONG", "inputs", "shorten it by"),
    ),
    "new tokens": ({"max_new_tokens": 0}, "", "max_new_tokens", "is 0"),
    "an empty text": ({"text": ""}, "", "text", "text is empty"),
    "a text of megabytes": ({"text": "a" * (2 << 20)}, "", "text", "text_bytes_max"),
    "no ids": ({"token_ids": pb.TokenIds()}, "", "token_ids", "token_ids is empty"),
    "an id too high": ({"token_ids": pb.TokenIds(ids=[5, 640])}, "", "token_ids", "has 640"),
    "the highest id": ({"token_ids": pb.TokenIds(ids=[MOST])}, "", "token_ids", "from 0 to 639"),
    "a hot temperature": (sampled(temperature=1e30), "", "sampling.temperature", "1e+30"),
    "temperature NaN": (sampled(temperature=nan), "", "sampling.temperature", "is nan"),
    "temperature inf": (sampled(temperature=inf), "", "sampling.temperature", "is inf"),
    "top_p NaN": (sampled(top_p=nan), "", "sampling.top_p", "is nan"),
    "top_p over": (sampled(top_p=1.5), "", "sampling.top_p", "in (0, 1]"),
    "typical_p NaN": (sampled(typical_p=nan), "", "sampling.typical_p", "is nan"),
    "typical_p 0": (sampled(typical_p=0), "", "sampling.typical_p", "in (0, 1]"),
    "min_p": (sampled(min_p=2), "", "sampling.min_p", "from 0 (off) to 1"),
    "min_p NaN": (sampled(min_p=nan), "", "sampling.min_p", "is nan"),
    "a huge penalty": (sampled(repetition_penalty=1e9), "", "sampling.repetition_penalty", "to 10"),
    "no penalty": (sampled(repetition_penalty=0), "", "sampling.repetition_penalty", "is 0.0"),
    "presence": (sampled(presence_penalty=nan), "", "sampling.presence_penalty", "is nan"),
    "frequency": (sampled(frequency_penalty=-3), "", "sampling.frequency_penalty", "from -2 to 2"),
    "decay": (decaying(1e6), "", "sampling.length_decay", "a factor from 1 to 10"),
    "decay NaN": (decaying(nan), "", "sampling.length_decay", "nan"),
    "bias NaN": (sampled(logit_bias={5: nan}), "", "sampling.logit_bias", "-100 to 100"),
    "bias 1e9": (sampled(logit_bias={5: 1e9}), "", "sampling.logit_bias", "-100 to 100"),
    "allowed": (sampled(allowed_token_ids=[640]), "", "sampling.allowed_token_ids", "has 640"),
    "all allowed": (
        sampled(allowed_token_ids=[5] * 5000),
        *("", "sampling.allowed_token_ids", "at most 4096"),
    ),
    "long bad words": (sampled(bad_words=["a" * 300]), "", "sampling.bad_words", "300 bytes"),
    "n-grams": (
        sampled(no_repeat_ngram_size=MOST),
        *("", "sampling.no_repeat_ngram_size", "from 0 (off) to 100"),
    ),
    "most answers": ({"answers": MOST}, "", "answers", "at most 64"),
    "too many tasks": ({"adapters": ["sum"] * 65}, "", "adapters", "65 adapters x 1 answers"),
    "more answers than beams": (
        {"beams": pb.Beams(width=2), "answers": 3, **greedy},
        *("", "answers", "at most as many"),
    ),
    "min over max": ({"min_new_tokens": 13}, "", "min_new_tokens", "at most max_new_tokens, 12"),
    "most new tokens": ({"max_new_tokens": MOST}, "", "max_new_tokens", "ask for at most"),
    "thousands of stops": ({"stops": pb.Stops(strings=["a"] * 9999)}, "", "stops.strings", "16"),
    "a stop of a megabyte": (
        {"stops": pb.Stops(strings=["a" * (1 << 20)])},
        *("", "stops.strings", "1048576 bytes"),
    ),
    "a stop that is no id": (
        {"stops": pb.Stops(token_ids=[640])},
        *("", "stops.token_ids", "has 640"),
    ),
    "prompt's alternatives": (
        {"details": pb.Details(prompt_logprobs=MOST)},
        *("", "details.prompt_logprobs", "from 0 to 20"),
    ),
    "half a schema": (
        {"guide": pb.Guide(json_schema='{"type":')},
        *("", "guide.json_schema", "json_schema cannot be followed"),
    ),
    "a deep schema": (
        {"guide": pb.Guide(json_schema='{"not":' * 5000 + "{}" + "}" * 5000)},
        *("", "guide.json_schema", "cannot be followed"),
    ),
    "no choices": ({"guide": pb.Guide(choices=pb.Choices())}, "", "guide.choices", "no text in"),
    "a grammar of nothing": (
        {"guide": pb.Guide(grammar="start: nope")},
        *("", "guide.grammar", "unknown name"),
    ),
    "a large guide": ({"guide": pb.Guide(regex="a" * (1 << 20))}, "", "guide.regex", "bytes_max"),
    "a way out": ({"adapter": "../sum"}, "", "adapter", "no adapter's name"),
    "a path": ({"adapter": "/etc/passwd"}, "", "adapter", "no adapter's name"),
    "a NUL": ({"adapter": "su\0m"}, "", "adapter", "no adapter's name"),
    "a long name": ({"adapter": "a" * 10_000}, "", "adapter", "no adapter's name"),
    "no version": ({"adapter": "sum@0"}, "", "adapter", "no adapter's name"),
    "another version": ({"adapter": "sum@9"}, "UNKNOWN_ADAPTER", "adapter", "'sum@9'"),
    "inputs of nothing": ({"inputs": INPUTS}, "", "inputs", "no adapter is named"),
    "inputs without a template": ({"adapter": "sum", "inputs": INPUTS}, "", "inputs", "template"),
    "an unknown input": (
        {"adapter": "fox", "inputs": pb.Inputs(fields={"number": "1"})},
        *("", "inputs.number", "did you mean 'numbers'"),
    ),
    "a missing input": (
        {"adapter": "fox", "inputs": pb.Inputs()},
        *("", "inputs.numbers", "is missing"),
    ),
    "inputs too long": (
        {"adapter": "fox", "inputs": pb.Inputs(fields={"numbers": "one " * 5000})},
        *("PROMPT_TOO_LONG", "inputs", "over the limit"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused_says_the_code_the_reason_and_the_field(world: World, case: str) -> None:
    fields, reason, field, words = BAD[case]
    message = world.message(**fields)
    refused, streamed = refusal(lambda: world.ask(message)), refusal(lambda: world.pieces(message))
    assert (refused.code, refused.text) == (streamed.code, streamed.text)
    assert refused.code == ("NOT_FOUND" if reason == "UNKNOWN_ADAPTER" else "INVALID_ARGUMENT")
    assert refused.reason == (reason or "INVALID_FIELD")
    assert refused.fields == [field]
    assert words in refused.text
    assert "RetryInfo" not in refused.details


def test_what_no_stub_would_send_is_answered_too(world: World) -> None:
    """A message of nothing, bytes that are none, ids for text, and one that is too large."""
    path = "/preamble.v1.GenerationService/"
    with grpc.insecure_channel(world.server.address) as channel:
        generate_: Any = channel.unary_unary(f"{path}Generate")
        tokenize: Any = channel.unary_unary(f"{path}Tokenize")
        detokenize: Any = channel.unary_unary(f"{path}Detokenize")
        for call, sent, reason, words in (
            (generate_, b"", "INVALID_FIELD", "prompt is not set"),
            (generate_, b"\xff\xff\xff", "UNREADABLE", "3 bytes sent are no request of Generate"),
            (generate_, b"\x0a\x02\xc3\x28", "UNREADABLE", "no request of Generate"),
            (tokenize, b"\x0a\x03\xed\xa0\x80", "UNREADABLE", "no request of Tokenize"),
            (
                tokenize,
                pb.TokenizeRequest(text="a" * (2 << 20)).SerializeToString(),
                *("INVALID_FIELD", "text_bytes_max"),
            ),
            (
                detokenize,
                pb.DetokenizeRequest(token_ids=[5, MOST]).SerializeToString(),
                *("INVALID_FIELD", "token_ids has 4294967295"),
            ),
        ):
            refused = refusal(partial(call, sent, timeout=WAIT_S))
            assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", reason)
            assert words in refused.text
        with pytest.raises(grpc.RpcError) as large:
            generate_(bytes(64 << 20), timeout=WAIT_S)
        assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for metadata in (
            (("x-a", "a" * 30_000),),
            (("authorization", "Bearer " + "a" * (1 << 20)),),
        ):
            with pytest.raises(grpc.RpcError) as large:
                generate_(b"", timeout=WAIT_S, metadata=metadata)
            assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # A field that only a newer client knows is passed over, and the connection lives.
        newer = world.message().SerializeToString() + b"\xca\x3e\x03abc"
        told = pb.GenerateResponse.FromString(generate_(newer, timeout=WAIT_S))
    assert told.token_ids == world.ask(world.message()).token_ids


def test_a_tiny_temperature_is_greedy_and_a_huge_top_k_is_none(world: World) -> None:
    told = world.ask(world.message(**sampled(temperature=1e-30)))
    assert told.token_ids == world.ask(world.message(**greedy)).token_ids
    told = world.ask(world.message(**sampled(top_k=MOST)))
    assert told.token_ids == world.ask(world.message()).token_ids


def test_a_deadline_that_has_passed_is_told_before_anything_runs(world: World) -> None:
    eventually(lambda: world.server.metric("preamble_requests_in_flight") == 0)
    before = world.server.metric("preamble_engine_prompt_tokens_total")
    with pytest.raises(grpc.RpcError) as late:
        world.stub.Generate(world.message(text="never heard of"), timeout=1e-6)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert world.server.metric("preamble_engine_prompt_tokens_total") == before


SCORES: dict[str, tuple[Sets, str, str]] = {
    "alternatives": ({"logprobs": 21}, "logprobs", "logprobs is 21"),
    "an empty text": ({"continuations": ["a", ""]}, "continuations", "0 bytes"),
    "too many": ({"continuations": ["a"] * 65}, "answers", "at most 64"),
    "a class of the future": ({"service_class": 9}, "service_class", "does not know"),
    "nothing": ({"text": ""}, "text", "empty"),
}


@pytest.mark.parametrize("case", SCORES)
def test_a_score_that_cannot_be_is_refused_by_its_fields(world: World, case: str) -> None:
    fields, field, words = SCORES[case]
    request = pb.ScoreRequest(**{"text": TEXT, **fields})
    refused = refusal(lambda: world.stub.Score(request, timeout=WAIT_S))
    assert (refused.code, refused.fields) == ("INVALID_ARGUMENT", [field])
    assert words in refused.text


def test_a_full_queue_says_when_to_come_again(world: World) -> None:
    # As many answers as there are places, for as long as this takes.
    long = world.message(
        answers=RUNNING + QUEUED, max_new_tokens=4000, stops=pb.Stops(ignore_model_ends=True)
    )
    streamed = pb.GenerateStreamRequest.FromString(long.SerializeToString())
    holding = world.stub.GenerateStream(streamed, timeout=WAIT_S)
    try:
        next(holding)
        refused = refusal(lambda: world.ask(world.message()))
    finally:
        holding.cancel()
    kept = ("requests_in_flight", "scheduler_running_requests", "scheduler_waiting_requests")
    eventually(lambda: not any(world.server.metric(f"preamble_{name}") for name in kept))
    assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    said_ms = refused.details["RetryInfo"].retry_delay.ToMilliseconds()
    assert said_ms > 0
    assert refused.trailers["grpc-retry-pushback-ms"] == str(said_ms)


def test_what_is_said_of_a_long_name_is_cut_before_it_is_too_much_metadata(world: World) -> None:
    for letter in "aé語":
        request = world.message(adapter="fox", inputs=pb.Inputs(fields={letter * 20_000: "x"}))
        refused = refusal(partial(world.ask, request))
        assert refused.code == "INVALID_ARGUMENT"
        assert 200 < len(refused.text.encode()) < 1010


def test_one_answer_can_fail_while_others_go_on(world: World) -> None:
    (world.adapters / "doomed.safetensors").unlink()  # It is known, and was never read for a rank.
    message = world.message(adapters=["sum", "doomed", ""])

    answer, pieces = world.ask(message), world.pieces(message)

    alone = [world.ask(world.message(adapter=name)).token_ids for name in ("sum", "")]
    assert [list(answer.completions[place].token_ids) for place in (0, 2)] == alone
    failed = answer.completions[1]
    assert failed.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert failed.failure.reason == "ADAPTER_UNUSABLE" and "doomed" in failed.failure.message
    assert [one.HasField("failure") for one in answer.completions] == [False, True, False]
    (last,) = [piece for piece in pieces if piece.index == 1]
    assert last.failure == failed.failure and last.HasField("usage")
    # Of one that is asked for alone, it is the call's.
    refused = refusal(lambda: world.ask(world.message(adapter="doomed")))
    assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "ADAPTER_UNUSABLE")


# ---------------------------------------------------------------------------- what is written of it

DOCUMENT = (ROOT / "docs" / "grpc.md").read_text("utf-8")
JOINED = re.sub(r"\\\n\s*", "", DOCUMENT)  # Lines that the shell would join.


def test_the_programs_in_the_document_run(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    for text in programs:
        exec(text.replace("localhost:9000", world.server.address), {})
        assert capsys.readouterr().out


def test_the_document_calls_every_method_and_says_what_each_takes() -> None:
    pool = descriptor_pool.Default()
    shown = re.findall(r"^grpcurl -plaintext (.*?)\$P\.(\w+)/(\w+)$", JOINED, re.MULTILINE)
    called = {(service, method) for _, service, method in shown}
    for name in ("Generation", "Adapter", "Admin"):
        service = pool.FindServiceByName(f"preamble.v1.{name}Service")
        for method in service.methods:
            assert (service.name, method.name) in called or method.name == "UploadAdapter"
    for words, service, method in shown:
        found = pool.FindMethodByName(f"preamble.v1.{service}.{method}")
        data = re.search(r"-d '(.*)'", words)
        Parse(data[1] if data else "{}", GetMessageClass(found.input_type)())


def test_the_example_runs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main(world.server.address) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed 1" in lines[0] and [line for line in lines if line.startswith("sum@1: ")]
    assert [line[:7] for line in lines[-3:]] == ["seed 0:", "seed 1:", "seed 2:"]
