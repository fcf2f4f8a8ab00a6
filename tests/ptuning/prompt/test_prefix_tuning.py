"""A prefix that is learned: what it starts from, its losses and gradients, and what it leaves."""

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
from gpt.parallel.sharding import stage_layers
from gpt.sampling_params import Sampling
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example, Examples, check_template, read_examples, task_template
from ptuning.prompt.prefix_tuning import Prefix, build_prefix
from ptuning.prompt.prompt_encoder import build_encoder
from ptuning.run.preparation import prepare
from ptuning.run.training_loop import Learning, load_trainer
from ptuning.run.validation import Measuring
from ptuning.task import Task
from ptuning.training.trainer import Trainer
from tests.support.models import CLASSIC, CONFIGS, EXPERTS, MODERN, build, lively
from tests.support.ranks import ranks
from tests.support.servers import write_checkpoint
from tests.support.tuning_settings import Keeping, write_settings, write_validation

TASKS = (Task("a", data="d", virtual_tokens=3), Task("b", data="d", virtual_tokens=2))
IDS: list[list[int]] = [[7, 9], []]
EXACT = 1e-12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("prefix"))


def settings(**changes: object) -> TuneConfig:
    given = {"model": "m", "tasks": TASKS, "method": "prefix", "steps": 20, "warmup_steps": 1}
    return TuneConfig(**{**given, **changes})  # type: ignore[arg-type]


def examples(v: int) -> list[Example]:
    """Of both tasks, with texts and answers of unequal lengths; one text begins as another."""
    a, b = [v, v + 1, v + 2], [v + 3, v + 4]
    return [
        Example([*a, 5, 6, 7], 4),
        Example([*a, 5, 6, 9, 3, 1, 2, 8], 7),
        Example([*b, 9, 3, 4, 11, 12, 13, 14], 6, task=1),
        Example([*b, 30, 31, 32, 33], 3, task=1),
    ]


def learner(model: GPT, **changes: object) -> Trainer:
    config = settings(**changes)
    if config.method == "prefix":
        return Trainer([model], config, prefix=build_prefix(config, TASKS, [model], IDS))
    return Trainer([model], config, build_encoder(config, TASKS, model, IDS))


def table_of(trainer: Trainer) -> Tensor:
    table = trainer.table()
    assert table is not None
    return table


@pytest.mark.parametrize("name", ["classic", "odd", "experts"])
def test_it_starts_as_what_the_model_makes_of_a_tables_rows(name: str) -> None:
    """So the first loss is that of a prompt, whatever an example has its tokens in common with."""
    model = build(CONFIGS[name])
    some = examples(model.config.vocab_size)
    for micro in (4, 1):
        ours, rows = (
            learner(model, method=method, micro_batch_examples=micro)
            for method in ("prefix", "prompt-tuning")
        )
        assert table_of(ours).shape == (5, model.config.prefix_width)
        wanted = rows.loss(some, table_of(rows))
        assert ours.loss(some, table_of(ours)) == pytest.approx(wanted, rel=EXACT)
    trained = ours.step(some).loss, ours.step(some).loss
    assert trained[0] == pytest.approx(wanted, rel=EXACT)
    assert decoded_loss(model, table_of(ours), some) == pytest.approx(
        ours.loss(some, table_of(ours)), rel=EXACT
    )
    assert trained[1] != trained[0]


def decoded_loss(model: GPT, whole: Tensor, some: list[Example]) -> float:
    """By the decoding path, one text at a time, of what stands in a cache."""
    total, v = 0.0, model.config.vocab_size
    for example in some:
        first, count = (0, 3) if example.task == 0 else (3, 2)
        ids = [*range(v, v + count), *example.ids[count:]]
        rule = Sampling(max_new_tokens=0, prompt_logprobs=0)
        (made,) = generate(model, [ids], rule, table=whole[first : first + count], kind="prefix")
        scores = [made.prompt_scores[place] for place in example.learned]
        total -= sum(score.logprob for score in scores if score is not None)
        assert None not in scores
    return total / sum(len(example.learned) for example in some)


