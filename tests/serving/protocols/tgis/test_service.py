"""The TGIS service, by messages over real sockets.

The oracle is preamble.v1 on the same server, which tests/e2e/test_serving.py compares with
`gpt.generation.generate`: in fp64 the same request gets the same answer on every protocol.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpt.tokenizers.tokenizer import open_tokenizer
from serving.protocols.tgis.service import _token_offsets
from tests.support.servers import eventually, is_idle
from tests.support.tgis_calls import (
    REFUSED,
    TEXT,
    TgisServer,
    call_error,
    stop_reason_name,
    tgis_server,
    violated_fields,
)
from tests.support.trained_tokenizers import CORPUS, LINES

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


OTHER = "the quick brown fox"
CONTEXT = 4096
LONG = {"max_new_tokens": 3900, "min_new_tokens": 3900}  # No stop condition ends it early.


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TgisServer]:
    limits: dict[str, Any] = {"running_requests_max": 2, "queue_requests_max": 4}
    with tgis_server(tmp_path_factory.mktemp("tgis"), **limits) as deployment:
        yield deployment


# ------------------------------------------------------------------------------------------ answers


def test_batches_are_answered_in_order_as_by_preamble_v1(deployment: TgisServer) -> None:
    texts = [TEXT, OTHER, "one", "two"]
    responses = deployment.generate(*texts, stopping={"max_new_tokens": 12})

    for text, response in zip(texts, responses, strict=True):
        expected = deployment.generate_own(text, max_new_tokens=12)
        assert response.text == expected.text
        assert response.generated_token_count == expected.usage.completion_tokens
        assert response.input_token_count == expected.usage.prompt_tokens
        assert response.seed == 0, "nothing is drawn"
    assert len({response.text for response in responses}) == 4


def test_empty_batches_get_empty_responses(deployment: TgisServer) -> None:
    assert deployment.generate() == []


def test_missing_parameters_use_server_defaults(deployment: TgisServer) -> None:
    expected = deployment.generate_own()
    (response,) = deployment.generate(TEXT)
    assert response.text == expected.text
    assert response.generated_token_count == expected.usage.completion_tokens
    assert (stop_reason_name(response) == "MAX_TOKENS") == (response.generated_token_count == 128)


@pytest.mark.parametrize(
    ("params", "own_fields"),
    [
        (
            {"method": 1, "sampling": {"temperature": 0.7, "top_k": 9, "top_p": 0.5, "seed": 7}},
            {"sampling": {"temperature": 0.7, "top_k": 9, "top_p": 0.5, "seed": 7}},
        ),
        (
            {"method": 1, "sampling": {"typical_p": 0.3, "seed": 2**64 - 1}},
            {"sampling": {"temperature": 1, "typical_p": 0.3, "seed": 2**64 - 1}},
        ),
        ({"method": 1, "sampling": {"temperature": 0}}, {}),
        ({"sampling": {"temperature": 1.5, "top_k": 3, "seed": 3}}, {}),
        (
            {"decoding": {"repetition_penalty": 1.5}},
            {"sampling": {"repetition_penalty": 1.5}},
        ),
        (
            {"decoding": {"length_penalty": {"start_index": 2, "decay_factor": 3}}},
            {"sampling": {"length_decay": {"start": 2, "factor": 3}}},
        ),
        ({"truncate_input_tokens": 3}, {"truncate_prompt_tokens": 3}),
    ],
    ids=["drawn", "typical", "explicit 0", "greedy", "repetition", "decay", "truncated"],
)
def test_parameters_equal_those_of_preamble_v1(
    deployment: TgisServer, params: dict[str, Any], own_fields: dict[str, Any]
) -> None:
    expected = deployment.generate_own(**own_fields, max_new_tokens=24)
    (response,) = deployment.generate(TEXT, stopping={"max_new_tokens": 24}, **params)
    assert (response.text, response.generated_token_count) == (
        expected.text,
        expected.usage.completion_tokens,
    )
    assert response.input_token_count == expected.usage.prompt_tokens


def test_drawn_seeds_have_32_bits_and_are_returned(deployment: TgisServer) -> None:
    stopping = {"max_new_tokens": 16}
    first_response, second_response = deployment.generate(TEXT, TEXT, method=1, stopping=stopping)
    assert first_response.seed != second_response.seed
    assert 0 < first_response.seed < 2**32
    (repeated,) = deployment.generate(
        TEXT, method=1, sampling={"seed": first_response.seed}, stopping=stopping
    )
    assert repeated == first_response
    expected = deployment.generate_own(
        sampling={"temperature": 1, "seed": first_response.seed}, max_new_tokens=16
    )
    assert first_response.text == expected.text, "a temperature that was not said is 1"


def test_truncation_keeps_the_last_tokens(deployment: TgisServer) -> None:
    ids = deployment.tokenizer.encode(TEXT)
    expected = deployment.generate_own("", token_ids={"ids": ids[-3:]}, max_new_tokens=8)
    response_options = {"input_text": True, "input_tokens": True}
    params = {"truncate_input_tokens": 3, "stopping": {"max_new_tokens": 8}}

    (response,) = deployment.generate(TEXT, response=response_options, **params)

    truncated_text = deployment.tokenizer.decode(ids[-3:])
    assert response.text == truncated_text + expected.text
    assert response.input_token_count == 3
    assert [input_token.text for input_token in response.input_tokens] == [
        deployment.tokenizer.id_to_token(token_id) for token_id in ids[-3:]
    ]


@pytest.mark.parametrize("name", ["prefix_id", "adapter_id"])
def test_prefix_ids_name_adapters_whose_rows_are_not_counted(
    deployment: TgisServer, name: str
) -> None:
    expected = deployment.generate_own(adapter="sum", max_new_tokens=8)
    response_options = {"input_tokens": True, "token_logprobs": True}
    params = {"stopping": {"max_new_tokens": 8}, "response": response_options}
    (response,) = deployment.generate(TEXT, adapter={name: "sum"}, **params)
    assert response.text == expected.text != deployment.generate_own(max_new_tokens=8).text
    assert response.input_token_count == expected.usage.prompt_tokens == len(response.input_tokens)
    assert all(input_token.logprob < 0 for input_token in response.input_tokens), (
        "each follows the rows"
    )


# -------------------------------------------------------------------------------- stop reasons


def test_stop_sequences_are_included_by_default(deployment: TgisServer) -> None:
    full_text = deployment.generate_own(max_new_tokens=24).text
    stop_text = full_text[4:7]
    text_before = full_text[: full_text.index(stop_text)]
    stopping: dict[str, Any] = {"max_new_tokens": 24, "stop_sequences": ["no such", stop_text]}

    for defaults in ({}, {"include_stop_sequence": True}):
        (response,) = deployment.generate(TEXT, stopping={**stopping, **defaults})
        assert (response.text, response.stop_sequence) == (text_before + stop_text, stop_text)
        assert stop_reason_name(response) == "STOP_SEQUENCE"
    (response,) = deployment.generate(TEXT, stopping={**stopping, "include_stop_sequence": False})
    assert (response.text, response.stop_sequence) == (text_before, stop_text)


def test_eos_has_its_own_stop_reason(deployment: TgisServer) -> None:
    decoding = {"length_penalty": {"start_index": 0, "decay_factor": 10}}
    response_options = {"generated_tokens": True}
    (response,) = deployment.generate(OTHER, decoding=decoding, response=response_options)
    assert stop_reason_name(response) == "EOS_TOKEN"
    assert response.tokens[-1].text == "</s>"
    assert response.generated_token_count == len(response.tokens)
    assert not response.stop_sequence


def test_lengths_beyond_the_context_are_clipped_and_reported(deployment: TgisServer) -> None:
    text = "the quick " * 2500
    params: dict[str, Any] = {"truncate_input_tokens": CONTEXT - 5}
    stopping = {"max_new_tokens": 5, "min_new_tokens": 5}
    (within_context,) = deployment.generate(text, stopping=stopping, **params)
    assert (stop_reason_name(within_context), within_context.generated_token_count) == (
        "MAX_TOKENS",
        5,
    )
    (over_context,) = deployment.generate(
        text, stopping={**stopping, "max_new_tokens": 9}, **params
    )
    assert (
        stop_reason_name(over_context),
        over_context.generated_token_count,
        over_context.text,
    ) == (
        "TOKEN_LIMIT",
        5,
        within_context.text,
    )
    (without_maximum,) = deployment.generate(text, stopping={"min_new_tokens": 5}, **params)
    assert (stop_reason_name(without_maximum), without_maximum.text) == (
        "TOKEN_LIMIT",
        within_context.text,
    )

    error: Any = call_error(deployment.ask(text, truncate_input_tokens=CONTEXT))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "over the model's context of 4096 tokens; shorten" in error.details()
    limits = {"min_new_tokens": 6, "max_new_tokens": 6}
    error = call_error(deployment.ask(text, stopping=limits, **params))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == ["params.stopping.min_new_tokens"]


def test_time_limits_succeed_and_deadlines_fail(deployment: TgisServer) -> None:
    (response,) = deployment.generate(TEXT, stopping={**LONG, "time_limit_millis": 1500})
    assert stop_reason_name(response) == "TIME_LIMIT"
    assert 0 < response.generated_token_count < 3900
    assert response.text
    error: Any = call_error(partial(deployment.ask(TEXT, stopping=LONG), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: is_idle(deployment.server))


# ------------------------------------------------------------------------------------------ streams


def test_streams_have_input_then_tokens_then_stop_reason(
    deployment: TgisServer,
) -> None:
    response_options = {"input_text": True, "input_tokens": True, "generated_tokens": True}
    details = {"token_logprobs": True, "token_ranks": True, "top_n_tokens": 2}
    params: dict[str, Any] = {
        "method": 1,
        "sampling": {"seed": 5},
        "stopping": {"max_new_tokens": 20},
        "response": {**response_options, **details},
    }
    (unary_response,) = deployment.generate(TEXT, **params)

    input_message, *token_messages = deployment.stream(TEXT, **params)()

    assert (input_message.text, input_message.seed) == (TEXT, 5)
    assert (
        input_message.input_token_count
        == len(input_message.input_tokens)
        == unary_response.input_token_count
    )
    assert input_message.input_tokens == unary_response.input_tokens
    assert (
        input_message.generated_token_count,
        list(input_message.tokens),
        stop_reason_name(input_message),
    ) == (
        0,
        [],
        "NOT_FINISHED",
    )
    assert TEXT + "".join(message.text for message in token_messages) == unary_response.text
    assert [token for message in token_messages for token in message.tokens] == list(
        unary_response.tokens
    )
    counts = [message.generated_token_count for message in token_messages]
    assert counts == sorted(counts)
    assert counts[-1] == unary_response.generated_token_count
    assert {stop_reason_name(message) for message in token_messages[:-1]} <= {"NOT_FINISHED"}
    assert (
        stop_reason_name(token_messages[-1]) == stop_reason_name(unary_response) != "NOT_FINISHED"
    )
    assert not any(
        message.input_token_count or message.seed or message.input_tokens
        for message in token_messages
    )


def test_stream_messages_without_text_are_omitted(deployment: TgisServer) -> None:
    _, *token_messages = deployment.stream("今日は世界", stopping={"max_new_tokens": 60})()
    assert all(message.text for message in token_messages[:-1])


def test_token_details_equal_those_of_preamble_v1(deployment: TgisServer) -> None:
    details = {"logprobs": 3, "prompt_logprobs": 3}
    (expected,) = deployment.generate_own(max_new_tokens=8, details=details).completions
    response_options = {"generated_tokens": True, "input_tokens": True, "token_logprobs": True}
    params: dict[str, Any] = {"stopping": {"max_new_tokens": 8}}
    (response,) = deployment.generate(
        TEXT, response={**response_options, "top_n_tokens": 3}, **params
    )
    (ranked,) = deployment.generate(
        TEXT, response={"generated_tokens": True, "token_ranks": True}, **params
    )
    assert [token.rank for token in ranked.tokens] == [score.rank for score in expected.scores]
    assert not any(token.logprob or token.top_tokens for token in ranked.tokens)
    assert not ranked.input_tokens
    spelling = deployment.tokenizer.id_to_token
    for token_infos, scores in (
        (response.tokens, expected.scores),
        (response.input_tokens, expected.prompt_scores),
    ):
        assert [token_info.text for token_info in token_infos] == [
            spelling(score.token_id) for score in scores
        ]
        for token_info, score in zip(token_infos, scores, strict=True):
            assert token_info.logprob == pytest.approx(score.logprob)
            assert token_info.rank == 0, "it was not asked for"
            assert [top.text for top in token_info.top_tokens] == [
                spelling(top.token_id) for top in score.top_tokens
            ]
            assert [top.logprob for top in token_info.top_tokens] == pytest.approx(
                [top.logprob for top in score.top_tokens]
            )
    assert len(response.tokens[0].top_tokens) == 3
    assert not response.input_tokens[0].top_tokens, "the first follows nothing"


@pytest.mark.parametrize(
    ("decoding", "pattern"),
    [
        ({"choice": {"choices": ["red", "green"]}}, "red|green"),
        ({"regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"grammar": 'start: "a" "b"+'}, "ab+"),
        ({"json_schema": '{"type": "boolean"}'}, "true|false"),
        ({"format": "TEXT"}, ".*"),
    ],
)
def test_guided_decoding_follows_the_guide(
    deployment: TgisServer, decoding: dict[str, Any], pattern: str
) -> None:
    penalty = {"start_index": 12, "decay_factor": 10}
    (response,) = deployment.generate(TEXT, decoding={**decoding, "length_penalty": penalty})
    assert re.fullmatch(pattern, response.text, re.DOTALL)


def test_json_format_generates_an_object(deployment: TgisServer) -> None:
    (response,) = deployment.generate(
        TEXT, decoding={"format": "JSON"}, stopping={"max_new_tokens": 9}
    )
    assert response.text.lstrip().startswith("{")


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("field", "value", "sentence"), REFUSED)
def test_invalid_parameters_are_refused_with_their_field(
    deployment: TgisServer, field: str, value: Any, sentence: str
) -> None:
    params: dict[str, Any] = {}
    *path, leaf = field.split(".")
    subfields = params
    for name in path:
        subfields = subfields.setdefault(name, {})
    subfields[leaf] = value
    for send in (deployment.ask(TEXT, **params), deployment.stream(TEXT, **params)):
        error: Any = call_error(send)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in error.details()
        assert violated_fields(error) == [f"params.{field}"]


def test_inconsistent_parameters_are_refused(deployment: TgisServer) -> None:
    for send, field in (
        (deployment.ask(TEXT, response={"token_logprobs": True}), "params.response"),
        (deployment.ask(TEXT, adapter={"prefix_id": "nobody"}), "adapter_id"),
        (deployment.ask(TEXT, adapter={"adapter_id": "../etc"}), "adapter_id"),
        (deployment.ask(TEXT, adapter={"prefix_id": "a", "adapter_id": "sum"}), "adapter_id"),
        (deployment.ask(TEXT, adapter={"prefix_id": "/etc/passwd"}), "adapter_id"),
        (deployment.ask(TEXT, adapter={"prefix_id": "su\0m"}), "adapter_id"),
        (deployment.ask(TEXT, adapter={"prefix_id": "a" * 10_000}), "adapter_id"),
        (deployment.ask(TEXT, adapter={"prefix_id": "sum@9"}), "adapter_id"),
        (deployment.ask(""), "requests[0].text"),
        (deployment.ask("one " * 5000), "requests[0].text"),
        (deployment.ask("one", "a" * (2 << 20)), "requests[1].text"),
        (deployment.ask("one", "one " * 5000), "requests[1].text"),
        (deployment.stream("a" * (2 << 20)), "request.text"),
        (deployment.stream("one " * 5000), "request.text"),
        (deployment.tokenize(TEXT, adapter_id="nobody"), "adapter_id"),
        (deployment.ask(*["one"] * 5), "requests"),
        (deployment.tokenize("a" * 600_000, "a" * 600_000), "requests"),
        (deployment.stream(""), "request.text"),
    ):
        error: Any = call_error(send)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        assert violated_fields(error) == [field]


def test_long_names_leave_room_for_the_advice(deployment: TgisServer) -> None:
    names = {"prefix_id": "a" * 100_000, "adapter_id": "b" * 100_000}
    error: Any = call_error(deployment.ask(TEXT, adapter=names))
    assert error.details().endswith("both fields mean the adapter: set only one of them")


def test_a_guide_that_no_text_matches_is_refused_in_plain_words(deployment: TgisServer) -> None:
    error: Any = call_error(deployment.stream(decoding={"regex": r"[^\s\S]"}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the guide allows none of this model's tokens next" in error.details()


def test_one_invalid_prompt_refuses_its_batch(deployment: TgisServer) -> None:
    error: Any = call_error(deployment.ask("unheard of", "one", ""))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == ["requests[2].text"]
    assert error.details().startswith("requests[2]: text is empty")
    eventually(lambda: is_idle(deployment.server))


def test_overload_is_refused_and_queued_requests_time_out(deployment: TgisServer) -> None:
    eventually(lambda: is_idle(deployment.server))
    label = (("x-correlation-id", "the same"),)  # Equal ids do not join two calls.
    running = [deployment.stream("one", stopping=LONG)(metadata=label) for _ in range(2)]
    for stream in running:
        assert stop_reason_name(next(stream)) == "NOT_FINISHED"

    (waited,) = deployment.generate("two", stopping={**LONG, "time_limit_millis": 100})
    assert (stop_reason_name(waited), waited.generated_token_count, waited.text) == (
        "TIME_LIMIT",
        0,
        "",
    )
    assert waited.input_token_count
    eventually(lambda: deployment.server.metric("preamble_scheduler_waiting_requests") == 0)

    waiting = [deployment.stream("three", stopping=LONG)() for _ in range(4)]
    eventually(lambda: deployment.server.metric("preamble_scheduler_waiting_requests") == 4)
    error: Any = call_error(deployment.ask("four"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "try again later" in error.details()
    assert ("grpc-retry-pushback-ms", "1000") in [
        tuple(metadatum) for metadatum in error.trailing_metadata()
    ]

    for stream in (*running, *waiting):
        stream.cancel()
    eventually(lambda: is_idle(deployment.server))
    assert deployment.server.metric("preamble_kv_blocks_held") == 0
    cancelled_requests = (
        'preamble_requests_total{code="CANCELLED",method="GenerateStream",wire="tgis"}'
    )
    eventually(lambda: deployment.server.metric(cancelled_requests) == 6)


# ------------------------------------------------------------------------------- tokenization


def test_tokenize_returns_the_models_tokens(deployment: TgisServer) -> None:
    texts = [TEXT, "Größe 今日は", ""]
    tokenize_options = {"return_tokens": True, "return_offsets": True}
    responses = deployment.tokenize(*texts, **tokenize_options)().responses
    for text, response in zip(texts, responses, strict=True):
        ids = deployment.tokenizer.encode(text)
        assert response.token_count == len(ids) == len(response.offsets)
        assert list(response.tokens) == list(map(deployment.tokenizer.id_to_token, ids))
        assert all(offset.start <= offset.end <= len(text) for offset in response.offsets)
    spans = [TEXT[offset.start : offset.end] for offset in responses[0].offsets]
    assert "".join(spans) == TEXT
    assert [token.replace("▁", " ").strip() for token in responses[0].tokens] == [
        span.strip() for span in spans
    ]

    truncated = deployment.tokenize(
        *texts, truncate_input_tokens=2, prefix_id="sum", **tokenize_options
    )().responses
    for response, untruncated in zip(truncated, responses, strict=True):
        assert response.token_count == min(2, untruncated.token_count)
        assert list(response.tokens) == list(untruncated.tokens[-2:])
        assert list(response.offsets) == list(untruncated.offsets[-2:])
    (bare,) = deployment.tokenize(TEXT)().responses
    assert (bare.token_count, list(bare.tokens), list(bare.offsets)) == (
        responses[0].token_count,
        [],
        [],
    )


def test_offsets_equal_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.train_from_iterator(
        CORPUS,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    for text in (*LINES, " two  spaces\n", "🦊 fox"):
        expected = library.encode(text)
        assert _token_offsets(expected.ids, text, tokenizer) == expected.offsets
        assert [tokenizer.id_to_token(token_id) for token_id in expected.ids] == expected.tokens


def test_model_info(deployment: TgisServer) -> None:
    info = deployment.call("ModelInfo", "ModelInfoRequest", "ModelInfoResponse", model_id="any")()
    assert (info.model_kind, info.max_sequence_length, info.max_new_tokens) == (0, 4096, 4095)
