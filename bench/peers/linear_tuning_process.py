"""Trainer process: LoRA, activated LoRA, DoRA or IA3 with one trainer; batches in, losses out.

The command is `python -m bench.peers.linear_tuning_process NAME THREADS`, where NAME is "ours" or
"peft". A request is a line of JSON on standard input, and each request has a reply of one line.
Both trainers change the same modules, with the same optimizer.
"""

import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol

import torch

from bench.peers.peft_process import train_peft_step

LEARNING_RATE = 1e-4
RANK = 16
# The tokens from which activated LoRA acts.
INVOCATION = (11, 12, 13, 14)
# A batch is a list of examples, and an example is a list of token ids that ends with the answer.
Batches = list[list[list[int]]]
# The modules of transformers, and the parts of fused linears that correspond to them.
MODULES = {
    "gpt2": (["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"], "mlp.c_proj"),
    "llama": (
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "down_proj",
    ),
}
TARGETS = {
    "gpt2": (),
    "llama": (
        "linear_qkv.query",
        "linear_qkv.key",
        "linear_qkv.value",
        "linear_proj",
        "linear_fc1.gate",
        "linear_fc1.up",
        "linear_fc2",
    ),
}


class LinearTrainer(Protocol):
    """A trainer with a loaded model; call `start_training` before `train_step`."""

    description: str

    def start_training(self, method: str) -> None:
        """Start a new training of an adapter."""

    def train_step(self, examples: list[list[int]], answer_tokens: int) -> float:
        """Train one step on a batch; return the mean loss before the update.

        The last `answer_tokens` ids of each example are the answer.
        """


class PreambleLinearTrainer:
    """Trains with `ptuning.training.trainer.Trainer`, as `preamble tune` does."""

    def __init__(self, model: str, dtype: str, family: str) -> None:
        import gpt

        self.description = f"ours, torch {version('torch')}"
        self._model = gpt.load(model, dtype=dtype)
        self._targets = TARGETS[family]

    def start_training(self, method: str) -> None:
        from ptuning.config import TuneConfig
        from ptuning.linears.trainable_linears import build_trainable_linears
        from ptuning.training.trainer import Trainer

        settings: dict[str, Any] = {} if method == "ia3" else {"rank": RANK}
        if method == "alora":
            settings["invocation_ids"] = INVOCATION
        config = TuneConfig(
            model="a model",
            name="an adapter",
            data="records",
            method=method,
            targets=self._targets,
            learning_rate=LEARNING_RATE,
            schedule="constant",
            warmup_steps=0,
            beta2=0.999,
            gradient_norm_max=1e30,
            **settings,
        )
        tasks = config.data_config.resolved_tasks
        linears = build_trainable_linears(config.task_method_configs, tasks, [self._model], seed=0)
        self._trainer = Trainer([self._model], config, linears=linears)

    def train_step(self, examples: list[list[int]], answer_tokens: int) -> float:
        from gpt.linear_adapter import last_occurrence
        from ptuning.data.dataset import Example

        batch = [
            Example(
                ids,
                len(ids) - answer_tokens,
                invocation_start=last_occurrence(ids, INVOCATION) or 0,
            )
            for ids in examples
        ]
        return self._trainer.step(batch).loss


class PeftLinearTrainer:
    """Trains with transformers and peft, on batches padded on the right."""

    def __init__(self, model: str, dtype: str, family: str) -> None:
        self.description = f"peft {version('peft')}, transformers {version('transformers')}"
        self._path = model
        self._dtype = getattr(torch, dtype)
        self._family = family
        self._peft_model: Any = self._load_model()

    def _load_model(self) -> Any:
        transformers: Any = import_module("transformers")
        return transformers.AutoModelForCausalLM.from_pretrained(
            self._path, dtype=self._dtype, attn_implementation="eager"
        )

    def start_training(self, method: str) -> None:
        peft: Any = import_module("peft")
        if isinstance(self._peft_model, peft.PeftModel):
            self._peft_model = None  # Free the old model before loading the new one.
            self._peft_model = self._load_model()
        modules, feedforward = MODULES[self._family]
        common = {"task_type": "CAUSAL_LM", "target_modules": modules}
        if method == "ia3":
            config = peft.IA3Config(**common, feedforward_modules=[feedforward])
        else:
            config = peft.LoraConfig(
                **common,
                r=RANK,
                lora_alpha=RANK,
                use_dora=method == "dora",
                alora_invocation_tokens=list(INVOCATION) if method == "alora" else None,
            )
        self._peft_model = peft.get_peft_model(self._peft_model, config).train()
        trained = [value for value in self._peft_model.parameters() if value.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)

    def train_step(self, examples: list[list[int]], answer_tokens: int) -> float:
        return train_peft_step(self._peft_model, self._optimizer, examples, answer_tokens)


TRAINERS: dict[str, type[PreambleLinearTrainer] | type[PeftLinearTrainer]] = {
    "ours": PreambleLinearTrainer,
    "peft": PeftLinearTrainer,
}
# Modules that are imported before the memory of the idle process is read.
PRELOADED_MODULES = {
    "ours": ("gpt", "ptuning.training.trainer", "torch._dynamo"),
    "peft": ("transformers.models.gpt2.modeling_gpt2", "peft", "torch._dynamo"),
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
    trainer: LinearTrainer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        if "model" in request:
            trainer = TRAINERS[name](request["model"], request["dtype"], request["family"])
            reply["about"] = trainer.description
        assert trainer is not None, "the first request must contain 'model'"
        if "method" in request:
            trainer.start_training(request["method"])
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
