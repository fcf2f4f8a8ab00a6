"""A proof: a few ids with the logits that a model's source gives, kept beside a checkpoint.

Who reshards a model, changes its dtype or upgrades what runs it replays the proof: the same model
gives the same logits, but for rounding. It is made and checked layer by layer, so the whole model
is never in memory. Where two models differ it does not say: comparing their tensors does.
"""

import hashlib
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.checkpoint.digest import identify
from gpt.checkpoint.files.safetensors_file import Mapped, header, open_safetensors
from gpt.checkpoint.logical_tensor import Checkpoint, Identity, common_dtype
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_NAMES, FLOATS
from gpt.errors import CheckpointError
from gpt.model.loading import check_dtype, load_model
from gpt.parallel.mesh import Mesh

FILE = "preamble.proof.safetensors"
FORMAT, VERSION = "preamble.proof", 1

ROWS = 4
ROW_TOKENS = 32  # Fewer if the model has fewer positions.

# Of a file that is read: a start must stay quick, whoever wrote it.
TOKENS_MAX = 4096
LOGITS_MAX = 1 << 28

# The largest difference of a logit that rounding may make, in standard deviations of the logits.
# Splits and batches move fp32 by 1e-5. Narrow dtypes were measured beside fp32, dense models of 4
# to 48 layers, random weights: bfloat16 0.03 to 0.11, float16 0.003 to 0.014; trained models have
# larger outliers. A wrong layout of rows or another rotary base moves logits by 1 to 7.
LIMITS: Mapping[str, float] = {
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 0.05,
    "bfloat16": 0.3,
}
# Rounding flips choices between experts that are nearly equal: 0.6 was seen, at 24 layers of 32.
EXPERTS_LIMIT = 1.0

DTYPES = {"ids": torch.int64, "best": torch.int64, "logits": torch.float32}


@dataclass(frozen=True, eq=False)
class Proof:
    """What a model said. `logits` are of each row's last position, `best` of all positions."""

    ids: Tensor  # (n, s) int64
    best: Tensor  # (n, s) int64: the id with the highest logit.
    logits: Tensor  # (n, vocabulary) fp32, computed in fp32.
    base: str  # The model's digest.
    dtype: str  # Of the weights that it was made from.
    made_by: str = ""  # Versions.

    @property
    def tensors(self) -> dict[str, Tensor]:
        """In the file's order: the widest dtypes first, so that all are aligned."""
        return {"ids": self.ids, "best": self.best, "logits": self.logits}

    def to_bytes(self) -> bytes:
        """The file. The same model on the same machine gives the same bytes."""
        raw = {name: _raw(value) for name, value in self.tensors.items()}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "base": self.base,
            "dtype": self.dtype,
            "made_by": self.made_by,
            "digest": self.digest,
        }
        shapes = [(name, value.dtype, tuple(value.shape)) for name, value in self.tensors.items()]
        return header(shapes, metadata) + b"".join(raw.values())

    @property
    def digest(self) -> str:
        """Tells a damaged file from a model that is another."""
        own = hashlib.sha256(f"{self.base} {self.dtype}\n".encode())
        for value in self.tensors.values():
            own.update(_raw(value))
        return own.hexdigest()

    def save(self, folder: Path) -> Path:
        """Write it beside a checkpoint; whoever looks sees all of it or none."""
        path = folder / FILE
        part = folder / f".{FILE}.{secrets.token_hex(4)}.part"
        try:
            with open(part, "xb") as file:
                file.write(self.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            held = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(held)  # The name, too, must survive a power cut.
            finally:
                os.close(held)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror}; give a directory that exists, is "
                "writable and has room"
            ) from None
        finally:
            part.unlink(missing_ok=True)
        return path


@dataclass(frozen=True)
class Difference:
    """How far a replay was from its proof."""

    largest: float  # Of a logit, in standard deviations of the proof's.
    limit: float
    best: int  # In how many places the best id is the same,
    places: int  # and of how many.
    dtype: str  # What was computed in.

    @property
    def same(self) -> bool:
        return self.largest <= self.limit

    @property
    def sentence(self) -> str:
        side = "within" if self.same else "over"
        return (
            f"in {self.dtype} the logits differ by {self.largest:.2g} of their standard deviation, "
            f"{side} the limit of {self.limit:g}, and the best token is the same in {self.best} of "
            f"{self.places} places"
        )


def prove(checkpoint: Checkpoint, identity: Identity | None = None) -> Proof:
    """Computed in fp32 on the CPU; a caller that knows the identity saves reading all for it."""
    config = checkpoint.config
    ids = draw_ids(config.vocab_size, config.max_position_embeddings)
    logits, best = _stream(checkpoint, ids, torch.float32)
    base = (identity or identify(checkpoint)).digest
    return Proof(ids, best, logits, base, stored_dtype(checkpoint), _versions())


