"""Worker start-up: opens a checkpoint, loads a rank's shard, checks it and counts its KV blocks.

The order is the same for every worker, whether it is the only rank or one of many:

1. Reject a checkpoint with faulty headers.
2. Load the weights. Pack them unless they are to be quantized.
3. Compare the logits with the reference logits in the checkpoint's proof file.
4. Quantize the weights if configured.
5. Count the KV blocks that fit into the remaining memory, on a device after the largest steps.

This module is independent of how a worker's process is started, and plans no steps.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from gpt.attention.selector import check_backend as check_attention
from gpt.attention.selector import select_backend
from gpt.batch import Batch
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.cpu.int8_linear import check_supported
from gpt.cpu_inference.weight_packing import pack_int8_weights, pack_weights, weight_bytes
from gpt.dtypes import FLOAT_DTYPE_NAMES, FLOAT_DTYPES
from gpt.errors import CheckpointError
from gpt.formats.overrides import open_with_overrides, read_overrides
from gpt.linear import selector as linear_selector
from gpt.linear.quantization_check import Divergence
from gpt.model.gpt_model import GPT
from gpt.model.loading import load_model
from gpt.model.pipeline import forward
from gpt.parallel.mesh import Mesh
from gpt.parallel.weight_sharding import check_split
from gpt.reference_logits.proof_file import Proof, find_proof
from gpt.reference_logits.replay import replay_proof
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from serving.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from serving.worker.kv_cache_size import size_kv_cache

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerCheckpoint:
    """A checkpoint whose headers passed all checks. No weights are loaded yet."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    proof: Proof | None


class WorkerReport(msgspec.Struct, frozen=True):
    """The measurements of a worker's start-up; plain values, which ranks exchange."""

    kv_blocks: int  # KV blocks that fit into the rank's memory, block 0 included.
    weight_bytes: int
    # The numbers of `Ready.proof` and `Ready.divergence`. Both are None on ranks before the last
    # pipeline stage. `proof` is also None if the proof was not checked, and `divergence` is also
    # None if no weights were quantized.
    proof: list[float] | None = None
    divergence: list[float] | None = None
    # The memory that the largest step needs beside the weights and the KV cache; 0 on a CPU, where
    # it is not measured.
    step_bytes: int = 0


@dataclass(frozen=True)
class Worker:
    """A rank's model, ready to run steps, and the report of its start-up."""

    model: GPT
    report: WorkerReport


class PhaseRunner(Protocol):
    """Runs a phase of the start-up, and returns only if no rank has failed in it."""

    def __call__(self, phase: Callable[[], T], /) -> T: ...


def open_for_serving(config: ServerConfig, device: torch.device) -> WorkerCheckpoint:
    """Open the checkpoint; raise an error if its headers or the config have a fault."""
    model_config, parallel_config = config.model_config, config.parallel_config
    overrides = read_overrides(model_config.config_json, model_config.true_vocab_size)
    checkpoint = open_with_overrides(model_config.model, overrides, model_config.tokenizer)
    check_split(checkpoint.config, parallel_config.tp, parallel_config.pp, ep=parallel_config.ep)
    # On a GPU, `check_attention` allocates device memory, so it does not run here: each rank runs
    # it when it loads its model (`select_backend` in `load_worker_model`).
    if device.type == "cpu":
        check_attention(
            model_config.attention_backend,
            checkpoint.config,
            device,
            dtype=model_config.dtype,
            kv_dtype=config.cache_config.kv_dtype,
        )
    proof = find_proof(checkpoint) if model_config.prove else None
    vocab_size = checkpoint.config.vocab_size
    tokenizer: Tokenizer = NullTokenizer(vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, vocab_size, checkpoint.tokenizer)
    return WorkerCheckpoint(checkpoint, tokenizer, proof)


def run_alone(phase: Callable[[], T], /) -> T:
    """Run a phase of a worker that is the only rank."""
    return phase()


def build_worker(
    opened: WorkerCheckpoint,
    mesh: Mesh,
    config: ServerConfig,
    *,
    run_phase: PhaseRunner = run_alone,
    ranks_sharing_memory: int = 1,
) -> Worker:
    """Load this rank's shard, prepare its weights, verify its logits, and count its KV blocks.

    All ranks must call this together. The first phase loads the weights, and packs them if they are
    not to be quantized. The second phase begins after all ranks have loaded, because it runs
    collectives: it compares the logits with the proof, quantizes the weights if configured,
    measures the effect of the quantization, and on a device runs the largest steps, to measure
    their memory. `ranks_sharing_memory`: the number of ranks that share
    the memory of this rank's host or device, this rank included.
    """
    model, loaded_bytes = run_phase(lambda: _load_and_pack(opened.checkpoint, mesh, config))

    def prove_and_measure() -> WorkerReport:
        proof = None
        if opened.proof is not None:  # Before weights are quantized, which changes the logits.
            proof = verify_proof(model, opened.checkpoint, opened.proof)
        prepared_weights = PreparedWeights()
        if config.model_config.quantizes_weights:
            prepared_weights = prepare_weights(model, config.model_config)
        size = size_kv_cache(
            model,
            config.scheduler_config,
            config.cache_config,
            ranks_sharing_memory=ranks_sharing_memory,
        )
        return WorkerReport(
            kv_blocks=size.blocks,
            weight_bytes=loaded_bytes - prepared_weights.freed_bytes,
            proof=proof,
            divergence=prepared_weights.divergence_numbers,
            step_bytes=size.step_bytes,
        )

    return Worker(model, run_phase(prove_and_measure))


