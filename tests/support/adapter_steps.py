"""Steps with linear adapters, which are loaded, replaced and evicted between the steps."""

from collections.abc import Mapping, Sequence

import msgspec

from gpt.config import GPTConfig
from gpt.linear_adapter import LinearAdapter
from serving.messages import AdapterLinearsWrite, LinearWrite, Outcome, Step, TensorBytes
from serving.worker.model_runner import ModelRunner
from tests.support.graph_steps import PROMPT, RULES, next_step, prefill_step
from tests.support.linear_adapters import random_linears

BASE = -1
# The ranges of adapters in the adapter memory; each one is large enough for any of the adapters.
LORA, DORA, IA3, WIDE = range(4)
RANGE_BYTES = 60 * 4096


def linears_write(
    start: int, linears: Mapping[str, LinearAdapter], nbytes: int = RANGE_BYTES
) -> AdapterLinearsWrite:
    """Return the write of a whole adapter, which has a range of `nbytes`."""
    writes = [
        LinearWrite(
            key,
            linear.scale,
            {
                name: TensorBytes(list(tensor.shape), bytearray(tensor.contiguous().numpy()))
                for name, tensor in linear.tensors()
            },
        )
        for key, linear in linears.items()
    ]
    return AdapterLinearsWrite(start, nbytes, f"digest {start}", 0, len(writes), writes)


def with_adapters(
    step: Step, starts: Sequence[int], adapted_from: Sequence[int] | None = None
) -> Step:
    return msgspec.structs.replace(
        step,
        adapter_starts=list(starts),
        adapted_from=list(adapted_from or [0] * len(starts)),
    )


def run_adapter_steps(
    runner: ModelRunner,
    config: GPTConfig,
    blocks: int = 6,
    range_bytes: int = RANGE_BYTES,
    *,
    has_bottlenecks: bool = False,
) -> list[Outcome]:
    """Run a prefill step and decode steps; return the outcomes of the decode steps.

    Each sequence has a number of `blocks`, and each adapter `range_bytes`. The inputs of the decode
    steps are fixed, so that the steps of two runners are the same. `has_bottlenecks`: there is one
    more step, with bottlenecks.
    """

    def linears(method: str, seed: int, **options: object) -> dict[str, LinearAdapter]:
        return random_linears(config, method, seed=seed, strength=0.5, **options)  # type: ignore[arg-type]

    def write(number: int, linears: Mapping[str, LinearAdapter]) -> AdapterLinearsWrite:
        return linears_write(number * range_bytes, linears, range_bytes)

    def run(step: Step, numbers: Sequence[int], *writes: AdapterLinearsWrite) -> Outcome:
        starts = [number * range_bytes if number >= 0 else BASE for number in numbers]
        step = msgspec.structs.replace(step, linear_writes=list(writes), may_capture_graph=True)
        outcome = runner.run_step(with_adapters(step, starts, adapted_from))
        assert outcome is not None
        return outcome

    numbers = [LORA, DORA, BASE, IA3, LORA]
    # The last sequence has an activated LoRA, which acts from its second decode step on.
    adapted_from = [0, 0, 0, 0, len(PROMPT) - 4 + 1]
    step = prefill_step(RULES, blocks)
    outcomes = [
        run(
            step,
            numbers,
            write(LORA, linears("lora", 1)),
            write(DORA, linears("dora", 2, by_parts=True, rank=18)),
            write(IA3, linears("ia3", 3)),
        )
    ]

    def decode(numbers: Sequence[int], *writes: AdapterLinearsWrite) -> None:
        nonlocal step
        step = next_step(step, outcomes[-1], lambda slot, token: 5 + 7 * slot + len(outcomes))
        outcomes.append(run(step, numbers, *writes))

    decode(numbers)
    decode(numbers)
    decode([BASE] * 5)
    # Another adapter replaces the LoRA, and a second one is loaded beside it.
    decode(
        numbers,
        write(LORA, linears("lora", 4, rank=7, targets=("linear_qkv", "linear_fc2"))),
    )
    wide = linears("lora", 5, rank=20, by_parts=True)
    decode([WIDE, DORA, LORA, BASE, WIDE], write(WIDE, wide))
    # A new adapter is written over the range of one that no sequence uses.
    decode([DORA, WIDE, DORA, BASE, BASE], write(DORA, linears("ia3", 6)))
    if has_bottlenecks:
        post = write(IA3, linears("bottleneck-post", 8))
        decode([LORA, WIDE, BASE, IA3, LORA], write(LORA, linears("bottleneck", 7)), post)
    return outcomes[1:]


def check_equal_outcomes(
    actual: Sequence[Outcome], expected: Sequence[Outcome], tolerance: float
) -> None:
    """Check the tokens and the log-probabilities of the steps of two runners."""
    for index, (outcome, other) in enumerate(zip(actual, expected, strict=True)):
        assert (outcome.faults, outcome.stuck) == (other.faults, other.stuck)
        assert outcome.tokens == other.tokens, index
        for score, other_score in zip(outcome.scores, other.scores, strict=True):
            assert abs(score.logprob - other_score.logprob) < tolerance, index
