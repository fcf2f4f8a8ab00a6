"""Thread pool of the C kernels: concurrent callers, many short loops, forked child processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpt.cpu import kernels, packed_linear

if not kernels.isa_level() or kernels.isa_level() == "plain":
    pytest.skip("the packed GEMM needs the C library and AVX2", allow_module_level=True)


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


def packed_linear_of(channels: int, columns: int) -> packed_linear.PackedLinear:
    generator = torch.Generator().manual_seed(channels)
    weight = torch.randn(columns, channels, generator=generator).bfloat16()
    memory = torch.empty(packed_linear.packed_numel(weight), dtype=torch.bfloat16)
    return packed_linear.PackedLinear(weight, memory)


def test_each_of_many_short_loops_computes_all_of_its_chunks() -> None:
    linear = packed_linear_of(64, 320)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.set_num_threads(1)
    expected = [linear(x[: rows + 1], None, None, None) for rows in range(len(x))]
    for index in range(3000):
        torch.set_num_threads(2 + index % 3)
        rows = index % len(x)
        assert torch.equal(linear(x[: rows + 1], None, None, None), expected[rows])


def test_concurrent_callers_get_their_own_results() -> None:
    """One caller at a time uses the workers; the others compute without them."""
    linear = packed_linear_of(256, 1024)
    # With this number of rows a call releases the GIL.
    inputs = torch.randn(
        4, kernels.KEEP_GIL_ROWS_MAX + 24, 256, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    torch.set_num_threads(1)
    expected = [linear(x, None, None, None) for x in inputs]
    torch.set_num_threads(2)

    def repeat(index: int) -> bool:
        torch.set_num_threads(2)
        outputs = (linear(inputs[index], None, None, None) for _ in range(100))
        return all(torch.equal(output, expected[index]) for output in outputs)

    with ThreadPoolExecutor(len(inputs)) as executor:
        assert all(executor.map(repeat, range(len(inputs))))


FORK_PROGRAM = """
import os, sys, torch
from tests.gpt.cpu.test_thread_pool import packed_linear_of
torch.set_num_threads(2)
linear, x = packed_linear_of(64, 320), torch.ones(8, 64).bfloat16()
expected = linear(x, None, None, None).tolist()
child = os.fork()
outputs = [linear(x, None, None, None).tolist() for _ in range(50)]
is_equal = all(output == expected for output in outputs)
if child == 0:
    os._exit(not is_equal)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) or not is_equal)
"""


def test_a_forked_child_process_starts_its_own_workers() -> None:
    subprocess.run([sys.executable, "-c", FORK_PROGRAM], check=True, timeout=600, env=os.environ)


def test_a_sleeping_pool_uses_no_cpu_time() -> None:
    """A spinning thread would use CPU time while the process waits."""
    program = (
        "import time, torch; from tests.gpt.cpu.test_thread_pool import packed_linear_of; "
        "torch.set_num_threads(4); linear = packed_linear_of(64, 320); "
        "linear(torch.ones(8, 64).bfloat16(), None, None, None); time.sleep(0.1); "
        "started = time.process_time(); time.sleep(1); print(time.process_time() - started)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=600, capture_output=True, text=True
    ).stdout
    assert float(output) < 0.5  # One spinning thread would use 1 second; three would use 3.
