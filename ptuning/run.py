"""A tuning run: from settings to an adapter file.

`prepare` does all that can go wrong before anything is computed, reading only the checkpoint's
headers; `run` loads the model, learns, and writes the adapter at once or not at all. Nothing here
talks to a terminal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpt.adapter import SUFFIX, Card, build_adapter, parse_name, save_adapter
from gpt.checkpoint import open_checkpoint
from gpt.digest import identify
from gpt.errors import ConfigError, RequestError
from gpt.loading import load_model
from gpt.logical import FLOATS, Checkpoint
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


@dataclass(frozen=True)
class Result:
    path: Path
    first_loss: float
    last_loss: float  # The mean of the last steps.


def prepare(config: TuneConfig) -> Prepared:
    _check_output(config)
    if config.dtype not in (None, *FLOATS):
        raise ConfigError(f"dtype is {config.dtype!r}; known are: {', '.join(FLOATS)}")
    checkpoint = open_checkpoint(config.model)
    sizes = checkpoint.config
    tokenizer: Tokenizer = NullTokenizer(sizes.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, sizes.vocab_size, checkpoint.tokenizer)
    template = Template(
        config.template,
        config.splits or (config.virtual_tokens,),
        truncate_field=config.truncate_field,
        answer_field=config.answer_field,
        bos="first" if tokenizer.adds_bos else "none",
        eos=tokenizer.eos_id is not None,
    )
    examples = read_examples(
        Path(config.data),
        template,
        tokenizer,
        vocab_size=sizes.vocab_size,
        tokens_max=min(
            config.tokens_max or sizes.max_position_embeddings, sizes.max_position_embeddings
        ),
    )
    return Prepared(config, checkpoint, tokenizer, template, examples)


def _check_output(config: TuneConfig) -> None:
    """Hours of learning should not end at a file that cannot be written."""
    if Path(config.output).exists() and not Path(config.output).is_dir():
        raise ConfigError(f"output: {config.output} is not a directory; name one, new or not")
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
    folder = Path(config.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: {folder} cannot be made ({error.strerror})") from None
    model = load_model(prepared.checkpoint, Mesh.single(config.device), dtype=config.dtype).eval()
    losses: list[float] = []

    def step(progress: Progress) -> None:
        losses.append(progress.loss)
        report(progress)

    text_ids = prepared.tokenizer.encode(config.initial_text) if config.initial_text else []
    start = initial_table(model, template.rows, text_ids, config.seed)
    table = tune(model, start, prepared.examples.examples, config, step)
    last = losses[-LAST_STEPS:]
    last_loss = sum(last) / len(last)
    card = _card(prepared, {"loss": last_loss, "first_loss": losses[0], "steps": config.steps})
    path = _next_version(folder, config.name)
    save_adapter(build_adapter(card, table), path)
    return Result(path, losses[0], last_loss)


def _card(prepared: Prepared, metrics: dict[str, float]) -> Card:
    config, identity = prepared.config, identify(prepared.checkpoint)
    return Card(
        config.name,
        task=config.task,
        base_digest=identity.digest,
        base_fingerprint=identity.fingerprint,
        template=prepared.template,
        method="prompt tuning",
        metrics={**metrics, "examples": len(prepared.examples.examples)},
        stop=config.stop,
        max_new_tokens=config.max_new_tokens,
        notes=(identity.note,) if identity.note else (),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _next_version(folder: Path, name: str) -> Path:
    """A file that no version of this name has: what was written once never changes."""
    versions = [0]
    for file in folder.glob(f"{name}*{SUFFIX}"):
        try:
            found = parse_name(file.name.removesuffix(SUFFIX))
        except RequestError:
            continue
        if found.name == name:
            versions.append(found.version or 1)
    return folder / f"{name}@{max(versions) + 1}{SUFFIX}"
