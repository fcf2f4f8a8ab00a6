"""Trains the demo model from nothing, on one CPU, and writes its checkpoint.

Records of tasks.py, each learned once, are written to a file, and `preamble tune`'s own trainer
learns them: `method: full`, a template without virtual tokens, a loss on answers only. Nothing is
padded, so records of any lengths make a batch. The same seed and threads give the same model.
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
from checkpoints_tools.layout.layout import Division
from checkpoints_tools.writers.registry import Wish
from examples.demo.evaluate import evaluate, report
from examples.demo.tasks import training_records
from examples.demo.vocabulary import VOCABULARY_SIZE, train_vocabulary
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import open_tokenizer
from ptuning.config import TuneConfig
from ptuning.reporting.observer import Audience
from ptuning.run.preparation import prepare
from ptuning.run.training_loop import Learning, load_trainer

CHECKPOINT = Path(__file__).parent / "checkpoint"
# As a training cluster would leave it: four ranks' files, the vocabulary padded. The bf16 model is
# the only one that anybody sees: its identity is its own.
SPLIT = Wish("megatron", dtype="bfloat16", division=Division(tp=2, pp=2), prove=True)
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


@dataclass(frozen=True)
class Recipe:
    steps: int = 8000
    batch_records: int = 36  # Of 30 tokens each, in the mean. 8000 steps are a file of 30 MB.
    seed: int = 0

    def settings(self, model: Path, data: Path, output: Path) -> TuneConfig:
        """As a user would write them for `preamble tune`."""
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
    """As many as are learned, since each is learned once."""
    records = training_records(recipe.seed, WEIGHTS)
    with file.open("w", encoding="utf-8") as out:
        for record in itertools.islice(records, recipe.steps * recipe.batch_records):
            line = {"prompt": record.prompt, "completion": record.completion}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def train(folder: Path, vocabulary: Path, recipe: Recipe) -> Path:
    """A native checkpoint in fp32, in `folder`, which also gets what that takes."""
    write_records(folder / "records.jsonl", recipe)
    write_native(fresh(CONFIG, recipe.seed), folder / "start", tokenizer=vocabulary)
    config = recipe.settings(folder / "start", folder / "records.jsonl", folder / "trained")
    prepared = prepare(config)
    with closing(Audience(prepared, sys.stderr)) as audience:
        trainer = load_trainer(prepared, Mesh.single())
        (path,) = Learning(prepared, trainer, audience).run().paths
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
