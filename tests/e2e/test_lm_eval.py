"""lm-evaluation-harness, unmodified, scores the base and an adapter over HTTP.

It runs in a process of its own with a local task, with transformers' tokenizer or with the
server's. The oracle is the same model in this process, and for the adapter, whose rows are
embeddings of real tokens, the model with these tokens as prefix.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import gpt
from checkpoints_tools.conversion.convert import write_native
from gpt.model.gpt_model import GPT
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from tests.support.models import lively
from tests.support.servers import CONFIG, ROOT, Server, serving, write_adapter
from tests.support.trained_tokenizers import byte_level

pytestmark = pytest.mark.slow

HARNESS_S = 300.0
# `make tools` installs it in an environment of its own, with half a gigabyte of dependencies.
HARNESS_PYTHON = ROOT / "build" / "lm_eval" / "bin" / "python"
INSTRUCTION = "what is the sum of"
DOCUMENTS = [
    {"question": "the quick brown fox", "choices": [" jumps", " sleeps", " answer"], "answer": 0},
    {"question": "twelve and thirty?", "choices": [" answer:", " forty two", " x"], "answer": 1},
    {"question": "what is", "choices": [" the sum of twelve", " it"], "answer": 0},
    {"question": "a lazy dog and", "choices": [" the quick", " twelve", " one"], "answer": 2},
    {"question": "the fox<|endoftext|>what is", "choices": [" the sum", "<s> one"], "answer": 1},
]
# Arguments of the harness: which tokenizer it uses, and whether it sends token ids or texts.
LOCAL = {"tokenizer_backend": "huggingface", "tokenizer": "words"}
REMOTE = {"tokenizer_backend": "remote"}
TEXTS = {"tokenizer_backend": "remote", "tokenized_requests": "False"}


def harness() -> Path:
    """The interpreter of its environment."""
    if HARNESS_PYTHON.exists():
        return HARNESS_PYTHON
    if importlib.util.find_spec("lm_eval") is not None:
        return Path(sys.executable)
    pytest.skip(
        f"lm_eval is neither in {HARNESS_PYTHON.relative_to(ROOT)} nor here; run `make tools`"
    )


@dataclass(frozen=True)
class Evaluation:
    folder: Path
    documents: list[dict[str, Any]]
    server: Server
    model: GPT
    tokenizer: Tokenizer
    python: Path


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluation]:
    python = harness()
    folder = tmp_path_factory.mktemp("lm_eval")
    corpus = folder / "words"
    corpus.mkdir()
    byte_level().save(str(corpus / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (corpus / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    config = replace(CONFIG, vocab_size=640)
    write_native(lively(config), folder / "checkpoint", tokenizer=corpus / "tokenizer.json")
    tokenizer = open_tokenizer(corpus / "tokenizer.json")
    adapters = folder / "adapters"
    adapters.mkdir()
    ids = tokenizer.encode(INSTRUCTION)
    write_adapter(adapters / "sum.safetensors", folder / "checkpoint", ids)
    model = gpt.load(folder / "checkpoint", dtype="float64")
    documents = [*DOCUMENTS, greedy_document(model, tokenizer)]
    (folder / "documents.jsonl").write_text(
        "".join(f"{json.dumps(document)}\n" for document in documents)
    )
    (folder / "local.yaml").write_text(yaml.safe_dump(task(folder)))
    with serving(folder / "checkpoint", folder / "s.yaml", adapters=str(adapters)) as server:
        yield Evaluation(folder, documents, server, model, tokenizer, python)


def greedy_document(model: GPT, tokenizer: Tokenizer) -> dict[str, Any]:
    """A document with one choice that is the base's own continuation."""
    for question in ("the", "a", "twelve", "fox", "dog", "sum", "answer", "lazy", "what", "brown"):
        ids = tokenizer.encode(question)
        with torch.no_grad():
            best = int(model.logits(torch.tensor([ids]))[0, -1].argmax())
        text = tokenizer.decode([best], continues_text=True)
        if tokenizer.encode(text) == [best] and tokenizer.encode(question + text) == [*ids, best]:
            return {"question": question, "choices": [text, " lazy dog"], "answer": 0}
    raise AssertionError("this model says nothing that can be said back")


def task(folder: Path) -> dict[str, Any]:
    return {
        "task": "local_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }


@pytest.mark.parametrize(
    ("model", "arguments"),
    [("checkpoint", LOCAL), ("checkpoint", REMOTE), ("checkpoint", TEXTS), ("sum", REMOTE)],
    ids=["local", "remote", "texts", "adapter"],
)
def test_harness_scores_equal_the_model_in_process(
    evaluation: Evaluation, model: str, arguments: dict[str, str]
) -> None:
    results, samples = run(evaluation, model, arguments)

    prefix = evaluation.tokenizer.encode(INSTRUCTION) if model == "sum" else []
    correct = 0
    greedy_ones = 0
    assert len(samples) == len(evaluation.documents)
    for sample in samples:
        document = evaluation.documents[sample["doc_id"]]
        expected = [
            score(evaluation, prefix, document["question"], choice)
            for choice in document["choices"]
        ]
        reported = [
            (float(logprob), greedy in (True, "True")) for (logprob, greedy), *_ in sample["resps"]
        ]
        assert [logprob for logprob, _ in reported] == pytest.approx(
            [choice for choice, _ in expected]
        )
        assert [greedy for _, greedy in reported] == [greedy for _, greedy in expected]
        greedy_ones += sum(greedy for _, greedy in reported)
        best = max(range(len(expected)), key=lambda index: expected[index][0])
        correct += best == document["answer"]
    assert results["acc,none"] == pytest.approx(correct / len(evaluation.documents))
    assert model != "checkpoint" or greedy_ones >= 1


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


def run(
    evaluation: Evaluation, model: str, tokenizer_arguments: dict[str, str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The task's results, and all samples."""
    out = Path(tempfile.mkdtemp(dir=evaluation.folder, prefix="out-"))
    model_arguments: dict[str, object] = {
        "model": model,
        "base_url": f"http://{evaluation.server.ready_field('http')}/v1/completions",
        "num_concurrent": 2,
        **tokenizer_arguments,
    }
    arguments = ["--model", "local-completions", "--tasks", "local_choices", "--log_samples"]
    arguments += ["--batch_size", "2"]
    arguments += [
        "--model_args",
        ",".join(f"{name}={value}" for name, value in model_arguments.items()),
    ]
    arguments += ["--include_path", str(evaluation.folder), "--output_path", str(out)]
    environment = {
        "HF_HOME": str(evaluation.folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin",
    }
    completed = subprocess.run(
        [str(evaluation.python), "-m", "lm_eval", *arguments],
        env={**environment, "OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1"},
        cwd=evaluation.folder,
        capture_output=True,
        text=True,
        timeout=HARNESS_S,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    results = json.loads(next(out.rglob("results_*.json")).read_text())
    lines = next(out.rglob("samples_*.jsonl")).read_text().splitlines()
    return results["results"]["local_choices"], [json.loads(line) for line in lines]
