"""Plans of training adapters of linears: memory and time by method, and published LoRA runs."""

from collections.abc import Callable
from dataclasses import replace
from time import process_time

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
from planning.hardware import Cluster, Device, find_device
from planning.model_presets import find_preset
from planning.published.training_runs import run_tables
from planning.training.efficiency import SOFTWARE, Software
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
from ptuning.data.dataset import Example
from tests.support.trained_linears import random_trainable_linears
from tests.support.trainers import trainer

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
        linears = random_trainable_linears(MethodConfig(method=method), [model])
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


# ----------------------------------------------------------------------------- measured step times

TIMED_MODEL = GPTConfig(4, 512, 8, 2048, 512)
EXAMPLE_TOKENS, EXAMPLES, INVOCATION_START = 257, 4, 200
# The error of predictions for a machine without published runs.
STEP_ERROR = 0.30


@pytest.mark.slow
def test_measured_step_times_relative_to_prompt_tuning_are_within_the_plans_error() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        planned, measured = planned_seconds(), measured_seconds()
    finally:
        torch.set_num_threads(threads)
    for method in METHODS:
        ratio = measured[method] / measured["prompt-tuning"]
        planned_ratio = planned[method] / planned["prompt-tuning"]
        assert abs(planned_ratio / ratio - 1) <= STEP_ERROR, (method, planned_ratio, ratio)


def measured_seconds() -> dict[str, float]:
    """CPU seconds of a step of each method: the least of several, in turn."""
    trainers = {}
    for method in ("prompt-tuning", *METHODS):
        model = load_model(random_init_checkpoint(TIMED_MODEL, 0), Mesh(torch.device("cpu")))
        changes: dict[str, object] = {"method": method}
        if method == "alora":
            changes |= {"template": "{a}<|INVOCATION|>{b}", "invocation_ids": [1, 2]}
        trainers[method] = trainer(model, **changes)
    seconds: dict[str, list[float]] = {method: [] for method in trainers}
    for _ in range(4):
        for method, method_trainer in trainers.items():
            start = process_time()
            method_trainer.step(timed_examples(method))
            seconds[method].append(process_time() - start)
    return {method: min(times[1:]) for method, times in seconds.items()}


def timed_examples(method: str) -> list[Example]:
    """Examples whose tokens all have a loss, as the plan assumes, from the invocation on."""
    virtual_ids = [TIMED_MODEL.vocab_size, TIMED_MODEL.vocab_size + 1]
    start = INVOCATION_START if method == "alora" else 0
    draws = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(EXAMPLES):
        ids = torch.randint(0, TIMED_MODEL.vocab_size, (EXAMPLE_TOKENS,), generator=draws).tolist()
        if method == "prompt-tuning":
            ids[:2] = virtual_ids
        examples.append(Example(ids, start + 2, invocation_start=start))
    return examples


def planned_seconds() -> dict[str, float]:
    """Seconds of a step at this machine's measured speeds; a CPU has no waves of tiles."""
    efficiency = replace(
        SOFTWARE["h100"].efficiency,
        products=1.0,
        fused_attention=1.0,
        tail=0.0,
        memory=1.0,
        gap_s=0.0,
    )
    # Activations have 4 bytes, and the plan counts 2.
    device = Device("this-cpu", matmul_flops(), 16 << 30, copy_bytes_per_s() / 2, 1e9, 1e9)
    seconds = {}
    for method in ("prompt-tuning", *METHODS):
        linears = next(
            (LinearAdapterSpec(choice, 16) for choice in METHODS if choice == method), None
        )
        job = TrainingJob(
            TIMED_MODEL,
            EXAMPLE_TOKENS - 1,
            EXAMPLES,
            "adapter",
            2 if linears is None else 0,
            flash=True,
            distributed_optimizer=False,
            linears=linears,
            context_tokens=INVOCATION_START if method == "alora" else 0,
        )
        seconds[method] = estimate_training(
            job,
            TrainingSplit(micro_batch=EXAMPLES),
            Cluster(device, 1),
            Software("this CPU", efficiency, STEP_ERROR, STEP_ERROR),
        ).iteration_s
    return seconds


def matmul_flops() -> float:
    a, b = torch.randn(1024, 512), torch.randn(512, 2048)
    return 2 * 1024 * 512 * 2048 / least_cpu_seconds(lambda: a @ b)


def copy_bytes_per_s() -> float:
    values = torch.randn(1 << 19)  # As large as the activations of a linear.
    return 2 * 4 * len(values) / least_cpu_seconds(values.clone)


def least_cpu_seconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(8):
        start = process_time()
        call()
        seconds.append(process_time() - start)
    return min(seconds)
