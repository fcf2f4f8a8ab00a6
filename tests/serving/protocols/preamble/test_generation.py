"""`preamble.v1.GenerationService` by its messages: each field arrives and does what it says.

The server is a real one, and the oracle the same model, asked in this process. A case that answers
as the base case does would prove little, so each has to answer otherwise.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from protos.preamble.v1 import generation_pb2 as pb
from serving.messages import Guide
from serving.protocols.preamble.generation import ask_of
from serving.request import Ask, Completion
from tests.support.generation_service import INPUTS, NEW, NUMBERS, TEXT, Sets, World, wired

pytestmark = pytest.mark.slow  # A server of its own: too long for the fast suite.

BASE = Ask(TEXT, max_new_tokens=NEW, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with wired(tmp_path_factory.mktemp("wire")) as world:
        yield world


# ------------------------------------------------------------------------- each field, by an oracle

SCHEMA = '{"enum": ["one", "two"]}'


def sampled(**fields: Any) -> Sets:
    return {"sampling": pb.Sampling(**fields)}


# What the message has besides, and what an ask has besides.
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
    "temperature": (sampled(temperature=2.3), {"temperature": 2.3}),
    "greedy": (sampled(temperature=0), {"temperature": 0.0}),
    "top_k": (sampled(top_k=2), {"top_k": 2}),
    "top_p": (sampled(top_p=0.3), {"top_p": 0.3}),
    "min_p": (sampled(min_p=0.7), {"min_p": 0.7}),
    "typical_p": (sampled(typical_p=0.2), {"typical_p": 0.2}),
    "seed": (sampled(seed=8), {"seed": 8}),
    "repetition_penalty": (sampled(repetition_penalty=9.9), {"repetition_penalty": 9.9}),
    "presence_penalty": (
        sampled(presence_penalty=-2, logit_bias={9: 9.0}),
        {"presence_penalty": -2.0, "logit_bias": {9: 9.0}},
    ),
    "frequency_penalty": (
        sampled(frequency_penalty=-1.7, logit_bias={9: 9.0}),
        {"frequency_penalty": -1.7, "logit_bias": {9: 9.0}},
    ),
    "logit_bias": (sampled(logit_bias={11: 12.5, 12: 12.3}), {"logit_bias": {11: 12.5, 12: 12.3}}),
    "allowed_token_ids": (
        sampled(allowed_token_ids=[40, 41, 42]),
        {"allowed_token_ids": (40, 41, 42)},
    ),
    "no_repeat_ngram_size": (
        sampled(no_repeat_ngram_size=1, allowed_token_ids=[40, 41, 42]),
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
        {"beams": pb.Beams(width=3), "answers": 2, **sampled(temperature=0)},
        {"beam_width": 3, "answers": 2, "temperature": 0.0},
    ),
    "beams of other rules": (
        {
            "beams": pb.Beams(width=3, length_penalty=2.5, early_stopping=pb.EARLY_STOPPING_FIRST),
            **sampled(temperature=0),
        },
        {"beam_width": 3, "length_penalty": 2.5, "early_stopping": True, "temperature": 0.0},
    ),
    "beams that never stop early": (
        {
            "beams": pb.Beams(width=2, early_stopping=pb.EARLY_STOPPING_NEVER),
            **sampled(temperature=0),
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
def test_a_field_does_what_it_does_for_a_program(world: World, case: str) -> None:
    fields, asked = CASES[case]
    message = world.message(**fields)

    wanted = world.oracle.generate([replace(BASE, **asked)])
    answer, pieces = world.ask(message), world.pieces(message)

    assert len(answer.completions) == len(wanted)
    for one, other in zip(answer.completions, wanted, strict=True):
        agree(world, one, other)
    agree(world, answer, wanted[0])
    for index, other in enumerate(wanted):
        agree(world, joined([piece for piece in pieces if piece.index == index]), other)
    assert [one.SerializeToString(deterministic=True) for one in counted(answer)] != [
        one.SerializeToString(deterministic=True) for one in counted(world.ask(world.message()))
    ]


def counted(answer: pb.GenerateResponse) -> list[pb.Completion]:
    """Without what another request before it changes."""
    for one in answer.completions:
        one.usage.cached_tokens = 0
    return list(answer.completions)


def joined(pieces: list[pb.GenerateStreamResponse]) -> pb.Completion:
    """What the pieces of one answer come to; only a last one has an end."""
    assert not any(piece.finish_reason or piece.HasField("usage") for piece in pieces[:-1])
    assert not any(piece.seed or piece.adapter for piece in pieces[1:])
    first, last = pieces[0], pieces[-1]
    whole = pb.Completion(seed=first.seed, adapter=first.adapter)
    whole.text = "".join(piece.text for piece in pieces)
    for piece in pieces:
        whole.token_ids.extend(piece.token_ids)
        whole.scores.extend(piece.scores)
        whole.prompt_scores.extend(piece.prompt_scores)
    whole.finish_reason = last.finish_reason
    whole.usage.CopyFrom(last.usage)
    for name in ("stop_string", "stop_token_id", "beam_score"):
        if last.HasField(name):
            setattr(whole, name, getattr(last, name))
    return whole


ENDS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "scored": pb.FINISH_REASON_LENGTH,
}


def agree(world: World, one: Any, other: Completion) -> None:
    """A completion, or the head of a response, is what the oracle says."""
    assert other.finish is not None
    assert (one.text, list(one.token_ids)) == (other.text, list(other.token_ids))
    assert (one.finish_reason, one.seed, one.adapter) == (
        *(ENDS[other.finish], other.seed, other.adapter),
    )
    usage = (other.prompt_tokens, other.virtual_tokens, len(other.token_ids))
    assert usage == (
        one.usage.prompt_tokens,
        one.usage.virtual_tokens,
        one.usage.completion_tokens,
    )
    if not isinstance(one, pb.Completion):
        return
    stop = one.WhichOneof("stop")
    assert (getattr(one, stop) if stop else None) == other.stop
    assert one.HasField("beam_score") == (other.beam_score is not None)
    assert one.beam_score == pytest.approx(other.beam_score or 0.0, abs=1e-6)
    scored(one.scores, zip(other.token_ids, other.scores, strict=False))
    vocabulary = world.oracle.checkpoint.config.vocab_size
    scored(one.prompt_scores, zip(other.prompt, other.prompt_scores, strict=False))
    virtual = [token >= vocabulary for token in other.prompt] if one.prompt_scores else []
    assert [score.virtual for score in one.prompt_scores] == virtual


def scored(scores: Any, wanted: Any) -> None:
    pairs = list(wanted)
    assert len(scores) == len(pairs)
    for one, (token, other) in zip(scores, pairs, strict=True):
        assert one.token_id == (0 if one.virtual else token)
        assert one.HasField("logprob") == (other is not None)
        if other is None:
            assert (one.rank, len(one.top_tokens)) == (0, 0)
            continue
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert one.rank == other.rank
        assert [top.token_id for top in one.top_tokens] == [token for token, _ in other.tops]
        logprobs = [top.logprob for top in one.top_tokens]
        assert logprobs == pytest.approx([logprob for _, logprob in other.tops], abs=1e-6)


def every_field(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths to all fields of a message that are no messages themselves, but lists of them."""
    for field in kind.DESCRIPTOR.fields:
        inner = field.message_type
        if inner is None or field.is_repeated or inner.name in ("TokenIds", "Inputs", "Choices"):
            yield (*path, field.name)
        else:
            yield from every_field(getattr(pb, inner.name), (*path, field.name))


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
}


