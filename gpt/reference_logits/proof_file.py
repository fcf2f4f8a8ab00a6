"""Proof file: reference logits beside a checkpoint, in a safetensors file with a digest.

`read_proof` validates the header, the shapes, the digest and the values, because a proof may come
from an untrusted source. The module `replay` computes proofs and compares them with a model.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from gpt.checkpoint.files.safetensors_file import SafetensorsTensor, encode_header, open_safetensors
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import CheckpointError
from gpt.files.atomic_files import write_atomic

PROOF_FILE = "preamble.proof.safetensors"
FORMAT, VERSION = "preamble.proof", 1

# Limits of a proof, which may come from an untrusted source. A server replays the proof when it
# starts, and a huge proof would delay the start.
TOKENS_MAX = 4096
LOGITS_MAX = 1 << 28

TENSOR_DTYPES = {"ids": torch.int64, "best": torch.int64, "logits": torch.float32}


@dataclass(frozen=True, eq=False)
class Proof:
    """Token ids, and the logits and argmax ids that a model computes for them."""

    ids: Tensor  # (n, s) int64: n rows of s token ids.
    best: Tensor  # (n, s) int64: the id of the largest logit at each position.
    logits: Tensor  # (n, vocabulary) fp32: the logits of each row's last position.
    base: str  # The base digest of the model.
    dtype: str  # Dtype of the stored weights. The logits are computed in fp32.
    software_versions: str = ""  # Versions of Preamble and torch.

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, in file order: the widest dtypes first, so that all are aligned."""
        return {"ids": self.ids, "best": self.best, "logits": self.logits}

    def to_bytes(self) -> bytes:
        """Return the contents of the proof file."""
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "base": self.base,
            "dtype": self.dtype,
            "made_by": self.software_versions,
            "digest": self.digest,
        }
        shapes = [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()
        ]
        return encode_header(shapes, metadata) + b"".join(map(_tensor_bytes, self.tensors.values()))

    @property
    def digest(self) -> str:
        """The SHA-256 of the contents, to detect a damaged file."""
        hasher = hashlib.sha256(f"{self.base} {self.dtype}\n".encode())
        for tensor in self.tensors.values():
            hasher.update(_tensor_bytes(tensor))
        return hasher.hexdigest()

    def save(self, folder: Path) -> Path:
        """Write the proof file atomically to the folder of a checkpoint; return its path."""
        path = folder / PROOF_FILE
        try:
            write_atomic(path, self.to_bytes())
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror}; give a directory that exists, is "
                "writable and has free space"
            ) from None
        return path


def find_proof(checkpoint: Checkpoint) -> Proof | None:
    """Return the proof beside a checkpoint; None if there is no proof file.

    Raise CheckpointError if the proof is invalid, or if its shapes do not fit the checkpoint.
    """
    return read_proof(checkpoint.path / PROOF_FILE, checkpoint.config)


def read_proof(path: Path, config: GPTConfig | None = None) -> Proof | None:
    """Return the proof in a file; None if the file does not exist.

    Raise CheckpointError if the proof is invalid, or if its shapes do not fit `config`.
    """
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise _proof_error(path, "is not a file")
    stored_tensors = open_safetensors(path)  # Validates the whole header.
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise _proof_error(path, f"has a broken header ({error})") from None
    _check_metadata(path, metadata)
    _check_shapes(path, stored_tensors)
    if config is not None:
        check_proof_fits(
            stored_tensors["logits"].shape, stored_tensors["ids"].shape, config, str(path)
        )
    # The tensors are copied, because the mapped file may be replaced or truncated later.
    ids, best, logits = (
        stored_tensors[name].tensor().clone() for name in ("ids", "best", "logits")
    )
    provenance = [metadata.get(name, "") for name in ("base", "dtype", "made_by")]
    proof = Proof(ids, best, logits, *provenance)
    if proof.digest != metadata.get("digest"):
        raise _proof_error(path, "has a digest that does not match its contents")
    vocabulary = logits.shape[1]
    for name, token_ids in (("ids", ids), ("best", best)):
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= vocabulary:
            raise _proof_error(
                path, f"has {name} from {low} to {high}, but a vocabulary of {vocabulary}"
            )
    if not bool(logits.isfinite().all()):
        raise _proof_error(path, "has logits that are not finite")
    if not torch.equal(logits.gather(1, best[:, -1:]), logits.amax(1, keepdim=True)):
        raise _proof_error(path, "is inconsistent: best is not the argmax of logits")
    return proof


def check_proof_fits(
    logits: tuple[int, ...], ids: tuple[int, ...], config: GPTConfig, source: str
) -> None:
    """Raise CheckpointError if the shapes of a proof show that it belongs to another model.

    `logits` and `ids` are the shapes of these tensors of the proof. `source` is the beginning of
    the error message.
    """
    if logits[1] != config.vocab_size:
        raise CheckpointError(
            f"{source}: the proof's vocabulary has {logits[1]} tokens, but the model's vocabulary "
            f"has {config.vocab_size}; the proof is of another model: use the proof of this "
            "checkpoint"
        )
    if ids[1] > config.max_position_embeddings:
        raise CheckpointError(
            f"{source}: the proof has rows of {ids[1]} tokens, but the model has only "
            f"{config.max_position_embeddings} positions; the proof is of another model: use the "
            "proof of this checkpoint"
        )


def _check_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise _proof_error(path, f"has metadata without the format {FORMAT!r}")
    version_text = metadata.get("version", "")[:9]
    if version_text.isascii() and version_text.isdigit() and int(version_text) > VERSION:
        raise CheckpointError(
            f"{path} has proof version {version_text}, but this release of Preamble reads version "
            f"{VERSION}; use a newer release, or prove the checkpoint again with this release"
        )
    if version_text != str(VERSION):
        raise _proof_error(path, f"has the invalid version {version_text!r}")
    if metadata.get("dtype") not in FLOAT_DTYPES:
        raise _proof_error(path, f"has the unknown dtype {metadata.get('dtype', '')[:20]!r}")
    if not re.fullmatch(r"[0-9a-f]{64}", metadata.get("base", "")):
        raise _proof_error(path, "has no valid base digest")


def _check_shapes(path: Path, stored_tensors: Mapping[str, SafetensorsTensor]) -> None:
    dtypes = {name: tensor.dtype for name, tensor in stored_tensors.items()}
    if dtypes != TENSOR_DTYPES:
        names = ", ".join(f"{name[:20]!r} {dtype}" for name, dtype in list(dtypes.items())[:4])
        raise _proof_error(
            path,
            f"has {names or 'no tensors'} instead of ids, best and logits (int64, int64, float32)",
        )
    ids, best, logits = (stored_tensors[name].shape for name in ("ids", "best", "logits"))
    if len(ids) != 2 or best != ids or len(logits) != 2 or logits[0] != ids[0]:
        raise _proof_error(
            path, f"has shapes that disagree: ids {ids}, best {best}, logits {logits}"
        )
    tokens, logit_count = math.prod(ids), math.prod(logits)
    if not (0 < tokens <= TOKENS_MAX and 0 < logit_count <= LOGITS_MAX):
        limits = f"the limits are {TOKENS_MAX} ids and {LOGITS_MAX} logits"
        raise _proof_error(path, f"has {tokens} ids and {logit_count} logits; {limits}")


def _proof_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {problem}; copy it again with its checkpoint, or remove it to skip the replay"
    )


def _tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
