"""LoRA, DoRA, IA3 and bottlenecks: gradients and steps are equal at any split, in fp64.

The oracle is one rank. The splits compute the same examples in micro-batches, with and without
sequence parallelism and activation checkpointing, also with fewer KV heads than tensor ranks.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import LOCAL_EXPERTS
from gpt.model.activation_checkpointing import RecomputePolicy
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from ptuning.config import TuneConfig
from ptuning.data.dataset import Example
from ptuning.training.trainer import Trainer
from tests.support.linear_adapters import EXPERT_TARGETS
from tests.support.models import CLASSIC, EIGHT_EXPERTS, EXPERTS, LAYERED, MODERN, lively
from tests.support.ranks import ranks
from tests.support.trained_linears import random_trainable_linears

STEPS = 5
LONG_STEPS = 20  # Of one case of each method: each step has some hundred collectives.
TOLERANCE = 1e-10
SPLITS = ((1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1), (4, 2, 1))
# The cases of a split in the slow suite: the first one, and the distance to the next one. Each case
# runs at TP 2 or 4. A split with four tensor ranks takes as long as several with two.
SLOW_CASES = {
    (1, 2, 1): (0, 3),
    (2, 2, 1): (0, 3),
    (1, 1, 2): (1, 3),
    (2, 1, 2): (2, 3),
    (4, 1, 1): (4, 6),
    (4, 2, 1): (1, 6),
}

MODELS = {
    "classic": CLASSIC.with_fields(num_layers=4, moe_layers=()),
    # Two KV heads: fewer than four tensor ranks.
    "modern": MODERN.with_fields(num_layers=4, moe_layers=()),
    "layered": LAYERED,
    "layered-pre": LAYERED.with_fields(norm_placement="pre"),
    "experts": EXPERTS,
    "eight experts": EIGHT_EXPERTS,
}
EXPERT_PARTS = ("linear_qkv", "linear_fc1.up", "experts.linear_fc1.gate", "experts.linear_fc2")


@dataclass(frozen=True)
class Case:
    model: str
    method: str
    targets: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    sequence_parallel: bool = False
    recompute: str = "none"
    virtual_stages: int = 1
    tasks: int = 1
    # Whether the first tasks have the settings of OWN_SETTINGS.
    has_own_settings: bool = False
    dropout: float = 0.0
    steps: int = STEPS


OWN_SETTINGS: tuple[dict[str, object], ...] = (
    {"dropout": 0.2},
    {"method": "dora", "rank": 2, "learning_rate": 2e-3},
    {"method": "ia3", "learning_rate": 2e-2},
    {"method": "alora", "rank": 1, "targets": ["linear_qkv.value", "linear_fc1"], "layers": [1, 2]},
)
PARTS = ("linear_qkv.query", "linear_qkv.key", "linear_qkv.value", "linear_fc2")
CASES = (
    Case("classic", "lora", steps=LONG_STEPS),
    Case("classic", "dora", sequence_parallel=True, recompute="full", steps=LONG_STEPS),
    Case("modern", "lora", sequence_parallel=True),
    Case("modern", "lora", PARTS),
    Case("modern", "dora", PARTS, recompute="block", virtual_stages=2),
    Case("modern", "dora", sequence_parallel=True),
    Case("modern", "ia3", steps=LONG_STEPS),
    Case("modern", "ia3", ("linear_qkv.key", "linear_qkv.value", "linear_proj"), (2,)),
    # No stage below the last layer computes anything backward.
    Case("layered", "lora", layers=(3,), sequence_parallel=True),
    Case("layered", "ia3", layers=(1, 2), sequence_parallel=True, virtual_stages=2),
    Case("experts", "lora", recompute="selective", tasks=2),
    Case(
        "experts",
        "lora",
        EXPERT_TARGETS,
        sequence_parallel=True,
        recompute="full",
        steps=LONG_STEPS,
    ),
    Case("experts", "dora", (*EXPERT_TARGETS, "linear_fc2"), virtual_stages=2),
    Case("experts", "dora", EXPERT_PARTS, sequence_parallel=True),
    Case("experts", "ia3", (*EXPERT_TARGETS, "linear_qkv", "linear_fc2"), sequence_parallel=True),
    Case("experts", "alora", ("linear_proj", *EXPERT_TARGETS), tasks=2),
    Case("classic", "bottleneck", sequence_parallel=True, tasks=2),
    Case("modern", "bottleneck", recompute="full", steps=LONG_STEPS),
    Case("modern", "bottleneck", ("linear_fc2",), virtual_stages=2),
    Case("layered-pre", "bottleneck", layers=(1, 2), sequence_parallel=True, tasks=2),
    Case("classic", "alora", sequence_parallel=True, recompute="full", tasks=2, steps=LONG_STEPS),
    Case("modern", "alora", virtual_stages=2),
    Case("layered", "alora", layers=(2,)),
    Case(
        "modern", "lora", sequence_parallel=True, tasks=5, has_own_settings=True, steps=LONG_STEPS
    ),
    Case("layered", "lora", recompute="full", virtual_stages=2, tasks=4, has_own_settings=True),
)


# The slow tests run all steps of these, and the soak tests of all.
SLOW_LONG_CASES = (("classic", "lora"), ("experts", "lora"))
LOW_RANK_SETTINGS = {"rank": 3, "alpha": 5.0, "lora_plus_ratio": 2.0}
RANK_SETTINGS: dict[str, dict[str, float]] = {"ia3": {}, "bottleneck": {"rank": 3}}


def settings_of(case: Case) -> TuneConfig:
    invocation = {"invocation_ids": [5]} if case.method == "alora" else {}
    tasks: list[dict[str, object]] = [
        {"name": f"t{number}", "data": "d", **invocation} for number in range(case.tasks)
    ]
    if case.has_own_settings:
        for task, own in zip(tasks, OWN_SETTINGS, strict=False):
            task |= own | ({"invocation_ids": [5]} if own.get("method") == "alora" else {})
    return TuneConfig.from_dict(
        {
            "model": "m",
            "tasks": tasks,
            "method": case.method,
            "targets": list(case.targets),
            "layers": list(case.layers),
            "dropout": case.dropout,
            "learning_rate": 5e-3,
            "micro_batch_examples": 4,
            "gradient_norm_max": 0.5,
            "weight_decay": 0.01,
            **RANK_SETTINGS.get(case.method, LOW_RANK_SETTINGS),
        },
        "here",
    )


def examples_of(config: GPTConfig, tasks: int) -> list[Example]:
    """Other methods than aLoRA ignore where the invocation starts."""
    generator = torch.Generator().manual_seed(8)
    examples = []
    for number in range(7):
        size = 7 + number * 5 % 9
        ids = torch.randint(config.vocab_size, (size,), generator=generator).tolist()
        ids[:2] = 3, 4  # The examples of a task have a common prefix.
        start = number % 3
        examples.append(Example(ids, size - 1 - start, number % tasks, invocation_start=start))
    return examples


@dataclass(frozen=True)
class Result:
    losses: list[float]
    task_losses: list[float]  # Of each task that is trained alone, step after step.
    gradients: Tensor  # As a vector of whole adapters; norms of weights have no meaning.
    values: Tensor  # After all steps.


def train(case: Case, mesh: Mesh) -> Result:
    config = MODELS[case.model]
    trainer = trainer_of(case, mesh)
    gradients = gradients_of(trainer_of(case, mesh), examples_of(config, case.tasks))
    steps = [trainer.step(examples_of(config, case.tasks)) for _ in range(case.steps)]
    values = trainer.current_table()
    assert values is not None
    task_losses = [own.loss for step in steps for own in step.by_task.values()]
    return Result([step.loss for step in steps], task_losses, gradients, values)


def trainer_of(case: Case, mesh: Mesh) -> Trainer:
    config, settings = MODELS[case.model], settings_of(case)
    stages = case.virtual_stages if mesh.pp > 1 else 1
    layers = stage_layers(config.num_layers, mesh.pp, vpp=stages)[mesh.pp_rank]
    checkpoint = lively(config.with_fields(dtype="float64"))
    recompute = RecomputePolicy(case.recompute)  # type: ignore[arg-type]
    chunks: list[GPT] = [
        load_model(checkpoint, mesh, layers=chunk_layers, recompute=recompute)
        for chunk_layers in layers
    ]
    linears = random_trainable_linears(settings.task_method_configs, chunks)
    return Trainer(chunks, settings, linears=linears)


@torch.no_grad()
def gradients_of(trainer: Trainer, examples: Sequence[Example]) -> Tensor:
    """The reduced gradients of a step, gathered as if they were the values."""
    optimizer, linears = trainer.optimizer, trainer.linears
    assert linears is not None
    reduce_gradients = optimizer.reduce_gradients

    def keep_gradients(
        model_config: GPTConfig, groups: Container[int] | None = None
    ) -> list[float]:
        share = reduce_gradients(model_config, groups)
        for _, _, _, value in linears.named_tensors():
            assert value.grad is not None
            gradients.append(value.grad.clone())
        return share

    gradients: list[Tensor] = []
    optimizer.reduce_gradients = keep_gradients  # type: ignore[method-assign]
    with torch.enable_grad():
        trainer.step(examples)
    for (_, _, _, value), gradient in zip(linears.named_tensors(), gradients, strict=True):
        value.copy_(gradient)
    return linears.gather()


@cache
def single_rank(case: Case) -> Result:
    return train(case, Mesh.single())


def slow_cases(split: tuple[int, int, int]) -> list[Case]:
    first, distance = SLOW_CASES[split]
    return [
        case if (case.model, case.method) in SLOW_LONG_CASES else replace(case, steps=STEPS)
        for case in CASES[first::distance]
    ]


def run_split(_: int, tp: int, pp: int, dp: int, cases: Sequence[Case]) -> list[Result]:
    # The threads of a process group stay until the process ends, so the cases share a mesh.
    mesh = cache(lambda parallel: Mesh.create(tp, pp, dp, sequence_parallel=parallel))
    return [train(case, mesh(case.sequence_parallel and tp > 1)) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=["x".join(map(str, split)) for split in SPLITS])
def test_gradients_and_steps_equal_those_of_one_rank(split: tuple[int, int, int]) -> None:
    check_split(split, slow_cases(split), timeout_s=300)


@pytest.mark.soak
@pytest.mark.parametrize("split", SPLITS, ids=["x".join(map(str, split)) for split in SPLITS])
def test_twenty_steps_of_every_case_equal_those_of_one_rank(split: tuple[int, int, int]) -> None:
    check_split(split, [replace(case, steps=LONG_STEPS) for case in CASES], timeout_s=1800)


def check_split(split: tuple[int, int, int], cases: Sequence[Case], timeout_s: float) -> None:
    tp, pp, dp = split
    results = ranks(tp * pp * dp, run_split, tp, pp, dp, cases, timeout_s=timeout_s)
    for case, rank_results in zip(cases, zip(*results, strict=True), strict=True):
        check(case, rank_results)


# Ranks that hold whole experts, or parts of some: (tp, pp, ep).
EXPERT_SPLITS = ((2, 1, 2), (2, 2, 2), (4, 1, 2))
EXPERT_CASES = (
    Case("eight experts", "lora", (*EXPERT_TARGETS, "linear_fc1"), sequence_parallel=True),
    Case("eight experts", "dora", EXPERT_PARTS, recompute="full"),
    Case("eight experts", "ia3", (*EXPERT_TARGETS, "linear_qkv")),
    Case("eight experts", "lora", EXPERT_PARTS),
)


def run_expert_split(_: int, tp: int, pp: int, ep: int) -> list[Result]:
    mesh = cache(lambda parallel: Mesh.create(tp, pp, ep=ep, sequence_parallel=parallel))
    return [train(case, mesh(case.sequence_parallel)) for case in EXPERT_CASES]


@pytest.mark.slow
@pytest.mark.parametrize("split", EXPERT_SPLITS, ids=["x".join(map(str, s)) for s in EXPERT_SPLITS])
def test_experts_on_other_ranks_have_the_gradients_of_one_rank(split: tuple[int, int, int]) -> None:
    tp, pp, ep = split
    results = ranks(tp * pp, run_expert_split, tp, pp, ep, timeout_s=300)
    for case, rank_results in zip(EXPERT_CASES, zip(*results, strict=True), strict=True):
        check(case, rank_results)


def check(case: Case, results: Sequence[Result]) -> None:
    want = single_rank(case)
    decrease_min = 0.2 if case.steps == LONG_STEPS else 0.02
    assert want.losses[-1] < want.losses[0] - decrease_min, case
    for result in results:
        assert result.losses == pytest.approx(want.losses, abs=TOLERANCE * want.losses[0]), case
        assert result.task_losses == pytest.approx(want.task_losses, abs=1e-9), case
        check_adapters(case, result.values, want.values, with_norms=True)
        check_adapters(case, result.gradients, want.gradients, with_norms=False)


def check_adapters(case: Case, actual: Tensor, expected: Tensor, *, with_norms: bool) -> None:
    linears = trainer_of(case, Mesh.single()).linears
    assert linears is not None
    unpacked = zip(linears.layout.unpack(actual), linears.layout.unpack(expected), strict=True)
    for task, want_task in unpacked:
        for key, want in want_task.items():
            for name, value in tensors_of(task[key], with_norms):
                reference = getattr(want, name)
                # The router may send no token of an activated LoRA to an expert.
                assert bool(reference.any()) or LOCAL_EXPERTS in key, (case, key, name)
                difference = (value - reference).abs().max()
                assert difference <= TOLERANCE * reference.abs().max(), (case, key, name)


def tensors_of(linear: LinearAdapter, with_norms: bool) -> list[tuple[str, Tensor]]:
    return [
        (name, value) for name, value in linear.tensors() if with_norms or name != "weight_norm"
    ]
