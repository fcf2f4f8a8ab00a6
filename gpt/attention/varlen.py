"""Attention of whole sequences, whose keys all come in with the batch: training, and one-shot runs.

A sequence may see a parent's tokens as its past. Three forms do the same: `rectangle` pads what is
nearly equally long for the library's fused attention; `lean` keeps queries, keys and values alone
for the backward pass and makes the probabilities again; `unfused` keeps those too, and can thin
them. It knows no pool. Shapes: q (T, H, D), k and v (T, G, D), H = G x queries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.batch import Batch

# So many queries are computed at once; what lies behind the last of them is not read for them.
TILE_QUERIES = 128
# A rectangle holds sequences from its longest down to this part of it, less a few tokens.
ALIKE = 0.8
ALIKE_TOKENS = 16


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions each query position sees: (..., queries, keys)."""
    distance = queries.unsqueeze(-1) - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def family(batch: Batch, sequence: int) -> list[slice]:
    """The flat rows that a sequence's tokens see: its parent's, and its own."""
    parent = batch.parents[sequence] if batch.parents else None
    found = [sequence] if parent is None else [parent, sequence]
    return [slice(batch.starts[s], batch.starts[s] + batch.lengths[s]) for s in found]


@dataclass(frozen=True)
class Drop:
    """Dropout of a sequence's probabilities (heads, queries, keys)."""

    p: float
    # Which stay: of a sequence, so many queries and keys, on the device of the tensor.
    keep: Callable[[int, tuple[int, int], Tensor], Tensor]

    def __call__(self, probabilities: Tensor, sequence: int) -> Tensor:
        _, queries, keys = probabilities.shape
        # Autograd keeps the mask, a byte for each, and not what it is multiplied with.
        return probabilities * self.keep(sequence, (queries, keys), probabilities) / (1 - self.p)


@dataclass(frozen=True)
class Rectangle:
    """Sequences of nearly equal lengths with equally long pasts, padded to the longest."""

    count: int
    queries: Tensor | None  # (count, longest) flat rows; a shorter one's last row is repeated.
    keys: Tensor | None  # (count, past + longest)
    mask: Tensor | None  # (longest, past + longest); None: causality alone.

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(count, longest, H, D). What stands behind a sequence is seen by itself alone."""
        asked, *read = (
            (x if rows is None else _taken(x, rows.flatten()))
            .view(self.count, -1, *x.shape[1:])
            .transpose(1, 2)
            for x, rows in ((q, self.queries), (k, self.keys), (v, self.keys))
        )
        grouped = q.shape[1] != k.shape[1]
        if grouped and self.mask is not None:
            # With a mask the fused kernels take a key for each query head, or step aside.
            read = [x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in read]
            grouped = False
        keys, values = read
        y = F.scaled_dot_product_attention(
            asked,
            keys,
            values,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=grouped,
        )
        return y.transpose(1, 2)


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    return cast(Tensor, _Taken.apply(x, rows))  # type: ignore[no-untyped-call]


class _Taken(torch.autograd.Function):
    """Rows of `x`, some of them many times: a parent's. Their gradients are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        summed = grad.new_zeros(ctx.shape, dtype=wide)
        summed.index_add_(0, ctx.saved_tensors[0], grad.to(wide))
        return summed.to(grad.dtype), None


def rectangle(q: Tensor, k: Tensor, v: Tensor, batch: Batch, window: int | None) -> Tensor:
    """The fused attention of the library, rectangle by rectangle, on any device."""
    plan = batch.kept.get((rectangle, window))
    if plan is None:
        plan = batch.kept[rectangle, window] = _rectangles(batch, window, q.device)
    rectangles, order = cast(tuple[list[Rectangle], Tensor | None], plan)
    pieces = [some.attend(q, k, v).reshape(-1, *q.shape[1:]) for some in rectangles]
    if order is None:
        return pieces[0]
    return torch.cat(pieces).index_select(0, order)


