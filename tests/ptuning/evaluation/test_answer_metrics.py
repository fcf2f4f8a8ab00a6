"""Answer metrics and adapter evaluation: hand-computed metrics, and answers cut as in serving."""

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
from gpt.adapters.prompt_template import PromptTemplate
from gpt.checkpoint.digest import identify
from gpt.formats.registry import open_checkpoint
from gpt.generation.completions import complete_prompts
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import NullTokenizer
from ptuning.data.dataset import ExampleSet, read_examples
from ptuning.evaluation.adapter_evaluation import evaluate
from ptuning.evaluation.answer_metrics import (
    accuracy,
    common_subsequence_length,
    compute_metrics,
    exact_match,
    f1,
    macro_average,
    rouge_l,
    split_words,
)
from ptuning.run_facts import ADAPTER, NO_PROMPT
from tests.support.models import MODERN, build, lively, recompute_greedy
from tests.support.ranks import ranks

TOKENIZER = NullTokenizer(MODERN.vocab_size)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
NEW = 8
TEMPLATE = PromptTemplate(
    "{text} <|VIRTUAL_PROMPT_0|> 9 {label}", (3,), answer_field="label", eos=False
)


@pytest.mark.parametrize(
    ("answer", "expected_answer", "exact", "accurate", "overlap", "rouge"),
    [
        ("yes", "yes", 1, 1, 1, 1),
        (" yes\n", "yes", 1, 1, 1, 1),
        ("Yes", "yes", 0, 1, 1, 1),
        ("ｙｅｓ", "yes", 0, 1, 1, 1),  # Full-width letters.
        ("yes.", "yes", 0, 0, 1, 1),
        ("no", "yes", 0, 0, 0, 0),
        ("", "", 1, 1, 1, 1),
        ("", "yes", 0, 0, 0, 0),
        ("the cat sat", "a cat sat", 0, 0, 1, 2 / 3),  # Articles count for Rouge only.
        ("cat cat dog", "cat dog bird", 0, 0, 2 / 3, 2 / 3),
        ("dog cat", "cat dog", 0, 0, 1, 1 / 2),
        ("我爱北京", "我爱上海", 0, 0, 1 / 2, 1 / 2),
        ("東京へ 行く", "東京へ行く", 0, 0, 1, 1),
        ("서울에 가요", "서울에 와요", 0, 0, 1 / 2, 1 / 2),
        ("Straße", "STRASSE", 0, 1, 1, 1),
    ],
)
def test_metrics_equal_hand_computed_values(
    answer: str, expected_answer: str, exact: float, accurate: float, overlap: float, rouge: float
) -> None:
    assert exact_match(answer, expected_answer) == exact
    assert accuracy(answer, expected_answer) == accurate
    assert f1(answer, expected_answer) == pytest.approx(overlap)
    assert rouge_l(answer, expected_answer) == pytest.approx(rouge)


@pytest.mark.parametrize(
    ("text", "words_of_text"),
    [
        ("It's 3.5, isn't it?", ["it", "s", "3", "5", "isn", "t", "it"]),
        ("go東京now", ["go", "東", "京", "now"]),
        ("हिन्दी में।", ["हिन्दी", "में"]),  # Marks stay with their letters.
        ("ที่นี่", ["ที่", "นี่"]),
        ("cafe\u0301", ["café"]),
        ("- … -", []),
    ],
)
def test_words_are_split_in_every_script(text: str, words_of_text: list[str]) -> None:
    assert split_words(text) == words_of_text


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
def test_common_subsequence_length_equals_its_definition(a: list[str], b: list[str]) -> None:
    assert common_subsequence_length(a, b) == plain_common_length(a, b)


def test_metrics_are_means_over_answers_and_macro_means_over_tasks() -> None:
    metrics = compute_metrics(["a1", "b1", "c1", "no"], ["a1", "b1", "c1", "d1"])
    assert metrics == {"exact_match": 0.75, "accuracy": 0.75, "f1": 0.75, "rouge_l": 0.75}
    assert macro_average([metrics, compute_metrics(["x"], ["y"])])["f1"] == 0.375
    assert macro_average([]) == {} and macro_average([{"f1": 1.0, "more": 1.0}, {"f1": 0.0}]) == {
        "f1": 0.5
    }


