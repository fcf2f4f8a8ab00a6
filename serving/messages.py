"""What passes between the front end, the planner and the ranks: plain data, packed, never pickled.

Three pairs of hands: the front end hands `Submission`s to the planner and gets `Update`s; the
planner hands a `Step` to every rank and gets an `Outcome` from the last stage. Both directions are
one message a step. A step says everything that a rank must do, and nothing of why.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from gpt.sampling_params import Sampling

ServiceClass = Literal["latency", "throughput"]
# Why a sequence never ran. "refused": what it asks cannot; "adapter": its adapter cannot be used;
# "full": more wait and run than may, and later there may be fewer.
Refusal = Literal["refused", "adapter", "full"]
# Why a sequence ended. "cancelled" answers a cancel; "fault": its numbers were not finite; "stuck":
# its guide lets no token follow.
End = Literal["stop", "length", "scored", "deadline", "cancelled", "fault", "stuck"] | Refusal


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the kinds of message; the tag tells which."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message."""


# ---------------------------------------------------------------------------- front end -> planner


class Guide(_Part, frozen=True):
    """What a completion must match."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str  # A JSON schema, a pattern, a JSON list of texts, or a grammar (EBNF).


class Rows(_Part, frozen=True):
    """An adapter's table: which, how many rows, where to read it, and what its rows are."""

    digest: str
    count: int
    file: str
    kind: str = "rows"  # As a card says it.

    @property
    def prefix(self) -> bool:
        """Whether it goes into blocks of keys and values, and not into the adapter pool."""
        return self.kind == "prefix"


class Submission(_Message, frozen=True):
    """One sequence to complete. A request for n answers, or for many tasks, is many of these."""

    number: int  # The caller's name for it; never used twice.
    prompt: list[int]  # An id at or above the vocabulary is a row of `rows`: vocabulary + row.
    sampling: Sampling
    rows: Rows | None = None
    tenant: str = ""  # Who shares the prefix cache with whom, and whose turn it is.
    service: ServiceClass = "latency"
    priority: int = 0  # Higher goes first.
    deadline: float | None = None  # On the monotonic clock, which all processes of a node share.
    guide: Guide | None = None
    made: list[int] = []  # Tokens that were made before, by ranks that are gone: it goes on after.
    unscored: int = 0  # If prompts are scored: its first tokens, whose scores nobody wants.


class Cancel(_Message, frozen=True):
    """End these, whether they wait or run; each gets its `Made` with the end "cancelled"."""

    numbers: list[int]


class Dump(_Message, frozen=True):
    """Write down the last steps. `ids`: with token ids, which may tell what was asked."""

    path: str
    ids: bool = False


class Close(_Message, frozen=True):
    """End at once what runs, and the ranks."""


ToPlanner = Submission | Cancel | Dump | Close

# ---------------------------------------------------------------------------- planner -> front end


class Scored(_Part, frozen=True):
    """A token's log-probability, its rank among all (1: the best), and the best ones, best first.

    `rank` and `tops` are there if alternatives were asked for.
    """

    logprob: float
    rank: int = 0
    tops: list[tuple[int, float]] = []  # Token id and log-probability.


class Phases(_Part, frozen=True):
    """Where the time went until a sequence's first token, by the clock of who plans.

    What is computed again for a preemption before that token is in `prefill_s`.
    """

    queue_s: float  # It waited: for its adapter, for its turn, for an equal prompt; each time.
    prefill_s: float  # The rest: its prompt was computed.
    decode_s: float = 0.0  # Of tokens that are told together with the first: a search's.


class Made(_Part, frozen=True):
    """What a step made for one sequence."""

    number: int
    tokens: list[int] = []
    scores: list[Scored] = []  # One for each token, if they were asked for.
    # For each token of the prompt from the first on, as they become known, in order; None where
    # there is none: for the first token, and for virtual ones.
    prompt_scores: list[Scored | None] = []
    end: End | None = None
    reason: str = ""  # With a refusal, "fault" and "stuck": a sentence for the caller.
    cached_tokens: int = 0  # With the first token: how much of the prompt was in the prefix cache.
    phases: Phases | None = None  # With the first token too, or with the end of one without any.


def joined(parts: Sequence[Made]) -> Made:
    """What was made of one sequence in several steps, as if it had been one."""
    if len(parts) == 1:
        return parts[0]
    return msgspec.structs.replace(
        parts[-1],
        tokens=[token for part in parts for token in part.tokens],
        scores=[score for part in parts for score in part.scores],
        prompt_scores=[score for part in parts for score in part.prompt_scores],
        cached_tokens=max(part.cached_tokens for part in parts),
        phases=next((part.phases for part in parts if part.phases is not None), None),
    )


class Load(_Part, frozen=True):
    """How busy the engine is. Blocks are of KV memory; `held` ones belong to sequences."""

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    prompt_tokens: int = 0  # All counts are since the start.
    cached_tokens: int = 0
    made_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    adapters_resident: int = 0  # On the device.
    adapter_loads: int = 0  # Onto the device, since the start.
    drafted_tokens: int = 0  # Tokens that were guessed and verified,
    accepted_tokens: int = 0  # and those that were right.
    replayed_steps: int = 0  # Of these, those whose work was recorded before,
    early_steps: int = 0  # and those that began before the tokens of the last one were known.


