"""Batched sampler: penalties, bans, guides, temperature, top-k, top-p, min-p, log-probabilities.

The sampler chooses the tokens of all rows of the logits at once; `gpt.generation.reference_sampler`
is the slow reference for one row. The sampling parameters of all slots are one array. Each step
gathers the parameters of its slots from this array, so each parameter costs a few operations for
the whole batch. A row's token does not depend on the other rows. Penalties, bans, guides and scores
are computed only for the rows that need them. On a GPU with Triton, one kernel
(`serving.worker.triton_sampler`) draws the tokens of all rows without typical-p, unless the logits
are fp64; a row's rules alone decide whether the kernel or torch draws its token. This module is
independent of steps, blocks and models.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.cpu.packed_linear import argmax_rows
from gpt.device_transfers import PendingHostCopy, to_device
from gpt.sampling_params import SamplingParams
from gpt.tokenizers.tokenizer import Tokenizer
from gpt.triton_runtime.availability import triton_unavailable_reason
from serving.messages import SlotInit, TokenScore
from serving.worker.guided_decoding import GuideMatchers
from serving.worker.token_bans import TokenBans

# Columns of the array of sampling parameters. _UNIFORM: the uniform random numbers of a step.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _TYPICAL_P = range(5)
_REPETITION, _PRESENCE, _FREQUENCY, _UNIFORM = range(5, 9)
# The columns that the kernel of `serving.worker.triton_sampler` reads.
_KERNEL_COLUMNS = [_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _UNIFORM]

# Numbers of tokens of a row that top-k, top-p and typical-p examine on a CPU. Top-k and top-p
# examine the most likely tokens; typical-p examines the tokens whose surprisal is nearest to the
# entropy. Rows that need more tokens than the first number are computed again with the second
# number, and if necessary with the whole vocabulary.
_TOPK_SIZES = (256, 4096)
# Maximum number of rows whose log-probabilities are computed at once. Each of these rows needs a
# copy of its logits in fp32.
_SCORED_ROWS_MAX = 64

# Maximum number of logits that are processed in fp64 at once. The temporary tensors of all sampling
# rules together take about 72 bytes for each of these logits; sorting them on a GPU takes more.
_PROCESSED_LOGITS_MAX = 2 << 20

_NEGATIVE_INFINITY = float("-inf")
# Draws the tokens of the rows with a temperature above 0: (logits, parameters, tokens).
RowKernel = Callable[[Tensor, Tensor, Tensor], None]
log = logging.getLogger(__name__)
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens on the device, and their pending copy to the host."""

    tokens: Tensor
    slots: Sequence[int]
    # The tokens, followed by the scores of `scored_rows`, if there are any.
    host_copy: PendingHostCopy
    scored_rows: IntArray
    top_counts: IntArray  # For each row: the number of alternatives to report; -1: no score.


@dataclass(frozen=True)
class SamplerOutput:
    """The token of each row, and a score of each row if any row needs one, else no scores.

    Rows that need no score have a placeholder. `failed_guide_rows`: rows whose guide allows no
    token; their tokens are invalid.
    """

    tokens: list[int]
    scores: list[TokenScore] = field(default_factory=list)
    failed_guide_rows: list[int] = field(default_factory=list)


