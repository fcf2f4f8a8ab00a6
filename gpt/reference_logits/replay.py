"""Proof: reference logits of a checkpoint, computed and replayed to verify a converted model.

A proof has a few rows of token ids, and the logits that the source model computes for them. It is
replayed after a resharding, a change of dtype or an upgrade: the same model gives the same logits,
except for rounding. `compute_proof` and `check_proof` load and run one layer at a time, so the
whole model is never in memory; `replay_proof` uses a loaded model. A failed replay does not show
which tensors differ; `preamble verify` compares them.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.checkpoint.digest import identify
from gpt.checkpoint.logical_tensor import Checkpoint, ModelIdentity, majority_dtype
from gpt.dtypes import FLOAT_DTYPE_NAMES, FLOAT_DTYPES
from gpt.model.loading import check_dtype, load_model
from gpt.parallel.mesh import Mesh
from gpt.reference_logits.proof_file import Proof, check_proof_fits
from gpt.software_versions import preamble_version

PROOF_ROWS = 4
PROOF_ROW_TOKENS = 32  # Fewer if the model has fewer positions.

# The largest permitted difference between a replay's logit and the proof's logit, for each dtype of
# the replay, in standard deviations of the logits. For comparison, these differences were measured:
# - fp32 with another parallel split or batch: 1e-5.
# - float16 against fp32, dense models of 4 to 48 layers with random weights: 0.003 to 0.014.
# - bfloat16 against fp32, the same models: 0.03 to 0.11. Trained models have larger outliers.
# - weight rows in a wrong order, or a wrong rotary base: 1 to 7.
LOGIT_TOLERANCES: Mapping[str, float] = {
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 0.05,
    "bfloat16": 0.3,
}
# With experts, rounding may also change the choice between experts with nearly equal scores. In 24
# layers of 32 experts, a difference of 0.6 was measured.
MOE_LOGIT_TOLERANCE = 1.0


@dataclass(frozen=True)
class LogitDifference:
    """The difference between the logits of a replay and those of the proof."""

    # The largest difference of a logit, in standard deviations of the proof's logits. For a model
    # with experts: the median, over the rows, of each row's largest difference.
    max_difference: float
    limit: float  # The largest permitted max_difference.
    argmax_matches: int  # Number of positions with the same argmax id.
    positions: int  # Number of positions whose argmax ids were compared.
    dtype: str  # The dtype of the replay.

    @property
    def is_within_limit(self) -> bool:
        return self.max_difference <= self.limit

    @property
    def summary(self) -> str:
        comparison = "within" if self.is_within_limit else "over"
        return (
            f"in {self.dtype} the logits differ by {self.max_difference:.2g} of their standard "
            f"deviation, {comparison} the limit of {self.limit:g}, and the most likely token is "
            f"the same at {self.argmax_matches} of {self.positions} positions"
        )


def compute_proof(checkpoint: Checkpoint, identity: ModelIdentity | None = None) -> Proof:
    """Return the proof of a checkpoint, computed in fp32 on the CPU.

    `identity` has the base digest; if it is None, all tensors are read to compute the digest.
    """
    config = checkpoint.config
    ids = probe_token_ids(config.vocab_size, config.max_position_embeddings)
    logits, best = _layerwise_logits(checkpoint, ids, torch.float32)
    base = (identity or identify(checkpoint)).digest
    return Proof(ids, best, logits, base, stored_dtype(checkpoint), _software_versions())


def check_proof(checkpoint: Checkpoint, proof: Proof, dtype: str = "float32") -> LogitDifference:
    """Replay the proof in `dtype` on the CPU, layer by layer.

    With fp32, the default, the limit is low enough to detect an error in one attention head.
    """
    check_dtype(dtype)
    check_proof_fits(proof.logits.shape, proof.ids.shape, checkpoint.config, str(checkpoint.path))
    logits, best = _layerwise_logits(checkpoint, proof.ids, FLOAT_DTYPES[dtype])
    return _compare_logits(proof, logits, best, checkpoint, dtype)


@torch.inference_mode()
def replay_proof(
    proof: Proof, compute_logits: Callable[[Tensor], Tensor], checkpoint: Checkpoint, dtype: str
) -> LogitDifference:
    """Replay the proof with a loaded model.

    `compute_logits` returns the model's logits, computed in `dtype`, for ids (n, s). It returns one
    of these:

    - Logits of all positions (n, s, vocabulary), as from `GPT.logits`. All argmax ids are compared.
    - Logits of the last positions (n, vocabulary). Only their argmax ids are compared.
    """
    check_proof_fits(proof.logits.shape, proof.ids.shape, checkpoint.config, str(checkpoint.path))
    logits = compute_logits(proof.ids)
    best = logits.argmax(-1).cpu()
    last_logits = logits[:, -1] if logits.dim() == 3 else logits
    assert last_logits.shape == proof.logits.shape, (
        f"compute_logits returned logits of the shape {tuple(last_logits.shape)}"
    )
    return _compare_logits(proof, last_logits.float().cpu(), best, checkpoint, dtype)


def logit_tolerance(proof: Proof, checkpoint: Checkpoint, dtype: str) -> float:
    """Return the largest permitted difference of a replay in `dtype`.

    1. LOGIT_TOLERANCES has the limit of `dtype`.
    2. The weights may have been rounded to the checkpoint's dtype after the proof was computed. If
       so, the limit of the checkpoint's dtype applies if it is larger.
    3. If the model has experts and the limit is above that of float32, the limit is
       MOE_LOGIT_TOLERANCE instead.
    """
    weights_dtype = stored_dtype(checkpoint)
    limit = LOGIT_TOLERANCES[dtype]
    # The weights were rounded if the checkpoint's dtype cannot represent all values of the proof's
    # dtype.
    were_rounded = (
        torch.promote_types(FLOAT_DTYPES[weights_dtype], FLOAT_DTYPES[proof.dtype])
        != FLOAT_DTYPES[weights_dtype]
    )
    if were_rounded:
        limit = max(limit, LOGIT_TOLERANCES[weights_dtype])
    is_low_precision = limit > LOGIT_TOLERANCES["float32"]
    return MOE_LOGIT_TOLERANCE if is_low_precision and any(checkpoint.config.moe_layers) else limit


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype in which the files store the largest number of values."""
    sources = (piece.source for tensor in checkpoint.tensors.values() for piece in tensor.slices)
    return FLOAT_DTYPE_NAMES[majority_dtype(sources) or FLOAT_DTYPES[checkpoint.config.dtype]]


