"""Guided decoding: whatever the model wants, with every kind of tokenizer, the text matches."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.errors import RequestError
from gpt.generation.reference_sampler import choose
from gpt.generation.stop_strings import CertainText
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer
from serving.messages import Begin, Guide
from serving.worker.guided_decoding import GUIDE_BYTES_MAX, check_guide
from serving.worker.sampler import Sampler
from tests.support.trained_tokenizers import Case, all_cases

STEPS_MAX = 400
PADDING = 3  # Ids of the model that no token has.

SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": -20, "maximum": 3000},
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["Straße", "世界", None, 7]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["größe", "name", "kind", "tags"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", 'a 世界 \U0001f600\n"quoted"\\', "Größe", "Größenordnung"]
PATTERN = "(ab|ñ|世){2,5}-[0-9]{3}"
GBNF = 'root ::= "(" [a-c]{1,4} ")" ("," "(" [0-9] ")")?'
LARK = 'start: item ("," item)?\nitem: /[a-d]{1,3}/ | "[" start "]"\n'


def valid(text: str) -> bool:
    """Whether a text is as SCHEMA says, by hand."""
    it = json.loads(text)
    return (
        set(it) == {"größe", "name", "kind", "tags"}
        and type(it["größe"]) is int
        and -20 <= it["größe"] <= 3000
        and isinstance(it["name"], str)
        and len(it["name"]) <= 12
        and it["kind"] in ("Straße", "世界", None, 7)
        and 1 <= len(it["tags"]) <= 3
        and all(isinstance(tag, bool) for tag in it["tags"])
    )


Check = Callable[[str], Any]
WRITTEN: list[tuple[Guide, Check]] = [
    (Guide("json", json.dumps(SCHEMA)), valid),
    (Guide("regex", PATTERN), re.compile(PATTERN).fullmatch),
    (Guide("choice", json.dumps(CHOICES)), CHOICES.__contains__),
    (Guide("grammar", GBNF), re.compile(r"\([a-c]{1,4}\)(,\([0-9]\))?").fullmatch),
    (Guide("grammar", LARK), re.compile(r"[a-d,\[\]]+").fullmatch),
]
# Where every token begins with a space, a guide must not need what stands inside of one.
NUMBERS: list[tuple[Guide, Check]] = [
    (Guide("regex", "( [0-9]{1,3}){2,4}"), re.compile("( [0-9]{1,3}){2,4}").fullmatch),
    (Guide("choice", '[" 7", " 8 9"]'), [" 7", " 8 9"].__contains__),
]
WORDS: list[tuple[Guide, Check]] = [
    (Guide("regex", "[ a-z]{4,12}"), re.compile("[ a-z]{4,12}").fullmatch),
    (Guide("grammar", "start: /[ a-z]{1,9}/"), re.compile("[ a-z]{1,9}").fullmatch),
]


@dataclass
class Row:
    """A sequence that is sampled from random logits, which depend on nothing but its number."""

    number: int
    rule: Sampling
    guide: Guide | None = None
    made: list[int] = field(default_factory=list)

    def begin(self, slot: int) -> Begin:
        return Begin(slot, self.rule, [1, 2], list(self.made), self.guide)

    def logits(self, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.number * 1000 + len(self.made))
        return torch.randn(size, generator=generator) * 4

    @property
    def over(self) -> bool:
        return bool(self.made) and self.made[-1] in self.rule.stop_token_ids


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return all_cases(tmp_path_factory.mktemp("tokenizers"))


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """As a client would get it."""
    stream = CertainText(tokenizer, ())
    return "".join(map(stream.push, tokens)) + stream.finish()


def sampler_of(tokenizer: Tokenizer, slots: int) -> Sampler:
    return Sampler(slots, tokenizer.vocab_size + PADDING, tokenizer_of_guides=tokenizer)


def step(sampler: Sampler, rows: dict[int, Row], size: int) -> None:
    """One token more for the sequence in each slot."""
    slots = list(rows)
    logits = torch.stack([row.logits(size) for row in rows.values()])
    chosen = sampler.choose(logits, slots, [2 + len(row.made) for row in rows.values()])
    assert not chosen.broken
    for row, token in zip(rows.values(), chosen.tokens, strict=True):
        row.made.append(token)


def run(tokenizer: Tokenizer, rows: Sequence[Row], resumed: int | None = None) -> None:
    """Until each row that has a guide is over. All are `resumed` in other slots at that step."""
    size = tokenizer.vocab_size + PADDING
    sampler = sampler_of(tokenizer, len(rows))
    order = list(range(len(rows)))
    for count in range(STEPS_MAX):
        if count in (0, resumed):
            order = order[::-1]
            for slot, row in zip(order, rows, strict=True):
                sampler.begin(row.begin(slot))
        live = {s: row for s, row in zip(order, rows, strict=True) if not row.over}
        if not any(row.guide for row in live.values()):
            return
        step(sampler, live, size)
    raise AssertionError("a guide did not come to an end")


def stops_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends a text; where the tokenizer names nothing, an id that has no text."""
    return tokenizer.stop_ids or (tokenizer.vocab_size,)


