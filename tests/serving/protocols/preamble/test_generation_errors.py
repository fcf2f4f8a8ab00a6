"""`preamble.v1.GenerationService`: scores of texts, and errors of calls.

Scores are compared with the reference loop; errors by what a program can branch on: the code, the
reason, the field, and the retry time.
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
from gpt.sampling_params import SamplingParams
from protos.preamble.v1 import generation_pb2 as pb
from serving.request import Ask
from tests.support.generation_service import (
    INPUTS,
    NUMBERS,
    QUEUED,
    RUNNING,
    TEXT,
    WAIT_S,
    GenerationServer,
    Sets,
    generation_server,
)
from tests.support.servers import ROOT, eventually, is_idle

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationServer]:
    with generation_server(tmp_path_factory.mktemp("wire")) as deployment:
        yield deployment


UINT32_MAX = 2**32 - 1  # The largest value of a uint32 field.
nan = math.nan
inf = math.inf


def sampling_fields(**fields: Any) -> Sets:
    return {"sampling": pb.Sampling(**fields)}


def decay_fields(factor: float) -> Sets:
    return sampling_fields(length_decay=pb.LengthDecay(start=1, factor=factor))


greedy = sampling_fields(temperature=0)


# ------------------------------------------------------------------------------------------- scores


def test_prompt_scores_equal_the_reference_loop(
    deployment: GenerationServer,
) -> None:
    ids = [5, 6, 7, 9, 11]
    model = gpt.load(deployment.checkpoint, dtype="float64")
    (plain,) = generate(model, [ids], SamplingParams(0, prompt_logprobs=1))
    assert plain.prompt_scores is not None
    scores = [token_score for token_score in plain.prompt_scores if token_score is not None]

    request = pb.ScoreRequest(token_ids=pb.TokenIds(ids=ids), logprobs=1)
    (score,) = deployment.stub.Score(request, timeout=WAIT_S).scores

    assert score.logprob == pytest.approx(
        sum(token_score.logprob for token_score in scores), abs=1e-9
    )
    assert [token.token_id for token in score.tokens] == ids
    assert [token.rank for token in score.tokens] == [
        0,
        *(token_score.rank for token_score in scores),
    ]
    assert not score.greedy


@pytest.mark.parametrize("adapter", ["", "sum", "late"])
def test_continuation_scores_equal_their_prompt_logprobs(
    deployment: GenerationServer, adapter: str
) -> None:
    prompt: Any = {"inputs": INPUTS} if adapter == "late" else {"text": TEXT}
    texts = [" the sum", "x", f"{TEXT} " * 6, "the lazy dog"]
    encode = deployment.oracle.tokenizer.encode

    request = pb.ScoreRequest(adapter=adapter, continuations=texts, **prompt)
    response = deployment.stub.Score(request, timeout=WAIT_S)

    plain = pb.GenerateRequest(
        adapter=adapter, max_new_tokens=0, details=pb.Details(prompt_logprobs=0), **prompt
    )
    usage_before = deployment.ask(plain)
    assert response.usage.prompt_tokens == usage_before.usage.prompt_tokens
    assert response.usage.virtual_tokens == usage_before.usage.virtual_tokens
    ask = Ask(
        NUMBERS if adapter == "late" else TEXT,
        adapters=(adapter,),
        continuations=tuple(texts),
        prompt_logprobs=0,
        max_new_tokens=0,
    )
    prompts = [
        request_answer.prompt for request_answer in deployment.oracle.admission.admit(ask).answers
    ]
    model = gpt.load(deployment.checkpoint, dtype="float64")
    for text, score, prompt_ids in zip(texts, response.scores, prompts, strict=True):
        ids = encode(text, continues_text=True)
        assert [token.token_id for token in score.tokens] == ids
        assert prompt_ids[-len(ids) :] == tuple(ids)
        table = None
        if adapter:
            table = open_adapter(deployment.adapters / f"{adapter}.safetensors").table
        rule = SamplingParams(0, prompt_logprobs=0)
        (reference,) = generate(model, [list(prompt_ids)], rule, adapter_table=table)
        assert reference.prompt_scores is not None
        continuation_scores = [
            token_score
            for token_score in reference.prompt_scores[-len(ids) :]
            if token_score is not None
        ]
        assert score.logprob == pytest.approx(
            sum(token_score.logprob for token_score in continuation_scores), abs=1e-9
        )
        assert score.greedy == all(token_score.rank == 1 for token_score in continuation_scores)
    assert response.usage.completion_tokens == sum(
        len(encode(t, continues_text=True)) for t in texts
    )


def test_the_likeliest_continuation_is_marked_greedy(
    deployment: GenerationServer,
) -> None:
    tokenizer = deployment.oracle.tokenizer
    for start in range(30, 90):  # Until a continuation's text tokenizes to the token itself.
        greedy = deployment.ask(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, start]), max_new_tokens=1)
        )
        if greedy.text and tokenizer.encode(greedy.text, continues_text=True) == list(
            greedy.token_ids
        ):
            break
    else:
        pytest.fail("no text to try")
    request = pb.ScoreRequest(
        token_ids=pb.TokenIds(ids=[5, start]), continuations=[greedy.text, "the quick brown"]
    )
    best, second = deployment.stub.Score(request, timeout=WAIT_S).scores
    assert (best.greedy, second.greedy) == (True, False)
    assert [token.rank for token in best.tokens] == [1]


# ------------------------------------------------------------------------------------- errors


class CallFailure(NamedTuple):
    """A failed call, with the google.rpc details by name."""

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
        assert [violation.description for violation in violations] == [self.text]
        return [violation.field for violation in violations]


def refusal(call: Callable[[], Any]) -> CallFailure:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    trailers = dict(error.trailing_metadata())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    details: dict[str, Any] = {}
    for detail in status.details:
        for kind in (ErrorInfo, BadRequest, RetryInfo):
            unpacked = kind()
            if detail.Unpack(unpacked):
                details[kind.DESCRIPTOR.name] = unpacked
    return CallFailure(error.code().name, error.details(), trailers, details)


INVALID: dict[str, tuple[Sets, str, str, str]] = {
    "both adapters": ({"adapter": "sum", "adapters": ["late"]}, "", "adapters", "both set"),
    "unknown adapter": ({"adapter": "none"}, "UNKNOWN_ADAPTER", "adapter", "'none'"),
    "temperature": (
        sampling_fields(temperature=-1),
        "",
        "sampling.temperature",
        "temperature is -1.0",
    ),
    "top_p": (sampling_fields(top_p=0), "", "sampling.top_p", "top_p is 0.0"),
    "penalty": (
        sampling_fields(repetition_penalty=0.001),
        "",
        "sampling.repetition_penalty",
        "is 0.001;",
    ),
    "bias": (sampling_fields(logit_bias={640: 1}), "", "sampling.logit_bias", "logit_bias has 640"),
    "bad words": (sampling_fields(bad_words=[""]), "", "sampling.bad_words", "0 bytes"),
    "stops": ({"stops": pb.Stops(strings=[""])}, "", "stops.strings", "0 bytes"),
    "logprobs": ({"details": pb.Details(logprobs=21)}, "", "details.logprobs", "from 0 to 20"),
    "beams": ({"beams": pb.Beams(width=1)}, "", "beams.width", "at least 2"),
    "wide beams": ({"beams": pb.Beams(width=17)}, "", "beams.width", "width is 17"),
    "beams that sample": ({"beams": pb.Beams(width=2)}, "", "sampling.temperature", "beams"),
    "a guide of no kind": ({"guide": pb.Guide()}, "", "guide", "guide is empty"),
    "a guide that is none": ({"guide": pb.Guide(regex="(")}, "", "guide.regex", "regex"),
    "answers": ({"answers": 65}, "", "answers", "at most 64"),
    "priority": ({"priority": 101}, "", "priority", "from -100 to 100"),
    "a class of the future": (
        {"service_class": 9},
        "",
        "service_class",
        "does not support; choose one of",
    ),
    "stopping of the future": (
        {"beams": pb.Beams.FromString(bytes([8, 2, 24, 7]))},
        *("", "beams.early_stopping", "does not support; choose one of"),
    ),
    "a cut of inputs": (
        {"adapter": "fox", "inputs": INPUTS, "truncate_prompt_tokens": 3},
        *("", "truncate_prompt_tokens", "truncate_prompt_tokens cannot be used"),
    ),
    "a long prompt": ({"text": "a " * 5000}, "PROMPT_TOO_LONG", "prompt", "shorten the prompt"),
    "long inputs": (
        {"adapter": "fox", "inputs": pb.Inputs(fields={"numbers": "a " * 5000})},
        *("PROMPT_TOO_LONG", "inputs", "shorten the text by"),
    ),
    "new tokens": ({"max_new_tokens": 0}, "", "max_new_tokens", "is 0"),
    "an empty text": ({"text": ""}, "", "text", "text is empty"),
    "a text of megabytes": ({"text": "a" * (2 << 20)}, "", "text", "text_bytes_max"),
    "no ids": ({"token_ids": pb.TokenIds()}, "", "token_ids", "token_ids is empty"),
    "an id too high": ({"token_ids": pb.TokenIds(ids=[5, 640])}, "", "token_ids", "has 640"),
    "the highest id": (
        {"token_ids": pb.TokenIds(ids=[UINT32_MAX])},
        "",
        "token_ids",
        "are 0 to 639",
    ),
    "a hot temperature": (sampling_fields(temperature=1e30), "", "sampling.temperature", "1e+30"),
    "temperature NaN": (sampling_fields(temperature=nan), "", "sampling.temperature", "is nan"),
    "temperature inf": (sampling_fields(temperature=inf), "", "sampling.temperature", "is inf"),
    "top_p NaN": (sampling_fields(top_p=nan), "", "sampling.top_p", "is nan"),
    "top_p over": (sampling_fields(top_p=1.5), "", "sampling.top_p", "in (0, 1]"),
    "typical_p NaN": (sampling_fields(typical_p=nan), "", "sampling.typical_p", "is nan"),
    "typical_p 0": (sampling_fields(typical_p=0), "", "sampling.typical_p", "in (0, 1]"),
    "min_p": (sampling_fields(min_p=2), "", "sampling.min_p", "from 0 (off) to 1"),
    "min_p NaN": (sampling_fields(min_p=nan), "", "sampling.min_p", "is nan"),
    "a huge penalty": (
        sampling_fields(repetition_penalty=1e9),
        "",
        "sampling.repetition_penalty",
        "to 10",
    ),
    "no penalty": (
        sampling_fields(repetition_penalty=0),
        "",
        "sampling.repetition_penalty",
        "is 0.0",
    ),
    "presence": (sampling_fields(presence_penalty=nan), "", "sampling.presence_penalty", "is nan"),
    "frequency": (
        sampling_fields(frequency_penalty=-3),
        "",
        "sampling.frequency_penalty",
        "from -2 to 2",
    ),
    "decay": (decay_fields(1e6), "", "sampling.length_decay", "a factor from 1 to 10"),
    "decay NaN": (decay_fields(nan), "", "sampling.length_decay", "nan"),
    "bias NaN": (sampling_fields(logit_bias={5: nan}), "", "sampling.logit_bias", "-100 to 100"),
    "bias 1e9": (sampling_fields(logit_bias={5: 1e9}), "", "sampling.logit_bias", "-100 to 100"),
    "allowed": (
        sampling_fields(allowed_token_ids=[640]),
        "",
        "sampling.allowed_token_ids",
        "has 640",
    ),
    "all allowed": (
        sampling_fields(allowed_token_ids=[5] * 5000),
        *("", "sampling.allowed_token_ids", "at most 4096"),
    ),
    "long bad words": (
        sampling_fields(bad_words=["a" * 300]),
        "",
        "sampling.bad_words",
        "300 bytes",
    ),
    "n-grams": (
        sampling_fields(no_repeat_ngram_size=UINT32_MAX),
        *("", "sampling.no_repeat_ngram_size", "from 0 (off) to 100"),
    ),
    "most answers": ({"answers": UINT32_MAX}, "", "answers", "at most 64"),
    "too many tasks": ({"adapters": ["sum"] * 65}, "", "adapters", "for each of 65 adapters"),
    "more answers than beams": (
        {"beams": pb.Beams(width=2), "answers": 3, **greedy},
        *("", "answers", "answers must be at most"),
    ),
    "min over max": ({"min_new_tokens": 13}, "", "min_new_tokens", "at most max_new_tokens, 12"),
    "most new tokens": ({"max_new_tokens": UINT32_MAX}, "", "max_new_tokens", "ask for at most"),
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
        {"details": pb.Details(prompt_logprobs=UINT32_MAX)},
        *("", "details.prompt_logprobs", "from 0 to 20"),
    ),
    "half a schema": (
        {"guide": pb.Guide(json_schema='{"type":')},
        *("", "guide.json_schema", "json_schema is invalid or unsupported"),
    ),
    "a deep schema": (
        {"guide": pb.Guide(json_schema='{"not":' * 5000 + "{}" + "}" * 5000)},
        *("", "guide.json_schema", "is invalid or unsupported"),
    ),
    "no choices": (
        {"guide": pb.Guide(choices=pb.Choices())},
        "",
        "guide.choices",
        "the list is empty",
    ),
    "a grammar of nothing": (
        {"guide": pb.Guide(grammar="start: nope")},
        *("", "guide.grammar", "unknown name"),
    ),
    "a large guide": ({"guide": pb.Guide(regex="a" * (1 << 20))}, "", "guide.regex", "bytes_max"),
    "a way out": ({"adapter": "../sum"}, "", "adapter", "not an adapter name"),
    "a path": ({"adapter": "/etc/passwd"}, "", "adapter", "not an adapter name"),
    "a NUL": ({"adapter": "su\0m"}, "", "adapter", "not an adapter name"),
    "a long name": ({"adapter": "a" * 10_000}, "", "adapter", "not an adapter name"),
    "no version": ({"adapter": "sum@0"}, "", "adapter", "not an adapter name"),
    "another version": ({"adapter": "sum@9"}, "UNKNOWN_ADAPTER", "adapter", "'sum@9'"),
    "inputs of nothing": ({"inputs": INPUTS}, "", "inputs", "the request names no adapter"),
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


@pytest.mark.parametrize("case", INVALID)
def test_invalid_requests_have_code_reason_and_field(
    deployment: GenerationServer, case: str
) -> None:
    fields, reason, field, message_words = INVALID[case]
    message = deployment.message(**fields)
    error = refusal(lambda: deployment.ask(message))
    streamed = refusal(lambda: deployment.pieces(message))
    assert (error.code, error.text) == (streamed.code, streamed.text)
    assert error.code == ("NOT_FOUND" if reason == "UNKNOWN_ADAPTER" else "INVALID_ARGUMENT")
    assert error.reason == (reason or "INVALID_FIELD")
    assert error.fields == [field]
    assert message_words in error.text
    assert "RetryInfo" not in error.details


def test_malformed_messages_are_refused(deployment: GenerationServer) -> None:
    """An empty message, malformed bytes, ids for text, and a message that is too large."""
    path = "/preamble.v1.GenerationService/"
    with grpc.insecure_channel(deployment.server.address) as channel:
        generate_: Any = channel.unary_unary(f"{path}Generate")
        tokenize: Any = channel.unary_unary(f"{path}Tokenize")
        detokenize: Any = channel.unary_unary(f"{path}Detokenize")
        for call, payload, reason, message_words in (
            (generate_, b"", "INVALID_FIELD", "prompt is not set"),
            (generate_, b"\xff\xff\xff", "UNREADABLE", "3 bytes sent are not a valid request"),
            (generate_, b"\x0a\x02\xc3\x28", "UNREADABLE", "not a valid request of Generate"),
            (tokenize, b"\x0a\x03\xed\xa0\x80", "UNREADABLE", "not a valid request of Tokenize"),
            (
                tokenize,
                pb.TokenizeRequest(text="a" * (2 << 20)).SerializeToString(),
                *("INVALID_FIELD", "text_bytes_max"),
            ),
            (
                detokenize,
                pb.DetokenizeRequest(token_ids=[5, UINT32_MAX]).SerializeToString(),
                *("INVALID_FIELD", "token_ids has 4294967295"),
            ),
        ):
            error = refusal(partial(call, payload, timeout=WAIT_S))
            assert (error.code, error.reason) == ("INVALID_ARGUMENT", reason)
            assert message_words in error.text
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
        # An unknown field of a newer client is skipped, and the connection continues.
        newer = deployment.message().SerializeToString() + b"\xca\x3e\x03abc"
        response = pb.GenerateResponse.FromString(generate_(newer, timeout=WAIT_S))
    assert response.token_ids == deployment.ask(deployment.message()).token_ids


def test_extreme_temperature_and_top_k(deployment: GenerationServer) -> None:
    response = deployment.ask(deployment.message(**sampling_fields(temperature=1e-30)))
    assert response.token_ids == deployment.ask(deployment.message(**greedy)).token_ids
    response = deployment.ask(deployment.message(**sampling_fields(top_k=UINT32_MAX)))
    assert response.token_ids == deployment.ask(deployment.message()).token_ids


def test_a_call_past_its_deadline_ends_and_holds_nothing(deployment: GenerationServer) -> None:
    # gRPC may deliver so short a timeout as a whole millisecond, so the server may have begun.
    # That an expired request is refused before it runs is tested at the engine.
    with pytest.raises(grpc.RpcError) as caught:
        deployment.stub.Generate(deployment.message(text="never heard of"), timeout=1e-6)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: deployment.server.metric("preamble_requests_in_flight") == 0)


SCORES: dict[str, tuple[Sets, str, str]] = {
    "alternatives": ({"logprobs": 21}, "logprobs", "logprobs is 21"),
    "an empty text": ({"continuations": ["a", ""]}, "continuations", "0 bytes"),
    "too many": ({"continuations": ["a"] * 65}, "answers", "at most 64"),
    "a class of the future": (
        {"service_class": 9},
        "service_class",
        "does not support; choose one of",
    ),
    "nothing": ({"text": ""}, "text", "empty"),
}


@pytest.mark.parametrize("case", SCORES)
def test_invalid_score_requests_name_the_field(deployment: GenerationServer, case: str) -> None:
    fields, field, message_words = SCORES[case]
    request = pb.ScoreRequest(**{"text": TEXT, **fields})
    error = refusal(lambda: deployment.stub.Score(request, timeout=WAIT_S))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert message_words in error.text


def test_full_queues_give_a_retry_time(deployment: GenerationServer) -> None:
    # As many answers as there are slots, for as long as this takes.
    long_request = deployment.message(
        answers=RUNNING + QUEUED, max_new_tokens=4000, stops=pb.Stops(ignore_model_ends=True)
    )
    streamed = pb.GenerateStreamRequest.FromString(long_request.SerializeToString())
    running_stream = deployment.stub.GenerateStream(streamed, timeout=WAIT_S)
    try:
        next(running_stream)
        error = refusal(lambda: deployment.ask(deployment.message()))
    finally:
        running_stream.cancel()
    eventually(lambda: is_idle(deployment.server))
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    retry_ms = error.details["RetryInfo"].retry_delay.ToMilliseconds()
    assert retry_ms > 0
    assert error.trailers["grpc-retry-pushback-ms"] == str(retry_ms)


def test_errors_with_long_names_are_truncated_to_the_metadata_limit(
    deployment: GenerationServer,
) -> None:
    for letter in "aé語":
        request = deployment.message(adapter="fox", inputs=pb.Inputs(fields={letter * 20_000: "x"}))
        error = refusal(partial(deployment.ask, request))
        assert error.code == "INVALID_ARGUMENT"
        assert 200 < len(error.text.encode()) < 1010


def test_failed_answers_do_not_affect_others(deployment: GenerationServer) -> None:
    (
        deployment.adapters / "doomed.safetensors"
    ).unlink()  # It is registered, and no rank has read it.
    message = deployment.message(adapters=["sum", "doomed", ""])

    response = deployment.ask(message)
    pieces = deployment.pieces(message)

    separate_tokens = [
        deployment.ask(deployment.message(adapter=name)).token_ids for name in ("sum", "")
    ]
    assert [list(response.completions[index].token_ids) for index in (0, 2)] == separate_tokens
    failed = response.completions[1]
    assert failed.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    assert failed.failure.reason == "ADAPTER_UNUSABLE" and "doomed" in failed.failure.message
    assert [completion.HasField("failure") for completion in response.completions] == [
        False,
        True,
        False,
    ]
    (failed_piece,) = [piece for piece in pieces if piece.index == 1]
    assert failed_piece.failure == failed.failure and failed_piece.HasField("usage")
    # If it is the only answer, the whole call fails.
    error = refusal(lambda: deployment.ask(deployment.message(adapter="doomed")))
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "ADAPTER_UNUSABLE")


# -------------------------------------------------------------------------------- the document

DOCUMENT = (ROOT / "docs" / "grpc.md").read_text("utf-8")
JOINED = re.sub(r"\\\n\s*", "", DOCUMENT)  # Continuation lines of the shell, joined.


def test_documented_programs_run(
    deployment: GenerationServer, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    for text in programs:
        exec(text.replace("localhost:9000", deployment.server.address), {})
        assert capsys.readouterr().out


def test_the_document_covers_every_method() -> None:
    pool = descriptor_pool.Default()
    examples = re.findall(r"^grpcurl -plaintext (.*?)\$P\.(\w+)/(\w+)$", JOINED, re.MULTILINE)
    called = {(service, method) for _, service, method in examples}
    for name in ("Generation", "Adapter", "Admin"):
        service = pool.FindServiceByName(f"preamble.v1.{name}Service")
        for method in service.methods:
            assert (service.name, method.name) in called or method.name == "UploadAdapter"
    for flags, service, method in examples:
        method_descriptor = pool.FindMethodByName(f"preamble.v1.{service}.{method}")
        json_argument = re.search(r"-d '(.*)'", flags)
        Parse(
            json_argument[1] if json_argument else "{}",
            GetMessageClass(method_descriptor.input_type)(),
        )


def test_the_example_runs(deployment: GenerationServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main(deployment.server.address) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "seed 1" in lines[0] and [line for line in lines if line.startswith("sum@1: ")]
    assert [line[:7] for line in lines[-3:]] == ["seed 0:", "seed 1:", "seed 2:"]
