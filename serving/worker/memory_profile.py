"""Memory profile: the device memory of the largest steps, measured before the KV pool is allocated.

The profile runs the largest steps that the settings allow, and reads the peak of torch's allocator.
The steps also make the libraries allocate what they keep: workspaces of cuBLAS, kernels of Triton.
The model runner of the profile has a KV pool of two blocks, and all sequences of a step use the
same block: the memory of a step depends on the lengths of the sequences, not on the contents of the
blocks. Afterwards the model runner is freed. All ranks run the same steps, because the steps run
collectives. A CPU is not profiled: the KV cache takes only a part of the host's free memory by
default, and a step fits into the rest.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.kv_groups import kv_groups
from gpt.model.gpt_model import GPT
from gpt.parallel.collectives import barrier
from gpt.sampling_params import SamplingParams
from serving.config import CacheConfig, SchedulerConfig
from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.messages import BlockTableUpdate, SlotInit, Step
from serving.worker.adapter_memory import AdapterMemory
from serving.worker.model_runner import ModelRunner

PROFILE_BLOCKS = 2  # Block 0, and the block that all sequences share.
SHARED_BLOCK = 1
LOGPROBS = 20  # The default of `logprobs_max`. More of them need hardly any more memory.
# Rules that the Triton kernel of the sampler supports. It needs a scratch buffer for all rows.
KERNEL_RULES = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=LOGPROBS)
# Rules for which torch processes and sorts the logits in fp64.
TORCH_RULES = replace(KERNEL_RULES, typical_p=0.9)
# Penalties, which need the history of a sequence on the device; the mask of `min_new_tokens`, which
# is applied in the same way as the masks of guides; the log-probabilities of the prompt. A sequence
# with draft tokens has no penalties.
STATEFUL_RULES = replace(
    TORCH_RULES,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    min_new_tokens=1,
    stop_token_ids=(0,),
    prompt_logprobs=LOGPROBS,
)


@dataclass(frozen=True)
class StepMemory:
    """The memory of a rank's device after the profile, in bytes."""

    free_bytes: int
    step_bytes: int  # The largest steps need this in addition to `allocated_bytes`.
    allocated_bytes: int  # What torch's allocator holds: the weights.
    # What this process holds outside of torch's allocator (CUDA context, NCCL, kernels), and what
    # other processes hold.
    other_bytes: int


@dataclass(frozen=True)
class LargestStep:
    """A step of the profile; `setting` limits its size."""

    setting: str
    step: Step


@dataclass(frozen=True)
class _Run:
    """The new tokens of one sequence in a step."""

    tokens: int
    past: int = 0
    drafts: int = 0  # The last new tokens are draft tokens.


def profile_step_memory(
    model: GPT, scheduler_config: SchedulerConfig, cache_config: CacheConfig
) -> StepMemory:
    """Measure the largest steps on a CUDA device. All ranks must call this together."""
    device = model.mesh.device
    _free_caches(device)  # The checks of the start have left cached memory.
    torch.cuda.reset_peak_memory_stats(device)
    with torch.cuda.device(device):
        run_largest_steps(model, scheduler_config, cache_config)
    peak_bytes = torch.cuda.max_memory_allocated(device)
    _free_caches(device)
    barrier(model.mesh)  # Ranks that share the device have freed their caches, too.
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    allocated_bytes = torch.cuda.memory_allocated(device)
    return StepMemory(
        free_bytes=free_bytes,
        step_bytes=peak_bytes - allocated_bytes,
        allocated_bytes=allocated_bytes,
        other_bytes=total_bytes - free_bytes - torch.cuda.memory_reserved(device),
    )


def run_largest_steps(
    model: GPT, scheduler_config: SchedulerConfig, cache_config: CacheConfig
) -> None:
    """Run the largest steps; raise ConfigError if the memory does not suffice for one of them."""
    exhausted = _exhausting_setting(model, scheduler_config, cache_config)
    if exhausted is None:
        return
    setting, reason = exhausted
    value = getattr(cache_config if hasattr(cache_config, setting) else scheduler_config, setting)
    raise ConfigError(
        f"the memory of {model.mesh.device} does not suffice for the largest step of this server, "
        f"beside the weights and without a KV cache; lower {setting}, which is {value}, use more "
        f"ranks (tp, pp), or stop other processes on the device ({reason})"
    )


