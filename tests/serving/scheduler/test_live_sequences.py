"""Live sequences: lookup by id, and deadlines that expire once."""

from gpt.sampling_params import SamplingParams
from serving.messages import Submission
from serving.scheduler.live_sequences import LiveSequences
from serving.scheduler.sequence import Sequence
from tests.support.fake_ranks import VOCAB_SIZE


def new_sequence(sequence_id: int, deadline: float | None) -> Sequence:
    return Sequence.from_submission(
        Submission(sequence_id, [1], SamplingParams(), deadline=deadline),
        arrival_order=sequence_id,
        vocab_size=VOCAB_SIZE,
        block_tokens=4,
        now=0.0,
    )


def live_sequences(*deadlines: float | None) -> LiveSequences:
    live = LiveSequences()
    for sequence_id, deadline in enumerate(deadlines):
        live.add(new_sequence(sequence_id, deadline))
    return live


def expired_ids(live: LiveSequences, now: float) -> list[int]:
    return [sequence.sequence_id for sequence in live.pop_expired(now)]


def test_get_returns_none_for_a_removed_sequence() -> None:
    live = live_sequences(None, 1.0)
    sequence = live.get(1)
    assert sequence is not None
    live.remove(sequence)
    assert live.get(1) is None
    assert 1 not in live and 0 in live
    assert len(live) == 1


def test_deadlines_expire_once_and_in_order() -> None:
    live = live_sequences(3.0, 1.0, None, 2.0, 9.0)
    assert expired_ids(live, 0.5) == []
    assert expired_ids(live, 3.0) == [1, 3, 0]
    assert expired_ids(live, 3.0) == []


def test_the_deadline_of_an_ended_sequence_does_not_expire() -> None:
    live = live_sequences(1.0, 2.0)
    ended = live.get(0)
    assert ended is not None
    live.remove(ended)
    assert expired_ids(live, 5.0) == [1]


def test_deadlines_of_ended_sequences_are_removed_together() -> None:
    live = live_sequences(*[100.0 + number for number in range(1000)])
    for sequence in list(live)[10:]:
        live.remove(sequence)
    assert expired_ids(live, 1.0) == []
    assert len(live._deadlines) == 10
    assert expired_ids(live, 105.0) == [0, 1, 2, 3, 4, 5]
