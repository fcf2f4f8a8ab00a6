"""Attention over a ragged batch: one signature, a plain twin, and a fast form.

Each query sees its own sequence's tokens up to itself (within the window, if there is one), whether
their keys came in this step or lie in the pool. `reference` says it in a loop that can be read;
`ragged` groups what is alike, so that nobody pays for another's length: single new tokens by their
contexts, prompts by their place. Shapes: q (T, H, D), k and v (T, G, D), H = G x queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.attention.varlen import Drop, family, lean, rectangle, visible
from gpt.batch import Batch
from gpt.cpu import kernels, training_kernels

KV = Tensor  # (blocks, 2, G, block tokens, D): keys and values of a layer, head by head.
Attend = Callable[[Tensor, Tensor, Tensor, Batch, KV | None, int | None], Tensor]
Store = Callable[[Tensor, Tensor, Batch, KV], None]

# What is read at once should stay in the cache between its gathering and its use.
GATHERED_BYTES = 4 << 20
SCORES_BYTES = 4 << 20
TILE_QUERIES = 128
# So many new tokens of a sequence go one by one where that is done without gathering.
SHORT_TOKENS = 4


def store(k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None:
    """Write this step's keys and values into their slots of the pool."""
    assert batch.slots is not None
    if kernels.serves(k, kv):
        kernels.store(k, v, batch.slots, kv)
        return
    block, place = batch.slots
    kv[block, 0, :, place] = k
    kv[block, 1, :, place] = v


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kv: KV | None,
    window: int | None,
    *,
    drop: Drop | None = None,
) -> Tensor:
    """One sequence at a time, in whole matrices. `drop` thins a sequence's probabilities."""
    outputs = []
    start = 0
    for sequence, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
        rows = slice(start, start + length)
        start += length
        if kv is None:
            seen_rows = family(batch, sequence)
            keys, values = (torch.cat([x[part] for part in seen_rows]) for x in (k, v))
        else:
            assert batch.tables is not None
            blocks = kv[batch.tables[sequence]].permute(1, 0, 3, 2, 4)
            keys, values = blocks.flatten(1, 2)[:, :context]
        queries = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(queries, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * q.shape[-1] ** -0.5
        seen = visible(batch.positions[rows], torch.arange(context, device=q.device), window)
        scores = scores.masked_fill(~seen, float("-inf"))
        wide = torch.promote_types(q.dtype, torch.float32)
        probabilities = scores.softmax(-1, dtype=wide).to(q.dtype)
        if drop is not None:
            probabilities = drop(probabilities, sequence)
        outputs.append(torch.einsum("hqk,khd->qhd", probabilities, values))
    return torch.cat(outputs)


def ragged(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
) -> Tensor:
    """Group by group; what the groups are is found out once for all layers of a step."""
    if kv is None:
        learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        if training_kernels.attends(q, k, batch, window):
            return training_kernels.attend(q, k, v, batch)
        if learns and not q.is_cuda:
            return lean(q, k, v, batch, window)
        return rectangle(q, k, v, batch, window)
    plan = planned(batch, Shape(q.shape[1], k.shape[1], kv.shape[3], window), q, kv)
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    for single in plan.native:
        single.attend(q, kv, y)
    for group in plan.groups:
        group.attend(q, k, v, kv, plan.room, y)
    return y


@dataclass(frozen=True)
class Shape:
    """What a plan depends on beside the batch."""

    heads: int
    groups: int
    block_tokens: int
    window: int | None

    @property
    def queries(self) -> int:
        return self.heads // self.groups


@dataclass(frozen=True)
class Tile:
    """Some queries of every sequence of a group, and the keys that any of them sees."""

    queries: slice
    keys: slice
    mask: Tensor  # (sequences x G or 1, queries, keys): 0, or minus infinity where none is seen.


@dataclass(frozen=True)
class Group:
    """Sequences with equally many new tokens, whose keys fill one rectangle."""

    rows: slice | Tensor  # Of the batch.
    sequences: int
    shape: Shape
    gather: Tensor | None  # Rows of the pool, of keys and of values, by sequence, group, block.
    tiles: list[Tile]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: KV, room: Tensor, out: Tensor) -> None:
        """Fill this group's rows of `out`. A tile's queries are (sequences x G, queries, D)."""
        d, count, groups = q.shape[-1], self.sequences, self.shape.groups
        q = _by_group(_taken(q, self.rows), count, groups)
        if self.gather is None:
            keys, values = (_by_group(_taken(x, self.rows), count, groups) for x in (k, v))
        else:
            # One after the other, so that the core which gathers a head's keys reads them too.
            keys, values = (
                torch.index_select(kv.view(-1, x.shape[-1]), 0, rows, out=x[: len(rows)]).view(
                    count * groups, -1, d
                )
                for rows, x in zip(self.gather, room, strict=True)
            )
        pieces = []
        for tile in self.tiles:
            seen, read = keys[:, tile.keys].transpose(1, 2), values[:, tile.keys]
            asked = q[:, tile.queries]
            mask = tile.mask.expand(len(asked), asked.shape[1], -1)
            scores = torch.baddbmm(mask, asked, seen, alpha=d**-0.5)
            pieces.append(torch.bmm(scores.softmax(-1), read))
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        y = y.view(count, groups, -1, self.shape.queries, d).transpose(1, 2)
        out[self.rows] = y.reshape(-1, self.shape.heads, d)


