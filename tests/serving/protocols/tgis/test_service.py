"""TGIS's wire, by messages over real sockets; and by the stubs that its own clients have.

The oracle is the server's own wire, which tests/e2e/test_serving.py holds against
`gpt.generation.generate`: in fp64 the same ask has the same answer, whatever it came by.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpt.tokenizers.tokenizer import open_tokenizer
from serving.protocols.tgis.service import _offsets
from tests.support.servers import ROOT, WAIT_S, eventually, serving, write_adapter, write_checkpoint
from tests.support.tgis_calls import REFUSED, TEXT, World, fields, refusal, said
from tests.support.trained_tokenizers import CORPUS, LINES

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


OTHER = "the quick brown fox"
CONTEXT = 4096
LONG = {"max_new_tokens": 3900, "min_new_tokens": 3900}  # Nothing ends it early.
STUBS = ROOT / "build" / "tgis"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tgis")
    checkpoint = write_checkpoint(folder)
    adapters = folder / "adapters"
    adapters.mkdir()
    rows = open_tokenizer(checkpoint / "tokenizer").encode("what is the sum of")
    write_adapter(adapters / "sum.safetensors", checkpoint, rows)
    limits: dict[str, Any] = {"running_requests_max": 2, "queue_requests_max": 4}
    with (
        serving(checkpoint, folder / "s.yaml", adapters=str(adapters), **limits) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield World(server, checkpoint, channel)


# ------------------------------------------------------------------------------------------ answers


def test_a_batch_is_answered_in_its_order_with_what_the_own_wire_says(world: World) -> None:
    texts = [TEXT, OTHER, "one", "two"]
    answers = world.generate(*texts, stopping={"max_new_tokens": 12})

    for text, answer in zip(texts, answers, strict=True):
        expected = world.ours(text, max_new_tokens=12)
        assert answer.text == expected.text
        assert answer.generated_token_count == expected.usage.completion_tokens
        assert answer.input_token_count == expected.usage.prompt_tokens
        assert answer.seed == 0, "nothing is drawn"
    assert len({answer.text for answer in answers}) == 4


def test_an_empty_batch_is_answered_with_an_empty_one(world: World) -> None:
    assert world.generate() == []


def test_what_is_not_said_is_the_servers_own_default(world: World) -> None:
    expected = world.ours()
    (answer,) = world.generate(TEXT)
    assert answer.text == expected.text
    assert answer.generated_token_count == expected.usage.completion_tokens
    assert (said(answer) == "MAX_TOKENS") == (answer.generated_token_count == 128)


@pytest.mark.parametrize(
    ("params", "same"),
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
def test_parameters_mean_what_they_mean_on_the_own_wire(
    world: World, params: dict[str, Any], same: dict[str, Any]
) -> None:
    expected = world.ours(**same, max_new_tokens=24)
    (answer,) = world.generate(TEXT, stopping={"max_new_tokens": 24}, **params)
    assert (answer.text, answer.generated_token_count) == (
        expected.text,
        expected.usage.completion_tokens,
    )
    assert answer.input_token_count == expected.usage.prompt_tokens


def test_a_seed_that_nobody_gave_has_32_bits_and_is_told(world: World) -> None:
    stopping = {"max_new_tokens": 16}
    first, second = world.generate(TEXT, TEXT, method=1, stopping=stopping)
    assert first.seed != second.seed
    assert 0 < first.seed < 2**32
    (again,) = world.generate(TEXT, method=1, sampling={"seed": first.seed}, stopping=stopping)
    assert again == first
    expected = world.ours(sampling={"temperature": 1, "seed": first.seed}, max_new_tokens=16)
    assert first.text == expected.text, "a temperature that was not said is 1"


def test_truncation_keeps_the_last_tokens(world: World) -> None:
    ids = world.tokenizer.encode(TEXT)
    expected = world.ours("", token_ids={"ids": ids[-3:]}, max_new_tokens=8)
    told = {"input_text": True, "input_tokens": True}
    params = {"truncate_input_tokens": 3, "stopping": {"max_new_tokens": 8}}

    (answer,) = world.generate(TEXT, response=told, **params)

    kept = world.tokenizer.decode(ids[-3:])
    assert answer.text == kept + expected.text
    assert answer.input_token_count == 3
    assert [one.text for one in answer.input_tokens] == [
        world.tokenizer.spelling(one) for one in ids[-3:]
    ]


@pytest.mark.parametrize("name", ["prefix_id", "adapter_id"])
def test_a_prefix_is_an_adapter_and_its_rows_are_not_counted(world: World, name: str) -> None:
    expected = world.ours(adapter="sum", max_new_tokens=8)
    told = {"input_tokens": True, "token_logprobs": True}
    params = {"stopping": {"max_new_tokens": 8}, "response": told}
    (answer,) = world.generate(TEXT, adapter={name: "sum"}, **params)
    assert answer.text == expected.text != world.ours(max_new_tokens=8).text
    assert answer.input_token_count == expected.usage.prompt_tokens == len(answer.input_tokens)
    assert all(one.logprob < 0 for one in answer.input_tokens), "each follows the rows"


# --------------------------------------------------------------------------------- why answers end


def test_a_stop_sequence_is_in_the_text_unless_it_is_not_wanted(world: World) -> None:
    whole = world.ours(max_new_tokens=24).text
    word = whole[4:7]
    before = whole[: whole.index(word)]
    stopping: dict[str, Any] = {"max_new_tokens": 24, "stop_sequences": ["no such", word]}

    for unsaid in ({}, {"include_stop_sequence": True}):
        (answer,) = world.generate(TEXT, stopping={**stopping, **unsaid})
        assert (answer.text, answer.stop_sequence) == (before + word, word)
        assert said(answer) == "STOP_SEQUENCE"
    (answer,) = world.generate(TEXT, stopping={**stopping, "include_stop_sequence": False})
    assert (answer.text, answer.stop_sequence) == (before, word)


def test_the_models_own_end_is_told_apart(world: World) -> None:
    decoding = {"length_penalty": {"start_index": 0, "decay_factor": 10}}
    told = {"generated_tokens": True}
    (answer,) = world.generate(OTHER, decoding=decoding, response=told)
    assert said(answer) == "EOS_TOKEN"
    assert answer.tokens[-1].text == "</s>"
    assert answer.generated_token_count == len(answer.tokens)
    assert not answer.stop_sequence


def test_more_than_the_context_holds_is_cut_and_told(world: World) -> None:
    text = "the quick " * 2500
    params: dict[str, Any] = {"truncate_input_tokens": CONTEXT - 5}
    stopping = {"max_new_tokens": 5, "min_new_tokens": 5}
    (asked,) = world.generate(text, stopping=stopping, **params)
    assert (said(asked), asked.generated_token_count) == ("MAX_TOKENS", 5)
    (cut,) = world.generate(text, stopping={**stopping, "max_new_tokens": 9}, **params)
    assert (said(cut), cut.generated_token_count, cut.text) == ("TOKEN_LIMIT", 5, asked.text)
    (unsaid,) = world.generate(text, stopping={"min_new_tokens": 5}, **params)
    assert (said(unsaid), unsaid.text) == ("TOKEN_LIMIT", asked.text)

    error: Any = refusal(world.ask(text, truncate_input_tokens=CONTEXT))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "over the model's context, 4096; shorten" in error.details()
    few = {"min_new_tokens": 6, "max_new_tokens": 6}
    error = refusal(world.ask(text, stopping=few, **params))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error) == ["params.stopping.min_new_tokens"]


def test_a_time_limit_ends_well_and_a_deadline_does_not(world: World) -> None:
    (answer,) = world.generate(TEXT, stopping={**LONG, "time_limit_millis": 1500})
    assert said(answer) == "TIME_LIMIT"
    assert 0 < answer.generated_token_count < 3900
    assert answer.text
    error: Any = refusal(partial(world.ask(TEXT, stopping=LONG), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: world.idle)


# ------------------------------------------------------------------------------------------ streams


def test_a_stream_tells_of_the_input_then_of_each_token_then_why_it_ended(world: World) -> None:
    told = {"input_text": True, "input_tokens": True, "generated_tokens": True}
    details = {"token_logprobs": True, "token_ranks": True, "top_n_tokens": 2}
    params: dict[str, Any] = {
        "method": 1,
        "sampling": {"seed": 5},
        "stopping": {"max_new_tokens": 20},
        "response": {**told, **details},
    }
    (whole,) = world.generate(TEXT, **params)

    first, *rest = world.stream(TEXT, **params)()

    assert (first.text, first.seed) == (TEXT, 5)
    assert first.input_token_count == len(first.input_tokens) == whole.input_token_count
    assert first.input_tokens == whole.input_tokens
    assert (first.generated_token_count, list(first.tokens), said(first)) == (0, [], "NOT_FINISHED")
    assert TEXT + "".join(one.text for one in rest) == whole.text
    assert [token for one in rest for token in one.tokens] == list(whole.tokens)
    counts = [one.generated_token_count for one in rest]
    assert counts == sorted(counts)
    assert counts[-1] == whole.generated_token_count
    assert {said(one) for one in rest[:-1]} <= {"NOT_FINISHED"}
    assert said(rest[-1]) == said(whole) != "NOT_FINISHED"
    assert not any(one.input_token_count or one.seed or one.input_tokens for one in rest)


def test_a_streams_messages_without_text_are_left_out(world: World) -> None:
    _, *rest = world.stream("今日は世界", stopping={"max_new_tokens": 60})()
    assert all(one.text for one in rest[:-1])


def test_details_of_tokens_are_those_of_the_own_wire(world: World) -> None:
    details = {"logprobs": 3, "prompt_logprobs": 3}
    (expected,) = world.ours(max_new_tokens=8, details=details).completions
    told = {"generated_tokens": True, "input_tokens": True, "token_logprobs": True}
    params: dict[str, Any] = {"stopping": {"max_new_tokens": 8}}
    (answer,) = world.generate(TEXT, response={**told, "top_n_tokens": 3}, **params)
    (ranked,) = world.generate(
        TEXT, response={"generated_tokens": True, "token_ranks": True}, **params
    )
    assert [one.rank for one in ranked.tokens] == [one.rank for one in expected.scores]
    assert not any(one.logprob or one.top_tokens for one in ranked.tokens)
    assert not ranked.input_tokens
    spelling = world.tokenizer.spelling
    for infos, scores in (
        (answer.tokens, expected.scores),
        (answer.input_tokens, expected.prompt_scores),
    ):
        assert [one.text for one in infos] == [spelling(one.token_id) for one in scores]
        for info, score in zip(infos, scores, strict=True):
            assert info.logprob == pytest.approx(score.logprob)
            assert info.rank == 0, "it was not asked for"
            assert [top.text for top in info.top_tokens] == [
                spelling(top.token_id) for top in score.top_tokens
            ]
            assert [top.logprob for top in info.top_tokens] == pytest.approx(
                [top.logprob for top in score.top_tokens]
            )
    assert len(answer.tokens[0].top_tokens) == 3
    assert not answer.input_tokens[0].top_tokens, "the first follows nothing"


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
def test_a_guide_is_followed(world: World, decoding: dict[str, Any], pattern: str) -> None:
    penalty = {"start_index": 12, "decay_factor": 10}
    (answer,) = world.generate(TEXT, decoding={**decoding, "length_penalty": penalty})
    assert re.fullmatch(pattern, answer.text, re.DOTALL)


def test_the_json_format_begins_an_object(world: World) -> None:
    (answer,) = world.generate(TEXT, decoding={"format": "JSON"}, stopping={"max_new_tokens": 9})
    assert answer.text.lstrip().startswith("{")


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("field", "value", "sentence"), REFUSED)
def test_what_cannot_be_is_refused_with_its_field(
    world: World, field: str, value: Any, sentence: str
) -> None:
    params: dict[str, Any] = {}
    *path, last = field.split(".")
    inner = params
    for name in path:
        inner = inner.setdefault(name, {})
    inner[last] = value
    for send in (world.ask(TEXT, **params), world.stream(TEXT, **params)):
        error: Any = refusal(send)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in error.details()
        assert fields(error) == [f"params.{field}"]


def test_details_of_no_tokens_and_other_mistakes_are_refused(world: World) -> None:
    for send, field in (
        (world.ask(TEXT, response={"token_logprobs": True}), "params.response"),
        (world.ask(TEXT, adapter={"prefix_id": "nobody"}), "adapter_id"),
        (world.ask(TEXT, adapter={"adapter_id": "../etc"}), "adapter_id"),
        (world.ask(TEXT, adapter={"prefix_id": "a", "adapter_id": "sum"}), "adapter_id"),
        (world.ask(TEXT, adapter={"prefix_id": "/etc/passwd"}), "adapter_id"),
        (world.ask(TEXT, adapter={"prefix_id": "su\0m"}), "adapter_id"),
        (world.ask(TEXT, adapter={"prefix_id": "a" * 10_000}), "adapter_id"),
        (world.ask(TEXT, adapter={"prefix_id": "sum@9"}), "adapter_id"),
        (world.ask(""), "requests[0].text"),
        (world.ask("one " * 5000), "requests[0].text"),
        (world.ask("one", "a" * (2 << 20)), "requests[1].text"),
        (world.ask("one", "one " * 5000), "requests[1].text"),
        (world.stream("a" * (2 << 20)), "request.text"),
        (world.stream("one " * 5000), "request.text"),
        (world.tokenize(TEXT, adapter_id="nobody"), "adapter_id"),
        (world.ask(*["one"] * 5), "requests"),
        (world.tokenize("a" * 600_000, "a" * 600_000), "requests"),
        (world.stream(""), "request.text"),
    ):
        error: Any = refusal(send)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        assert fields(error) == [field]


def test_one_bad_prompt_refuses_its_batch_before_any_runs(world: World) -> None:
    eventually(lambda: world.idle)
    before = world.server.metric("preamble_engine_prompt_tokens_total")
    error: Any = refusal(world.ask("unheard of", "one", ""))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields(error) == ["requests[2].text"]
    assert world.server.metric("preamble_engine_prompt_tokens_total") == before


def test_overload_is_refused_and_what_waits_ends_by_its_own_limit(world: World) -> None:
    eventually(lambda: world.idle)
    label = (("x-correlation-id", "the same"),)  # No two calls are one for it.
    running = [world.stream("one", stopping=LONG)(metadata=label) for _ in range(2)]
    for stream in running:
        assert said(next(stream)) == "NOT_FINISHED"

    (waited,) = world.generate("two", stopping={**LONG, "time_limit_millis": 100})
    assert (said(waited), waited.generated_token_count, waited.text) == ("TIME_LIMIT", 0, "")
    assert waited.input_token_count
    eventually(lambda: world.server.metric("preamble_scheduler_waiting_requests") == 0)

    waiting = [world.stream("three", stopping=LONG)() for _ in range(4)]
    eventually(lambda: world.server.metric("preamble_scheduler_waiting_requests") == 4)
    error: Any = refusal(world.ask("four"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "try again later" in error.details()
    assert ("grpc-retry-pushback-ms", "1000") in [tuple(one) for one in error.trailing_metadata()]

    for stream in (*running, *waiting):
        stream.cancel()
    eventually(lambda: world.idle)
    assert world.server.metric("preamble_kv_blocks_held") == 0
    ended = 'preamble_requests_total{code="CANCELLED",method="GenerateStream",wire="tgis"}'
    eventually(lambda: world.server.metric(ended) == 6)


# ---------------------------------------------------------------------------------- texts as tokens


def test_texts_are_told_as_the_tokens_that_the_model_gets(world: World) -> None:
    texts = [TEXT, "Größe 今日は", ""]
    wanted = {"return_tokens": True, "return_offsets": True}
    whole = world.tokenize(*texts, **wanted)().responses
    for text, answer in zip(texts, whole, strict=True):
        ids = world.tokenizer.encode(text)
        assert answer.token_count == len(ids) == len(answer.offsets)
        assert list(answer.tokens) == list(map(world.tokenizer.spelling, ids))
        assert all(one.start <= one.end <= len(text) for one in answer.offsets)
    spans = [TEXT[one.start : one.end] for one in whole[0].offsets]
    assert "".join(spans) == TEXT
    assert [one.replace("▁", " ").strip() for one in whole[0].tokens] == [
        span.strip() for span in spans
    ]

    cut = world.tokenize(*texts, truncate_input_tokens=2, prefix_id="sum", **wanted)().responses
    for answer, full in zip(cut, whole, strict=True):
        assert answer.token_count == min(2, full.token_count)
        assert list(answer.tokens) == list(full.tokens[-2:])
        assert list(answer.offsets) == list(full.offsets[-2:])
    (bare,) = world.tokenize(TEXT)().responses
    assert (bare.token_count, list(bare.tokens), list(bare.offsets)) == (
        whole[0].token_count,
        [],
        [],
    )


def test_offsets_are_those_of_the_tokenizers_library(tmp_path: Path) -> None:
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
    ours = open_tokenizer(tmp_path)
    for text in (*LINES, " two  spaces\n", "🦊 fox"):
        expected = library.encode(text)
        assert _offsets(expected.ids, text, ours) == expected.offsets
        assert [ours.spelling(one) for one in expected.ids] == expected.tokens


def test_the_model_is_told(world: World) -> None:
    told = world.call("ModelInfo", "ModelInfoRequest", "ModelInfoResponse", model_id="any")()
    assert (told.model_kind, told.max_sequence_length, told.max_new_tokens) == (0, 4096, 4095)


# ---------------------------------------------------------------------------------- their own stubs


@pytest.mark.slow
def test_stubs_that_others_wrote_are_answered(world: World) -> None:
    if not (STUBS / "vllm_tgis_adapter").is_dir():
        pytest.skip(f"no TGIS stubs in {STUBS}; run: make tools")
    client = subprocess.run(
        [sys.executable, "-m", "tests.support.tgis_client", world.server.address, TEXT, OTHER],
        cwd=ROOT,
        env={**os.environ, "TGIS_STUBS": str(STUBS)},
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
    )
    assert client.returncode == 0, client.stderr
    told = json.loads(client.stdout)
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 11}
    sampling["repetition_penalty"] = 1.1
    for text, answer in zip((TEXT, OTHER), told["texts"], strict=True):
        expected = world.ours(text, adapter="sum", sampling=sampling, max_new_tokens=16)
        assert answer == text + expected.text
    assert told["streamed"] == told["texts"]
    assert told["seeds"] == [11] * 4
    assert told["last"] == told["stops"]
    assert set(told["stops"]) <= {"MAX_TOKENS", "EOS_TOKEN"}
    assert all(told["counts"] + told["inputs"] + told["tokens"])
    assert set(told["details"]) == {2}
    assert (told["context"], told["kind"]) == (CONTEXT, "DECODER_ONLY")
    assert told["code"] == "INVALID_ARGUMENT"