def measure_model(
    model: GPT, scheduler_config: SchedulerConfig, cache_config: CacheConfig
) -> WorkerReport:
    """Count the KV blocks and the weight bytes of a model that is already loaded on one rank."""
    size = size_kv_cache(model, scheduler_config, cache_config)
    return WorkerReport(size.blocks, _parameter_bytes(model), step_bytes=size.step_bytes)


def combine_reports(reports: Sequence[WorkerReport]) -> WorkerReport:
    """Combine the reports of all ranks, in rank order, into one report.

    Every rank uses the smallest number of KV blocks, because all ranks have the same block tables.
    """
    proofs = [report.proof for report in reports if report.proof is not None]
    divergences = [report.divergence for report in reports if report.divergence is not None]
    return WorkerReport(
        kv_blocks=min(report.kv_blocks for report in reports),
        weight_bytes=sum(report.weight_bytes for report in reports),
        proof=proofs[-1] if proofs else None,
        divergence=divergences[-1] if divergences else None,
        step_bytes=max(report.step_bytes for report in reports),
    )


def load_worker_model(
    checkpoint: Checkpoint, mesh: Mesh, model_config: ModelConfig, cache_config: CacheConfig
) -> GPT:
    """Load this rank's shard with the selected attention backend; pack and quantize nothing."""
    attention = select_backend(
        model_config.attention_backend,
        checkpoint.config,
        mesh.device,
        dtype=model_config.dtype,
        kv_dtype=cache_config.kv_dtype,
    )
    dtype = FLOAT_DTYPES[model_config.dtype or checkpoint.config.dtype]
    linear_selector.check_backend(
        model_config.linear_backend, model_config.te_recipe, mesh.device, dtype
    )
    if model_config.weights == "int8":
        check_supported(mesh.device, dtype)
    model = load_model(checkpoint, mesh, dtype=model_config.dtype, attention_backend=attention)
    return model.eval()


@dataclass(frozen=True)
class PreparedWeights:
    """The memory that preparing the weights freed, and the effect of quantization on the logits."""

    freed_bytes: int = 0
    divergence: Divergence | None = None  # Set on the last stage if weights were quantized.

    @property
    def divergence_numbers(self) -> list[float] | None:
        """The divergence as the numbers of `Ready.divergence`."""
        if self.divergence is None:
            return None
        return [
            self.divergence.mean_kl_nats,
            self.divergence.top1_agreement,
            float(self.divergence.positions),
        ]


def prepare_weights(model: GPT, config: ModelConfig) -> PreparedWeights:
    """Pack or quantize a loaded model's weights for the selected linear backend."""
    if model.mesh.device.type == "cuda":
        backend_settings = (config.linear_backend, config.te_recipe)
        return PreparedWeights(
            *linear_selector.apply_backend(model, *backend_settings, config.divergence_max)
        )
    if config.weights == "int8":
        bytes_before = weight_bytes(model)
        divergence = pack_int8_weights(model, config.divergence_max)
        return PreparedWeights(bytes_before - weight_bytes(model), divergence)
    if config.linear_backend != "torch":
        pack_weights(model)
    return PreparedWeights()


@torch.inference_mode()
def verify_proof(model: GPT, checkpoint: Checkpoint, proof: Proof) -> list[float] | None:
    """Raise CheckpointError if the model's logits differ from the proof's reference logits.

    All stages run the forward pass. The last stage compares, and returns the numbers of
    `Ready.proof`; the other stages return None.
    """
    mesh = model.mesh

    def logits_of(ids: Tensor) -> Tensor:
        rows, columns = ids.shape
        batch = Batch.unpaged((columns,) * rows, mesh.device)
        logits = forward(model, ids.flatten().to(mesh.device), batch)
        assert logits is not None, "only the last stage has logits"
        return logits.view(rows, columns, -1)

    if not model.is_last_stage:
        batch = Batch.unpaged((proof.ids.shape[1],) * len(proof.ids), mesh.device)
        forward(model, proof.ids.flatten().to(mesh.device), batch)
        return None
    comparison = replay_proof(proof, logits_of, checkpoint, FLOAT_DTYPE_NAMES[model.dtype])
    log.info(
        "event=proof_replayed difference=%.3g limit=%g best=%d/%d dtype=%s",
        comparison.max_difference,
        comparison.limit,
        comparison.argmax_matches,
        comparison.positions,
        comparison.dtype,
    )
    if not comparison.is_within_limit:
        path = checkpoint.path
        raise CheckpointError(
            f"the logits of {path} differ from the reference logits in its proof file, which were "
            f"computed with the source checkpoint: {comparison.summary}; find the tensors that "
            f"differ with `preamble verify SOURCE {path}`, or skip the check with --no-prove "
            "(prove: false)"
        )
    return [
        comparison.max_difference,
        comparison.limit,
        float(comparison.argmax_matches),
        float(comparison.positions),
    ]


def _load_and_pack(checkpoint: Checkpoint, mesh: Mesh, config: ServerConfig) -> tuple[GPT, int]:
    """Return the loaded model and its weight bytes before packing. Runs no collectives."""
    model = load_worker_model(checkpoint, mesh, config.model_config, config.cache_config)
    loaded_bytes = _parameter_bytes(model)  # Counted now, because packing drops the parameters.
    if not config.model_config.quantizes_weights:
        prepare_weights(model, config.model_config)
    return model, loaded_bytes


def _parameter_bytes(model: GPT) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
