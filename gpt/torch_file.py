"""One file of `torch.save`: plain tensors, mapped where the format allows it.

A pickle runs its author's code when it is loaded freely; so only weights-only loading is ever used,
and a file that asks for more is refused by the name of what it asks for.
It knows no models.
"""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from gpt.errors import CheckpointError
from gpt.logical import InMemory
from gpt.safetensors_file import refuse_pointer

ZIP = b"PK\x03\x04"


def open_torch(path: Path) -> dict[str, InMemory]:
    """The tensors of a state dict. Files of torch < 1.6 cannot be mapped and are held in memory."""
    try:
        with open(path, "rb") as file:
            head = file.read(8)
        refuse_pointer(path, head)
        mapped = head.startswith(ZIP)
        record = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; fetch the checkpoint again") from None
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} cannot be read ({reason}); it has {size} bytes and is truncated or broken: "
            "fetch or copy it again"
        ) from None
    if not isinstance(record, dict) or not all(isinstance(v, Tensor) for v in record.values()):
        raise CheckpointError(
            f"{path} is not a plain state dict of names and tensors; save model.state_dict(), or "
            "better safetensors"
        )
    return {str(key): InMemory(value, f"{path}: {key}") for key, value in record.items()}


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
