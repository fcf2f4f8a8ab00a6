"""Job: a request that the engine has accepted, with the sequences that the engine submits for it.

A job has one sequence for each answer; with beam search, one for each live beam of the current
round. Jobs are plain state: they send no messages and use no locks.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpt.errors import PreambleError
from serving.engine.beam_search import BeamSearch, beam_searches
from serving.engine.stream import Stream
from serving.messages import SequenceOutput, merge_outputs
from serving.request import AnswerSpec, Request


@dataclass(eq=False)
class TrackedSequence:
    """A sequence of a job, from its submission to its end."""

    job: "Job"
    answer: AnswerSpec
    # Indices of the request's answers that receive the output: one answer, or all answers of a beam
    # search.
    answer_indices: range
    search: BeamSearch | None = None
    beam_index: int = 0  # Index among the beams of the round.
    priority_boost: int = 0  # Added to the request's priority.
    sequence_id: int = -1  # Id in the engine loop; -1: not submitted.
    # Those of another server, and those that this engine has generated.
    output_tokens: list[int] = field(default_factory=list)
    prompt_scores_received: int = 0  # Prompt tokens whose scores were received.
    # Scores that were received before a loss of ranks and will be received again, because the
    # sequence was submitted again.
    prompt_scores_to_skip: int = 0
    submitted_at: float | None = None  # First submission, on the monotonic clock.
    resubmit_delay_s: float = 0.0  # Time from `submitted_at` to the latest submission.
    finished: bool = False  # The sequence ended, or its output is no longer needed.

    @property
    def has_generated(self) -> bool:
        """Whether this engine has generated a token."""
        return len(self.output_tokens) > len(self.answer.resumed_tokens)


@dataclass(eq=False)
class Job:
    """An accepted request. Its stream is used only on `loop`."""

    request: Request
    deadline: float | None  # On the monotonic clock.
    final_only: bool  # The caller uses no output before the end.
    loop: asyncio.AbstractEventLoop
    sequences: list[TrackedSequence] = field(init=False)
    has_output: bool = False  # Whether a token was received.
    # How often the ranks were lost while sequences of this job were queued or running on them.
    rank_losses: int = 0
    stream: Stream | None = None

    def __post_init__(self) -> None:
        answers, self.sequences = enumerate(self.request.answers), []
        if self.request.beams is None:
            self.sequences = [
                TrackedSequence(
                    self,
                    answer,
                    range(index, index + 1),
                    output_tokens=list(answer.resumed_tokens),
                )
                for index, answer in answers
            ]
        for search in beam_searches(self.request):
            self.start_beam_round(search)

    @property
    def unfinished(self) -> list[TrackedSequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def reserved_beams(self) -> int:
        """Number of sequences reserved for the next rounds of beam searches."""
        unfinished = self.unfinished
        widths = {
            sequence.search.indices: sequence.search.width
            for sequence in unfinished
            if sequence.search is not None
        }
        return sum(widths.values()) - len(unfinished) if widths else 0

    def start_beam_round(self, search: BeamSearch) -> list[TrackedSequence]:
        """Replace the sequences of a search by those of its next round; return the new ones.

        From the second round on, the sequences have the request's priority plus 1. Without this,
        each round would wait in the queue behind requests of the same priority.
        """
        priority_boost = int(search.has_begun)
        beams = [
            TrackedSequence(self, answer, search.indices, search, beam_index, priority_boost)
            for beam_index, answer in enumerate(search.next_round())
        ]
        self.sequences = [
            sequence for sequence in self.sequences if sequence.search is not search
        ] + beams
        return beams


# (job, answer index, output of this answer or error that ends the whole request).
StreamEvent = tuple[Job, int, SequenceOutput | PreambleError]


def is_deferrable(event: StreamEvent) -> bool:
    """Whether delivery may wait for later events of the same answer.

    It may wait if all of these conditions hold:

    - The caller uses only the final answer.
    - The event is not an error, a first token or an end.
    - The answer has no stop string, deadline or time limit, which could end it before the engine
      loop does.
    """
    job, index, payload = event
    if isinstance(payload, PreambleError) or payload.end is not None or payload.phases is not None:
        return False
    has_time_limit = job.deadline is not None or job.request.time_limit_s is not None
    return job.final_only and not has_time_limit and not job.request.answers[index].stop_strings


def coalesce_events(events: Sequence[StreamEvent]) -> list[StreamEvent]:
    """Merge the outputs of each answer into one event; errors come last."""
    outputs: dict[tuple[Job, int], list[SequenceOutput]] = {}
    errors: list[StreamEvent] = []
    for job, index, payload in events:
        if isinstance(payload, SequenceOutput):
            outputs.setdefault((job, index), []).append(payload)
        else:
            errors.append((job, index, payload))
    return [(*key, merge_outputs(parts)) for key, parts in outputs.items()] + errors
