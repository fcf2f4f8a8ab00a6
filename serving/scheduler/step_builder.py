"""A step while it is being put together, and as what it is remembered until its outcome comes.

Lists that grow side by side, a place for each sequence. It knows where ids and rows go, and not who
is chosen.
"""

from dataclasses import dataclass, field

from serving.messages import Begin, Fill, Rewrite, Step, Table
from serving.scheduler.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """A step that is on its way through the stages."""

    step: Step
    sequences: list[Sequence]
    prompt_tokens: int


@dataclass(slots=True)
class Draft:
    vocab_size: int
    tokens_left: int  # Of the step's budget,
    fill_left: int = 0  # and how many tokens of prefixes may be written before it.
    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    past: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    draws: list[bool] = field(default_factory=list)
    scores: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    begins: list[Begin] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    rewrites: list[Rewrite] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    prompt_tokens: int = 0

    def begin(self, sequence: Sequence) -> None:
        """The sequence takes its slot, with the blocks that it has by now."""
        one, vocab_size = sequence.submission, self.vocab_size
        prompt = sequence.tokens[: sequence.prompt]
        if sequence.virtual_end:
            prompt = [token if token < vocab_size else -1 for token in prompt]
        made = sequence.tokens[sequence.prompt :]
        self.begins.append(Begin(sequence.slot, one.sampling, prompt, made, one.guide))
        if sequence.table:
            self.tables.append(Table(sequence.slot, 0, list(sequence.table)))

    def decode(self, sequence: Sequence, *, known: bool = True) -> None:
        """One more token of a sequence whose prompt is behind it.

        Not `known`: what stands before it is being drawn by a step in flight.
        """
        self.sequences.append(sequence)
        self.slots.append(sequence.slot)
        self.past.append(sequence.planned)
        self.lengths.append(1)
        self.ids.append(sequence.tokens[-1] if known else -1)
        self.draws.append(True)
        self.scores.append(0)
        self.tokens_left -= 1
        sequence.planned += 1
        sequence.flights += 1

    def guess(self, guesses: list[list[int]]) -> None:
        """Let them stand behind the last tokens of those that decode, who are all there is yet."""
        ids = list[int]()
        for sequence, last, guess in zip(self.sequences, self.ids, guesses, strict=True):
            ids += [last, *guess]
            sequence.guess = guess
            sequence.planned += len(guess)
        self.tokens_left -= len(ids) - len(self.ids)
        self.drafts = [len(guess) for guess in guesses]
        self.lengths = [1 + count for count in self.drafts]
        self.ids = ids

    def fill(self, sequence: Sequence, end: int, block_tokens: int) -> None:
        """Its prefix up to `end` is written, where it would have been computed."""
        rows, start = sequence.submission.rows, sequence.planned
        assert rows is not None and sequence.unfilled >= end - start > 0, "no prefix to write"
        blocks = sequence.table[start // block_tokens : -(-end // block_tokens)]
        self.fills.append(Fill(rows.digest, start, end - start, blocks))
        self.fill_left -= end - start
        sequence.planned = end
        sequence.filled += end - start

    def prompt(self, sequence: Sequence, count: int) -> None:
        """The next tokens of a prompt."""
        past, vocab_size = sequence.planned, self.vocab_size
        end = past + count
        ids = sequence.tokens[past:end]
        if past < sequence.virtual_end and sequence.virtual_start < end:
            shift = sequence.rows_start
            assert shift >= 0, "virtual tokens without their rows"
            ids = [token if token < vocab_size else token + shift for token in ids]
        one = sequence.submission.sampling
        assert not sequence.unfilled, "a prefix with a hole"
        # A token's score comes from the row before it.
        wanted = sequence.scored < sequence.prompt and sequence.scored <= end
        self.sequences.append(sequence)
        self.slots.append(sequence.slot)
        self.past.append(past)
        self.lengths.append(count)
        self.ids.extend(ids)
        self.draws.append(end == len(sequence.tokens) and one.max_new_tokens > 0)
        self.scores.append(max(0, min(end, sequence.prompt - 1) - past) if wanted else 0)
        self.tokens_left -= count
        self.prompt_tokens += count
        sequence.planned = end
        sequence.flights += 1

    def step(self, number: int, clears: list[int]) -> Step:
        # Chunks of prompts have come since, which have none.
        more = len(self.sequences) - len(self.drafts) if self.drafts else 0
        return Step(
            number,
            self.slots,
            self.past,
            self.lengths,
            self.ids,
            self.draws,
            self.scores,
            self.begins,
            self.tables,
            self.copies,
            clears,
            self.rewrites,
            self.drafts + [0] * more,
            self.fills,
        )
