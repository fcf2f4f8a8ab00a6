"""The number of threads of torch and of the C library, during a block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
