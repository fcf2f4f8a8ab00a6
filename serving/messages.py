"""Messages between front end, engine loop and ranks: msgpack structs (Submission, Step, Outcome).

The front end sends `Submission`s to the engine loop and receives `Update`s; the engine loop sends
each `Step` to every rank and receives its `Outcome` from the last pipeline stage: one message per
step in each direction. A step describes all work of a rank, and contains no scheduling policy.
Messages are plain data: nothing is pickled.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from gpt.sampling_params import SamplingParams

ServiceClass = Literal["latency", "throughput"]
# Why the engine loop rejected a submission. "refused": this server can never run the submission;
# "adapter": the adapter is unusable; "full": the queue is at its limit, and a later attempt may
# succeed.
RejectionReason = Literal["refused", "adapter", "full"]
# Why a sequence ended. "scored": its prompt was scored, and it generates no tokens; "cancelled": a
# `Cancel` named the sequence; "fault": its hidden states or logits were not finite; "stuck": its
# guide allows no next token.
EndReason = (
    Literal["stop", "length", "scored", "deadline", "cancelled", "fault", "stuck"] | RejectionReason
)


# An idle engine loop runs a step without sequences, and sends an `Update`, at this interval.
HEARTBEAT_INTERVAL_S = 1.0


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the tag identifies the type."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of the structs inside messages; they have no tag."""


# ------------------------------------------------------------------------ front end -> engine loop


