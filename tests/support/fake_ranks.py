"""Fake ranks without a model: they execute steps and check every read of the KV cache.

In place of keys and values, a block holds for each token a hash of the tenant and of all tokens up
to this one, which depends on the KV group. A block that is shared wrongly, copied too early or used
after it was freed therefore fails the check when it is read. In a group with a window, only the
tokens in the window are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import (
    AdapterLinearsWrite,
    AdapterRef,
    BlockTableUpdate,
    Outcome,
    PrefixKVWrite,
    Step,
    Submission,
    TokenScore,
)

VOCAB_SIZE = 50
NONFINITE = -1  # In place of a hash: keys or values that are NaN or infinite.
CLEARED = -2
# A token id of the vocabulary, or the digest of an adapter and the number of one of its rows.
TokenIdentity = int | tuple[str, int]


def token_identity(submission: Submission, token: int) -> TokenIdentity:
    if token < VOCAB_SIZE:
        return token
    assert submission.adapter_ref is not None
    return submission.adapter_ref.digest, token - VOCAB_SIZE


def computed_identity(submission: Submission, token: int, position: int) -> TokenIdentity:
    """Return what determines the keys and values of a token, beside the tokens before it."""
    identity = token_identity(submission, token)
    adapter = submission.adapter_ref
    if adapter is None or not adapter.changes_linears or position < submission.adapted_from:
        return identity
    digest, row = (adapter.digest, token) if isinstance(identity, int) else identity
    return f"linears of {digest}", row


def stable_hash(text: str) -> int:
    """Hash a string; unlike `hash`, equal in every process."""
    return crc32(text.encode())


def next_state(state: int, token: TokenIdentity) -> int:
    """Return the hash of a token and everything before it."""
    key = token if isinstance(token, int) else (stable_hash(token[0]), token[1])
    return hash((state, key)) & 0x7FFFFFFFFFFFFFFF


def prefix_state(digest: str, row: int) -> int:
    """Return the hash that stands for one token of a prefix adapter, for every tenant."""
    return hash((stable_hash(digest), row))


def group_state(state: int, group: int) -> int:
    """Return the content of a KV group's block for a token; a negative number stays as it is."""
    return state if group == 0 or state < 0 else state ^ group


def sample_token(state: int, seed: int, position: int) -> int:
    """Return the token that follows `state`. Most tokens are predictable by an n-gram proposer."""
    draw = hash((state, seed, position))
    return draw // 8 % VOCAB_SIZE if draw % 8 == 0 else position % 2


def logprob(state: int, target: int) -> float:
    return float(hash((state, target)) % 1000)


@dataclass
class ExpectedSequence:
    """The states, tokens and scores of a submission that runs alone."""

    submission: Submission
    states: list[int] = field(default_factory=list)  # The hash after each token.
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        submission = self.submission
        self.states += [
            prefix_state(submission.adapter_ref.digest, row)
            for row in range(self.prefix_tokens)
            if submission.adapter_ref
        ]
        state = hash((stable_hash(submission.tenant), self.states[-1] if self.states else 0))
        for token in submission.prompt[self.prefix_tokens :]:
            identity = computed_identity(submission, token, len(self.states))
            state = next_state(state, identity)
            self.states.append(state)
        sampling = submission.sampling
        while len(self.tokens) < sampling.max_new_tokens:
            token = sample_token(state, sampling.seed, len(self.states))
            self.tokens.append(token)
            state = next_state(state, computed_identity(submission, token, len(self.states)))
            self.states.append(state)
            if token in sampling.stop_token_ids:
                break

    @property
    def prefix_tokens(self) -> int:
        """The number of tokens whose keys and values come from a prefix adapter."""
        adapter = self.submission.adapter_ref
        return adapter.row_count if adapter is not None and adapter.is_prefix else 0

    @property
    def end_reason(self) -> str:
        sampling = self.submission.sampling
        if not sampling.max_new_tokens:
            return "scored"
        return "stop" if self.tokens[-1] in sampling.stop_token_ids else "length"

    @property
    def prompt_scores(self) -> list[TokenScore | None]:
        targets = self.submission.prompt[1:]
        scores = [
            TokenScore(logprob(state, target)) if target < VOCAB_SIZE else None
            for state, target in zip(self.states, targets, strict=False)
        ]
        if self.prefix_tokens:
            # No hidden state is computed for the prefix, so the first text token has no score.
            scores[self.prefix_tokens - 1] = None
        return [None, *scores]


