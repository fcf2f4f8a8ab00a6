"""A toy world: nine tasks on eight letters, and a small GPT that learned to do what it is told.

A prompt is instructions (signs that mean the task, ten at most, any of five synonyms), a word, and
an arrow; the answer is another word. Without instructions nothing says which task is meant. Data
and tokenizer are apart from the loop that learns from them.
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
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer
from ptuning.config import TuneConfig
from ptuning.data.batch_order import Order
from ptuning.data.dataset import Example, read_tasks
from ptuning.prompt.initialization import initial_ids
from ptuning.prompt.prefix_tuning import build_prefix, prefix_parts
from ptuning.prompt.prompt_encoder import build_encoder
from ptuning.run_facts import Progress
from ptuning.training.pipeline import prefix_at
from ptuning.training.trainer import Trainer

BASES = Path(__file__).resolve().parents[2] / "build" / "toy"

LETTERS = "abcdefghijklmnop"
KANA = "アイウエオカキクケコサシスセソタ"
ARROW = "→"
END, UNKNOWN = "</s>", "<unk>"
WORD = 8  # Letters of a word.
SIGNS_MAX = 10  # Instructions before a word.
BARE = 0.2  # Of the words have none.


def _table(letters: str) -> Callable[[str], str]:
    turned = str.maketrans(LETTERS, letters)
    return lambda word: word.translate(turned)


def _shuffled(seed: int) -> str:
    return "".join(random.Random(seed).sample(LETTERS, len(LETTERS)))


def _swapped(word: str) -> str:
    return "".join(word[at + 1] + word[at] for at in range(0, WORD, 2))


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
# Nobody is ever taught this one: what learns it has learned it from its own examples.
CONTROL = "untaught"
EVERY = {**TASKS, CONTROL: _table(_shuffled(2))}
# Five for each task, as no text of the tasks has them.
SIGNS = {
    task: [chr(0x4E00 + 5 * place + synonym) for synonym in range(5)]
    for place, task in enumerate(TASKS)
}


def tokenizer() -> tokenizers.Tokenizer:
    """Sentencepiece's kind, without merges: each sign of the world is a token, and nothing else.

    So every row of the embedding has been learned, as in a model that is worth a prompt.
    """
    signs = [*LETTERS, *KANA, ARROW, *itertools.chain(*SIGNS.values())]
    numbers = {sign: number for number, sign in enumerate([END, UNKNOWN, *signs])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [], unk_token=UNKNOWN))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_special_tokens([END])
    return made


def words(seed: int) -> Iterator[str]:
    """Without end. Nobody should measure with the words that it learned from."""
    draw = random.Random(seed)
    while True:
        yield "".join(draw.choices(LETTERS, k=WORD))


def records(task: str, count: int, seed: int) -> list[dict[str, str]]:
    """Words and their answers, without instructions."""
    some = itertools.islice(words(seed), count)
    return [{"word": word, "answer": EVERY[task](word)} for word in some]


CONFIG = GPTConfig(  # One that HF's Llama can hold.
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
    """How the base is made. A batch has equally many instructions, so that nothing is padded."""

    steps: int = 800
    batch_examples: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    seed: int = 0
    deviation: float = 0.06  # Of the initial weights: three times the usual, as the model is small.
    # What is hard to learn is taught more often.
    often: tuple[str, ...] = ("sort", "descend", "swap", "reverse", "sort", "descend")
    config: GPTConfig = CONFIG

    def batches(self) -> Iterator[list[Example]]:
        """What the base learns from, without end."""
        library, draw = tokenizer(), random.Random(self.seed)
        numbers = library.get_vocab()  # Of each sign, so the whole is what `encode` would make.
        tasks, some = [*TASKS, *self.often], words(self.seed)
        while True:
            count = 0 if draw.random() < BARE else draw.randint(1, SIGNS_MAX)
            batch = []
            for word in itertools.islice(some, self.batch_examples):
                # Without instructions all tasks are equally likely, so that none is a good guess.
                task = draw.choice(tasks if count else [*TASKS])
                prompt = "".join(draw.choices(SIGNS[task], k=count)) + word + ARROW
                ids = [numbers[sign] for sign in prompt + TASKS[task](word)]
                batch.append(Example([*ids, numbers[END]], len(prompt)))
            yield batch

    @property
    def key(self) -> str:
        """What the base follows from: another recipe, or another world, is another base."""
        first = itertools.islice(self.batches(), 20)
        taught = [example.ids for example in itertools.chain(*first)]
        return hashlib.sha256(f"{self} {tokenizer().to_str()} {taught}".encode()).hexdigest()[:16]


def learn_base(recipe: Recipe, report: Callable[[Progress], None]) -> dict[str, torch.Tensor]:
    """The plain way to a base: the product's own trainer, on all weights."""
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
    start = fresh(recipe.config, recipe.seed, recipe.deviation)
    model = load_model(start, Mesh.single())
    trainer = Trainer([model], config)
    for batch in itertools.islice(recipe.batches(), recipe.steps):
        report(trainer.step(batch))
    return {name: value.detach() for name, value in model.named_parameters()}