class Guide(_Part, frozen=True):
    """Guided decoding: the format that a completion must match."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str  # By kind: a JSON schema, a regex, a JSON list of strings, or a grammar (EBNF).


class AdapterRef(_Part, frozen=True):
    """Reference to an adapter: digest, row count, file, kind of rows, and adapter weights."""

    digest: str
    row_count: int
    file: str
    # The `kind` in the adapter's card (metadata). "rows": embeddings; "prefix": keys and values.
    kind: str = "rows"
    # Adapter weights (gpt/linear_adapter.py): the number of linears and parts, the bytes of all
    # of them in fp32, and the bytes on the rank that needs the most. 0: the adapter changes none.
    linear_count: int = 0
    linear_bytes: int = 0
    rank_bytes: int = 0
    # The identity of the file when its content was checked (gpt/files/file_identity.py).
    identity: tuple[int, ...] = ()

    @property
    def changes_linears(self) -> bool:
        return self.linear_count > 0

    @property
    def has_pool_rows(self) -> bool:
        """Whether the adapter has rows that must be in the adapter pool."""
        return self.kind == "rows"

    @property
    def uses_device_pools(self) -> bool:
        """Whether a part of the adapter is in the adapter pool or in the adapter memory."""
        return self.has_pool_rows or self.changes_linears

    @property
    def is_prefix(self) -> bool:
        """Whether the rows are keys and values, stored in KV blocks.

        Other rows are embeddings, stored in the adapter pool.
        """
        return self.kind == "prefix"


class Submission(_Message, frozen=True):
    """One sequence to complete. A request for several answers or tasks is several submissions."""

    sequence_id: int  # The sender chooses it, and does not reuse it.
    prompt: list[int]  # An id >= vocabulary size is a virtual token: vocabulary size + adapter row.
    sampling: SamplingParams
    adapter_ref: AdapterRef | None = None
    # The queue is fair between tenants. A tenant's cached blocks are not used for other tenants,
    # unless shared_prefix_cache is set.
    tenant: str = ""
    service: ServiceClass = "latency"
    priority: int = 0  # Higher runs first.
    deadline: float | None = None  # On the monotonic clock, which all processes of a node share.
    guide: Guide | None = None
    # Tokens that were generated before the ranks were lost, or by another server; generation
    # continues after them.
    output_tokens: list[int] = []
    # With prompt_logprobs: number of leading prompt tokens without reported scores.
    unscored_tokens: int = 0
    # Part of the keys of the sequence's cached blocks, so that only sequences with an equal salt
    # share them.
    cache_salt: str = ""
    # The position of the first token on which the adapter's weights act: 0, or the
    # position of the invocation of an activated LoRA.
    adapted_from: int = 0


class Cancel(_Message, frozen=True):
    """End these waiting or running sequences; the last output of each has the end "cancelled"."""

    sequence_ids: list[int]


class DumpFlightRecorder(_Message, frozen=True):
    """Write the recent steps to `path`.

    `with_token_ids`: also write the token ids, which reveal prompts.
    """

    path: str
    with_token_ids: bool = False


class Close(_Message, frozen=True):
    """End the engine loop and the ranks at once; sequences get no further output."""


ToEngineLoop = Submission | Cancel | DumpFlightRecorder | Close

# ------------------------------------------------------------------------ engine loop -> front end


class TokenScore(_Part, frozen=True):
    """A token's log-probability, its rank in the vocabulary (1 = best) and the top alternatives.

    `tops` is sorted, best first; it is empty if no alternatives were requested.
    """

    logprob: float
    rank: int = 0
    tops: list[tuple[int, float]] = []  # Token id and log-probability.


class Phases(_Part, frozen=True):
    """Time until a sequence's first token, split into phases. The engine loop measures it.

    If a sequence is preempted before its first token, the repeated prefill counts in `prefill_s`.
    """

    # Sum of three waits: for the adapter, in the queue, and for another sequence that computes the
    # same prefix (its blocks then come from the prefix cache).
    queue_s: float
    prefill_s: float  # (Time to the first token) - `queue_s`: the prompt is computed in this time.
    # Beam search only: decode time of the tokens that are delivered together with the first token.
    decode_s: float = 0.0


class SequenceOutput(_Part, frozen=True):
    """The output of a step for one sequence."""

    sequence_id: int
    tokens: list[int] = []
    scores: list[TokenScore] = []  # One per token, if logprobs were requested.
    # Scores of the prompt's tokens from index `Submission.unscored_tokens` on, in order, each sent
    # once. None for a token without a score: the prompt's first token and virtual tokens.
    prompt_scores: list[TokenScore | None] = []
    end: EndReason | None = None
    # Text for the caller. Set if `end` is a `RejectionReason`, "fault" or "stuck".
    reason: str = ""
    cached_tokens: int = 0  # Prompt tokens found in the prefix cache; sent once, with `phases`.
    phases: Phases | None = None  # With the first token, or with the end "scored".


def merge_outputs(outputs: Sequence[SequenceOutput]) -> SequenceOutput:
    """Merge the outputs of one sequence from several steps into one output."""
    if len(outputs) == 1:
        return outputs[0]
    return msgspec.structs.replace(
        outputs[-1],
        tokens=[token for output in outputs for token in output.tokens],
        scores=[score for output in outputs for score in output.scores],
        prompt_scores=[score for output in outputs for score in output.prompt_scores],
        cached_tokens=max(output.cached_tokens for output in outputs),
        phases=next((output.phases for output in outputs if output.phases is not None), None),
    )


class EngineStats(_Part, frozen=True):
    """Load of the engine, in sequences and KV blocks.

    Sequences use `blocks_held` of the `blocks`, in each KV group the number in `blocks_by_group`.
    The prefix cache keeps `blocks_cached` more, which no sequence uses.
    """

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    # All counts from here on are totals since the start of the ranks, unless their comments say
    # something else.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    made_tokens: int = 0  # Generated tokens.
    preemptions: int = 0
    steps: int = 0
    adapters_resident: int = 0  # Adapters on the device now.
    adapter_loads: int = 0  # Copies of adapters onto the device.
    drafted_tokens: int = 0  # Draft tokens that were verified.
    accepted_tokens: int = 0  # Draft tokens that were accepted.
    replayed_steps: int = 0  # Steps that replayed a CUDA graph.
    early_steps: int = 0  # Steps that were planned before the previous step's tokens were known.
    compiled_kernels: int = 0  # Kernels that Triton compiled on any rank after the warm-up.
    # CUDA graph captures of rank 0 that failed. After a failure, steps run without graphs.
    failed_captures: int = 0
    blocks_by_group: list[int] = []  # Empty before the first step.
    adapter_evictions: int = 0  # Adapters that left the device for others.
    # Bytes of the adapter memory on each rank that adapters have now; not a total.
    adapter_memory_bytes: int = 0


class Ready(_Message, frozen=True):
    """The ranks have loaded the model and accept submissions."""

    # Capacity of the KV cache, in tokens that are in no sequence behind a window.
    kv_tokens: int
    weight_bytes: int  # Sum over all ranks.
    dtype: str
    # Comparison of the model's logits with the checkpoint's proof (reference logits): largest
    # difference, its limit, number of positions with the same best token, number of all positions.
    proof: list[float] | None = None
    batch_invariant: bool = False  # A sequence's results are bit-identical in every batch.
    notes: list[str] = []  # Log texts that say which fast paths are unavailable, and why.
    # Effect of quantized weights: mean KL divergence in nats, fraction of positions with the same
    # best token, number of all positions.
    divergence: list[float] | None = None
    # The memory that the largest step needs beside the weights and the KV cache, on the rank that
    # needs the most; 0 on a CPU, where it is not measured.
    step_bytes: int = 0
    # Capacity of the KV cache for one sequence; more than `kv_tokens` if layers have windows, which
    # free blocks while the sequence runs. 0: it is `kv_tokens`.
    sequence_kv_tokens: int = 0
    kv_blocks: int = 0  # Blocks of the KV cache that sequences of all KV groups can use.


class StepSize(_Part, frozen=True):
    """The size of a step, summed over its sequences."""

    tokens: int = 0  # New tokens.
    context_tokens: int = 0  # Tokens before the new ones: the sum of `Step.past`.


class StepTime(_Part, frozen=True):
    """The size of a completed step, and its duration."""

    tokens: int
    context_tokens: int
    seconds: float


class Update(_Message, frozen=True):
    """Outputs and statistics, the steps that were completed, and the steps that are in flight.

    Both lists of steps are in launch order. Steps without new tokens, such as heartbeats, are left
    out.
    """

    outputs: list[SequenceOutput]
    stats: EngineStats
    completed_steps: list[StepTime] = []  # Since the last update.
    # Also has the step that the engine loop launches directly after it sends this message, if any.
    steps_in_flight: list[StepSize] = []
    # By digest: whether the adapter was put on the device (True) or evicted from it (False), for
    # each adapter with such a change since the last update. An adapter's last change counts.
    adapter_changes: dict[str, bool] = {}


class WarmingUp(_Message, frozen=True):
    """The ranks have loaded the weights, and are running warm-up steps."""


class KernelCompilation(_Message, frozen=True):
    """Triton begins to compile a kernel on a rank, or has compiled it.

    A step that waits for a compilation is not hung.
    """

    kernel: str
    seconds: float | None = None  # None: the compilation begins.


class Failed(_Message, frozen=True):
    """The ranks end for this reason."""

    reason: str
    is_permanent: bool = False  # A restart would fail the same way; an operator must fix the cause.


FromEngineLoop = WarmingUp | Ready | Update | KernelCompilation | Failed

# ----------------------------------------------------------------------------- engine loop -> ranks


class SlotInit(_Part, frozen=True):
    """Assign a slot to a sequence; the slot's previous state is discarded."""

    slot: int
    sampling: SamplingParams
    prompt: list[int]  # Vocabulary ids; -1 for a virtual token.
    output_tokens: list[int]  # Tokens generated before a preemption or before ranks were lost.
    guide: Guide | None = None