def check_proof(checkpoint: Checkpoint, proof: Proof, dtype: str = "float32") -> Difference:
    """Replay it one layer at a time on the CPU. In fp32, a fault of a single head shows."""
    check_dtype(dtype)
    refuse_misfit(proof.logits.shape, proof.ids.shape, checkpoint.config, str(checkpoint.path))
    logits, best = _stream(checkpoint, proof.ids, FLOATS[dtype])
    return _compare(proof, logits, best, checkpoint, dtype)


@torch.inference_mode()
def replay(
    proof: Proof, logits_of: Callable[[Tensor], Tensor], checkpoint: Checkpoint, dtype: str
) -> Difference:
    """Hold any way of running the checkpoint's model, in `dtype`, against the proof.

    `logits_of` takes ids (n, s) and gives logits (n, vocabulary) of the last positions, or those of
    all, (n, s, vocabulary), as `GPT.logits` does; with all, more best ids are compared.
    """
    refuse_misfit(proof.logits.shape, proof.ids.shape, checkpoint.config, str(checkpoint.path))
    logits = logits_of(proof.ids)
    best = logits.argmax(-1).cpu()
    last = logits[:, -1] if logits.dim() == 3 else logits
    assert last.shape == proof.logits.shape, f"logits of {tuple(last.shape)} are no answer"
    return _compare(proof, last.float().cpu(), best, checkpoint, dtype)


def tolerance(proof: Proof, checkpoint: Checkpoint, dtype: str) -> float:
    """What rounding may change: in computing, and of weights made narrower since the proof was."""
    stored = stored_dtype(checkpoint)
    exact = torch.promote_types(FLOATS[stored], FLOATS[proof.dtype]) == FLOATS[stored]
    limit = max(LIMITS[dtype], 0.0 if exact else LIMITS[stored])
    narrow = limit > LIMITS["float32"]
    return EXPERTS_LIMIT if narrow and any(checkpoint.config.moe_layers) else limit


def stored_dtype(checkpoint: Checkpoint) -> str:
    """What its files hold, whatever it is converted to when it is read."""
    pieces = (piece.source for tensor in checkpoint.tensors.values() for piece in tensor.pieces)
    return FLOAT_NAMES[common_dtype(pieces) or FLOATS[checkpoint.config.dtype]]


