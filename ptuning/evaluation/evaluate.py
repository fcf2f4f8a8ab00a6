"""`preamble tune --evaluate ADAPTER FILE`: what an adapter is worth on records, and without it.

The adapter's own card says how records become prompts, where answers end, and which model it is
for. The same records are answered without its virtual tokens, so that what it adds can be seen.
Answers are written and cut by the lines that a server uses.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gpt.adapters.adapter_file import Adapter, check_adapter, open_adapter
from gpt.checkpoint.digest import identify
from gpt.errors import AdapterError, ConfigError
from gpt.formats.overrides import open_overridden, read_overrides
from gpt.generation.completions import NEW_TOKENS, write_answers
from gpt.model.gpt_model import GPT
from gpt.model.loading import device_of, load_model
from gpt.model.pipeline import chunks_of
from gpt.parallel.mesh import Mesh, share_from_last
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example, Examples, read_examples
from ptuning.data.micro_batch import micro_batch, portions
from ptuning.evaluation.answer_metrics import measures
from ptuning.prompt.prefix_tuning import prefix_parts
from ptuning.run_facts import ADAPTER, NO_PROMPT, Sample
from ptuning.training.pipeline import Channels, run_passes
from ptuning.training.pipeline_schedule import forward_only

BATCH_TOKENS = 4096  # In one pass, for the loss.
SAMPLES = 12  # Answers that are told as JSON,
SHOWN = 3  # and to a person.


@dataclass(frozen=True)
class Score:
    """What answers are worth, by what stood before the text."""

    loss: float  # Of the right answers' tokens, the mean.
    measures: Mapping[str, float]  # Shares, from 0 to 1.
    answers_cut: int  # Of what was written, ended by max_new_tokens.


@dataclass(frozen=True)
class Evaluation:
    """An adapter on some records."""

    examples: int
    truncated: int
    dropped: Sequence[str]  # Why each other record was left out.
    scores: Mapping[str, Score]  # ADAPTER and NO_PROMPT.
    samples: Sequence[Sample]


def evaluate(
    model: GPT | Sequence[GPT], tokenizer: Tokenizer, adapter: Adapter, examples: Examples
) -> Evaluation:
    """`examples` are records by the adapter's own template. Every rank calls alike."""
    vocab_size = chunks_of(model)[0].config.vocab_size
    table = adapter.table.to(chunks_of(model)[0].mesh.device)
    plain = [_plain(example, vocab_size) for example in examples.examples]
    texts: dict[str, list[str]] = {}
    cut: list[bool] = []
    scores: dict[str, Score] = {}
    for what, shown, rows in ((NO_PROMPT, plain, None), (ADAPTER, examples.examples, table)):
        prompts = [list(example.ids[: example.answer_start]) for example in shown]
        written = write_answers(
            model,
            tokenizer,
            # A model needs a token to begin after, and this is what its texts begin after.
            [prompt or [tokenizer.bos_id or tokenizer.eos_id or 0] for prompt in prompts],
            table=rows,
            kind=adapter.card.kind,
            max_new_tokens=adapter.card.max_new_tokens or NEW_TOKENS,
            stops=adapter.card.stop,
        )
        texts[what] = [answer.text for answer in written]
        cut = [answer.cut for answer in written]
        found = measures(texts[what], examples.answers)
        scores[what] = Score(answer_loss(model, shown, rows, adapter.card.kind), found, sum(cut))
    told = (examples.records, examples.answers, texts[NO_PROMPT], texts[ADAPTER], cut)
    samples = [
        Sample(*one) for one, _ in zip(zip(*told, strict=True), range(SAMPLES), strict=False)
    ]
    return Evaluation(len(examples.examples), examples.truncated, examples.dropped, scores, samples)


@torch.no_grad()
def answer_loss(
    model: GPT | Sequence[GPT],
    examples: Sequence[Example],
    table: Tensor | None,
    kind: str = "rows",
) -> float:
    """The mean over all learned tokens. Every rank calls alike."""
    chunks = chunks_of(model)
    mesh = chunks[0].mesh
    # Who is alike in length goes together; where an example stands does not matter to a sum.
    ordered = sorted(examples, key=lambda example: len(example.ids))
    micros = [
        micro_batch(some, mesh.device)
        for some in portions([one for one in ordered if one.learned], None, BATCH_TOKENS)
        if some
    ]
    passes = forward_only(mesh.pp, len(micros), len(chunks))
    prefix = None
    if table is not None and kind == "prefix":
        prefix = prefix_parts(table, chunks)
        table = None
    total = run_passes(
        chunks, passes, micros, Channels(mesh), table=table, prefix=prefix, scale=0.0
    )
    tokens = sum(len(example.learned) for example in examples)
    return float(share_from_last(total, mesh)) / max(1, tokens)


