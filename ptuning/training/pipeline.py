"""Runs a schedule: this stage's chunks, and the messages to the stages before and after it.

Each direction between two stages is a link of its own, in which messages keep the order of the
passes; nothing says what it is, for every rank knows every micro-batch. What is needed next is
asked for before the present pass begins, so messages travel while stages compute. What was sent is
let go: a backward pass needs the graph that made it, not its numbers. Knows no optimizer.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpt.model.gpt_model import GPT
from gpt.model.layers import Prefix
from gpt.model.vocab_parallel_cross_entropy import token_losses
from gpt.parallel.mesh import Mesh
from ptuning.data.micro_batch import MicroBatch
from ptuning.training.pipeline_schedule import Pass

# Messages that a link keeps until they have arrived, when the next one is sent. The next stage has
# asked for one ahead, so two let it lag by a pass.
KEPT_MAX = 2


class _Link:
    """Messages from one stage to the next one, or to the one before, first in, first out."""

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup | None, sender: int, taker: int):
        self._mesh, self._group, self._sender, self._taker = mesh, group, sender, taker
        self._kept: deque[tuple[dist.Work, Tensor]] = deque()
        self._here: deque[Tensor] = deque()  # Of a stage to itself.

    def send(self, x: Tensor) -> None:
        sent = x.detach().contiguous()
        if self._group is None:
            self._here.append(sent)
            return
        if self._mesh.staged:
            sent = sent.cpu()
        work = dist.isend(sent, self._taker, group=self._group)
        assert work is not None, "this rank is not in its own link"
        self._kept.append((work, sent))
        self.settle(KEPT_MAX)

    def settle(self, kept_max: int) -> None:
        """Wait until no more than so many are on their way."""
        while len(self._kept) > kept_max:
            self._kept.popleft()[0].wait()

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> "_Arrival":
        """Ask for the next message. They are taken in the order in which they were asked for."""
        if self._group is None:
            return _Arrival(self._mesh.device, None, self._here)
        place = "cpu" if self._mesh.staged else self._mesh.device
        x = torch.empty(shape, dtype=dtype, device=place)
        work = dist.irecv(x, self._sender, group=self._group)
        assert work is not None, "this rank is not in its own link"
        return _Arrival(self._mesh.device, work, deque([x]))


@dataclass(frozen=True)
class _Arrival:
    """A message that may be on its way."""

    device: torch.device
    work: dist.Work | None
    box: deque[Tensor]

    def take(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.box.popleft().to(self.device)


class Channels:
    """The links of this rank to its neighbours in the pipeline, whose ends are neighbours too.

    Every rank of the mesh must make them together. Each link has a group of its own: NCCL does
    what two ranks of a group ask of it one after another, and two directions would wait for each
    other. Each carries a first message here, in an order that all follow, for NCCL connects two
    ranks at their first one, and both must be there.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._links: dict[tuple[bool, int], _Link] = {}  # Forward or not; the stage that sends.
        for edge in range(mesh.pp):
            ends = edge, (edge + 1) % mesh.pp
            for forward in (True, False):
                sender, taker = ends if forward else ends[::-1]
                group = _join(mesh, ends)
                if mesh.pp_rank in ends:
                    link = _Link(mesh, group, mesh.stage_rank(sender), mesh.stage_rank(taker))
                    self._links[forward, sender] = link
                    if group is not None:
                        _greet(link, mesh, mesh.pp_rank == sender)

    def send(self, x: Tensor, *, forward: bool) -> None:
        """On to the next stage, or back to the one before. It is kept until it has arrived."""
        self._links[forward, self.mesh.pp_rank].send(x)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, *, forward: bool) -> _Arrival:
        sender = (self.mesh.pp_rank + (-1 if forward else 1)) % self.mesh.pp
        return self._links[forward, sender].expect(shape, dtype)

    def settle(self) -> None:
        """Come back when all that was sent has arrived."""
        for link in self._links.values():
            link.settle(0)


def _join(mesh: Mesh, stages: tuple[int, int]) -> dist.ProcessGroup | None:
    """The group of these two stages, if this rank is in it; all ranks make all pipelines' groups.

    Torch can also let the two alone make it, but then its name counts the groups that each has
    made, and they differ.
    """
    if mesh.pp == 1:
        return None
    width = mesh.tp * mesh.dp
    pairs = [[stage * width + column for stage in stages] for column in range(width)]
    mine, _ = dist.new_subgroups_by_enumeration(pairs)
    return cast("dist.ProcessGroup | None", mine)


