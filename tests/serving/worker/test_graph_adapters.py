"""Steps with linear adapters on a fake device: waits, launches, and captured graphs."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from gpt.batch import Batch
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import LOCAL_EXPERTS
from gpt.parallel.adaptable_linears import adaptable_linears
from serving.messages import Outcome, Step
from serving.worker import cuda_graphs, graph_adapters
from serving.worker.model_runner import ModelRunner
from tests.support.adapter_steps import (
    BASE,
    LORA,
    linears_write,
    run_adapter_steps,
    with_adapters,
)
from tests.support.graph_steps import RULES, next_step, prefill_step
from tests.support.linear_adapters import DENSE_TARGETS, EXPERT_TARGETS, random_linears

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: make tools"),
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="the fake device needs a CPU build of torch"
    ),
]
# The launches that adapters add to a layer: two for each linear, one that scales the input of fc2,
# and what was fused with a linear: the activation, and the norm in fp8 layers, whose wide rows the
# adapters need too.
ADDED_LAUNCHES_MAX = {"bfloat16": 10, "fp8": 14}


def graphs_of(runner: ModelRunner) -> cuda_graphs.CudaGraphRunner:
    assert runner._graphs is not None
    return runner._graphs


@pytest.mark.parametrize("linears", ADDED_LAUNCHES_MAX)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("classic", "modern", "odd")),
    ],
)
def test_a_decode_pass_with_adapters_can_be_captured(family: str, linears: str) -> None:
    from tests.support.fake_device import Counts, fake_device
    from tests.support.fake_device_runners import FAMILIES, make_runner

    passes: list[list[int]] = []  # The launches before each layer of a captured pass.

    def capture(work: cuda_graphs.Work) -> cuda_graphs.Work:
        work()
        with device.captures() as counts:
            passes.append([])
            current.append(counts)
            work()
        return work

    current: list[Counts] = []
    with fake_device() as device:
        runner = make_runner(
            FAMILIES[family], torch.bfloat16, fp8_linears=linears == "fp8", capturer=capture
        )

        def mark(*_: object) -> None:
            if passes:
                passes[-1].append(len(device.counts.launches))

        for layer in runner.model.decoder_layers:
            layer.register_forward_pre_hook(mark)
        graphs = graphs_of(runner)
        graphs.capture_for(4)
        graphs.capture_for(4, adapted=True)
    base, adapted = (
        max(end - start for start, end in pairwise(marks[1 : runner.model.config.num_layers]))
        for marks in passes
    )
    launches = current[-1].launches
    assert launches.count("expand_rows") == 4 * runner.model.config.num_layers
    assert launches.count("shrink_rows") == 4 * runner.model.config.num_layers
    assert "expand_rows" not in current[0].launches
    assert base + 8 <= adapted <= base + ADDED_LAUNCHES_MAX[linears], (base, adapted)


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    """A runner that captures graphs, on a fake device."""
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import FAMILIES, make_runner

    with fake_device():
        yield make_runner(FAMILIES["llama"], torch.bfloat16, capturer=lambda work: work)


def run(runner: ModelRunner, step: Step) -> Outcome:
    outcome = runner.run_step(step)
    assert outcome is not None
    return outcome


@pytest.mark.slow
def test_steps_with_loaded_replaced_and_evicted_adapters_are_replayed(runner: ModelRunner) -> None:
    outcomes = run_adapter_steps(runner, runner.model.config, blocks=4)
    assert all(outcome.replayed for outcome in outcomes)


def test_a_step_with_adapters_waits_once() -> None:
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import FAMILIES, make_runner

    with fake_device() as device:
        runner = make_runner(FAMILIES["llama"], torch.bfloat16)
        linears = random_linears(runner.model.config, "lora", by_parts=True)
        step = with_adapters(prefill_step(RULES[:3], blocks=4), [LORA, BASE, LORA], [0, 0, 3])
        with device.counted() as counts:
            outcome = run(
                runner,
                msgspec.structs.replace(step, linear_writes=[linears_write(LORA, linears)]),
            )
        assert len(counts.waits) == 1 and counts.blocking_copies == []
        assert "expand_rows" in counts.launches
        step = next_step(step, outcome, lambda slot, token: token)
        adapted = with_adapters(step, [LORA, BASE, LORA], [0, 0, 3])
        copies = []
        for repeated in (step, adapted):
            with device.counted() as counts:
                run(runner, repeated)
            assert len(counts.waits) == 1 and counts.blocking_copies == []
            copies.append(len(counts.copies))
        # The rows of the adapters; the terms are on the device.
        assert copies[1] == copies[0] + 1


@pytest.mark.slow
def test_adapters_of_experts_have_terms_outside_of_the_table() -> None:
    from tests.support.fake_device import fake_device
    from tests.support.fake_device_runners import FAMILIES, make_runner

    with fake_device():
        runner = make_runner(FAMILIES["experts"], torch.bfloat16)
        memory = runner._adapter_memory
        assert memory.table is not None
        assert not any(LOCAL_EXPERTS in name for name in memory.table.linears)
        assert "decoder.layers.0.mlp.shared_experts.linear_fc2" in memory.table.linears
        step = with_adapters(prefill_step(RULES[:3], blocks=4), [LORA, BASE, LORA], [0, 0, 3])
        for targets, has_experts in ((DENSE_TARGETS, False), (EXPERT_TARGETS, True)):
            linears = random_linears(runner.model.config, targets=targets)
            memory.write(linears_write(LORA, linears))
            (encoded,) = memory.encoded(np.array(list(memory._adapters)))
            assert encoded.has_experts == has_experts
            assert encoded.linears == {key for key in linears if LOCAL_EXPERTS not in key}
            assert graph_adapters._is_supported(encoded) != has_experts
            kernels = memory.add_adapters(Batch.unpaged(step.lengths), step).adapter_kernels
            assert kernels is not None
            layers = [adapted.moe_layers for adapted in kernels.expert_rows]
            names = {f"decoder.layers.{layer}.mlp" for layer in (0, 2, 3)}
            assert layers == ([names] if has_experts else [])


def test_heartbeats_capture_graphs_with_adapters_when_there_is_an_adapter(
    runner: ModelRunner,
) -> None:
    graphs, heartbeat = graphs_of(runner), Step(0, may_capture_graph=True)
    while runner.has_missing_graphs:
        run(runner, heartbeat)
    assert len(graphs._captured_graphs) == len(graphs.sizes) and not graphs._adapter_graphs
    linears = random_linears(runner.model.config)
    run(runner, Step(0, linear_writes=[linears_write(LORA, linears)]))
    assert runner.has_missing_graphs
    run(runner, heartbeat)
    assert list(graphs._adapter_graphs) == [graphs.sizes[-1]]
    while runner.has_missing_graphs:
        run(runner, heartbeat)
    assert list(graphs._adapter_graphs) == list(graphs.sizes[::-1])


def test_a_busy_server_captures_a_graph_after_many_steps_without_it(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "STEPS_BEFORE_CAPTURE", 3)
    linears = random_linears(runner.model.config)
    step = with_adapters(prefill_step(RULES[:3], blocks=4), [LORA, BASE, BASE])
    step = msgspec.structs.replace(step, linear_writes=[linears_write(LORA, linears)])
    outcome = run(runner, step)
    replayed = []
    for _ in range(5):
        step = next_step(step, outcome, lambda slot, token: token)
        step = with_adapters(step, [LORA, BASE, BASE])
        outcome = run(runner, step)
        replayed.append(outcome.replayed)
    assert replayed == [False, False, True, True, True]
    assert not graphs_of(runner)._captured_graphs, "graphs without adapters"


@pytest.mark.parametrize("kind", ["rank", "input scale", "bottleneck", "fits"])
def test_adapters_beyond_the_limits_of_graphs_run_without_them(
    kind: str, runner: ModelRunner
) -> None:
    config = runner.model.config
    linears = random_linears(config, rank=graph_adapters.GRAPH_RANKS_MAX + (kind == "rank"))
    if kind == "input scale":
        name = next(iter(adaptable_linears(config)))
        linears[name] = LinearAdapter(input_scale=torch.ones(config.hidden_size))
    if kind == "bottleneck":
        linears = random_linears(config, "bottleneck")
    step = with_adapters(prefill_step(RULES[:2], blocks=4), [LORA, BASE])
    step = msgspec.structs.replace(step, linear_writes=[linears_write(LORA, linears)])
    outcome = run(runner, step)
    decode = next_step(step, outcome, lambda slot, token: token)
    decode = msgspec.structs.replace(decode, may_capture_graph=True)
    assert run(runner, with_adapters(decode, [LORA, BASE])).replayed == (kind == "fits")
    # No adapter acts on these steps.
    assert run(runner, with_adapters(decode, [BASE, BASE])).replayed
    assert run(runner, with_adapters(decode, [LORA, BASE], [1000, 0])).replayed
