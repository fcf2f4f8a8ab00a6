"""Prefix tuning: initial values, losses and gradients, and the written adapter."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.adapters.adapter_file import open_adapter
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from gpt.sampling_params import SamplingParams
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example, ExampleSet, check_template, read_examples, task_template
from ptuning.prompt.prefix_tuning import PrefixEncoder, build_prefix
from ptuning.prompt.prompt_encoder import build_encoder
from ptuning.run.preparation import prepare
from ptuning.run.training_loop import TrainingLoop, load_trainer
from ptuning.run.validation import Validator
from ptuning.task import Task
from ptuning.training.trainer import Trainer
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, build, lively
from tests.support.ranks import ranks
from tests.support.servers import write_checkpoint
from tests.support.tuning_settings import LossRecorder, write_settings, write_validation

TASKS = (Task("a", data="d", virtual_tokens=3), Task("b", data="d", virtual_tokens=2))
IDS: list[list[int]] = [[7, 9], []]
EXACT = 1e-12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("prefix"))


def settings(**changes: object) -> TuneConfig:
    defaults = {"model": "m", "tasks": TASKS, "method": "prefix", "steps": 20, "warmup_steps": 1}
    return TuneConfig(**{**defaults, **changes})  # type: ignore[arg-type]


def examples(v: int) -> list[Example]:
    """Examples of both tasks with unequal lengths; two texts have a common prefix."""
    a = [v, v + 1, v + 2]
    b = [v + 3, v + 4]
    return [
        Example([*a, 5, 6, 7], 4),
        Example([*a, 5, 6, 9, 3, 1, 2, 8], 7),
        Example([*b, 9, 3, 4, 11, 12, 13, 14], 6, task_index=1),
        Example([*b, 30, 31, 32, 33], 3, task_index=1),
    ]


def learner(model: GPT, **changes: object) -> Trainer:
    config = settings(**changes)
    method_config, seed = config.method_config, config.training_config.seed
    if method_config.method == "prefix":
        prefix = build_prefix(method_config, TASKS, [model], IDS, seed=seed)
        return Trainer([model], config, prefix=prefix)
    return Trainer([model], config, build_encoder(method_config, TASKS, model, IDS, seed=seed))


def table_of(trainer: Trainer) -> Tensor:
    table = trainer.current_table()
    assert table is not None
    return table


@pytest.mark.parametrize("name", ["classic", "odd", "experts"])
def test_prefix_starts_as_the_models_keys_and_values_of_the_rows(name: str) -> None:
    """The first loss equals that of prompt tuning, whichever tokens are shared."""
    model = build(CONFIGS[name])
    batch = examples(model.config.vocab_size)
    for micro in (4, 1):
        prefix_trainer, rows_trainer = (
            learner(model, method=method, micro_batch_examples=micro)
            for method in ("prefix", "prompt-tuning")
        )
        assert table_of(prefix_trainer).shape == (5, model.config.prefix_width)
        rows_loss = rows_trainer.mean_loss(batch, table_of(rows_trainer))
        assert prefix_trainer.mean_loss(batch, table_of(prefix_trainer)) == pytest.approx(
            rows_loss, rel=EXACT
        )
    trained = prefix_trainer.step(batch).loss, prefix_trainer.step(batch).loss
    assert trained[0] == pytest.approx(rows_loss, rel=EXACT)
    assert decoded_loss(model, table_of(prefix_trainer), batch) == pytest.approx(
        prefix_trainer.mean_loss(batch, table_of(prefix_trainer)), rel=EXACT
    )
    assert trained[1] != trained[0]


def decoded_loss(model: GPT, table: Tensor, batch: list[Example]) -> float:
    """Loss by the decode path: one text at a time, with the prefix in the KV cache."""
    total = 0.0
    v = model.config.vocab_size
    for example in batch:
        first_row, count = (0, 3) if example.task_index == 0 else (3, 2)
        ids = [*range(v, v + count), *example.ids[count:]]
        rule = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
        (completion,) = generate(
            model,
            [ids],
            rule,
            adapter_table=table[first_row : first_row + count],
            adapter_kind="prefix",
        )
        scores = [completion.prompt_scores[position] for position in example.loss_positions]
        total -= sum(score.logprob for score in scores if score is not None)
        assert None not in scores
    return total / sum(len(example.loss_positions) for example in batch)


@pytest.mark.parametrize("config", [MODERN, EXPERTS], ids=["modern", "experts"])
def test_prefix_gradient_equals_finite_differences(config: GPTConfig) -> None:
    model = build(config)
    batch = examples(config.vocab_size)
    trainer = learner(model)
    assert trainer.prefix is not None
    table = table_of(trainer)
    # A rate of zero changes nothing, and neither does clipping by this norm.
    grads: dict[str, Tensor] = {}
    for name, value in trainer.prefix.named_parameters():
        value.register_hook(lambda grad, name=name: grads.update({name: grads.get(name, 0) + grad}))
    trainer.step(batch)
    encoder = PrefixEncoder(table, [model])
    with torch.no_grad():
        for name, value in encoder.named_parameters():
            value.copy_(grads[name])
    slopes = encoder.gather_table()
    scale = float(encoder.gather_table().abs().max())
    generator = torch.Generator().manual_seed(1)
    for index in torch.randperm(table.numel(), generator=generator)[:20].tolist():
        losses_around = []
        for sign in (1, -1):
            moved = table.clone()
            moved.view(-1)[index] += sign * 1e-5
            losses_around.append(trainer.mean_loss(batch, moved))
        slope = (losses_around[0] - losses_around[1]) / 2e-5
        assert abs(slope - float(slopes.view(-1)[index])) < 1e-6 * scale


def test_loss_falls_and_the_model_stays_bit_identical() -> None:
    model = build(CLASSIC)
    weights_before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = learner(model, steps=30, learning_rate=0.1, schedule="constant")
    batch = examples(CLASSIC.vocab_size)
    losses = [trainer.step(batch).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    for name, value in model.named_parameters():
        assert torch.equal(value, weights_before[name]) and value.grad is None, name


SPLITS = {"tensor": (4, 1, 1, 1), "pipeline": (1, 2, 2, 2)}


def train_split(
    _: int, split: tuple[int, int, int, int]
) -> tuple[list[float], list[float], Tensor]:
    tp, pp, dp, virtual = split
    mesh = Mesh.create(tp, pp, dp, sequence_parallel=True)
    return train_on_mesh(
        mesh, tp=tp, pp=pp, dp=dp, virtual_stages=virtual, sequence_parallel=tp > 1
    )


def train_on_mesh(mesh: Mesh, **changes: object) -> tuple[list[float], list[float], Tensor]:
    """Losses and gradient norms of some steps, and the full table after them."""
    config = settings(micro_batch_examples=1, **changes)
    virtual_stages = config.parallel_config.virtual_stages
    layers = stage_layers(MODERN.num_layers, mesh.pp, vpp=virtual_stages)[mesh.pp_rank]
    source = lively(MODERN.with_fields(dtype="float64"))
    chunks = [load_model(source, mesh, layers=layer_range) for layer_range in layers]
    seed = config.training_config.seed
    prefix = build_prefix(config.method_config, TASKS, chunks, IDS, seed=seed)
    trainer = Trainer(chunks, config, prefix=prefix)
    metrics = [trainer.step(examples(MODERN.vocab_size)) for _ in range(5)]
    return (
        [step_metrics.loss for step_metrics in metrics],
        [step_metrics.gradient_norm for step_metrics in metrics],
        table_of(trainer),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_prefix_steps_are_equal_for_every_split(name: str) -> None:
    tp, pp, dp, _ = SPLITS[name]
    losses, norms, table = train_on_mesh(Mesh.single())
    for split_result in ranks(tp * pp * dp, train_split, SPLITS[name]):
        assert split_result[0] == pytest.approx(losses, rel=1e-10)
        assert split_result[1] == pytest.approx(norms, rel=1e-9)
        torch.testing.assert_close(split_result[2], table, rtol=1e-8, atol=1e-9)


def run_on_rank(_: int, file: Path, ends_after: int | None) -> list[float]:
    """Losses of a run on this rank; the run may be stopped early."""
    config = TuneConfig.from_yaml(str(file))
    mesh = Mesh.single()
    parallel = config.parallel_config
    if parallel.ranks > 1:
        mesh = Mesh.create(parallel.tp, parallel.pp)
    prepared = prepare(config)
    audience = LossRecorder(ends_after)
    with suppress(EOFError):
        TrainingLoop(prepared, load_trainer(prepared, mesh), audience).run()
    return audience.losses


@pytest.mark.slow
def test_resumed_split_prefix_run_writes_the_adapter_of_one_rank(
    checkpoint: Path, tmp_path: Path
) -> None:
    """At this rate the loss rises, so the best table must survive in the saved states."""
    other_record = {"prompt": "the quick", "completion": " fox jumps over the lazy brown fox"}
    tables: dict[str, Tensor] = {}
    for name, split in (("one", {}), ("whole", {"tp": 2, "pp": 2}), ("halves", {"tp": 2, "pp": 2})):
        folder = tmp_path / name
        folder.mkdir()
        changes: dict[str, object] = {**write_validation(folder, 1), **split, "method": "prefix"}
        (folder / "validation.jsonl").write_text(json.dumps(other_record))
        changes |= {"virtual_tokens": 4, "steps": 12, "validate_every": 4, "save_every": 1}
        changes |= {"warmup_steps": 0, "schedule": "constant", "max_new_tokens": 1}
        file = write_settings(folder, checkpoint, **changes)
        if name == "one":
            single_rank_losses = run_on_rank(0, file, None)
        elif name == "whole":
            assert ranks(4, run_on_rank, file, None)[0] == pytest.approx(
                single_rank_losses, rel=1e-9
            )
        else:
            first_losses = ranks(4, run_on_rank, file, 10)[0]
            assert [*first_losses, *ranks(4, run_on_rank, file, None)[0]] == pytest.approx(
                single_rank_losses, rel=1e-9
            )
        written = open_adapter(folder / "adapters" / "answer@1.safetensors")
        assert written.card.metrics["steps"] == 8
        tables[name] = written.table
    assert torch.equal(tables["whole"], tables["halves"])
    torch.testing.assert_close(tables["whole"], tables["one"], rtol=1e-5, atol=1e-6)


def test_written_prefix_adapter_answers_as_validated(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"method": "prefix", "virtual_tokens": 4, "steps": 12, "learning_rate": 0.3}
    changes |= {"golden_examples": 2, "max_new_tokens": 3, **write_validation(tmp_path, 3)}
    file = write_settings(tmp_path, checkpoint, **changes)
    assert main(["tune", str(file)]) == 0
    written = Path(capsys.readouterr().out.strip())
    adapter = open_adapter(written)
    card = adapter.card
    assert (card.kind, card.method, card.virtual_tokens) == ("prefix", "prefix", 4)
    assert card.metrics["loss"] < card.metrics["first_loss"]
    assert len(card.golden) == 2

    arguments = [str(written), str(tmp_path / "validation.jsonl"), "--model", str(checkpoint)]
    assert main(["tune", "--evaluate", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    validation_metrics = card.metrics["validation"]
    assert report["scores"]["adapter"]["loss"] == pytest.approx(
        validation_metrics["loss"], rel=1e-3
    )
    assert report["scores"]["adapter"]["measures"] == validation_metrics["adapter"]

    prepared = prepare(TuneConfig.from_yaml(str(file)))
    measuring = Validator(prepared, load_trainer(prepared, Mesh.single()))
    validation = measuring.validate(0, adapter.table.double(), answers=True)
    assert validation.loss == pytest.approx(validation_metrics["loss"], rel=1e-5)


def test_prompt_without_text_after_truncation_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    settings_with_validation = {**write_validation(tmp_path, 3), "truncate_field": "prompt"}
    file = write_settings(
        tmp_path, checkpoint, method="prefix", virtual_tokens=4, **settings_with_validation
    )
    prepared = prepare(TuneConfig.from_yaml(str(file)))
    (task_data,) = prepared.tasks
    assert task_data.validation is not None
    measuring = Validator(prepared, load_trainer(prepared, Mesh.single()))
    context = prepared.checkpoint.config.max_position_embeddings
    for tokens_left, count in ((4, 0), (5, 3)):  # Of the context, beside an answer.
        prompts = measuring.render_prompts(
            task_data.template, task_data.validation, context - tokens_left
        )
        assert [len(prompt) for prompt in prompts if prompt is not None] == [5] * count


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder_hidden": 8}, "encoder_hidden is 8, but has an effect only if"),
        ({"encoder_from": "runs/a"}, "prefix has no encoder; remove encoder_from"),
        ({"optimizer": "adafactor", "tp": 2}, "prefix shards them over 2 tensor ranks"),
        ({"template": "a <|VIRTUAL_PROMPT_0|>{prompt}{completion}"}, "must come first"),
        ({"virtual_tokens": 10**7}, "virtual_tokens is 10000000; the maximum for this model is"),
        ({"hidden_dropout": 0.1}, "have an effect only with method: full"),
    ],
)
def test_unsupported_prefix_settings_are_refused(
    changes: dict[str, object],
    words: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write_settings(tmp_path, checkpoint, method="prefix", **changes)
    assert main(["tune", str(file)]) == 1
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


class BosTokenizer:
    """A tokenizer of letters that adds a begin-of-text token."""

    adds_bos = True
    bos_id = 1
    eos_id = 2

    def encode(self, text: str, *, started: bool = False) -> list[int]:
        return [ord(letter) % 50 + 3 for letter in text]


def test_bos_token_follows_the_prefix_and_prefix_tokens_have_no_loss(
    tmp_path: Path,
) -> None:
    task = Task("a", virtual_tokens=2)
    tokens = BosTokenizer()
    tokenizer_: Any = tokens
    check_template(task_template(task, tokenizer_, kind="prefix"), "prefix", "a")
    with pytest.raises(ConfigError, match="must come first"):
        check_template(task_template(task, tokenizer_), "prefix", "a")
    file = tmp_path / "records.jsonl"
    records = [{"prompt": prompt, "completion": "yes"} for prompt in ("go", "")]
    file.write_text("\n".join(map(json.dumps, records)))

    def read(adds: bool) -> ExampleSet:
        tokens.adds_bos = adds
        template = task_template(task, tokenizer_, kind="prefix")
        sizes = {"vocab_size": 60, "tokens_max": 20}
        return read_examples(file, template, tokenizer_, **sizes, kind="prefix")

    with_bos = read(True)
    without_bos = read(False)
    assert [list(example.ids[:3]) for example in with_bos.examples] == [[60, 61, 1]] * 2
    assert with_bos.dropped == []
    assert [example.loss_positions[0] for example in with_bos.examples] == [5, 3]
    assert len(without_bos.examples) == 1
    assert "a prefix alone predicts no token" in without_bos.dropped[0]
