"""Pipeline execution: runs a stage's schedule and sends activations and gradients between stages.

Each direction between two stages is a separate link, on which messages keep the order of the
passes. Messages carry no header, because every rank knows the shapes of all micro-batches. The
receive of the next pass is posted before the current pass begins, so communication overlaps with
computation. After a stage has sent a tensor, the stage keeps only the autograd edge of the tensor,
for the backward pass. This module updates no parameters.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpt.batch import Batch
from gpt.model.attention_layer import PrefixKV
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.parallel.vocab_parallel_cross_entropy import token_losses
from ptuning.data.micro_batch import MicroBatch
from ptuning.training.pipeline_schedule import Pass

# Maximum number of unfinished sends of a link when send() returns. Two of them let the receiving
# stage be one pass late without delaying the sending stage.
SENDS_PENDING_MAX = 2


class _StageLink:
    """FIFO link that carries messages in one direction between two neighboring stages."""

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup | None, sender: int, receiver: int):
        self._mesh = mesh
        self._group = group
        self._sender = sender
        self._receiver = receiver
        self._pending_sends: deque[tuple[dist.Work, Tensor]] = deque()
        # If the pipeline has a single stage: the messages between the chunks of this stage.
        self._local_queue: deque[Tensor] = deque()

    def send(self, x: Tensor) -> None:
        buffer = x.detach().contiguous()
        if self._group is None:
            self._local_queue.append(buffer)
            return
        if self._mesh.stages_through_host:
            buffer = buffer.cpu()
        work = dist.isend(buffer, self._receiver, group=self._group)
        assert work is not None, "this rank is not a member of the link's process group"
        self._pending_sends.append((work, buffer))
        self.wait_for_sends(SENDS_PENDING_MAX)

    def wait_for_sends(self, pending_max: int) -> None:
        """Wait until at most `pending_max` sends are unfinished."""
        while len(self._pending_sends) > pending_max:
            self._pending_sends.popleft()[0].wait()

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> "_PendingReceive":
        """Post the receive of the next message; messages arrive in the order of the posts."""
        if self._group is None:
            return _PendingReceive(self._mesh.device, None, self._local_queue)
        device = "cpu" if self._mesh.stages_through_host else self._mesh.device
        buffer = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(buffer, self._sender, group=self._group)
        assert work is not None, "this rank is not a member of the link's process group"
        return _PendingReceive(self._mesh.device, work, deque([buffer]))


@dataclass(frozen=True)
class _PendingReceive:
    """A posted receive. If `work` is None, the message comes from the link's local queue."""

    device: torch.device
    work: dist.Work | None
    queue: deque[Tensor]

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.queue.popleft().to(self.device)


@dataclass(frozen=True)
class _PassInput:
    """The posted receives of a pass's input, in the order of the messages."""

    context: _PendingReceive | None  # The rows before the invocations of activated LoRA.
    rows: _PendingReceive


