"""A CUDA device without memory, on which a test counts launches, copies and waits.

Tensors on the device are FakeTensors: they have a shape, a dtype and the device cuda:0, but no
values. Tensors on the host are real. `FakeDevice` sees each operation of torch, and each launch of
a Triton kernel. An operation whose shape depends on values raises an error. A host read of device
values, and a copy from host memory that waits for the device, are counted; `captures` makes them
errors, as they are during the capture of a CUDA graph.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from gpt.triton_runtime.availability import triton_unavailable_reason

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
aten = torch.ops.aten
# Indices in torch's table of device guards, from c10's enum DeviceType.
CUDA_GUARD, META_GUARD = 1, 14
# Operations that allocate memory or change only the metadata of a tensor.
WITHOUT_LAUNCH = frozenset(
    [
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.empty_strided.default,
        aten.is_pinned.default,
        aten._unsafe_view.default,
        aten.detach_.default,
    ]
)
# Operations that are one kernel on a GPU, but several operations on FakeTensors. The first output
# has the shape of the first input.
ATTENTION = aten.scaled_dot_product_attention.default
RMS_NORM = aten._fused_rms_norm.default
# A matmul that writes to memory of its caller, which FakeTensors do not support.
SCALED_MATMUL_OUT = aten._scaled_mm.out


class CaptureForbids(Exception):
    """An operation that a CUDA graph cannot capture."""


@dataclass
class Counts:
    """What a piece of work did. Copies and waits are described, for the message of a test."""

    launches: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)  # From the host, behind the queued work.
    blocking_copies: list[str] = field(default_factory=list)  # From the host; they wait.
    waits: list[str] = field(default_factory=list)  # Host reads, and waits for events.


class MemoryLedger:
    """The bytes of the tensors on the device, and their peak.

    A tensor that does not fit into `capacity_bytes` raises torch's error. `other_bytes` are in use
    outside of torch.
    """

    def __init__(self) -> None:
        self.capacity_bytes = 80 << 30
        self.other_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, x: Tensor) -> None:
        """Count the storage of a tensor, until it is freed. Views share the storage."""
        storage = x.untyped_storage()
        key, storage_bytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        if storage_bytes > self.free_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {storage_bytes} of {self.free_bytes} bytes"
            )

        def free(_: object) -> None:
            del self._storages[key]
            self.used_bytes -= storage_bytes

        self._storages[key] = weakref.ref(storage, free)
        self.used_bytes += storage_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.other_bytes - self.used_bytes

    def reset_peak(self) -> None:
        self.peak_bytes = self.used_bytes

    @contextmanager
    def peak(self) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the largest growth of the bytes since the beginning."""
        self.reset_peak()
        bytes_before = self.used_bytes
        yield lambda: self.peak_bytes - bytes_before


