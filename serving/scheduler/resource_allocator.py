"""Who runs, in which slot and blocks, and who loses its place to whom.

The pool is lent out block by block as sequences grow. When it runs short, the lowest of those that
run goes back to wait: its published blocks stay cached, and what is lost is computed again. Nobody
takes from one that ranks higher, so the highest always gets through. It knows no turns.
"""

from serving.config import ServerConfig
from serving.messages import Made, Rewrite, Submission, Table
from serving.scheduler.adapter_slots import AdapterRows
from serving.scheduler.block_pool import Blocks
from serving.scheduler.prefix_cache import Match, Prefixes
from serving.scheduler.sequence import Sequence, Standing
from serving.scheduler.step_builder import Draft
from serving.scheduler.waiting_queue import Waiting


class Room:
    def __init__(
        self, vocab_size: int, blocks: int, config: ServerConfig, waiting: Waiting, digest: str
    ) -> None:
        self._vocab_size = vocab_size
        self._size = config.kv_block_tokens
        self._age_s = config.priority_age_s
        self._waiting = waiting
        self.blocks = Blocks(blocks)
        self.prefixes = Prefixes(
            *(self.blocks, self._size, vocab_size, digest),
            enabled=config.prefix_cache,
            shared=config.shared_prefix_cache,
        )
        self.rows = AdapterRows(config.adapter_rows_max)
        self._slots_count = config.running_requests_max
        self._slots = list(range(self._slots_count - 1, -1, -1))
        self.running: dict[int, Sequence] = {}
        self.prompts: dict[int, Sequence] = {}  # Of these, whose prompt is not all planned.
        # And those that can decode now, by class, the longest waiting one first.
        self.ready: dict[bool, dict[int, Sequence]] = {True: {}, False: {}}
        self.guarded = 0  # Sequences of the latency class that are past their prompt.
        self.preemptions = 0
        self.fills = 0  # Prefixes that were written.
        self.departures = 0
        self._clears: list[int] = []
        self._reserved: int | None = None  # Blocks promised to those that run; None: not counted.

    def standing(self, sequence: Sequence) -> Standing:
        return sequence.standing(self._age_s)

    def never(self, submission: Submission, context_max: int) -> Made | None:
        """Its end, if it can never run, however much others leave."""
        number, prompt, rows = submission.number, submission.prompt, submission.rows
        if not prompt:
            reason = "the prompt is empty; it needs at least one token"
            return Made(number, end="refused", reason=reason)
        count = 0 if rows is None else rows.count
        prefix = rows is not None and rows.prefix
        if prefix and not _begins(prompt, range(self._vocab_size, self._vocab_size + count)):
            reason = (
                f"the adapter is keys and values of {count} tokens, which stand before all others; "
                "the prompt must begin with them, in order, and have tokens of its own behind them"
            )
            return Made(number, end="refused", reason=reason)
        if count > self.rows.count and not prefix:
            reason = (
                f"the adapter has {count} rows, and all adapters together have room for "
                f"{self.rows.count}; raise adapter_rows_max"
            )
            return Made(number, end="adapter", reason=reason)
        known, made = self._vocab_size + count, submission.made
        wrong = [one for one in (min(prompt), max(prompt)) if not 0 <= one < known]
        wrong += [one for one in made if not 0 <= one < self._vocab_size][:1]
        if wrong:
            reason = (
                f"token id {wrong[0]} is outside the vocabulary of {self._vocab_size} and the "
                f"adapter's {count} rows"
            )
            return Made(number, end="refused", reason=reason)
        new = submission.sampling.max_new_tokens
        most = len(prompt) + new
        # The last token made needs no keys and values.
        memory = self.blocks.count * self._size + (new > 0)
        room = min(context_max, memory)
        if most > room:
            what = "memory for keys and values" if memory < context_max else "context"
            reason = (
                f"prompt ({len(prompt)} tokens) + max_new_tokens ({new}) = {most}, over the "
                f"{room} tokens of {what}; cut {most - room} of them"
            )
            return Made(number, end="refused", reason=reason)
        return None

    # ----------------------------------------------------------------------------------- letting in

    def recount(self) -> None:
        """A plan begins; sequences have grown."""
        self._reserved = None

    def wants_rows(self, sequence: Sequence, match: Match) -> bool:
        """Whether rows of its adapter must be in the adapter pool before it can run."""
        rows = sequence.submission.rows
        return rows is not None and not rows.prefix and sequence.virtual_end > match.tokens

    def has_rows(self, sequence: Sequence) -> bool:
        rows = sequence.submission.rows
        return rows is None or self.rows.fits(rows.digest, rows.count)

    def let_in(self, draft: Draft, sequence: Sequence, match: Match, now: float) -> bool:
        """Give it a slot and what matches, if there is room for its prompt and a little more."""
        goal = min(len(sequence.tokens) + self._size, sequence.kv_most)
        # What matches is held first, so that it is not counted as room.
        self.blocks.hold(match.blocks)
        if not self._clear_way(sequence, self._blocks_of(goal) - len(match.blocks), now):
            self.blocks.drop(match.blocks)
            return False
        sequence.waited_s += now - sequence.queued_at
        sequence.slot = self._slots.pop()
        sequence.planned_at = now
        sequence.goal = len(sequence.tokens)
        sequence.planned = sequence.computed = match.tokens
        sequence.table = match.blocks
        if match.copied:
            (block,) = self.blocks.take(1)
            sequence.table.append(block)
            if block != match.copied:
                draft.copies.append((match.copied, block))
        rows = sequence.submission.rows
        if rows is not None and self.wants_rows(sequence, match):
            sequence.rows_start, fresh = self.rows.pin(rows.digest, rows.count)
            if fresh:
                draft.rewrites.append(Rewrite(sequence.rows_start, rows.digest))
        self.running[sequence.number] = self.prompts[sequence.number] = sequence
        if self._reserved is not None:
            self._reserved += self._promised(sequence)
        self.prefixes.announce(sequence)
        draft.begin(sequence)
        return True

    def _clear_way(self, sequence: Sequence, blocks: int, now: float) -> bool:
        """Whether so many blocks and a slot are to be had, with those taken that rank lower."""
        if self._reserved is None:
            self._reserved = sum([self._promised(one) for one in self.running.values()])
        lacking = blocks + self._reserved - self.blocks.available
        if lacking <= 0 and self._slots:
            return True
        lower = [one for one in self.lower_than(sequence) if one.flights == 0]
        lower.sort(key=self.standing)
        victims = []
        for one in lower:
            victims.append(one)
            lacking -= self._promised(one)
            lacking -= sum(self.blocks.holders(block) == 1 for block in one.table)
            if lacking <= 0:
                for victim in victims:
                    self.preempt(victim, now)
                self._reserved = None
                return True
        return False

    def lower_than(self, sequence: Sequence) -> list[Sequence]:
        """Those that run and could lose their place to this one that waits.

        By its birth alone it may take a place; having waited long only guards it. So two cannot
        take each other's.
        """
        mine = (sequence.latency, sequence.submission.priority)
        return [
            one
            for one in self.running.values()
            if one.ending is None and self.standing(one)[:2] < mine
        ]

    def _promised(self, sequence: Sequence) -> int:
        """Blocks to keep for one that runs: the rest of its prompt, and the next one."""
        goal = min(max(sequence.goal, sequence.planned) + self._size, sequence.kv_most)
        return max(0, self._blocks_of(goal) - len(sequence.table))

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._size)

    # -------------------------------------------------------------------------------------- growing

    def grow(self, draft: Draft, sequence: Sequence, blocks: int, now: float) -> bool:
        """So many more blocks for one that runs, if need be from those that rank lower."""
        if blocks <= 0:
            return True
        if blocks > self.blocks.available:
            self._take_from_lower(sequence, blocks, now)
            if blocks > self.blocks.available:
                return False
        taken = self.blocks.take(blocks)
        draft.tables.append(Table(sequence.slot, len(sequence.table), taken))
        sequence.table += taken
        return True

    def fill(self, draft: Draft, sequence: Sequence, now: float) -> None:
        """Have its prefix written, as much of it as this step may."""
        count = min(sequence.unfilled, draft.fill_left)
        end = sequence.planned + count
        if count and self.grow(draft, sequence, self._blocks_of(end) - len(sequence.table), now):
            draft.fill(sequence, end, self._size)
            self.fills += not sequence.unfilled

    def _take_from_lower(self, sequence: Sequence, blocks: int, now: float) -> None:
        mine = self.standing(sequence)
        lower = [
            (standing, one)
            for one in self.running.values()
            if one.flights == 0 and one.ending is None and (standing := self.standing(one)) < mine
        ]
        lower.sort()
        for _, one in lower:
            if blocks <= self.blocks.available:
                return
            self.preempt(one, now)

    def advanced(self, sequence: Sequence) -> None:
        """More of its prompt is planned."""
        if sequence.planned >= sequence.virtual_end:
            # The step that was just planned reads them, and nothing is let in by it any more.
            self._unpin(sequence)
        if sequence.planned == sequence.goal:
            del self.prompts[sequence.number]
            self.guarded += sequence.latency

    def _unpin(self, sequence: Sequence) -> None:
        if sequence.rows_start >= 0:
            assert sequence.submission.rows is not None
            self.rows.unpin(sequence.submission.rows.digest)
            sequence.rows_start = -1

    # ---------------------------------------------------------------------------------- giving back

    def preempt(self, sequence: Sequence, now: float) -> None:
        """It waits again, with what it has made, and computes again what is lost until then."""
        assert sequence.flights == 0 and sequence.ending is None, "it is not to be touched now"
        self.preemptions += 1
        self.put_back(sequence, now)

    def put_back(self, sequence: Sequence, now: float) -> None:
        """It gives back all that it has, and waits again."""
        self.vacate(sequence)
        sequence.queued_at = now
        self._waiting.push(sequence)

    def vacate(self, sequence: Sequence) -> None:
        """It gives back its slot, its blocks and its adapter's rows."""
        number, blocks = sequence.number, self.blocks
        del self.running[number]
        self.departures += 1
        if self.prompts.pop(number, None) is None:
            self.ready[sequence.latency].pop(number, None)
            self.guarded -= sequence.latency
        self.wake(self.prefixes.withdraw(sequence))
        if sequence.poisoned:
            dirty = sequence.table[sequence.computed // self._size :]
            for block in dirty:
                assert blocks.holders(block) == 1, "what may not be finite is shared"
                blocks.forget(block)
            self._clears += dirty
        blocks.drop(sequence.table)
        self._slots.append(sequence.slot)
        self._unpin(sequence)
        sequence.slot = -1
        sequence.table = []
        sequence.planned = sequence.computed = sequence.filled = 0

    def wake(self, sequences: list[Sequence]) -> None:
        """What these waited for is there, or will not come."""
        for sequence in sequences:
            if sequence.ending is None:
                sequence.parked = False
                self._waiting.push(sequence)

    def take_clears(self) -> list[int]:
        clears, self._clears = self._clears, []
        return clears

    def tally(self) -> None:
        """Nothing is lost: sums only."""
        self.blocks.tally(sum([len(one.table) for one in self.running.values()]))
        assert len(self._slots) + len(self.running) == self._slots_count, "a slot is lost"

    def check(self) -> None:
        """Nothing is lost and nothing is held twice."""
        self.tally()
        running = list(self.running.values())
        self.blocks.check([one.table for one in running])
        self.prefixes.check(running)
        self.rows.check(sum(one.rows_start >= 0 for one in running))
        slots = {one.slot for one in running} | set(self._slots)
        assert len(slots) == len(running) + len(self._slots), "a slot is lost, or held twice"
        for one in running:
            # What is drawn for one that ends is not kept.
            ended = one.ending is not None
            unknown = len(one.guess) + max(0, one.flights - (not ended))
            assert one.computed + one.filled <= one.planned <= len(one.tokens) + unknown
            assert not one.guess or one.flights == 1
            assert one.planned <= len(one.table) * self._size
            ready = one.number in self.ready[one.latency]
            prompt = one.number in self.prompts
            assert prompt == (one.planned < one.goal) and not (prompt and ready)
            # Whoever neither flies nor is a prompt can decode.
            assert ready == (not prompt and one.flights == 0 and one.ending is None)
        assert self.guarded == sum(one.latency for one in running if one.number not in self.prompts)


def _begins(prompt: list[int], virtual: range) -> bool:
    """Whether a prompt is all of these ids in order, and others."""
    own = prompt[len(virtual) :]
    return prompt[: len(virtual)] == list(virtual) and bool(own) and max(own) < virtual.start
