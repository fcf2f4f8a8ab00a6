"""Restricted unpickler: reads untrusted pickles as data, with inert stubs for foreign classes.

A pickle can call any importable function by name. Therefore each file is loaded by one of two
restricted loaders:

- torch's weights-only loader, which may call torch's tensor constructors and `Stub`;
- `StubUnpickler`, which may call `Stub` and a few plain types.

A stub stores its arguments and runs no code. Objects of training frameworks and of a few harmless
classes become stubs. A name that is not allowed is refused, and the error contains the name. The
module is independent of the model.
"""

import io
import pickle
import pickletools
import re
import threading
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from gpt.checkpoint.files.safetensors_file import refuse_git_lfs_pointer
from gpt.checkpoint.files.torch_save import ZIP_MAGIC
from gpt.errors import CheckpointError

# Classes of training frameworks; checkpoints contain their args, loss scalers and schedulers.
TRAINING_CLASSES = re.compile(
    r"(megatron|nemo|transformer_engine|transformer_engine_torch|modelopt|apex|lightning"
    r"|pytorch_lightning|omegaconf|fp16|optimizer_param_scheduler|learning_rates)\..+"
)
# Classes of namespaces, numbers, arrays, paths, dates, signals and random generator states.
SAFE_CLASSES = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|_io\.BytesIO|datetime\.\w+"
    r"|pathlib\.(_local\.)?(Pure)?(Posix)?Path|signal\.(Signals|SIG\w+)"
    r"|numpy\.(dtype|ndarray|dtypes\.\w+|bool_?|u?int\d+|float\d+)"
    r"|numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\.random\._pickle\.\w+|torch\._C\.Generator"
)
GETATTR, BYTES = "builtins.getattr", "builtins.bytes"

# A file of torch < 1.6 begins with four pickles: magic number, protocol version, system info and
# object. The keys and the raw bytes of the storages follow.
LEGACY_PICKLES = 4

# torch.serialization.safe_globals changes process-wide state.
_safe_globals_lock = threading.Lock()


class Stub:
    """An inert replacement for an object of a foreign class; stores its arguments and fields."""

    qualified_name: ClassVar[str] = ""  # Module and name of the foreign class.
    arguments: tuple[Any, ...]
    fields: dict[str, Any]  # From __setstate__ with a dict of fields.
    state: Any  # From __setstate__ with another argument; else None.

    def __new__(cls, *arguments: Any) -> "Stub":
        stub = super().__new__(cls)
        stub.arguments = arguments
        stub.fields = {}
        stub.state = None
        return stub

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            self.fields = state
        else:
            self.state = state

    def __repr__(self) -> str:
        shown_arguments = (
            repr(a) if isinstance(a, str | int | float) else "..." for a in self.arguments
        )
        return f"{self.qualified_name}({', '.join(shown_arguments)})"


@cache
def _stub_class(qualified_name: str) -> type[Stub]:
    class_name = qualified_name.rpartition(".")[2]
    return type(class_name, (Stub,), {"qualified_name": qualified_name})


def _restricted_getattr(owner: object, name: object, *default: object) -> Stub:
    """Replace `getattr`: some Python versions pickle enum members as getattr(Class, "NAME")."""
    if default or not isinstance(name, str) or not isinstance(owner, type) or owner is Stub:
        raise pickle.UnpicklingError(f"it asks to run {GETATTR}")
    if not issubclass(owner, Stub):
        raise pickle.UnpicklingError(f"it asks to run {GETATTR}")
    return owner(name)


def _empty_bytes(*arguments: object) -> bytes:
    """Replace `bytes`: older pickle protocols write empty bytes as the call bytes()."""
    if arguments:
        raise pickle.UnpicklingError(f"it asks to run {BYTES}")
    return b""


class StubUnpickler(pickle._Unpickler):
    """Unpickler that maps allowed names to stubs, dtypes or plain types, and refuses other names.

    The C unpickler allocates a table as large as the largest memo index in the file, and in a
    hostile file this index can be huge. The base class is therefore the unpickler in Python,
    `pickle._Unpickler`.

    Objects of the classes that `TRAINING_CLASSES`, `SAFE_CLASSES` or `extra_names` matches become
    stubs. A subclass for another kind of file can replace `extra_names`.
    """

    # The opcode BYTEARRAY8 is refused, because it allocates any length that the file states. No
    # checkpoint contains a bytearray.
    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }
    # Older pickle protocols use Python 2's names: long is int, unicode is str.
    extra_names = re.compile(
        r"typing\.Any|builtins\.(int|long|float|bool|str|unicode|bytes|list|tuple|dict|NoneType)"
    )

    def find_class(self, module: str, name: str) -> Any:
        # Older pickle protocols use Python 2's name of the module `builtins`.
        qualified_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if qualified_name in PLAIN_TYPES:
            return PLAIN_TYPES[qualified_name]
        if qualified_name == GETATTR:
            return _restricted_getattr
        if qualified_name == BYTES:
            return _empty_bytes
        if _is_allowed(qualified_name) or self.extra_names.fullmatch(qualified_name):
            return _stub_class(qualified_name)
        raise pickle.UnpicklingError(f"it asks to run {qualified_name}, which is not data")