def _rectangles(
    batch: Batch, window: int | None, device: torch.device
) -> tuple[list[Rectangle], Tensor | None]:
    """The parts of a batch, and where each of its tokens lies in them."""
    lengths, past = batch.lengths, batch.past
    if not any(past) and min(lengths) == max(lengths):
        return [Rectangle(len(lengths), None, None, _mask(0, lengths[0], window, device))], None
    parts: list[list[int]] = []
    for s in sorted(range(len(lengths)), key=lambda s: (-past[s], -lengths[s])):
        longest = parts[-1][0] if parts else s
        if (
            not parts
            or past[s] != past[longest]
            or lengths[s] < (ALIKE * lengths[longest] - ALIKE_TOKENS)
        ):
            parts.append([])
        parts[-1].append(s)
    order = torch.empty(batch.tokens, dtype=torch.long)
    rectangles, start = [], 0
    for part in parts:
        longest = lengths[part[0]]
        queries, keys = [], []
        for row, s in enumerate(part):
            *before, own = (torch.arange(rows.start, rows.stop) for rows in family(batch, s))
            order[own] = start + row * longest + torch.arange(len(own))
            padded = torch.cat([own, own[-1:].expand(longest - len(own))])
            queries.append(padded)
            keys.append(torch.cat([*before, padded]))
        start += len(part) * longest
        mask = _mask(past[part[0]], longest, window, device)
        asked, read = (torch.stack(rows).to(device) for rows in (queries, keys))
        rectangles.append(Rectangle(len(part), asked, read, mask))
    return rectangles, order.to(device)


def _mask(past: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    if not past and (window is None or window >= length):
        return None
    keys = torch.arange(past + length, device=device)
    return visible(keys[past:], keys, window)


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    kv: Tensor | None,
    window: int | None,
    *,
    drop: Drop | None = None,
) -> Tensor:
    """Matrix by matrix. Autograd keeps the probabilities in the dtype of the model, as they came
    and as they were thinned, and the mask of that."""
    assert kv is None, "what lies in a pool is not trained"
    pieces = []
    for s, tile in _tiles(batch, window, q, (k.shape[1], max(batch.lengths))):
        keys, values = (_joined(x, tile.keys) for x in (k, v))
        asked = _by_group(q[tile.rows], k.shape[1])
        probabilities = tile.probabilities(asked, keys)
        if drop is not None:
            heads = probabilities.view(q.shape[1], -1, probabilities.shape[-1])
            probabilities = drop(heads, s).view_as(probabilities)
        y = torch.bmm(probabilities, values.transpose(0, 1))
        pieces.append(_by_token(y, q.shape[1]))
    return torch.cat(pieces)


def lean(q: Tensor, k: Tensor, v: Tensor, batch: Batch, window: int | None) -> Tensor:
    """Tile by tile, for a CPU: its fused backward pass takes longer than plain products."""
    return cast(Tensor, _Lean.apply(q, k, v, batch, window))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Tile:
    """Some queries of a sequence, one after another, and all keys that any of them sees."""

    rows: slice
    keys: list[slice]  # Parts of the flat rows, in order.
    mask: Tensor  # (queries of a group, keys): 0, or minus infinity where none is seen.

    def probabilities(self, asked: Tensor, keys: Tensor) -> Tensor:
        """(G, queries of a group, keys), of queries by group and keys by token."""
        mask = self.mask.unsqueeze(0).expand(len(asked), -1, -1)
        scale = asked.shape[-1] ** -0.5
        scores = torch.baddbmm(mask, asked, keys.permute(1, 2, 0), alpha=scale)
        return scores.softmax(-1)


