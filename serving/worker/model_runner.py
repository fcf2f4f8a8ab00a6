"""One rank's part of a step: blocks, rows and tables are brought up to date, then the model runs.

The step says everything, so there is no policy here: which sequences run, where their keys lie and
which rows hold an adapter are another's decisions. Ids and tables reach the device as one packed
array. The last stage looks whether each sequence's numbers are finite, and its first tensor rank
draws the tokens. What was launched runs on; only whoever wants its outcome waits for it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from gpt.attention.kv_cache import KINDS, KVPool, prefix_part
from gpt.costs.inference import kv_bytes_per_token
from gpt.device_transfers import to_device
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import ConfigError
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Sends, meet
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import Tokenizer
from serving.config import ServerConfig
from serving.messages import Begin, Fill, Outcome, Rewrite, Scored, Step, Table
from serving.worker.cuda_graphs import (
    BAD_HIDDEN,
    Graphs,
    Made,
    Record,
    reserved_bytes,
    sizes,
    unfit,
)
from serving.worker.input_batch import Flat, Ints, lay_out
from serving.worker.sampler import Chosen, Drawn, Sampler

log = logging.getLogger(__name__)

Landing = Callable[[], Outcome]  # Waits for a step that was launched.

# Logits for prompt scores are made this many bytes at a time.
SCORED_BYTES_MAX = 64 << 20
GREEDY = Sampling()
# Of what the machine has free for all its ranks: the rest is for files, buffers and neighbours.
HOST_SHARE = 0.25
DEVICE_SHARE = 0.9


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
        record: Record | None = None,  # Instead of CUDA graphs.
    ) -> None:
        self.model, self.blocks, self.slots = model, blocks, slots
        mesh, network = model.mesh, model.config
        self._block_tokens = config.kv_block_tokens
        self._ahead = config.steps_ahead(mesh.device.type)
        reason = None if record else unfit(model, config)
        if reason is not None and mesh.device.type == "cuda":
            log.info("event=no_graphs reason=%r", reason)
        self.pool = KVPool(
            network,
            model.layers,
            blocks + (reason is None),  # One for rows that pad.
            tp=mesh.tp,
            block_tokens=config.kv_block_tokens,
            dtype=KINDS.get(config.kv_dtype, model.dtype),
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
        # What each slot drew last, and a place that nobody reads.
        self._last = torch.zeros(slots + 1, dtype=torch.int64, device=mesh.device)
        self._graphs: Graphs | None = None
        if reason is None:
            self._graphs = Graphs(
                model,
                self.pool,
                rows=self._rows,
                tables=self._tables,
                last=self._last,
                scratch=blocks,
                sizes=sizes(config),
                record=record,
            )
        self._landed = 0.0  # When a step was last over.
        self._begun: dict[int, Begin] = {}  # By slot, where prompts are scored.
        self._broken: set[int] = set()  # Slots whose guide could not be used.

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Of steps that are recorded, in rows."""
        return () if self._graphs is None else self._graphs.sizes

    def populate(self) -> None:
        """Have the pool's memory ahead, in spare time."""
        self.pool.populate(_host_bytes)

    def run(self, step: Step) -> Outcome | None:
        """Do what the step says. The last stage's first tensor rank has its outcome."""
        landing = self.launch(step)
        return None if landing is None else landing()

    @torch.inference_mode()
    def launch(self, step: Step) -> Landing | None:
        """Begin what the step says; a device may still be at it when this returns.

        Whoever has the outcome lands steps in the order in which they were launched.
        """
        started = time.perf_counter()
        self._prepare(step)
        if not step.slots:
            meet(self.model.mesh)  # A sign of life of every rank, not of this one only.
        landing: Landing = partial(Outcome, step.number)
        if step.slots:
            landing = self._replay(step) or self._pass(step)
        return None if self._sampler is None else partial(self._land, landing, started)

    def _land(self, landing: Landing, started: float) -> Outcome:
        outcome = landing()
        # It could not begin before the one before it was over.
        began, self._landed = max(started, self._landed), time.perf_counter()
        return msgspec.structs.replace(outcome, seconds=self._landed - began)

    def _prepare(self, step: Step) -> None:
        """Everything that comes before the pass, in the order of the message."""
        if step.clears:
            self.pool.clear(step.clears)
        if step.copies:
            self.pool.copy([source for source, _ in step.copies], [to for _, to in step.copies])
        for rewrite in step.rewrites:
            self._rewrite(rewrite)
        for fill in step.fills:
            self._fill(fill)
        for begin in step.begins:
            self._tables[begin.slot] = 0
            if self._sampler is not None:
                self._begin(begin, self._sampler)
        for table in step.tables:
            end = table.start + len(table.blocks)
            self._tables[table.slot, table.start : end] = table.blocks
            if self._graphs is not None:
                self._graphs.change(table.slot, table.start, end)

    def _rewrite(self, rewrite: Rewrite) -> None:
        if self._rows is None:
            return
        rows = torch.frombuffer(bytearray(rewrite.data), dtype=torch.float32)
        rows = rows.view(-1, self.model.config.hidden_size)
        # In the model's dtype a number may be too large; then its own sequences have the fault.
        self._rows[rewrite.start : rewrite.start + len(rows)] = rows.to(self._rows.dtype)

    def _fill(self, fill: Fill) -> None:
        mesh, network = self.model.mesh, self.model.config
        table = torch.frombuffer(bytearray(fill.data), dtype=torch.float32)
        table = table.view(fill.count, network.prefix_width)
        part = prefix_part(table, network, self.model.layers, mesh.tp_rank, mesh.tp)
        self.pool.fill(fill.blocks, fill.start % self._block_tokens, part)

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

    def _replay(self, step: Step) -> Landing | None:
        """The model, once, as it was recorded for such steps; None: the step is of no such kind."""
        graphs, model = self._graphs, self.model
        if graphs is None or not graphs.takes(step):
            return None
        x = None if model.first else pipeline.receive(model, len(step.slots))
        made = graphs.run(step, x)
        if self._sends is not None:
            self._sends.send(made.x)
            return partial(Outcome, step.number)
        assert self._sampler is not None and made.logits is not None
        places = np.flatnonzero(np.array(step.draws))
        slots = [step.slots[place] for place in places]
        drawn = None
        if not self._sampler.best_alone(slots):
            whole = len(slots) == len(step.slots)
            device = made.logits.device
            logits = made.logits if whole else made.logits[to_device(places, device)]
            drawn = self._sampler.draw(logits, slots, [step.past[place] + 1 for place in places])
            self._last.index_copy_(0, to_device(np.array(slots), device), drawn.tokens)
        return partial(self._told, step, places, made, drawn)

    def _told(self, step: Step, places: Ints, made: Made, drawn: Drawn | None) -> Outcome:
        """What came of a step that was replayed; `places` draw."""
        assert self._sampler is not None and made.told is not None
        best, faults = made.told.read()[:, : len(step.slots)].numpy()
        bad = set(np.flatnonzero(faults & BAD_HIDDEN).tolist())
        bad |= set(places[faults[places] != 0].tolist())
        stuck = self._stuck(step)
        tokens, scores = best[places].tolist(), list[Scored]()
        if drawn is not None:
            chosen = self._sampler.read(drawn)
            tokens, scores = chosen.tokens, chosen.scores
            stuck |= set(places[chosen.broken].tolist())
        return Outcome(
            *(step.number, tokens, scores, [], sorted(bad)),
            stuck=sorted(stuck - bad),
            replayed=True,
        )

    def _pass(self, step: Step) -> Landing:
        """The model, once. What it says is whole only where the sampler is."""
        flat, model = lay_out(step, self._tables, self._block_tokens, self._last), self.model
        batch = flat.batch
        if not flat.all_draw and len(flat.rows) < batch.tokens:
            batch = replace(batch, rows=flat.rows if len(flat.rows) else batch.last_rows[:1])
        x = pipeline.take(model, flat.ids, batch)
        # Looking for virtual tokens waits for the device, so it is done only where there are some.
        virtual = flat.largest >= model.config.vocab_size
        x = model.hidden(x, batch, self.pool, self._rows if virtual else None)
        if self._sends is not None:
            self._sends.send(x)
            return partial(Outcome, step.number)
        bad: set[int] = set()
        stuck = self._stuck(step)
        tokens, scores = self._draw(step, flat, x, bad, stuck)
        prompt_scores = self._score(step, flat, x, bad) if len(flat.scored) else []
        if not flat.all_draw:  # Else the logits were looked at, which are of all rows.
            # Last, since it waits for the device; what was drawn of such numbers is of no use.
            _note_faults(x, flat.sequence, bad)
        made = (tokens, scores, prompt_scores, sorted(bad))
        return partial(Outcome, step.number, *made, stuck=sorted(stuck - bad))

    def _stuck(self, step: Step) -> set[int]:
        """The places of those whose guide could not be used."""
        if not self._broken:
            return set()
        return {place for place, slot in enumerate(step.slots) if slot in self._broken}

    def _draw(
        self, step: Step, flat: Flat, x: Tensor, bad: set[int], stuck: set[int]
    ) -> tuple[list[int], list[Scored]]:
        """The tokens that are drawn, row by row. Logits, if needed, all tensor ranks make."""
        count = len(flat.drawing)
        if not count:
            return [], []
        slots = [step.slots[place] for place in flat.drawing.tolist()]
        likeliest = None
        if self._sampler is not None and self._sampler.best_alone(slots):
            likeliest = self.model.best(_asked(x, flat, 0, count))
        if likeliest is not None:
            chosen = Chosen(likeliest.tolist())
        else:
            logits = self._logits(flat, x, 0, count)
            if self._sampler is None:
                return [], []
            chosen = self._sampler.choose(logits, slots, flat.positions.tolist())
            _note_faults(logits, flat.drawing, bad)
        if chosen.broken:
            stuck |= set(flat.drawing[chosen.broken].tolist())
        if self._ahead:
            device = self._last.device
            tokens = to_device(np.array(chosen.tokens), device)
            self._last[to_device(np.array(slots), device)] = tokens
        return chosen.tokens, chosen.scores

    def _score(self, step: Step, flat: Flat, x: Tensor, bad: set[int]) -> list[list[Scored]]:
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

    def _logits(self, flat: Flat, x: Tensor, start: int, count: int) -> Tensor:
        """Logits of `count` of the rows that need them."""
        return self.model.head(_asked(x, flat, start, count), flat.batch)


def _asked(x: Tensor, flat: Flat, start: int, count: int) -> Tensor:
    """Some of the rows that need logits."""
    return x if flat.all_draw else x.index_select(0, flat.rows[start : start + count])


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
    dtype = config.kv_dtype if config.kv_dtype in KINDS else FLOAT_NAMES[model.dtype]
    block_bytes = tokens * kv_bytes_per_token(network, len(model.layers), model.mesh.tp, dtype)
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
    reserve += reserved_bytes(model, config)
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


def recordings(config: ServerConfig, runner: Runner) -> list[Step]:
    """A step of each size that is recorded, the largest first: the others fit into its memory."""
    tokens, context = config.kv_block_tokens, runner.model.config.max_position_embeddings
    past = min(tokens, context) - 1
    fits = [size for size in runner.graph_sizes if size < runner.blocks]
    return [_laid_out([1] * size, past, tokens) for size in reversed(fits)]


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