class PipelineChannels:
    """Links of this rank to its neighbors in the pipeline; first and last stage are neighbors.

    All ranks of the mesh must call the constructor. Each link has its own process group: NCCL
    executes the operations of two ranks in one group in order, so both directions in one group
    could deadlock. NCCL connects two ranks at their first message, in which both ranks must take
    part. The constructor therefore sends one message over each link, in the same order on all
    ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # Keyed by (whether the direction is forward, number of the sending stage).
        self._links: dict[tuple[bool, int], _StageLink] = {}
        for edge in range(mesh.pp):
            stage_pair = edge, (edge + 1) % mesh.pp
            for forward in (True, False):
                sender, receiver = stage_pair if forward else stage_pair[::-1]
                group = _create_pair_group(mesh, stage_pair)
                if mesh.pp_rank in stage_pair:
                    link = _StageLink(
                        mesh, group, mesh.stage_rank(sender), mesh.stage_rank(receiver)
                    )
                    self._links[forward, sender] = link
                    if group is not None:
                        _connect(link, mesh, mesh.pp_rank == sender)

    def send(self, x: Tensor, *, forward: bool) -> None:
        """Start to send `x` to the next stage (forward) or to the previous stage (backward)."""
        self._links[forward, self.mesh.pp_rank].send(x)

    def post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, forward: bool
    ) -> _PendingReceive:
        sender = (self.mesh.pp_rank + (-1 if forward else 1)) % self.mesh.pp
        return self._links[forward, sender].post_receive(shape, dtype)

    def wait_for_sends(self) -> None:
        """Wait until all sends of all links are finished."""
        for link in self._links.values():
            link.wait_for_sends(0)


def _create_pair_group(mesh: Mesh, stages: tuple[int, int]) -> dist.ProcessGroup | None:
    """Create a group for each pair of corresponding ranks of two stages; return this rank's group.

    Return None if the pipeline has a single stage, or if this rank is in neither of the two stages.
    All ranks of the mesh must call this function. With `use_local_synchronization`, only the two
    ranks of a group would need to call torch. This option is not used, because it names a group by
    the number of groups that a rank has created, and this number can differ between the two ranks.
    """
    if mesh.pp == 1:
        return None
    ranks_per_stage = mesh.tp * mesh.dp
    pairs = [
        [stage * ranks_per_stage + rank_in_stage for stage in stages]
        for rank_in_stage in range(ranks_per_stage)
    ]
    group, _ = dist.new_subgroups_by_enumeration(pairs)
    return cast("dist.ProcessGroup | None", group)


def _connect(link: _StageLink, mesh: Mesh, is_sender: bool) -> None:
    if is_sender:
        link.send(torch.zeros(1, device=mesh.device))
        link.wait_for_sends(0)
    else:
        link.post_receive((1,), torch.float32).wait()


def run_passes(
    chunks: Sequence[GPT],
    passes: Sequence[Pass],
    micro_batches: Sequence[MicroBatch],
    channels: PipelineChannels,
    *,
    table: Tensor | None,
    prefix: Mapping[int, Tensor] | None = None,
    loss_scales: Sequence[float],
    lowest_layer: int = -1,
) -> Tensor:
    """Run this stage's passes; return the summed loss of each task in fp64 on the last stage.

    On other stages the sums are zero. `loss_scales` has a number for each task. The backward passes
    add the gradients of the sum of (summed loss * loss scale) over the tasks to:

    - `table`, which only the first stage reads;
    - `prefix`, this rank's keys and values by layer;
    - all parameters that require gradients, and the tensors of the micro-batches' adapters.

    `lowest_layer` is the lowest layer with such tensors; -1: the embedding or the table. Nothing is
    computed backward below it.

    All ranks of the mesh must call this function; each stage has its own passes. Without backward
    passes, no autograd graph is built.
    """
    with torch.set_grad_enabled(not all(scheduled_pass.forward for scheduled_pass in passes)):
        stage_run = _StageRun(
            chunks, micro_batches, channels, table, loss_scales, lowest_layer, prefix=prefix
        )
        receive = stage_run.post_receive(passes[0]) if passes else None
        for scheduled_pass, next_pass in zip(passes, [*passes[1:], None], strict=True):
            next_receive = None if next_pass is None else stage_run.post_receive(next_pass)
            if scheduled_pass.forward:
                stage_run.forward(scheduled_pass, receive)
            else:
                stage_run.backward(scheduled_pass, receive)
            receive = next_receive
    channels.wait_for_sends()
    return stage_run.loss_sums


class _StageRun:
    """State of one stage while it runs a schedule: saved activations and the loss sums."""

    def __init__(
        self,
        chunks: Sequence[GPT],
        micro_batches: Sequence[MicroBatch],
        channels: PipelineChannels,
        table: Tensor | None,
        loss_scales: Sequence[float],
        lowest_layer: int,
        *,
        prefix: Mapping[int, Tensor] | None,
    ) -> None:
        self._chunks = chunks
        self._micro_batches = micro_batches
        self._channels = channels
        self._table = table
        self._loss_scales = loss_scales
        self._lowest_layer = lowest_layer
        self._has_backward_passes = torch.is_grad_enabled()
        self._prefixes: list[PrefixKV | None] = [
            None
            if prefix is None
            else micro_batch_prefix(prefix, micro_batch.ids, chunks[0].config.vocab_size)
            for micro_batch in micro_batches
        ]
        self._saved_activations: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        self.loss_sums = torch.zeros(
            len(loss_scales), dtype=torch.float64, device=channels.mesh.device
        )

    def post_receive(self, scheduled_pass: Pass) -> _PassInput | None:
        """Post the receive of a pass's input and return it.

        Return None for a forward pass through the first chunk of the model and for a backward pass
        through the last chunk, because these passes receive no input from another chunk, and for
        a backward pass that computes nothing.
        """
        chunk = self._chunks[scheduled_pass.chunk]
        has_no_input = chunk.is_first_stage if scheduled_pass.forward else chunk.is_last_stage
        if has_no_input or not (scheduled_pass.forward or self._has_backward(chunk)):
            return None
        micro_batch = self._micro_batches[scheduled_pass.micro_batch]
        context = None
        if scheduled_pass.forward and micro_batch.context is not None:
            context = self._post_receive(chunk, micro_batch.context.batch.tokens, forward=True)
        forward = scheduled_pass.forward
        return _PassInput(
            context, self._post_receive(chunk, micro_batch.batch.tokens, forward=forward)
        )

    def _post_receive(self, chunk: GPT, tokens: int, *, forward: bool) -> _PendingReceive:
        shape = (chunk.mesh.local_rows(tokens), chunk.config.hidden_size)
        return self._channels.post_receive(shape, chunk.dtype, forward=forward)

    def _has_backward(self, chunk: GPT) -> bool:
        """Return whether a layer of the chunk, or one below it, has tensors that are trained."""
        return self._lowest_layer < chunk.layers.stop

    def _has_input_grad(self, chunk: GPT) -> bool:
        """Return whether an earlier chunk has tensors that are trained."""
        return self._lowest_layer < chunk.layers.start and not chunk.is_first_stage

    def forward(self, scheduled_pass: Pass, receive: _PassInput | None) -> None:
        chunk = self._chunks[scheduled_pass.chunk]
        needs_grad = torch.is_grad_enabled() and self._has_backward(chunk)
        with torch.set_grad_enabled(needs_grad):
            self._forward(scheduled_pass, receive)

    def _forward(self, scheduled_pass: Pass, receive: _PassInput | None) -> None:
        chunk = self._chunks[scheduled_pass.chunk]
        micro_batch = self._micro_batches[scheduled_pass.micro_batch]
        needs_grad = torch.is_grad_enabled()
        batch, x = self._with_context(chunk, micro_batch, receive), micro_batch.ids
        if receive is not None:
            x = receive.rows.wait().requires_grad_(needs_grad and self._has_input_grad(chunk))
        table = self._table if chunk.is_first_stage else None
        prefix = self._prefixes[scheduled_pass.micro_batch]
        y = chunk.forward_hidden(x, batch, None, table, prefix=prefix)
        if chunk.is_last_stage:
            logits = chunk.compute_logits_shard(y, batch)
            losses = token_losses(logits, micro_batch.labels, chunk.mesh, chunk.config.vocab_size)
            y = self._scaled_loss(losses, micro_batch)
        else:
            self._channels.send(y, forward=True)
        if needs_grad:
            self._saved_activations[scheduled_pass.chunk, scheduled_pass.micro_batch] = (
                x,
                get_gradient_edge(y),
            )
        elif chunk is self._chunks[-1] and not self._has_backward_passes:
            # Without gradients, this is the micro-batch's last pass on this stage: free its
            # attention masks.
            micro_batch.batch.attention_metadata.clear()

    def _scaled_loss(self, losses: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Add the losses to the sums of their tasks; return the scaled sum over the tasks."""
        scaled_sums = []
        task_losses = losses.split([own.logits for own in micro_batch.tasks])
        for own, own_losses in zip(micro_batch.tasks, task_losses, strict=True):
            self.loss_sums[own.task] += own_losses.detach().double().sum()
            scaled_sums.append(own_losses.sum() * self._loss_scales[own.task])
        return torch.stack(scaled_sums).sum()

    @torch.no_grad()
    def _with_context(
        self, chunk: GPT, micro_batch: MicroBatch, receive: _PassInput | None
    ) -> Batch:
        """Return the batch with the keys and values of its context, which the chunk computes."""
        context = micro_batch.context
        if context is None:
            return micro_batch.batch
        x = context.ids
        if receive is not None:
            assert receive.context is not None
            x = receive.context.wait()
        recorded_kv: dict[int, tuple[Tensor, Tensor]] = {}
        y = chunk.forward_hidden(x, replace(context.batch, recorded_kv=recorded_kv))
        if not chunk.is_last_stage:
            self._channels.send(y, forward=True)
        return replace(micro_batch.batch, context=context.frozen(recorded_kv))

    def backward(self, scheduled_pass: Pass, receive: _PassInput | None) -> None:
        if self._has_backward(self._chunks[scheduled_pass.chunk]):
            self._backward(scheduled_pass, receive)
        if scheduled_pass.chunk == 0:
            # Free the attention masks after the last backward pass of a micro-batch; otherwise the
            # masks of all micro-batches would stay in memory.
            self._micro_batches[scheduled_pass.micro_batch].batch.attention_metadata.clear()

    def _backward(self, scheduled_pass: Pass, receive: _PassInput | None) -> None:
        chunk = self._chunks[scheduled_pass.chunk]
        x, edge = self._saved_activations.pop((scheduled_pass.chunk, scheduled_pass.micro_batch))
        if receive is None:
            wide_dtype = torch.promote_types(chunk.dtype, torch.float32)
            grad = self.loss_sums.new_ones((), dtype=wide_dtype)
        else:
            grad = receive.rows.wait()
        torch.autograd.backward((edge,), (grad,))
        if self._has_input_grad(chunk):
            assert x.grad is not None
            self._channels.send(x.grad, forward=False)


def micro_batch_prefix(key_values: Mapping[int, Tensor], ids: Tensor, vocab_size: int) -> PrefixKV:
    """Return the prefix of a micro-batch, with the positions and table rows of virtual tokens."""
    positions = (ids >= vocab_size).nonzero().squeeze(-1)
    return PrefixKV(key_values, positions, ids[positions] - vocab_size)
