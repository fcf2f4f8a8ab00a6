"""Who goes on, before it is known what they drew: the step after the one in flight.

It follows by itself where nothing has to be decided: all decode, nobody's choice looks at what was
made, and there are blocks for all. Whoever ends by what it drew was in that step for nothing, and
its row is dropped. Whatever else there is waits until the step in flight is over.
"""

from serving.scheduler.resource_allocator import Room
from serving.scheduler.sequence import Sequence
from serving.scheduler.step_builder import Draft, Flight


def go_on(draft: Draft, flight: Flight, room: Room, block_tokens: int, now: float) -> None:
    """Their next tokens; nobody's, if more hangs on what comes of the step in flight."""
    going = _going(flight, room)
    if sum(_full(one, block_tokens) for one in going) > room.blocks.available:
        return
    for sequence in going:
        room.grow(draft, sequence, _full(sequence, block_tokens), now)
        draft.decode(sequence, known=False)
        sequence.planned_at = now


def _going(flight: Flight, room: Room) -> list[Sequence]:
    """Those who have another token to come, whatever they drew."""
    going = list[Sequence]()
    if room.prompts or any(room.ready.values()):
        return going
    for sequence, draws in zip(flight.sequences, flight.step.draws, strict=True):
        if sequence.ending is not None:
            continue
        one = sequence.submission
        if not draws or one.guide is not None or not one.sampling.stateless:
            return []
        if len(sequence.tokens) + 1 < sequence.most:
            going.append(sequence)
    return going


def _full(sequence: Sequence, block_tokens: int) -> bool:
    return sequence.planned == len(sequence.table) * block_tokens