@dataclass(frozen=True)
class Plan:
    """What the library in C does of a step, and what is done here, group by group."""

    native: Sequence[kernels.Paged | kernels.Runs]
    groups: Sequence[Group]
    room: Tensor  # Where keys and values are gathered.


def _taken(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _by_group(x: Tensor, sequences: int, groups: int) -> Tensor:
    """(sequences x new tokens, heads, D) as (sequences x G, new tokens x heads of a group, D)."""
    d = x.shape[-1]
    x = x.reshape(sequences, -1, groups, x.shape[1] // groups, d).transpose(1, 2)
    return x.reshape(sequences * groups, -1, d)


def planned(batch: Batch, shape: Shape, like: Tensor, kv: KV) -> Plan:
    """Who does what of a step, for queries `like` these; found out once."""
    plan = batch.kept.get(shape)
    if plan is None:
        plan = batch.kept[shape] = _planned(batch, shape, like, kv)
    assert isinstance(plan, Plan)
    return plan


def _planned(batch: Batch, shape: Shape, like: Tensor, kv: KV) -> Plan:
    """Sequences with one new token go together if their contexts are alike, others if equal."""
    contexts = batch.contexts
    native: list[kernels.Paged | kernels.Runs] = []
    serves = kernels.serves(like, kv)
    short_max = SHORT_TOKENS if serves else 1
    short = [s for s, length in enumerate(batch.lengths) if length <= short_max]
    long = [s for s, length in enumerate(batch.lengths) if length > short_max]
    token_bytes = 2 * shape.groups * like.shape[-1] * like.element_size()
    tokens_max = GATHERED_BYTES // token_bytes
    groups: list[Group] = []
    if serves and short:
        native.append(_singles(batch, short, shape))
    elif short:
        groups = [
            _decoding(batch, some, shape, like)
            for some in _by_context(short, contexts, shape, tokens_max)
        ]
    if serves and long and kernels.attends_runs(like):
        native.append(_runs(batch, long, shape))
        long = []
    alike: dict[tuple[int, int], list[int]] = {}
    for s in long:
        alike.setdefault((batch.lengths[s], batch.past[s]), []).append(s)
    for (length, past), sequences in alike.items():
        scores = shape.heads * min(length, TILE_QUERIES) * (length + past) * like.element_size()
        together = max(1, min(SCORES_BYTES // scores, tokens_max // (length + past)))
        for at in range(0, len(sequences), together):
            groups.append(_prompts(batch, sequences[at : at + together], shape, like))
    largest = max((g.gather.shape[1] for g in groups if g.gather is not None), default=0)
    room = like.new_empty(2, largest, shape.block_tokens * like.shape[-1])
    return Plan(native, groups, room)


def _singles(batch: Batch, sequences: Sequence[int], shape: Shape) -> kernels.Paged:
    assert batch.tables is not None
    rows, owners, contexts = [], [], []
    for s in sequences:
        for n in range(batch.lengths[s]):
            rows.append(batch.starts[s] + n)
            owners.append(s)
            contexts.append(batch.past[s] + n + 1)
    return kernels.Paged(rows, owners, contexts, batch.tables, window=shape.window)


def _runs(batch: Batch, sequences: Sequence[int], shape: Shape) -> kernels.Runs:
    assert batch.tables is not None
    starts, lengths, past = (
        [numbers[s] for s in sequences] for numbers in (batch.starts, batch.lengths, batch.past)
    )
    return kernels.Runs(starts, sequences, lengths, past, batch.tables, window=shape.window)


def _by_context(
    sequences: Sequence[int], contexts: Sequence[int], shape: Shape, tokens_max: int
) -> list[list[int]]:
    """Parts whose shortest context is not much less than the longest, of bounded size."""
    parts: list[list[int]] = []
    for s in sorted(sequences, key=lambda s: -contexts[s]):
        longest = contexts[parts[-1][0]] if parts else 0
        if shape.window is not None:
            longest = min(longest, shape.window)
        full = parts and (len(parts[-1]) + 1) * longest > tokens_max
        if not parts or full or 2 * contexts[s] + 2 * shape.block_tokens < longest:
            parts.append([])
        parts[-1].append(s)
    return [sorted(part) for part in parts]


def _decoding(batch: Batch, sequences: Sequence[int], shape: Shape, like: Tensor) -> Group:
    """One query for each; blocks before the window are not read."""
    size, window, device = shape.block_tokens, shape.window, like.device
    ends = [batch.contexts[s] for s in sequences]
    first = [0 if window is None else max(0, end - window) // size for end in ends]
    width = max(-(-end // size) - start for end, start in zip(ends, first, strict=True))
    begin, end = (torch.tensor(x, device=device) for x in (first, ends))
    blocks = begin.unsqueeze(1) + torch.arange(width, device=device)
    keys = begin.unsqueeze(1) * size + torch.arange(width * size, device=device)
    seen = visible(end - 1, keys, window)
    mask = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    mask = mask.repeat_interleave(shape.groups, 0).unsqueeze(1)
    everything = slice(None)
    return Group(
        rows=_rows(batch, sequences, device),
        sequences=len(sequences),
        shape=shape,
        gather=_gathered(batch, sequences, blocks, shape),
        tiles=[Tile(everything, everything, mask)],
    )


def _prompts(batch: Batch, sequences: Sequence[int], shape: Shape, like: Tensor) -> Group:
    """Equally long pieces of prompts at the same place; a tile reads the keys that it sees."""
    size, window, device = shape.block_tokens, shape.window, like.device
    length, past = batch.lengths[sequences[0]], batch.past[sequences[0]]
    start = 0  # The position of the first key at hand.
    gather = None
    if past:
        first = 0 if window is None else max(0, past + 1 - window) // size
        blocks = torch.arange(first, -(-(past + length) // size), device=device)
        gather = _gathered(batch, sequences, blocks.expand(len(sequences), -1), shape)
        start = first * size
    tiles = []
    for at in range(0, length, TILE_QUERIES):
        end = min(at + TILE_QUERIES, length)
        low = start if window is None else max(start, past + at + 1 - window)
        high = past + end
        if gather is not None and end == length:
            # All that was gathered: of a part of it the product would make a copy first.
            high = -(-high // size) * size
        queries = torch.arange(past + at, past + end, device=device)
        seen = visible(queries, torch.arange(low, high, device=device), window)
        mask = like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        mask = mask.repeat_interleave(shape.queries, 0).unsqueeze(0)
        asked = slice(at * shape.queries, end * shape.queries)
        tiles.append(Tile(asked, slice(low - start, high - start), mask))
    return Group(_rows(batch, sequences, device), len(sequences), shape, gather, tiles)


def _gathered(batch: Batch, sequences: Sequence[int], places: Tensor, shape: Shape) -> Tensor:
    """The rows of the pool, one for each head of a block, that hold these places of the tables."""
    assert batch.tables is not None
    tables = batch.tables
    if len(sequences) < len(tables):
        tables = tables[torch.tensor(sequences, device=tables.device)]
    blocks = tables.gather(1, places.clamp_max(tables.shape[1] - 1))
    heads = torch.arange(2 * shape.groups, device=tables.device).view(2, 1, shape.groups, 1)
    return (blocks.unsqueeze(1) * (2 * shape.groups) + heads).flatten(1)


def _rows(batch: Batch, sequences: Sequence[int], device: torch.device) -> slice | Tensor:
    """The flat rows of sequences that are equally long."""
    length, starts = batch.lengths[sequences[0]], batch.starts
    begin = starts[sequences[0]]
    if starts[sequences[-1]] - begin == (len(sequences) - 1) * length:
        return slice(begin, begin + len(sequences) * length)
    first = torch.tensor([starts[s] for s in sequences], device=device)
    return (first.unsqueeze(1) + torch.arange(length, device=device)).flatten()
