"""The best way to serve a workload: splits, batches, KV memory and replicas, all of them tried.

What has no room is refused by bytes alone. The rest is played through by
`planning.inference.estimate`: a coarse grid of everything first, then all that is near to the best
of it. Of those that keep the limits, with a margin, the objective takes one. What is not taken
keeps its reason. No torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.sharding import check_split
from planning.hardware import divisors
from planning.inference.estimate import (
    BLOCK_TOKENS,
    ServingEstimate,
    ServingSplit,
    Workload,
    estimate_serving,
)
from planning.inference.objective import POSTURES, USUAL, Posture, Room, Wish, kv_wanted, room_of
from planning.inference.service_levels import LOAD_MAX, broken, score
from planning.memory_ledger import Ledger
from planning.plan import Standing

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
COARSE = (1, 4, 16, 64, 256)
STAGES_MAX = 16
STAGES_BEYOND = 2  # Of those that hold the model, with as many tensor ranks.
SPARSE = (16, 64)  # Batches of splits that are seldom the best, and take long to play.
TIE = 0.02  # Predictions are no better than that: among such, what is simpler wins.
FEW = 3  # So few splits are looked at closely all.
BEST = 3  # Else so many.


@dataclass(frozen=True)
class Candidate:
    split: ServingSplit
    standing: Standing
    estimate: ServingEstimate | None = None
    reason: str = ""
    memory: Ledger | None = None
    whole: bool = False  # It stands for all of its tp and pp.
    gpus_needed: int = 0  # Where there are too few of them for the requests that come.
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    wish: Wish
    best: Candidate | None
    others: Sequence[Candidate]  # The best ones first, then what is refused.

    @property
    def all(self) -> list[Candidate]:
        return [*([self.best] if self.best else []), *self.others]


def search_serving(wish: Wish) -> Found:
    """Everything that was looked at, judged."""
    return _Search(wish).found()


def figures_of(load: Workload, split: ServingSplit, estimate: ServingEstimate) -> dict[str, float]:
    requests_per_s, tokens_per_s = estimate.requests_per_s, estimate.tokens_per_s
    concurrency = estimate.concurrency
    if load.request_rate is not None and math.isfinite(estimate.request_ms.mean):
        # What comes is what goes; the requests that were played are a sample of them.
        requests_per_s = load.request_rate
        tokens_per_s = requests_per_s * load.output_tokens.mean
        concurrency = requests_per_s * estimate.request_ms.mean / 1000
    return {
        "tokens_per_s_per_gpu": tokens_per_s / split.gpus,
        "itl_ms_p95": estimate.itl_ms.p95,
        "ttft_ms_p95": estimate.ttft_ms.p95,
        "request_ms_p95": estimate.request_ms.p95,
        "tokens_per_s": tokens_per_s,
        "gpus": float(split.gpus),
        "memory_bytes": float(estimate.memory.total),
        "requests_per_s": requests_per_s,
        "concurrency": concurrency,
        "itl_ms_p50": estimate.itl_ms.p50,
        "ttft_ms_p50": estimate.ttft_ms.p50,
        "request_ms_p50": estimate.request_ms.p50,
        "itl_ms_mean": estimate.itl_ms.mean,
        "ttft_ms_mean": estimate.ttft_ms.mean,
        "request_ms_mean": estimate.request_ms.mean,
    }


def splits(
    model: GPTConfig, gpus_per_node: int, gpus: int, stages_max: int = STAGES_MAX
) -> Iterator[tuple[int, int]]:
    """Every tp and pp that the model can have, the smaller ones first."""
    stages = [pp for pp in divisors(model.num_layers) if pp <= stages_max]
    # Ranks of one copy fill a node evenly, or one of them would be cut in two.
    pairs = [(tp, pp) for tp in divisors(gpus_per_node) for pp in stages]
    for tp, pp in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1])):
        if tp * pp <= gpus:
            try:
                check_split(model, tp, pp)
            except ConfigError:
                continue
            yield tp, pp


@dataclass
class _Search:
    wish: Wish
    candidates: dict[ServingSplit, Candidate] = field(default_factory=dict)
    _capacities: dict[ServingSplit, float] = field(default_factory=dict)
    _staged: set[tuple[int, int]] = field(default_factory=set)

    def found(self) -> Found:
        wish, rooms = self.wish, dict[tuple[int, int], Room]()
        for tp, pp in splits(wish.model, wish.cluster.gpus_per_node, wish.gpus):
            # More stages than it takes save no time; some more leave room for a larger batch.
            if sum(one[0] == tp for one in rooms) == STAGES_BEYOND:
                continue
            room = room_of(wish, tp, pp, 1, USUAL)
            if room.tokens:
                rooms[tp, pp] = room
            else:
                split = ServingSplit(tp, pp, 1, 1)
                self.candidates[split] = Candidate(
                    split, "rejected", None, room.reason, room.memory, whole=True
                )
        self._staged = {pair for pair in rooms if self._is_staged(pair, rooms)}
        pairs = [(one, replicas) for one in rooms for replicas in self._replicas(*one)]
        few = len(pairs) <= FEW
        for pair, replicas in pairs:
            self._too_many(pair, replicas, rooms[pair])
            grid = SPARSE if pair in self._staged else BATCHES if few else COARSE
            batches = self._batches(rooms[pair], replicas, grid)
            self._grow(pair, replicas, batches, POSTURES if few else (USUAL,))
        if not few:
            for one in self._leading():
                self._near(one, rooms[one.split.tp, one.split.pp])
        return self._judge()

    # ---------------------------------------------------------------------------- what there is

    @staticmethod
    def _is_staged(pair: tuple[int, int], rooms: Mapping[tuple[int, int], Room]) -> bool:
        """More stages than are needed: they save no time of a request."""
        tp, pp = pair
        whole = any(stages == 1 for _, stages in rooms)
        return pp > min(stages for ranks, stages in rooms if ranks == tp) or (pp > 1 and whole)

    def _replicas(self, tp: int, pp: int) -> list[int]:
        """How many copies to try; of an open loop, from what one can answer on."""
        wish, most = self.wish, self.wish.gpus // (tp * pp)
        if wish.workload.request_rate is not None:
            return [0]  # Each batch has its own least.
        if wish.fill:
            return counts(most) if wish.objective == "gpus" else [most]
        if (tp, pp) in self._staged:
            return [max(1, min(most, wish.workload.concurrency or 1))]
        assert wish.workload.concurrency is not None
        return counts(min(most, wish.workload.concurrency))

    def _batches(self, room: Room, replicas: int, grid: Sequence[int]) -> list[int]:
        """Up to what memory holds, and up to the first that all who call fit in."""
        asked = self.wish.workload.concurrency
        needed = room.batch_max
        if asked is not None and not self.wish.fill:
            needed = min(needed, -(-asked // max(1, replicas)))
        chosen = [batch for batch in grid if batch < needed]
        return [*chosen, min(needed, grid[-1])]

    def _too_many(self, pair: tuple[int, int], replicas: int, room: Room) -> None:
        """The first batch that memory does not hold, with that as its reason."""
        batch = next((one for one in BATCHES if one > room.batch_max), None)
        if batch is not None and batch in self._batches(
            replace(room, batch_max=batch), replicas, BATCHES
        ):
            split = ServingSplit(*pair, max(1, replicas), batch, max(batch, USUAL.step_tokens))
            reason = (
                f"memory holds {room.tokens:,} tokens of keys and values, which is "
                f"{room.batch_max} requests of {self.wish.usual:,}"
            )
            self.candidates[split] = Candidate(split, "rejected", None, reason)

    def _leading(self) -> list[Candidate]:
        """The best of each split, of the best splits; where none keeps the limits, the nearest."""
        best: dict[tuple[int, int, int], Candidate] = {}
        for one in sorted(self.candidates.values(), key=self._worth, reverse=True):
            split = one.split
            if one.estimate is not None:
                best.setdefault((split.tp, split.pp, split.replicas), one)
        return list(best.values())[:BEST]

    def _near(self, one: Candidate, room: Room) -> None:
        """Batches around it, in each posture."""
        split = one.split
        reach = 2 if split.pp > 1 else 4
        low, high = split.running_requests_max // reach, split.running_requests_max * reach
        batches = self._batches(room, split.replicas, BATCHES)
        replicas = 0 if self.wish.workload.request_rate is not None else split.replicas
        near = [batch for batch in batches if low <= batch <= high]
        self._grow((split.tp, split.pp), replicas, near, POSTURES)

    def _grow(
        self,
        pair: tuple[int, int],
        replicas: int,
        batches: Sequence[int],
        postures: Sequence[Posture],
    ) -> None:
        """Larger and larger batches, until there is room for twice as many as come."""
        for posture in postures:
            for batch in batches:
                one = self._try(pair, replicas, batch, posture)
                if one is None or one.standing == "rejected" or self.wish.fill:
                    continue
                if 2 * one.figures["concurrency"] < batch * one.split.replicas:
                    break

    # ---------------------------------------------------------------------------- one candidate

    def _try(
        self, pair: tuple[int, int], replicas: int, batch: int, posture: Posture
    ) -> Candidate | None:
        """The last of those that were looked at; None: there is no room for such a batch."""
        wish, (tp, pp) = self.wish, pair
        # Each that runs needs a token of a step.
        step_tokens = max(posture.step_tokens, -(-batch // BLOCK_TOKENS) * BLOCK_TOKENS)
        room = room_of(wish, tp, pp, batch, Posture(step_tokens, posture.stall_ms))
        split = ServingSplit(tp, pp, 1, batch, step_tokens, None, posture.stall_ms)
        if batch > room.batch_max:
            return None
        split = replace(split, kv_tokens=kv_wanted(wish, room, batch))
        if replicas:
            return self._note(replace(split, replicas=replicas), room)
        least = self._least(split)
        most = wish.gpus // (tp * pp)
        if least > most:
            one = replace(split, replicas=max(1, most))
            each = self._capacity(split)
            reason = (
                f"a replica answers {each:.3g} requests/s at most, so for "
                f"{wish.workload.request_rate:g} it takes {least} of them, {least * tp * pp} GPUs; "
                f"{wish.gpus} may be used"
            )
            needed = least * tp * pp
            noted = Candidate(one, "rejected", None, reason, gpus_needed=needed)
            self.candidates[one] = noted
            return noted
        tried = [least, *(count for count in counts(most) if count > least)]
        before = math.inf
        for count in tried:
            noted = self._note(replace(split, replicas=count), room)
            request_ms = noted.figures.get("request_ms_p95", math.inf)
            gain, before = before - request_ms, request_ms
            # More replicas only make it quicker, as long as requests wait for each other.
            quick = wish.objective != "latency" or gain < TIE * request_ms
            if noted.standing != "rejected" and quick:
                break
        return noted

    def _note(self, split: ServingSplit, room: Room) -> Candidate:
        if split not in self.candidates:
            self.candidates[split] = self._judged(split, room)
        return self.candidates[split]

    def _judged(self, split: ServingSplit, room: Room) -> Candidate:
        wish = self.wish
        estimate = estimate_serving(
            *(wish.model, wish.dtype, self._load(split), split, wish.cluster, wish.costs)
        )
        if math.isinf(estimate.utilization):  # The estimate found no room where we saw some.
            reason = f"memory holds {estimate.kv_tokens} tokens of keys and values"
            return Candidate(split, "rejected", None, reason, estimate.memory)
        load = self._load(split)
        figures = figures_of(load, split, estimate)
        reason = broken(wish.limits, load, figures)
        if math.isinf(estimate.request_ms.mean):
            reason = "more requests come than it answers"
        standing: Standing = "rejected" if reason else room.standing
        return Candidate(split, standing, estimate, reason, estimate.memory, figures=figures)

    def _load(self, split: ServingSplit) -> Workload:
        return self.wish.load(split.running_requests_max, split.replicas)

    def _least(self, split: ServingSplit) -> int:
        """Replicas that answer what comes, and have some time left."""
        assert self.wish.workload.request_rate is not None
        capacity = self._capacity(split)
        if capacity <= 0:
            return self.wish.gpus + 1
        return max(1, math.ceil(self.wish.workload.request_rate / (LOAD_MAX * capacity)))

    def _capacity(self, split: ServingSplit) -> float:
        """Requests a second of one replica that is never short of them."""
        wish = self.wish
        if split not in self._capacities:
            full = replace(wish.workload, request_rate=None, concurrency=split.running_requests_max)
            estimate = estimate_serving(
                *(wish.model, wish.dtype, full, split, wish.cluster, wish.costs)
            )
            self._capacities[split] = estimate.requests_per_s
        return self._capacities[split]

    # ------------------------------------------------------------------------------ the verdict

    def _judge(self) -> Found:
        all_of = sorted(self.candidates.values(), key=self._worth, reverse=True)
        for standing in ("fits", "tight"):
            good = [one for one in all_of if one.standing == standing]
            if good:
                best = self._simplest(good)
                return Found(
                    self.wish,
                    replace(best, standing="best"),
                    [one for one in all_of if one is not best],
                )
        return Found(self.wish, None, all_of)

    def _worth(self, one: Candidate) -> tuple[int, float, float]:
        """What sorts candidates: fits, tight, rejected; then the objective."""
        rank = ("rejected", "tight", "fits").index(one.standing)
        if one.estimate is None:
            return rank - 1, 0.0, 0.0
        figures = one.figures
        # Among those that break a limit, whoever breaks it least is nearest.
        slack = min([held.slack for held in self.wish.limits.held(figures)], default=0.0)
        return rank, min(0.0, slack), self._score(one)

    def _score(self, one: Candidate) -> float:
        return score(self.wish.objective, self._load(one.split), one.figures)

    def _simplest(self, good: Sequence[Candidate]) -> Candidate:
        """Of those that are as good as the best one, as far as one can tell."""
        wish = self.wish
        few = wish.objective == "gpus" or wish.workload.request_rate is not None
        if few and wish.objective != "latency":
            fewest = min(one.split.gpus for one in good)
            good = [one for one in good if one.split.gpus == fewest]
            return self._least_of(good, lambda one: one.figures["request_ms_p95"])
        return self._least_of(good, lambda one: -score(wish.objective, wish.workload, one.figures))

    def _least_of(
        self, good: Sequence[Candidate], value: Callable[[Candidate], float]
    ) -> Candidate:
        least = min(map(value, good))
        alike = [one for one in good if value(one) <= least + TIE * abs(least)]

        def effort(one: Candidate) -> tuple[float, ...]:
            split, held = one.split, one.memory
            total = held.total if held is not None else 0
            # Where clients come as they like, room for more of them costs nothing.
            batch = split.running_requests_max * (1 if self.wish.closed else -1)
            return split.gpus, split.tp * split.pp, batch, total, value(one)

        return min(alike, key=effort)


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most there can be."""
    powers = [1 << place for place in range(most.bit_length())]
    return sorted({*(count for count in powers if count <= most), most} - {0})