class _TupleStub(Stub):
    """Replacement for `torch.Size`: builds a plain tuple."""

    def __new__(cls, values: Any = ()) -> Any:
        return tuple(values)


class _OrderedDict(dict[Any, Any]):
    """Replacement for OrderedDict; ignores the version metadata that state_dict() attaches."""

    def __setstate__(self, _state: Any) -> None:
        pass


class _DefaultDict(dict[Any, Any]):
    """Replacement for defaultdict; ignores the default factory."""

    def __init__(self, *_arguments: Any) -> None:
        super().__init__()


PLAIN_TYPES: dict[str, type] = {
    "torch.Size": _TupleStub,
    "collections.OrderedDict": _OrderedDict,
    "collections.defaultdict": _DefaultDict,
    "builtins.set": set,
}


def read_pickle(path: Path, byte_range: tuple[int, int] | None = None) -> Any:
    """Load the object of a `torch.save` file, with stubs for foreign classes.

    `byte_range` (start, length) selects an archive inside a larger file. Tensors of a byte
    range, and of a file of torch < 1.6, are loaded into memory; other tensors are memory-mapped.
    """
    try:
        with open(path, "rb") as file:
            file.seek(byte_range[0] if byte_range else 0)
            buffer = io.BytesIO(file.read(byte_range[1])) if byte_range else None
            magic = buffer.getvalue()[:8] if buffer else file.read(8)
        refuse_git_lfs_pointer(path, magic)
        is_zip = magic.startswith(ZIP_MAGIC)
        source = buffer or path
        names = _globals_in_zip(path, source) if is_zip else _globals_in_legacy(path)
        stubs = [(_stub_class(name), name) for name in sorted(names) if _is_allowed(name)]
        allowed: list[Any] = [*stubs, (_restricted_getattr, GETATTR), (_empty_bytes, BYTES)]
        if buffer:
            buffer.seek(0)
        mmap = is_zip and buffer is None
        with _safe_globals_lock, torch.serialization.safe_globals(allowed):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; copy the checkpoint again") from None
    except PermissionError:
        raise CheckpointError(
            f"cannot read {path}: Permission denied; give this user the permission to read it"
        ) from None
    except pickle.UnpicklingError as error:
        raise _unpickling_error(path, str(error)) from None
    # A broken or hostile pickle can make the loader raise any exception.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        raise CheckpointError(
            f"{path} cannot be read ({reason}); it has {path.stat().st_size} bytes and is truncated"
            " or broken: copy it again"
        ) from None


def _is_allowed(name: str) -> bool:
    return bool(TRAINING_CLASSES.fullmatch(name) or SAFE_CLASSES.fullmatch(name))


def _globals_in_zip(path: Path, source: Path | io.BytesIO) -> list[str]:
    """Return the pickle's globals that torch does not allow; refuse compressed archive members."""
    with zipfile.ZipFile(source) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    f"{path}: {member.filename} is compressed, but torch.save does not compress; "
                    "load the file with torch and save it again with torch.save"
                )
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return list(torch.serialization.get_unsafe_globals_in_checkpoint(source))


def _globals_in_legacy(path: Path) -> set[str]:
    """Return the globals in the pickles of a file of torch < 1.6."""
    names = set()
    with open(path, "rb") as file:
        for _ in range(LEGACY_PICKLES):
            for code, argument, _position in pickletools.genops(file):
                if code.name == "GLOBAL":
                    names.add(str(argument).replace(" ", "."))
    return names


def _unpickling_error(path: Path, reason: str) -> CheckpointError:
    """Return an error with the name that the loader refused, if `reason` contains the name."""
    match = re.search(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)", reason)
    blocked_calls = [name for name in (GETATTR, BYTES) if name in reason]
    name = match[1] if match else ""
    if blocked_calls:
        name = blocked_calls[0]
    if name:
        return CheckpointError(
            f"{path} asks to run {name}, which is not data; if you trust the author of the file, "
            "load it with torch and save it again without that object"
        )
    line = reason.strip().split("\n", 1)[0][:200]
    return CheckpointError(f"{path} is not a safe, readable pickle ({line}); copy it again")
