"""A receiver that keeps what a link tells it, for tests that stand where the engine does."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from gpt.sampling_params import Sampling
from serving.engine.transport import Link
from serving.messages import Made, Ready, Submission, Update


class Ear:
    """Every wait has an end; times are on the monotonic clock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.readies: list[tuple[float, Ready]] = []
        self.losses: list[tuple[float, str]] = []
        self.updates = 0
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, Made] = {}

    def ready(self, facts: Ready) -> None:
        with self._changed:
            self.readies.append((time.monotonic(), facts))
            self._changed.notify_all()

    def update(self, update: Update) -> None:
        with self._changed:
            self.updates += 1
            for made in update.made:
                self.tokens[made.number] += made.tokens
                if made.end is not None:
                    self.ends[made.number] = made
            self._changed.notify_all()

    def lost(self, reason: str) -> None:
        with self._changed:
            self.losses.append((time.monotonic(), reason))
            self._changed.notify_all()

    def until(self, holds: Callable[[], object], within_s: float) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, within_s), f"still not so after {within_s} s"


def complete(
    link: Link,
    ear: Ear,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    first: int,
    within_s: float,
) -> list[list[int]]:
    """Greedy completions of all prompts at once. `first` numbers them; no number is used twice."""
    numbers = range(first, first + len(prompts))
    for number, prompt in zip(numbers, prompts, strict=True):
        link.send(Submission(number, list(prompt), Sampling(max_new_tokens=count)))
    ear.until(lambda: all(number in ear.ends for number in numbers), within_s)
    assert {ear.ends[number].end for number in numbers} == {"length"}
    return [ear.tokens[number] for number in numbers]
