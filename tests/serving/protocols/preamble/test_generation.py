"""`preamble.v1.GenerationService`: each field of its messages arrives and has its effect.

The server is real, and the oracle is the same model in this process. Each case must give another
answer than the base case, else it would prove little.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from protos.preamble.v1 import generation_pb2 as pb
from serving.messages import Guide
from serving.protocols.preamble.generation import build_ask
from serving.request import Ask, Completion
from tests.support.generation_service import (
    INPUTS,
    NEW,
    NUMBERS,
    TEXT,
    GenerationServer,
    Sets,
    generation_server,
)

pytestmark = pytest.mark.slow  # A server of its own: too long for the fast suite.

BASE = Ask(TEXT, max_new_tokens=NEW, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationServer]:
    with generation_server(tmp_path_factory.mktemp("wire")) as deployment:
        yield deployment


# ------------------------------------------------------------------------- each field, by an oracle

SCHEMA = '{"enum": ["one", "two"]}'


def sampling_fields(**fields: Any) -> Sets:
    return {"sampling": pb.Sampling(**fields)}


# The fields of the message, and the fields of the ask, in addition to the base case.
CASES: dict[str, tuple[Sets, Sets]] = {
    "token ids": ({"token_ids": pb.TokenIds(ids=[5, 6, 7])}, {"prompt": (5, 6, 7)}),
    "an adapter": ({"adapter": "sum"}, {"adapters": ("sum",)}),
    "inputs": ({"adapter": "fox", "inputs": INPUTS}, {"adapters": ("fox",), "prompt": NUMBERS}),
    "several adapters": (
        {"adapters": ["sum", "", "late"]},
        {"adapters": ("sum", "", "late")},
    ),
    "several tasks of templates": (
        {"adapters": ["late", "fox@2"], "inputs": INPUTS},
        {"adapters": ("late", "fox@2"), "prompt": NUMBERS},
    ),
    "answers": ({"answers": 3}, {"answers": 3}),
    "answers of adapters": (
        {"adapters": ["sum", "late"], "answers": 2},
        {"adapters": ("sum", "late"), "answers": 2},
    ),
    "max_new_tokens": ({"max_new_tokens": 3}, {"max_new_tokens": 3}),
    "temperature": (sampling_fields(temperature=2.3), {"temperature": 2.3}),
    "greedy": (sampling_fields(temperature=0), {"temperature": 0.0}),
    "top_k": (sampling_fields(top_k=2), {"top_k": 2}),
    "top_p": (sampling_fields(top_p=0.3), {"top_p": 0.3}),
    "min_p": (sampling_fields(min_p=0.7), {"min_p": 0.7}),
    "typical_p": (sampling_fields(typical_p=0.2), {"typical_p": 0.2}),
    "seed": (sampling_fields(seed=8), {"seed": 8}),
    "repetition_penalty": (sampling_fields(repetition_penalty=9.9), {"repetition_penalty": 9.9}),
    "presence_penalty": (
        sampling_fields(presence_penalty=-2, logit_bias={9: 9.0}),
        {"presence_penalty": -2.0, "logit_bias": {9: 9.0}},
    ),
    "frequency_penalty": (
        sampling_fields(frequency_penalty=-1.7, logit_bias={9: 9.0}),
        {"frequency_penalty": -1.7, "logit_bias": {9: 9.0}},
    ),
    "logit_bias": (
        sampling_fields(logit_bias={11: 12.5, 12: 12.3}),
        {"logit_bias": {11: 12.5, 12: 12.3}},
    ),
    "allowed_token_ids": (
        sampling_fields(allowed_token_ids=[40, 41, 42]),
        {"allowed_token_ids": (40, 41, 42)},
    ),
    "no_repeat_ngram_size": (
        sampling_fields(no_repeat_ngram_size=1, allowed_token_ids=[40, 41, 42]),
        {"no_repeat_ngram_size": 1, "allowed_token_ids": (40, 41, 42)},
    ),
    "regex": ({"guide": pb.Guide(regex="[a-c]{4}")}, {"guide": Guide("regex", "[a-c]{4}")}),
    "json schema": ({"guide": pb.Guide(json_schema=SCHEMA)}, {"guide": Guide("json", SCHEMA)}),
    "choices": (
        {"guide": pb.Guide(choices=pb.Choices(texts=["red", "blue"]))},
        {"guide": Guide("choice", '["red", "blue"]')},
    ),
    "grammar": (
        {"guide": pb.Guide(grammar='start: "x" | "y"')},
        {"guide": Guide("grammar", 'start: "x" | "y"')},
    ),
    "beams": (
        {"beams": pb.Beams(width=3), "answers": 2, **sampling_fields(temperature=0)},
        {"beam_width": 3, "answers": 2, "temperature": 0.0},
    ),
    "beams of other rules": (
        {
            "beams": pb.Beams(width=3, length_penalty=2.5, early_stopping=pb.EARLY_STOPPING_FIRST),
            **sampling_fields(temperature=0),
        },
        {"beam_width": 3, "length_penalty": 2.5, "early_stopping": True, "temperature": 0.0},
    ),
    "beams that never stop early": (
        {
            "beams": pb.Beams(width=2, early_stopping=pb.EARLY_STOPPING_NEVER),
            **sampling_fields(temperature=0),
        },
        {"beam_width": 2, "early_stopping": "never", "temperature": 0.0},
    ),
    "logprobs": ({"details": pb.Details(logprobs=2)}, {"logprobs": 2}),
    "logprobs without alternatives": ({"details": pb.Details(logprobs=0)}, {"logprobs": 0}),
    "prompt_logprobs": (
        {"details": pb.Details(prompt_logprobs=1), "adapter": "late", "inputs": INPUTS},
        {"prompt_logprobs": 1, "adapters": ("late",), "prompt": NUMBERS},
    ),
    "no new tokens": (
        {"max_new_tokens": 0, "details": pb.Details(prompt_logprobs=0)},
        {"max_new_tokens": 0, "prompt_logprobs": 0},
    ),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 3}, {"truncate_tokens": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_fields_have_the_effect_that_they_have_in_python(
    deployment: GenerationServer, case: str
) -> None:
    fields, ask_fields = CASES[case]
    message = deployment.message(**fields)

    expected = deployment.oracle.generate([replace(BASE, **ask_fields)])
    response = deployment.ask(message)
    pieces = deployment.pieces(message)

    assert len(response.completions) == len(expected)
    for completion, expected_completion in zip(response.completions, expected, strict=True):
        assert_equal(deployment, completion, expected_completion)
    assert_equal(deployment, response, expected[0])
    for index, expected_completion in enumerate(expected):
        assert_equal(
            deployment,
            join_pieces([piece for piece in pieces if piece.index == index]),
            expected_completion,
        )
    assert [
        completion.SerializeToString(deterministic=True)
        for completion in without_cache_counts(response)
    ] != [
        completion.SerializeToString(deterministic=True)
        for completion in without_cache_counts(deployment.ask(deployment.message()))
    ]


def without_cache_counts(response: pb.GenerateResponse) -> list[pb.Completion]:
    """The response without the effects of earlier requests on the cache."""
    for completion in response.completions:
        completion.usage.cached_tokens = 0
    return list(response.completions)


def join_pieces(pieces: list[pb.GenerateStreamResponse]) -> pb.Completion:
    """One answer joined from its pieces; only the last piece has a finish reason."""
    assert not any(piece.finish_reason or piece.HasField("usage") for piece in pieces[:-1])
    assert not any(piece.seed or piece.adapter for piece in pieces[1:])
    first_piece = pieces[0]
    last_piece = pieces[-1]
    completion = pb.Completion(seed=first_piece.seed, adapter=first_piece.adapter)
    completion.text = "".join(piece.text for piece in pieces)
    for piece in pieces:
        completion.token_ids.extend(piece.token_ids)
        completion.scores.extend(piece.scores)
        completion.prompt_scores.extend(piece.prompt_scores)
    completion.finish_reason = last_piece.finish_reason
    completion.usage.CopyFrom(last_piece.usage)
    for name in ("stop_string", "stop_token_id", "beam_score"):
        if last_piece.HasField(name):
            setattr(completion, name, getattr(last_piece, name))
    return completion


ENDS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "scored": pb.FINISH_REASON_LENGTH,
}


def assert_equal(deployment: GenerationServer, completion: Any, expected: Completion) -> None:
    """A completion, or the head of a response, equals the oracle's."""
    assert expected.finish is not None
    assert (completion.text, list(completion.token_ids)) == (
        expected.text,
        list(expected.token_ids),
    )
    assert (completion.finish_reason, completion.seed, completion.adapter) == (
        *(ENDS[expected.finish], expected.seed, expected.adapter),
    )
    usage = (expected.prompt_tokens, expected.virtual_tokens, len(expected.token_ids))
    assert usage == (
        completion.usage.prompt_tokens,
        completion.usage.virtual_tokens,
        completion.usage.completion_tokens,
    )
    if not isinstance(completion, pb.Completion):
        return
    stop = completion.WhichOneof("stop")
    assert (getattr(completion, stop) if stop else None) == expected.stop
    assert completion.HasField("beam_score") == (expected.beam_score is not None)
    assert completion.beam_score == pytest.approx(expected.beam_score or 0.0, abs=1e-6)
    assert_scores_equal(completion.scores, zip(expected.token_ids, expected.scores, strict=False))
    vocabulary = deployment.oracle.checkpoint.config.vocab_size
    assert_scores_equal(
        completion.prompt_scores, zip(expected.prompt, expected.prompt_scores, strict=False)
    )
    virtual = [token >= vocabulary for token in expected.prompt] if completion.prompt_scores else []
    assert [score.virtual for score in completion.prompt_scores] == virtual