def _exhausting_setting(
    model: GPT, scheduler_config: SchedulerConfig, cache_config: CacheConfig
) -> tuple[str, str] | None:
    """Run the largest steps.

    If the memory does not suffice for a step, return the setting that limits the step's size, and
    the text of the error. The error itself is deleted, because it refers to the step's tensors.
    """
    setting = "adapter_memory_mb"
    try:
        AdapterMemory(
            model,
            cache_config.adapter_pages * ADAPTER_PAGE_BYTES,
            scheduler_config.running_requests_max,
        )
        # Only the first stage has an adapter pool.
        setting = "adapter_rows_max" if model.is_first_stage else "running_requests_max"
        # The adapter pool and the slots have the sizes that they will have in the server.
        runner = ModelRunner(
            model,
            scheduler_config,
            cache_config,
            async_scheduling=False,
            blocks=PROFILE_BLOCKS,
            slots=scheduler_config.running_requests_max,
            is_profile=True,
        )
        steps = largest_steps(model.config, scheduler_config, cache_config)
        if model.mesh.pp > 1:
            # A stage keeps the outputs of up to 2 x pp steps until the next stage receives them.
            widest_step = max(steps, key=lambda largest: len(largest.step.token_ids))
            steps += [widest_step] * (2 * model.mesh.pp)
        for largest_step in steps:
            setting = largest_step.setting
            runner.run_step(largest_step.step)
        runner.wait_for_sends()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return setting, str(error)
    return None


