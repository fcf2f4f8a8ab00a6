"""What of a prompt is in the KV pool already, or is being computed by another.

A block's key is a hash over its tokens and the key before it, so that equal keys mean equal
prefixes; the first one has the tenant and the model in it. Parts of blocks have keys where prompts
are likely to part; they are shared by copying. It knows blocks by their names, and takes none.
"""

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from serving.scheduler.block_pool import Blocks
from serving.scheduler.sequence import Sequence

KEY_BYTES = 16
NO_ADAPTER = bytes(KEY_BYTES)


def digest_of(*words: str) -> bytes:
    """A key for some words, each told from the next."""
    whole = b"".join(len(word.encode()).to_bytes(8, "little") + word.encode() for word in words)
    return blake2b(whole, digest_size=KEY_BYTES).digest()


@dataclass(slots=True)
class Match:
    """The first tokens of a sequence that need not be computed."""

    tokens: int = 0
    blocks: list[int] = field(default_factory=list)  # To be held along with others.
    copied: int = 0  # A block whose first tokens continue them; 0: none.


class Prefixes:
    """`enabled` False: nothing matches, nothing is named, and nobody waits for another.

    `shared`: what one tenant has computed is there for all.
    """

    def __init__(
        self,
        blocks: Blocks,
        block_tokens: int,
        vocab_size: int,
        digest: str,
        enabled: bool = True,
        *,
        shared: bool = False,
    ) -> None:
        self._blocks = blocks
        self._size = block_tokens
        self._vocab_size = vocab_size
        self._digest = digest
        self._enabled = enabled
        self._shared = shared
        # Keys that a running prompt will publish, and the sequences that wait for them.
        self._coming: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, list[Sequence]] = {}
        # Who still writes behind a part of a block that has a name.
        self._writers: dict[int, Sequence] = {}

    # -------------------------------------------------------------------------------------- keys

    def enter(self, sequence: Sequence) -> None:
        """Find the keys of a new sequence's tokens."""
        if not self._enabled:
            return
        rows = sequence.submission.rows
        sequence.adapter = digest_of(rows.digest) if rows else NO_ADAPTER
        self.extend(sequence)
        size = self._size
        for position in dict.fromkeys(sequence.boundaries(self._vocab_size)):
            place, part = divmod(position, size)
            if part:
                key = self._key(sequence, place, position)
                sequence.tails.setdefault(place, []).append((position, key))

    def extend(self, sequence: Sequence) -> None:
        """Find the keys of blocks that its tokens fill by now."""
        if self._enabled:
            for place in range(len(sequence.keys), len(sequence.tokens) // self._size):
                sequence.keys.append(self._key(sequence, place, (place + 1) * self._size))

    def _key(self, sequence: Sequence, place: int, end: int) -> bytes:
        if place:
            parent = sequence.keys[place - 1]
        else:
            salt = "" if self._shared else sequence.submission.tenant
            parent = digest_of(self._digest, salt)
        start, adapter = place * self._size, NO_ADAPTER
        ids = sequence.tokens[start:end]
        if start < sequence.virtual_end and sequence.virtual_start < end:
            # Row r of an adapter is -1 - r, so that it is nothing else's id.
            vocab_size = self._vocab_size
            ids = [token if token < vocab_size else vocab_size - 1 - token for token in ids]
            adapter = sequence.adapter if min(ids) < 0 else NO_ADAPTER
        whole = parent + adapter + array("q", ids).tobytes()
        return blake2b(whole, digest_size=KEY_BYTES).digest()

    # ---------------------------------------------------------------------------------- matching

    def match(self, sequence: Sequence) -> Match:
        most, size, find = sequence.match_max, self._size, self._blocks.find
        found = Match()
        if not self._enabled or most <= 0:
            return found
        for key in sequence.keys[: most // size]:
            block = find(key)
            if block is None:
                break
            found.blocks.append(block)
        place = len(found.blocks)
        found.tokens = place * size
        self._match_part(sequence, place, most, found)
        return found

    def _match_part(self, sequence: Sequence, place: int, most: int, found: Match) -> None:
        """The longest part of the next block that a named one begins with."""
        if most <= found.tokens:
            return
        parts = sequence.tails.get(place, [])
        if place < len(sequence.keys) and most < (place + 1) * self._size:
            # The whole block may be there, though only a part of it may be used.
            parts = [*parts, (most, sequence.keys[place])]
        for position, key in reversed(parts):
            block = self._blocks.find(key) if found.tokens < position <= most else None
            if block is not None:
                found.tokens, found.copied = position, block
                return

    def unsettled(self, block: int) -> bool:
        """Whether a step in flight writes into a named block: then it may not be copied yet.

        What is written may turn out not to be finite, and would be copied along.
        """
        writer = self._writers.get(block)
        if writer is None or writer.flights == 0:
            return False
        return block in writer.table[writer.computed // self._size :]

    # -------------------------------------------------------------------------------- publishing

    def publish(self, sequence: Sequence, old: int) -> list[Sequence]:
        """Name what a step that is over has filled, from token `old` on; who waited for it."""
        new, size = sequence.computed, self._size
        woken: list[Sequence] = []
        if not self._enabled:
            return woken
        self.extend(sequence)
        for place in range(old // size, new // size):
            self._name(sequence, sequence.keys[place], sequence.table[place], woken)
        if old < sequence.prompt:
            for place in range(old // size, (new - 1) // size + 1):
                for position, key in sequence.tails.get(place, ()):
                    if old < position <= new:
                        self._name(sequence, key, sequence.table[place], woken)
                        self._writers[sequence.table[place]] = sequence
        return woken

    def _name(self, sequence: Sequence, key: bytes, block: int, woken: list[Sequence]) -> None:
        self._blocks.name(key, block)
        if self._coming.get(key) is sequence:
            del self._coming[key]
        woken.extend(self._parked.pop(key, ()))

    # ------------------------------------------------------------------------------- coming keys

    def announce(self, sequence: Sequence) -> None:
        """It runs, and will publish what of its prompt is not there yet."""
        if self._enabled:
            for key in self._unpublished(sequence):
                self._coming[key] = sequence

    def withdraw(self, sequence: Sequence) -> list[Sequence]:
        """It runs no more; who waited for it."""
        woken: list[Sequence] = []
        if not self._enabled:
            return woken
        for key in self._unpublished(sequence):
            if self._coming.get(key) is sequence:
                del self._coming[key]
                woken.extend(self._parked.pop(key, ()))
        for place in sequence.tails:
            if place < len(sequence.table):
                block = sequence.table[place]
                if self._writers.get(block) is sequence:
                    del self._writers[block]
        return woken

    def _unpublished(self, sequence: Sequence) -> list[bytes]:
        done, size = sequence.computed, self._size
        if done >= sequence.prompt:
            return []
        keys = sequence.keys[done // size : sequence.prompt // size]
        for parts in sequence.tails.values():
            keys.extend(key for position, key in parts if position > done)
        return keys

    def awaited(self, sequence: Sequence, match: Match) -> bytes | None:
        """The last key of its prompt that somebody computes already, if waiting for it pays."""
        most, size, coming = sequence.match_max, self._size, self._coming
        place, last, gained = match.tokens // size, None, 0
        while place < min(most // size, len(sequence.keys)):
            key = sequence.keys[place]
            if key in coming:
                last, gained = key, (place + 1) * size
            elif self._blocks.find(key) is None:
                break
            place += 1
        for position, key in sequence.tails.get(place, ()):
            if gained < position <= most and key in coming:
                last, gained = key, position
        if last is None or gained - match.tokens < size:
            return None
        # One that goes first does not wait for one that may be held up.
        return last if coming[last].latency or not sequence.latency else None

    def park(self, sequence: Sequence, key: bytes) -> None:
        sequence.parked = True
        self._parked.setdefault(key, []).append(sequence)

    def check(self, running: list[Sequence]) -> None:
        alive = set(running)
        assert alive.issuperset(self._coming.values()), "a key comes from one that does not run"
        assert alive.issuperset(self._writers.values()), "a block's writer does not run"
        assert self._parked.keys() <= self._coming.keys(), "one waits for what does not come"