@cache
def model() -> GPT:
    return build(MODERN)


@cache
def greedy(prompt: tuple[int, ...]) -> list[int]:
    return recompute_greedy(model(), prompt, NEW).tokens


def expected_answer_of(prompt: list[int], stop: str) -> tuple[list[int], str]:
    """The expected answer: decode token by token until the text contains the stop string."""
    tokens = greedy(tuple(prompt))
    for count in range(1, NEW + 1):
        text = TOKENIZER.decode(tokens[:count], continues_text=True)
        if stop and stop in text:
            return tokens[:count], text[: text.index(stop)]
    return tokens, TOKENIZER.decode(tokens, continues_text=True)


@pytest.mark.parametrize("tokens_max", [25, 8192])
def test_answers_equal_plain_decoding_cut_at_the_stop_string(tokens_max: int) -> None:
    stop = TOKENIZER.decode(greedy(tuple(PROMPTS[2]))[2:4])
    completions = complete_prompts(
        model(),
        TOKENIZER,
        PROMPTS,
        max_new_tokens=NEW,
        stop_strings=[stop, "never"],
        tokens_max=tokens_max,
    )
    expected_answers = [expected_answer_of(prompt, stop) for prompt in PROMPTS]
    assert [
        (completion.token_ids, completion.text) for completion in completions
    ] == expected_answers
    assert not completions[2].is_truncated and len(completions[2].token_ids) == 4
    assert [completion.is_truncated for completion in completions] == [
        len(tokens) == NEW for tokens, _ in expected_answers
    ]
    assert all(completion.logprob < 0 and not completion.scores for completion in completions)


def test_each_prompt_has_its_own_token_limit_within_the_context() -> None:
    long_prompt = [1] * (MODERN.max_position_embeddings - 2)
    completions = complete_prompts(
        model(), TOKENIZER, [[1], [2], long_prompt], max_new_tokens=[1, 3, 5], with_scores=True
    )
    assert [len(completion.token_ids) for completion in completions] == [1, 3, 2]
    assert [len(completion.scores) for completion in completions] == [1, 3, 2]
    assert completions[1].logprob == pytest.approx(
        sum(score.logprob for score in completions[1].scores)
    )


# -------------------------------------------------------------------------------------- evaluation


def build_test_adapter(base: str | None = None) -> Adapter:
    table = torch.randn(3, MODERN.hidden_size, generator=torch.Generator().manual_seed(1))
    card = Card("one", base_digest=base, template=TEMPLATE, max_new_tokens=4)
    return build_adapter(card, table)


def write_records(file: Path, adapter: Adapter) -> None:
    """Write records: three expected answers are the adapter's answers, the last one differs."""
    virtual = [MODERN.vocab_size + row for row in range(3)]
    lines = []
    for number in range(4):
        text = f"{number} {number + 20}"
        ids = [number, number + 20, *virtual, 9]
        label = TOKENIZER.decode(recompute_greedy(model(), ids, 4, adapter.table).tokens)
        lines.append({"text": text, "label": label if number < 3 else "1 1 1 1"})
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def examples_of(file: Path) -> ExampleSet:
    size = MODERN.vocab_size
    context = MODERN.max_position_embeddings
    return read_examples(file, TEMPLATE, TOKENIZER, vocab_size=size, tokens_max=context)


def plain_loss(examples: ExampleSet, table: torch.Tensor, *, virtual: bool) -> float:
    size = MODERN.vocab_size
    losses = []
    for example in examples.examples:
        answer = len(example.ids) - example.answer_start
        ids = [token for token in example.ids if virtual or token < size]
        logits = model().logits(torch.tensor([ids]), table)[0].log_softmax(-1)
        positions = range(len(ids) - answer, len(ids))
        losses += [-float(logits[position - 1, ids[position]]) for position in positions]
    return sum(losses) / len(losses)


