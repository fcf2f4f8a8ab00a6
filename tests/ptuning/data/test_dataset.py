"""Dataset: token ids and loss positions of records, and truncated, dropped or invalid records."""

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

from gpt.adapters.prompt_template import PromptTemplate
from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count
from gpt.errors import ConfigError
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer
from ptuning.config import TuneConfig
from ptuning.data.dataset import (
    Example,
    ExampleSet,
    TaskData,
    new_tokens_limit,
    read_examples,
    read_tasks,
)
from ptuning.data.preflight import StepStats, memory_line, preflight_lines, preflight_report
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
# The virtual tokens stand in the middle of the text, and two groups of them are adjacent.
MIDDLE = f"Q: {{question}}{P0} of {{context}}{P1}{P2}\nA: {{answer}}"
ROLES: dict[str, Any] = {"answer_field": "answer", "virtual_tokens": 6, "splits": [2, 3, 1]}
# Filling a template by text replacement would change each of these.
ATTACKS = [P0, P2, "<prompt_0>", "<prompt_5>", "{answer}", "{context}", "{", "</s>", "<s>"]
ATTACKS += ["<|endoftext|>", "<unk>", "<0x41>", "\u2581"]
FIELDS = ("question", "context", "answer")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("tokenizers")
    options = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    return {
        "sentencepiece": sentencepiece_case(
            folder / "a", model_type="bpe", byte_fallback=True, **options
        ),
        "byte level": json_case(folder / "b", byte_level()),
        "llama json": json_case(folder / "c", llama_like(), runs=True),
    }


KINDS = ("sentencepiece", "byte level", "llama json")


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return str(path)


def read_tasks_of(values: dict[str, Any], tokenizer: Tokenizer) -> list[TaskData]:
    """Read the tasks of the settings `values`."""
    config = TuneConfig.from_dict(values, "x.yaml")
    return read_tasks(config.data_config, config.method_config, tokenizer, SIZES)


def tasks_of(
    tokenizer: Tokenizer, records: Sequence[dict[str, Any]], folder: Path, **changes: Any
) -> list[TaskData]:
    values = {"model": "m", "name": "a", "data": write(folder / "x.jsonl", records)} | changes
    return read_tasks_of(values, tokenizer)


def numbers(folder: Path, records: Sequence[dict[str, Any]], **changes: Any) -> list[TaskData]:
    """Tasks whose tokens are numbers, so that a record shows its ids."""
    return tasks_of(NullTokenizer(V), records, folder, **{"virtual_tokens": 2} | changes)


