"""Launches of compiled Triton kernels without a GPU, as they reach the launcher of Triton's driver.

A fake driver stands for the GPU. Triton compiles the kernels for it, but nothing runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.support.triton_compiled import FakeDriver, fake_gpu

STREAM = 77


@dataclass(frozen=True)
class TracedLaunch:
    """The arguments of Triton's launcher, with the address of each tensor."""

    grid: tuple[int, int, int]
    stream: int
    function: int  # A number of the compiled kernel.
    metadata: object
    arguments: tuple[object, ...]


class _TracingDriver(FakeDriver):
    def __init__(self, launches: list[TracedLaunch]) -> None:
        super().__init__(90)
        functions = count(1)
        self._launches = launches
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (object(), next(functions), 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        )

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def launcher_cls(self, *_: object) -> Any:
        return self._launch

    def _launch(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: int,
        metadata: object,
        *others: Any,
    ) -> None:
        hook_argument, enter_hook, _, *arguments = others
        if enter_hook is not None:
            enter_hook(hook_argument)
        addresses = (
            argument.data_ptr() if isinstance(argument, Tensor) else argument
            for argument in arguments
        )
        self._launches.append(TracedLaunch((x, y, z), stream, function, metadata, (*addresses,)))


@contextmanager
def traced_launches() -> Iterator[list[TracedLaunch]]:
    """Yield a list, to which each launch is added."""
    launches: list[TracedLaunch] = []
    with fake_gpu(driver=_TracingDriver(launches)):
        yield launches
