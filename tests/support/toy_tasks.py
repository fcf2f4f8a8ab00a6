"""A synthetic language: nine tasks on eight letters, and a small GPT trained on instructions.

A prompt is instructions (at most ten signs, each one of the task's five synonyms), a word, and an
arrow; the answer is another word. Without instructions the task is undetermined. Data and tokenizer
do not depend on the training loop.
"""

import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders

from checkpoints_tools.conversion.convert import write_native
from gpt.batch import Batch
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from ptuning.config import TuneConfig
from ptuning.data.batch_order import BatchOrder
from ptuning.data.dataset import Example, read_tasks
from ptuning.prompt.initialization import initial_ids
from ptuning.prompt.prefix_tuning import build_prefix, shard_prefix_table
from ptuning.prompt.prompt_encoder import build_encoder
from ptuning.run_facts import StepMetrics
from ptuning.training.pipeline import micro_batch_prefix
from ptuning.training.trainer import Trainer

BASES = Path(__file__).resolve().parents[2] / "build" / "toy"

LETTERS = "abcdefghijklmnop"
KANA = "アイウエオカキクケコサシスセソタ"
ARROW = "→"
END = "</s>"
UNKNOWN = "<unk>"
WORD = 8  # Letters of a word.
SIGNS_MAX = 10  # Instructions before a word.
BARE = 0.2  # The share of words without instructions.


def _table(letters: str) -> Callable[[str], str]:
    translation = str.maketrans(LETTERS, letters)
    return lambda word: word.translate(translation)


def _shuffled(seed: int) -> str:
    return "".join(random.Random(seed).sample(LETTERS, len(LETTERS)))


def _swapped(word: str) -> str:
    return "".join(word[position + 1] + word[position] for position in range(0, WORD, 2))


TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "next": _table(LETTERS[1:] + LETTERS[:1]),
    "swap": _swapped,
    "descend": lambda word: "".join(sorted(word, reverse=True)),
    "rotate": lambda word: word[1:] + word[:1],
    "cipher": _table(_shuffled(1)),
    "kana": _table(KANA),  # Its answers are not in Latin letters.
}
# The base is never trained on this task, so an adapter must learn it from its own examples.
CONTROL = "untaught"
EVERY = {**TASKS, CONTROL: _table(_shuffled(2))}
# Five synonyms for each task; no text of the tasks contains them.
SIGNS = {
    task: [chr(0x4E00 + 5 * number + synonym) for synonym in range(5)]
    for number, task in enumerate(TASKS)
}


def tokenizer() -> tokenizers.Tokenizer:
    """A SentencePiece tokenizer without merges: each sign of the language is a token.

    So every row of the embedding is trained, as in a model that a user would tune.
    """
    signs = [*LETTERS, *KANA, ARROW, *itertools.chain(*SIGNS.values())]
    numbers = {sign: number for number, sign in enumerate([END, UNKNOWN, *signs])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [], unk_token=UNKNOWN))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    library.add_special_tokens([END])
    return library


def words(seed: int) -> Iterator[str]:
    """An endless series of random words. Training and measurement need different seeds."""
    draw = random.Random(seed)
    while True:
        yield "".join(draw.choices(LETTERS, k=WORD))


def records(task: str, count: int, seed: int) -> list[dict[str, str]]:
    """Words and their answers, without instructions."""
    drawn_words = itertools.islice(words(seed), count)
    return [{"word": word, "answer": EVERY[task](word)} for word in drawn_words]


CONFIG = GPTConfig(  # HF's Llama can express it.
    num_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    ffn_hidden_size=384,
    vocab_size=tokenizer().get_vocab_size(),
    max_position_embeddings=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
)


@dataclass(frozen=True)
class Recipe:
    """How the base is trained. Prompts of a batch have equally many instructions: no padding."""

    steps: int = 800
    batch_examples: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    seed: int = 0
    deviation: float = 0.06  # Of the initial weights: three times the usual, as the model is small.
    # Tasks that are hard to learn are sampled more often.
    often: tuple[str, ...] = ("sort", "descend", "swap", "reverse", "sort", "descend")
    config: GPTConfig = CONFIG

    def batches(self) -> Iterator[list[Example]]:
        """An endless series of training batches for the base."""
        library = tokenizer()
        draw = random.Random(self.seed)
        numbers = library.get_vocab()  # One token per sign, so no encoding is needed.
        tasks = [*TASKS, *self.often]
        drawn_words = words(self.seed)
        while True:
            count = 0 if draw.random() < BARE else draw.randint(1, SIGNS_MAX)
            batch = []
            for word in itertools.islice(drawn_words, self.batch_examples):
                # Without instructions all tasks are equally likely: no task is the best guess.
                task = draw.choice(tasks if count else [*TASKS])
                prompt = "".join(draw.choices(SIGNS[task], k=count)) + word + ARROW
                ids = [numbers[sign] for sign in prompt + TASKS[task](word)]
                batch.append(Example([*ids, numbers[END]], len(prompt)))
            yield batch

    @property
    def key(self) -> str:
        """Identifies the base: another recipe or another language gives another base."""
        batches = itertools.islice(self.batches(), 20)
        token_ids = [example.ids for example in itertools.chain(*batches)]
        return hashlib.sha256(f"{self} {tokenizer().to_str()} {token_ids}".encode()).hexdigest()[
            :16
        ]


