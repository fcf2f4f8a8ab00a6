"""lm-evaluation-harness, unmodified, scores the base and an adapter over the OpenAI API.

It tokenizes with transformers or through the server. Two oracles: the same model in this process
(for the adapter, whose rows are embeddings of real tokens, with these tokens as prefix), and the
harness's own transformers model, which reads the checkpoint that `preamble convert --to hf` has
written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt
import preamble
from gpt.model.gpt_model import GPT
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from tests.support.chat_server import BASE, write_byte_level_checkpoint
from tests.support.chat_templates import CHATML
from tests.support.evaluation_harness import (
    CHOICES,
    PERPLEXITY,
    TEXTS,
    Document,
    Harness,
    Scores,
)
from tests.support.servers import serving, write_adapter

pytestmark = pytest.mark.clients

INSTRUCTION = "what is the sum of"
DOCUMENTS: list[Document] = [
    {"question": "the quick brown fox", "choices": [" jumps", " sleeps", " answer"], "answer": 0},
    {"question": "twelve and thirty?", "choices": [" answer:", " forty two", " x"], "answer": 1},
    {"question": "what is", "choices": [" the sum of twelve", " it"], "answer": 0},
    {"question": "a lazy dog and", "choices": [" the quick", " twelve", " one"], "answer": 2},
]
# Control tokens in messages stay text, but transformers parses those of a rendered template. So
# only completions have this document.
CONTROL_TOKENS: Document = {
    "question": "the fox<|endoftext|>what is",
    "choices": [" the sum", "<s> one"],
    "answer": 1,
}
# Arguments of the harness: the server's tokenizer, for token ids or for texts.
REMOTE = {"tokenizer_backend": "remote"}
REMOTE_TEXTS = {"tokenizer_backend": "remote", "tokenized_requests": "False"}
LOGPROB_ATOL = 1e-3  # transformers computes norms and positions in fp32.


@dataclass(frozen=True)
class Evaluation:
    harness: Harness
    documents: list[Document]
    address: str
    exported: Path  # The checkpoint in Hugging Face's format.
    model: GPT
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluation]:
    folder = tmp_path_factory.mktemp("lm_eval")
    harness = Harness(folder)
    checkpoint = write_byte_level_checkpoint(folder, CHATML)
    assert preamble.main(["convert", str(checkpoint), str(folder / "exported"), "--to", "hf"]) == 0
    tokenizer = open_tokenizer(checkpoint / "tokenizer")
    adapters = folder / "adapters"
    adapters.mkdir()
    write_adapter(adapters / "sum.safetensors", checkpoint, tokenizer.encode(INSTRUCTION))
    model = gpt.load(checkpoint, dtype="float64")
    documents = [*DOCUMENTS, greedy_document(model, tokenizer)]
    for task in (TEXTS, PERPLEXITY):
        harness.write_documents(task, documents)
    documents.append(CONTROL_TOKENS)
    harness.write_documents(CHOICES, documents)
    with serving(checkpoint, folder / "s.yaml", adapters=str(adapters)) as server:
        yield Evaluation(
            harness, documents, server.http_address, folder / "exported", model, tokenizer
        )


def greedy_document(model: GPT, tokenizer: Tokenizer) -> dict[str, Any]:
    """A document with one choice that is the base's own continuation."""
    for question in ("the", "a", "twelve", "fox", "dog", "sum", "answer", "lazy", "what", "brown"):
        ids = tokenizer.encode(question)
        with torch.no_grad():
            best = int(model.logits(torch.tensor([ids]))[0, -1].argmax())
        text = tokenizer.decode([best], continues_text=True)
        if tokenizer.encode(text) == [best] and tokenizer.encode(question + text) == [*ids, best]:
            return {"question": question, "choices": [text, " lazy dog"], "answer": 0}
    raise AssertionError("no greedy token of this model is encoded as itself")


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [(BASE, REMOTE_TEXTS), ("sum", REMOTE)],
    ids=["texts", "adapter"],
)
def test_scores_equal_those_of_the_model_in_process(
    evaluation: Evaluation, model: str, tokenizer: dict[str, str]
) -> None:
    scores = evaluation.harness.score_completions(evaluation.address, model, [CHOICES], **tokenizer)
    check_choices(evaluation, model, scores)


