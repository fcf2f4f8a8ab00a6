"""One file of `torch.save`: plain tensors, mapped where the format allows it.

A pickle runs its author's code when it is loaded freely; so only weights-only loading is ever used,
and a file that asks for more is refused by the name of what it asks for. A broken one fails inside
torch in any way at all, which is one sentence here. It knows no models.
"""

import pickle
import warnings
from pathlib import Path

import torch
from torch import Tensor

from gpt.checkpoint.files.safetensors_file import refuse_pointer
from gpt.checkpoint.logical_tensor import InMemory
from gpt.errors import CheckpointError

ZIP = b"PK\x03\x04"

# Said of every pickle that is not of torch's own default, which harms nobody.
warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)


def open_torch(path: Path, *, mapped: bool = True) -> dict[str, InMemory]:
    """The tensors of a state dict, all of them dense."""
    record = load_torch(path, mapped=mapped)
    if not isinstance(record, dict) or not all(isinstance(v, Tensor) for v in record.values()):
        raise CheckpointError(
            f"{path} is not a plain state dict of names and tensors; save model.state_dict(), or "
            "better safetensors"
        )
    for key, value in record.items():
        if not is_dense(value):
            raise CheckpointError(
                f"{path}: {key} is {value.layout} on {value.device}; it must be a dense tensor in "
                "memory: save it again so, or better as safetensors"
            )
    return {str(key): InMemory(value, f"{path}: {key}") for key, value in record.items()}


def is_dense(tensor: Tensor) -> bool:
    """Sparse, nested and meta tensors claim a shape without the numbers behind it."""
    strided = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return strided and not tensor.is_nested


def load_torch(path: Path, *, mapped: bool = True) -> object:
    """What a file holds, if it is nothing but data. Its code is never run.

    Files of torch < 1.6 cannot be mapped and are held in memory.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(8)
        refuse_pointer(path, head)
        mapped = mapped and head.startswith(ZIP)
        record: object = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return record
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; fetch the checkpoint again") from None
    except PermissionError:
        raise CheckpointError(
            f"cannot read {path}: Permission denied; let this user read it, or copy it"
        ) from None
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from None
    # Whatever stands in a broken or a hostile pickle, the loader meets it in its own ways.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} cannot be read ({reason}); it has {size} bytes and is truncated or broken: "
            "fetch or copy it again"
        ) from None


def _refused(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    try:
        wanted = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # Not a zip file, or not even a pickle: the first error says enough.
        wanted = []
    if wanted:
        return CheckpointError(
            f"{path} holds more than tensors: it asks to run {', '.join(sorted(wanted)[:3])}; "
            "save it again as safetensors"
        )
    reason = str(error).split("\n", 1)[0]
    return CheckpointError(f"{path} is not a readable torch file ({reason}); fetch it again")
