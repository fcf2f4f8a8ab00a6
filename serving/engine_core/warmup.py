"""Warm-up: synthetic steps that allocate all memory and compile kernels.

The prefill step has the largest number of tokens, and the decode steps have the largest number of
sequences, that the scheduler can put into a step. Therefore the steps of requests find memory
allocated and kernels compiled. The watchdog derives its first step time-out from the time of the
prefill step.

The scheduler does not take part. This module assigns slots from 0 on, and blocks from 1 on: block 0
is never allocated. A slot's state from the warm-up is discarded when a sequence gets the slot
(`SlotInit`). This module only builds the steps; `EngineLoop.warm_up` runs them before the first
request.
"""

from gpt.sampling_params import SamplingParams
from serving.config import SchedulerConfig
from serving.messages import BlockTableUpdate, SlotInit, Step
from serving.worker.model_runner import ModelRunner

GREEDY = SamplingParams()
# The new tokens of the sequences of the mixed step, most important first: a prefill chunk, the
# verification of 1 to 3 draft tokens, and a decode token. GPU kernels do not depend on the length
# of a chunk, so it is short.
MIXED_LENGTHS = (32, 2, 1, 4, 3)


def warmup_steps(
    config: SchedulerConfig, block_tokens: int, model_runner: ModelRunner
) -> list[Step]:
    """The six warm-up steps.

    - The largest prefill, twice: the first run allocates memory, the second one is measured.
    - A full decode batch with random sampling.
    - A full decode batch with greedy sampling.
    - A mixed step of sequences with earlier tokens: a prefill chunk, runs of 2 to 4 tokens and a
      decode token. It is not captured as a CUDA graph.
    - A step that zeroes the blocks that the warm-up has written. Their values may be NaN or
      infinity, which must not reach the sequences that use the blocks later.
    """
    context = model_runner.model.config.max_position_embeddings
    sequences_max = min(config.running_requests_max, model_runner.slots)
    lengths: list[int] = []
    tokens_left, free_blocks = config.step_tokens_max, model_runner.blocks - 1
    while tokens_left > 0 and free_blocks > 0 and len(lengths) < sequences_max:
        lengths.append(min(tokens_left, context, free_blocks * block_tokens))
        tokens_left -= lengths[-1]
        free_blocks -= -(-lengths[-1] // block_tokens)
    count = min(sequences_max, model_runner.blocks - 1)
    groups = len(model_runner.windows)
    prefill_step = _synthetic_step(lengths, 0, block_tokens, groups)
    past = min(block_tokens, context) - 1
    greedy_step = _synthetic_step([1] * count, past, block_tokens, groups)
    sampled_step = _synthetic_step(
        [1] * count,
        past,
        block_tokens,
        groups,
        SamplingParams(temperature=1.0, top_p=0.9, top_k=50),
    )
    mixed_step = _synthetic_step(
        _mixed_lengths(sequences_max, past, block_tokens, config, model_runner),
        past,
        block_tokens,
        groups,
    )
    block_max = max(
        table.blocks[-1]
        for step in (prefill_step, greedy_step, mixed_step)
        for table in step.block_table_updates
    )
    return [
        prefill_step,
        prefill_step,
        sampled_step,
        greedy_step,
        mixed_step,
        Step(0, block_clears=list(range(1, block_max + 1))),
    ]


def _mixed_lengths(
    sequences_max: int,
    past: int,
    block_tokens: int,
    config: SchedulerConfig,
    model_runner: ModelRunner,
) -> list[int]:
    """Return the MIXED_LENGTHS of as many sequences as fit, each shortened if it must be."""
    context = model_runner.model.config.max_position_embeddings
    tokens_left, free_blocks = config.step_tokens_max, model_runner.blocks - 1
    lengths: list[int] = []
    for length in MIXED_LENGTHS[:sequences_max]:
        shortened = min(length, tokens_left, context - past, free_blocks * block_tokens - past)
        if shortened <= 0:
            break
        lengths.append(shortened)
        tokens_left -= shortened
        free_blocks -= -(-(past + shortened) // block_tokens)
    return lengths


def _synthetic_step(
    lengths: list[int],
    past: int,
    block_tokens: int,
    groups: int,
    sampling: SamplingParams = GREEDY,
) -> Step:
    """A step with `len(lengths)` sequences; sequence i has `lengths[i]` new tokens.

    Sequence i has slot i and samples a token. The sequences use consecutive blocks, from block 1
    on. Each sequence also has `past` earlier tokens, whose keys and values are arbitrary.
    """
    block_table_updates: list[BlockTableUpdate] = []
    first_block = 1
    for slot, length in enumerate(lengths):
        end_block = first_block + -(-(past + length) // block_tokens)
        blocks = list(range(first_block, end_block))
        # Each KV group writes its keys and values over those of the other groups.
        block_table_updates += [BlockTableUpdate(slot, 0, blocks, group) for group in range(groups)]
        first_block = end_block
    count = len(lengths)
    return Step(
        0,
        slots=list(range(count)),
        past=[past] * count,
        lengths=lengths,
        token_ids=[0] * sum(lengths),
        draws=[True] * count,
        prompt_score_counts=[0] * count,
        slot_inits=[SlotInit(slot, sampling, [0], []) for slot in range(count)],
        block_table_updates=block_table_updates,
    )
