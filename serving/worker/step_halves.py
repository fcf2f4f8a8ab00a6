"""Step halves: a step whose memory does not suffice, divided into two steps of about half the size.

The halves contain only what the forward pass and the sampling need: the model runner has applied
the step's updates before it divides the step. The module does not import torch.
"""

from itertools import accumulate, chain

from serving.messages import Outcome, Step, TokenScore

Halves = tuple[Step, Step]


def halve_step(step: Step) -> Halves | None:
    """Return the halves, or None for a single token and for a single sequence with draft tokens.

    Several sequences are divided into two groups; the tokens of a single sequence into two runs.
    """
    if len(step.slots) > 1:
        ends = list(accumulate(step.lengths))
        middle = min(range(1, len(ends)), key=lambda count: abs(ends[count - 1] - ends[-1] / 2))
        return _sequence_range(step, 0, middle), _sequence_range(step, middle, len(ends))
    length = step.lengths[0]
    if length < 2 or any(step.draft_counts):
        return None
    middle = length // 2
    score_count = min(middle, step.prompt_score_counts[0])
    return (
        Step(
            step.step_id,
            slots=step.slots,
            past=step.past,
            lengths=[middle],
            token_ids=step.token_ids[:middle],
            draws=[False],
            prompt_score_counts=[score_count],
            adapter_starts=step.adapter_starts,
            adapted_from=step.adapted_from,
        ),
        Step(
            step.step_id,
            slots=step.slots,
            past=[step.past[0] + middle],
            lengths=[length - middle],
            token_ids=step.token_ids[middle:],
            draws=step.draws,
            prompt_score_counts=[step.prompt_score_counts[0] - score_count],
            adapter_starts=step.adapter_starts,
            adapted_from=step.adapted_from,
        ),
    )


def merge_outcomes(step: Step, halves: Halves, outcomes: tuple[Outcome, Outcome]) -> Outcome:
    """Return the outcome of `step`, given the outcomes of its halves."""
    first, second = outcomes
    prompt_scores = [*first.prompt_scores, *second.prompt_scores]
    offset = len(halves[0].slots)
    if len(step.slots) == 1:  # Both halves are of the same sequence.
        offset = 0
        prompt_scores = [list(chain.from_iterable(prompt_scores))] if prompt_scores else []
    scores: list[TokenScore] = []
    if first.scores or second.scores:
        for outcome in outcomes:
            scores += outcome.scores or [TokenScore(0.0)] * len(outcome.tokens)
    return Outcome(
        step.step_id,
        tokens=[*first.tokens, *second.tokens],
        scores=scores,
        prompt_scores=prompt_scores,
        faults=sorted({*first.faults, *(offset + index for index in second.faults)}),
        stuck=sorted({*first.stuck, *(offset + index for index in second.stuck)}),
        replayed=first.replayed and second.replayed,
    )


def _sequence_range(step: Step, start: int, end: int) -> Step:
    """Return the step of sequences `start` to `end`, `end` excluded."""
    first_token = sum(step.lengths[:start])
    token_count = sum(step.lengths[start:end])
    return Step(
        step.step_id,
        slots=step.slots[start:end],
        past=step.past[start:end],
        lengths=step.lengths[start:end],
        token_ids=step.token_ids[first_token : first_token + token_count],
        draws=step.draws[start:end],
        prompt_score_counts=step.prompt_score_counts[start:end],
        draft_counts=step.draft_counts[start:end],
        adapter_starts=step.adapter_starts[start:end],
        adapted_from=step.adapted_from[start:end],
    )