def largest_steps(
    model_config: GPTConfig, scheduler_config: SchedulerConfig, cache_config: CacheConfig
) -> list[LargestStep]:
    """Return steps of which one needs the most memory that any step of this server can need.

    The forward pass needs the most memory for the most tokens, in sequences of unequal lengths
    without past tokens (attention pads them), or in chunks with past tokens. Sampling needs the
    most memory for the most rows of logits; each kind of sampling rules uses other buffers. The
    first step makes the history of penalties as large as it can become, because it stays allocated.
    """
    context, block_tokens = model_config.max_position_embeddings, cache_config.kv_block_tokens
    windows = [group.window for group in kv_groups(model_config)]
    # Without windows, a sequence is not longer than the KV cache.
    if cache_config.kv_tokens_max is not None and not any(windows):
        context = min(context, -(-cache_config.kv_tokens_max // block_tokens) * block_tokens)
    builder = _StepBuilder(
        context, block_tokens, virtual_token=model_config.vocab_size, groups=len(windows)
    )
    requests, tokens = scheduler_config.running_requests_max, scheduler_config.step_tokens_max
    # Prompts of the most tokens, in few sequences.
    prompts = [_Run(length) for length in _unequal_lengths(tokens, requests, context)]
    # A chunk at the end of a context, while all other sequences decode.
    decodes = [_Run(1, past=min(block_tokens, context) - 1)] * (requests - 1)
    chunk_tokens = min(tokens - len(decodes), context)
    chunk = _Run(chunk_tokens, past=context - chunk_tokens)
    # The most sequences.
    sequences = [_Run(min(tokens // requests, context))] * requests
    decoding = [_Run(1, past=context - 1), *decodes]
    steps = [
        LargestStep("running_requests_max", builder.build(decoding, STATEFUL_RULES)),
        LargestStep("running_requests_max", builder.build(decoding, KERNEL_RULES)),
        LargestStep("step_tokens_max", builder.build(prompts, STATEFUL_RULES, scores_first=True)),
        LargestStep("running_requests_max", builder.build(sequences, STATEFUL_RULES, copies=True)),
        LargestStep("running_requests_max", builder.build(sequences, KERNEL_RULES)),
        LargestStep("step_tokens_max", builder.build([chunk, *decodes], KERNEL_RULES)),
    ]
    verified = _verified_runs(scheduler_config, context)
    if verified:
        steps += [
            LargestStep("speculate_rows_max", builder.build(verified, rules))
            for rules in (TORCH_RULES, KERNEL_RULES)
        ]
    return steps


def _unequal_lengths(tokens: int, sequences_max: int, context: int) -> list[int]:
    """Return the lengths of few sequences with `tokens` tokens, if possible of unequal lengths."""
    lengths: list[int] = []
    while tokens > 0 and len(lengths) < sequences_max:
        lengths.append(min(tokens, context))
        tokens -= lengths[-1]
    if len(set(lengths)) == 1 and lengths[-1] > 4 and len(lengths) < sequences_max:
        lengths[-1:] = [lengths[-1] - 2, 2]
    return lengths


def _verified_runs(config: SchedulerConfig, context: int) -> list[_Run]:
    """Return decodes with the most draft tokens, beside the ends of prompts in all other slots.

    The ends of prompts do not count in `speculate_rows_max`, but each has a row of logits.
    """
    runs: list[_Run] = []
    rows_left, tokens_left = config.speculate_rows_max, config.step_tokens_max
    while len(runs) < config.running_requests_max:
        rows = min(1 + config.speculate_tokens_max, rows_left, tokens_left, context)
        if rows < 2:
            break
        runs.append(_Run(rows, past=context - rows, drafts=rows - 1))
        rows_left -= rows
        tokens_left -= rows
    if not runs:
        return []
    prompts = min(config.running_requests_max - len(runs), tokens_left)
    if prompts:
        runs += [_Run(min(tokens_left // prompts, context))] * prompts
    return runs


@dataclass(frozen=True)
class _StepBuilder:
    """Builds steps in which run i is the sequence of slot i, and samples a token."""

    context: int
    block_tokens: int
    virtual_token: int
    groups: int  # KV groups.

    def build(
        self,
        runs: Sequence[_Run],
        rules: SamplingParams,
        *,
        scores_first: bool = False,
        copies: bool = False,
    ) -> Step:
        """Return a step of these runs.

        `scores_first`: the prompt of the first sequence is scored. `copies`: each sequence copies a
        block, as after a prompt whose last block is cached.
        """
        token_ids = [0] * sum(run.tokens for run in runs)
        token_ids[0] = self.virtual_token  # So that the embeddings of adapters are looked up.
        count = len(runs)
        return Step(
            0,
            slots=list(range(count)),
            past=[run.past for run in runs],
            lengths=[run.tokens for run in runs],
            token_ids=token_ids,
            draws=[True] * count,
            prompt_score_counts=[runs[0].tokens - 1 if scores_first else 0] + [0] * (count - 1),
            draft_counts=[run.drafts for run in runs] if any(run.drafts for run in runs) else [],
            slot_inits=list(self._slot_inits(runs, rules)),
            block_table_updates=[
                BlockTableUpdate(slot, 0, [SHARED_BLOCK] * self._block_count(run), group)
                for slot, run in enumerate(runs)
                for group in range(self.groups)
            ],
            block_copies=[(SHARED_BLOCK, SHARED_BLOCK)] * count if copies else [],
        )

    def _block_count(self, run: _Run) -> int:
        return -(-(run.past + run.tokens) // self.block_tokens)

    def _slot_inits(self, runs: Sequence[_Run], rules: SamplingParams) -> Iterator[SlotInit]:
        """Yield the init of each slot. The first prompt fills the context.

        One long prompt is enough, because the history of penalties has the same length for all
        sequences.
        """
        for slot, run in enumerate(runs):
            length = run.past + run.tokens
            if slot == 0:
                length = max(length, self.context - 1)
            yield SlotInit(slot, rules, [0] * length, [])


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether device memory is exhausted: of torch's allocator, or of a library."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return "out of memory" in str(error) or "ALLOC_FAILED" in str(error)


def _free_caches(device: torch.device) -> None:
    """Return the memory of deleted tensors to the device."""
    gc.collect()  # Tensors in reference cycles.
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
