"""lm-evaluation-harness, unmodified, scores the base and an adapter over HTTP.

It is a process of its own, with a local task; the oracle is the same model in this process, and for
the adapter, whose rows are real tokens' embeddings, the same model behind those tokens.
"""

import importlib.util
import json
import subprocess
import sys
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
# `make tools` gives it an environment of its own, since it brings half a gigabyte along.
OWN = ROOT / "build" / "lm_eval" / "bin" / "python"
INSTRUCTION = "what is the sum of"
DOCUMENTS = [
    {"question": "the quick brown fox", "choices": [" jumps", " sleeps", " answer"], "answer": 0},
    {"question": "twelve and thirty?", "choices": [" answer:", " forty two", " x"], "answer": 1},
    {"question": "what is", "choices": [" the sum of twelve", " it"], "answer": 0},
    {"question": "a lazy dog and", "choices": [" the quick", " twelve", " one"], "answer": 2},
]


def harness() -> Path:
    """An interpreter that has it."""
    if OWN.exists():
        return OWN
    if importlib.util.find_spec("lm_eval") is not None:
        return Path(sys.executable)
    pytest.skip(f"lm_eval is neither in {OWN.relative_to(ROOT)} nor here; run `make tools`")


@dataclass(frozen=True)
class World:
    folder: Path
    documents: list[dict[str, Any]]
    server: Server
    model: GPT
    tokenizer: Tokenizer
    python: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    python = harness()
    folder = tmp_path_factory.mktemp("lm_eval")
    words = folder / "words"
    words.mkdir()
    byte_level().save(str(words / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (words / "tokenizer_config.json").write_text(json.dumps(named))
    config = replace(CONFIG, vocab_size=640)
    write_native(lively(config), folder / "checkpoint", tokenizer=words / "tokenizer.json")
    tokenizer = open_tokenizer(words / "tokenizer.json")
    adapters = folder / "adapters"
    adapters.mkdir()
    ids = tokenizer.encode(INSTRUCTION)
    write_adapter(adapters / "sum.safetensors", folder / "checkpoint", ids)
    model = gpt.load(folder / "checkpoint", dtype="float64")
    documents = [*DOCUMENTS, said(model, tokenizer)]
    (folder / "documents.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in documents))
    (folder / "local.yaml").write_text(yaml.safe_dump(task(folder)))
    with serving(folder / "checkpoint", folder / "s.yaml", adapters=str(adapters)) as server:
        yield World(folder, documents, server, model, tokenizer, python)


def said(model: GPT, tokenizer: Tokenizer) -> dict[str, Any]:
    """A document one of whose choices is what the base itself would say."""
    for question in ("the", "a", "twelve", "fox", "dog", "sum", "answer", "lazy", "what", "brown"):
        ids = tokenizer.encode(question)
        with torch.no_grad():
            best = int(model.logits(torch.tensor([ids]))[0, -1].argmax())
        text = tokenizer.decode([best], started=True)
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


@pytest.mark.parametrize("model", ["checkpoint", "sum"])
def test_the_harness_scores_what_the_model_in_process_does(world: World, model: str) -> None:
    results, samples = run(world, model)

    before = world.tokenizer.encode(INSTRUCTION) if model == "sum" else []
    right = 0
    greedy_ones = 0
    assert len(samples) == len(world.documents)
    for sample in samples:
        document = world.documents[sample["doc_id"]]
        expected = [score(world, before, document["question"], one) for one in document["choices"]]
        told = [
            (float(logprob), greedy in (True, "True")) for (logprob, greedy), *_ in sample["resps"]
        ]
        assert [logprob for logprob, _ in told] == pytest.approx([one for one, _ in expected])
        assert [greedy for _, greedy in told] == [greedy for _, greedy in expected]
        greedy_ones += sum(greedy for _, greedy in told)
        best = max(range(len(expected)), key=lambda place: expected[place][0])
        right += best == document["answer"]
    assert results["acc,none"] == pytest.approx(right / len(world.documents))
    assert model != "checkpoint" or greedy_ones >= 1


def score(world: World, before: list[int], question: str, choice: str) -> tuple[float, bool]:
    """A continuation's log-probability, and whether it is what would have been said."""
    context = [*before, *world.tokenizer.encode(question)]
    more = world.tokenizer.encode(choice)
    with torch.no_grad():
        logits = world.model.logits(torch.tensor([[*context, *more]]))[0].double()
    logprobs = logits.log_softmax(-1)[len(context) - 1 : -1]
    total = sum(float(row[token]) for row, token in zip(logprobs, more, strict=True))
    return total, logprobs.argmax(-1).tolist() == more


def run(world: World, model: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The task's results, and all that was scored for them."""
    out = world.folder / f"out-{model}"
    said = {
        "model": model,
        "base_url": f"http://{world.server._said('http')}/v1/completions",
        "tokenizer": str(world.folder / "words"),
        "num_concurrent": 2,
    }
    words = ["--model", "local-completions", "--tasks", "local_choices", "--log_samples"]
    words += ["--batch_size", "2"]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in said.items())]
    words += ["--include_path", str(world.folder), "--output_path", str(out)]
    environment = {"HF_HOME": str(world.folder / "hf"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"}
    done = subprocess.run(
        [str(world.python), "-m", "lm_eval", *words],
        env={**environment, "OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1"},
        cwd=world.folder,
        capture_output=True,
        text=True,
        timeout=HARNESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next(out.rglob("results_*.json")).read_text())
    lines = next(out.rglob("samples_*.jsonl")).read_text().splitlines()
    return results["results"]["local_choices"], [json.loads(line) for line in lines]
