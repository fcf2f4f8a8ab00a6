"""Guided decoding: for any logits and every kind of tokenizer, the text matches its guide."""

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
from gpt.generation.reference_sampler import sample_token
from gpt.generation.stop_strings import StopStringDetokenizer
from gpt.sampling_params import SamplingParams
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer
from serving.messages import Guide, SlotInit
from serving.worker.guided_decoding import GUIDE_BYTES_MAX, check_guide
from serving.worker.sampler import Sampler
from tests.support.trained_tokenizers import Case, all_cases

STEPS_MAX = 400
PADDING = 3  # Ids of the padded vocabulary that the tokenizer does not have.

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


def matches_schema(text: str) -> bool:
    """Whether a text matches SCHEMA, checked without a schema library."""
    document = json.loads(text)
    return (
        set(document) == {"größe", "name", "kind", "tags"}
        and type(document["größe"]) is int
        and -20 <= document["größe"] <= 3000
        and isinstance(document["name"], str)
        and len(document["name"]) <= 12
        and document["kind"] in ("Straße", "世界", None, 7)
        and 1 <= len(document["tags"]) <= 3
        and all(isinstance(tag, bool) for tag in document["tags"])
    )


Check = Callable[[str], Any]
GUIDES: list[tuple[Guide, Check]] = [
    (Guide("json", json.dumps(SCHEMA)), matches_schema),
    (Guide("regex", PATTERN), re.compile(PATTERN).fullmatch),
    (Guide("choice", json.dumps(CHOICES)), CHOICES.__contains__),
    (Guide("grammar", GBNF), re.compile(r"\([a-c]{1,4}\)(,\([0-9]\))?").fullmatch),
    (Guide("grammar", LARK), re.compile(r"[a-d,\[\]]+").fullmatch),
]
# If every token begins with a space, a guide must not need text from inside a token.
NUMBER_GUIDES: list[tuple[Guide, Check]] = [
    (Guide("regex", "( [0-9]{1,3}){2,4}"), re.compile("( [0-9]{1,3}){2,4}").fullmatch),
    (Guide("choice", '[" 7", " 8 9"]'), [" 7", " 8 9"].__contains__),
]
WORD_GUIDES: list[tuple[Guide, Check]] = [
    (Guide("regex", "[ a-z]{4,12}"), re.compile("[ a-z]{4,12}").fullmatch),
    (Guide("grammar", "start: /[ a-z]{1,9}/"), re.compile("[ a-z]{1,9}").fullmatch),
]


@dataclass
class Row:
    """A sequence that is sampled from random logits, which depend only on its seed."""

    number: int
    rule: SamplingParams
    guide: Guide | None = None
    generated: list[int] = field(default_factory=list)

    def slot_init(self, slot: int) -> SlotInit:
        return SlotInit(slot, self.rule, [1, 2], list(self.generated), self.guide)

    def logits(self, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.number * 1000 + len(self.generated))
        return torch.randn(size, generator=generator) * 4

    @property
    def has_ended(self) -> bool:
        return bool(self.generated) and self.generated[-1] in self.rule.stop_token_ids


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return all_cases(tmp_path_factory.mktemp("tokenizers"))


