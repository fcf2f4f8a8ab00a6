"""Usage metrics: requests and tokens of each tenant and adapter, for the operator and for billing.

The counts are those of the `usage` fields of responses: a prompt that several answers share is
counted once, and a scored continuation counts as generated tokens. A request counts when it is
accepted, its tokens when they are delivered to the protocol. So an interrupted answer has the
tokens that were delivered until then.

The number of combinations of tenant and adapter is bounded. Further combinations are counted under
the name OTHER, first of the adapter and then of the tenant too, so that the sums stay complete.
`serving.service.usage_file` writes the counts to a file.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import NamedTuple, Self

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from serving.config import USAGE_LABELS_MAX
from serving.request import AnswerSpec, Piece, Request

# Stands for all tenants or adapters without counts of their own. No name begins with an underscore.
OTHER = "_other"
HELP_TEXTS = {
    "requests": "Accepted requests, by tenant and adapter.",
    "prompt_tokens": "Prompt tokens without virtual tokens, by tenant and adapter.",
    "virtual_tokens": "Virtual tokens in prompts, by tenant and adapter.",
    "cached_tokens": "Prompt tokens from the prefix cache, by tenant and adapter.",
    "generated_tokens": "Generated tokens, by tenant and adapter.",
}


class UsageKey(NamedTuple):
    """A combination of tenant and adapter. The empty names mean no tenant and the base model."""

    tenant: str
    adapter: str  # The name without a version.


@dataclass(slots=True)
class UsageCounts:
    """The counts of one combination. The names are keys of the usage file."""

    requests: int = 0
    prompt_tokens: int = 0  # Without virtual tokens.
    virtual_tokens: int = 0
    cached_tokens: int = 0  # Prompt tokens, virtual tokens included, from the prefix cache.
    generated_tokens: int = 0

    def __sub__(self, other: Self) -> "UsageCounts":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return UsageCounts(*(count - previous for count, previous in pairs))

    @property
    def is_zero(self) -> bool:
        return not any(astuple(self))


class UsageMeter:
    """The counts of all combinations since the start of the server. Any thread may read them."""

    def __init__(self, labels_max: int = USAGE_LABELS_MAX) -> None:
        """`labels_max`: the maximum number of combinations, those with OTHER included."""
        self._labels_max = labels_max
        self._counts: dict[UsageKey, UsageCounts] = {}
        self.lock = threading.Lock()  # Held to change or read counts.

    def snapshot(self) -> dict[UsageKey, UsageCounts]:
        """Return a copy of all counts."""
        with self.lock:
            return {key: replace(counts) for key, counts in self._counts.items()}

    def open_request(self, request: Request) -> "RequestUsage":
        """Count an accepted request, once for each of its adapters, and return its counter."""
        keys = [
            UsageKey(request.tenant, answer.adapter.partition("@")[0]) for answer in request.answers
        ]
        with self.lock:
            counts = [self._counts_of(key) for key in keys]
            for index in {key: index for index, key in enumerate(keys)}.values():
                counts[index].requests += 1
        return RequestUsage(self, request.answers, counts)

    def _counts_of(self, key: UsageKey) -> UsageCounts:
        """Return the counts of a combination, or of the OTHER combination that stands for it."""
        # Half of the combinations are reserved for tenants without an adapter's name. So a tenant
        # that uses many adapters does not hide the usage of the other tenants.
        key_limit = self._labels_max - 1 if key.adapter == "" else self._labels_max // 2
        choices = ((key, key_limit), (UsageKey(key.tenant, OTHER), self._labels_max - 1))
        for choice, limit in choices:
            if choice in self._counts or len(self._counts) < limit:
                return self._counts.setdefault(choice, UsageCounts())
        return self._counts.setdefault(UsageKey(OTHER, OTHER), UsageCounts())


class RequestUsage:
    """Counts the tokens of one request while its answers are delivered."""

    def __init__(
        self, meter: UsageMeter, answers: Sequence[AnswerSpec], counts: Sequence[UsageCounts]
    ) -> None:
        """`counts`: the counts of each answer; answers may share them."""
        self._meter = meter
        self._answers = answers
        self._counts = counts
        # Answers with the same adapter and prompt share the prompt's tokens: the first of them
        # stands for the prompt. By answer: the index of the first one.
        first_indices: dict[tuple[str, tuple[int, ...]], int] = {}
        self._prompt_indices = [
            first_indices.setdefault((answer.adapter, _prompt_of(answer)), index)
            for index, answer in enumerate(answers)
        ]
        self._started: set[int] = set()  # Indices of the answers with output.

    def record_piece(self, piece: Piece) -> None:
        """Count the tokens of a piece of output."""
        if piece.error is not None and not piece.token_ids:
            return
        index = piece.index
        with self._meter.lock:
            counts = self._counts[index]
            counts.generated_tokens += len(piece.token_ids)
            if piece.finish == "scored":
                counts.generated_tokens += self._answers[index].continuation_tokens
            if self._prompt_indices[index] == index:
                counts.cached_tokens += piece.cached_tokens
                if index not in self._started:
                    self._add_prompt(index)
        self._started.add(index)

    def close(self) -> None:
        """Count the prompts whose first answer has no output, while another answer has."""
        with self._meter.lock:
            for index in {self._prompt_indices[index] for index in self._started} - self._started:
                self._add_prompt(index)

    def _add_prompt(self, index: int) -> None:
        answer, counts = self._answers[index], self._counts[index]
        if answer.resumed_tokens:  # The server that began the answer counted the prompt.
            return
        counts.prompt_tokens += answer.prompt_tokens - answer.continuation_tokens
        counts.virtual_tokens += answer.virtual_tokens


def _prompt_of(answer: AnswerSpec) -> tuple[int, ...]:
    """Return the prompt without the continuation that is scored."""
    return answer.prompt[: len(answer.prompt) - answer.continuation_tokens]


@dataclass(frozen=True)
class UsageCollector(Collector):
    """The counts as Prometheus counters, with the labels tenant and adapter."""

    meter: UsageMeter

    def collect(self) -> Iterator[CounterMetricFamily]:
        snapshot = self.meter.snapshot()
        for field in fields(UsageCounts):
            family = CounterMetricFamily(
                f"preamble_usage_{field.name}",
                HELP_TEXTS[field.name],
                labels=["tenant", "adapter"],
            )
            for key, counts in snapshot.items():
                family.add_metric([key.tenant, key.adapter], getattr(counts, field.name))
            yield family