@dataclass
class _Slot:
    expected: ExpectedSequence
    block_tables: list[list[int]] = field(default_factory=list)  # By KV group.
    output_tokens: list[int] = field(default_factory=list)
    is_nonfinite: bool = False  # A step of the sequence was non-finite.
    # Of the last step: its draft tokens, and the hash after each token up to its end.
    draft_tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)


class FakeRanks:
    """Executes steps. `breaks(sequence_id)` decides whether a step of a sequence is non-finite.

    The seed of a submission is its sequence id, so a `SlotInit` says which sequence a slot holds.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        breaks: Callable[[int], bool],
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.kv_cache = [[CLEARED] * block_tokens for _ in range(blocks)]
        self.block_tokens = block_tokens
        self.windows = windows  # The window of each KV group.
        self.adapter_rows: dict[int, tuple[str, int]] = {}  # Rows of the adapter cache.
        self.row_counts: dict[str, int] = {}  # By the digest of an adapter.
        self.adapter_refs: dict[str, AdapterRef] = {}  # Those that change linears, by digest.
        # By first byte in the adapter memory: the digest, and the number of linears written.
        self.adapter_memory: dict[int, tuple[str, int]] = {}
        self.slots: dict[int, _Slot] = {}
        self.expected: dict[int, ExpectedSequence] = {}
        self._breaks = breaks
        self.computed_tokens: dict[int, int] = {}  # By sequence id.
        self.decodes = 0
        self.prompt_tokens = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.prefix_tokens_written = 0

    def register(self, submission: Submission) -> None:
        """Make a submission known, before the step that first contains its sequence."""
        self.expected[submission.sequence_id] = ExpectedSequence(submission)
        adapter = submission.adapter_ref
        if adapter and not adapter.is_prefix:
            self.row_counts[adapter.digest] = adapter.row_count
        if adapter and adapter.changes_linears:
            self.adapter_refs[adapter.digest] = adapter

    def run(self, step: Step) -> Outcome:
        self._prepare(step)
        assert len(set(step.slots)) == len(step.slots), "a slot is twice in a step"
        nonfinite = self._write_all(step)
        tokens: list[int] = []
        prompt_scores = []
        for index, slot_number in enumerate(step.slots):
            if index not in nonfinite:
                self._check_read(step, index)
            slot = self.slots[slot_number]
            past = step.past[index]
            end = past + step.lengths[index]
            submission = slot.expected.submission
            if step.draws[index]:
                first = end - (step.draft_counts[index] if step.draft_counts else 0)
                seed = submission.sampling.seed
                sampled = [
                    sample_token(slot.states[position - 1], seed, position)
                    for position in range(first, end + 1)
                ]
                tokens += sampled
                self._accept_draft(slot, sampled)
            if step.prompt_score_counts[index]:
                prompt_scores.append(
                    [
                        TokenScore(logprob(slot.states[position], submission.prompt[position + 1]))
                        for position in range(past, past + step.prompt_score_counts[index])
                    ]
                )
        return Outcome(
            step.step_id,
            tokens,
            [TokenScore(float(token)) for token in tokens],
            prompt_scores,
            nonfinite,
            seconds=0.01 + 0.0001 * len(step.token_ids),
        )

    def _accept_draft(self, slot: _Slot, sampled: list[int]) -> None:
        """Append the sampled tokens up to the first one that differs from the draft."""
        matches = [token == draft for token, draft in zip(sampled, slot.draft_tokens, strict=False)]
        accepted = matches.index(False) if False in matches else len(matches)
        slot.output_tokens += sampled[: accepted + 1]
        self.draft_tokens += len(slot.draft_tokens)
        self.accepted_tokens += accepted

    def _prepare(self, step: Step) -> None:
        """Apply what a step changes before its forward pass: blocks, adapter rows and slots."""
        for block in step.block_clears:
            self.kv_cache[block] = [CLEARED] * self.block_tokens
        sources = [list(self.kv_cache[source]) for source, _ in step.block_copies]
        for (_, target), states in zip(step.block_copies, sources, strict=True):
            assert target != 0, "block 0 is written"
            self.kv_cache[target] = states
        for write in step.adapter_writes:
            for row in range(self.row_counts[write.digest]):
                self.adapter_rows[write.start + row] = (write.digest, row)
        for linears_write in step.linear_writes:
            self._write_linears(linears_write)
        for prefix_write in step.prefix_writes:
            self._write_prefix(prefix_write)
        for slot_init in step.slot_inits:
            slot = _Slot(self.expected[slot_init.sampling.seed], [[] for _ in self.windows])
            slot.output_tokens = list(slot_init.output_tokens)
            self.slots[slot_init.slot] = slot
            prompt = slot.expected.submission.prompt
            assert slot_init.prompt == [token if token < VOCAB_SIZE else -1 for token in prompt]
            assert slot.output_tokens == slot.expected.tokens[: len(slot.output_tokens)]
        for update in step.block_table_updates:
            assert update.blocks, "an update without blocks"
            self._update_table(self.slots[update.slot].block_tables[update.group], update)

    def _update_table(self, table: list[int], update: BlockTableUpdate) -> None:
        """Append blocks to a table, after zeros for unneeded ones; or free blocks with zeros."""
        window = self.windows[update.group]
        if any(update.blocks):
            assert update.start == len(table), "a block table with a gap"
            freed_count = update.blocks.count(0)
            assert not any(update.blocks[:freed_count]), "block 0 is assigned"
            assert not freed_count or (window is not None and not table)
        else:
            assert window is not None, "a block is freed in a group without a window"
            assert not any(table[: update.start]), "blocks are not freed in order"
        table[update.start : update.start + len(update.blocks)] = update.blocks

    def _write_linears(self, write: AdapterLinearsWrite) -> None:
        assert write.count > 0
        if not write.first:
            end = write.start + self.adapter_refs[write.digest].rank_bytes
            for start, (digest, _) in list(self.adapter_memory.items()):
                if start < end and write.start < start + self.adapter_refs[digest].rank_bytes:
                    del self.adapter_memory[start]
            self.adapter_memory[write.start] = write.digest, 0
        digest, count = self.adapter_memory[write.start]
        assert (digest, count) == (write.digest, write.first), "linears are not written in order"
        self.adapter_memory[write.start] = digest, count + write.count

    def _check_adapter(self, step: Step, index: int, submission: Submission) -> None:
        """Check that the sequence's adapter is written completely, and acts on its tokens."""
        adapter = submission.adapter_ref
        start = step.adapter_starts[index] if step.adapter_starts else -1
        if adapter is None or not adapter.changes_linears:
            assert start == -1
            return
        expected = adapter.digest, adapter.linear_count
        assert self.adapter_memory.get(start) == expected, "another adapter, or a part of it"
        assert step.adapted_from[index] == submission.adapted_from

    def _write_prefix(self, write: PrefixKVWrite) -> None:
        first = write.start // self.block_tokens
        assert write.count > 0 and len(write.other_group_blocks) == len(self.windows) - 1
        for group, blocks in enumerate([write.blocks, *write.other_group_blocks]):
            assert len(blocks) == -(-(write.start + write.count) // self.block_tokens) - first
            assert 0 not in blocks
            for row in range(write.start, write.start + write.count):
                block = self.kv_cache[blocks[row // self.block_tokens - first]]
                block[row % self.block_tokens] = group_state(prefix_state(write.digest, row), group)
        self.prefix_tokens_written += write.count

    def _write_all(self, step: Step) -> list[int]:
        """Write the states of all tokens of a step; return the indices that are non-finite."""
        token_ids = iter(step.token_ids)
        nonfinite = []
        for index, length in enumerate(step.lengths):
            ids = [next(token_ids) for _ in range(length)]
            output_tokens = self.slots[step.slots[index]].output_tokens
            # With asynchronous scheduling, -1 stands for the last token of the slot.
            ids = [output_tokens[-1] if token == -1 else token for token in ids]
            if self._write(step, index, ids):
                nonfinite.append(index)
        assert next(token_ids, None) is None, "ids without a sequence"
        return nonfinite

    def _write(self, step: Step, index: int, ids: list[int]) -> bool:
        """Check the ids of one sequence and write their states; return if they are non-finite."""
        slot = self.slots[step.slots[index]]
        past = step.past[index]
        expected = slot.expected
        submission = expected.submission
        assert past >= expected.prefix_tokens, "a prefix is computed"
        end = past + len(ids)
        draft_count = step.draft_counts[index] if step.draft_counts else 0
        draft_start = end - draft_count
        all_tokens = [*submission.prompt, *expected.tokens]
        expected_identities = [
            token_identity(submission, token) for token in all_tokens[past:draft_start]
        ]
        identities = [
            token if token < VOCAB_SIZE else self.adapter_rows[token - VOCAB_SIZE]
            for token in ids[: draft_start - past]
        ]
        assert identities == expected_identities, (
            "ids of another sequence, or rows of another adapter"
        )
        self._check_adapter(step, index, submission)
        slot.draft_tokens = ids[draft_start - past :]
        slot.states = expected.states[:draft_start]
        for token in slot.draft_tokens:
            assert 0 <= token < VOCAB_SIZE, "a virtual token is drafted"
            identity = computed_identity(submission, token, len(slot.states))
            slot.states.append(next_state(slot.states[-1], identity))
        self._check_counts(step, index, slot, draft_start, end)
        sequence_id = submission.sequence_id
        self.computed_tokens[sequence_id] = self.computed_tokens.get(sequence_id, 0) + len(ids)
        if past >= len(submission.prompt):
            self.decodes += 1
        else:
            self.prompt_tokens += len(ids)
        # A step in flight behind a non-finite step reads its values, if only to mask them.
        nonfinite = slot.is_nonfinite = self._breaks(sequence_id) or slot.is_nonfinite
        for group, table in enumerate(slot.block_tables):
            for position in range(past, end):
                block = table[position // self.block_tokens]
                assert block, "a block that was freed is written"
                self.kv_cache[block][position % self.block_tokens] = (
                    NONFINITE if nonfinite else group_state(slot.states[position], group)
                )
        return nonfinite

    def _check_counts(
        self, step: Step, index: int, slot: _Slot, draft_start: int, end: int
    ) -> None:
        """Check that a sequence samples, drafts and scores prompt tokens only when it may."""
        submission = slot.expected.submission
        max_new_tokens = submission.sampling.max_new_tokens
        samples = (
            draft_start == len(submission.prompt) + len(slot.output_tokens) and max_new_tokens > 0
        )
        assert step.draws[index] == samples
        if draft_start < end:
            is_decode = samples and draft_start == step.past[index] + 1
            assert is_decode and end < len(submission.prompt) + max_new_tokens, "too many drafts"
        scores_prompt = (
            submission.sampling.prompt_logprobs is not None and not submission.output_tokens
        )
        assert scores_prompt or not step.prompt_score_counts[index]

    def _check_read(self, step: Step, index: int) -> None:
        """Check the blocks that attention reads: each token's state, and no non-finite padding."""
        slot = self.slots[step.slots[index]]
        past = step.past[index]
        end = past + step.lengths[index]
        for group, table in enumerate(slot.block_tables):
            states = self._visible_states(slot, group, past, end)
            expected = [group_state(state, group) for state in slot.states[end - len(states) : end]]
            assert states == expected, "keys and values of another prefix"
            for block in table[: -(-end // self.block_tokens)]:
                # Attention reads and masks all of the table's blocks.
                assert NONFINITE not in self.kv_cache[block], "non-finite values are masked"

    def _visible_states(self, slot: _Slot, group: int, past: int, end: int) -> list[int]:
        """Return the contents up to `end` that the tokens from position `past` on attend to."""
        window = self.windows[group]
        start = 0 if window is None else max(0, past - window + 1)
        size = self.block_tokens
        table = slot.block_tables[group]
        return [
            self.kv_cache[table[position // size]][position % size]
            for position in range(start, end)
        ]


def make_adapter_ref(
    name: str, count: int, kind: str = "rows", *, linears: int = 0, pages: int = 0
) -> AdapterRef:
    """Return a reference to an adapter of `count` rows and `linears` adapter weights."""
    nbytes = pages * ADAPTER_PAGE_BYTES
    return AdapterRef(name, count, f"{name}.safetensors", kind, linears, nbytes, nbytes)


def virtual_ids(count: int) -> list[int]:
    return [VOCAB_SIZE + row for row in range(count)]


def text_ids(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(count)]
