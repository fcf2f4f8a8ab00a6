"""One rank's part of a step: blocks, rows and tables are brought up to date, then the model runs.

The step says everything, so there is no policy here: which sequences run, where their keys lie and
which rows hold an adapter are another's decisions. Ids and tables reach the device as one packed
array. The last stage looks whether each sequence's numbers are finite, and its first tensor rank
draws the tokens.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt import pipeline
from gpt.batch import Batch
from gpt.errors import ConfigError
from gpt.kv import KVPool
from gpt.model import GPT
from gpt.parallel import Sends, meet
from gpt.sampling import Sampling
from gpt.sharding import local_groups
from gpt.tokenizer import Tokenizer
from serving.config import ServerConfig
from serving.messages import Begin, Outcome, Rewrite, Scored, Step, Table
from serving.sampler import Sampler

log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

# Logits for prompt scores are made this many bytes at a time.
SCORED_BYTES_MAX = 64 << 20
GREEDY = Sampling()
# Of what the machine has free for all its ranks: the rest is for files, buffers and neighbours.
HOST_SHARE = 0.25
DEVICE_SHARE = 0.9


@dataclass(frozen=True)
class _Flat:
    """A step laid out for the model."""

    ids: Tensor
    batch: Batch
    rows: Tensor  # Those that need logits: first the drawing ones, then those that are scored.
    virtual: bool  # Whether an id names a row of the adapter pool.
    sequence: Ints  # For each flat row, its place in the step.
    drawing: Ints  # The place of each row after which a token is drawn,
    positions: Ints  # and the position that the token gets.
    scored: Ints  # Flat rows whose followers in the prompt are scored.


class Runner:
    """The model of this rank, its KV pool and adapter pool, and what each slot needs."""

    def __init__(
        self,
        model: GPT,
        config: ServerConfig,
        *,
        blocks: int,
        slots: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.model, self.blocks, self.slots = model, blocks, slots
        mesh, network = model.mesh, model.config
        self._block_tokens = config.kv_block_tokens
        self.pool = KVPool(
            network,
            model.layers,
            blocks,
            tp=mesh.tp,
            block_tokens=config.kv_block_tokens,
            dtype=model.dtype,
            device=mesh.device,
        )
        width = -(-network.max_position_embeddings // config.kv_block_tokens)
        self._tables = np.zeros((slots, width), np.int64)
        self._rows: Tensor | None = None
        if model.first:
            shape = (config.adapter_rows_max, network.hidden_size)
            self._rows = torch.zeros(shape, dtype=model.dtype, device=mesh.device)
        self._sends = None if model.last else Sends(mesh, mesh.pp_rank + 1, 2 * mesh.pp)
        self._sampler: Sampler | None = None
        if model.last and mesh.tp_rank == 0:
            self._sampler = Sampler(slots, network.vocab_size, mesh.device, tokenizer)
        self._begun: dict[int, Begin] = {}  # By slot, where prompts are scored.
        self._broken: set[int] = set()  # Slots whose guide could not be used.

    @torch.inference_mode()
    def run(self, step: Step) -> Outcome | None:
        """Do what the step says. The last stage's first tensor rank has its outcome."""
        started = time.perf_counter()
        self._prepare(step)
        if not step.slots:
            meet(self.model.mesh)  # A sign of life of every rank, not of this one only.
        outcome = self._pass(step) if step.slots else Outcome(step.number)
        if self._sampler is None:
            return None
        return msgspec.structs.replace(outcome, seconds=time.perf_counter() - started)

    def _prepare(self, step: Step) -> None:
        """Everything that comes before the pass, in the order of the message."""
        if step.clears:
            self.pool.clear(step.clears)
        if step.copies:
            self.pool.copy([source for source, _ in step.copies], [to for _, to in step.copies])
        for rewrite in step.rewrites:
            self._rewrite(rewrite)
        for begin in step.begins:
            self._tables[begin.slot] = 0
            if self._sampler is not None:
                self._begin(begin, self._sampler)
        for table in step.tables:
            self._tables[table.slot, table.start : table.start + len(table.blocks)] = table.blocks

    def _rewrite(self, rewrite: Rewrite) -> None:
        if self._rows is None:
            return
        rows = torch.frombuffer(bytearray(rewrite.data), dtype=torch.float32)
        rows = rows.view(-1, self.model.config.hidden_size)
        # In the model's dtype a number may be too large; then its own sequences have the fault.
        self._rows[rewrite.start : rewrite.start + len(rows)] = rows.to(self._rows.dtype)

    def _begin(self, begin: Begin, sampler: Sampler) -> None:
        self._begun.pop(begin.slot, None)
        self._broken.discard(begin.slot)
        if begin.sampling.prompt_logprobs is not None:
            self._begun[begin.slot] = begin
        try:
            sampler.begin(begin)
        except Exception as error:
            if begin.guide is None:
                raise
            # A guide is a program of the caller's in another's library. One that was let in and
            # cannot be followed costs its own sequence, not the ranks.
            log.warning("event=guide_failed slot=%d reason=%r", begin.slot, type(error).__name__)
            self._broken.add(begin.slot)
            sampler.begin(msgspec.structs.replace(begin, guide=None))

    def _pass(self, step: Step) -> Outcome:
        """The model, once. What it says is whole only where the sampler is."""
        flat = self._flat(step)
        model = self.model
        x = pipeline.take(model, flat.ids, flat.batch)
        # Looking for virtual tokens waits for the device, so it is done only where there are some.
        x = model.hidden(x, flat.batch, self.pool, self._rows if flat.virtual else None)
        if self._sends is not None:
            self._sends.send(x)
            return Outcome(step.number)
        bad: set[int] = set()
        stuck = {place for place, slot in enumerate(step.slots) if slot in self._broken}
        tokens, scores = self._draw(step, flat, x, bad, stuck)
        prompt_scores = self._score(step, flat, x, bad)
        # Last, since it waits for the device; what was drawn of such numbers is of no use.
        _note_faults(x, flat.sequence, bad)
        return Outcome(
            step.number, tokens, scores, prompt_scores, sorted(bad), stuck=sorted(stuck - bad)
        )

    def _flat(self, step: Step) -> _Flat:
        """The step as tensors: one array, one copy to the device."""
        slots, lengths = np.array(step.slots), np.array(step.lengths)
        contexts = lengths + np.array(step.past)
        ends = lengths.cumsum()
        drawing = np.flatnonzero(np.array(step.draws))
        scored = np.array([], np.int64)
        if any(step.scores):
            pairs = zip(ends - lengths, step.scores, strict=True)
            scored = np.concatenate([np.arange(start, start + count) for start, count in pairs])
        width = -(-int(contexts.max()) // self._block_tokens)
        ids = np.array(step.ids, np.int64)
        tables = self._tables[slots, :width]
        # One that draws has its last row, and the rows before it that its guesses need.
        counts = 1 + np.array(step.drafts)[drawing] if step.drafts else np.ones_like(drawing)
        before = np.repeat(counts.cumsum(), counts) - 1 - np.arange(counts.sum())
        drawing = np.repeat(drawing, counts)
        rows = np.concatenate([ends[drawing] - 1 - before, scored])
        packed = torch.from_numpy(np.concatenate([ids, tables.ravel(), rows]))
        parts = packed.to(self.model.mesh.device).split([len(ids), tables.size, len(rows)])
        batch = Batch.paged(
            step.lengths, step.past, parts[1].view(tables.shape), self._block_tokens
        )
        return _Flat(
            ids=parts[0],
            batch=batch,
            rows=parts[2],
            virtual=bool(ids.max() >= self.model.config.vocab_size),
            sequence=np.repeat(np.arange(len(slots)), lengths),
            drawing=drawing,
            positions=contexts[drawing] - before,
            scored=scored,
        )

    def _draw(
        self, step: Step, flat: _Flat, x: Tensor, bad: set[int], stuck: set[int]
    ) -> tuple[list[int], list[Scored]]:
        """The tokens that are drawn, row by row. All tensor ranks make the logits."""
        count = len(flat.drawing)
        if not count:
            return [], []
        logits = self._logits(flat, x, 0, count)
        if self._sampler is None:
            return [], []
        slots = [step.slots[place] for place in flat.drawing]
        chosen = self._sampler.choose(logits, slots, flat.positions.tolist())
        _note_faults(logits, flat.drawing, bad)
        stuck |= set(flat.drawing[chosen.broken].tolist())
        return chosen.tokens, chosen.scores

    def _score(self, step: Step, flat: _Flat, x: Tensor, bad: set[int]) -> list[list[Scored]]:
        """Scores of prompt tokens, from a bounded number of logits at a time."""
        first, network = len(flat.drawing), self.model.config
        made: dict[int, list[Scored]] = {p: [] for p, wanted in enumerate(step.scores) if wanted}
        rows_max = max(1, SCORED_BYTES_MAX // (network.vocab_size * 4))
        for start in range(0, len(flat.scored), rows_max):
            rows = flat.scored[start : start + rows_max]
            logits = self._logits(flat, x, first + start, len(rows))
            if self._sampler is None:
                continue
            places = flat.sequence[rows]
            _note_faults(logits, places, bad)
            positions = flat.batch.positions[torch.from_numpy(rows).to(x.device)].cpu().numpy()
            for place in np.unique(places).tolist():
                here = np.flatnonzero(places == place)
                begun = self._begun[step.slots[place]]
                # A virtual token has no score: its place is filled, and whoever reads it knows.
                wanted = [max(0, begun.prompt[at + 1]) for at in positions[here].tolist()]
                made[place] += self._sampler.scores(
                    logits[here[0] : here[-1] + 1],
                    wanted,
                    begun.sampling.prompt_logprobs or 0,
                )
        return list(made.values())

    def _logits(self, flat: _Flat, x: Tensor, start: int, count: int) -> Tensor:
        """Logits of `count` of the rows that need them."""
        return self.model.head(x.index_select(0, flat.rows[start : start + count]), flat.batch)


def _note_faults(x: Tensor, places: Ints, bad: set[int]) -> None:
    """Add the places of rows that have a number that is not finite. Mostly none has: one pass."""
    if bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite()):
        return
    # Large numbers may add up to infinity, so the sum is only a suspicion.
    bad |= set(places[(~x.isfinite().all(-1)).cpu().numpy()].tolist())


def blocks_that_fit(model: GPT, config: ServerConfig, *, neighbours: int = 1) -> int:
    """How many KV blocks this rank can have, block 0 among them.

    `neighbours`: ranks that share this machine's memory, or this device, this one counted. Ranks
    must agree on the least of their answers.
    """
    tokens, network = config.kv_block_tokens, model.config
    channels = local_groups(network, model.mesh.tp) * network.kv_channels
    block_bytes = 2 * len(model.layers) * tokens * channels * model.dtype.itemsize
    free = _free_bytes(model) // neighbours
    if config.kv_tokens_max is not None:
        blocks = -(-config.kv_tokens_max // tokens) + 1
        if blocks * block_bytes > free:
            raise ConfigError(
                f"kv_tokens_max is {config.kv_tokens_max}, for which each rank needs "
                f"{blocks * block_bytes} bytes; {free} are free: say at most "
                f"{max(0, free // block_bytes - 1) * tokens}, or leave it out"
            )
        return blocks
    blocks = _share(model, config, free) // block_bytes
    if model.mesh.device.type == "cpu":
        # More would only be cache, and this memory is what the machine's files are cached in.
        full = -(-network.max_position_embeddings // tokens)
        blocks = min(blocks, config.running_requests_max * full + 1)
    if blocks < 2:
        raise ConfigError(
            f"there is memory for {blocks * tokens} tokens of keys and values, {block_bytes} bytes "
            f"for each {tokens}; free some, take fewer layers for each rank (pp, tp), or say "
            "kv_tokens_max"
        )
    return blocks


def _share(model: GPT, config: ServerConfig, free: int) -> int:
    """What keys and values may have, of what is free now that the weights are there."""
    network = model.config
    if model.mesh.device.type == "cpu":
        return int(HOST_SHARE * free)
    hidden = config.step_tokens_max * (8 * network.hidden_size + 3 * network.ffn_hidden_size)
    # Sampling holds a few copies of the logits, in fp32; attention may hold its scores.
    rows = max(config.running_requests_max, config.speculate_rows_max)
    logits = 4 * 4 * rows * network.vocab_size
    reserve = 2 * hidden * model.dtype.itemsize + logits + SCORED_BYTES_MAX * 4
    return max(0, int(DEVICE_SHARE * free) - reserve)


def _free_bytes(model: GPT) -> int:
    if model.mesh.device.type == "cpu":
        return _host_bytes()
    free, _ = torch.cuda.mem_get_info(model.mesh.device)
    return free


def _host_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            # Of files that were read, as a checkpoint's: they give way to what is needed.
            lines = (group / "memory.stat").read_text().splitlines()
            used -= int(dict(line.split() for line in lines).get("inactive_file", 0))
            free = min(free, int(limit) - used)
    except OSError:  # Not in a group, or in one of the older kind.
        pass
    return max(0, free)


def rehearsal(config: ServerConfig, runner: Runner) -> list[Step]:
    """As much as any step will ask for: the largest chunk and a full decode batch, twice each.

    The last step clears what they wrote. Whoever begins after that takes the slots and blocks over.
    """
    tokens = config.kv_block_tokens
    context = runner.model.config.max_position_embeddings
    seats = min(config.running_requests_max, runner.slots)
    lengths: list[int] = []
    left, free = config.step_tokens_max, runner.blocks - 1
    while left > 0 and free > 0 and len(lengths) < seats:
        lengths.append(min(left, context, free * tokens))
        left -= lengths[-1]
        free -= -(-lengths[-1] // tokens)
    count = min(seats, runner.blocks - 1)
    chunk = _laid_out(lengths, 0, tokens)
    past = min(tokens, context) - 1
    decodes = _laid_out([1] * count, past, tokens)
    drawn = _laid_out([1] * count, past, tokens, Sampling(temperature=1.0, top_p=0.9, top_k=50))
    used = max(table.blocks[-1] for step in (chunk, decodes) for table in step.tables)
    return [chunk, chunk, drawn, decodes, Step(0, clears=list(range(1, used + 1)))]


def _laid_out(lengths: list[int], past: int, tokens: int, sampling: Sampling = GREEDY) -> Step:
    """Sequences of these lengths, in blocks one after another; each draws a token."""
    tables: list[Table] = []
    begin = 1
    for slot, length in enumerate(lengths):
        end = begin + -(-(past + length) // tokens)
        tables.append(Table(slot, 0, list(range(begin, end))))
        begin = end
    count = len(lengths)
    return Step(
        0,
        slots=list(range(count)),
        past=[past] * count,
        lengths=lengths,
        ids=[0] * sum(lengths),
        draws=[True] * count,
        scores=[0] * count,
        begins=[Begin(slot, sampling, [0], []) for slot in range(count)],
        tables=tables,
    )
