"""Who runs next: plans a step as plain data, and takes in what came of it.

Each plan fills one budget of tokens: those that decode, then prompts in chunks, the latency class
before the throughput class; who waits is let in while there is room. An outcome moves sequences on,
publishes what they filled, and ends them. It knows no tensor, no process and no clock.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from serving.config import ServerConfig
from serving.messages import End, Load, Made, Outcome, Scored, Step, Submission
from serving.scheduler.async_scheduling import go_on
from serving.scheduler.deadlines import Deadlines
from serving.scheduler.ngram_proposer import Guesses
from serving.scheduler.prefill_cost import Pace
from serving.scheduler.resource_allocator import Room
from serving.scheduler.sequence import LEVELS_TO_LATENCY, Sequence
from serving.scheduler.step_builder import Draft, Flight
from serving.scheduler.waiting_queue import Tenants, Waiting

STUCK = (
    "no token of this model goes on with what the guide wants, or it takes too long to find one; "
    "make the guide simpler, and see that a text can match it"
)
# Waiting sequences that a plan sets aside at most, for want of rows or for a copy.
ASIDE_MAX = 32


class Scheduler:
    """`blocks` counts block 0; `context_tokens_max` is a sequence's whole length at most; a step
    has at most `fill_tokens_max` tokens of prefixes written.

    Steps must be run in the order in which they were planned, and so come their outcomes. `ahead`:
    one step more may be in flight, of those that go on whatever they drew in the one before.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        blocks: int,
        config: ServerConfig,
        context_tokens_max: int,
        stages: int = 1,
        digest: str = "",
        fill_tokens_max: int = 256,
        ahead: bool = False,
    ) -> None:
        self._vocab_size, self._context_max = vocab_size, context_tokens_max
        self._stages, self._ahead = stages, ahead
        self._size = config.kv_block_tokens
        self._budget, self._fill_max = config.step_tokens_max, fill_tokens_max
        self._stall_s = config.prefill_stall_ms_max / 1000
        self._late_s = LEVELS_TO_LATENCY * config.priority_age_s
        self._look_s = config.priority_age_s / 20  # As time passes another may be the first.
        self._guess_max = config.speculate_tokens_max
        self._rows_max = config.speculate_rows_max
        self._pace = Pace()
        self._tenants = Tenants()
        self._waiting = Waiting(self._tenants, config.priority_age_s)
        self._room = Room(vocab_size, blocks, config, self._waiting, digest)

        self._live: dict[int, Sequence] = {}  # All that have not ended, by number.
        self._deadlines = Deadlines(self._live)
        self._flights: deque[Flight] = deque()
        self._ended: list[Made] = []
        # When the first of those that wait found no room and nobody to take it from.
        self._closed_at, self._closed_until = (0, 0), 0.0
        self._arrivals = self._steps = 0
        self._prompt_tokens = self._cached_tokens = self._made_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0

    # --------------------------------------------------------------------------- coming and going

    def add(self, submission: Submission, now: float, aside_s: float = 0.0) -> Made | None:
        """Queue a sequence, heard of `aside_s` before. What can never run is answered at once."""
        number, prompt, sampling = submission.number, submission.prompt, submission.sampling
        assert number not in self._live, f"number {number} is used twice"
        refused = self._room.never(submission, self._context_max)
        if refused is not None:
            return refused
        made = submission.made
        if made and made[-1] in sampling.stop_token_ids:
            return Made(number, end="stop")
        if made and len(made) >= sampling.max_new_tokens:
            return Made(number, end="length")
        sequence = Sequence(
            submission,
            order=self._arrivals,
            tokens=[*prompt, *made],
            prompt=len(prompt),
            most=len(prompt) + sampling.max_new_tokens,
            latency=submission.service == "latency",
            queued_at=now,
            came_at=now - aside_s,
            aside_s=aside_s,
        )
        self._arrivals += 1
        # Whoever goes on after tokens that were made has been told its prompt's scores before.
        scores = sampling.prompt_logprobs is not None and not made
        sequence.scored = submission.unscored if scores else sequence.prompt
        if max(prompt) >= self._vocab_size:
            places = [place for place, one in enumerate(prompt) if one >= self._vocab_size]
            sequence.virtual_start, sequence.virtual_end = places[0], places[-1] + 1
        if self._guess_max and sampling.stateless and submission.guide is None:
            sequence.guesses = Guesses(sequence.tokens, self._vocab_size)
        self._room.prefixes.enter(sequence)
        self._live[number] = sequence
        self._tenants.enter(submission.tenant)
        self._waiting.push(sequence)
        if submission.deadline is not None:
            self._deadlines.add(submission.deadline, number)
        return None

    def cancel(self, numbers: Iterable[int]) -> None:
        """End these at once, or as soon as no step has them. Numbers that are over are ignored."""
        for number in numbers:
            sequence = self._live.get(number)
            if sequence is not None:
                self._stop(sequence, "cancelled")

    def ended(self) -> list[Made]:
        """What ended without a step since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _stop(self, sequence: Sequence, end: End) -> None:
        """End it for a reason that is not its own."""
        if sequence.ending is not None:
            return
        sequence.ending = end
        if sequence.waits and not sequence.parked:
            self._waiting.discard(sequence)
        self._room.ready[sequence.latency].pop(sequence.number, None)
        if sequence.flights == 0:
            self._leave(sequence)
            self._ended.append(self._last(sequence))

    def _last(self, sequence: Sequence) -> Made:
        return Made(sequence.number, end=sequence.ending, reason=sequence.reason)

    def _leave(self, sequence: Sequence) -> None:
        """It is over: everything that it has goes back."""
        if not sequence.waits:
            self._room.vacate(sequence)
        del self._live[sequence.number]
        self._tenants.leave(sequence.submission.tenant)

    # ----------------------------------------------------------------------------------- planning

    def plan(self, now: float) -> Step | None:
        """The next step. None: there is nothing to do before the next outcome, or at all.

        Deadlines that have passed are looked at here; `ended` tells of them.
        """
        for number in self._deadlines.passed(now):
            self._stop(self._live[number], "deadline")
        if len(self._flights) >= self._stages:
            return self._early(now) if self._ahead else None
        draft = self._draft()
        # Who comes in is chosen before decodes are: it may take the place of one that decodes.
        if len(self._waiting) and not self._closed(now):
            self._admit(draft, now)
        self._decodes(draft, now)
        if self._guess_max:
            self._guess(draft, now)
        self._chunks(draft, now)
        return self._fly(draft) if draft.sequences or draft.begins or draft.fills else None

    def _early(self, now: float) -> Step | None:
        """The step after the one in flight, if it follows whatever comes of that."""
        if len(self._flights) > self._stages or (len(self._waiting) and not self._closed(now)):
            return None
        draft = self._draft()
        go_on(draft, self._flights[-1], self._room, self._size, now)
        return self._fly(draft) if draft.sequences else None

    def idle_step(self) -> Step:
        """A step without sequences, to be run and answered like the others."""
        return self._fly(self._draft())

    def _draft(self) -> Draft:
        return Draft(self._vocab_size, self._budget, self._fill_max)

    def _fly(self, draft: Draft) -> Step:
        step = draft.step(self._steps, self._room.take_clears())
        self._steps += 1
        self._flights.append(Flight(step, draft.sequences, draft.prompt_tokens))
        return step

    def _prompt_budget(self, tokens: int) -> int:
        """How many of so many tokens prompts may have, so that nobody's next token is late.

        The more wait for a first token, the longer the others may wait for their next.
        """
        if not self._room.guarded:
            return tokens
        firsts = self._waiting.urgent + sum(one.latency for one in self._room.prompts.values())
        stall_s = self._stall_s * max(1, firsts)
        return min(tokens, self._pace.tokens_within(stall_s, self._size))

    # ---------------------------------------------------------------------------------- admission

    def _closed(self, now: float) -> bool:
        """Whether there is no use in looking at who waits: nothing changed since none came in."""
        return now < self._closed_until and self._changes() == self._closed_at

    def _changes(self) -> tuple[int, int]:
        return self._waiting.changes, self._room.departures

    def _admit(self, draft: Draft, now: float) -> None:
        """Let in who is next and finds room, as many as this step has tokens for."""
        room, aside = self._room, list[Sequence]()
        ready = len(room.ready[True]) + len(room.ready[False])
        left = self._prompt_budget(draft.tokens_left - min(ready, self._decodes_max()))
        ahead = {True: 0, False: 0}  # Tokens of prompts that run already, by class.
        for one in room.prompts.values():
            ahead[one.latency] += one.goal - one.planned
        if left <= ahead[True]:
            return
        room.recount()
        turns = self._waiting.turns(now)
        full = rows_wanted = False
        while len(aside) < ASIDE_MAX and not full:
            # Prompts of the throughput class do not keep one of the other from coming in.
            urgent = left <= ahead[True] + ahead[False]
            sequence = turns.next(urgent=urgent) if left > ahead[True] else None
            if sequence is None:
                break
            match = room.prefixes.match(sequence)
            key = room.prefixes.awaited(sequence, match)
            if key is not None:
                room.prefixes.park(sequence, key)
                continue
            # While one waits for rows no other takes any, or it might wait forever.
            lacks_rows = room.wants_rows(sequence, match) and (
                rows_wanted or not room.has_rows(sequence)
            )
            rows_wanted |= lacks_rows
            unsettled = match.copied and room.prefixes.unsettled(match.copied)
            if not (lacks_rows or unsettled):
                full = not room.let_in(draft, sequence, match, now)
            if sequence.waits:
                aside.append(sequence)
            else:
                ahead[sequence.latency] += sequence.goal - sequence.planned
                self._count_prompt(sequence, match.tokens)
        for sequence in aside:
            self._waiting.push(sequence)
        if full and not room.lower_than(aside[-1]):
            self._closed_at, self._closed_until = self._changes(), now + self._look_s

    def _count_prompt(self, sequence: Sequence, matched: int) -> None:
        if sequence.cached >= 0:
            return  # It has been here before; computing it again is not its tenant's doing.
        sequence.cached = min(matched, sequence.prompt)
        self._prompt_tokens += sequence.prompt
        self._cached_tokens += sequence.cached
        self._tenants.charge(sequence.submission.tenant, len(sequence.tokens) - matched)

    # ------------------------------------------------------------------------------------- tokens

    def _decodes_max(self) -> int:
        """With several stages each step has its part of all that decode, so that each has some."""
        decoding = len(self._room.running) - len(self._room.prompts)
        return -(-decoding // self._stages)

    def _decodes(self, draft: Draft, now: float) -> None:
        """One token for each sequence that is ready, as far as it is this step's turn."""
        room, size = self._room, self._size
        chosen = list(room.ready[True].values())
        if room.ready[False]:
            others = list(room.ready[False].values())
            # Who has stood back for very long goes first once.
            late = sum(now - one.planned_at >= self._late_s for one in others)
            chosen = [*others[:late], *chosen, *others[late:]]
        if room.blocks.available < len(chosen):
            chosen.sort(key=room.standing, reverse=True)
        most = min(self._decodes_max(), draft.tokens_left)
        for sequence in chosen:
            if len(draft.sequences) == most:
                break
            if sequence.waits:  # One that ranks higher took its place just now.
                continue
            if sequence.planned == len(sequence.table) * size and not room.grow(
                draft, sequence, 1, now
            ):
                continue
            draft.decode(sequence)
            sequence.planned_at = now
            del room.ready[sequence.latency][sequence.number]

    def _guess(self, draft: Draft, now: float) -> None:
        """What those that decode may say next, in rows that make the step no slower.

        A block of a prompt goes before guesses, and nobody loses a place to one.
        """
        room, size = self._room, self._size
        taken = size if room.prompts else 0
        rows = min(self._rows_max - len(draft.sequences), draft.tokens_left - taken)
        guesses = [list[int]() for _ in draft.sequences]
        hopeful = [
            (-one.guesses.rate, place)
            for place, one in enumerate(draft.sequences)
            if one.guesses is not None
        ]
        for _, place in sorted(hopeful) if rows > 0 else ():
            one = draft.sequences[place]
            assert one.guesses is not None
            guess = one.guesses.next(min(self._guess_max, one.guess_max, rows))
            # Each of those that run may need a block soon.
            spare = max(0, room.blocks.available - len(room.running))
            free = (len(one.table) + spare) * size - one.planned
            guess = guess[: max(0, free)]
            more = -(-(one.planned + len(guess)) // size) - len(one.table)
            room.grow(draft, one, more, now)
            guesses[place] = guess
            rows -= len(guess)
        if any(guesses):
            draft.guess(guesses)

    def _chunks(self, draft: Draft, now: float) -> None:
        """The next tokens of prompts, the latency class first, as far as the budget goes."""
        room = self._room
        if not room.prompts:
            return
        left = self._prompt_budget(draft.tokens_left)
        ranked = []
        for one in room.prompts.values():
            standing = room.standing(one)
            late = now - one.planned_at >= self._late_s
            ranked.append((late or standing[0], standing, one))
        ranked.sort(reverse=True)
        for _, _, sequence in ranked:
            if left <= 0:
                return
            if not sequence.waits and sequence.ending is None:
                left -= self._chunk(draft, sequence, now, left)

    def _chunk(self, draft: Draft, sequence: Sequence, now: float, left: int) -> int:
        """Plan the next tokens of a prompt; how many there are."""
        room, size = self._room, self._size
        room.fill(draft, sequence, now)
        if sequence.unfilled:
            return 0
        past, held = sequence.planned, len(sequence.table)
        end = min(past + left, sequence.goal)
        if end < sequence.goal and end // size * size > past:
            end = end // size * size  # Whole blocks are published early.
        if not room.grow(draft, sequence, -(-end // size) - held, now):
            end = min(end, (held + room.blocks.available) * size)
            if end <= past:
                return 0
            room.grow(draft, sequence, -(-end // size) - held, now)
        draft.prompt(sequence, end - past)
        sequence.planned_at = now
        room.advanced(sequence)
        return end - past

    # --------------------------------------------------------------------------------- committing

    def commit(self, outcome: Outcome, now: float) -> list[Made]:
        """Take in what came of the oldest step in flight."""
        flight = self._flights.popleft()
        step, faults = flight.step, outcome.faults
        assert outcome.number == step.number, f"step {step.number} has outcome {outcome.number}"
        if flight.sequences:
            self._pace.learn(flight.prompt_tokens, outcome.seconds)
        tokens, scores = iter(outcome.tokens), iter(outcome.scores)
        rows = iter(outcome.prompt_scores)
        made = []
        for place, sequence in enumerate(flight.sequences):
            count = 1 + len(sequence.guess) if step.draws[place] else 0
            drawn = list(islice(tokens, count))
            scored = list(islice(scores, count)) if outcome.scores else []
            told = next(rows) if step.scores[place] else []
            sequence.flights -= 1
            if place in faults and not self._forgiven(sequence, now):
                self._fault(sequence)
            elif place in outcome.stuck and sequence.ending is None:
                sequence.ending, sequence.reason = "stuck", STUCK
            if sequence.ending is not None:
                if sequence.flights == 0:
                    self._leave(sequence)
                    made += [] if sequence.over else [self._last(sequence)]
            elif not sequence.waits:
                one = self._advance(sequence, step.lengths[place], drawn, scored, told, now)
                if one is not None:
                    made.append(one)
        return made

    def _advance(
        self,
        sequence: Sequence,
        length: int,
        drawn: list[int],
        scored: list[Scored],
        told: list[Scored],
        now: float,
    ) -> Made | None:
        """What a sequence has of a step that is over."""
        sampling = sequence.submission.sampling
        past, guessed = sequence.computed, len(sequence.guess)
        filled, sequence.filled = sequence.filled, 0
        if drawn:
            drawn = sequence.accept(drawn)
            self._made_tokens += len(drawn)
            self._drafted_tokens += guessed
            self._accepted_tokens += len(drawn) - 1
            self._tenants.charge(sequence.submission.tenant, len(drawn))
            length += len(drawn) - 1 - guessed
        # Keys and values behind wrong guesses are nobody's: what comes next is written over them.
        computed = sequence.computed = past + filled + length
        if guessed:
            sequence.planned = computed
        if computed // self._size > past // self._size or past < sequence.goal:
            self._room.wake(self._room.prefixes.publish(sequence, past))
        prompt_scores: list[Scored | None] = []
        if sequence.scored < sequence.prompt:
            prompt_scores = sequence.news(told, past + filled, self._vocab_size)
        if drawn:
            if sequence.ending is None and sequence.flights == 0:
                self._room.ready[sequence.latency][sequence.number] = sequence
        elif sequence.computed == sequence.goal:
            sequence.ending = "scored"
        elif not prompt_scores:
            return None
        cached, phases = 0, None
        if not sequence.told and (drawn or sequence.ending):
            sequence.told, cached, phases = True, sequence.cached, sequence.phases(now)
        if sequence.ending is not None:
            sequence.over = True
            if sequence.flights == 0:
                self._leave(sequence)
        return Made(
            sequence.number,
            drawn,
            scored[: len(drawn)] if sampling.logprobs is not None else [],
            prompt_scores,
            sequence.ending,
            cached_tokens=cached,
            phases=phases,
        )

    def _forgiven(self, sequence: Sequence, now: float) -> bool:
        """A guess may be what was not finite: its sequence goes on without any, from before it."""
        if not sequence.guess or sequence.ending is not None:
            return False
        sequence.guess, sequence.guesses = [], None
        sequence.poisoned = True
        self._room.put_back(sequence, now)
        sequence.poisoned = False
        return True

    def _fault(self, sequence: Sequence) -> None:
        """Its numbers are not finite: what it wrote in this step and after it is not to be used."""
        sequence.poisoned = True
        if sequence.ending is None:
            sequence.ending = "fault"
            sequence.reason = (
                "the model's numbers for this sequence are not finite; its weights or the "
                "adapter's rows are damaged, or their range is too large for the dtype"
            )

    # ---------------------------------------------------------------------------------- reporting

    @property
    def busy(self) -> bool:
        """Whether something waits or runs."""
        return bool(self._live)

    @property
    def load(self) -> Load:
        room = self._room
        return Load(
            waiting=len(self._live) - len(room.running),
            running=len(room.running),
            blocks=room.blocks.count,
            blocks_held=room.blocks.held,
            blocks_cached=room.blocks.cached,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            made_tokens=self._made_tokens,
            preemptions=room.preemptions,
            steps=self._steps,
            adapters_resident=room.rows.resident,
            adapter_loads=room.rows.loads + room.fills,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def check(self, *, deep: bool = False) -> None:
        """No block and no slot is lost. `deep`: each is where it belongs, and so is who waits."""
        if deep:
            self._room.check()
            waiting = sum(one.waits and not one.parked for one in self._live.values())
            assert waiting == len(self._waiting), "one neither waits nor runs"
        self._room.tally()
