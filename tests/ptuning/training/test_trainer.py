"""Training steps: loss and gradient, unchanged frozen weights, equal results for every split."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from ptuning.config import TuneConfig
from ptuning.data.batch_order import BatchOrder
from ptuning.data.dataset import Example
from ptuning.data.micro_batch import build_micro_batch
from ptuning.launch import config_to_dict
from ptuning.run.artifacts import gather_model
from ptuning.training.pipeline import PipelineChannels, run_passes
from ptuning.training.pipeline_schedule import schedule_1f1b, schedule_forward_only
from ptuning.training.trainer import Trainer
from tests.support.models import (
    CLASSIC,
    CONFIGS,
    EXPERTS,
    MODERN,
    ODD,
    POST_NORMS,
    SIGMOID_EXPERTS,
    XIELU,
    build,
    lively,
)
from tests.support.ranks import ranks
from tests.support.suites import cases_by_suite
from tests.support.trainers import examples, learn, settings, trainer


def test_loss_falls_and_the_model_stays_bit_identical() -> None:
    model = build(CLASSIC)
    weights_before = {name: value.clone() for name, value in model.named_parameters()}

    trainer_ = trainer(model, steps=100, learning_rate=0.5, warmup_steps=1, schedule="constant")
    metrics = learn(trainer_, 100)

    assert metrics[-1].loss < 0.5 * metrics[0].loss
    for name, value in model.named_parameters():
        assert torch.equal(value, weights_before[name]), name
        assert value.grad is None, name


def test_same_seed_trains_the_same_table() -> None:
    model = build(CLASSIC)
    tables = []
    for seed in (3, 3, 4):
        trainer_ = trainer(model, seed=seed, steps=5)
        learn(trainer_, 5)
        tables.append(trainer_.current_table())
    first_table, same_seed_table, other_seed_table = (
        table for table in tables if table is not None
    )
    assert torch.equal(first_table, same_seed_table)
    assert not torch.equal(first_table, other_seed_table)


PLAIN_LOOP_CASES = [
    (name, portion) for name in ("classic", "modern", "odd") for portion in (0, 1, 3)
]
PLAIN_LOOP_CASES += [
    (name, 3) for name in ("layered", "post norms", "sinks", "ALiBi", "multipliers", "xIELU")
]


@pytest.mark.parametrize(("name", "portion"), PLAIN_LOOP_CASES)
def test_loss_and_gradient_equal_a_plain_loop_over_examples(name: str, portion: int) -> None:
    config = CONFIGS[name]
    model = build(config)
    trainer_ = trainer(model, micro_batch_examples=portion or None, gradient_norm_max=1e9, steps=10)
    assert trainer_.encoder is not None
    table = trainer_.current_table()
    assert table is not None
    plain = table.clone().requires_grad_()
    batch = examples(config.vocab_size)
    expected = plain_loss(model, batch, plain)
    expected.backward()

    metrics = trainer_.step(batch)

    assert plain.grad is not None
    assert metrics.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert metrics.gradient_norm == pytest.approx(float(plain.grad.norm()), rel=1e-10)
    assert trainer_.mean_loss(batch, table) == pytest.approx(metrics.loss, rel=1e-12)


def plain_loss(model: GPT, batch: Sequence[Example], table: Tensor) -> Tensor:
    """Loss of a plain loop: one example at a time, logits at all positions."""
    losses = []
    for example in batch:
        logits = model.logits(torch.tensor([example.ids]), table)[0]
        answer = torch.tensor(example.ids[example.answer_start :])
        losses.append(
            F.cross_entropy(logits[example.answer_start - 1 : -1], answer, reduction="none")
        )
    return torch.cat(losses).mean()


def test_common_prefix_is_computed_once_per_task() -> None:
    v = CLASSIC.vocab_size
    batch = [
        Example([v, v + 1, 7, 5, 6], 4),
        Example([v + 2, 8, 9], 2, 1),
        Example([v, v + 1, 7, 9, 3], 4),
        Example([v + 2, 8, 8, 9, 1], 3, 1),
        Example([v + 3, 1, 2, 3], 2, 2),
    ]
    micro_batch = build_micro_batch(batch)
    # Rows and the 7 of the first task; of the second only the row, as its 8 predicts the answer.
    assert micro_batch.batch.query_lengths[:2] == (3, 1)
    assert micro_batch.batch.tokens == 3 + 1 + (1 + 1) + (1 + 3) + 3


def test_each_epoch_has_every_example_once_in_an_order_set_by_the_step() -> None:
    items = [Example([n, n, n], 1) for n in range(10)]
    order = BatchOrder(items, 4, seed=1)
    first_epoch = [example.ids[0] for step in range(1, 6) for example in order.batch(step)]
    assert sorted(first_epoch[:10]) == sorted(first_epoch[10:]) == list(range(10))
    assert first_epoch[:10] != first_epoch[10:]
    same_seed_order = BatchOrder(items, 4, seed=1)
    assert [same_seed_order.batch(step) for step in (5, 2)] == [
        order.batch(step) for step in (5, 2)
    ]
    assert BatchOrder(items, 10**9, seed=1).batch_size == 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp16_and_bf16_models_train_fp32_tables_and_skip_overflows(dtype: torch.dtype) -> None:
    model = build(CLASSIC, dtype=dtype)
    trainer_ = trainer(model, steps=20, learning_rate=0.5, warmup_steps=1)
    metrics = learn(trainer_, 20)
    assert metrics[-1].loss < 0.8 * metrics[0].loss
    table = trainer_.current_table()
    assert table is not None and table.dtype is torch.float32
    if dtype is torch.float16:
        trainer_.loss_scales[0].value = 2.0**40
        assert trainer_.step(examples(CLASSIC.vocab_size)).skipped
        table_after = trainer_.current_table()
        assert table_after is not None and torch.equal(table, table_after)


SPLITS = [
    # tensor, pipeline, data, chunks, sequence parallel
    (2, 1, 1, 1, True),
    (1, 2, 1, 2, False),
    (2, 2, 1, 1, True),
    (1, 1, 2, 1, False),
    (4, 1, 1, 1, True),
    (2, 1, 2, 1, False),
]
FULL_TRAINING_CONFIGS = {
    "classic": CLASSIC,
    "modern": MODERN,
    "odd": ODD,
    "experts": EXPERTS,
    "xIELU": XIELU,
    # Norms over all heads, and half as many KV heads as the tensor ranks of split 4.
    "post norms": POST_NORMS,
    "multipliers": EXPERTS.with_fields(residual_multiplier=0.6, logits_scaling=0.8),
}
# Indices of the splits of each network; at least two networks have each split.
# tests/equivalence/test_gradients_across_splits.py has the gradients of every pair of settings.
FULL_TRAINING_SPLITS = {
    "classic": (0, 3, 4),
    "modern": (1, 2, 5),
    "odd": (0, 1, 3),
    "experts": (2, 4, 5),
    "xIELU": (0, 2, 3),  # Its three layers are too few for the virtual stages of split 1.
    "post norms": (0, 4),
    "multipliers": (2, 4),
}
FULL = {"method": "full", "steps": 10, "learning_rate": 1e-3, "warmup_steps": 1}


def train_fully(
    rank: int, name: str, split: tuple[int, int, int, int, bool], drops: bool
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of three steps of full training, and the weights on rank 0."""
    tp, pp, dp, virtual, sequence_parallel = split
    mesh = Mesh.single()
    if tp * pp * dp > 1:
        mesh = Mesh.create(tp, pp, dp, sequence_parallel=sequence_parallel)
    # Data ranks draw different dropout masks, so comparisons over data ranks have no dropout.
    p = 0.1 if drops else 0.0
    config = FULL_TRAINING_CONFIGS[name].with_fields(
        hidden_dropout=p, attention_dropout=p, dtype="float64"
    )
    layers = stage_layers(config.num_layers, pp, vpp=virtual)[mesh.pp_rank]
    checkpoint = lively(config)
    chunks = [
        load_model(checkpoint, mesh, layers=layer_range, recompute=RecomputePolicy("full"))
        for layer_range in layers
    ]
    trainer_ = Trainer(chunks, settings(**FULL, micro_batch_examples=2, virtual_stages=virtual))
    # As if the rows were the first words.
    batch = [
        Example([token % config.vocab_size for token in example.ids], example.answer_start)
        for example in examples(config.vocab_size)
    ]
    metrics = [trainer_.step(batch) for _ in range(3)]
    return (
        [step_metrics.loss for step_metrics in metrics],
        [step_metrics.gradient_norm for step_metrics in metrics],
        gather_model(chunks),
    )


