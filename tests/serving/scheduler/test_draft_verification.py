"""Draft verification: accepted tokens are those that would be sampled without drafts."""

import pytest

from gpt.sampling_params import SamplingParams
from serving.messages import Submission
from serving.scheduler.draft_verification import verify_draft
from serving.scheduler.sequence import Sequence
from tests.support.fake_ranks import VOCAB_SIZE


@pytest.mark.parametrize(
    ("draft", "sampled", "tokens_left", "valid"),
    [
        ([], [8], 9, [8]),
        ([5, 6], [5, 6, 7], 9, [5, 6, 7]),
        ([5, 6], [5, 9, 7], 9, [5, 9]),
        ([5, 6], [9, 6, 7], 9, [9]),  # A draft token after a rejected one is not accepted.
        ([5, 6], [5, 6, 7], 2, [5, 6]),
        ([5, 6], [5, 6, 7], 1, [5]),
        ([3, 6], [3, 6, 7], 9, [3]),  # Token 3 is a stop token.
        ([5, 6], [5, 3, 7], 9, [5, 3]),
        ([5, 6], [5, 6, 3], 9, [5, 6, 3]),
    ],
)
def test_tokens_are_valid_up_to_the_first_rejected_draft_token(
    draft: list[int], sampled: list[int], tokens_left: int, valid: list[int]
) -> None:
    assert verify_draft(draft, sampled, (3,), tokens_left) == valid


def test_verification_changes_none_of_its_arguments() -> None:
    draft = [5, 6]
    sampled = [5, 9, 7]
    verify_draft(draft, sampled, (), 9)
    assert draft == [5, 6]
    assert sampled == [5, 9, 7]


@pytest.mark.parametrize(
    ("draft", "sampled", "accepted", "end"),
    [
        ([], [8], [8], None),
        ([5, 6], [5, 6, 7], [5, 6, 7], None),
        ([5, 6], [5, 9, 7], [5, 9], None),
        ([5, 6], [9, 6, 7], [9], None),
        # Stops at token 3, although the draft was right.
        ([5, 3, 6], [5, 3, 6, 7], [5, 3], "stop"),
        ([5, 6], [5, 3, 7], [5, 3], "stop"),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8], "length"),
        ([5, 6, 7], [5, 6, 7, 3], [5, 6, 7, 3], "stop"),
    ],
)
def test_accepted_tokens_equal_those_without_drafts(
    draft: list[int], sampled: list[int], accepted: list[int], end: str | None
) -> None:
    max_new_tokens = 5 if end == "length" or sampled[-1] == 3 else 6
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(3,))
    sequence = Sequence.from_submission(
        Submission(0, [1, 2], sampling, output_tokens=[5]),
        arrival_order=0,
        vocab_size=VOCAB_SIZE,
        block_tokens=4,
        now=0.0,
    )
    sequence.plan_drafts(draft)
    assert sequence.append_valid_tokens(sampled) == accepted
    assert sequence.tokens == [1, 2, 5, *accepted]
    assert sequence.end_reason == end
    assert sequence.draft_tokens == []