def test_evaluation_computes_the_plain_loss_and_exact_matches(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    adapter = build_test_adapter()
    write_records(file, adapter)
    examples = examples_of(file)

    evaluation = evaluate(model(), TOKENIZER, adapter, examples)

    adapter_scores = evaluation.scores[ADAPTER]
    plain = evaluation.scores[NO_PROMPT]
    assert adapter_scores.measures["exact_match"] == 0.75 and plain.measures["exact_match"] == 0
    assert adapter_scores.loss == pytest.approx(
        plain_loss(examples, adapter.table, virtual=True), abs=1e-9
    )
    assert plain.loss == pytest.approx(plain_loss(examples, adapter.table, virtual=False), abs=1e-9)
    assert [sample.expected.strip() == sample.after.strip() for sample in evaluation.samples] == [
        *(True, True, True, False)
    ]
    assert evaluation.samples[0].inputs == {"text": "0 20"} and adapter_scores.answers_cut == 4


def _evaluate_on_rank(rank: int, size: int, tp: int, file: str) -> tuple[float, float, list[str]]:
    torch.set_num_threads(1)
    model_shard = build(MODERN, Mesh.create(tp=tp, pp=size // tp))
    evaluation = evaluate(model_shard, TOKENIZER, build_test_adapter(), examples_of(Path(file)))
    score = evaluation.scores[ADAPTER]
    return score.loss, score.measures["f1"], [sample.before for sample in evaluation.samples]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_evaluation_is_equal_for_every_split_and_rank(tp: int, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    write_records(file, build_test_adapter())
    single_rank = _evaluate_single_rank(file)
    for loss, share_exact, texts in ranks(2, _evaluate_on_rank, 2, tp, str(file)):
        assert loss == pytest.approx(single_rank[0], abs=1e-9)
        assert (share_exact, texts) == single_rank[1:]


def _evaluate_single_rank(file: Path) -> tuple[float, float, list[str]]:
    evaluation = evaluate(model(), TOKENIZER, build_test_adapter(), examples_of(file))
    score = evaluation.scores[ADAPTER]
    return score.loss, score.measures["f1"], [sample.before for sample in evaluation.samples]


def test_evaluate_command_scores_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_native(lively(MODERN.with_fields(dtype="float64")), tmp_path / "model")
    digest = identify(open_checkpoint(tmp_path / "model")).digest
    adapter = build_test_adapter(digest)
    file = tmp_path / "records.jsonl"
    write_records(file, adapter)
    save_adapter(adapter, tmp_path / "one.safetensors")
    save_adapter(build_test_adapter("0" * 64), tmp_path / "other.safetensors")
    bare = build_adapter(replace(adapter.card, template=None), adapter.table)
    save_adapter(bare, tmp_path / "bare.safetensors")

    def run_evaluate(name: str, *flags: str) -> tuple[int, str, str]:
        code = preamble.main(["tune", "--evaluate", str(tmp_path / name), str(file), *flags])
        output = capsys.readouterr()
        return code, output.out, output.err

    flags = ["--model", str(tmp_path / "model")]
    code, out, _ = run_evaluate("one.safetensors", *flags)
    assert code == 0 and "one.safetensors on records.jsonl: 4 records" in out
    assert "exact match          75.0%        0.0%\n" in out
    code, out, _ = run_evaluate("one.safetensors", *flags, "--json")
    record = json.loads(out)
    assert code == 0 and record["scores"][ADAPTER]["measures"]["exact_match"] == 0.75
    assert len(record["samples"]) == 4
    for name, extra_flags, message in (
        ("one.safetensors", [], "give --model PATH, or the CONFIG.yaml with which the adapter"),
        ("other.safetensors", flags, "was trained on the model with digest 000000000000"),
        ("bare.safetensors", flags, "has no template, so the field of the expected"),
    ):
        code, out, err = run_evaluate(name, *extra_flags)
        assert (code, out) == (1, "") and message in err and err.count("\n") == 1