def assert_scores_equal(scores: Any, expected_scores: Any) -> None:
    pairs = list(expected_scores)
    assert len(scores) == len(pairs)
    for score, (token, expected_score) in zip(scores, pairs, strict=True):
        assert score.token_id == (0 if score.virtual else token)
        assert score.HasField("logprob") == (expected_score is not None)
        if expected_score is None:
            assert (score.rank, len(score.top_tokens)) == (0, 0)
            continue
        assert score.logprob == pytest.approx(expected_score.logprob, abs=1e-6)
        assert score.rank == expected_score.rank
        assert [top.token_id for top in score.top_tokens] == [
            token for token, _ in expected_score.tops
        ]
        logprobs = [top.logprob for top in score.top_tokens]
        assert logprobs == pytest.approx([logprob for _, logprob in expected_score.tops], abs=1e-6)


def every_field(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths to all fields of a message that are no messages themselves, or lists of them."""
    for field in kind.DESCRIPTOR.fields:
        submessage_type = field.message_type
        if (
            submessage_type is None
            or field.is_repeated
            or submessage_type.name in ("TokenIds", "Inputs", "Choices")
        ):
            yield (*path, field.name)
        else:
            yield from every_field(getattr(pb, submessage_type.name), (*path, field.name))


VALUES: dict[str, Any] = {
    "text": "other",
    "token_ids": [3],
    "inputs": {"a": "b"},
    "choices": ["x"],
    "logit_bias": {3: 1.5},
    "adapters": ["x"],
    "bad_words": ["x"],
    "strings": ["x"],
    "allowed_token_ids": [3],
    "adapter": "x",
    "early_stopping": 2,
    "service_class": 2,
    "add_special_tokens": False,
}


@pytest.mark.parametrize("path", list(every_field(pb.GenerateRequest)), ids=".".join)
def test_every_field_reaches_the_ask(path: tuple[str, ...]) -> None:
    def ask_with_field(*, filled: bool) -> Ask:
        message = pb.GenerateRequest()
        if path[0] == "beams":  # Which has to say how wide.
            message.beams.width = 2  # A required field.
        if path[0] == "guide":
            message.guide.regex = "x"
        submessage: Any = message
        for name in path[:-1]:
            submessage = getattr(submessage, name)
        name = path[-1]
        field = submessage.DESCRIPTOR.fields_by_name[path[-1]]
        if filled and field.message_type is None and not field.is_repeated:
            setattr(
                submessage, name, VALUES.get(name, "y" if field.type == field.TYPE_STRING else 3)
            )
        elif filled:
            list_fields = {"inputs": "fields", "choices": "texts"}
            list_fields |= {} if path[0] in ("stops", "resume") else {"token_ids": "ids"}
            part = getattr(submessage, name)
            part = getattr(part, list_fields[name]) if name in list_fields else part
            value = VALUES[name]
            part.update(value) if isinstance(value, dict) else part.extend(value)
        return build_ask(message)

    assert ask_with_field(filled=True) != ask_with_field(filled=False)


# --------------------------------------------------------------------- stops, and time limits


def test_stops_end_the_text_and_are_reported(deployment: GenerationServer) -> None:
    base = deployment.ask(deployment.message())
    assert len(base.text) > 8
    stop_text = base.text[4:7]
    token = base.token_ids[5]

    for include_stop, text in (
        (False, base.text[:4]),
        (True, base.text[: base.text.index(stop_text) + 3]),
    ):
        stops = pb.Stops(strings=["never said", stop_text], include_in_text=include_stop)
        completion = deployment.ask(deployment.message(stops=stops)).completions[0]
        assert (completion.text, completion.stop_string) == (text, stop_text)
        assert completion.finish_reason == pb.FINISH_REASON_STOP
    completion = deployment.ask(deployment.message(stops=pb.Stops(token_ids=[token]))).completions[
        0
    ]
    assert completion.stop_token_id == token == completion.token_ids[-1]
    assert list(completion.token_ids) == list(base.token_ids)[: len(completion.token_ids)]


def test_eos_can_be_delayed_or_ignored(deployment: GenerationServer) -> None:
    end = deployment.oracle.tokenizer.stop_ids[0]
    eos_bias = pb.Sampling(logit_bias={end: 100.0})

    ended_at_once = deployment.ask(deployment.message(sampling=eos_bias))
    assert (list(ended_at_once.token_ids), ended_at_once.text) == ([end], "")
    assert ended_at_once.completions[0].stop_token_id == end
    ended_later = deployment.ask(deployment.message(sampling=eos_bias, min_new_tokens=4))
    assert len(ended_later.token_ids) == 5 and list(ended_later.token_ids).index(end) == 4
    never = deployment.ask(
        deployment.message(sampling=eos_bias, stops=pb.Stops(ignore_model_ends=True))
    )
    assert list(never.token_ids) == [end] * NEW
    assert never.finish_reason == pb.FINISH_REASON_LENGTH


def test_bad_words_are_excluded_and_length_decay_raises_eos(deployment: GenerationServer) -> None:
    base = deployment.ask(deployment.message())
    bad_word = base.text.split()[1]
    without_bad_word = deployment.ask(
        deployment.message(sampling=pb.Sampling(bad_words=[bad_word]))
    )
    assert bad_word in base.text.split() and bad_word not in without_bad_word.text.split()

    end = deployment.oracle.tokenizer.stop_ids[0]
    raised = pb.Sampling(
        temperature=0, logit_bias={end: 1.0}, length_decay=pb.LengthDecay(start=3, factor=10.0)
    )
    ask = replace(BASE, temperature=0.0, logit_bias={end: 1.0}, length_decay=(3, 10.0))
    (expected,) = deployment.oracle.generate([ask])
    assert_equal(
        deployment, deployment.ask(deployment.message(sampling=raised)).completions[0], expected
    )
    (plain,) = deployment.oracle.generate([replace(ask, length_decay=None)])
    assert plain.token_ids != expected.token_ids


def test_time_limits_return_the_partial_text(deployment: GenerationServer) -> None:
    # No stop condition ends it earlier.
    message = deployment.message(
        max_new_tokens=4000, time_limit_ms=1500, stops=pb.Stops(ignore_model_ends=True), answers=2
    )
    for completions in (
        list(deployment.ask(message).completions),
        [
            join_pieces([p for p in deployment.pieces(message) if p.index == index])
            for index in range(2)
        ],
    ):
        for completion in completions:
            assert completion.finish_reason == pb.FINISH_REASON_TIME_LIMIT
            assert 0 < len(completion.token_ids) == completion.usage.completion_tokens < 4000
            assert completion.text


def test_pieces_of_several_answers_are_interleaved(deployment: GenerationServer) -> None:
    pieces = deployment.pieces(deployment.message(answers=3, max_new_tokens=400))
    order = [piece.index for piece in pieces]
    assert set(order) == {0, 1, 2}
    assert order != sorted(order), "one after the other"


def test_cached_prompt_tokens_are_counted(deployment: GenerationServer) -> None:
    fresh = pb.GenerateRequest(text=f"{TEXT} no one has asked this yet " * 4, max_new_tokens=1)
    first_usage = deployment.ask(fresh).usage
    second_usage = deployment.ask(fresh).usage
    assert first_usage.cached_tokens == 0
    assert second_usage.cached_tokens == second_usage.prompt_tokens - 1
    (piece,) = [piece for piece in deployment.pieces(fresh) if piece.HasField("usage")]
    assert piece.usage.cached_tokens == second_usage.cached_tokens
