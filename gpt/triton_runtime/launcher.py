"""Launches of Triton kernels with little host time.

Triton's own launch computes the key of the compiled kernel from strings, which takes the host
longer than a short kernel takes the GPU. Here the key is a tuple of the dtypes, the alignments and
the constants of a launch. The first launch with a key is Triton's own, which also compiles the
kernel. Later launches call the compiled kernel. A key is at least as fine as Triton's, so a launch
never uses a kernel that Triton would not have chosen. The module does not know which kernels there
are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

# The minor versions of Triton whose launcher has the signature that `CompiledKernel.launch` uses.
# With another version, every launch is Triton's own.
SUPPORTED_VERSIONS = ("3.6.", "3.7.")
IS_VERSION_SUPPORTED = triton.__version__.startswith(SUPPORTED_VERSIONS)
# Triton compiles other code for addresses and integers that are divisible by this number.
DIVISOR = 16


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel on a device."""

    run: Callable[..., None]  # Triton's launcher.
    function: int
    metadata: object
    # The values of the kernel's constants. They are compiled into the code, so the launcher ignores
    # the values, but it needs an argument for each.
    constants: tuple[object, ...]

    def launch(self, grid: tuple[int, ...], stream: int, values: list[object]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        hooks = (None, None, None)  # The argument of the hooks, and two hooks.
        self.run(x, y, z, stream, self.function, self.metadata, *hooks, *values, *self.constants)


# Triton, too, keeps its compiled kernels as long as the process lives.
_compiled_kernels: dict[tuple[object, ...], CompiledKernel] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel[grid](*arguments, **constants)` on the device of the first argument.

    `arguments` are the parameters of the kernel before its constants: tensors, integers, floats and
    None. The first one is a tensor. `constants` also contains Triton's options, such as
    `num_warps`. All tensors must be on one device, which Triton checks in its own launches only.
    """
    if not isinstance(kernel, JITFunction):  # A kernel in Triton's interpreter.
        kernel[grid](*arguments, **constants)
        return
    device = driver.active.get_current_device()
    if arguments[0].get_device() not in (device, -1):  # -1: a tensor in host memory, in tests.
        with torch.cuda.device_of(arguments[0]):
            launch(kernel, grid, *arguments, **constants)
        return
    key, values = _key_and_values(arguments)
    full_key = (kernel.fn, device, *constants, *constants.values(), *key)
    compiled = _compiled_kernels.get(full_key)
    # Only Triton's own launch calls the hooks of a profiler.
    has_hooks = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
    if compiled is not None and not has_hooks:
        compiled.launch(grid, driver.active.get_current_stream(device), values)
        return
    triton_kernel = kernel[grid](*arguments, **constants)
    # None: a hook of the JIT compiler has stopped the launch.
    if IS_VERSION_SUPPORTED and triton_kernel is not None:
        _compiled_kernels[full_key] = CompiledKernel(
            triton_kernel.run,
            triton_kernel.function,
            triton_kernel.packed_metadata,
            tuple(constants[name] for name in kernel.arg_names[len(arguments) :]),
        )


def _key_and_values(arguments: tuple[Any, ...]) -> tuple[list[object], list[object]]:
    """Return what Triton's code depends on, and the arguments with an address for each tensor.

    Triton's launcher asks the CUDA driver about each tensor, but not about an address.
    """
    key: list[object] = []
    values: list[object] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            key += (argument.dtype, address % DIVISOR == 0)
            values.append(address)
            continue
        if type(argument) is int:
            key.append(_integer_class(argument))
        else:
            assert argument is None or type(argument) is float
            key.append(type(argument))
        values.append(argument)
    return key, values


def _integer_class(value: int) -> int:
    """Return a number for integers with the same code: the size, and whether DIVISOR divides it."""
    if value == 1:  # Triton compiles the value into the code.
        return -1
    bits = (value if value >= 0 else ~value).bit_length()  # Without the sign.
    size = (bits > 31) + (bits > 63)  # The integer is passed in 32 or 64 bits, or as unsigned.
    return 2 * size + (value % DIVISOR == 0)
