"""Submission limits: what can never run is refused with the limit and the remedy."""

import pytest

from gpt.sampling_params import SamplingParams
from serving.messages import AdapterRef, Submission
from tests.support.fake_ranks import VOCAB_SIZE, make_adapter_ref, text_ids, virtual_ids
from tests.support.scheduler_harness import SchedulerHarness


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "adapter_ref", "reason"),
    [
        ([], 4, None, "empty"),
        ([VOCAB_SIZE], 4, None, "outside the vocabulary of 50"),
        ([-1], 4, None, "token id -1"),
        ([VOCAB_SIZE + 2], 4, make_adapter_ref("task", 2), "token id 52"),
        (
            text_ids(30),
            11,
            None,
            "= 41 tokens, but the context allows at most 40; shorten the prompt",
        ),
        (text_ids(30), 2**31, None, "the context allows at most 40"),
        (virtual_ids(9), 4, make_adapter_ref("task", 9), "raise adapter_rows_max"),
    ],
)
def test_submissions_that_can_never_run_are_refused(
    prompt: list[int], max_new_tokens: int, adapter_ref: AdapterRef | None, reason: str
) -> None:
    harness = SchedulerHarness(context=40, adapter_rows_max=8)
    submission = Submission(
        0, prompt, SamplingParams(max_new_tokens=max_new_tokens), adapter_ref=adapter_ref
    )
    rejection = harness.scheduler.add_sequence(submission, 0.0)
    assert rejection is not None
    assert rejection.end == ("adapter" if reason == "raise adapter_rows_max" else "refused")
    assert reason in rejection.reason


def test_a_sequence_may_fill_the_kv_cache_and_not_exceed_it() -> None:
    harness = SchedulerHarness(blocks=1 + 3)
    harness.submit(text_ids(8), 5)
    harness.finish()
    assert harness.last_outputs[0].end == "length"
    rejection = harness.scheduler.add_sequence(
        Submission(1, text_ids(8), SamplingParams(max_new_tokens=6)), 0.0
    )
    assert rejection is not None and "KV cache allows at most 13" in rejection.reason
