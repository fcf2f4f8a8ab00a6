"""From a file to the ids that a run learns: what is learned, cut, left out or refused, and why."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.adapters.prompt_template import Template
from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count
from gpt.errors import ConfigError
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer
from ptuning.config import TuneConfig
from ptuning.data.dataset import TaskData, read_examples, read_tasks
from ptuning.data.preflight import StepFacts, check_facts, check_lines, memory_line
from tests.support.models import CLASSIC
from tests.support.trained_tokenizers import (
    Case,
    byte_level,
    json_case,
    llama_like,
    sentencepiece_case,
)

V = 700
SIZES = replace(CLASSIC, vocab_size=V, max_position_embeddings=120)
P0, P1, P2 = (f"<|VIRTUAL_PROMPT_{n}|>" for n in range(3))
# The virtual tokens stand in the middle of the text, and two of their places touch.
MIDDLE = f"Q: {{question}}{P0} of {{context}}{P1}{P2}\nA: {{answer}}"
ROLES: dict[str, Any] = {"answer_field": "answer", "virtual_tokens": 6, "splits": [2, 3, 1]}
# Each of these would become something else, were the template filled by replacing texts.
ATTACKS = [P0, P2, "<prompt_0>", "<prompt_5>", "{answer}", "{context}", "{", "</s>", "<s>"]
ATTACKS += ["<|endoftext|>", "<unk>", "<0x41>", "\u2581"]
FIELDS = ("question", "context", "answer")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    top = tmp_path_factory.mktemp("tokenizers")
    same = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    return {
        "sentencepiece": sentencepiece_case(
            top / "a", model_type="bpe", byte_fallback=True, **same
        ),
        "byte level": json_case(top / "b", byte_level()),
        "llama json": json_case(top / "c", llama_like(), runs=True),
    }


KINDS = ("sentencepiece", "byte level", "llama json")


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return str(path)


def tasks_of(
    tokenizer: Tokenizer, records: Sequence[dict[str, Any]], folder: Path, **changes: Any
) -> list[TaskData]:
    values = {"model": "m", "name": "a", "data": write(folder / "x.jsonl", records)} | changes
    return read_tasks(TuneConfig.of(values, "x.yaml"), tokenizer, SIZES)


def numbers(folder: Path, records: Sequence[dict[str, Any]], **changes: Any) -> list[TaskData]:
    """With numbers as tokens, so that ids can be read off a record."""
    return tasks_of(NullTokenizer(V), records, folder, **{"virtual_tokens": 2} | changes)


def record(prompt: str, answer: str, **more: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": answer, **more}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "values",
    [
        ("the quick fox", "lazy dog", "jumps over"),
        (f"{P0}<prompt_0>", "{answer}", "{question}</s>"),
        ("Привет мир", "今日は世界 مرحبا", "déjà vu 🙂"),
    ],
    ids=["words", "attacks", "not Latin"],
)
def test_ids_are_those_of_a_list_made_by_hand(
    kind: str, values: tuple[str, str, str], cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases[kind]
    inputs = dict(zip(FIELDS, values, strict=True))
    question, context, answer = values

    (task,) = tasks_of(case.ours, [inputs], tmp_path, template=MIDDLE, **ROLES)

    # Encoded by our tokenizer, which is held against its library elsewhere: these texts have what
    # looks like control tokens.
    encode = case.ours.encode
    before = [*encode(f"Q: {question}"), V, V + 1, *encode(f" of {context}"), V + 2, V + 3, V + 4]
    before += [V + 5, *encode("\nA:")]
    whole = encode(f"\nA: {answer}")
    assert whole[: len(encode("\nA:"))] == encode("\nA:"), "or the answer would be cut elsewhere"
    (example,) = task.examples.examples
    assert list(example.ids) == [*before, *whole[len(encode("\nA:")) :], case.ours.eos_id]
    assert example.answer_start == len(before)
    assert list(example.learned) == list(range(len(before), len(example.ids)))
    assert task.examples.answers == [answer]
    assert task.examples.records == [{"question": question, "context": context}]
    if values[0].startswith("the"):
        assert encode("\nA:") == case.encode("\nA:")
        assert whole == case.encode(f"\nA: {answer}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    texts=st.lists(
        st.lists(st.one_of(st.sampled_from(ATTACKS), st.text(max_size=3)), max_size=4).map("".join),
        min_size=3,
        max_size=3,
    )
)
def test_a_field_never_becomes_a_virtual_or_a_control_token(
    kind: str, texts: list[str], cases: dict[str, Case]
) -> None:
    tokenizer = cases[kind].ours
    template = Template(MIDDLE, (2, 3, 1), answer_field="answer")
    inputs = dict(zip(FIELDS, texts, strict=True))

    ids = template.render(tokenizer, inputs, vocab_size=V, tokens_max=9999, answer=True).ids

    assert [token for token in ids if token >= V] == list(range(V, V + 6))
    # A text that has no token may be unknown; that is no control.
    controls = {tokenizer.bos_id, tokenizer.eos_id}
    controls |= {one.id for name, one in tokenizer.controls.items() if name != "<unk>"}
    assert controls.isdisjoint(ids[:-1])
    assert ids[-1] == tokenizer.eos_id


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_would_merge_with_its_prompt_is_learned_whole(
    kind: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    tokenizer = cases[kind].ours
    text, encode = "the quick fox", tokenizer.encode
    cuts = [n for n in range(2, 9) if encode(text)[: len(encode(text[:n]))] != encode(text[:n])]
    prompt, answer = text[: cuts[0]], text[cuts[0] :]
    (task,) = tasks_of(tokenizer, [record(prompt, answer), record("over", "")], tmp_path)
    first, second = task.examples.examples
    assert list(first.ids[20 : first.answer_start]) == encode(prompt)
    learned = [first.ids[place] for place in first.learned]
    assert learned == [*encode(answer, started=True), tokenizer.eos_id]
    assert tokenizer.decode(first.ids[20:]) == text
    assert [second.ids[place] for place in second.learned] == [tokenizer.eos_id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_example_keeps_its_virtual_tokens_its_answer_and_its_end(
    kind: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    tokenizer = cases[kind].ours
    records = [
        {"question": "the fox", "context": text * 40, "answer": "lazy dog"}
        for text in ("quick brown ", "Привет мир ", "今日は世界", "x")
    ]
    changes = {"template": MIDDLE, "truncate_field": "context", "tokens_max": 50} | ROLES
    (task,) = tasks_of(tokenizer, records, tmp_path, **changes)
    assert task.examples.truncated >= 3
    for example in task.examples.examples:
        assert len(example.ids) <= 50
        assert [token for token in example.ids if token >= V] == list(range(V, V + 6))
        assert tokenizer.decode(example.ids[example.answer_start :], started=True).strip() == (
            "lazy dog"
        )
        assert example.ids[-1] == tokenizer.eos_id


def test_all_text_is_learned_if_asked_but_never_the_first_id_or_a_virtual_one(
    tmp_path: Path,
) -> None:
    for template, virtual, ids, learned in (
        (f"{P0} {{prompt}} {{completion}}", {}, [V, V + 1, 5, 6, 7], [2, 3, 4]),
        (f"1 {P0} {{prompt}} {{completion}}", {}, [1, V, V + 1, 5, 6, 7], [3, 4, 5]),
        (
            f"1 2{P0}{{prompt}}{P1} {{completion}}",
            {"splits": [1, 1]},
            [1, 2, V, 5, 6, V + 1, 7],
            [1, 3, 4, 6],
        ),
    ):
        changes = {"template": template, "answer_only_loss": False} | virtual
        (task,) = numbers(tmp_path, [record("5 6", "7")], **changes)
        (example,) = task.examples.examples
        assert list(example.ids) == ids
        assert list(example.learned) == learned


def test_rows_of_several_tasks_stand_one_after_another_in_one_table(tmp_path: Path) -> None:
    shared = write(
        tmp_path / "shared.jsonl",
        [
            record("5", "6", taskname="b"),
            record("7", "8", taskname="a"),
            {"q": "1", "a": "2", "taskname": "c", "prompt": "0"},
            record("9", "10", taskname="b"),
        ],
    )
    other = write(tmp_path / "other.csv.jsonl", [record("11", "12", taskname="a")])
    plain = f"{P0}{{prompt}} {{completion}}"
    own = {"splits": [2, 1], "answer_field": "a", "template": f"{P0}{{q}}{P1} {{a}}"}
    config = {"model": "m", "data": shared, "answer_only_loss": False}
    config["tasks"] = [
        {"name": "a", "virtual_tokens": 2, "validation": other, "template": plain},
        {"name": "b", "virtual_tokens": 1, "answer_only_loss": True, "template": plain},
        {"name": "c", "virtual_tokens": 3, **own},
    ]
    told: list[int] = []

    a, b, c = read_tasks(
        TuneConfig.of(config, "x.yaml"),
        NullTokenizer(V),
        SIZES,
        lambda count, total: told.append(count),
    )

    assert told == [4, 1]  # Each file is read once.
    assert [one.first_row for one in (a, b, c)] == [0, 2, 3]
    found = [[list(example.ids) for example in one.examples.examples] for one in (a, b, c)]
    assert found == [
        [[V, V + 1, 7, 8]],
        [[V + 2, 5, 6], [V + 2, 9, 10]],
        [[V + 3, V + 4, 1, V + 5, 2]],
    ]
    places = [[list(example.learned) for example in one.examples.examples] for one in (a, b, c)]
    assert places == [[[2, 3]], [[2], [2]], [[2, 4]]]
    assert [example.task for one in (a, b, c) for example in one.examples.examples] == [0, 1, 1, 2]
    assert a.validation is not None
    assert list(a.validation.examples[0].ids) == [V, V + 1, 11, 12]
    assert b.validation is c.validation is None


def test_without_virtual_tokens_the_template_s_markers_are_left_out(tmp_path: Path) -> None:
    template = f"1 {P0}{{prompt}} {{completion}}"
    changes = {"method": "full", "name": "", "template": template}
    (task,) = numbers(tmp_path, [record("5", "6")], **changes)
    assert list(task.examples.examples[0].ids) == [1, 5, 6]
    assert task.template.rows == 0


def test_what_is_left_out_is_told_with_its_line_and_the_rest_is_kept(tmp_path: Path) -> None:
    template = f"{P0}{{prompt}} {{completion}}"
    records = [
        record("1", "2"),
        record("3 " * 9, "4"),
        record("5", "6 " * 9),
        record("1", "\ud800"),
    ]
    records += [record("7", "")]
    (task,) = numbers(tmp_path, records, template=template, tokens_max=8)
    found = task.examples
    assert [list(example.ids) for example in found.examples] == [[V, V + 1, 1, 2]]
    assert found.records == [{"prompt": "1"}]
    assert found.answers == ["2"]
    reasons = [
        "line 2: prompt and answer have 10 tokens + 2 virtual tokens = 12, over the limit of 8",
        "line 3: prompt and answer have 10 tokens + 2 virtual tokens = 12, over the limit of 8; "
        "the answer alone has 9: shorten it, or allow more",
        "line 4: ",
        "line 5: nothing to learn, as the answer is empty and no token ends it",
    ]
    assert len(found.dropped) == len(reasons)
    assert all(map(str.startswith, found.dropped, reasons)), found.dropped


def test_the_first_so_many_are_a_file_of_their_own(tmp_path: Path) -> None:
    (task,) = numbers(
        tmp_path, [record(f"{n} ", "1") for n in range(5)], template=f"{P0}{{prompt}}{{completion}}"
    )
    first = task.examples.first(2)
    assert first.examples == task.examples.examples[:2]
    assert (len(first.records), first.answers) == (2, ["1", "1"])
    assert len(task.examples.first(99).examples) == 5


TWO = {"tasks": [{"name": "a"}, {"name": "b"}], "name": ""}
REFUSED: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str]] = {
    "no record": ({}, [], "has no usable example of the task 'a'; it has no record"),
    "all too long": (
        {"tokens_max": 3},
        [record("1", "2")],
        "the first was left out: line 1: prompt",
    ),
    "a field": ({}, [record("1", "2"), {"prompt": "1"}], "line 2: no field 'completion', which"),
    "a number": ({}, [{"prompt": "1", "completion": 2}], "line 1: 'completion' is 2; it must be"),
    "null": ({}, [{"prompt": None, "completion": "2"}], "line 1: 'prompt' is None; it must be"),
    "unknown": (TWO, [record("1", "2", taskname="A")], "line 1: no task with this file is named"),
    "no taskname": (TWO, [record("1", "2")], "line 1: no field 'taskname', and several tasks"),
    "a taskname": (TWO, [{**record("1", "2"), "taskname": 3}], "'taskname' is 3; it must be a"),
    "an empty task": (TWO, [record("1", "2", taskname="a")], "no usable example of the task 'b'"),
    "a mixture": (
        {},
        [record("1", "2", taskname="x"), record("1", "2", taskname="y")],
        "line 2: the taskname is 'y', and 'x' above it; list several tasks under `tasks`",
    ),
    "two of a name": ({"tasks": [{"name": "a"}] * 2}, [], "two tasks are named 'a'; each needs a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_records_are_refused_with_their_line(case: str, tmp_path: Path) -> None:
    changes, records, words = REFUSED[case]
    data = write(tmp_path / "x.jsonl", records)
    values = {"model": "m", "name": "a", "data": data} | changes
    if "tasks" in changes:
        values.pop("name")
    with pytest.raises(ConfigError) as caught:
        read_tasks(TuneConfig.of(values, "x.yaml"), NullTokenizer(V), SIZES)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_of_one_task_takes_records_by_another_name(tmp_path: Path) -> None:
    template = f"{P0}{{prompt}} {{completion}}"
    named = [record("1", "2", taskname="squad"), record("1", "2")]
    (task,) = numbers(tmp_path, named, template=template)
    assert len(task.examples.examples) == 2
    # Where the template has such a field, it is one like others.
    named = [record("1", "2", taskname="5"), record("1", "2", taskname="6")]
    (task,) = numbers(tmp_path, named, template=f"{P0}{{taskname}} {{completion}}")
    assert [example.ids[2] for example in task.examples.examples] == [5, 6]


NEMO: dict[str, Any] = {
    "taskname": "squad",
    "prompt_template": f"{P0} {{context}} {P1} {{answer}}",
    "total_virtual_tokens": 5,
    "virtual_token_splits": [3, 2],
    "truncate_field": "context",
    "answer_only_loss": True,
    "answer_field": "answer",
}


def test_templates_of_nemo_are_tasks() -> None:
    short = {
        "taskname": "all",
        "prompt_template": f"{P0}{{text}} {{label}}",
        "total_virtual_tokens": 4,
        "truncate_field": None,
        "virtual_token_splits": None,
    }
    values = {"model": "m", "data": "d", "task_templates": [NEMO, short]}
    first, second = TuneConfig.of(values, "x.yaml").wanted
    assert (first.name, first.splits, first.virtual_tokens) == ("squad", (3, 2), 5)
    assert (first.truncate_field, first.answer_field) == ("context", "answer")
    assert first.answer_only_loss is True
    # NeMo learns all of the text unless it is told otherwise.
    assert (second.answer_field, second.answer_only_loss, second.data) == ("label", False, "d")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"total_virtual_token": 5},
            "number 1: unknown key 'total_virtual_token'; did you mean 'to",
        ),
        ({"total_virtual_tokens": "5"}, "total_virtual_tokens is '5'; it must be a whole number"),
        (
            {"virtual_token_splits": [1, 2]},
            r"number 1: splits are \[1, 2\], 3 in all; they must su",
        ),
        (
            {"answer_field": None, "prompt_template": "{a}."},
            "answer_field is missing, and prompt_t",
        ),
    ],
)
def test_a_wrong_template_of_nemo_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneConfig.of({"model": "m", "task_templates": [NEMO | change]}, "x.yaml")
    several: tuple[object, ...] = ({}, [], [3])
    for wrong in several:
        with pytest.raises(ConfigError, match=r"x\.yaml: task_templates"):
            TuneConfig.of({"model": "m", "task_templates": wrong}, "x.yaml")


def test_rows_of_a_table_are_records_like_others(tmp_path: Path) -> None:
    content = io.StringIO()
    csv.writer(content).writerows([("id", "prompt", "completion"), (1, 5, 6), (2, "7\n8", 9)])
    path = tmp_path / "x.csv"
    path.write_text(content.getvalue(), newline="")
    template = Template(
        f"{P0}{{prompt}} {{completion}}", (1,), answer_field="completion", eos=False
    )
    found = read_examples(path, template, NullTokenizer(V), vocab_size=V, tokens_max=9)
    assert [list(example.ids) for example in found.examples] == [[V, 5, 6], [V, 7, 8, 9]]


def test_what_would_be_learned_is_told_before_anything_is(tmp_path: Path) -> None:
    template = f"{P0}1 {{prompt}} {{completion}}"
    records = [record(f"2 {n}", f"{n} {n}") for n in range(10)] + [
        record("3", "9"),
        record("3", "9"),
    ]
    records.append(record("4 " * 20, "5"))
    known = write(tmp_path / "v.jsonl", [record("2 7", "8"), record("2 77", "8")])
    changes = {"template": template, "validation": known, "tokens_max": 20, "max_new_tokens": 1}
    changes |= {"steps": 6, "batch_examples": 4, "micro_batch_examples": 2, "dp": 2}
    config = TuneConfig.of(
        {"model": "m", "data": "d", "name": "a", "virtual_tokens": 2} | changes, "x.yaml"
    )
    tasks = numbers(tmp_path, records, **changes)

    facts = check_facts(tasks, NullTokenizer(V), config)
    lines = check_lines(tasks, NullTokenizer(V), config, SIZES)

    (task,) = facts.tasks
    learning = task.learning
    assert (learning.examples, learning.cut, learning.left_out) == (12, 0, 1)
    assert (learning.repeated, learning.empty_answers, task.known_prompts) == (1, 0, 1)
    assert (learning.prompt_tokens.least, learning.prompt_tokens.most) == (4, 5)
    assert (learning.answer_tokens.least, learning.answer_tokens.half) == (1, 2)
    assert (facts.step.examples, facts.step.passes, facts.step.rounds) == (4, 2, 2)
    # Of two rounds: 76 ids in each, of which each example's last is not computed; a pass shares the
    # ids that its examples begin with.
    whole = 2 * (sum(len(example.ids) - 1 for example in tasks[0].examples.examples)) / 6
    assert facts.step.tokens + facts.step.shared_tokens == pytest.approx(whole)
    assert facts.step.shared_tokens >= 2 * 2  # Two virtual tokens at least, in both passes.
    assert json.loads(json.dumps(asdict(facts)))["step"]["rounds"] == 2
    text = "\n".join(lines)
    assert "prompt (5 tokens): '<2 virtual>1 2 0'" in text
    assert "answer (2 tokens, learned): ' 0 0'" in text
    for words in (
        "12 examples; 0 were cut, 1 left out",
        "left out: line 13: prompt and answer have 22 tokens",
        "6 steps are 2 rounds of all examples",
        "warning: 1 of 2 validation prompts are learned from as well",
        "warning: 10 answers are longer than max_new_tokens, 1",
        "warning: the warm-up's 20 steps are all of the run's 6",
        "1 examples that are repeated",
        "no token that ends a text",
    ):
        assert words in text, text


def test_the_memory_that_a_run_needs_is_told_before_anything_is() -> None:
    h, layers, tokens = 4096, 32, 4096
    model = GPTConfig(layers, h, 32, 51200, 2048, dtype="bfloat16")
    step = StepFacts(8, 8, 8.0 * tokens, tokens, 0, 100, 1)
    settings = {"model": "m", "data": "d", "name": "a"}

    def told(**changes: object) -> tuple[float, float]:
        line = memory_line(TuneConfig.of(settings | changes, "x.yaml"), model, step)
        weights, kept = re.findall(r"([\d.]+) GB", line)
        return float(weights), float(kept)

    frozen = (2 * parameter_count(model), 18 * layers * tokens * h)
    assert told() == tuple(round(one / 1e9, 3) for one in frozen)
    whole = (18 * parameter_count(model), 32 * layers * tokens * h)
    assert told(method="full") == tuple(round(one / 1e9, 3) for one in whole)
    assert told(recompute="full")[1] == pytest.approx(frozen[1] / 1e9 / 9, abs=1e-3)
    # A stage has half of the layers, and twice as many passes on their way.
    assert told(pp=2)[1] == told()[1] and told(pp=2)[0] < told()[0] * 0.6
    assert told(tp=8, sequence_parallel=True)[1] == pytest.approx(told()[1] / 8, abs=1e-3)
