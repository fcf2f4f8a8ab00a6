"""Restricted unpickler: reads untrusted pickles as data, with inert stubs for foreign classes.

A pickle can call any importable function by name. `StubUnpickler` calls only `Stub` and a few
functions of this module that build plain data. A stub stores its arguments and runs no code.
Objects of training frameworks, of torch and of a few harmless classes become stubs. A name that is
not allowed is refused, and the error contains the name. The module is independent of the model.
"""

import pickle
import re
from collections.abc import Callable, Iterable, Sized
from functools import cache
from struct import unpack
from typing import Any, ClassVar

import torch

from gpt.settings import short_repr

# Classes of training frameworks; checkpoints contain their args, loss scalers and schedulers.
TRAINING_CLASSES = re.compile(
    r"(megatron|nemo|transformer_engine|transformer_engine_torch|modelopt|apex|lightning"
    r"|pytorch_lightning|omegaconf|fp16|optimizer_param_scheduler|learning_rates)\..+"
)
# Classes of namespaces, numbers, arrays, paths, dates, signals and random generator states.
SAFE_CLASSES = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|_io\.BytesIO|datetime\.\w+|collections\.Counter"
    r"|pathlib\.(_local\.)?(Pure)?(Posix)?Path|signal\.(Signals|SIG\w+)|builtins\.complex"
    r"|numpy\.(dtype|ndarray|dtypes\.\w+|bool_?|u?int\d+|float\d+)"
    r"|numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\.(core|_core)\.numeric\._frombuffer"
    r"|numpy\.random\.(_\w+|bit_generator)\.\w+|torch\._C\.Generator"
)
# Tensor classes, devices and quantization schemes, which torch's weights-only loader also allows.
TORCH_CLASSES = re.compile(
    r"torch\.((cuda\.)?(sparse\.)?\w*Tensor|device|per_(tensor|channel)_\w+)"
    r"|torch\.nn\.parameter\.(Parameter|Buffer)"
)
# Types of the keys of a dict and of the elements of a set. Objects of these types are hashed and
# printed in linear time. A tuple that contains another tuple twice, and so on, is not.
KEY_PARTS_MAX = 16  # Elements of a tuple that is a key.
KEY_TYPES = (str, int, float, complex, bytes, type(None), type, torch.dtype)


class Stub:
    """An inert replacement for an object of a foreign class; stores its arguments and fields."""

    qualified_name: ClassVar[str] = ""  # Module and name of the foreign class.
    arguments: tuple[Any, ...]
    keyword_arguments: dict[str, Any]
    fields: dict[str, Any]  # From __setstate__ with a dict of fields.
    state: Any  # From __setstate__ with another argument; else None.
    entries: dict[Any, Any]  # If the foreign class is a subclass of dict: its keys and values.
    elements: list[Any]  # If the foreign class is a subclass of list or set: its elements.

    def __new__(cls, *arguments: Any, **keyword_arguments: Any) -> "Stub":
        stub = super().__new__(cls)
        stub.arguments = arguments
        stub.keyword_arguments = keyword_arguments
        stub.fields = {}
        stub.state = None
        stub.entries = {}
        stub.elements = []
        return stub

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            self.fields = state
        else:
            self.state = state

    def __setitem__(self, key: Any, entry: Any) -> None:
        self.entries[key] = entry

    def append(self, element: Any) -> None:
        self.elements.append(element)

    add = append

    def extend(self, elements: Iterable[Any]) -> None:
        self.elements.extend(elements)

    def __repr__(self) -> str:
        shown_arguments = (
            repr(a) if isinstance(a, str | int | float) else "..." for a in self.arguments
        )
        return f"{self.qualified_name}({', '.join(shown_arguments)})"


@cache
def _stub_class(qualified_name: str) -> type[Stub]:
    class_name = qualified_name.rpartition(".")[2]
    return type(class_name, (Stub,), {"qualified_name": qualified_name})