@pytest.fixture(scope="module")
def transformers_scores(evaluation: Evaluation) -> Scores:
    tasks = (CHOICES, TEXTS, PERPLEXITY)
    return evaluation.harness.score_transformers(evaluation.exported, "float64", tasks)


@pytest.mark.parametrize("tokenizer", ["local", "remote"])
def test_scores_equal_those_of_transformers(
    evaluation: Evaluation, transformers_scores: Scores, tokenizer: str
) -> None:
    arguments: dict[str, object] = dict(REMOTE)
    if tokenizer == "local":
        arguments = {"tokenizer_backend": "huggingface", "tokenizer": evaluation.exported}
    tasks = (CHOICES, TEXTS, PERPLEXITY)
    scores = evaluation.harness.score_completions(evaluation.address, BASE, tasks, **arguments)
    check_choices(evaluation, BASE, scores)
    assert scores.accuracy == pytest.approx(transformers_scores.accuracy)
    for choices, expected in zip(scores.choices, transformers_scores.choices, strict=True):
        assert [logprob for logprob, _ in choices] == pytest.approx(
            [logprob for logprob, _ in expected], abs=LOGPROB_ATOL
        )
        assert [greedy for _, greedy in choices] == [greedy for _, greedy in expected]
    assert scores.texts == transformers_scores.texts
    assert scores.perplexity == pytest.approx(transformers_scores.perplexity, rel=LOGPROB_ATOL)


def test_chats_equal_those_of_transformers(evaluation: Evaluation) -> None:
    expected = evaluation.harness.score_transformers(
        evaluation.exported, "float64", [TEXTS], "--apply_chat_template"
    )
    scores = evaluation.harness.score_chats(evaluation.address, BASE, [TEXTS])
    assert scores.texts == expected.texts
    assert scores.metrics[TEXTS] == expected.metrics[TEXTS]


def check_choices(evaluation: Evaluation, model: str, scores: Scores) -> None:
    """Compare the scores of the choices with the model in this process."""
    prefix = evaluation.tokenizer.encode(INSTRUCTION) if model == "sum" else []
    correct = 0
    greedy_choices = 0
    for document, choices in zip(evaluation.documents, scores.choices, strict=True):
        expected = [
            score(evaluation, prefix, document["question"], choice)
            for choice in document["choices"]
        ]
        assert [logprob for logprob, _ in choices] == pytest.approx(
            [logprob for logprob, _ in expected]
        )
        assert [greedy for _, greedy in choices] == [greedy for _, greedy in expected]
        greedy_choices += sum(greedy for _, greedy in choices)
        best = max(range(len(expected)), key=lambda index: expected[index][0])
        correct += best == document["answer"]
    assert scores.accuracy == pytest.approx(correct / len(evaluation.documents))
    assert model != BASE or greedy_choices >= 1


def score(
    evaluation: Evaluation, prefix: list[int], question: str, choice: str
) -> tuple[float, bool]:
    """A continuation's log-probability, and whether it is the greedy continuation."""
    context = [*prefix, *evaluation.tokenizer.encode(question, allow_special=True)]
    continuation = evaluation.tokenizer.encode(choice, allow_special=True)
    with torch.no_grad():
        logits = evaluation.model.logits(torch.tensor([[*context, *continuation]]))[0].double()
    logprobs = logits.log_softmax(-1)[len(context) - 1 : -1]
    total = sum(float(row[token]) for row, token in zip(logprobs, continuation, strict=True))
    return total, logprobs.argmax(-1).tolist() == continuation
