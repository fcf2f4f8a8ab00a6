"""Job: a request that the engine has accepted, as the sequences that it wants of the planner.

One for each answer; or, for beams, one for each that lives in this round of its search, and others
in the next. Plain standing: it sends nothing and locks nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpt.errors import PreambleError
from serving.engine.beam_search import Search, searches
from serving.engine.stream import Stream
from serving.messages import Made, joined
from serving.request import Answer, Request


@dataclass(eq=False)
class Wanted:
    """A sequence on its way."""

    job: "Job"
    answer: Answer
    # Whose places among the request's answers what comes of it is for: its own, or, if it is a
    # beam, those of its search.
    indices: range
    search: Search | None = None
    place: int = 0  # Among the beams of the round.
    lead: int = 0  # Over its request's priority.
    number: int = -1  # As the planner knows it; -1: it does not.
    made: list[int] = field(default_factory=list)
    scored: int = 0  # Tokens of the prompt whose scores came,
    repeated: int = 0  # and how many of them will come again, since ranks were lost.
    sent_at: float | None = None  # When it was first sent to a planner, on the monotonic clock,
    lost_s: float = 0.0  # and how long after that to the one that it is with.
    over: bool = False  # It ended, or nobody wants it any more.


@dataclass(eq=False)
class Job:
    """A request on its way. Its stream is touched only on `loop`."""

    request: Request
    deadline: float | None  # On the monotonic clock.
    whole: bool
    loop: asyncio.AbstractEventLoop
    sequences: list[Wanted] = field(init=False)
    told: bool = False  # Whether a token came.
    losses: int = 0
    stream: Stream | None = None

    def __post_init__(self) -> None:
        answers, self.sequences = enumerate(self.request.answers), []
        if self.request.beams is None:
            self.sequences = [Wanted(self, one, range(i, i + 1)) for i, one in answers]
        for search in searches(self.request):
            self.go_on(search)

    @property
    def left(self) -> list[Wanted]:
        return [sequence for sequence in self.sequences if not sequence.over]

    @property
    def spare(self) -> int:
        """Places that its beams do not fill just now, and may in their next round."""
        left = self.left
        widths = {one.search.indices: one.search.width for one in left if one.search is not None}
        return sum(widths.values()) - len(left) if widths else 0

    def go_on(self, search: Search) -> list[Wanted]:
        """The next round of beams takes the place of the last one.

        One that has begun goes on before others of its priority, as if it had kept its place among
        those that run; else each round would wait for its turn anew.
        """
        lead = int(search.begun)
        beams = [
            Wanted(self, answer, search.indices, search, place, lead)
            for place, answer in enumerate(search.round())
        ]
        self.sequences = [one for one in self.sequences if one.search is not search] + beams
        return beams


# For a request's stream: what was made of the answer with an index, or the end of all.
News = tuple[Job, int, Made | PreambleError]


def waits(news: News) -> bool:
    """Whether nobody can do anything with it yet: its answer is wanted whole, it is neither a first
    token nor an end, and neither its text nor its time can end the answer before the planner does.
    """
    job, index, what = news
    if isinstance(what, PreambleError) or what.end is not None or what.phases is not None:
        return False
    timed = job.deadline is not None or job.request.time_limit_s is not None
    return job.whole and not timed and not job.request.answers[index].stop_strings


def gathered(news: Sequence[News]) -> list[News]:
    """Each answer's news as one; what ends a whole request comes last."""
    made: dict[tuple[Job, int], list[Made]] = {}
    errors: list[News] = []
    for job, index, what in news:
        if isinstance(what, Made):
            made.setdefault((job, index), []).append(what)
        else:
            errors.append((job, index, what))
    return [(*key, joined(parts)) for key, parts in made.items()] + errors