def draw_ids(vocab_size: int, positions: int) -> Tensor:
    """Ids in even steps from the vocabulary's first to its last, in an order that looks random."""
    columns = min(ROW_TOKENS, positions)
    count = ROWS * columns
    order = sorted(range(count), key=lambda place: hashlib.sha256(b"%d" % place).digest())
    steps = [place * (vocab_size - 1) // (count - 1) for place in order]
    return torch.tensor(steps).view(ROWS, columns)


@torch.inference_mode()
def _stream(checkpoint: Checkpoint, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of the last positions, and the best ids of all."""
    mesh, layers = Mesh.single(), checkpoint.config.num_layers
    lengths = (ids.shape[1],) * ids.shape[0]
    batch = Batch.plain(lengths)
    x = ids.flatten()
    for layer in range(layers - 1):
        # A stage of a pipeline, which is gone before the next one is allocated.
        one = range(layer, layer + 1)
        x = load_model(checkpoint, mesh, dtype=dtype, layers=one).hidden(x, batch)
    last = load_model(checkpoint, mesh, dtype=dtype, layers=range(layers - 1, layers))
    x = last.hidden(x, batch)
    logits, best = [], []
    for rows in torch.arange(len(x)).split(ids.shape[1]):  # A vocabulary may be large.
        row = last.head(x, Batch.plain(lengths, rows=rows))
        best.append(row.argmax(-1))
        logits.append(row[-1].float())
    return torch.stack(logits), torch.stack(best)


def _compare(
    proof: Proof, logits: Tensor, best: Tensor, checkpoint: Checkpoint, dtype: str
) -> Difference:
    scale = float(proof.logits.std(correction=0)) or 1.0
    rows = (logits - proof.logits).abs().amax(1).div(scale).nan_to_num(math.inf, math.inf)
    # Where experts are nearly equal, rounding may choose others, and then a row differs that is
    # right. Of a wrong model nearly all rows do, so with experts half of them decide.
    decides = (len(rows) - 1) // 2 if any(checkpoint.config.moe_layers) else len(rows) - 1
    largest = float(rows.sort().values[decides])
    expected = proof.best if best.dim() == 2 else proof.best[:, -1]
    agreed = int((best == expected).sum())
    limit = tolerance(proof, checkpoint, dtype)
    return Difference(largest, limit, agreed, best.numel(), dtype)


def find_proof(checkpoint: Checkpoint) -> Proof | None:
    """The proof that lies beside a checkpoint and fits it; None if there is none."""
    return read_proof(checkpoint.path / FILE, checkpoint.config)


def read_proof(path: Path, config: GPTConfig | None = None) -> Proof | None:
    """The proof in a file; None if there is no file. With `config` it must fit that model."""
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise _unfit(path, "is not a file")
    stored = open_safetensors(path)  # Checks every word of the header, and says what is wrong.
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise _unfit(path, f"has a broken header ({error})") from None
    _check_facts(path, metadata)
    _check_shapes(path, stored)
    if config is not None:
        refuse_misfit(stored["logits"].shape, stored["ids"].shape, config, str(path))
    # Copied out of the mapped file: that may be replaced or cut while the proof is in use.
    ids, best, logits = (stored[name].tensor().clone() for name in ("ids", "best", "logits"))
    facts = [metadata.get(name, "") for name in ("base", "dtype", "made_by")]
    proof = Proof(ids, best, logits, *facts)
    if proof.digest != metadata.get("digest"):
        raise _unfit(path, "is not what was written: its digest is another")
    vocabulary = logits.shape[1]
    for name, numbers in (("ids", ids), ("best", best)):
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= vocabulary:
            raise _unfit(path, f"has {name} from {low} to {high}, its vocabulary is {vocabulary}")
    if not bool(logits.isfinite().all()):
        raise _unfit(path, "has logits that are not finite")
    if not torch.equal(logits.gather(1, best[:, -1:]), logits.amax(1, keepdim=True)):
        raise _unfit(path, "contradicts itself: its best ids are not those of its logits")
    return proof


def refuse_misfit(
    logits: tuple[int, ...], ids: tuple[int, ...], config: GPTConfig, where: str
) -> None:
    """A proof that the model cannot even run is of another model."""
    if logits[1] != config.vocab_size:
        raise CheckpointError(
            f"{where}: the proof has logits of {logits[1]} tokens, the model's vocabulary is "
            f"{config.vocab_size}; it is another model's: take both from the same checkpoint"
        )
    if ids[1] > config.max_position_embeddings:
        raise CheckpointError(
            f"{where}: the proof has rows of {ids[1]} tokens, the model has "
            f"{config.max_position_embeddings} positions; it is another model's: take both from "
            "the same checkpoint"
        )


def _check_facts(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise _unfit(path, "does not say that it is a proof")
    number = metadata.get("version", "")[:9]
    if number.isascii() and number.isdigit() and int(number) > VERSION:
        raise CheckpointError(
            f"{path} is a proof of version {number}, this Preamble reads version {VERSION}; use "
            "a newer Preamble, or prove the checkpoint again with this one"
        )
    if number != str(VERSION):
        raise _unfit(path, f"says that its version is {number!r}")
    if metadata.get("dtype") not in FLOATS:
        raise _unfit(path, f"says that its dtype is {metadata.get('dtype', '')[:20]!r}")
    if not re.fullmatch(r"[0-9a-f]{64}", metadata.get("base", "")):
        raise _unfit(path, "does not say which model it is of")


def _check_shapes(path: Path, stored: Mapping[str, Mapped]) -> None:
    found = {name: one.dtype for name, one in stored.items()}
    if found != DTYPES:
        names = ", ".join(f"{name[:20]!r} {dtype}" for name, dtype in list(found.items())[:4])
        raise _unfit(path, f"holds {names or 'nothing'}, not ids, best and logits")
    ids, best, logits = (stored[name].shape for name in ("ids", "best", "logits"))
    if len(ids) != 2 or best != ids or len(logits) != 2 or logits[0] != ids[0]:
        raise _unfit(path, f"has shapes that disagree: ids {ids}, best {best}, logits {logits}")
    tokens, numbers = math.prod(ids), math.prod(logits)
    if not (0 < tokens <= TOKENS_MAX and 0 < numbers <= LOGITS_MAX):
        limits = f"from 1 to {TOKENS_MAX} and to {LOGITS_MAX} can be"
        raise _unfit(path, f"has {tokens} ids and {numbers} logits; {limits}")


def _unfit(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}; copy it again with its checkpoint, or remove it, and nothing is replayed"
    )


def _raw(value: Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _versions() -> str:
    try:
        own = version("preamble")
    except PackageNotFoundError:
        own = "0+checkout"  # Run from a checkout that was never installed.
    return f"preamble {own}, torch {torch.__version__}"