def _greet(link: _Link, mesh: Mesh, sends: bool) -> None:
    if sends:
        link.send(torch.zeros(1, device=mesh.device))
        link.settle(0)
    else:
        link.expect((1,), torch.float32).take()


def run_passes(
    chunks: Sequence[GPT],
    passes: Sequence[Pass],
    micros: Sequence[MicroBatch],
    channels: Channels,
    *,
    table: Tensor | None,
    prefix: Mapping[int, Tensor] | None = None,
    scale: float,
) -> Tensor:
    """The sum of the losses of all learned tokens, in fp64, on the last stage; elsewhere zero.

    Gradients of that sum times `scale` are added to those of `table` (which only the first stage
    reads) or of the `prefix` (by layer, this rank's), and of parameters that want one. All ranks of
    the mesh call it together, each stage with its own passes; without backward ones nothing is
    kept. The same call gives the same bits.
    """
    run = _Run(chunks, micros, channels, table, scale, prefix=prefix)
    with torch.set_grad_enabled(not all(one.forward for one in passes)):
        arrival = run.expect(passes[0]) if passes else None
        for one, after in zip(passes, [*passes[1:], None], strict=True):
            following = None if after is None else run.expect(after)
            if one.forward:
                run.forward(one, arrival)
            else:
                run.backward(one, arrival)
            arrival = following
    channels.settle()
    return run.total


class _Run:
    """What one stage has in its hands while it runs a schedule."""

    def __init__(
        self,
        chunks: Sequence[GPT],
        micros: Sequence[MicroBatch],
        channels: Channels,
        table: Tensor | None,
        scale: float,
        *,
        prefix: Mapping[int, Tensor] | None,
    ) -> None:
        self._chunks, self._micros, self._channels = chunks, micros, channels
        self._table, self._scale = table, scale
        self._prefixes: list[Prefix | None] = [
            None if prefix is None else prefix_at(prefix, micro.ids, chunks[0].config.vocab_size)
            for micro in micros
        ]
        self._held: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        self.total = torch.zeros((), dtype=torch.float64, device=channels.mesh.device)

    def expect(self, one: Pass) -> _Arrival | None:
        """Ask for the message that a pass begins with; the ends of the pipeline have none."""
        chunk = self._chunks[one.chunk]
        if chunk.first if one.forward else chunk.last:
            return None
        tokens = self._micros[one.micro].batch.tokens
        shape = (chunk.mesh.rows(tokens), chunk.config.hidden_size)
        return self._channels.expect(shape, chunk.dtype, forward=one.forward)

    def forward(self, one: Pass, arrival: _Arrival | None) -> None:
        chunk, micro = self._chunks[one.chunk], self._micros[one.micro]
        learning = torch.is_grad_enabled()
        x = micro.ids if arrival is None else arrival.take().requires_grad_(learning)
        table, prefix = self._table if chunk.first else None, self._prefixes[one.micro]
        y = chunk.hidden(x, micro.batch, None, table, prefix=prefix)
        if chunk.last:
            logits = chunk.head_shard(y, micro.batch)
            losses = token_losses(logits, micro.answers, chunk.mesh, chunk.config.vocab_size)
            y = losses.sum()
            self.total += losses.detach().double().sum()
        else:
            self._channels.send(y, forward=True)
        if learning:
            self._held[one.chunk, one.micro] = x, get_gradient_edge(y)
        elif chunk is self._chunks[-1]:
            micro.batch.kept.clear()

    def backward(self, one: Pass, arrival: _Arrival | None) -> None:
        x, edge = self._held.pop((one.chunk, one.micro))
        if arrival is None:
            wide = torch.promote_types(self._chunks[one.chunk].dtype, torch.float32)
            grad = self.total.new_full((), self._scale, dtype=wide)
        else:
            grad = arrival.take()
        torch.autograd.backward((edge,), (grad,))
        if not self._chunks[one.chunk].first:
            assert x.grad is not None
            self._channels.send(x.grad, forward=False)
        if one.chunk == 0:
            # Its masks; else those of all micro-batches of a step would pile up.
            self._micros[one.micro].batch.kept.clear()


def prefix_at(layers: Mapping[int, Tensor], ids: Tensor, vocab_size: int) -> Prefix:
    """A prefix where a micro-batch's virtual tokens stand."""
    places = (ids >= vocab_size).nonzero().squeeze(-1)
    return Prefix(layers, places, ids[places] - vocab_size)