@cache
def base() -> Path:
    """The base as a native checkpoint with its tokenizer; made once, then found again."""
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
        made = Path(folder) / "base"
        write_native((recipe.config, learn_base(recipe, _told)), made, tokenizer=file)
        if not target.exists():  # Somebody else may have been quicker.
            os.replace(made, target)
    torch.set_num_threads(threads)
    return target


def open_beside(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint."""
    found = open_checkpoint(path).tokenizer
    assert found is not None
    return open_tokenizer(found)


def learn(
    model: GPT,
    config: TuneConfig,
    looks: Iterable[int] = (),
) -> dict[int, torch.Tensor]:
    """The run's table after its last step, and after those of these numbers.

    With the method `full` there is none, and the model itself is what has learned.
    """
    found: dict[int, torch.Tensor] = {}
    encoder, prefix, tokens = None, None, open_beside(Path(config.model))
    (task,) = read_tasks(config, tokens, model.config)
    starts = [initial_ids(task, config, tokens)]
    if config.method == "prefix":
        prefix = build_prefix(config, config.wanted, [model], starts)
    elif config.method != "full":
        encoder = build_encoder(config, config.wanted, model, starts)
    trainer = Trainer([model], config, encoder, prefix=prefix)
    order = Order(task.examples.examples, config.batch_examples, config.seed)
    for step in range(1, config.steps + 1):
        trainer.step(order.batch(step))
        if config.method != "full" and step in {*looks, config.steps}:
            table = trainer.table()
            assert table is not None
            found[step] = table
    return found


def batches(model: GPT, config: TuneConfig) -> Iterator[list[Example]]:
    """Those of a run, step by step."""
    (task,) = read_tasks(config, open_beside(Path(config.model)), model.config)
    order = Order(task.examples.examples, config.batch_examples, config.seed)
    return map(order.batch, range(1, config.steps + 1))


@torch.inference_mode()
def right(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    table: torch.Tensor | None = None,
    kind: str = "rows",
) -> float:
    """The share of answers of which greedy decoding would write every token.

    One pass tells: where all tokens are the likeliest behind the right ones, decoding writes them.
    """
    ids = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    starts = itertools.accumulate((len(one) for one in ids), initial=0)
    rows = [
        range(end - len(answer), end)
        for end, answer in zip(itertools.islice(starts, 1, None), answers, strict=True)
    ]
    batch = Batch.plain(
        [len(one) for one in ids], rows=torch.tensor([row for one in rows for row in one])
    )
    flat = torch.tensor([token for one in ids for token in one])
    prefix = None
    if table is not None and kind == "prefix":
        prefix = prefix_at(prefix_parts(table, [model]), flat, model.config.vocab_size)
        table = None
    hidden = model.hidden(flat, batch, table=table, prefix=prefix)
    likeliest = iter(model.head(hidden, batch).argmax(-1).tolist())
    hits = [[next(likeliest) for _ in answer] == list(answer) for answer in answers]
    return sum(hits) / len(hits)


def _told(progress: Progress) -> None:
    if progress.step % 100 == 0:
        print(f"step {progress.step} of {progress.steps}, loss {progress.loss:.3f}", flush=True)
