"""Model runner: applies a step to the KV pool, runs the model and samples.

A step contains every decision: the sequences that run, their KV blocks, and the adapter pool rows
of each adapter. Therefore the model runner has no policy. Token ids and block tables are copied to
the device as one packed array. The last pipeline stage checks that each sequence's hidden states
and logits are finite, and its first tensor rank samples the tokens. `launch` does not wait for a
step that replays a CUDA graph; reading the outcome waits for the device. Without a graph, the last
stage waits for the tokens inside `launch`, once for each step without prompt scores.

In this package a row without a qualifier is one new token in the batch: a row of the hidden states
or of the logits. The rows of adapters are called adapter rows or prefix rows.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from gpt.attention.kv_cache import KV_DTYPES, KVPool
from gpt.device_transfers import PendingHostCopy, to_device
from gpt.host_limits import available_memory_bytes
from gpt.kv_groups import kv_groups
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from gpt.parallel.collectives import barrier, broadcast_from_first_rank
from gpt.parallel.pipeline_communication import AsyncSender
from gpt.tokenizers.tokenizer import Tokenizer
from serving.config import CacheConfig, SchedulerConfig
from serving.memory_budget import ADAPTER_PAGE_BYTES, SCORED_BYTES_MAX
from serving.messages import AdapterRowsWrite, Outcome, SlotInit, Step, TokenScore
from serving.worker.adapter_memory import AdapterMemory
from serving.worker.cuda_graphs import (
    BAD_HIDDEN,
    Capturer,
    CudaGraphRunner,
    GraphCaptureError,
    GraphOutput,
    graph_sizes,
    unsupported_reason,
)
from serving.worker.graph_adapters import GraphAdapters
from serving.worker.input_batch import InputBatch, IntArray, build_input_batch
from serving.worker.prefix_kv import write_prefix_kv
from serving.worker.sampler import SampledTokens, Sampler
from serving.worker.step_halves import halve_step, merge_outcomes

log = logging.getLogger(__name__)

PendingOutcome = Callable[[], Outcome]  # Waits for a launched step and returns its outcome.


class ModelRunner:
    """This rank's model, its KV pool, its adapter pool, and the state of its slots."""

    def __init__(
        self,
        model: GPT,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        async_scheduling: bool,
        blocks: int,
        slots: int,
        tokenizer: Tokenizer | None = None,
        capturer: Capturer | None = None,  # Replaces CUDA graph capture, for tests on a CPU.
        # For `serving.worker.memory_profile`: sequences may be longer than the KV pool, no step is
        # captured, and a step that exhausts the memory fails.
        is_profile: bool = False,
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.slots = slots
        mesh, model_config = model.mesh, model.config
        self._block_tokens = cache_config.kv_block_tokens
        self.async_scheduling = async_scheduling
        self._is_profile = is_profile
        reason = None if capturer else unsupported_reason(model, scheduler_config)
        if reason is not None and mesh.device.type == "cuda" and not is_profile:
            log.info("event=no_graphs reason=%r", reason)
        has_graphs = reason is None and not is_profile
        groups = kv_groups(model_config)
        self.pool = KVPool(
            model_config,
            model.layers,
            blocks + has_graphs,  # One scratch block for the padding rows of CUDA graphs.
            tp=mesh.tp,
            block_tokens=cache_config.kv_block_tokens,
            dtype=KV_DTYPES.get(cache_config.kv_dtype, model.dtype),
            device=mesh.device,
            groups=groups,
        )
        self.windows = tuple(group.window for group in groups)  # Of each KV group.
        # Without a window, a sequence has no more blocks than the KV pool, however long the model's
        # context is.
        context_blocks = -(-model_config.max_position_embeddings // cache_config.kv_block_tokens)
        is_limited = None in self.windows and not is_profile
        table_width = min(context_blocks, blocks) if is_limited else context_blocks
        self._block_tables = np.zeros((len(groups), slots, table_width), np.int64)
        self._adapter_rows: Tensor | None = None
        if model.is_first_stage:
            shape = (cache_config.adapter_rows_max, model_config.hidden_size)
            self._adapter_rows = torch.zeros(shape, dtype=model.dtype, device=mesh.device)
        self._adapter_memory = AdapterMemory(
            model, cache_config.adapter_pages * ADAPTER_PAGE_BYTES, slots
        )
        self._adapter_memory.compile_kernels()
        self._stage_sender = (
            None if model.is_last_stage else AsyncSender(mesh, mesh.pp_rank + 1, 2 * mesh.pp)
        )
        self._sampler: Sampler | None = None
        if model.is_last_stage and mesh.is_first_in_stage:
            self._sampler = Sampler(slots, model_config.vocab_size, mesh.device, tokenizer)
        # Each slot's last sampled token, and an unused entry for the padding rows of CUDA graphs.
        self._last_tokens = torch.zeros(slots + 1, dtype=torch.int64, device=mesh.device)
        self._graphs: CudaGraphRunner | None = None
        if has_graphs:
            self._graphs = CudaGraphRunner(
                model,
                self.pool,
                adapter_rows=self._adapter_rows,
                block_tables=self._block_tables,
                last_tokens=self._last_tokens,
                scratch_block=blocks,
                sizes=graph_sizes(scheduler_config),
                broadcasts_ids=async_scheduling and mesh.expert_mesh.tp > 1,
                adapters=self._graph_adapters(scheduler_config),
                capturer=capturer,
            )
        self.failed_captures = 0  # CUDA graph captures that failed; graphs are off after the first.
        # Whether the step may be run again after an error: no state has changed but KV blocks.
        self._can_rerun = True
        self._last_step_end = 0.0  # When the last step ended, by time.perf_counter().
        self._scored_slots: dict[int, SlotInit] = {}  # Slots whose prompts are scored.
        self._failed_guide_slots: set[int] = set()  # Slots whose guide could not be started.

    def _graph_adapters(self, config: SchedulerConfig) -> GraphAdapters | None:
        if self._adapter_memory.table is None:
            return None
        return GraphAdapters(self._adapter_memory, graph_sizes(config)[-1], self.model.mesh.device)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The batch sizes of CUDA graphs, in rows; empty without graphs."""
        return () if self._graphs is None else self._graphs.sizes

    @property
    def has_missing_graphs(self) -> bool:
        """Whether a step without sequences can capture a CUDA graph."""
        return self._graphs is not None and self._graphs.has_missing_graphs

    def prefault_memory(self, *, has_adapters: bool) -> None:
        """Pre-fault the pages of the KV pool and of the adapter memory in background threads.

        The adapter memory of a server without adapters takes no pages.
        """
        self.pool.prefault(available_memory_bytes)
        if has_adapters:
            self._adapter_memory.prefault()

    def run_step(self, step: Step) -> Outcome | None:
        """Run a step and wait for it; return None except on the last stage's first tensor rank."""
        pending = self.launch(step)
        return None if pending is None else pending()

    def wait_for_sends(self) -> None:
        """Wait until the next pipeline stage has received the hidden states of all steps."""
        if self._stage_sender is not None:
            self._stage_sender.wait()

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingOutcome | None:
        """Launch a step; the device may still compute when this returns.

        Return None on a rank without a sampler. Pending outcomes must be read in the order in which
        their steps were launched.
        """
        started = time.perf_counter()
        self._apply_updates(step)
        if not step.slots:
            barrier(self.model.mesh)  # A heartbeat must show that all ranks are alive.
            if step.may_capture_graph:
                self._capture_next_graph()
        pending: PendingOutcome = partial(Outcome, step.step_id)
        if step.slots:
            pending = self._launch_sequences(step)
        return None if self._sampler is None else partial(self._wait, pending, started)

    def _wait(self, pending: PendingOutcome, started: float) -> Outcome:
        outcome = pending()
        # A step cannot begin before the previous step has ended.
        start = max(started, self._last_step_end)
        self._last_step_end = time.perf_counter()
        return msgspec.structs.replace(outcome, seconds=self._last_step_end - start)

    def _apply_updates(self, step: Step) -> None:
        """Apply all changes that precede the forward pass, in the order that `Step` defines."""
        if step.block_clears:
            self.pool.clear_blocks(step.block_clears)
        if step.block_copies:
            self.pool.copy_blocks(
                [source for source, _ in step.block_copies],
                [target for _, target in step.block_copies],
            )
        for adapter_write in step.adapter_writes:
            self._write_adapter_rows(adapter_write)
        for linears_write in step.linear_writes:
            self._adapter_memory.write(linears_write)
            if self._graphs is not None:
                self._graphs.capture_adapters()
        for prefix_write in step.prefix_writes:
            write_prefix_kv(self.pool, self.model, prefix_write)
        for slot_init in step.slot_inits:
            # Unset entries point to block 0, which no sequence owns.
            self._block_tables[:, slot_init.slot] = 0
            if self._sampler is not None:
                self._init_slot(slot_init, self._sampler)
        for table_update in step.block_table_updates:
            end = table_update.start + len(table_update.blocks)
            table = self._block_tables[table_update.group, table_update.slot]
            table[table_update.start : end] = table_update.blocks
            if self._graphs is not None:
                self._graphs.mark_changed(
                    table_update.slot, table_update.start, end, table_update.group
                )

    def _write_adapter_rows(self, adapter_write: AdapterRowsWrite) -> None:
        if self._adapter_rows is None:
            return
        host_rows = torch.frombuffer(bytearray(adapter_write.data), dtype=torch.float32)
        adapter_rows = to_device(
            host_rows.view(-1, self.model.config.hidden_size), self._adapter_rows.device
        )
        # A value that overflows in the model's dtype becomes infinite. Only the sequences of this
        # adapter then fail, when their hidden states or logits are checked.
        end = adapter_write.start + len(adapter_rows)
        self._adapter_rows[adapter_write.start : end] = adapter_rows.to(self._adapter_rows.dtype)

    def _init_slot(self, slot_init: SlotInit, sampler: Sampler) -> None:
        self._scored_slots.pop(slot_init.slot, None)
        self._failed_guide_slots.discard(slot_init.slot)
        if slot_init.sampling.prompt_logprobs is not None:
            self._scored_slots[slot_init.slot] = slot_init
        try:
            sampler.init_slot(slot_init)
        except Exception as error:
            if slot_init.guide is None:
                raise
            # A request's guide is input of a third-party library. If the library fails on a guide
            # that passed admission, only the sequence of this request ends with an error.
            log.warning(
                "event=guide_failed slot=%d reason=%r", slot_init.slot, type(error).__name__
            )
            self._failed_guide_slots.add(slot_init.slot)
            sampler.init_slot(msgspec.structs.replace(slot_init, guide=None))

    def _capture_next_graph(self) -> None:
        """Capture the largest missing graph; without memory for it, steps run without graphs."""
        if self._graphs is None:
            return
        try:
            self._graphs.capture_next()
        except (GraphCaptureError, torch.OutOfMemoryError) as error:
            self._turn_graphs_off(error)

    def _turn_graphs_off(self, error: Exception) -> None:
        log.warning("event=graphs_off reason=%r", str(error))
        self.failed_captures += 1
        self._graphs = None

    def _launch_sequences(self, step: Step) -> PendingOutcome:
        """Launch the forward pass and the sampling of a step.

        If the device's memory is exhausted on the only rank, the step is run in halves. On several
        ranks it fails, because the other ranks run the whole step.
        """
        self._can_rerun = self.model.mesh.ranks == 1 and not self._is_profile
        try:
            return self._replay_graph(step) or self._run_model(step)
        except torch.OutOfMemoryError as error:
            halves = halve_step(step) if self._can_rerun else None
            if halves is None:
                raise
            log.warning(
                "event=step_halved sequences=%d tokens=%d reason=%r",
                len(step.slots),
                len(step.token_ids),
                str(error),
            )
        # Here the error is deleted, which referred to the tensors of the failed pass.
        if self.model.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        first, second = [self._launch_sequences(half) for half in halves]
        return lambda: merge_outcomes(step, halves, (first(), second()))

    def _replay_graph(self, step: Step) -> PendingOutcome | None:
        """Launch the step as the replay of a CUDA graph; None: there is no graph for the step."""
        graphs, model = self._graphs, self.model
        if graphs is None or not graphs.supports(step):
            return None
        try:
            if not graphs.prepare(step):
                return None
        except GraphCaptureError as error:
            self._turn_graphs_off(error)
            return None
        x = None if model.is_first_stage else pipeline.receive_hidden(model, len(step.slots))
        graph_output = graphs.run(step, x)
        self._can_rerun = False  # The graph has replaced the slots' last tokens.
        if self._stage_sender is not None:
            self._stage_sender.send(graph_output.x)
            return partial(Outcome, step.step_id)
        if self._sampler is None:  # Only the first tensor rank samples.
            return partial(Outcome, step.step_id)
        assert graph_output.logits is not None
        indices = np.flatnonzero(np.array(step.draws))
        slots = [step.slots[index] for index in indices]
        sampled_tokens = None
        if not self._sampler.argmax_suffices(slots):
            all_sampled = len(slots) == len(step.slots)
            device = graph_output.logits.device
            logits = (
                graph_output.logits
                if all_sampled
                else graph_output.logits[to_device(indices, device)]
            )
            sampled_tokens = self._sampler.launch_sampling(
                logits, slots, [step.past[index] + 1 for index in indices]
            )
            self._store_last_tokens(slots, sampled_tokens.tokens)
        return partial(self._graph_outcome, step, indices, graph_output, sampled_tokens)

    def _graph_outcome(
        self,
        step: Step,
        indices: IntArray,
        graph_output: GraphOutput,
        sampled_tokens: SampledTokens | None,
    ) -> Outcome:
        """Wait for a replayed step, and return its outcome.

        `indices`: the sequences that sample a token, as indices in the step.
        """
        assert self._sampler is not None and graph_output.argmax_and_faults is not None
        argmax_ids, faults = graph_output.argmax_and_faults.wait()[:, : len(step.slots)].numpy()
        # Logits matter only for the sequences that sample a token.
        fault_indices = set(np.flatnonzero(faults & BAD_HIDDEN).tolist())
        fault_indices |= set(indices[faults[indices] != 0].tolist())
        stuck_indices = self._failed_guide_indices(step)
        tokens, scores = argmax_ids[indices].tolist(), list[TokenScore]()
        if sampled_tokens is not None:
            sampler_output = self._sampler.read_output(sampled_tokens)
            tokens, scores = sampler_output.tokens, sampler_output.scores
            stuck_indices |= set(indices[sampler_output.failed_guide_rows].tolist())
        return Outcome(
            step.step_id,
            tokens,
            scores,
            [],
            sorted(fault_indices),
            stuck=sorted(stuck_indices - fault_indices),
            replayed=True,
        )

    def _run_model(self, step: Step) -> PendingOutcome:
        """Run the forward pass without a graph; the rank with a sampler also samples the tokens."""
        model = self.model
        inputs = build_input_batch(step, self._block_tables, self._block_tokens, self._last_tokens)
        if self.async_scheduling and min(step.token_ids) < 0:
            # Only the first rank of the stage has the last sampled tokens.
            token_ids = broadcast_from_first_rank(inputs.token_ids, model.mesh.expert_mesh)
            inputs = replace(inputs, token_ids=token_ids)
        batch = self._adapter_memory.add_adapters(inputs.batch, step)
        if not inputs.samples_every_row and len(inputs.logits_rows) < batch.tokens:
            batch = replace(
                batch,
                # One row at least: the last row of the first sequence.
                logit_rows=inputs.logits_rows
                if len(inputs.logits_rows)
                else batch.positions.new_full((1,), step.lengths[0] - 1),
            )
        x = pipeline.receive_input(model, inputs.token_ids, batch)
        # Without virtual tokens the lookup in the adapter pool is skipped.
        has_virtual_tokens = inputs.token_id_max >= model.config.vocab_size
        x = model.forward_hidden(
            x, batch, self.pool, self._adapter_rows if has_virtual_tokens else None
        )
        if self._stage_sender is not None:
            self._stage_sender.send(x)
            return partial(Outcome, step.step_id)
        if model.mesh.dp_rank > 0:  # These ranks only compute experts for the first ones.
            return partial(Outcome, step.step_id)
        fault_indices: set[int] = set()
        stuck_indices = self._failed_guide_indices(step)
        # Before the sampling, which cannot be repeated if the memory is exhausted.
        prompt_scores = (
            self._score_prompts(step, inputs, x, fault_indices) if len(inputs.scored_rows) else []
        )
        checks: list[_FiniteCheck] = []
        # NaN or infinity in a row's hidden states also shows in its logits. If every row is
        # sampled, `_sample` (or the model's `greedy_tokens`, which returns None for logits that are
        # not finite) checks the logits of all rows, so no second check is needed.
        if self._sampler is not None and not inputs.samples_every_row:
            checks.append(_FiniteCheck(x, inputs.row_sequences))
        tokens, scores = self._sample(step, inputs, x, checks, stuck_indices)
        # The wait for the tokens was also a wait for the checks, which were launched earlier. The
        # scheduler discards the tokens of sequences with a fault.
        for check in checks:
            fault_indices |= check.fault_indices()
        return partial(
            Outcome,
            step.step_id,
            tokens,
            scores,
            prompt_scores,
            sorted(fault_indices),
            stuck=sorted(stuck_indices - fault_indices),
        )

    def _failed_guide_indices(self, step: Step) -> set[int]:
        """Return the indices of the step's sequences whose guide could not be started."""
        if not self._failed_guide_slots:
            return set()
        return {index for index, slot in enumerate(step.slots) if slot in self._failed_guide_slots}

    def _sample(
        self,
        step: Step,
        inputs: InputBatch,
        x: Tensor,
        checks: list["_FiniteCheck"],
        stuck_indices: set[int],
    ) -> tuple[list[int], list[TokenScore]]:
        """Wait for the sampled tokens and their scores; return them in row order.

        Only the rank with a sampler returns any. A check of the logits is added to `checks`, and
        sequences with a failed guide to `stuck_indices`. All tensor ranks of the stage must call
        this, because each of them computes a part of the logits.
        """
        count = len(inputs.sampled_sequences)
        if not count:
            return [], []
        slots = [step.slots[index] for index in inputs.sampled_sequences.tolist()]
        argmax_ids = None
        if self._sampler is not None and self._sampler.argmax_suffices(slots):
            argmax_ids = self.model.greedy_tokens(_select_logits_rows(x, inputs, 0, count))
        if argmax_ids is not None:
            if self.async_scheduling:
                self._store_last_tokens(slots, argmax_ids)
            return argmax_ids.tolist(), []
        logits = self._compute_logits(inputs, x, 0, count)
        if self._sampler is None or logits is None:
            return [], []
        checks.append(_FiniteCheck(logits, inputs.sampled_sequences))
        sampled_tokens = self._sampler.launch_sampling(logits, slots, inputs.positions.tolist())
        self._can_rerun = False  # The sampler has added the tokens to its history.
        if self.async_scheduling:
            self._store_last_tokens(slots, sampled_tokens.tokens)
        sampler_output = self._sampler.read_output(sampled_tokens)
        if sampler_output.failed_guide_rows:
            stuck_indices |= set(
                inputs.sampled_sequences[sampler_output.failed_guide_rows].tolist()
            )
        return sampler_output.tokens, sampler_output.scores

    def _store_last_tokens(self, slots: list[int], tokens: Tensor) -> None:
        """Store each slot's sampled token on the device, for a step that is planned early."""
        device = self._last_tokens.device
        self._last_tokens.index_copy_(0, to_device(np.array(slots), device), tokens)

    def _score_prompts(
        self, step: Step, inputs: InputBatch, x: Tensor, fault_indices: set[int]
    ) -> list[list[TokenScore]]:
        """Return the scores of prompt tokens: one list for each sequence that needs scores.

        At most `SCORED_BYTES_MAX` bytes of logits exist at a time.
        """
        first_row, model_config = len(inputs.sampled_sequences), self.model.config
        scores_by_index: dict[int, list[TokenScore]] = {
            index: [] for index, score_count in enumerate(step.prompt_score_counts) if score_count
        }
        rows_max = max(1, SCORED_BYTES_MAX // (model_config.vocab_size * 4))
        for start in range(0, len(inputs.scored_rows), rows_max):
            rows = inputs.scored_rows[start : start + rows_max]
            logits = self._compute_logits(inputs, x, first_row + start, len(rows))
            if self._sampler is None or logits is None:
                continue
            indices = inputs.row_sequences[rows]
            fault_indices |= _FiniteCheck(logits, indices).fault_indices()
            positions = inputs.scored_positions[start : start + rows_max]
            for sequence_index in np.unique(indices).tolist():
                row_numbers = np.flatnonzero(indices == sequence_index)
                slot_init = self._scored_slots[step.slots[sequence_index]]
                # A virtual token (-1 in `SlotInit.prompt`) has no score: token 0 is scored in its
                # place, and `new_prompt_scores` in `serving.scheduler.sequence` drops this score.
                targets = [
                    max(0, slot_init.prompt[position + 1])
                    for position in positions[row_numbers].tolist()
                ]
                scores_by_index[sequence_index] += self._sampler.score_targets(
                    logits[row_numbers[0] : row_numbers[-1] + 1],
                    targets,
                    slot_init.sampling.prompt_logprobs or 0,
                )
        return list(scores_by_index.values())

    def _compute_logits(
        self, inputs: InputBatch, x: Tensor, start: int, count: int
    ) -> Tensor | None:
        """Return the logits of `count` rows of `inputs.logits_rows`, from entry `start` on.

        Only the first tensor rank has them; the others return None.
        """
        rows = _select_logits_rows(x, inputs, start, count)
        return self.model.compute_logits_on_first_rank(rows, inputs.batch)


def _select_logits_rows(x: Tensor, inputs: InputBatch, start: int, count: int) -> Tensor:
    """Return the hidden states of `count` rows of `inputs.logits_rows`, from entry `start` on."""
    return (
        x
        if inputs.samples_every_row
        else x.index_select(0, inputs.logits_rows[start : start + count])
    )


class _FiniteCheck:
    """A check for NaN and infinity that is launched at once and read later.

    `indices`: the index of the sequence of each row of `x`.
    """

    def __init__(self, x: Tensor, indices: IntArray) -> None:
        self._x = x
        self._indices = indices
        total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
        self._is_finite = PendingHostCopy(total.isfinite())

    def fault_indices(self) -> set[int]:
        """Wait for the check, and return the sequences of rows with NaN or infinity."""
        if bool(self._is_finite.wait()):
            return set()
        # The sum of large finite values may be infinite too, so each row is checked.
        return set(self._indices[(~self._x.isfinite().all(-1)).cpu().numpy()].tolist())
