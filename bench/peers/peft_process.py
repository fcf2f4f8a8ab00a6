"""One trainer of the comparison, as a process: `python -m bench.peers.peft_process NAME THREADS`.

It learns a table of virtual tokens in front of a frozen model, as its library's users would, from
the batches of ids that it is given. Work comes as a line of JSON on standard input, and each gets a
line back. Both sides begin with the same table and use the same rule to move it.
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

RATE = 1e-3
Batches = list[list[list[int]]]  # Of examples, each of text ids whose last ones are the answer.


class Learner(Protocol):
    """One side. A new one has loaded the model; `begin` has to come before `step`."""

    about: str

    def begin(self, virtual: int) -> None:
        """Start anew, with `first_table`."""

    def step(self, examples: list[list[int]], answer: int) -> float:
        """Learn from a batch whose last `answer` ids are the answers; the mean loss before."""


def first_table(rows: int, width: int) -> Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(rows)) * 0.02


class Ours:
    """`ptuning.training.trainer.Trainer`, as `preamble tune` uses it."""

    def __init__(self, model: str, dtype: str) -> None:
        import gpt

        self.about = f"ours, torch {version('torch')}"
        self._model = gpt.load(model, dtype=dtype)

    def begin(self, virtual: int) -> None:
        from ptuning.config import TuneConfig
        from ptuning.prompt.prompt_encoder import Encoder
        from ptuning.training.trainer import Trainer

        config = TuneConfig(
            model="a model",
            name="an adapter",
            data="records",
            virtual_tokens=virtual,
            learning_rate=RATE,
            schedule="constant",
            warmup_steps=0,
            beta2=0.999,
            gradient_norm_max=1e30,
        )
        width = self._model.config.hidden_size
        encoder = Encoder((virtual,), first_table(virtual, width), {}, self._model.mesh)
        self._trainer = Trainer([self._model], config, encoder)
        self._virtual = [self._model.config.vocab_size + row for row in range(virtual)]

    def step(self, examples: list[list[int]], answer: int) -> float:
        from ptuning.data.dataset import Example

        batch = [
            Example(self._virtual + ids, len(self._virtual + ids) - answer) for ids in examples
        ]
        return self._trainer.step(batch).loss


class Peft:
    """transformers and peft, in a loop that pads on the right."""

    def __init__(self, model: str, dtype: str) -> None:
        self.about = f"peft {version('peft')}, transformers {version('transformers')}"
        self._path, self._dtype = model, getattr(torch, dtype)
        self._loaded = self._load()

    def _load(self) -> Any:
        loaded: Any = import_module("transformers").GPT2LMHeadModel
        return loaded.from_pretrained(self._path, dtype=self._dtype)

    def begin(self, virtual: int) -> None:
        peft: Any = import_module("peft")
        if isinstance(self._loaded, peft.PeftModel):
            self._loaded = None  # Not two of them at any time.
            self._loaded = self._load()
        asked = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=virtual)
        self._loaded = peft.get_peft_model(self._loaded, asked).train()
        (table,) = [one for one in self._loaded.parameters() if one.requires_grad]
        table.data.copy_(first_table(*table.shape))
        self._optimizer = torch.optim.AdamW([table], lr=RATE, weight_decay=0.0)

    def step(self, examples: list[list[int]], answer: int) -> float:
        longest = max(map(len, examples))
        ids = torch.zeros((len(examples), longest), dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, example in enumerate(examples):
            ids[row, : len(example)] = torch.tensor(example)
            mask[row, : len(example)] = 1
            labels[row, len(example) - answer : len(example)] = torch.tensor(example[-answer:])
        self._optimizer.zero_grad()
        loss = self._loaded(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


SIDES: dict[str, type[Ours] | type[Peft]] = {"ours": Ours, "peft": Peft}
IMPORTS = {
    "ours": ("gpt", "ptuning.training.trainer", "torch._dynamo"),  # The last is the optimizer's.
    "peft": ("transformers.models.gpt2.modeling_gpt2", "peft"),
}


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    for module in IMPORTS[name]:
        import_module(module)
    answers.write("{}\n")
    learner: Learner | None = None
    for line in sys.stdin:
        work = json.loads(line)
        answer: dict[str, Any] = {}
        if "model" in work:
            learner = SIDES[name](work["model"], work["dtype"])
            answer["about"] = learner.about
        assert learner is not None, "the first line names the model"
        if "virtual" in work:
            learner.begin(work["virtual"])
        if "batches" in work:
            spent, start = time.process_time(), time.perf_counter()
            answer["losses"] = [learner.step(batch, work["answer"]) for batch in work["batches"]]
            answer["seconds"] = time.perf_counter() - start
            answer["cpu_s"] = time.process_time() - spent
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