class Ready(_Message, frozen=True):
    """The ranks have the model and answer from now on."""

    kv_tokens: int  # What the pool of keys and values holds.
    weight_bytes: int  # Of all ranks together.
    dtype: str
    proof: list[float] | None = None  # A replayed proof's difference, limit, best and places.
    batch_invariant: bool = False  # A row's numbers are the same to the bit in whatever batch.
    notes: list[str] = []  # For the log: which fast paths are not there, and why.
    # What narrow weights have changed: divergence, share of places with the same best, places.
    drift: list[float] | None = None


class Update(_Message, frozen=True):
    """What the last step made, and how large the step is that runs from now on (0: none does)."""

    made: list[Made]
    load: Load
    step_tokens: int = 0  # New tokens in the step that begins now.
    step_context: int = 0  # And those that they look back at, in all.
    seconds: float = 0.0  # What the last step took.


class Warming(_Message, frozen=True):
    """The ranks have the weights, and run their first steps."""


class Failed(_Message, frozen=True):
    """The ranks end, because of this."""

    reason: str
    refused: bool = False  # A person must put it right: the same again would end the same.


FromPlanner = Warming | Ready | Update | Failed

# --------------------------------------------------------------------------------- planner -> ranks


class Begin(_Part, frozen=True):
    """A sequence takes a slot; whatever was in it is over."""

    slot: int
    sampling: Sampling
    prompt: list[int]  # Ids of the vocabulary; -1 where the prompt has a virtual token.
    made: list[int]  # Tokens made before: it was preempted, or its ranks are gone.
    guide: Guide | None = None


class Table(_Part, frozen=True):
    """More blocks of a sequence: `blocks` are those from place `start` of its table on."""

    slot: int
    start: int
    blocks: list[int]


class Rewrite(_Part, frozen=True):
    """Rows of an adapter go onto the device: fp32, packed, one after another."""

    start: int  # The first row of the pool.
    digest: str
    data: bytes = b""  # Filled in by who has the adapter.


class Fill(_Part, frozen=True):
    """Keys and values of a prefix go into blocks: some of the table's rows, fp32, packed.

    Every rank writes those of its own layers and KV heads.
    """

    digest: str
    start: int  # The first row, and its place in the sequence.
    count: int
    blocks: list[int]  # The sequence's, from the one that has that row on.
    data: bytes = b""  # Filled in by who has the adapter.


class Step(_Message, frozen=True):
    """What every rank does next. Lists of one length belong together, a place for each sequence.

    In this order: `clears`, `copies`, `rewrites`, `fills`, `begins`, `tables`, then one pass of the
    model.
    An id at or above the vocabulary is vocabulary + row of the adapter pool; -1: what its slot drew
    last. A step without sequences is a sign of life, and is answered.
    """

    number: int
    slots: list[int] = []
    past: list[int] = []  # Tokens of each that are in the KV pool already.
    lengths: list[int] = []  # New tokens of each.
    ids: list[int] = []  # All new tokens, one sequence after another.
    # Whether a token is drawn after each one's last new token, and after those before it that
    # `drafts` counts.
    draws: list[bool] = []
    # For each: how many of its new tokens, from the first on, are wanted scores for the token that
    # follows them in the prompt (which `Begin.prompt` has). 0: none.
    scores: list[int] = []
    begins: list[Begin] = []
    tables: list[Table] = []
    copies: list[tuple[int, int]] = []  # Block from, block to; all are read before any is written.
    clears: list[int] = []  # Blocks that held what is not finite, to be zeroed.
    rewrites: list[Rewrite] = []
    # How many of each one's new tokens, the last ones, are guesses: a token is drawn after the one
    # before them and after each. Empty: nothing is guessed.
    drafts: list[int] = []
    fills: list[Fill] = []


class Halt(_Message, frozen=True):
    """The end."""


ToRank = Step | Halt


class Outcome(_Message, frozen=True):
    """What the last stage says of a step."""

    number: int
    # One for each sequence that draws, and one for each of its guesses, in the step's order.
    tokens: list[int] = []
    scores: list[Scored] = []  # One for each token, if any sequence of the step asked.
    prompt_scores: list[list[Scored]] = []  # For each sequence whose `scores` is not 0, in order.
    faults: list[int] = []  # Places in the step of sequences whose numbers are not finite.
    seconds: float = 0.0  # From the step's arrival to its end on the last stage.
    stuck: list[int] = []  # Places of sequences whose guide lets no token follow.
    replayed: bool = False  # Its work was recorded before: a CUDA graph.


encode = msgspec.msgpack.Encoder().encode
to_planner = msgspec.msgpack.Decoder(ToPlanner).decode
from_planner = msgspec.msgpack.Decoder(FromPlanner).decode
to_rank = msgspec.msgpack.Decoder(ToRank).decode
outcome = msgspec.msgpack.Decoder(Outcome).decode