class Sampler:
    """The sampling parameters and the sampling state of all slots.

    Logits and tokens are on `device`. `guide_tokenizer` is needed for guided decoding.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        guide_tokenizer: Tokenizer | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._parameters: FloatArray = np.zeros((slots, 9))
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._top_counts = np.full(slots, -1)  # Alternatives to report; -1: no scores.
        self._is_greedy = np.ones(slots, dtype=np.bool_)
        # Slots for which the Triton kernel can sample from the unprocessed logits.
        self._is_drawn_directly = np.zeros(slots, dtype=np.bool_)
        self._row_kernel = _select_row_kernel(self._device, vocab_size)
        # Slots that need more than the argmax of their logits.
        self._slots_beyond_argmax = set[int]()
        self._bans: dict[int, TokenBans] = {}
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._decays: dict[int, _LengthDecay] = {}
        self._history = _PenaltyHistory(slots, vocab_size, self._device)
        self._guide_matchers = GuideMatchers(guide_tokenizer, vocab_size)

    def init_slot(self, slot_init: SlotInit) -> None:
        """Set a slot's sampling parameters, and its state after `slot_init.output_tokens`."""
        slot, sampling = slot_init.slot, slot_init.sampling
        self._parameters[slot] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.typical_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            0.0,
        )
        self._seeds[slot] = sampling.seed
        self._top_counts[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        # A slot with min_new_tokens still counts as greedy. Its bans are applied only if the argmax
        # is a stop token that comes too early (`_rows_ending_early`).
        self._is_greedy[slot] = (
            replace(sampling, min_new_tokens=0).is_plain_greedy and slot_init.guide is None
        )
        for slot_state in (self._bans, self._biases, self._decays):
            slot_state.pop(slot, None)
        self._history.drop_slot(slot)
        self._guide_matchers.drop_slot(slot)
        if sampling.logit_bias:
            biases = {i: bias for i, bias in sampling.logit_bias if 0 <= i < self._vocab_size}
            self._biases[slot] = (
                to_device(np.array(list(biases), dtype=np.int64), self._device),
                to_device(np.array(list(biases.values()), dtype=np.float64), self._device),
            )
        if (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
        ):
            self._history.init_slot(slot, slot_init.prompt, slot_init.output_tokens)
        if sampling.length_decay is not None:
            stop_ids = [token for token in sampling.stop_token_ids if 0 <= token < self._vocab_size]
            ids = to_device(np.array(stop_ids, dtype=np.int64), self._device)
            self._decays[slot] = _LengthDecay(sampling, len(slot_init.prompt), ids)
        if TokenBans.is_needed(sampling, len(slot_init.output_tokens)):
            self._bans[slot] = TokenBans(
                sampling, slot_init.prompt, slot_init.output_tokens, self._vocab_size
            )
        needs_argmax_only = (
            self._is_greedy[slot] and sampling.logprobs is None and slot not in self._bans
        )
        if needs_argmax_only:
            self._slots_beyond_argmax.discard(slot)
        else:
            self._slots_beyond_argmax.add(slot)
        self._is_drawn_directly[slot] = (
            bool(_has_kernel_rules(self._parameters[slot]))
            and slot_init.guide is None
            and not self._history.has_slot(slot)
            and not any(slot in slots for slots in (self._bans, self._biases, self._decays))
        )
        if slot_init.guide is not None:
            self._guide_matchers.init_slot(
                slot, slot_init.guide, sampling.stop_token_ids, slot_init.output_tokens
            )

    def sample(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]
    ) -> SamplerOutput:
        """Sample a token for each row of `logits` (R, V).

        `slots`, `positions`: the slot of each row, and the position of the sampled token in its
        sequence. A random draw depends only on the slot's seed and the position.
        """
        return self.read_output(self.launch_sampling(logits, slots, positions))

    def argmax_suffices(self, slots: Sequence[int]) -> bool:
        """Whether these slots need only the argmax of their logits.

        They are greedy, without logit bias, penalties, bans, guides or scores.
        """
        return self._slots_beyond_argmax.isdisjoint(slots)

    def launch_sampling(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]
    ) -> SampledTokens:
        """Launch the sampling; the device may still compute when this returns."""
        slot_ids = np.asarray(slots, dtype=np.int64)
        position_ids = np.asarray(positions, dtype=np.int64)
        # fp64 logits are sampled in fp64.
        uses_kernel = self._row_kernel is not None and logits.dtype != torch.float64
        is_drawn_directly = self._is_drawn_directly[slot_ids] & uses_kernel
        # Rows whose logits are processed (penalties, bans, guides, temperature) before a token is
        # chosen. The other rows are drawn directly, or need only the argmax.
        processed_rows = np.flatnonzero(~self._is_greedy[slot_ids] & ~is_drawn_directly)
        rows_max = max(1, _PROCESSED_LOGITS_MAX // logits.shape[-1])
        if len(processed_rows) == len(slot_ids) <= rows_max:
            tokens = self._process_and_sample(
                logits.to(torch.float64, copy=True),
                slot_ids,
                position_ids,
                uses_kernel=uses_kernel,
            )
        else:
            tokens = _argmax_of_rows(logits, ~is_drawn_directly)
            processed_rows = np.concatenate(
                [processed_rows, self._rows_ending_early(tokens, slot_ids)]
            )
            if is_drawn_directly.any():
                parameters = self._step_parameters(slot_ids, position_ids)
                self._draw_in_kernel(logits, parameters, is_drawn_directly, tokens)
            for start in range(0, len(processed_rows), rows_max):
                chunk_rows = processed_rows[start : start + rows_max]
                rows = to_device(chunk_rows, logits.device)
                tokens[rows] = self._process_and_sample(
                    logits[rows].to(torch.float64),
                    slot_ids[chunk_rows],
                    position_ids[chunk_rows],
                    uses_kernel=uses_kernel,
                )
        scored_rows = np.flatnonzero(self._top_counts[slot_ids] >= 0)
        top_counts = np.minimum(self._top_counts[slot_ids], logits.shape[-1])
        host_copy = PendingHostCopy(self._pack_scores(logits, tokens, scored_rows, top_counts))
        # Last, so that the sampling can be repeated if the memory is exhausted.
        self._history.append_tokens(slot_ids, tokens)
        return SampledTokens(tokens, slots, host_copy, scored_rows, top_counts)

    def read_output(self, sampled_tokens: SampledTokens) -> SamplerOutput:
        """Wait for the sampled tokens, and update bans and guides with them.

        Outputs must be read in the order of the calls of `launch_sampling`.
        """
        slots = sampled_tokens.slots
        ids, scores = _unpack_sampled(sampled_tokens)
        if self._bans:
            for slot, token in zip(slots, ids, strict=True):
                if slot in self._bans:
                    self._bans[slot].append(token)
        failed_guide_rows = []
        matchers = self._guide_matchers
        if matchers:
            for row, slot in enumerate(slots):
                if slot in matchers and not matchers.accept_token(slot, ids[row]):
                    failed_guide_rows.append(row)
        return SamplerOutput(ids, scores, failed_guide_rows)

    def score_targets(
        self, logits: Tensor, targets: Sequence[int], top_count: int
    ) -> list[TokenScore]:
        """Return the score of the target token of each row of `logits` (N, V).

        Each score includes the `top_count` best tokens of the row.
        """
        target_ids = to_device(np.array(targets, dtype=np.int64), logits.device)
        rows = _score_rows(logits, target_ids, top_count).tolist()
        return [_unpack_score(row, min(top_count, logits.shape[-1])) for row in rows]

    def _rows_ending_early(self, tokens: Tensor, slots: IntArray) -> IntArray:
        """Return the greedy rows whose argmax is a stop token before min_new_tokens is reached."""
        rows: list[int] = []
        if self._bans:
            rows = [
                row
                for row, slot in enumerate(slots)
                if slot in self._bans and self._is_greedy[slot]
            ]
        if not rows:  # Return early, because reading the tokens waits for the device.
            return np.zeros(0, dtype=np.int64)
        ids = tokens.tolist()
        early_rows = [row for row in rows if self._bans[slots[row]].bans_stop_token(ids[row])]
        return np.array(early_rows, dtype=np.int64)

    def _step_parameters(self, slots: IntArray, positions: IntArray) -> FloatArray:
        """Return the sampling parameters of rows, with the random numbers of this step."""
        parameters = self._parameters[slots]
        parameters[:, _UNIFORM] = uniforms(self._seeds[slots], positions)
        return parameters

    def _draw_in_kernel(
        self, logits: Tensor, parameters: FloatArray, is_drawn: BoolArray, tokens: Tensor
    ) -> None:
        """Write the tokens of the rows `is_drawn` to `tokens`; the kernel skips the others."""
        # NumPy's indexing with a list returns an array with columns first.
        kernel_parameters = np.ascontiguousarray(parameters[:, _KERNEL_COLUMNS])
        kernel_parameters[~is_drawn, _TEMPERATURE] = 0
        assert self._row_kernel is not None
        self._row_kernel(logits, to_device(kernel_parameters, logits.device), tokens)

    def _process_and_sample(
        self, x: Tensor, slots: IntArray, positions: IntArray, *, uses_kernel: bool
    ) -> Tensor:
        """Process the logits `x` (fp64, overwritten), and return the token of each row."""
        parameters = self._step_parameters(slots, positions)
        device_parameters = to_device(parameters, x.device)
        if self._biases:
            for row, slot in enumerate(slots):
                if slot in self._biases:
                    tokens, bias = self._biases[slot]
                    x[row, tokens] += bias
        self._history.apply_penalties(x, slots, device_parameters)
        if self._decays:
            for row, slot in enumerate(slots):
                if slot in self._decays:
                    self._decays[slot].apply(x[row], int(positions[row]))
        self._apply_bans(x, slots)
        is_drawn = np.zeros(len(slots), dtype=np.bool_)
        if uses_kernel:
            is_drawn = _has_kernel_rules(parameters)
        sampled_rows = np.flatnonzero((parameters[:, _TEMPERATURE] > 0) & ~is_drawn)
        if len(sampled_rows) == len(slots):
            return sample_tokens(x, parameters, device_parameters)
        token_ids = _argmax_of_rows(x, ~is_drawn)
        if is_drawn.any():
            self._draw_in_kernel(x, parameters, is_drawn, token_ids)
        if len(sampled_rows):
            rows = to_device(sampled_rows, x.device)
            token_ids[rows] = sample_tokens(
                x[rows], parameters[sampled_rows], device_parameters[rows]
            )
        return token_ids

    def _apply_bans(self, x: Tensor, slots: IntArray) -> None:
        """Apply guides, then bans, in the order that the docstring of `SamplingParams` lists.

        A guide or a ban that would leave a row without any token is not applied to the row.
        """
        guided_rows = [row for row, slot in enumerate(slots) if slot in self._guide_matchers]
        if guided_rows:
            _mask_logits(
                x,
                guided_rows,
                ~self._guide_matchers.allowed_mask([int(slots[row]) for row in guided_rows]),
            )
        banned_rows = [
            (row, self._bans[slot]) for row, slot in enumerate(slots) if slot in self._bans
        ]
        for mask_of in (
            TokenBans.not_allowed_mask,
            TokenBans.bad_words_mask,
            TokenBans.repeats_mask,
            TokenBans.early_stop_mask,
        ):
            masks = [
                (row, mask) for row, bans in banned_rows if (mask := mask_of(bans)) is not None
            ]
            if masks:
                _mask_logits(x, [row for row, _ in masks], np.stack([mask for _, mask in masks]))

    def _pack_scores(
        self, logits: Tensor, tokens: Tensor, scored_rows: IntArray, top_counts: IntArray
    ) -> Tensor:
        """Return the tokens and the requested scores as one tensor, for one copy to the host."""
        if not len(scored_rows):
            return tokens
        rows = to_device(scored_rows, logits.device)
        scored_logits = logits if len(scored_rows) == len(top_counts) else logits[rows]
        packed_scores = _score_rows(scored_logits, tokens[rows], int(top_counts.max()))
        # Ids are exact in fp64 up to 2^53.
        return torch.cat([tokens.to(torch.float64), packed_scores.flatten()])


def _unpack_sampled(sampled_tokens: SampledTokens) -> tuple[list[int], list[TokenScore]]:
    """Wait for the copy; split it into tokens and scores."""
    packed_numbers, count = sampled_tokens.host_copy.wait().tolist(), len(sampled_tokens.slots)
    if not len(sampled_tokens.scored_rows):
        return packed_numbers, []
    ids, score_numbers = [int(number) for number in packed_numbers[:count]], packed_numbers[count:]
    width = len(score_numbers) // len(sampled_tokens.scored_rows)
    scores = [TokenScore(0.0)] * count
    for index, row in enumerate(sampled_tokens.scored_rows):
        row_numbers = score_numbers[index * width : (index + 1) * width]
        scores[row] = _unpack_score(row_numbers, int(sampled_tokens.top_counts[row]))
    return ids, scores


def _select_row_kernel(device: torch.device, vocab_size: int) -> RowKernel | None:
    """Return the kernel that draws tokens on a GPU, compiled for fp64; None: torch draws them."""
    if device.type != "cuda":
        return None
    reason = triton_unavailable_reason(device)
    if reason is not None:
        log.info("event=sampler backend=torch reason=%r", reason)
        return None
    from serving.worker.triton_sampler import sample_rows

    # Compile the variant for processed logits, which the warm-up does not sample.
    sample_rows(
        torch.zeros(1, vocab_size, dtype=torch.float64, device=device),
        torch.zeros(1, len(_KERNEL_COLUMNS), dtype=torch.float64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    return sample_rows


def _has_kernel_rules(parameters: FloatArray) -> BoolArray:
    """Return for each row whether the kernel can draw its token. The kernel has no typical-p."""
    is_drawn: BoolArray = (parameters[..., _TEMPERATURE] > 0) & (parameters[..., _TYPICAL_P] >= 1)
    return is_drawn


def _argmax_of_rows(logits: Tensor, is_needed: BoolArray) -> Tensor:
    """Return the argmax of each row. If no row needs it, the tokens are uninitialized."""
    if is_needed.any():
        return argmax_rows(logits)
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)


def uniforms(seeds: NDArray[np.uint64], positions: IntArray) -> FloatArray:
    """`gpt.sampling_params.uniform_draw` for arrays: SplitMix64 in wrapping 64-bit arithmetic."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniform_numbers: FloatArray = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) / 2.0**53
    return uniform_numbers


def sample_tokens(x: Tensor, parameters: FloatArray, device_parameters: Tensor) -> Tensor:
    """Sample a token for each row of logits `x` (R, V). All rows have a temperature above 0.

    `x` is overwritten with unnormalized probabilities (weights). Penalties and bans are already
    applied. `parameters` are the sampling parameters of the rows on the host, `device_parameters`
    their copy on the device.
    """
    x.sub_(x.amax(-1, keepdim=True)).div_(device_parameters[:, _TEMPERATURE, None]).exp_()
    floor = device_parameters[:, _MIN_P].clone()
    top_k, top_p = parameters[:, _TOP_K], parameters[:, _TOP_P]
    truncated_rows = np.flatnonzero(((top_k > 0) & (top_k < x.shape[-1])) | (top_p < 1))
    if len(truncated_rows):
        rows = to_device(truncated_rows, x.device)
        row_weights = x if len(truncated_rows) == len(x) else x[rows]
        row_floor = _weight_floor(
            row_weights, device_parameters[rows], _TOPK_SIZES, has_top_k=bool(top_k.any())
        )
        floor[rows] = torch.maximum(floor[rows], row_floor)
    if len(truncated_rows) or parameters[:, _MIN_P].any():
        x.masked_fill_(x < floor.unsqueeze(-1), 0)
    typical_rows = np.flatnonzero(parameters[:, _TYPICAL_P] < 1)
    if len(typical_rows):
        rows = to_device(typical_rows, x.device)
        row_weights = x[rows]
        x[rows] = row_weights.masked_fill(
            _atypical_mask(row_weights, device_parameters[rows, _TYPICAL_P, None]), 0
        )
    cumulative = x.cumsum(-1)
    targets = device_parameters[:, _UNIFORM, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    return token_ids.clamp(max=x.shape[-1] - 1)  # A row with NaN or infinity may give index V.


def _weight_floor(
    weights: Tensor, device_parameters: Tensor, sizes: Sequence[int], *, has_top_k: bool
) -> Tensor:
    """For each row of `weights` (R, V), return the smallest weight that top-k and top-p keep: (R,).

    On a CPU only the `sizes[0]` largest weights of a row are examined. Rows that need more are
    computed again with the next size, so a row's floor does not depend on the other rows. If
    `sizes` is empty, and on a GPU, all weights are examined. `has_top_k`: at least one row has a
    top-k. If a row has a top-k and a top-p, its top-p applies to the weights that its top-k keeps.
    """
    vocabulary = weights.shape[-1]
    # The host reads whether a row needs more weights. This would stall a GPU, so a GPU sorts all
    # weights.
    size = min(vocabulary, sizes[0] if sizes and weights.device.type == "cpu" else vocabulary)
    top_weights = weights.topk(size).values
    k, p = device_parameters[:, _TOP_K, None].long(), device_parameters[:, _TOP_P, None]
    kth_weight = top_weights.gather(-1, (k - 1).clamp(0, size - 1))
    kth_weight = torch.where((k > 0) & (k <= size), kth_weight, 0)
    top_k_weights = weights.masked_fill(weights < kth_weight, 0) if has_top_k else weights
    total = top_k_weights.sum(-1, keepdim=True)
    # The weights are in descending order. A token is kept if the probabilities of the tokens before
    # it sum to less than top_p. The first token is always kept.
    weight_before = top_weights.cumsum(-1).roll(1, -1)
    weight_before[:, 0] = 0
    is_retained = (top_weights >= kth_weight) & ((weight_before < p * total) | (p >= 1))
    last_index = (is_retained.sum(-1, keepdim=True) - 1).clamp(min=0)
    floor = top_weights.gather(-1, last_index).squeeze(-1)
    if size == vocabulary:
        return floor
    smallest_top = top_weights[:, -1]
    unsettled_rows = (
        ((k.squeeze(-1) > size) | ((floor <= smallest_top) & (smallest_top > 0)))
        .nonzero()
        .squeeze(-1)
    )
    if len(unsettled_rows):
        floor[unsettled_rows] = _weight_floor(
            weights[unsettled_rows],
            device_parameters[unsettled_rows],
            sizes[1:],
            has_top_k=has_top_k,
        )
    return floor


def _atypical_mask(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Return a mask (R, V) of the tokens that typical-p excludes.

    The surprisal of these tokens is too far from the entropy of their row.
    """
    p = weights / weights.sum(-1, keepdim=True)
    distance = p.log().add_(torch.special.entr(p).sum(-1, keepdim=True)).abs_()
    return distance > _typical_distance(distance, p, typical_p, _TOPK_SIZES)


def _typical_distance(
    distance: Tensor, p: Tensor, typical_p: Tensor, sizes: Sequence[int]
) -> Tensor:
    """For each row, return the distance (R, 1) up to which typical-p keeps tokens.

    It is the smallest distance for which the tokens within it have a total probability of at least
    `typical_p`. `distance` (R, V): |surprisal - entropy of the row|; `p`: the probabilities. On a
    CPU only the `sizes[0]` nearest tokens are examined first, as in `_weight_floor`.
    """
    vocabulary = p.shape[-1]
    size = min(vocabulary, sizes[0] if sizes and p.device.type == "cpu" else vocabulary)
    nearest = distance.topk(size, largest=False)
    is_within = p.gather(-1, nearest.indices).cumsum(-1) < typical_p
    distance_max = nearest.values.gather(-1, is_within.sum(-1, keepdim=True).clamp(max=size - 1))
    if size == vocabulary:
        return distance_max
    unsettled_rows = is_within[:, -1].nonzero().squeeze(-1)
    if len(unsettled_rows):
        row_tensors = (distance[unsettled_rows], p[unsettled_rows], typical_p[unsettled_rows])
        distance_max[unsettled_rows] = _typical_distance(*row_tensors, sizes[1:])
    return distance_max


def _mask_logits(x: Tensor, rows: Sequence[int], banned: NDArray[np.bool_]) -> None:
    """Mask the `banned` tokens (N, V) of these N rows; skip rows that would have no token left."""
    row_ids = to_device(np.array(rows), x.device)
    row_logits = x[row_ids]
    masked_logits = row_logits.masked_fill(to_device(banned, x.device), _NEGATIVE_INFINITY)
    is_all_masked = masked_logits.amax(-1, keepdim=True) == _NEGATIVE_INFINITY
    x[row_ids] = torch.where(is_all_masked, row_logits, masked_logits)


def _score_rows(logits: Tensor, tokens: Tensor, top_count: int) -> Tensor:
    """Return the scores of one token per row of `logits`, as a tensor (N, 2 + 2 * top_count).

    Its columns are the token's log-probability, its rank, the ids of the `top_count` best tokens,
    and their log-probabilities.
    """
    chunks = []
    top_count = min(top_count, logits.shape[-1])
    for chunk_logits, chunk_tokens in zip(
        logits.split(_SCORED_ROWS_MAX), tokens.split(_SCORED_ROWS_MAX), strict=True
    ):
        logits_fp32 = chunk_logits.to(torch.promote_types(chunk_logits.dtype, torch.float32))
        log_normalizer = logits_fp32.logsumexp(-1, keepdim=True)
        token_logits = logits_fp32.gather(-1, chunk_tokens.unsqueeze(-1))
        rank = 1 + (logits_fp32 > token_logits).sum(-1, keepdim=True)
        parts = [token_logits - log_normalizer, rank]
        if top_count:
            ids = _top_ids(logits_fp32, top_count)
            parts += [ids, logits_fp32.gather(-1, ids) - log_normalizer]
        chunks.append(torch.cat([part.to(torch.float64) for part in parts], dim=-1))
    return torch.cat(chunks) if chunks else torch.zeros(0, 2 + 2 * top_count, dtype=torch.float64)


def _top_ids(logits: Tensor, top_count: int) -> Tensor:
    """Return the ids of the `top_count` best tokens of each row (R, V), best token first.

    Of equal logits, the token with the lower id comes first.
    """
    # The host reads whether there are ties. This would stall a GPU, so a GPU sorts all logits.
    if logits.device.type != "cpu":
        return logits.sort(stable=True, descending=True, dim=-1).indices[:, :top_count]
    # `topk` breaks ties arbitrarily. One more value shows whether the last token to return is tied
    # with the next one.
    values, ids = logits.topk(min(top_count + 1, logits.shape[-1]))
    ids = ids.sort(-1).values
    order = logits.gather(-1, ids).sort(stable=True, descending=True, dim=-1).indices
    top_ids = ids.gather(-1, order)[:, :top_count]
    if values.shape[-1] == top_count or not bool((values[:, -1] == values[:, -2]).any()):
        return top_ids
    return logits.sort(stable=True, descending=True, dim=-1).indices[:, :top_count]


def _unpack_score(numbers: Sequence[float], top_count: int) -> TokenScore:
    logprob, rank, *top_numbers = numbers
    half = len(top_numbers) // 2
    ids, logprobs = top_numbers[:top_count], top_numbers[half : half + top_count]
    return TokenScore(logprob, int(rank), [(int(i), p) for i, p in zip(ids, logprobs, strict=True)])


@dataclass(frozen=True)
class _LengthDecay:
    """The length decay of one slot: the logits of stop tokens grow with each output token."""

    sampling: SamplingParams
    prompt_tokens: int
    stop_ids: Tensor

    def apply(self, x: Tensor, position: int) -> None:
        """Raise the logits of stop tokens in a row (V,), in place.

        `position`: the next token's position in its sequence.
        """
        growth = self.sampling.stop_logit_growth(position - self.prompt_tokens)
        if growth:
            stop_logits = x[self.stop_ids]
            x[self.stop_ids] = stop_logits + stop_logits.abs() * growth


class _PenaltyHistory:
    """The tokens of sequences with penalties, on the device: a history row for each sequence.

    Penalties change only the logits of tokens in the sequence. The tokens are stored in order, with
    duplicates, which are harmless because each writes the same new logit. History rows are
    allocated when they are first needed; their numbers are independent of the rows of the logits.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slot_rows = np.full(slots, -1)  # The history row of each slot; -1: none.
        self._free: list[int] = []  # History rows that no slot has.
        self._lengths = np.zeros(0, dtype=np.int64)
        self._ids = torch.zeros(0, 0, dtype=torch.long, device=device)
        # How often each token is in the output (not in the prompt).
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def init_slot(self, slot: int, prompt: Sequence[int], output_tokens: Sequence[int]) -> None:
        seen_ids = [token for token in (*prompt, *output_tokens) if 0 <= token < self._vocab_size]
        output_ids = [token for token in output_tokens if 0 <= token < self._vocab_size]
        if not self._free:
            self._grow_rows()
        row = self._slot_rows[slot] = self._free.pop()
        self._grow_columns(len(seen_ids))
        self._lengths[row] = len(seen_ids)
        self._ids[row, : len(seen_ids)] = to_device(
            np.array(seen_ids, dtype=np.int64), self._device
        )
        counts = np.bincount(np.asarray(output_ids, dtype=np.int64), minlength=self._vocab_size)
        self._counts[row] = to_device(counts.astype(np.int32), self._device)

    def has_slot(self, slot: int) -> bool:
        return bool(self._slot_rows[slot] >= 0)

    def drop_slot(self, slot: int) -> None:
        if self._slot_rows[slot] >= 0:
            self._free.append(int(self._slot_rows[slot]))
            self._slot_rows[slot] = -1

    def apply_penalties(self, x: Tensor, slots: IntArray, device_parameters: Tensor) -> None:
        """Apply the penalties to the logits `x` (R, V) of these slots, in place."""
        indices, rows = self._rows_with_history(slots)
        has_tokens = self._lengths[rows] > 0
        indices, rows = indices[has_tokens], rows[has_tokens]
        if not len(rows):
            return
        lengths = self._lengths[rows]
        ids = self._ids[to_device(rows, self._device), : lengths.max()]
        # Columns after the end of a history repeat the history's first token, whose new logit is
        # then only written again.
        columns = torch.arange(ids.shape[1], device=self._device)
        is_past_end = columns >= to_device(lengths, self._device).unsqueeze(-1)
        ids = torch.where(is_past_end, ids[:, :1], ids)
        logits_rows = to_device(indices, self._device).unsqueeze(-1)
        count = self._counts[to_device(rows, self._device).unsqueeze(-1), ids]
        parameters = device_parameters[logits_rows.squeeze(-1)]
        repetition = parameters[:, _REPETITION, None]
        old = x[logits_rows, ids]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new = new - parameters[:, _FREQUENCY, None] * count
        x[logits_rows, ids] = new - parameters[:, _PRESENCE, None] * (count > 0)

    def append_tokens(self, slots: IntArray, tokens: Tensor) -> None:
        """Append a new token to the sequence of each of these slots."""
        indices, rows = self._rows_with_history(slots)
        if not len(rows):
            return
        self._grow_columns(int(self._lengths[rows].max()) + 1)
        row_ids = to_device(rows, self._device)
        token_ids = tokens[to_device(indices, self._device)]
        self._ids[row_ids, to_device(self._lengths[rows], self._device)] = token_ids
        self._counts[row_ids, token_ids] += 1
        self._lengths[rows] += 1

    def _rows_with_history(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return the indices in `slots` of the slots with penalties, and their history rows."""
        rows = self._slot_rows[slots]
        indices = np.flatnonzero(rows >= 0)
        return indices, rows[indices]

    def _grow_rows(self) -> None:
        row_count = len(self._lengths)
        rows_added = max(4, row_count)
        self._free += range(row_count, row_count + rows_added)
        self._lengths = np.concatenate([self._lengths, np.zeros(rows_added, dtype=np.int64)])
        self._ids = torch.cat([self._ids, self._ids.new_zeros(rows_added, self._ids.shape[1])])
        self._counts = torch.cat(
            [self._counts, self._counts.new_zeros(rows_added, self._vocab_size)]
        )

    def _grow_columns(self, length: int) -> None:
        columns = self._ids.shape[1]
        if length > columns:
            columns_added = max(length - columns, columns, 256)
            self._ids = torch.cat(
                [self._ids, self._ids.new_zeros(len(self._ids), columns_added)], dim=1
            )