class BlockTableUpdate(_Part, frozen=True):
    """Write `blocks` into the block table of a slot, from index `start` on.

    Block 0 stands for a block that was freed, because it is behind the window of its KV group.
    """

    slot: int
    start: int
    blocks: list[int]
    group: int = 0  # The KV group; a slot has a block table in each.


class AdapterRowsWrite(_Part, frozen=True):
    """Copy an adapter's rows into the adapter pool on the device."""

    start: int  # First row of the pool to write.
    digest: str
    data: bytes = b""  # The rows, fp32, contiguous. The engine loop sets them before the launch.


class TensorBytes(_Part, frozen=True):
    """A tensor: its shape, and its fp32 elements, contiguous."""

    shape: list[int]
    # Read only. `torch.frombuffer` warns about immutable `bytes`. In the process of its sender it
    # may be a memoryview, which is encoded likewise.
    data: bytearray


class LinearWrite(_Part, frozen=True):
    """An adapter's change of one linear or part: the fields of `LinearAdapter`, unsharded."""

    key: str
    scale: float
    tensors: dict[str, TensorBytes]


class AdapterLinearsWrite(_Part, frozen=True):
    """Copy an adapter's weights, or some of them, into the adapter memory of each rank.

    The changes are numbered in the order of their keys. The write of the first change begins a new
    adapter at `start`; later writes continue behind it.
    """

    start: int  # First byte of the adapter in the adapter memory.
    nbytes: int  # Of the adapter there.
    digest: str
    first: int
    count: int
    linears: list[LinearWrite] = []  # The engine loop sets them before the launch.


