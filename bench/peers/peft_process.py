"""Trainer process: runs one trainer of the comparison; JSON batches in, losses out.

The command is `python -m bench.peers.peft_process NAME THREADS`, where NAME is "ours" or "peft".
The process trains a table of virtual tokens in front of a frozen model, on batches of token ids. A
request is a line of JSON on standard input, and each request has a reply of one line. Both trainers
start with the same table and use the same optimizer.
"""

import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor

LEARNING_RATE = 1e-3
# A batch is a list of examples, and an example is a list of token ids that ends with the answer.
Batches = list[list[list[int]]]


class SoftPromptTrainer(Protocol):
    """A trainer with a loaded model; call `start_training` before `train_step`."""

    description: str

    def start_training(self, virtual_tokens: int) -> None:
        """Start a new training from `initial_table`."""

    def train_step(self, examples: list[list[int]], answer_tokens: int) -> float:
        """Train one step on a batch; return the mean loss before the update.

        The last `answer_tokens` ids of each example are the answer.
        """


def initial_table(rows: int, width: int) -> Tensor:
    """Draw the initial virtual tokens, the same for both trainers."""
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(rows)) * 0.02


class PreambleTrainer:
    """Trains with `ptuning.training.trainer.Trainer`, as `preamble tune` does."""

    def __init__(self, model: str, dtype: str) -> None:
        import gpt

        self.description = f"ours, torch {version('torch')}"
        self._model = gpt.load(model, dtype=dtype)

    def start_training(self, virtual_tokens: int) -> None:
        from ptuning.config import TuneConfig
        from ptuning.prompt.prompt_encoder import PromptEncoder
        from ptuning.training.trainer import Trainer

        config = TuneConfig(
            model="a model",
            name="an adapter",
            data="records",
            virtual_tokens=virtual_tokens,
            learning_rate=LEARNING_RATE,
            schedule="constant",
            warmup_steps=0,
            beta2=0.999,
            gradient_norm_max=1e30,
        )
        width = self._model.config.hidden_size
        encoder = PromptEncoder(
            (virtual_tokens,), initial_table(virtual_tokens, width), {}, self._model.mesh
        )
        self._trainer = Trainer([self._model], config, encoder)
        self._virtual_ids = [self._model.config.vocab_size + row for row in range(virtual_tokens)]

    def train_step(self, examples: list[list[int]], answer_tokens: int) -> float:
        from ptuning.data.dataset import Example

        batch = [
            Example(self._virtual_ids + ids, len(self._virtual_ids + ids) - answer_tokens)
            for ids in examples
        ]
        return self._trainer.step(batch).loss


class PeftTrainer:
    """Trains with transformers and peft, on batches padded on the right."""

    def __init__(self, model: str, dtype: str) -> None:
        self.description = f"peft {version('peft')}, transformers {version('transformers')}"
        self._path = model
        self._dtype = getattr(torch, dtype)
        self._peft_model = self._load_model()

    def _load_model(self) -> Any:
        model_class: Any = import_module("transformers").GPT2LMHeadModel
        return model_class.from_pretrained(self._path, dtype=self._dtype)

    def start_training(self, virtual_tokens: int) -> None:
        peft: Any = import_module("peft")
        if isinstance(self._peft_model, peft.PeftModel):
            self._peft_model = None  # Free the old model before loading the new one.
            self._peft_model = self._load_model()
        tuning_config = peft.PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=virtual_tokens
        )
        self._peft_model = peft.get_peft_model(self._peft_model, tuning_config).train()
        (table,) = [
            parameter for parameter in self._peft_model.parameters() if parameter.requires_grad
        ]
        table.data.copy_(initial_table(*table.shape))
        self._optimizer = torch.optim.AdamW([table], lr=LEARNING_RATE, weight_decay=0.0)

    def train_step(self, examples: list[list[int]], answer_tokens: int) -> float:
        return train_peft_step(self._peft_model, self._optimizer, examples, answer_tokens)


def train_peft_step(
    peft_model: Any,
    optimizer: torch.optim.Optimizer,
    examples: list[list[int]],
    answer_tokens: int,
) -> float:
    """Train a model of PEFT on a padded batch; return the mean loss of the answers."""
    longest = max(map(len, examples))
    ids = torch.zeros((len(examples), longest), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        ids[row, : len(example)] = torch.tensor(example)
        mask[row, : len(example)] = 1
        labels[row, len(example) - answer_tokens : len(example)] = torch.tensor(
            example[-answer_tokens:]
        )
    optimizer.zero_grad()
    loss = peft_model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


TRAINERS: dict[str, type[PreambleTrainer] | type[PeftTrainer]] = {
    "ours": PreambleTrainer,
    "peft": PeftTrainer,
}
# Modules that are imported before the memory of the idle process is read. Without this, the
# optimizer would import torch._dynamo during the training.
PRELOADED_MODULES = {
    "ours": ("gpt", "ptuning.training.trainer", "torch._dynamo"),
    "peft": ("transformers.models.gpt2.modeling_gpt2", "peft"),
}


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    # Replies use a copy of standard output. The output of a library goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    for module in PRELOADED_MODULES[name]:
        import_module(module)
    replies.write("{}\n")
    trainer: SoftPromptTrainer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        if "model" in request:
            trainer = TRAINERS[name](request["model"], request["dtype"])
            reply["about"] = trainer.description
        assert trainer is not None, "the first request must contain 'model'"
        if "virtual" in request:
            trainer.start_training(request["virtual"])
        if "batches" in request:
            cpu_start, start = time.process_time(), time.perf_counter()
            reply["losses"] = [
                trainer.train_step(batch, request["answer"]) for batch in request["batches"]
            ]
            reply["seconds"] = time.perf_counter() - start
            reply["cpu_s"] = time.process_time() - cpu_start
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