def record(prompt: str, answer: str, **fields: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": answer, **fields}


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
def test_rendered_ids_equal_a_hand_made_list(
    kind: str, values: tuple[str, str, str], cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases[kind]
    inputs = dict(zip(FIELDS, values, strict=True))
    question, context, answer = values

    (task,) = tasks_of(case.ours, [inputs], tmp_path, template=MIDDLE, **ROLES)

    # Encoded by our tokenizer, which other tests compare with its library: these texts contain what
    # looks like control tokens.
    encode = case.ours.encode
    expected_prompt = [
        *encode(f"Q: {question}"),
        V,
        V + 1,
        *encode(f" of {context}"),
        V + 2,
        V + 3,
        V + 4,
    ]
    expected_prompt += [V + 5, *encode("\nA:")]
    answer_ids = encode(f"\nA: {answer}")
    assert answer_ids[: len(encode("\nA:"))] == encode("\nA:"), (
        "or the answer would be cut elsewhere"
    )
    (example,) = task.examples.examples
    assert list(example.ids) == [
        *expected_prompt,
        *answer_ids[len(encode("\nA:")) :],
        case.ours.eos_id,
    ]
    assert example.answer_start == len(expected_prompt)
    assert list(example.loss_positions) == list(range(len(expected_prompt), len(example.ids)))
    assert task.examples.answers == [answer]
    assert task.examples.records == [{"question": question, "context": context}]
    if values[0].startswith("the"):
        assert encode("\nA:") == case.encode("\nA:")
        assert answer_ids == case.encode(f"\nA: {answer}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    texts=st.lists(
        st.lists(st.one_of(st.sampled_from(ATTACKS), st.text(max_size=3)), max_size=4).map("".join),
        min_size=3,
        max_size=3,
    )
)
def test_field_text_never_becomes_a_virtual_or_special_token(
    kind: str, texts: list[str], cases: dict[str, Case]
) -> None:
    tokenizer = cases[kind].ours
    template = PromptTemplate(MIDDLE, (2, 3, 1), answer_field="answer")
    inputs = dict(zip(FIELDS, texts, strict=True))

    ids = template.render(tokenizer, inputs, vocab_size=V, tokens_max=9999, with_answer=True).ids

    assert [token for token in ids if token >= V] == list(range(V, V + 6))
    # A text that has no token may be unknown; that is no control.
    controls = {tokenizer.bos_id, tokenizer.eos_id}
    controls |= {
        control_token.id
        for name, control_token in tokenizer.control_tokens.items()
        if name != "<unk>"
    }
    assert controls.isdisjoint(ids[:-1])
    assert ids[-1] == tokenizer.eos_id


@pytest.mark.parametrize("kind", KINDS)
def test_answer_tokens_do_not_merge_with_the_prompt(
    kind: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    tokenizer = cases[kind].ours
    text = "the quick fox"
    encode = tokenizer.encode
    merging_positions = [
        n for n in range(2, 9) if encode(text)[: len(encode(text[:n]))] != encode(text[:n])
    ]
    prompt = text[: merging_positions[0]]
    answer = text[merging_positions[0] :]
    (task,) = tasks_of(tokenizer, [record(prompt, answer), record("over", "")], tmp_path)
    first_example, second_example = task.examples.examples
    assert list(first_example.ids[20 : first_example.answer_start]) == encode(prompt)
    answer_ids = [first_example.ids[position] for position in first_example.loss_positions]
    assert answer_ids == [*encode(answer, continues_text=True), tokenizer.eos_id]
    assert tokenizer.decode(first_example.ids[20:]) == text
    assert [second_example.ids[position] for position in second_example.loss_positions] == [
        tokenizer.eos_id
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_example_keeps_virtual_tokens_answer_and_end_token(
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
        assert tokenizer.decode(
            example.ids[example.answer_start :], continues_text=True
        ).strip() == ("lazy dog")
        assert example.ids[-1] == tokenizer.eos_id


def test_full_text_loss_skips_the_first_id_and_virtual_tokens(
    tmp_path: Path,
) -> None:
    for template, virtual, ids, loss_ids in (
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
        assert list(example.loss_positions) == loss_ids


def test_rows_of_several_tasks_are_consecutive_in_one_table(tmp_path: Path) -> None:
    shared_file = write(
        tmp_path / "shared.jsonl",
        [
            record("5", "6", taskname="b"),
            record("7", "8", taskname="a"),
            {"q": "1", "a": "2", "taskname": "c", "prompt": "0"},
            record("9", "10", taskname="b"),
        ],
    )
    other_file = write(tmp_path / "other.csv.jsonl", [record("11", "12", taskname="a")])
    plain = f"{P0}{{prompt}} {{completion}}"
    own_settings = {"splits": [2, 1], "answer_field": "a", "template": f"{P0}{{q}}{P1} {{a}}"}
    values = {"model": "m", "data": shared_file, "answer_only_loss": False}
    values["tasks"] = [
        {"name": "a", "virtual_tokens": 2, "validation": other_file, "template": plain},
        {"name": "b", "virtual_tokens": 1, "answer_only_loss": True, "template": plain},
        {"name": "c", "virtual_tokens": 3, **own_settings},
    ]
    reports: list[int] = []

    config = TuneConfig.from_dict(values, "x.yaml")
    a, b, c = read_tasks(
        config.data_config,
        config.method_config,
        NullTokenizer(V),
        SIZES,
        lambda count, total: reports.append(count),
    )

    assert reports == [4, 1]  # Each file is read once.
    assert [task_data.first_row for task_data in (a, b, c)] == [0, 2, 3]
    ids_by_task = [
        [list(example.ids) for example in task_data.examples.examples] for task_data in (a, b, c)
    ]
    assert ids_by_task == [
        [[V, V + 1, 7, 8]],
        [[V + 2, 5, 6], [V + 2, 9, 10]],
        [[V + 3, V + 4, 1, V + 5, 2]],
    ]
    places = [
        [list(example.loss_positions) for example in task_data.examples.examples]
        for task_data in (a, b, c)
    ]
    assert places == [[[2, 3]], [[2], [2]], [[2, 4]]]
    assert [
        example.task_index for task_data in (a, b, c) for example in task_data.examples.examples
    ] == [
        0,
        1,
        1,
        2,
    ]
    assert a.validation is not None
    assert list(a.validation.examples[0].ids) == [V, V + 1, 11, 12]
    assert b.validation is c.validation is None


def test_template_without_virtual_tokens_has_no_markers(tmp_path: Path) -> None:
    template = f"1 {P0}{{prompt}} {{completion}}"
    changes = {"method": "full", "name": "", "template": template}
    (task,) = numbers(tmp_path, [record("5", "6")], **changes)
    assert list(task.examples.examples[0].ids) == [1, 5, 6]
    assert task.template.virtual_tokens == 0


def test_dropped_records_are_reported_and_the_rest_is_kept(tmp_path: Path) -> None:
    template = f"{P0}{{prompt}} {{completion}}"
    records = [
        record("1", "2"),
        record("3 " * 9, "4"),
        record("5", "6 " * 9),
        record("1", "\ud800"),
    ]
    records += [record("7", "")]
    (task,) = numbers(tmp_path, records, template=template, tokens_max=8)
    examples = task.examples
    assert [list(example.ids) for example in examples.examples] == [[V, V + 1, 1, 2]]
    assert examples.records == [{"prompt": "1"}]
    assert examples.answers == ["2"]
    reasons = [
        "line 2: prompt and answer have 10 tokens + 2 virtual tokens = 12, over the limit of 8",
        "line 3: prompt and answer have 10 tokens + 2 virtual tokens = 12, over the limit of 8; "
        "the answer alone has 9 tokens, so shorten it, or raise the limit",
        "line 4: ",
        "line 5: nothing to learn: the answer is empty and no end token follows it",
    ]
    assert len(examples.dropped) == len(reasons)
    assert all(map(str.startswith, examples.dropped, reasons)), examples.dropped


def test_head_equals_a_file_with_the_first_records(tmp_path: Path) -> None:
    (task,) = numbers(
        tmp_path, [record(f"{n} ", "1") for n in range(5)], template=f"{P0}{{prompt}}{{completion}}"
    )
    head = task.examples.head(2)
    assert head.examples == task.examples.examples[:2]
    assert (len(head.records), head.answers) == (2, ["1", "1"])
    assert len(task.examples.head(99).examples) == 5


TWO = {"tasks": [{"name": "a"}, {"name": "b"}], "name": ""}
INVALID_RECORDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str]] = {
    "no record": ({}, [], "has no usable example of the task 'a'; it has no record"),
    "all too long": (
        {"tokens_max": 3},
        [record("1", "2")],
        "the first record was dropped: line 1: prompt",
    ),
    "a field": (
        {},
        [record("1", "2"), {"prompt": "1"}],
        "line 2: the record has no field 'completion', but",
    ),
    "a number": ({}, [{"prompt": "1", "completion": 2}], "line 1: 'completion' is 2; it must be"),
    "null": ({}, [{"prompt": None, "completion": "2"}], "line 1: 'prompt' is None; it must be"),
    "unknown": (TWO, [record("1", "2", taskname="A")], "no task that reads this file is named"),
    "no taskname": (
        TWO,
        [record("1", "2")],
        "line 1: the record has no field 'taskname', but several tasks",
    ),
    "a taskname": (TWO, [{**record("1", "2"), "taskname": 3}], "'taskname' is 3; it must be a"),
    "an empty task": (TWO, [record("1", "2", taskname="a")], "no usable example of the task 'b'"),
    "a mixture": (
        {},
        [record("1", "2", taskname="x"), record("1", "2", taskname="y")],
        "line 2: the taskname is 'y', but it is 'x' in earlier records; list several tasks by name",
    ),
    "two of a name": ({"tasks": [{"name": "a"}] * 2}, [], "two tasks are named 'a'; give each"),
}


@pytest.mark.parametrize("case", INVALID_RECORDS)
def test_invalid_records_are_refused_with_their_line(case: str, tmp_path: Path) -> None:
    changes, records, message_words = INVALID_RECORDS[case]
    data_path = write(tmp_path / "x.jsonl", records)
    values = {"model": "m", "name": "a", "data": data_path} | changes
    if "tasks" in changes:
        values.pop("name")
    with pytest.raises(ConfigError) as caught:
        read_tasks_of(values, NullTokenizer(V))
    assert message_words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_single_task_accepts_another_taskname(tmp_path: Path) -> None:
    template = f"{P0}{{prompt}} {{completion}}"
    labelled = [record("1", "2", taskname="squad"), record("1", "2")]
    (task,) = numbers(tmp_path, labelled, template=template)
    assert len(task.examples.examples) == 2
    # If the template has such a field, it is an ordinary field.
    labelled = [record("1", "2", taskname="5"), record("1", "2", taskname="6")]
    (task,) = numbers(tmp_path, labelled, template=f"{P0}{{taskname}} {{completion}}")
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


def test_nemo_task_templates_become_tasks() -> None:
    nemo_values = {
        "taskname": "all",
        "prompt_template": f"{P0}{{text}} {{label}}",
        "total_virtual_tokens": 4,
        "truncate_field": None,
        "virtual_token_splits": None,
    }
    values = {"model": "m", "data": "d", "task_templates": [NEMO, nemo_values]}
    config = TuneConfig.from_dict(values, "x.yaml")
    first_task, second_task = config.data_config.resolved_tasks
    assert (first_task.name, first_task.splits, first_task.virtual_tokens) == ("squad", (3, 2), 5)
    assert (first_task.truncate_field, first_task.answer_field) == ("context", "answer")
    assert first_task.answer_only_loss is True
    # NeMo trains on all of the text by default.
    assert (second_task.answer_field, second_task.answer_only_loss, second_task.data) == (
        "label",
        False,
        "d",
    )


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
            r"number 1: splits are \[1, 2\], with the sum 3; they must su",
        ),
        (
            {"answer_field": None, "prompt_template": "{a}."},
            "answer_field is missing, and prompt_t",
        ),
    ],
)
def test_invalid_nemo_template_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneConfig.from_dict({"model": "m", "task_templates": [NEMO | change]}, "x.yaml")
    several: tuple[object, ...] = ({}, [], [3])
    for invalid in several:
        with pytest.raises(ConfigError, match=r"x\.yaml: task_templates"):
            TuneConfig.from_dict({"model": "m", "task_templates": invalid}, "x.yaml")