class PrefixKVWrite(_Part, frozen=True):
    """Copy `count` rows of a prefix adapter's keys and values into KV blocks.

    Each rank writes only the keys and values of its own layers and KV heads.
    """

    digest: str
    start: int  # First row; row i of a prefix adapter has position i in the sequence.
    count: int
    # The sequence's blocks in the first KV group, from the block of position `start` on.
    blocks: list[int]
    data: bytes = b""  # The rows, fp32, contiguous. The engine loop sets them before the launch.
    other_group_blocks: list[list[int]] = []  # `blocks` in each of the other KV groups.


class Step(_Message, frozen=True):
    """The work of one step. Every rank receives the same message.

    `slots`, `past`, `lengths`, `draws`, `prompt_score_counts` and a non-empty `draft_counts` have
    one entry per sequence. Before the forward pass, ranks apply `block_clears`, `block_copies`,
    `adapter_writes`, `linear_writes`, `prefix_writes`, `slot_inits` and `block_table_updates`. This
    order matters:

    - A copy may have a cleared block as its target.
    - A prefix write may overwrite the source block of a copy.
    - A slot init empties the block table of its slot, which an update then fills.

    A token id >= the vocabulary size is vocabulary size + row of the adapter pool; -1 is the token
    that the slot sampled last. A step without sequences is a heartbeat; it has an `Outcome` too.
    """

    step_id: int
    slots: list[int] = []
    past: list[int] = []  # For each sequence, the number of its tokens in the KV cache.
    lengths: list[int] = []  # For each sequence, the number of its new tokens.
    token_ids: list[int] = []  # All new tokens, concatenated in sequence order.
    # For each sequence, whether tokens are sampled. A sequence with n draft tokens (`draft_counts`)
    # samples one token after each of its last n + 1 new tokens; n is 0 without draft tokens.
    draws: list[bool] = []
    # For each sequence, the number n of prompt tokens that this step scores; 0: no scores. The
    # logits of the sequence's new token i (0 <= i < n) score the token that follows it in the
    # prompt (`SlotInit.prompt`).
    prompt_score_counts: list[int] = []
    slot_inits: list[SlotInit] = []
    block_table_updates: list[BlockTableUpdate] = []
    # (source, target) blocks; all sources are read before any target is written.
    block_copies: list[tuple[int, int]] = []
    block_clears: list[int] = []  # Blocks to zero, because they may hold NaN or infinity.
    adapter_writes: list[AdapterRowsWrite] = []
    # For each sequence, how many of its last new tokens are draft tokens. Empty: no sequence has
    # draft tokens.
    draft_counts: list[int] = []
    prefix_writes: list[PrefixKVWrite] = []
    linear_writes: list[AdapterLinearsWrite] = []
    # For each sequence, the first byte of its adapter in the adapter memory, and the position of
    # the first token on which the adapter's weights act; -1: no adapter changes linears.
    # Both empty: there is no such adapter in the step.
    adapter_starts: list[int] = []
    adapted_from: list[int] = []
    # Whether ranks may capture a CUDA graph, which takes up to seconds: the graph of the step's
    # batch size, or, if the step has no sequences, the largest graph that is missing.
    may_capture_graph: bool = False


class Halt(_Message, frozen=True):
    """Tells a rank to end."""


ToRank = Step | Halt


class Outcome(_Message, frozen=True):
    """The result of a step, from the last pipeline stage."""

    step_id: int
    # For each sequence whose `draws` is true, in the step's order: one token, and one more for each
    # of its draft tokens.
    tokens: list[int] = []
    # One per token if any sequence of the step requested logprobs, else empty. A token whose
    # sequence did not request them has a placeholder.
    scores: list[TokenScore] = []
    # One list for each sequence whose `prompt_score_counts` is not 0, in order.
    prompt_scores: list[list[TokenScore]] = []
    faults: list[int] = []  # Sequences (indices in the step) whose computed values are not finite.
    # Duration on the last stage: (time at which the step's tokens are known) - max(arrival of the
    # step, end of the previous step).
    seconds: float = 0.0
    stuck: list[int] = []  # Sequences (indices in the step) whose guide allows no next token.
    replayed: bool = False  # The step replayed a CUDA graph.


encode = msgspec.msgpack.Encoder().encode
decode_to_engine_loop = msgspec.msgpack.Decoder(ToEngineLoop).decode
decode_from_engine_loop = msgspec.msgpack.Decoder(FromEngineLoop).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
