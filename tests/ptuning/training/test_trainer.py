"""Steps of learning: the right loss and gradient, nothing else moved, the same on every split."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.model.activation_checkpointing import Recompute
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import stage_layers
from ptuning.config import TuneConfig
from ptuning.data.batch_order import Order
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import micro_batch
from ptuning.launch import plain
from ptuning.run.artifacts import gathered
from ptuning.training.optimizer import Scale, share_of_rate
from ptuning.training.pipeline import Channels, run_passes
from ptuning.training.pipeline_schedule import forward_only, one_f_one_b
from ptuning.training.trainer import Trainer
from tests.support.models import CLASSIC, EXPERTS, MODERN, ODD, SIGMOID_EXPERTS, build, lively
from tests.support.ranks import ranks
from tests.support.trainers import examples, learn, settings, trainer


def test_the_loss_falls_and_the_model_stays_as_it_was_to_the_last_bit() -> None:
    model = build(CLASSIC)
    before = {name: value.clone() for name, value in model.named_parameters()}

    made = trainer(model, steps=100, learning_rate=0.5, warmup_steps=1, schedule="constant")
    told = learn(made, 100)

    assert told[-1].loss < 0.5 * told[0].loss
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name
        assert value.grad is None, name


def test_the_same_seed_learns_the_same_table() -> None:
    model, tables = build(CLASSIC), []
    for seed in (3, 3, 4):
        made = trainer(model, seed=seed, steps=5)
        learn(made, 5)
        tables.append(made.table())
    first, same, other = (table for table in tables if table is not None)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("config", [CLASSIC, MODERN, ODD], ids=["classic", "modern", "odd"])
@pytest.mark.parametrize("portion", [None, 1, 3])
def test_loss_and_gradient_are_those_of_one_example_at_a_time_with_all_logits(
    config: GPTConfig, portion: int | None
) -> None:
    model = build(config)
    made = trainer(model, micro_batch_examples=portion, gradient_norm_max=1e9, steps=10)
    assert made.encoder is not None
    table = made.table()
    assert table is not None
    plain = table.clone().requires_grad_()
    batch = examples(config.vocab_size)
    expected = plain_loss(model, batch, plain)
    expected.backward()

    told = made.step(batch)

    assert plain.grad is not None
    assert told.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert told.gradient_norm == pytest.approx(float(plain.grad.norm()), rel=1e-10)
    assert made.loss(batch, table) == pytest.approx(told.loss, rel=1e-12)


def plain_loss(model: GPT, batch: Sequence[Example], table: Tensor) -> Tensor:
    """One example at a time, logits everywhere."""
    losses = []
    for example in batch:
        logits = model.logits(torch.tensor([example.ids]), table)[0]
        answer = torch.tensor(example.ids[example.answer_start :])
        losses.append(
            F.cross_entropy(logits[example.answer_start - 1 : -1], answer, reduction="none")
        )
    return torch.cat(losses).mean()


def test_what_examples_begin_with_is_computed_once_for_each_task() -> None:
    v = CLASSIC.vocab_size
    batch = [
        Example([v, v + 1, 7, 5, 6], 4),
        Example([v + 2, 8, 9], 2, 1),
        Example([v, v + 1, 7, 9, 3], 4),
        Example([v + 2, 8, 8, 9, 1], 3, 1),
        Example([v + 3, 1, 2, 3], 2, 2),
    ]
    made = micro_batch(batch)
    # Rows and the 7 of the first task; of the second the row, as the 8 predicts an answer's token.
    assert made.batch.lengths[:2] == (3, 1)
    assert made.batch.tokens == 3 + 1 + (1 + 1) + (1 + 3) + 3


def test_every_example_is_learned_from_once_a_round_in_an_order_that_steps_decide() -> None:
    items = [Example([n, n, n], 1) for n in range(10)]
    order = Order(items, 4, seed=1)
    seen = [example.ids[0] for step in range(1, 6) for example in order.batch(step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    again = Order(items, 4, seed=1)
    assert [again.batch(step) for step in (5, 2)] == [order.batch(step) for step in (5, 2)]
    assert Order(items, 10**9, seed=1).size == 10


def test_learning_rates_go_up_in_a_line_and_then_as_asked() -> None:
    cosine = settings(steps=100, warmup_steps=10, minimum_rate=0.1)
    assert [share_of_rate(step, cosine) for step in (1, 5, 10, 11)] == [0.1, 0.5, 1.0, 1.0]
    assert share_of_rate(56, cosine) == pytest.approx(0.55)
    assert 0.1 < share_of_rate(100, cosine) < 0.101
    assert share_of_rate(90, settings(schedule="constant")) == 1.0
    roots = settings(schedule="inverse-sqrt", warmup_steps=16)
    assert share_of_rate(64, roots) == 0.5


def test_a_scale_is_halved_where_gradients_overflow_and_doubled_after_good_steps() -> None:
    scale = Scale.of(torch.float16)
    first = scale.value
    scale.learn(finite=False)
    assert scale.value == first / 2
    for _ in range(1000):
        scale.learn(finite=True)
    assert scale.value == first
    assert Scale.of(torch.bfloat16).value == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_learn_wide_tables_and_skip_what_overflows(dtype: torch.dtype) -> None:
    model = build(CLASSIC, dtype=dtype)
    made = trainer(model, steps=20, learning_rate=0.5, warmup_steps=1)
    told = learn(made, 20)
    assert told[-1].loss < 0.8 * told[0].loss
    table = made.table()
    assert table is not None and table.dtype is torch.float32
    if dtype is torch.float16:
        made.scale.value = 2.0**40
        assert made.step(examples(CLASSIC.vocab_size)).skipped
        after = made.table()
        assert after is not None and torch.equal(table, after)


SPLITS = [
    # tensor, pipeline, data, chunks, sequence parallel
    (2, 1, 1, 1, True),
    (1, 2, 1, 2, False),
    (2, 2, 1, 1, True),
    (1, 1, 2, 1, False),
    (4, 1, 1, 1, True),
    (2, 1, 2, 1, False),
]
WHOLE = {"classic": CLASSIC, "modern": MODERN, "odd": ODD, "experts": EXPERTS}
FULL = {"method": "full", "steps": 10, "learning_rate": 1e-3, "warmup_steps": 1}


def learn_whole(
    rank: int, name: str, split: tuple[int, int, int, int, bool], drops: bool
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Three steps of a whole model: losses, gradient norms, and on rank 0 what it became."""
    tp, pp, dp, virtual, sequence_parallel = split
    mesh = Mesh.single()
    if tp * pp * dp > 1:
        mesh = Mesh.create(tp, pp, dp, sequence_parallel=sequence_parallel)
    # Every data rank draws masks of its own, so there are none where such are compared.
    p = 0.1 if drops else 0.0
    config = WHOLE[name].with_fields(hidden_dropout=p, attention_dropout=p, dtype="float64")
    layers = stage_layers(config.num_layers, pp, vpp=virtual)[mesh.pp_rank]
    checkpoint = lively(config)
    chunks = [
        load_model(checkpoint, mesh, layers=own, recompute=Recompute("full")) for own in layers
    ]
    made = Trainer(chunks, settings(**FULL, micro_batch_examples=2, virtual_stages=virtual))
    # As if the rows were the first words.
    batch = [
        Example([token % config.vocab_size for token in one.ids], one.answer_start)
        for one in examples(config.vocab_size)
    ]
    told = [made.step(batch) for _ in range(3)]
    return [one.loss for one in told], [one.gradient_norm for one in told], gathered(chunks)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_learns_the_same_on_every_split(name: str) -> None:
    alone_by_drops = {
        drops: learn_whole(0, name, (1, 1, 1, 1, False), drops) for drops in (False, True)
    }
    for split in SPLITS:
        tp, pp, dp, _, _ = split
        everyone = ranks(tp * pp * dp, learn_whole, name, split, dp == 1)
        alone = alone_by_drops[dp == 1]
        for losses, norms, _ in everyone:
            assert losses == pytest.approx(alone[0], rel=1e-10), (name, split)
            assert norms == pytest.approx(alone[1], rel=1e-9), (name, split)
        for key, value in everyone[0][2].items():
            torch.testing.assert_close(value, alone[2][key], rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("config", [CLASSIC, MODERN, EXPERTS], ids=["classic", "modern", "experts"])
def test_the_gradient_is_what_differences_of_the_loss_say(config: GPTConfig) -> None:
    model, batch = build(config), examples(config.vocab_size)
    made = trainer(model, steps=10)
    table = made.table()
    assert table is not None
    leaf = table.clone().requires_grad_()
    plain_loss(model, batch, leaf).backward()
    assert leaf.grad is not None
    generator, scale = torch.Generator().manual_seed(1), float(leaf.grad.abs().max())
    for place in torch.randperm(table.numel(), generator=generator)[:20].tolist():
        around = []
        for sign in (1, -1):
            moved = table.clone()
            moved.view(-1)[place] += sign * 1e-5
            around.append(made.loss(batch, moved))
        slope = (around[0] - around[1]) / 2e-5
        assert abs(slope - float(leaf.grad.view(-1)[place])) < 1e-6 * scale


def test_only_what_makes_the_table_is_learned() -> None:
    model = build(CLASSIC)
    made = trainer(model, steps=10, method="mlp")
    assert made.encoder is not None
    held = {name.split("/", 1)[1] for name in made.optimizer.tensors()}
    assert held == {name for name, _ in made.encoder.named_parameters()}
    learn(made, 1)
    assert all(value.grad is None for value in model.parameters())


def test_a_frozen_model_never_drops_whatever_its_checkpoint_was_trained_with() -> None:
    told = []
    for p in (0.0, 0.3):
        config = CLASSIC.with_fields(hidden_dropout=p, attention_dropout=p)
        told.append([one.loss for one in learn(trainer(build(config), steps=3), 3)])
    assert told[0] == told[1]


def test_a_step_leaves_no_masks_of_its_micro_batches_behind() -> None:
    model, channels = build(CLASSIC), Channels(Mesh.single())
    micros = [micro_batch([one]) for one in examples(CLASSIC.vocab_size)]
    table = torch.zeros(2, CLASSIC.hidden_size, dtype=torch.float64, requires_grad=True)
    for passes in (one_f_one_b(0, 1, 4), forward_only(1, 4)):
        run_passes([model], passes, micros, channels, table=table, scale=1.0)
        assert not any(one.batch.kept for one in micros)


IDLE: dict[str, tuple[dict[str, object], str]] = {
    "width": ({"encoder_hidden": 8}, "method is one of: mlp, lstm, tpmlp, peft-mlp"),
    "layers": ({"method": "peft-mlp", "encoder_layers": 3}, "method is mlp or lstm"),
    "share": ({"schedule": "constant", "minimum_rate": 0.1}, "schedule is cosine"),
    "recomputed": ({"recompute": "full", "recompute_layers": 2}, "recompute is block"),
    "patience": ({"patience": 3}, "validate_every is set"),
    "golden": ({"method": "full", "golden_examples": 3}, "an adapter is learned"),
}


@pytest.mark.parametrize("case", IDLE)
def test_a_setting_that_would_do_nothing_is_refused(case: str) -> None:
    changes, when = IDLE[case]
    with pytest.raises(ConfigError, match=f"does nothing here: it is for where {when}"):
        settings(**changes)
    with pytest.raises(ConfigError, match="it is a share of the learning rate"):
        settings(minimum_rate=1.5)


def test_other_ranks_are_told_all_settings_of_a_run_with_several_tasks() -> None:
    tasks = [{"name": "a"}, {"name": "b", "answer_only_loss": True}]
    config = TuneConfig.of(
        {"model": "m", "data": "d", "answer_only_loss": False, "tasks": tasks}, "here"
    )
    assert TuneConfig.of(plain(config), "there") == config


def gather_narrow(rank: int) -> dict[str, Tensor]:
    mesh = Mesh.create(1, 2)
    layers = stage_layers(SIGMOID_EXPERTS.num_layers, 2)[mesh.pp_rank]
    model = load_model(lively(SIGMOID_EXPERTS), mesh, dtype="bfloat16", layers=layers[0])
    return gathered([model])


@pytest.mark.slow
def test_what_is_kept_wide_in_a_narrow_model_is_gathered_wide() -> None:
    alone = gathered([load_model(lively(SIGMOID_EXPERTS), Mesh.single(), dtype="bfloat16")])
    assert {value.dtype for value in alone.values()} == {torch.bfloat16, torch.float32}
    whole = ranks(2, gather_narrow)[0]
    for name, value in alone.items():
        assert value.dtype == whole[name].dtype, name
        assert torch.equal(value, whole[name]), name
