"""Steps for a model runner that captures CUDA graphs, and their sampling parameters."""

from collections.abc import Callable

from gpt.sampling_params import SamplingParams
from serving.messages import BlockTableUpdate, Outcome, SlotInit, Step
from tests.support.models import CLASSIC

V = CLASSIC.vocab_size
PROMPT = [7, 3, 90, 12, 5, 44, 61, 2, 18]
RULES = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(temperature=4.0, seed=5, top_p=0.95),
    SamplingParams(temperature=3.0, seed=7, logprobs=2),
    SamplingParams(logprobs=3, repetition_penalty=1.3),
    SamplingParams(min_new_tokens=4, stop_token_ids=tuple(range(0, V, 2))),
]


def prefill_step(rules: list[SamplingParams], blocks: int = 6) -> Step:
    """A prefill step of all slots: prompts of different lengths, each in `blocks` blocks."""
    slots = range(len(rules))
    lengths = [len(PROMPT) - slot for slot in slots]
    return Step(
        1,
        slots=list(slots),
        past=[0] * len(rules),
        lengths=lengths,
        token_ids=[token for length in lengths for token in PROMPT[:length]],
        draws=[True] * len(rules),
        prompt_score_counts=[0] * len(rules),
        slot_inits=[
            SlotInit(slot, rule, PROMPT[:length], [])
            for slot, rule, length in zip(slots, rules, lengths, strict=True)
        ],
        block_table_updates=[
            BlockTableUpdate(slot, 0, list(range(1 + blocks * slot, 1 + blocks * (slot + 1))))
            for slot in slots
        ],
    )


def next_step(step: Step, outcome: Outcome, ids: Callable[[int, int], int]) -> Step:
    """The decode step after `step`; `ids` maps a slot and its drawn token to the next input."""
    count = len(step.slots)
    return Step(
        step.step_id + 1,
        slots=step.slots,
        past=[past + length for past, length in zip(step.past, step.lengths, strict=True)],
        lengths=[1] * count,
        token_ids=[ids(slot, token) for slot, token in enumerate(outcome.tokens)],
        draws=[True] * count,
        prompt_score_counts=[0] * count,
    )