def learn_base(recipe: Recipe, report: Callable[[StepMetrics], None]) -> dict[str, torch.Tensor]:
    """Train the base with the product's own trainer, on all weights."""
    config = TuneConfig(
        model="toy",
        data="toy",
        method="full",
        steps=recipe.steps,
        batch_examples=recipe.batch_examples,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
    )
    start = random_init_checkpoint(recipe.config, recipe.seed, recipe.deviation)
    model = load_model(start, Mesh.single())
    trainer = Trainer([model], config)
    for batch in itertools.islice(recipe.batches(), recipe.steps):
        report(trainer.step(batch))
    return {name: value.detach() for name, value in model.named_parameters()}


@cache
def base() -> Path:
    """The base as a native checkpoint with its tokenizer; trained once, then cached."""
    recipe = Recipe()
    target = BASES / recipe.key
    if target.exists():
        return target
    BASES.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=BASES) as folder:
        file = Path(folder) / "tokenizer.json"
        tokenizer().save(str(file))
        path = Path(folder) / "base"
        write_native((recipe.config, learn_base(recipe, _report)), path, tokenizer=file)
        if not target.exists():  # Another process may have been faster.
            os.replace(path, target)
    torch.set_num_threads(threads)
    return target


def open_checkpoint_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint."""
    tokenizer = open_checkpoint(path).tokenizer
    assert tokenizer is not None
    return open_tokenizer(tokenizer)


def train_prompt(
    model: GPT,
    config: TuneConfig,
    steps_saved: Iterable[int] = (),
) -> dict[int, torch.Tensor]:
    """The run's table after its last step, and after each step in `looks`.

    With the method `full` there is no table: the model itself is trained.
    """
    tables: dict[int, torch.Tensor] = {}
    encoder = None
    prefix = None
    method_config, training = config.method_config, config.training_config
    tokens = open_checkpoint_tokenizer(Path(config.model_config.model))
    (task,) = read_tasks(config.data_config, method_config, tokens, model.config)
    starts = [initial_ids(task, method_config, tokens, seed=training.seed)]
    tasks = config.data_config.resolved_tasks
    if method_config.method == "prefix":
        prefix = build_prefix(method_config, tasks, [model], starts, seed=training.seed)
    elif method_config.method != "full":
        encoder = build_encoder(method_config, tasks, model, starts, seed=training.seed)
    trainer = Trainer([model], config, encoder, prefix=prefix)
    order = BatchOrder(task.examples.examples, training.batch_examples, training.seed)
    for step in range(1, training.steps + 1):
        trainer.step(order.batch(step))
        if method_config.method != "full" and step in {*steps_saved, training.steps}:
            table = trainer.current_table()
            assert table is not None
            tables[step] = table
    return tables


def batches(model: GPT, config: TuneConfig) -> Iterator[list[Example]]:
    """The training batches of a run, step by step."""
    training = config.training_config
    tokens = open_checkpoint_tokenizer(Path(config.model_config.model))
    (task,) = read_tasks(config.data_config, config.method_config, tokens, model.config)
    order = BatchOrder(task.examples.examples, training.batch_examples, training.seed)
    return map(order.batch, range(1, training.steps + 1))


@torch.inference_mode()
def exact_match_share(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    table: torch.Tensor | None = None,
    kind: str = "rows",
) -> float:
    """The share of answers that greedy decoding would generate exactly.

    One forward pass is enough: if each token of the answer is the argmax after the true prefix,
    greedy decoding generates the answer.
    """
    ids = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    starts = itertools.accumulate((len(sequence) for sequence in ids), initial=0)
    rows = [
        range(end - len(answer), end)
        for end, answer in zip(itertools.islice(starts, 1, None), answers, strict=True)
    ]
    batch = Batch.unpaged(
        [len(sequence) for sequence in ids],
        logit_rows=torch.tensor([row for sequence in rows for row in sequence]),
    )
    flat = torch.tensor([token for sequence in ids for token in sequence])
    prefix = None
    if table is not None and kind == "prefix":
        prefix = micro_batch_prefix(
            shard_prefix_table(table, [model]), flat, model.config.vocab_size
        )
        table = None
    hidden = model.forward_hidden(flat, batch, virtual_embeddings=table, prefix=prefix)
    likeliest = iter(model.compute_logits(hidden, batch).argmax(-1).tolist())
    hits = [[next(likeliest) for _ in answer] == list(answer) for answer in answers]
    return sum(hits) / len(hits)


def _report(progress: StepMetrics) -> None:
    if progress.step % 100 == 0:
        print(f"step {progress.step} of {progress.steps}, loss {progress.loss:.3f}", flush=True)
