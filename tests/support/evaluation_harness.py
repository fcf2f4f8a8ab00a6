"""Evaluation by lm-evaluation-harness, unmodified, in a process of its own environment.

Its tasks are files with local documents, so that it downloads no dataset.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.client_environments import interpreter, run_process

# A document has a question, choices, and the index of the answer.
Document = dict[str, Any]
CHOICES = "local_choices"
TEXTS = "local_texts"
PERPLEXITY = "local_perplexity"
TASKS: dict[str, dict[str, Any]] = {
    CHOICES: {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    TEXTS: {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    PERPLEXITY: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


@dataclass(frozen=True)
class Scores:
    """Metrics, and what the model returned for each document, by task."""

    metrics: dict[str, dict[str, float]]
    samples: dict[str, list[dict[str, Any]]]

    @property
    def accuracy(self) -> float:
        return self.metrics[CHOICES]["acc,none"]

    @property
    def perplexity(self) -> float:
        return self.metrics[PERPLEXITY]["word_perplexity,none"]

    @property
    def choices(self) -> list[list[tuple[float, bool]]]:
        """The log-probability of each choice of each document, and whether it is the greedy one."""
        return [
            [
                (float(logprob), greedy in (True, "True"))
                for (logprob, greedy), *_ in sample["resps"]
            ]
            for sample in self.samples[CHOICES]
        ]

    @property
    def texts(self) -> list[str]:
        return [sample["resps"][0][0] for sample in self.samples[TEXTS]]


class Harness:
    """The harness with local tasks: first write their documents, then run them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = interpreter("lm-eval")

    def write_documents(self, task: str, documents: Sequence[Document]) -> None:
        path = self._folder / f"{task}.jsonl"
        path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
        dataset = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
        record = {"task": task, **dataset, "test_split": "test", **TASKS[task]}
        (self._folder / f"{task}.yaml").write_text(yaml.safe_dump(record))

    def score_completions(
        self, address: str, model: str, tasks: Sequence[str], **arguments: object
    ) -> Scores:
        """Score a model of a server by the completions API; `arguments` select the tokenizer."""
        url = f"http://{address}/v1/completions"
        arguments = {"model": model, "base_url": url, "num_concurrent": 2, **arguments}
        return self._run("local-completions", arguments, tasks, "--batch_size", "2")

    def score_chats(self, address: str, model: str, tasks: Sequence[str]) -> Scores:
        """Score a model of a server by the chat completions API."""
        url = f"http://{address}/v1/chat/completions"
        arguments = {"model": model, "base_url": url, "num_concurrent": 2}
        return self._run("local-chat-completions", arguments, tasks, "--apply_chat_template")

    def score_transformers(
        self, checkpoint: Path, dtype: str, tasks: Sequence[str], *options: str
    ) -> Scores:
        """Score a checkpoint in Hugging Face's format with transformers."""
        arguments = {"pretrained": checkpoint, "dtype": dtype}
        return self._run("hf", arguments, tasks, "--device", "cpu", "--batch_size", "1", *options)

    def _run(
        self, kind: str, arguments: Mapping[str, object], tasks: Sequence[str], *options: str
    ) -> Scores:
        output = Path(tempfile.mkdtemp(dir=self._folder, prefix="output-"))
        command: list[str | Path] = [self._python, "-m", "lm_eval", "--model", kind]
        command += ["--model_args", ",".join(f"{key}={arguments[key]}" for key in arguments)]
        command += ["--tasks", ",".join(tasks), "--include_path", self._folder]
        command += ["--log_samples", "--output_path", output, *options]
        run_process(command, OMP_NUM_THREADS="1")
        results = json.loads(next(output.rglob("results_*.json")).read_text())
        samples = {}
        for task in tasks:
            lines = next(output.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
            task_samples = [json.loads(line) for line in lines]
            samples[task] = sorted(task_samples, key=lambda sample: int(sample["doc_id"]))
        return Scores(results["results"], samples)
