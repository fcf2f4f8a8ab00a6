"""Which block of the KV pool belongs to whom: counted, named by what is in it, never read.

A block is free, held by as many sequences as its count says, or cached: held by none, but named,
so that a later prompt may hold it again. Cached ones go when a free one is lacking, the one first
that was let go first. Block 0 is scratch and never given out. What a name means is not known here.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Blocks:
    """`count` includes block 0."""

    def __init__(self, count: int) -> None:
        assert count > 1, "a pool needs block 0 and one to give out"
        self.count = count - 1
        self._free = list(range(count - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * count
        self._holds = self._held = 0  # All of these, and how many are not 0.
        self._names: dict[int, list[bytes]] = {}
        self._named: dict[bytes, int] = {}
        # Its lookup by name, bound once: prompts are matched block by block.
        self.find = self._named.get

    @property
    def available(self) -> int:
        """Blocks that can be taken now; cached ones are lost by it."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self._held

    def take(self, count: int) -> list[int]:
        """As many fresh blocks, held once. The caller has looked at `available`."""
        assert count <= self.available, f"{count} blocks of {self.available}"
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self.forget(block)
            self._holders[block] = 1
            taken.append(block)
        self._holds += count
        self._held += count
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One holder more for each."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._cached[block]
                self._held += 1
            self._holders[block] += 1
            self._holds += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One holder fewer. The last ones are let go first: without them the others still serve."""
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            assert holders >= 0, f"block {block} is dropped by one who does not hold it"
            self._holders[block] = holders
            self._holds -= 1
            if holders == 0:
                self._held -= 1
                if block in self._names:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def name(self, name: bytes, block: int) -> None:
        """Publish a block that somebody holds. What has that name already keeps it."""
        if name not in self._named:
            self._named[name] = block
            self._names.setdefault(block, []).append(name)

    def forget(self, block: int) -> None:
        """Take a block's names away: it is about to hold something else, or nothing of use."""
        for name in self._names.pop(block, ()):
            del self._named[name]

    def holders(self, block: int) -> int:
        return self._holders[block]

    def tally(self, holds: int) -> None:
        """No block is lost, and they are held as often as said; quick enough for every step."""
        assert self._held + self.available == self.count, "a block is lost, or given back twice"
        assert self._holds == holds, f"blocks are held {self._holds} times, not {holds}"

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """The same block by block: free, cached, or held exactly as often as the tables say."""
        counts = [0] * (self.count + 1)
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._holders, "blocks are held otherwise than sequences say"
        free = set(self._free)
        assert len(free) == len(self._free) and not free & self._cached.keys(), "given back twice"
        idle = {block for block, held in enumerate(counts) if block and not held}
        assert free | self._cached.keys() == idle, "a block is lost, or is free and held"
        assert self._cached.keys() == self._names.keys() & idle, "cached without a name, or not"
        names = {name: block for block, names in self._names.items() for name in names}
        assert names == self._named, "a name leads elsewhere than its block says"
