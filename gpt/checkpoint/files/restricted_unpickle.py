"""Pickles that others wrote, read as data: objects of classes that are not here become stand-ins.

A pickle names functions and has them called. Only torch's weights-only loader is used, and all it
may call besides torch's own makers of tensors is `Stub`, which keeps its arguments and does
nothing; or `StandIns`, which has nothing else. Names of training code and of a few harmless classes
get a stand-in each; a file that asks for any other name is refused by it. It knows no models.
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

from gpt.checkpoint.files.safetensors_file import refuse_pointer
from gpt.checkpoint.files.torch_save import ZIP
from gpt.errors import CheckpointError

# Code that trains; its classes stand in arguments, loss scalers and schedulers.
TRAINERS = re.compile(
    r"(megatron|nemo|transformer_engine|transformer_engine_torch|modelopt|apex|lightning"
    r"|pytorch_lightning|omegaconf|fp16|optimizer_param_scheduler|learning_rates)\..+"
)
# Classes that hold numbers, names and states of random generators.
HOLDERS = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|_io\.BytesIO|datetime\.\w+"
    r"|pathlib\.(_local\.)?(Pure)?(Posix)?Path|signal\.(Signals|SIG\w+)"
    r"|numpy\.(dtype|ndarray|dtypes\.\w+|bool_?|u?int\d+|float\d+)"
    r"|numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\.random\._pickle\.\w+|torch\._C\.Generator"
)
GETATTR, BYTES = "builtins.getattr", "builtins.bytes"

# A file of torch < 1.6 is four pickles and then raw bytes: a number, a version, a platform, data.
OLD_PICKLES = 4

# Names are allowed for a whole process at a time.
_lock = threading.Lock()


class Stub:
    """An object of a class that is not here: what it was made of, and nothing that it could do."""

    path: ClassVar[str] = ""  # Module and class.
    arguments: tuple[Any, ...]
    fields: dict[str, Any]
    state: Any  # What it was restored from, if that was no dict of fields.

    def __new__(cls, *arguments: Any) -> "Stub":
        made = super().__new__(cls)
        made.arguments, made.fields, made.state = arguments, {}, None
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            self.fields = state
        else:
            self.state = state

    def __repr__(self) -> str:
        plain = (repr(a) if isinstance(a, str | int | float) else "..." for a in self.arguments)
        return f"{self.path}({', '.join(plain)})"


@cache
def _stub(path: str) -> type[Stub]:
    return type(path.rpartition(".")[2], (Stub,), {"path": path})


def _member(owner: object, name: object, *rest: object) -> Stub:
    """What `getattr` is allowed to be. Some Pythons pickle an enum as getattr(Class, "NAME")."""
    if rest or not isinstance(name, str) or not isinstance(owner, type) or owner is Stub:
        raise pickle.UnpicklingError(f"it asks to run {GETATTR}")
    if not issubclass(owner, Stub):
        raise pickle.UnpicklingError(f"it asks to run {GETATTR}")
    return owner(name)


def _no_bytes(*wanted: object) -> bytes:
    """What `bytes` is allowed to be: older protocols write an empty value as a call of it."""
    if wanted:
        raise pickle.UnpicklingError(f"it asks to run {BYTES}")
    return b""


class StandIns(pickle._Unpickler):
    """Written in Python: the faster one fills as much memory as a file's memo numbers claim.

    Every name becomes a stand-in, a dtype, a dict or a set; what else is asked for is refused.

    `also` are further names that a kind of file has, as a pattern.
    """

    # A bytearray's length is believed, and filled with zeros; no checkpoint has one.
    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }
    # The older protocols have Python 2's names: long is int, unicode is str.
    also = re.compile(
        r"typing\.Any|builtins\.(int|long|float|bool|str|unicode|bytes|list|tuple|dict|NoneType)"
    )

    def find_class(self, module: str, name: str) -> Any:
        # Older protocols have the name that Python 2 had.
        path = f"{'builtins' if module == '__builtin__' else module}.{name}"
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        if path in PLAIN:
            return PLAIN[path]
        if path == GETATTR:
            return _member
        if path == BYTES:
            return _no_bytes
        if _is_harmless(path) or self.also.fullmatch(path):
            return _stub(path)
        raise pickle.UnpicklingError(f"it asks to run {path}, which is not data")


class _Size(Stub):
    """`torch.Size`, and other tuples by name."""

    def __new__(cls, values: Any = ()) -> Any:
        return tuple(values)


class _Ordered(dict[Any, Any]):
    """A dict; what a module's state_dict() hangs on it, its versions, is left out."""

    def __setstate__(self, _state: Any) -> None:
        pass


