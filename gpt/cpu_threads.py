"""CPU threads of torch and of the C kernels: their number, and how long OpenMP threads spin.

The module imports torch only when it sets the number of threads, so that a process can limit the
spinning before it imports torch.
"""

import os
from collections.abc import MutableMapping

from gpt.host_limits import usable_cores

# The number of iterations that a waiting thread of GNU OpenMP, which torch uses, spins before it
# sleeps. They take 0.05 to 0.2 ms, depending on the CPU. The default number takes 4 to 15 ms. If
# another process preempts a thread of a torch operation, the other threads spin for all that time
# on the cores that the preempted thread could use.
OPENMP_SPIN_COUNT = 4000


def limit_openmp_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the OpenMP threads of processes with this environment sleep after a short spin.

    A process reads the setting when it imports torch. The user's own settings have priority.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(OPENMP_SPIN_COUNT))


def set_thread_count(processes: int = 1, *, respect_environment: bool = True) -> None:
    """Set the number of threads to (usable CPU cores of the node) / (processes of the node).

    `processes`: the processes of the node that compute at the same time. `respect_environment`: use
    OMP_NUM_THREADS instead, if it is set.
    """
    import torch

    environment_threads = os.environ.get("OMP_NUM_THREADS", "") if respect_environment else ""
    if environment_threads.isdecimal() and int(environment_threads) > 0:
        threads = int(environment_threads)
    else:
        threads = max(1, usable_cores() // processes)
    torch.set_num_threads(threads)