def test_csv_rows_give_the_same_examples(tmp_path: Path) -> None:
    content = io.StringIO()
    csv.writer(content).writerows([("id", "prompt", "completion"), (1, 5, 6), (2, "7\n8", 9)])
    path = tmp_path / "x.csv"
    path.write_text(content.getvalue(), newline="")
    template = PromptTemplate(
        f"{P0}{{prompt}} {{completion}}", (1,), answer_field="completion", eos=False
    )
    examples = read_examples(path, template, NullTokenizer(V), vocab_size=V, tokens_max=9)
    assert [list(example.ids) for example in examples.examples] == [[V, 5, 6], [V, 7, 8, 9]]


def test_check_reports_examples_counts_and_warnings(tmp_path: Path) -> None:
    template = f"{P0}1 {{prompt}} {{completion}}"
    records = [record(f"2 {n}", f"{n} {n}") for n in range(10)] + [
        record("3", "9"),
        record("3", "9"),
    ]
    records.append(record("4 " * 20, "5"))
    validation = write(tmp_path / "v.jsonl", [record("2 7", "8"), record("2 77", "8")])
    changes = {
        "template": template,
        "validation": validation,
        "tokens_max": 20,
        "max_new_tokens": 1,
    }
    changes |= {"steps": 6, "batch_examples": 4, "micro_batch_examples": 2, "dp": 2}
    config = TuneConfig.from_dict(
        {"model": "m", "data": "d", "name": "a", "virtual_tokens": 2} | changes, "x.yaml"
    )
    tasks = numbers(tmp_path, records, **changes)

    report = preflight_report(tasks, NullTokenizer(V), config)
    lines = preflight_lines(tasks, NullTokenizer(V), config, SIZES)

    (task,) = report.tasks
    learning = task.learning
    assert (learning.examples, learning.cut, learning.left_out) == (12, 0, 1)
    assert (learning.repeated, learning.empty_answers, task.known_prompts) == (1, 0, 1)
    assert (learning.prompt_tokens.least, learning.prompt_tokens.most) == (4, 5)
    assert (learning.answer_tokens.least, learning.answer_tokens.half) == (1, 2)
    assert (report.step.examples, report.step.passes, report.step.rounds) == (4, 2, 2)
    # Of two rounds: 76 ids in each, of which each example's last is not computed; a pass shares the
    # common first ids of its examples.
    tokens_per_step = 2 * (sum(len(example.ids) - 1 for example in tasks[0].examples.examples)) / 6
    assert report.step.tokens + report.step.shared_tokens == pytest.approx(tokens_per_step)
    assert report.step.shared_tokens >= 2 * 2  # Two virtual tokens at least, in both passes.
    assert json.loads(json.dumps(asdict(report)))["step"]["rounds"] == 2
    text = "\n".join(lines)
    assert "prompt (5 tokens): '<2 virtual>1 2 0'" in text
    assert "answer (2 tokens, with a loss): ' 0 0'" in text
    for expected_words in (
        "12 examples; 0 truncated, 1 dropped",
        "dropped: line 13: prompt and answer have 22 tokens",
        "6 steps are 2 epochs",
        "warning: 1 of 2 validation prompts also occur in the training data",
        "warning: 10 answers are longer than max_new_tokens (1)",
        "warning: warmup_steps is 20 and the run has 6 steps",
        "1 duplicate examples",
        "no end-of-text token",
    ):
        assert expected_words in text, text