@pytest.mark.parametrize("path", list(every_field(pb.GenerateRequest)), ids=".".join)
def test_no_field_is_forgotten_on_the_way_to_an_ask(path: tuple[str, ...]) -> None:
    def asked(*, filled: bool) -> Ask:
        message = pb.GenerateRequest()
        if path[0] == "beams":  # Which has to say how wide.
            message.beams.width = 2
        if path[0] == "guide":
            message.guide.regex = "x"
        inner: Any = message
        for name in path[:-1]:
            inner = getattr(inner, name)
        name, field = path[-1], inner.DESCRIPTOR.fields_by_name[path[-1]]
        if filled and field.message_type is None and not field.is_repeated:
            setattr(inner, name, VALUES.get(name, "y" if field.type == field.TYPE_STRING else 3))
        elif filled:
            list_of = {"inputs": "fields", "choices": "texts"}
            list_of |= {} if path[0] == "stops" else {"token_ids": "ids"}
            part = getattr(inner, name)
            part = getattr(part, list_of[name]) if name in list_of else part
            value = VALUES[name]
            part.update(value) if isinstance(value, dict) else part.extend(value)
        return ask_of(message)

    assert asked(filled=True) != asked(filled=False)


# ------------------------------------------------------------------------------ stops, and the time


def test_stops_end_a_text_and_say_which_did(world: World) -> None:
    base = world.ask(world.message())
    assert len(base.text) > 8
    word, token = base.text[4:7], base.token_ids[5]

    for inside, text in ((False, base.text[:4]), (True, base.text[: base.text.index(word) + 3])):
        stops = pb.Stops(strings=["never said", word], include_in_text=inside)
        one = world.ask(world.message(stops=stops)).completions[0]
        assert (one.text, one.stop_string) == (text, word)
        assert one.finish_reason == pb.FINISH_REASON_STOP
    one = world.ask(world.message(stops=pb.Stops(token_ids=[token]))).completions[0]
    assert one.stop_token_id == token == one.token_ids[-1]
    assert list(one.token_ids) == list(base.token_ids)[: len(one.token_ids)]


