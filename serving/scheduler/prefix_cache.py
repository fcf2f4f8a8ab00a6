"""Prefix cache: chained block hashes find KV blocks that contain a prompt's first tokens.

A block's key is a hash of its tokens, of their adapter if some are virtual, and of the previous
block's key, so equal keys mean equal prefixes. The key of the first block includes the model, the
cache salt, and the tenant unless tenants share the cache. A partial block is the part of a block
before a position at which prompts are likely to diverge. It has a key too, and is shared by copying
the block. If a running sequence computes blocks that a waiting sequence needs, the waiting sequence
is parked: it waits until the last of these blocks is published, instead of computing them again.
This module allocates no block and reads no tensor.
"""

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from gpt.kv_groups import blocks_behind_window
from serving.scheduler.block_pool import BlockPool
from serving.scheduler.sequence import Sequence

KEY_BYTES = 16
NO_ADAPTER_KEY = bytes(KEY_BYTES)


def hash_strings(*strings: str) -> bytes:
    """A key for a list of strings; ("ab", "c") and ("a", "bc") have different keys."""
    encoded_bytes = b"".join(
        len(string.encode()).to_bytes(8, "little") + string.encode() for string in strings
    )
    return blake2b(encoded_bytes, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The leading tokens of a sequence whose keys and values are cached."""

    tokens: int
    # For each KV group, its table of full blocks, to be retained and shared. An entry is 0 where
    # the block is behind the group's window.
    tables: list[list[int]]
    # For each KV group, a cached block to copy: its first tokens continue the match after the full
    # blocks. Empty: no partial block matches.
    partial_blocks: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """The full blocks of all groups, in the order of the tables."""
        return [block for table in self.tables for block in table if block]


class PrefixCache:
    """Computes keys, matches prompts and publishes blocks.

    `enabled=False`: no prompt matches, no block is published, and no sequence waits for a key.
    `shared=True`: all tenants share cached blocks. `windows`: the window of each KV group. Each
    group has a block for a key. A match needs all of its blocks in a group without a window, and in
    a group with a window of w tokens those of its last w - 1 tokens.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        block_tokens: int,
        vocab_size: int,
        model_digest: str,
        enabled: bool = True,
        *,
        shared: bool = False,
        windows: Collection[int | None] = (None,),
    ) -> None:
        self._block_pool = block_pool
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._model_digest = model_digest
        self._enabled = enabled
        self._shares_tenants = shared
        self._windows = tuple(windows)
        # By KV group: what is appended to a key for the group's blocks.
        self._key_suffixes = [
            b"",
            *(group.to_bytes(4, "little") for group in range(1, len(self._windows))),
        ]
        # By pending key (not published yet): the prefilling sequence that computes its block.
        self._pending: dict[bytes, Sequence] = {}
        # By pending key: the sequences that are parked until it is published.
        self._parked_by_key: dict[bytes, list[Sequence]] = {}
        # By published partial block: the running sequence that writes later tokens into the block.
        self._writers: dict[int, Sequence] = {}

    # -------------------------------------------------------------------------------------- keys

    def compute_keys(self, sequence: Sequence) -> None:
        """Compute the keys of a new sequence's full and partial blocks."""
        if not self._enabled:
            return
        adapter_ref = sequence.submission.adapter_ref
        sequence.set_adapter_key(
            hash_strings(adapter_ref.digest) if adapter_ref else NO_ADAPTER_KEY
        )
        self.extend_keys(sequence)
        block_tokens = self._block_tokens
        for position in dict.fromkeys(sequence.prefix_boundaries(self._vocab_size)):
            block_index, offset = divmod(position, block_tokens)
            if offset:
                key = self._block_key(sequence, block_index, position)
                sequence.add_partial_key(block_index, position, key)

    def extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys of blocks that the sequence's tokens have filled since the last call."""
        if self._enabled:
            for block_index in range(
                len(sequence.block_keys), len(sequence.tokens) // self._block_tokens
            ):
                sequence.append_block_key(
                    self._block_key(sequence, block_index, (block_index + 1) * self._block_tokens)
                )

    def _block_key(self, sequence: Sequence, block_index: int, end: int) -> bytes:
        if block_index:
            parent = sequence.block_keys[block_index - 1]
        else:
            submission = sequence.submission
            tenant = "" if self._shares_tenants else submission.tenant
            salts = (submission.cache_salt,) if submission.cache_salt else ()
            parent = hash_strings(self._model_digest, tenant, *salts)
        start, adapter_key = block_index * self._block_tokens, NO_ADAPTER_KEY
        ids = sequence.tokens[start:end]
        if start < sequence.virtual_end and sequence.virtual_start < end:
            # A virtual token (row r of the adapter) is hashed as -1 - r, which equals no token id.
            vocab_size = self._vocab_size
            ids = [token if token < vocab_size else vocab_size - 1 - token for token in ids]
            adapter_key = sequence.adapter_key if min(ids) < 0 else NO_ADAPTER_KEY
        adapted_offset = max(0, sequence.submission.adapted_from - start)
        if sequence.changes_linears and adapted_offset < end - start:
            # The adapter acts on the block from this offset on. The offset is a part of the key,
            # because the end of the invocation may lie in a later block.
            adapter_key = sequence.adapter_key + adapted_offset.to_bytes(4, "little")
        encoded_bytes = parent + adapter_key + array("q", ids).tobytes()
        return blake2b(encoded_bytes, digest_size=KEY_BYTES).digest()

    # ---------------------------------------------------------------------------------- matching

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """The longest cached prefix of a sequence."""
        tokens_max = sequence.cache_match_max
        if not self._enabled or tokens_max <= 0:
            return PrefixMatch(0, [[] for _ in self._windows])
        tables = self._match_full_blocks(sequence.block_keys[: tokens_max // self._block_tokens])
        tokens, partial_blocks = self._match_partial_block(sequence, len(tables[0]), tokens_max)
        return PrefixMatch(tokens, tables, partial_blocks)

    def _match_full_blocks(self, keys: list[bytes]) -> list[list[int]]:
        """The tables of the longest match of full blocks; `keys` are the keys of all blocks."""
        find_cached = self._block_pool.find_cached
        tables = list[list[int]]()
        for group, window in enumerate(self._windows):
            suffix = self._key_suffixes[group]
            table = list[int]()
            for key in keys:
                block = find_cached(key + suffix if suffix else key)
                if block is None and window is None:
                    break
                table.append(block or 0)
            tables.append(table)
            if window is None:
                keys = keys[: len(table)]
        if self._windows == (None,):
            return tables
        count = self._window_match(tables, len(keys))
        for group, window in enumerate(self._windows):
            unneeded_count = self._blocks_behind_window(window, count * self._block_tokens)
            tables[group] = [0] * unneeded_count + tables[group][unneeded_count:count]
        return tables

    def _window_match(self, tables: list[list[int]], count_max: int) -> int:
        """The largest number of blocks, at most `count_max`, that match in all groups."""
        count = count_max
        while count:
            # The last missing block that a window covers. No match between its end and `count`
            # is possible, because the windows of shorter matches begin earlier.
            missing = -1
            for table, window in zip(tables, self._windows, strict=True):
                start = self._blocks_behind_window(window, count * self._block_tokens)
                if window is not None:
                    missing = max(
                        missing,
                        next((i for i in range(count - 1, start - 1, -1) if not table[i]), -1),
                    )
            if missing < 0:
                return count
            count = missing
        return 0

    def _blocks_behind_window(self, window: int | None, tokens: int) -> int:
        """Number of leading blocks that no token from position `tokens` on attends to."""
        return blocks_behind_window(window, tokens, self._block_tokens)

    def _match_partial_block(
        self, sequence: Sequence, block_index: int, tokens_max: int
    ) -> tuple[int, list[int]]:
        """The longest published partial block that continues a match of `block_index` full blocks.

        Returns the position where the match ends, at most `tokens_max`, and the partial block of
        each KV group. If no partial block matches, the position is the end of the full blocks, and
        there are no blocks.
        """
        full_block_tokens = block_index * self._block_tokens
        if tokens_max <= full_block_tokens:
            return full_block_tokens, []
        partial_keys = sequence.partial_keys.get(block_index, [])
        if (
            block_index < len(sequence.block_keys)
            and tokens_max < (block_index + 1) * self._block_tokens
        ):
            # `tokens_max` is inside this block. If the full block is cached, it can be used like a
            # partial block that ends at `tokens_max`.
            partial_keys = [*partial_keys, (tokens_max, sequence.block_keys[block_index])]
        for position, key in reversed(partial_keys):
            if full_block_tokens < position <= tokens_max:
                blocks = [self._block_pool.find_cached(key + s) for s in self._key_suffixes]
                cached_blocks = [block for block in blocks if block is not None]
                if len(cached_blocks) == len(blocks):
                    return position, cached_blocks
        return full_block_tokens, []

    def has_write_in_flight(self, block: int) -> bool:
        """Whether a step in flight writes into a published block.

        If so, the block must not be copied yet: the written values may be NaN or infinity.
        """
        writer = self._writers.get(block)
        if writer is None or writer.steps_in_flight == 0:
            return False
        start = writer.computed_tokens // self._block_tokens
        return any(block in table[start:] for table in writer.block_tables)

    def forget_writer(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        """Record that a running sequence frees `blocks`, so that it does not write them again."""
        for block in blocks:
            if self._writers.get(block) is sequence:
                del self._writers[block]

    # -------------------------------------------------------------------------------- publishing

    def publish(self, sequence: Sequence, start: int) -> list[Sequence]:
        """Publish the blocks that a completed step computed from token `start` on.

        Returns the sequences that were parked for these blocks.
        """
        end, block_tokens = sequence.computed_tokens, self._block_tokens
        woken: list[Sequence] = []
        if not self._enabled:
            return woken
        self.extend_keys(sequence)
        for block_index in range(start // block_tokens, end // block_tokens):
            self._publish_blocks(sequence, sequence.block_keys[block_index], block_index, woken)
        if start < sequence.prompt_tokens:
            for block_index in range(start // block_tokens, (end - 1) // block_tokens + 1):
                for position, key in sequence.partial_keys.get(block_index, ()):
                    if start < position <= end:
                        self._publish_blocks(sequence, key, block_index, woken)
                        for table in sequence.block_tables:
                            self._writers[table[block_index]] = sequence
        return woken

    def _publish_blocks(
        self, sequence: Sequence, key: bytes, block_index: int, woken: list[Sequence]
    ) -> None:
        """Publish the block of each KV group under a key."""
        for table, suffix in zip(sequence.block_tables, self._key_suffixes, strict=True):
            self._block_pool.publish(key + suffix, table[block_index])
        if self._pending.get(key) is sequence:
            del self._pending[key]
        woken.extend(self._parked_by_key.pop(key, ()))

    # ------------------------------------------------------------------------------ pending keys

    def announce(self, sequence: Sequence) -> None:
        """Register as pending the keys that an admitted sequence will publish."""
        if self._enabled:
            for key in self._unpublished_keys(sequence):
                self._pending[key] = sequence

    def withdraw(self, sequence: Sequence) -> list[Sequence]:
        """Remove the pending keys of a sequence that stops running.

        Returns the sequences that were parked for these keys.
        """
        woken: list[Sequence] = []
        if not self._enabled:
            return woken
        for key in self._unpublished_keys(sequence):
            if self._pending.get(key) is sequence:
                del self._pending[key]
                woken.extend(self._parked_by_key.pop(key, ()))
        for block_index in sequence.partial_keys:
            if block_index < sequence.table_length:
                self.forget_writer(
                    sequence, [table[block_index] for table in sequence.block_tables]
                )
        return woken

    def _unpublished_keys(self, sequence: Sequence) -> list[bytes]:
        computed_tokens, block_tokens = sequence.computed_tokens, self._block_tokens
        if computed_tokens >= sequence.prompt_tokens:
            return []
        keys = sequence.block_keys[
            computed_tokens // block_tokens : sequence.prompt_tokens // block_tokens
        ]
        for partial_keys in sequence.partial_keys.values():
            keys.extend(key for position, key in partial_keys if position > computed_tokens)
        return keys

    def park_if_pending(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Park a waiting sequence if a running one computes blocks of its prompt.

        Returns whether the sequence is parked now. A parked sequence is not in the waiting queue:
        it waits for a pending key.
        """
        key = self._pending_key(sequence, match)
        if key is None:
            return False
        sequence.park()
        self._parked_by_key.setdefault(key, []).append(sequence)
        return True

    def _pending_key(self, sequence: Sequence, match: PrefixMatch) -> bytes | None:
        """The last pending key of the sequence's prompt; None: the sequence does not wait.

        A sequence waits only if waiting saves at least one block of prefill. A latency-class
        sequence does not wait for a throughput-class sequence, which may be delayed.
        """
        tokens_max = sequence.cache_match_max
        block_tokens = self._block_tokens
        pending = self._pending
        block_index = match.tokens // block_tokens
        last_key = None
        pending_end = 0  # Position where the block with `last_key` ends.
        while block_index < min(tokens_max // block_tokens, len(sequence.block_keys)):
            key = sequence.block_keys[block_index]
            if key in pending:
                last_key, pending_end = key, (block_index + 1) * block_tokens
            elif self._block_pool.find_cached(key) is None:
                break
            block_index += 1
        for position, key in sequence.partial_keys.get(block_index, ()):
            if pending_end < position <= tokens_max and key in pending:
                last_key, pending_end = key, position
        if last_key is None or pending_end - match.tokens < block_tokens:
            return None
        return (
            last_key
            if pending[last_key].is_latency_class or not sequence.is_latency_class
            else None
        )

    def check(self, running: list[Sequence]) -> None:
        running_set = set(running)
        assert running_set.issuperset(self._pending.values()), (
            "a key is pending from a sequence that does not run"
        )
        assert running_set.issuperset(self._writers.values()), "a block's writer does not run"
        assert self._parked_by_key.keys() <= self._pending.keys(), (
            "a sequence waits for a key that is not pending"
        )