@pytest.mark.parametrize("config", [MODERN, EXPERTS], ids=["modern", "experts"])
def test_its_gradient_is_what_differences_of_the_loss_say(config: GPTConfig) -> None:
    model = build(config)
    some = examples(config.vocab_size)
    trainer = learner(model)
    assert trainer.prefix is not None
    table = table_of(trainer)
    # A rate of zero moves nothing, and clipping by this norm changes nothing.
    grads: dict[str, Tensor] = {}
    for name, value in trainer.prefix.named_parameters():
        value.register_hook(lambda grad, name=name: grads.update({name: grads.get(name, 0) + grad}))
    trainer.step(some)
    whole = Prefix(table, [model])
    with torch.no_grad():
        for name, value in whole.named_parameters():
            value.copy_(grads[name])
    slopes, scale = whole.table(), float(whole.table().abs().max())
    generator = torch.Generator().manual_seed(1)
    for place in torch.randperm(table.numel(), generator=generator)[:20].tolist():
        around = []
        for sign in (1, -1):
            moved = table.clone()
            moved.view(-1)[place] += sign * 1e-5
            around.append(trainer.loss(some, moved))
        slope = (around[0] - around[1]) / 2e-5
        assert abs(slope - float(slopes.view(-1)[place])) < 1e-6 * scale


def test_the_loss_falls_and_the_model_stays_as_it_was_to_the_last_bit() -> None:
    model = build(CLASSIC)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = learner(model, steps=30, learning_rate=0.1, schedule="constant")
    some = examples(CLASSIC.vocab_size)
    losses = [trainer.step(some).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) and value.grad is None, name


SPLITS = {"tensor": (4, 1, 1, 1), "pipeline": (1, 2, 2, 2)}


def split(_: int, split: tuple[int, int, int, int]) -> tuple[list[float], list[float], Tensor]:
    tp, pp, dp, virtual = split
    mesh = Mesh.create(tp, pp, dp, sequence_parallel=True)
    return learned(mesh, tp=tp, pp=pp, dp=dp, virtual_stages=virtual, sequence_parallel=tp > 1)


def learned(mesh: Mesh, **changes: object) -> tuple[list[float], list[float], Tensor]:
    """Losses and norms of some steps, and the whole table after them."""
    config = settings(micro_batch_examples=1, **changes)
    layers = stage_layers(MODERN.num_layers, mesh.pp, vpp=config.virtual_stages)[mesh.pp_rank]
    stored = lively(MODERN.with_fields(dtype="float64"))
    chunks = [load_model(stored, mesh, layers=own) for own in layers]
    trainer = Trainer(chunks, config, prefix=build_prefix(config, TASKS, chunks, IDS))
    told = [trainer.step(examples(MODERN.vocab_size)) for _ in range(5)]
    return [one.loss for one in told], [one.gradient_norm for one in told], table_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_steps_are_one_ranks_at_any_split(name: str) -> None:
    tp, pp, dp, _ = SPLITS[name]
    losses, norms, table = learned(Mesh.single())
    for found in ranks(tp * pp * dp, split, SPLITS[name]):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1] == pytest.approx(norms, rel=1e-9)
        torch.testing.assert_close(found[2], table, rtol=1e-8, atol=1e-9)


def ran(_: int, file: Path, ends_after: int | None) -> list[float]:
    """The losses of a run on this rank, which may end in the middle of it."""
    config = TuneConfig.read(str(file))
    mesh = Mesh.single()
    if config.tp * config.pp > 1:
        mesh = Mesh.create(config.tp, config.pp)
    prepared, audience = prepare(config), Keeping(ends_after)
    with suppress(EOFError):
        Learning(prepared, load_trainer(prepared, mesh), audience).run()
    return audience.losses


@pytest.mark.slow
def test_a_split_run_goes_on_and_leaves_the_best_of_one_ranks(
    checkpoint: Path, tmp_path: Path
) -> None:
    """At this rate it gets worse, so what is written had to be kept through the states."""
    other = {"prompt": "the quick", "completion": " fox jumps over the lazy brown fox"}
    tables: dict[str, Tensor] = {}
    for name, split in (("one", {}), ("whole", {"tp": 2, "pp": 2}), ("halves", {"tp": 2, "pp": 2})):
        folder = tmp_path / name
        folder.mkdir()
        changes: dict[str, object] = {**write_validation(folder, 1), **split, "method": "prefix"}
        (folder / "validation.jsonl").write_text(json.dumps(other))
        changes |= {"virtual_tokens": 4, "steps": 12, "validate_every": 4, "save_every": 1}
        changes |= {"warmup_steps": 0, "schedule": "constant", "max_new_tokens": 1}
        file = write_settings(folder, checkpoint, **changes)
        if name == "one":
            alone = ran(0, file, None)
        elif name == "whole":
            assert ranks(4, ran, file, None)[0] == pytest.approx(alone, rel=1e-9)
        else:
            first = ranks(4, ran, file, 10)[0]
            assert [*first, *ranks(4, ran, file, None)[0]] == pytest.approx(alone, rel=1e-9)
        written = open_adapter(folder / "adapters" / "answer@1.safetensors")
        assert written.card.metrics["steps"] == 8
        tables[name] = written.table
    assert torch.equal(tables["whole"], tables["halves"])
    torch.testing.assert_close(tables["whole"], tables["one"], rtol=1e-5, atol=1e-6)