def test_check_reports_the_estimated_memory() -> None:
    h = 4096
    layers = 32
    tokens = 4096
    model = GPTConfig(layers, h, 32, 51200, 2048, dtype="bfloat16")
    step = StepStats(8, 8, 8.0 * tokens, tokens, 0, 100, 1)
    settings = {"model": "m", "data": "d", "name": "a"}

    def estimated_memory(**changes: object) -> tuple[float, float]:
        line = memory_line(TuneConfig.from_dict(settings | changes, "x.yaml"), model, step)
        weights, activations = re.findall(r"([\d.]+) GB", line)
        return float(weights), float(activations)

    frozen = (2 * parameter_count(model), 18 * layers * tokens * h)
    assert estimated_memory() == tuple(round(byte_count / 1e9, 3) for byte_count in frozen)
    full_memory = (18 * parameter_count(model), 32 * layers * tokens * h)
    assert estimated_memory(method="full") == tuple(
        round(byte_count / 1e9, 3) for byte_count in full_memory
    )
    assert estimated_memory(recompute="full")[1] == pytest.approx(frozen[1] / 1e9 / 9, abs=1e-3)
    # A stage has half of the layers, and twice as many passes in flight.
    assert (
        estimated_memory(pp=2)[1] == estimated_memory()[1]
        and estimated_memory(pp=2)[0] < estimated_memory()[0] * 0.6
    )
    assert estimated_memory(tp=8, sequence_parallel=True)[1] == pytest.approx(
        estimated_memory()[1] / 8, abs=1e-3
    )