class FakeDevice(TorchDispatchMode):
    """Runs torch's operations on tensors of `DEVICE`, and counts them and their memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = FakeTensorMode()
        self.memory = MemoryLedger()
        self._pinned: set[int] = set()  # Addresses of storages in pinned memory.
        self._pinned_tensors: list[Tensor] = []  # They keep these addresses in use.
        self._captures = False
        self._queued = 0  # Operations queued on the device.
        self._complete = 0  # Of these, the operations that the host knows to be complete.
        self.counts = Counts()

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count into a new object, which is yielded."""
        counts_before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = counts_before

    @contextmanager
    def captures(self) -> Iterator[Counts]:
        """Raise CaptureForbids at each operation that a CUDA graph cannot capture."""
        self._captures = True
        try:
            with self.counted() as counts:
                yield counts
        finally:
            self._captures = False

    def launch(self, name: str) -> None:
        """Count a launched kernel."""
        self._queued += 1
        self.counts.launches.append(name)

    def wait(self, position: int, reason: str) -> None:
        """Wait until the first `position` queued operations are complete."""
        if position > self._complete:
            self._forbid(reason)
            self._complete = position
            self.counts.waits.append(reason)

    def queue_position(self) -> int:
        return self._queued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # A property of a tensor.
            return func(*args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if func in (ATTENTION, RMS_NORM) and isinstance(tensors[0], FakeTensor):
            self.launch(str(func))
            with self:
                y = torch.empty_like(tensors[0])
            return y if func is ATTENTION else (y, torch.empty_like(y[..., :1]))
        if func is SCALED_MATMUL_OUT:
            self.launch(str(func))
            return kwargs["out"]
        with self:
            composite = func.decompose(*args, **kwargs)
            if composite is not NotImplemented:
                return composite
        is_on_device = any(isinstance(x, FakeTensor) for x in tensors)
        target = kwargs.get("device")
        if not is_on_device and (target is None or torch.device(target).type == "cpu"):
            return self._run_on_host(func, args, kwargs)
        return self._run_on_device(func, tensors, args, kwargs)

    def _run_on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        with unset_fake_temporarily():
            if func is aten._pin_memory.default:
                return self._pin(args[0].clone())
            is_pinned = kwargs.pop("pin_memory", None)
            y = func(*args, **kwargs)
        return self._pin(y) if is_pinned else y

    def _run_on_device(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            self.wait(self._queued, "host read of a value")
            return 1
        target = kwargs.get("device")
        if func is aten._to_copy.default and target is not None and target.type == "cpu":
            return self._copy_to_host(tensors[0], kwargs)
        is_copy = func in (aten._to_copy.default, aten.copy_.default)
        # torch passes a number in host memory to a kernel as an argument.
        on_host = [x for x in tensors if not isinstance(x, FakeTensor) and (x.dim() or is_copy)]
        for x in on_host:
            self._copy_to_device(x, func, is_async=_is_non_blocking(func, args, kwargs))
        args, kwargs = tree_map(self._fake, (args, kwargs))
        y = func(*args, **kwargs)
        for x in tree_flatten(y)[0]:
            if isinstance(x, FakeTensor):
                self.memory.add(x)
        if not (func.is_view or func in WITHOUT_LAUNCH or (is_copy and on_host)):
            self.launch(str(func))
        return y

    def _copy_to_host(self, x: Tensor, kwargs: Any) -> Tensor:
        self._forbid("a copy to the host")
        self._queued += 1
        if not kwargs.get("non_blocking"):
            self.wait(self._queued, "blocking copy to the host")
        with unset_fake_temporarily():  # Numbers that do not mean a fault.
            return torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype)

    def _copy_to_device(self, x: Tensor, func: Any, *, is_async: bool) -> None:
        copy = f"{func} of {tuple(x.shape)} from host memory"
        self._forbid(copy)
        self._queued += 1
        if is_async and x.untyped_storage().data_ptr() in self._pinned:
            self.counts.copies.append(copy)
        else:
            self.counts.blocking_copies.append(copy)

    def _forbid(self, operation: str) -> None:
        if self._captures:
            raise CaptureForbids(operation)

    def _pin(self, x: Tensor) -> Tensor:
        self._pinned.add(x.untyped_storage().data_ptr())
        self._pinned_tensors.append(x)
        return x

    def _fake(self, x: object) -> object:
        if isinstance(x, Tensor) and not isinstance(x, FakeTensor):
            return self.fake_mode.from_tensor(x)
        return x


class _FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._position = 0

    def record(self, stream: object) -> None:
        self._position = self._device.queue_position()

    def synchronize(self) -> None:
        self._device.wait(self._position, "wait for an event")


@contextmanager
def _cuda_guard() -> Iterator[None]:
    """Let a build of torch without CUDA index tensors of a CUDA device.

    Indexing sets the current device, which such a build cannot. It uses the guard of the device
    "meta" instead, which does nothing.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    table_type = ctypes.c_void_p * (META_GUARD + 1)
    guards = table_type.in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guard_before = guards[CUDA_GUARD]
    guards[CUDA_GUARD] = guard_before or guards[META_GUARD]
    try:
        yield
    finally:
        guards[CUDA_GUARD] = guard_before


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Let torch and Triton use a device `DEVICE` that does not exist."""
    from triton import JITFunction

    from gpt.triton_runtime import launcher

    device = FakeDevice()

    def launch(function: Any, *args: object, **kwargs: object) -> None:
        device.launch(function.__name__)

    def no_context(*_: object) -> AbstractContextManager[None]:
        return nullcontext()

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (JITFunction, "run", launch),
        (launcher, "launch", launch),
        (torch.cuda, "device", no_context),
        (torch.cuda, "device_of", no_context),
        (torch.cuda, "current_stream", lambda *_: None),
        (torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
        (torch.cuda, "Event", lambda: _FakeEvent(device)),
        *_memory_patches(device),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_cuda_guard())
        stack.enter_context(torch.inference_mode())
        stack.enter_context(device.fake_mode)
        stack.enter_context(device)
        stack.callback(triton_unavailable_reason.cache_clear)
        triton_unavailable_reason.cache_clear()
        assert triton_unavailable_reason(DEVICE) is None  # It waits for the device once.
        yield device


def _memory_patches(device: FakeDevice) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The functions of torch.cuda that read and free memory. The allocator caches nothing."""
    memory = device.memory
    return [
        (torch.cuda, "mem_get_info", lambda *_: (memory.free_bytes, memory.capacity_bytes)),
        (torch.cuda, "memory_allocated", lambda *_: memory.used_bytes),
        (torch.cuda, "memory_reserved", lambda *_: memory.used_bytes),
        (torch.cuda, "max_memory_allocated", lambda *_: memory.peak_bytes),
        (torch.cuda, "reset_peak_memory_stats", lambda *_: memory.reset_peak()),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "synchronize", lambda *_: device.wait(device.queue_position(), "sync")),
    ]


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    if func is aten.copy_.default:
        return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    return func is aten._to_copy.default and bool(kwargs.get("non_blocking"))