def detokenize(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of the tokens, as a client receives it."""
    stream = StopStringDetokenizer(tokenizer, ())
    return "".join(map(stream.push, tokens)) + stream.finish()


def make_sampler(tokenizer: Tokenizer, slots: int) -> Sampler:
    return Sampler(slots, tokenizer.vocab_size + PADDING, guide_tokenizer=tokenizer)


def sample_step(sampler: Sampler, rows: dict[int, Row], size: int) -> None:
    """Sample one more token for the sequence in each slot."""
    slots = list(rows)
    logits = torch.stack([row.logits(size) for row in rows.values()])
    sampled = sampler.sample(logits, slots, [2 + len(row.generated) for row in rows.values()])
    assert not sampled.failed_guide_rows
    for row, token in zip(rows.values(), sampled.tokens, strict=True):
        row.generated.append(token)


def run_to_end(
    tokenizer: Tokenizer, rows: Sequence[Row], preemption_step: int | None = None
) -> None:
    """Run until each guided row has ended; at `preemption_step` all rows change slots."""
    size = tokenizer.vocab_size + PADDING
    sampler = make_sampler(tokenizer, len(rows))
    order = list(range(len(rows)))
    for count in range(STEPS_MAX):
        if count in (0, preemption_step):
            order = order[::-1]
            for slot, row in zip(order, rows, strict=True):
                sampler.init_slot(row.slot_init(slot))
        live = {slot: row for slot, row in zip(order, rows, strict=True) if not row.has_ended}
        if not any(row.guide for row in live.values()):
            return
        sample_step(sampler, live, size)
    raise AssertionError(f"a guide did not end in {STEPS_MAX} steps")


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's stop tokens; if it has none, an id that has no text."""
    return tokenizer.stop_ids or (tokenizer.vocab_size,)


@pytest.mark.parametrize(
    "kind",
    [
        "bpe",
        "llama",
        "unigram",
        "gpt2",
        "byte_level",
        "llama_json",
        "metaspace",
        "words",
        "null",
    ],
)
def test_random_logits_match_the_guide_and_leave_other_rows_unchanged(
    cases: dict[str, Case], kind: str
) -> None:
    tokenizer = cases[kind].ours
    stops = stop_ids(tokenizer)
    guides = {"null": NUMBER_GUIDES, "words": WORD_GUIDES}.get(kind, GUIDES)
    if kind in ("unigram", "metaspace"):  # These tokenizers cannot write every letter.
        pattern = "(the|wo rd){1,4}"
        guides = [(Guide("regex", pattern), re.compile(pattern).fullmatch)]
    rule = SamplingParams(temperature=1.0, stop_token_ids=stops)
    rows: list[Row] = []
    checks: list[Check | None] = []
    for guide, check in guides:
        check_guide(guide, stops)
        rows += [Row(len(rows) + seed, replace(rule, seed=seed), guide) for seed in range(3)]
        checks += [check] * 3
    for unguided_rule in (
        SamplingParams(),
        replace(rule, seed=3),
        replace(rule, top_p=0.9, frequency_penalty=1.0),
    ):
        rows.append(Row(len(rows), replace(unguided_rule, stop_token_ids=())))
        checks.append(None)
    run_to_end(tokenizer, rows)
    texts = set()
    for row, matches in zip(rows, checks, strict=True):
        if matches is None:
            check_unguided(tokenizer, row)
            continue
        text = detokenize(tokenizer, row.generated[:-1])
        assert matches(text), (row.guide, text)
        texts.add(text)
    assert len(texts) > len(guides)
    preempted_rows = [Row(row.number, row.rule, row.guide) for row in rows]
    run_to_end(tokenizer, preempted_rows, preemption_step=3)
    for row, preempted_row in zip(rows, preempted_rows, strict=True):
        assert row.guide is None or preempted_row.generated == row.generated


def check_unguided(tokenizer: Tokenizer, row: Row) -> None:
    """Assert that an unguided row has the tokens of the reference sampler."""
    prefix = Row(row.number, row.rule)
    for token in row.generated:
        logits = prefix.logits(tokenizer.vocab_size + PADDING)
        position = 2 + len(prefix.generated)
        assert token == sample_token(logits, row.rule, [1, 2], prefix.generated, position)
        prefix.generated.append(token)


def test_a_finished_guide_overrides_min_new_tokens_and_bad_words(
    cases: dict[str, Case],
) -> None:
    tokenizer = cases["gpt2"].ours
    stop = 5  # Also an ordinary token: allowed only where the guide may end.
    assert tokenizer.token_bytes(stop)
    text = tokenizer.decode([stop])
    guide = Guide("choice", json.dumps([f"ab{text}c", "abc", "abcd"]))
    for rule in (
        SamplingParams(min_new_tokens=30, stop_token_ids=(stop,)),
        SamplingParams(bad_words=((stop,),), stop_token_ids=(stop,)),
        SamplingParams(allowed_token_ids=(0,), stop_token_ids=(stop,), temperature=2.0),
    ):
        row = Row(1, rule, guide)
        sampler = make_sampler(tokenizer, 1)
        sampler.init_slot(row.slot_init(0))
        while not row.generated or row.generated[-1] != stop:
            sample_step(sampler, {0: row}, tokenizer.vocab_size + PADDING)
            assert len(row.generated) < 12
        assert tokenizer.decode(row.generated[:-1]) in json.loads(guide.text)
        if rule.min_new_tokens:  # It must continue as long as the guide allows.
            assert tokenizer.decode(row.generated[:-1]).endswith("d")


def test_the_tokenizers_stop_tokens_are_the_default(
    cases: dict[str, Case],
) -> None:
    tokenizer = cases["gpt2"].ours
    row = Row(1, SamplingParams(), Guide("choice", '["ab"]'))
    sampler = make_sampler(tokenizer, 1)
    sampler.init_slot(row.slot_init(0))
    for _ in range(6):
        sample_step(sampler, {0: row}, tokenizer.vocab_size + PADDING)
    end = row.generated.index(tokenizer.stop_ids[0])
    assert tokenizer.decode(row.generated[:end]) == "ab"
    assert set(row.generated[end:]) == set(tokenizer.stop_ids)


def test_json_whitespace_is_bounded(cases: dict[str, Case]) -> None:
    tokenizer = cases["byte_level"].ours
    size = tokenizer.vocab_size + PADDING
    spaces = [
        token
        for token in range(tokenizer.vocab_size)
        if not (tokenizer.token_bytes(token) or b"x").strip()
    ]
    sampler = make_sampler(tokenizer, 1)
    schema = {**SCHEMA, "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    rule = SamplingParams(stop_token_ids=stop_ids(tokenizer))
    sampler.init_slot(SlotInit(0, rule, [1], [], Guide("json", json.dumps(schema))))
    generated: list[int] = []
    while not generated or generated[-1] not in rule.stop_token_ids:
        logits = torch.zeros(1, size)
        logits[0, spaces] = 10
        generated += sampler.sample(logits, [0], [1 + len(generated)]).tokens
        assert len(generated) < 180
    text = tokenizer.decode(generated[:-1])
    assert type(json.loads(text)["a"]) is bool
    assert not re.search(r"\n\s*\n|[^\n\t ]  ", text)


def test_unlisted_properties_are_forbidden(cases: dict[str, Case]) -> None:
    tokenizer = cases["byte_level"].ours
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    for is_open in (False, True):
        if is_open:
            schema["additionalProperties"] = True
        sampler = make_sampler(tokenizer, 1)
        rule = SamplingParams(stop_token_ids=stop_ids(tokenizer))
        sampler.init_slot(SlotInit(0, rule, [1], [], Guide("json", json.dumps(schema))))
        generated: list[int] = []
        for text in ('{"', "a" if not is_open else "b"):
            for token in tokenizer.encode(text):
                logits = torch.zeros(1, tokenizer.vocab_size + PADDING)
                logits[0, token] = 10
                generated += sampler.sample(logits, [0], [1 + len(generated)]).tokens
        assert tokenizer.decode(generated) == ('{"b' if is_open else '{"a')
        logits = torch.zeros(1, tokenizer.vocab_size + PADDING)
        logits[0, tokenizer.encode("b")[0]] = 10
        last = sampler.sample(logits, [0], [1 + len(generated)]).tokens
        assert (tokenizer.decode(last) == "b") is is_open


def test_an_unsatisfiable_guide_fails_only_its_row(cases: dict[str, Case]) -> None:
    tokenizer = cases["null"].ours
    sampler = make_sampler(tokenizer, 3)
    rule = SamplingParams(stop_token_ids=(tokenizer.vocab_size,))
    guides = [Guide("regex", "abc"), Guide("regex", "( 1)+"), Guide("regex", "(")]
    for slot, guide in enumerate(guides):
        sampler.init_slot(SlotInit(slot, rule, [1], [], guide))
    logits = torch.randn(3, tokenizer.vocab_size + PADDING)
    sampled = sampler.sample(logits, [2, 1, 0], [1, 1, 1])
    assert sampled.failed_guide_rows == [0, 2]
    assert sampled.tokens[1] == 1


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (Guide("json", ""), r"guide.json has 0 bytes; it must have 1 to"),
        (Guide("json", "[1"), "guide.json is invalid or unsupported .*; give a JSON schema within"),
        (Guide("json", '{"type": "obj"}'), "Invalid type: obj"),
        (Guide("json", '{"$ref": "http://x.example/y"}'), "guide.json is invalid or unsupported"),
        (
            Guide("json", '{"items":' * 5000 + "{}" + "}" * 5000),
            "guide.json is invalid or unsupported",
        ),
        (Guide("json", '"text"'), "guide.json is invalid or unsupported"),
        (Guide("json", '{"type":"string","pattern":"(?=a)"}'), "look-around"),
        (Guide("regex", "a\\"), "guide.regex is invalid .*ends with a backslash"),
        (Guide("json", r'{"pattern": "a\\"}'), "guide.json is invalid .*ends with a backslash"),
        (Guide("regex", "("), "guide.regex is invalid or unsupported .*give a regular expression"),
        (Guide("regex", "(" * 9000 + "a" + ")" * 9000), "guide.regex is invalid or unsupported"),
        (Guide("regex", "x" * (GUIDE_BYTES_MAX + 1)), f"has {GUIDE_BYTES_MAX + 1} bytes"),
        (Guide("choice", "a, b"), "guide.choice is invalid or unsupported .* a JSON list of texts"),
        (Guide("choice", "[1]"), "guide.choice is invalid or unsupported"),
        (Guide("choice", "[]"), "the list is empty"),
        (Guide("choice", '["a", ""]'), "or contains an empty text"),
        (Guide("choice", "[" * 30000), "guide.choice is invalid or unsupported"),
        (Guide("grammar", "start: x"), "guide.grammar is invalid or unsupported .*unknown name"),
        (Guide("grammar", "root ::= " + "(" * 30000), "guide.grammar is invalid or unsupported"),
        (
            Guide(
                "grammar",
                "start: T0\n"
                + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40))
                + 'T40: "a"\n',
            ),
            "guide.grammar is invalid or unsupported .*too big",
        ),
        # With the library's own limits, these would take hours and gigabytes.
        (Guide("regex", "a?" * 32000), "guide.regex is invalid or unsupported .*too big"),
        (
            Guide("json", json.dumps({"anyOf": [{"type": "string", "pattern": "a?" * 9000}]})),
            "a pattern has 18000 characters; at most 2000 are allowed",
        ),
        (
            Guide("json", json.dumps({"type": "object", "patternProperties": {"a?" * 9000: {}}})),
            "a pattern has 18000 characters",
        ),
        (Guide("grammar", "start: " + '"a"? ' * 12000), "guide.grammar is invalid or unsupported"),
    ],
    ids=range(24),
)
def test_an_invalid_guide_is_refused_quickly(guide: Guide, message: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError, match=message) as refusal:
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
def test_the_largest_admitted_guides_start_quickly(guide: Guide, cases: dict[str, Case]) -> None:
    tokenizer = cases["llama"].ours
    check_guide(guide, tokenizer.stop_ids)
    sampler = make_sampler(tokenizer, 1)
    # The first guide also builds the library's tokenizer.
    sampler.init_slot(SlotInit(0, SamplingParams(), [1], [], Guide("regex", "a")))
    rule = SamplingParams(stop_token_ids=tokenizer.stop_ids)
    started = time.process_time()
    sampler.init_slot(SlotInit(0, rule, [1], [], guide))
    sampled = sampler.sample(torch.zeros(1, tokenizer.vocab_size + PADDING), [0], [1])
    assert time.process_time() - started < 1.0
    if guide.kind in ("choice", "json"):
        assert not sampled.failed_guide_rows


def test_an_unknown_guide_kind_is_refused() -> None:
    with pytest.raises(
        RequestError, match="guide has the unknown kind 'xml'; choose one of: json, regex"
    ):
        check_guide(Guide("xml", "a"), (0,))  # type: ignore[arg-type]


def test_a_guide_needs_a_stop_token() -> None:
    with pytest.raises(RequestError, match="set stop_token_ids"):
        check_guide(Guide("regex", "a"), NullTokenizer(9).stop_ids)


def test_without_llguidance_the_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"install preamble\[guided\]"):
        check_guide(Guide("regex", "a"), (0,))
    # Other rows do not need the library; a guide that was not refused fails only its own row.
    sampler = Sampler(2, 9, guide_tokenizer=NullTokenizer(9))
    sampler.init_slot(SlotInit(0, SamplingParams(), [1], []))
    sampler.init_slot(SlotInit(1, SamplingParams(), [1], [], Guide("regex", "( 1)+")))
    sampled = sampler.sample(torch.eye(9)[[3, 4]], [0, 1], [1, 1])
    assert (sampled.tokens[0], sampled.failed_guide_rows) == (3, [1])
