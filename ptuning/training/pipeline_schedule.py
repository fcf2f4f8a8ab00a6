"""Pipeline schedules as lists of passes: 1F1B, interleaved schedule (less bubble), forward-only.

Each stage executes its own list and waits for the messages of its neighbors. The stages must never
deadlock; a test simulates the lists of all stages. The interleaved schedule is built for a number
of micro-batches that is rounded up to a multiple of `stages`; then the passes of the added
micro-batches are removed. The remaining passes keep their order, so the removal cannot cause a
deadlock. This module does not execute the passes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """Forward or backward pass of one micro-batch through one model chunk of this stage."""

    forward: bool
    micro_batch: int
    chunk: int = 0


def schedule_forward_only(stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """Return the schedule without backward passes, for validation. It is the same on all stages."""
    return _forward_passes(stages, micro_batches, chunks)


def schedule_1f1b(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return the 1F1B schedule of a stage.

    The stage stores the activations of at most `stages - stage` micro-batches. This is the schedule
    with flushes (PipeDream-Flush), https://arxiv.org/abs/2006.09503.
    """
    warmup_passes = stages - stage - 1
    forwards = [Pass(True, micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Pass(False, micro_batch) for micro_batch in range(micro_batches)]
    return _alternate_passes(forwards, backwards, warmup_passes)


def schedule_interleaved_1f1b(
    stage: int, stages: int, micro_batches: int, chunks: int
) -> list[Pass]:
    """Return Megatron's interleaved 1F1B schedule, https://arxiv.org/abs/2104.04473.

    Its bubble is `chunks` times smaller than the bubble of 1F1B. Micro-batches pass through the
    chunks in groups of `stages`: a stage computes its first chunk for all micro-batches of a group,
    then its second chunk for all of them, and so on. When a stage begins its second chunk, the
    first micro-batch of the group has passed the first chunks of all stages.
    """
    if chunks == 1:
        return schedule_1f1b(stage, stages, micro_batches)
    padded_micro_batches = -(-micro_batches // stages) * stages
    forwards = _forward_passes(stages, padded_micro_batches, chunks)
    backwards = [
        Pass(False, scheduled_pass.micro_batch, chunks - 1 - scheduled_pass.chunk)
        for scheduled_pass in forwards
    ]
    warmup_passes = 2 * (stages - stage - 1) + (chunks - 1) * stages
    passes = _alternate_passes(forwards, backwards, warmup_passes)
    return [
        scheduled_pass for scheduled_pass in passes if scheduled_pass.micro_batch < micro_batches
    ]


def _forward_passes(stages: int, micro_batches: int, chunks: int) -> list[Pass]:
    """Return the forward passes, ordered by group of micro-batches, chunk and micro-batch.

    A group has `stages` micro-batches; the last group may have fewer.
    """
    return [
        Pass(True, micro_batch, chunk)
        for start in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for micro_batch in range(start, min(start + stages, micro_batches))
    ]


def _alternate_passes(
    forwards: list[Pass], backwards: list[Pass], warmup_passes: int
) -> list[Pass]:
    """Return `warmup_passes` forward passes, then pairs of a forward and a backward pass.

    The remaining backward passes are at the end.
    """
    passes = forwards[:warmup_passes]
    for forward, backward in zip(forwards[warmup_passes:], backwards, strict=False):
        passes += [forward, backward]
    return passes + backwards[max(0, len(forwards) - warmup_passes) :]