def numbered_examples(count: int) -> ExampleSet:
    examples = [Example([number, 1, 2], 2) for number in range(count)]
    texts = [str(number) for number in range(count)]
    return ExampleSet(examples, 3, ["a"], [{"text": text} for text in texts], texts)


def test_sample_is_fixed_random_and_in_the_order_of_the_file() -> None:
    examples = numbered_examples(1000)
    sample = examples.sample(100)
    numbers = [int(answer) for answer in sample.answers]
    assert numbers == sorted(set(numbers)) and len(numbers) == 100
    assert numbers == [int(answer) for answer in numbered_examples(1000).sample(100).answers]
    # Each tenth of the file, and each residue of its line number, has its share of the sample.
    for groups in ([number // 100 for number in numbers], [number % 10 for number in numbers]):
        assert all(2 <= groups.count(group) <= 22 for group in range(10))
    assert [example.ids[0] for example in sample.examples] == numbers
    assert [int(record["text"]) for record in sample.records] == numbers
    assert (sample.truncated, sample.dropped) == (3, ["a"])
    assert examples.sample(1000) is examples and examples.sample(2000) is examples


@pytest.mark.parametrize(
    ("answer_lengths", "max_new_tokens", "limit"),
    [
        ([1, 2, 3], None, 7),
        ([2], 256, 6),
        ([2], 4, 4),
        ([40, 3], None, 50),
        ([41], None, 52),
        ([], None, 4),
    ],
)
def test_answer_limit_is_the_longest_answer_and_a_margin(
    answer_lengths: list[int], max_new_tokens: int | None, limit: int
) -> None:
    examples = [Example([5, 6, *([7] * length)], 2) for length in answer_lengths]
    assert new_tokens_limit(examples, max_new_tokens) == limit
