"""Sampler: a step's logits to tokens, all rows at once (gpt.generation.reference_sampler: one).

Each slot's rules are numbers in a table, gathered per step, so that a rule costs a few operations
for the batch and a row's token never depends on its mates. What only some rows have (penalties,
bans, guides, scores) is computed for those rows alone. Knows nothing of steps, blocks or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.cpu.packed_linear import best
from gpt.device_transfers import Coming, to_device
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import Tokenizer
from serving.messages import Begin, Scored
from serving.worker.guided_decoding import Guides
from serving.worker.token_bans import Bans

# Columns of the table of numbers.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _TYPICAL_P = range(5)
_REPETITION, _PRESENCE, _FREQUENCY, _UNIFORM = range(5, 9)

# How many of the likeliest tokens are looked at for top-k and top-p, and of the most typical ones,
# before all are sorted.
_SIZES = (256, 4096)
# Rows that are scored at once: their weights are a second copy of the logits.
_SCORED_ROWS_MAX = 64

_NEVER = float("-inf")
Numbers = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Drawn:
    """Tokens on the device, and on their way to the host."""

    tokens: Tensor
    slots: Sequence[int]
    told: Coming  # The tokens; behind them, if there are any, scores of the rows that asked.
    asked: Ints
    counts: Ints  # Of alternatives, for each row.


@dataclass(frozen=True)
class Chosen:
    """A token for each row; if any row asked for scores, one for each (nothing for the others).

    `broken` are the rows whose guide cannot go on: their tokens mean nothing.
    """

    tokens: list[int]
    scores: list[Scored] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)


class Sampler:
    """The state of all slots on `device`. A slot that begins anew forgets what was in it."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        tokenizer_of_guides: Tokenizer | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._numbers: Numbers = np.zeros((slots, 9))
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._tops = np.full(slots, -1)  # -1: no scores.
        self._plain = np.ones(slots, dtype=np.bool_)
        self._asks_more = set[int]()  # Slots that want more than the likeliest token of all.
        self._bans: dict[int, Bans] = {}
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._decays: dict[int, _Decay] = {}
        self._history = _History(slots, vocab_size, self._device)
        self._guides = Guides(tokenizer_of_guides, vocab_size)

    def begin(self, begin: Begin) -> None:
        """The slot's rules, and the state that they are in after `begin.made`."""
        slot, rule = begin.slot, begin.sampling
        self._numbers[slot] = (
            *(rule.temperature, rule.top_k, rule.top_p, rule.min_p, rule.typical_p),
            *(rule.repetition_penalty, rule.presence_penalty, rule.frequency_penalty, 0.0),
        )
        self._seeds[slot] = rule.seed
        self._tops[slot] = -1 if rule.logprobs is None else rule.logprobs
        # One that only must not end yet has the likeliest token too, as long as that is no end.
        self._plain[slot] = replace(rule, min_new_tokens=0).plain and begin.guide is None
        for kept in (self._bans, self._biases, self._decays):
            kept.pop(slot, None)
        self._history.drop(slot)
        self._guides.drop(slot)
        if rule.logit_bias:
            known = {i: bias for i, bias in rule.logit_bias if 0 <= i < self._vocab_size}
            self._biases[slot] = (
                torch.tensor(list(known), dtype=torch.long, device=self._device),
                torch.tensor(list(known.values()), dtype=torch.float64, device=self._device),
            )
        if rule.repetition_penalty != 1 or rule.presence_penalty or rule.frequency_penalty:
            self._history.begin(slot, begin.prompt, begin.made)
        if rule.length_decay is not None:
            stops = [token for token in rule.stop_token_ids if 0 <= token < self._vocab_size]
            ids = torch.tensor(stops, dtype=torch.long, device=self._device)
            self._decays[slot] = _Decay(rule, len(begin.prompt), ids)
        if Bans.needed(rule, len(begin.made)):
            self._bans[slot] = Bans(rule, begin.prompt, begin.made, self._vocab_size)
        alone = self._plain[slot] and rule.logprobs is None and slot not in self._bans
        (self._asks_more.discard if alone else self._asks_more.add)(slot)
        if begin.guide is not None:
            self._guides.begin(slot, begin.guide, rule.stop_token_ids, begin.made)

    def choose(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Chosen:
        """A token for each row of `logits` (R, V); `positions` are those that the tokens get."""
        return self.read(self.draw(logits, slots, positions))

    def best_alone(self, slots: Sequence[int]) -> bool:
        """Whether the likeliest token of each one's logits is all that is wanted of them."""
        return self._asks_more.isdisjoint(slots)

    def draw(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Drawn:
        """The choice, which a device may still be making when this returns."""
        at, places = np.asarray(slots, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        shaped = np.flatnonzero(~self._plain[at])
        if len(shaped) == len(at):
            tokens = self._shaped(logits.to(torch.float64, copy=True), at, places)
        else:
            tokens = best(logits)
            shaped = np.concatenate([shaped, self._early(tokens, at)])
            if len(shaped):
                rows = to_device(shaped, logits.device)
                few = logits[rows].to(torch.float64)
                tokens[rows] = self._shaped(few, at[shaped], places[shaped])
        self._history.push(at, tokens)
        asked = np.flatnonzero(self._tops[at] >= 0)
        counts = np.minimum(self._tops[at], logits.shape[-1])
        told = Coming(self._scored(logits, tokens, asked, counts))
        return Drawn(tokens, slots, told, asked, counts)

    def read(self, drawn: Drawn) -> Chosen:
        """What was drawn, as soon as the device has. Steps must be read as they were drawn."""
        slots = drawn.slots
        ids, scores = _told(drawn)
        for slot, token in zip(slots, ids, strict=True) if self._bans else ():
            if slot in self._bans:
                self._bans[slot].push(token)
        broken = []
        for row, slot in enumerate(slots) if self._guides else ():
            if slot in self._guides and not self._guides.push(slot, ids[row]):
                broken.append(row)
        return Chosen(ids, scores, broken)

    def scores(self, logits: Tensor, targets: Sequence[int], tops: int) -> list[Scored]:
        """Each target's score in its row of `logits` (N, V), with the `tops` best."""
        own = torch.tensor(targets, dtype=torch.long, device=logits.device)
        rows = _score(logits, own, tops).tolist()
        return [_read(row, min(tops, logits.shape[-1])) for row in rows]

    def _early(self, tokens: Tensor, slots: Ints) -> Ints:
        """Rows that would end, and must not yet."""
        rows = (
            [row for row, slot in enumerate(slots) if slot in self._bans and self._plain[slot]]
            if self._bans
            else []
        )
        if not rows:  # To look at tokens waits for the device.
            return np.zeros(0, dtype=np.int64)
        ids = tokens.tolist()
        early = [row for row in rows if self._bans[slots[row]].keeps_from(ids[row])]
        return np.array(early, dtype=np.int64)

    def _shaped(self, x: Tensor, slots: Ints, positions: Ints) -> Tensor:
        """The tokens of rows that some rule shapes. `x` is theirs in fp64, and is spoilt."""
        numbers = self._numbers[slots]
        numbers[:, _UNIFORM] = uniforms(self._seeds[slots], positions)
        of_rows = to_device(numbers, x.device)
        for row, slot in enumerate(slots) if self._biases else ():
            if slot in self._biases:
                tokens, bias = self._biases[slot]
                x[row, tokens] += bias
        self._history.penalise(x, slots, of_rows)
        for row, slot in enumerate(slots) if self._decays else ():
            if slot in self._decays:
                self._decays[slot].apply(x[row], int(positions[row]))
        self._ban(x, slots)
        drawn = np.flatnonzero(numbers[:, _TEMPERATURE] > 0)
        if len(drawn) == len(slots):
            return draw(x, numbers, of_rows)
        greedy = x.argmax(-1)
        if len(drawn):
            rows = to_device(drawn, x.device)
            greedy[rows] = draw(x[rows], numbers[drawn], of_rows[rows])
        return greedy

    def _ban(self, x: Tensor, slots: Ints) -> None:
        """Bans, those that must hold first; one that would leave nothing of a row is skipped."""
        guided = [row for row, slot in enumerate(slots) if slot in self._guides]
        if guided:
            _forbid(x, guided, ~self._guides.allowed([int(slots[row]) for row in guided]))
        banned = [(row, self._bans[slot]) for row, slot in enumerate(slots) if slot in self._bans]
        for ban in (Bans.strangers, Bans.words, Bans.repeats, Bans.ends):
            masks = [(row, mask) for row, one in banned if (mask := ban(one)) is not None]
            if masks:
                _forbid(x, [row for row, _ in masks], np.stack([mask for _, mask in masks]))

    def _scored(self, logits: Tensor, tokens: Tensor, asked: Ints, counts: Ints) -> Tensor:
        """The tokens and the scores that were asked for, for one copy to the host."""
        if not len(asked):
            return tokens
        rows = to_device(asked, logits.device)
        few = logits if len(asked) == len(counts) else logits[rows]
        scored = _score(few, tokens[rows], int(counts.max()))
        # Ids are exact in fp64 up to 2^53.
        return torch.cat([tokens.to(torch.float64), scored.flatten()])


def _told(drawn: Drawn) -> tuple[list[int], list[Scored]]:
    """Tokens and scores on the host."""
    flat, count = drawn.told.read().tolist(), len(drawn.slots)
    if not len(drawn.asked):
        return flat, []
    ids, rest = [int(one) for one in flat[:count]], flat[count:]
    width = len(rest) // len(drawn.asked)
    scores = [Scored(0.0)] * count
    for place, row in enumerate(drawn.asked):
        numbers = rest[place * width : (place + 1) * width]
        scores[row] = _read(numbers, int(drawn.counts[row]))
    return ids, scores


def uniforms(seeds: NDArray[np.uint64], positions: Ints) -> Numbers:
    """`gpt.sampling_params.uniform` for many: SplitMix64, whose numbers wrap."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn: Numbers = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / 2.0**53
    return drawn


def draw(x: Tensor, numbers: Numbers, of_rows: Tensor) -> Tensor:
    """A token for each row of shaped logits (R, V), which become weights in place.

    `numbers` has the rows' rules on the host, `of_rows` the same on the device.
    """
    x.sub_(x.amax(-1, keepdim=True)).div_(of_rows[:, _TEMPERATURE, None]).exp_()
    floor = of_rows[:, _MIN_P].clone()
    top_k, top_p = numbers[:, _TOP_K], numbers[:, _TOP_P]
    narrow = np.flatnonzero(((top_k > 0) & (top_k < x.shape[-1])) | (top_p < 1))
    if len(narrow):
        rows = to_device(narrow, x.device)
        few = x if len(narrow) == len(x) else x[rows]
        least = _floor(few, of_rows[rows], _SIZES, counted=bool(top_k.any()))
        floor[rows] = torch.maximum(floor[rows], least)
    if len(narrow) or numbers[:, _MIN_P].any():
        x.masked_fill_(x < floor.unsqueeze(-1), 0)
    typical = np.flatnonzero(numbers[:, _TYPICAL_P] < 1)
    if len(typical):
        rows = to_device(typical, x.device)
        few = x[rows]
        x[rows] = few.masked_fill(_untypical(few, of_rows[rows, _TYPICAL_P, None]), 0)
    cumulated = x.cumsum(-1)
    targets = of_rows[:, _UNIFORM, None] * cumulated[:, -1:]
    picked = torch.searchsorted(cumulated, targets, right=True).squeeze(-1)
    return picked.clamp(max=x.shape[-1] - 1)  # A row that is not finite finds no place.


def _floor(weights: Tensor, of_rows: Tensor, sizes: Sequence[int], *, counted: bool) -> Tensor:
    """The least weight that top-k and top-p keep of each row (R, V), by its `size` likeliest.

    A row for which those are too few is looked at again, with more; each row by the same rule,
    whatever its mates need. `counted`: some row has a top-k, which makes less the whole of top-p.
    """
    vocabulary = weights.shape[-1]
    # To ask whether some row needs more would halt a device that runs ahead; it sorts all instead.
    size = min(vocabulary, sizes[0] if sizes and weights.device.type == "cpu" else vocabulary)
    best = weights.topk(size).values
    k, p = of_rows[:, _TOP_K, None].long(), of_rows[:, _TOP_P, None]
    kth = best.gather(-1, (k - 1).clamp(0, size - 1))
    kth = torch.where((k > 0) & (k <= size), kth, 0)
    whole = weights.masked_fill(weights < kth, 0) if counted else weights
    total = whole.sum(-1, keepdim=True)
    # A token stays while those before it have not reached top_p; so the first always stays.
    before = best.cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    kept = (best >= kth) & ((before < p * total) | (p >= 1))
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    floor = best.gather(-1, last).squeeze(-1)
    if size == vocabulary:
        return floor
    edge = best[:, -1]
    unsure = ((k.squeeze(-1) > size) | ((floor <= edge) & (edge > 0))).nonzero().squeeze(-1)
    if len(unsure):
        floor[unsure] = _floor(weights[unsure], of_rows[unsure], sizes[1:], counted=counted)
    return floor


def _untypical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Those (R, V) that typical-p leaves out: whose surprise is too far from the expected one."""
    p = weights / weights.sum(-1, keepdim=True)
    distance = p.log().add_(torch.special.entr(p).sum(-1, keepdim=True)).abs_()
    return distance > _reach(distance, p, typical_p, _SIZES)


def _reach(distance: Tensor, p: Tensor, typical_p: Tensor, sizes: Sequence[int]) -> Tensor:
    """How far (R, 1) the nearest go that make up `typical_p`; looked for as in `_floor`."""
    vocabulary = p.shape[-1]
    size = min(vocabulary, sizes[0] if sizes and p.device.type == "cpu" else vocabulary)
    nearest = distance.topk(size, largest=False)
    less = p.gather(-1, nearest.indices).cumsum(-1) < typical_p
    reach = nearest.values.gather(-1, less.sum(-1, keepdim=True).clamp(max=size - 1))
    if size == vocabulary:
        return reach
    unsure = less[:, -1].nonzero().squeeze(-1)
    if len(unsure):
        rest = (distance[unsure], p[unsure], typical_p[unsure])
        reach[unsure] = _reach(*rest, sizes[1:])
    return reach


def _forbid(x: Tensor, rows: Sequence[int], banned: NDArray[np.bool_]) -> None:
    """What `banned` (N, V) says of these rows may not be drawn, where that leaves anything."""
    at = to_device(np.array(rows), x.device)
    few = x[at]
    left = few.masked_fill(to_device(banned, x.device), _NEVER)
    nothing = left.amax(-1, keepdim=True) == _NEVER
    x[at] = torch.where(nothing, few, left)


def _score(logits: Tensor, tokens: Tensor, tops: int) -> Tensor:
    """For each row: log-probability, rank, then ids and log-probabilities of the `tops` best."""
    told = []
    tops = min(tops, logits.shape[-1])
    for few, own in zip(
        logits.split(_SCORED_ROWS_MAX), tokens.split(_SCORED_ROWS_MAX), strict=True
    ):
        wide = few.to(torch.promote_types(few.dtype, torch.float32))
        all_ = wide.logsumexp(-1, keepdim=True)
        mine = wide.gather(-1, own.unsqueeze(-1))
        rank = 1 + (wide > mine).sum(-1, keepdim=True)
        parts = [mine - all_, rank]
        if tops:
            ids = _best(wide, tops)
            parts += [ids, wide.gather(-1, ids) - all_]
        told.append(torch.cat([part.to(torch.float64) for part in parts], dim=-1))
    return torch.cat(told) if told else torch.zeros(0, 2 + 2 * tops, dtype=torch.float64)


def _best(logits: Tensor, tops: int) -> Tensor:
    """Ids of the `tops` best of each row (R, V), best first; of equals the lower id first."""
    if logits.device.type != "cpu":  # Where to ask would halt a device that runs ahead.
        return logits.sort(stable=True, descending=True, dim=-1).indices[:, :tops]
    # One more than wanted tells whether the last place is contested; `topk` settles ties anyhow.
    values, ids = logits.topk(min(tops + 1, logits.shape[-1]))
    ids = ids.sort(-1).values
    order = logits.gather(-1, ids).sort(stable=True, descending=True, dim=-1).indices
    best = ids.gather(-1, order)[:, :tops]
    if values.shape[-1] == tops or not bool((values[:, -1] == values[:, -2]).any()):
        return best
    return logits.sort(stable=True, descending=True, dim=-1).indices[:, :tops]


def _read(numbers: Sequence[float], tops: int) -> Scored:
    logprob, rank, *best = numbers
    most = len(best) // 2
    ids, logprobs = best[:tops], best[most : most + tops]
    return Scored(logprob, int(rank), [(int(i), p) for i, p in zip(ids, logprobs, strict=True)])


@dataclass(frozen=True)
class _Decay:
    """The length decay of one slot. A position tells how much was made before it."""

    rule: Sampling
    prompt_tokens: int
    stops: Tensor

    def apply(self, x: Tensor, position: int) -> None:
        """To a row of logits (V,), in place."""
        growth = self.rule.growth(position - self.prompt_tokens)
        if growth:
            ends = x[self.stops]
            x[self.stops] = ends + ends.abs() * growth


class _History:
    """The tokens of the sequences that have penalties, on the device; a row for each.

    A penalty touches only tokens that were seen, so they are kept in order, with what came twice
    twice: both places then are given the same new logit. Rows are made when first needed.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._row = np.full(slots, -1)  # Of each slot.
        self._free: list[int] = []
        self._lengths = np.zeros(0, dtype=np.int64)
        self._ids = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # Of made ones.

    def begin(self, slot: int, prompt: Sequence[int], made: Sequence[int]) -> None:
        seen = [token for token in (*prompt, *made) if 0 <= token < self._vocab_size]
        again = [token for token in made if 0 <= token < self._vocab_size]
        if not self._free:
            self._grow_rows()
        row = self._row[slot] = self._free.pop()
        self._fit(len(seen))
        self._lengths[row] = len(seen)
        self._ids[row, : len(seen)] = torch.tensor(seen, dtype=torch.long, device=self._device)
        counts = np.bincount(np.asarray(again, dtype=np.int64), minlength=self._vocab_size)
        self._counts[row] = torch.from_numpy(counts).to(self._device, torch.int32)

    def drop(self, slot: int) -> None:
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1

    def penalise(self, x: Tensor, slots: Ints, of_rows: Tensor) -> None:
        """Penalties on the logits `x` (R, V) of these slots, in place."""
        places, rows = self._rows(slots)
        used = self._lengths[rows] > 0
        places, rows = places[used], rows[used]
        if not len(rows):
            return
        lengths = self._lengths[rows]
        ids = self._ids[to_device(rows, self._device), : lengths.max()]
        # Past its end a row repeats its first token, which is as good as any.
        there = torch.arange(ids.shape[1], device=self._device)
        past = there >= to_device(lengths, self._device).unsqueeze(-1)
        ids = torch.where(past, ids[:, :1], ids)
        of_x = to_device(places, self._device).unsqueeze(-1)
        count = self._counts[to_device(rows, self._device).unsqueeze(-1), ids]
        numbers = of_rows[of_x.squeeze(-1)]
        repetition = numbers[:, _REPETITION, None]
        old = x[of_x, ids]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new = new - numbers[:, _FREQUENCY, None] * count
        x[of_x, ids] = new - numbers[:, _PRESENCE, None] * (count > 0)

    def push(self, slots: Ints, tokens: Tensor) -> None:
        """Each of these slots' sequences has a new token."""
        places, rows = self._rows(slots)
        if not len(rows):
            return
        self._fit(int(self._lengths[rows].max()) + 1)
        at = to_device(rows, self._device)
        made = tokens[to_device(places, self._device)]
        self._ids[at, to_device(self._lengths[rows], self._device)] = made
        self._counts[at, made] += 1
        self._lengths[rows] += 1

    def _rows(self, slots: Ints) -> tuple[Ints, Ints]:
        """Places in `slots` that have a row, and the rows."""
        rows = self._row[slots]
        places = np.flatnonzero(rows >= 0)
        return places, rows[places]

    def _grow_rows(self) -> None:
        have = len(self._lengths)
        more = max(4, have)
        self._free += range(have, have + more)
        self._lengths = np.concatenate([self._lengths, np.zeros(more, dtype=np.int64)])
        self._ids = torch.cat([self._ids, self._ids.new_zeros(more, self._ids.shape[1])])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._vocab_size)])

    def _fit(self, length: int) -> None:
        have = self._ids.shape[1]
        if length > have:
            more = max(length - have, have, 256)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(len(self._ids), more)], dim=1)