def test_a_run_leaves_an_adapter_that_answers_as_it_was_measured(
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

    words = [str(written), str(tmp_path / "validation.jsonl"), "--model", str(checkpoint)]
    assert main(["tune", "--evaluate", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    measured = card.metrics["validation"]
    assert told["scores"]["adapter"]["loss"] == pytest.approx(measured["loss"], rel=1e-3)
    assert told["scores"]["adapter"]["measures"] == measured["adapter"]

    prepared = prepare(TuneConfig.read(str(file)))
    measuring = Measuring(prepared, load_trainer(prepared, Mesh.single()))
    made = measuring.now(0, adapter.table.double(), answers=True)
    assert made.loss == pytest.approx(measured["loss"], rel=1e-5)


def test_a_record_whose_text_is_cut_away_is_not_asked(checkpoint: Path, tmp_path: Path) -> None:
    measured = {**write_validation(tmp_path, 3), "truncate_field": "prompt"}
    file = write_settings(tmp_path, checkpoint, method="prefix", virtual_tokens=4, **measured)
    prepared = prepare(TuneConfig.read(str(file)))
    (data,) = prepared.tasks
    assert data.validation is not None
    measuring = Measuring(prepared, load_trainer(prepared, Mesh.single()))
    context = prepared.checkpoint.config.max_position_embeddings
    for room, count in ((4, 0), (5, 3)):  # Of the context, beside an answer.
        found = measuring.prompts(data.template, data.validation, context - room)
        assert [len(one) for one in found if one is not None] == [5] * count


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder_hidden": 8}, "encoder_hidden is 8, and does nothing here"),
        ({"encoder_from": "runs/a"}, "prefix has no encoder to start from"),
        ({"optimizer": "adafactor", "tp": 2}, "prefix shares them out over 2 tensor ranks"),
        ({"template": "a <|VIRTUAL_PROMPT_0|>{prompt}{completion}"}, "can only stand first"),
        ({"virtual_tokens": 10**7}, "virtual_tokens is 10000000; this model takes at most"),
        ({"hidden_dropout": 0.1}, "are for method: full"),
    ],
)
def test_what_a_prefix_cannot_be_is_refused(
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


class Beginning:
    """A tokenizer of letters that puts a token before every text."""

    adds_bos, bos_id, eos_id = True, 1, 2

    def encode(self, text: str, *, started: bool = False) -> list[int]:
        return [ord(letter) % 50 + 3 for letter in text]


def test_a_beginning_of_text_stands_behind_it_and_nothing_is_learned_from_its_own_tokens(
    tmp_path: Path,
) -> None:
    task, tokens = Task("a", virtual_tokens=2), Beginning()
    given: Any = tokens
    check_template(task_template(task, given, kind="prefix"), "prefix", "a")
    with pytest.raises(ConfigError, match="can only stand first"):
        check_template(task_template(task, given), "prefix", "a")
    file = tmp_path / "records.jsonl"
    records = [{"prompt": prompt, "completion": "yes"} for prompt in ("go", "")]
    file.write_text("\n".join(map(json.dumps, records)))

    def read(adds: bool) -> Examples:
        tokens.adds_bos = adds
        template = task_template(task, given, kind="prefix")
        sizes = {"vocab_size": 60, "tokens_max": 20}
        return read_examples(file, template, given, **sizes, kind="prefix")

    with_it, without = read(True), read(False)
    assert [list(one.ids[:3]) for one in with_it.examples] == [[60, 61, 1]] * 2
    assert with_it.dropped == []
    assert [one.learned[0] for one in with_it.examples] == [5, 3]
    assert len(without.examples) == 1
    assert "a prefix says nothing by itself" in without.dropped[0]
