"""`torch.save` files of every age as data: tensors as views, objects of other programs as stubs.

The module detects the format of a file, calls its reader, and converts the exceptions of a broken
or hostile file to a `CheckpointError`. The file runs no code, and no storage is copied. torch's own
weights-only loader is not used: it reads only pickles of protocol 2, cannot map an archive inside a
larger file, and allows classes of other programs only by a change of process-wide state.
"""

import pickle
from pathlib import Path
from typing import Any

from gpt.checkpoint.files.file_tree import Span, file_span
from gpt.checkpoint.files.safetensors_file import file_error, refuse_git_lfs_pointer
from gpt.checkpoint.files.torch_legacy import PICKLE_MAGIC, view_legacy_file
from gpt.checkpoint.files.torch_save import ZIP_MAGIC
from gpt.checkpoint.files.torch_zip import view_archive
from gpt.errors import CheckpointError


def read_torch_file(path: Path) -> Any:
    """Load the object of a `torch.save` file."""
    try:
        return read_torch_span(file_span(path))
    except OSError as error:
        raise file_error(path, error) from None


def read_torch_span(span: Span) -> Any:
    """Load the object of a `torch.save` file that is a whole file or a part of a larger one."""
    magic = span.peek(8)
    refuse_git_lfs_pointer(span.path, magic)
    try:
        if magic.startswith(ZIP_MAGIC):
            return view_archive(span)
        if magic.startswith(PICKLE_MAGIC):
            return view_legacy_file(span)
        raise ValueError("it does not begin like a file of torch.save")
    except OSError:
        raise
    # A broken or hostile file can raise any exception.
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and "asks to run" in str(error):
            raise CheckpointError(
                f"{span.path}: {error}; if you trust the author of the file, load it with torch "
                "and save it again without that object"
            ) from None
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        raise CheckpointError(
            f"{span.path} cannot be read ({reason}); it has {span.length} bytes and is truncated or"
            " broken: copy it again"
        ) from None