def _refused(function: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it asks to run {function}, which is not data")


def _restricted_getattr(owner: object, name: object, *default: object) -> Stub | type[Stub]:
    """Replace `getattr`: some Python versions pickle enum members as getattr(Class, "NAME")."""
    if default or not isinstance(name, str) or not isinstance(owner, type) or owner is Stub:
        raise _refused("builtins.getattr")
    if not issubclass(owner, Stub) or TORCH_CLASSES.fullmatch(owner.qualified_name):
        raise _refused("builtins.getattr")
    # `_ConstructorCall` calls the class itself in place of its `__new__`.
    return owner if name == "__new__" else owner(name)


def _encode_latin1(text: object, encoding: object = "") -> bytes:
    """Replace `_codecs.encode`: protocol 2 writes bytes as the call encode(TEXT, "latin1")."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise _refused("_codecs.encode")
    return text.encode("latin-1")


def _build_bytes(*arguments: object) -> bytes:
    """Replace `bytes`: protocol 2 writes empty bytes as the call bytes()."""
    if arguments:
        raise _refused("builtins.bytes")
    return b""


def _build_bytearray(*arguments: object) -> bytes:
    """Replace `bytearray`: it is written as a call without arguments, with bytes or with a text."""
    match arguments:
        case ():
            return b""
        case (bytes() as content,):
            return content
        case (str(), _):
            return _encode_latin1(*arguments)
    raise _refused("builtins.bytearray")


class _ConstructorCall:
    """Replacement for `functools.partial`, as protocols 2 and 3 write it.

    They write an object of a class that is created with keyword arguments as the call of
    partial(CLASS.__new__, CLASS, *ARGUMENTS, **KEYWORD_ARGUMENTS).
    """

    def __init__(self, constructor: object) -> None:
        self._constructor = constructor
        self.arguments: Any = ()
        self._keyword_arguments: Any = {}

    def __setstate__(self, state: Any) -> None:
        self._constructor, self.arguments, self._keyword_arguments, _ = state

    def __call__(self) -> Stub:
        stub_class, *arguments = self.arguments
        if not (isinstance(stub_class, type) and issubclass(stub_class, Stub)):
            raise _refused("functools.partial")
        if self._constructor is not stub_class:
            raise _refused("functools.partial")
        return stub_class(*arguments, **self._keyword_arguments)


def _size(argument: object, entry_bytes: int) -> int:
    """Return about the number of bytes of a copy of an argument."""
    if isinstance(argument, str | bytes):
        return len(argument)
    return entry_bytes * len(argument) if isinstance(argument, Sized) else 0


def _check_key(key: object) -> None:
    """Check a key of a dict or an element of a set (`KEY_TYPES`), before Python hashes it."""
    parts = key if isinstance(key, tuple) else (key,)
    if len(parts) > KEY_PARTS_MAX:
        raise pickle.UnpicklingError(f"a key of a dict has {len(parts)} elements")
    for part in parts:
        if not isinstance(part, (*KEY_TYPES, Stub)):
            raise pickle.UnpicklingError(f"{short_repr(key)} is not a key of a checkpoint's dict")


def _build_set(elements: Any = ()) -> set[Any]:
    """Replace `set` and `frozenset`, which protocols 2 and 3 call with a list."""
    for element in elements:
        _check_key(element)
    return set(elements)


def _build_size(dimensions: Any = ()) -> tuple[Any, ...]:
    """Replace `torch.Size`."""
    return tuple(dimensions)


class _OrderedDict(dict[Any, Any]):
    """Replacement for OrderedDict; ignores the version metadata that state_dict() attaches."""

    def __init__(self, pairs: Iterable[Any] = ()) -> None:
        super().__init__()
        for key, child in pairs.items() if isinstance(pairs, dict) else pairs:
            _check_key(key)
            self[key] = child

    def __setstate__(self, _state: Any) -> None:
        pass


class _DefaultDict(dict[Any, Any]):
    """Replacement for defaultdict; ignores the default factory."""

    def __init__(self, *_arguments: Any) -> None:
        super().__init__()

    def __setstate__(self, _state: Any) -> None:
        pass


# What a pickle may call besides stubs, by the name in the pickle.
PLAIN_CONSTRUCTORS: dict[str, Any] = {
    "_codecs.encode": _encode_latin1,
    "builtins.bytearray": _build_bytearray,
    "builtins.bytes": _build_bytes,
    "builtins.frozenset": _build_set,
    "builtins.getattr": _restricted_getattr,
    "builtins.set": _build_set,
    "collections.OrderedDict": _OrderedDict,
    "collections.defaultdict": _DefaultDict,
    "functools.partial": _ConstructorCall,
    "torch.Size": _build_size,
}
# The opcode BUILD may set the state of objects of these classes only.
STATEFUL_CLASSES = (Stub, _ConstructorCall, _OrderedDict, _DefaultDict)
# A call takes a few bytes of a pickle, and can copy a large argument that the pickle contains once.
# This limits the bytes of all copies. No pickle that is read has more bytes itself.
COPIED_BYTES_MAX = 256 << 20
# A smaller copy is not counted: the bytes of all such copies are proportional to the pickle's size.
SMALL_COPY_BYTES = 64
POINTER_BYTES = 8  # Size of an element of a tuple.
HASHED_ENTRY_BYTES = 64  # About the size of an element of a set, or of an entry of a dict.
HASHED_CONSTRUCTORS = (_build_set, _OrderedDict)
# Protocol 2 uses Python 2's names of these modules.
PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


# The loaders of `pickle`, by opcode.
BASE_LOADERS: dict[int, Any] = pickle._Unpickler.dispatch


class StubUnpickler(pickle._Unpickler):
    """Unpickler that maps allowed names to stubs, dtypes or plain types, and refuses other names.

    It derives from `pickle._Unpickler`, which is written in Python. The C implementation allocates
    a table as large as the largest memo index in a file, and a hostile file can contain any index.
    `extra_names` matches the names that are allowed in addition to `TRAINING_CLASSES`,
    `SAFE_CLASSES` and `TORCH_CLASSES`; a subclass can replace it with the names in its own files.
    Objects of all these classes become stubs.
    """

    _copied_bytes = 0  # Bytes of the arguments that calls have copied so far.

    # Attributes of the base class that its type stubs do not declare.
    stack: list[Any]  # The objects above the last mark.
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    # Older pickle protocols use Python 2's names: long is int, unicode is str.
    extra_names = re.compile(
        r"typing\.Any|builtins\.(int|long|float|bool|str|unicode|list|tuple|dict|NoneType)"
    )

    def find_class(self, module: str, name: str) -> Any:
        qualified_name = f"{PYTHON_2_MODULES.get(module, module)}.{name}"
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if qualified_name in PLAIN_CONSTRUCTORS:
            return PLAIN_CONSTRUCTORS[qualified_name]
        patterns = (TRAINING_CLASSES, SAFE_CLASSES, TORCH_CLASSES, self.extra_names)
        if any(pattern.fullmatch(qualified_name) for pattern in patterns):
            return _stub_class(qualified_name)
        raise _refused(qualified_name)

    def load_bytearray8(self) -> None:
        """Read the content of a bytearray; the base class allocates any length that is stated."""
        (length,) = unpack("<Q", self.read(8))
        self.append(self.read(length))

    def load_long4(self) -> None:
        """Refuse integers of more than 255 bytes, which Python takes quadratic time to print."""
        raise pickle.UnpicklingError("an integer has more than 255 bytes")

    def _count_copies(self, function: object, arguments: Any) -> None:
        """Count the bytes that a call copies; raise if all calls together copy too many."""
        copied = [arguments, function.arguments if isinstance(function, _ConstructorCall) else ()]
        if not (isinstance(function, type) and issubclass(function, Stub)):
            copied += arguments  # A stub only refers to its arguments.
        entry_bytes = HASHED_ENTRY_BYTES if function in HASHED_CONSTRUCTORS else POINTER_BYTES
        sizes = [_size(argument, entry_bytes) for argument in copied]
        self._copied_bytes += sum(size for size in sizes if size > SMALL_COPY_BYTES)
        if self._copied_bytes > COPIED_BYTES_MAX:
            raise pickle.UnpicklingError(f"its calls copy more than {COPIED_BYTES_MAX} bytes")

    def load_reduce(self) -> None:
        self._count_copies(self.stack[-2], self.stack[-1])
        BASE_LOADERS[pickle.REDUCE[0]](self)

    def load_newobj(self) -> None:
        self._count_copies(self.stack[-2], self.stack[-1])
        BASE_LOADERS[pickle.NEWOBJ[0]](self)

    def load_newobj_ex(self) -> None:
        self._count_copies(self.stack[-3], self.stack[-2])
        self._count_copies(self.stack[-3], self.stack[-1].values())
        BASE_LOADERS[pickle.NEWOBJ_EX[0]](self)

    def load_build(self) -> None:
        """Set the state of an object, but not of a class or function of this module."""
        self._count_copies(Stub, self.stack[-1] if isinstance(self.stack[-1], dict) else ())
        if not isinstance(self.stack[-2], STATEFUL_CLASSES):
            raise pickle.UnpicklingError("it asks to change an object that has no state")
        BASE_LOADERS[pickle.BUILD[0]](self)

    def _check_keys(self) -> None:
        """Check the keys of the pairs above the last mark on the stack."""
        for key in self.stack[::2]:
            _check_key(key)

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        BASE_LOADERS[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        self._check_keys()
        BASE_LOADERS[pickle.SETITEMS[0]](self)

    def load_dict(self) -> None:
        self._check_keys()
        BASE_LOADERS[pickle.DICT[0]](self)

    def load_additems(self) -> None:
        for element in self.stack:
            _check_key(element)
        BASE_LOADERS[pickle.ADDITEMS[0]](self)

    def load_frozenset(self) -> None:
        for element in self.stack:
            _check_key(element)
        BASE_LOADERS[pickle.FROZENSET[0]](self)

    dispatch: ClassVar[dict[int, Any]] = {
        **BASE_LOADERS,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        pickle.LONG4[0]: load_long4,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.REDUCE[0]: load_reduce,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
    }
