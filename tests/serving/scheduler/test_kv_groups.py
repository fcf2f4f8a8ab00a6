"""KV groups in the scheduler: the blocks that sequences hold, and what a prefix match needs."""

import pytest

from gpt.config import GPTConfig
from gpt.kv_groups import kv_groups, layers_per_block
from serving.messages import Step
from tests.support.fake_ranks import text_ids
from tests.support.models import CLASSIC
from tests.support.scheduler_harness import SchedulerHarness

BLOCK_TOKENS = 4
WINDOW = 32
LONG = 4 * WINDOW
# Bytes held / sum over the layers of min(context, window + one block) tokens.
RATIO_MAX = 1.2


def shape(layers: int, pattern: tuple[bool, ...]) -> GPTConfig:
    return CLASSIC.with_fields(
        num_layers=layers,
        moe_layers=(),
        window_size=WINDOW,
        window_layers=tuple(pattern[layer % len(pattern)] for layer in range(layers)),
    )


SHAPES = {
    "Gemma 3 1B": shape(26, (True,) * 5 + (False,)),
    "Gemma 3 27B": shape(62, (True,) * 5 + (False,)),
    "GPT-OSS 20B": shape(24, (True, False)),
    "Mistral": shape(4, (True,)),
}


class KVMeasurement:
    """Compares the KV that is held during decode steps with the bound, in tokens x layers."""

    def __init__(self, config: GPTConfig, *, blocks: int, prefix_cache: bool = True) -> None:
        groups = kv_groups(config)
        self.config = config
        self.layers_per_block = layers_per_block(groups, range(config.num_layers))
        self.harness = SchedulerHarness(
            windows=[group.window for group in groups],
            kv_block_tokens=BLOCK_TOKENS,
            step_tokens_max=16,
            blocks=blocks,
            prefix_cache=prefix_cache,
        )
        self.checked_steps = 0

    def finish(self) -> None:
        while self.harness.step():
            self.check(self.harness.steps[-1])
        self.harness.check_finished()

    def check(self, step: Step) -> None:
        stats = self.harness.scheduler.stats
        contexts = [past + 1 for past in step.past]
        is_decode = set(step.lengths) == {1} and len(step.slots) == stats.running
        if not is_decode or min(contexts) < LONG:
            return
        stored = stats.blocks_held * BLOCK_TOKENS * self.layers_per_block
        needed = sum(
            min(context, context if layer.window_size is None else WINDOW + BLOCK_TOKENS)
            for layer in self.config.layers
            for context in contexts
        )
        assert stored <= RATIO_MAX * needed
        self.checked_steps += 1


@pytest.mark.parametrize("name", SHAPES)
def test_a_long_sequence_holds_little_more_than_its_windows(name: str) -> None:
    measurement = KVMeasurement(SHAPES[name], blocks=2000)
    measurement.harness.submit(text_ids(100), new=60)
    measurement.finish()
    assert measurement.checked_steps > 20


@pytest.mark.parametrize("name", ["Gemma 3 1B", "GPT-OSS 20B"])
def test_sequences_hold_no_more_after_preemption(name: str) -> None:
    # The sequences do not fit together at their full lengths.
    blocks = {"Gemma 3 1B": 240, "GPT-OSS 20B": 110}[name]
    measurement = KVMeasurement(SHAPES[name], blocks=blocks, prefix_cache=False)
    for seed in range(3):
        measurement.harness.submit(text_ids(20, seed), new=150)
    measurement.finish()
    assert measurement.checked_steps > 20
    assert measurement.harness.scheduler.stats.preemptions


@pytest.mark.parametrize("name", SHAPES)
def test_sequences_with_a_cached_prefix_hold_no_more(name: str) -> None:
    measurement = KVMeasurement(SHAPES[name], blocks=2000)
    measurement.harness.submit(text_ids(120), new=30)
    measurement.finish()
    for seed in range(3):
        measurement.harness.submit([*text_ids(120), *text_ids(4, seed)], new=30)
    measurement.finish()
    assert measurement.checked_steps > 40
    assert [measurement.harness.cached_tokens[number] for number in range(4)] == [0, 120, 120, 120]


def test_a_match_needs_only_the_last_tokens_of_a_window_group() -> None:
    """The eviction of blocks behind the window does not shorten the match."""
    harness = SchedulerHarness(windows=[8], blocks=11, running_requests_max=1)
    harness.submit(text_ids(40), new=1)
    harness.finish()
    assert harness.scheduler.stats.blocks_cached == harness.scheduler.stats.blocks == 10
    harness.submit(text_ids(8, 1), new=1)  # Evicts two blocks: the ones that were freed first.
    harness.finish()
    harness.submit(text_ids(40), new=1)
    harness.finish()
    assert harness.cached_tokens[2] == 39


def test_a_sequence_with_windows_may_be_longer_than_the_cache() -> None:
    harness = SchedulerHarness(windows=[8], blocks=7)
    harness.submit(text_ids(100), new=50)
    harness.finish()
    assert harness.last_outputs[0].end == "length"
    mixed_harness = SchedulerHarness(windows=[None, 8], blocks=14)
    # Three blocks for the window, and ten for the rest.
    mixed_harness.submit(text_ids(30), new=11)
    mixed_harness.submit(text_ids(30), new=12)
    mixed_harness.finish()
    assert [mixed_harness.last_outputs[number].end for number in (0, 1)] == ["length", "refused"]


def test_the_prefix_cache_has_a_key_for_each_of_many_groups() -> None:
    harness = SchedulerHarness(windows=[None, *[8] * 299], blocks=9000)
    for _ in range(2):
        harness.submit(text_ids(40), new=1)
        harness.finish()
    assert harness.cached_tokens[1] == 39


def test_decoding_sequences_reserve_no_blocks_for_prefill_chunks() -> None:
    harness = SchedulerHarness(windows=[None, 8], blocks=55, step_tokens_max=64)
    for seed in range(3):
        harness.submit(text_ids(8, seed), new=60)
    for _ in range(41):
        harness.step()
    # Each sequence has 48 tokens, and needs 13 + 3 blocks for its next block of tokens.
    harness.submit(text_ids(8, 3), new=4)  # Needs 3 + 3 blocks: 54 in total.
    harness.step()
    assert harness.scheduler.stats.running == 4
    harness.finish()
