"""Trains the demo model from nothing, on one CPU, and writes its checkpoint.

Records come from tasks.py without end and are learned once each; only answers have a loss. Records
of one length make a batch, so that no token is padding. The product's trainer is for frozen models;
this is the plain loop that makes one to freeze. The same seed and threads give the same model.
"""

import argparse
import itertools
import math
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints_tools.convert import convert, plan
from checkpoints_tools.layout import Division
from checkpoints_tools.writers import Wish
from examples.demo.evaluate import evaluate, report
from examples.demo.tasks import Record, training_records
from examples.demo.vocabulary import VOCABULARY_SIZE, train_vocabulary
from gpt.batch import Batch
from gpt.config import GPTConfig
from gpt.fresh import fresh
from gpt.loading import load, load_model
from gpt.logical import in_memory
from gpt.model import GPT
from gpt.parallel import Mesh
from gpt.tokenizer import Tokenizer, open_tokenizer

CHECKPOINT = Path(__file__).parent / "checkpoint"
# As a training cluster would leave it: four ranks' files, the vocabulary padded.
SPLIT = Wish("megatron", division=Division(tp=2, pp=2), prove=True)
CONFIG = GPTConfig(
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=384,
    vocab_size=VOCABULARY_SIZE,
    max_position_embeddings=256,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
)
# What is hard to learn is taught more often.
WEIGHTS = (
    dict.fromkeys(("sum", "smaller"), 3.0)
    | dict.fromkeys(("larger", "difference"), 6.0)
    | dict.fromkeys(("mood", "name", "city", "subject", "place"), 0.5)
)
POOL_RECORDS = 8192  # Records that are grouped by length before their batches are shuffled.


@dataclass(frozen=True)
class Recipe:
    steps: int = 8000
    batch_tokens: int = 1024
    learning_rate: float = 4e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    beta2: float = 0.98
    gradient_norm_max: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Example:
    ids: list[int]  # Prompt, answer and end, but for the end itself, which predicts nothing.
    targets: list[int]  # The answer and the end.


def encode(records: Iterable[Record], tokenizer: Tokenizer) -> Iterator[Example]:
    assert tokenizer.eos_id is not None
    for record in records:
        prompt = tokenizer.encode(record.prompt)
        whole = tokenizer.encode(f"{record.prompt} {record.completion}")
        assert whole[: len(prompt)] == prompt, "the mark must end a token"
        yield Example(whole, [*whole[len(prompt) :], tokenizer.eos_id])


def batches(examples: Iterator[Example], tokens: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches of examples of one length, about `tokens` long, in random order."""
    rng = random.Random(seed)
    waiting: dict[int, list[Example]] = defaultdict(list)
    while True:
        full = []
        for example in itertools.islice(examples, POOL_RECORDS):
            alike = waiting[len(example.ids)]
            alike.append(example)
            if len(alike) * len(example.ids) >= tokens:
                full.append(waiting.pop(len(example.ids)))
        rng.shuffle(full)
        yield from full


def answer_loss(model: GPT, batch: list[Example]) -> Tensor:
    """Mean cross entropy of the answers' tokens; no other token needs logits."""
    length = len(batch[0].ids)
    assert all(len(example.ids) == length for example in batch)
    rows = [
        row * length + place
        for row, example in enumerate(batch)
        for place in range(length - len(example.targets), length)
    ]
    ids = torch.tensor([example.ids for example in batch]).flatten()
    plan = Batch.plain((length,) * len(batch), rows=torch.tensor(rows))
    targets = torch.tensor([target for example in batch for target in example.targets])
    return F.cross_entropy(model(ids, plan), targets)


def rate(step: int, recipe: Recipe) -> float:
    """The share of the full learning rate: a line up, then a cosine down to a hundredth."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def train(tokenizer: Tokenizer, recipe: Recipe, config: GPTConfig = CONFIG) -> GPT:
    """A trained model in fp32. Prints a line for every hundred steps."""
    model = load_model(fresh(config, recipe.seed), Mesh.single("cpu")).requires_grad_(True)
    matrices = [value for value in model.parameters() if value.dim() > 1]
    vectors = [value for value in model.parameters() if value.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(0.9, recipe.beta2),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, recipe))
    examples = encode(training_records(recipe.seed, WEIGHTS), tokenizer)
    start, tokens, total = time.monotonic(), 0, 0.0
    endless = batches(examples, recipe.batch_tokens, recipe.seed)
    for step, batch in enumerate(itertools.islice(endless, recipe.steps), 1):
        loss = answer_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm_max)
        optimizer.step()
        scheduler.step()
        tokens += len(batch) * len(batch[0].ids)
        total += float(loss.detach())
        if step % 100 == 0:
            seconds = time.monotonic() - start
            print(f"step {step} loss {total / 100:.4f} tokens {tokens} seconds {seconds:.0f}")
            sys.stdout.flush()
            total = 0.0
    return model


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.train", description=__doc__)
    parser.add_argument("--target", type=Path, default=CHECKPOINT, help="replaced if it exists")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args(argv)
    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "tokenizer.model"
        vocabulary.write_bytes(train_vocabulary(flags.seed))
        model = train(open_tokenizer(vocabulary), Recipe(steps=flags.steps, seed=flags.seed))
        # The bf16 model is the only one that anybody sees: its identity is its own.
        stored = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
        shutil.rmtree(flags.target, ignore_errors=True)
        source = in_memory(replace(CONFIG, dtype="bfloat16"), stored, vocabulary)
        convert(plan(source, flags.target, SPLIT))
        print(report(evaluate(load(flags.target), open_tokenizer(vocabulary))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
