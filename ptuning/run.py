"""A tuning run: from settings to an adapter file.

`prepare` does all that can go wrong before anything is computed, reading only the checkpoint's
headers; `run` loads the model, learns, and writes the adapter at once or not at all. Nothing here
talks to a terminal.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gpt.adapter import Card, build_adapter, check_folder, parse_name, publish_adapter
from gpt.card import TABLE_BYTES_MAX
from gpt.config import GPTConfig
from gpt.digest import identify
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.loading import device_of, load_model
from gpt.logical import FLOATS, Checkpoint
from gpt.overrides import open_overridden, read_overrides
from gpt.parallel import Mesh
from gpt.prompts import Template
from gpt.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from ptuning.config import TuneConfig
from ptuning.dataset import Examples, read_examples
from ptuning.train import Progress, initial_table, tune

# The card's loss is the mean over this many last steps; one batch alone says little.
LAST_STEPS = 20


@dataclass(frozen=True)
class Prepared:
    """Everything that a run starts from, checked; no weight is loaded yet."""

    config: TuneConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: Template
    examples: Examples
    initial_ids: list[int]  # Of the text that the table starts as; empty: there is none.
    card: Card  # All of it but what the base and the run will add.


@dataclass(frozen=True)
class Result:
    path: Path
    first_loss: float
    last_loss: float  # The mean of the last steps.


def prepare(config: TuneConfig) -> Prepared:
    _check_name(config)
    device_of(config.device)
    if config.dtype not in (None, *FLOATS):
        raise ConfigError(f"dtype is {config.dtype!r}; known are: {', '.join(FLOATS)}")
    changes = read_overrides(config.config_json, config.true_vocab_size)
    checkpoint = open_overridden(config.model, changes, config.tokenizer)
    sizes = checkpoint.config
    tokenizer: Tokenizer = NullTokenizer(sizes.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, sizes.vocab_size, checkpoint.tokenizer)
    _check_rows(config, sizes)
    template = Template(
        config.template,
        config.splits or (config.virtual_tokens,),
        truncate_field=config.truncate_field,
        answer_field=config.answer_field,
        bos="first" if tokenizer.adds_bos else "none",
        eos=tokenizer.eos_id is not None,
    )
    card = Card(
        config.name,
        task=config.task,
        template=template,
        method="prompt tuning",
        stop=config.stop,
        max_new_tokens=config.max_new_tokens,
    )
    initial_ids = _initial_ids(config, tokenizer)
    context = sizes.max_position_embeddings
    examples = read_examples(
        Path(config.data),
        template,
        tokenizer,
        vocab_size=sizes.vocab_size,
        tokens_max=min(config.tokens_max or context, context),
    )
    try:
        # Last, as it makes the directory. Hours of learning should not end where nobody can write.
        check_folder(Path(config.output))
    except AdapterError as error:
        raise ConfigError(f"output: {error}") from None
    return Prepared(config, checkpoint, tokenizer, template, examples, initial_ids, card)


def _check_rows(config: TuneConfig, sizes: GPTConfig) -> None:
    """As many as a server will take, before any prompt is made of them."""
    rows_max = min(sizes.max_position_embeddings // 2, TABLE_BYTES_MAX // (4 * sizes.hidden_size))
    if config.virtual_tokens > rows_max:
        raise ConfigError(
            f"virtual_tokens is {config.virtual_tokens}; this model takes at most {rows_max}: "
            f"half its context of {sizes.max_position_embeddings}, and a table of 1 GiB"
        )


def _initial_ids(config: TuneConfig, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(config.initial_text) if config.initial_text else []
    except RequestError as error:
        raise ConfigError(f"initial_text: {error}") from None


def _check_name(config: TuneConfig) -> None:
    try:
        name = parse_name(config.name)
    except RequestError as error:
        raise ConfigError(f"name: {error}") from None
    if name.version is not None:
        raise ConfigError(
            f"name is {config.name!r}; leave the version out, as each run makes the next one"
        )


def run(prepared: Prepared, report: Callable[[Progress], None]) -> Result:
    """Learn, and write the adapter."""
    config, template = prepared.config, prepared.template
    model = load_model(prepared.checkpoint, Mesh.single(config.device), dtype=config.dtype).eval()
    losses: list[float] = []

    def step(progress: Progress) -> None:
        losses.append(progress.loss)
        report(progress)

    start = initial_table(model, template.rows, prepared.initial_ids, config.seed)
    table = tune(model, start, prepared.examples.examples, config, step)
    last = losses[-LAST_STEPS:]
    last_loss = sum(last) / len(last)
    card = _card(prepared, {"loss": last_loss, "first_loss": losses[0], "steps": config.steps})
    path = publish_adapter(build_adapter(card, table), Path(config.output))
    return Result(path, losses[0], last_loss)


def _card(prepared: Prepared, metrics: dict[str, float]) -> Card:
    identity = identify(prepared.checkpoint)
    return replace(
        prepared.card,
        base_digest=identity.digest,
        base_fingerprint=identity.fingerprint,
        metrics={**metrics, "examples": len(prepared.examples.examples)},
        notes=(identity.note,) if identity.note else (),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
