"""`torch.save` file with a plain state dict: loaded weights-only and memory-mapped.

Tensors are memory-mapped if the file format allows it. An unrestricted load of a pickle runs code
from the file, so only torch's weights-only loader is used. If that loader refuses a file, the error
names up to three functions that the file asks to run. A broken file can raise any exception inside
torch; this module converts it to a `CheckpointError`. The module is independent of the model.
"""

import pickle
import warnings
from pathlib import Path

import torch
from torch import Tensor

from gpt.checkpoint.files.safetensors_file import file_error, refuse_git_lfs_pointer
from gpt.checkpoint.logical_tensor import InMemoryTensor
from gpt.errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"

# torch warns about every pickle protocol except its default, although it reads all protocols.
warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)


def open_state_dict(path: Path, *, mmap: bool = True) -> dict[str, InMemoryTensor]:
    """Load the tensors of a state dict by name; refuse a tensor that is not dense."""
    state_dict = load_weights_only(path, mmap=mmap)
    if not isinstance(state_dict, dict) or not all(
        isinstance(tensor, Tensor) for tensor in state_dict.values()
    ):
        raise CheckpointError(
            f"{path} is not a plain state dict of names and tensors; save model.state_dict(), "
            "preferably as safetensors"
        )
    for key, tensor in state_dict.items():
        if not is_dense(tensor):
            raise CheckpointError(
                f"{path}: {key} is {tensor.layout} on {tensor.device}; it must be a dense CPU "
                "tensor: save it again as a dense tensor, preferably as safetensors"
            )
    return {
        str(key): InMemoryTensor(tensor, f"{path}: {key}") for key, tensor in state_dict.items()
    }


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor is a dense CPU tensor, not a sparse, nested or meta tensor."""
    is_strided_on_cpu = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_strided_on_cpu and not tensor.is_nested


def load_weights_only(path: Path, *, mmap: bool = True) -> object:
    """Load the object of a torch file with the weights-only loader, which runs no code of the file.

    `mmap` maps the tensors. Files of torch < 1.6 cannot be mapped and are loaded into memory.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(8)
        refuse_git_lfs_pointer(path, magic)
        is_zip = magic.startswith(ZIP_MAGIC)
        content: object = torch.load(
            path, map_location="cpu", weights_only=True, mmap=mmap and is_zip
        )
        return content
    except CheckpointError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise file_error(path, error) from None
    except pickle.UnpicklingError as error:
        raise _unpickling_error(path, error) from None
    # A broken or hostile pickle can make the loader raise any exception.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} cannot be read ({reason}); it has {size} bytes and is truncated or broken: "
            "download or copy the file again"
        ) from None


def _unpickling_error(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    try:
        unsafe_globals = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # Not a zip file or not a pickle: the names of the functions are unknown.
        unsafe_globals = []
    if unsafe_globals:
        return CheckpointError(
            f"{path} contains more than tensors: it asks to run "
            f"{', '.join(sorted(unsafe_globals)[:3])}; save it again as safetensors"
        )
    reason = str(error).split("\n", 1)[0]
    return CheckpointError(
        f"{path} is not a readable torch file ({reason}); download or copy the file again"
    )