@pytest.mark.parametrize(
    "kind",
    [
        *("bpe", "llama", "unigram", "gpt2", "byte_level", "llama_json", "metaspace"),
        *("words", "null"),
    ],
)
def test_random_tokens_match_and_unguided_mates_are_as_without(
    cases: dict[str, Case], kind: str
) -> None:
    tokenizer = cases[kind].ours
    stops = stops_of(tokenizer)
    written = {"null": NUMBERS, "words": WORDS}.get(kind, WRITTEN)
    if kind in ("unigram", "metaspace"):  # They cannot write every letter.
        written = [(Guide("regex", "(the|wo rd){1,4}"), re.compile("(the|wo rd){1,4}").fullmatch)]
    rule = Sampling(temperature=1.0, stop_token_ids=stops)
    rows: list[Row] = []
    checks: list[Check | None] = []
    for guide, check in written:
        check_guide(guide, stops)
        rows += [Row(len(rows) + seed, replace(rule, seed=seed), guide) for seed in range(3)]
        checks += [check] * 3
    for one in (Sampling(), replace(rule, seed=3), replace(rule, top_p=0.9, frequency_penalty=1.0)):
        rows.append(Row(len(rows), replace(one, stop_token_ids=())))
        checks.append(None)
    run(tokenizer, rows)
    ways = set()
    for row, matches in zip(rows, checks, strict=True):
        if matches is None:
            check_free(tokenizer, row)
            continue
        text = text_of(tokenizer, row.made[:-1])
        assert matches(text), (row.guide, text)
        ways.add(text)
    assert len(ways) > len(written)
    # Preempted in the middle, they go on as if nothing had been.
    again = [Row(row.number, row.rule, row.guide) for row in rows]
    run(tokenizer, again, resumed=3)
    assert [row.made for row in again if row.guide] == [row.made for row in rows if row.guide]


def check_free(tokenizer: Tokenizer, row: Row) -> None:
    alone = Row(row.number, row.rule)
    for token in row.made:
        logits = alone.logits(tokenizer.vocab_size + PADDING)
        assert token == choose(logits, row.rule, [1, 2], alone.made, 2 + len(alone.made))
        alone.made.append(token)


def test_a_guide_that_is_over_outweighs_min_new_tokens_and_bad_words(
    cases: dict[str, Case],
) -> None:
    tokenizer = cases["gpt2"].ours
    stop = 5  # An ordinary token, too: it may only be drawn where the guide may end.
    assert tokenizer.token_bytes(stop)
    text = tokenizer.decode([stop])
    guide = Guide("choice", json.dumps([f"ab{text}c", "abc", "abcd"]))
    for rule in (
        Sampling(min_new_tokens=30, stop_token_ids=(stop,)),
        Sampling(bad_words=((stop,),), stop_token_ids=(stop,)),
        Sampling(allowed_token_ids=(0,), stop_token_ids=(stop,), temperature=2.0),
    ):
        row = Row(1, rule, guide)
        sampler = sampler_of(tokenizer, 1)
        sampler.begin(row.begin(0))
        while not row.made or row.made[-1] != stop:
            step(sampler, {0: row}, tokenizer.vocab_size + PADDING)
            assert len(row.made) < 12
        assert tokenizer.decode(row.made[:-1]) in json.loads(guide.text)
        if rule.min_new_tokens:  # As long as it can go on, it must.
            assert tokenizer.decode(row.made[:-1]).endswith("d")