class _Default(dict[Any, Any]):
    """A dict that makes what it lacks; here it does not."""

    def __init__(self, *_arguments: Any) -> None:
        super().__init__()


PLAIN: dict[str, type] = {
    "torch.Size": _Size,
    "collections.OrderedDict": _Ordered,
    "collections.defaultdict": _Default,
    "builtins.set": set,
}


def read_pickle(path: Path, span: tuple[int, int] | None = None) -> Any:
    """The object in a file of `torch.save`; tensors are views of the mapped file where it can be.

    Files of torch < 1.6 cannot be mapped and are held in memory, and so is what lies in a span
    (start, length) of a larger file.
    """
    try:
        with open(path, "rb") as file:
            file.seek(span[0] if span else 0)
            held = io.BytesIO(file.read(span[1])) if span else None
            head = held.getvalue()[:8] if held else file.read(8)
        refuse_pointer(path, head)
        zipped = head.startswith(ZIP)
        mapped, source = zipped and held is None, held or path
        names = _names_in_zip(path, source) if zipped else _names_in_old(path)
        stubs = [(_stub(name), name) for name in sorted(names) if _is_harmless(name)]
        allowed: list[Any] = [*stubs, (_member, GETATTR), (_no_bytes, BYTES)]
        if held:
            held.seek(0)
        with _lock, torch.serialization.safe_globals(allowed):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; copy the checkpoint again") from None
    except PermissionError:
        raise CheckpointError(
            f"cannot read {path}: Permission denied; let this user read it, or copy it"
        ) from None
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from None
    # Whatever stands in a broken or a hostile pickle, the loader meets it in its own ways.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        raise CheckpointError(
            f"{path} cannot be read ({reason}); it has {path.stat().st_size} bytes and is truncated"
            " or broken: copy it again"
        ) from None


def _is_harmless(name: str) -> bool:
    return bool(TRAINERS.fullmatch(name) or HOLDERS.fullmatch(name))


def _names_in_zip(path: Path, source: Path | io.BytesIO) -> list[str]:
    """What a file asks for besides what torch allows. Its bytes lie as they are, never packed."""
    with zipfile.ZipFile(source) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    f"{path}: {member.filename} is compressed, which torch.save never does; unpack"
                    " it and save it again with torch.save"
                )
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return list(torch.serialization.get_unsafe_globals_in_checkpoint(source))


def _names_in_old(path: Path) -> set[str]:
    names = set()
    with open(path, "rb") as file:
        for _ in range(OLD_PICKLES):
            for code, argument, _place in pickletools.genops(file):
                if code.name == "GLOBAL":
                    names.add(str(argument).replace(" ", "."))
    return names


def _refused(path: Path, reason: str) -> CheckpointError:
    """A sentence with the name that the loader would not call."""
    found = re.search(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)", reason)
    called = [name for name in (GETATTR, BYTES) if name in reason]
    name = called[0] if called else found[1] if found else ""
    if name:
        return CheckpointError(
            f"{path} asks to run {name}, which is not data; load it only where you trust its "
            "author, and save it again without that"
        )
    line = reason.strip().split("\n", 1)[0][:200]
    return CheckpointError(f"{path} is not a pickle that is safe to read ({line}); copy it again")
