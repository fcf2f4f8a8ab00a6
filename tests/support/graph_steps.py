"""Steps for a runner that records them, and the rules of their sampling."""

from collections.abc import Callable

from gpt.sampling_params import Sampling
from serving.messages import Begin, Outcome, Step, Table
from tests.support.models import CLASSIC

V = CLASSIC.vocab_size
PROMPT = [7, 3, 90, 12, 5, 44, 61, 2, 18]
RULES = [
    Sampling(max_new_tokens=9),
    Sampling(temperature=4.0, seed=5, top_p=0.95),
    Sampling(temperature=3.0, seed=7, logprobs=2),
    Sampling(logprobs=3, repetition_penalty=1.3),
    Sampling(min_new_tokens=4, stop_token_ids=tuple(range(0, V, 2))),
]


def begun(rules: list[Sampling], blocks: int = 6) -> Step:
    """All slots, each with its prompt, of another length, in so many blocks of its own."""
    slots = range(len(rules))
    lengths = [len(PROMPT) - slot for slot in slots]
    return Step(
        1,
        slots=list(slots),
        past=[0] * len(rules),
        lengths=lengths,
        ids=[token for length in lengths for token in PROMPT[:length]],
        draws=[True] * len(rules),
        scores=[0] * len(rules),
        begins=[
            Begin(slot, rule, PROMPT[:length], [])
            for slot, rule, length in zip(slots, rules, lengths, strict=True)
        ],
        tables=[
            Table(slot, 0, list(range(1 + blocks * slot, 1 + blocks * (slot + 1))))
            for slot in slots
        ],
    )


def after(step: Step, outcome: Outcome, ids: Callable[[int, int], int]) -> Step:
    """The next token of each; `ids` of its place and what was drawn."""
    count = len(step.slots)
    return Step(
        step.number + 1,
        slots=step.slots,
        past=[past + length for past, length in zip(step.past, step.lengths, strict=True)],
        lengths=[1] * count,
        ids=[ids(place, token) for place, token in enumerate(outcome.tokens)],
        draws=[True] * count,
        scores=[0] * count,
    )
