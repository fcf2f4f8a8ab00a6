"""Answers end where a server ends them, and measures say of them what one can count by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import preamble
from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import Adapter, Card, build_adapter, save_adapter
from gpt.adapters.prompt_template import Template
from gpt.checkpoint.digest import identify
from gpt.formats.registry import open_checkpoint
from gpt.generation.completions import write_answers
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import NullTokenizer
from ptuning.data.dataset import Examples, read_examples
from ptuning.evaluation.answer_metrics import (
    accuracy,
    common_length,
    exact_match,
    f1,
    macro,
    measures,
    rouge_l,
    words,
)
from ptuning.evaluation.evaluate import evaluate
from ptuning.run_facts import ADAPTER, NO_PROMPT
from tests.support.models import MODERN, build, lively, recompute_greedy
from tests.support.ranks import ranks

TOKENIZER = NullTokenizer(MODERN.vocab_size)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
NEW = 8
TEMPLATE = Template("{text} <|VIRTUAL_PROMPT_0|> 9 {label}", (3,), answer_field="label", eos=False)


@pytest.mark.parametrize(
    ("answer", "right", "exact", "accurate", "shared", "rouge"),
    [
        ("yes", "yes", 1, 1, 1, 1),
        (" yes\n", "yes", 1, 1, 1, 1),
        ("Yes", "yes", 0, 1, 1, 1),
        ("ｙｅｓ", "yes", 0, 1, 1, 1),  # Letters of full width.
        ("yes.", "yes", 0, 0, 1, 1),
        ("no", "yes", 0, 0, 0, 0),
        ("", "", 1, 1, 1, 1),
        ("", "yes", 0, 0, 0, 0),
        ("the cat sat", "a cat sat", 0, 0, 1, 2 / 3),  # Articles count for Rouge alone.
        ("cat cat dog", "cat dog bird", 0, 0, 2 / 3, 2 / 3),
        ("dog cat", "cat dog", 0, 0, 1, 1 / 2),
        ("我爱北京", "我爱上海", 0, 0, 1 / 2, 1 / 2),
        ("東京へ 行く", "東京へ行く", 0, 0, 1, 1),
        ("서울에 가요", "서울에 와요", 0, 0, 1 / 2, 1 / 2),
        ("Straße", "STRASSE", 0, 1, 1, 1),
    ],
)
def test_measures_are_what_one_counts_by_hand(
    answer: str, right: str, exact: float, accurate: float, shared: float, rouge: float
) -> None:
    assert exact_match(answer, right) == exact
    assert accuracy(answer, right) == accurate
    assert f1(answer, right) == pytest.approx(shared)
    assert rouge_l(answer, right) == pytest.approx(rouge)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It's 3.5, isn't it?", ["it", "s", "3", "5", "isn", "t", "it"]),
        ("go東京now", ["go", "東", "京", "now"]),
        ("हिन्दी में।", ["हिन्दी", "में"]),  # Marks stay with their letters.
        ("ที่นี่", ["ที่", "นี่"]),
        ("cafe\u0301", ["café"]),
        ("- … -", []),
    ],
)
def test_words_are_found_in_any_script(text: str, found: list[str]) -> None:
    assert words(text) == found


def plain_common_length(a: Sequence[str], b: Sequence[str]) -> int:
    @cache
    def length(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        if a[i] == b[j]:
            return 1 + length(i + 1, j + 1)
        return max(length(i + 1, j), length(i, j + 1))

    return length(0, 0)


LETTERS = st.lists(st.sampled_from("abc"), max_size=8)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(LETTERS, LETTERS)
def test_the_longest_common_subsequence_is_that_of_its_definition(
    a: list[str], b: list[str]
) -> None:
    assert common_length(a, b) == plain_common_length(a, b)


def test_a_mean_is_over_answers_and_over_tasks_each_task_counts_alike() -> None:
    one = measures(["a1", "b1", "c1", "no"], ["a1", "b1", "c1", "d1"])
    assert one == {"exact_match": 0.75, "accuracy": 0.75, "f1": 0.75, "rouge_l": 0.75}
    assert macro([one, measures(["x"], ["y"])])["f1"] == 0.375
    assert macro([]) == {} and macro([{"f1": 1.0, "more": 1.0}, {"f1": 0.0}]) == {"f1": 0.5}


@cache
def model() -> GPT:
    return build(MODERN)


@cache
def greedy(prompt: tuple[int, ...]) -> list[int]:
    return recompute_greedy(model(), prompt, NEW).tokens


def expected(prompt: list[int], stop: str) -> tuple[list[int], str]:
    """Token by token, until the text has the stop string."""
    tokens = greedy(tuple(prompt))
    for count in range(1, NEW + 1):
        text = TOKENIZER.decode(tokens[:count], started=True)
        if stop and stop in text:
            return tokens[:count], text[: text.index(stop)]
    return tokens, TOKENIZER.decode(tokens, started=True)


@pytest.mark.parametrize("tokens_max", [25, 8192])
def test_answers_are_those_of_plain_decoding_cut_at_the_stop_string(tokens_max: int) -> None:
    stop = TOKENIZER.decode(greedy(tuple(PROMPTS[2]))[2:4])
    found = write_answers(
        model(),
        TOKENIZER,
        PROMPTS,
        max_new_tokens=NEW,
        stops=[stop, "never"],
        tokens_max=tokens_max,
    )
    wanted = [expected(prompt, stop) for prompt in PROMPTS]
    assert [(one.token_ids, one.text) for one in found] == wanted
    assert not found[2].cut and len(found[2].token_ids) == 4
    assert [one.cut for one in found] == [len(tokens) == NEW for tokens, _ in wanted]
    assert all(one.logprob < 0 and not one.scores for one in found)


def test_each_prompt_may_have_its_own_maximum_and_none_goes_past_the_context() -> None:
    long = [1] * (MODERN.max_position_embeddings - 2)
    found = write_answers(
        model(), TOKENIZER, [[1], [2], long], max_new_tokens=[1, 3, 5], scored=True
    )
    assert [len(one.token_ids) for one in found] == [1, 3, 2]
    assert [len(one.scores) for one in found] == [1, 3, 2]
    assert found[1].logprob == pytest.approx(sum(one.logprob for one in found[1].scores))


# -------------------------------------------------------------------------------------- evaluation


def an_adapter(base: str | None = None) -> Adapter:
    table = torch.randn(3, MODERN.hidden_size, generator=torch.Generator().manual_seed(1))
    card = Card("one", base_digest=base, template=TEMPLATE, max_new_tokens=4)
    return build_adapter(card, table)


def write_records(file: Path, adapter: Adapter) -> None:
    """Three answers are what the model writes with the adapter, the last one is another."""
    virtual = [MODERN.vocab_size + row for row in range(3)]
    lines = []
    for number in range(4):
        text = f"{number} {number + 20}"
        ids = [number, number + 20, *virtual, 9]
        label = TOKENIZER.decode(recompute_greedy(model(), ids, 4, adapter.table).tokens)
        lines.append({"text": text, "label": label if number < 3 else "1 1 1 1"})
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def examples_of(file: Path) -> Examples:
    size, context = MODERN.vocab_size, MODERN.max_position_embeddings
    return read_examples(file, TEMPLATE, TOKENIZER, vocab_size=size, tokens_max=context)


def plain_loss(examples: Examples, table: torch.Tensor, *, virtual: bool) -> float:
    size, losses = MODERN.vocab_size, []
    for example in examples.examples:
        answer = len(example.ids) - example.answer_start
        ids = [token for token in example.ids if virtual or token < size]
        logits = model().logits(torch.tensor([ids]), table)[0].log_softmax(-1)
        at = range(len(ids) - answer, len(ids))
        losses += [-float(logits[place - 1, ids[place]]) for place in at]
    return sum(losses) / len(losses)


def test_an_evaluation_has_the_plain_loss_and_counts_right_answers(tmp_path: Path) -> None:
    file, adapter = tmp_path / "records.jsonl", an_adapter()
    write_records(file, adapter)
    examples = examples_of(file)

    found = evaluate(model(), TOKENIZER, adapter, examples)

    ours, plain = found.scores[ADAPTER], found.scores[NO_PROMPT]
    assert ours.measures["exact_match"] == 0.75 and plain.measures["exact_match"] == 0
    assert ours.loss == pytest.approx(plain_loss(examples, adapter.table, virtual=True), abs=1e-9)
    assert plain.loss == pytest.approx(plain_loss(examples, adapter.table, virtual=False), abs=1e-9)
    assert [one.expected.strip() == one.after.strip() for one in found.samples] == [
        *(True, True, True, False)
    ]
    assert found.samples[0].inputs == {"text": "0 20"} and ours.answers_cut == 4


def _evaluated(rank: int, size: int, tp: int, file: str) -> tuple[float, float, list[str]]:
    torch.set_num_threads(1)
    share = build(MODERN, Mesh.create(tp=tp, pp=size // tp))
    found = evaluate(share, TOKENIZER, an_adapter(), examples_of(Path(file)))
    score = found.scores[ADAPTER]
    return score.loss, score.measures["f1"], [one.before for one in found.samples]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_an_evaluation_is_the_same_at_any_split_and_on_every_rank(tp: int, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    write_records(file, an_adapter())
    whole = _evaluated_here(file)
    for loss, shared, texts in ranks(2, _evaluated, 2, tp, str(file)):
        assert loss == pytest.approx(whole[0], abs=1e-9)
        assert (shared, texts) == whole[1:]


def _evaluated_here(file: Path) -> tuple[float, float, list[str]]:
    found = evaluate(model(), TOKENIZER, an_adapter(), examples_of(file))
    score = found.scores[ADAPTER]
    return score.loss, score.measures["f1"], [one.before for one in found.samples]


def test_the_command_evaluates_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_native(lively(MODERN.with_fields(dtype="float64")), tmp_path / "model")
    digest = identify(open_checkpoint(tmp_path / "model")).digest
    adapter, file = an_adapter(digest), tmp_path / "records.jsonl"
    write_records(file, adapter)
    save_adapter(adapter, tmp_path / "one.safetensors")
    save_adapter(an_adapter("0" * 64), tmp_path / "other.safetensors")
    bare = build_adapter(replace(adapter.card, template=None), adapter.table)
    save_adapter(bare, tmp_path / "bare.safetensors")

    def told(name: str, *flags: str) -> tuple[int, str, str]:
        code = preamble.main(["tune", "--evaluate", str(tmp_path / name), str(file), *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    flags = ["--model", str(tmp_path / "model")]
    code, out, _ = told("one.safetensors", *flags)
    assert code == 0 and "one.safetensors on records.jsonl: 4 records" in out
    assert "exact match          75.0%        0.0%\n" in out
    code, out, _ = told("one.safetensors", *flags, "--json")
    record = json.loads(out)
    assert code == 0 and record["scores"][ADAPTER]["measures"]["exact_match"] == 0.75
    assert len(record["samples"]) == 4
    for name, given_flags, why in (
        ("one.safetensors", [], "give --model PATH, or the CONFIG.yaml of its run"),
        ("other.safetensors", flags, "was trained on the model 000000000000"),
        ("bare.safetensors", flags, "has no template, so nothing says which"),
    ):
        code, out, err = told(name, *given_flags)
        assert (code, out) == (1, "") and why in err and err.count("\n") == 1
