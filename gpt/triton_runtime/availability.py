"""Triton availability: a check that launches a probe kernel on a CUDA device.

At its first launch, Triton builds a module with a C compiler and writes files to its cache folder.
Either may fail although Triton can be imported. Therefore the backend selectors of attention and of
linears ask this module, which compiles and launches a kernel of one element. The module does not
know what the kernels of the model need beyond that.
"""

from functools import cache

import torch


@cache
def triton_unavailable_reason(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on the CUDA device; None if a kernel has run there.

    The kernel is launched by the first call for a device, which waits for the device.
    """
    try:
        from gpt.triton_runtime.probe_kernel import write_flag

        flag = torch.zeros(1, dtype=torch.int32, device=device)
        with torch.cuda.device_of(flag):
            write_flag[1,](flag)
        value = int(flag)
    except Exception as error:  # A broken installation raises many kinds of exceptions.
        message = (str(error).splitlines() or ["no message"])[0]
        return f"no Triton kernel can be launched ({type(error).__name__}: {message})"
    return None if value == 1 else f"a Triton kernel stored {value} instead of 1"