class _Lean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, window: int | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.batch, ctx.window = batch, window
        y = torch.empty_like(q)
        for _, tile in _tiles(batch, window, q, (k.shape[1], TILE_QUERIES)):
            keys, values = (_joined(x, tile.keys) for x in (k, v))
            probabilities = tile.probabilities(_by_group(q[tile.rows], k.shape[1]), keys)
            read = torch.bmm(probabilities, values.transpose(0, 1))
            y[tile.rows] = _by_token(read, q.shape[1])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        groups, scale = k.shape[1], q.shape[-1] ** -0.5
        # What several sequences see is summed in more digits than it has.
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=wide) for x in (k, v))
        for _, tile in _tiles(ctx.batch, ctx.window, q, (groups, TILE_QUERIES)):
            keys, values = (_joined(x, tile.keys) for x in (k, v))
            asked, dy = (_by_group(x[tile.rows], groups) for x in (q, grads[0]))
            p = tile.probabilities(asked, keys)
            dvalues = torch.bmm(p.transpose(1, 2), dy)
            dp = torch.bmm(dy, values.permute(1, 2, 0))
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype).mul_(scale)
            dq[tile.rows] = _by_token(torch.bmm(ds, keys.transpose(0, 1)), q.shape[1])
            dkeys = torch.bmm(ds.transpose(1, 2), asked)
            for whole, piece in ((dk, dkeys), (dv, dvalues)):
                sizes = [rows.stop - rows.start for rows in tile.keys]
                for rows, part in zip(tile.keys, piece.transpose(0, 1).split(sizes), strict=True):
                    whole[rows] += part
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _tiles(
    batch: Batch, window: int | None, q: Tensor, sizes: tuple[int, int]
) -> Iterator[tuple[int, Tile]]:
    """A batch's tiles of at most so many queries, `sizes` being the groups and that number."""
    key = (_tiles, window, q.dtype, *sizes)
    tiles = batch.kept.get(key)
    if tiles is None:
        tiles = batch.kept[key] = _planned(batch, window, q, sizes)
    return iter(cast(Sequence[tuple[int, Tile]], tiles))


def _planned(
    batch: Batch, window: int | None, q: Tensor, sizes: tuple[int, int]
) -> list[tuple[int, Tile]]:
    groups, queries_max = sizes
    masks: dict[tuple[int, int, int], Tensor] = {}
    tiles = []
    for s, (length, past) in enumerate(zip(batch.lengths, batch.past, strict=True)):
        *before, own = family(batch, s)
        for at in range(0, length, queries_max):
            end = min(at + queries_max, length)
            low = 0 if window is None or queries_max >= length else max(0, past + at + 1 - window)
            shape = (past + at - low, end - at, past + end - low)
            if shape not in masks:
                masks[shape] = _additive(shape, window, q, q.shape[1] // groups)
            keys = [slice(rows.start + low, rows.stop) for rows in before if low < past]
            keys.append(slice(own.start + max(0, low - past), own.start + end))
            rows = slice(own.start + at, own.start + end)
            tiles.append((s, Tile(rows, keys, masks[shape])))
    return tiles


def _additive(
    shape: tuple[int, int, int], window: int | None, like: Tensor, queries: int
) -> Tensor:
    """The mask of tokens of which the first has so many keys before it, for a group's queries."""
    first, length, keys = shape
    places = torch.arange(keys, device=like.device)
    seen = visible(places[first : first + length], places, window)
    return like.new_zeros(seen.shape).masked_fill_(~seen, float("-inf")).repeat(queries, 1)


def _joined(x: Tensor, parts: Sequence[slice]) -> Tensor:
    return x[parts[0]] if len(parts) == 1 else torch.cat([x[rows] for rows in parts])


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(tokens, heads, D) as (G, heads of a group x tokens, D)."""
    d = x.shape[-1]
    x = x.reshape(len(x), groups, -1, d).permute(1, 2, 0, 3)
    return x.reshape(groups, -1, d)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """The reverse of `_by_group`."""
    return x.reshape(heads, -1, x.shape[-1]).transpose(0, 1)
