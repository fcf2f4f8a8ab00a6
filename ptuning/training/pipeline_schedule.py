"""Schedules of a pipeline: which micro-batch passes which chunk of a stage when, as plain lists.

A stage follows its own list; what it needs from its neighbours, it waits for. Lists of all stages
fit together if nobody ever waits in a circle, which a test proves by playing them. Rounds that are
not full are planned as if they were, and what does not exist is left out: what remains keeps its
order, so no new circle can arise. Knows no model and no messages.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one chunk of this stage: forward, or its gradient back."""

    forward: bool
    micro: int
    chunk: int = 0


def forward_only(stages: int, micros: int, chunks: int = 1) -> list[Pass]:
    """No gradients, as in validation; the same for each stage."""
    return _forwards(stages, micros, chunks)


def one_f_one_b(stage: int, stages: int, micros: int) -> list[Pass]:
    """One forward, one backward: no stage holds more micro-batches than stages follow, and its own.

    https://arxiv.org/abs/2006.09503, the schedule with flushes.
    """
    ahead = stages - stage - 1
    forwards = [Pass(True, micro) for micro in range(micros)]
    backwards = [Pass(False, micro) for micro in range(micros)]
    return _one_by_one(forwards, backwards, ahead)


def interleaved(stage: int, stages: int, micros: int, chunks: int) -> list[Pass]:
    """The same over several chunks a stage, in Megatron's order: bubbles are `chunks` times fewer.

    As many micro-batches as there are stages pass a chunk, then the next one, as by then the first
    of them is back at the first stage. https://arxiv.org/abs/2104.04473
    """
    if chunks == 1:
        return one_f_one_b(stage, stages, micros)
    whole = -(-micros // stages) * stages
    forwards = _forwards(stages, whole, chunks)
    backwards = [Pass(False, one.micro, chunks - 1 - one.chunk) for one in forwards]
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
    passes = _one_by_one(forwards, backwards, ahead)
    return [one for one in passes if one.micro < micros]


def _forwards(stages: int, micros: int, chunks: int) -> list[Pass]:
    """Rounds of as many micro-batches as there are stages, each through all chunks."""
    return [
        Pass(True, micro, chunk)
        for start in range(0, micros, stages)
        for chunk in range(chunks)
        for micro in range(start, min(start + stages, micros))
    ]


def _one_by_one(forwards: list[Pass], backwards: list[Pass], ahead: int) -> list[Pass]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    passes = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        passes += [forward, backward]
    return passes + backwards[max(0, len(forwards) - ahead) :]
