"""Trains the demo model from random weights on one CPU and writes its checkpoint.

The script writes the records of tasks.py to a file, and trains on each record once with the trainer
of `preamble tune`: `method: full`, a template without virtual tokens, and a loss on answers only.
Batches are not padded. The same seed and number of threads give the same model.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints_tools.conversion.convert import convert, plan, write_native
from checkpoints_tools.layout.layout import ParallelSplit
from checkpoints_tools.writers.registry import ConversionOptions
from examples.demo.evaluate import evaluate, report
from examples.demo.tasks import training_records
from examples.demo.vocabulary import VOCABULARY_SIZE, train_vocabulary
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import open_tokenizer
from ptuning.config import TuneConfig
from ptuning.reporting.observer import RunObserver
from ptuning.run.preparation import prepare
from ptuning.run.training_loop import TrainingLoop, load_trainer

CHECKPOINT = Path(__file__).parent / "checkpoint"
# The checkpoint has the layout that a training cluster writes: bf16 weights in the files of four
# ranks, with a padded vocabulary.
SPLIT = ConversionOptions("megatron", dtype="bfloat16", split=ParallelSplit(tp=2, pp=2), prove=True)
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
# Relative frequencies of tasks: tasks that are hard to learn have more records.
WEIGHTS = (
    dict.fromkeys(("sum", "smaller"), 3.0)
    | dict.fromkeys(("larger", "difference"), 6.0)
    | dict.fromkeys(("mood", "name", "city", "subject", "place"), 0.5)
)


@dataclass(frozen=True)
class Recipe:
    steps: int = 8000
    batch_records: int = 36  # About 30 tokens each. 8000 steps need a file of 30 MB.
    seed: int = 0

    def settings(self, model: Path, data: Path, output: Path) -> TuneConfig:
        """Return the settings of `preamble tune`."""
        return TuneConfig(
            model=str(model),
            data=str(data),
            name="demo",
            output=str(output),
            method="full",
            template="{prompt} {completion}",
            steps=self.steps,
            batch_examples=self.batch_records,
            learning_rate=4e-3,
            warmup_steps=100,
            minimum_rate=0.01,
            weight_decay=0.05,
            save_every=self.steps,
            seed=self.seed,
        )


def write_records(file: Path, recipe: Recipe) -> None:
    """Write the training records of all steps, `batch_records` per step."""
    records = training_records(recipe.seed, WEIGHTS)
    with file.open("w", encoding="utf-8") as out:
        for record in itertools.islice(records, recipe.steps * recipe.batch_records):
            line = {"prompt": record.prompt, "completion": record.completion}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def train(folder: Path, vocabulary: Path, recipe: Recipe) -> Path:
    """Train in `folder` and return the path of the native fp32 checkpoint."""
    write_records(folder / "records.jsonl", recipe)
    write_native(
        random_init_checkpoint(CONFIG, recipe.seed), folder / "start", tokenizer=vocabulary
    )
    config = recipe.settings(folder / "start", folder / "records.jsonl", folder / "trained")
    prepared = prepare(config)
    with closing(RunObserver(prepared, sys.stderr)) as observer:
        trainer = load_trainer(prepared, Mesh.single())
        (path,) = TrainingLoop(prepared, trainer, observer).run().paths
    return path


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
        trained = train(Path(folder), vocabulary, Recipe(steps=flags.steps, seed=flags.seed))
        shutil.rmtree(flags.target, ignore_errors=True)
        convert(plan(open_checkpoint(trained), flags.target, SPLIT))
        print(report(evaluate(load(flags.target), open_tokenizer(vocabulary))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
