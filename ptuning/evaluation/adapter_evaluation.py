"""Adapter evaluation: scores a model with and without an adapter, for `tune --evaluate`.

The adapter's card has the prompt template, the stop strings and the digest of the base model. The
model answers the same records with and without the adapter's virtual tokens, so the scores show the
gain of the adapter. Stop strings have the same effect as in serving; the length limit comes from
the expected answers (`new_tokens_limit`). The expected answers are the drafts of the generation, so
one forward pass per record and variant gives the loss, and the answer if it is correct. This module
needs no run; ptuning/run/validation.py evaluates held-out records during a run.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from gpt.adapters.adapter_file import Adapter, check_adapter, open_adapter
from gpt.adapters.sequence_adapters import sequence_adapters
from gpt.checkpoint.digest import identify
from gpt.cpu_inference.weight_packing import pack_weights
from gpt.errors import AdapterError, ConfigError
from gpt.formats.overrides import open_with_overrides, read_overrides
from gpt.generation.completions import TextCompletion, complete_prompts
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model, parse_device
from gpt.model.pipeline import model_chunks
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from ptuning.activity import MEASURING, ActivityCallback, ignore_activity, loading_progress
from ptuning.config import ModelConfig, TuneConfig
from ptuning.data.dataset import Example, ExampleSet, new_tokens_limit, read_examples
from ptuning.evaluation.answer_metrics import compute_metrics
from ptuning.run_facts import ADAPTER, NO_PROMPT, Sample

SAMPLES_MAX = 12  # Number of sample answers in the JSON output.
LINES_SHOWN = 3  # Number of sample answers and of reasons for dropped records in the text output.


@dataclass(frozen=True)
class Score:
    """Scores of the model with the adapter, or without the adapter."""

    loss: float  # Mean loss over the tokens of the expected answers.
    measures: Mapping[str, float]  # Metrics from 0 to 1.
    answers_cut: int  # Number of generated answers that reached the length limit.


@dataclass(frozen=True)
class Evaluation:
    """Scores and sample answers of an adapter on records. The field names are JSON keys."""

    examples: int  # Number of examples, without dropped records.
    truncated: int  # Number of truncated examples.
    dropped: Sequence[str]  # The reason for each dropped record.
    scores: Mapping[str, Score]  # Keyed by ADAPTER and NO_PROMPT.
    samples: Sequence[Sample]


def evaluate(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    adapter: Adapter,
    examples: ExampleSet,
    report_activity: ActivityCallback = ignore_activity,
) -> Evaluation:
    """Score an adapter on examples that were rendered with the adapter's template.

    All ranks must call this function.
    """
    vocab_size = model_chunks(model)[0].config.vocab_size
    table = adapter.table.to(model_chunks(model)[0].mesh.device)
    plain_examples = [_without_virtual_tokens(example, vocab_size) for example in examples.examples]
    answer_tokens_max = new_tokens_limit(examples.examples, adapter.card.max_new_tokens)
    answers: dict[str, list[TextCompletion]] = {}
    scores: dict[str, Score] = {}
    count = len(examples.examples)
    for variant, scored_examples, variant_table in (
        (NO_PROMPT, plain_examples, None),
        (ADAPTER, examples.examples, table),
    ):
        activity = MEASURING[variant]
        report_activity(activity, 0, count)
        prompts = [list(example.ids[: example.answer_start]) for example in scored_examples]
        answers[variant] = complete_prompts(
            model,
            tokenizer,
            # A prompt needs at least one token. An empty prompt becomes the BOS token, or the EOS
            # token if the tokenizer has no BOS token, because this token precedes each text in
            # pre-training data.
            [prompt or [tokenizer.bos_id or tokenizer.eos_id or 0] for prompt in prompts],
            adapter_table=variant_table,
            adapter_kind=adapter.card.kind,
            adapters=sequence_adapters(adapter, model, prompts) if variant == ADAPTER else (),
            max_new_tokens=answer_tokens_max,
            stop_strings=adapter.card.stop,
            drafts=[example.ids[example.answer_start :] for example in scored_examples],
            shares_prefix=True,
            report_progress=_progress_callback(report_activity, activity, count),
        )
        texts = [answer.text for answer in answers[variant]]
        scores[variant] = Score(
            _mean_loss(answers[variant]),
            compute_metrics(texts, examples.answers),
            answers_cut=sum(answer.is_truncated for answer in answers[variant]),
        )
    sample_columns = zip(
        examples.records, examples.answers, answers[NO_PROMPT], answers[ADAPTER], strict=True
    )
    samples = [
        Sample(inputs, expected, before.text, after.text, after.is_truncated)
        for inputs, expected, before, after in islice(sample_columns, SAMPLES_MAX)
    ]
    return Evaluation(count, examples.truncated, examples.dropped, scores, samples)


def _progress_callback(
    report_activity: ActivityCallback, activity: str, total: int
) -> Callable[[int], None]:
    return lambda completed: report_activity(activity, completed, total)


def _mean_loss(answers: Sequence[TextCompletion]) -> float:
    """Return the mean loss over the tokens of the drafts, which are the expected answers."""
    logprobs = [logprob for answer in answers for logprob in answer.draft_logprobs]
    return -sum(logprobs) / max(1, len(logprobs))


def _without_virtual_tokens(example: Example, vocab_size: int) -> Example:
    """Return the same example without its virtual tokens."""
    ids = [token for token in example.ids if token < vocab_size]
    virtual_count = sum(token >= vocab_size for token in example.ids[: example.answer_start])
    return Example(ids, example.answer_start - virtual_count, example.task_index)


def evaluate_command(args: argparse.Namespace, report_activity: ActivityCallback) -> int:
    """Run `tune --evaluate ADAPTER FILE`; return the exit code.

    The model is `args.model` if it is set, else the setting `model` of the config file.
    """
    path, file = map(Path, args.evaluate)
    model_config = _read_model_config(args)
    overrides = read_overrides(model_config.config_json, model_config.true_vocab_size)
    checkpoint = open_with_overrides(model_config.model, overrides, model_config.tokenizer)
    adapter = open_adapter(path, base=checkpoint)
    gpt_config = checkpoint.config
    notes = check_adapter(
        adapter,
        gpt_config.with_fields(dtype=model_config.dtype or gpt_config.dtype),
        identify(checkpoint),
    )
    tokenizer: Tokenizer = NullTokenizer(gpt_config.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, gpt_config.vocab_size, checkpoint.tokenizer)
    examples = _read_examples(
        adapter, file, tokenizer, gpt_config.vocab_size, gpt_config.max_position_embeddings
    )
    mesh = Mesh.single(parse_device(model_config.device))
    model = load_model(
        checkpoint,
        mesh,
        dtype=model_config.dtype,
        report_progress=loading_progress(report_activity),
    ).eval()
    pack_weights(model)
    evaluation = evaluate(model, tokenizer, adapter, examples, report_activity)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if args.json:
        record = {"adapter": str(path), "file": str(file), "notes": notes, **asdict(evaluation)}
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        sys.stdout.write(evaluation_text(evaluation, f"{path.name} on {file.name}"))
    return 0


def _read_model_config(args: argparse.Namespace) -> ModelConfig:
    model = getattr(args, "model", None)
    if args.config is not None:
        model_config = TuneConfig.from_yaml(args.config).model_config
        return model_config if model is None else replace(model_config, model=model)
    if model is None:
        raise ConfigError(
            "an adapter file does not contain the path of its model; give --model PATH, or the "
            "CONFIG.yaml with which the adapter was trained"
        )
    return ModelConfig(model=model)


def _read_examples(
    adapter: Adapter, file: Path, tokenizer: Tokenizer, vocab_size: int, context: int
) -> ExampleSet:
    card = adapter.card
    if card.template is None or card.template.answer_field is None:
        missing = "template" if card.template is None else "answer field in its template"
        raise AdapterError(
            f"the card of {card.name!r} has no {missing}, so the field of the expected answer is "
            "unknown; evaluate an adapter written by `preamble tune`, or import the adapter with "
            "a template that has an answer field"
        )
    limits = {"vocab_size": vocab_size, "tokens_max": context}
    return read_examples(file, card.template, tokenizer, **limits, kind=card.kind)


def evaluation_text(evaluation: Evaluation, title: str) -> str:
    """Return the scores and some sample answers as text for the terminal."""
    adapter_score, baseline_score = evaluation.scores[ADAPTER], evaluation.scores[NO_PROMPT]
    lines = [
        f"{title}: {evaluation.examples} records, {evaluation.truncated} truncated, "
        f"{len(evaluation.dropped)} dropped"
    ]
    lines += [f"dropped: {reason}" for reason in evaluation.dropped[:LINES_SHOWN]]
    lines.append(f"{'':14}{ADAPTER:>12}{NO_PROMPT:>12}")
    lines.append(f"{'loss':14}{adapter_score.loss:12.4f}{baseline_score.loss:12.4f}")
    for name, value in adapter_score.measures.items():
        lines.append(
            f"{name.replace('_', ' '):14}{value:12.1%}{baseline_score.measures[name]:12.1%}"
        )
    lines.append(f"{'answers cut':14}{adapter_score.answers_cut:12}{baseline_score.answers_cut:12}")
    for sample in evaluation.samples[:LINES_SHOWN]:
        lines.append(
            f"expected {sample.expected.strip()!r}, {ADAPTER} {sample.after.strip()!r}, "
            f"{NO_PROMPT} {sample.before.strip()!r}"
        )
    return "\n".join(lines) + "\n"