def _plain(example: Example, vocab_size: int) -> Example:
    """The same text without virtual tokens."""
    ids = [token for token in example.ids if token < vocab_size]
    before = sum(token >= vocab_size for token in example.ids[: example.answer_start])
    return Example(ids, example.answer_start - before, example.task)


def evaluate_command(args: argparse.Namespace) -> int:
    """`args.evaluate` is an adapter's path and that of records; the model is the config's, or
    `args.model`.
    """
    path, file = map(Path, args.evaluate)
    config = _config(args)
    changes = read_overrides(config.config_json, config.true_vocab_size)
    checkpoint = open_overridden(config.model, changes, config.tokenizer)
    adapter = open_adapter(path, base=checkpoint)
    sizes = checkpoint.config
    notes = check_adapter(
        adapter, sizes.with_fields(dtype=config.dtype or sizes.dtype), identify(checkpoint)
    )
    tokenizer: Tokenizer = NullTokenizer(sizes.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, sizes.vocab_size, checkpoint.tokenizer)
    examples = _examples(adapter, file, tokenizer, sizes.vocab_size, sizes.max_position_embeddings)
    mesh = Mesh.single(device_of(config.device))
    model = load_model(checkpoint, mesh, dtype=config.dtype).eval()
    found = evaluate(model, tokenizer, adapter, examples)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if args.json:
        record = {"adapter": str(path), "file": str(file), "notes": notes, **asdict(found)}
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        sys.stdout.write(sheet(found, f"{path.name} on {file.name}"))
    return 0


def _config(args: argparse.Namespace) -> TuneConfig:
    model = getattr(args, "model", None)
    if args.config is not None:
        config = TuneConfig.read(args.config)
        return config if model is None else replace(config, model=model)
    if model is None:
        raise ConfigError(
            "an adapter does not say where its model is; give --model PATH, or the CONFIG.yaml of "
            "its run"
        )
    return TuneConfig(model=model, name="evaluated", data="none")


def _examples(
    adapter: Adapter, file: Path, tokenizer: Tokenizer, vocab_size: int, context: int
) -> Examples:
    card = adapter.card
    if card.template is None or card.template.answer_field is None:
        lacks = "template" if card.template is None else "answer field in its template"
        raise AdapterError(
            f"the card of {card.name!r} has no {lacks}, so nothing says which of a record's fields "
            "is the right answer; evaluate an adapter that `preamble tune` made, or import it with "
            "a template of such"
        )
    sizes = {"vocab_size": vocab_size, "tokens_max": context}
    return read_examples(file, card.template, tokenizer, **sizes, kind=card.kind)


def sheet(found: Evaluation, title: str) -> str:
    """For a person."""
    ours, plain = found.scores[ADAPTER], found.scores[NO_PROMPT]
    lines = [f"{title}: {found.examples} records, {found.truncated} cut, "
             f"{len(found.dropped)} left out"]  # fmt: skip
    lines += [f"left out: {reason}" for reason in found.dropped[:SHOWN]]
    lines.append(f"{'':14}{ADAPTER:>12}{NO_PROMPT:>12}")
    lines.append(f"{'loss':14}{ours.loss:12.4f}{plain.loss:12.4f}")
    for name, value in ours.measures.items():
        lines.append(f"{name.replace('_', ' '):14}{value:12.1%}{plain.measures[name]:12.1%}")
    lines.append(f"{'answers cut':14}{ours.answers_cut:12}{plain.answers_cut:12}")
    for sample in found.samples[:SHOWN]:
        lines.append(f"right {sample.expected.strip()!r}, {ADAPTER} {sample.after.strip()!r}, "
                     f"{NO_PROMPT} {sample.before.strip()!r}")  # fmt: skip
    return "\n".join(lines) + "\n"