def test_the_models_own_end_can_be_held_off_or_ignored(world: World) -> None:
    end = world.oracle.tokenizer.stop_ids[0]
    ends = pb.Sampling(logit_bias={end: 100.0})

    at_once = world.ask(world.message(sampling=ends))
    assert (list(at_once.token_ids), at_once.text) == ([end], "")
    assert at_once.completions[0].stop_token_id == end
    later = world.ask(world.message(sampling=ends, min_new_tokens=4))
    assert len(later.token_ids) == 5 and list(later.token_ids).index(end) == 4
    never = world.ask(world.message(sampling=ends, stops=pb.Stops(ignore_model_ends=True)))
    assert list(never.token_ids) == [end] * NEW
    assert never.finish_reason == pb.FINISH_REASON_LENGTH


def test_a_bad_word_is_not_made_and_an_end_grows_likelier(world: World) -> None:
    base = world.ask(world.message())
    word = base.text.split()[1]
    other = world.ask(world.message(sampling=pb.Sampling(bad_words=[word])))
    assert word in base.text.split() and word not in other.text.split()

    end = world.oracle.tokenizer.stop_ids[0]
    raised = pb.Sampling(
        temperature=0, logit_bias={end: 1.0}, length_decay=pb.LengthDecay(start=3, factor=10.0)
    )
    ask = replace(BASE, temperature=0.0, logit_bias={end: 1.0}, length_decay=(3, 10.0))
    (wanted,) = world.oracle.generate([ask])
    agree(world, world.ask(world.message(sampling=raised)).completions[0], wanted)
    (plain,) = world.oracle.generate([replace(ask, length_decay=None)])
    assert plain.token_ids != wanted.token_ids


def test_a_time_limit_ends_well_with_the_text_that_there_is(world: World) -> None:
    # Nothing ends it otherwise for long.
    message = world.message(
        max_new_tokens=4000, time_limit_ms=1500, stops=pb.Stops(ignore_model_ends=True), answers=2
    )
    for done in (
        list(world.ask(message).completions),
        [joined([p for p in world.pieces(message) if p.index == index]) for index in range(2)],
    ):
        for one in done:
            assert one.finish_reason == pb.FINISH_REASON_TIME_LIMIT
            assert 0 < len(one.token_ids) == one.usage.completion_tokens < 4000
            assert one.text


def test_pieces_of_several_answers_come_between_one_another(world: World) -> None:
    pieces = world.pieces(world.message(answers=3, max_new_tokens=400))
    order = [piece.index for piece in pieces]
    assert set(order) == {0, 1, 2}
    assert order != sorted(order), "one after the other"


def test_what_was_computed_before_is_counted_as_cached(world: World) -> None:
    fresh = pb.GenerateRequest(text=f"{TEXT} no one has asked this yet " * 4, max_new_tokens=1)
    first, again = world.ask(fresh).usage, world.ask(fresh).usage
    assert first.cached_tokens == 0
    assert again.cached_tokens == again.prompt_tokens - 1
    (piece,) = [one for one in world.pieces(fresh) if one.HasField("usage")]
    assert piece.usage.cached_tokens == again.cached_tokens
