"""Asynchronous scheduling: the steps in flight, and the decodes that can be planned early.

A step is in flight from its plan to its outcome. Each pipeline stage runs one step. Asynchronous
scheduling plans one more step (an early step) while these steps run, before the tokens of the last
planned step are known. The early step has only decodes, and its plan must not depend on these
tokens. Therefore each sequence of the last planned step that has not ended must fulfill two
conditions:

- It samples a token in that step, as a decode or as the last chunk of a prefill.
- It has no sampling rule that depends on earlier output (`Sequence.has_stateless_sampling`).

If a sequence ends with the last planned step, the token that the early step samples for the
sequence is discarded. Admissions and prefills are not planned early: they wait until a pipeline
stage has no step.

Asynchronous scheduling and speculative decoding exclude each other, for two reasons:

- Drafts are proposed from the last token, which is not known when an early step is planned.
- The token positions of the next step depend on the number of draft tokens that are accepted.

Therefore `ServerConfig.uses_async_scheduling` returns False if `speculate_tokens_max` is not 0, and
`Scheduler` asserts that speculative decoding and asynchronous scheduling are not combined.
"""

from collections import deque
from dataclasses import dataclass

from serving.messages import Step
from serving.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was planned and has no outcome yet, with its sequences in the step's order."""

    step: Step
    sequences: list[Sequence]
    prompt_tokens: int  # Number of tokens of the step's prefill chunks.


class InFlightSteps:
    """The steps that were planned and have no outcome yet, oldest first.

    `stages`: the number of pipeline stages, each of which runs one step.
    """

    def __init__(self, stages: int, *, async_scheduling: bool) -> None:
        self._stages = stages
        self._async_scheduling = async_scheduling
        self._steps: deque[InFlightStep] = deque()

    def append(self, in_flight: InFlightStep) -> None:
        self._steps.append(in_flight)

    def pop_oldest(self, step_id: int) -> InFlightStep:
        """Remove the oldest step, whose outcome has arrived."""
        in_flight = self._steps.popleft()
        assert step_id == in_flight.step.step_id, (
            f"received the outcome of step {step_id}, but the oldest step in flight is "
            f"{in_flight.step.step_id}"
        )
        return in_flight

    @property
    def is_full(self) -> bool:
        """Whether every pipeline stage has a step."""
        return len(self._steps) >= self._stages

    @property
    def can_plan_early(self) -> bool:
        """Whether an early step may be planned, although every pipeline stage has a step."""
        return self._async_scheduling and len(self._steps) == self._stages

    def early_decodes(self) -> list[Sequence]:
        """The sequences that decode in an early step, after the last planned step.

        These are the sequences of the last planned step that have not ended and do not reach their
        length limit with the token of that step.

        The list is empty, and no early step can be planned, if a sequence of the last planned step
        has not ended and meets one of these conditions:

        - It samples no token in that step, because it is in the middle of its prefill.
        - It has a sampling rule that depends on earlier output.
        """
        last = self._steps[-1]
        continuing = list[Sequence]()
        for sequence, draws in zip(last.sequences, last.step.draws, strict=True):
            if sequence.end_reason is not None:
                continue
            if not draws or not sequence.has_stateless_sampling:
                return []
            if len(sequence.tokens) + 1 < sequence.tokens_max:
                continuing.append(sequence)
        return continuing
