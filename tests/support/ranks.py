"""Runs one function as n ranks: n gloo processes on loopback, results in rank order.

Each process is forked from a server that has torch loaded already, so a start costs tens of
milliseconds instead of seconds. A rank that has finished or failed waits to be ended, so its
neighbours never report a lost connection in place of the first real error. The module knows no
meshes: a rank has the default process group, and builds the groups that it needs.
"""

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from gpt.child_processes import die_with_parent

R = TypeVar("R")

# A rank that exceeds its time limit dumps its stack and ends. The caller waits this much longer for
# the dump, because the time of a rank begins at its start, which a busy machine delays.
GRACE_S = 60.0

FORKSERVER = multiprocessing.get_context("forkserver")
# Modules that tests import, so that a rank need not import them again, and modules that torch
# imports at a first backward. A name that cannot be imported is skipped. The server starts at the
# first call of `ranks`.
PRELOAD = (
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "pytest",
    "hypothesis",
    "gpt.model.gpt_model",
    "gpt.model.loading",
    "gpt.generation.generate",
)
# Modules that processes of the slow suite import too: tuning runs, and ranks of megatron-core.
SLOW_PRELOAD = (
    "torch._dynamo",
    "preamble",
    "ptuning.__main__",
    "ptuning.run.training_loop",
    "ptuning.reporting.observer",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.dist_checkpointing",
)
FORKSERVER.set_forkserver_preload(list(PRELOAD))


def preload_slow_modules() -> None:
    """Preload the modules of the slow suite as well; before the server starts."""
    FORKSERVER.set_forkserver_preload([*PRELOAD, *SLOW_PRELOAD])


def ranks(
    n: int,
    function: Callable[..., R],
    *args: object,
    timeout_s: float = 240.0,
    preload: Sequence[str] = (),
) -> list[R]:
    """`[function(rank, *args) for rank in range(n)]`, each in its own process, all at once.

    `function` is a module's own (not nested), so that a process can import it. Arguments and
    results are pickled. An exception in a rank is raised here, with that rank's stack as a note.
    `preload` names modules that the ranks have in place of PRELOAD: they are forked from another
    server, which the calls with the same modules share.
    """
    if preload:
        starter = _other_process(tuple(preload))
        return starter.submit(partial(ranks, n, function, *args, timeout_s=timeout_s)).result()
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(n):
                parent_end, child_end = FORKSERVER.Pipe()
                arguments = (child_end, call, rank, n, folder, timeout_s)
                process: BaseProcess = FORKSERVER.Process(target=_run, args=arguments, daemon=True)
                process.start()
                child_end.close()  # Otherwise the pipe would stay open after the process.
                pipes.append(parent_end)
                processes.append(process)
            return _collect(pipes, processes, Path(folder), timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


@cache
def _other_process(preload: tuple[str, ...]) -> ProcessPoolExecutor:
    """A process that starts ranks with other preloaded modules: a process has only one server."""
    spawn = multiprocessing.get_context("spawn")
    arguments = preload, os.getpid()
    return ProcessPoolExecutor(1, spawn, initializer=_begin_other_process, initargs=arguments)


def _begin_other_process(modules: tuple[str, ...], parent_pid: int) -> None:
    die_with_parent(parent_pid)  # It has both ends of the executor's queue, which so never ends.
    FORKSERVER.set_forkserver_preload(list(modules))


def _collect(
    pipes: list[Connection], processes: list[BaseProcess], folder: Path, timeout_s: float
) -> list[R]:
    """One result per rank; raises the earliest failure."""
    results: dict[int, R] = {}
    deadline = time.monotonic() + timeout_s + GRACE_S
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks did not start within {timeout_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                result, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise _failure(rank, processes, folder, timeout_s) from None
            if error is not None:
                others = [other_pipe for other_pipe in waiting if other_pipe is not pipe]
                # A rank that dies closes its gloo sockets a moment before its pipe.
                grace_s = GRACE_S if "gloo" in str(error) else 0.0
                for failed in wait(others, timeout=grace_s):
                    assert isinstance(failed, Connection)
                    try:
                        failed.recv_bytes()
                    except EOFError:  # A dead rank is the cause of the other rank's error.
                        rank = pipes.index(failed)
                        raise _failure(rank, processes, folder, timeout_s) from error
                raise error
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _failure(rank: int, processes: list[BaseProcess], folder: Path, timeout_s: float) -> Exception:
    """The error of a rank without a result: a time-out with every stack, or its exit code."""
    processes[rank].join(GRACE_S)
    if not (folder / f"stack-{rank}").read_text():
        return RuntimeError(f"rank {rank} died, exit code {processes[rank].exitcode}")
    for process in processes:
        process.join(1.0)
    stacks = [path.read_text() for path in sorted(folder.glob("stack-*"))]
    timeout = TimeoutError(f"ranks were still running after {timeout_s:g} s")
    for index, stack in enumerate(stacks):
        timeout.add_note(f"rank {index}: {stack}" if stack else f"rank {index}: had finished")
    return timeout


def _run(
    pipe: Connection, call: bytes, rank: int, size: int, folder: str, timeout_s: float
) -> None:
    """Run the function in the process of a rank, send (result, error), and wait for the end."""
    with open(f"{folder}/stack-{rank}", "w") as stack:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
        try:
            reply = pickle.dumps((_call(call, rank, size, folder, timeout_s), None))
        except BaseException as error:
            reply = pickle.dumps((None, _portable(error, rank)))
        pipe.send_bytes(reply)
        faulthandler.cancel_dump_traceback_later()
        try:
            pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # The test has ended; there is nothing to clean up.


def _call(call: bytes, rank: int, size: int, folder: str, timeout_s: float) -> object:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # A host name may resolve to nothing.
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    function, args = pickle.loads(call)
    return function(rank, *args)


def _portable(error: BaseException, rank: int) -> BaseException:
    """The error if it can be pickled, else its text; both with the stack as a note."""
    stack = "".join(traceback.format_exception(error))
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"rank {rank}:\n{stack}")
    return copy