SLOW_FULL_TRAINING = ("odd", "experts", "post norms")


@pytest.mark.parametrize(
    "name",
    cases_by_suite(
        SLOW_FULL_TRAINING,
        [name for name in FULL_TRAINING_CONFIGS if name not in SLOW_FULL_TRAINING],
    ),
)
def test_full_training_is_equal_for_every_split(name: str) -> None:
    expected_by_drops = {
        drops: train_fully(0, name, (1, 1, 1, 1, False), drops) for drops in (False, True)
    }
    for split in (SPLITS[index] for index in FULL_TRAINING_SPLITS[name]):
        tp, pp, dp, _, _ = split
        results = ranks(tp * pp * dp, train_fully, name, split, dp == 1)
        expected = expected_by_drops[dp == 1]
        for losses, norms, _ in results:
            assert losses == pytest.approx(expected[0], rel=1e-10), (name, split)
            assert norms == pytest.approx(expected[1], rel=1e-9), (name, split)
        for key, value in results[0][2].items():
            torch.testing.assert_close(value, expected[2][key], rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("config", [CLASSIC, MODERN, EXPERTS], ids=["classic", "modern", "experts"])
def test_gradient_equals_finite_differences(config: GPTConfig) -> None:
    model = build(config)
    batch = examples(config.vocab_size)
    trainer_ = trainer(model, steps=10)
    table = trainer_.current_table()
    assert table is not None
    leaf = table.clone().requires_grad_()
    plain_loss(model, batch, leaf).backward()
    assert leaf.grad is not None
    generator = torch.Generator().manual_seed(1)
    scale = float(leaf.grad.abs().max())
    for index in torch.randperm(table.numel(), generator=generator)[:20].tolist():
        losses_around = []
        for sign in (1, -1):
            moved = table.clone()
            moved.view(-1)[index] += sign * 1e-5
            losses_around.append(trainer_.mean_loss(batch, moved))
        slope = (losses_around[0] - losses_around[1]) / 2e-5
        assert abs(slope - float(leaf.grad.view(-1)[index])) < 1e-6 * scale


def test_only_the_prompt_encoder_is_trained() -> None:
    model = build(CLASSIC)
    trainer_ = trainer(model, steps=10, method="mlp")
    assert trainer_.encoder is not None
    optimizer_names = {name.split("/", 1)[1] for name in trainer_.optimizer.state_dict()}
    assert optimizer_names == {name for name, _ in trainer_.encoder.named_parameters()}
    learn(trainer_, 1)
    assert all(value.grad is None for value in model.parameters())


def test_frozen_model_runs_without_dropout() -> None:
    losses = []
    for p in (0.0, 0.3):
        config = CLASSIC.with_fields(hidden_dropout=p, attention_dropout=p)
        losses.append(
            [step_metrics.loss for step_metrics in learn(trainer(build(config), steps=3), 3)]
        )
    assert losses[0] == losses[1]


def test_step_frees_the_masks_of_its_micro_batches() -> None:
    model = build(CLASSIC)
    channels = PipelineChannels(Mesh.single())
    micros = [build_micro_batch([example]) for example in examples(CLASSIC.vocab_size)]
    table = torch.zeros(2, CLASSIC.hidden_size, dtype=torch.float64, requires_grad=True)
    for passes in (schedule_1f1b(0, 1, 4), schedule_forward_only(1, 4)):
        run_passes([model], passes, micros, channels, table=table, loss_scales=[1.0])
        assert not any(micro.batch.attention_metadata for micro in micros)


IDLE: dict[str, tuple[dict[str, object], str]] = {
    "width": ({"encoder_hidden": 8}, "method is one of: mlp, lstm, tpmlp, peft-mlp"),
    "layers": ({"method": "peft-mlp", "encoder_layers": 3}, "method is mlp or lstm"),
    "share": ({"schedule": "constant", "minimum_rate": 0.1}, "schedule is cosine"),
    "recomputed": ({"recompute": "full", "recompute_layers": 2}, "recompute is block"),
    "patience": ({"patience": 3, "validate_every": 0}, "validate_every is not 0"),
    "sample": ({"measure": "all", "validation_examples": 9}, "measure is not all"),
    "golden": ({"method": "full", "golden_examples": 3}, "method is not full"),
}


@pytest.mark.parametrize("case", IDLE)
def test_setting_without_effect_is_refused(case: str) -> None:
    changes, when = IDLE[case]
    with pytest.raises(ConfigError, match=f"has an effect only if {when}"):
        settings(**changes)
    with pytest.raises(ConfigError, match=r"minimum_rate is 1\.5; it must be at least 0 and"):
        settings(minimum_rate=1.5)


def test_child_ranks_receive_all_settings_of_several_tasks() -> None:
    tasks = [{"name": "a"}, {"name": "b", "answer_only_loss": True}]
    config = TuneConfig.from_dict(
        {"model": "m", "data": "d", "answer_only_loss": False, "tasks": tasks}, "here"
    )
    assert TuneConfig.from_dict(config_to_dict(config), "there") == config


def gather_bf16(rank: int) -> dict[str, Tensor]:
    mesh = Mesh.create(1, 2)
    layers = stage_layers(SIGMOID_EXPERTS.num_layers, 2)[mesh.pp_rank]
    model = load_model(lively(SIGMOID_EXPERTS), mesh, dtype="bfloat16", layers=layers[0])
    return gather_model([model])


@pytest.mark.slow
def test_fp32_parameters_of_a_bf16_model_are_gathered_in_fp32() -> None:
    single_rank = gather_model(
        [load_model(lively(SIGMOID_EXPERTS), Mesh.single(), dtype="bfloat16")]
    )
    assert {value.dtype for value in single_rank.values()} == {torch.bfloat16, torch.float32}
    gathered = ranks(2, gather_bf16)[0]
    for name, value in single_rank.items():
        assert value.dtype == gathered[name].dtype, name
        assert torch.equal(value, gathered[name]), name