def probe_token_ids(vocab_size: int, positions: int) -> Tensor:
    """Return ids (n, s) evenly spaced over the vocabulary, in a fixed pseudo-random order."""
    columns = min(PROOF_ROW_TOKENS, positions)
    count = PROOF_ROWS * columns
    order = sorted(range(count), key=lambda index: hashlib.sha256(b"%d" % index).digest())
    token_ids = [index * (vocab_size - 1) // (count - 1) for index in order]
    return torch.tensor(token_ids).view(PROOF_ROWS, columns)


@torch.inference_mode()
def _layerwise_logits(
    checkpoint: Checkpoint, ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the logits of the last positions, and the argmax ids of all positions."""
    mesh, layers = Mesh.single(), checkpoint.config.num_layers
    lengths = (ids.shape[1],) * ids.shape[0]
    batch = Batch.unpaged(lengths)
    x = ids.flatten()
    for layer in range(layers - 1):
        # One layer as a pipeline stage; it is freed before the next one is allocated.
        layer_range = range(layer, layer + 1)
        x = load_model(checkpoint, mesh, dtype=dtype, layers=layer_range).forward_hidden(x, batch)
    last_stage = load_model(checkpoint, mesh, dtype=dtype, layers=range(layers - 1, layers))
    x = last_stage.forward_hidden(x, batch)
    logits, best = [], []
    # The logits are computed one row of the proof at a time, to limit memory.
    for row_indices in torch.arange(len(x)).split(ids.shape[1]):
        row_logits = last_stage.compute_logits(x, Batch.unpaged(lengths, logit_rows=row_indices))
        best.append(row_logits.argmax(-1))
        logits.append(row_logits[-1].float())
    return torch.stack(logits), torch.stack(best)


def _compare_logits(
    proof: Proof, logits: Tensor, best: Tensor, checkpoint: Checkpoint, dtype: str
) -> LogitDifference:
    scale = float(proof.logits.std(correction=0)) or 1.0
    # NaN counts as an infinite difference.
    row_differences = (
        (logits - proof.logits).abs().amax(1).div(scale).nan_to_num(math.inf, math.inf)
    )
    sorted_differences = row_differences.sort().values
    if any(checkpoint.config.moe_layers):
        # Rounding may change the choice between experts with nearly equal scores, so a few rows of
        # a correct model differ. In a wrong model nearly all rows differ. Therefore the median row
        # is compared with the limit.
        max_difference = float(sorted_differences[(len(sorted_differences) - 1) // 2])
    else:
        max_difference = float(sorted_differences[-1])
    proof_best = proof.best if best.dim() == 2 else proof.best[:, -1]
    argmax_matches = int((best == proof_best).sum())
    limit = logit_tolerance(proof, checkpoint, dtype)
    return LogitDifference(max_difference, limit, argmax_matches, best.numel(), dtype)


def _software_versions() -> str:
    return f"preamble {preamble_version()}, torch {torch.__version__}"