def test_without_stop_tokens_of_its_own_a_request_ends_by_the_tokenizers(
    cases: dict[str, Case],
) -> None:
    tokenizer = cases["gpt2"].ours
    row = Row(1, Sampling(), Guide("choice", '["ab"]'))
    sampler = sampler_of(tokenizer, 1)
    sampler.begin(row.begin(0))
    for _ in range(6):
        step(sampler, {0: row}, tokenizer.vocab_size + PADDING)
    end = row.made.index(tokenizer.stop_ids[0])
    assert tokenizer.decode(row.made[:end]) == "ab"
    assert set(row.made[end:]) == set(tokenizer.stop_ids)


def test_a_model_that_likes_spaces_comes_to_an_end(cases: dict[str, Case]) -> None:
    tokenizer = cases["byte_level"].ours
    size = tokenizer.vocab_size + PADDING
    spaces = [
        i for i in range(tokenizer.vocab_size) if not (tokenizer.token_bytes(i) or b"x").strip()
    ]
    sampler = sampler_of(tokenizer, 1)
    schema = {**SCHEMA, "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    rule = Sampling(stop_token_ids=stops_of(tokenizer))
    sampler.begin(Begin(0, rule, [1], [], Guide("json", json.dumps(schema))))
    made: list[int] = []
    while not made or made[-1] not in rule.stop_token_ids:
        logits = torch.zeros(1, size)
        logits[0, spaces] = 10
        made += sampler.choose(logits, [0], [1 + len(made)]).tokens
        assert len(made) < 120
    assert type(json.loads(tokenizer.decode(made[:-1]))["a"]) is bool


def test_a_guide_that_no_token_can_follow_breaks_its_own_row_only(cases: dict[str, Case]) -> None:
    tokenizer = cases["null"].ours
    sampler = sampler_of(tokenizer, 3)
    rule = Sampling(stop_token_ids=(tokenizer.vocab_size,))
    guides = [Guide("regex", "abc"), Guide("regex", "( 1)+"), Guide("regex", "(")]
    for slot, guide in enumerate(guides):
        sampler.begin(Begin(slot, rule, [1], [], guide))
    logits = torch.randn(3, tokenizer.vocab_size + PADDING)
    chosen = sampler.choose(logits, [2, 1, 0], [1, 1, 1])
    assert chosen.broken == [0, 2]
    assert chosen.tokens[1] == 1


@pytest.mark.parametrize(
    ("guide", "sentence"),
    [
        (Guide("json", ""), r"guide.json is 0 bytes; it needs 1 to"),
        (Guide("json", "[1"), "guide.json cannot be followed .*; it must be a JSON schema"),
        (Guide("json", '{"type": "obj"}'), "Invalid type: obj"),
        (Guide("json", '{"$ref": "http://x.example/y"}'), "guide.json cannot be followed"),
        (Guide("json", '{"items":' * 5000 + "{}" + "}" * 5000), "guide.json cannot be followed"),
        (Guide("json", '"text"'), "guide.json cannot be followed"),
        (Guide("json", '{"type":"string","pattern":"(?=a)"}'), "look-around"),
        (Guide("regex", "("), "guide.regex cannot be followed .*it must be a regular expression"),
        (Guide("regex", "(" * 9000 + "a" + ")" * 9000), "guide.regex cannot be followed"),
        (Guide("regex", "x" * (GUIDE_BYTES_MAX + 1)), f"is {GUIDE_BYTES_MAX + 1} bytes"),
        (Guide("choice", "a, b"), "guide.choice cannot be followed .* a JSON list of texts"),
        (Guide("choice", "[1]"), "guide.choice cannot be followed"),
        (Guide("choice", "[]"), "there is no text in it"),
        (Guide("choice", '["a", ""]'), "or an empty one"),
        (Guide("choice", "[" * 30000), "guide.choice cannot be followed"),
        (Guide("grammar", "start: x"), "guide.grammar cannot be followed .*unknown name"),
        (Guide("grammar", "root ::= " + "(" * 30000), "guide.grammar cannot be followed"),
        (
            Guide(
                "grammar",
                "start: T0\n"
                + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40))
                + 'T40: "a"\n',
            ),
            "guide.grammar cannot be followed .*too big",
        ),
        # Of these the library's own limits would allow hours of work, and gigabytes.
        (Guide("regex", "a?" * 32000), "guide.regex cannot be followed .*too big"),
        (
            Guide("json", json.dumps({"anyOf": [{"type": "string", "pattern": "a?" * 9000}]})),
            "a pattern has 18000 characters, at most 2000 can be",
        ),
        (
            Guide("json", json.dumps({"type": "object", "patternProperties": {"a?" * 9000: {}}})),
            "a pattern has 18000 characters",
        ),
        (Guide("grammar", "start: " + '"a"? ' * 12000), "guide.grammar cannot be followed"),
    ],
    ids=range(22),
)
def test_a_guide_that_cannot_be_followed_is_refused_soon(guide: Guide, sentence: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError, match=sentence) as refusal:
        check_guide(guide, (0,))
    assert refusal.value.field == f"guide.{guide.kind}"
    assert len(str(refusal.value)) < 500
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "guide",
    [
        Guide("regex", "a?" * 1500),
        Guide("grammar", "start: " + '"a"? ' * 3000),
        Guide("json", json.dumps({"anyOf": [{"type": "string", "pattern": "a?" * 1000}] * 16})),
        Guide("choice", json.dumps([f"choice {number}" for number in range(3000)])),
        Guide(
            "json",
            json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(600)}}),
        ),
    ],
    ids=["regex", "grammar", "patterns", "choices", "names"],
)
def test_the_most_that_is_let_in_is_followed_before_anyone_waits_long(
    guide: Guide, cases: dict[str, Case]
) -> None:
    tokenizer = cases["llama"].ours
    check_guide(guide, tokenizer.stop_ids)
    sampler = sampler_of(tokenizer, 1)
    sampler.begin(Begin(0, Sampling(), [1], [], Guide("regex", "a")))  # The vocabulary is read.
    started = time.process_time()
    sampler.begin(Begin(0, Sampling(stop_token_ids=tokenizer.stop_ids), [1], [], guide))
    chosen = sampler.choose(torch.zeros(1, tokenizer.vocab_size + PADDING), [0], [1])
    assert time.process_time() - started < 1.0
    if guide.kind in ("choice", "json"):
        assert not chosen.broken


def test_a_guide_of_a_kind_that_is_not_is_refused() -> None:
    with pytest.raises(RequestError, match="guide is of kind 'xml'; known are: json, regex"):
        check_guide(Guide("xml", "a"), (0,))  # type: ignore[arg-type]


def test_a_guide_needs_a_token_that_ends_it() -> None:
    with pytest.raises(RequestError, match="give stop_token_ids"):
        check_guide(Guide("regex", "a"), NullTokenizer(9).stop_ids)


def test_without_the_library_a_guide_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"install preamble\[guided\]"):
        check_guide(Guide("regex", "a"), (0,))
    # Nothing else needs it, and one that comes through nevertheless breaks its own row only.
    sampler = Sampler(2, 9, tokenizer_of_guides=NullTokenizer(9))
    sampler.begin(Begin(0, Sampling(), [1], []))
    sampler.begin(Begin(1, Sampling(), [1], [], Guide("regex", "( 1)+")))
    chosen = sampler.choose(torch.eye(9)[[3, 4]], [0, 1], [1, 1])
    assert (chosen.tokens[0], chosen.broken) == (3, [1])
