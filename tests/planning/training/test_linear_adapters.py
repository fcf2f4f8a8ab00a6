"""Plans of training linear adapters: memory and time by method, and published LoRA runs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.costs.activation_memory import layer_activation_bytes
from gpt.costs.linear_adapter import (
    METHODS,
    LinearAdapterSpec,
    LinearMethod,
    linear_adapter_cost,
    stage_costs,
)
from gpt.costs.training import TrainingSetup
from gpt.errors import ConfigError
from gpt.linear_adapter import AdaptedRows
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from planning.hardware import Cluster, find_device
from planning.model_presets import find_preset
from planning.published.training_runs import run_tables
from planning.training.estimate import (
    TrainingEstimate,
    TrainingJob,
    TrainingSplit,
    estimate_training,
)
from planning.training.plan import plan_training
from planning.training.search import SearchSpace
from planning.training.step_time import FUSED_BACKWARD
from ptuning.config import MethodConfig
from tests.support.trained_linears import random_trainable_linears

LLAMA_8B = find_preset("llama3-8b")
LORA = LinearAdapterSpec("lora", 16)
SMALL_MODELS = {
    "gpt2": GPTConfig(2, 256, 8, 512, 256),
    "llama": GPTConfig(
        2,
        256,
        8,
        512,
        256,
        num_query_groups=2,
        ffn_hidden_size=768,
        gated=True,
        activation="silu",
        normalization="RMSNorm",
        position_embedding_type="rope",
    ),
}


def estimate(
    linears: LinearAdapterSpec | None = LORA,
    split: TrainingSplit = TrainingSplit(),  # noqa: B008
    *,
    global_batch: int | None = None,
    context_tokens: int = 0,
) -> TrainingEstimate:
    job = TrainingJob(
        LLAMA_8B,
        4096,
        global_batch or split.dp * split.micro_batch,
        "adapter",
        flash=True,
        linears=linears,
        context_tokens=context_tokens,
    )
    return estimate_training(job, split, Cluster(find_device("h100"), split.gpus))


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_number_takes_16_bytes(method: LinearMethod) -> None:
    linears = LinearAdapterSpec(method, 16)
    for split in (TrainingSplit(), TrainingSplit(tp=4, sequence_parallel=True)):
        frozen, memory = estimate(None, split).memory, estimate(linears, split).memory
        numbers = linear_adapter_cost(LLAMA_8B, linears, tp=split.tp).trained
        assert memory.weights - frozen.weights == 4 * numbers
        assert memory.gradients == 4 * numbers
        assert memory.optimizer == 8 * numbers


def test_the_state_of_a_stage_is_that_of_its_layers() -> None:
    split = TrainingSplit(tp=2, pp=4)
    memory = estimate(split=split, global_batch=4).memory
    assert memory.gradients == 4 * stage_costs(LLAMA_8B, LORA, 2, 4)[0].trained
    assert 4 * memory.gradients == 4 * linear_adapter_cost(LLAMA_8B, LORA, tp=2).trained


def test_lora_keeps_the_inputs_of_linears() -> None:
    """3 h + ffn numbers a token and layer, of which flash attention keeps h anyway."""
    h, ffn, tokens, layers, low_rank = 4096, 14336, 4096, 32, 4 * 16
    extra = estimate().memory.activations - estimate(None).memory.activations
    assert extra == 2 * tokens * layers * (2 * h + ffn + low_rank)
    recomputed = TrainingSplit(recompute="full")
    assert (
        estimate(split=recomputed).memory.activations
        == estimate(None, recomputed).memory.activations
    )


@pytest.mark.parametrize("method", [None, "lora", "dora", "ia3"])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_activation_bytes_are_near_those_that_autograd_saves(
    name: str, method: LinearMethod | None
) -> None:
    config, tokens = SMALL_MODELS[name], 64
    setup = TrainingSetup(1, False, True, "adapter", dropout=False)
    planned_bytes = 2 * layer_activation_bytes(config, 1, tokens, "none", setup)
    if method is not None:
        cost = linear_adapter_cost(config, LinearAdapterSpec(method, 16))
        numbers = cost.activations_per_token - cost.attention_outputs_per_token
        planned_bytes += 2 * tokens * numbers
    # The plan counts 16-bit activations, and the model computes in fp32. Without adapters, the
    # first layer needs no gradients of its norm, so torch saves less.
    ratio = saved_bytes(config, method, tokens) / (2 * planned_bytes)
    assert 0.9 <= ratio <= 1.01


def saved_bytes(config: GPTConfig, method: LinearMethod | None, tokens: int) -> int:
    """Return the bytes of the distinct tensors that a forward pass saves, without parameters."""
    model = load_model(random_init_checkpoint(config, 0), Mesh(torch.device("cpu")))
    model.requires_grad_(False)
    ids, batch, table = torch.arange(tokens), Batch.unpaged([tokens], "cpu"), None
    parameters: list[Tensor] = list(model.parameters())
    if method is None:
        ids = torch.arange(tokens) + config.vocab_size
        table = torch.zeros(tokens, config.hidden_size, requires_grad=True)
    else:
        linears = random_trainable_linears([MethodConfig(method=method)], [model])
        (adapter,) = linears.begin_step()
        batch = replace(batch, adapted_rows=(AdaptedRows(adapter, None),))
        parameters += [
            value
            for terms in adapter.values()
            for term in terms
            for value in vars(term).values()
            if isinstance(value, Tensor)
        ]
    excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, Tensor] = {}  # Keeps the tensors, so that no address is used again.

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in excluded:
            saved[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.forward_hidden(ids, batch, None, table)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_layers_below_the_lowest_changed_layer_have_no_backward_pass() -> None:
    half = LinearAdapterSpec("lora", 16, layers=tuple(range(16, 32)))
    all_layers, upper = estimate(), estimate(half)
    assert upper.memory.activations == all_layers.memory.activations / 2
    # Linears: a forward pass of all layers, and a backward pass of half of them.
    assert upper.seconds["products"] == pytest.approx(
        0.75 * all_layers.seconds["products"], rel=0.01
    )
    assert upper.seconds["low_rank"] == pytest.approx(0.5 * all_layers.seconds["low_rank"])
    # The lowest layers only: everything above them has a backward pass.
    lower = estimate(LinearAdapterSpec("lora", 16, layers=tuple(range(16))))
    assert lower.seconds["products"] == pytest.approx(all_layers.seconds["products"])


def test_flops_are_those_of_the_frozen_model_and_of_the_low_rank_products() -> None:
    numbers = linear_adapter_cost(LLAMA_8B, LORA).trained
    extra = estimate().flops_per_iteration - estimate(None).flops_per_iteration
    assert extra == pytest.approx(6 * numbers * 4096, rel=1e-6)


def test_the_context_of_activated_lora_has_a_forward_pass_only() -> None:
    activated = LinearAdapterSpec("alora", 16)
    all_tokens, tail = estimate(activated), estimate(activated, context_tokens=3686)
    assert estimate(activated).iteration_s == estimate(LORA).iteration_s
    share = (4096 - 3686) / 4096
    kv_bytes = 2 * 2 * 8 * 128 * 3686 * 32
    assert tail.memory.activations == pytest.approx(
        share * all_tokens.memory.activations + kv_bytes, rel=1e-6
    )
    # Attention: the forward pass of all pairs of tokens, and the backward pass of those with a
    # query behind the context.
    attention = (1 + FUSED_BACKWARD * (1 - (1 - share) ** 2)) / (1 + FUSED_BACKWARD)
    assert tail.seconds["attention"] == pytest.approx(attention * all_tokens.seconds["attention"])
    assert tail.model_flops < 0.6 * all_tokens.model_flops
    assert tail.iteration_s < 0.65 * all_tokens.iteration_s
    assert tail.seconds["low_rank"] == pytest.approx(share * all_tokens.seconds["low_rank"])


def test_gradients_of_the_adapter_are_reduced_over_replicas_and_tensor_ranks() -> None:
    split = TrainingSplit(tp=2, dp=2, sequence_parallel=True)
    seconds = estimate(split=split).seconds
    assert 0 < seconds["data_parallel"] < 0.01 * sum(seconds.values())
    assert estimate(None, split).seconds["data_parallel"] == 0
    numbers = linear_adapter_cost(LLAMA_8B, LORA, tp=2).trained
    assert estimate(split=split).sent_bytes["data_parallel"] == 4 * numbers


def test_published_lora_runs_are_within_the_target_of_training() -> None:
    """NeMo's LoRA changes linear_qkv with rank 32 by default."""
    linears = LinearAdapterSpec("lora", 32, ("linear_qkv",))
    runs = [run for table in run_tables() for run in table.runs if run.job.trainable == "adapter"]
    errors = [
        estimate_training(replace(run.job, linears=linears), run.split, run.cluster).iteration_s
        / run.seconds
        - 1
        for run in runs
    ]
    assert len(runs) == 2
    assert max(map(abs, errors)) <= 0.12
    assert sum(map(abs, errors)) / 2 <= 0.08


def test_the_plan_names_the_adapter_and_its_state() -> None:
    job = TrainingJob(LLAMA_8B, 4096, 128, "adapter", linears=LORA)
    plan = plan_training(job, Cluster(find_device("h100"), 8), SearchSpace(tp=(1, 2), pp=(1,)))
    assert plan.request[0].startswith("train LoRA of rank 16 on all linears (35.7 M parameters)")
    assert any("gradients and moments of the adapter" in line for line in plan.advice)
    assert plan.best is not None and plan.best.memory is not None


@pytest.mark.parametrize(
    ("linears", "context_tokens", "message"),
    [
        (LinearAdapterSpec("lora", 16, ("linear_q",)), 0, "changes linear_q"),
        (LORA, 100, "only method alora"),
        (LinearAdapterSpec("alora", 16), 4096, "set a number from 0 to 4095"),
    ],
)
def test_jobs_that_cannot_run_are_refused(
    linears: LinearAdapterSpec, context_tokens: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(linears, context_tokens=context_tokens)
